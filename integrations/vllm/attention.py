"""Put attention with shared prefixes in the place of vLLM's CPU attention."""

from __future__ import annotations

import functools

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

BACKEND = "rlkernel.integrations.vllm.attention_backend.Backend"
BUILD_PARAMETERS = ("self", "common_prefix_len", "common_attn_metadata", "fast_build=False")
FORWARD_PARAMETERS = (
    "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale=None",
    "output_block_scale=None",
)  # fmt: skip


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be, or does not run on a CPU."""
    if not current_platform.is_cpu():
        raise PatchError(f"vLLM must run on a CPU, got {current_platform.device_name}")
    from vllm.v1.attention.backends import cpu_attn

    contract.checked(cpu_attn.CPUAttentionMetadataBuilder, "build", BUILD_PARAMETERS)
    contract.checked(cpu_attn.CPUAttentionBackendImpl, "forward", FORWARD_PARAMETERS)
    member = registry.AttentionBackendEnum.CPU_ATTN
    if member.is_overridden():
        raise PatchError(f"vLLM's own CPU attention must be in its registry, got {member.get_path()}")
    # what register_backend(member, BACKEND) writes, in a table of its own: undo takes all of it away
    table = vars(registry)["_ATTN_OVERRIDES"]
    patch.replace(registry, "_ATTN_OVERRIDES", table | {member: BACKEND}, expected=table)
    # vLLM keeps the backends that it chose before
    chosen = vars(selector)["_cached_get_attn_backend"]
    patch.replace(selector, "_cached_get_attn_backend", functools.cache(chosen.__wrapped__), expected=chosen)
