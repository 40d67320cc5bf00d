"""What stands where a loss of torchtitan expects logits: it has their shape, and what is computed of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

IGNORED = -100  # torchtitan's IGNORE_INDEX

# of the logits themselves, of what softmax and log_softmax make of them, and of products of two of these
Kind = Literal["logits", "log_softmax", "softmax", "softmax * logits", "softmax * log_softmax"]


@dataclass(frozen=True)
class Scores:
    """Of each row of the lm_head, [B, L]: what was scored."""

    labels: Tensor
    logprobs: Tensor
    lse: Tensor
    entropy: Tensor | None

    def of(self, asked: Tensor) -> Tensor:
        """The log-probability of each label that is asked for; 0 where it is ignored."""
        same = asked.data_ptr() == self.labels.data_ptr() and asked.numel() == self.labels.numel()
        if same and asked.is_contiguous() and self.labels.is_contiguous():
            return self.logprobs.reshape(asked.shape)
        # somebody has made labels anew: the look at them waits for the GPU
        known, logprobs = self.labels.reshape(asked.shape), self.logprobs.reshape(asked.shape)
        if not torch.all((asked == known) | (asked == IGNORED)):
            raise ValueError(
                "the labels of FusedLoss's inner loss must be those that it was called with, or "
                f"{IGNORED}, got others"
            )
        return torch.where(asked == IGNORED, logprobs.new_zeros(()), logprobs)


class ScoredLogits(torch.Tensor):
    """Logits [..., V] that nobody has made.

    What ``compute_logprobs`` and ``cross_entropy_loss`` do with logits is answered with what was scored, and
    so is ``log_softmax`` that is gathered at the labels.  Anything else is an error: it has no answer here.
    """

    scores: Scores
    kind: Kind

    @staticmethod
    def __new__(cls, scores: Scores, shape: tuple[int, ...], kind: Kind = "logits") -> ScoredLogits:
        made: ScoredLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=scores.logprobs.device,
            requires_grad=scores.logprobs.requires_grad,
        )  # fmt: skip
        made.scores, made.kind = scores, kind
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScoredLogits({self.kind}, shape={tuple(self.shape)})"

    def become(self, kind: Kind) -> ScoredLogits:
        return ScoredLogits(self.scores, tuple(self.shape), kind)

    def rows(self, values: Tensor) -> Tensor:
        """[B, L] values in the shape of the rows; what a loss computes without gradients has none."""
        values = values.reshape(self.shape[:-1])
        return values if torch.is_grad_enabled() else values.detach()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name == "__get__":  # shape, dtype, device and their like
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        logits = next(x for x in _flat(args, kwargs.values()) if isinstance(x, ScoredLogits))
        answer = ANSWERS.get(name)
        # a product's other factor may come first, no other function's
        if answer is None or not (args and (args[0] is logits or name in PRODUCTS)):
            raise unknown(f"{name}()", logits)
        return answer(logits, function, *args[1:], **kwargs) if name not in PRODUCTS else answer(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise unknown(f"{function}", next(x for x in _flat(args) if isinstance(x, ScoredLogits)))


def unknown(what: str, logits: ScoredLogits) -> RuntimeError:
    return RuntimeError(
        f"the inner loss of FusedLoss must take log-probabilities of labels and entropies from its logits, "
        f"got {what} of their {logits.kind}: rlkernel makes no logits; this loss needs torchtitan's own "
        "ChunkedLossWrapper"
    )


def _flat(*values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        for x in value:
            yield from _flat(x) if isinstance(x, tuple | list) else (x,)


def _last(logits: ScoredLogits, dim: Any, name: str) -> None:
    if dim not in (-1, logits.dim() - 1) and dim not in ([-1], (-1,)):
        raise unknown(f"{name}(dim={dim})", logits)


def _only(logits: ScoredLogits, name: str, *kinds: Kind) -> None:
    if logits.kind not in kinds:
        raise unknown(f"{name}()", logits)


def _same(logits: ScoredLogits, function: Any) -> ScoredLogits:
    """Of ``float()`` and ``contiguous()``."""
    return logits


def _to(logits: ScoredLogits, function: Any, *args: Any, **kwargs: Any) -> ScoredLogits:
    given = (*args, *kwargs.values())
    if given not in ((torch.float32,), (logits.device,), (logits.device, torch.float32)):
        raise unknown(f"to(*{args}, **{kwargs})", logits)
    return logits


def _detach(logits: ScoredLogits, function: Any) -> ScoredLogits:
    scores = logits.scores
    entropy = None if scores.entropy is None else scores.entropy.detach()
    bare = Scores(scores.labels, scores.logprobs.detach(), scores.lse.detach(), entropy)
    return ScoredLogits(bare, tuple(logits.shape), logits.kind)


def _shaped(logits: ScoredLogits, function: Any, *shape: Any) -> ScoredLogits:
    """Of ``view`` and ``reshape``: other rows, with the vocabulary last."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    known, count = math.prod(x for x in sizes if x != -1), logits.shape.numel()
    if -1 in sizes and known and count % known == 0:
        sizes = tuple(count // known if x == -1 else x for x in sizes)
    if not sizes or sizes[-1] != logits.shape[-1] or math.prod(sizes) != count:
        raise unknown(f"{function.__name__}({', '.join(map(str, shape))})", logits)
    return ScoredLogits(logits.scores, sizes, logits.kind)


def _flatten(logits: ScoredLogits, function: Any, start_dim: int = 0, end_dim: int = -1) -> ScoredLogits:
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    if end == logits.dim() - 1 and start != end:
        raise unknown(f"flatten({start_dim}, {end_dim})", logits)
    shape = tuple(logits.shape)
    merged = math.prod(shape[start : end + 1])
    return ScoredLogits(logits.scores, (*shape[:start], merged, *shape[end + 1 :]), logits.kind)


def _cross_entropy(
    logits: ScoredLogits,
    function: Any,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    **options: Any,
) -> Tensor:
    off = {name: value for name, value in options.items() if value not in (None, 0.0)}
    if off or ignore_index != IGNORED or logits.dim() != 2 or target.dim() != 1:
        given = ", ".join(f"{name}={value!r}" for name, value in off.items())
        raise unknown(f"cross_entropy({given}) with ignore_index={ignore_index}", logits)
    _only(logits, "cross_entropy", "logits", "log_softmax")  # of which it is the same
    losses = -logits.rows(logits.scores.of(target))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != IGNORED).sum()


