"""What only Triton's ``paged_prefix_attention`` has: blocks that must fit in a tile, and limits."""

import pytest
import torch
from accuracy import error
from backends import NO_INTERPRETER, TRITON_DEVICES
from paged_cases import STEPS, dense, differing, make, run

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
