"""The workspace: one buffer per thread and device, bounded by a setting."""

import threading
import time
import weakref

import pytest
import torch
from fork_safety import ends_while_another_thread_holds

from rlkernel.runtime import gpu, workspace
from rlkernel.runtime.workspace import Carver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    workspace.release()
    yield
    workspace.set_limit(None)


def address(size):
    with workspace.lease(size, CPU) as leased:
        assert leased.memory.numel() == size
        return leased.memory.data_ptr()


def test_grows_and_is_kept():
    small = address(100)
    assert address(50) == small
    large = address(10_000)
    assert address(100) == large


@pytest.mark.parametrize("free", [workspace.release, lambda: workspace.set_limit(2**21)])
def test_buffers_are_freed(free):
    with workspace.lease(100, CPU) as leased:
        buffer = weakref.ref(leased.memory._base)
    del leased
    assert buffer() is not None
    free()
    assert buffer() is None


def test_a_second_thread_waits_for_the_buffer():
    order = []

    def work():
        with workspace.lease(100, CPU):
            order.append("second")

    with workspace.lease(100, CPU) as leased:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        order.append("first")
        leased.memory.fill_(1)
    thread.join()
    assert order == ["first", "second"]


def test_an_exception_gives_the_buffer_back():
    with pytest.raises(KeyError), workspace.lease(100, CPU):
        raise KeyError
    done = []
    thread = threading.Thread(target=lambda: done.append(address(100)))
    thread.start()
    thread.join(timeout=60)
    assert done


def test_limit_setting_environment_and_default(monkeypatch):
    monkeypatch.delenv("RLKERNEL_WORKSPACE_MIB", raising=False)
    assert workspace.limit() == workspace.limit(torch.device("cpu")) == workspace.DEFAULT_LIMIT == 256 * 2**20
    assert workspace.limit(torch.device("cuda")) == workspace.GPU_LIMIT == 2**30
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
    cutting = Carver(torch.empty(counting.size, dtype=torch.uint8))
    a, b = cut(cutting)
    a.fill_(1)
    b.fill_(2)
    assert cutting.size == counting.size == 512, "parts start at multiples of 256 bytes"
    assert (a == 1).all() and (b == 2).all() and a.shape == (3, 5) and b.dtype == torch.bfloat16


def left_for(owner, size, kept=64):
    """What a lease of ``size`` bytes finds that comes after one which kept ``kept`` bytes of 7s."""
    keeper = torch.zeros(1)
    with workspace.lease(256, CPU) as leased:
        leased.memory.fill_(7)
        workspace.keep(CPU, keeper, kept, "note")
    with workspace.lease(size, CPU, keeper if owner == "same" else owner) as leased:
        return leased.memory.clone(), leased.kept, leased.note


def test_what_was_kept_stands_before_what_is_asked_for():
    memory, kept, note = left_for("same", 100)
    assert (memory.numel(), kept, note) == (164, 64, "note")
    assert bool((memory[:64] == 7).all())


@pytest.mark.parametrize("owner, size", [(None, 100), (torch.zeros(1), 100), ("same", 200)])
def test_kept_memory_is_lost_to_others_and_to_a_lack_of_room(owner, size):
    memory, kept, note = left_for(owner, size)
    assert (memory.numel(), kept, note) == (size, 0, None)


def test_kept_memory_is_given_once():
    owner = torch.zeros(1)
    with workspace.lease(256, CPU):
        workspace.keep(CPU, owner, 64)
    with workspace.lease(100, CPU, owner) as first:
        assert first.kept == 64
    with workspace.lease(100, CPU, owner) as second:
        assert second.kept == 0


def test_a_captured_graph_has_memory_of_its_own(monkeypatch):
    """Two graphs may be replayed side by side, though one stream captured both, and beside eager calls."""
    owner = torch.zeros(1)
    with workspace.lease(256, CPU) as eager:
        workspace.keep(CPU, owner, 64)
    with monkeypatch.context() as capture:
        capture.setattr(gpu, "capturing", lambda device: True)
        graphs = []
        for _ in range(2):
            with workspace.lease(256, CPU, owner) as first:
                workspace.keep(CPU, owner, 32)
            with workspace.lease(256, CPU, owner) as second:
                graphs += [first, second]
        assert all(leased.memory.numel() == 256 and leased.kept == 0 for leased in graphs)
    with workspace.lease(100, CPU, owner) as after:
        assert after.kept == 64, "what an eager call kept is still there"
    addresses = {leased.memory.data_ptr() for leased in (eager, *graphs)}
    assert len(addresses) == 5 and after.memory.data_ptr() == eager.memory.data_ptr()


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not():
    assert ends_while_another_thread_holds(lambda: workspace.lease(100, CPU), lambda: address(100))


def test_limits_of_two_threads_end_in_any_order():
    before = workspace.limit()
    first, second = workspace.limited(2**22), workspace.limited(2**23)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert workspace.limit() == 2**23, "that of the block that stands"
    second.__exit__(None, None, None)
    assert workspace.limit() == before
