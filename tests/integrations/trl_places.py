"""What rlkernel.patch_trl() replaces in the real TRL, and a fixture: no test leaves it replaced."""

import pytest

from rlkernel.integrations._logit_helpers import HELPERS

trl = pytest.importorskip("trl", reason="needs TRL, which rlkernel does not depend on")
utils = pytest.importorskip("trl.trainer.utils")

HEAD = "_ChunkedLogProbFunction"
PLACES = (HEAD, *(helper.__name__ for helper in HELPERS))
UPSTREAM = {name: getattr(utils, name) for name in PLACES}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    left = [name for name in PLACES if getattr(utils, name) is not UPSTREAM[name]]
    assert not left, f"a test left {left} patched"
