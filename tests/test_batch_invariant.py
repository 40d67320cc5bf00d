"""``batch_invariant``: torch's operations, row by row."""

import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from bitwise import assert_equal
from invariant_rows import FEW, FUNCTIONS, ROWS, WEIGHT, own_numbers, threads

import rlkernel
from rlkernel.consistency import assert_invariant, aten

assert own_numbers and threads  # fixtures of the tests here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_same_bits_in_every_batch(name, dtype):
    with rlkernel.batch_invariant():
        assert_invariant(FUNCTIONS[name], ROWS.to(dtype), rows=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_threads_change_no_bit(name, dtype):
    """Nor do they in any batch: of one thread above, of one and of many rows here."""
    x = ROWS.to(dtype)
    with rlkernel.batch_invariant():
        want = FUNCTIONS[name](x)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            found = {rows: FUNCTIONS[name](x[:rows]) for rows in (1, 17, len(x))}
        finally:
            torch.set_num_threads(before)
    for rows, got in found.items():
        assert_equal(f"{rows} rows", got, want[:rows])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_any_operation_does_otherwise_is_seen(name, monkeypatch):
    """Mutants, the same on every processor: all that a function calls differs for an odd number of rows."""
    rows = 0

    def nudged(right):
        def run(original, *args, **kwargs):
            found = right(original, *args, **kwargs)
            for x in found if isinstance(found, tuple) else (found,):
                if rows % 2 and x.is_floating_point():
                    x.mul_(1 + 2**-14)
            return found

        return run

    def function(x):
        nonlocal rows
        rows = len(x)
        return FUNCTIONS[name](x)

    with rlkernel.batch_invariant() as mode:
        function(ROWS[:9])
    called = {row.op for row in mode.report()}
    assert called or name == "embedding"  # a copy
    for op in called:
        monkeypatch.setitem(aten.SERVED, op, nudged(aten.SERVED[op]))
    with rlkernel.batch_invariant():
        if called:
            with pytest.raises(AssertionError):
                assert_invariant(function, ROWS[:10], sizes=(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "embedding"])
def test_gradients_of_rows_have_the_same_bits_in_every_batch(name, dtype, threads):
    def gradient(x):
        x = x.detach().requires_grad_()
        out = FUNCTIONS[name](x)
        (found,) = torch.autograd.grad(out, x, out.detach().clone())
        return found

    with rlkernel.batch_invariant():
        assert_invariant(gradient, ROWS[:70].to(dtype), sizes=(1, 3, 8, 33) if threads == 1 else (3,), rows=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_torchs(name, dtype):
    run, x = FUNCTIONS[name], ROWS.to(dtype)
    want, truth = run(x), run(x.double())
    with rlkernel.batch_invariant():
        got = run(x)
    assert got.dtype == want.dtype
    check(name, got, want, truth)


@pytest.mark.parametrize("op", ["mm", "sum.dim_IntList", "silu"])
def test_an_order_that_follows_the_batch_is_seen(op, monkeypatch):
    """Mutants: each operation as a library might do it."""

    def halves(original, a, b):
        half = a.shape[1] // (2 if len(a) > 4 else 3)
        return (a[:, :half, None] * b[None, :half]).sum(1) + (a[:, half:, None] * b[None, half:]).sum(1)

    def by_rows(original, x, dim, keepdim=False, *, dtype=None):
        if not x.is_floating_point():
            return original(x, dim, keepdim, dtype=dtype)
        return sum(x.unbind(-1)) if len(x) % 2 else sum(x.flip(-1).unbind(-1))

    def tail(original, x):
        found = (x / (1 + torch.exp(-x))).flatten()
        found[-3:] *= 1 + 2**-22
        return found.view(x.shape)

    runs = {"mm": lambda x: x @ WEIGHT.t(), "sum.dim_IntList": lambda x: x.sum(-1), "silu": F.silu}
    monkeypatch.setitem(aten.SERVED, op, {"mm": halves, "sum.dim_IntList": by_rows, "silu": tail}[op])
    with rlkernel.batch_invariant(), pytest.raises(AssertionError):
        assert_invariant(runs[op], ROWS, sizes=FEW, rows=9)


CALLS = {
    "exp": torch.exp,
    "exp_": lambda x: x.clone().exp_(),
    "exp.out": lambda x: torch.exp(x, out=x.clone()),
}
WRONG = {
    "two rows": lambda x: len(x) == 2,
    "strides": lambda x: not x.is_contiguous(),
    "negative numbers": lambda x: len(x) == 2 and bool((x < 0).any()),
}


@pytest.mark.parametrize("where", WRONG)
@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_of_torch_that_fails_its_check_is_refused(op, where, monkeypatch):
    from rlkernel.consistency import aten_checked

    monkeypatch.setattr(aten_checked, "_seen", {})
    kernel = torch.library.get_kernel

    class Worse:
        def __init__(self, name, key):
            self.kernel, self.name = kernel(name, key), name

        def call_boxed(self, keyset, x, *args, **kwargs):
            wrong = self.name == f"aten::{op}" and WRONG[where](x)
            found = self.kernel.call_boxed(keyset, x, *args, **kwargs)
            return found.mul_(1 + 2**-20) if wrong else found

    monkeypatch.setattr(torch.library, "get_kernel", Worse)
    refused = pytest.raises(RuntimeError, match=f"torch's {op} gives rows of 300 other bits")
    with rlkernel.batch_invariant(), refused:
        CALLS[op](ROWS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_rows_are_looked_at_among_thousands(device, monkeypatch):
    from rlkernel.consistency import aten_checked

    def run(x):
        return x.sum(1, keepdim=True) * (1 + 2**-20 * (len(x) > 1000))

    monkeypatch.setattr(aten_checked, "DEVICES", (device,))
    assert aten_checked._differs(run, torch.float32, 64, "cpu") == (device == "cpu")
    assert not aten_checked._differs(lambda x: x * 2, torch.float32, 64, "cpu")


REFUSED = {
    "convolution": lambda: F.conv1d(torch.randn(1, 2, 5), torch.randn(3, 2, 2)),
    "native_batch_norm": lambda: F.batch_norm(torch.randn(4, 3), None, None, training=True),
    "pow.Tensor_Scalar": lambda: ROWS.abs() ** 1.7,
    "mm": lambda: torch.mm(ROWS.double(), WEIGHT.t().double()),
    "_softmax": lambda: ROWS.softmax(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_invariant_is_an_error_or_counted(name):
    with rlkernel.batch_invariant() as strict:
        with pytest.raises(RuntimeError, match=f"torch's {name} must be invariant inside"):
            REFUSED[name]()
        with rlkernel.batch_invariant(strict=False) as loose:
            REFUSED[name]()
    refused = [row for row in loose.report() if row.backend == "torch, not invariant"]
    assert refused and refused[0].op == name and refused[0].calls == 1
    assert refused[0] in strict.report()


def test_integers_are_exact_as_they_are():
    x = torch.arange(12).view(3, 4)
    with rlkernel.batch_invariant():
        found = x @ x.T, x.sum(1), x.cumsum(1), x.float().mean(1), (x > 3).sum()
    for got, want in zip(
        found, (x @ x.T, x.sum(1), x.cumsum(1), x.float().mean(1), (x > 3).sum()), strict=True
    ):
        assert torch.equal(got, want)


def test_out_and_in_place():
    x, w = ROWS[:5], WEIGHT.t()
    with rlkernel.batch_invariant():
        want = x @ w
        out = torch.empty(0)
        assert torch.mm(x, w, out=out) is out and torch.equal(out, want)
        strided = torch.zeros(5, 154)[:, ::2]
        torch.mm(x, w, out=strided)
        assert torch.equal(strided, want)
        base = torch.full((5, 77), torch.nan)
        assert torch.equal(torch.addmm(base, x, w, beta=0), want)
        assert torch.equal(torch.zeros(5, 77).addmm_(x, w), want)
        assert torch.equal(torch.mv(w.t(), x[0]), want[0])
        assert torch.equal(torch.dot(x[0], w[:, 0]), want[0, 0])
        assert torch.equal(F.silu(x, inplace=False), F.silu(x.clone(), inplace=True))
