"""What rlkernel.patch_openrlhf() replaces in the real OpenRLHF, restores and refuses; Ray's processes."""

import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys

import forks
import pytest
import torch
from openrlhf_cases import (
    DOOR,
    INSTALLED,
    MODULES,
    actors,
    environment,
    losses,
    makers,
    nothing_left_behind,
    upstream,
    utils,
)

import rlkernel
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.openrlhf import contract, install, processes, runtime_env, switch
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch

assert nothing_left_behind and upstream  # fixtures of every test here

Maker = makers.RemoteExperienceMaker
OWNERS = {"Actor": actors.Actor, "RemoteExperienceMaker": Maker} | vars(losses)


def test_what_is_replaced_and_restored():
    before = DOOR.everything()
    with rlkernel.patch_openrlhf() as patch:
        assert "openrlhf.models.actor.Actor.forward -> rlkernel.linear_logprob" in str(patch)
        assert "openrlhf.models.loss.PolicyLoss.forward -> rlkernel.policy_loss" in str(patch)
        assert "RemoteExperienceMaker.get_advantages_and_returns -> rlkernel.gae" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused
        assert actors.log_probs_from_logits is utils.log_probs_from_logits
        assert actors.compute_entropy is utils.compute_entropy
        assert makers.compute_reward is utils.compute_reward
        DOOR.check_one_at_a_time(patch)
    DOOR.check_restored(before)


def test_the_example_of_the_docstring():
    DOOR.check_example()


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_openrlhf([part]) as patch:
        places = " ".join(patch.replaced)
        assert ("compute_entropy" in places) == (part == "logprobs")
        assert ("Actor.forward" in places) == (part == "fused_head")
        assert (
            ("PolicyLoss" in places) == ("ValueLoss" in places) == ("DPOLoss" in places) == (part == "losses")
        )
        assert ("compute_reward" in places) == ("Maker" in places) == (part == "advantages")
        DOOR.check_parts(part)
    patch.undo()


def test_refusals(monkeypatch):
    version = importlib.metadata.version

    def become(changed, found):
        if found is None:
            changed.setitem(sys.modules, "openrlhf", None)
        else:
            changed.setattr(
                importlib.metadata, "version", lambda name: found if name == "openrlhf" else version(name)
            )

    DOOR.check_refusals(monkeypatch, become, ["0.12.0", "0.11.1", "0.10.4"])


CHANGES = {
    "compute_entropy": lambda m: m.setattr(utils, "compute_entropy", lambda logits, dim=-1: 0),
    "Actor.forward": lambda m: m.setattr(MODULES["models.ring_attn_utils"], "gather_and_pad_tensor", None),
    "PolicyLoss.forward": lambda m: m.setattr(losses.PolicyLoss, "forward", lambda self, log_probs: 0),
    "ValueLoss.forward": lambda m: m.setattr(losses.ValueLoss, "__init__", lambda self, clip: None),
    "compute_reward": lambda m: m.setattr(utils, "compute_reward", lambda r: 0),
    "RemoteExperienceMaker.get_cumulative_returns": lambda m: m.setattr(Maker, "get_cumulative_returns", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_openrlhf(monkeypatch, caplog, name):
    kept = "openrlhf.models.utils.log_probs_from_logits"
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, kept)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(utils, "compute_entropy"), (utils, "log_probs_from_logits"), (actors.Actor, "forward"),
     (losses.PolicyLoss, "forward"), (Maker, "get_cumulative_returns")],
)  # fmt: skip
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


def test_a_part_that_cannot_be_imported(monkeypatch):
    """As OpenRLHF's models without flash-attn."""
    monkeypatch.setitem(sys.modules, "openrlhf.models.actor", None)
    monkeypatch.delattr("openrlhf.models.actor")
    with pytest.raises(PatchError, match="fused_head cannot be replaced: .*actor"):
        rlkernel.patch_openrlhf()
    with rlkernel.patch_openrlhf(strict=False) as patch:
        assert set(patch.refused) == {"fused_head"} and patch.replaced


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setattr(losses.PolicyLoss, "forward", lambda *x: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "PolicyLoss.forward")


def test_signatures_stay_openrlhfs():
    def signatures():
        found = {}
        for path in contract.PARAMETERS:
            owner, _, name = path.rpartition(".")
            home = OWNERS[owner] if owner else MODULES["models.ring_attn_utils"]
            home = utils if hasattr(utils, name) and not owner else home
            found[path] = inspect.signature(getattr(home, name))
        return found

    before = signatures()
    with rlkernel.patch_openrlhf():
        assert before == signatures()
        assert utils.compute_reward.__wrapped__ and losses.PolicyLoss.forward.__name__ == "forward"


