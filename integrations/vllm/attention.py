"""Put attention with shared prefixes in the place of vLLM's."""

from __future__ import annotations

import functools
from types import ModuleType

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import attention_paged
from rlkernel.integrations.vllm.vllm_patch import VllmPatch


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be, or runs neither on a CPU nor on a GPU."""
    if current_platform.is_cuda_alike():
        from rlkernel.integrations.vllm import attention_gpu

        replace(patch, attention_gpu)
    elif current_platform.is_cpu():
        from rlkernel.integrations.vllm import attention_cpu

        replace(patch, attention_cpu)
    else:
        raise PatchError(f"vLLM must run on a CPU or a GPU, got {current_platform.device_name}")


def replace(patch: VllmPatch, ours: ModuleType) -> None:
    """What ``register_backend`` writes of each backend, in a table of its own: undo takes all of it away.

    ``ours.THEIRS`` has vLLM's backends by their names in the registry, and the module ours by the same names.
    """
    table = vars(registry)["_ATTN_OVERRIDES"]
    members = {}
    for name, theirs in ours.THEIRS.items():
        attention_paged.check(theirs)
        member = registry.AttentionBackendEnum[name]
        if member.is_overridden():
            raise PatchError(f"vLLM's own {name} must be in its registry, got {member.get_path()}")
        members[member] = f"{ours.__name__}.{name}"
    patch.replace(registry, "_ATTN_OVERRIDES", table | members, expected=table)
    # vLLM keeps the backends that it chose before
    chosen = vars(selector)["_cached_get_attn_backend"]
    patch.replace(selector, "_cached_get_attn_backend", functools.cache(chosen.__wrapped__), expected=chosen)
