"""Real frameworks, no network: models and tokenizers are made on the spot."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))  # which import each other
os.environ["HF_HUB_OFFLINE"] = "1"  # must stand before huggingface_hub's first import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

collect_ignore = [
    "in_vllm",
    "in_trl_vllm",
    "in_sglang",  # `make test-vllm`, `test-trl-vllm` and `test-sglang` run them
    "in_earlier_trl",  # test_trl_earlier.py does, under several versions of TRL
    "in_axolotl",
    "in_llamafactory",
    "in_swift",
    "in_torchtitan",  # and the test of each name does
]


@pytest.fixture
def rays_turn(tmp_path_factory):
    """One cluster of Ray at a time, whichever process tests it: each starts six processes."""
    with open(tmp_path_factory.getbasetemp().parent / "ray.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
