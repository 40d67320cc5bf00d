"""What a release asks of its tag: steps of .github/workflows/release.yml, and of who makes one by hand.

    python .ci/release.py version            the version of this checkout, from its newest tag
    python .ci/release.py version --cuda     that of a wheel with CUDA: the toolkit is in it
    python .ci/release.py check v0.1.0       an error unless tag, checkout and CHANGELOG.md agree

What the version is, setuptools-scm says.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """That which setuptools-scm makes of the checkout."""
    command = [sys.executable, "-m", "setuptools_scm", "--root", str(root)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"release: setuptools-scm finds no version in {root.name}: {run.stderr.strip()}")
    return run.stdout.split()[-1]


def toolkit(root: Path = ROOT) -> str:
    """The CUDA toolkit that the release builds with, such as 130."""
    pinned = (root / "requirements/nvcc.txt").read_text()
    major, minor = re.search(r"^nvidia-cuda-nvcc==(\d+)\.(\d+)", pinned, re.MULTILINE).groups()
    return major + minor


def with_local(version: str, local: str) -> str:
    return f"{version}{'.' if '+' in version else '+'}{local}"


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """What is wrong with a release of this tag from this checkout."""
    found = []
    if not re.fullmatch(r"v\d+(\.\d+)+((a|b|rc)\d+)?", tag):
        found.append(f"the tag must be v and a version, such as v1.2.0 or v1.2.0rc1, got {tag}")
    if (of_checkout := version(root)) != tag.removeprefix("v"):
        found.append(f"the version of the checkout must be that of the tag {tag}, got {of_checkout}")
    changes = (root / "CHANGELOG.md").read_text()
    released = re.match(r"v?[\d.]*\d", tag)
    if released and not re.search(
        rf"^## \[?{re.escape(released[0].removeprefix('v'))}\b", changes, re.MULTILINE
    ):
        found.append(f"CHANGELOG.md must have a section of {released[0].removeprefix('v')}, got none")
    return found


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["version"] and arguments[1:] in ([], ["--cuda"]):
        print(with_local(version(), f"cu{toolkit()}") if arguments[1:] else version())
        return 0
    if arguments[:1] == ["check"] and len(arguments) == 2:
        texts = problems(arguments[1])
        print("\n".join(texts) or f"{arguments[1]} can be released", file=sys.stderr if texts else sys.stdout)
        return bool(texts)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
