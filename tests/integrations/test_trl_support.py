"""patch_trl(support=K) without vLLM: what its outputs say reaches the rows that score the same tokens."""

import types
from collections import namedtuple

import pytest
import torch
import trl_trainers

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.trl import support as integration

make_trainer, model_path = trl_trainers.make_trainer, trl_trainers.model_path
Output = namedtuple("Output", "prompt_token_ids outputs")
Sample = namedtuple("Sample", "token_ids sampling_mask")
Mask = namedtuple("Mask", "token_ids")


def answer(prompt, tokens, kept):
    """What vLLM says of one request."""
    return Output(prompt, [Sample(tokens, None if kept is None else Mask(kept))])


def batch(samples):
    """TRL's padded rows: prompts on the left of a column, completions on its right."""
    left = max(len(prompt) for prompt, _ in samples)
    right = max(len(tokens) for _, tokens in samples)
    ids = torch.zeros(len(samples), left + right, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(samples):
        here = slice(left - len(prompt), left + len(tokens))
        ids[row, here], mask[row, here] = torch.tensor([*prompt, *tokens]), 1
    return ids, mask, right


def truth(trainer, samples, kept):
    """Log-softmax of each sample alone, over what was kept of each place (empty: all)."""
    found = []
    for (prompt, tokens), each in zip(samples, kept, strict=True):
        logits = trainer.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 :]
        for z, token, ids in zip(logits / trainer.temperature, tokens, each, strict=False):
            found.append((z[token] - (z[ids] if ids else z).logsumexp(0)).item())
    return torch.tensor(found)


SAMPLES = [([5, 6, 7], [8, 9]), ([4], [10, 11, 12]), ([5, 6, 7], [9]), ([4, 5], [6, 13, 14])]
KEPT = [[[8, 30], [9]], [[], [11, 3, 4], [5, 12]], [[9, 10, 11]], [[6, 20], [13], []]]


def noted(patch):
    patch.support.start("train")
    patch.support.note([answer(*s, k) for s, k in zip(SAMPLES, KEPT, strict=True)])


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_tokens_are_scored_among_what_was_kept(make_trainer, algorithm, chunk):
    trainer = make_trainer(algorithm, temperature=0.7)
    order = [2, 0, 3, 1]  # as after TRL's shuffle
    ids, mask, length = batch([SAMPLES[i] for i in order])
    with torch.no_grad():
        want = truth(trainer, [SAMPLES[i] for i in order], [KEPT[i] for i in order])
        with rlkernel.patch_trl(support=64) as patch:
            noted(patch)
            score = trainer._get_per_token_logps_and_entropies
            got, entropy, *_ = score(trainer.model, ids, mask, length, chunk, compute_entropy=True)
            assert not patch.fallbacks and patch.calls["_ChunkedLogProbFunction"] == -(-4 // (chunk or 4))
        plain = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, chunk)[0]
    there = mask[:, -length:].bool()
    torch.testing.assert_close(got[there], want, rtol=0, atol=1e-5)
    assert (got - plain)[there].max() > 0.1 and (got >= plain - 1e-5)[there].all()
    alone = [place for i in order for place in map(len, KEPT[i])]
    assert entropy[there][torch.tensor(alone) == 1].abs().max() < 1e-6


def test_turns_with_a_tool_between_them(make_trainer):
    trainer = make_trainer()
    prompt, first, tool, second = [5, 6], [7, 8], [20, 21, 22], [9, 10]
    kept = [[7, 30], [8, 31]], [[9, 32], [10, 33, 34]]
    ids, mask, length = batch([(prompt, [*first, *tool, *second])])
    with torch.no_grad():
        want = truth(trainer, [(prompt, [*first, *tool, *second])], [[*kept[0], [], [], [], *kept[1]]])
        with rlkernel.patch_trl(support=64) as patch:
            patch.support.start("train")
            patch.support.note([answer(prompt, first, kept[0])])
            patch.support.note([answer([*prompt, *first, *tool], second, kept[1])])
            got = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-5)


def test_rows_of_completions_alone_as_on_gpus():
    """TRL's head there has no other rows; the same ids, and an offset for each of them."""
    ids, mask, length = batch(SAMPLES)
    patch = types.SimpleNamespace()
    support = integration.Support(patch, 64)
    support.note([answer(*s, k) for s, k in zip(SAMPLES, KEPT, strict=True)])
    rows = {}
    for count in (ids.numel() - len(ids), int(mask[:, -length:].sum())):
        with support.scoring(ids, mask, length, len(ids)):
            rows[count] = support.rows(count, ids.device)
    (every, completions) = rows.values()
    flat = [place for each in KEPT for place in each]
    assert completions.offsets.diff().tolist() == [len(place) for place in flat]
    assert completions.ids.tolist() == every.ids.tolist() == [token for place in flat for token in place]
    at = mask[:, 1:].clone()
    at[:, :-length] = 0
    assert every.offsets.diff()[at.flatten() == 1].tolist() == completions.offsets.diff().tolist()
    assert support.rows(9, ids.device) is None  # of a pass that is not TRL's


def test_what_is_not_known_is_scored_over_the_whole_vocabulary_and_counted(make_trainer):
    trainer = make_trainer()
    ids, mask, length = batch(SAMPLES[:3])
    with torch.no_grad(), rlkernel.patch_trl(support=64) as patch, pytest.warns(UserWarning) as told:
        patch.support.start("train")
        patch.support.note([answer(*SAMPLES[0], [[8, 30], [-1]]), answer(*SAMPLES[1], None)])
        patch.support.note([answer([5, 6], [7], [[7]])])  # in front of two others, and no part of either
        got = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
        want = truth(trainer, SAMPLES[:3], [[[8, 30], []], [[], [], []], [[]]])
        patch.support.start("train")  # nothing is known of what comes
        whole = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
        fallbacks = dict(patch.fallbacks)
    torch.testing.assert_close(got[mask[:, -length:].bool()], want, rtol=0, atol=1e-5)
    stock = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
    torch.testing.assert_close(whole, stock.detach(), rtol=0, atol=1e-5)
    assert {name.partition(": ")[2]: times for name, times in fallbacks.items()} == {
        integration.NOT_KNOWN: 1, integration.NOT_SENT: 1, integration.NOT_FOUND: 2,
    }  # fmt: skip
    assert len(told) == 3


def test_options():
    for options, message in (
        ({"support": -1}, r"support must be an integer in \[0, 2\*\*31\), got -1"),
        ({"support": True}, "support must be an integer .*, got True"),
        ({"support": 5, "vllm": False}, "support must be 0 with vllm=False, got 5"),
        ({"support": 5, "prefix_sharing": True}, "support must be 0 with prefix_sharing, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            rlkernel.patch_trl(**options)
    with rlkernel.patch_trl(support=5) as patch:
        assert rlkernel.patch_trl() is rlkernel.patch_trl(support=5) is patch
        with pytest.raises(PatchError, match="support must be what the patch in place has, 5, got 6"):
            rlkernel.patch_trl(support=6)
