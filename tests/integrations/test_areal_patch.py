"""What rlkernel.patch_areal() replaces in the real AReaL, restores and refuses; and processes of AReaL's."""

import inspect
import json
import os
import subprocess
import sys

import pytest
from areal_cases import (
    CONTROLLER,
    DOOR,
    ENTERED,
    SOURCE,
    STAND_INS,
    actor,
    engine,
    importable,
    load,
    nothing_left_behind,
    own_logging,
    upstream,
    vocab_parallel,
)
from doors import ROOT

import rlkernel
from rlkernel import doctor
from rlkernel.integrations import _contract
from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.areal import contract, register, switch
from rlkernel.integrations.areal.__main__ import main
from rlkernel.integrations.areal.areal_patch import ArealPatch

areal = sys.modules["areal"]

assert nothing_left_behind and upstream  # fixtures of every test here
GATHER = "areal.utils.functional.vocab_parallel.gather_logprobs"


def test_what_is_replaced_and_restored():
    before, finders = DOOR.everything(), list(sys.meta_path)
    with rlkernel.patch_areal() as patch:
        for place in (GATHER, "areal.models.tree_attn.functional.gather_logprobs_entropy"):
            assert f"{place} -> rlkernel.logprob" in str(patch)
        assert "areal.engine.fsdp_engine.gather_logprobs -> rlkernel.logprob" in str(patch)
        assert "FSDPEngine.forward_backward_batch -> rlkernel.linear_logprob" in str(patch)
        assert "PPOActor._compute_advantages -> rlkernel.gae" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused and not patch.waiting
        DOOR.check_one_at_a_time(patch)
    assert sys.meta_path == finders and not patch.active
    DOOR.check_restored(before)


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_areal([part]) as patch:
        places = " ".join(patch.replaced)
        assert ("vocab_parallel.gather_logprobs" in places) == (part == "logprobs")
        assert ("FSDPEngine" in places) == (part == "fused_head")
        assert ("fsdp_engine.gather_logprobs" in places) == (part != "advantages")
        assert ("PPOActor" in places) == (part == "advantages")
        DOOR.check_parts(part)
    patch.undo()


def test_refusals(monkeypatch):
    def become(changed, version):
        if version is None:
            changed.setitem(sys.modules, "areal", None)
        else:
            changed.setattr(areal, "__version__", version)

    DOOR.check_refusals(monkeypatch, become, ["1.1.0", "1.0.3", "0.0.0.dev"])


CHANGES = {
    "fused_head": lambda m: m.setattr(
        engine.FSDPEngine, "forward_backward_batch", lambda self, mb_list, process_output_fn: 0
    ),
    "advantages": lambda m: m.setattr(actor.PPOActor, "_compute_advantages", lambda self, data, more=1: data),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_areal(monkeypatch, caplog, name):
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, GATHER)


def test_one_function_that_is_another(monkeypatch):
    """Is left as it is, but where an engine asks it, which may ask for what its head has scored."""

    def gather_logprobs_entropy(logits, labels):
        return logits

    with monkeypatch.context() as changed:
        for home in (vocab_parallel, engine):
            changed.setattr(home, "gather_logprobs_entropy", gather_logprobs_entropy)
        with pytest.raises(PatchError, match="gather_logprobs_entropy cannot be replaced: .* must take"):
            rlkernel.patch_areal()
        with rlkernel.patch_areal(strict=False) as patch:
            assert list(patch.refused) == ["gather_logprobs_entropy"] and GATHER in patch.replaced
            assert vocab_parallel.gather_logprobs_entropy is gather_logprobs_entropy
            assert engine.gather_logprobs_entropy.__wrapped__ is gather_logprobs_entropy


@pytest.mark.parametrize("name", ["gather_logprobs", "FSDPEngine"])
def test_an_engine_that_asks_for_something_else(monkeypatch, name):
    with monkeypatch.context() as changed:
        changed.delattr(engine, name)
        with pytest.raises(PatchError, match=f"fused_head cannot be replaced: .*{name} must be"):
            rlkernel.patch_areal(["fused_head"])


def test_a_method_whose_text_cannot_be_read(monkeypatch):
    def unreadable(function):
        raise OSError("could not get source code")

    with monkeypatch.context() as changed:
        changed.setattr(inspect, "getsource", unreadable)
        with pytest.raises(PatchError, match="_compute_advantages must have a text that can be read"):
            rlkernel.patch_areal()


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setattr(actor.PPOActor, "_compute_advantages", lambda self, data: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "PPOActor._compute_advantages")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (vocab_parallel, "gather_logprobs"), (engine.FSDPEngine, "train_batch"),
        (actor.PPOActor, "_compute_advantages"),
    ],
)  # fmt: skip
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


def test_signatures_stay_areals():
    owners = [(vocab_parallel, name) for name in ("gather_logprobs", "gather_logprobs_entropy")]
    owners += [
        (engine.FSDPEngine, path.partition(".")[2]) for path in contract.PARAMETERS if "Engine" in path
    ]
    owners.append((actor.PPOActor, "_compute_advantages"))
    before = [inspect.signature(getattr(*owner)) for owner in owners]
    with rlkernel.patch_areal():
        assert before == [inspect.signature(getattr(*owner)) for owner in owners]
        assert vocab_parallel.gather_logprobs.__name__ == "gather_logprobs"
    assert len(owners) == len(contract.PARAMETERS)


