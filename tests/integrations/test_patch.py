"""The machinery under every integration: all or nothing, in both directions."""

import logging
import sys
import threading
import types

import pytest
from fork_safety import ends_while_another_thread_holds

from rlkernel.integrations import _patch
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import Patch, PatchError


class Owner:
    @staticmethod
    def f():
        return "original"

    g = "original"


def new_f():
    return "new"


@pytest.fixture
def patch():
    patch = Patch("test")
    patch.replace(Owner, "f", staticmethod(new_f), expected=vars(Owner)["f"])
    patch.replace(Owner, "g", "new", expected="original")
    yield patch
    patch.undo()


def state():
    return Owner.f(), Owner.g


ORIGINAL, NEW = ("original", "original"), ("new", "new")


def test_apply_and_undo_restore_the_very_objects(patch):
    before = dict(vars(Owner))
    patch.apply()
    assert state() == NEW and patch.active
    patch.undo()
    assert {name: vars(Owner)[name] for name in before} == before and not patch.active


def test_both_are_idempotent(patch):
    assert patch.apply() is patch.apply()
    patch.undo()
    patch.undo()
    assert state() == ORIGINAL


def test_an_undo_that_was_interrupted_can_be_finished(patch, monkeypatch):
    def interrupted(owner, name, value):
        if name == "f":
            raise KeyboardInterrupt
        setattr(owner, name, value)

    patch.apply()
    with monkeypatch.context() as context:
        context.setattr(_patch, "setattr", interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            patch.undo()
    assert state() == ("new", "original") and patch.active
    patch.undo()
    assert state() == ORIGINAL and not patch.active


def test_with_restores_after_an_exception(patch):
    with pytest.raises(ZeroDivisionError), patch:
        assert state() == NEW
        raise ZeroDivisionError
    assert state() == ORIGINAL


def test_with_nests_and_can_be_entered_again(patch):
    for _ in range(2):
        with patch:
            with patch:
                assert state() == NEW
            assert state() == NEW
        assert state() == ORIGINAL


def test_with_leaves_on_what_somebody_else_had_turned_on(patch):
    patch.apply()
    with patch.share():
        pass
    assert state() == NEW


def test_undo_inside_with_is_enough(patch):
    with patch:
        patch.undo()
        assert state() == ORIGINAL
    assert state() == ORIGINAL


def test_refuses_to_patch_what_is_not_there(patch):
    patch.replace(Owner, "h", "new", expected="anything")
    with pytest.raises(PatchError, match=r"cannot patch .*Owner\.h: it must hold 'anything', got nothing"):
        patch.apply()
    assert state() == ORIGINAL and not patch.active


def test_refuses_to_patch_what_has_changed(patch, monkeypatch):
    monkeypatch.setattr(Owner, "g", "somebody else's")
    with pytest.raises(PatchError, match=r"Owner\.g: it must hold 'original', got \"somebody else's\""):
        patch.apply()
    assert Owner.f() == "original"


def test_refuses_to_undo_what_was_patched_over(patch):
    patch.apply()
    Owner.g = "somebody else's"
    with pytest.raises(
        PatchError, match=r"cannot undo .*Owner\.g: it must hold 'new', got \"somebody else's\""
    ):
        patch.undo()
    assert state() == ("new", "somebody else's") and patch.active
    Owner.g = "new"
    patch.undo()
    assert state() == ORIGINAL


def test_failure_half_way_leaves_nothing_behind(patch):
    class ReadOnly:
        """Its attribute is there, and cannot be set."""

        __slots__ = ("__dict__",)

        def __setattr__(self, name, value):
            raise AttributeError(f"{name} is read-only")

    owner = ReadOnly()
    owner.__dict__["x"] = 1
    patch.replace(owner, "x", 2, expected=1)
    with pytest.raises(AttributeError, match="read-only"):
        patch.apply()
    assert state() == ORIGINAL and not patch.active


def test_everywhere_finds_importers_before_and_after(monkeypatch):
    original, new = Owner.f, new_f
    home, early, late, other = (
        types.ModuleType(name) for name in ("pkg.home", "pkg.early", "pkg.late", "pkgs")
    )
    for module in (home, early, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        module.f = original
    patch = Patch("test")
    patch.replace_everywhere("pkg", "f", new, expected=original)
    with patch:
        assert home.f is early.f is new and other.f is original
        late.f = home.f  # from pkg.home import f
        monkeypatch.setitem(sys.modules, "pkg.late", late)
    assert home.f is early.f is late.f is original


def test_a_patch_that_finds_nothing_to_replace_is_on_and_off():
    """As one of a framework that has changed, of which every function is left to it."""
    empty = Patch("empty")
    for _ in range(2):
        with empty:
            assert empty.active and _patch.in_place("empty") is empty is empty.apply()
            assert repr(empty) == "<empty: nothing replaced>" and _patch._in_place.count(empty) == 1
        assert not empty.active and _patch.in_place("empty") is None


def test_says_what_it_replaced(patch):
    assert repr(patch) == "<test: nothing replaced>"
    with patch:
        assert list(patch.replaced) == [f"{__name__}.Owner.f", f"{__name__}.Owner.g"]
        assert f"{__name__}.Owner.g -> 'new'" in repr(patch)


def test_a_counted_patch_warns_of_a_reason_once_and_sums_up_once(caplog):
    caplog.set_level(logging.INFO)
    patch = CountedPatch("rlkernel.patch_test", "Framework")
    patch.replace(Owner, "g", "new", expected="original")
    with pytest.warns(UserWarning) as told, patch:
        patch.count(patch.calls, "f")
        for name in ("f", "f", "g"):
            patch.left(name, "a reason", "advice")
        patch.left("f", "an expected reason", quiet=True)
        with pytest.raises(PatchError, match="no other patch of Framework must be in place, got one"):
            CountedPatch("another", "Framework").apply()
    patch.undo()
    assert [str(w.message) for w in told] == [
        "rlkernel.patch_test() leaves f to Framework: a reason (advice)"
    ]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage() == (
        "1 calls ran on rlkernel, 4 were left to Framework"
        "\n  2 x f: a reason\n  1 x g: a reason\n  1 x f: an expected reason"
    )


class Interrupted(types.ModuleType):
    """While ``f`` is set, or taken away, the other thread has its turn."""

    def __setattr__(self, name, value):
        if name == "f" and (turn := vars(self).get("turn")) is not None:
            turn()
        super().__setattr__(name, value)


@pytest.mark.parametrize("first", ["apply", "undo", "with"])
@pytest.mark.parametrize("second", ["apply", "undo", "with"])
def test_threads_apply_and_undo_one_after_the_other(first, second):
    """Of two at the same time the second one finds all of what the first one did, or nothing of it."""
    module, others = Interrupted("owner"), [types.ModuleType(str(i)) for i in range(3)]
    made = Patch("threads")
    for owner in (module, *others):
        owner.f = state
        made.replace(owner, "f", new_f, expected=state)
    if first == "undo":
        made.apply()
    errors, began = [], threading.Event()

    def run(what):
        try:
            if what == "with":
                with made:
                    pass
            else:
                getattr(made, what)()
        except Exception as error:
            errors.append(error)

    def other():
        began.set()
        run(second)

    thread = threading.Thread(target=other)

    def turn():
        vars(module).pop("turn")
        thread.start()
        began.wait(60)
        thread.join(0.2)  # ends where it does not wait for the first one, as it must

    vars(module)["turn"] = turn
    run(first)
    thread.join(60)
    assert not errors
    if first == second == "with":
        assert not made.active, "whoever leaves last"
    made.undo()
    assert {owner.f for owner in (module, *others)} == {state}
    assert not made.active and made not in _patch._in_place


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not(patch):
    assert ends_while_another_thread_holds(_patch.alone, patch.apply)
