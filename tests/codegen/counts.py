"""What the instructions of a kernel occupy: of a turn of its busiest loop, and of the whole."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from flow import Code, Graph, Instruction


class Kind(NamedTuple):
    """What one instruction of a warp occupies."""

    fma: bool = False
    alu: bool = False  # compares, logic, shifts, conversions: half the lanes of fma on NVIDIA's
    special: bool = False  # exp2, log2, reciprocals, and conversions of the same unit
    fp64: bool = False
    lsu: int = 0  # passes of the unit that loads and stores, each of 4 bytes a lane
    loaded: int = 0  # bytes of memory, a lane
    stored: int = 0
    tensor: bool = False
    flops: int = 0  # of a warp; 0 where the listing does not say it
    block_flops: int = 0  # of all warps of a block together
    unit: str = ""  # what must not vanish: a tensor core's product, a copy past the registers


class Machine(NamedTuple):
    """How to read a listing."""

    code: Callable[[str], Code]
    kind: Callable[[Instruction], Kind]


SUMMED = ("loaded", "stored", "flops", "tensor", "fma", "alu", "special", "fp64", "lsu")


def counted(machine: Machine, listing: str, warps: int = 0) -> dict[str, Any]:
    """Of a kernel whose blocks have so many warps: the fields of ``ledger.Record`` that a listing has."""
    code = machine.code(listing)
    graph = Graph(code)
    kinds = [machine.kind(x) for x in code.instructions]
    if warps:
        kinds = [k._replace(flops=k.flops + k.block_flops // warps) for k in kinds]
    reached = [i for block in graph.order for i in graph.places[block]]
    loop = _busiest(graph, kinds)
    turn = loop or _way(graph, kinds, 0, graph.order)
    units = Counter(kinds[i].unit for i in reached if kinds[i].unit)
    sums = {name: sum(getattr(kinds[i], name) for i in turn) for name in SUMMED}
    own = {"size": len(reached), "looped": bool(loop), "turn": len(turn), "warps": warps}
    return {**own, **sums, "units": dict(sorted(units.items()))}


def _busiest(graph: Graph, kinds: list[Kind]) -> list[int]:
    """A turn of the loop in which the time goes: of the innermost ones that with most products, or bytes.

    Of equal ones the shortest: a longer one does the same behind masks, at the edge.
    """
    found = sorted(graph.loops().items(), key=lambda loop: (len(loop[1]), loop[0]))
    turns = {head: _way(graph, kinds, head, body) for head, body in found}

    def weight(head: int) -> tuple[int, ...]:
        inside = [kinds[i] for i in turns[head]]
        flops, tensor = sum(k.flops for k in inside), sum(k.tensor for k in inside)
        return flops, tensor, sum(k.loaded + k.stored for k in inside), -len(inside)

    # a loop that touches no memory is one of a reduction or of a slow case, inside of the one that counts
    worthy = [(head, body) for head, body in found if any(weight(head)[:3])] or found
    innermost: list[tuple[int, set[int]]] = []
    for head, body in worthy:
        if not any(inner < body for _, inner in innermost):
            innermost.append((head, body))
    heads = [head for head, _ in innermost]
    busiest = turns[max(heads, key=lambda head: (weight(head), -head))] if heads else []
    return [] if _is_a_tail(graph, kinds, found, busiest) else busiest


def _is_a_tail(
    graph: Graph, kinds: list[Kind], found: list[tuple[int, set[int]]], busiest: list[int]
) -> bool:
    """Whether a loop of single elements is the rest of what code without a loop takes many at a time."""
    one = sum(kinds[i].loaded for i in busiest)
    if any(kinds[i].tensor for i in busiest) or one > 4:
        return False
    looping = {block for _, body in found for block in body}
    way = _way(graph, kinds, 0, graph.order)
    outside = {i for block in graph.order if block not in looping for i in graph.places[block]}
    return sum(kinds[i].loaded for i in way if i in outside) >= max(8 * one, 32)


def _way(graph: Graph, kinds: list[Kind], head: int, body: Collection[int]) -> list[int]:
    """A turn through what the loop is there for: its products, or else what it loads."""
    multiplies = any(kinds[i].tensor for block in body for i in graph.places[block])

    def gains(places: range) -> tuple[int, ...]:
        inside = [kinds[i] for i in places]
        if multiplies:
            return sum(k.flops for k in inside), sum(k.tensor for k in inside)
        return (sum(k.loaded for k in inside), 0)

    return graph.way(head, body, gains)
