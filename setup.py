"""Builds `rlkernel._C` with ninja: CPU kernels where a C++ compiler is, CUDA and HIP where theirs are too.

    RLKERNEL_BACKENDS     auto (default), or a list such as cpu,cuda; a part asked for by name must build
    RLKERNEL_CUDA_ARCHS   default 80;90a;100;120, those that nvcc knows, and PTX of the newest for later ones
    RLKERNEL_HIP_ARCHS    default gfx90a;gfx942
    MAX_JOBS              compilers at a time
    CUDAFLAGS             what nvcc gets besides, such as -lineinfo for a profiler that shows lines
    LDFLAGS               what the linker gets besides: `make wheels` hands it an older C library

Objects stay in build/native-<machine>, with depfiles: what did not change is not compiled again, whoever
asks. Kernels know no Python, so all Pythons share their objects; each has its own bindings.
No torch is needed: kernels see pointers, and one binary serves every torch version.
"""

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
CXX = os.environ.get("CXX", "g++")
INCLUDE = f"-I{ROOT / 'csrc/include'}"
COMMON = "-O3 -std=c++17 -fPIC -fvisibility=hidden"
# No contraction behind the source's back: a fused multiply-add stands where the code says fma, so that a tail
# loop has the bits of the main loop. errno and traps are given up because they only block vectorisation. No
# vector crosses the border of a file, so how an instruction set passes them (-Wpsabi) concerns nobody.
CPU_MATH = "-ffp-contract=off -fno-math-errno -fno-trapping-math"
LINK = f"{CXX} -shared {os.environ.get('LDFLAGS', '')}".rstrip()
CPU_FLAGS = f"{COMMON} -fopenmp {CPU_MATH} -Wall -Wextra -Wno-psabi {INCLUDE}"
# What runs where there is no AVX2 gets of -O3 what its kernels gain from: they are as fast, and take a fifth
# less to compile. clang does not know these options.
X86_ISAS = {
    "baseline": "" if "clang" in CXX else "-O2 -fpeel-loops -fvect-cost-model=dynamic",
    "avx2": "-march=x86-64-v3",
    "avx512": "-march=x86-64-v4",
}
# What only the matrix product has, and is compiled for it alone: RLKERNEL_CPU_DISPATCH_BF16.
BF16_ISA, BF16_SOURCES = {"avx512_bf16": "-march=x86-64-v4 -mavx512bf16"}, ("matmul.isa.cpp",)
# What most kernels include, parsed once for each instruction set: <immintrin.h> alone takes as long as many a
# kernel. A compiler that does not take the precompiled file reads the header itself.
PRECOMPILED = ("algorithm", "cmath", "immintrin.h", "memory", "vector")
# What nvcc compiles as one source: its passes for each architecture take more than a second, whatever a file
# holds. Not all as one: a change compiles the part that it is in, and the filters, which ask for an
# architecture, get PTX for one more.
TOGETHER = {
    "filters": ("sampling_bf16", "sampling_f16", "sampling_f32"),
    "rows": ("layer_norm", "rms_norm", "rotary", "swiglu"),
    "sequences": (
        "errors",
        "gae",
        "group_advantages",
        "kl_shaped_rewards",
        "policy_loss",
        "preference_loss",
        "prefix_shared_attention",
        "value_loss",
        "whiten",
    ),
}
ISAS = X86_ISAS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ""}
PARTS = ("cpu", "cuda", "hip")
COMPARISONS = {"<": lt, "<=": le, ">": gt, ">=": ge, "==": eq, "!=": ne}


@dataclass
class Part:
    """What one part adds to the ninja file.

    sources are (rule, source, suffix, flags); headers, by suffix, what is precompiled for it, with its flags.
    """

    rules: dict[str, str] = field(default_factory=dict)
    sources: list[tuple[str, Path, str, str]] = field(default_factory=list)
    archs: list[str] = field(default_factory=list)
    libraries: str = ""
    headers: dict[str, tuple[str, str]] = field(default_factory=dict)


class Unavailable(Exception):
    """Why a part cannot be built here, in one line."""


def arch_list(variable: str, default: list[str]) -> list[str]:
    value = os.environ.get(variable, "")
    return [arch for arch in re.split(r"[;, ]+", value) if arch] or default


