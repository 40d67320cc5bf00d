"""The compiled kernels: loads `rlkernel._C` and picks its functions by a tensor's device."""

from __future__ import annotations

import ctypes
import importlib
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rlkernel.calls.paged_prefix_attention import ITEM, LAUNCH
from rlkernel.calls.policy_loss import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    DIVERGENCES,
    KL_ESTIMATORS,
    KL_WEIGHTS,
    LEVELS,
    POLICY_TERMS,
    SUMS,
)
from rlkernel.calls.preference_loss import PREFERENCE_DIVERGENCES, PREFERENCE_TERMS
from rlkernel.calls.rms_norm import ROUNDINGS as NORM_ROUNDINGS
from rlkernel.calls.sampling import FILTER_ORDERS
from rlkernel.calls.swiglu import ACTIVATIONS
from rlkernel.calls.swiglu import ROUNDINGS as PRODUCT_ROUNDINGS
from rlkernel.runtime import debug, gpu, invariance

if TYPE_CHECKING:
    from rlkernel._C import Kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what kernels read as floats
ON_HOST = ("cpu", "emulated")  # parts without a stream
BUILD = "build it where a C++ compiler is, " + (
    "with `make build` in the source tree"
    if Path(__file__).parents[2].joinpath("setup.py").exists()
    else "with `pip install --force-reinstall --no-deps .` in a checkout or its source archive"
)


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
        module = importlib.import_module("rlkernel._C")
        if differing := differing_names(getattr(module, "ENUMS", {})):
            raise ImportError(f"it is not the build of these sources: {differing[0]}")
        return module
    except (ImportError, OSError) as error:
        raise ImportError(f"rlkernel._C cannot be loaded: {error}; {BUILD}") from error


def differing_names(enums: dict[str, tuple[str, ...]]) -> list[str]:
    """What C++ calls otherwise than Python, or in another order: a rule holds the number of a name."""
    ours = {
        "Term": POLICY_TERMS,
        "Level": LEVELS,
        "Aggregation": SUMS,
        "Kl": KL_ESTIMATORS,
        "KlWeight": KL_WEIGHTS,
        "Divergence": DIVERGENCES,
        "Correction": CORRECTION_LEVELS,
        "Verdict": CORRECTION_MODES,
        "PreferenceTerm": PREFERENCE_TERMS,
        "PreferenceDivergence": PREFERENCE_DIVERGENCES,
        "FilterOrder": FILTER_ORDERS,
        "PagedItem": ITEM,
        "PagedLaunch": LAUNCH,
        "Activation": ACTIVATIONS,
        "NormRounding": NORM_ROUNDINGS,
        "ProductRounding": PRODUCT_ROUNDINGS,
    }
    return [
        f"the names of {enum} must be {', '.join(names)}, its C++ has {', '.join(enums.get(enum, ()))}"
        for enum, names in ours.items()
        if enums.get(enum) != names
    ]


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


def _old_driver(runtime: int, driver: int, compiled: bool) -> str:
    """Why a driver cannot run what a CUDA runtime of this version needs.

    A driver runs what is ``compiled`` for the device by any toolkit of its own major version or an older one,
    and turns PTX of a toolkit that is no newer than itself into code.
    """
    if driver // 1000 > runtime // 1000 or driver >= runtime:
        return ""
    if compiled and driver // 1000 == runtime // 1000:
        return ""
    known, built = (f"{version // 1000}.{version % 1000 // 10}" for version in (driver, runtime))
    needs = "" if compiled else ", and for this device has PTX alone"
    return f"rlkernel._C was built with CUDA {built}{needs}, this driver knows CUDA {known}: it must be newer"


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
        compiled = _runs_on([arch for arch in archs if not arch.endswith("+PTX")], capability)
        runtime, driver = module.cuda_versions()
        if old := _old_driver(runtime, driver, compiled):
            return old
    if part == "hip":
        name = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        if name not in archs:
            return f"rlkernel._C was built for {' '.join(archs)}, this device is {name}"
    found: Kernels = getattr(module, part)
    return found


