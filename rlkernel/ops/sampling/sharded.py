"""``sample`` and its kin over a vocabulary that the ranks of a process group share out.

Rows that nobody filters need no more of a rank than its records.  For all that looks at a row again (a
filter, a rank, other tokens than the drawn one, a bias or a penalty) the rows are dealt out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.sampling import SampleOutput, SampleStats, Sampling, SamplingCall
from rlkernel.drivers import vocab_parallel
from rlkernel.drivers import vocab_parallel_sampling as driver
from rlkernel.drivers.vocab_parallel_sampling import Shards, Tiles
from rlkernel.ops import _vocab_parallel
from rlkernel.ops.sampling import inputs
from rlkernel.ops.sampling.drawing import draw
from rlkernel.ops.sampling.numbers import Rows
from rlkernel.ops.sampling.outputs import assembled
from rlkernel.ops.sampling.ranks import Wanted, ranked
from rlkernel.runtime import debug

_OWN = ("group", "vocab_start", "out")  # what each rank may have its own of
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Source(NamedTuple):
    """Where a rank has its logits [N, V_r] from.

    ``like`` [N, 0] has their dtype; ``tiles`` are of the entries from one to another, ``whole`` is all.
    """

    argument: str  # what the caller gave for them
    like: Tensor
    tiles: Tiles
    whole: Callable[[], Tensor]

    @classmethod
    def of(cls, logits: Tensor, vocab_start: int) -> "Source":
        def tiles(a: int, b: int) -> Any:
            yield 0, logits.shape[0], a, logits[:, a - vocab_start : b - vocab_start]

        return cls("logits", logits[:, :0], tiles, lambda: logits)


def sampled(
    source: Source,
    group: str,
    vocab_start: int,
    rows: Rows,
    options: dict[str, Any],
    token_ids: Tensor | None = None,
    may_store: Callable[[list[str]], Any] = bool,
) -> SampleOutput:
    """``rows`` are those of this rank's entries; ``may_store`` refuses reasons to hold logits."""
    given = (source, group, vocab_start, rows, options, token_ids, may_store)
    if torch.compiler.is_compiling():  # the ranks speak to each other
        from rlkernel.runtime import graph_break

        made: SampleOutput = graph_break.outside(_sampled, *given)
        return made
    return _sampled(*given)


def _sampled(
    source: Source,
    group: str,
    vocab_start: int,
    rows: Rows,
    options: dict[str, Any],
    token_ids: Tensor | None,
    may_store: Callable[[list[str]], Any],
) -> SampleOutput:
    shards = _shards(source.argument, group, vocab_start, rows, options | {"token_ids": token_ids})
    rows = rows._replace(vocab=shards.vocab)
    if token_ids is not None:
        token_ids = inputs.forced(token_ids, rows)
    elif options["seeds"] is None:
        first = vocab_parallel.gathered(inputs.seeds_of(None, rows), vocab_parallel.group_of(group))[0]
        options = options | {"seeds": first.view(rows.shape)}
    request, wanted, wants = inputs.asked(rows, options, token_ids)
    reasons = inputs.looks_again(request, wanted, options, rows.vocab)
    may_store(reasons)
    kernels = dispatch.pick("sampling", source.like, sampling=request, needs=("every statistic",))
    found: Sequence[Tensor | None]
    if not reasons and not kernels.unsupported(source.like, sampling=request, needs=("tiles",)):
        stats = driver.from_records(kernels, source.tiles, shards, request, source.like)
        found = ranked(SamplingCall(source.like, None, request), stats, wanted)
    else:
        stats, found = _dealt(source.whole(), shards, rows, request, wanted, wants, options)
    return assembled(rows.shape, rows.vocab, request, stats, found, options)


def _dealt(
    logits: Tensor, shards: Shards, rows: Rows, request: Sampling, wanted: Wanted, wants: tuple[str, ...],
    options: dict[str, Any],
) -> tuple[SampleStats, Sequence[Tensor | None]]:  # fmt: skip
    """The statistics of all rows, and what ``ranked`` finds: each rank's of its rows, then gathered."""
    a, b = shards.rows(rows.total, shards.rank)
    bias, penalties, z = options["logit_bias"], options["penalties"], _expanded(rows)
    bias = inputs.bias_of_rows(bias, rows, a, b, z)
    if penalties is not None:
        penalties = inputs.checked(penalties).of_rows(a, b, z)
    mine = driver.dealt(logits, shards)
    own = rows._replace(shape=mine.shape[:1])
    adjusted = inputs.adjusted(mine, own, bias, penalties)
    call = SamplingCall(mine, adjusted, request.of_rows(a, b), wants)
    stats = draw(call)
    found = ranked(call, stats, wanted.of_rows(a, b))
    every = driver.collected([*stats, *found], rows.total, shards)
    count = len(SampleStats._fields)
    return SampleStats._make(every[:count]), every[count:]


def _expanded(rows: Rows) -> Tensor:
    """[B, V] without memory, of the logits that penalties change."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.empty((), dtype=dtype, device=rows.device).expand(rows.total, rows.vocab)


def _shards(argument: str, group: str, vocab_start: int, rows: Rows, options: dict[str, Any]) -> Shards:
    """What the ranks have, as each tells the others; raises ValueError, on all of them, where it does not
    fit."""
    look = debug.may_read(torch.empty(0, dtype=torch.float32, device=rows.device))
    shared = {name: value for name, value in options.items() if name not in _OWN}
    said = [_vocab_parallel.digest(value) if look else 0 for value in shared.values()]
    own = [vocab_start, vocab_start + rows.vocab, rows.total, _DTYPES.index(rows.dtype), *said]
    everyone = vocab_parallel.group_of(group)
    facts = vocab_parallel.gathered(torch.tensor(own, device=rows.device), everyone).tolist()
    spans = tuple((start, end) for start, end, *_ in facts)
    _vocab_parallel.size_of(spans)
    _, _, totals, dtypes, *others = zip(*facts, strict=True)
    if len(set(totals)) > 1:
        raise ValueError(f"{argument} must have the same rows on every rank of group, got {list(totals)}")
    if len(set(dtypes)) > 1:
        got = [str(_DTYPES[i]).removeprefix("torch.") for i in dtypes]
        raise ValueError(f"{argument} must have the same dtype on every rank of group, got {got}")
    _vocab_parallel.same(shared, others)
    return Shards(group, dist.get_rank(everyone), spans)
