"""TRL: logprobs and entropies of its trainers through ``rlkernel.linear_logprob`` and ``rlkernel.logprob``.

Since TRL 1.15 trainers score tokens in one place: the fused head of ``trl.trainer.utils`` calls
``_ChunkedLogProbFunction.apply``, a global that is looked up at every call. So the order of imports does not
matter, nor whether a trainer exists already, and a patch may come and go between two steps. Three helpers
that take logits remain for the experimental trainers, which import them by name.  Distillation scores no
tokens: it compares whole distributions of two models, which no op here does, and stays TRL's.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernel.integrations._patch import Patch, PatchError
from rlkernel.integrations._trl_contract import (
    HEAD,
    HEAD_PARAMETERS,
    HELPER_PARAMETERS,
    OUTPUTS,
    checked,
    supported_utils,
)
from rlkernel.ops import logprob as ops
from rlkernel.ops.linear_logprob import linear_logprob_statistics

if TYPE_CHECKING:
    from rlkernel.integrations._trl_prefix import PrefixSharing

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SKIPPED = torch.iinfo(torch.int64).min  # not -100: a negative index stays the error that it is


logger = logging.getLogger("rlkernel.patch_trl")


class TrlPatch(Patch):
    """What :func:`patch` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self) -> None:
        super().__init__("rlkernel.patch_trl")
        self.calls: Counter[str] = Counter()
        """How often rlkernel ran in place of which TRL function."""
        self.fallbacks: Counter[str] = Counter()
        """How often TRL's own function ran after all, and why. Neither counts what torch.compile traces."""
        self.prefix: PrefixSharing | None = None
        """What ``prefix_sharing`` did: ``patch.prefix.tokens``, ``patch.prefix.ratio``."""
        self._told: set[str] = set()

    def apply(self) -> TrlPatch:
        global _active
        if _active is not None and _active is not self and _active.active:
            raise PatchError("no other patch of TRL must be in place, got one: undo it first")
        super().apply()
        _active = self
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if self.prefix is not None:
            self.prefix.models.undo()
        if was_active:
            self._sum_up()

    def count(self, counter: Counter[str], key: str) -> None:
        if not torch.compiler.is_compiling():  # it would guard on the number and compile anew every call
            counter[key] += 1

    def left(self, name: str, reason: str, advice: str = "", quiet: bool = False) -> None:
        """Count a call that TRL's own function serves after all, and warn of its reason once."""
        self.count(self.fallbacks, f"{name}: {reason}")
        if quiet or reason in self._told or torch.compiler.is_compiling():
            return
        self._told.add(reason)
        advice = advice and f" ({advice})"
        warnings.warn(f"rlkernel.patch_trl() leaves {name} to TRL: {reason}{advice}", stacklevel=3)

    def _sum_up(self) -> None:
        ran, left = self.calls.total(), self.fallbacks.total()
        reasons = "".join(f"\n  {times} x {reason}" for reason, times in self.fallbacks.most_common())
        level = logging.WARNING if self._told else logging.INFO
        logger.log(level, "%d calls ran on rlkernel, %d were left to TRL%s", ran, left, reasons)


_active: TrlPatch | None = None


def patch(
    *,
    prefix_sharing: bool | str = False,
    prefix_min_ratio: float | None = None,
    dropout: str = "own",
    strict: bool = True,
) -> TrlPatch:
    """Put rlkernel under TRL's trainers until ``undo()``, or until the end of the ``with`` block.

    A second call while the patch is on returns the same object; a ``with`` over it leaves the patch on.  What
    is left to TRL after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        prefix_sharing: GRPOTrainer and RLOOTrainer compute each prompt once per group, in all their passes,
            and keep groups together when they shuffle.  ``"require"`` makes it an error to leave a batch to
            TRL.
        prefix_min_ratio: leave a batch to TRL that has fewer padded tokens for each row of the packed batch.
        dropout: ``"own"`` leaves a model that draws dropout to TRL, where each sample has a draw of its own.
            ``"shared"`` packs it: one draw for each row, which the samples that share the row share.
        strict: take only the versions of TRL that have been run.  ``False`` takes any whose functions have
            the names and parameters of what is replaced.

    Raises:
        ValueError: an option is not one of its values, or is given without ``prefix_sharing``.
        ImportError: TRL is not installed. PatchError: the version of TRL is not supported, or what is to be
        replaced is not what that version has, or the patch is on with other options.
            Nothing is replaced then.
    """
    _check_options(prefix_sharing, prefix_min_ratio, dropout, strict)
    if _active is not None and _active.active:
        _check_same(_active, prefix_sharing, prefix_min_ratio, dropout)
        _active.share()
        return _active
    utils = supported_utils(strict)
    result = TrlPatch()
    head = checked(utils, HEAD, HEAD_PARAMETERS)
    result.replace(utils, HEAD, _Head(head, result, utils), expected=head)
    for name, make in _HELPERS.items():
        original = checked(utils, name, HELPER_PARAMETERS[name])
        result.replace_everywhere("trl", name, make(original, result), expected=original)
    if prefix_sharing:
        from rlkernel.integrations import _trl_prefix  # imports the trainers, which takes seconds

        result.prefix = _trl_prefix.PrefixSharing(
            result, prefix_min_ratio, required=prefix_sharing == "require", shared_dropout=dropout == "shared"
        )
    return result.apply()


