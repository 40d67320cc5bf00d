"""Which skips are in order on which machine: what a machine has must run, and a skip says what it lacks.

``tests/summary.py`` asks this of every skip of a run. A reason that no rule knows, or that does not hold on
this machine, is an error: a backend, a compiler or a framework was lost, or the list needs a line.
"""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable

import chromium
import required_parts

NO_INTERPRETER = "Triton runs on the GPU here, or is too old to be interpreted"


def never() -> bool:
    """``make`` brings it."""
    return False


def always() -> bool:
    """By the design of the test, which names the backend that it is not for."""
    return True


def gpu() -> bool:
    import torch  # here and below: a run without a skip that asks for it is summed up at once

    return torch.cuda.is_available()


def no_gpu() -> bool:
    return not gpu()


def torch_without(part: str) -> bool:
    import torch

    return torch.version.cuda is None if part == "cuda" else not torch.distributed.is_available()


def old_torch() -> bool:
    """Older than the first in which torchtitan can be imported."""
    from torch.distributed import fsdp

    return not hasattr(fsdp, "DataParallelMeshDims")


def old_triton() -> bool:
    """torch itself asks for a Triton that cannot interpret these kernels; any other old one is an error."""
    asked = [r for r in importlib.metadata.requires("torch") or () if re.match(r"triton\b(?!-)", r)]
    return any(re.search(r"==3\.([0-6]|7\.0)\b", r) for r in asked)


def other_triton() -> bool:
    """Than the one whose code the committed ledger has."""
    from rlkernel.bench.ledger import Ledger

    return Ledger.load().compilers.get("triton") != f"triton {importlib.metadata.version('triton')}"


def another_python() -> bool:
    """TRL, transformers, PEFT and DeepSpeed, and so OpenRLHF and SWIFT, want Python 3.11 or newer, verl one
    before 3.13."""
    return not (3, 11) <= sys.version_info[:2] < (3, 13)


def not_x86() -> bool:
    """The kernels are compiled for several instruction sets on x86 alone."""
    return platform.machine() not in ("x86_64", "AMD64")


def old_libc() -> bool:
    """No newer than that of the images which wheels are built in, or another library than glibc."""
    name, number = platform.libc_ver()
    return name != "glibc" or tuple(map(int, number.split("."))) <= (2, 28)


# the beginning of a reason, and when it holds; the first that fits decides
RULES: tuple[tuple[str, Callable[[], bool]], ...] = (
    (r"the reference (promises|says|computes|picks|takes) ", always),
    (r"PyTorch checks its own indices|torch's own indexing", always),
    (r"\S+ on a CPU takes milliseconds a row", always),
    (r"the interpreter's and the emulation's tokens cost too much", always),
    (r"Triton's interpreter copies every argument", always),
    (r"TRL does not smooth it|ours divides the score by the length, TRL the sum", always),
    (r"\S+ refuses: ", always),  # backends.skip_unless_able knows of what
    (r"needs a CUDA or ROCm device|the vendors' own kernels need a GPU", no_gpu),
    (r"\S+: \S+ is a Triton kernel without a CPU path", no_gpu),
    (r"indexing needs a torch built with CUDA", lambda: torch_without("cuda")),
    (r"the GPU decides how tiles are loaded|a CPU's autocast", gpu),
    (r"torch's library has no FP8 product for this processor", always),
    (r"with a GPU the ops' tests run the CUDA functions|its kernels are interpreted here", gpu),
    (r"a cascade has no window|the model of tensor cores has no ", gpu),
    (re.escape(NO_INTERPRETER), lambda: gpu() or old_triton()),
    (r"the interpreter needs Triton 3.7.1|what was measured is Triton 3.7.1", old_triton),
    (r"the ledger is of another Triton", other_triton),
    (r"this processor's kernels are ", not_x86),
    (re.escape(chromium.ABSENT), lambda: chromium.find() is None),
    (r"manylinux_2_28 stubs are made on x86_64 alone", not_x86),
    (r"this system's C library is no newer than manylinux_2_28's", old_libc),
    (r"PyYAML is not installed", never),
    (r"this machine has no nvcc", lambda: "cuda" not in required_parts.required()),
    # what runs on GPUs alone
    (r"(flashinfer|aiter|x) is (not )?installed|(flash-attn|flashinfer): not installed", always),
    (r"\S+: RLKERNEL_PEERS names no folder with a checkout", always),
    (r"this kernel keeps no resettable high-water mark|this Linux is older than 5.14", always),
    (r"needs /proc|pages are Linux's", lambda: sys.platform != "linux"),
    (r"this tree was not built in place|(this tree is )?not a git checkout", always),
    (r"needs torch.distributed", lambda: torch_without("distributed")),
    (r"(tomllib|the site's theme|SkyRL) needs Python 3.11", lambda: sys.version_info < (3, 11)),
    (r"(LLaMA-Factory|torchtitan) needs Python 3.11", lambda: sys.version_info < (3, 11)),
    (r"torchtitan needs a later torch", old_torch),
    (r"AReaL needs Python 3.11 or 3.12", lambda: not (3, 11) <= sys.version_info < (3, 13)),
    (
        r"(hypothesis|Triton|basedpyright) is not installed|vLLM|\S+: make fetches it|"
        r"\S+: \S+ is not that of commit ",
        never,
    ),
    (r"needs Megatron-Core", lambda: sys.version_info >= (3, 14)),
    (
        r"(needs )?(TRL|PEFT|DeepSpeed|transformers|Liger|verl|OpenRLHF|SWIFT|axolotl|torchtitan|Ray)\b"
        r"|could not import ",
        another_python,
    ),
)


def out_of_order(reason: str) -> bool:
    """Whether nothing here explains a skip with this reason, on this machine."""
    rule = next((holds for text, holds in RULES if re.match(text, reason)), never)
    return not rule()
