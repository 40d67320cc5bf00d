"""The kept tokens of each sampled one in the outputs of the real engine, and what a trainer makes of them.

From worker processes and over HTTP: test_vllm_processes.py.
"""

from itertools import zip_longest

import engines
import pytest
import torch

import rlkernel
from rlkernel.integrations.vllm import positions, support, support_of
from rlkernel.integrations.vllm import sampler as ours

FILTERS = (
    {"top_p": 0.7},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {},
    {"allowed_token_ids": list(range(7, 200, 3))},
    {"top_p": 0.8, "bad_words": ["a", "b c"]},
    {"min_tokens": 4, "stop_token_ids": [7, 8, 9]},
    {"temperature": 0.0, "n": 1},
)


def kinds(count, **always):
    """Of all filters, with a seed for each sample; without biases and penalties, which a trainer has not."""
    from vllm import SamplingParams

    made = []
    for i in range(count):
        options = {"temperature": (0.6, 1.0, 1.3)[i % 3], "seed": 100 * i, "max_tokens": 24, "logprobs": 0}
        made.append(SamplingParams(**(options | {"n": 1 + i % 2} | FILTERS[i % len(FILTERS)] | always)))
    return made


def ask(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def masks(outputs):
    return [
        [sample.sampling_mask and sample.sampling_mask.token_ids for sample in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def prompts():
    return engines.prompts(16, shortest=40)


@pytest.fixture(scope="module")
def narrow(model):
    """As a rollout of RL is asked for, with prompts in chunks and too little memory for all requests."""
    return engines.in_process(
        model,
        logprobs_mode="processed_logprobs",
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        num_gpu_blocks_override=12,
    )


@pytest.fixture
def asking():
    with rlkernel.patch_vllm(strict=True, return_support=engines.VOCAB) as patch:
        yield patch


@pytest.fixture
def logits(monkeypatch):
    """Of each sampled token, by the seed of its sample and the number of tokens in front."""
    seen = {}
    original = ours.sampled

    def sampled(sampler, logits, metadata, mode):
        runner = positions._runner
        places = positions.positions(len(logits), logits.device).tolist()
        for row, name in enumerate(runner.input_batch.req_ids):
            seen[runner.requests[name].sampling_params.seed, places[row]] = logits[row].clone()
        return original(sampler, logits, metadata, mode)

    monkeypatch.setattr(ours, "sampled", sampled)
    return seen


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


def test_the_ratio_is_one_to_the_bit(narrow, asking, prompts, logits, preempted):
    params = kinds(len(prompts))
    outputs = ask(narrow, prompts, params)
    assert preempted and not asking.fallbacks
    filtered = whole = 0
    for prompt, kind, output in zip(prompts, params, outputs, strict=True):
        assert len(output.outputs) == kind.n
        for i, sample in enumerate(output.outputs):
            kept = sample.sampling_mask.token_ids
            assert len(kept) == len(sample.token_ids) == len(sample.logprobs)
            if kind.temperature == 0:
                assert kept == [[token] for token in sample.token_ids]
                continue
            begin = len(prompt["prompt_token_ids"])
            rows = torch.stack([logits[kind.seed + i, begin + place] for place in range(len(kept))])
            tokens = torch.tensor(list(sample.token_ids))
            taken = support_of([sample])
            assert taken.known.all()
            trained = rlkernel.logprob(
                rows, tokens, temperature=kind.temperature,
                support_ids=taken.ids, support_offsets=taken.offsets,
            ).logprobs  # fmt: skip
            steps = zip(sample.token_ids, sample.logprobs, strict=True)
            rolled = torch.tensor([step[token].logprob for token, step in steps])
            assert torch.equal(trained, rolled), (kind, (trained - rolled).abs().max())
            is_whole = torch.tensor([not ids for ids in kept])
            plain = rlkernel.logprob(rows, tokens, temperature=kind.temperature).logprobs
            assert ((plain - rolled).abs() < 1e-5)[is_whole].all()
            if kind.top_p == 0.7:  # without the support the ratio is the mass that was kept
                assert (plain - rolled < -0.01).any()
            whole, filtered = whole + int(is_whole.sum()), filtered + int((~is_whole).sum())
    assert whole > 50 and filtered > 200


def test_what_was_kept_is_what_vllm_keeps(narrow, asking, prompts, logits):
    """Its own filters of the same logits, where no tie decides."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    params = kinds(2, n=1)
    for prompt, kind, output in zip(prompts, params, ask(narrow, prompts[:2], params), strict=False):
        begin = len(prompt["prompt_token_ids"])
        for place, kept in enumerate(output.outputs[0].sampling_mask.token_ids):
            row = logits[kind.seed, begin + place].clone()[None] / kind.temperature
            k = torch.tensor([kind.top_k or engines.VOCAB])
            theirs = apply_top_k_top_p(row, k, torch.tensor([kind.top_p]))[0]
            assert kept == theirs.isfinite().nonzero()[:, 0].tolist()


def test_a_request_says_how_much_it_wants_and_what_is_more_is_said(narrow, patch, prompts):
    """Whatever the others of its batch want."""
    rooms = [None, 0, 4, 30, engines.VOCAB, 2**30]
    prompts = prompts[: len(FILTERS)]
    params = [kind.clone() for kind in kinds(len(prompts), n=1, max_tokens=12) for _ in rooms]
    for i, kind in enumerate(params):
        if (room := rooms[i % len(rooms)]) is not None:
            kind.extra_args = {"rlkernel_support": room}
    outputs = ask(narrow, [prompt for prompt in prompts for _ in rooms], params)
    got = masks(outputs)
    tokens = engines.tokens(outputs)
    larger = smaller = 0
    for first in range(0, len(got), len(rooms)):
        none, zero, *limited, whole, more = got[first : first + len(rooms)]
        assert tokens[first : first + len(rooms)] == [tokens[first]] * len(rooms)  # its seed says which
        assert not any(none) and not any(zero) and more == whole
        for room, samples in zip(rooms[2:4], limited, strict=True):
            for ids, all_ids in zip(samples, whole, strict=True):
                assert ids == [kept if len(kept) <= room else [-1] for kept in all_ids]
                larger += ids.count([-1])
                smaller += sum(0 < len(kept) <= room for kept in all_ids)
    assert larger > 20 and smaller > 20
    taken = support_of([outputs[2]])
    assert torch.equal(~taken.known[0], torch.tensor([ids == [-1] for ids in got[2][0]]))


def test_nothing_is_kept_or_sent_where_nobody_asks(narrow, patch, prompts, monkeypatch):
    asked = []
    original = rlkernel.sample

    def sample(logits, **options):
        asked.append(options.get("return_support"))
        return original(logits, **options)

    monkeypatch.setattr(rlkernel, "sample", sample)
    outputs = ask(narrow, prompts[:2], kinds(2))
    assert set(asked) == {None} and not any(map(any, masks(outputs)))
    assert "GPUModelRunner.sample_tokens" not in patch.calls
    with pytest.raises(ValueError, match="outputs must have the support of each of their tokens, got 0 of "):
        support_of(outputs)


def test_who_asks_gets_the_tokens_that_he_would_have_had(narrow, prompts):
    params = kinds(len(prompts), seed=None)
    drawn = []
    for room in (0, engines.VOCAB):
        torch.manual_seed(0)
        with rlkernel.patch_vllm(strict=True, return_support=room):
            drawn.append(engines.tokens(ask(narrow, prompts, params)))
    assert drawn[0] == drawn[1]


def test_an_ask_that_makes_no_sense_ends_nobody_elses_request(narrow, asking, prompts):
    params = kinds(2, n=1)
    params[0].extra_args = {"rlkernel_support": "many"}
    with pytest.warns(
        UserWarning, match=r"extra_args\['rlkernel_support'\] must be an integer >= 0, got 'many'"
    ):
        bad, good = ask(narrow, prompts[:2], params)
    assert bad.outputs[0].sampling_mask is None and bad.outputs[0].token_ids
    assert len(good.outputs[0].sampling_mask.token_ids) == len(good.outputs[0].token_ids)


def test_a_token_that_vllm_drew_has_no_known_support(narrow, asking, prompts, monkeypatch):
    monkeypatch.setattr(ours, "unserved", lambda *_: "a test")
    params = kinds(1, seed=None)
    with pytest.warns(UserWarning, match="a test"):
        outputs = ask(narrow, prompts[:1], params)
    (ids,) = masks(outputs)[0]
    assert ids == [[-1]] * len(outputs[0].outputs[0].token_ids)
    assert not support_of(outputs).known.any() and not support_of(outputs).ids.numel()


def test_a_request_that_is_aborted_leaves_nothing(narrow, asking, prompts):
    engine = narrow.llm_engine
    engine.add_request("gone", prompts[0], kinds(1)[0])
    engine.add_request("stays", prompts[1], kinds(2, n=1)[1])
    for _ in range(8):
        engine.step()
    engine.abort_request(["gone"])
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in outputs] == ["stays"]
    assert support_of(outputs).known.all()
    assert not engine.output_processor.request_states and support._step is None


def test_tokens_that_are_on_their_way_from_the_device(narrow, prompts, monkeypatch):
    """As with asynchronous scheduling, which vLLM has on GPUs alone."""
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Output(AsyncModelRunnerOutput):
        def __init__(self, output):
            self.output = output

        def get_output(self):
            return self.output

    original = GPUModelRunner.sample_tokens
    params = kinds(len(FILTERS))
    with rlkernel.patch_vllm(strict=True, return_support=engines.VOCAB):
        at_once = ask(narrow, prompts[: len(FILTERS)], params)

    def sample_tokens(self, grammar_output):
        return Output(original(self, grammar_output))

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    with rlkernel.patch_vllm(strict=True, return_support=engines.VOCAB):
        later = ask(narrow, prompts[: len(FILTERS)], params)
    assert masks(later) == masks(at_once) and all(map(all, masks(later)))


def test_tokens_that_were_drafted(model, expanded, narrow, monkeypatch):
    """Beside vLLM's own log-probabilities of the whole vocabulary, which are those of the kept tokens."""
    from vllm import SamplingParams

    from rlkernel.integrations.vllm.masks import Masks

    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    several = []
    original = Masks.slice_request

    def slice_request(self, row, num_positions):
        several.append(num_positions > 1)
        return original(self, row, num_positions)

    monkeypatch.setattr(Masks, "slice_request", slice_request)
    engines.shut_down(narrow)
    llm = engines.in_process(
        model,
        logprobs_mode="processed_logprobs",
        speculative_config=drafting,
        enable_prefix_caching=False,
    )
    cycles = [{"prompt_token_ids": [7 + i, 8, 9 + i, 10] * 6} for i in range(8)]
    options = {"max_tokens": 40, "ignore_eos": True, "logprobs": engines.VOCAB}
    filters = [{"top_p": 0.4}, {"top_p": 0.2}, {"temperature": 0.0}, {"top_p": 0.3, "temperature": 0.3}] * 2
    seeds = range(100, 105)  # and three without
    params = [SamplingParams(seed=seed, **(options | each)) for each, seed in zip_longest(filters, seeds)]
    with rlkernel.patch_vllm(strict=True, return_support=200) as patch:
        torch.manual_seed(0)
        outputs = ask(llm, cycles, params)
    with rlkernel.patch_vllm(strict=True):
        torch.manual_seed(0)
        assert engines.tokens(ask(llm, cycles, params)) == engines.tokens(outputs)
    if not support._takes_several_places():  # vLLM 0.31
        assert not any(map(any, masks(outputs)))
        assert patch.fallbacks["GPUModelRunner.sample_tokens: the support of several tokens a step"] > 5
        return
    assert sum(several) > 5 and patch.calls["RejectionSampler.forward"] > 5
    known = 0
    for kind, output in zip(params, outputs, strict=True):
        (sample,) = output.outputs
        steps = zip(sample.token_ids, sample.sampling_mask.token_ids, sample.logprobs, strict=True)
        for token, kept, scores in steps:
            if kept == [-1]:
                continue
            if kind.temperature == 0:
                assert kept == [token]
            else:
                left = sorted(id for id, entry in scores.items() if entry.logprob > -1e30)
                assert (kept or list(range(engines.VOCAB))) == left
            known += 1
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert known == total