def _check_options(
    prefix_sharing: bool | str, prefix_min_ratio: float | None, dropout: str, strict: bool
) -> None:
    if not isinstance(prefix_sharing, bool) and prefix_sharing != "require":
        raise ValueError(f"prefix_sharing must be True, False or 'require', got {prefix_sharing!r}")
    if dropout not in ("own", "shared"):
        raise ValueError(f"dropout must be 'own' or 'shared', got {dropout!r}")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    if dropout != "own" and not prefix_sharing:
        raise ValueError(f"dropout must be 'own' without prefix_sharing, got {dropout!r}")
    if prefix_min_ratio is None:
        return
    if not prefix_sharing:
        raise ValueError(f"prefix_min_ratio must be None without prefix_sharing, got {prefix_min_ratio!r}")
    if (
        isinstance(prefix_min_ratio, bool)
        or not isinstance(prefix_min_ratio, int | float)
        or not prefix_min_ratio >= 1
    ):
        raise ValueError(f"prefix_min_ratio must be a number >= 1, got {prefix_min_ratio!r}")


def _check_same(
    active: TrlPatch, prefix_sharing: bool | str, prefix_min_ratio: float | None, dropout: str
) -> None:
    """A caller who asks for what the patch in place does not do would believe that it does."""
    if not prefix_sharing:
        return
    prefix = active.prefix
    asked: list[tuple[str, Any, Any]] = []
    if prefix is None or (prefix_sharing == "require" and not prefix.required):
        asked.append(("prefix_sharing", prefix is not None, prefix_sharing))
    elif prefix_min_ratio is not None and prefix.min_ratio != prefix_min_ratio:
        asked.append(("prefix_min_ratio", prefix.min_ratio, prefix_min_ratio))
    elif (dropout == "shared") != prefix.shared_dropout:
        asked.append(("dropout", "shared" if prefix.shared_dropout else "own", dropout))
    for name, found, wanted in asked:
        raise PatchError(f"{name} must be what the patch in place has, {found}, got {wanted}: undo it first")


# The head: hidden states and lm_head to logprobs


class _Head:
    """Stands in for TRL's ``ChunkedLogProbFunction``, of which only ``apply`` is used."""

    def __init__(self, original: Any, patch: TrlPatch, utils: ModuleType) -> None:
        self.original, self.patch, self.utils = original, patch, utils

    def __repr__(self) -> str:
        return "rlkernel.linear_logprob"

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """``(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1)``, None where not asked for."""
        if reason := _head_unsupported(hidden, weight):
            self.patch.left(HEAD, reason)
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size,
                final_logit_softcapping, logit_scale, outputs,
            )  # fmt: skip
        self.patch.count(self.patch.calls, HEAD)
        skipped = self.patch.prefix.unlabelled(len(hidden)) if self.patch.prefix else 0
        with _hidden_dtype(hidden, weight), _gathered_again(self.utils, weight, bias):
            scores = linear_logprob_statistics(
                hidden[skipped:], weight, targets[skipped:], bias=bias, temperature=temperature,
                logit_scale=logit_scale, softcap=final_logit_softcapping, return_entropy="entropy" in outputs,
                statistics=tuple(name for name in OUTPUTS[1:] if name in outputs),
            )  # fmt: skip
        results = (scores.logprobs, *(getattr(scores, name) for name in OUTPUTS))
        if not skipped:
            return results
        return tuple(x if x is None else torch.nn.functional.pad(x, (skipped, 0)) for x in results)


def _head_unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Why this call is left to TRL, or None."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}"
    return None


