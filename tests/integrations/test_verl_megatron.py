"""verl's log-probabilities and entropies over two of Megatron-Core's ranks, over gloo, against verl's own."""

import contextlib
import importlib
import subprocess
import sys

import megatron_models
import pytest
import ranks
import torch
from accuracy import check
from bitwise import assert_equal
from doors import random
from megatron_models import BATCH, LENGTH, VOCAB

import rlkernel

pytest.importorskip("megatron.core", reason="needs Megatron-Core, which is not installed")
pytest.importorskip("verl", reason="needs verl, which is not installed")
pytestmark = [ranks.pytestmark, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HOME = "verl.utils.megatron.tensor_parallel"
UPSTREAM = random(7, BATCH, LENGTH)
DTYPES = (torch.float32, torch.bfloat16)


def _inputs(dtype):
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(6))
    return random(5, BATCH, LENGTH, VOCAB, scale=3.0).to(dtype), labels


def _numbers(rank, kind):
    """Of each function, dtype and side: what it gives, and the gradient of this rank's logits."""
    megatron_models.begin(2)
    home = importlib.import_module(HOME)
    found = {}
    for side in ("stock", "ours"):
        with rlkernel.patch_verl(["logprobs"]) if side == "ours" else contextlib.nullcontext() as patch:
            for name in (
                "vocab_parallel_log_probs_from_logits",
                "vocab_parallel_entropy",
                "vocab_parallel_entropy_with_chunking",
            ):
                for dtype in DTYPES:
                    logits, labels = _inputs(dtype)
                    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
                    given = (shard * 1, labels) if "log_probs" in name else (shard * 1,)
                    out = getattr(home, name)(*given)
                    out.mul(UPSTREAM).sum().backward()
                    found[name, dtype, side] = out.detach(), shard.grad
            if patch:
                assert patch.calls.total() == 3 * len(DTYPES) and not patch.fallbacks
                with pytest.raises((IndexError, RuntimeError)):  # verl's own
                    home.vocab_parallel_entropy_with_chunking(random(1, 4, VOCAB // 2))
                assert "logits are not [B, L, V]" in str(patch.fallbacks)
    return found


def test_logprobs_and_entropies_over_megatrons_ranks(tmp_path):
    found = ranks.run(_numbers, ["tp"], tmp_path)["tp"]
    for name, dtype in {key[:2] for key in found[0]}:
        logits, labels = _inputs(dtype)
        exact = logits.double().requires_grad_()
        logprobs = exact.log_softmax(-1)
        if "log_probs" in name:
            truth = logprobs.gather(-1, labels[..., None])[..., 0]
        else:
            truth = -(logprobs.exp() * logprobs).sum(-1)
        truth.mul(UPSTREAM).sum().backward()
        ours, stock = (found[0][name, dtype, side][0] for side in ("ours", "stock"))
        assert ours.dtype == torch.float32
        assert_equal("the other rank's", ours, found[1][name, dtype, "ours"][0])
        check(f"{name} {dtype}", ours, stock, truth.detach())
        ours, stock = (
            torch.cat([of[name, dtype, side][1] for of in found], -1) for side in ("ours", "stock")
        )
        check(f"{name} {dtype} gradient", ours, stock, exact.grad)


CODE = f"""
import sys, rlkernel
with rlkernel.patch_verl() as patch:
    assert "{HOME}" not in sys.modules and patch.waiting == {{"logprobs over Megatron": "{HOME}"}}
    from {HOME} import vocab_parallel_entropy
    assert vocab_parallel_entropy.__module__ == "rlkernel" and not patch.waiting
    assert "{HOME}.vocab_parallel_log_probs_from_logits" in patch.replaced
assert sys.modules["{HOME}"].vocab_parallel_entropy.__module__ == "{HOME}"
with rlkernel.patch_verl(["losses"]) as patch:
    assert not patch.waiting and "{HOME}" not in str(patch)
with rlkernel.patch_verl() as patch:
    assert "{HOME}.vocab_parallel_entropy" in patch.replaced
"""


def test_it_is_replaced_when_an_engine_imports_it():
    """Megatron-Core's import takes seconds, which a process that trains with FSDP does not spend."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
