"""manylinux_2_28 by a newer compiler: link against what an older C library had, and look that it held.

    python .ci/manylinux.py stubs FOLDER      libraries to link against; prints the LDFLAGS that use them
    python .ci/manylinux.py audit FILE ...    extensions or wheels: an error if one needs what is newer

A library's symbols have versions, and the linker takes the newest: on a newer system that of the day when a
function last changed, though the older one is there too. The stubs have the names of the system's libraries
and of each symbol the newest version that manylinux_2_28 has; nothing of them is in what was linked. What
GCC's headers use and no older library has is defined in `newer.cpp`, hidden in the extension. A manylinux
image needs none of this, and `wheels.py` does none of it there.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# The newest version of each family, https://github.com/pypa/auditwheel has the list
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6")
MOVED = {  # by 2.34 into libc.so.6
    "libpthread.so.0": (
        "pthread_",
        "__pthread_",
        "_pthread_",
        "sem_",
        "thrd_",
        "mtx_",
        "cnd_",
        "tss_",
        "call_once",
    ),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("shm_", "timer_", "mq_", "__mq_", "aio_", "lio_"),
}
NEEDED = (*LIBRARIES, *MOVED, "libgcc_s.so.1", "ld-linux-x86-64.so.2")
# Who brings them: the interpreter, and torch's OpenMP runtime, which rlkernel/native/__init__.py loads first.
UNVERSIONED = re.compile(r"_?Py|GOMP_|omp_")

# What GCC's headers use of newer libraries, by what the older ones have. Where nobody says that a process has
# one thread, it has many. The two functions of std::exception_ptr have been private parts of these others.
NEWER = """#include <new>
#define HIDDEN __attribute__((visibility("hidden")))
extern "C" {
HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;
void copied(void*, const void*) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroyed(void*) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
HIDDEN void add_owner(const void*) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
HIDDEN void drop_owner(void*) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void add_owner(const void* owner) { void* kept; copied(&kept, owner); }
void drop_owner(void* owner) { destroyed(owner); }
}
namespace std {
HIDDEN void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
"""


def supported(version: str) -> bool:
    """Whether manylinux_2_28 has this version of a symbol."""
    family, _, number = version.rpartition("_")
    digits = tuple(int(part) for part in number.split(".") if part.isdecimal())
    return family in NEWEST and bool(digits) and digits <= NEWEST[family]


def _symbols(library: Path) -> Iterator[tuple[str, str, str, str, bool]]:
    """Of every symbol that is not local: name, version, kind, binding and whether it is defined there."""
    command = ["readelf", "--dyn-syms", "-W", str(library)]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdecimal() and fields[4] != "LOCAL":
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@"), fields[3], fields[4], fields[6] != "UND"


def _home(name: str, library: str, versions: set[str]) -> str | None:
    """The library of an older system: 2.34 moved threads, loading and shared memory into libc."""
    if library != "libc.so.6" or "GLIBC_2.34" not in versions:
        return library
    return next((home for home, prefixes in MOVED.items() if name.startswith(prefixes)), None)


def _contents(compiler: str) -> dict[str, dict[str, dict[str, str]]]:
    """For each library of an older system, each version's symbols and their kinds."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for library in LIBRARIES:
        versions: dict[str, dict[str, str]] = {}
        for name, version, kind, _, defined in _symbols(_file(compiler, library)):
            if defined and version != name:
                versions.setdefault(name, {})[version] = kind
        for name, of in versions.items():
            old = [version for version in of if supported(version)]
            if old and (home := _home(name, library, {*of})):
                newest = max(old, key=lambda version: [int(x) for x in version.split("_")[-1].split(".")])
                found.setdefault(home, {}).setdefault(newest, {})[name] = of[newest]
    return found


def _file(compiler: str, name: str) -> Path:
    command = [compiler, f"-print-file-name={name}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"{compiler} must know where {name} is, got {path}")
    return path.resolve()


def stubs(folder: Path, compiler: str = "g++") -> str:
    """Writes the libraries of an older system into ``folder``; returns the LDFLAGS that use them."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for library, versions in _contents(compiler).items():
        assembly, script = [], []
        for version, names in sorted(versions.items()):
            for name, kind in sorted(names.items()):
                section, of = ("data", "object") if kind == "OBJECT" else ("text", "function")
                assembly.append(
                    f".{section}\n.globl {name}\n.type {name}, @{of}\n{name}: .quad 0\n.size {name}, 8"
                )
            script.append(f"{version} {{ global: {'; '.join(sorted(names))}; }};")
        source, exports = folder / f"{library}.s", folder / f"{library}.map"
        source.write_text("\n".join([*assembly, ".section .note.GNU-stack"]) + "\n")
        exports.write_text("\n".join(script) + "\n")
        _run(
            compiler,
            "-shared",
            "-nostdlib",
            f"-Wl,--version-script={exports},-soname,{library}",
            source,
            "-o",
            folder / library,
        )
        stem = folder / (library.partition(".so")[0] + ".so")
        stem.unlink(missing_ok=True)
        stem.symlink_to(library)
    nonshared, loader = _file(compiler, "libc_nonshared.a"), _file(compiler, "ld-linux-x86-64.so.2")
    (folder / "libc.so").unlink()
    moved = " ".join(str(folder / library) for library in MOVED)
    (folder / "libc.so").write_text(
        f"GROUP ( {folder}/libc.so.6 {nonshared} AS_NEEDED ( {moved} {loader} ) )\n"
    )
    newer = folder / "newer.cpp"
    newer.write_text(NEWER)
    _run(compiler, "-O2", "-fPIC", "-c", newer, "-o", folder / "newer.o")
    return f"-L{folder} {folder}/newer.o"


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def problems(extension: Path) -> list[str]:
    """What an extension needs and manylinux_2_28 or its process does not have."""
    found = []
    for name, version, _, binding, defined in _symbols(extension):
        if defined or not name or (binding == "WEAK" and not version):
            continue
        # readelf ends a needed version with its number in the file: name@VERSION (4)
        if version and not supported(version):
            found.append(f"{name} must be of manylinux_2_28, got {version}")
        if not version and not UNVERSIONED.match(name):
            found.append(f"{name} must have a version, got none")
    listed = subprocess.run(
        ["readelf", "-d", "-W", str(extension)], capture_output=True, text=True, check=True
    )
    for tag, value in re.findall(r"\((\w+)\).*\[(.*)\]", listed.stdout):
        if tag == "NEEDED" and value not in NEEDED:
            found.append(f"it must need only libraries of manylinux_2_28, got {value}")
        if tag in ("RPATH", "RUNPATH"):
            found.append(f"it must search no folder of its own, got {value}")
    return found


def audit(path: Path) -> list[str]:
    """The problems of an extension, or of all that are in a wheel: one at least, and nothing is bundled."""
    if path.suffix != ".whl":
        return problems(path)
    found, count = [], 0
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        for name in wheel.namelist():
            if re.search(r"\.so(\.|$)", name):
                count += 1
                extracted = Path(wheel.extract(name, folder))
                found += [f"{name}: {text}" for text in problems(extracted)]
                if not re.fullmatch(r"rlkernel/_C\.[^/]*\.so", name):
                    found.append(f"{name}: the wheel must hold rlkernel._C alone, got another library")
    return found if count else [f"the wheel must hold rlkernel._C, got {path.name} without it"]


def main(arguments: list[str]) -> int:
    command, *rest = arguments or [""]
    if command == "stubs" and len(rest) == 1:
        print(stubs(Path(rest[0])))
        return 0
    if command == "audit" and rest:
        texts = [f"{path}: {text}" for path in rest for text in audit(Path(path))]
        print("\n".join(texts) if texts else f"manylinux_2_28 has all that {', '.join(rest)} needs")
        return bool(texts)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
