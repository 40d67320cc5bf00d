"""The files of peers that a test runs and nobody installs: ``python tests/fetch_peers.py DIRECTORY``.

vLLM's wheel is 340 MB of GPU binaries that a CPU cannot run, and some twenty Python files say how it samples;
FlashInfer's is 100 MB of what compiles them, and its Python calls them;
SkyRL, OpenRLHF, AReaL, axolotl and torchtitan want flash-attn, vLLM or a GPU, LLaMA-Factory earlier versions
of what is here, and their Python files do without.  pip takes the wheel of the version that
requirements/constraints.txt pins, the files below are unpacked as they are, and the wheel is deleted.  They
lie outside of site-packages, so that TRL and transformers do not take them for installed.  Earlier versions
of TRL lie beside them, whole, each in a folder of its own, and so does ms-swift, whose tests run it with the
TRL that it is made for.
"""

import contextlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "requirements" / "constraints.txt"
FILES = {
    "vllm": (
        "vllm/_custom_ops.py",  # the torch path of the repetition penalty
        "vllm/model_executor/layers/quantization/input_quant_fp8.py",
        "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        "vllm/model_executor/layers/quantization/utils/quant_utils.py",
        "vllm/model_executor/layers/utils.py",  # apply_penalties
        "vllm/v1/outputs.py",
        "vllm/v1/sample/",
        "vllm/v1/worker/gpu/sample/gumbel.py",
        "vllm/v1/worker/gpu/sample/min_p.py",
    ),
    "skyrl": (
        "skyrl/__init__.py",
        # without skyrl/backends/__init__.py, whose types Pydantic refuses on Python 3.11
        "skyrl/backends/skyrl_train/__init__.py",
        "skyrl/backends/skyrl_train/distributed/",
        "skyrl/backends/skyrl_train/training_batch.py",
        "skyrl/backends/skyrl_train/utils/",
        "skyrl/backends/skyrl_train/workers/",
        "skyrl/env_vars.py",
        "skyrl/train/__init__.py",
        "skyrl/train/config/",
        "skyrl/train/dataset/",
        "skyrl/train/utils/",
        "skyrl/utils/",
    ),
    "openrlhf": ("openrlhf/",),
    "areal": ("areal/",),
    "axolotl": ("axolotl/",),
    "addict": ("addict/",),  # of which axolotl's configurations are made
    "llamafactory": ("llamafactory/",),
    "torchtitan": ("torchtitan/",),
    # above its kernels: what plans and checks
    "flashinfer-python": (
        *(
            f"flashinfer/{name}.py"
            for name in (
                "__init__",
                "_build_meta",
                "api_logging",
                "artifacts",
                "cascade",
                "compilation_context",
                "fi_trace",
                "page",
                "prefill",
                "sampling",
                "tllm_enums",
                "topk",
                "utils",
                "version",
            )
        ),
        *(f"flashinfer/{name}/" for name in ("cudnn", "cutile", "jit", "quantization", "trace")),
    ),
    # what torchtitan imports
    "docstring_parser": ("docstring_parser/",),
    "shtab": ("shtab/",),
    "spmd_types": ("spmd_types/",),
    "torch_checkpointing": ("torch_checkpointing/",),
    "torchdata": ("torchdata/",),
    "typeguard": ("typeguard/",),
    "tyro": ("tyro/",),
}
ASIDE = {"flashinfer-python"}  # nobody who has the folder on the path of modules may find it
# those after which what patch_trl() calls looks otherwise; 1.9.2 is of the series that axolotl pins
EARLIER_TRL = ("1.0.0", "1.4.0", "1.9.2", "1.12.0", "1.14.2")
SWIFTS_TRL = "0.29.1"  # the last before 1.0, which ms-swift asks for
LLAMAFACTORY_TRL = "0.24.0"  # the last that LLaMA-Factory takes
# of OpenRLHF there are wheels for one machine alone, although they hold no binary
ANYWHERE = ("--platform", "manylinux1_x86_64", "--python-version", "3.11", "--only-binary", ":all:")


def version(peer: str) -> str:
    pin = re.search(rf"^{peer}==(\S+)", CONSTRAINTS.read_text(), re.M)
    assert pin is not None, f"{CONSTRAINTS} must pin {peer}"
    return pin[1]


def fetch(peer: str, target: Path) -> None:
    marker, wanted = target / f"{peer}-{version(peer)}", "\n".join(FILES[peer])
    if marker.exists() and marker.read_text() == wanted:
        return
    options = () if peer == "vllm" else ANYWHERE
    with wheel(peer, version(peer), *options) as archive:
        for member in archive.infolist():
            name = re.sub(r"^[^/]*\.data/purelib/", "", member.filename)
            if name.startswith(FILES[peer]) and name.endswith((".py", ".yaml", ".jinja")):
                path = target / peer / name if peer in ASIDE else target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    marker.write_text(wanted)


def fetch_whole(target: Path) -> None:
    earlier = (*EARLIER_TRL, SWIFTS_TRL, LLAMAFACTORY_TRL)
    for peer, wanted in [("ms-swift", version("ms-swift")), *(("trl", wanted) for wanted in earlier)]:
        folder = target / f"{peer}-{wanted}"
        if not folder.exists():
            with wheel(peer, wanted) as archive, tempfile.TemporaryDirectory(dir=target) as half:
                archive.extractall(half)
                Path(half).rename(folder)
                Path(half).mkdir()  # which its context removes


@contextlib.contextmanager
def wheel(peer: str, wanted: str, *options: str) -> Iterator[zipfile.ZipFile]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, *options, "--dest", folder, f"{peer}=={wanted}"], check=True)
        (found,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(found) as archive:
            yield archive


def unavailable(peer: str) -> str:
    """Why this machine gets no files of the peer; empty where it does."""
    if peer != "vllm":
        return ""
    if sys.version_info < (3, 11):
        return "vLLM needs Python 3.11"
    if (platform.system(), platform.machine()) not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        return f"vLLM has no wheel for {platform.system()} on {platform.machine()}"
    return ""


if __name__ == "__main__":
    for name in FILES:
        if reason := unavailable(name):
            print(f"{reason}: nothing is compared with it")
        else:
            fetch(name, Path(sys.argv[1]))
    fetch_whole(Path(sys.argv[1]))
