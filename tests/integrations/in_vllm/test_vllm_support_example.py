"""The example of a rollout with its support, in its short form."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[3] / "examples" / "vllm_support.py"
    spec = importlib.util.spec_from_file_location("vllm_support", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trainer_that_knows_the_support_has_the_rollouts_ratio(example):
    args = example.arguments(["--prompts", "3", "--samples", "2", "--tokens", "12", "--vocabulary", "512"])
    every, kept = example.ratios(args)
    without, with_it = every.values()
    assert len(kept) > 40 and (kept > 1).any() and (kept < 400).all()
    assert ((with_it - 1).abs() < 1e-4).all()  # engine and trainer round in other places
    assert without.mean() < 0.95
