"""The real vLLM on a CPU, on a model that is made on the spot: ``make test-vllm`` runs this folder."""

import os
import sys
from pathlib import Path

# must stand before vLLM's first import; its workers inherit them
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile for longer than the tests run
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.pop("VLLM_RLKERNEL", None)
sys.path.insert(1, str(Path(__file__).parent.parent))  # tiny

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
