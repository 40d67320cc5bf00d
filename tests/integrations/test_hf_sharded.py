"""packed_logprobs of models whose parameters are spread over ranks, who must call equally often."""

import pytest
import ranks
import tiny
import torch

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf
from rlkernel.integrations.hf import logprobs

pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
pytestmark = ranks.pytestmark

BATCHES = (
    ([[3, 4, 5, 6, 7], [8, 9]], [[[10, 11, 12]] * 2 + [[13, 14, 15, 16]], [[17], [18, 19]]]),
    ([[3, 4, 20]], [[[10, 11], [12], []]]),
)
NOTHING = ([], [])


def _packed_logprobs(rank, kind):
    """By kind of batch: calls of the model, labels, whether no_grad has the bits, and all errors."""
    rlkernel.register_hf()
    report = []
    for batches, options in (
        (BATCHES, {"passes": 1} if kind == "ddp" else {}),
        ((BATCHES[0], NOTHING), {"passes": 1} if kind == "ddp" else {}),
        (BATCHES, {"max_tokens": 8, "passes": 4}),
    ):
        batch = PrefixBatch.pack(*batches[rank])
        alone, shared = tiny.make_model(vocab=64, hidden=32), tiny.make_model(vocab=64, hidden=32)
        for model in (alone, shared):
            model.set_attn_implementation("rlkernel")

        def loss(scores):
            w = torch.linspace(-1, 1, len(scores.logprobs))
            return (scores.logprobs * w).sum() + (scores.entropy * w.flip(0)).sum()

        want = rlkernel.packed_logprobs(alone, batch, return_entropy=True)
        loss(want).backward()
        shared = ranks.wrap(shared, kind)
        counted = ranks.calls_of(shared)
        with torch.no_grad():
            before = rlkernel.packed_logprobs(shared, batch, return_entropy=True, **options)
        found = rlkernel.packed_logprobs(shared, batch, return_entropy=True, **options)
        calls = len(counted) / 2
        grads = ranks.gradients(shared, kind, loss(found))
        pairs = [(getattr(found, name), getattr(want, name)) for name in ("logprobs", "entropy")]
        same = all(map(torch.equal, (x for x, _ in pairs), (before.logprobs, before.entropy)))
        off = [float((x - y).detach().abs().max()) for x, y in pairs if len(y)]
        apart = {}
        for name, p in alone.named_parameters():
            mean = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(mean)
            mean /= ranks.RANKS
            apart[name] = float((grads[name] - mean).abs().max() / mean.abs().max())
        report.append((calls, len(found.logprobs), same, off, apart))
    return report


@pytest.mark.parametrize("kinds", ranks.kinds("ddp", "fsdp1", "fsdp2", "fsdp2-head", "zero3"))
def test_packed_logprobs(kinds, tmp_path):
    """Values of the model alone, gradients the mean over ranks: of unequal batches, of none, of parts."""
    for kind, reports in ranks.run(_packed_logprobs, kinds, tmp_path).items():
        for rank, report in enumerate(reports):
            for case, (calls, labels, same, off, apart) in enumerate(report):
                where = f"{kind}, rank {rank}, case {case}"
                assert calls == (1, 1, 4)[case], where
                assert labels == ((13, 3), (13, 0), (13, 3))[case][rank], where
                assert same and all(x <= 2e-5 for x in off), f"{where}: values differ by {off}"
                assert all(x <= 2e-5 for x in apart.values()), f"{where}: gradients differ by {apart}"


def test_passes_are_validated(monkeypatch):
    rlkernel.register_hf()
    model, batch = tiny.make_model(vocab=64), PrefixBatch.pack(*BATCHES[0])
    model.set_attn_implementation("rlkernel")
    with pytest.raises(ValueError, match="passes must be an integer >= 4, the parts that have rows, got 1"):
        rlkernel.packed_logprobs(model, batch, max_tokens=10, passes=1)
    with pytest.raises(ValueError, match="passes must be an integer >= 1, .* got True"):
        rlkernel.packed_logprobs(model, batch, passes=True)
    monkeypatch.setattr(logprobs, "is_sharded", lambda model: True)
    with pytest.raises(ValueError, match="passes must be given with max_tokens for a sharded model"):
        rlkernel.packed_logprobs(model, batch, max_tokens=10)


def test_what_reaches_wrappers_that_cast_floats():
    """Mixed precision of FSDP makes bf16 of float arguments, which holds no count beyond 256."""
    longer, _ = PrefixBatch.pack([[3, 4]], [[[5, 6]] * 300]).with_last_tokens()
    assert not any(x.is_floating_point() for x in longer.model_kwargs().values() if torch.is_tensor(x))
    assert longer.token_counts().dtype == torch.int64 and longer.token_counts().max() == 300


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_tensor_parallelism_is_refused(alone):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model = tiny.make_model(vocab=64)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    reasons = ["Qwen2ForCausalLM: its layers are split over ranks by tensor parallelism"]
    assert hf.check_model(model) == reasons and not hf.is_sharded(model)
    fully_shard(model, mesh=alone, ignored_params={layer.weight})
    assert hf.check_model(model) == reasons and hf.is_sharded(model)


def test_fsdp2_hides_no_reason(alone):
    """Its class stands in front of the model's, and only the latter's file tells where attention goes."""
    from torch.distributed.fsdp import fully_shard
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    reasons = ["BloomForCausalLM: its attention does not go through transformers' AttentionInterface"]
    assert hf.check_model(model) == reasons
    fully_shard(model, mesh=alone)
    assert hf.check_model(model) == reasons
