"""Rollouts with top_p, which TRL alone scores over the whole vocabulary, and with their support."""

import pytest
import runs

import rlkernel

FILTERS = {"top_p": 0.9, "temperature": 0.9}


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    return runs.train(model, tmp_path_factory.mktemp("stock"), **FILTERS)


@pytest.fixture(scope="module")
def supported(model, tmp_path_factory):
    with rlkernel.patch_trl(vllm="require", support=runs.engines.VOCAB) as patch:
        run = runs.train(model, tmp_path_factory.mktemp("supported"), **FILTERS)
        assert not patch.fallbacks and not patch.vllm.fallbacks
        run.calls = dict(patch.vllm.calls)
    return run


def report(name, run):
    mean, largest = (max(run.column(f"{runs.DIFFERENCE}/{kind}")) for kind in ("mean", "max"))
    ratios = [x for kind in ("min", "max") for x in run.column(f"{runs.RATIO}/{kind}")]
    print(f"{name}: sampling_logp_difference mean {mean:.1e}, max {largest:.1e}; ", end="")
    print(f"importance ratios {min(ratios):.6f} to {max(ratios):.6f}")
    return largest, max(abs(x - 1) for x in ratios)


def test_the_difference_of_sampling_and_training_is_that_of_two_attentions(stock, supported):
    """Of every token, where stock TRL is off by the mass that the filter left out."""
    difference, ratio = report("stock", stock)
    assert difference > 0.05 and ratio > 0.05
    difference, ratio = report("support", supported)
    assert difference < 5e-5 and ratio < 5e-5


def test_both_learn(stock, supported):
    for run in (stock, supported):
        rewards = run.column("reward")
        print([round(x, 3) for x in rewards])
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
