"""Architectures of transformers on packed batches: every sample alone is the truth."""

import pytest
import torch
from packed_cases import models, pack, packed_model

import rlkernel
from rlkernel import PrefixBatch, PrefixLayout
from rlkernel.integrations import hf
from rlkernel.integrations.hf import attention as packed_attention

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


CHECKPOINTING = (None, {"use_reentrant": False}, {"use_reentrant": True})

# transformers computes RMSNorm and RoPE in fp32 whatever the model's dtype, so gradients agree to fp32;
# gemma2's own attention also its softmax.  Everything else is fp64.
LOGPROBS = {"gemma2": 3e-6}
GRADIENTS = {"gemma2": 3e-6}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=("plain", "checkpointing", "reentrant"))
@pytest.mark.parametrize("name", models.TEN)
def test_every_sample_as_if_alone(name, checkpointing):
    logprobs, entropy, grads = models.dense(name)
    model = packed_model(name, checkpointing)
    found = rlkernel.packed_logprobs(model, pack(), return_entropy=True)
    w = models.weights(len(logprobs))
    loss = (found.logprobs * w).sum() + (found.entropy * w.flip(0)).sum()
    pairs = (found.logprobs, logprobs), (found.entropy, entropy)
    errors = [float((a - b).detach().abs().max()) for a, b in pairs]
    worst = models.worst(models.gradients(model, loss), grads)
    print(f"logprobs {errors[0]:.1e}, entropy {errors[1]:.1e}, gradients {worst:.1e}")
    assert max(errors) <= LOGPROBS.get(name, 1e-12)
    assert worst <= GRADIENTS.get(name, 1e-6)
    assert found.logprobs.dtype == torch.float64 and found.aux_loss is None


TREE = {  # system > prompts > shared reasoning > continuations; one prompt also has a completion of its own
    "nodes": [6, 4, 3, 5, 2, 4, 3, 0, 6],
    "parents": [-1, 0, 1, 2, 2, 1, 0, 6, 6],
    "completion": [False, False, True, True, True, True, False, True, True],
}


@pytest.mark.parametrize("name", ("llama", "gpt_oss"))
def test_trees(name):
    nodes = [[(13 * i + 5 * b) % 50 + 3 for i in range(n)] for b, n in enumerate(TREE["nodes"])]
    parents, completion = TREE["parents"], TREE["completion"]
    batch = PrefixBatch.pack_tree(nodes, parents, completion)
    samples = []
    for end in [i for i in range(len(nodes)) if i not in parents]:
        path = [end]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        samples.append([[t for i in path if completion[i] == c for t in nodes[i]] for c in (False, True)])
    model = models.make(name)
    alone = torch.cat([logprobs for logprobs, _ in models.alone(model, samples)])
    w = models.weights(len(alone))
    expected = models.gradients(model, (alone * w).sum())
    hf.use_packed(model)
    unpacked = batch.unpack(rlkernel.packed_logprobs(model, batch).logprobs, fill=float("nan"))
    logprobs = unpacked[~unpacked.isnan()]
    assert logprobs.shape == alone.shape and batch.ratio > 1.5
    assert float((logprobs - alone).detach().abs().max()) <= 1e-12
    assert models.worst(models.gradients(model, (logprobs * w).sum()), expected) <= 1e-6


# what must not pass unnoticed


def wrong_positions(batch, monkeypatch):
    batch.position_ids = torch.arange(batch.total)[None]


def no_cross_pass(batch, monkeypatch):
    layout = batch.layout
    batch.layout = PrefixLayout(layout.lengths, (-1,) * len(layout.lengths), layout.completion)


def leak_between_siblings(batch, monkeypatch):
    parents = [*batch.layout.parents]
    first = next(s for s, p in enumerate(parents) if p == 0)
    parents[first + 1] = first  # the second completion of the first prompt sees the first one
    batch.layout = PrefixLayout(batch.layout.lengths, tuple(parents), batch.layout.completion)


def dropped(option):
    def mutate(batch, monkeypatch):
        real = packed_attention.prefix_shared_attention
        monkeypatch.setattr(
            packed_attention, "prefix_shared_attention", lambda *a, **k: real(*a, **k | {option: None})
        )

    mutate.__name__ = f"no_{option}"
    return mutate


MUTANTS = [
    *((name, mutant) for name in ("llama", "gemma3") for mutant in (wrong_positions, no_cross_pass)),
    *((name, leak_between_siblings) for name in ("llama", "gpt_oss")),
    *((name, dropped("window")) for name in ("mistral", "gemma3", "gpt_oss")),
    ("gemma2", dropped("softcap")),
    ("gpt_oss", dropped("sinks")),
    ("gemma3", dropped("scale")),
]


@pytest.mark.parametrize("name, mutant", MUTANTS, ids=lambda x: getattr(x, "__name__", x))
def test_mutants_show(name, mutant, monkeypatch):
    # gemma scales by 1 / sqrt(query_pre_attn_scalar), its softcap bends large logits: make both visible
    options = {"query_pre_attn_scalar": 4} if name.startswith("gemma") else {}
    options |= {"attn_logit_softcapping": 2.0} if name == "gemma2" else {}
    model = models.make(name, **options)
    with torch.no_grad():
        expected = torch.cat([logprobs for logprobs, _ in models.alone(model)])
        hf.use_packed(model)
        batch = pack()
        right = rlkernel.packed_logprobs(model, batch).logprobs
        mutant(batch, monkeypatch)
        wrong = rlkernel.packed_logprobs(model, batch).logprobs
    good, bad = (float((x - expected).abs().max()) for x in (right, wrong))
    print(f"right {good:.1e}, mutant {bad:.1e}")
    assert good <= LOGPROBS.get(name, 1e-12)
    assert bad > 1e-2
