"""Functions of peers that cannot be installed beside each other, taken by name out of their own files.

SkyRL, OpenRLHF, AReaL, axolotl, LLaMA-Factory, torchtitan and FlashInfer are on PyPI: ``make`` fetches their
files (tests/fetch_peers.py).  The others are on GitHub alone.  A test of theirs runs where the folder
``$RLKERNEL_PEERS`` holds a checkout of the commit below under the name given here, and is skipped where it
does not:

    git clone https://github.com/THUDM/slime $RLKERNEL_PEERS/slime
    git -C $RLKERNEL_PEERS/slime checkout 624b824

Of a file only the named functions and classes are run, without their decorators, in a namespace that holds
what the caller gives: their packages would need Ray, Megatron or a GPU to be imported.
"""

import ast
import functools
import hashlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkernel.benchmarks import _peers

# repository, commit, and the first digits of the SHA-256 of the files that tests take something out of
CHECKOUTS = {
    "nemo-rl": (
        "NVIDIA-NeMo/RL",
        "7ea279abfbeb698b092856d0dab61e7cf39bc909",
        {
            "nemo_rl/algorithms/utils.py": "4b9014d79b5e2ce3",
            "nemo_rl/algorithms/advantage_estimator.py": "694e004dc8ff6f06",
            "nemo_rl/algorithms/loss/loss_functions.py": "e0687539c27bf6c8",
            "nemo_rl/algorithms/loss/interfaces.py": "87e634c6e64e6fc9",
        },
    ),
    "slime": (
        "THUDM/slime",
        "624b824a898ab0ec1fcb4d373004c7f3852bf515",
        {
            "slime/utils/ppo_utils.py": "0f0ad5ee55ceb27a",
            "slime/backends/megatron_utils/loss.py": "f3a0f85db2d5278f",
            "slime/backends/megatron_utils/cp_utils.py": "01cc3c6cfa3574d2",
        },
    ),
    "prime-rl": (
        "PrimeIntellect-ai/prime-rl",
        "559b44772e471d1538537b8805cc77f3824a5e64",
        {
            "src/prime_rl/trainer/rl/loss.py": "102b14539a2aa7e4",
            "packages/prime-rl-configs/src/prime_rl/configs/trainer.py": "8e9dfae7baf22c7e",
        },
    ),
    "deepspeed-examples": (
        "deepspeedai/DeepSpeedExamples",
        "45b4b7156c8794a3452a5a7d03dbd8d797068569",
        {"applications/DeepSpeed-Chat/dschat/rlhf/ppo_trainer.py": "5d6d6a2cc01c270a"},
    ),
    "open-instruct": (
        "allenai/open-instruct",
        "e6c3044aa6201c8bfa4573c1b03142af599e730d",
        {"open_instruct/grpo_utils.py": "dcadf2c3ce4d3b70"},
    ),
}
WHEELS = (
    "addict", "areal", "axolotl", "flashinfer-python", "llamafactory", "openrlhf", "skyrl", "torchtitan",
    "vllm",
    "docstring_parser", "shtab", "spmd_types", "torch_checkpointing", "torchdata", "typeguard", "tyro",
)  # fmt: skip


def load(peer: str, path: str, *names: str, **given: Any) -> types.SimpleNamespace:
    """The functions and classes ``names`` of one file; skips where the peer is not here."""
    file = folder(peer) / path
    if peer in CHECKOUTS:
        repository, commit, digests = CHECKOUTS[peer]
        if not hashlib.sha256(file.read_bytes()).hexdigest().startswith(digests[path]):
            pytest.skip(f"{peer}: {path} is not that of commit {commit[:7]} of {repository}")
    return taken(file, *names, **given)


def taken(file: Path, *names: str, **given: Any) -> types.SimpleNamespace:
    """The functions and classes ``names`` of a file that is here."""
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn} | given
    exec(_code(file, names), namespace)
    return types.SimpleNamespace(**{name: namespace[name] for name in names})


def folder(peer: str) -> Path:
    """Where the files of a peer are; skips where they are nowhere."""
    folders = _peers.folders()
    for folder in folders:
        # the files of a wheel begin with its package
        found = folder if peer in WHEELS and (folder / peer).is_dir() else folder / peer
        if found.is_dir():
            return found
    want = "make fetches it" if peer in WHEELS else "RLKERNEL_PEERS names no folder with a checkout"
    pytest.skip(f"{peer}: {want}", allow_module_level=True)


@functools.cache
def _code(file: Path, names: tuple[str, ...]) -> types.CodeType:
    tree = ast.parse(file.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(names) <= set(found), f"{file} has no {', '.join(set(names) - set(found))}"
    body: list[ast.stmt] = [ast.parse("from __future__ import annotations").body[0]]
    for name in names:
        found[name].decorator_list = []  # registries, jit and checks of types
        body.append(found[name])
    return compile(ast.Module(body, []), str(file), "exec")
