"""What rlkernel.patch_verl() replaces in the real verl, restores and refuses; verl's plugin and Ray."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verl_cases import DOOR, core, nothing_left_behind, upstream, verl

import rlkernel
from rlkernel.integrations._parts import Asked
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.verl import contract, install, switch
from rlkernel.integrations.verl.verl_patch import VerlPatch

torch_functional = pytest.importorskip("verl.utils.torch_functional")
torch_head = pytest.importorskip("verl.utils.experimental.torch_functional")
by_name = pytest.importorskip("verl.workers.utils.losses")

assert nothing_left_behind and upstream  # fixtures of every test here
ROOT = Path(__file__).parents[2]


def test_what_is_replaced_and_restored():
    before = DOOR.everything()
    with rlkernel.patch_verl() as patch:
        assert "verl.utils.torch_functional.logprobs_from_logits -> rlkernel.logprob" in str(patch)
        assert "core_algos.POLICY_LOSS_REGISTRY.gspo -> rlkernel.policy_loss" in str(patch)
        assert "core_algos.ADV_ESTIMATOR_REGISTRY.grpo -> rlkernel.group_advantages" in str(patch)
        assert "FusedLinearForPPO.forward -> rlkernel.linear_logprob" in str(patch)
        assert "<locals>" not in str(patch) and not patch.refused
        assert core.get_policy_loss_fn("vanilla") is core.compute_policy_loss_vanilla
        assert core.get_adv_estimator_fn("gae") is core.compute_gae_advantage_return
        assert by_name.compute_value_loss is core.compute_value_loss
        assert by_name.get_policy_loss_fn is core.get_policy_loss_fn
        DOOR.check_one_at_a_time(patch)
    DOOR.check_restored(before)


def test_a_module_that_is_imported_later_takes_the_new_and_gives_it_back():
    name = "verl.workers.rollout.naive.naive_rollout"
    for loaded in [x for x in sys.modules if x.startswith("verl.workers.rollout.naive")]:
        del sys.modules[loaded]
    with rlkernel.patch_verl():
        late = importlib.import_module(name)
        assert late.logprobs_from_logits is torch_functional.logprobs_from_logits
    assert late.logprobs_from_logits is torch_functional.logprobs_from_logits


@pytest.mark.parametrize("part", switch.PARTS)
def test_parts(part):
    with rlkernel.patch_verl([part]) as patch:
        places = " ".join(patch.replaced)
        assert ("torch_functional.entropy_from_logits" in places) == (part == "logprobs")
        assert ("FusedLinearForPPO" in places) == ("linear_cross_entropy" in places) == (part == "fused_head")
        assert ("POLICY_LOSS" in places) == ("compute_value_loss" in places) == (part == "losses")
        assert ("ADV_ESTIMATOR" in places) == (part == "advantages")
        DOOR.check_parts(part)
    patch.undo()


def test_every_loss_and_estimator_of_verl_is_here_or_known_to_be_left():
    with rlkernel.patch_verl():
        left = [k for k, v in core.POLICY_LOSS_REGISTRY.items() if v.__module__ != "rlkernel"]
        assert set(left) == {"clip_cov", "kl_cov", "bypass_mode"}
        left = [k for k, v in core.ADV_ESTIMATOR_REGISTRY.items() if v.__module__ != "rlkernel"]
        assert set(left) == {"optimal_token_baseline", "tir_optimal_token_baseline"}


def test_refusals(monkeypatch):
    def become(changed, version):
        if version is None:
            changed.setitem(sys.modules, "verl", None)
        else:
            changed.setattr(verl, "__version__", version)

    DOOR.check_refusals(monkeypatch, become, ["0.11.0", "0.9.0"])


CHANGES = {
    "compute_policy_loss_gspo": lambda m: m.setattr(
        core, "compute_policy_loss_gspo", lambda log_prob: log_prob
    ),
    "compute_policy_loss_sapo": lambda m: m.setitem(core.POLICY_LOSS_REGISTRY, "sapo", lambda *x: None),
    "compute_opo_outcome_advantage": lambda m: m.delattr(core, "compute_opo_outcome_advantage"),
    "entropy_from_logits": lambda m: m.setattr(
        torch_functional, "entropy_from_logits", lambda logits, dim=-1: 0
    ),
    "FusedLinearForPPO": lambda m: m.setattr(
        "verl.utils.experimental.torch_functional.FusedLinearForPPO.forward", lambda self, hidden: 0
    ),
    "linear_cross_entropy": lambda m: m.setattr(
        "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy", lambda hidden: 0
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_verl(monkeypatch, caplog, name):
    kept = "verl.utils.torch_functional.logprobs_from_logits"
    DOOR.check_change(monkeypatch, caplog, CHANGES[name], name, kept)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(core, "compute_value_loss"), (torch_functional, "entropy_from_logits"),
     (torch_head.FusedLinearForPPO, "forward")],
)  # fmt: skip
def test_what_somebody_has_put_around_a_function_stays(monkeypatch, owner, name):
    DOOR.check_around(monkeypatch, owner, name)


def test_a_part_that_cannot_be_imported(monkeypatch):
    """As verl's losses without one of verl's dependencies."""
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", None)
    monkeypatch.delattr("verl.trainer.ppo.core_algos")
    with pytest.raises(PatchError, match="losses cannot be replaced: .*core_algos"):
        rlkernel.patch_verl()
    with rlkernel.patch_verl(strict=False) as patch:
        assert set(patch.refused) == {"losses", "advantages"} and patch.replaced


def test_a_patch_of_which_nothing_can_be_replaced_comes_off_again(monkeypatch):
    """Else its variables would stay, and it would stand in the way of every further patch."""
    before = [os.environ.get(name) for name in DOOR.variables]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "verl.trainer.ppo.core_algos", None)
        without.delattr("verl.trainer.ppo.core_algos")
        with rlkernel.patch_verl(["losses"], strict=False) as patch:
            assert set(patch.refused) == {"losses"} and not patch.replaced
            assert [os.environ.get(name) for name in DOOR.variables] != before
    assert [os.environ.get(name) for name in DOOR.variables] == before
    with rlkernel.patch_verl() as further:
        assert further is not patch and further.replaced


def test_somebody_else_replaces_what_is_replaced(monkeypatch):
    def replace(others):
        others.setitem(core.POLICY_LOSS_REGISTRY, "vanilla", lambda *x: "somebody else's")

    DOOR.check_somebody_else(monkeypatch, replace, "POLICY_LOSS_REGISTRY.vanilla")


def test_signatures_stay_verls():
    import inspect

    names = [name for name in contract.PARAMETERS if name.startswith("compute_")]
    before = {name: inspect.signature(getattr(core, name)) for name in names}
    with rlkernel.patch_verl():
        assert before == {name: inspect.signature(getattr(core, name)) for name in names}
        assert core.compute_value_loss.__doc__


# the plugin


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None
    monkeypatch.setenv(switch.MODULES, "mine")
    with rlkernel.patch_verl(["losses", "logprobs"]):
        assert switch.asked() == Asked(("logprobs", "losses"), True)
        assert os.environ[switch.MODULES] == f"mine,{switch.PLUGIN}"
    assert switch.asked() is None and os.environ[switch.MODULES] == "mine"
    DOOR.check_switch(monkeypatch)


def test_the_plugin_does_what_is_asked_for_once(monkeypatch, caplog):
    DOOR.check_asked_once(monkeypatch, caplog, install.register, "fused_head")
    DOOR.check_wrong_name(monkeypatch, caplog, install.register)


CODE = """
import verl
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
import sys
print(core_algos.get_policy_loss_fn("vanilla").__module__, torch_functional.logprobs_from_logits.__module__,
      "rlkernel.integrations.verl.install" in sys.modules)
