"""vLLM: its sampler and its prompt logprobs through ``rlkernel.sample`` and ``rlkernel.score_tokens``.

vLLM runs the model in processes of its own, which a replacement in the parent does not reach.  So the way in
is vLLM's: every process loads the entry points of ``vllm.general_plugins``, of which ``register`` is one.
It does nothing unless ``VLLM_RLKERNEL`` is set, which ``patch`` does; child processes inherit it.
"""

from rlkernel.integrations.vllm.install import patch, register
from rlkernel.integrations.vllm.rollout import Support, support_of
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

__all__ = ["Support", "VllmPatch", "patch", "register", "support_of"]
