"""What a backend is asked for ``paged_prefix_attention``, what it answers, and the plan that kernels follow.

A row of the softmax is computed in a tree that its own positions fix.  Its keys are cut into chunks of
``CHUNK`` positions.  Within a chunk a state (top, total, sums) goes through the keys in tiles, aligned at
multiples of a power of two that divides ``TILE``; then the states of the chunks are merged, the first one
first.  Items only say who does which part of it: so a row has the same bits alone and in any group.
"""

from typing import NamedTuple

from torch import Tensor

TILE = 64
"""Keys of which one is shared or none: every item ends where its rows do or at a multiple of it."""
CHUNK = 512
"""Keys of a partial result; a multiple of TILE."""
ITEM_ROWS = 64
"""Rows of an item at most; with the query heads of a K/V head, the rows of its product."""

ITEM = ("first", "end", "page", "position", "keys", "slot", "carry")
"""Columns of ``items``; see PagedPlan."""
LAUNCH = ("first_item", "end_item", "first_row", "end_row")
"""Columns of ``launches``; see PagedPlan."""
WIDTH = ("wide_items", "most_rows")
"""Columns of ``widths``; see PagedPlan."""


class PagedPlan(NamedTuple):
    """A step's work, made once on the host and used by each layer: int32, ``launches`` and ``widths`` on
    the CPU.

    A plan row is a row of the query, ordered so that rows which share keys stand together.  An item is

        plan rows first <= i < end, at most ITEM_ROWS of them, with every query head of a K/V head,
        keys at the positions position <= j < position + keys, all in one chunk, perhaps none;
            key j is row j % block_size of block pages[page + j // block_size - position // block_size],
        partial results slot + i - first, one for each query head;
        carry 1: these hold the state of the same rows and chunk after earlier keys, and are continued.

    Row i sees key j where ``0 <= positions[i] - j`` and, with a window W, ``positions[i] - j < W``.  Each key
    of an item is seen by one of its rows at least, so it was written; what stands in the cache beside it may
    be anything.  A row that sees none of its item's keys leaves the state that was there, or that of no keys.

    Launches follow each other: the items of one may run in any order, then, where first_row < end_row, the
    partial results ``slots[starts[i]:starts[i + 1]]`` of plan row i are merged in this order and written to
    row ``rows[i]`` of the output, after which the partial results of all slots are free again.
    The items of a launch that have more than one row come first: ``widths`` says how many these are, and how
    many rows its widest has, so that whoever gives an item's rows to several programs starts none in vain.
    """

    rows: Tensor  # [T]: the query's row of each plan row
    positions: Tensor  # [T]: in the row's sequence
    pages: Tensor  # [P]
    items: Tensor  # [N, ITEM]
    starts: Tensor  # [T + 1]
    slots: Tensor  # [S]
    launches: Tensor  # [L, LAUNCH]
    widths: Tensor  # [L, WIDTH]
    slot_count: int  # partial results of each query head that are there at once
    block_size: int
    window: int  # positions that a row sees, itself included; 0: all
    requests: int
    highest_page: int  # -1 without one
    keys_read: int  # of all items, the rows of a group reading together
    keys_apart: int  # the same if each request read its own


class PagedRule(NamedTuple):
    """What an attention score goes through, checked and normalised."""

    scale: float  # s = scale * q . k
    softcap: float  # then softcap * tanh(s / softcap); 0: not
    window: int  # keys at most this many positions back, the row itself included; 0: all


class PagedCall(NamedTuple):
    """Checked; the query's last dimension is dense, the caches have any strides."""

    query: Tensor  # [T, Hq, D]
    key_cache: Tensor  # [blocks, block_size, Hkv, D]
    value_cache: Tensor  # [blocks, block_size, Hkv, Dv]
    block_table: Tensor  # int32 [B, max_blocks]
    seq_lens: Tensor  # int32 [B]: keys of each request, those of its rows included
    cu_seqlens_q: Tensor  # int32 [B + 1]: the rows of each request are its last positions
    plan: PagedPlan
    rule: PagedRule
    sinks: Tensor | None = None  # [Hq]


class PagedResults(NamedTuple):
    """``lse`` is the whole row's, the sinks included."""

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # [Hq, T] fp32 or fp64
