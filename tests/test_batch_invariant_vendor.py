"""``batch_invariant(vendor=True)``: a library's product in the place of ours, where it had the same bits.

The library is torch's on a GPU; here stand-ins play it on the CPU, and torch's own, which never has them.
"""

import pytest
import torch
from bitwise import assert_equal
from matmul_cases import ROWS

import rlkernel
from rlkernel import native
from rlkernel.consistency import aten_products, vendor
from rlkernel.runtime import invariance

COMPARED = "torch, compared"
K, N = 200, 24


@pytest.fixture
def library(monkeypatch):
    """Install a library and get the list of the operands that it was given."""
    calls = []

    def install(multiply):
        def called(a, b):
            calls.append((a, b))
            return multiply(a, b)

        # which are a CPU's ways alone
        monkeypatch.setattr(aten_products, "_short", lambda: None)
        monkeypatch.setattr(native, "replaced", lambda op, name, otherwise: otherwise)
        monkeypatch.setattr(vendor, "DEVICES", ("cpu",))
        monkeypatch.setattr(vendor, "_same", {})
        monkeypatch.setattr(vendor, "multiply", called)
        return calls

    return install


def ours(a, b):
    with rlkernel.use_backend("native"):
        return rlkernel.matmul(a, b)


def splitting_few_rows(a, b):
    """As libraries do it for the sake of small batches."""
    half = a.shape[1] // 2
    return ours(a, b) if len(a) >= 8 else ours(a[:, :half], b[:half]) + ours(a[:, half:], b[half:])


def operands(rows, dtype=torch.float32):
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, K, generator=g).to(dtype), torch.randn(N, K, generator=g).to(dtype).t()