def find_tool(names: list[str], homes: list[str], folders: list[str]) -> str | None:
    """The first of `names` under a home named by the environment, on PATH, or in a usual folder."""
    under_homes = [str(Path(os.environ[home]) / "bin") for home in homes if os.environ.get(home)]
    path = os.pathsep.join([*under_homes, os.environ.get("PATH", os.defpath), *folders])
    return next((tool for name in names if (tool := shutil.which(name, path=path))), None)


def probe(build_dir: Path, suffix: str, compiling: str, libraries: str) -> None:
    """Compile and link an empty kernel, once per compiler and flags: the verdict is kept on disk."""
    source = build_dir / f"probe{suffix}"
    source.write_text("__global__ void empty() {}\nint launch() { empty<<<1, 1>>>(); return 0; }\n")
    compiler = shlex.split(compiling)[0]
    linking = f"{LINK} -Wl,--no-undefined"
    key = f"{compiling}\n{linking}\n{libraries}\n{Path(compiler).stat().st_mtime_ns}"
    verdict = build_dir / f"probe-{hashlib.sha256(key.encode()).hexdigest()[:16]}.txt"
    if not verdict.exists():
        output = ""
        compile_command = f"{compiling} -c {source} -o {source}.o"
        for command in (compile_command, f"{linking} {source}.o {libraries} -o {source}.so"):
            run = subprocess.run(shlex.split(command), capture_output=True, text=True)
            if run.returncode:
                lines = (run.stderr or run.stdout).strip().splitlines() or ["no message"]
                output = next((line for line in lines if "error" in line), lines[-1])
                break
        verdict.write_text(output)
    if text := verdict.read_text():
        raise Unavailable(f"{compiler} cannot build for these architectures: {text}")


