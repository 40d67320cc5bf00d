"""What the test files of linear_divergence share: running it in small tiles, and judging it by fp64."""

import pytest
import torch
from accuracy import check
from backends import of, running
from linear_logprob_cases import largest

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference.linear_divergence import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_divergence"))
NAMES = ("hidden", "weight", "bias")
BETAS = (0.0, 0.3, 1.0)


@pytest.fixture
def small_tiles(monkeypatch):
    """Many chunks of rows and slices of the vocabulary in both directions, with ragged ends."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))


def inputs_of(n, size, vocab, teacher_size=None, biases=True, **options):
    """Arguments of a call with a teacher of another size, and with both biases."""
    inputs = make_inputs(n, size, vocab, teacher_size=teacher_size or size + 5, **options)
    if biases:
        g = torch.Generator().manual_seed(3)
        for name, head in (("bias", "weight"), ("teacher_bias", "teacher_weight")):
            inputs[name] = torch.randn(vocab, generator=g).to(inputs[head])
    return inputs


def upstream(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x)


def run(backend, inputs, grad=None, needs=NAMES, **options):
    """The outputs by name, and the gradients that ``needs`` names."""
    leaves = {name: x.detach().requires_grad_(name in needs) for name, x in inputs.items()}
    with running(backend):
        out = rlkernel.linear_divergence(**leaves, **options)
        got = {name: x.detach() for name, x in out._asdict().items() if x is not None}
        wanted = [name for name in NAMES if name in needs and name in leaves]
        if wanted:
            grad = upstream(out.divergence) if grad is None else grad.to(out.divergence)
            grads = torch.autograd.grad(out.divergence, [leaves[name] for name in wanted], grad)
            got |= {f"grad of {name}": x for name, x in zip(wanted, grads, strict=True)}
    return got


def double(inputs):
    return {name: x.double() for name, x in inputs.items()}


def logits_of(hidden, weight, bias=None, scale=1.0, softcap=None):
    u = hidden @ weight.T
    u = (u if bias is None else u + bias) * scale
    return u if softcap is None else softcap * torch.tanh(u / softcap)


def both_logits(inputs, options):
    """Of the student and the teacher, in the dtype of ``inputs``."""
    return (
        logits_of(
            inputs[f"{of}hidden"], inputs[f"{of}weight"], inputs.get(f"{of}bias"),
            options.get(f"{of}logit_scale", 1.0), options.get(f"{of}softcap"),
        )
        for of in ("", "teacher_")
    )  # fmt: skip


def check_against_fp64(backend, inputs, grad=None, needs=NAMES, **options):
    """Outputs and gradients within the budget; PyTorch's own error is the reference's in this dtype."""
    ours, torchs, truth = (
        run(b, x, grad, needs, **options)
        for b, x in ((backend, inputs), ("reference", inputs), ("reference", double(inputs)))
    )
    assert list(ours) == list(truth)
    logits = max(largest(x) for x in both_logits(double(inputs), options))
    for name, exact in truth.items():
        leaf = name.removeprefix("grad of ")
        assert ours[name].dtype == (inputs[leaf].dtype if leaf in inputs else torch.float32), name
        if leaf in inputs:
            # backward's tiles are not those of the statistics: a probability is off by a logit's unit
            apart = logits * largest(exact) if inputs[leaf].dtype == torch.float32 else 0.0
            check(name, ours[name], torchs[name], exact, apart)
        else:  # differences of logarithms, which are as large as logits are far apart
            check(name, ours[name], torchs[name], exact, max(1.0, logits / options.get("temperature", 1.0)))