def test_the_docstrings_example():
    DOOR.check_example()


# modules that come later


@pytest.fixture
def unimported(monkeypatch):
    """A process that has not imported a part's module."""

    def forget(part):
        module = sys.modules[contract.HOMES[part]]
        monkeypatch.delitem(sys.modules, module.__name__)
        parent, _, last = module.__name__.rpartition(".")
        monkeypatch.delattr(sys.modules[parent], last, raising=False)
        return module.__name__

    return forget


@pytest.mark.parametrize("parts", [("fused_head",), ("logprobs", "fused_head")])
def test_an_engine_that_is_imported_later(unimported, parts):
    name = unimported("fused_head")
    with rlkernel.patch_areal(parts) as patch:
        assert patch.waiting == {"fused_head": name} and isinstance(sys.meta_path[0], Arrivals)
        late = load(name)
        assert late.FSDPEngine.train_batch.__module__ == "rlkernel" and not patch.waiting
        assert late.gather_logprobs.__module__ == "rlkernel"
    assert late.FSDPEngine.train_batch.__module__ == name
    assert late.gather_logprobs is vocab_parallel.gather_logprobs


def test_what_is_wrong_with_a_later_module_is_an_error_of_its_import(monkeypatch, unimported, caplog):
    unimported("advantages")
    monkeypatch.setitem(contract.TEXTS, "_compute_advantages", "")
    DOOR.check_wrong_later(monkeypatch, caplog, "advantages", load, "must have the text")


def test_an_undone_patch_waits_for_nothing(unimported):
    name = unimported("advantages")
    late = DOOR.check_undone_waits("advantages", load)
    assert late.PPOActor._compute_advantages.__module__ == name


def test_the_doctor_imports_what_parts_wait_for(monkeypatch, unimported):
    monkeypatch.setattr(_contract, "version", lambda name: areal.__version__)
    name = unimported("advantages")
    with importable(), own_logging():
        found = doctor.examine("areal")
    assert found.reason is None and not found.why_not and not found.notes
    assert f"{name}.PPOActor._compute_advantages" in found.replaced and GATHER in found.replaced
    name = unimported("advantages")
    monkeypatch.setitem(sys.modules, name, None)
    found = doctor.examine("areal")
    assert str(found.reason).startswith(f"PatchError: advantages cannot be replaced: import of {name} halted")
    monkeypatch.setattr(ArealPatch, "plan", lambda self, part: self.wait_for(part))
    assert doctor.examine("areal").notes["fused_head"] == "waits for areal.engine.fsdp_engine"


# processes


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None
    with rlkernel.patch_areal(["advantages", "logprobs"]):
        assert switch.asked() == Asked(("logprobs", "advantages"), True)
        assert os.environ[switch.SWITCH] == "logprobs,advantages" and os.environ[switch.STRICT] == "1"
    assert switch.asked() is None and switch.STRICT not in os.environ
    DOOR.check_switch(monkeypatch)


def test_a_process_does_what_is_asked_for_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, register, "advantages")
    DOOR.check_wrong_name(monkeypatch, caplog, register)


def test_no_module_to_run():
    for arguments in ([], ["--port", "--x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == "usage: python -m rlkernel.integrations.areal MODULE [its arguments]"
    assert not ArealPatch.in_place() and switch.SWITCH not in os.environ


WORKER = """
import importlib, json, sys
assert __name__ == "__main__"
from rlkernel.integrations.areal.areal_patch import ArealPatch
patch = ArealPatch.in_place()
waiting = sorted(patch.waiting) if patch else None
replaced = None
if waiting == ["logprobs"]:
    import areal_cases
    names = [areal_cases.vocab_parallel.gather_logprobs, areal_cases.engine.FSDPEngine.train_batch]
    replaced = [x.__module__ == "rlkernel" for x in names]
print(json.dumps([sys.argv[1:], waiting, replaced]))
"""


@pytest.mark.parametrize("asked", [None, "logprobs", "0"])
def test_a_module_of_areals_as_a_program(tmp_path, asked):
    """As AReaL's scheduler starts its workers, which import AReaL afterwards."""
    (tmp_path / "worker_of_test.py").write_text(WORKER)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "areal = types.ModuleType('areal')\n"
        f"vars(areal).update({ENTERED['areal']!r}, __path__=[{str(SOURCE)!r}])\n"
        "sys.modules['areal'] = areal\n"
    )
    places = [tmp_path, ROOT, ROOT / "tests", ROOT / "tests" / "integrations", STAND_INS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, places), *sys.path])}
    environment |= {"PYTHONWARNINGS": "ignore"} | ({} if asked is None else {switch.SWITCH: asked})
    command = [
        sys.executable,
        "-m",
        "rlkernel.integrations.areal",
        "worker_of_test",
        "--port",
        "7",
        "--role",
        "x",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    arguments, waiting, replaced = json.loads(done.stdout.splitlines()[-1])
    assert arguments == ["--port", "7", "--role", "x"]
    parts = {None: switch.PARTS, "logprobs": ("logprobs",), "0": ()}[asked]
    assert waiting == (sorted(parts) or None)
    assert replaced == ([True, False] if asked == "logprobs" else None)


def test_what_the_tests_enter_without_its_init_is_there():
    for name in (*ENTERED, CONTROLLER):
        path = SOURCE.joinpath(*name.split(".")[1:])
        assert (path / "__init__.py").exists() or path.with_suffix(".py").exists(), name
