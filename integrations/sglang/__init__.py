"""SGLang: its sampler and the log-probabilities of its prompts through ``rlkernel.sample`` and ``logprob``.

SGLang runs the model in processes of its own, which a replacement in the parent does not reach.  So the way
in is SGLang's: every process loads the entry points of ``sglang.srt.plugins``, of which ``register`` is one.
It does nothing unless ``SGLANG_RLKERNEL`` is set, which ``patch`` does; child processes inherit it.
"""

from rlkernel.integrations.sglang.install import patch, register
from rlkernel.integrations.sglang.sglang_patch import SglangPatch

__all__ = ["SglangPatch", "patch", "register"]