def check_host() -> None:
    """Raises Unavailable where nothing can be compiled: the bindings and every part need this compiler."""
    compiler = (shlex.split(CXX) or ["g++"])[0]
    if shutil.which(compiler) is None:
        raise Unavailable(f"the C++ compiler {compiler} was not found (PATH, CXX)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise Unavailable(f"Python.h was not found in {sysconfig.get_path('include')}")


def cpu_part(build_dir: Path) -> Part:
    bf16 = BF16_ISA if ISAS is X86_ISAS else {}
    compiler = f"{CXX} {CPU_FLAGS} $extra -MMD -MF $out.d -c $in -o $out"
    part = Part(
        {"cxx": compiler, "header": compiler.replace(" -c ", " -x c++-header ").replace("-MMD", "-MD")},
        archs=[*ISAS, *bf16],
    )  # -MD: a clang refuses what was precompiled of the system's headers before they changed
    for source in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        if source.name.endswith(".isa.cpp"):
            for isa, flags in (ISAS | bf16 if source.name in BF16_SOURCES else ISAS).items():
                part.sources.append(("cxx", source, f".{isa}", f"-DRLKERNEL_ISA={isa} {flags}"))
        else:
            part.sources.append(("cxx", source, "", ""))
    if ISAS is X86_ISAS:
        for isa, flags in ISAS.items():
            header = build_dir / f"precompiled.{isa}.h"
            text = "".join(f"#include <{name}>\n" for name in PRECOMPILED)
            if not header.exists() or header.read_text() != text:
                header.write_text(text)
            part.headers[f".{isa}"] = str(header), f"-DRLKERNEL_ISA={isa} {flags}"
    return part


def cuda_libraries(nvcc: str) -> str:
    """Folders that may hold the runtime: PyPI's packages have it in lib, a toolkit in targets or lib64."""
    home = Path(nvcc).resolve().parent.parent
    asked = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    folders = re.findall(r"-L\"?([^\s\"]+)", asked)
    return " ".join(
        f"-L{folder}" for folder in dict.fromkeys([*folders, str(home / "lib"), str(home / "lib64")])
    )


def cuda_part(build_dir: Path) -> Part:
    # site-packages stand in no sys.path while pip builds in isolation
    installed = sorted(
        str(folder)
        for place in {*sys.path, sysconfig.get_path("purelib")}
        for folder in Path(place).glob("nvidia/cu[1-9][0-9]/bin")
    )
    nvcc = find_tool(["nvcc"], ["CUDA_HOME", "CUDA_PATH"], [*reversed(installed), "/usr/local/cuda/bin"])
    if nvcc is None:
        raise Unavailable("nvcc was not found (PATH, CUDA_HOME, CUDA_PATH, the package nvidia-cuda-nvcc)")
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    known = [arch for arch in ("80", "90a", "100", "120") if f"compute_{arch.rstrip('a')}" in listed]
    archs = arch_list("RLKERNEL_CUDA_ARCHS", known)
    plain = [arch for arch in archs if arch.isdecimal()]
    # -O1 for the host, whose functions only launch. Lines cost a tenth of the time, and few look at them.
    compiler = (
        f"{nvcc} -ccbin {CXX} -O3 -std=c++17 -Xcompiler -O1,-fPIC,-fvisibility=hidden --fmad=false "
        f"-Xfatbin=-compress-all --threads {len(archs)} {os.environ.get('CUDAFLAGS', '')} {INCLUDE}"
    )
    sources = together(build_dir, sorted((ROOT / "csrc/cuda").glob("*.cu")))
    named = [*archs, *(f"{arch}+PTX" for arch in sorted(plain, key=int)[-1:])]
    codes = {source: cuda_codes(source, archs) for source in sources}
    libraries = f"{cuda_libraries(nvcc)} -lcudart_static -lrt -lpthread -ldl"
    probe(build_dir, ".cu", f"{compiler} {max(codes.values(), default='')}", libraries)
    rules = {"nvcc": f"{compiler} $extra -MD -MF $out.d -c $in -o $out"}
    suffix = f".{'-'.join(named)}"
    return Part(rules, [("nvcc", source, suffix, codes[source]) for source in sources], named, libraries)


def together(build_dir: Path, sources: list[Path]) -> list[Path]:
    """The sources, with those of TOGETHER replaced by one that includes them."""
    (build_dir / "cuda").mkdir(exist_ok=True)
    for name, ops in TOGETHER.items():
        parts = [source for source in sources if source.stem in ops]
        joined = build_dir / "cuda" / f"{name}.cu"
        text = "".join(f'#include "{part}"\n' for part in parts)
        if not joined.exists() or joined.read_text() != text:
            joined.write_text(text)
        sources = [source for source in sources if source not in parts] + [joined] * bool(parts)
    return sources


def headers_of(source: Path, found: set[Path] | None = None) -> set[Path]:
    """A source and our headers that it includes, directly or not."""
    found = set() if found is None else found
    found.add(source)
    for name in re.findall(r'^#include "(.*)"', source.read_text(), re.MULTILINE):
        for header in (ROOT / "csrc/include" / name, source.parent / name):
            if header.exists() and header.resolve() not in found:
                headers_of(header.resolve(), found)
    return found


def cuda_codes(source: Path, archs: list[str]) -> str:
    """What nvcc makes of a source, PTX once for all architectures for which it would be the same, and that of
    the newest for later ones.

    nvcc has one compiler for those before sm_100 and another one from there on; within each of the two only
    what the sources themselves ask of __CUDA_ARCH__ makes a difference, as tests/test_build.py sees.
    """
    text = "".join(path.read_text() for path in sorted(headers_of(source)))
    asked = sorted(set(re.findall(r"__CUDA_ARCH__\s*([<>=!]=|<|>)\s*(\d+)", text)))
    # any other word about architectures, such as 900 <= __CUDA_ARCH__, may make a difference for each
    understood = r"(defined\s*\(?|#\s*ifn?def)\s*__CUDA_ARCH__\b|__CUDA_ARCH__\s*([<>=!]=|<|>)\s*\d+\b"
    special = "__CUDA_ARCH_" in re.sub(understood, "", text)
    numbers = {arch: int(re.match(r"\d+", arch)[0]) for arch in archs}
    groups: dict[object, list[str]] = {}
    for arch, number in numbers.items():
        answers = [COMPARISONS[sign](10 * number, int(bound)) for sign, bound in asked]
        groups.setdefault(arch if special else (number >= 100, *answers), []).append(arch)
    newest = max((arch for arch in archs if arch.isdecimal()), key=int, default=None)
    codes = []
    for group in groups.values():
        virtual = f"compute_{group[0] if len(group) == 1 else min(numbers[arch] for arch in group)}"
        made = [f"sm_{arch}" for arch in group] + [virtual] * (newest in group)
        codes.append(f"-gencode=arch={virtual},code=[{','.join(made)}]")
    return " ".join(codes)


def hip_part(build_dir: Path) -> Part:
    clangs = ["clang++", *(f"clang++-{version}" for version in range(24, 16, -1))]
    hip = find_tool(["hipcc", *clangs], ["ROCM_PATH", "ROCM_HOME", "HIP_PATH"], ["/opt/rocm/bin"])
    if hip is None:
        raise Unavailable("neither hipcc nor clang++ was found (PATH, ROCM_PATH)")
    archs = arch_list("RLKERNEL_HIP_ARCHS", ["gfx90a", "gfx942"])
    offload = " ".join(f"--offload-arch={arch}" for arch in archs)
    language = "" if Path(hip).name == "hipcc" else "-x hip "
    compiler = f"{hip} {language}{COMMON} -ffp-contract=off {offload} {INCLUDE}"
    library_folder = Path(hip).resolve().parent.parent / "lib"
    libraries = f"-L{library_folder} -lamdhip64"
    probe(build_dir, ".hip", compiler, libraries)
    sources = [
        ("hip", source, f".{'-'.join(archs)}", "") for source in sorted((ROOT / "csrc/hip").glob("*.hip"))
    ]
    return Part({"hip": f"{compiler} -MMD -MF $out.d -c $in -o $out"}, sources, archs, libraries)


def chosen_parts(build_dir: Path) -> dict[str, Part]:
    """The parts to build: those asked for by name, or with auto those whose compilers are here."""
    names = [name.strip() for name in os.environ.get("RLKERNEL_BACKENDS", "auto").split(",") if name.strip()]
    if unknown := [name for name in names if name not in (*PARTS, "auto")]:
        raise SystemExit(f"RLKERNEL_BACKENDS must list cpu, cuda and hip, or be auto, got {unknown[0]!r}")
    try:
        check_host()
    except Unavailable as reason:
        if asked := [name for name in names if name != "auto"]:
            raise SystemExit(f"rlkernel: RLKERNEL_BACKENDS asks for {asked[0]}, but {reason}") from None
        print(f"rlkernel: rlkernel._C is not built: {reason}; ops run on Triton and PyTorch", flush=True)
        return {}
    if re.search(r"[\s:$]", str(ROOT)):
        raise SystemExit(f"rlkernel: the folder of the sources must have no space, colon or $, got {ROOT}")
    parts = {"cpu": cpu_part(build_dir)}
    for name, make in (("cuda", cuda_part), ("hip", hip_part)):
        if name not in names and "auto" not in names:
            continue
        try:
            parts[name] = make(build_dir)
        except Unavailable as reason:
            if name in names:
                raise SystemExit(f"rlkernel: RLKERNEL_BACKENDS asks for {name}, but {reason}") from None
            print(f"rlkernel: {name} is not built: {reason}", flush=True)
    return parts


def write_ninja(build_dir: Path, parts: dict[str, Part]) -> Path:
    """The rules of one extension: `build.ninja` in a folder of this Python and these parts."""
    own = build_dir / "-".join([sys.implementation.cache_tag, *parts])
    own.mkdir(exist_ok=True)
    # pip's build isolation puts pybind11 under a new path each time; a copy keeps the commands the same.
    headers = build_dir / f"pybind11-{pybind11.__version__}"
    if not headers.exists():
        shutil.copytree(pybind11.get_include(), headers, ignore=shutil.ignore_patterns("CMake*"))
    built = [f"-DRLKERNEL_BUILT_{name.upper()}='\"{' '.join(part.archs)}\"'" for name, part in parts.items()]
    includes = f"{INCLUDE} -isystem {headers} -isystem {sysconfig.get_path('include')}"
    flags = " ".join([COMMON, "-Wall -Wextra", includes, *built])
    # -O1: these functions only hand arguments on, and take half the time to compile.
    # g++ may fill half a GB before it collects garbage, which saves a tenth; clang does not know the option.
    later = "" if "clang" in CXX else "--param ggc-min-heapsize=524288 "
    rules = {"bindings": f"{CXX} {flags} -O1 {later}-MMD -MF $out.d -c $in -o $out"}
    builds, objects = [], []

    def add(
        folder: Path, rule: str, source: Path, suffix: str = "", extra: str = "", header: str = ""
    ) -> None:
        written = source.is_relative_to(build_dir)
        name = source.relative_to(build_dir if written else ROOT / "csrc").as_posix().replace("/", "-")
        objects.append(f"{folder}/{name}{suffix}.o")
        after, extra = (f" | {header}.gch", f"{extra} -include {header}") if header else ("", extra)
        builds.extend([f"build {objects[-1]}: {rule} {source}{after}", f"  extra = {extra}"])

    add(own, "bindings", ROOT / "csrc/bindings.cpp")
    for part in parts.values():
        rules.update(part.rules)
        for header, extra in part.headers.values():
            builds.extend([f"build {header}.gch: header {header}", f"  extra = {extra}"])
        for rule, source, suffix, extra in part.sources:
            header, _ = part.headers.get(suffix, ("", ""))
            add(build_dir, rule, source, suffix, extra, header)
    libraries = " ".join(part.libraries for part in parts.values())
    # -fopenmp is not given to the linker: rlkernel/native/__init__.py binds torch's OpenMP runtime; a second
    # one in the process would bring its own threads and its own idea of how many there are.
    lines = [f"builddir = {build_dir}"]  # with ninja's log of what was compiled how, which all share
    for rule, command in rules.items():
        lines.extend([f"rule {rule}", f"  command = {command}", "  depfile = $out.d", "  deps = gcc"])
    lines.extend(["rule link", f"  command = {LINK} $in {libraries} -o $out"])
    lines.extend([*builds, f"build {own}/_C.so: link {' '.join(objects)}"])
    ninja_file = own / "build.ninja"
    ninja_file.write_text("\n".join(lines) + "\n")
    return ninja_file


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = ROOT / "build" / f"native-{platform.machine()}"
        build_dir.mkdir(parents=True, exist_ok=True)
        with open(build_dir / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree take turns
            parts = chosen_parts(build_dir)
            if not parts:
                target.unlink(missing_ok=True)  # that of an earlier build would be packed in its place
                return
            jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
            ninja_file = write_ninja(build_dir, parts)
            # ninja holds the lock too: it may outlive this process, and two of them spoil their log
            command = [sys.executable, "-m", "ninja", "-f", str(ninja_file), *jobs]
            subprocess.run(command, check=True, pass_fds=[lock.fileno()])
            target.parent.mkdir(parents=True, exist_ok=True)
            # A new file beside it, then a rename: a process that has the old one mapped keeps it whole.
            shutil.copy2(ninja_file.with_name("_C.so"), target.with_suffix(".tmp"))
            os.replace(target.with_suffix(".tmp"), target)
        built = "; ".join(f"{name} for {' '.join(part.archs)}" for name, part in parts.items())
        print(f"rlkernel: built {built}", flush=True)

    def copy_extensions_to_source(self) -> None:
        for name in map(self.get_ext_filename, (ext.name for ext in self.extensions)):
            if not Path(self.build_lib, name).exists():
                (ROOT / name).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class LinkedSource(sdist):
    """The folders that rlkernel has as links are in the archive once, and the links are links."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        links = [path for path in (ROOT / "rlkernel").iterdir() if path.is_symlink()]
        behind = tuple(f"rlkernel/{link.name}/" for link in links)
        super().make_release_tree(base_dir, [name for name in files if not name.startswith(behind)])
        for link in links:
            os.symlink(os.readlink(link), Path(base_dir, "rlkernel", link.name))


def version() -> dict[str, str]:
    """The fallback where setuptools-scm is absent, as on a machine without network: setuptools says 0.0.0."""
    if find_spec("setuptools_scm"):
        return {}
    text = (ROOT / "pyproject.toml").read_text()
    return {"version": re.search(r'^fallback_version = "(.*?)"', text, re.MULTILINE)[1]}


def readme() -> str:
    """README.md with links that hold on the page of a package index too."""
    home = re.search(r'^Homepage = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    return re.sub(r"\]\((?!\w+:|#)", f"]({home}/blob/main/", (ROOT / "README.md").read_text())


# optional: setuptools asks for no file where none was built; what fails to compile still raises
setup(
    **version(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("rlkernel._C", sources=[], optional=True)],
    cmdclass={"build_ext": NinjaBuild, "sdist": LinkedSource},
)
