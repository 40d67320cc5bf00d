"""The TRL that axolotl pins, axolotl and stand-ins for what it imports come first on the path
(../test_axolotl.py); here is a model on the disk."""

import gc
import importlib
import os
import sys
import types
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # must stand before huggingface_hub's first import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "in_earlier_trl"))

import tiny


def import_without_bitsandbytes():
    """axolotl's loader imports its classes, of which no model here has any; TRL and PEFT ask whether it is
    installed."""
    for name in ("peft", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "trl.trainer.kto_trainer"):
        importlib.import_module(name)
    whole, layers = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.nn")
    for name in ("Params4bit", "Linear4bit", "Linear8bitLt"):
        setattr(layers, name, type(name, (), {}))
    whole.nn = layers
    stand_ins = {x.__name__: x for x in (whole, layers)}
    sys.modules |= stand_ins
    try:
        importlib.import_module("axolotl.train")
    finally:
        for name in stand_ins:
            del sys.modules[name]


import_without_bitsandbytes()
gc.collect()
gc.freeze()  # axolotl collects garbage four times per model, and would look through all these modules


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))
