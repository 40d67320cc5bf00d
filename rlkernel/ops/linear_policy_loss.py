"""From hidden states to a policy loss and its gradients, with each logit computed once."""

import functools
import inspect
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import debug, dispatch
from rlkernel.calls.linear_logprob import Head
from rlkernel.ops import _policy_rule, _validate
from rlkernel.ops._policy_inputs import check_values, checked, counted
from rlkernel.ops._typed import typed
from rlkernel.ops.linear_logprob import checked_head, linear_logprob
from rlkernel.ops.policy_loss import policy_loss
from rlkernel.runtime.modes import anchor, once_differentiable, without_autocast
from rlkernel.types import (
    LEVELS,
    POLICY_METRICS,
    LinearPolicy,
    LinearPolicyLossOutput,
    LinearPolicyStats,
    PolicyRule,
)

ALGORITHMS = ("auto", "one_pass", "two_pass")

_log = logging.getLogger("rlkernel")

# what rows outside of the mask have as target: no number that a caller could mean
_OUTSIDE = torch.iinfo(torch.int64).min
_parameters = inspect.signature(policy_loss).parameters.values()
_DEFAULTS = {p.name: p.default for p in _parameters if p.kind is p.KEYWORD_ONLY}
_TENSORS = {name: _DEFAULTS[name] for name in inspect.signature(checked).parameters if name in _DEFAULTS}
_CHOICES = {
    name: _DEFAULTS[name]
    for name in inspect.signature(_policy_rule.build).parameters
    if name in _DEFAULTS and name not in _TENSORS
}


