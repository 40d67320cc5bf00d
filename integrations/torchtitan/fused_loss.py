"""torchtitan's chunked loss without chunks and without logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.distributed.utils import is_in_batch_invariant_mode

from rlkernel.integrations.torchtitan import contract, head, ranks
from rlkernel.integrations.torchtitan.scored_logits import IGNORED, ScoredLogits, Scores

_losses = contract.losses()
logger = logging.getLogger(__name__)


class FusedLoss(_losses.ChunkedLossWrapper):  # type: ignore[name-defined]
    """``ChunkedLossWrapper``, with ``linear_logprob`` in place of the lm_head's logits.

    The inner loss is called once, with an object that has the shape of the logits and knows what
    ``compute_logprobs`` or ``cross_entropy_loss`` would compute of them.  The loss that it returns has its
    whole graph, so a factor of the loss reaches every gradient.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_losses.ChunkedLossWrapper.Config):  # type: ignore[name-defined]
        """That of ``ChunkedLossWrapper``.  ``num_chunks`` is without effect: nothing is cut."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        # what an inner loss would compile reads the logits
        super().__init__(config, compile_config=None)
        components = () if compile_config is None else compile_config.components
        if compile_config is not None and compile_config.enable and "loss" in components:
            logger.info("FusedLoss does not compile its inner loss: it has no logits to read")

    def set_lm_head(self, lm_head: nn.Module) -> None:
        ranks.check_backend()
        super().set_lm_head(head.checked(lm_head))
        if is_in_batch_invariant_mode():
            logger.warning(
                "debug.batch_invariant is on: FusedLoss's log-probabilities are not the bits of the "
                "generator's, which vLLM makes of logits; ChunkedLossWrapper's are"
            )

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Any = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of hidden states ``pred`` [B, L, H], as the wrapper's."""
        if self.lm_head is None:
            raise ValueError("lm_head must be set before FusedLoss is called, got None")
        ranks.check(pred, labels)
        typed = spmd.is_type_checking()
        with spmd.no_typecheck():
            scored = self._scored(labels, loss_inputs)
            found = head.scored(self.lm_head, pred, scored, return_entropy=self._has_entropy())
            logprobs = found.logprobs.masked_fill(labels == IGNORED, 0.0)
            scores = Scores(labels, logprobs, found.lse, found.entropy)
            logits = ScoredLogits(scores, (*labels.shape, self.lm_head.out_features))
            with ranks.unshared():
                loss, metrics = self.loss_fn(logits, labels, global_valid_tokens, **loss_inputs)
            if typed:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, metrics

    def _scored(self, labels: Tensor, loss_inputs: dict[str, Any]) -> Tensor:
        """A label of each row that the loss may look at, and of the others none: they cost nothing."""
        if not self._has_entropy():
            return labels
        # a row has its entropy and its logsumexp whatever its label is, and without one
        some = labels.masked_fill(labels == IGNORED, 0)
        mask = loss_inputs.get("loss_mask")
        if contract.class_name(self.loss_fn) not in contract.MASKED or mask is None:
            return some
        return torch.where(mask.bool(), some, IGNORED)

    def _has_entropy(self) -> bool:
        return contract.class_name(self.loss_fn) != contract.CROSS_ENTROPY
