"""packed_logprobs: what models do to logits, and batches in parts, as trees and as turns of agents."""

import importlib.util
from pathlib import Path

import pytest
import torch
from packed_cases import EXACT, error, models, pack, packed_model

import rlkernel
from rlkernel import PrefixBatch
from rlkernel.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


def test_the_example_of_its_documentation():
    model, batch = packed_model(), pack()
    logprobs = rlkernel.packed_logprobs(model, batch).logprobs
    padded = batch.unpack(logprobs)
    for row, (prompt, completion) in zip(padded, models.SAMPLES, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(completion)[:, None].long()
        )
        assert error(row[: len(completion)], expected[:, 0]) <= EXACT if completion else (row == 0).all()


@pytest.mark.parametrize("name", ("granite", "cohere", "minicpm3", "deepseek_v2", "gpt2", "gemma2"))
def test_what_models_do_to_logits(name):
    """Scales, softcaps, learned positions, values narrower than keys (minicpm3) and wider (deepseek_v2)."""
    model = models.make(name)
    expected = torch.cat([x for x, _ in models.alone(model, temperature=0.7)])
    w = models.weights(len(expected))
    grads = models.gradients(model, (expected * w).sum())
    hf.use_packed(model)
    found = rlkernel.packed_logprobs(model, pack(), temperature=0.7).logprobs
    assert error(found, expected) <= (3e-6 if name == "gemma2" else EXACT)
    assert models.worst(models.gradients(model, (found * w).sum()), grads) <= 3e-6


def test_a_head_with_a_bias():
    model = packed_model()
    model.lm_head = torch.nn.Linear(32, models.VOCAB, dtype=torch.float64)
    expected = torch.cat([x for x, _ in models.alone(model)])
    assert error(rlkernel.packed_logprobs(model, pack()).logprobs, expected) <= EXACT


def test_old_and_reference_passes_have_the_bits_of_the_policy_pass():
    model, batch = packed_model(dtype=torch.float32), pack()
    policy = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    with torch.no_grad():
        old = rlkernel.packed_logprobs(model, batch, return_entropy=True)
    assert torch.equal(policy.logprobs, old.logprobs) and torch.equal(policy.entropy, old.entropy)
    assert policy.logprobs.requires_grad and not old.logprobs.requires_grad
    assert torch.equal(rlkernel.packed_logprobs(model.eval(), batch).logprobs, old.logprobs)


@pytest.mark.parametrize("max_tokens", (1, 15, 30, 1000))
def test_parts(max_tokens):
    logprobs, entropy, grads = models.dense("llama")
    model, batch = packed_model(), pack()
    assert len(batch.split(max_tokens)) == {1: 8, 15: 5, 30: 2, 1000: 1}[max_tokens]
    found = rlkernel.packed_logprobs(model, batch, return_entropy=True, max_tokens=max_tokens)
    assert error(found.logprobs, logprobs) <= EXACT and error(found.entropy, entropy) <= EXACT
    w = models.weights(len(logprobs))
    loss = (found.logprobs * w).sum() + (found.entropy * w.flip(0)).sum()
    assert models.worst(models.gradients(model, loss), grads) <= 1e-6


def test_parts_of_a_tree_and_of_a_part():
    nodes = [[3 + i for i in range(n)] for n in (7, 5, 4, 6, 3)]
    tree = PrefixBatch.pack_tree(nodes, [-1, 0, 1, 1, 0], [False, True, True, True, True])
    model = packed_model()
    part = pack().select([6, 1, 4])
    with torch.no_grad():
        for batch in (tree, part):
            whole = rlkernel.packed_logprobs(model, batch).logprobs
            assert len(batch.split(14)) > 1
            assert error(rlkernel.packed_logprobs(model, batch, max_tokens=14).logprobs, whole) <= EXACT


@pytest.mark.parametrize("max_tokens", (None, 24))
@pytest.mark.parametrize("name", ("llama", "mixtral"))
def test_turns_of_agents(name, max_tokens):
    """Whole sequences that begin alike, with tools between the turns; each has a mask of its own."""
    g = torch.Generator().manual_seed(2)
    long = torch.randint(3, models.VOCAB, (26,), generator=g).tolist()
    tokens = [long[:13], long[:20], long, long[:15] + [5, 6, 7, 8], [9, 10, 11], long[:13]]
    masks = [[int(t > 5 and t % 7 < 4) for t in range(len(ids))] for ids in tokens]
    masks[1][:13] = [0] * 13  # trains on its last turn alone
    model = models.make(name)
    ids, mask = models.padded([([], ids) for ids in tokens])
    stock = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    logprobs = stock.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for n, own in enumerate(masks):
        wanted[n, : len(own)] = torch.tensor(own) != 0
    want = torch.where(wanted, torch.nn.functional.pad(logprobs, (1, 0)), 0)
    w = torch.randn(want.shape, generator=g, dtype=want.dtype)
    expected = models.gradients(model, (want * w).sum() + (stock.aux_loss if name == "mixtral" else 0))
    hf.use_packed(model)
    batch = PrefixBatch.from_sequences(tokens, masks)
    assert batch.total < 35 and batch.labels.numel() < batch.total - batch.n_prefix
    found = rlkernel.packed_logprobs(model, batch, return_aux_loss=name == "mixtral", max_tokens=max_tokens)
    got = batch.unpack(found.logprobs)
    assert error(got, want) <= EXACT
    loss = (got * w).sum() + (found.aux_loss if name == "mixtral" else 0)
    assert models.worst(models.gradients(model, loss), expected) <= 1e-5


@pytest.mark.parametrize("return_aux_loss", (False, True))
def test_batches_without_a_label(return_aux_loss):
    model = packed_model("mixtral" if return_aux_loss else "llama")
    for prompts, completions in (([], []), ([[], []], [[[]], [[]]]), ([[]], [[[5]]]), ([[5, 6]], [[[]]])):
        batch = PrefixBatch.pack(prompts, completions)
        found = rlkernel.packed_logprobs(model, batch, return_entropy=True, return_aux_loss=return_aux_loss)
        assert found.logprobs.shape == found.entropy.shape == (0,)
        loss = found.logprobs.sum() + found.entropy.sum()
        (loss + found.aux_loss if return_aux_loss else loss).backward()


def test_the_example():
    path = Path(__file__).parents[2] / "examples" / "packed_grpo.py"
    spec = importlib.util.spec_from_file_location("packed_grpo", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.make_model(layers=2, hidden=32)
    rollout = example.make_rollout(prompt=24, length=6, group=4, groups=2)
    dense, packed = (
        example.step(model, rollout, score, 4) for score in (example.dense_logprobs, example.packed_logprobs)
    )
    assert abs(dense[0] - packed[0]) <= 1e-6
    assert error(dense[1], packed[1]) <= 1e-5 * float(dense[1].abs().max())
