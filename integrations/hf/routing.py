"""Record the experts that a model's routers choose, and have them choose those of a record.

A router's own code runs as it is, with its own softmax or sigmoid, its own weights and its own gradient; what
changes is the answer of the one ``torch.topk`` in it that chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from rlkernel.integrations._patch import ABSENT, Patch, PatchError
from rlkernel.integrations.hf import checkpointing
from rlkernel.integrations.hf.routers import Router, routers
from rlkernel.routing_replay.choice import top_k
from rlkernel.routing_replay.routes import Routes, cat, share_chosen, storage_dtype

TIES = ("model", "lowest")
FEW_TOKENS = 16  # of fewer, one layer says little: all layers are judged together

# (scores [tokens, experts], free) -> the experts [tokens, top_k]; free() is what the router would choose
Choose = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class RoutingPatch(Patch):
    """Stands around the routers of one model."""

    def __init__(self, name: str, model: nn.Module, ties: str) -> None:
        super().__init__(name)
        if ties not in TIES:
            raise ValueError(f"ties must be one of {', '.join(TIES)}, got {ties!r}")
        self.ties = ties
        self.routers = routers(model)
        modules = {id(router.module) for router in self.routers}
        for index, router in enumerate(self.routers):
            expected = vars(router.module).get("forward", ABSENT)  # accelerate's hooks leave one there
            self.replace(router.module, "forward", self._around(index, router), expected=expected)
        for layer, attribute, function in checkpointing.checkpoints(model):
            if any(id(module) in modules for module in layer.modules()):
                bound = checkpointing.bound(function, layer)
                self.replace(layer, attribute, bound, expected=function)

    def _around(self, index: int, router: Router) -> Callable[..., Any]:
        forward = router.module.forward

        @functools.wraps(forward)
        def routed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{self.name}: the model must not be compiled, got it inside torch.compile"
                )
            with _Choice(router, self._choose(index), self.ties) as choice:
                results = forward(*args, **kwargs)
            choice.require_used(results)
            return results

        return routed

    def _choose(self, index: int) -> Choose:
        raise NotImplementedError


class _Choice(TorchFunctionMode):
    """Answers the ``torch.topk`` by which a router chooses, and no other operation."""

    def __init__(self, router: Router, choose: Choose, ties: str) -> None:
        super().__init__()
        self.router = router
        self.choose = choose
        self.ties = ties
        self.chosen: Tensor | None = None
        self.masked: tuple[Any, Any] = None, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and self._chooses(*args, **kwargs):
            return self._answer(func, args, kwargs)
        results = func(*args, **kwargs)
        if func in (torch.masked_fill, Tensor.masked_fill):
            # the experts of groups that a router leaves out have a score all the same, where they were chosen
            self.masked = results, args[0]
        return results

    def _chooses(self, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> bool:
        # groups of experts are chosen by topk too, from scores of another shape
        experts, chosen = self.router.shape
        return input.dim() == 2 and input.shape[1] == experts and k == chosen and dim in (-1, 1)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.chosen is not None:
            raise PatchError(f"{self.router.path} must choose its experts once, got a second torch.topk")
        scores = kwargs["input"] if "input" in kwargs else args[0]
        experts, chosen = self.router.shape
        stock: list[Any] = []

        def free() -> Tensor:
            if self.ties == "lowest":
                return top_k(scores, chosen)[1]
            stock.append(func(*args, **kwargs))
            return stock[0][1]

        self.chosen = self.choose(scores, free)
        if stock and self.chosen is stock[0][1]:
            return stock[0]
        results, unmasked = self.masked
        values = (unmasked if scores is results else scores).gather(-1, self.chosen)
        return torch.return_types.topk((values, self.chosen))

    def require_used(self, results: Any) -> None:
        """Hold the router to what it is known to be, without a look at a value."""
        if self.chosen is None:
            raise PatchError(
                f"{self.router.path} must choose its experts by torch.topk over {self.router.shape[0]} "
                "scores, got none"
            )
        if not any(part is self.chosen for part in results):
            raise PatchError(f"{self.router.path} must return the experts that torch.topk chose, got others")


class Recording(RoutingPatch):
    """``passes``: the routes of each forward pass inside of the ``with``; ``routes``: of all of them."""

    def __init__(self, model: nn.Module, ties: str = "model") -> None:
        super().__init__("routing_replay.record", model, ties)
        self.passes: list[Routes] = []
        self._shapes: list[tuple[int, ...]] = []  # of the batch of each
        self._shape: tuple[int, ...] = ()
        self._layers: list[Tensor] = []
        self._hook: Any = None

    @property
    def routes(self) -> Routes:
        """Of the one pass; of several over the same rows (a prompt, then token by token), each row joined.

        Raises:
            ValueError: there was no pass, or passes of different numbers of rows.
        """
        if not self.passes:
            raise ValueError("the model must have run inside of routing_replay.record, got no forward pass")
        if len(self.passes) == 1:
            return self.passes[0]
        rows = {shape[0] for shape in self._shapes}
        if len(rows) > 1:
            raise ValueError(
                f"the passes must have the same number of rows, got {self._shapes}: take .passes one by one"
            )
        parts = [
            routes.split([shape[1]] * shape[0])
            for routes, shape in zip(self.passes, self._shapes, strict=True)
        ]
        return cat([part[row] for row in range(rows.pop()) for part in parts])

    def apply(self) -> Self:
        if not self.active:
            super().apply()
            self._hook = self.routers[0].block.register_forward_pre_hook(self._begin, with_kwargs=True)
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            self._hook.remove()

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not checkpointing.in_backward():
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            self._shape, self._layers = tuple(hidden.shape[:-1]), []

    def _choose(self, index: int) -> Choose:
        def choose(scores: Tensor, free: Callable[[], Tensor]) -> Tensor:
            chosen = free()
            if not checkpointing.in_backward():  # what is computed again was recorded
                self._add(index, chosen)
            return chosen

        return choose

    def _add(self, index: int, chosen: Tensor) -> None:
        if len(self._layers) != index:
            raise RuntimeError(
                f"the routers must run one after the other, got {self.routers[index].path} "
                f"after {len(self._layers)} others"
            )
        experts, _ = self.routers[index].shape
        self._layers.append(chosen.detach().to(storage_dtype(experts)))
        if len(self._layers) == len(self.routers):
            first = self._layers[0].device  # a model may lie on several
            ids = torch.stack([layer.to(first) for layer in self._layers])
            known = torch.ones(ids.shape[1], dtype=torch.bool, device=first)
            self.passes.append(Routes(ids, known, experts))
            self._shapes.append(self._shape)


@dataclass
class _Pass:
    """One forward pass: the routes that it replays, and how far it has come."""

    routes: Routes
    whole: bool  # every token has a record
    there: dict[torch.device, Routes]
    compare: bool = False
    shares: list[Tensor] = field(default_factory=list)
    due: int = 0

    def on(self, device: torch.device) -> Routes:
        if device not in self.there:
            self.there[device] = self.routes.to(device)
        return self.there[device]

    def experts(self, index: int, scores: Tensor, free: Callable[[], Tensor]) -> Tensor:
        routes = self.on(scores.device)
        if routes.tokens != len(scores):
            wanted = (routes.layers, len(scores), routes.top_k)
            raise ValueError(
                f"routes must have shape [layers, tokens, top_k] = {wanted} in this pass, "
                f"got {tuple(routes.experts.shape)}"
            )
        recorded = routes.experts[index].long()
        if self.whole and not self.compare:
            return recorded
        with torch.no_grad():
            own = free()
        if self.compare:
            self.shares.append(share_chosen(recorded, own, routes.known))
        return recorded if self.whole else recorded.where(routes.known[:, None], own)


class Replay(RoutingPatch):
    """Every forward pass inside of the ``with`` replays the routes given last: ``routing_replay.replay``."""

    def __init__(
        self,
        model: nn.Module,
        routes: Routes | Recording,
        min_overlap: float | None = None,
        ties: str = "model",
    ) -> None:
        super().__init__("routing_replay.replay", model, ties)
        experts, chosen = self.routers[0].shape
        if min_overlap is None:
            min_overlap = (1 + chosen / experts) / 2 if chosen < experts else 0.0
        if not 0 <= min_overlap <= 1:
            raise ValueError(f"min_overlap must be in [0, 1], got {min_overlap}")
        self.min_overlap = float(min_overlap)
        self.overlap: Tensor | None = None
        """Of each layer, the fraction of the recorded experts that its router would have chosen itself, in
        the first pass over the routes that were compared last."""
        self._run: _Pass | None = None
        self.use(routes)

    def use(self, routes: Routes | Recording) -> None:
        """Replay other routes from the next pass on: those of the next micro-batch.

        Passes before keep theirs, also when checkpointing computes them again.

        Raises:
            ValueError: another number of layers, of experts, or of experts for a token than the model's.
        """
        routes = routes.routes if isinstance(routes, Recording) else routes
        experts, chosen = self.routers[0].shape
        wanted = len(self.routers), chosen, experts
        found = routes.layers, routes.top_k, routes.num_experts
        if found != wanted:
            raise ValueError(
                f"routes must have layers, top_k, num_experts = {wanted}, the model's, got {found}"
            )
        self._next = _Pass(routes, bool(routes.known.all()), {})
        self._compare = self.min_overlap > 0 and bool(routes.known.any())

    def _choose(self, index: int) -> Choose:
        notes, key = checkpointing.notes(), (self, index)
        if notes is not None and checkpointing.again():
            return functools.partial(notes[key].experts, index)
        if checkpointing.in_backward():
            raise RuntimeError(
                f"{self.routers[index].path} must be computed again by a checkpoint that was there when "
                "replay began, transformers' own or torch's CheckpointWrapper, got another: its routes are "
                "not known"
            )
        if index == 0:
            self._run = replace(self._next, compare=self._compare, shares=[])
        run = self._run
        if run is None or run.due != index:
            due = "the first" if run is None else self.routers[run.due].path
            raise RuntimeError(
                f"the routers must run one after the other, got {self.routers[index].path} where {due} "
                "was due"
            )
        if notes is not None:
            notes[key] = replace(run, compare=False)

        def choose(scores: Tensor, free: Callable[[], Tensor]) -> Tensor:
            experts = run.experts(index, scores, free)
            run.due += 1
            if run.due == len(self.routers):
                self._run = None
                if run.compare:
                    self._judge(run)
            return experts

        return choose

    def _judge(self, run: _Pass) -> None:
        self._compare = False
        self.overlap = torch.stack([share.cpu() for share in run.shares])
        judged = self.overlap if int(run.routes.known.sum()) >= FEW_TOKENS else self.overlap.mean()
        if bool((judged < self.min_overlap).any()):
            layers = ", ".join(
                f"{router.path} {share:.2f}"
                for router, share in zip(self.routers, self.overlap.tolist(), strict=True)
            )
            raise ValueError(
                f"routes must share at least min_overlap = {self.min_overlap:.2f} of their experts with "
                f"those that the model would choose, in every layer, got {layers}: the routes of another "
                "model, of other tokens, of shifted positions, or in another order of layers"
            )
