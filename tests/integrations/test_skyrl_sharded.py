"""SkyRL's models as its FSDP strategy shares them out over ranks."""

import pytest
import ranks
import torch
from skyrl_cases import BACKEND, config, load, nothing_left_behind, upstream
from test_skyrl_models import PACKED, run, wrapper

import rlkernel

pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not need")
pytestmark = ranks.pytestmark
fsdp_utils = load(f"{BACKEND}.distributed.fsdp_utils")

assert nothing_left_behind and upstream  # fixtures of every test here


def shared(model, **options):
    mesh = torch.distributed.init_device_mesh("cpu", (ranks.RANKS,))
    fsdp_utils.apply_fsdp2(
        model.model, {"mesh": mesh, "reshard_after_forward": True, **options}, config.FSDPConfig()
    )
    return model


def whole(grads):
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()
    }


def _step(rank, kind):
    """By kind of batch: how far values and gradients are from those of the model alone, and the counts."""
    options = PACKED if kind == "packed" else {}
    side = "left" if rank else "right"
    want = run(wrapper(**options), side=side)
    model = shared(wrapper(**options))
    with rlkernel.patch_skyrl() as patch:
        got = run(model, side=side)
        again = run(model, side=side)
        counts = dict(patch.calls), dict(patch.fallbacks)
    grads, apart = whole(got[1]), {}
    for name, mean in want[1].items():
        torch.distributed.all_reduce(mean)
        mean /= ranks.RANKS
        apart[name] = float((grads[name] - mean).abs().max() / mean.abs().max())
    off = [float((x - y).abs().max()) for x, y in zip(got[0], want[0], strict=True)]
    return off, apart, all(map(torch.equal, got[0], again[0])), counts


@pytest.mark.parametrize("kinds", [["padded", "packed"]], ids=["all"])
def test_a_sharded_model(kinds, tmp_path):
    """Values of the model alone, gradients the mean over ranks, of unequal batches."""
    for kind, reports in ranks.run(_step, kinds, tmp_path).items():
        for rank, (off, apart, same, counts) in enumerate(reports):
            where = f"{kind}, rank {rank}"
            assert counts == ({"HFModelWrapper": 2}, {}), where
            assert same and max(off) <= 2e-5, f"{where}: values differ by {off}"
            assert max(apart.values()) <= 2e-5, f"{where}: gradients differ by {apart}"
