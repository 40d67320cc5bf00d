"""Have a model's routers choose the experts of a record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rlkernel.integrations.hf import checkpointing
from rlkernel.integrations.hf.routing_patch import Choose, RoutingPatch
from rlkernel.integrations.hf.routing_record import Recording
from rlkernel.routing_replay.routes import Routes, share_chosen
from rlkernel.runtime import invariance

FEW_TOKENS = 16  # of fewer, one layer says little: all layers are judged together


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
        min_overlap: float | None,
        deterministic: bool,
    ) -> None:
        super().__init__("replay", model, deterministic)
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
        with invariance.own_figures():
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