_emulated: list[Kernels] = []
_nobody: ContextVar[Any] = ContextVar("rlkernel_nobody", default=None)


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


def tensor_reasons(name: str, tensor: Tensor) -> list[str]:
    """The reasons that dtype and device give."""
    reasons = []
    if tensor.dtype not in DTYPES:
        reasons.append(f"{name} must be fp16, bf16 or fp32, got {str(tensor.dtype).removeprefix('torch.')}")
    found = kernels_for(tensor.device)
    return [*reasons, found] if isinstance(found, str) else reasons


def taking(name: str) -> Callable[..., list[str]]:
    """``unsupported`` of an op that is known by its first tensor."""
    return lambda *tensors, **options: tensor_reasons(name, tensors[0])


def at_most_fp32(what: str, count: int = 1) -> Callable[..., list[str]]:
    """``unsupported`` of an op whose first ``count`` tensors may have any dtype but fp64."""

    def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
        found = kernels_for(tensors[0].device)
        wide = any(x.dtype == torch.float64 for x in tensors[:count])
        reasons = [f"{what} must be at most fp32, got float64"] if wide else []
        return [*reasons, found] if isinstance(found, str) else reasons

    return unsupported


def taking_logits(*tensors: Tensor, **options: Any) -> list[str]:
    """``unsupported`` of an op over rows of logits."""
    logits = tensors[0]
    reasons = tensor_reasons("logits", logits)
    if logits.dim() and logits.shape[-1] > 1 and logits.stride(-1) != 1:
        reasons.append(f"the last stride of logits must be 1, got {logits.stride(-1)}")
    return reasons


def kernels(device: torch.device) -> Kernels:
    """The kernels that run on ``device``, each on its current stream."""
    found = kernels_for(device)
    if isinstance(found, str):
        raise NotImplementedError(found)
    if found.part in ON_HOST:
        return found
    queue = _on_stream(found, gpu.raw_stream(device))
    return queue if device.index == torch.cuda.current_device() else _on_device(queue, device)


@cache
def _on_stream(part: Kernels, stream: int) -> Any:
    """``part`` with the first argument of each kernel filled in."""
    return _each_kernel(part, lambda kernel: partial(kernel, stream))


def _on_device(part: Kernels, device: torch.device) -> Any:
    """``part`` with each kernel launched while ``device`` is the current one."""

    def guarded(kernel: Callable[..., None]) -> Callable[..., None]:
        def launched(**arguments: Any) -> None:
            with torch.cuda.device(device):
                kernel(**arguments)

        return launched

    return _each_kernel(part, guarded)


def _each_kernel(part: Kernels, change: Callable[[Any], Any]) -> types.SimpleNamespace:
    public = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    return types.SimpleNamespace(**{n: change(x) if callable(x) else x for n, x in public.items()})


Short = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def direct(op: str, **dispatched: Any) -> Short | None:
    """The short way of ``op``'s public call, which C++ takes while these settings are at rest."""
    found: Short | None = extension().direct(
        op,
        **dispatched,
        emulated=_emulated,
        debug=debug.setting,
        levels=invariance.settings,
        forward_ad=vars(forward_ad),
    )
    return found


def replaced(op: str, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """For torch's dispatcher: ``otherwise``, before which C++ takes the calls that ``op`` knows and counts
    them as those of torch's operation ``name``."""
    found: Callable[..., Any] = extension().replaced(
        op,
        counted=(name, "native"),
        used=invariance.used,
        otherwise=otherwise,
        asides=invariance.asides,
        emulated=_emulated,
        levels=invariance.settings,
        forward_ad=vars(forward_ad),
    )
    return found


@cache
def short_way(name: str) -> Short:
    """That of a function of a backend's module, for which nothing is to be chosen any more."""
    found = direct(name, forced=_nobody, asked=_nobody, last={}, module=None)
    assert found is not None
    return found


@contextmanager
def emulated(module: Any) -> Iterator[Kernels]:
    """For tests: the device kernels in `module`, a build of csrc/emulation, run CPU tensors meanwhile."""
    _emulated.append(module)
    try:
        yield module
    finally:
        _emulated.remove(module)
