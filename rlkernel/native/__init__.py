"""The compiled kernels: loads `rlkernel._C` and picks its functions by a tensor's device."""

import ctypes
import importlib
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlkernel.runtime import gpu

ON_HOST = ("cpu", "emulated")  # parts without a stream
BUILD = "build it with `pip install -e . --no-build-isolation` where a C++ compiler is, in the source tree"


@dataclass(frozen=True)
class Kernels:
    """The functions of one part of the extension; their arguments are in `_C.pyi`."""

    part: str  # cpu, cuda, hip, or emulated
    logprob_forward: Callable[..., None]
    logprob_backward: Callable[..., None]
    logprob_exp: Callable[..., None]
    logprob_support_forward: Callable[..., None]
    logprob_support_backward: Callable[..., None]
    policy_loss: Callable[..., None]
    policy_select: Callable[..., None]
    value_loss_forward: Callable[..., None]
    value_loss_backward: Callable[..., None]
    gae: Callable[..., None]
    whiten: Callable[..., None]
    kl_shaped_rewards: Callable[..., None]
    group_advantages: Callable[..., None]
    preference_sums: Callable[..., None]
    preference_loss: Callable[..., None]
    preference_backward: Callable[..., None]
    attention_merge: Callable[..., None]
    segment_reduce: Callable[..., None]
    gather_kv: Callable[..., None]
    sampling_statistics: Callable[..., None]
    sampling_finish: Callable[..., None]

    @classmethod
    def of(cls, part: str, module: types.ModuleType, suffix: str) -> "Kernels":
        return cls(part, *(getattr(module, f"{field.name}{suffix}") for field in fields(cls)[1:]))


def _openmp_runtime() -> str:
    """The OpenMP runtime that this process has already (torch's), or the system's.

    The extension is linked without one: a second runtime would bring a second pool of threads, deaf to
    torch.set_num_threads. LLVM's and Intel's runtimes serve GNU's entry points too.
    """
    maps = Path("/proc/self/maps")
    mapped = set(re.findall(r"/.*", maps.read_text())) if maps.exists() else set()
    for name in (r"libgomp[.-]", r"libiomp5", r"libomp[.-]"):
        if found := sorted(path for path in mapped if re.match(name, Path(path).name)):
            return found[0]
    return "libgomp.so.1"


@cache
def extension() -> types.ModuleType:
    """`rlkernel._C`, loaded on first use. Raises ImportError saying how to build it."""
    try:
        ctypes.CDLL(_openmp_runtime(), ctypes.RTLD_GLOBAL)
        return importlib.import_module("rlkernel._C")
    except (ImportError, OSError) as error:
        raise ImportError(f"rlkernel._C cannot be loaded: {error}; {BUILD}") from error


def _runs_on(archs: list[str], capability: tuple[int, int]) -> bool:
    """Whether CUDA code for one of `archs` runs on a device: its major version, or PTX that is not newer."""
    for arch in archs:
        digits = int(re.match(r"\d+", arch)[0])  # type: ignore[index]
        built = divmod(digits, 10)
        if arch.endswith("+PTX"):
            if built <= capability:
                return True
        elif arch.endswith("a"):
            if built == capability:
                return True
        elif built[0] == capability[0] and built <= capability:
            return True
    return False


@cache
def _kernels(part: str, index: int | None) -> Kernels | str:
    try:
        module = extension()
    except ImportError as error:
        return str(error)
    archs = module.built().get(part)
    if archs is None:
        return f"the {part} part of rlkernel._C was not built (it has {', '.join(module.built())}); {BUILD}"
    if part == "cuda":
        capability = torch.cuda.get_device_capability(index)
        if not _runs_on(archs, capability):
            device = ".".join(map(str, capability))
            return f"rlkernel._C was built for CUDA {' '.join(archs)}, this device is {device}"
    if part == "hip":
        name = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        if name not in archs:
            return f"rlkernel._C was built for {' '.join(archs)}, this device is {name}"
    return Kernels.of(part, module, f"_{part}")


_emulated: list[Kernels] = []


def kernels_for(device: torch.device | str) -> Kernels | str:
    """The kernels that run on `device`, or the reason why there are none."""
    if isinstance(device, str):
        device = torch.device(device)
    kind = device.type
    if kind == "cpu":
        return _emulated[-1] if _emulated else _kernels("cpu", None)
    if kind == "cuda":
        return _kernels("hip" if torch.version.hip else "cuda", device.index)
    return f"rlkernel._C has kernels for cpu and cuda tensors, got {kind}"


def launch(name: str, device: torch.device, *arguments: Any) -> None:
    """Run the kernel `name` of the part that `device` is for, on its current stream."""
    kernels = kernels_for(device)
    if not isinstance(kernels, Kernels):
        raise NotImplementedError(kernels)
    kernel: Callable[..., None] = getattr(kernels, name)
    if kernels.part in ON_HOST:
        kernel(*arguments, 0)
    elif device.index == torch.cuda.current_device():
        kernel(*arguments, gpu.raw_stream(device))
    else:
        with torch.cuda.device(device):
            kernel(*arguments, gpu.raw_stream(device))


@contextmanager
def emulated(module: types.ModuleType) -> Iterator[Kernels]:
    """For tests: the device kernels in `module`, a build of csrc/emulation, run CPU tensors meanwhile."""
    kernels = Kernels.of("emulated", module, "")
    _emulated.append(kernels)
    try:
        yield kernels
    finally:
        _emulated.remove(kernels)
