"""What only the Triton kernels of ``paged_prefix_attention`` promise: bits, whatever a step is cut into."""

import math

import pytest
import torch
from accuracy import error
from backends import NO_INTERPRETER, TRITON_DEVICES
from bitwise import assert_equal
from paged_cases import STEPS, TABLES, Request, dense, group, make

pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import rlkernel  # noqa: E402
from rlkernel.calls.paged_prefix_attention import TILE  # noqa: E402
from rlkernel.prefix import paged  # noqa: E402
from rlkernel.triton_ops import paged_prefix_attention as triton_op  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)
SHARED = ("decode of several", "deep in one chunk", "both at once", "prefill behind a cached prompt")


def run(inputs, **options):
    with rlkernel.use_backend("triton"):
        return rlkernel.paged_prefix_attention(**inputs, **options, return_lse=True)


def alone(inputs, n):
    """The n-th request of a step by itself, and its rows."""
    first, end = inputs["cu_seqlens_q"][n : n + 2].tolist()
    starts = torch.tensor([0, end - first], dtype=torch.int32, device=inputs["query"].device)
    own = {name: inputs[name][n : n + 1] for name in TABLES[:2]}
    return {**inputs, **own, "query": inputs["query"][first:end], "cu_seqlens_q": starts}, slice(first, end)


def differing(inputs, **options):
    """Requests whose bits are others alone than in their step."""
    out, lse = run(inputs, **options)
    found = []
    for n in range(len(inputs["seq_lens"])):
        one, rows = alone(inputs, n)
        if rows.start == rows.stop:
            continue
        mine, its = run(one, **options)
        if not (torch.equal(mine, out[rows]) and torch.equal(its, lse[:, rows])):
            found.append(n)
    return found


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", SHARED)
def test_a_request_has_the_bits_that_it_has_alone(step, dtype, device):
    assert not differing(make(STEPS[step], dtype=dtype, device=device))


@ON_EVERY_DEVICE
def test_with_a_window_a_softcap_and_sinks_too(device):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    inputs = make(STEPS["both at once"], window=75, device=device)
    assert not differing(inputs, window=75, softcap=3.0, sinks=sinks)


@ON_EVERY_DEVICE
def test_tiles_that_shared_keys_do_not_fill_are_found(monkeypatch, device):
    """The bits hold because a block of keys is never more than what is shared in whole."""
    wide = triton_op.Blocks(16, 2 * TILE, 4, 1)
    monkeypatch.setattr(triton_op, "_blocks", lambda *_: wide)
    inputs = make(STEPS["both at once"], device=device)
    assert differing(inputs)
    assert error(run(inputs)[0], dense(inputs, torch.float64)[0]) < 1e-5


def test_every_block_of_keys_divides_a_tile():
    for blocks in (*triton_op.NVIDIA.values(), *triton_op.AMD.values()):
        assert TILE % blocks.k == 0


@ON_EVERY_DEVICE
def test_passes_and_chunked_prefills_change_no_bit(monkeypatch, device):
    inputs = make(STEPS["prefill behind a cached prompt"], device=device)
    want = run(inputs)
    rows = {name: inputs[name] for name in TABLES}
    launches = len(rlkernel.paged_prefix_plan(*rows.values(), 16).launches)
    monkeypatch.setattr(paged, "SLOTS", 40)
    assert len(rlkernel.paged_prefix_plan(*rows.values(), 16).launches) > launches
    for name, a, b in zip(("out", "lse"), run(inputs), want, strict=True):
        assert_equal(name, a, b)
    # the last of the first request's 70 rows, as a step behind the others
    first, _ = alone(inputs, 0)
    last = first | {"query": first["query"][-9:], "cu_seqlens_q": first["cu_seqlens_q"].clamp(max=9)}
    assert_equal("out", run(last)[0], want[0][61:70])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(bad, device):
    inputs = make(group("a", 128, [5, 6, 70], [2, 1, 1]), device=device)
    for position, hurt in ((100, [True] * 4), (129, [True, True, False, False])):
        block = inputs["block_table"][0, position // 16]
        cache = inputs["value_cache"].clone()
        cache[block, position % 16] = bad
        out, lse = run({**inputs, "value_cache": cache})
        assert (~out.isfinite()).any(2).any(1).tolist() == hurt and bool(lse.isfinite().all())


@ON_EVERY_DEVICE
def test_a_row_that_its_group_does_not_see_stays_its_own(device):
    """Rows of a tile whose windows begin at different keys."""
    requests = [Request((("a", 192),), own) for own in (1, 64, 130)]
    inputs = make(requests, window=100, device=device)
    out, _ = run(inputs, window=100)
    assert error(out, dense(inputs, torch.float64, window=100)[0]) < 1e-5
    assert not differing(inputs, window=100)


def test_reasons():
    query, cache = (torch.zeros(*shape, device=TRITON_DEVICES[-1]) for shape in ((3, 2, 64), (5, 16, 1, 64)))
    assert triton_op.unsupported(query, cache, cache) == []
    (reason,) = triton_op.unsupported(query.double(), cache.double(), cache.double())
    assert "query must be float32, float16 or bfloat16" in reason
    wide = torch.zeros(5, 16, 1, 257, device=query.device)
    assert "the head dim of value_cache must be at most 256, got 257" in triton_op.unsupported(
        query, cache, wide
    )
    many = torch.zeros(3, 17, 64, device=query.device)
    (reason,) = triton_op.unsupported(many, cache, cache)
    assert reason == "query heads of a K/V head must be at most 16, got 17"
