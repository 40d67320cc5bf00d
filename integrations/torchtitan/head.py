"""The lm_head of a torchtitan model, which scores labels where it would have made logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlkernel.calls.logprob import LogprobOutput
from rlkernel.integrations._forward import forward_replaced
from rlkernel.integrations.torchtitan import ranks
from rlkernel.ops.linear_logprob import linear_logprob

# what is an lm_head there beside a Linear: each adds something to it, which is known here
CAST = "torchtitan.experiments.rl.models.cast_linear.CastLinear"
CAPPED = "torchtitan.models.muse_glimmer.model.SoftCappedLinear"

ADVICE = "torchtitan's own ChunkedLossWrapper takes it"


def checked(module: nn.Module) -> nn.Module:
    """The lm_head, whose ``forward`` must be a known one.

    Raises:
        ValueError: it is another.
    """
    if not isinstance(module, nn.Linear):
        raise ValueError(f"lm_head must be a torch.nn.Linear, got {_name(type(module))}: {ADVICE}")
    home = _home(type(module))
    known = home is nn.Linear or _name(home) in (CAST, CAPPED)
    # a model that has been parallelized redistributes around it, which does nothing on one rank of "tp"
    if not known or ("forward" in vars(module) and not getattr(module, "_parallelized", False)):
        raise ValueError(
            f"lm_head must be a Linear, CastLinear or SoftCappedLinear as torchtitan has them, got "
            f"{_name(type(module))} with a forward of its own: {ADVICE}"
        )
    return module


def scored(module: nn.Module, hidden: Tensor, labels: Tensor, *, return_entropy: bool) -> LogprobOutput:
    """One call of the module, so that FSDP gathers its weight and reduces its gradient as for any other."""

    def forward(entered: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(_score(module, entered, labels, return_entropy))

    with forward_replaced(module, forward):
        return LogprobOutput(*module(hidden))


def _score(module: Any, hidden: Tensor, labels: Tensor, return_entropy: bool) -> LogprobOutput:
    weight, bias = module.weight, module.bias
    hidden, options = ranks.local(module, hidden)
    name = _name(_home(type(module)))
    if name == CAST:
        hidden, weight = hidden.to(module.compute_dtype), weight.to(module.compute_dtype)
        bias = None if bias is None else bias.to(module.compute_dtype)
    elif name == CAPPED:
        options |= {"logit_scale": module.output_multiplier, "softcap": module.output_soft_cap_temp}
    return linear_logprob(hidden, weight, labels, bias=bias, return_entropy=return_entropy, **options)


def _home(kind: type) -> type:
    """The class that has the ``forward`` of another."""
    return next(x for x in kind.__mro__ if "forward" in vars(x))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
