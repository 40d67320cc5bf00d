"""Routing replay: a mixture of experts sends every token to the experts that a record names.

with routing_replay.record(model) as routes:      # or routes of the rollout's engine, from_vllm(...)
    model(**batch)
with routing_replay.replay(model, routes):
    loss(model(**batch)).backward()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkernel.routing_replay.choice import combine, top_k
from rlkernel.routing_replay.engines import from_sglang, from_vllm
from rlkernel.routing_replay.routes import Routes, cat, pack, pad, pad_like
from rlkernel.routing_replay.storage import load, save

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Routes",
    "cat",
    "combine",
    "deterministic",
    "from_sglang",
    "from_vllm",
    "load",
    "moe_layers",
    "pack",
    "pad",
    "pad_like",
    "record",
    "replay",
    "save",
    "top_k",
]


def record(model: nn.Module, *, deterministic: bool = False) -> Any:
    """Record the experts that the routers of a model of transformers choose inside of a ``with``.

    What the ``with`` gives has ``passes``, the ``Routes`` of each forward pass, and ``routes``, of all
    of them; ``replay`` takes it as it is. Nothing else changes: no bit of the outputs and of the gradients.

    Args:
        model: of transformers, whatever wraps it (PEFT, DDP, FSDP2).
        deterministic: as ``deterministic``, and recorded.

    Raises:
        ValueError: the model is no mixture of experts, or one whose router is not known.
        PatchError: its router is not the one of the supported transformers.

    Examples:
        >>> with rlkernel.routing_replay.record(model) as record:
        ...     logits = model(torch.tensor([[1, 2, 3]])).logits
        >>> record.routes.experts.shape
        torch.Size([2, 3, 2])
    """
    from rlkernel.integrations.hf import routing_record  # here: it loads all of integrations.hf

    return routing_record.Recording(model, deterministic)


def replay(
    model: nn.Module, routes: Any, *, min_overlap: float | None = None, deterministic: bool = False
) -> Any:
    """Inside of a ``with``, the routers of a model choose the experts of a record, with their own weights.

    The weights are the model's own function of its own logits, taken at the recorded experts, so the router
    has its gradient. Tokens without a record route freely. Every forward pass inside replays the same routes
    (old, reference and policy logprobs of one micro-batch); ``.use(others)`` changes them for the passes
    after. Gradient checkpointing sees the same routes again, also when the ``with`` is over.

    The first pass over new routes is compared with what the model would choose itself; ``.overlap [layers]``
    is the fraction in common.

    Args:
        model: as for ``record``.
        routes: ``Routes`` of the tokens of a pass, as the model gets them, padding included (``pad``,
            ``pack``), or what ``record`` gave.
        min_overlap: the least fraction of its experts, in any layer, that the model would choose itself; less
            is an error, with 0 it is not looked at. By default half way between chance and all.
        deterministic: as ``deterministic``, and replayed.

    Raises:
        ValueError: another shape than the model's or the pass's; too small an overlap; a model that
            ``record`` refuses. PatchError: as for ``record``.

    Examples:
        >>> with rlkernel.routing_replay.record(model) as record:
        ...     logits = model(torch.tensor([[1, 2, 3]])).logits
        >>> with rlkernel.routing_replay.replay(model, record.routes):
        ...     torch.equal(model(torch.tensor([[1, 2, 3]])).logits, logits)
        True
    """
    from rlkernel.integrations.hf import routing_replayed

    return routing_replayed.Replay(model, routes, min_overlap, deterministic)


def deterministic(model: nn.Module) -> Any:
    """Inside of a ``with``, routers choose by ``top_k``, and ``combine`` sums what the experts gave.

    So a tie goes to the lowest expert, and a token's experts are summed from its first slot to its last, in
    fp32, rounded once: none of both depends on the other tokens. The experts run slot by slot for it. Their
    products are the model's own; whether those depend on the batch is theirs to say.

    Raises:
        ValueError, PatchError: as for ``record``.

    Examples:
        >>> with rlkernel.routing_replay.deterministic(model):
        ...     model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 16])
    """
    from rlkernel.integrations.hf import routing_patch

    return routing_patch.RoutingPatch("deterministic", model, True)


def moe_layers(model: nn.Module) -> list[int]:
    """The numbers of the hidden layers that have a router: where an engine, which counts all, has them.

    Examples:
        >>> rlkernel.routing_replay.moe_layers(model)
        [0, 1]
    """
    from rlkernel.integrations.hf import routers

    return routers.moe_layers(model)
