"""The real TRL over the real vLLM on a CPU: ``make test-trl-vllm`` runs this folder."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))  # patch_orders, ports
sys.path.insert(1, str(Path(__file__).parents[1]))  # tiny
sys.path.insert(1, str(Path(__file__).parents[1] / "in_vllm"))  # engines
sys.path.append(str(Path(__file__).parents[3] / "examples"))  # which import each other

import vllm_environment  # noqa: F401, I001  (before vLLM)
import engines
import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("model"))
