"""What only Triton's ``paged_prefix_attention`` has: blocks that must fit in a tile, and limits."""

import pytest
import torch
from accuracy import error
from backends import NO_INTERPRETER, TRITON_DEVICES
from paged_cases import STEPS, TABLES, dense, differing, make, run

import rlkernel

pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from rlkernel.calls.paged_prefix_attention import TILE  # noqa: E402
from rlkernel.triton_ops import paged_prefix_attention as triton_op  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)


@ON_EVERY_DEVICE
def test_tiles_that_shared_keys_do_not_fill_are_found(monkeypatch, device):
    """The bits hold because a block of keys is never more than what is shared in whole."""
    wide = triton_op.Blocks(16, 2 * TILE, 4, 1)
    monkeypatch.setattr(triton_op, "_blocks", lambda *_: wide)
    inputs = make(STEPS["both at once"], device=device)
    assert differing("triton", inputs)
    assert error(run("triton", inputs)[0], dense(inputs, torch.float64)[0]) < 1e-5


def test_every_block_of_keys_divides_a_tile():
    for blocks in (*triton_op.NVIDIA.values(), *triton_op.AMD.values()):
        assert TILE % blocks.k == 0


@pytest.mark.parametrize("rows", [1, 9, 16, 64])
@pytest.mark.parametrize("step", STEPS)
def test_every_row_of_an_item_has_a_program_and_a_decode_none_without_one(step, rows):
    inputs = make(STEPS[step], head_dim=1)
    plan = rlkernel.paged_prefix_plan(*(inputs[name] for name in TABLES), 16)
    in_vain = 0
    for (first, end, *_), widths in zip(plan.launches.tolist(), plan.widths.tolist(), strict=True):
        counts = (plan.items[first:end, 1] - plan.items[first:end, 0]).tolist()
        wide, tiles, programs = triton_op.spread(end - first, *widths, rows)
        # as paged_attention_kernel reads its number
        found = [
            (n // tiles, n % tiles) if n < wide * tiles else (n - wide * (tiles - 1), 0)
            for n in range(programs)
        ]
        assert len({*found}) == programs
        working = {(i, t) for i, count in enumerate(counts) for t in range(-(-count // rows))}
        assert working <= {*found}
        in_vain += programs - len(working)
    groups_fit = rows >= 16 and step != "many rows of a group"
    if groups_fit and "prefill" not in step and step != "both at once":
        assert not in_vain


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