def _hidden_dtype(hidden: Tensor, weight: Tensor) -> contextlib.AbstractContextManager[Any]:
    """TRL computes in autocast's dtype, else in hidden's; linear_logprob in the wider of both.

    Naming the dtype through autocast spares a converted copy of the head and keeps the head's gradient in its
    dtype.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) or hidden.dtype.itemsize >= weight.dtype.itemsize:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=hidden.dtype)


@contextlib.contextmanager
def _gathered_again(utils: ModuleType, *head: Tensor | None) -> Iterator[None]:
    """Under ZeRO-3, backward finds the head gathered as forward did.

    TRL's fused head gathers the partitioned parameters around forward only, and their memory is gone when
    backward runs. What the op saves of them is replaced by a request to gather them again.
    """
    partitioned = {p.data_ptr(): p for p in head if p is not None and hasattr(p, "ds_status")}
    if not partitioned:
        yield
        return

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        parameter = partitioned.get(saved.data_ptr())
        return saved if parameter is None or parameter.shape != saved.shape else (parameter,)

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with utils.maybe_gather_lm_head_ctx(packed[0]):
            return packed[0].data  # keeps the memory for this backward when the parameter lets go of it

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# The helpers: logits to logprobs


def _log_softmax_helper(original: Callable[..., Tensor], patch: TrlPatch) -> Callable[..., Tensor]:
    def selective_log_softmax(
        logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> Tensor:
        several = row_mask is None and index.ndim == logits.ndim  # several tokens a row
        rows = index[..., 0] if several and index.shape[-1] else index
        if reason := _logits_unsupported(logits, rows, row_mask):
            patch.left("selective_log_softmax", reason)
            return original(logits, index, temperature=temperature, row_mask=row_mask)
        patch.count(patch.calls, "selective_log_softmax")
        if several:
            return ops.selective_log_softmax(logits, index, temperature)
        index = _masked(index, row_mask)
        return ops.logprob(logits, index, temperature=temperature, ignore_index=SKIPPED).logprobs

    return _named(selective_log_softmax)


def _entropy_helper(original: Callable[..., Tensor], patch: TrlPatch) -> Callable[..., Tensor]:
    def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
        if reason := _logits_unsupported(logits):
            patch.left("entropy_from_logits", reason)
            return original(logits, chunk_size=chunk_size)
        patch.count(patch.calls, "entropy_from_logits")
        return ops.entropy_from_logits(logits)

    return _named(entropy_from_logits)


def _log_softmax_and_entropy_helper(
    original: Callable[..., tuple[Tensor, Tensor]], patch: TrlPatch
) -> Callable[..., tuple[Tensor, Tensor]]:
    def selective_log_softmax_and_entropy(
        logits: Tensor,
        index: Tensor,
        entropy_requires_grad: bool = True,
        temperature: float = 1.0,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if reason := _logits_unsupported(logits, index, row_mask):
            patch.left("selective_log_softmax_and_entropy", reason)
            return original(logits, index, entropy_requires_grad, temperature=temperature, row_mask=row_mask)
        patch.count(patch.calls, "selective_log_softmax_and_entropy")
        index = _masked(index, row_mask)
        scores = ops.logprob(
            logits, index, temperature=temperature, ignore_index=SKIPPED, return_entropy=True
        )
        assert scores.entropy is not None
        return scores.logprobs, scores.entropy if entropy_requires_grad else scores.entropy.detach()

    return _named(selective_log_softmax_and_entropy)


_HELPERS: dict[str, Callable[[Any, TrlPatch], Callable[..., Any]]] = {
    "selective_log_softmax": _log_softmax_helper,
    "entropy_from_logits": _entropy_helper,
    "selective_log_softmax_and_entropy": _log_softmax_and_entropy_helper,
}


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__qualname__ = function.__name__  # not "<locals>": the patch shows it
    return function


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index if row_mask is None else index.long().masked_fill(row_mask == 0, SKIPPED)


def _logits_unsupported(
    logits: Tensor, index: Tensor | None = None, row_mask: Tensor | None = None
) -> str | None:
    if logits.dtype not in FLOATS:
        return f"logits are {logits.dtype}"
    if logits.ndim < 2 or logits.shape[-1] == 0:
        return f"logits have shape {tuple(logits.shape)}"
    if index is not None and index.shape != logits.shape[:-1]:
        return "index has neither the rows of logits nor several entries for each"
    if index is not None and index.dtype not in (torch.int32, torch.int64):
        return f"index is {index.dtype}"
    if row_mask is not None and row_mask.shape != logits.shape[:-1]:
        return "row_mask does not have the rows of logits"
    return None
