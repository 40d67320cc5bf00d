"""The extension and the wheel: what gets built where, and that nothing is built twice."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import types
import zipfile
from pathlib import Path

import exchange
import pytest
import required_parts
import torch

from rlkernel import native
from rlkernel.bench import status

ROOT = Path(__file__).resolve().parents[1]
PACKAGED = ("rlkernel", "triton_ops", "integrations", "benchmarks", "csrc")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HOMES = ("RLKERNEL_", "CUDA_", "ROCM_", "HIP_")  # what names a compiler to setup.py
COMPILED = ("isa", "logprob", "matmul", "whiten")  # matmul has an instruction set that no other op has
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


BINDINGS = """#include <pybind11/pybind11.h>
PYBIND11_MODULE(_C, m) { m.attr("cpu") = RLKERNEL_BUILT_CPU; }
"""
KERNELS = """#include "rlkernel/logprob/arguments.h"
namespace rlkernel::cpu::RLKERNEL_ISA {
int logprob_forward(const LogprobForward&) { return 0; }
int logprob_backward(const LogprobBackward&) { return 0; }
int logprob_exp(const LogprobExp&) { return 0; }
}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources whose kernels and bindings compile in no time, without folders of nvcc."""
    root = tmp_path_factory.mktemp("tree")
    for name in PACKAGED:
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.tmp")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, root / name)
    for path in (root / "csrc/cpu").glob("*.cpp"):
        if path.name.removesuffix(".cpp").removesuffix(".isa") not in COMPILED:
            path.unlink()
        elif path.name.endswith(".isa.cpp"):
            path.write_text("")  # nothing here is run, and a shared library may lack symbols
    (root / "csrc/cpu/logprob.isa.cpp").write_text(KERNELS)
    (root / "csrc/bindings.cpp").write_text(BINDINGS)
    setup = (root / "setup.py").read_text()
    setup = setup.replace("-O3", "-O0").replace('"immintrin.h", ', "")
    (root / "setup.py").write_text(re.sub(r'"/(usr/local/cuda|opt/rocm)/bin"', "", setup))
    return root


def build(tree, **environment):
    """The status and output of `setup.py build_ext`, in an environment without compilers' homes."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HOMES)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    run = subprocess.run(command, cwd=tree, env=kept | environment, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def without_device_compilers(folder):
    """A PATH whose only tools are those of a CPU build."""
    folder.mkdir(exist_ok=True)
    for tool in ("g++", "c++", "as", "ld", "sh"):
        if (found := shutil.which(tool)) and not (folder / tool).exists():
            (folder / tool).symlink_to(found)
    return str(folder)


def test_the_cpu_part_is_built_for_every_instruction_set():
    built = native.extension().built()
    x86 = sysconfig.get_platform().endswith("x86_64")
    assert built["cpu"] == (["baseline", "avx2", "avx512", "avx512_bf16"] if x86 else ["baseline"])
    kernels = native.kernels_for("cpu")
    assert not isinstance(kernels, str) and kernels.part == "cpu"


def test_built_parts_have_their_functions():
    import emulation

    module = native.extension()
    kernels_h = (ROOT / "csrc/include/rlkernel/kernels.h").read_text()
    alone = {*re.findall(r"KERNEL\((\w+)\)", kernels_h.split("define RLKERNEL_CPU_KERNELS")[1])}
    # of an op whose compiled kernels are a CPU's alone there is none for a device
    assert {*status.CPU_ONLY} & {*vars(module.cpu)} <= alone
    parts = {part: getattr(module, part) for part in module.built()}
    assert all(kernels.part == part for part, kernels in parts.items())
    for part, kernels in parts.items():
        assert {*vars(kernels)} == {*vars(module.cpu)} - (set() if part == "cpu" else alone), part
    for lanes in (32, 64):  # which have their tests' functions besides
        emulated = {*vars(emulation.module(lanes))}
        assert emulated & {*vars(module.cpu)} == {*vars(module.cpu)} - alone


def test_a_device_without_kernels_has_a_reason():
    assert "got meta" in native.kernels_for("meta")
    assert not native._runs_on(["80", "90a", "100", "100+PTX"], (7, 5))
    assert native._runs_on(["80"], (8, 9)) and not native._runs_on(["86"], (8, 0))
    assert native._runs_on(["90a"], (9, 0)) and not native._runs_on(["90a"], (10, 0))
    assert native._runs_on(["100+PTX"], (12, 0)) and not native._runs_on(["100+PTX"], (9, 0))


