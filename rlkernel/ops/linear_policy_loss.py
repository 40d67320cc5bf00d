"""From hidden states to a policy loss and its gradients, with each logit computed once."""

import functools
import logging
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from rlkernel import dispatch
from rlkernel.calls.linear_policy_loss import (
    LinearPolicyLossCall,
    LinearPolicyLossOutput,
    LinearPolicyLossResults,
)
from rlkernel.calls.policy_loss import LEVELS, POLICY_METRICS, PolicyRule
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._options import HandedOn, LinearPolicyLossOptions
from rlkernel.ops._typed import typed
from rlkernel.ops.linear_logprob import checked_head, checked_ids, linear_logprob
from rlkernel.ops.policy_loss import DEFAULTS, policy_loss
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.ops.policy_loss.inputs import check_values, checked
from rlkernel.ops.policy_loss.rollout_correction import within_second_moment
from rlkernel.runtime import debug, ranges
from rlkernel.runtime.modes import without_autocast
from rlkernel.types import LinearPolicyAlgorithm

ALGORITHMS = ("auto", "one_pass", "two_pass", "fused")

_log = logging.getLogger("rlkernel")

# what rows outside of the mask have as target: no number that a caller could mean
_OUTSIDE = torch.iinfo(torch.int64).min


@overload
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    return_entropy: Literal[True],
    **options: Unpack[LinearPolicyLossOptions],
) -> LinearPolicyLossOutput[Tensor]: ...


@overload
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    return_entropy: bool = False,
    **options: Unpack[LinearPolicyLossOptions],
) -> LinearPolicyLossOutput: ...


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
    algorithm: LinearPolicyAlgorithm = "auto",
    cu_seqlens: Tensor | None = None,
    **options: Unpack[HandedOn],
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
        algorithm: "one_pass": three GEMMs or an error; "two_pass": four; "auto": one pass where it can;
            "fused": four, in the kernels and with the bits of ``linear_logprob(algorithm="fused")``.
        options: every other keyword of ``policy_loss``.

    Returns:
        LinearPolicyLossOutput: ``loss``, ``metrics``, and the constants ``logprobs`` and ``entropy``.

    Raises:
        ValueError: as ``linear_logprob`` and ``policy_loss``; "one_pass" is not possible, with the reason.

    Follows Liger's ``LigerFusedLinearGRPOLoss``, which computes gradients in forward too.

    Examples:
        >>> hidden, lm_head = torch.randn(1, 4, 16, requires_grad=True), torch.randn(100, 16)
        >>> ids, advantages, mask = torch.tensor([[7, 0, 99, 3]]), torch.ones(1), torch.ones(1, 4)
        >>> out = rlkernel.linear_policy_loss(hidden, lm_head, ids, None, advantages, mask)
        >>> out.loss.backward()
        >>> hidden.grad.shape
        torch.Size([1, 4, 16])
    """
    if isinstance(hidden, Tensor):
        want, dims = ("[N, H] with cu_seqlens", 2) if cu_seqlens is not None else ("[B, L, H]", 3)
        if hidden.dim() != dims:
            want += "" if cu_seqlens is not None else ", or [N, H] with cu_seqlens"
            raise ValueError(f"hidden must be {want}, got {tuple(hidden.shape)}")
    head = checked_head(
        hidden, weight, bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        ignore_index=_OUTSIDE, logits_dtype=logits_dtype,
    )  # fmt: skip
    target_ids = checked_ids(target_ids, hidden)
    _validate.choice("algorithm", algorithm, ALGORITHMS)
    for name in options:
        if name not in DEFAULTS or name == "entropy":
            known = ", ".join(sorted(set(DEFAULTS) - {"entropy"}))
            raise ValueError(f"options must be among those of policy_loss ({known}), got {name!r}")
    dtype = torch.promote_types(head.compute_dtype, torch.float32)
    shape = target_ids.shape
    like = torch.zeros(shape, dtype=dtype, device=hidden.device)
    given: dict[str, Any] = {**DEFAULTS, **options, "entropy_coef": entropy_coef, "cu_seqlens": cu_seqlens}
    given["entropy"] = like if entropy_coef else None
    policy, items = checked(like, old_logprobs, advantages, mask, **given)
    kept, rule = policy.mask, policy.rule
    if given["correction"] is not None:
        policy = within_second_moment(policy, given["correction"])
    if items is not None:
        items = items.to(like)

    reach = _reach(given["loss_type"], rule)
    if reach == "batch":
        if algorithm == "one_pass":
            reason = "the loss needs the logprobs of the whole batch"
            raise ValueError(f"algorithm must be 'auto' or 'two_pass' here, got 'one_pass': {reason}")
        if not torch.compiler.is_compiling():
            _log.debug("linear_policy_loss in two passes: the loss needs the logprobs of the whole batch")
        ids = torch.where(kept, target_ids, _OUTSIDE)
        has_entropy = return_entropy or bool(entropy_coef)
        with ranges.of("linear_policy_loss"):
            own = linear_logprob(
                hidden, weight, ids, bias=bias, temperature=temperature, logit_scale=logit_scale,
                softcap=softcap, ignore_index=_OUTSIDE, return_entropy=has_entropy, logits_dtype=logits_dtype,
                algorithm="fused" if algorithm == "fused" else "tiled",
            )  # fmt: skip
            given["entropy"] = own.entropy
            loss, metrics = policy_loss(own.logprobs, old_logprobs, advantages, mask, **given)
        entropy = None if own.entropy is None else own.entropy.detach()
        return LinearPolicyLossOutput(loss, metrics, own.logprobs.detach(), entropy)

    wanted = torch.is_grad_enabled()
    needs = tuple(wanted and x is not None and x.requires_grad for x in (hidden, weight, bias))
    call = LinearPolicyLossCall(
        hidden=hidden.reshape(-1, hidden.shape[-1]), weight=weight,
        target_ids=torch.where(kept, target_ids, _OUTSIDE).reshape(-1), **head._asdict(),
        policy=policy._replace(entropy_gradient=rule.entropy_coef != 0), items=items, reach=reach,
        return_entropy=return_entropy, algorithm=algorithm, weight_dtype=weight.dtype, needs=needs,
    )  # fmt: skip
    loss, metrics, logprobs, entropy = op(call)
    return LinearPolicyLossOutput(
        loss, metrics, logprobs.view(shape), None if entropy is None else entropy.view(shape)
    )


def _reach(loss_type: str, rule: PolicyRule) -> str:
    """Whose logprobs the derivative of a token needs: those of its "token", its "sequence" or the "batch"."""
    others = any(
        x != y
        for name, x, y in zip(rule._fields, rule, _PLAIN, strict=True)
        if name not in policy_rule.REACH_KNOWS
    )
    if others or loss_type not in policy_rule.REACH:
        return "batch"
    return policy_rule.REACH[loss_type] if LEVELS[rule.level] == "token" else "sequence"


_PLAIN = policy_rule.build(**DEFAULTS)


def _pick(call: LinearPolicyLossCall) -> ModuleType:
    options = {"compute_dtype": call.compute_dtype, "algorithm": call.algorithm}
    return dispatch.pick("linear_policy_loss", call.hidden, call.weight, **options)


def _forward(impl: ModuleType, call: LinearPolicyLossCall) -> LinearPolicyLossResults:
    _validate.values(call.target_ids, call.weight.shape[0], call.temperature, call.ignore_index)
    check_values(call.policy)
    with torch.no_grad(), without_autocast(call.hidden.device):
        results = impl.forward(call)
    if debug.enabled() and debug.may_read(results.logprobs):
        bad = ~(results.logprobs.isfinite() | results.logprobs.isneginf())  # which is outside of the support
        if bad.any():
            where = bad.nonzero()[0].tolist()
            got = results.logprobs[tuple(where)].item()
            raise ValueError(f"hidden{where} must give a logprob that is a number, got {got}")
    if call.narrow:
        grad = _times(None, results.grad_weight, call.weight_dtype, own=True)
        results = results._replace(grad_weight=grad)
    return results


def _backward(
    impl: Any, call: LinearPolicyLossCall, results: LinearPolicyLossResults, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of forward times the upstream number."""
    factor = grads[0]
    assert factor is not None
    if call.narrow:
        return tuple(None if g is None else (g * factor).to(g.dtype) for g in results.grads)
    on_cpu = factor.device.type == "cpu"  # elsewhere a look at it would synchronise
    times = functools.partial(_times, None if on_cpu and factor == 1 else factor, own=not _graph_is_kept())
    hidden, weight, bias = results.grads
    return times(hidden), times(weight, call.weight_dtype), times(bias)


