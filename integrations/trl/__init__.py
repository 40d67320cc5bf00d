"""TRL: logprobs and entropies of its trainers through ``rlkernel.linear_logprob`` and ``rlkernel.logprob``.

Since TRL 1.15 trainers score tokens in one place: the fused head of ``trl.trainer.utils`` calls
``_ChunkedLogProbFunction.apply``, a global that is looked up at every call. So the order of imports does not
matter, nor whether a trainer exists already, and a patch may come and go between two steps. Three helpers
that take logits remain for the experimental trainers, which import them by name.  Distillation
scores no tokens but compares the distributions of two models: its losses have places of their own.

Before 1.15 each trainer calls its model for logits and computes of them itself.  There the lm_head of the
model scores the tokens while the trainer's own code runs (``logits_head``).
"""

from rlkernel.integrations.trl.install import patch
from rlkernel.integrations.trl.trl_patch import TrlPatch

__all__ = ["TrlPatch", "patch"]
