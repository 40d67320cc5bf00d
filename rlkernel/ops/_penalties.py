"""Penalties on tokens that have appeared, or that would repeat what has."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _repetition, _scalars, _validate
from rlkernel.ops._repetition import Dry
from rlkernel.ops._token_bias import TokenBias
from rlkernel.runtime import debug


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

        words = None if self.bad_words is None else words_of(self.bad_words)
        _is_dry(self.dry)
        if words is not None and words.dim() == 3:
            words = each(words)
        dry = (
            self.dry
            if self.dry is None
            else self.dry._replace(
                **{name: each(getattr(self.dry, name)) for name in ("multiplier", "base", "allowed_length")}
            )
        )
        rows = {name: each(value) for name, value in self._asdict().items()}
        return self._replace(**rows | {"dry": dry, "bad_words": words})

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
        ids = _repetition.history(self.prompt_token_ids, self.output_token_ids, z.shape[1])
        if self.dry is not None:
            found.append(_repetition.dry_bias(ids, _checked(self.dry, z)))
        if n:
            found.append(TokenBias(_repetition.ends_of_ngrams(ids, n), -torch.inf))
        if words is not None:
            known = words_of(words).to(z.device)
            if known.dim() == 3 and known.shape[0] != z.shape[0]:
                want = f"one list of words for each of {z.shape[0]} rows"
                raise ValueError(f"penalties.bad_words must be words or {want}, got {known.shape[0]} lists")
            if debug.may_read(known) and (known >= z.shape[1]).any():
                raise ValueError(
                    f"penalties.bad_words must hold ids in [0, {z.shape[1]}), got {known.max().item()}"
                )
            found.append(TokenBias(_repetition.ends_of_words(ids, known), -torch.inf))
        return found


def words_of(words: Sequence[Any] | Tensor) -> Tensor:
    """[W, n], or [B, W, n] where each request has its own, with -1 in front of the shorter words."""
    if isinstance(words, Tensor):
        if words.dtype not in (torch.int64, torch.int32) or words.dim() not in (2, 3) or words.shape[-1] == 0:
            got = f"{_validate.name(words.dtype)} {tuple(words.shape)}"
            raise ValueError(f"penalties.bad_words must be integers [W, n] or [B, W, n], got {got}")
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
    made = torch.full((len(lists), most, longest), -1, dtype=torch.int64)
    for i, each in enumerate(lists):
        for j, word in enumerate(each):
            made[i, j, longest - len(word) :] = torch.tensor(word)
    return made if own else made[0]


def _holds_ids(words: Any) -> bool:
    """Whether it is a word, and no list of them or None."""
    return isinstance(words, Sequence) and len(words) > 0 and _scalars.as_int(words[0]) is not None


def _is_id(token: Any) -> bool:
    id = _scalars.as_int(token)
    return id is not None and id >= 0


def _count(argument: str, value: Any) -> int:
    number = _scalars.as_int(value)
    if number is None or number < 0:
        raise ValueError(f"penalties.{argument} must be an integer >= 0, got {value!r}")
    return number


def _is_dry(dry: Any) -> None:
    if dry is not None and not isinstance(dry, Dry):
        raise TypeError(f"penalties.dry must be a Dry, got {type(dry).__name__}")


def _checked(dry: Dry, z: Tensor) -> Dry:
    _is_dry(dry)
    for name in ("multiplier", "base", "allowed_length"):
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
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = _validate.name(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"penalties.{argument} must be an int32 or int64 tensor, got {got}")
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"penalties.{argument} must be [{rows}, L], got {tuple(ids.shape)}")
    _validate.same_device(f"penalties.{argument}", ids, "logits", z.device)
    counts = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=z.device)
    inside = (ids >= 0) & (ids < vocab)
    counts.scatter_add_(1, torch.where(inside, ids, vocab).long(), torch.ones_like(ids, dtype=torch.int32))
    return counts[:, :vocab]


# From where on a value is one, more than that for the first; all are finite.
_LEAST = {
    "repetition": 0.0, "frequency": -math.inf, "presence": -math.inf,
    "dry.multiplier": 0.0, "dry.base": 1.0, "dry.allowed_length": 1.0,
}  # fmt: skip


def _column(argument: str, value: float | Tensor, z: Tensor) -> Tensor:
    """[B, 1] or [1, 1] in the dtype of ``z``, to which it is rounded before it is checked."""
    least, above = _LEAST[argument], argument == "repetition"
    want = "finite" if least == -math.inf else f"{'>' if above else '>='} {least:g} and finite"

    def inside(x: float) -> bool:
        return (x > least if above else x >= least) and -math.inf < x < math.inf

    argument = f"penalties.{argument}"
    if not isinstance(value, Tensor):
        if not _scalars.is_number(value):
            raise ValueError(f"{argument} must be a number or a tensor, got {type(value).__name__}")
        number = _scalars.rounded(value, z.dtype)
        if not inside(number):
            raise ValueError(f"{argument} must be {want}, got {value}")
        return z.new_full((1, 1), number)
    if value.dtype == torch.bool or value.is_complex():
        raise ValueError(f"{argument} must be numbers, got {_validate.name(value.dtype)}")
    if value.requires_grad:
        raise ValueError(f"{argument} must not require a gradient, got requires_grad=True")
    if value.shape not in ((), (z.shape[0],)):
        shape = f"one value or have shape {(z.shape[0],)}"
        raise ValueError(f"{argument} must be {shape}, got {tuple(value.shape)}")
    rows = value.to(z.device, z.dtype).reshape(-1)
    _validate.look(argument, rows, inside, want)
    return rows[:, None]
