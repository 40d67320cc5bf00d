"""What the test files of linear_logprob share: running it on small tiles, and judging the result by fp64."""

import pytest
import torch
from accuracy import check
from backends import is_slow, of, running, skip_unless_able
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.drivers import linear_products, linear_tiles
from rlkernel.drivers.linear_tiles import Tile

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def of_dtypes(op, *slow):
    """Parametrize by backend, device and dtype: all three dtypes, but for ``slow`` ones alone where Python or
    fibers play the GPU; the driver is the same, and products on a CPU give the kernels fp32 of any."""
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return pytest.mark.parametrize(
        ("backend", "device", "dtype"),
        [
            pytest.param(*pair.values, dtype, id=f"{pair.id}-{name}", marks=pair.marks)
            for pair in of(op)
            for name, dtype in names.items()
            if name in slow or not is_slow(*pair.values)
        ],
    )


NAMES = ("hidden", "weight", "bias")


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles in both directions, with ragged ends, on shapes that a CPU test can afford; backward finds
    some of them kept and multiplies the others again."""
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: min(tiles, 2))
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(linear_tiles, "GPU_TILE", Tile(8, 48))


def able(backend, inputs, **options):
    skip_unless_able(
        backend,
        "linear_logprob",
        inputs["hidden"],
        inputs["weight"],
        compute_dtype=inputs["hidden"].dtype,
        **options,
    )


def run(backend, inputs, upstream=None, needs=(True, True, True), **options):
    """Outputs and the gradients of hidden, weight and bias, on one backend."""
    leaves = {k: v.detach().clone() for k, v in inputs.items()}
    wanted = [
        leaves[n].requires_grad_() for n, need in zip(NAMES, needs, strict=True) if need and n in leaves
    ]
    with running(backend):
        out = rlkernel.linear_logprob(**leaves, **options)
        if upstream is None:
            return out, []
        used = [(o, g) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
        loss = sum((o * g.to(o.dtype)).sum() for o, g in used)
        return out, list(torch.autograd.grad(loss, wanted))


def check_against_fp64(backend, inputs, upstream=None, needs=(True, True, True), **options):
    """Outputs and gradients within the budget; PyTorch's own error is the reference's in this dtype."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    wide_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    algorithm = options.pop("algorithm", "auto")
    wide_options.pop("algorithm", None)
    truth, true_grads = run("reference", wide, upstream, needs, **wide_options)
    torchs, torch_grads = run("reference", inputs, upstream, needs, **options)
    ours, grads = run(backend, inputs, upstream, needs, **options, algorithm=algorithm)
    # a logprob is a difference of two numbers as large as lse; of a single row PyTorch may have the lucky one
    size = max(1.0, largest(truth.lse)) if inputs["hidden"].device.type == "cuda" else 1
    for name, a, b, c in zip(ours._fields, ours, torchs, truth, strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            check(name, a, b, c, magnitude=size)
    wanted = [n for n, need in zip(NAMES, needs, strict=True) if need and n in inputs]
    # On a GPU a tile of backward and the one that lse is of may differ in shape, by which the library sums: a
    # probability exp(logit - lse) is off by a unit of lse, and PyTorch has one product for both
    apart = inputs["hidden"].dtype == torch.float32 and inputs["hidden"].device.type == "cuda"
    size = largest(truth.lse) if apart else 0.0
    for name, a, b, c in zip(wanted, grads, torch_grads, true_grads, strict=True):
        assert a.dtype == inputs[name].dtype
        check(f"grad of {name}", a, b, c, magnitude=size * largest(c))


def largest(x):
    """Of the finite elements."""
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def with_bias(inputs):
    vocab = inputs["weight"].shape[0]
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    return inputs | {"bias": bias.to(inputs["weight"])}


class Storages(TorchDispatchMode):
    """Sizes of all memory that operators give, by address."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return out


class Flops(TorchDispatchMode):
    """Operations of matrix products, in place or not."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))
