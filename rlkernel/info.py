"""What this machine can run: ``python -m rlkernel.info [--json] [--all] [--require PART ...]``.

Versions, devices, the parts of the compiled extension, optional packages, and for every op the backend that
would run on each device, with the reasons why the others would not. Needs torch alone.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch, native
from rlkernel.integrations.areal import switch as areals
from rlkernel.integrations.llamafactory import switch as llamafactories
from rlkernel.integrations.openrlhf import switch as openrlhfs
from rlkernel.integrations.sglang import switch as sglangs
from rlkernel.integrations.skyrl import switch as skyrls
from rlkernel.integrations.swift import switch as swifts
from rlkernel.integrations.verl import switch as verls
from rlkernel.integrations.vllm import switch as vllms
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.runtime import debug, log, ranges, trials, workspace

# module: distribution. Asked of the metadata, never imported: an import can take seconds or claim a GPU.
OPTIONAL = {
    "numpy": "numpy",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "aiter": "amd-aiter",
    "transformers": "transformers",
    "trl": "trl",
    "vllm": "vllm",
    "sglang": "sglang",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "liger_kernel": "liger-kernel",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "skyrl": "skyrl",
    "areal": "areal",
    "swift": "ms-swift",
    "axolotl": "axolotl",
    "llamafactory": "llamafactory",
    "torchtitan": "torchtitan",
    "rich": "rich",
    "matplotlib": "matplotlib",
}

# What rlkernel reads while it runs; docs/build.md says what each does.
ENVIRONMENT = (
    "AREAL_RLKERNEL",
    "AREAL_RLKERNEL_STRICT",
    "LLAMAFACTORY_RLKERNEL",
    "LLAMAFACTORY_RLKERNEL_STRICT",
    "OPENRLHF_RLKERNEL",
    "OPENRLHF_RLKERNEL_RAY_HOOK",
    "OPENRLHF_RLKERNEL_STRICT",
    "RLKERNEL_CPU_ISA",
    "RLKERNEL_DEBUG",
    "RLKERNEL_LOG",
    "RLKERNEL_NVTX",
    "RLKERNEL_STORE_SCORES",
    "RLKERNEL_WORKSPACE_MIB",
    "SGLANG_RLKERNEL",
    "SGLANG_RLKERNEL_BATCH_INVARIANT",
    "SGLANG_RLKERNEL_STRICT",
    "SKYRL_RLKERNEL",
    "SKYRL_RLKERNEL_STRICT",
    "SWIFT_RLKERNEL",
    "SWIFT_RLKERNEL_STRICT",
    "VERL_RLKERNEL",
    "VERL_RLKERNEL_STRICT",
    "VLLM_RLKERNEL",
    "VLLM_RLKERNEL_BATCH_INVARIANT",
    "VLLM_RLKERNEL_STRICT",
    "VLLM_RLKERNEL_SUPPORT",
)

# What decides which vector path of the CPU kernels runs.
ISA_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


def collect() -> dict[str, Any]:
    """Everything that ``python -m rlkernel.info`` shows, as plain values that JSON can hold."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "cpu": _cpu(),
        "extension": _extension(),
        "optional": {module: _version(name, module) for module, name in OPTIONAL.items()},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "wrong": wrong(),
        "ops": {op: {device: _choice(op, device) for device in _devices()} for op in dispatch.ops()},
    }


def _versions() -> dict[str, str | None]:
    return {
        "rlkernel": _version("rlkernel"),
        "commit": _commit(Path(__file__).parent.parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "platform": platform.platform(),
    }


def _version(distribution: str, module: str | None = None) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # a package that was put on the path without being installed still counts, without a version
        return "unknown" if module and importlib.util.find_spec(module) else None


def _commit(root: Path) -> str | None:
    """The checkout's commit, with ``+changes`` when tracked files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that belongs to another user
        return None


def _devices() -> dict[str, str]:
    model = _cpuinfo("model name", "Model") or platform.processor() or platform.machine()
    devices = {"cpu": f"{model}, {threads()}"}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            arch = p.gcnArchName if torch.version.hip else f"sm_{p.major}{p.minor}"
            devices[f"cuda:{i}"] = f"{p.name}, {arch}, {p.total_memory / 2**30:.0f} GiB"
    return devices


def threads() -> str:
    """How many torch runs on, such as "1 thread"."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count != 1)}"


def _cpuinfo(*fields: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return ""
    rows = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in rows if name.strip() in fields), "")