def _softmax(kind: Kind) -> Callable[..., ScoredLogits]:
    def answer(
        logits: ScoredLogits, function: Any, dim: Any = None, dtype: Any = None, _stacklevel: int = 3
    ) -> ScoredLogits:
        _only(logits, function.__name__, "logits")
        _last(logits, dim, function.__name__)
        if dtype not in (None, torch.float32):
            raise unknown(f"{function.__name__}(dtype={dtype})", logits)
        return logits.become(kind)

    return answer


def _gather(logits: ScoredLogits, function: Any, dim: int, index: Tensor) -> Tensor:
    """Of one label a row."""
    _only(logits, "gather", "log_softmax")
    _last(logits, dim, "gather")
    if index.shape != (*logits.shape[:-1], 1):
        raise unknown(f"gather(index={list(index.shape)})", logits)
    asked = index[..., 0]
    return logits.rows(logits.scores.of(asked).masked_fill(asked == IGNORED, 0.0))[..., None]


def _logsumexp(logits: ScoredLogits, function: Any, dim: Any, keepdim: bool = False) -> Tensor:
    _only(logits, "logsumexp", "logits", "log_softmax")
    _last(logits, dim, "logsumexp")
    values = logits.rows(logits.scores.lse)
    values = values if logits.kind == "logits" else torch.zeros_like(values)
    return values[..., None] if keepdim else values


def _product(a: Any, b: Any) -> ScoredLogits:
    """Of which the sum over the vocabulary is an expectation."""
    kinds = {x.kind if isinstance(x, ScoredLogits) else None for x in (a, b)}
    logits = a if isinstance(a, ScoredLogits) else b
    for kind in ("logits", "log_softmax"):
        if kinds == {"softmax", kind} and a.scores is b.scores and a.shape == b.shape:
            product: Any = f"softmax * {kind}"
            return logits.become(product)
    raise unknown(f"mul() with {type(b if logits is a else a).__name__}", logits)


def _sum(logits: ScoredLogits, function: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    _only(logits, "sum", "softmax * logits", "softmax * log_softmax")
    _last(logits, dim, "sum")
    scores = logits.scores
    if scores.entropy is None:
        raise unknown("an entropy that was not computed", logits)
    values = -scores.entropy if logits.kind == "softmax * log_softmax" else scores.lse - scores.entropy
    values = logits.rows(values)
    return values[..., None] if keepdim else values


def _size(logits: ScoredLogits, function: Any, dim: int | None = None) -> Any:
    return logits.shape if dim is None else logits.shape[dim]


PRODUCTS = ("mul", "__mul__", "__rmul__", "multiply")
_BY_NAME: dict[str, Callable[..., Any]] = {
    "float": _same,
    "contiguous": _same,
    "to": _to,
    "detach": _detach,
    "dim": lambda logits, _: len(logits.shape),
    "size": _size,
    "numel": lambda logits, _: logits.shape.numel(),
    "reshape": _shaped,
    "view": _shaped,
    "flatten": _flatten,
    "cross_entropy": _cross_entropy,
    "log_softmax": _softmax("log_softmax"),
    "softmax": _softmax("softmax"),
    "gather": _gather,
    "logsumexp": _logsumexp,
    "sum": _sum,
}
ANSWERS = _BY_NAME | dict.fromkeys(PRODUCTS, _product)
