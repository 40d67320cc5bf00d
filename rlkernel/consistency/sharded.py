"""What the level "tensor_parallel" replaces beside the rest: linear layers, whose sums become one tree, and
reductions over ranks, which are refused.

A product cannot know what it is a part of.  A linear layer has its sums cut into the same segments wherever
it runs: one that is whole has all of them; the layers of ``rlkernel.tensor_parallel`` say which are theirs.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.consistency.aten_call import BACKENDS, Refused, is_exact, need_floats, used
from rlkernel.drivers.rank_tree import segments_of
from rlkernel.ops.matmul import matmul
from rlkernel.runtime import invariance
from rlkernel.types import Backend

LEVEL = "tensor_parallel"
REDUCTIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "inference_all_reduce",
)  # fmt: skip
FREE = ("max", "min")  # of which any order gives the same
REFUSAL = "must be one of integers, or a maximum, inside rlkernel.batch_invariant(level='tensor_parallel')"
FOREIGN = (
    "a library adds up the ranks' parts in an order of its own, of parts that are no nodes of one tree: "
    "layers that torch's or transformers' plans, Megatron, vLLM or DeepSpeed's AutoTP cut need the styles of "
    "rlkernel.tensor_parallel; other reductions belong outside the block"
)


def is_on() -> bool:
    """Whether the innermost block is of this level."""
    return bool(invariance.settings) and invariance.settings[-1].level == LEVEL


def linear(original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_exact(x):
        return original(x, weight, bias)
    for parameter in (x, weight):
        if type(parameter) not in (Tensor, torch.nn.Parameter):
            kind = type(parameter).__name__
            raise Refused(
                f"its operands must be whole tensors, got a {kind}; cut layers by rlkernel.tensor_parallel"
            )
    need_floats(x, weight)
    found = dispatch.able("matmul", BACKENDS, x, weight)
    if found is None:
        raise Refused(f"no backend of rlkernel.matmul takes {x.dtype} on {x.device.type}")
    used.backend = found[0]
    flat = x[None] if x.dim() == 1 else x
    columns, inner = weight.shape
    with dispatch.use_backend(cast(Backend, found[0])):
        out = matmul(flat, weight.t(), bias, segments=segments_of(inner), grad_segments=segments_of(columns))
    return out[0] if x.dim() == 1 else out


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of torch.distributed, which adds up what the ranks have.

    It is replaced as an attribute, and not in the dispatcher, from where Python would call a backend without
    letting go of the interpreter's lock, for which the backend's threads may wait.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in tensors)
        given = [kwargs.get("op"), kwargs.get("reduceOp"), *args]
        said = [x if isinstance(x, str) else getattr(x, "name", None) for x in given if x is not None]
        free = any(isinstance(x, str) and x.lower() in FREE for x in said)
        # gradients that ranks of other data share follow the batch as they must; autograd asks for these
        backward = torch._C._current_graph_task_id() != -1
        if floats and not free and not backward and is_on():
            if invariance.settings[-1].strict:
                raise RuntimeError(f"{name} {REFUSAL}, got a sum of floating-point numbers: {FOREIGN}")
            invariance.count(name, "torch, not invariant")
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    kept: list[tuple[Any, str, Any]] = []
    try:
        for module, name in _reductions():
            function = getattr(module, name)
            kept.append((module, name, function))
            setattr(module, name, _refusing(name, function))
        yield
    finally:
        for module, name, function in reversed(kept):
            setattr(module, name, function)


def _reductions() -> list[tuple[Any, str]]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed import _functional_collectives, distributed_c10d

    # DeepSpeed's own reduction between the processes of a machine does not pass through torch's
    deepspeed = [
        sys.modules[name] for name in ("deepspeed.comm", "deepspeed.comm.comm") if name in sys.modules
    ]
    modules = (torch.distributed, distributed_c10d, _functional_collectives, *deepspeed)
    return [(module, name) for module in modules for name in REDUCTIONS if hasattr(module, name)]
