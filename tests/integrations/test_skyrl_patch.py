"""What rlkernel.patch_skyrl() replaces in the real SkyRL, restores and refuses; and Ray's processes."""

import functools
import inspect
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
from patch_orders import same
from skyrl_cases import (
    BACKEND,
    DOOR,
    SOURCE,
    STAND_INS,
    algorithm,
    batch,
    load,
    nothing_left_behind,
    ppo_utils,
    torch_utils,
    upstream,
)

import rlkernel
from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.skyrl import contract, plugin, switch
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch

model_wrapper = load(f"{BACKEND}.workers.model_wrapper")
worker = load(f"{BACKEND}.workers.worker")
skyrl = sys.modules["skyrl"]

assert nothing_left_behind and upstream  # fixtures of every test here
ROOT = Path(__file__).parents[2]
LOSSES, ESTIMATORS = ppo_utils.PolicyLossRegistry, ppo_utils.AdvantageEstimatorRegistry


def test_what_is_replaced_and_restored():
    before, finders = DOOR.everything(), list(sys.meta_path)
    regular, dual = LOSSES.get("regular"), LOSSES.get("dual_clip")
    with rlkernel.patch_skyrl() as patch:
        assert f"{BACKEND}.utils.torch_utils.logprobs_from_logits -> rlkernel.logprob" in str(patch)
        assert f"{BACKEND}.workers.model_wrapper.logprobs_from_logits -> rlkernel.logprob" in str(patch)
        assert "HFModelWrapper.forward -> rlkernel.linear_logprob" in str(patch)
        assert "PolicyLossRegistry.gspo -> rlkernel.policy_loss" in str(patch)
        assert "AdvantageEstimatorRegistry.reinforce++ -> rlkernel.gae" in str(patch)
        assert f"{BACKEND}.workers.worker.ppo_critic_loss -> rlkernel.value_loss" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused and not patch.waiting
        assert LOSSES.get("regular").original is regular
        assert LOSSES.get("dual_clip").original is dual
        assert worker.ppo_critic_loss is ppo_utils.ppo_critic_loss
        DOOR.check_one_at_a_time(patch)
    assert sys.meta_path == finders and not patch.active
    DOOR.check_restored(before)


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_skyrl([part]) as patch:
        places = " ".join(patch.replaced)
        assert ("chunked_entropy_from_logits" in places) == (part == "logprobs")
        assert ("HFModelWrapper" in places) == (part == "fused_head")
        assert ("PolicyLossRegistry" in places) == ("ppo_critic_loss" in places) == (part == "losses")
        assert ("AdvantageEstimatorRegistry" in places) == (part == "advantages")
        DOOR.check_parts(part)
    patch.undo()


def test_every_loss_and_estimator_of_skyrl_is_here_or_known_to_be_left():
    with rlkernel.patch_skyrl():
        left = [k for k, v in LOSSES._functions.items() if v.__module__ != "rlkernel"]
        assert set(left) == {"clip_cov", "kl_cov", "dppo"}
        assert all(v.__module__ == "rlkernel" for v in ESTIMATORS._functions.values())


def test_refusals(monkeypatch):
    def become(changed, version):
        if version is None:
            changed.setitem(sys.modules, "skyrl", None)
        else:
            changed.setattr(skyrl, "__version__", version)

    DOOR.check_refusals(monkeypatch, become, ["0.4.0", "0.2.9"])


CHANGES = {
    "gspo_policy_loss": lambda m: m.setattr(ppo_utils, "gspo_policy_loss", lambda log_probs: log_probs),
    "sapo_policy_loss": lambda m: m.setitem(LOSSES._functions, "sapo", lambda *x: None),
    "compute_maxrl_advantage": lambda m: m.delattr(ppo_utils, "compute_maxrl_advantage"),
    "compute_gae_advantage_return": lambda m: m.delitem(ESTIMATORS._functions, "gae"),
    "chunked_entropy_from_logits": lambda m: m.setattr(
        torch_utils, "chunked_entropy_from_logits", lambda logits, dim=-1: 0
    ),
    "fused_head": lambda m: m.setattr(model_wrapper.HFModelWrapper, "forward", lambda self, hidden: 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_skyrl(monkeypatch, caplog, name):
    kept = f"{BACKEND}.utils.torch_utils.logprobs_from_logits"
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, kept)


@pytest.mark.parametrize("name", ["logprobs_from_logits", "ulysses_pad_and_slice_inputs"])
def test_a_forward_that_asks_for_something_else(monkeypatch, name):
    with monkeypatch.context() as changed:
        changed.delattr(model_wrapper, name)
        with pytest.raises(PatchError, match=f"fused_head cannot be replaced: .*{name} must be callable"):
            rlkernel.patch_skyrl(["fused_head"])


def test_a_part_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, contract.HOMES["losses"], None)
    with pytest.raises(PatchError, match="losses cannot be replaced: .*ppo_utils"):
        rlkernel.patch_skyrl()
    with rlkernel.patch_skyrl(strict=False) as patch:
        assert set(patch.refused) == {"losses", "advantages"} and patch.replaced


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setitem(LOSSES._functions, "regular", lambda *x: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "PolicyLossRegistry.regular")


