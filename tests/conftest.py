"""Without a GPU, Triton kernels run in Triton's interpreter and device code is emulated: the same tests."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # spinning threads of parallel test processes slow each other down

import torch

from rlkernel.bench import interpreter

if not torch.cuda.is_available() and interpreter.works():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must stand before Triton's first import

import contextlib
import gc

import hypothesis
import pytest
import triton_interpreter

from rlkernel.bench.amx import avoid_broken_amx
from rlkernel.runtime import workspace

# the same examples in every run: what CI finds, everyone finds
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")
avoid_broken_amx()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
triton_interpreter.install()


def pytest_collection_finish():
    """What is here is here for good: trainers collect garbage at every turn, and need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN and the workspace is overwritten before each use: what was not written shows."""
    lease = workspace.lease

    @contextlib.contextmanager
    def poisoned(*arguments):
        with lease(*arguments) as leased:
            leased.memory[leased.kept :].fill_(255)
            yield leased

    monkeypatch.setattr(workspace, "lease", poisoned)
    with _nan_filled_memory():
        yield


@contextlib.contextmanager
def _nan_filled_memory():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with it, torch.empty fills floats with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
