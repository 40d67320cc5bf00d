"""Compile the Triton kernels for GPUs that this machine does not have: ``python tests/triton_aot.py sm_90``.

``tests/aot_cases/<op>.py`` has calls on CPU tensors.  They run here with a driver that only names the target,
and with each launch replaced by Triton's own compile without launching; so what is compiled is what would be
launched, specialised as it would be.  Prints one JSON object: case -> kernel -> registers, spills, shared
memory, units of the GPU; and what its instructions do (tests/codegen/counts.py).

Runs in a process of its own, one per target and without ``TRITON_INTERPRET``: Triton decides at its first
import.
"""

import contextlib
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent / "codegen"))

import amdgcn
import sass
from counts import counted

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# whose cases are compiled for a target; of the others all
ONLY = {
    "gfx950": ("linear_logprob", "matmul", "attention", "prefix_shared_attention", "paged_prefix_attention")
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
    """The functions that are launched: those that no other function calls or hands on."""
    functions = {f.fn.__name__: f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
    sources = {name: f.src for name, f in functions.items()}
    return sorted(
        name
        for name in functions
        if not any(re.search(rf"\b{name}[(,]", text) for other, text in sources.items() if other != name)
    )


@contextlib.contextmanager
def compiling_only() -> Iterator[list[tuple[str, Any]]]:
    """Launches compile and do nothing else; the list gets a pair (kernel name, binary) of each."""
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def compile_cases(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Case -> kernel -> binary."""
    found = {}
    for name, call in cases.items():
        with compiling_only() as compiled:
            call()
        found[name] = dict(compiled)
    return found


def binaries_of_varied_calls() -> dict[str, int]:
    """How many binaries of each kernel it takes to change what changes from one training step to the next."""
    from rlkernel.calls.gae import GaeCall
    from rlkernel.calls.group_advantages import GroupAdvantagesCall
    from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall
    from rlkernel.calls.layer_norm import LayerNormCall
    from rlkernel.calls.linear_logprob import Head, LinearLogprobCall
    from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
    from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule
    from rlkernel.calls.preference_loss import PreferenceLossCall, PreferenceRule
    from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule, OutGrads
    from rlkernel.calls.rms_norm import RmsNormCall, RmsNormGrads
    from rlkernel.calls.sampling import Sampling, SamplingCall
    from rlkernel.calls.value_loss import ValueLossCall
    from rlkernel.calls.whiten import WhitenCall
    from rlkernel.prefix.layout import PrefixLayout
    from rlkernel.prefix.paged import plan_of
    from rlkernel.triton_ops import (
        gae,
        group_advantages,
        kl_shaped_rewards,
        layer_norm,
        linear_logprob,
        logprob,
        paged_prefix_attention,
        preference_loss,
        prefix_shared_attention,
        prefix_shared_attention_around,
        rms_norm,
        sampling,
        value_loss,
        whiten,
    )

    hidden, weight = torch.empty(129, 64, dtype=torch.bfloat16), torch.empty(50, 64, dtype=torch.bfloat16)
    with compiling_only() as compiled:
        for batch, length, t, ignore in (
            (1, 1, 1.0, -100),
            (2, 16, 0.7, 0),
            (3, 17, 2.0, 1),
            (16, 1, 1e-3, 16),
        ):
            n = batch * length
            logits = torch.empty(batch, length + 1, 256)[:, :-1]
            ids, rows = torch.zeros(batch, length, dtype=torch.int64), torch.ones(batch, length)
            kept = torch.zeros(7 * n, dtype=torch.int32), torch.arange(n + 1)
            grads, results = RowGrads(*(rows,) * 3), LogprobResults(*(rows,) * 5, torch.empty(7 * n))
            for support in ((), kept):
                call = LogprobCall(logits, ids, t, ignore, True, True, *support)
                logprob.forward(call)
                logprob.backward(call, results, grads)
            head = Head(None, t, 1.0, None, ignore, torch.float32, torch.bfloat16)
            options = {"return_entropy": True, "algorithm": "fused"}
            product = LinearLogprobCall.of(hidden[:n], weight, ids.view(-1), head, **options)
            found = linear_logprob.forward(product)
            grads = RowGrads(*(rows.view(-1),) * 3)
            linear_logprob.backward(product._replace(needs=(True, False, False)), found, grads)
            # any address and stride too: the order of its sums must not follow from them
            values = torch.empty(batch, length + 17)[:, t > 1 :][:, :length]
            tensors, options = (values, values, values > 0, values, None), (t, t, None, "token", float(batch))
            call = ValueLossCall(*tensors, *options, torch.float32)
            value_loss.backward(call, value_loss.forward(call), rows[0, 0])
            pairs = torch.empty(2 * batch, length + 17)[:, :length].contiguous()
            numbers = (t, 0.5, t, -0.5, 1.0, 0.0, t, 1.0, 1.0, float(batch), 0.0)  # beta to nll_items
            rule = PreferenceRule((1, 9), (t, 1.0), (0.0, t / 9), True, False, 0, False, *numbers)
            call = PreferenceLossCall(pairs, pairs, pairs > 0, *(None,) * 8, rule)
            preference_loss.backward(call, preference_loss.forward(call), rows[0, 0])
            keys, k = torch.arange(n), int(16 * t)
            numbers = (t, k, t / 9, t / 9, t)  # temperature to top_n_sigma
            request = Sampling(*numbers, keys, keys, raw=True, entropy=True, rank=True, support=n)
            sampling.forward(SamplingCall(logits.reshape(n, 256), None, request))
            gae.forward(
                GaeCall(logits[..., 0].clone(), rows, rows != 0, t / (1 + t), 0.9, None, None, "skip")
            )
            heads, scale = logits[..., t > 1 :][..., :255], torch.ones(256)[t > 1 :][:255]
            norm = RmsNormCall(heads, None, scale, t, t, "after_weight", True, (True, False, True))
            rms_norm.backward(norm, rms_norm.forward(norm), RmsNormGrads(heads, None))
            norm = LayerNormCall(heads, scale, None, t, True, (True, True, False))
            layer_norm.backward(norm, layer_norm.forward(norm), heads)
            whiten.forward(WhitenCall(values, values > 0, None, True, True, t, "std"))
            kl_shaped_rewards.forward(
                KlShapedRewardsCall(rows, rows, rows, rows != 0, t, "k3", 20 * t, 10 * t, False, None)
            )
            groups = None, None, length, None, None, None, None
            group_advantages.forward(
                GroupAdvantagesCall(
                    values.reshape(-1, 1), *groups, "grpo", "batch", True, t, "zero", 0.0, "std"
                )
            )
            layout = PrefixLayout((60 + n, 4096, length), (-1, 0, 0), (False, True, True))
            rule = AttentionRule(t, 0.0, 5000 if t > 1 else 0, False)
            q, kv = (torch.empty(layout.total, h, 64, dtype=torch.bfloat16) for h in (8, 2))
            attention = AttentionCall(q, kv, kv, layout, rule, torch.ones(8))
            found = prefix_shared_attention.forward(attention)
            prefix_shared_attention.backward(attention, found, OutGrads(q))
            part, index = q[: n + 8], torch.arange(n + 8)
            around, rows = prefix_shared_attention_around, slice(length, length + n + 8)
            around.attention_merge(q[rows], found.lse[:, rows], part, found.lse[:, : n + 8])
            around.segment_reduce(*around.gather_kv(kv, kv, index), index, index)
            pages, starts = torch.arange(9).expand(n, -1).int(), torch.arange(n + 1).int()
            lens = torch.full((n,), 70 + n, dtype=torch.int32)
            step = pages, lens, starts, plan_of(pages, lens.tolist(), starts.tolist(), 16, 0)
            cache = torch.empty(9, 16, 2, 64, dtype=torch.bfloat16)
            paged_prefix_attention.forward(PagedCall(q[:n], cache, cache, *step, PagedRule(t, 0.0, 0)))
    names = {name for name, _ in compiled}
    return {name: len({id(binary) for n, binary in compiled if n == name}) for name in names}


# instructions that multiply tiles, with their rows, columns and share of K, and that copy tiles of a tensor
UNITS = re.compile(
    r"\b(?:mma\.sync\S*?|wgmma\.mma_async\S*?)\.m\d+n\d+k\d+|\btcgen05\.mma\S*kind::\w+|\bcp\.async\.bulk\.tensor"
)
MATRIX_UNITS = re.compile(r"\bv_mfma_\w+")  # of AMD


def resources(binary: Any) -> dict[str, Any]:
    """Registers a thread, bytes a thread spills to memory, bytes of shared memory, UNITS that it uses,
    whether warps of their own copy, and how many copies may be on their way when it goes on."""
    if "hsaco" in binary.asm:
        text = binary.asm["amdgcn"]
        field = {k: int(v) for k, v in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
        # scalar registers spill into vector registers, which costs no memory
        spilled = field["vgpr_spill_count"] + field["private_segment_fixed_size"]
        shared = binary.metadata.shared
        units = sorted(set(MATRIX_UNITS.findall(text)))
        found = {"registers": field["vgpr_count"], "spilled": spilled, "shared": shared}
        return found | {"units": units, "specialized": False, "ahead": 0}
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
        "units": sorted(set(UNITS.findall(binary.asm["ptx"]))),
        "specialized": "setmaxnreg" in binary.asm["ptx"],  # warps of their own copy
        "ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", binary.asm["ptx"])), default=0),
    }


def counts_of(target: str, binaries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Case -> kernel -> what its instructions do."""
    every = {(case, kernel): b for case, kernels in binaries.items() for kernel, b in kernels.items()}
    if TARGETS[target].backend == "hip":
        machine, printed = amdgcn.MACHINE, [amdgcn.listings(b.asm["amdgcn"]) for b in every.values()]
    else:
        cubins, tool = [b.asm["cubin"] for b in every.values()], triton.knobs.nvidia.nvdisasm.path
        machine, printed = sass.MACHINE, sass.listings(cubins, target, tool)
    found: dict[str, dict[str, Any]] = {}
    for ((case, kernel), binary), listings in zip(every.items(), printed, strict=True):
        counts = counted(machine, listings[kernel], binary.metadata.num_warps)
        found.setdefault(case, {})[kernel] = counts
    return found


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
        f"{path.stem}: {name}": call
        for path in sorted((Path(__file__).parent / "aot_cases").glob("*.py"))
        if path.stem in ONLY.get(target, (path.stem,))
        for name, call in importlib.import_module(f"aot_cases.{path.stem}").cases().items()
    }
    binaries = compile_cases(cases)
    report = {
        "cases": {n: {k: resources(b) for k, b in kernels.items()} for n, kernels in binaries.items()},
        "counts": counts_of(target, binaries),
        "kernels": kernels(found),
        "binaries": binaries_of_varied_calls(),
        "planted": resources(compile_cases({"planted": planted})["planted"]["spilling_kernel"]),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
