"""Compile the Triton kernels for GPUs that this machine does not have: ``python tests/triton_aot.py sm_90``.

The modules of ``rlkernel.triton_ops`` have ``aot_cases()``: calls on CPU tensors.  They run here with a
driver that only names the target, and with each launch replaced by Triton's own compile without launching;
so what is compiled is what would be launched, specialised as it would be.  Prints one JSON object: case ->
kernel -> registers, spills, shared memory.

Runs in a process of its own, one per target and without ``TRITON_INTERPRET``: Triton decides at its first
import.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class NamesTheTarget:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def modules() -> list[ModuleType]:
    import rlkernel.triton_ops as package

    names = [m.name for m in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def kernels(modules: list[ModuleType]) -> list[str]:
    """The functions that are launched: those that no other function calls."""
    functions = {f.fn.__name__: f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
    sources = {name: f.src for name, f in functions.items()}
    return sorted(
        name
        for name in functions
        if not any(re.search(rf"\b{name}\(", text) for other, text in sources.items() if other != name)
    )


def compile_cases(cases: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    try:
        report = {}
        for name, call in cases.items():
            compiled.clear()
            call()
            report[name] = {kernel: resources(binary) for kernel, binary in compiled}
        return report
    finally:
        JITFunction.run = run


def resources(binary: Any) -> dict[str, int]:
    """Registers a thread, bytes a thread spills to memory, bytes of shared memory a program."""
    if "hsaco" in binary.asm:
        text = binary.asm["amdgcn"]
        field = {k: int(v) for k, v in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        # scalar registers spill into vector registers, which costs no memory
        spilled = field["vgpr_spill_count"] + field["private_segment_fixed_size"]
        return {"registers": field["vgpr_count"], "spilled": spilled, "shared": binary.metadata.shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    field = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": field["REG"],
        "spilled": field["STACK"] + field["LOCAL"],
        "shared": binary.metadata.shared,
    }


@triton.jit
def spilling_kernel(x, N: tl.constexpr):
    """Holds an N x N tile in the registers of one warp, by way of its transpose, which it needs whole."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + rows * N + columns)
    for _ in range(4):
        tile = tile * tl.sum(tile, axis=0)[None, :] + tl.sum(tile, axis=1)[:, None]
    tl.store(x + rows * N + columns, tile)


def planted() -> None:
    spilling_kernel[(1,)](torch.empty(128, 128), N=128, num_warps=1)


def main(target: str) -> None:
    triton.runtime.driver.set_active(NamesTheTarget(TARGETS[target]))
    if TARGETS[target].backend == "hip":
        torch.version.hip = "7"  # what the launch plans ask
    found = modules()
    cases = {
        f"{module.__name__.split('.')[-1]}: {name}": call
        for module in found
        for name, call in getattr(module, "aot_cases", dict)().items()
    }
    report = {
        "cases": compile_cases(cases),
        "kernels": kernels(found),
        "planted": compile_cases({"planted": planted})["planted"]["spilling_kernel"],
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
