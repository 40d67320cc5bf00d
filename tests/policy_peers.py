"""The loss code of TRL and verl, as the benchmark runs it; skips where they are not installed."""

import functools

import pytest

from rlkernel.benchmarks import _peers, policy_loss


@functools.cache
def verl_core():
    try:
        return _peers.verl_core_algos()
    except ImportError as error:
        pytest.skip(f"verl: {error}")


def verl_loss(name, inputs, agg, weights=None, **config):
    return policy_loss.verl_loss(verl_core(), name, inputs, agg, weights, **config)


def trl_loss(inputs, **options):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    return policy_loss.trl_loss(trainer.GRPOTrainer, inputs, **options)
