"""Large gradients on a CPU: pages of new memory come together, and what is written does not depend on it."""

import ctypes
import mmap
import subprocess
import sys

import pytest
import torch
from backends import skip_unless_able
from bitwise import assert_equal
from emulation import CSRC, CXX, FLAGS

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.native import logprob
from rlkernel.reference.logprob import make_inputs

PAGE = mmap.PAGESIZE
PAGES = 16
POPULATE_WRITE = 23

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are Linux's")


@pytest.fixture(scope="module")
def bring_pages(tmp_path_factory):
    library = tmp_path_factory.mktemp("pages") / "pages.so"
    subprocess.run([CXX, *FLAGS, "-fPIC", "-shared", CSRC / "cpu/pages.cpp", "-o", library], check=True)
    function = ctypes.CDLL(str(library))["_ZN8rlkernel3cpu11bring_pagesEPvl"]
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_bool
    return function


@pytest.fixture
def memory():
    """New memory, its address, and a function that tells which of its pages are there."""
    libc = ctypes.CDLL(None)
    # private, as an allocator's: shared memory is a file's
    block = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    # one page of a huge one would bring them all
    block.madvise(mmap.MADV_NOHUGEPAGE)

    def there():
        found = (ctypes.c_ubyte * PAGES)()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGES * PAGE), found) == 0
        return [i for i, x in enumerate(found) if x & 1]

    return block, address, there


def test_pages_of_new_memory_come_together_and_no_others(bring_pages, memory):
    block, address, there = memory
    try:
        mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(POPULATE_WRITE)
    except OSError:
        pytest.skip("this Linux is older than 5.14 and brings no pages on request")
    assert there() == []
    # from the middle of page 2 to the middle of page 9
    assert bring_pages(address + 2 * PAGE + 100, 7 * PAGE)
    assert there() == list(range(3, 9))
    assert not any(block[3 * PAGE : 9 * PAGE])


def test_memory_that_is_there_stays_as_it_is(bring_pages, memory):
    block, address, there = memory
    block[3 * PAGE : 4 * PAGE] = b"x" * PAGE
    before = there()
    assert not bring_pages(address + 2 * PAGE + 100, 7 * PAGE)
    assert there() == before and block[3 * PAGE : 4 * PAGE] == b"x" * PAGE


def test_what_holds_no_whole_page_is_left_to_the_writes(bring_pages, memory):
    _, address, there = memory
    for first, size in ((0, 0), (0, PAGE - 1), (1, PAGE), (100, 2 * PAGE - 101)):
        assert not bring_pages(address + first, size)
    assert there() == []


def test_memory_of_nobody_is_an_answer_not_a_crash(bring_pages):
    assert not bring_pages(0, 16 * PAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [4099, 70001], ids=["several rows at a time", "one row at a time"])
def test_a_gradient_has_the_same_bits_in_new_memory(monkeypatch, dtype, vocab):
    inputs = make_inputs(2**24 // (vocab * dtype.itemsize) + 1, vocab, dtype=dtype)
    skip_unless_able("native", "logprob", *inputs.values())
    logits, ids = inputs["logits"].detach(), inputs["target_ids"]
    ids[1:3] = -100
    results = logprob.forward(LogprobCall(logits, ids, 0.7, -100, True))
    up = torch.randn(2, len(ids))

    def gradient(rows, out):
        monkeypatch.setattr(torch, "empty", lambda *_, **__: out)
        try:
            call = LogprobCall(logits[rows], ids[rows], 0.7, -100, True)
            parts = LogprobResults(*(x[rows] for x in results[:5]))
            return logprob.backward(call, parts, RowGrads(*up[:, rows]))[0]
        finally:
            monkeypatch.undo()

    every, size = slice(None), logits.numel() * dtype.itemsize
    new = torch.frombuffer(mmap.mmap(-1, size + PAGE), dtype=dtype, count=logits.numel(), offset=64)
    in_new = gradient(every, new.view(logits.shape))
    assert_equal("in memory that is there", gradient(every, torch.full_like(logits, torch.nan)), in_new)
    few = slice(0, 4)  # too few for pages to matter
    assert_equal("of a few rows", gradient(few, torch.full_like(logits[few], torch.nan)), in_new[few])
