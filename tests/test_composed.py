"""What layers compute in one kernel has the bits of torch's operations inside ``batch_invariant``."""

import functools

import pytest
import torch
from bitwise import assert_equal
from torch.nn import functional as F

import rlkernel
from rlkernel.consistency import composed

pytestmark = pytest.mark.usefixtures("poison")
ON_EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def drawn(*shape, dtype, seed=0):
    """The tiny beside the large: the order of a sum shows in it."""
    g = torch.Generator().manual_seed(seed + shape[-1])
    x = torch.randn(*shape, generator=g)
    x[..., ::5] *= 30
    return x.to(dtype)


def normed(x, weight, residual, offset):
    """As transformers writes it, or with an offset as Gemma does."""
    h = x if residual is None else x + residual
    wide = h.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    if weight is None:
        return wide.to(x.dtype)
    return (wide * (offset + weight.float())).to(x.dtype) if offset else weight * wide.to(x.dtype)


@ON_EVERY_DTYPE
def test_rms_norm(dtype):
    differs = 0
    for length in (1, 7, 8, 40, 64, 203, 1024, 1031):
        x = drawn(11, length, dtype=dtype)
        scale = torch.linspace(-1, 2, length).to(dtype)  # which passes -0 in fp16
        more = drawn(11, length, dtype=dtype, seed=1)
        cases = [(w, r, 0.0) for w in (scale, None) for r in (more, None)]
        for weight, residual, offset in [*cases, (scale, None, 1.0), (scale, more, 1.0)]:
            options = {"weight_offset": offset, "round_first": not offset}
            with rlkernel.batch_invariant():
                want = normed(x, weight, residual, offset)
            got, summed = composed.rms_norm(x, weight, 1e-6, residual, **options)
            assert_equal("normed", got, want)
            if residual is not None and summed is not None:
                assert_equal("summed", summed, x + residual)
            for rows in (slice(0, 1), slice(2, 5), slice(4, 11)):
                parts = (None if y is None else y[rows] for y in (x, residual))
                part = composed.rms_norm(next(parts), weight, 1e-6, next(parts), **options)[0]
                assert_equal("rows", part, want[rows])
            differs += not torch.equal(normed(x, weight, residual, offset), want)
    assert differs or dtype != torch.float32  # torch's own sum is another in fp32


def test_rms_norm_of_heads_where_they_lie():
    """Of a slice of what several projections made, and with roots that no rounding of a library shows in."""
    whole = drawn(300, 6 * 64, dtype=torch.float32)
    heads = whole[:, 64:320].view(300, 4, 64)
    with rlkernel.batch_invariant():
        want = normed(heads, None, None, 0.0)
    assert_equal("normed", composed.rms_norm(heads, None, 1e-6)[0], want)


@ON_EVERY_DTYPE
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation, dtype):
    for shape in ((1, 14), (17, 203 * 2), (2, 3, 64)):
        packed = drawn(*shape, dtype=dtype)
        gate, up = packed.chunk(2, -1)
        with rlkernel.batch_invariant():
            want = ACTIVATIONS[activation](gate) * up
        assert_equal("product", composed.gated(packed, activation), want)


@ON_EVERY_DTYPE
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [64, 32])
def test_turn(width, interleaved, dtype):
    """In place, among what lies beside them."""
    whole, table = drawn(19, 64 * 7, dtype=dtype), drawn(50, width, dtype=dtype, seed=1)
    positions = torch.arange(19) * 7 % 50
    cos, sin = (x[:, None] for x in table[positions].chunk(2, -1))

    def turned(x):
        x, rest = x[..., :width], x[..., width:]
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        found = a * cos - b * sin, b * cos + a * sin
        return torch.cat(
            (torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1), rest), -1
        )

    got = whole.clone()
    q, k = (got[:, a:b].view(19, -1, 64) for a, b in ((0, 256), (256, 384)))
    composed.turn(q, k, table, positions, interleaved)
    heads = whole.view(19, 7, 64)
    assert_equal("turned", got.view(19, 7, 64), torch.cat((turned(heads[:, :6]), heads[:, 6:]), 1))
    alone = whole.view(19, 7, 64).clone()
    composed.turn(alone[:, :6], None, table, positions, interleaved)
    assert_equal("queries", alone, got.view(19, 7, 64))


@ON_EVERY_DTYPE
@pytest.mark.parametrize("biased", [False, True])
def test_linear(biased, dtype):
    """Also behind weights that were written over, or are others."""
    linear = composed.Linear()
    weight = torch.nn.Parameter(drawn(72, 203, dtype=dtype), requires_grad=False)
    bias = drawn(72, dtype=dtype) if biased else None

    def check(x):
        with rlkernel.batch_invariant(), torch.no_grad():
            assert_equal("linear", linear(x, weight, bias), F.linear(x, weight, bias))

    for shape in ((1, 203), (16, 203), (33, 203), (2, 3, 203), (203,), (0, 203)):
        check(drawn(*shape, dtype=dtype, seed=2))
    x = drawn(5, 2 * 203, dtype=dtype)[:, 203:]
    check(x)
    weight.mul_(3)
    check(x)
    weight.data = drawn(72, 203, dtype=dtype, seed=5)
    check(x)
    weight = weight.detach().flip(0)
    bias = None if bias is None else bias.flip(0)
    check(x)


def test_what_kernels_do_not_take():
    x = torch.ones(2, 4)
    assert composed.takes(x, x)
    assert not composed.takes(x.double())
    assert not composed.takes(x, x.bfloat16())
    assert not composed.takes(x.to("meta"))
