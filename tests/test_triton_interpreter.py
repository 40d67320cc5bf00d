"""The corrections of Triton's interpreter, on which every other test of a Triton kernel rests."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton_shortcuts
from backends import INTERPRETED, NO_INTERPRETER

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not INTERPRETED:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import triton.language as tl  # noqa: E402

# ties to both sides, overflow to infinity, subnormals, NaN with a payload that rounding would carry away
BITS = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001, 0x00008001, 0x80018000, 0x7F800000, 0x7FFFFFFF]
AWKWARD = torch.tensor(BITS, dtype=torch.int64).to(torch.int32).view(torch.float32)


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def round_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16, fp_downcast_rounding="rtne"))


@triton.jit
def dot_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


@triton.jit
def arithmetic_kernel(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a * b - 1.0)
    tl.store(out + 2 * N + i, tl.where(a < b, a, b))
    tl.store(out + 3 * N + i, tl.abs(a))
    tl.store(out + 4 * N + i, tl.maximum(a, b))


@triton.jit
def reduce_kernel(x, out, N: tl.constexpr):
    row = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(row, axis=0))
    tl.store(out + 1, tl.max(row, axis=0))
    tl.store(out + 2, tl.min(row, axis=0))


@triton.jit
def largest(x, N: tl.constexpr):
    return tl.max(tl.load(x + tl.arange(0, N)), axis=0)


@triton.jit
def calling_kernel(x, out, N: tl.constexpr):
    tl.store(out, largest(x, N))


@triton.jit
def compose(slope, shift, slope_behind, shift_behind):
    return slope * slope_behind, shift * slope_behind + shift_behind


@triton.jit
def scan_kernel(
    slopes, shifts, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, BACK: tl.constexpr
):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    slope, shift = tl.associative_scan(
        (tl.load(slopes + i), tl.load(shifts + i)), AXIS, compose, reverse=BACK
    )
    tl.store(out + i, slope)
    tl.store(out + M * N + i, shift)


def test_fp32_to_bf16_rounds_to_nearest_even():
    x = torch.cat([torch.randn(1016) * 1e3, AWKWARD])
    for kernel in (cast_kernel, round_kernel):
        y = torch.empty(1024, dtype=torch.bfloat16)
        kernel[(1,)](x, y, N=1024)
        assert torch.equal(y.isnan(), x.isnan())
        torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_bf16_to_other_dtypes(dtype):
    x = torch.randn(256).bfloat16()
    y = torch.empty(256, dtype=dtype)
    cast_kernel[(1,)](x, y, N=256)
    assert torch.equal(y, x.to(dtype))
    back = torch.empty(256, dtype=torch.bfloat16)
    cast_kernel[(1,)](y, back, N=256)
    assert torch.equal(back, y.bfloat16())


def test_bf16_dot_accumulates_in_fp32():
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    c = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, M=16, N=16, K=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dot_has_the_bits_of_its_row_and_column(dtype):
    """In a tile of any shape, on either side, where NumPy's product of a part has other bits."""
    a, b = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype)

    def dot(x, y):
        c = torch.empty(x.shape[0], y.shape[1])
        shape = {"M": x.shape[0], "N": y.shape[1], "K": x.shape[1]}
        dot_kernel[(1,)](x.contiguous(), y.contiguous(), c, **shape)
        return c

    whole = dot(a, b)
    assert torch.equal(dot(a[16:32], b), whole[16:32])
    assert torch.equal(dot(a, b[:, 32:48]), whole[:, 32:48])
    assert torch.equal(dot(b.T, a.T).T, whole)
    zeros = dot(torch.cat([a, torch.zeros_like(a)], 1), torch.cat([b, torch.zeros_like(b)]))
    assert torch.equal(zeros, whole)
    error = (whole - a.double() @ b.double()).abs().max()
    assert 0 < error < 1e-5  # a chain in fp32, of few links


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_a_scan_joins_all_before_in_their_order(axis, back):
    """Of what does not commute, in integers, whose grouping shows in no bit."""
    slopes, shifts = torch.randint(-9, 9, (2, 8, 16))
    out = torch.empty(2, 8, 16, dtype=torch.int64)
    scan_kernel[(1,)](slopes, shifts, out, M=8, N=16, AXIS=axis, BACK=back)
    slope, shift = (x.flip(axis) if back else x.clone() for x in (slopes, shifts))
    for i in range(1, slope.shape[axis]):
        here, before = (slice(None),) * axis + (i,), (slice(None),) * axis + (i - 1,)
        shift[here] += shift[before] * slope[here]
        slope[here] *= slope[before]
    assert torch.equal(out, torch.stack([x.flip(axis) if back else x for x in (slope, shift)]))