@pytest.mark.parametrize(
    ("runtime", "driver", "compiled", "runs"),
    [
        (13000, 13000, True, True),
        (13000, 14010, False, True),
        (13020, 13000, True, True),  # minor versions of one major run each other's code,
        (13020, 13000, False, False),  # but not each other's PTX
        (13000, 12090, True, False),
        (13000, 0, True, False),
    ],
)
def test_an_old_driver_has_a_reason(runtime, driver, compiled, runs):
    reason = native._old_driver(runtime, driver, compiled)
    assert (reason == "") == runs
    if not runs:
        assert f"CUDA {runtime // 1000}.{runtime % 1000 // 10}" in reason
        assert f"this driver knows CUDA {driver // 1000}.{driver % 1000 // 10}" in reason
        assert ("PTX" in reason) == (not compiled)


def test_an_old_driver_leaves_ops_to_triton(monkeypatch):
    module = types.SimpleNamespace(
        built=lambda: {"cpu": ["baseline"], "cuda": ["90a", "100+PTX"]},
        cuda_versions=lambda: (13000, 12090),
        cuda=types.SimpleNamespace(part="cuda"),
    )
    monkeypatch.setattr(native, "extension", lambda: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    kernels = native._kernels.__wrapped__
    assert "this driver knows CUDA 12.9" in kernels("cuda", 0)
    module.cuda_versions = lambda: (13000, 13000)
    assert kernels("cuda", 0) is module.cuda


def test_emulated_kernels_are_put_back_when_the_body_raises():
    import emulation

    before = native.kernels_for("cpu")
    with pytest.raises(KeyError), native.emulated(emulation.module(32)):
        assert native.kernels_for("cpu").part == "emulated"
        raise KeyError
    assert native.kernels_for("cpu") is before


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_governed_by_torch():
    """The kernels run on torch's threads: no second runtime is mapped and no thread is added."""
    script = """
import os, re, torch
torch.set_num_threads(2)
a = torch.randn(512, 512)
(a @ a).exp_().sum()
before = len(os.listdir("/proc/self/task"))
import rlkernel
from rlkernel import native
from rlkernel.bench import status
logits = torch.randn(64, 20000)
with rlkernel.use_backend("native"):
    rlkernel.logprob(logits, torch.zeros(64, dtype=torch.int64))
runtimes = set(re.findall(r"/.*lib(?:gomp|omp|iomp5)[^/\\n]*", open("/proc/self/maps").read()))
print(len(runtimes), len(os.listdir("/proc/self/task")) - before)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", "0"]


def test_isa_objects_keep_their_code_to_themselves():
    """A weak symbol of the AVX-512 object could be the one the linker keeps for every instruction set."""
    objects = sorted((ROOT / "build").glob(f"native-{platform.machine()}/*.isa.cpp.*.o"))
    if not objects:
        pytest.skip("this tree was not built in place")
    for path in objects:
        symbols = subprocess.run(["nm", "--defined-only", "-C", path], capture_output=True, text=True).stdout
        weak = [line for line in symbols.splitlines() if re.search(r" [WVu] (?!DW\.ref\.)", line)]
        isa = path.name.split(".")[-2]
        assert not [line for line in weak if f"cpu::{isa}::" not in line], path.name


@pytest.mark.slow
def test_a_second_build_compiles_nothing(tree, tmp_path):
    environment = {"PATH": without_device_compilers(tmp_path / "bin"), "RLKERNEL_BACKENDS": "cpu"}
    status, output = build(tree, **environment)
    assert status == 0, output
    assert "rlkernel: built cpu" in output and "cuda" not in output
    status, output = build(tree, **environment)
    assert status == 0 and "no work to do" in output
    (tree / "csrc/cpu/whiten.cpp").touch()
    status, output = build(tree, **environment)
    assert status == 0 and "[2/2]" in output, output  # that file and the link


@pytest.mark.slow
def test_a_missing_compiler_is_one_line(tree, tmp_path):
    path = without_device_compilers(tmp_path / "bin")
    status, output = build(tree, PATH=path)
    assert status == 0, output
    said = [line for line in output.splitlines() if "not built" in line]
    assert said == [
        "rlkernel: cuda is not built: nvcc was not found (PATH, CUDA_HOME, CUDA_PATH, the package "
        "nvidia-cuda-nvcc)",
        "rlkernel: hip is not built: neither hipcc nor clang++ was found (PATH, ROCM_PATH)",
    ]
    status, output = build(tree, PATH=path, RLKERNEL_BACKENDS="cpu,cuda")
    assert status != 0 and "asks for cuda, but nvcc was not found" in output


NO_COMPILER = "the C++ compiler g++ was not found (PATH, CXX)"
WITHOUT_EXTENSION = """
import sys, torch, rlkernel
from rlkernel import info, native
assert rlkernel.__file__.startswith(sys.argv[1]), rlkernel.__file__
logits, ids = torch.randn(3, 7, requires_grad=True), torch.tensor([0, 6, -100])
out = rlkernel.logprob(logits, ids, return_entropy=True)
out.logprobs.sum().backward()
torch.testing.assert_close(out.logprobs[:2], torch.log_softmax(logits, -1)[[0, 1], [0, 6]])
assert logits.grad.isfinite().all() and rlkernel.last_backend("logprob") == "reference"
sys.exit(info.main(sys.argv[2:]))
"""


def without_tools(folder):
    """An environment whose PATH is one empty folder, and that names no compiler."""
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*HOMES, "PYTHONPATH", "TRITON_"))}
    return kept | {"PATH": str(folder), "CXX": "g++"}


def test_an_install_without_a_compiler_is_a_working_library(tree, tmp_path):
    """One line says what is left out and why, ops run on the reference, and info names what is missing."""
    environment, target = without_tools(tmp_path / "empty"), tmp_path / "target"
    library = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    earlier = [tree / f"{home}rlkernel/_C{SUFFIX}" for home in ("", f"{library}/")]
    for path in earlier:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of other sources")
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--target", target, tree]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    said = [line.strip() for line in (run.stdout + run.stderr).splitlines() if "not built" in line]
    assert said == [f"rlkernel: rlkernel._C is not built: {NO_COMPILER}; ops run on Triton and PyTorch"]
    assert (target / "rlkernel/__init__.py").exists() and not [*target.rglob("_C*.so")]
    status, output = build(tree, **environment)
    assert status == 0 and said[0] in output and not any(path.exists() for path in earlier)
    # -S: an editable install of this tree must not lend its extension
    python = [sys.executable, "-S", "-c", WITHOUT_EXTENSION, target, "--require", "cpu"]
    environment["PYTHONPATH"] = os.pathsep.join([str(target), *filter(lambda p: "-packages" in p, sys.path)])
    run = subprocess.run(python, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "the extension must have cpu" in run.stderr, run.stderr
    missing = "rlkernel._C cannot be loaded: No module named 'rlkernel._C'"
    assert f"extension     not built: {missing}" in run.stdout and "where a C++ compiler is" in run.stdout
    assert f"  not native: {missing}" in run.stdout


@pytest.mark.parametrize("asked", ["cpu", "auto,cpu", "cpu,cuda"])
def test_a_compiler_that_was_asked_for_is_an_error(tree, tmp_path, asked):
    environment = without_tools(tmp_path / "empty")
    status, output = build(tree, **environment, RLKERNEL_BACKENDS=asked)
    part = asked.replace("auto,", "").partition(",")[0]
    assert status != 0 and "Traceback" not in output
    assert f"rlkernel: RLKERNEL_BACKENDS asks for {part}, but {NO_COMPILER}" in output.splitlines()


def test_a_compiler_that_fails_is_an_error(tree, tmp_path):
    """Optional is what cannot be compiled here, never what does not compile."""
    fake_tool(tmp_path / "g++", 1)
    status, output = build(tree, CXX=str(tmp_path / "g++"))
    assert status != 0 and "rlkernel._C is not built" not in output


def test_an_unknown_backend_is_an_error(tree):
    status, output = build(tree, RLKERNEL_BACKENDS="cpu,opencl")
    assert status != 0 and "RLKERNEL_BACKENDS must list cpu, cuda and hip, or be auto, got 'opencl'" in output


def fake_tool(path, status):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("home", "tool", "status", "parts"),
    [
        ("CUDA_HOME", "nvcc", 1, ["cpu", "cuda"]),
        ("CUDA_PATH", "nvcc", 1, ["cpu", "cuda"]),
        ("PATH", "nvcc", 1, ["cpu", "cuda"]),
        ("PYTHONPATH", "nvcc", 1, ["cpu", "cuda"]),  # as PyPI's packages install it
        ("ROCM_PATH", "hipcc", 1, ["cpu", "hip"]),
        ("HIP_PATH", "hipcc", 1, ["cpu", "hip"]),
        ("PATH", "clang++-19", 0, ["cpu", "hip"]),
        ("PATH", "clang++", 1, ["cpu"]),  # a clang without AMD's headers and runtime, as most are
        ("PATH", "other", 0, ["cpu"]),
    ],
)
def test_ci_requires_the_parts_whose_compilers_setup_finds(
    tree, tmp_path, monkeypatch, home, tool, status, parts
):
    for name in filter(lambda name: name.startswith(HOMES), [*os.environ]):
        monkeypatch.delenv(name)
    monkeypatch.setattr(required_parts, "USUAL", ())
    path = without_device_compilers(tmp_path / "bin")
    package = tmp_path / "home/nvidia/cu13" if home == "PYTHONPATH" else tmp_path / "home"
    fake_tool(package / "bin" / tool, status)
    found = {home: str(tmp_path / "home")} if home != "PATH" else {"PATH": f"{path}:{tmp_path / 'home/bin'}"}
    if home == "PYTHONPATH":
        monkeypatch.syspath_prepend(found[home])
    for name, value in ({"PATH": path} | found).items():
        monkeypatch.setenv(name, value)
    assert required_parts.required() == parts
    for part in set(parts) - {"cpu"}:  # setup.py sees that compiler too, and then says that it is a fake
        if status:
            code, output = build(tree, RLKERNEL_BACKENDS=part, **({"PATH": path} | found))
            assert code != 0 and f"{tool} cannot build" in output and "not found" not in output


@pytest.mark.slow
def test_the_wheel_holds_the_linked_folders(tree, tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    environment = {**os.environ, "RLKERNEL_BACKENDS": "cpu"}
    run = subprocess.run(
        [*pip, "-w", tmp_path, "."], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("rlkernel-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    for folder in ("triton_ops", "integrations", "benchmarks"):
        sources = {f"rlkernel/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*.py")}
        assert sources and sources <= names
        assert not any(name.startswith(f"{folder}/") for name in names)
    assert {f"rlkernel/_C{SUFFIX}", "rlkernel/_C.pyi", "rlkernel/py.typed"} <= names
    assert "rlkernel/benchmarks/results/codegen.json" in names
    assert not any(name.startswith(("csrc/", "tests/", "build/")) for name in names)
    fields, _, page = metadata.partition("\n\n")
    assert "Author: rlkernel maintainers" in fields and "Project-URL: Documentation, https://" in fields
    assert "](docs/" not in page and "/blob/main/docs/" in page  # links that hold on an index's page
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in needed if "extra" not in line] == ["Requires-Dist: torch>=2.11"]


def test_the_source_archive_is_the_repository(tmp_path):
    """With tests, pages, examples and Makefile, so that the README's commands work in it; links are links."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("this tree is not a git checkout")
    root = tmp_path / "tree"
    for name in tracked:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (archive,) = tmp_path.glob("rlkernel-*.tar.gz")
    with tarfile.open(archive) as opened:
        members = {m.name.partition("/")[2]: m for m in opened.getmembers()}
    assert set(tracked) <= set(members)
    links = {name: m.linkname for name, m in members.items() if m.issym()}
    assert links == {
        f"rlkernel/{folder}": f"../{folder}" for folder in ("benchmarks", "integrations", "triton_ops")
    }
    assert not any(name.endswith((".pyc", ".so")) for name in members)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the ops' tests run the CUDA functions")
def test_cuda_functions_raise_without_a_gpu():
    """The CUDA part loads on a machine without a driver; a launch raises with the runtime's own words."""
    if "cuda" not in native.extension().built():
        pytest.skip("this machine has no nvcc")
    launch = """
x = torch.zeros(4)
native.extension().cuda.whiten(
    x=x, mask=None, weights=None, states=None, update=False, shift_mean=True, unbiased=True, eps_in_std=False,
    eps=0.0, clip=1.0, partials=x[:0].double(), out=x, state=None,
)
"""
    error = exchange.run(f"told(device={exchange.CUDA})", launch)
    assert re.search("RuntimeError: whiten: .*(driver|device)", error)
