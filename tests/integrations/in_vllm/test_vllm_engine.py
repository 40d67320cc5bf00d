"""Whole requests in one process: outputs with rlkernel beside those of vLLM alone."""

import engines
import pytest
import torch

CLOSE = 5e-4  # of log-probabilities of a token that was computed alone and in a prompt


def ask(llm, prompts, kinds):
    return llm.generate(list(prompts), list(kinds), use_tqdm=False)


def test_200_requests_of_all_kinds(llm, patch):
    """Greedy requests are vLLM's own, whose bits follow the batch; of the others it scores what was drawn."""
    prompts, kinds = engines.prompts(200, shortest=3, longest=60), engines.mixed(200, seeded=True)
    got = ask(llm, prompts, kinds)
    assert not patch.fallbacks and patch.calls["Sampler.forward"] > 20
    patch.undo()
    try:
        greedy = [i for i, kind in enumerate(kinds) if kind.temperature == 0]
        assert len(greedy) > 40
        alone = ask(llm, [prompts[i] for i in greedy], [kinds[i] for i in greedy])
        for i, want in zip(greedy, alone, strict=True):
            (mine,), (theirs,) = got[i].outputs, want.outputs
            assert mine.token_ids == theirs.token_ids and mine.finish_reason == theirs.finish_reason
            same_logprobs(mine.logprobs, theirs.logprobs, slack=2)
        scored_by_vllm(llm, prompts, kinds, got)
    finally:
        patch.apply()


def same_logprobs(mine, theirs, slack=0):
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert list(one) == list(other) if slack == 0 else set(one) == set(other)
        for token, entry in one.items():
            assert abs(entry.rank - other[token].rank) <= slack
            assert entry.decoded_token == other[token].decoded_token
            assert entry.logprob == pytest.approx(other[token].logprob, abs=CLOSE)


def scored_by_vllm(llm, prompts, kinds, got):
    """Log-probabilities and ranks of drawn tokens are those that vLLM gives them in a prompt."""
    from vllm import SamplingParams

    asked = [i for i, kind in enumerate(kinds) if kind.temperature and kind.logprobs is not None]
    longer = [
        {"prompt_token_ids": [*prompts[i]["prompt_token_ids"], *got[i].outputs[0].token_ids]} for i in asked
    ]
    want = ask(llm, longer, [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)] * len(asked))
    ranks = tokens = 0
    for i, scored in zip(asked, want, strict=True):
        sample = got[i].outputs[0]
        behind = scored.prompt_logprobs[len(prompts[i]["prompt_token_ids"]) :]
        for token, mine, theirs in zip(sample.token_ids, sample.logprobs, behind, strict=True):
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=CLOSE)
            ranks += mine[token].rank != theirs[token].rank
            assert abs(mine[token].rank - theirs[token].rank) <= 1  # neighbours within rounding
            tokens += 1
    assert tokens > 200 and ranks <= tokens / 50


@pytest.mark.parametrize("count", [0, 3, -1])
def test_prompt_logprobs_are_vllms(llm, patch, count):
    from vllm import SamplingParams

    prompts = engines.prompts(6, longest=150)
    kind = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=count)
    mine = ask(llm, prompts, [kind] * 6)
    assert patch.calls["GPUModelRunner._get_prompt_logprobs_dict"] > 0 and not patch.fallbacks
    patch.undo()
    try:
        theirs = ask(llm, prompts, [kind] * 6)
    finally:
        patch.apply()
    for one, other in zip(mine, theirs, strict=True):
        assert one.prompt_logprobs[0] is None and other.prompt_logprobs[0] is None
        # of all 512 tokens, some are as good as equal
        same_logprobs(one.prompt_logprobs[1:], other.prompt_logprobs[1:], slack=2 if count == -1 else 0)


