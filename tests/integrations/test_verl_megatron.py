"""verl's log-probabilities and entropies over two of Megatron-Core's ranks, over gloo, against verl's own."""

import contextlib
import importlib
import subprocess
import sys
from types import SimpleNamespace

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


# the fused head


def _whole_head():
    """Hidden states [L, 1, H] as Megatron has them, the weight and labels [1, L]."""
    g = torch.Generator().manual_seed(4)
    return random(11, LENGTH, 1, 16), random(12, VOCAB, 16), torch.randint(0, VOCAB, (1, LENGTH), generator=g)


HEADS = {"rows of each rank": True, "all rows": False}  # sequence parallelism, or not
ENTROPIES = random(13, LENGTH)


def _heads(rank, kind):
    """By verl's function of Megatron's postprocess: outputs, and gradients of the rank's own tensors."""
    megatron_models.begin(2)
    fused = importlib.import_module("verl.models.mcore.model_forward_fused")
    found = {}
    for name, sequence_parallel in HEADS.items():
        hidden, weight, labels = _whole_head()
        hidden = (hidden.chunk(2)[rank] if sequence_parallel else hidden).clone().requires_grad_()
        weight = weight.chunk(2)[rank].clone().requires_grad_()
        config = SimpleNamespace(sequence_parallel=sequence_parallel, config_logger_dir="")
        with rlkernel.patch_verl(["fused_head"]) as patch:
            out = fused.fused_output_processor(
                hidden_states=hidden * 1, output_layer=SimpleNamespace(weight=weight), output_weight=None,
                labels=labels, context=fused.FusedOutputProcessorContext(temperature=0.7), config=config,
            )  # fmt: skip
            (out.log_probs * UPSTREAM[0] + out.entropy * ENTROPIES).sum().backward()
            assert patch.calls == {"linear_cross_entropy": 1} and not patch.fallbacks
        found[name] = out.log_probs.detach(), out.entropy.detach(), hidden.grad, weight.grad
    return found


def test_the_fused_head_over_megatrons_ranks(tmp_path):
    """verl's own runs on GPUs alone.  Of all rows it leaves each rank the gradient of its part of the
    vocabulary, which nobody adds up: verl trains with sequence parallelism, where Megatron does."""
    found = ranks.run(_heads, ["tp"], tmp_path)["tp"]
    hidden, weight, labels = (
        x.double().requires_grad_() if x.is_floating_point() else x for x in _whole_head()
    )
    logprobs = ((hidden[:, 0] @ weight.T) / 0.7).log_softmax(-1)
    truth = logprobs.gather(-1, labels[0][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    (truth[0] * UPSTREAM[0] + truth[1] * ENTROPIES).sum().backward()
    for name, sequence_parallel in HEADS.items():
        for got, want in zip(found[0][name][:2], truth, strict=True):
            torch.testing.assert_close(got, want.detach().float(), rtol=1e-6, atol=1e-5)
        for got, other in zip(found[0][name][:2], found[1][name][:2], strict=True):
            assert_equal("the other rank's", got, other)
        grads = [of[name][2] for of in found]
        if not sequence_parallel:
            assert_equal("of the other rank", *grads)
        grad = torch.cat(grads) if sequence_parallel else grads[0]
        torch.testing.assert_close(grad, hidden.grad.float(), rtol=1e-6, atol=1e-5)
        grad = torch.cat([of[name][3] for of in found])
        torch.testing.assert_close(grad, weight.grad.float(), rtol=1e-6, atol=1e-5)


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
