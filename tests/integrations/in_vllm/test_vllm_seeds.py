"""A request's seed gives the same tokens, whatever the engine does around it."""

import engines
import pytest

COUNT = 12


@pytest.fixture(scope="module")
def requests():
    kinds = engines.mixed(COUNT, seeded=True, temperature=1.0, ignore_eos=True, max_tokens=24)
    return list(zip(engines.prompts(COUNT, shortest=40), kinds, strict=True))


def run(llm, requests):
    prompts, kinds = zip(*requests, strict=True)
    return [one[0] for one in engines.tokens(llm.generate(list(prompts), list(kinds), use_tqdm=False))]


@pytest.fixture
def alone(llm, patch, requests):
    return [run(llm, [request])[0] for request in requests]


def test_alone_together_and_in_any_order(llm, patch, requests, alone):
    assert len({tuple(tokens) for tokens in alone}) == COUNT
    assert run(llm, requests) == alone
    assert run(llm, requests[::-1])[::-1] == alone
    assert not patch.fallbacks


def test_among_requests_without_a_seed(llm, patch, requests, alone):
    others = list(zip(engines.prompts(COUNT, seed=9), engines.mixed(COUNT, seed=9), strict=True))
    mixed = [request for pair in zip(others, requests, strict=True) for request in pair]
    assert run(llm, mixed)[1::2] == alone


def test_samples_of_one_request_differ_and_are_those_of_their_seeds(llm, patch):
    from vllm import SamplingParams

    (prompt,) = engines.prompts(1)
    (many,) = engines.tokens(
        llm.generate([prompt], SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False)
    )
    assert len({tuple(tokens) for tokens in many}) == 3
    one = run(llm, [(prompt, SamplingParams(seed=6, max_tokens=8))])
    assert one == [many[1]]  # vLLM gives sample i the seed + i


def test_a_resumed_rollout_goes_on_with_the_tokens_that_it_would_have_had(llm, patch):
    from vllm import SamplingParams

    (prompt,) = engines.prompts(1)
    whole = run(llm, [(prompt, SamplingParams(seed=5, max_tokens=8, ignore_eos=True))])[0]
    longer = {"prompt_token_ids": prompt["prompt_token_ids"] + whole[:3]}
    assert run(llm, [(longer, SamplingParams(seed=5, max_tokens=5, ignore_eos=True))]) == [whole[3:]]


def test_requests_without_a_seed_follow_the_engines_generator(llm, patch):
    import torch
    from vllm import SamplingParams

    (prompt,) = engines.prompts(1)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(run(llm, [(prompt, SamplingParams(max_tokens=12, ignore_eos=True))] * 2))
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


@pytest.fixture
def narrow(model):
    """Prompts in chunks of 32 tokens, no prefix caching, and too little memory for all requests at once."""
    return engines.in_process(
        model, max_num_batched_tokens=32, enable_prefix_caching=False, num_gpu_blocks_override=10
    )


def test_in_chunks_preempted_and_without_prefix_caching(narrow, patch, requests, alone, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    original = Scheduler._preempt_request

    def counted(self, request, *arguments, **named):
        preempted.append(request.request_id)
        return original(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    assert run(narrow, requests) == alone
    assert preempted and not patch.fallbacks


def test_vllms_own_sampler_cannot(narrow, requests):
    """It fails on a CPU where a request with a seed has its prompt cut; the page says so."""
    with pytest.raises(Exception, match="CPU Generator does not use offset"):
        run(narrow, requests)