def test_signatures_stay_skyrls():
    names = [name for name in contract.PARAMETERS if hasattr(ppo_utils, name)]
    before = {name: inspect.signature(getattr(ppo_utils, name)) for name in names}
    forward = inspect.signature(model_wrapper.HFModelWrapper.forward)
    with rlkernel.patch_skyrl():
        assert before == {name: inspect.signature(getattr(ppo_utils, name)) for name in names}
        assert forward == inspect.signature(model_wrapper.HFModelWrapper.forward)
        assert ppo_utils.ppo_critic_loss.__name__ == "ppo_critic_loss"
    assert len(names) > 10


def test_the_docstrings_example():
    DOOR.check_example()


def test_a_users_loss_that_wraps_skyrls_is_the_users(monkeypatch):
    """As its attributes say that it is SkyRL's."""
    stock = LOSSES._functions["regular"]

    @functools.wraps(stock)
    def doubled(*args, **kwargs):
        loss, metrics = stock(*args, **kwargs)
        return 2 * loss, metrics

    with monkeypatch.context() as changed:
        changed.setitem(LOSSES._functions, "regular", doubled)
        with pytest.raises(PatchError, match="'regular' must be SkyRL's own ppo_policy_loss"):
            rlkernel.patch_skyrl()
        with rlkernel.patch_skyrl(strict=False) as patch:
            assert list(patch.refused) == ["ppo_policy_loss"] and LOSSES._functions["regular"] is doubled


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ppo_utils, "ppo_critic_loss"), (torch_utils, "logprobs_from_logits"),
     (model_wrapper.HFModelWrapper, "forward")],
)  # fmt: skip
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


# modules that come later


@pytest.fixture
def unimported(monkeypatch):
    """A process that has not imported SkyRL's models."""

    def forget(*names):
        for name in names:
            module = sys.modules[f"{BACKEND}.{name}"]
            monkeypatch.delitem(sys.modules, module.__name__)
            parent, _, last = module.__name__.rpartition(".")
            monkeypatch.delattr(sys.modules[parent], last)
        return f"{BACKEND}.{names[0]}"

    return forget


@pytest.mark.parametrize("parts", [("fused_head",), ("logprobs", "fused_head")])
def test_models_that_are_imported_later(monkeypatch, unimported, parts):
    """As in a driver without flash-attn, or of a process of Ray's."""
    name = unimported("workers.model_wrapper")
    with rlkernel.patch_skyrl(parts) as patch:
        assert patch.waiting == {"fused_head": name} and isinstance(sys.meta_path[0], Arrivals)
        late = load(name)
        assert late.HFModelWrapper.forward.__module__ == "rlkernel" and not patch.waiting
        assert late.logprobs_from_logits.__module__ == "rlkernel"
        assert late.__spec__.loader.exec_module.__self__ is late.__spec__.loader
    assert late.HFModelWrapper.forward.__module__ == name
    assert late.logprobs_from_logits is torch_utils.logprobs_from_logits
    assert late.chunked_entropy_from_logits is torch_utils.chunked_entropy_from_logits


def test_what_is_wrong_with_a_later_module_is_an_error_of_its_import(monkeypatch, unimported, caplog):
    unimported("workers.model_wrapper")
    monkeypatch.setitem(contract.PARAMETERS, "forward", ("self", "something else"))
    DOOR.check_wrong_later(monkeypatch, caplog, "fused_head", load, "forward must take")


def test_an_undone_patch_waits_for_nothing(unimported):
    name = unimported("workers.model_wrapper")
    late = DOOR.check_undone_waits("fused_head", load)
    assert late.HFModelWrapper.forward.__module__ == name


def test_models_without_flash_attn(unimported, monkeypatch):
    unimported("workers.model_wrapper")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with rlkernel.patch_skyrl() as patch:
        assert list(patch.waiting) == ["fused_head"] and "PolicyLossRegistry.gspo" in str(patch)
        assert "forward" not in str(patch)


