"""The norms: what a row's bits do not depend on, what they are, and mutants that are found."""

import sys
from fractions import Fraction
from importlib import import_module

import emulation
import instruction_sets
import numpy as np
import pytest
import torch
from backends import is_slow, of, running
from bitwise import assert_equal
from norm_cases import run, upstream

import rlkernel
from rlkernel import native

OPS = ("layer_norm", "rms_norm")
ON_EVERY_BACKEND = pytest.mark.parametrize(
    ("op", "backend", "device"),
    [
        pytest.param(op, *pair.values, id=f"{op}-{pair.id}", marks=pair.marks)
        for op in OPS
        for pair in of(op)
        if pair.values[0] != "reference"
    ],
)
pytestmark = pytest.mark.usefixtures("poison")
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 128, 129, 257)
PER_ROW = ("normed", "summed", "grad_x", "grad_residual")


def make_inputs(op, *shape, **options):
    """Rows that mix the tiny with the large: the order of a sum shows in it."""
    inputs = import_module(f"rlkernel.reference.{op}").make_inputs(*shape, **options)
    inputs["x"][..., ::5] *= 30
    return inputs


def rows_of(inputs, rows):
    return {name: x[rows] if x.dim() > 1 else x for name, x in inputs.items()}


def variants(count):
    """Rows of a batch: some of them, in front and further on, alone and in another order."""
    yield from (slice(0, m) for m in ROWS if m < count)
    yield from (slice(count - m, count) for m in (1, 2, 17) if m < count)
    yield torch.randperm(count, generator=torch.Generator().manual_seed(5))


def check_rows_alone(run_rows, inputs):
    """``run_rows(inputs, grads)`` on parts of the rows gives the bits of all of them."""
    count = inputs["x"].shape[0]
    grad = upstream(inputs["x"])
    whole = run_rows(inputs, lambda x: grad)
    for rows in variants(count):
        got = run_rows(rows_of(inputs, rows), lambda x, rows=rows: grad[rows])
        for name in PER_ROW:
            if name in got:
                assert_equal(f"{name} of {rows}", got[name], whole[name][rows])
    dirty = {name: x.clone() for name, x in inputs.items()}
    dirty["x"][::2] = torch.nan
    dirty["x"][1::4] = torch.inf
    got = run_rows(dirty, lambda x: grad)
    for name in PER_ROW:
        if name in got:
            assert_equal(f"{name} beside NaN", got[name][3::4], whole[name][3::4])


@ON_EVERY_BACKEND
def test_a_row_does_not_feel_the_others(op, backend, device):
    options = {"residual": True} if op == "rms_norm" else {}
    whole = (((257, 40), torch.float32), ((257, 1000), torch.float32), ((33, 1027), torch.bfloat16))
    few = (((9, 40), torch.float32), ((3, 1027), torch.bfloat16))
    for shape, dtype in few if is_slow(backend, device) else whole:
        inputs = make_inputs(op, *shape, device=device, dtype=dtype, **options)
        check_rows_alone(lambda x, grads: run(op, backend, x, grads), inputs)


@pytest.mark.parametrize("op", OPS)
def test_a_sum_that_feels_the_batch_is_found(op):
    """The mutant: what a GPU does that has too few rows for its multiprocessors, it splits them."""

    def mutant(inputs, grads):
        x = inputs["x"]
        parts = x.square().chunk(4 if len(x) < 8 else 1, 1)
        squares = sum(part.sum(-1, keepdim=True) for part in parts)
        return {"normed": x * torch.rsqrt(squares / x.shape[1] + 1e-6)}

    with pytest.raises(AssertionError, match="normed of"):
        check_rows_alone(mutant, make_inputs(op, 257, 1000))


