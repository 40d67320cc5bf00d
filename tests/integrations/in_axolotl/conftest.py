"""The TRL that axolotl pins, axolotl and stand-ins for what it imports come first on the path
(../test_axolotl.py); here is a model on the disk."""

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # must stand before huggingface_hub's first import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "in_earlier_trl"))

import tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))
