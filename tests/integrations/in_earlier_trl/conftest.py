"""A TRL from before 1.15 comes first on the path (../test_trl_earlier.py); here is a model on the disk."""

import gc
import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # must stand before huggingface_hub's first import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import tiny


def pytest_collection_finish():
    """What is here is here for good: trainers collect garbage at every turn, and need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))