"""


def test_the_entry_point_in_fresh_processes(tmp_path):
    """verl imports it in every process; it is idle unless the variable is set."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    assert points == {"rlkernel": switch.PLUGIN}
    # as an installed package has it, whatever this one was installed from
    folder = tmp_path / "rlkernel_of_this_tree-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: rlkernel-of-this-tree\nVersion: 1\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[verl.plugins]", *lines, ""]))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]))

    def start(**variables):
        command = [sys.executable, "-W", "ignore", "-c", CODE]
        return subprocess.Popen(command, env=environment | variables, stdout=subprocess.PIPE, text=True)

    runs = {
        ("verl.trainer.ppo.core_algos", "verl.utils.torch_functional", "True"): start(),
        ("rlkernel", "verl.utils.torch_functional", "True"): start(VERL_RLKERNEL="losses"),
    }
    for want, process in runs.items():
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and tuple(said.split()[-3:]) == want, said


@pytest.mark.slow
def test_rays_processes(rays_turn, monkeypatch):
    """Which a patch in the driver reaches, where Ray is started after it."""
    ray = pytest.importorskip("ray", reason="needs verl, of whose dependencies Ray is one")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    class Worker:
        def logprob(self):
            import verl  # noqa: F401
            from verl.utils.torch_functional import logprobs_from_logits

            found = logprobs_from_logits(torch.zeros(1, 4), torch.tensor([1]))
            patch = VerlPatch.in_place()
            return logprobs_from_logits.__module__, found.item(), patch and dict(patch.calls)

    with rlkernel.patch_verl(["logprobs"]):
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            actor = ray.remote(Worker).remote()
            module, found, calls = ray.get(actor.logprob.remote(), timeout=300)
        finally:
            ray.shutdown()
    assert module == "rlkernel" and calls == {"logprobs_from_logits": 1}
    assert found == pytest.approx(-torch.tensor(4.0).log().item())