def _like(call: LinearPolicyLossCall) -> LinearPolicyLossResults:
    dtype = torch.promote_types(call.compute_dtype, torch.float32)
    new = functools.partial(torch.empty, dtype=dtype, device=call.hidden.device)
    count = call.target_ids.shape[0]
    grads = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need and x is not None else None
        for x, need in zip((call.hidden, call.weight, call.bias), call.needs, strict=True)
    )
    entropy = new(count) if call.with_entropy else None
    return LinearPolicyLossResults(new(()), new(len(POLICY_METRICS)), new(count), entropy, *grads)


def _graph_is_kept() -> bool:
    """Whether this backward pass leaves the saved tensors to another one; True where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or bool(tell())


def _times(
    factor: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None = None, *, own: bool
) -> Tensor | None:
    """``factor * grad`` in ``dtype`` or its own; None as factor is 1; in the same memory if it is ``own``."""
    if grad is None:
        return None
    dtype = dtype or grad.dtype
    if own and grad.dtype == dtype:
        return grad if factor is None else grad.mul_(factor.to(dtype))
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    rows = max(1, 2**20 // max(grad[0].numel(), 1)) if len(grad) else 1
    for wide, narrow in zip(grad.split(rows), out.split(rows), strict=True):  # no second tensor in fp32
        narrow.copy_(wide if factor is None else wide * factor.to(wide.dtype))
    return out


op = Op(
    "linear_policy_loss",
    LinearPolicyLossCall,
    LinearPolicyLossResults,
    outputs=4,
    pick=_pick,
    forward=_forward,
    backward=_backward,
    like=_like,
    gradients=("hidden", "weight", "bias"),
    differentiable=("loss",),
    saves=("grad_hidden", "grad_weight", "grad_bias"),
    traced=True,
    in_node={"narrow": True},
)
