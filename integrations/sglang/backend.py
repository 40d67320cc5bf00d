"""The name ``rlkernel`` among SGLang's sampling backends, for ``--sampling-backend rlkernel``."""

from __future__ import annotations

from sglang.srt.arg_groups.choices import SAMPLING_BACKEND_CHOICES
from sglang.srt.layers import sampler as home
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_context, get_platform

BACKEND = "rlkernel"


def add() -> None:
    home.register_sampler_backend(BACKEND, named)


def remove() -> None:
    SAMPLING_BACKEND_CHOICES.discard(BACKEND)
    home._CUSTOM_SAMPLER_FACTORIES.pop(BACKEND, None)


def named() -> Sampler:
    """SGLang's own sampler, as the patch has it: what that leaves to SGLang needs a backend that SGLang has,
    so the process goes on with its default one."""
    default = "flashinfer" if get_platform().has_flashinfer else "pytorch"
    get_context().override("rlkernel.patch_sglang", sampling_backend=default)
    return Sampler()