def test_a_process_that_has_imported_nothing(unimported, monkeypatch):
    """Of Ray's: nothing of SkyRL is imported by the patch, and each part is there when SkyRL imports it."""
    names = [unimported(name) for name in ("workers.model_wrapper", "utils.ppo_utils", "utils.torch_utils")]
    monkeypatch.setenv(switch.SWITCH, "1")
    plugin.register()
    patch = SkyrlPatch.in_place()
    assert set(patch.waiting) == set(switch.PARTS) and not patch.replaced and patch.active
    assert not any(name in sys.modules for name in names)
    late = load(names[2])
    assert late.logprobs_from_logits.__module__ == "rlkernel" and "logprobs" not in patch.waiting
    core = load(names[1])
    assert core.PolicyLossRegistry._functions["gspo"].__module__ == "rlkernel"
    assert core.compute_gae_advantage_return.__module__ == "rlkernel" and [*patch.waiting] == ["fused_head"]
    assert load(names[0]).HFModelWrapper.forward.__module__ == "rlkernel" and not patch.waiting
    assert rlkernel.unpatch_all() == ["rlkernel.patch_skyrl"]
    assert core.PolicyLossRegistry._functions["gspo"].__module__ == names[1]


# registries and pickle


def test_a_registry_is_handed_on_by_name():
    """What SkyRL pickles for Ray is where the function is found, in a process with the patch or without."""
    from ray import cloudpickle

    with rlkernel.patch_skyrl():
        sent = {k: cloudpickle.dumps(v) for k, v in (LOSSES._functions | ESTIMATORS._functions).items()}
        loss = cloudpickle.dumps(ppo_utils.ppo_critic_loss)
        assert pickle.loads(sent["dual_clip"]) is LOSSES._functions["dual_clip"]
        assert pickle.loads(sent["grpo"]) is ESTIMATORS._functions["grpo"]
        assert pickle.loads(loss) is ppo_utils.ppo_critic_loss
    ours = {name for name, data in sent.items() if b"rlkernel" in data}
    assert ours == set(LOSSES._functions | ESTIMATORS._functions) - {"clip_cov", "kl_cov", "dppo"}
    assert max(len(sent[name]) for name in ours) < 400
    assert pickle.loads(sent["dual_clip"]) is LOSSES._functions["dual_clip"]


# the environment


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None
    monkeypatch.setenv(
        switch.JOB, json.dumps({"metadata": {"a": "b"}, "runtime_env": {"env_vars": {"X": "1"}}})
    )
    with rlkernel.patch_skyrl(["losses", "logprobs"]):
        assert switch.asked() == Asked(("logprobs", "losses"), True)
        assert json.loads(os.environ[switch.JOB]) == {
            "metadata": {"a": "b"},
            "runtime_env": {
                "worker_process_setup_hook": switch.HOOK,
                "env_vars": {"X": "1", "SKYRL_RLKERNEL": "logprobs,losses", "SKYRL_RLKERNEL_STRICT": "1"},
            },
        }
    assert switch.asked() is None and "worker_process" not in os.environ[switch.JOB]
    DOOR.check_switch(monkeypatch)


def test_a_job_with_a_hook_of_its_own(monkeypatch):
    monkeypatch.setenv(switch.JOB, json.dumps({"runtime_env": {"worker_process_setup_hook": "my.hook"}}))
    before = DOOR.everything()
    with pytest.raises(PatchError, match="worker_process_setup_hook of RAY_JOB.* got 'my.hook'"):
        rlkernel.patch_skyrl()
    assert (
        same(before, DOOR.everything()) and SkyrlPatch.in_place() is None and switch.SWITCH not in os.environ
    )


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '"x"', '{"runtime_env": "x"}', '{"runtime_env": {"env_vars": ["x"]}}']
)
def test_a_job_that_cannot_be_read(monkeypatch, text):
    monkeypatch.setenv(switch.JOB, text)
    before = DOOR.everything()
    with pytest.raises(PatchError, match="RAY_JOB_CONFIG_JSON_ENV_VAR must be"):
        rlkernel.patch_skyrl()
    assert same(before, DOOR.everything()) and SkyrlPatch.in_place() is None
    assert os.environ[switch.JOB] == text and switch.SWITCH not in os.environ


@pytest.mark.parametrize("hook", [switch.HOOK, "my.hook", None])
@pytest.mark.parametrize("mode", ["driver", "worker", "no ray"])
def test_a_process_of_the_job_forgets_it(monkeypatch, mode, hook):
    import ray

    kind = {"driver": ray.SCRIPT_MODE, "worker": ray.WORKER_MODE}.get(mode)
    context = types.SimpleNamespace(worker=types.SimpleNamespace(mode=kind))
    monkeypatch.setattr(ray, "is_initialized", lambda: mode != "no ray")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv(switch.JOB, json.dumps({"runtime_env": hook and {"worker_process_setup_hook": hook}}))
    plugin.register()
    assert (switch.JOB in os.environ) == (mode != "worker" or hook != switch.HOOK)


