"""Launches of the kernels around ``tile_product``: how a block is loaded, and memory for what they leave."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.runtime import workspace
from rlkernel.runtime.workspace import Carver
from rlkernel.triton_ops._descriptors import aligned
from rlkernel.triton_ops._device import generation
from rlkernel.triton_ops._sizes import cdiv

GROUP = 16  # blocks of rows: at 4096 hidden states of 16 bits each they take 16 MiB of the L2


class Tile(NamedTuple):
    """A block's rows, columns and step of K, warps and stages; ``specialized``: a warp of its own copies."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    specialized: bool = False


LARGE, SMALL, NARROW = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3)
# Blackwell alone: what Triton 3.6 makes of it for Hopper gave wrong sums and NaN on an H200.
COPIED = LARGE._replace(specialized=True)


class Launch(NamedTuple):
    """How a kernel is launched: from H, V, dtypes and the GPU, never from the number of rows."""

    described: bool
    tile: Tile
    whole_k: bool

    @property
    def options(self) -> dict[str, Any]:
        tile = self.tile
        options = {
            "DESCRIBED": self.described, "WHOLE_K": self.whole_k, "SPECIALIZED": tile.specialized,
            "BM": tile.rows, "BN": tile.columns, "BK": tile.step, "GROUP": GROUP,
            "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False,
        }  # fmt: skip
        # AMD's instructions for tiles of 16 and of 32 rows add up in different orders
        if torch.version.hip is not None:
            options |= {"matrix_instr_nonkdim": 16}
        return options

    def blocks(self, rows: int, columns: int) -> int:
        return cdiv(rows, self.tile.rows) * cdiv(columns, self.tile.columns)


def launch_of(
    a: Tensor, b: Tensor, compute: torch.dtype, described: dict[int, Tile], loaded: Tile = SMALL,
    *, across: bool = False,
) -> Launch:  # fmt: skip
    """How to multiply ``a`` and ``b``: by descriptors, with the GPU generation's tile, or by pointers."""
    tile = described.get(generation())
    if tile is not None and all(x.dtype == compute and aligned(x) for x in (a, b)):
        return Launch(True, tile, True)
    if a.stride(0) % 16 or b.stride(0) % 16:  # rows that cannot be loaded 16 bytes at a time pass registers
        tile = Tile(64, 64, 32, 4, 2)
    elif (
        torch.version.hip is not None
    ):  # of 64 KiB of shared memory; its stages stay in registers but for one
        tile = loaded._replace(stages=2)
    else:
        tile = loaded
    return Launch(False, tile, not across and a.shape[1] % LARGE.step == 0)


@contextlib.contextmanager
def leased(carve: Callable[[Carver], Any], device: torch.device) -> Iterator[Any]:
    """The parts of the workspace that ``carve`` asks for."""
    counter = Carver()
    carve(counter)
    with workspace.lease(counter.size, device) as lease:
        yield carve(Carver(lease.memory))


def run(kernel: Any, programs: int, like: Tensor, *arguments: Any, **options: Any) -> None:
    if programs:
        with torch.cuda.device_of(like):
            # descriptors that kernels make stand in memory that Triton asks this context's allocator for
            contextvars.copy_context().run(_allocating, kernel[(programs,)], like.device, arguments, options)


def _allocating(launch: Any, device: torch.device, arguments: Any, options: Any) -> None:
    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    triton.set_allocator(allocate)
    launch(*arguments, **options)


def tl_type(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def or_none(scale: float) -> float | None:
    """A factor of 1 is none, so that no kernel multiplies by it."""
    return None if scale == 1.0 else scale
