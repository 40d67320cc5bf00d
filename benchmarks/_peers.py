"""What the benchmark files share: finding an installed peer, and running a case under pytest-benchmark."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import rlkernel
from rlkernel.bench import parity
from rlkernel.bench.cases import Case
from rlkernel.bench.run import PASSES, Contender


def module(path: str) -> ModuleType:
    """Import ``path`` of a peer.

    Raises:
        ImportError: it is not installed, or one of its own dependencies is not; says which.
    """
    package = path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ImportError("not installed")
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ImportError(f"{package} {_version(package)} does not import here: {error}") from error


def file(package: str, path: str, root: Path | None = None) -> ModuleType:
    """One file of a peer by itself, for a package whose ``__init__`` needs more than the file does."""
    if root is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("not installed")
        root = Path(spec.submodule_search_locations[0])
    location = root / path
    name = f"rlkernel_bench_{package}_{location.stem}"
    found = importlib.util.spec_from_file_location(name, location)
    if found is None or found.loader is None or not location.exists():
        raise ImportError(f"{package} {_version(package)} has no {path}")
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def folders() -> list[Path]:
    """Where files of peers that are not installed may lie: ``$RLKERNEL_PEERS``, then where ``make`` puts
    them."""
    named = os.environ.get("RLKERNEL_PEERS")
    return [*([Path(named)] if named else []), Path(sys.prefix) / "peers"]


@functools.cache
def verl(path: str) -> ModuleType:
    """``verl.<path>``: verl's own files, also where ray, codetiming and tensordict, which its losses and
    advantages never use, are not installed.

    Raises:
        ImportError: verl is not installed, or one of its files does not import.
    """
    path = f"verl.{path}"
    try:
        return module(path)
    except ImportError:
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise
    names = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
    folder = Path(spec.submodule_search_locations[0])
    fakes = {name: _bare(name, folder.joinpath(*name.split(".")[1:])) for name in names}
    for name, classes in _VERL_ONLY_IMPORTS.items():
        if name.startswith("verl.") or importlib.util.find_spec(name) is None:
            fakes[name] = _bare(name, None, *classes)
    with _in_place_of(("verl",), fakes):
        groupwise = importlib.import_module("verl.utils.groupwise")
        for name in ("as_torch_index", "group_mean_std"):
            setattr(fakes["verl.utils"], name, getattr(groupwise, name))
        return importlib.import_module(path)


def verl_core_algos() -> ModuleType:
    return verl("trainer.ppo.core_algos")


# Modules of which those files take a name for an annotation, an isinstance or a container.
_VERL_ONLY_IMPORTS = {
    "verl.protocol": ("DataProto",),
    "verl.trainer.config": ("AlgoConfig",),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
    "verl.workers.config": ("ActorConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
    "tensordict": ("TensorDict",),
    "omegaconf": ("DictConfig",),
}


@functools.cache
def vllm(path: str) -> ModuleType:
    """``vllm.<path>``: the installed package, or else vLLM's own file where ``make`` put it, beside stubs of
    what that file imports and its torch path never uses.

    Raises:
        ImportError: neither is here, or the file does not import.
    """
    if importlib.util.find_spec("vllm") is not None:
        return module(f"vllm.{path}")
    folder = next((x / "vllm" for x in folders() if (x / "vllm").is_dir()), None)
    if folder is None:
        raise ImportError("not installed")
    fakes = {name: _bare(name, folder.joinpath(*name.split(".")[1:])) for name in _VLLM_PACKAGES}
    for name, contents in _vllm_stubs().items():
        fakes.setdefault(name, _bare(name, None)).__dict__.update(contents)
    with _in_place_of(("vllm",), fakes):
        return importlib.import_module(f"vllm.{path}")


# vLLM's packages, whose __init__ would start its engine
_VLLM_PACKAGES = (
    "vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.layers", "vllm.utils", "vllm.v1",
    "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.sample", "vllm.v1.sample.ops", "vllm.v1.worker",
    "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample",
)  # fmt: skip


def _vllm_stubs() -> dict[str, dict[str, Any]]:
    """What the sampling files import from the rest of vLLM, by module.

    Its CPU kernels are C++ of a build of its own. On POWER and RISC-V CPUs it samples in
    torch, and that is the machine that it is told of here; on a GPU it is told of none, with the same effect.
    """
    import torch._dynamo  # which the import of vLLM's files would start, beside stubs that are not for it
    import triton
    import triton.language as tl

    no = {name: lambda *_: False for name in ("is_cuda", "is_cuda_alike", "is_rocm", "is_xpu", "is_enabled")}
    on_cpu = not torch.cuda.is_available()
    platform = SimpleNamespace(
        **no,
        is_cpu=lambda: on_cpu,
        get_cpu_architecture=lambda: "POWERPC",
        import_kernels=lambda: None,
        simple_compile_backend="eager",  # for the rank, where inductor would take a minute to start
    )
    anything = type("anything", (), {})
    return {
        "vllm": {"SamplingParams": anything},
        "vllm._aiter_ops": {"rocm_aiter_ops": SimpleNamespace(**no)},
        "vllm.compilation.cuda_graph": {"CUDAGraphStat": anything},
        "vllm.config.model": {
            "LogprobsMode": str,
            "PROCESSED_LOGPROBS_MODES": ("processed_logits", "processed_logprobs"),
        },
        "vllm.envs": {"__getattr__": _vllm_switch},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {
            "current_platform": platform,
            "CpuArchEnum": SimpleNamespace(RISCV="RISCV", POWERPC="POWERPC"),
        },
        "vllm.platforms.interface": {"DeviceCapability": anything},
        "vllm.scalar_type": {"ScalarType": anything},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": False},
        "vllm.utils.flashinfer": dict.fromkeys(
            (
                "flashinfer_bf16_mm",
                "flashinfer_quant_nvfp4_8x4_sf_layout",
                "is_flashinfer_cutedsl_bf16_gemm_supported",
            )
        ),  # fmt: skip
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": lambda **_: contextlib.nullcontext()},
        "vllm.utils.math_utils": {"cdiv": None},
        "vllm.utils.platform_utils": {"num_compute_units": None},
        "vllm.utils.torch_utils": {
            "PIN_MEMORY": False,
            "async_tensor_h2d": lambda data, device, dtype: torch.tensor(data, device=device, dtype=dtype),
            "direct_register_custom_op": lambda **_: None,
            "make_tensor_with_pad": None,
        },
        "vllm.v1.core.sched.output": {"SchedulerOutput": anything},
        "vllm.v1.sample.logits_processor": {"LogitsProcessors": anything},
        "vllm.v1.sample.thinking_budget_state": {"ThinkingBudgetStateHolder": anything},
    }


def _vllm_switch(name: str) -> bool:
    """Every switch of vLLM's environment is off."""
    if name.startswith("VLLM_"):
        return False
    raise AttributeError(name)


