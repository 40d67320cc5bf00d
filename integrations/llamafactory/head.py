"""The lm_head of a model, with the mean of the logits of every row, also of those that are not scored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.hf.lm_head import IGNORED
from rlkernel.ops.linear_logprob import linear_logprob_statistics


class MeanOfAll(EngineHead):
    """LLaMA-Factory logs the mean of all logits, those of prompts and padding among them."""

    def _score(self, hidden: Tensor, labels: Tensor) -> Any:
        scores = super()._score(hidden, labels)
        if "mean_logits" in self.statistics:
            with torch.no_grad():
                self.found["mean_logits"] = torch.where(
                    labels == IGNORED, self._means(hidden, labels), self.found["mean_logits"]
                )
        return scores

    def _means(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Of each row that is not scored; without a cap the mean of the logits is one of the weights."""
        weight, bias = self.module.weight, self.module.bias
        if not self.softcap:
            mean = weight.mean(0, dtype=torch.float32)
            shift = 0.0 if bias is None else bias.mean(dtype=torch.float32)
            return self.scale * (torch.mv(hidden.float(), mean) + shift)
        places = (labels == IGNORED).nonzero()[:, 0]
        found = linear_logprob_statistics(
            hidden[places], weight, torch.zeros_like(places), statistics=("mean_logits",), bias=bias,
            logit_scale=self.scale, softcap=self.softcap,
        )  # fmt: skip
        assert found.mean_logits is not None
        return found.mean_logits.new_zeros(len(hidden)).index_copy(0, places, found.mean_logits)
