"""What stands where a trainer expects logits, as those of TRL before 1.15: what it would compute of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from rlkernel.integrations.hf.lm_head import IGNORED, LmHead

LOGPROB, ENTROPY, MEAN_LOGIT, IS_TOP1, LABEL = range(5)
COLUMNS = 5
LARGEST = 2**24  # the labels are numbers of fp32 like the others, which has all integers up to here

# what may become of logits on their way: rows are chosen; __get__ is of attributes, as shape and device
PASSING = (
    "__getitem__",
    "__get__",
    "chunk",
    "contiguous",
    "detach",
    "index_select",
    "size",
    "dim",
    "as_subclass",
)
DIVIDING = ("div", "div_", "__truediv__", "true_divide")


class Scores(NamedTuple):
    """Of a call of a model: what was scored, and how."""

    head: LmHead | None  # none where there are logits after all
    temperature: float
    columns: tuple[int, ...]  # the others are not computed


class ScoredLogits(torch.Tensor):
    """[..., 5] for logits [..., V]: of each row the log-probability of its label, the entropy, the mean of
    the logits, whether the label is the most likely token, and the label.

    Rows are chosen of it as of logits, and what the trainer computes of logits is looked up.  Anything
    else that a trainer may do with logits has no answer here, and is an error.
    """

    framework: ClassVar[str] = "TRL"
    door: ClassVar[str] = "rlkernel.patch_trl()"
    passing: ClassVar[tuple[str, ...]] = PASSING
    computed: ClassVar[Mapping[str, Callable[..., Any]]]

    scores: Scores
    divided: float  # by what the trainer has divided so far

    @classmethod
    def of(cls, values: Tensor, scores: Scores, divided: float = 1.0) -> Self:
        result = values.as_subclass(cls)
        result.scores, result.divided = scores, divided
        return result

    def column(self, index: int) -> Tensor:
        if index not in self.scores.columns:
            raise RuntimeError(
                f"{self.framework} must ask for what it was scored for, "
                f"columns {self.scores.columns}, got {index}"
            )
        return self.as_subclass(torch.Tensor)[..., index]

    def logprobs(self, index: Tensor, temperature: float = 1.0) -> Tensor:
        """``selective_log_softmax`` of the logits."""
        self.require_temperature(temperature)
        head = self.scores.head
        if head is not None:
            head.check_labels(self.column(LABEL).long(), index, self.framework)
        return self.column(LOGPROB)

    def entropies(self, temperature: float = 1.0) -> Tensor:
        """``entropy_from_logits`` of the logits."""
        self.require_temperature(temperature)
        return self.column(ENTROPY)

    def require_temperature(self, temperature: float) -> None:
        if (found := self.divided * temperature) != self.scores.temperature:
            raise RuntimeError(
                f"{self.framework} must divide its logits by its temperature, "
                f"{self.scores.temperature}, got {found}"
            )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        logits = args[0] if args else None
        if not isinstance(logits, ScoredLogits):
            raise cls.unknown(name)
        if name in cls.passing:
            return _carried(super().__torch_function__(function, types, args, kwargs), logits)
        if name in DIVIDING:
            divisor = args[1] if len(args) > 1 else kwargs.get("other")
            if not isinstance(divisor, int | float):
                raise cls.unknown(name)
            if name == "div_":
                logits.divided *= divisor
                return logits
            return cls.of(logits.as_subclass(torch.Tensor), logits.scores, logits.divided * divisor)
        if compute := cls.computed.get(name):
            return compute(logits, *args[1:], **kwargs)
        raise cls.unknown(name)

    @classmethod
    def unknown(cls, name: str) -> RuntimeError:
        return RuntimeError(
            f"{cls.framework} must do with its logits what {cls.door} knows, got {name}() of them: this "
            "trainer computes something else of logits, and must run without the patch"
        )


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
        raise logits.unknown(f"mean(dim={dim})")
    logits.require_temperature(1.0)
    means = logits.column(MEAN_LOGIT)
    return means if dim is not None else means.mean()


def _argmax(logits: ScoredLogits, dim: int | None = None) -> Tensor:
    """The label where it is the most likely token, else no token at all: it is compared with the label."""
    if dim not in (-1, logits.dim() - 1):
        raise logits.unknown(f"argmax(dim={dim})")
    return torch.where(logits.column(IS_TOP1) != 0, logits.column(LABEL).long(), IGNORED - 1)


def _cross_entropy(logits: ScoredLogits, target: Tensor, **options: Any) -> Tensor:
    """The mean over all rows, as DPO's SFT loss has it, or each of them, 0 where its label is ignored."""
    each = options.get("reduction") == "none"
    off = {
        name: value
        for name, value in options.items()
        if value != DEFAULTS.get(name) and not (each and name == "reduction")
    }
    if off:
        given = ", ".join(f"{name}={value!r}" for name, value in off.items())
        raise logits.unknown(f"cross_entropy({given})")
    losses = -logits.logprobs(target)
    return losses if each else losses.mean()


DEFAULTS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
COMPUTED: dict[str, Callable[..., Tensor]] = {
    "mean": _mean,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
}
ScoredLogits.computed = COMPUTED
