"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``, and plans of whole models."""

import abc
import copy
import fnmatch
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from rlkernel.drivers.rank_tree import SEGMENTS
from rlkernel.tensor_parallel import functional

RANKS = (1, 2, 4, 8)


class _Style(ParallelStyle):
    """``dims`` names the parameters that are cut, and along what; others are on every rank."""

    of: type[nn.Module] = nn.Linear
    dims: dict[str, int] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if device_mesh.ndim != 1 or device_mesh.size() not in RANKS:
            raise ValueError(f"device_mesh must be one dimension of 1, 2, 4 or 8 ranks, got {device_mesh}")
        if not isinstance(module, self.of) or type(module).forward is not self.of.forward:
            raise ValueError(
                f"{name} must be given a torch.nn.{self.of.__name__}, got {type(module).__name__}"
            )
        self._check(module)
        for field, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, field, self._cut(parameter, self.dims.get(field), device_mesh))
        _install(module, functools.partial(self._forward, module, device_mesh.get_group()))
        return module

    def _cut(self, parameter: nn.Parameter, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            raise ValueError("the parameters of a layer that is cut must be whole tensors, got a DTensor")
        known = getattr(parameter, "_rlkernel_cut", None)  # by the other layer that it is tied to
        if known is not None and known[:2] == (mesh, dim):
            return known[2]
        place = Replicate() if dim is None else Shard(dim)
        part = distribute_tensor(parameter.data, mesh, [place], src_data_rank=self.src_data_rank)
        found = nn.Parameter(part, parameter.requires_grad)
        parameter._rlkernel_cut = (mesh, dim, found)  # type: ignore[attr-defined]
        return found

    @abc.abstractmethod
    def _check(self, module: Any) -> None:
        """Raises ValueError where the module cannot be cut evenly."""

    @abc.abstractmethod
    def _forward(self, module: Any, group: dist.ProcessGroup, *inputs: Any) -> Tensor:
        """What the module computes of its own part."""


class RowwiseParallel(_Style):
    """The inputs of a torch.nn.Linear are shared out, and every rank gets its outputs.

    As torch's style of that name, but for its sum, which is ``row_parallel_linear``'s.  Parameters become
    DTensors.
    """

    dims = {"weight": 1}

    def _check(self, module: nn.Linear) -> None:
        _check_divisible(self, "in_features", module.in_features)

    def _forward(self, module: nn.Linear, group: dist.ProcessGroup, *inputs: Any) -> Tensor:
        (x,) = inputs
        weight, bias = local(module.weight), local(module.bias)
        return functional.row_parallel_linear(x, weight, bias, group)


class ColwiseParallel(_Style):
    """The outputs of a torch.nn.Linear are shared out.

    As torch's style of that name, but for the sum of its inputs' gradient, which is
    ``column_parallel_linear``'s.  Parameters become DTensors.

    Args:
        gather_output: give every rank all outputs, as an lm_head's logits that a loss takes whole.
    """

    dims = {"weight": 0, "bias": 0}

    def __init__(self, *, gather_output: bool = False) -> None:
        super().__init__()
        self.gather_output = gather_output

    def _check(self, module: nn.Linear) -> None:
        _check_divisible(self, "out_features", module.out_features)

    def _forward(self, module: nn.Linear, group: dist.ProcessGroup, *inputs: Any) -> Tensor:
        (x,) = inputs
        weight, bias = local(module.weight), local(module.bias)
        gather = self.gather_output
        return functional.column_parallel_linear(x, weight, bias, group, gather_output=gather)


class EmbeddingParallel(_Style):
    """The rows of a torch.nn.Embedding are shared out: see ``vocab_parallel_embedding``."""

    of = nn.Embedding
    dims = {"weight": 0}

    def _check(self, module: nn.Embedding) -> None:
        _check_divisible(self, "num_embeddings", module.num_embeddings)
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name):
                raise ValueError(
                    f"EmbeddingParallel must be given an embedding without {name}, got one with it"
                )

    def _forward(self, module: nn.Embedding, group: dist.ProcessGroup, *inputs: Any) -> Tensor:
        (ids,) = inputs
        weight = local(module.weight)
        return functional.vocab_parallel_embedding(ids, weight, group, padding_idx=module.padding_idx)


class HeadNormParallel(ParallelStyle):
    """A norm of each head, as Qwen3's ``q_norm`` on [..., heads, D], where the heads are shared out.

    Its weight is on every rank, and the gradient is ``shared_weight``'s: a sum over all heads in order.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | None) -> nn.Module:
        names = [name for name, _ in module.named_parameters()]
        if names != ["weight"] or next(module.parameters()).dim() != 1:
            raise ValueError(f"HeadNormParallel must be given a norm with a weight [D] alone, got {module}")
        group = None if device_mesh is None else device_mesh.get_group()
        _install(module, functools.partial(_head_norm, module, group))
        return module


def _head_norm(module: nn.Module, group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    bare = copy.copy(module)
    bare.__dict__["_parameters"] = {}
    weight: Any = module.weight
    bare.weight = functional.shared_weight(weight, x.shape[-2], group)
    return type(module).forward(bare, x)


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """For each module of transformers' ``model.tp_plan`` the style of ours.

    Raises:
        ValueError: the model has no plan; or it asks for a style that has none here.
    """
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(gather_output=True),
        "colwise_gather_output": lambda: ColwiseParallel(gather_output=True),
        "rowwise": RowwiseParallel,
        "embedding_rowwise": EmbeddingParallel,
        "replicated_with_grad_allreduce": HeadNormParallel,
    }
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(f"model must be one of transformers that has a tp_plan, got {type(model).__name__}")
    for name, style in plan.items():
        if style not in styles:
            raise ValueError(f"the style of {name} must be one of {', '.join(styles)}, got {style!r}")
    return {name: styles[style]() for name, style in plan.items()}


def parallelize(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Cuts a model of transformers, by its own ``tp_plan``, over the ranks of ``mesh``.

    The model computes, under ``rlkernel.batch_invariant(level="tensor_parallel")``, the bits of the whole
    model, forward and backward.  Without ``mesh`` it stays whole, and only its norms of each head are
    told to sum the gradient of their weight as ranks do.

    Raises:
        ValueError: the model cannot be cut so; says what is off.
    """
    plan = plan_of(model)
    config: Any = model.config
    if mesh is None:
        for pattern, style in plan.items():
            if isinstance(style, HeadNormParallel):
                for name, module in model.named_modules():
                    if fnmatch.fnmatch(name, pattern):
                        style._apply(module, None)
        return model
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % mesh.size():
            raise ValueError(f"the model's {name} must be one that {mesh.size()} ranks divide, got {heads}")
    return parallelize_module(model, mesh, plan)


def local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _install(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


def _check_divisible(style: ParallelStyle, name: str, size: int) -> None:
    if size % SEGMENTS:
        want = f"{name} that {SEGMENTS} divides"
        raise ValueError(f"{type(style).__name__} must be given {want}, got {size}")
