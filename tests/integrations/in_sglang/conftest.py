"""The real SGLang on a CPU: ``make test-sglang`` runs this folder."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))  # accuracy
sys.path.insert(1, str(Path(__file__).parents[1]))  # doors
sys.path.insert(1, str(Path(__file__).parents[1] / "in_vllm"))  # chi_square

import pytest
import sglang_environment  # noqa: F401  (before SGLang)
import steps


@pytest.fixture(scope="session", autouse=True)
def published():
    """The arguments of a server, without a server."""
    with steps.arguments():
        yield


@pytest.fixture
def patch():
    import rlkernel

    with rlkernel.patch_sglang() as patch:
        yield patch


@pytest.fixture
def invariant():
    import rlkernel

    with rlkernel.patch_sglang(batch_invariant=True) as patch:
        yield patch
