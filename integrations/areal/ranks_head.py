"""The lm_head of a tensor-parallel model of AReaL's, of which each rank has neighbouring rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations.hf.lm_head import IGNORED, HeadError, LmHead
from rlkernel.ops.linear_logprob import linear_logprob_statistics


class RanksHead(LmHead):
    """Scores by the rows of every rank: the ranks have the same tokens, gathered by the head's own style."""

    _mesh: Any = None

    def _entered(self, hidden: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(hidden, DTensor) or any(not isinstance(x, Replicate) for x in hidden.placements):
            raise HeadError(f"{self.name}: its lm_head must be given all tokens, as its style gathers them")
        if (
            not isinstance(self.module.weight, DTensor)
            or hidden.device_mesh != self.module.weight.device_mesh
        ):
            raise HeadError(f"{self.name}: the ranks of its lm_head must be those of its hidden states")
        self._mesh = hidden.device_mesh
        return hidden.to_local()

    def _left(self, logits: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        found: Tensor = DTensor.from_local(logits, self._mesh, [Shard(-1)], run_check=False)
        return found

    def _score(self, hidden: Tensor, labels: Tensor) -> Any:
        names, self.statistics = self.statistics, ()
        try:
            scores = super()._score(hidden, labels)
        finally:
            self.statistics = names
        if names:  # of a rank's own part, as AReaL has them, which takes its product once more
            weight, bias = self.module.weight.to_local(), self.module.bias
            with torch.no_grad():
                own = linear_logprob_statistics(
                    hidden, weight, torch.where(labels == IGNORED, IGNORED, 0), statistics=names,
                    bias=None if bias is None else bias.to_local(), temperature=self.temperature,
                    logit_scale=self.scale, softcap=self.softcap,
                )  # fmt: skip
            self.found = {name: getattr(own, name) for name in names}
        return scores
