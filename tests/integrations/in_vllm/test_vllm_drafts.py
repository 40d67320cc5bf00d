"""n-gram drafts: a request with a seed has the tokens that it has without, and vLLM's definitions hold."""

import engines
import pytest
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler

import rlkernel
from rlkernel.integrations.vllm import drafts

DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
COUNT = 12
STOCK = RejectionSampler.forward


def requests():
    """Prompts that repeat themselves, and all kinds of options that vLLM takes with drafts."""
    from vllm import SamplingParams

    kinds = [
        {"temperature": 0.4}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.0}, {"temperature": 0.5, "frequency_penalty": 0.6, "presence_penalty": 0.2},
        {"temperature": 0.6, "repetition_penalty": 1.3, "top_p": 0.9},
        {"temperature": 0.3, "bad_words": ["a", "b c"]},
        {"temperature": 0.4, "min_tokens": 12, "stop_token_ids": [7, 8, 9, 10, 11]},
        {"temperature": 0.5, "allowed_token_ids": list(range(4, 40))}, {"temperature": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 0.4, "top_k": 3, "top_p": 0.8},
    ]  # fmt: skip
    params = [
        SamplingParams(seed=100 + i, max_tokens=32, ignore_eos=True, logprobs=(0, 3)[i % 2], **kind)
        for i, kind in enumerate(kinds)
    ]
    prompts = [{"prompt_token_ids": [7 + i, 8, 9 + i, 10] * (8 + i % 3)} for i in range(COUNT)]
    return prompts, params


def run(llm, prompts, params):
    return [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]


def speak_in(llm, mode):
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    runner.sampler.logprobs_mode = runner.sampler.topk_topp_sampler.logprobs_mode = mode


@pytest.fixture(scope="module")
def without(model):
    """What requests say without drafts, in each mode of log-probabilities."""
    said = {}
    with rlkernel.patch_vllm(strict=True):
        llm = engines.in_process(model)
        for mode in ("raw_logprobs", "processed_logprobs"):
            speak_in(llm, mode)
            said[mode] = run(llm, *requests())
        engines.shut_down(llm)
    return said


@pytest.fixture(scope="module")
def drafting(model, without):
    """Prompts in chunks of 48 tokens, no prefix caching, and too little memory for all requests at once.

    One engine for all tests: vLLM 0.32 makes no other one in a process where it has looked for n-grams.
    """
    return engines.in_process(
        model, speculative_config=DRAFTING, max_num_batched_tokens=48, enable_prefix_caching=False,
        num_gpu_blocks_override=14,
    )  # fmt: skip


@pytest.fixture
def preempted(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    names = []
    original = Scheduler._preempt_request

    def counted(self, request, *arguments, **named):
        names.append(request.request_id)
        return original(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    return names


@pytest.fixture
def chains(monkeypatch):
    """How many drafts of each request stood, in every step with drafts."""
    stood, original = [], drafts.chained

    def chained(sampler, metadata, *arguments):
        out = original(sampler, metadata, *arguments)
        taken = (out.sampled_token_ids >= 0).sum(1) - 1
        stood.extend(zip(taken.tolist(), metadata.num_draft_tokens, strict=True))
        return out

    monkeypatch.setattr(drafts, "chained", chained)
    return stood


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_tokens_and_logprobs_are_those_without_drafts(drafting, without, patch, chains, preempted, mode):
    """Beside requests without a seed, and in another order."""
    from vllm import SamplingParams

    speak_in(drafting, mode)
    prompts, params = requests()
    others = [SamplingParams(max_tokens=20, temperature=0.5, logprobs=1)] * 3
    found = run(drafting, prompts + prompts[:3], params + others)[:COUNT]
    again = run(drafting, prompts[::-1], params[::-1])[::-1]
    tokens = [list(one.token_ids) for one in without[mode]]
    assert [list(one.token_ids) for one in found] == tokens
    assert [list(one.token_ids) for one in again] == tokens
    assert preempted and not patch.fallbacks and patch.calls[drafts.NAME] > 10
    drafted, stood = sum(given for _, given in chains), sum(taken for taken, _ in chains)
    assert drafted > 100 and 0 < stood < drafted
    for one, want in zip(found, without[mode], strict=True):
        for token, got, expected in zip(one.token_ids, one.logprobs, want.logprobs, strict=True):
            assert set(got) == set(expected)
            for name in got:
                assert got[name].logprob == pytest.approx(expected[name].logprob, abs=1e-3)
            assert got[token].rank == expected[token].rank


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_definitions_are_those_of_vllm(drafting, patch, monkeypatch, expanded, mode):
    """vLLM's own function on the batches of an engine, given our tokens for its own."""
    from vllm.v1.sample import rejection_sampler

    chained, compared = drafts.chained, []

    def both(sampler, metadata, draft_probs, logits, asked):
        mine = chained(sampler, metadata, draft_probs, logits.clone(), asked)
        if not any(metadata.num_draft_tokens):  # of no tokens vLLM has no largest top_k
            return mine
        monkeypatch.setattr(rejection_sampler, "rejection_sample", lambda *a, **k: mine.sampled_token_ids)
        theirs = STOCK(RejectionSampler(sampler), metadata, None, logits.clone(), asked)
        there = (mine.sampled_token_ids >= 0).flatten()
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            got, want = (getattr(x.logprobs_tensors, name) for x in (mine, theirs))
            compared.append((name, got[there], want[there]))
        return mine

    monkeypatch.setattr(drafts, "chained", both)
    speak_in(drafting, mode)
    prompts, params = requests()
    for one in params:  # behind drafts that reach min_tokens vLLM bans the end of the text once more
        one.min_tokens = one.max_tokens if one.min_tokens else 0
    run(drafting, prompts, params)
    assert len(compared) > 30
    for name, got, want in compared:
        assert got.shape == want.shape and got.dtype == want.dtype
        if name == "logprobs":
            torch.testing.assert_close(got.clamp(min=-1e30), want.clamp(min=-1e30), rtol=0, atol=1e-4)
        elif name == "selected_token_ranks":
            assert torch.equal(got, want)
        else:
            assert torch.equal(got[:, 0], want[:, 0])
