"""The real SkyRL, what rlkernel replaces in it, and inputs for both.

Its files lie where ``tests/fetch_peers.py`` put them, without what they want of a GPU; what in_skyrl/ holds
stands for packages of which they use a little.  Neither stays on the path: other frameworks would take what
lies there for installed.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import Door, policy_batch, stood_in
from peer_sources import folder

import rlkernel
from rlkernel.integrations.skyrl import contract, switch
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch

if sys.version_info < (3, 11):
    pytest.skip("SkyRL needs Python 3.11", allow_module_level=True)
pytest.importorskip("ray", reason="needs Ray, which rlkernel does not need", exc_type=ImportError)
pytest.importorskip("omegaconf", reason="needs Ray, with which it comes here", exc_type=ImportError)
STAND_INS = Path(__file__).parent / "in_skyrl"
BACKEND = "skyrl.backends.skyrl_train"


SOURCE = folder("skyrl") / "skyrl"


def importable():
    return stood_in(STAND_INS, {"flash_attn"})


def load(name):
    with importable():
        return importlib.import_module(name)


if "skyrl" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "skyrl", SOURCE / "__init__.py", submodule_search_locations=[str(SOURCE)]
    )
    sys.modules["skyrl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["skyrl"])
ppo_utils = load(f"{BACKEND}.utils.ppo_utils")
torch_utils = load(f"{BACKEND}.utils.torch_utils")
config = load("skyrl.train.config")


DOOR = Door(
    rlkernel.patch_skyrl, SkyrlPatch, "skyrl", "SkyRL", contract.SUPPORTED, switch, (*switch.OWN, switch.JOB),
    (ppo_utils.PolicyLossRegistry._functions, ppo_utils.AdvantageEstimatorRegistry._functions),
)  # fmt: skip
check_against_skyrl, check_left_to_skyrl = DOOR.check_against, DOOR.check_left
upstream, nothing_left_behind = DOOR.fixtures()


def algorithm(**fields):
    """SkyRL's configuration; ``a__b`` is field b of its part a."""
    made = config.AlgorithmConfig()
    for name, value in fields.items():
        *path, last = name.split("__")
        owner = made
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, last), name
        setattr(owner, last, value)
    return made


def batch(*sizes, **more):
    new, old, rollout, advantages, mask = policy_batch(*sizes, **more)
    return {
        "log_probs": new, "old_log_probs": old, "advantages": advantages, "loss_mask": mask.float(),
        "rollout_logprobs": rollout,
    }  # fmt: skip


def rewards(seed=0, rows=12, tokens=7):
    """Of advantage estimators: responses that end together, as SkyRL pads them, with a reward at the last
    token, and the names of their groups."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = (torch.arange(tokens) >= tokens - lengths[:, None]).float()
    token_level = torch.zeros(rows, tokens)
    token_level[:, -1] = torch.randn(rows, generator=g) + 1
    names = np.array([f"uid-{i}" for i in (0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1)][:rows], dtype=object)
    return token_level, mask, names
