"""The workspace: one buffer per thread and device, bounded by a setting."""

import threading

import pytest
import torch

from rlkernel import workspace
from rlkernel.workspace import Carver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    workspace.release()
    yield
    workspace.set_limit(None)


def test_grows_and_is_kept():
    small = workspace.take(100, CPU)
    assert workspace.take(50, CPU).data_ptr() == small.data_ptr()
    large = workspace.take(10_000, CPU)
    assert large.numel() == 10_000
    assert workspace.take(100, CPU).data_ptr() == large.data_ptr()


def test_threads_do_not_share():
    addresses = [workspace.take(1000, CPU).data_ptr()]
    kept = []

    def work():
        kept.append(workspace.take(1000, CPU))
        addresses.append(kept[0].data_ptr())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(set(addresses)) == 2


def test_limit_setting_environment_and_default(monkeypatch):
    monkeypatch.delenv("RLKERNEL_WORKSPACE_MIB", raising=False)
    assert workspace.limit() == workspace.DEFAULT_LIMIT == 256 * 2**20
    monkeypatch.setenv("RLKERNEL_WORKSPACE_MIB", "64")
    assert workspace.limit() == 64 * 2**20
    workspace.set_limit(2**21)
    assert workspace.limit() == 2**21
    with pytest.raises(KeyError), workspace.limited(2**22):
        assert workspace.limit() == 2**22
        raise KeyError
    assert workspace.limit() == 2**21
    workspace.set_limit(None)
    assert workspace.limit() == 64 * 2**20


def test_bad_limits_are_named(monkeypatch):
    with pytest.raises(ValueError, match=r"size must be >= 1048576 bytes \(1 MiB\), got 5"):
        workspace.set_limit(5)
    monkeypatch.setenv("RLKERNEL_WORKSPACE_MIB", "lots")
    with pytest.raises(ValueError, match="RLKERNEL_WORKSPACE_MIB must be a number >= 1, got 'lots'"):
        workspace.limit()


def test_carver_counts_what_it_cuts():
    def cut(carver):
        return carver.part(3, 5, dtype=torch.float32), carver.part(7, dtype=torch.bfloat16)

    counting = Carver()
    cut(counting)
    cutting = Carver(workspace.take(counting.size, CPU))
    a, b = cut(cutting)
    a.fill_(1)
    b.fill_(2)
    assert cutting.size == counting.size == 512, "parts start at multiples of 256 bytes"
    assert (a == 1).all() and (b == 2).all() and a.shape == (3, 5) and b.dtype == torch.bfloat16
