"""The real TRL over the real vLLM on a CPU: ``make test-trl-vllm`` runs this folder."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[1:1] = [str(HERE.parent / "in_vllm"), str(HERE.parent)]  # engines, tiny

import vllm_environment  # noqa: F401, I001  (before vLLM)
import engines
import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("model"))