# the environment


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None
    with rlkernel.patch_openrlhf(["losses", "logprobs"]):
        assert switch.asked() == Asked(("logprobs", "losses"), True)
        assert os.environ[switch.RAY] == switch.HOOK and switch.BEFORE not in os.environ
    assert switch.asked() is None and switch.RAY not in os.environ
    monkeypatch.setenv(switch.RAY, "mine.hook")
    with rlkernel.patch_openrlhf():
        assert (os.environ[switch.RAY], os.environ[switch.BEFORE]) == (switch.HOOK, "mine.hook")
    assert os.environ[switch.RAY] == "mine.hook" and switch.BEFORE not in os.environ
    DOOR.check_switch(monkeypatch)


def test_what_is_asked_for_is_put_on_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, processes.watch, "fused_head")
    DOOR.check_wrong_name(monkeypatch, caplog, lambda: install.register(switch.PARTS))


def test_parts_of_two_modules(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "advantages,fused_head")
    processes.watch()
    patch = OpenRlhfPatch.in_place()
    assert set(patch.parts) == {"fused_head", "advantages"} and "compute_reward" in str(patch)
    patch.undo()


def test_parts_that_come_later_are_refused_by_themselves(monkeypatch, caplog):
    DOOR.listen(monkeypatch, caplog)
    monkeypatch.setenv(switch.SWITCH, "1")
    install.register(("losses",))
    patch = OpenRlhfPatch.in_place()
    with monkeypatch.context() as changed:
        changed.setattr(utils, "compute_reward", lambda r: 0)
        install.register(("losses", "advantages"))
    assert patch.refused.keys() == {"compute_reward"} and patch.parts == ("losses", "advantages")
    assert Maker.get_cumulative_returns.__module__ == "rlkernel"
    patch.undo()


def test_the_runtime_environment_of_ray(monkeypatch):
    found = runtime_env({"env_vars": {"A": "1"}})
    assert found["env_vars"] == {"A": "1", switch.SWITCH: "1"}
    assert found["worker_process_setup_hook"] == "rlkernel.integrations.openrlhf.in_worker"
    assert OpenRlhfPatch.in_place().parts == switch.PARTS, "this process, too"
    rlkernel.unpatch_all()
    monkeypatch.setenv(switch.SWITCH, "losses")
    monkeypatch.setenv(switch.STRICT, "1")
    own = {switch.SWITCH: "losses", switch.STRICT: "1"}
    assert runtime_env(None)["env_vars"] == own
    assert runtime_env({"env_vars": {switch.SWITCH: "0"}})["env_vars"] == own | {switch.SWITCH: "0"}
    assert runtime_env(runtime_env(None)) == runtime_env(None)
    called = []
    monkeypatch.setattr(processes, "in_worker", lambda: called.append("ours"))
    monkeypatch.setattr(switch, "_hook", lambda given: {"pip": ["x"], **(given or {})}, raising=False)
    monkeypatch.setenv(switch.BEFORE, "rlkernel.integrations.openrlhf.switch._hook")
    assert runtime_env(None)["pip"] == ["x"]
    runtime_env({"worker_process_setup_hook": lambda: called.append("theirs")})["worker_process_setup_hook"]()
    assert called == ["theirs", "ours"]
    rlkernel.unpatch_all()


# other processes

TRAINER = """
import sys
from openrlhf.utils.logging_utils import init_logger
early = "openrlhf.models" in sys.modules, "deepspeed" in sys.modules
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker, compute_reward
from openrlhf.models import Actor, PolicyLoss
import inspect, openrlhf.models
assert inspect.getsource(openrlhf.models) and openrlhf.models.__spec__.loader is openrlhf.models.__loader__
from rlkernel.integrations.openrlhf.processes import waited_for
assert __name__ == "__main__" and sys.argv[0].endswith("trainer_of_test.py")
print(sys.argv[1:], early, Actor.forward.__module__, PolicyLoss.forward.__module__, compute_reward.__module__,
      RemoteExperienceMaker.get_cumulative_returns.__module__,
      waited_for in sys.meta_path)
"""


def test_a_module_that_is_run(tmp_path):
    """Nothing of OpenRLHF is imported before the module does so, and then it finds it replaced."""
    (tmp_path / "trainer_of_test.py").write_text(TRAINER)
    given = environment(OPENRLHF_RLKERNEL="losses,advantages")
    given["PYTHONPATH"] = os.pathsep.join([str(tmp_path), given["PYTHONPATH"]])
    command = ("-m", "rlkernel.integrations.openrlhf", "--local_rank=0", "trainer_of_test", "--x", "1")
    run = subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True, timeout=600)
    want = (
        "['--local_rank=0', '--x', '1'] (False, False) openrlhf.models.actor rlkernel rlkernel rlkernel False"
    )
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == want, (run.stdout, run.stderr)


