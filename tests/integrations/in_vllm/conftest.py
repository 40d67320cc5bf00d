"""The real vLLM on a CPU, on a model that is made on the spot: ``make test-vllm`` runs this folder."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent))  # tiny

import vllm_environment  # noqa: F401, I001  (before vLLM)
import engines
import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def llm(model):
    """An engine in this process, where a patch of its classes comes and goes at any time."""
    return engines.in_process(model)


@pytest.fixture
def patch():
    import rlkernel

    with rlkernel.patch_vllm(strict=True) as patch:
        yield patch
