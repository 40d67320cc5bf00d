"""``batch_invariant`` where it is left in another order, and calls that torch itself refuses."""

import threading

import pytest
import torch

import rlkernel
from rlkernel import batch_invariant_ops as names
from rlkernel.runtime import invariance

g = torch.Generator().manual_seed(0)
ROWS = torch.randn(3, 4, generator=g)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert not rlkernel.batch_invariant.is_enabled() and not invariance.settings


def test_what_was_enabled_is_disabled_inside_a_block_without_it():
    names.enable_batch_invariant_mode()
    with names.set_batch_invariant_mode(False):
        names.disable_batch_invariant_mode()
    assert not names.is_batch_invariant_mode_enabled()


def test_a_block_ends_while_another_thread_has_suspended_it():
    entered, leave, errors = threading.Event(), threading.Event(), []

    def run():
        try:
            with rlkernel.batch_invariant():
                entered.set()
                leave.wait(20)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(20)
    with names.set_batch_invariant_mode(False), names.set_batch_invariant_mode(False):
        leave.set()
        thread.join()
    assert not errors


def test_a_block_inside_what_was_compiled_is_refused():
    @torch.compile(backend="eager")
    def run(x):
        with rlkernel.batch_invariant():
            return x @ x.t()

    with pytest.raises(RuntimeError, match="must be entered outside of what torch.compile made"):
        run(ROWS)


def test_mean_dim_of_integers_is_fp32_and_log_softmax_has_the_last_dimension():
    """As in the package whose names these are."""
    found = names.mean_dim(torch.tensor([[1, 2], [5, 7]]), 1)
    assert found.dtype == torch.float32 and found.tolist() == [1.5, 6.0]
    with pytest.raises(ValueError, match="dim must be the last dimension of 2, got 0"):
        names.log_softmax(ROWS, dim=0)