UNDONE = """
import rlkernel, openrlhf.models
patched = openrlhf.models.Actor.forward.__module__
rlkernel.unpatch_all()
from openrlhf.trainer.ppo_utils.experience_maker import compute_reward
print(patched, openrlhf.models.Actor.forward.__module__, compute_reward.__module__)
"""
BY_CALL = """
import rlkernel
with rlkernel.patch_openrlhf(["losses"]) as patch:  # the first to import OpenRLHF's models
    import openrlhf.models as models
    print(patch.parts, models.PolicyLoss.forward.__module__, models.Actor.forward.__module__)
"""


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (UNDONE, "rlkernel openrlhf.models.actor openrlhf.models.utils"),
        (BY_CALL, "('losses',) rlkernel openrlhf.models.actor"),
    ],
    ids=["undone", "by call"],
)
def test_what_was_waited_for_is_not_put_on_any_more(tmp_path, text, want):
    """Once the patch was undone, or the process has asked for one itself."""
    (tmp_path / "trainer_of_test.py").write_text(text)
    given = environment(OPENRLHF_RLKERNEL="1")
    given["PYTHONPATH"] = os.pathsep.join([str(tmp_path), given["PYTHONPATH"]])
    status, said = forks.run_module(
        ["rlkernel.integrations.openrlhf", "trainer_of_test"], given, forgotten="openrlhf"
    )
    assert status == 0 and said.splitlines()[-1] == want, said


def test_a_module_must_be_named():
    from rlkernel.integrations.openrlhf.__main__ import main

    with pytest.raises(SystemExit, match="usage: python -m rlkernel.integrations.openrlhf MODULE"):
        main(["--local_rank=0"])
    assert switch.SWITCH not in os.environ


def test_an_import_that_fails_is_waited_for_again(tmp_path, monkeypatch):
    """As OpenRLHF's models without flash-attn, which an error tells of."""
    (tmp_path / "waited_for.py").write_text("raise ImportError('no flash-attn')")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = []
    monkeypatch.setattr(processes, "register", told.append)
    monkeypatch.setattr(processes, "WHERE", {"waited_for": ("losses",)})
    monkeypatch.setenv(switch.SWITCH, "1")
    processes.watch()
    with pytest.raises(ImportError, match="no flash-attn"):
        importlib.import_module("waited_for")
    (tmp_path / "waited_for.py").write_text("# now it is there, and of another size")
    importlib.invalidate_caches()
    assert not told and importlib.import_module("waited_for") and told == [("losses",)]
    finder = processes.waited_for
    assert finder not in sys.meta_path and finder.find_spec("waited_for", None) is None
    del sys.modules["waited_for"]


@pytest.mark.slow
def test_rays_processes(rays_turn, monkeypatch):
    """Which a patch in the driver reaches, where ``ray.init`` is called after it, as OpenRLHF calls it."""
    import ray

    for name, value in environment().items():
        if name.startswith("PYTHON"):
            monkeypatch.setenv(name, value)

    class Worker:
        def modules(self):
            return "openrlhf.models" in sys.modules

        def logprob(self):
            from openrlhf.models.actor import log_probs_from_logits

            from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch

            found = log_probs_from_logits(torch.zeros(1, 4), torch.tensor([1]))
            patch = OpenRlhfPatch.in_place()
            return log_probs_from_logits.__module__, found.item(), patch and (patch.parts, dict(patch.calls))

    with rlkernel.patch_openrlhf(["logprobs", "losses"]):
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False,
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}},
        )  # fmt: skip
        try:
            actor = ray.remote(Worker).remote()
            assert not ray.get(actor.modules.remote(), timeout=300)
            module, found, (parts, calls) = ray.get(actor.logprob.remote(), timeout=300)
        finally:
            ray.shutdown()
    assert module == "rlkernel" and calls == {"log_probs_from_logits": 1} and parts == ("logprobs", "losses")
    assert found == pytest.approx(-torch.tensor(4.0).log().item())


def test_the_doctor():
    from rlkernel import doctor

    found = doctor.examine("openrlhf")
    assert found.reason is None and found.installed == "0.11.2" and not found.why_not, found
    assert found.supported == contract.SUPPORTED and found.replaced and INSTALLED.is_dir()
