"""Attention with shared prefixes in vLLM's engine: what is generated is what vLLM generates."""

import contextlib

import engines
import pytest
import tiny
import torch
import transformers
from vllm import SamplingParams

import rlkernel
from rlkernel.integrations.vllm import attention_paged

LENGTH = 150  # tokens of a prompt: four blocks of 32, and some behind them


def patched_attention(**options):
    return rlkernel.patch_vllm(ops=("attention",), strict=True, **options)


def generated(model, prompts, patched, params=None, batch_invariant=False, **options):
    """What an engine says to the prompts, four samples each, and the counts of the patch."""
    params = params or SamplingParams(
        n=4, temperature=1.0, max_tokens=12, logprobs=0, seed=5, ignore_eos=True
    )

    def run():
        llm = engines.in_process(model, **options)
        found = llm.generate(prompts, params, use_tqdm=False)
        engines.shut_down(llm)
        return [[(tuple(o.token_ids), o.cumulative_logprob) for o in request.outputs] for request in found]

    if not patched:
        return run(), None
    with patched_attention(batch_invariant=batch_invariant) as patch:
        said = run()
        return said, patch.counts()


def agree(ours, theirs):
    for mine, stock in zip(ours, theirs, strict=True):
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in stock]
        for (_, a), (_, b) in zip(mine, stock, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def shared_prompts(count):
    return engines.prompts(count, shortest=LENGTH, longest=LENGTH)


@pytest.fixture(scope="module")
def groups(model):
    """Two prompts, four samples each."""
    prompts = shared_prompts(2)
    return generated(model, prompts, False), generated(model, prompts, True)


def test_tokens_and_logprobs_are_those_of_vllm(groups):
    (theirs, _), (ours, _) = groups
    assert [len(tokens) for samples in theirs for tokens, _ in samples] == [12] * 8
    agree(ours, theirs)


def test_a_prompt_is_read_once_for_its_samples(groups):
    _, (_, counts) = groups
    read, apart = (counts["bytes"][key] for key in (attention_paged.READ, attention_paged.APART))
    print(f"{read} bytes of keys and values read, {apart} by requests by themselves")
    assert counts["calls"]["attention"] >= 2 * 11  # layers times steps behind the first
    # four samples of 128 shared tokens, and two blocks of their own
    assert 2 * read < apart


def test_requests_that_share_nothing_go_to_vllm(model):
    prompts = shared_prompts(1) + engines.prompts(3, seed=9)
    params = [
        SamplingParams(n=n, temperature=1.0, seed=n, max_tokens=8, logprobs=0, ignore_eos=True)
        for n in (3, 1, 1, 1)
    ]
    theirs, _ = generated(model, prompts, False, params)
    ours, counts = generated(model, prompts, True, params)
    agree(ours, theirs)
    assert counts["calls"]["attention"]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    # nor do equal prompts without a cache of prefixes
    ours, counts = generated(model, prompts[:1] + prompts, True, params, enable_prefix_caching=False)
    assert not counts["calls"] and sum(counts["fallbacks"].values()) == 2 * 8
    assert list(counts["fallbacks"]) == [f"attention: {attention_paged.ALONE}"]
    again, counts = generated(model, prompts[1:], True, params, batch_invariant=True)
    assert counts["calls"]["attention"] == 2 * 8 and not counts["fallbacks"]
    agree(again, ours[2:])


def test_a_prompt_that_was_cached_before_is_shared_by_the_rows_of_a_prefill(model):
    """Two requests with other tokens behind the same blocks, prefilled in chunks of many rows."""
    (base,) = shared_prompts(1)
    tails = engines.prompts(2, seed=3, shortest=20, longest=30)
    prompts = [{"prompt_token_ids": base["prompt_token_ids"] + t["prompt_token_ids"]} for t in tails]
    greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    said = {}
    for patched in (False, True):
        with patched_attention() if patched else contextlib.nullcontext() as patch:
            llm = engines.in_process(model, max_num_batched_tokens=64)
            llm.generate([base], greedy, use_tqdm=False)
            found = llm.generate(prompts, greedy, use_tqdm=False)
            engines.shut_down(llm)
        said[patched] = [[(tuple(o.token_ids), o.cumulative_logprob) for o in r.outputs] for r in found]
    agree(said[True], said[False])
    assert patch.calls["attention"] == 2  # of two layers: what is left of the second prompt is alone


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_has_the_logprobs_of_vllm(model, dtype):
    """Of the first token, which rounding does not lead elsewhere."""
    prompts = shared_prompts(2)
    params = SamplingParams(n=4, temperature=1.0, max_tokens=2, logprobs=0, seed=5, ignore_eos=True)
    theirs, _ = generated(model, prompts, False, params, dtype=dtype)
    ours, counts = generated(model, prompts, True, params, dtype=dtype)
    assert counts["calls"].get("attention") or "instruction set" in str(counts["fallbacks"])
    for mine, stock in zip(ours, theirs, strict=True):
        for (tokens, a), (wanted, b) in zip(mine, stock, strict=True):
            assert tokens != wanted or a == pytest.approx(b, abs=0.1)


def test_a_sliding_window_is_kept(tmp_path):
    config = transformers.MistralConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=engines.VOCAB, sliding_window=70, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    prompts = shared_prompts(2)
    theirs, _ = generated(str(tmp_path), prompts, False)
    ours, counts = generated(str(tmp_path), prompts, True)
    agree(ours, theirs)
    assert counts["calls"]["attention"]


def test_after_undo_the_engine_goes_on_with_vllms_kernel(model):
    (prompt,) = shared_prompts(1)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=6, logprobs=0, ignore_eos=True)
    with patched_attention() as patch:
        llm = engines.in_process(model)
        llm.generate([prompt], params, use_tqdm=False)
        before = dict(patch.calls)
    again = llm.generate([prompt], params, use_tqdm=False)
    engines.shut_down(llm)
    assert before["attention"] and patch.calls == before
    (theirs,), _ = generated(model, [prompt], False, params)
    agree([[(tuple(o.token_ids), o.cumulative_logprob) for o in again[0].outputs]], [theirs])
