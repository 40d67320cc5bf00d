"""Put attention with shared prefixes in the place of vLLM's."""

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

NAME = "attention"
ALONE = "no requests share a block"
READ, APART = "read", "read by requests by themselves"


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be, or runs neither on a CPU nor on a GPU."""
    if current_platform.is_cuda_alike():
        from rlkernel.integrations.vllm import attention_gpu

        return attention_gpu.plan(patch)
    if not current_platform.is_cpu():
        raise PatchError(f"vLLM must run on a CPU or a GPU, got {current_platform.device_name}")
    from vllm.v1.attention.backends import cpu_attn

    contract.checked(cpu_attn.CPUAttentionMetadataBuilder, "build", BUILD_PARAMETERS)
    contract.checked(cpu_attn.CPUAttentionBackendImpl, "forward", FORWARD_PARAMETERS)
    register(patch, {"CPU_ATTN": BACKEND})


def register(patch: VllmPatch, paths: dict[str, str]) -> None:
    """What ``register_backend`` writes of each, in a table of its own: undo takes all of it away."""
    table = vars(registry)["_ATTN_OVERRIDES"]
    members = {registry.AttentionBackendEnum[name]: path for name, path in paths.items()}
    for member in members:
        if member.is_overridden():
            raise PatchError(f"vLLM's own {member.name} must be in its registry, got {member.get_path()}")
    patch.replace(registry, "_ATTN_OVERRIDES", table | members, expected=table)
    # vLLM keeps the backends that it chose before
    chosen = vars(selector)["_cached_get_attn_backend"]
    patch.replace(selector, "_cached_get_attn_backend", functools.cache(chosen.__wrapped__), expected=chosen)
