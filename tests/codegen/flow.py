"""Loops of machine code: instructions in order, the labels that they jump to, ways around a loop."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    name: str  # with what follows it: LDG.E.128
    text: str  # the whole of it
    targets: tuple[str, ...] = ()  # labels that it may jump to
    falls: bool = True  # whether the next instruction may come after it


@dataclass(frozen=True)
class Code:
    """A kernel: ``labels`` are places in ``instructions``."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]


class Graph:
    """The blocks of a kernel, each called by the place of its first instruction."""

    def __init__(self, code: Code) -> None:
        count = len(code.instructions)
        starts = {0, *code.labels.values()}
        starts |= {i + 1 for i, x in enumerate(code.instructions) if x.targets or not x.falls}
        edges = sorted(start for start in starts if start < count)
        self.places: dict[int, range] = {}
        self.after: dict[int, list[int]] = {}
        for start, end in zip(edges, [*edges[1:], count], strict=True):
            last = code.instructions[end - 1]
            jumps = [code.labels[name] for name in last.targets if code.labels.get(name, count) < count]
            self.places[start] = range(start, end)
            self.after[start] = jumps + ([end] if last.falls and end < count else [])
        self.order, self.before = self._order()

    def loops(self) -> dict[int, set[int]]:
        """The blocks of each loop, by its head.

        A loop is what leads to a jump back without leaving its head, which every way into the loop passes;
        jumps back to one head are one loop.  So a rare case that the compiler has put behind the end of the
        code belongs to the loop that it returns to, and a jump from one loop to another makes none.
        """
        found: dict[int, set[int]] = {}
        for block in self.order:
            for head in filter(lambda other: self._dominates(other, block), self.after[block]):
                body, todo = found.setdefault(head, {head}), [block]
                while todo:
                    here = todo.pop()
                    if here not in body:
                        body.add(here)
                        todo += self.before[here]
        return found

    def way(self, head: int, body: Collection[int], gains: Callable[[range], tuple[int, ...]]) -> list[int]:
        """The places that one turn of a loop passes: of the ways that gain most the shortest.

        What stands under a condition and gains nothing is passed by, as the end of a tile in a loop over all
        parts of all tiles.  Loops inside are gone through once.
        """
        best: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        ends = []
        for block in filter(set(body).__contains__, self.order):
            places = self.places[block]
            sources = [best[b] for b in self.before[block] if b in best] if block != head else []
            if block != head and not sources:
                continue
            score, path = max(sources, key=lambda x: x[0], default=((), []))
            own = (*gains(places), -len(places))
            score = tuple(map(sum, zip(score, own, strict=True))) if score else own
            best[block] = score, [*path, block]
            if head in self.after[block] or not self.after[block]:
                ends.append(best[block])
        path = max(ends, key=lambda x: x[0], default=((), []))[1]
        return [i for block in path for i in self.places[block]]

    def _order(self) -> tuple[list[int], dict[int, list[int]]]:
        """Blocks that can be reached, each after those that dominate it, and the blocks before each."""
        done: list[int] = []
        before: dict[int, list[int]] = {0: []}
        stack = [(0, iter(self.after[0]))] if self.after else []
        while stack:
            block, rest = stack[-1]
            for after in rest:
                new = after not in before
                before.setdefault(after, []).append(block)
                if new:
                    stack.append((after, iter(self.after[after])))
                    break
            else:
                done.append(block)
                stack.pop()
        return done[::-1], before

    @cached_property
    def _nearest(self) -> dict[int, int]:
        """The nearest block that every way to a block passes, as Cooper, Harvey and Kennedy find it."""
        rank = {block: i for i, block in enumerate(self.order)}
        nearest = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [b for b in self.before[block] if b in nearest]
                both = known[0]
                for other in known[1:]:
                    while both != other:
                        while rank[other] > rank[both]:
                            other = nearest[other]
                        while rank[both] > rank[other]:
                            both = nearest[both]
                if nearest.get(block) != both:
                    nearest[block], changed = both, True
        return nearest

    def _dominates(self, above: int, block: int) -> bool:
        while block != above and block:
            block = self._nearest[block]
        return block == above
