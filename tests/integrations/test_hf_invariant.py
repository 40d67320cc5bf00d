"""transformers as it is, under ``rlkernel.batch_invariant``: KL of rollout and trainer is 0."""

import contextlib

import pytest
import torch
from hf_training import FAMILIES, LENGTHS, ON_OURS, SIZES, differences, made, rollout, scored, transformers

import rlkernel
from rlkernel.integrations.hf import invariant
from rlkernel.integrations.hf.models import behind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_difference_is_zero_in_every_step(family, dtype):
    steps = 20 if family == "qwen3" else 2
    assert differences(family, dtype, rlkernel.batch_invariant(), steps) == [0.0] * steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ON_OURS)
def test_the_short_way_of_a_step_has_the_bits_of_the_long_one(family, dtype, monkeypatch):
    """Of a batch that is padded on the left, past the window; and it takes every layer of every step."""
    model = made(family, dtype)
    short, took = invariant._step(), []

    def watched(*given):
        took.append(short(*given))
        return took[-1]

    def steps(way):
        monkeypatch.setattr(invariant, "_step", lambda: way)
        cache = transformers.DynamicCache(config=model.config)
        ids = torch.randint(160, (3, 20), generator=torch.Generator().manual_seed(4))
        mask = (torch.arange(20) >= torch.tensor([0, 3, 11])[:, None]).long()
        first, found = 8, []
        for end in (first, *range(first + 1, 21)):
            begin = 0 if end == first else end - 1
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
            given = {"attention_mask": mask[:, :end], "position_ids": positions, **behind(model, cache)}
            logits = model(input_ids=ids[:, begin:end], **given).logits[:, -1]
            found.append(logits[mask[:, end - 1] > 0])  # padding behind nothing sees nothing
        return torch.cat(found)

    with rlkernel.batch_invariant(), torch.no_grad():
        wanted = steps(None)
        assert torch.equal(steps(watched), wanted)
    # while a row is padding it sees no key, and its batch goes the long way
    assert len(took) == 24 and sum(x is None for x in took) <= 2 * 4


@pytest.mark.parametrize("left", [True, False], ids=["padded in front", "padded behind"])
def test_a_window_on_sdpa_has_the_same_bits(left):
    """transformers' own attention, where it has all that the model needs."""
    model = made("gemma3", torch.float32)
    g = torch.Generator().manual_seed(3)
    samples = [(torch.randint(160, (n,), generator=g), None) for n in LENGTHS]
    with rlkernel.batch_invariant(), torch.no_grad():
        ours = scored(model, samples, 2, left)
        model.set_attn_implementation("sdpa")
        assert torch.equal(scored(model, samples, 2, left), ours)
        cache = transformers.DynamicCache()
        model(input_ids=samples[3][0][None, :20], **behind(model, cache))
        with pytest.raises(RuntimeError, match="use the attention of rlkernel.register_hf"):
            model(input_ids=samples[3][0][None, 20:], **behind(model, cache))


def test_an_encoder_on_ours_has_the_bits_of_sdpa():
    """Each of its rows sees all of them; they are no padding behind the first."""
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in list(SIZES)[:5]}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    ids, mask = torch.randint(160, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    with rlkernel.batch_invariant(), torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask).logits[0, :6]
        model.set_attn_implementation(rlkernel.register_hf())
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits[0, :6], want)
        assert torch.equal(model(input_ids=ids[:1, :6]).logits[0], want)


@pytest.mark.parametrize("ours", [False, True], ids=["sdpa", "ours"])
def test_under_autocast(ours):
    """Weights in fp32, products in bf16: queries and keys come from norms and rotations wider than values."""
    model = made("qwen3", torch.float32)
    if ours:
        model.set_attn_implementation(rlkernel.register_hf())
    prompts = [torch.randint(160, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 21)]
    with rlkernel.batch_invariant(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        samples = rollout(model, prompts, 3)
        for left in (True, False):
            assert torch.equal(scored(model, samples, 3, left), torch.stack([x for _, x in samples]))


SEEN = torch.ones(6, 6, dtype=torch.bool)
SEES_BEHIND = {
    "a prefix sees itself": SEEN.tril() | (torch.arange(6) < 3),
    "an image in the middle": SEEN.tril() | torch.block_diag(SEEN[:2, :2], SEEN[:3, :3], SEEN[:1, :1]),
    "all see all": SEEN,
    "a row sees less than the one in front of it": SEEN.tril()
    & ~(torch.arange(6)[:, None].eq(4) & (torch.arange(6) > 2)),
}


@pytest.mark.parametrize("name", SEES_BEHIND)
def test_a_row_that_sees_what_is_behind_it_is_no_padding(name):
    """And is refused, where its output was 0 before."""
    model = made("qwen3", torch.float32)
    model.set_attn_implementation(rlkernel.register_hf())
    with rlkernel.batch_invariant(), torch.no_grad(), pytest.raises(RuntimeError, match="up to itself"):
        model(input_ids=torch.arange(6)[None], attention_mask=SEES_BEHIND[name][None, None])


def test_without_the_mode_it_is_not():
    """bf16: torch's attention sums a cached step and a whole sequence in another order on every processor."""
    assert max(differences("qwen3", torch.bfloat16, contextlib.nullcontext(), 3)) > 0


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_by_every_implementation(implementation, dtype):
    """Logits and the gradients of what goes in: alone, and padded on the left beside another."""
    model = made("qwen3-moe", dtype)
    model.set_experts_implementation(implementation)
    g = torch.Generator().manual_seed(3)
    embedded, other = (torch.randn(1, n, 48, generator=g).to(dtype) for n in (9, 21))
    upstream = torch.randn(9, 160, generator=g).to(dtype)

    def run(rows, pad):
        leaf = embedded.clone().requires_grad_()
        padded = torch.nn.functional.pad(leaf, (0, 0, pad, 0))
        mask = (torch.arange(pad + 9) >= pad).long()[None].repeat(rows, 1)
        if rows == 2:
            mask[1] = 1
            padded = torch.cat([padded, other])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(inputs_embeds=padded, attention_mask=mask, position_ids=positions).logits[0, pad:]
        return logits.detach(), torch.autograd.grad(logits, leaf, upstream)[0]

    with rlkernel.batch_invariant() as mode:
        alone, beside = run(1, 0), run(2, 12)
    assert all(torch.equal(x, y) for x, y in zip(alone, beside, strict=True))
    assert ("_grouped_mm" in {row.op for row in mode.report()}) == (implementation == "grouped_mm")