def test_bf16_arithmetic_rounds_once():
    x, y = torch.randn(128).bfloat16(), torch.randn(128).bfloat16()
    out = torch.empty(5, 128, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, N=128)
    expected = torch.stack([x + y, x * y - 1.0, torch.minimum(x, y), x.abs(), torch.maximum(x, y)])
    assert torch.equal(out, expected)


def test_bf16_reductions():
    x = torch.randn(64).bfloat16()
    out = torch.empty(3)
    reduce_kernel[(1,)](x, out, N=64)
    assert out[0].item() == x.float().sum().bfloat16().item()
    assert (out[1].item(), out[2].item()) == (x.max().item(), x.min().item())


def test_rows_of_nan_warn_of_nothing(recwarn):
    x, out = torch.full((8,), float("nan")), torch.empty(3)
    reduce_kernel[(1,)](x, out, N=8)
    assert out.isnan().all()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_device_functions_and_the_language_after_a_launch():
    from triton.language.core import is_builtin

    x, out = torch.randn(8), torch.empty(1)
    calling_kernel[(1,)](x, out, N=8)
    assert out.item() == x.max().item()
    assert is_builtin(tl.load) and is_builtin(tl.core.load), "a launch must leave the language as it found it"


# the shortcuts

OPERATORS = [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "and",
    "rand",
    "or",
    "ror",
    "getitem",
]
NUMBERS = (0, 3, -2, 2**31, 2**40, -0.0, 0.1, -1e30, 1e-42, 1e200, float("inf"), float("nan"), True)
KINDS = (
    tl.float32, tl.float64, tl.int32, tl.int64, tl.uint32, tl.int1, tl.float16, tl.bfloat16,
    tl.pointer_type(tl.float32), tl.pointer_type(tl.int1),
)  # fmt: skip


def operands():
    """Of each dtype a tile, one that lies column by column, a row, a column, and a number."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    random = np.random.default_rng(0)
    for dtype in KINDS:
        kind = np.dtype(np.uint64 if dtype.is_ptr() else _get_np_dtype(dtype))
        tile = (20 * random.standard_normal((4, 8)) * (np.arange(8) > 0) + 0.1 * (np.arange(8) == 0)).astype(
            kind
        )
        for data in (
            tile,
            np.asfortranarray(tile),
            tile[:1],
            tile[:, :1],
            tile[0],
            np.broadcast_to(tile[:1], (4, 8)),
        ):
            yield tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
        yield tl.tensor(TensorHandle(tile[0, :1], dtype), dtype)


def outcome(method, *arguments):
    """All that anything after it may depend on."""
    try:
        found = method(*arguments)
    except Exception as error:
        return type(error)
    data = found.handle.data
    steps = [step for step, n in zip(data.strides, data.shape, strict=True) if n > 1]
    kinds = str(found.type), str(found.dtype), str(found.handle.dtype), str(found.shape), data.dtype
    return *kinds, data.shape, steps, data.tobytes()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_shortcut_leads_where_the_long_way_does(name):
    from triton.runtime import interpreter

    taken = []
    semantic, shortcuts = interpreter.interpreter_semantic, triton_shortcuts.Shortcuts(interpreter)
    long_way = vars(tl.tensor)[f"__{name}__"].__wrapped__

    def plain(*arguments):
        return long_way(*arguments, _semantic=semantic)

    def counted(*arguments):
        taken.append(1)
        return plain(*arguments)

    short = shortcuts.of(f"__{name}__", counted)
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    whole, others = slice(None), list(operands())
    others += [(None, whole), (whole, None), (whole, None, whole)] if name == "getitem" else NUMBERS
    calls = 0
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for x in operands():
                for y in others:
                    calls += 1
                    assert outcome(short, x, y) == outcome(plain, x, y), (x, x.handle.data.strides, y)
    finally:
        scope.restore()
    assert 0 < len(taken) < calls