@ON_EVERY_BACKEND
def test_layout_and_alignment_do_not_show(op, backend, device):
    """Rows that start anywhere in a vector, also those of a weight."""
    inputs = make_inputs(op, 6, 41, device=device)
    whole = run(op, backend, inputs)
    for name, x in inputs.items():
        shifted = torch.cat([x.flatten().new_zeros(1), x.flatten()])[1:].view(x.shape)
        got = run(op, backend, inputs | {name: shifted})
        for key, want in whole.items():
            assert_equal(f"{key}, misaligned {name}", got[key], want)
    wide = torch.cat([inputs["x"], inputs["x"]], 1)[:, :41]
    for key, want in run(op, backend, inputs | {"x": wide}).items():
        assert_equal(f"{key}, strided", want, whole[key])


@ON_EVERY_BACKEND
def test_same_bits_every_time(op, backend, device):
    inputs = make_inputs(op, 70, 50, device=device)
    first = run(op, backend, inputs)
    for _ in range(2 if is_slow(backend, device) else 50):
        for name, x in run(op, backend, inputs).items():
            assert_equal(name, x, first[name])


@pytest.mark.parametrize("op", OPS)
def test_threads_do_not_show(op):
    inputs, before, results = make_inputs(op, 1000, 130), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(op, "native", inputs))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        for name, want in results[0].items():
            assert_equal(name, got[name], want)


@pytest.mark.parametrize("op", OPS)
def test_both_warp_sizes_give_the_same_bits(op):
    for length in (70, 1030):
        inputs = make_inputs(op, 40, length)
        narrow, wide = (run(op, f"emulated-warp{warp}", inputs) for warp in (32, 64))
        for name, x in narrow.items():
            assert_equal(name, wide[name], x)


def results():
    """All outputs and gradients of the native backend."""
    found = []
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for length in (1, 7, 40, 1027):
                found += run(op, "native", make_inputs(op, 70, length, dtype=dtype)).values()
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_do_not_show(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


def single(x):
    """The nearest fp32 of an exact number."""
    return Fraction(torch.tensor(float(x), dtype=torch.float64).float().item())


def declared_sum(values):
    """Of exact terms, as docs/ops/rms_norm.md has it."""
    lanes = [[Fraction(0)] * 8 for _ in range(4)]
    for i, value in enumerate(values):
        chain, lane = i // 8 % 4, i % 8
        lanes[chain][lane] = single(lanes[chain][lane] + value)
    pairs = [[single(a + b) for a, b in zip(lanes[k], lanes[k + 1], strict=True)] for k in (0, 2)]
    eight = [single(a + b) for a, b in zip(*pairs, strict=True)]
    for half in (4, 2, 1):
        eight = [single(eight[i] + eight[i + half]) for i in range(half)]
    return eight[0]


def test_the_declared_bits():
    """Rows of bf16 numbers, whose squares and partial sums fp64 holds, so that each is rounded once."""
    x = make_inputs("rms_norm", 4, 203).pop("x").bfloat16().float()
    want = []
    for row in x.tolist():
        mean = single(declared_sum(Fraction(v) * Fraction(v) for v in row) / 203)
        # torch's root need not be the nearest
        root = np.sqrt(np.float32(float(single(mean + single(1e-6)))))
        want.append(torch.tensor(np.float32(1) / root))
    with running("native"):
        got = rlkernel.rms_norm(x)
    assert_equal("normed", got, x * torch.stack(want)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "original, replacement",
    [
        ("__syncthreads();  // the groups' sums are written\n    part = 0;", "part = 0;"),
        ("__syncthreads();  // the groups' sums are read: the next sum may overwrite them", ""),
    ],
)
def test_a_planted_fault_is_found(op, original, replacement):
    inputs = make_inputs(op, 5, 1030)
    right = run(op, "emulated-warp32", inputs)
    own = {f"{op}/kernel.cuh": ("#pragma once", "#pragma once")}  # says whose kernels show the fault
    broken = emulation.load(emulation.build_module(32, own | {"norm.cuh": (original, replacement)}))
    wrong = 0
    for seed in range(6):
        broken.configure(seed, 2)
        with native.emulated(broken), rlkernel.use_backend("native"):
            wrong += not torch.equal(getattr(rlkernel, op)(**inputs), right["normed"])
    assert wrong
