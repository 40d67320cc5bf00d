"""The example of GRPO: inside batch_invariant the KL of TRL's rollout and of its trainer is 0."""

import pytest
import recipes
import torch

pytest.importorskip("trl", reason="TRL is not installed")

example = recipes.load("grpo_arithmetic")


@pytest.fixture
def quiet_transformers():
    from transformers.utils import logging

    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def test_the_kl_is_zero_in_every_step(tmp_path, quiet_transformers):
    threads = str(torch.get_num_threads())
    args = example.parse(
        ["--batch-invariant", "--steps", "4", "--batch", "32", "--vocabulary", "256", "--hidden", "64"]
        + ["--largest", "2", "--start", "0.1", "--threads", threads, "--quiet"]
    )
    recipes.before_after.warmed_up(tmp_path, args)
    found = example.train("patched", tmp_path, args).record["rollout"]
    assert found["equal"] == found["tokens"] > 4 * 32
    assert found["max"] == found["kl"] == 0
    # the very same run without the mode
    found = example.train("stock", tmp_path, args).record["rollout"]
    assert found["equal"] < found["tokens"] and found["max"] > 0
