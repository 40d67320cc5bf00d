"""Wheels and releases: what they need, where their version comes from, and that a bare machine trains."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlkernel import native

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))

import build_seconds  # noqa: E402
import clean_machine  # noqa: E402
import manylinux  # noqa: E402
import release  # noqa: E402
import wheels  # noqa: E402

linux = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="manylinux_2_28 stubs are made on x86_64 alone"
)

PROGRAM = """
#include <cmath>
#include <exception>
#include <memory>
#include <pthread.h>
void* run(void* x) { return x; }
double f(double x, std::size_t n, std::shared_ptr<int> shared, std::exception_ptr thrown) {
  std::unique_ptr<double[]> held(new double[n]);
  pthread_t thread;
  pthread_create(&thread, nullptr, run, held.get());
  pthread_join(thread, nullptr);
  std::exception_ptr again = thrown;
  return std::exp(x) + std::pow(x, *shared) + std::log2(held[0]) + (again ? 1 : 0);
}
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The LDFLAGS that link as on an older system."""
    return shlex.split(manylinux.stubs(tmp_path_factory.mktemp("stubs")))


@linux
@pytest.mark.skipif(
    not wheels.newer_than_image(), reason="this system's C library is no newer than manylinux_2_28's"
)
def test_the_audit_sees_what_is_too_new_and_the_stubs_prevent_it(older, tmp_path):
    (tmp_path / "program.cpp").write_text(PROGRAM)
    compile_ = ["g++", "-O2", "-fPIC", "-shared", tmp_path / "program.cpp", "-o"]
    subprocess.run([*compile_, tmp_path / "new.so"], check=True)
    said = manylinux.problems(tmp_path / "new.so")
    assert any(re.fullmatch(r"exp must be of manylinux_2_28, got GLIBC_2\.29", text) for text in said), said
    subprocess.run([*compile_, tmp_path / "old.so", *older], check=True)
    assert manylinux.problems(tmp_path / "old.so") == []
    # what no older library has stays without a version, and is seen
    (tmp_path / "program.cpp").write_text(
        'extern "C" int arc4random_of_2_36(); int g() { return arc4random_of_2_36(); }'
    )
    subprocess.run([*compile_, tmp_path / "unknown.so", *older], check=True)
    assert manylinux.problems(tmp_path / "unknown.so") == ["arc4random_of_2_36 must have a version, got none"]
    # and so is a library of its own
    subprocess.run([*compile_, tmp_path / "gomp.so", *older, "-Wl,--no-as-needed", "-lgomp"], check=True)
    assert any("got libgomp.so.1" in text for text in manylinux.problems(tmp_path / "gomp.so"))


@pytest.mark.parametrize(
    ("version", "old"),
    [("GLIBC_2.28", True), ("GLIBC_2.29", False), ("GLIBC_2.2.5", True), ("GLIBCXX_3.4.24", True),
     ("GLIBCXX_3.4.25", False), ("CXXABI_1.3.13", False), ("GLIBC_PRIVATE", False), ("GOMP_4.0", False)],
)  # fmt: skip
def test_versions_are_numbers(version, old):
    assert manylinux.supported(version) == old


@linux
def test_the_extension_linked_as_a_wheel_needs_only_an_old_system(older, tmp_path):
    """The objects of this tree, linked as `make wheels` links them: they load, without torch too."""
    tag = sys.implementation.cache_tag
    linked = sorted((ROOT / "build").glob(f"native-*/{tag}-*/_C.so"), key=lambda path: path.stat().st_mtime)
    if not linked:
        pytest.skip("this tree was not built in place")
    text = linked[-1].with_name("build.ninja").read_text()
    libraries = re.search(r"rule link\n  command = .*\$in (.*) -o \$out", text)[1]
    objects = re.search(r"_C\.so: link (.*)", text)[1]
    out = tmp_path / Path(native.extension().__file__).name
    command = f"g++ -shared {shlex.join(older)} {objects} {libraries} -o {out}"
    subprocess.run(shlex.split(command), check=True)
    assert manylinux.problems(out) == []
    parts = linked[-1].parent.name.removeprefix(f"{tag}-").replace("-", ",")
    run = subprocess.run(
        [sys.executable, "-S", "-c", wheels.LOADS, out, parts], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_a_wheel_without_the_extension_or_with_another_library_is_refused(tmp_path):
    empty, bundling = tmp_path / "rlkernel-1-py3-none-any.whl", tmp_path / "rlkernel-1-cp311.whl"
    with zipfile.ZipFile(empty, "w") as wheel:
        wheel.writestr("rlkernel/__init__.py", "")
    assert manylinux.audit(empty) == [f"the wheel must hold rlkernel._C, got {empty.name} without it"]
    with zipfile.ZipFile(bundling, "w") as wheel:
        wheel.write(native.extension().__file__, "rlkernel.libs/libgomp-1.so.1")
    assert any("the wheel must hold rlkernel._C alone" in text for text in manylinux.audit(bundling))


def test_pythons_share_the_kernels(tmp_path, monkeypatch):
    """Another Python compiles its bindings and links; so does a build with other parts."""
    setup = build_seconds.setup_of(ROOT)
    monkeypatch.setenv("RLKERNEL_BACKENDS", "cpu")
    made = {}
    for tag in ("cpython-310", "cpython-399"):
        monkeypatch.setattr(sys.implementation, "cache_tag", tag)
        ninja_file = setup["write_ninja"](tmp_path, setup["chosen_parts"](tmp_path))
        made[tag] = set(re.findall(r"^build (\S+):", ninja_file.read_text(), re.MULTILINE))
    of_one = [made["cpython-310"] - made["cpython-399"], made["cpython-399"] - made["cpython-310"]]
    assert [{Path(name).name for name in names} for names in of_one] == [{"bindings.cpp.o", "_C.so"}] * 2
    kernels = made["cpython-310"] & made["cpython-399"]
    assert len(kernels) > 10
    for source in (ROOT / "csrc/cpu").glob("*.cpp"):  # or they would be of one Python
        assert not re.search(
            r"pybind11|Python\.h", "".join(p.read_text() for p in setup["headers_of"](source))
        )


ARCHS = ["80", "90a", "100", "120"]
TWICE = (
    "-gencode=arch=compute_80,code=[sm_80,sm_90a] -gencode=arch=compute_100,code=[sm_100,sm_120,compute_100]"
)

# of clusters, which are there from sm_90 on
THRICE = TWICE.replace(
    "arch=compute_80,code=[sm_80,sm_90a]",
    "arch=compute_80,code=[sm_80] -gencode=arch=compute_90a,code=[sm_90a]",
)


@pytest.mark.parametrize(
    ("guard", "groups"),
    [
        ("", ["80 90a", "100 120"]),
        ("#if __CUDA_ARCH__ >= 1000", ["80 90a", "100 120"]),
        ("#if __CUDA_ARCH__ >= 900", ["80", "90a", "100 120"]),
        ("#if __CUDA_ARCH__ > 1000", ["80 90a", "100", "120"]),
        ("#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ < 1200", ["80", "90a", "100", "120"]),
        ("#ifdef __CUDA_ARCH_FEAT_SM90_ALL", ARCHS),
        ("#if 900 <= __CUDA_ARCH__", ARCHS),
        ("#ifndef __CUDA_ARCH__\n#elif defined(__CUDA_ARCH__)", ["80 90a", "100 120"]),
    ],
)
def test_ptx_is_made_once_unless_the_source_asks_for_an_architecture(tmp_path, guard, groups):
    setup = build_seconds.setup_of(ROOT)
    (tmp_path / "asking.cuh").write_text(guard)
    (tmp_path / "kernel.cu").write_text('#include "asking.cuh"\n')
    codes = re.findall(r"code=\[([^\]]*)\]", setup["cuda_codes"](tmp_path / "kernel.cu", ARCHS))
    assert [" ".join(re.findall(r"sm_(\w+)", code)) for code in codes] == groups
    assert [code.partition("compute_")[2] for code in codes] == [""] * (len(codes) - 1) + [
        groups[-1].split()[0]
    ]
    assert setup["cuda_codes"](tmp_path / "kernel.cu", ["90a"]) == "-gencode=arch=compute_90a,code=[sm_90a]"


def test_every_cuda_source_is_compiled_once(tmp_path):
    setup = build_seconds.setup_of(ROOT)
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    compiled = setup["together"](tmp_path, sources)
    written = [source for source in compiled if source.is_relative_to(tmp_path)]
    assert [source.stem for source in written] == list(setup["TOGETHER"])
    inside = [Path(name) for source in written for name in re.findall(r'#include "(.*)"', source.read_text())]
    assert sorted([*inside, *(source for source in compiled if source not in written)]) == sources
    assert {source.stem for source in inside} == {op for ops in setup["TOGETHER"].values() for op in ops}
    for source in written:  # that one of its ops asks for an architecture would cost all of them
        assert setup["cuda_codes"](source, ARCHS) == (THRICE if source.stem == "filters" else TWICE)
    assert setup["together"](tmp_path, []) == []


def test_ptx_is_the_same_where_it_is_made_once(tmp_path):
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("this machine has no nvcc")
    source = ROOT / "csrc/cuda/gae.cu"
    assert build_seconds.setup_of(ROOT)["cuda_codes"](source, ARCHS) == TWICE
    texts = {}
    for arch in ARCHS:
        command = [
            nvcc,
            f"-arch=compute_{arch}",
            "-ptx",
            "-O3",
            "-std=c++17",
            "--fmad=false",
            f"-I{ROOT}/csrc/include",
        ]
        subprocess.run([*command, source, "-o", tmp_path / arch], check=True)
        lines = (tmp_path / arch).read_text().splitlines()
        texts[arch] = [line for line in lines if not line.startswith((".target", "//"))]
    assert texts["80"] == texts["90a"] and texts["100"] == texts["120"]
    assert texts["80"] != texts["100"]  # or once would do


# Versions and the release


def test_a_machine_without_setuptools_scm_builds_the_fallback_version(monkeypatch):
    """setuptools alone would call it 0.0.0."""
    setup = build_seconds.setup_of(ROOT)
    assert setup["version"]() == {} or importlib.util.find_spec("setuptools_scm") is None
    monkeypatch.setitem(setup["version"].__globals__, "find_spec", lambda name: None)
    said = setup["version"]()["version"]
    assert f'fallback_version = "{said}"' in (ROOT / "pyproject.toml").read_text()


def test_a_folder_that_ninja_cannot_name_is_refused(tmp_path, monkeypatch):
    setup = build_seconds.setup_of(ROOT)
    monkeypatch.setitem(setup["chosen_parts"].__globals__, "ROOT", tmp_path / "a folder")
    with pytest.raises(SystemExit, match="folder of the sources must have no space, colon or .*/a folder"):
        setup["chosen_parts"](tmp_path)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A repository of one commit that is a release."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", ".git_archival.txt", ".gitattributes", "requirements/nvcc.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## [1.2.0] - today\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    return root


def git(root, *words):
    name = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "tag.gpgSign=false"]
    subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True)


def test_versions_are_those_of_tags(checkout, tmp_path):
    assert re.fullmatch(r"0\.1\.dev1\+g\w+|0\.1\.0\.dev1\+g\w+", release.version(checkout))
    git(checkout, "tag", "-m", "first", "v1.2.0")
    assert release.version(checkout) == "1.2.0" and release.problems("v1.2.0", checkout) == []
    assert release.with_local("1.2.0", f"cu{release.toolkit(checkout)}") == "1.2.0+cu130"
    assert release.with_local("1.2.1.dev1+gabc", "cu130") == "1.2.1.dev1+gabc.cu130"
    archive = tmp_path / "archive"
    archive.mkdir()
    git(checkout, "archive", "-o", str(tmp_path / "archive.tar"), "HEAD")
    subprocess.run(["tar", "xf", tmp_path / "archive.tar", "-C", archive], check=True)
    assert release.version(archive) == "1.2.0"  # what git wrote into .git_archival.txt
    shutil.copy2(ROOT / ".git_archival.txt", archive)
    fallback = re.search(r'^fallback_version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    assert release.version(archive) == fallback  # a copy of the files, of which nothing is known


def test_a_tag_that_is_not_this_version_is_refused(checkout):
    git(checkout, "tag", "-f", "-m", "first", "v1.2.0")
    said = release.problems("v1.3.0", checkout)
    assert said == [
        "the version of the checkout must be that of the tag v1.3.0, got 1.2.0",
        "CHANGELOG.md must have a section of 1.3.0, got none",
    ]
    assert "the tag must be v and a version" in release.problems("1.2", checkout)[0]


def workflow(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_steps_of_a_workflow_are_commands_of_this_repository(name):
    jobs = workflow(name)["jobs"]
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = set()
    for job in jobs.values():
        assert set(job.get("needs", [])) <= set(jobs)
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step["uses"])
            for line in step.get("run", "").splitlines():
                words = shlex.split(line)
                seen.update(words)
                files = [word for word in words if word.startswith(".ci/")]
                assert all((ROOT / file).is_file() for file in files), line
                if words[0].startswith(".ci/"):
                    assert os.access(ROOT / words[0], os.X_OK)
                if words[0] == "make":
                    assert set(words[1:]) <= targets, line
                assert words[0] in ("make", "bash", "gh", ".venv/bin/python") or files, line
    wanted = {"release": {"sdist", ".ci/release.py", "cibuildwheel", ".ci/manylinux.py"}, "ci": {".ci/run"}}
    assert wanted[name] <= seen


def test_the_release_builds_every_python_and_audits(monkeypatch):
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    minors = re.search(r"cp3\{(.*)\}-manylinux_x86_64", settings["build"])[1].split(",")
    assert [f"3.{minor}" for minor in minors] == wheels.supported_pythons()
    assert settings["manylinux-x86_64-image"] == "manylinux_2_28"
    repair = settings["linux"]["repair-wheel-command"]
    assert f"--plat {wheels.PLATFORM}" in repair[0] and ".ci/manylinux.py audit" in repair[1]
    environment = {**os.environ, "PYTHON": sys.executable}
    lines = subprocess.run(
        [ROOT / ".ci/cuda-settings"], env=environment, capture_output=True, text=True
    ).stdout
    told = dict(line.split("=", 1) for line in lines.splitlines())
    assert "-r requirements/nvcc.txt" in told["CIBW_BEFORE_ALL_LINUX"]
    assert "RLKERNEL_BACKENDS=cpu,cuda" in told["CIBW_ENVIRONMENT_LINUX"]
    assert told["SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLKERNEL"].endswith(f"cu{release.toolkit()}")
    assert settings["environment-pass"] == ["SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RLKERNEL"]


# From the wheel to a training run


def test_of_all_wheels_the_one_for_this_python_and_for_cpus_is_taken(tmp_path):
    """As `dist/rlkernel-*.whl` of the page names them."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    files = [
        tmp_path / f"rlkernel-1.0{local}-{of}-{of}-x.whl" for local in ("+cu130", "") for of in ("cp39", tag)
    ]
    for time, file in enumerate(files):
        file.touch()
        os.utime(file, (-time, -time))
    assert clean_machine.fitting(files) == files[3] and clean_machine.fitting(files[:2]) == files[1]
    with pytest.raises(SystemExit, match=f"there must be a wheel with {tag} in its name, got none"):
        clean_machine.fitting(files[:1])


