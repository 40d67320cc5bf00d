"""torchtitan's trainer of pretraining with FusedLoss, and with its own wrapper: losses, norms and weights."""

import pytest
import titan
import torch
from pretraining import trained
from test_titan_trainer import alone  # noqa: F401  # one rank
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

KINDS = {
    "llama3": {"activation_checkpoint": SelectiveAC.Config(), "validate": True},
    "qwen3": {
        "activation_checkpoint": FullAC.Config(),
        "training": {"global_batch_size": 8, "max_norm": 0.01},
        "parallelism": {"fsdp_reshard_after_forward": "always"},
    },
    "deepseek_v3": {},
    "muse_glimmer": {"compile": CompileConfig(enable=True, components=["loss"], backend="eager")},
}
SFT = titan.INNER["sft"]


def check_alike(found, want, tolerance=2e-5):
    """What two trainings told, and their weights."""
    assert len(found[0]) == len(want[0]) > 0
    for ours, theirs in zip(found[0], want[0], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(found[1], want[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", KINDS)
def test_a_pretraining(model):
    found, want = (trained(loss(SFT), model, **KINDS[model]) for loss in (titan.fused, titan.chunked))
    check_alike(found, want)


def test_it_goes_on_from_a_checkpoint(tmp_path):
    options = {"folder": tmp_path, "training": {"steps": 3}}
    want = trained(titan.fused(SFT), **options)
    (tmp_path / "checkpoint" / "step-3").rename(tmp_path / "gone")
    told, weights = trained(titan.fused(SFT), **options)
    assert [step for step, *_ in told] == [3]
    check_alike((want[0][:2] + told, weights), want)
