"""Megatron-Core: its losses over a vocabulary that ranks share out, and its models' heads, without logits.

RL frameworks over Megatron take their log-probabilities from the same two functions, which they import when
they call them: verl, slime, ms-swift.  Megatron's own trainers get a model's loss from its labels; the head
then makes losses of hidden states where it would have made logits.
"""

from rlkernel.integrations.megatron.install import init, patch
from rlkernel.integrations.megatron.megatron_patch import MegatronPatch

__all__ = ["MegatronPatch", "init", "patch"]
