"""The real AReaL, what rlkernel replaces in it, and inputs for both.

Its files lie where ``tests/fetch_peers.py`` put them.  Packages of it whose ``__init__`` imports its
controllers, and with them servers and clients of the web, are entered without it; what in_areal/ holds stands
for packages of which the rest uses a little, and does not stay on the path.
"""

import contextlib
import importlib
import importlib.machinery
import logging
import sys
import types
from pathlib import Path

import fetch_peers
import pytest
import torch
from doors import Door, stood_in
from peer_sources import folder

import rlkernel
from rlkernel.integrations.areal import contract, switch
from rlkernel.integrations.areal.areal_patch import ArealPatch

if not (3, 11) <= sys.version_info < (3, 13):
    pytest.skip("AReaL needs Python 3.11 or 3.12", allow_module_level=True)
pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
STAND_INS = Path(__file__).parent / "in_areal"
SOURCE = folder("areal")
SOURCE = SOURCE if SOURCE.name == "areal" else SOURCE / "areal"


class Unused:
    """A class of AReaL's controllers, from which others are derived that no test makes."""


# packages that are entered without their __init__, and what others take from there
ENTERED = {
    "areal": {"__version__": fetch_peers.version("areal")},
    "areal.infra": {"TrainController": Unused},
    "areal.infra.rpc": {},
    "areal.trainer": {},
    "areal.trainer.ppo": {},
}
CONTROLLER = "areal.experimental.training_service.controller.controller"


def enter():
    for name, given in ENTERED.items():
        if name in sys.modules:
            continue
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)  # others look for it
        module.__path__ = [str(SOURCE.joinpath(*name.split(".")[1:]))]
        vars(module).update(given)
        sys.modules[name] = module
    controller = types.ModuleType(CONTROLLER)
    controller.GatewayTrainController = Unused
    sys.modules[CONTROLLER] = controller


def importable():
    return stood_in(STAND_INS, {path.stem for path in STAND_INS.iterdir()})


@contextlib.contextmanager
def own_logging():
    """Whoever asks AReaL for a logger gets another root of all loggers, of which pytest knows nothing."""
    kind = logging.Logger
    before = kind.root, kind.manager
    try:
        yield
    finally:
        kind.root, kind.manager = before


def load(name):
    with importable(), own_logging():
        return importlib.import_module(name)


enter()
vocab_parallel = load(contract.HOMES["logprobs"])
actor = load(contract.HOMES["advantages"])
engine = load(contract.HOMES["fused_head"])


def eager():
    """AReaL compiles what it gathers with; one test lets it."""
    return torch.compiler.set_stance("force_eager")


DOOR = Door(rlkernel.patch_areal, ArealPatch, "areal", "AReaL", contract.SUPPORTED, switch, switch.OWN)
check_against_areal, check_left_to_areal = DOOR.check_against, DOOR.check_left
upstream, nothing_left_behind = DOOR.fixtures(eager)