def _cpu() -> dict[str, Any]:
    flags = _cpuinfo("flags", "Features").split()
    return {
        "architecture": platform.machine(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
    }


def _extension() -> dict[str, Any]:
    """``parts`` maps each part that was compiled in (cpu, cuda, hip) to its architectures."""
    try:
        built = native.extension().built()
    except ImportError as error:
        return {"parts": {}, "missing": str(error)}
    return {"parts": {part: list(archs) for part, archs in built.items()}, "missing": None}


def wrong() -> dict[str, str]:
    """What is the matter with variables that the import or the first call which reads them would refuse."""
    found = {}
    isas = _extension()["parts"].get("cpu", [])
    if (isa := os.environ.get("RLKERNEL_CPU_ISA")) and isas and isa not in isas:
        found["RLKERNEL_CPU_ISA"] = f"RLKERNEL_CPU_ISA must be one of {', '.join(isas)}, got {isa!r}"
    readers: dict[str, Callable[[], object]] = {
        "RLKERNEL_DEBUG": debug.set_up,
        log.VARIABLE: log.asked,
        ranges.VARIABLE: ranges.asked,
        trials.STORE_SCORES: trials.stores_scores,
        "RLKERNEL_WORKSPACE_MIB": workspace.limit,
        vllms.SWITCH: vllms.asked,
        verls.SWITCH: verls.asked,
        openrlhfs.SWITCH: openrlhfs.asked,
        skyrls.SWITCH: skyrls.asked,
        areals.SWITCH: areals.asked,
        swifts.SWITCH: swifts.asked,
        sglangs.SWITCH: sglangs.asked,
        llamafactories.SWITCH: llamafactories.asked,
    }
    for name, read in readers.items():
        try:
            read()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def _choice(op: str, device: str) -> dict[str, Any]:
    """The backend that would run ``op`` on small inputs on ``device``, and why the others would not."""
    tensors = [x for x in _inputs(op, device).values() if isinstance(x, Tensor)]
    reasons = dispatch.reasons(op, *tensors)
    able = [name for name in dispatch.order(op, tensors[0].device) if not reasons[name]]
    return {
        "backend": able[0] if able else None,
        "path": reasons.paths.get(able[0]) if able else None,
        "also": able[1:],
        "reasons": {k: v for k, v in reasons.items() if v},
    }


def _inputs(op: str, device: str) -> dict[str, Any]:
    make_inputs = importlib.import_module(f"rlkernel.reference.{op}").make_inputs
    sizes: list[Any] = []
    for p in inspect.signature(make_inputs).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            sizes += [4, 8]
        elif p.name == "layout":  # a prompt of 8 rows, completions of 5 and 3
            sizes.append(PrefixLayout((8, 5, 3), (-1, 0, 0), (False, True, True)))
        elif p.kind is not p.KEYWORD_ONLY and p.default is p.empty:
            sizes.append(8)
    return make_inputs(*sizes, device=device)


def render(info: dict[str, Any], every: bool = False) -> str:
    """``collect()``'s result as the text that ``python -m rlkernel.info`` prints; ``every``: op by op."""
    lines = [f"{name:<14}{value}" for name, value in info["versions"].items() if value]
    lines += [f"{name:<14}{value}" for name, value in info["devices"].items()]
    cpu = info["cpu"]
    lines.append(
        f"{'cpu isa':<14}{cpu['architecture']}, torch uses {cpu['torch_capability']}: {' '.join(cpu['isa'])}"
    )
    extension = info["extension"]
    for part, archs in extension["parts"].items():
        lines.append(f"{'built ' + part:<14}{' '.join(archs) or 'yes'}")
    if extension["missing"]:
        lines.append(f"{'extension':<14}not built: {extension['missing']}")
    lines.append("")
    lines += [f"{module:<14}{version or 'not installed'}" for module, version in info["optional"].items()]
    lines.append("")
    width = max(map(len, info["environment"])) + 2
    lines += [f"{name:<{width}}{value or 'not set'}" for name, value in info["environment"].items()]
    lines += [f"wrong: {why}" for why in info["wrong"].values()]
    lines += _op_by_op(info["ops"]) if every else _grouped(info["ops"])
    return "\n".join(lines)


def _op_by_op(ops: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for op, choices in ops.items():
        for device, choice in choices.items():
            also = f" (also able: {', '.join(choice['also'])})" if choice["also"] else ""
            over = f", over {choice['path']}" if choice["path"] else ""
            lines += ["", f"{op} on {device} runs on {choice['backend'] or 'no backend'}{over}{also}"]
            lines += [f"  not {name}: {'; '.join(why)}" for name, why in choice["reasons"].items()]
    return lines


def _grouped(ops: dict[str, dict[str, Any]]) -> list[str]:
    """Of each device: the ops by the backend that they run on, then each reason once."""
    lines = []
    for device in next(iter(ops.values())):
        runs: dict[str, list[str]] = {}
        reasons: dict[str, list[str]] = {}
        for op, choices in ops.items():
            runs.setdefault(choices[device]["backend"] or "no backend", []).append(op)
            for name, why in choices[device]["reasons"].items():
                reasons.setdefault(f"not {name}: {'; '.join(why)}", []).append(op)
        lines += ["", f"on {device}"]
        for backend, names in runs.items():
            lines += _wrapped(f"  {backend} runs ", names, len(ops))
        for op, choices in ops.items():
            if path := choices[device]["path"]:
                lines += _wrapped(f"  {op} runs over ", [path], len(ops))
        for reason, names in reasons.items():
            lines += _wrapped(f"  {reason}: ", names, len(ops))
    return lines


def _wrapped(start: str, names: list[str], count: int) -> list[str]:
    said = f"all {count} ops" if len(names) == count else ", ".join(names)
    return textwrap.wrap(start + said, 110, subsequent_indent="    ", break_on_hyphens=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlkernel.info", description="What this machine can run.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--all", action="store_true", help="op by op, instead of each reason once")
    parser.add_argument(
        "--require",
        nargs="+",
        default=[],
        metavar="PART",
        help="exit with 1 unless the extension has these parts",
    )
    options = parser.parse_args(arguments)
    info = collect()
    try:
        print(json.dumps(info, indent=2) if options.json else render(info, options.all), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    absent = [part for part in options.require if part not in info["extension"]["parts"]]
    if absent:
        print(f"the extension must have {', '.join(absent)}, got {info['extension']}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
