"""DeepSpeed: losses over a split vocabulary, distillation, and DeepSpeed-Chat's PPO without logits.

DeepSpeed looks its autograd functions up in their module at every call, so the order of imports does not
matter, nor whether an engine exists already.  What is checked, reduced over ranks and divided by around them
stays DeepSpeed's.  ``score`` gives any engine's logprobs without its logits.
"""

from rlkernel.integrations.deepspeed.deepspeed_patch import DeepSpeedPatch
from rlkernel.integrations.deepspeed.install import patch
from rlkernel.integrations.deepspeed.scores import Scores, score

__all__ = ["DeepSpeedPatch", "Scores", "patch", "score"]
