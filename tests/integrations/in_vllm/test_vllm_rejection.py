"""vLLM's rejection sampler and ours: the same distribution, the same greedy tokens."""

import os
import types

import engines
import pytest
import torch
from chi_square import chi_square
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

import rlkernel
from rlkernel.integrations.vllm import drafts, rejection

VOCAB = 12
BONUS = VOCAB + 1  # no token of the target: it says where all drafts stood
STOCK = rejection_sampler.rejection_sample


def metadata(temperature, rows, generators=None):
    temperature = torch.full((rows,), temperature) if isinstance(temperature, float) else temperature
    greedy = temperature == 0
    return types.SimpleNamespace(
        all_greedy=bool(greedy.all()),
        all_random=not bool(greedy.any()),
        temperature=None if greedy.all() else temperature,
        generators=generators or {},
    )


@pytest.fixture(autouse=True, scope="module")
def kernels():
    """vLLM's own for a CPU, which an engine puts in the place of those in Triton."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture
def patched():
    with rlkernel.patch_vllm(ops=("rejection",), strict=True) as patch:
        yield patch


def call(
    function, drafts, target, draft_probs=None, temperature=1.0, generators=None, bonus=None, **named
):  # fmt: skip
    """``drafts``: a list for each request; target and draft_probs [num_tokens, V]."""
    lengths = [len(x) for x in drafts]
    flat = torch.tensor([token for x in drafts for token in x], dtype=torch.int32)
    bonus = torch.full((len(drafts), 1), BONUS, dtype=torch.int32) if bonus is None else bonus
    return function(
        flat, lengths, max(lengths), torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        draft_probs, target.clone(), bonus, metadata(temperature, len(drafts), generators), **named,
    )  # fmt: skip


def target_of(seed=0):
    """Two places with tokens that cannot be drawn, as filters leave them."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[0, 3], logits[1, [0, 5]] = -torch.inf, -torch.inf
    return logits


ROWS = 20_000


@pytest.mark.parametrize(
    ("drafted", "function"),
    [
        ("given", "vLLM's"),
        ("given", "ours"),
        ("from a distribution", "vLLM's"),
        ("from a distribution", "ours"),
        ("some dropped", "ours"),  # vLLM's kernel for CPUs takes -1 for a token, those for GPUs reject it
    ],
)
def test_every_token_is_distributed_as_the_targets(drafted, function, request):
    torch.manual_seed(1)
    if function == "ours":
        patch = request.getfixturevalue("patched")
    target = target_of()
    p = target.double().softmax(1)
    q = None
    if drafted == "given":
        drafts = torch.randint(0, VOCAB, (ROWS, 2))
    else:
        q = (torch.randn(2, VOCAB) * 1.5).softmax(1)
        drafts = torch.stack([torch.multinomial(x, ROWS, replacement=True) for x in q], 1)
    if drafted == "some dropped":  # for what vLLM drops them: the target cannot draw them
        drafts = torch.where(p.gather(1, drafts.T).T == 0, -1, drafts)
    draft_probs = None if q is None else q.repeat(ROWS, 1)
    out = call(rejection_sampler.rejection_sample, drafts.tolist(), target.repeat(ROWS, 1), draft_probs)
    assert out.shape == (ROWS, 3) and out.dtype == torch.int32
    assert chi_square(out[:, 0], p[0]) < 5
    went_on = out[:, 1] >= 0
    assert went_on.any() and not went_on.all()
    assert torch.equal(went_on, out[:, 0] == drafts[:, 0]) or q is not None
    assert chi_square(out[went_on, 1], p[1]) < 5
    assert (out[:, 2][out[:, 2] >= 0] == BONUS).all() and (out[:, 2] == BONUS).any()
    if function == "ours":
        assert patch.calls[rejection.NAME] == 1 and not patch.fallbacks


def test_the_chi_square_sees_another_distribution():
    p = target_of().double().softmax(1)[0]
    tokens = torch.multinomial(0.97 * p + 0.03 / VOCAB, ROWS, replacement=True)
    tokens = tokens[p[tokens] > 0]
    assert chi_square(tokens, p) > 5


@pytest.mark.parametrize("with_q", [False, True])
def test_greedy_tokens_are_those_of_vllm(patched, with_q):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        lengths = torch.randint(0, 4, (6,), generator=generator).tolist()
        lengths[0] = 3
        target = torch.randn(sum(lengths), VOCAB, generator=generator)
        best = target.argmax(1).split(lengths)
        drafts = [torch.where(torch.rand(len(x), generator=generator) < 0.7, x, 1).tolist() for x in best]
        drafts[0][2] = -1
        q = torch.rand(sum(lengths), VOCAB, generator=generator) if with_q else None
        q = None if q is None else q / q.sum(1, keepdim=True)
        theirs = call(STOCK, drafts, target, q, temperature=0.0)
        mine = call(rejection_sampler.rejection_sample, drafts, target, q, temperature=0.0)
        assert torch.equal(mine, theirs)
    assert patched.calls[rejection.NAME] == 20