def test_prompt_logprobs_build_no_log_softmax_and_few_rows_of_logits(llm, patch, monkeypatch):
    from vllm import SamplingParams

    import rlkernel
    from rlkernel.integrations.vllm import prompt_logprobs

    monkeypatch.setattr(prompt_logprobs, "ROWS", 16)
    rows, softmaxes = [], []
    score, log_softmax = rlkernel.score_tokens, torch.Tensor.log_softmax
    monkeypatch.setattr(rlkernel, "score_tokens", lambda x, *a, **o: rows.append(len(x)) or score(x, *a, **o))
    monkeypatch.setattr(
        torch.Tensor, "log_softmax", lambda x, *a, **o: softmaxes.append(x.shape) or log_softmax(x, *a, **o)
    )
    (prompt,) = engines.prompts(1, shortest=70, longest=70)
    ask(llm, [prompt], [SamplingParams(max_tokens=1, prompt_logprobs=1)])
    assert rows == [16, 16, 16, 16, 5] and not softmaxes


def test_structured_outputs_keep_to_their_grammar(llm, patch):
    """The tokens that a grammar leaves, with and without a length below which the end may not come."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    choice = StructuredOutputsParams(choice=["abc", "xyz"])
    kinds = [
        SamplingParams(seed=i, max_tokens=6, structured_outputs=choice, min_tokens=min_tokens, logprobs=1)
        for i in range(8)
        for min_tokens in (0, 2)
    ]
    prompts = engines.prompts(len(kinds))
    out = ask(llm, prompts, kinds)
    assert {one.outputs[0].text for one in out} == {"abc", "xyz"} and not patch.fallbacks


BANNED = range(4, 30)
GAP = 3.0


def test_biases_without_end(llm, patch):
    """inf forces its token, as in vLLM, and NaN gives token 0; neither ends the engine for the others."""
    from vllm import SamplingParams

    biases = [{33: float("inf")}, {33: float("nan")}, {33: -float("inf")}, {33: 1.0}]
    kinds = [SamplingParams(temperature=0, max_tokens=3, logit_bias=x, ignore_eos=True) for x in biases]
    mine = engines.tokens(ask(llm, engines.prompts(4), kinds))
    assert mine[0] == [[33] * 3] and mine[1] == [[0] * 3] and not patch.fallbacks
    patch.undo()
    try:
        theirs = engines.tokens(ask(llm, engines.prompts(4), kinds))
    finally:
        patch.apply()
    assert [mine[0], *mine[2:]] == [theirs[0], *theirs[2:]]


def processors():
    """What a user writes: one of the kind that may change the likeliest token, and one of the other."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Ban(LogitsProcessor):
        def __init__(self, *_):
            pass

        def is_argmax_invariant(self):
            return False

        def update_state(self, _):
            pass

        def apply(self, logits):
            logits[:, list(BANNED)] = -torch.inf
            return logits

    class Sharpen(Ban):
        def is_argmax_invariant(self):
            return True

        def apply(self, logits):
            return logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - GAP, -torch.inf)

    return [Ban, Sharpen]


def test_custom_logits_processors(model, patch):
    from vllm import SamplingParams

    llm = engines.in_process(model, logits_processors=processors())
    prompts, kinds = engines.prompts(40), engines.mixed(40, seeded=True, allowed_token_ids=None)
    got = ask(llm, prompts, kinds)
    assert not patch.fallbacks
    for sample in (one.outputs[0] for one in got):
        assert not set(sample.token_ids) & set(BANNED)
    patch.undo()
    try:
        greedy = [i for i, kind in enumerate(kinds) if kind.temperature == 0]
        want = ask(llm, [prompts[i] for i in greedy], [kinds[i] for i in greedy])
    finally:
        patch.apply()
    for i, other in zip(greedy, want, strict=True):
        assert got[i].outputs[0].token_ids == other.outputs[0].token_ids
        same_logprobs(got[i].outputs[0].logprobs, other.outputs[0].logprobs, slack=2)
    (one,) = ask(llm, prompts[:1], [SamplingParams(temperature=0.5, seed=0, max_tokens=40, logprobs=-1)])
    for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True):
        left = [entry.logprob for id, entry in step.items() if id not in BANNED]
        # of logits that the temperature has divided
        assert max(left) - 0.5 * GAP - CLOSE <= step[token].logprob < max(left) + CLOSE
        assert min(left) < max(left) - 0.5 * GAP
