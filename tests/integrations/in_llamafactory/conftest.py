"""LLaMA-Factory and its TRL come first on the path (../test_llamafactory.py); here is a model on the disk."""

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))