def test_the_script_of_the_page_finds_what_it_imports(tmp_path):
    nothing, script = ["python3", "-c", "pass"], clean_machine.commands()[-1][1]
    instead = {
        "venv": nothing,
        "trl": nothing,
        "rlkernel-*.whl": nothing,
        "--short": ["python3", script, "--help"],
    }
    rows = clean_machine.run(tmp_path / "a.whl", tmp_path, instead)
    assert "--short" in rows[-1]["said"]


@linux
@pytest.mark.slow
def test_a_bare_machine_goes_from_the_wheel_to_grpo(tmp_path):
    """The commands of docs/build.md without compiler and GPU, outside of the checkout.

    Only torch and TRL are lent by this environment, where the page downloads them, and the run is shorter.
    """
    pytest.importorskip("trl", reason="TRL is not installed")
    if not list((ROOT / "build").glob("native-*/*/_C.so")):
        pytest.skip("this tree was not built in place")
    assert [words[-1] for words in clean_machine.commands()] == ["env", "trl", "rlkernel-*.whl", "--short"]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", tmp_path, ROOT], check=True)  # its objects are there already
    (wheel,) = tmp_path.glob("rlkernel-*.whl")
    lend = "import site, sys; open(site.getsitepackages()[0] + '/lent.pth', 'w').write(sys.argv[1])"
    lent = "\n".join(path for path in sys.path if path.endswith("-packages"))
    example = [
        "--steps",
        "2",
        "--batch",
        "16",
        "--vocabulary",
        "256",
        "--hidden",
        "32",
        "--largest",
        "1",
        "--start",
        "0.01",
    ]
    instead = {
        "torch==2.13.0": ["env/bin/python", "-c", lend, lent],
        "rlkernel-*.whl": ["env/bin/pip", "install", "-q", "--no-deps", "--no-index", "rlkernel-*.whl"],
        "--short": ["env/bin/python", "examples/grpo_arithmetic.py", *example],
    }
    (tmp_path / "machine").mkdir()
    rows = clean_machine.run(wheel, tmp_path / "machine", instead)
    assert "patched" in rows[-1]["said"]
    script = (
        "import rlkernel; from rlkernel import native; "
        "print(rlkernel.__file__, rlkernel.__version__, *native.extension().built())"
    )
    python, clean = tmp_path / "machine/env/bin/python", clean_machine.environment(tmp_path / "none")
    run = subprocess.run([python, "-c", script], cwd=tmp_path, env=clean, capture_output=True, text=True)
    where, version, *parts = run.stdout.split()
    assert (
        where.startswith(str(tmp_path)) and wheel.name.startswith(f"rlkernel-{version}-") and "cpu" in parts
    )
