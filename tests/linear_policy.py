"""What the tests of linear_policy_loss share: running it, and what it is equal to."""

import pytest
import torch
from accuracy import check
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference import linear_policy_loss as reference
from rlkernel.runtime import workspace

OP = "linear_policy_loss"
ON_EVERY_BACKEND = pytest.mark.parametrize(
    ("backend", "device", "room"),
    [
        pytest.param(*pair.values, room, id=f"{pair.id}-{room}")
        for pair in of(OP)
        for room in (["tight"] if is_slow(*pair.values) else ["roomy", "tight"])
    ],
    indirect=["room"],
)
LEAVES = ("hidden", "weight", "bias")
HEAD = ("bias", "temperature", "logit_scale", "softcap", "logits_dtype")
ALL = {"beta": 0.1, "entropy_coef": 0.01, "correction": "icepop", "temperature": 0.8}


def make_inputs(*shape, **options):
    return reference.make_inputs(*shape, temperature=ALL["temperature"], **options)


@pytest.fixture(params=["roomy", "tight"])
def room(request, monkeypatch):
    """Ragged tiles in both directions; tight: the workspace holds few blocks of 8 rows, so many steps."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))
    if request.param == "tight":
        monkeypatch.setattr(workspace, "_limit", 40_000)
    return request.param


def able(backend, inputs, **options):
    compute = inputs["hidden"].dtype
    skip_unless_able(backend, OP, inputs["hidden"], inputs["weight"], compute_dtype=compute, **options)


def prepare(inputs, needs):
    leaves = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    wanted = [
        leaves[n].requires_grad_() for n, need in zip(LEAVES, needs, strict=True) if need and n in leaves
    ]
    return leaves, wanted


def run(backend, inputs, needs=(True, True, True), upstream=1.0, **options):
    leaves, wanted = prepare(inputs, needs)
    with running(backend):
        out = rlkernel.linear_policy_loss(**leaves, **options)
        grads = torch.autograd.grad(out.loss * upstream, wanted) if wanted else []
    return out, list(grads)


def compose(backend, inputs, needs=(True, True, True), **options):
    """What the op is equal to; rows outside of the mask are ignored ones."""
    leaves, wanted = prepare(inputs, needs)
    head = {name: options.pop(name) for name in HEAD if name in options}
    hidden, weight, ids = (leaves.pop(name) for name in ("hidden", "weight", "target_ids"))
    head["bias"] = leaves.pop("bias", None)
    kept = leaves["mask"] != 0
    entropic = options.pop("return_entropy", False) or options.get("entropy_coef", 0) != 0
    with running(backend):
        own = rlkernel.linear_logprob(
            hidden, weight, torch.where(kept, ids, -100), return_entropy=entropic, **head
        )
        loss = rlkernel.policy_loss(own.logprobs, **leaves, entropy=own.entropy, **options)
        grads = torch.autograd.grad(loss.loss, wanted) if wanted else []
    return rlkernel.LinearPolicyLossOutput(*loss, own.logprobs, own.entropy), list(grads)


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def with_bias(inputs):
    vocab = inputs["weight"].shape[0]
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    return inputs | {"bias": bias.to(inputs["weight"])}


def per_sequence(inputs):
    """One advantage for each sequence."""
    return inputs | {"advantages": inputs["advantages"][:, 0].contiguous()}


def packed(inputs):
    """Without what the mask hides behind a sequence's last token, and one empty sequence more."""
    lengths = (inputs["mask"] * torch.arange(1, inputs["mask"].shape[1] + 1).to(inputs["mask"].device)).amax(
        1
    )
    inside = torch.arange(inputs["mask"].shape[1]).to(lengths) < lengths[:, None]
    per_token = {k for k, v in inputs.items() if k not in ("weight", "bias") and v.dim() > 1}
    result = {k: v[inside] if k in per_token else v for k, v in inputs.items()}
    ends = lengths.cumsum(0)
    result["cu_seqlens"] = torch.cat([ends.new_zeros(1), ends[:1], ends])
    if "advantages" not in per_token:
        result["advantages"] = torch.cat(
            [inputs["advantages"][:1], inputs["advantages"][:1], inputs["advantages"][1:]]
        )
    return result


def check_against_fp64(backend, inputs, needs=(True, True, True), **options):
    algorithm = options.pop("algorithm", "auto")
    exact = {k: wide(v) for k, v in options.items()}
    truth, true_grads = compose("reference", {k: wide(v) for k, v in inputs.items()}, needs, **exact)
    torchs, torch_grads = compose("reference", inputs, needs, **options)
    ours, grads = run(backend, inputs, needs, **options, algorithm=algorithm)
    # sums cancel: their digits are those of their terms
    terms = 8 * max(1.0, inputs["advantages"].abs().amax().item())
    logprobs = truth.logprobs.detach().nan_to_num(neginf=0.0)
    beside = {"metrics": max(terms, _magnified(inputs, logprobs))}
    for name, a, b, c in zip(ours._fields, ours, torchs, truth, strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            check(name, a, b, c, magnitude=beside.get(name, terms))
    wanted = [n for n, need in zip(LEAVES, needs, strict=True) if need and n in inputs]
    for name, a, b, c in zip(wanted, grads, torch_grads, true_grads, strict=True):
        assert a.dtype == inputs[name].dtype
        # relative to a ratio, its error is that of the log-probability in fp32
        relative = 2 + (logprobs.abs().max().item() if a.dtype == torch.float32 else 0)
        check(f"grad of {name}", a, b, c, magnitude=relative * c.abs().max().item())


def _magnified(inputs, logprobs):
    """What a log-probability's last digit is worth in the ratio to another policy's, where that is largest.

    The other one's may be far away: exp(2.6) turns the rounding of a log-probability of 8 into that of 108.
    """
    kept = inputs["mask"] != 0
    others = [inputs.get(name) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")]
    gaps = [(x.double() - logprobs).abs()[kept & ~x.isneginf()] for x in others if x is not None]
    gaps = [gap for gap in gaps if gap.numel()]
    return logprobs.abs().max().item() * max((gap.exp().max().item() for gap in gaps), default=1.0)


def check_bits(backend, inputs, **options):
    """The composition's loss, metrics, logprobs and entropy to the bit; its gradients within rounding."""
    ours, grads = run(backend, inputs, **options)
    options.pop("algorithm", None)
    theirs, want = compose(backend, inputs, **options)
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_equal(name, a, b)
    for a, b in zip(grads, want, strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=(1e-6 if b.dtype == torch.float32 else 2e-2) * scale)
    return ours, grads
