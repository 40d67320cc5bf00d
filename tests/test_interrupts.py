"""An interrupt, or the exception of a signal handler, while a block is entered leaves what was before."""

import dis
import sys

import pytest
import torch

import rlkernel
from rlkernel import dispatch, workspace
from rlkernel.integrations import _patch
from rlkernel.integrations._patch import Patch
from rlkernel.runtime import ranges

# Behind these CPython looks for signals: what a call gave is not yet stored anywhere then.
CHECKED = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")
FILES = tuple(module.__file__ for module in (dispatch, workspace, ranges, _patch))


class Owner:
    f, g = 1, 2


def patch():
    made = Patch("test")
    made.replace(Owner, "f", 10, expected=1)
    made.replace(Owner, "g", 20, expected=2)
    return made


def applied():
    made = patch().apply()
    sys.settrace(None)
    made.undo()


def entered(block):
    with block():
        sys.settrace(None)  # leaving is not looked at


BLOCKS = {
    "use_backend": lambda: entered(lambda: rlkernel.use_backend("reference")),
    "limited": lambda: entered(lambda: workspace.limited(2**22)),
    "lease": lambda: entered(lambda: workspace.lease(1000, torch.device("cpu"))),
    "nvtx_ranges": lambda: entered(rlkernel.nvtx_ranges),
    "with patch": lambda: entered(patch),
    "apply": applied,
}


def state():
    blocks = list(workspace._blocks), list(ranges._blocks), list(_patch._in_place)
    locks = workspace._blocks_lock.locked(), ranges._lock.locked()
    return dispatch._forced.get(), workspace._limit, ranges.nvtx, Owner.f, Owner.g, blocks, locks


def interrupted(run, number):
    """The line at which ``run()`` was interrupted the ``number``-th time that it could be, or None."""
    seen, last, place = 0, {}, None

    def trace(frame, event, _):
        nonlocal seen, place
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before = last.get(id(frame))
            last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            seen += before in CHECKED
            if seen == number and place is None:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
    return place


@pytest.mark.parametrize("block", BLOCKS)
def test_wherever_a_block_is_interrupted_nothing_is_left_of_it(block, monkeypatch):
    monkeypatch.setattr(ranges, "_need_nvtx", lambda what: None)
    BLOCKS[block]()  # what is imported the first time
    before, number = state(), 0
    while place := interrupted(BLOCKS[block], number + 1):
        number += 1
        assert state() == before, f"an interrupt at {place} leaves another state"
    assert number > 2


def test_an_undo_is_finished_by_another_wherever_it_was_interrupted():
    before, number = state(), 0
    while True:
        made = patch().apply()
        place = interrupted(made.undo, number + 1)
        made.undo()
        assert state()[:5] == before[:5], f"an interrupt at {place} leaves another state"
        rlkernel.unpatch_all()
        assert state() == before, f"an interrupt at {place} leaves a patch that is listed"
        if place is None:
            break
        number += 1
    assert number > 2
