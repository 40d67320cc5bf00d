"""The example of a whole PPO update: its numbers, that it runs, and on a GPU that a replay gives its bits."""

import importlib.util
from pathlib import Path

import pytest
import torch
from accuracy import check
from bitwise import assert_equal

_SPEC = importlib.util.spec_from_file_location(
    "ppo_update", Path(__file__).parent.parent / "examples" / "ppo_update.py"
)
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)
TRAINED = ("logprobs", "values")


def leaves(batch, dtype=torch.float32):
    batch = {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}
    return {k: x.requires_grad_() if k in TRAINED else x for k, x in batch.items()}


@pytest.mark.parametrize("size", [(1, 4), (5, 37), (16, 200)], ids=str)
def test_update_is_as_accurate_as_plain_pytorch(size):
    batch = example.make_batch(*size, torch.device("cpu"))
    truth = example.plain_update(leaves(batch, torch.float64))
    torchs = example.plain_update(leaves(batch))
    ours = example.update(leaves(batch))
    for name, a, b, c in zip(("loss", *TRAINED), ours, torchs, truth, strict=False):
        check(name, a, b, c, magnitude=float(c.abs().max()))


def test_runs_here(capsys):
    example.main(["--batch", "4", "--length", "64", "--updates", "1"])
    printed = capsys.readouterr().out
    assert "4 x 64 tokens" in printed and "tokens" in printed and "times as long" in printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_a_replay_gives_the_bits_of_an_eager_update():
    device = torch.device("cuda")
    batch = leaves(example.make_batch(16, 300, device))
    replay, results = example.captured(batch)
    fresh = example.make_batch(16, 300, device, seed=1)
    with torch.no_grad():
        for name, x in batch.items():
            x.copy_(fresh[name])
    replay()
    for i, (a, b) in enumerate(zip(results, example.update(leaves(fresh)), strict=True)):
        assert_equal(f"result {i}", a, b)