@functools.partial(typed, options=policy_loss)
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy_coef: float = 0.0,
    return_entropy: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    algorithm: str = "auto",
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> LinearPolicyLossOutput:
    """A policy loss and its gradients from hidden states and the lm_head; each logit is computed once.

    Equal to

        out = linear_logprob(hidden, weight, target_ids, bias=bias, ..., return_entropy=True)
        policy_loss(out.logprobs, old_logprobs, advantages, mask, entropy=out.entropy, ..., **options)

    The logits of a chunk of rows stay in the workspace until the loss's derivative of these rows is known,
    and become their gradient in place.  So the logits are not computed again in backward, which multiplies
    the gradients by the upstream number: three GEMMs instead of four.  Rows outside of the mask cost nothing;
    on a CPU, rows whose derivative is exactly 0 cost one GEMM of three.

    Where the workspace does not hold a chunk of rows that pays (for a ratio of sequences: of whole
    sequences), or a loss needs the logprobs of the whole batch, the call makes two passes with four GEMMs,
    with a frozen head two.  ``logging.getLogger("rlkernel")`` says which, at level DEBUG.

    The logprobs have the bits that ``linear_logprob`` gives on the same backend with the rows outside of the
    mask ignored, with and without gradients, and the same call gives the same bits.

    Args:
        hidden: [B, L, H], or [N, H] with ``cu_seqlens``; fp16, bf16, fp32 or fp64.
        weight: [V, H]; as in ``linear_logprob``, also the other arguments of the head.
        target_ids: [B, L] or [N] integers, in [0, V) where the mask is set.
        old_logprobs: as ``target_ids``, of the policy that the step started from; None: this one.
        advantages: one for each token or one for each sequence.
        mask: as ``target_ids``, nonzero where a token counts.
        entropy_coef: factor of the entropy bonus, which has its gradient.
        return_entropy: also return the entropy when it is not part of the loss.
        algorithm: "one_pass": three GEMMs or an error; "two_pass": four; "auto": one pass where it can.
        options: every other keyword of ``policy_loss``.

    Returns:
        LinearPolicyLossOutput: ``loss``, ``metrics``, and the constants ``logprobs`` and ``entropy``.

    Raises:
        ValueError: as ``linear_logprob`` and ``policy_loss``; "one_pass" is not possible, with the reason.

    Follows Liger's ``LigerFusedLinearGRPOLoss``, which computes gradients in forward too.
    """
    if isinstance(hidden, Tensor):
        want, dims = ("[N, H] with cu_seqlens", 2) if cu_seqlens is not None else ("[B, L, H]", 3)
        if hidden.dim() != dims:
            want += "" if cu_seqlens is not None else ", or [N, H] with cu_seqlens"
            raise ValueError(f"hidden must be {want}, got {tuple(hidden.shape)}")
    target_ids, head = checked_head(
        hidden, weight, target_ids, bias, temperature, logit_scale, softcap, _OUTSIDE, logits_dtype
    )
    _validate.choice("algorithm", algorithm, ALGORITHMS)
    for name in options:
        if name not in _DEFAULTS or name == "entropy":
            known = ", ".join(sorted(set(_DEFAULTS) - {"entropy"}))
            raise ValueError(f"options must be among those of policy_loss ({known}), got {name!r}")
    dtype = torch.promote_types(head.compute_dtype, torch.float32)
    shape = target_ids.shape
    like = torch.zeros(shape, dtype=dtype, device=hidden.device)
    given = options | {"entropy_coef": entropy_coef, "cu_seqlens": cu_seqlens}
    given["entropy"] = like if entropy_coef else None
    choices = {name: given.get(name, x) for name, x in _CHOICES.items()}
    others = {name: given.get(name, x) for name, x in _TENSORS.items()}
    _, tensors, rule, items = checked(like, old_logprobs, advantages, mask, choices, **others)
    kept = tensors[2]
    assert kept is not None
    if choices["correction"] is not None:
        tensors = counted(tensors, choices["correction"])
    if items is not None:
        items = items.to(like)

    reach = _reach(options.get("loss_type", _DEFAULTS["loss_type"]), rule)
    if reach == "batch":
        if algorithm == "one_pass":
            reason = "the loss needs the logprobs of the whole batch"
            raise ValueError(f"algorithm must be 'auto' or 'two_pass' here, got 'one_pass': {reason}")
        _log.debug("linear_policy_loss in two passes: the loss needs the logprobs of the whole batch")
        ids = torch.where(kept, target_ids, _OUTSIDE)
        has_entropy = return_entropy or bool(entropy_coef)
        own = linear_logprob(
            hidden, weight, ids, bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
            ignore_index=_OUTSIDE, return_entropy=has_entropy, logits_dtype=logits_dtype, algorithm="tiled",
        )  # fmt: skip
        given["entropy"] = own.entropy
        loss, metrics = policy_loss(own.logprobs, old_logprobs, advantages, mask, **given)
        entropy = None if own.entropy is None else own.entropy.detach()
        return LinearPolicyLossOutput(loss, metrics, own.logprobs.detach(), entropy)

    wanted = torch.is_grad_enabled()
    needs = [wanted and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    flat = hidden.reshape(-1, hidden.shape[-1])
    ids = torch.where(kept, target_ids, _OUTSIDE).reshape(-1)
    if torch.compiler.is_compiling():
        per_row = head.temperature if isinstance(head.temperature, Tensor) else None
        number = head.temperature if per_row is None else 1.0
        scale, cap, dtypes = head.logit_scale, head.softcap, (head.logits_dtype, head.compute_dtype)
        outputs = _op(
            flat, weight, bias, ids, per_row, number, scale, cap, *dtypes, list(tensors), items,
            [float(x) for x in rule], reach, return_entropy, algorithm, needs,
        )[:4]  # fmt: skip
    else:
        outputs = _LinearPolicyLoss.apply(
            flat, weight, bias, ids, head, tensors, rule, items, reach, return_entropy, algorithm, needs
        )[:4]
    loss, metrics, logprobs, entropy = outputs
    has_entropy = return_entropy or rule.entropy_coef != 0
    return LinearPolicyLossOutput(
        loss, metrics, logprobs.view(shape), entropy.view(shape) if has_entropy else None
    )


def _reach(loss_type: str, rule: PolicyRule) -> str:
    """Whose logprobs the derivative of a token needs: those of its "token", its "sequence" or the "batch"."""
    others = any(
        x != y
        for name, x, y in zip(rule._fields, rule, _PLAIN, strict=True)
        if name not in _policy_rule.REACH_KNOWS
    )
    if others or loss_type not in _policy_rule.REACH:
        return "batch"
    return _policy_rule.REACH[loss_type] if LEVELS[rule.level] == "token" else "sequence"


def _plain_rule() -> PolicyRule:
    """The rule of ``policy_loss`` without any option."""
    names = inspect.signature(_policy_rule.build).parameters
    absent = {name: False for name in names if name.startswith("has_")} | {"length": 1}
    given = {name: _DEFAULTS[name] for name in names if name in _DEFAULTS}
    return _policy_rule.build(**{name: False for name in names} | given | absent)


_PLAIN = _plain_rule()


def _pick(hidden: Tensor, weight: Tensor, head: Head, algorithm: str) -> ModuleType:
    options = {"compute_dtype": head.compute_dtype, "algorithm": algorithm}
    return dispatch.pick("linear_policy_loss", hidden, weight, **options)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    tensors: Sequence[Tensor | None],
    rule: PolicyRule,
    items: Tensor | None,
    reach: str,
    return_entropy: bool,
    algorithm: str,
    needs: Sequence[bool],
) -> LinearPolicyStats:
    impl = _pick(hidden, weight, head, algorithm)
    _validate.values(target_ids, weight.shape[0], head.temperature, _OUTSIDE)
    advantages, mask, cu_seqlens = tensors[1:4]
    assert advantages is not None and mask is not None
    check_values(advantages, mask, cu_seqlens)
    policy = LinearPolicy(tuple(tensors), rule, items, reach, return_entropy)
    with torch.no_grad(), without_autocast(hidden.device):
        stats = impl.forward(
            hidden, weight, target_ids, head, policy, algorithm, (needs[0], needs[1], needs[2])
        )
    if debug.enabled() and debug.may_read(stats[2]):
        bad = ~(stats[2].isfinite() | stats[2].isneginf())  # which is outside of the support
        if bad.any():
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"hidden{where} must give a logprob that is a number, got {stats[2][tuple(where)].item()}"
            )
    return stats


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any,
        hidden,
        weight,
        bias,
        target_ids,
        head,
        tensors,
        rule,
        items,
        reach,
        return_entropy,
        algorithm,
        needs,
    ):
        stats = _forward(
            hidden, weight, target_ids, head, tensors, rule, items, reach, return_entropy, algorithm, needs
        )
        loss, metrics, logprobs, entropy, *grads = stats
        graph = anchor(loss)
        ctx.save_for_backward(*grads, graph)
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(*(x for x in (metrics, logprobs, entropy) if x is not None))
        return loss, metrics, logprobs, entropy, graph

    @staticmethod
    @once_differentiable("linear_policy_loss")
    def backward(ctx: Any, grad_loss, *_):  # type: ignore[no-untyped-def]
        on_cpu = grad_loss.device.type == "cpu"  # elsewhere a look at it would synchronise
        factor = None if on_cpu and grad_loss == 1 else grad_loss
        times = functools.partial(_times, factor, own=not _graph_is_kept())
        *grads, _ = ctx.saved_tensors
        return *map(times, grads, ctx.dtypes), *(None,) * 9


