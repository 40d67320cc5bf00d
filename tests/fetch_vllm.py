"""The files of vLLM that sample, to compare with: ``python tests/fetch_vllm.py DIRECTORY``.

vLLM's wheel is 340 MB of GPU binaries that a CPU cannot run, and some twenty Python files say how it samples.
pip downloads the wheel of the version that requirements/constraints.txt pins, the files below are unpacked
as they are, and the wheel is deleted.  They lie outside of site-packages, so that TRL and transformers do not
take vLLM for installed.
"""

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "requirements" / "constraints.txt"
FILES = (
    "vllm/_custom_ops.py",  # the torch path of the repetition penalty
    "vllm/model_executor/layers/utils.py",  # apply_penalties
    "vllm/v1/outputs.py",
    "vllm/v1/sample/",
    "vllm/v1/worker/gpu/sample/gumbel.py",
    "vllm/v1/worker/gpu/sample/min_p.py",
)


def version() -> str:
    pin = re.search(r"^vllm==(\S+)$", CONSTRAINTS.read_text(), re.M)
    assert pin is not None, f"{CONSTRAINTS} must pin vllm"
    return pin[1]


def fetch(target: Path) -> None:
    marker = target / f"vllm-{version()}"
    if marker.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", folder, f"vllm=={version()}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(FILES) and name.endswith(".py")]
            archive.extractall(target, names)
    marker.touch()


if __name__ == "__main__":
    if sys.version_info < (3, 11):
        print("vLLM needs Python 3.11: nothing is compared with it")
    elif (platform.system(), platform.machine()) in (("Linux", "x86_64"), ("Linux", "aarch64")):
        fetch(Path(sys.argv[1]))
    else:
        print(
            f"vLLM has no wheel for {platform.system()} on {platform.machine()}: nothing is compared with it"
        )