def products(a, b, times=3, **options):
    """The same product some times, and on which backend each ran."""
    found, ran = [], []
    with rlkernel.use_backend("native"):
        for _ in range(times):
            with rlkernel.batch_invariant(**options) as mode:
                found.append(torch.mm(a, b))
            ran += [call.backend for call in mode.report() if call.op == "mm"]
    for x in found:
        assert_equal("product", x, ours(a, b))
    return ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_library_with_our_bits_is_used_from_the_second_time_on(library, dtype):
    library(ours)
    for rows in ROWS:
        a, b = operands(rows, dtype)
        assert products(a, b, vendor=True) == ["native", COMPARED, COMPARED]
        assert products(a, b, times=1, vendor=True) == [COMPARED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_product_on_a_cpu_is_found_to_be_another(library, dtype):
    calls = library(torch.mm)
    for rows in ROWS:
        assert products(*operands(rows, dtype), vendor=True) == ["native"] * 3
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_library_that_splits_small_batches_is_used_for_large_ones(library, dtype):
    library(splitting_few_rows)
    for rows in ROWS:
        last = COMPARED if rows >= 8 else "native"
        assert products(*operands(rows, dtype), vendor=True)[1:] == [last] * 2


@pytest.mark.parametrize("at", [8, 100, 192])
def test_a_split_anywhere_is_found_in_a_single_row(library, at):
    library(lambda a, b: ours(a[:, :at], b[:at]) + ours(a[:, at:], b[at:]))
    assert products(*operands(1), vendor=True) == ["native"] * 3


def test_it_is_off_by_default_and_in_an_inner_block_without_it(library):
    calls = library(ours)
    a, b = operands(16)
    assert products(a, b) == ["native"] * 3
    with rlkernel.batch_invariant(vendor=True):
        assert products(a, b) == ["native"] * 3
    assert not calls
    rlkernel.batch_invariant.enable(vendor=True)
    try:
        for _ in range(3):
            torch.mm(a, b)
    finally:
        rlkernel.batch_invariant.disable()
    assert calls


def test_what_is_compared_is_a_call_of_the_same_kind(library):
    """Its shapes, strides and alignment, in memory of its own; of another kind it says nothing."""
    calls = library(ours)
    memory = torch.randn(16 * 208 + 3)
    a, b = memory[3:].as_strided((16, K), (208, 1)), operands(16)[1]
    assert products(a, b, vendor=True)[-1] == COMPARED
    for x, y in calls[:-2]:
        assert (x.stride(), y.stride()) == (a.stride(), b.stride()) and (x.shape, y.shape) == (
            a.shape,
            b.shape,
        )
        assert (x.data_ptr() - a.data_ptr()) % 256 == 0 == (y.data_ptr() - b.data_ptr()) % 256
        assert x.data_ptr() != a.data_ptr()
    for other in (a.contiguous(), memory[:-3].as_strided(a.shape, a.stride()), a[:15]):
        assert products(other, b, times=1, vendor=True) == ["native"]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert products(a, b, times=1, vendor=True) == ["native"]
    finally:
        torch.set_float32_matmul_precision(precision)


def test_numbers_that_would_show_nothing_decide_nothing(library, monkeypatch):
    library(ours)
    monkeypatch.setattr(vendor, "_telling", lambda a, b, _: (torch.zeros_like(a), torch.zeros_like(b)))
    assert products(*operands(16), vendor=True) == ["native"] * 3


@pytest.mark.parametrize(
    "a, b",
    [
        (torch.randn(1, K).expand(16, K), torch.randn(K, N)),
        (torch.randn(16, 8), torch.randn(8, N)),
        (torch.randn(0, K), torch.randn(K, N)),
    ],
    ids=["rows that overlap", "a short K", "no rows"],
)
def test_what_cannot_be_compared_is_ours(library, a, b):
    calls = library(ours)
    assert products(a, b, vendor=True) == ["native"] * 3 and not calls


def test_kinds_that_are_remembered_are_bounded(library, monkeypatch):
    library(ours)
    monkeypatch.setattr(vendor, "KINDS", 3)
    for rows in range(1, 9):
        assert products(*operands(rows), vendor=True) == ["native", COMPARED, COMPARED]
        assert len(vendor._same) <= 3


def test_what_goes_wrong_in_a_comparison_leaves_the_mode_as_it_is(library):
    """A library that fails is an error, memory that runs out is not; torch's operations stay replaced."""

    def raises(kind):
        def multiply(a, b):
            raise kind("planted")

        return multiply

    library(raises(torch.OutOfMemoryError))
    assert products(*operands(16), vendor=True) == ["native"] * 3
    library(raises(ZeroDivisionError))
    a, b = operands(16)
    with rlkernel.use_backend("native"), rlkernel.batch_invariant(vendor=True):
        torch.mm(a, b)
        with pytest.raises(ZeroDivisionError) as error:
            torch.mm(a, b)
        assert error.traceback and not invariance.is_aside()


def test_large_operands_are_not_held_twice(library, monkeypatch):
    calls = library(ours)
    monkeypatch.setattr(vendor, "MOST", K * N - 1)
    assert products(*operands(16), vendor=True) == ["native"] * 3 and not calls


def test_a_linear_layer_and_its_gradients(library):
    """A bias is added before the rounding, which a library may do otherwise: it stays ours."""
    library(ours)
    layer, x = torch.nn.Linear(K, 40, bias=False), torch.randn(16, K, requires_grad=True)

    def run(**options):
        with rlkernel.use_backend("native"), rlkernel.batch_invariant(**options) as mode:
            out = layer(x)
            grads = torch.autograd.grad(out.square().sum(), [x, layer.weight])
        return (out.detach(), *grads), {call.backend for call in mode.report() if call.op == "mm"}

    want, _ = run()
    random = torch.get_rng_state()
    ran = set()
    while COMPARED not in ran:  # addresses, and so kinds, of what torch allocates are few
        got, ran = run(vendor=True)
    assert torch.equal(random, torch.get_rng_state())
    for name, x_, y in zip(("out", "x", "weight"), got, want, strict=True):
        assert_equal(name, x_, y)
    with rlkernel.use_backend("native"), rlkernel.batch_invariant(vendor=True) as mode:
        for _ in range(3):
            torch.nn.functional.linear(x.detach(), layer.weight.detach(), torch.ones(40))
    assert COMPARED not in {call.backend for call in mode.report()}


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="vendor must be True or False, got 'cublas'"):
        rlkernel.batch_invariant(vendor="cublas")