def test_greedy_rows_stand_beside_others(patched):
    target = target_of().repeat(2, 1)
    best = target[:2].argmax(1).tolist()
    for _ in range(5):
        temperature = torch.tensor([0.0, 0.7])
        out = call(rejection_sampler.rejection_sample, [best, best], target, temperature=temperature)
        assert out[0].tolist() == [*best, BONUS]


def test_a_request_without_drafts_gets_the_token_behind_them(patched):
    out = call(rejection_sampler.rejection_sample, [[], [1, 2]], target_of())
    assert out[0].tolist() == [BONUS, -1, -1]


def test_tokens_behind_drafts_may_come_as_a_row(patched):
    """vLLM's kernels look at their memory alone, and its tests hand on either shape."""
    best = target_of().argmax(1).tolist()
    bonus = torch.tensor([VOCAB + 2, VOCAB + 3], dtype=torch.int32)
    target = target_of()[[0, 1, 0]]
    for shape in ((2,), (2, 1)):
        out = call(
            rejection_sampler.rejection_sample, [best, best[:1]], target, temperature=0.0,
            bonus=bonus.view(shape),
        )  # fmt: skip
        assert out.tolist() == [[*best, VOCAB + 2], [best[0], VOCAB + 3, -1]]


def test_a_seeds_tokens_depend_on_no_other_request(patched):
    def draw(others):
        generators = {others: torch.Generator().manual_seed(11)}
        drafts = [[5, 5]] * others + [[1, 2]]
        target = torch.cat([target_of(9)] * others + [target_of()])
        return call(rejection_sampler.rejection_sample, drafts, target, generators=generators)[
            others
        ].tolist()

    assert draw(0) == draw(1) == draw(5)


def test_what_has_a_rule_of_vllms_own_is_left_to_it(patched):
    target, drafts = target_of(), [[1, 2]]
    with pytest.warns(UserWarning, match="distributions"):
        call(rejection_sampler.rejection_sample, drafts, target, torch.full((2, VOCAB), 0.5))
    assert patched.fallbacks.total() == 1 and not patched.calls


def test_the_rule_that_vllm_has_since_033_is_left_to_it(monkeypatch):
    """With its signature in the place of this vLLM's."""
    seen = []

    def rejection_sample(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
        bonus_token_ids, sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None,
        use_fp64_gumbel=False, fly_window_size=None, fly_entropy_threshold=None, fly_entropy_top_k=3,
    ):  # fmt: skip
        seen.append((fly_window_size, fly_entropy_threshold, fly_entropy_top_k))

    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sample)
    monkeypatch.setattr(rejection_sampler, "compute_fly_entropy", None, raising=False)
    with rlkernel.patch_vllm(ops=("rejection",), strict=True) as patch:
        fly = {"fly_entropy_threshold": None, "fly_entropy_top_k": 3}
        out = call(rejection_sampler.rejection_sample, [[1, 2]], target_of(), fly_window_size=None, **fly)
        assert out.shape == (1, 3) and not seen
        with pytest.warns(UserWarning, match="FLy"):
            call(rejection_sampler.rejection_sample, [[1, 2]], target_of(), fly_window_size=4, **fly)
    assert seen == [(4, None, 3)] and patch.calls[rejection.NAME] == patch.fallbacks.total() == 1


def test_undo_gives_vllm_its_function_back():
    with rlkernel.patch_vllm(ops=("rejection",), strict=True):
        assert rejection_sampler.rejection_sample is not STOCK
    assert rejection_sampler.rejection_sample is STOCK


def test_greedy_text_with_ngram_drafts_is_that_without(model, llm):
    """Drafts from the prompt, of which some stand and some do not, in an engine of worker processes."""
    prompts = [{"prompt_token_ids": [7, 8, 9, 10] * 6}, {"prompt_token_ids": [5, 6] * 12}]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def said(engine):
        return [tuple(r.outputs[0].token_ids) for r in engine.generate(prompts, params, use_tqdm=False)]

    wanted = said(llm)
    drafting = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with rlkernel.patch_vllm(ops=("rejection",), strict=True) as patch:
        drafted = engines.worker_processes(model, speculative_config=drafting)
        found = said(drafted)
        (worker,) = patch.stats(drafted)
        engines.shut_down(drafted)
    assert found == wanted
    assert worker["pid"] != os.getpid()
    assert worker["calls"][drafts.NAME] and not worker["fallbacks"]
