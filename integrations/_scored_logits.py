"""What stands where a trainer expects logits, TRL's before 1.15 and others: what it would compute of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from rlkernel.integrations._contract import word
from rlkernel.integrations.hf.lm_head import IGNORED, LmHead

LOGPROB, ENTROPY, MEAN_LOGIT, IS_TOP1, LABEL = range(5)
COLUMNS = 5
LARGEST = 2**24  # the labels are numbers of fp32 like the others, which has all integers up to here

# what may become of logits on their way: rows are chosen; __get__ is of attributes, as shape and device.  A
# view is by the shape that the trainer reads of them.
PASSING = (
    "__getitem__",
    "__get__",
    "chunk",
    "contiguous",
    "detach",
    "index_select",
    "size",
    "dim",
    "squeeze",
    "view",
    "as_subclass",
    "unsqueeze",
)
DIVIDING = ("div", "div_", "__truediv__", "true_divide")


class Scores(NamedTuple):
    """Of a call of a model: what was scored, and how."""

    head: LmHead | None  # none where there are logits after all
    temperature: float
    columns: tuple[int, ...]  # the others are not computed
    framework: str = "TRL"
    masked: tuple[int, ...] = ()  # what its labels are where it masks what is computed of a row

    def unknown(self, name: str) -> RuntimeError:
        door = f"rlkernel.patch_{word(self.framework)}()"
        return RuntimeError(
            f"{self.framework} must do with its logits what {door} knows, got {name}() of them: this trainer "
            "computes something else of logits, and must run without the patch"
        )


class ScoredLogits(torch.Tensor):
    """[..., 5] for logits [..., V]: of each row the log-probability of its label, the entropy, the mean of
    the logits, whether the label is the most likely token, and the label.

    Rows are chosen of it as of logits, and what a trainer computes of logits is looked up.  Anything else
    that it may do with logits has no answer here, and is an error.
    """

    passing: ClassVar[tuple[str, ...]] = PASSING
    computed: ClassVar[Mapping[str, Callable[..., Any]]]  # by name

    scores: Scores
    divided: float  # by what the trainer has divided so far

    @classmethod
    def of(cls, values: Tensor, scores: Scores, divided: float = 1.0) -> Self:
        result = values.as_subclass(cls)
        result.scores, result.divided = scores, divided
        return result

    def column(self, index: int) -> Tensor:
        framework, columns = self.scores.framework, self.scores.columns
        if index not in columns:
            raise RuntimeError(
                f"{framework} must ask for what it was scored for, columns {columns}, got {index}"
            )
        return self.as_subclass(torch.Tensor)[..., index]

    def logprobs(self, index: Tensor, temperature: float = 1.0) -> Tensor:
        """``selective_log_softmax`` of the logits."""
        self.require_temperature(temperature)
        found, wanted = self.column(LABEL).long(), index
        for label in self.scores.masked:
            if index.shape == found.shape:
                wanted = torch.where(index == label, found, wanted)
        if self.scores.head is not None:
            self.scores.head.check_labels(found, wanted, self.scores.framework)
        return self.column(LOGPROB)

    def entropies(self, temperature: float = 1.0) -> Tensor:
        """``entropy_from_logits`` of the logits."""
        self.require_temperature(temperature)
        return self.column(ENTROPY)

    def require_temperature(self, temperature: float) -> None:
        if (found := self.divided * temperature) != self.scores.temperature:
            raise RuntimeError(
                f"{self.scores.framework} must divide its logits by its temperature, "
                f"{self.scores.temperature}, got {found}"
            )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        logits = args[0] if args else None
        if not isinstance(logits, ScoredLogits):
            found = (x for x in _flat(args, kwargs.values()) if isinstance(x, ScoredLogits))
            raise next(found).scores.unknown(name)
        if name in cls.passing:
            return _carried(super().__torch_function__(function, types, args, kwargs), logits)
        if name in DIVIDING:
            divisor = args[1] if len(args) > 1 else kwargs.get("other")
            if not isinstance(divisor, int | float):
                raise logits.scores.unknown(name)
            if name == "div_":
                logits.divided *= divisor
                return logits
            return cls.of(logits.as_subclass(torch.Tensor), logits.scores, logits.divided * divisor)
        if compute := cls.computed.get(name):
            return compute(logits, *args[1:], **kwargs)
        raise logits.scores.unknown(name)


def _flat(*values: Iterable[Any]) -> Iterator[Any]:
    for x in itertools.chain(*values):
        yield from _flat(x) if isinstance(x, tuple | list) else (x,)


def _carried(result: Any, source: ScoredLogits) -> Any:
    """What was chosen of the rows of ``source`` is of the same scores."""
    if isinstance(result, tuple | list):
        return type(result)(_carried(x, source) for x in result)
    if isinstance(result, ScoredLogits):
        result.scores, result.divided = source.scores, source.divided
    return result


def _mean(logits: ScoredLogits, dim: int | None = None) -> Tensor:
    """Of the vocabulary, or of all logits."""
    if dim not in (None, -1, logits.dim() - 1):
        raise logits.scores.unknown(f"mean(dim={dim})")
    logits.require_temperature(1.0)
    means = logits.column(MEAN_LOGIT)
    return means if dim is not None else means.mean()


def _sum(logits: ScoredLogits, dim: int | None = None) -> Tensor:
    """Of the vocabulary."""
    if dim not in (-1, logits.dim() - 1):
        raise logits.scores.unknown(f"sum(dim={dim})")
    assert logits.scores.head is not None  # there are no means without
    return _mean(logits, dim) * logits.scores.head.module.weight.shape[0]


def _argmax(logits: ScoredLogits, dim: int | None = None) -> Tensor:
    """The label where it is the most likely token, else no token at all: it is compared with the label."""
    if dim not in (-1, logits.dim() - 1):
        raise logits.scores.unknown(f"argmax(dim={dim})")
    return torch.where(logits.column(IS_TOP1) != 0, logits.column(LABEL).long(), IGNORED - 1)


def _cross_entropy(logits: ScoredLogits, target: Tensor, **options: Any) -> Tensor:
    """The mean over the rows with a target, which are all of them in DPO's SFT loss, or each row's own."""
    each = options.get("reduction") == "none"
    usual = DEFAULTS | {"reduction": "none"} if each else DEFAULTS
    off = {name: value for name, value in options.items() if value != usual.get(name)}
    if off:
        given = ", ".join(f"{name}={value!r}" for name, value in off.items())
        raise logits.scores.unknown(f"cross_entropy({given})")
    if each:  # 0 where the label is ignored
        return -logits.logprobs(target)
    if IGNORED not in logits.scores.masked:
        return -logits.logprobs(target).mean()
    has = target != IGNORED
    return -(logits.logprobs(target) * has).sum() / has.sum()


DEFAULTS = {"weight": None, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0}


def _nan_to_num(logits: ScoredLogits, nan: float | None = None) -> ScoredLogits:
    """axolotl's, for FP8 models that have NaN under the mask, where nothing is scored.  A token of a
    completion whose logits are NaN has NaN here."""
    return logits


COMPUTED: dict[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "sum": _sum,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
    "nan_to_num": _nan_to_num,
}
ScoredLogits.computed = COMPUTED