def _graph_is_kept() -> bool:
    """Whether this backward pass leaves the saved tensors to another one; True where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or bool(tell())


def _times(factor: Tensor | None, grad: Tensor | None, dtype: torch.dtype, own: bool) -> Tensor | None:
    """``factor * grad`` in ``dtype``, None as factor is 1; in the same memory where it is ``own``."""
    if grad is None:
        return None
    if own and grad.dtype == dtype:
        return grad if factor is None else grad.mul_(factor.to(dtype))
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    rows = max(1, 2**20 // max(grad[0].numel(), 1)) if len(grad) else 1
    for some, narrow in zip(grad.split(rows), out.split(rows), strict=True):  # no second tensor in fp32
        narrow.copy_(some if factor is None else some * factor.to(some.dtype))
    return out


# Under torch.compile the op is one opaque node: what is absent is an empty tensor, a rule its numbers.


@torch.library.custom_op("rlkernel::linear_policy_loss", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    tensors: Sequence[Tensor | None],
    items: Tensor | None,
    rule: Sequence[float],
    reach: str,
    return_entropy: bool,
    algorithm: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    t = temperature if temperatures is None else temperatures
    head = Head(bias, t, logit_scale, softcap, _OUTSIDE, logits_dtype, compute_dtype)
    kinds = PolicyRule.__annotations__.values()
    numbers = PolicyRule(*(kind(x) for kind, x in zip(kinds, rule, strict=True)))
    stats = _forward(
        hidden, weight, target_ids, head, tensors, numbers, items, reach, return_entropy, algorithm, needs
    )
    dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    grads = (_times(None, g, dtype, own=True) for g, dtype in zip(stats[4:], dtypes, strict=True))
    return tuple(stats[0].new_empty(0) if x is None else x for x in (*stats[:4], *grads))  # type: ignore[return-value]


@_op.register_fake
def _op_fake(hidden, weight, bias, target_ids, *rest):  # type: ignore[no-untyped-def]
    compute_dtype, (_, _, rule, _, return_entropy, _, needs) = rest[5], rest[6:]
    dtype = torch.promote_types(compute_dtype, torch.float32)
    coefficient = rule[PolicyRule._fields.index("entropy_coef")]

    def new(*shape: Any) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=hidden.device)

    count = target_ids.shape[0]
    grads = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need and x is not None else new(0)
        for x, need in zip((hidden, weight, bias), needs, strict=True)
    )
    entropy = new(count if return_entropy or coefficient else 0)
    return new(()), new(len(POLICY_METRICS)), new(count), entropy, *grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[4:], *inputs[:3])
    ctx.mark_non_differentiable(*output[1:])
    tensors, ctx.needs = inputs[-7], inputs[-1]
    # autograd takes a list apart where it holds tensors alone, and wants as many gradients
    ctx.tensors = None if any(x is None for x in tensors) else [None] * len(tensors)


@once_differentiable("linear_policy_loss")
def _autograd(ctx: Any, grad_loss, *unused):  # type: ignore[no-untyped-def]
    grads = (
        (g * grad_loss).to(g.dtype) if need else None
        for g, need in zip(ctx.saved_tensors[:3], ctx.needs, strict=True)
    )
    return *grads, *(None,) * 7, ctx.tensors, *(None,) * 6


_op.register_autograd(_autograd, setup_context=_setup_context)
