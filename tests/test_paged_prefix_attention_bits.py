"""What the kernels of ``paged_prefix_attention`` promise: a row's bits, whatever a step is cut into."""

import math

import backends
import pytest
import torch
from accuracy import error
from bitwise import assert_equal
from paged_cases import (
    LAYOUTS,
    OP,
    STEPS,
    TABLES,
    Request,
    alone,
    dense,
    differing,
    group,
    in_blocks_of,
    make,
    run,
)

import rlkernel
from rlkernel.prefix import paged

# the reference computes requests one by one with torch's products, whose bits may follow shapes
ON_EVERY_KERNEL = pytest.mark.parametrize(
    ("backend", "device"), [p for p in backends.of(OP) if p.values[0] != "reference"]
)
SHARED = ("decode of several", "deep in one chunk", "both at once", "prefill behind a cached prompt")


def assert_same(got, want):
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert_equal(name, a, b)


@ON_EVERY_KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", SHARED)
def test_a_request_has_the_bits_that_it_has_alone(backend, device, step, dtype):
    assert not differing(backend, make(STEPS[step], dtype=dtype, device=device))


@ON_EVERY_KERNEL
def test_with_a_window_a_softcap_and_sinks_too(backend, device):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    inputs = make(STEPS["both at once"], window=75, device=device)
    assert not differing(backend, inputs, window=75, softcap=3.0, sinks=sinks)


@ON_EVERY_KERNEL
def test_passes_and_chunked_prefills_change_no_bit(backend, device, monkeypatch):
    inputs = make(STEPS["prefill behind a cached prompt"], device=device)
    want = run(backend, inputs)
    rows = {name: inputs[name] for name in TABLES}
    launches = len(rlkernel.paged_prefix_plan(*rows.values(), 16).launches)
    monkeypatch.setattr(paged, "SLOTS", 40)
    assert len(rlkernel.paged_prefix_plan(*rows.values(), 16).launches) > launches
    assert_same(run(backend, inputs), want)
    # the last of the first request's 70 rows, as a step behind the others
    first, _ = alone(inputs, 0)
    last = first | {"query": first["query"][-9:], "cu_seqlens_q": first["cu_seqlens_q"].clamp(max=9)}
    assert_equal("out", run(backend, last)[0], want[0][61:70])


@ON_EVERY_KERNEL
@pytest.mark.parametrize("size", [3, 64])
def test_blocks_of_another_size_change_no_bit(backend, device, size):
    inputs = make(STEPS["both at once"], device=device)
    assert_same(run(backend, in_blocks_of(size, inputs)), run(backend, inputs))


@ON_EVERY_KERNEL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_a_cache_has_its_numbers_changes_no_bit(backend, device, layout):
    inputs = make(STEPS["both at once"], head_dim=40, device=device)
    assert_same(run(backend, LAYOUTS[layout](inputs)), run(backend, inputs))


@ON_EVERY_KERNEL
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(backend, device, bad):
    inputs = make(group("a", 128, [5, 6, 70], [2, 1, 1]), device=device)
    for position, hurt in ((100, [True] * 4), (129, [True, True, False, False])):
        block = inputs["block_table"][0, position // 16]
        cache = inputs["value_cache"].clone()
        cache[block, position % 16] = bad
        out, lse = run(backend, {**inputs, "value_cache": cache})
        assert (~out.isfinite()).any(2).any(1).tolist() == hurt and bool(lse.isfinite().all())


@ON_EVERY_KERNEL
def test_a_row_that_its_group_does_not_see_stays_its_own(backend, device):
    """Rows of a tile whose windows begin at different keys."""
    requests = [Request((("a", 192),), own) for own in (1, 64, 130)]
    inputs = make(requests, window=100, device=device)
    out, _ = run(backend, inputs, window=100)
    assert error(out, dense(inputs, torch.float64, window=100)[0]) < 1e-5
    assert not differing(backend, inputs, window=100)
