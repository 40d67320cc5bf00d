"""Which logits ``linear_policy_loss`` keeps in the workspace, and for how long.

A block is as many rows as ``linear_logprob`` takes into one GEMM.  The workspace holds the logits of some
blocks; a step computes as many as there is room for, and finishes those whose rows need no later one.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall
from rlkernel.drivers.linear_chosen import choose, operations
from rlkernel.drivers.linear_policy_loss_pass import PolicyPass
from rlkernel.drivers.linear_products import Scratch, dense
from rlkernel.drivers.linear_tiles import one_pass_limit
from rlkernel.runtime import gpu, workspace
from rlkernel.runtime.workspace import Carver


class Step(NamedTuple):
    """Blocks of rows whose logits are computed, then those whose derivative is complete."""

    compute: range
    finish: range


class Plan:
    """Which rows the workspace holds when; ``obstacle`` says why it cannot be done, else it is empty."""

    def __init__(self, call: LinearPolicyLossCall, policy: PolicyPass) -> None:
        hidden, weight, head, needs = call.hidden, call.weight, call.head, call.needs
        self.obstacle, self.policy = "", policy
        kept = call.target_ids != head.ignore_index
        self.rows, mask = choose(kept, operations(weight, head, hidden.shape[0], 1))
        self.n = hidden.shape[0] if self.rows is None else self.rows.numel()
        make = functools.partial(
            Resident, hidden, weight, head, self.n, self.rows is not None, gradients=True,
            hidden_gradient=needs[0], weight_gradient=needs[1], mask=mask if needs[1] else None,
        )  # fmt: skip
        one, two, limit = make(blocks=1), make(blocks=2), workspace.limit(hidden.device)
        tokens = one.plan.tokens
        total = -(-self.n // tokens)
        apart = total > 1 and policy.reach != "token"
        if apart and not self._may_read_offsets(call):
            return
        need = self._whole_sequences(kept, tokens, total) if apart else list(range(total))
        least = max((last - k + 1 for k, last in enumerate(need)), default=1)
        room = 1 + (limit - one.size) // max(two.size - one.size, 1) if one.size <= limit else 0
        self.blocks = min(room, max(total, 1))
        if self.blocks < least and total > 0:
            what = "one chunk of rows" if least == 1 else f"the {least} chunks of rows that a sequence spans"
            size = one.size + (least - 1) * (two.size - one.size)
            self.obstacle = (
                f"the logits of {what} take {size / 2**20:.1f} MiB, the limit is {limit / 2**20:.1f}"
            )
            if least == 1:
                self.obstacle += f"; {one_pass_limit(weight, head)} MiB are enough"
            return
        self.steps = steps_of(need, self.blocks)
        if len(self.steps) > 1 and not self._may_read_offsets(call):
            return
        self.scratch: Resident = one if self.blocks == 1 else make(blocks=self.blocks)
        stages = needs[1] and weight.dtype != torch.float32 and len(self.steps) == 1
        if stages and (staged := make(blocks=self.blocks, staged=True)).size <= limit:
            self.scratch = staged
        edges = [min(k * tokens, self.n) for s in self.steps for k in (s.finish.start, s.finish.stop)]
        if self.rows is None or len(self.steps) < 2:  # one step asks for the loss of all rows
            self.edges = edges
        else:  # of the rows as they were given
            last = [e - i % 2 for i, e in enumerate(edges)]
            self.edges = [x + i % 2 for i, x in enumerate(self.rows[last].tolist())]

    def _may_read_offsets(self, call: LinearPolicyLossCall) -> bool:
        """Whether it is known where sequences begin, or may be."""
        if call.policy.cu_seqlens is None or gpu.may_wait(call.hidden.device):
            return True
        self.obstacle = "offsets of packed sequences cannot be read under capture or in sync debug mode"
        return False

    def _whole_sequences(self, kept: Tensor, tokens: int, total: int) -> list[int]:
        """For each block the last block of the sequences that it has rows of."""
        ends = self.policy.starts[1:]
        if self.rows is not None:
            count = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
            ends = count[torch.tensor(ends, device=kept.device)].tolist()
        need, i = [], 0
        for k in range(total):
            row = min((k + 1) * tokens, self.n) - 1
            while ends[i] <= row:
                i += 1
            need.append((ends[i] - 1) // tokens)
        return need


def steps_of(need: list[int], blocks: int) -> list[Step]:
    steps, done, known = [], 0, 0
    while done < len(need):
        upto = min(done + blocks, len(need))
        stop = done
        while stop < len(need) and need[stop] < upto:
            stop += 1
        steps.append(Step(range(known, upto), range(done, stop)))
        done, known = stop, upto
    return steps


class Resident(Scratch):
    """The workspace with the logits of ``blocks`` chunks of rows; block k is in slot k modulo ``blocks``."""

    def __init__(self, *arguments: Any, blocks: int, staged: bool = False, **options: Any) -> None:
        self.blocks, self._staged = blocks, staged
        super().__init__(*arguments, **options)

    def _carve(self, carver: Carver) -> int:
        vocab, size = self.weight.shape
        part, wide = carver.part, min(self.plan.vocab, vocab)
        tokens = min(self.n, self.plan.tokens)
        rows = min(self.blocks * self.plan.tokens, self.n)
        # a tile of a block is dense, and the tiles of neighbouring blocks follow each other
        self._tiles = [
            part(rows, min(wide, vocab - v0), dtype=self.head.logits_dtype) for v0 in range(0, vocab, wide)
        ]
        self._carve_operands(carver, rows, wide)
        on_cpu = self.weight.device.type == "cpu"  # elsewhere it would synchronise to leave out rows
        self._spare = part(tokens, wide, dtype=self.head.logits_dtype) if on_cpu else None
        self._live = part(rows, size, dtype=self.operand) if on_cpu and self._of_weight else None
        self._dh = part(rows, size, dtype=torch.float32) if self._of_hidden else None
        staged = self._staged and self._of_weight and self.weight.dtype != torch.float32
        self._dw = part(wide, size, dtype=torch.float32) if staged else None
        return carver.size

    @property
    def leaves_out(self) -> bool:
        """Whether rows without a derivative are left out, which looks at values."""
        return self._spare is not None

    def bounds(self, block: int) -> tuple[int, int]:
        return block * self.plan.tokens, min((block + 1) * self.plan.tokens, self.n)

    def slot(self, block: int) -> int:
        """The first row of the block in the parts."""
        return block % self.blocks * self.plan.tokens

    def load(self, rows: Tensor | None, block: int) -> None:
        """Gather or convert the hidden states of a block, where that is needed at all."""
        if self._h is not None:
            (a, b), at = self.bounds(block), self.slot(block)
            self._gather(rows, a, b, self._h[at : at + b - a])

    def states(self, a: int, b: int, at: int) -> Tensor:
        return self.source[a:b] if self._h is None else self._h[at : at + b - a]

    def block_logits(self, block: int, v0: int, w: Tensor) -> Tensor:
        """The logits of a block and a slice of the vocabulary, into their tile."""
        (a, b), at = self.bounds(block), self.slot(block)
        return self._product(self.tile(at, b - a, v0), self.states(a, b, at), w)

    def tile(self, at: int, count: int, v0: int) -> Tensor:
        return self._tiles[v0 // self.plan.vocab][at : at + count]

    def compact(self, tile: Tensor, live: Tensor) -> Tensor:
        """The rows ``live`` of a tile, ascending, moved to its top."""
        assert self._spare is not None
        top, step = tile[: live.numel()], self._spare.shape[0]
        for i in range(0, live.numel(), step):  # what is written ends before what is still to be read
            rows = live[i : i + step]
            spare = dense(self._spare, rows.numel(), tile.shape[1])
            top[i : i + step] = torch.index_select(tile, 0, rows, out=spare)
        return top

    def compact_states(self, h: Tensor | None, at: int, live: Tensor) -> Tensor | None:
        if self._live is None or h is None:  # without d weight nobody needs them
            return None
        return torch.index_select(h, 0, live, out=self._live[at : at + live.numel()])

    def hidden_sum(self, at: int, count: int) -> Tensor:
        assert self._dh is not None
        return self._dh[at : at + count]

    def runs(self, blocks: range) -> Iterator[tuple[int, int, int]]:
        """(begin, end, first row in the parts) of blocks that lie side by side there."""
        for _, group in itertools.groupby(blocks, key=lambda k: k // self.blocks):
            together = list(group)
            yield self.bounds(together[0])[0], self.bounds(together[-1])[1], self.slot(together[0])
