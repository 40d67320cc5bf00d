"""The real SGLang on a CPU: ``make test-sglang`` runs this folder."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parents[1], HERE.parent, HERE.parent / "in_vllm"):  # accuracy; doors; chi_square
    sys.path.insert(1, str(folder))

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