def test_the_hook_is_the_function_that_ray_calls():
    module, _, name = switch.HOOK.rpartition(".")
    assert module == plugin.__name__ and getattr(plugin, name) is plugin.register


def test_the_plugin_does_what_is_asked_for_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, plugin.register, "losses")
    DOOR.check_wrong_name(monkeypatch, caplog, plugin.register)


@pytest.mark.parametrize(
    ("mode", "hook", "late"),
    [("driver", None, True), ("driver", switch.HOOK, False), ("worker", None, False)],
)
def test_ray_runs_already(monkeypatch, mode, hook, late):
    """Whose processes then know nothing of the patch, unless their job does."""
    import ray

    context = types.SimpleNamespace(
        runtime_env={"worker_process_setup_hook": hook},
        worker=types.SimpleNamespace(mode=ray.SCRIPT_MODE if mode == "driver" else ray.WORKER_MODE),
    )
    with monkeypatch.context() as running:
        running.setattr(ray, "is_initialized", lambda: True)
        running.setattr(ray, "get_runtime_context", lambda: context)
        if not late:
            with rlkernel.patch_skyrl(["losses"]):
                pass
            return
        with pytest.raises(PatchError, match="Ray must be started after rlkernel.patch_skyrl"):
            rlkernel.patch_skyrl(["losses"])
        with pytest.warns(UserWarning, match="Ray must be started after") as told:
            patch = rlkernel.patch_skyrl(["losses"], strict=False)
        patch.undo()
        assert told[0].filename == __file__


CODE = """
import importlib, json, os, subprocess, sys
import ray
import skyrl.backends.skyrl_train.utils.ppo_utils as core

class Worker:
    def told(self):
        hooked = "rlkernel.integrations.skyrl.plugin" in sys.modules
        early = "skyrl.backends" in sys.modules
        core = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
        from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
        kinds = [core.PolicyLossRegistry.get(name).__module__ for name in ("gspo", "users_own")]
        patch = SkyrlPatch.in_place()
        context = ray.get_runtime_context()  # which vLLM's actor hands to its engine's process
        code = f"import ray; ray.init({context.gcs_address!r}, runtime_env={context.runtime_env.to_dict()!r})"
        engine = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        told = "" if engine.returncode == 0 else engine.stderr[-500:]
        return [hooked, early, *kinds, list(patch.parts if patch else ()), told]

def users_own(*x, **y):
    return x

def run():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False,
             runtime_env={"env_vars": {"NCCL_CUMEM_ENABLE": "0"}})  # as SkyRL's initialize_ray
    core.sync_registries()
    # SkyRL's engines and workers name further variables
    actor = ray.remote(Worker).options(runtime_env={"env_vars": {"MORE": "1"}}).remote()
    print(json.dumps(ray.get(actor.told.remote(), timeout=300)))
    ray.shutdown()

core.PolicyLossRegistry.register("users_own", users_own)
run()
assert "rlkernel" not in sys.modules
import rlkernel
rlkernel.patch_skyrl(["losses"])
run()
"""


@pytest.mark.slow
def test_rays_processes(rays_turn, tmp_path):
    """By one variable, under a driver that knows nothing of rlkernel; and where the driver calls it."""
    (tmp_path / "skyrl").symlink_to(SOURCE)  # without the other peers that lie beside it
    (tmp_path / "driver.py").write_text(CODE)
    hook = {"worker_process_setup_hook": switch.HOOK, "env_vars": {switch.SWITCH: "losses,advantages"}}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(STAND_INS), str(tmp_path), *sys.path]),
        "PYTHONWARNINGS": "ignore",
        switch.JOB: json.dumps({"runtime_env": hook}),
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "driver.py")], env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert told == [
        [True, False, "rlkernel", "__main__", ["losses", "advantages"], ""],
        [True, False, "rlkernel", "__main__", ["losses"], ""],
    ]


def test_the_losses_of_a_patch_that_is_undone_go_on():
    """A worker holds the function that it was made with."""
    with rlkernel.patch_skyrl() as patch:
        held = LOSSES.get("regular")
    given = batch(1)
    held(
        given["log_probs"], given["old_log_probs"], given["advantages"], config=algorithm(),
        loss_mask=given["loss_mask"],
    )  # fmt: skip
    assert patch.calls == {"ppo_policy_loss": 1}