@contextlib.contextmanager
def _in_place_of(packages: tuple[str, ...], fakes: dict[str, ModuleType]) -> Iterator[None]:
    """``fakes`` are what an import finds inside the block; afterwards ``packages`` are as they were."""

    def ours() -> list[str]:
        return [name for name in sys.modules if _top(name) in (*packages, *fakes)]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def _bare(name: str, folder: Path | None, *classes: str) -> ModuleType:
    """A module without its code: with a folder, a package whose other modules are real."""
    made = ModuleType(name)
    if folder is not None:
        made.__path__ = [str(folder)]
    for each in classes:
        setattr(made, each, type(each, (), {}))
    return made


def _top(name: str) -> str:
    return name.partition(".")[0]


@contextlib.contextmanager
def shrunk(path: str, name: str, scale: int) -> Iterator[None]:
    """Divide the constant ``name`` of the module ``path`` by ``scale`` inside the block."""
    owner = importlib.import_module(path)
    full = getattr(owner, name)
    setattr(owner, name, full // scale)
    try:
        yield
    finally:
        setattr(owner, name, full)


def _version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [package])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def parametrize(metafunc: Any, cases: list[Case], names: tuple[str, ...]) -> None:
    """The body of a benchmark file's ``pytest_generate_tests``: every case, both passes, every name."""
    metafunc.parametrize("name", names)
    passes = [False, True] if metafunc.module.GRADIENTS else [False]
    metafunc.parametrize("backward", passes, ids=[PASSES[backward] for backward in passes])
    metafunc.parametrize("case", cases, ids=[f"{case.name} {case.dtype}" for case in cases])


def pytest_benchmark(benchmark: Any, op: str, case: Case, backward: bool, name: str) -> None:
    """Time ``name`` ("rlkernel" or a peer) on ``case``; skipped with the reason where it cannot run.

    On the GPU where there is one: a call then ends when the GPU is done, so that what Python takes counts too
    (``rlkernel.bench`` times the GPU alone).
    """
    import pytest  # rlkernel.bench runs without it
    import torch

    own = importlib.import_module(f"rlkernel.benchmarks.{op}")
    case = case.replace(op=op, gradients=case.gradients or own.GRADIENTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = parity.make_inputs(own, case, device)
    grads = parity.upstream(own, case, inputs)
    if name == "rlkernel":
        contender = Contender(name, parity.ours(own, op, "auto"))
    else:
        peer = next(p for p in own.PEERS if p.name == name)
        try:
            contender = Contender(name, peer.load(), peer)
        except ImportError as error:
            pytest.skip(str(error))
    step = contender.step(inputs, case, grads, backward)

    def finished() -> None:
        step()
        torch.cuda.synchronize()

    timed = step if device == "cpu" else finished
    try:
        timed()  # the first call compiles and allocates
    except NotImplementedError as error:
        pytest.skip(f"{name}: {error}")
    direction = PASSES[backward]
    benchmark.group = f"{op} {case.name} {case.dtype} {direction}"  # contenders stand beside each other
    benchmark.extra_info.update(
        op=op, name=name, sizes=dict(case.sizes), dtype=case.dtype, device=device,
        bytes=own.bytes_moved(case, backward), flops=own.flops(case, backward), **{"pass": direction},
    )  # fmt: skip
    if name == "rlkernel":
        benchmark.extra_info["backend"] = rlkernel.last_backend(op)
    benchmark(timed)
