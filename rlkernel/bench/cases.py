"""What is measured: the cases and peers of ``benchmarks/<op>.py``, and the shapes of known models."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch

# Sizes of published models, from their config.json; an op takes the letters that are its own.
MODELS: dict[str, dict[str, int]] = {
    "llama-3-8b": {"H": 4096, "V": 128256},
    "llama-3.2-1b": {"H": 2048, "V": 128256},
    "qwen2.5-0.5b": {"H": 896, "V": 151936},
    "qwen3-0.6b": {"H": 1024, "V": 151936},
    "qwen3-8b": {"H": 4096, "V": 151936},
    "mistral-7b-v0.3": {"H": 4096, "V": 32768},
    "gemma-3-4b": {"H": 2560, "V": 262208},
    "gpt-oss-20b": {"H": 2880, "V": 201088},
    "deepseek-v3": {"H": 7168, "V": 129280},
}
MODEL_TOKENS = {"cpu": 256, "cuda": 8192}
DTYPES = ("float32", "bfloat16", "float16", "float64")
SUITES = ("parity", "memory", "speed")


class UsageError(ValueError):
    """The command line asks for something that is not there; says what is."""


@dataclass(frozen=True)
class Case:
    """One call of an op: the sizes that ``make_inputs`` takes, in order, a dtype, the function's options."""

    sizes: Mapping[str, int]
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # what sets this case apart, for its name
    gradients: tuple[str, ...] = ()  # inputs that get a gradient; () means the op's GRADIENTS
    upstream: tuple[str, ...] = ()  # outputs that get one from above; () means all of the op's OUTPUTS
    suites: tuple[str, ...] = SUITES
    peers: tuple[str, ...] = ()  # () means all
    workspace: int | None = None  # bytes, instead of the default limit
    scale: int = 1  # lengths are this many times smaller than what the case stands for
    axis: tuple[str, int] | None = None  # where the case lies in a series, for --plot and the memory table
    inputs: Mapping[str, Any] = field(default_factory=dict)  # for make_inputs, beside the op's INPUTS
    op: str = ""

    @property
    def name(self) -> str:
        parts = [f"{letter}={size}" for letter, size in self.sizes.items()]
        if "temperature" in self.options:
            parts.append(f"T={self.options['temperature']}")
        if self.options.get("return_entropy"):
            parts.append("entropy")
        parts += [self.note] if self.note else []
        return " ".join(parts)

    @property
    def rows(self) -> int:
        """The first size."""
        return next(iter(self.sizes.values()))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def replace(self, **changes: Any) -> "Case":
        return dataclasses.replace(self, **changes)


Call = Callable[[dict[str, Any], Case], dict[str, Tensor]]
Bare = Callable[[dict[str, Any], Case, bool], Callable[[], None]]


@dataclass(frozen=True)
class Peer:
    """A rival. ``load`` imports it and returns its call; it raises ImportError when it is not there, and the
    call raises NotImplementedError when it cannot do a case. Either reason is shown in the report."""

    name: str
    load: Callable[[], Call]
    on_request: bool = False  # slow to start: runs only when --peers names it, or --peers all
    bare: Bare | None = None  # a ceiling, not a rival: only timed
    # makes its fixed tiles so many times smaller inside the block, as a scaled case needs; None: it has none
    shrink: Callable[[int], AbstractContextManager[None]] | None = None
    cpu_note: str = ""  # what a reader of CPU results must know: most peers have their best path on a GPU


def modules(names: Iterable[str] | None = None) -> dict[str, ModuleType]:
    """``benchmarks/<op>.py`` of every op that has one, or of ``names``."""
    known = [op for op in dispatch.ops() if importlib.util.find_spec(f"rlkernel.benchmarks.{op}")]
    for name in names or ():
        if name not in known:
            raise UsageError(f"--op must be one of {', '.join(known)}, got {name}")
    return {op: importlib.import_module(f"rlkernel.benchmarks.{op}") for op in names or known}


def presets(benchmarks: Mapping[str, ModuleType]) -> list[str]:
    """Every name that --preset takes: the models and the presets of the benchmarks."""
    own = [name for module in benchmarks.values() for name in module.PRESETS]
    return [*MODELS, *dict.fromkeys(own)]


def parse_shape(text: str) -> dict[str, int] | tuple[int, ...]:
    """``"N=512,V=32000"`` to a mapping, ``"512x32000"`` to a tuple in the order of the op's letters."""
    try:
        if "=" in text:
            pairs = [pair.split("=") for pair in text.split(",")]
            shape: dict[str, int] | tuple[int, ...] = {letter.strip(): int(size) for letter, size in pairs}
            sizes = list(shape.values())  # type: ignore[union-attr]
        else:
            shape = tuple(sizes := [int(size) for size in text.split("x")])
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UsageError(f"--shape must be like N=512,V=32000 or 512x32000, got {text}")
    return shape


def select(
    benchmarks: Mapping[str, ModuleType],
    preset: str | None = None,
    shape: str | None = None,
    dtypes: Iterable[str] = (),
    device: str = "cpu",
) -> list[Case]:
    """The cases that a command line asks for, in the order of the ops."""
    chosen: list[Case] = []
    for op, module in benchmarks.items():
        cases = _of_op(module, preset, shape, device)
        if dtypes:
            # a mapping has no hash, so cases are told apart by their names
            unique = {f"{c.name} {c.axis}": c for c in cases}
            cases = [c.replace(dtype=d) for c in unique.values() for d in dtypes]
        chosen += [c.replace(op=op, gradients=c.gradients or module.GRADIENTS) for c in cases]
    if preset is not None and preset not in presets(benchmarks):
        raise UsageError(f"--preset must be one of {', '.join(presets(benchmarks))}, got {preset}")
    if not chosen:
        letters = "; ".join(f"{op}: {','.join(module.DIMS)}" for op, module in benchmarks.items())
        with_preset = "" if preset is None else f" --preset {preset}"
        raise UsageError(f"an op must take these sizes ({letters}), got --shape {shape}{with_preset}")
    return chosen


def _of_op(module: ModuleType, preset: str | None, shape: str | None, device: str) -> list[Case]:
    base: list[Case] = list(module.QUICK)
    sizes: dict[str, int] = {}
    if preset in MODELS:
        sizes = {"N": MODEL_TOKENS[device], **MODELS[preset]}
        dtype = "float32" if device == "cpu" else "bfloat16"
        base = [Case(sizes, dtype, module.OPTIONS, note=preset)]
    elif preset is not None:
        base = list(module.PRESETS.get(preset, ()))
    elif shape is not None:
        base = [Case({}, dtype, module.OPTIONS) for dtype in ("float32", "bfloat16")]
    if shape is not None:
        given = parse_shape(shape)
        if isinstance(given, tuple):
            if len(given) != len(module.DIMS):
                return []
            given = dict(zip(module.DIMS, given, strict=True))
        if not set(given) <= set(module.DIMS):
            return []
        base = [c.replace(sizes={**c.sizes, **given}) for c in base]
    complete = [c for c in base if set(module.DIMS) <= set(c.sizes)]
    return [c.replace(sizes={letter: c.sizes[letter] for letter in module.DIMS}) for c in complete]
