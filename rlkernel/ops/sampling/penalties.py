"""Penalties on tokens that have appeared, or that would repeat what has."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _scalars, _validate
from rlkernel.ops._validate import Range
from rlkernel.ops.sampling import repetition as repeats
from rlkernel.ops.sampling.numbers import Rows, described, integer_tensor, whole, within
from rlkernel.ops.sampling.repetition import Dry
from rlkernel.ops.sampling.token_bias import TokenBias
from rlkernel.runtime import debug

_PER_ROW = ("multiplier", "base", "allowed_length")  # of Dry: a number, or one for each row


class Penalties(NamedTuple):
    """Penalties of each request on the tokens that its prompt and its output hold already.

    Equal to, for a token that appears c times in the output,

        z = (z / repetition if z > 0 else z * repetition)   if it is in the prompt or the output
        z = z - frequency * c - presence * (c > 0)

    ``prompt_token_ids`` [B, P] and ``output_token_ids`` [B, L] are integers, padded with any id outside
    [0, V); ``repetition`` > 0 (1: none), ``frequency`` and ``presence`` (0: none) are finite numbers or [B].
    Follows vLLM's ``apply_all_penalties`` and OpenAI's definition of the last two.

    Then ``dry``; and ``z = -inf`` for each token that would be the last one of n tokens, ``no_repeat_ngram``
    = n > 0, which stand in the history already, or of one of ``bad_words`` (vLLM, HF), which are lists of
    token ids, the same for all requests, or a list of them (or None) for each.  The history is the prompt's
    tokens and the output's behind them, without the padding.

    Examples:
        >>> penalties = rlkernel.Penalties(torch.tensor([[1]]), repetition=2.0)
        >>> rlkernel.sample(torch.tensor([[1.0, 3.0, 2.0]]), temperature=0.0, penalties=penalties).token_ids
        tensor([2])
    """

    output_token_ids: Tensor
    prompt_token_ids: Tensor | None = None
    repetition: float | Tensor = 1.0
    frequency: float | Tensor = 0.0
    presence: float | Tensor = 0.0
    dry: Dry | None = None
    no_repeat_ngram: int = 0
    bad_words: Sequence[Any] | Tensor | None = None

    def apply(self, z: Tensor) -> Tensor:
        """The logits ``z`` [B, V] after the penalties; raises ValueError for what is off."""
        z = self._of_counts(z)
        for bias in self._of_history(z):
            bias.add_to(z)  # in place: z is a tensor of ours
        return z

    def repeated(self, times: int) -> "Penalties":
        """For ``times`` rows of each request, one behind the other."""

        def each(x: Any) -> Any:
            return x.repeat_interleave(times, 0) if isinstance(x, Tensor) and x.dim() else x

        words, dry = None if self.bad_words is None else words_of(self.bad_words), self.dry
        if words is not None and words.dim() == 3:
            words = each(words)
        if dry is not None:
            dry = _checked_type(dry)._replace(**{name: each(getattr(dry, name)) for name in _PER_ROW})
        rows = {name: each(value) for name, value in self._asdict().items()}
        return self._replace(**rows | {"dry": dry, "bad_words": words})

    def of_rows(self, a: int, b: int, z: Tensor) -> "Penalties":
        """For the requests from ``a`` to ``b`` of those of ``z``; raises ValueError for what is off."""

        def part(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            if x.shape[0] != z.shape[0]:
                want = f"hold one row for each of {z.shape[0]} rows"
                raise ValueError(f"penalties.{name} must {want}, got {tuple(x.shape)}")
            return x[a:b]

        for name in ("repetition", "frequency", "presence"):
            _column(name, getattr(self, name), z)
        _count("no_repeat_ngram", self.no_repeat_ngram)
        words = None if self.bad_words is None else _words(self.bad_words, z)
        if words is not None and words.dim() == 3:
            words = words[a:b]
        dry = None if self.dry is None else _checked(_checked_type(self.dry), z)
        if dry is not None:
            dry = dry._replace(**{name: part(f"dry.{name}", getattr(dry, name)) for name in _PER_ROW})
        rows = {name: part(name, x) for name, x in self._asdict().items() if name not in ("dry", "bad_words")}
        return self._replace(**rows, dry=dry, bad_words=words)

    def _of_counts(self, z: Tensor) -> Tensor:
        said = _counts("output_token_ids", self.output_token_ids, z)
        seen = said > 0
        if self.prompt_token_ids is not None:
            seen = seen | (_counts("prompt_token_ids", self.prompt_token_ids, z) > 0)
        factor = _column("repetition", self.repetition, z)
        # on a GPU nobody has looked: what is no factor is NaN, and its row not valid
        factor = torch.where((factor > 0) & (factor < torch.inf), factor, torch.nan)
        z = torch.where(seen, torch.where(z > 0, z / factor, z * factor), z)
        z = z - _column("frequency", self.frequency, z) * said
        return z - _column("presence", self.presence, z) * (said > 0)

    def _of_history(self, z: Tensor) -> list[TokenBias]:
        words, found = self.bad_words, []
        n = _count("no_repeat_ngram", self.no_repeat_ngram)
        if n == 0 and words is None and self.dry is None:
            return []
        ids = repeats.history(self.prompt_token_ids, self.output_token_ids, z.shape[1])
        if self.dry is not None:
            found.append(repeats.dry_bias(ids, _checked(_checked_type(self.dry), z)))
        if n:
            found.append(TokenBias(repeats.ends_of_ngrams(ids, n), -torch.inf))
        if words is not None:
            known = _words(words, z)
            found.append(TokenBias(repeats.ends_of_words(ids, known), -torch.inf))
        return found


def _words(words: Sequence[Any] | Tensor, z: Tensor) -> Tensor:
    """Those of the rows of ``z``."""
    known = words_of(words).to(z.device)
    if known.dim() == 3 and known.shape[0] != z.shape[0]:
        want = f"one list of words for each of {z.shape[0]} rows"
        raise ValueError(f"penalties.bad_words must be words or {want}, got {known.shape[0]} lists")
    if debug.may_read(known) and (known >= z.shape[1]).any():
        raise ValueError(f"penalties.bad_words must hold ids in [0, {z.shape[1]}), got {known.max().item()}")
    return known


def words_of(words: Sequence[Any] | Tensor) -> Tensor:
    """[W, n], or [B, W, n] where each request has its own, with -1 in front of the shorter words."""
    if isinstance(words, Tensor):
        if words.dtype not in (torch.int64, torch.int32) or words.dim() not in (2, 3) or words.shape[-1] == 0:
            want = "integers [W, n] or [B, W, n]"
            raise ValueError(f"penalties.bad_words must be {want}, got {described(words)}")
        return words.long()
    if not isinstance(words, Sequence):
        raise ValueError(f"penalties.bad_words must be lists of token ids, got {words!r}")
    own = len(words) > 0 and not any(_holds_ids(x) for x in words)
    each_row = words if own else [words]
    for row in each_row:
        if row is not None and not isinstance(row, Sequence):
            raise ValueError(f"penalties.bad_words must be lists of token ids, got {row!r}")
    lists = [[] if row is None else list(row) for row in each_row]
    for word in (word for each in lists for word in each):
        if not isinstance(word, Sequence) or len(word) == 0 or not all(_is_id(t) for t in word):
            raise ValueError(f"penalties.bad_words must be lists of token ids, got {word!r}")
    longest = max([1, *[len(word) for each in lists for word in each]])
    most = max([0, *[len(each) for each in lists]])
    made = torch.full((len(lists), most, longest), -1, dtype=torch.int64, device="cpu")
    for i, each in enumerate(lists):
        for j, word in enumerate(each):
            made[i, j, longest - len(word) :] = torch.tensor(word, device="cpu")
    return made if own else made[0]


def _holds_ids(words: Any) -> bool:
    """Whether it is a word, and no list of them or None."""
    return isinstance(words, Sequence) and len(words) > 0 and _scalars.as_int(words[0]) is not None


def _is_id(token: Any) -> bool:
    id = _scalars.as_int(token)
    return id is not None and id >= 0


def _count(argument: str, value: Any) -> int:
    return whole(f"penalties.{argument}", value, 0, _MOST, "an integer >= 0")


def _checked_type(dry: Any) -> Dry:
    if not isinstance(dry, Dry):
        raise TypeError(f"penalties.dry must be a Dry, got {type(dry).__name__}")
    return dry


def _checked(dry: Dry, z: Tensor) -> Dry:
    for name in _PER_ROW:
        _column(f"dry.{name}", getattr(dry, name), z)
    breakers = dry.breakers
    if isinstance(breakers, Tensor):
        integers = not (breakers.is_floating_point() or breakers.is_complex() or breakers.dtype == torch.bool)
    else:
        integers = isinstance(breakers, Sequence) and all(_scalars.as_int(x) is not None for x in breakers)
    if not integers:
        raise ValueError(f"penalties.dry.breakers must be token ids, got {breakers!r}")
    return dry._replace(last_n=_count("dry.last_n", dry.last_n))


def _counts(argument: str, ids: Tensor, z: Tensor) -> Tensor:
    """How often each token appears [B, V]."""
    rows, vocab = z.shape
    integer_tensor(f"penalties.{argument}", ids)
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"penalties.{argument} must be [{rows}, L], got {tuple(ids.shape)}")
    _validate.same_device(f"penalties.{argument}", ids, "logits", z.device)
    counts = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=z.device)
    inside = (ids >= 0) & (ids < vocab)
    counts.scatter_add_(1, torch.where(inside, ids, vocab).long(), torch.ones_like(ids, dtype=torch.int32))
    return counts[:, :vocab]


_MOST = torch.finfo(torch.float64).max  # the largest finite number of all dtypes
_NON_NEGATIVE, _FROM_ONE = (Range(x, _MOST, False, f">= {x} and finite") for x in (0, 1))
_FINITE = Range(-_MOST, _MOST, False, "finite")
_RANGES = {
    "repetition": Range(0, _MOST, True, "> 0 and finite"), "frequency": _FINITE, "presence": _FINITE,
    "dry.multiplier": _NON_NEGATIVE, "dry.base": _FROM_ONE, "dry.allowed_length": _FROM_ONE,
}  # fmt: skip


def _column(name: str, value: float | Tensor, z: Tensor) -> Tensor:
    """[B, 1] or [1, 1] in the dtype of ``z``, to which it is rounded before it is checked."""
    rows = Rows(z.shape[:1], z.shape[1], z.dtype, z.device)
    given = value.to(z.device) if isinstance(value, Tensor) else value
    made = within(_RANGES[name], f"penalties.{name}", given, rows, z.dtype)
    return made[:, None] if isinstance(made, Tensor) else z.new_full((1, 1), made)
