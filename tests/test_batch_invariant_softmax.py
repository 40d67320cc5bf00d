"""Softmax inside ``batch_invariant`` on a CPU: our kernel, of the same bits in any batch on any processor."""

import sys

import accuracy
import instruction_sets
import pytest
import torch

import rlkernel
from rlkernel import native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 15, 31, 32, 33, 63, 1030, 32768, 151936)
WAYS = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


def rows(length, dtype=torch.float32, scale=4.0):
    g = torch.Generator().manual_seed(length)
    return (torch.randn(3, length, generator=g) * scale).to(dtype)


def inside(name, x, **options):
    with rlkernel.batch_invariant() as mode:
        found = WAYS[name](x, -1, **options)
    assert (f"_{name}", "native") in {(row.op, row.backend) for row in mode.report()}
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_it_is_as_exact_as_torchs(name, dtype):
    for length in LENGTHS:
        for x in (rows(length, dtype), rows(length, dtype, 0.01), rows(length, dtype, 60.0)):
            truth = WAYS[name](x.double(), -1)
            magnitude = x.abs().max().item() if name == "log_softmax" else 0.0
            theirs = WAYS[name](x.float(), -1)  # torch's of fp16 sums a long row to infinity
            accuracy.check(f"{name} of {length}", inside(name, x), theirs.to(dtype), truth, magnitude)
            found = inside(name, x, dtype=torch.float32)
            assert found.dtype == torch.float32
            accuracy.check(f"fp32 {name} of {length}", found, theirs, truth, magnitude)


@pytest.mark.parametrize("name", WAYS)
def test_numbers_that_are_none_stand_where_torch_has_them(name):
    inf, nan = torch.inf, torch.nan
    x = torch.zeros(8, 40)
    x[0, 3], x[1, 39], x[2, 1], x[4, :39], x[5, 7] = nan, inf, -inf, -inf, 3e38
    x[3], x[6, ::2], x[7, 5] = -inf, -3e38, -1e-40
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        found, theirs = inside(name, given), WAYS[name](given, -1)
        assert torch.equal(found.isnan(), theirs.isnan())
        assert torch.allclose(found, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", WAYS)
def test_a_row_has_its_bits_wherever_it_lies(name):
    for dtype in DTYPES:
        wide = rows(200, dtype)
        whole = inside(name, wide[:, :100])
        for i in range(3):
            assert torch.equal(inside(name, wide[i, :100].clone()), whole[i])
        columns = wide[:, :100].t().contiguous().t()
        assert torch.equal(inside(name, columns), whole)
        assert torch.equal(
            inside(name, wide.view(3, 1, 2, 100)), inside(name, wide.view(6, 100)).view(3, 1, 2, 100)
        )
        assert torch.equal(inside(name, torch.stack([wide[0, :100]] * 700)), whole[:1].expand(700, 100))
    one = torch.tensor(3.0)
    assert inside(name, one).item() == (1.0 if name == "softmax" else 0.0)
    with rlkernel.batch_invariant():
        assert WAYS[name](torch.empty(0, 5), -1).shape == (0, 5)
        assert WAYS[name](torch.empty(5, 0), -1).shape == (5, 0)


def test_a_result_is_written_whole():
    """No element is left as the memory had it, and none is written behind the end."""
    for length in (1, 31, 33, 100):
        for dtype in DTYPES:
            memory = torch.full((4 * length + 64,), torch.nan, dtype=dtype)
            out = memory[32 : 32 + 3 * length].view(3, length)
            native.kernels(memory.device).softmax(x=rows(length, dtype), logarithm=False, out=out)
            assert out.isfinite().all() and memory[:32].isnan().all()
            assert memory[32 + 3 * length :].isnan().all()


def results():
    return [
        inside(name, rows(length, dtype))
        for dtype in DTYPES
        for length in (1, 7, 31, 45, 1030, 5003)
        for name in WAYS
    ]


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_do_not_show(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)
