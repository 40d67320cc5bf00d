"""SGLang's sampler, patched beside unpatched, on batches of SGLang's own."""

import pytest
import steps
import torch
from accuracy import check
from chi_square import chi_square
from sglang.srt.layers import sampler as home
from sglang.srt.layers.sampler import Sampler, top_k_top_p_min_p_sampling_from_probs_torch
from steps import step
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel

V = 700
GREEDY = {"temperature": 0}
BATCHES = {
    "greedy": [GREEDY] * 4,
    "tempered": [{"temperature": t} for t in (1.0, 0.7, 1.3, 0.2)],
    "filtered": [
        {"top_p": 0.9},
        {"top_k": 5, "temperature": 0.8},
        {"min_p": 0.1},
        {"top_k": V, "top_p": 0.5},
    ],
    "mixed": [GREEDY, {"temperature": 0.7}, {"top_k": 1, "temperature": 0.5}, {"top_k": 3, "min_p": 0.2}],
}
TOPS, GIVEN = [3, 0, 1, 5], [None, [7, 7, 0], [V - 1], []]


def logits_of(n, vocab=V, dtype=torch.float32):
    return (4 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(3))).to(dtype)


def heats(requests):
    """Whose distribution SGLang reports: greedy batches are not divided, greedy rows of others are by 1."""
    if all(r == GREEDY for r in requests):
        return torch.ones(len(requests), 1, dtype=torch.float64)
    return torch.tensor([[r.get("temperature") or 1.0] for r in requests], dtype=torch.float64)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_logprobs_are_sglangs_within_twice_its_error(name, original, monkeypatch):
    monkeypatch.setattr(home, "SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    requests, logits = BATCHES[name], logits_of(4)
    heat = torch.ones(4, 1).double() if original else heats(requests)
    truth = torch.log_softmax(logits.double() / heat, -1)
    stock_tokens, stock = step(logits, requests, TOPS, GIVEN)
    with rlkernel.patch_sglang() as patch:
        tokens, found = step(logits, requests, TOPS, GIVEN)
        assert patch.calls["Sampler.forward"] == 1 and not patch.fallbacks
    assert tokens.dtype == stock_tokens.dtype and tokens.shape == stock_tokens.shape
    for row, (ours, theirs) in enumerate(
        zip(found.next_token_top_logprobs_val, stock.next_token_top_logprobs_val, strict=True)
    ):
        ids = found.next_token_top_logprobs_idx[row]
        assert torch.equal(ids, stock.next_token_top_logprobs_idx[row]) and len(ids) == TOPS[row]
        check(f"top of row {row}", ours, theirs, truth[row, ids])
    assert found.next_token_token_ids_logprobs_idx == stock.next_token_token_ids_logprobs_idx
    for row, (ours, theirs) in enumerate(
        zip(found.next_token_token_ids_logprobs_val, stock.next_token_token_ids_logprobs_val, strict=True)
    ):
        check(f"given ids of row {row}", ours, theirs, truth[row, GIVEN[row] or []])
    ours = found.next_token_logprobs - truth.gather(1, tokens.long()[:, None])[:, 0]
    theirs = stock.next_token_logprobs - truth.gather(1, stock_tokens.long()[:, None])[:, 0]
    assert ours.abs().max() <= 2 * theirs.abs().max() + 1e-6


def test_rare_tokens_have_their_logprobs_where_sglangs_probabilities_are_zero():
    """It takes the logarithm of fp32 probabilities."""
    logits = torch.zeros(1, 8)
    logits[0, 3] = 120.0
    _, stock = step(logits, [{"temperature": 1.0}], given=[[0]])
    assert stock.next_token_token_ids_logprobs_val[0].item() < -1e38
    with rlkernel.patch_sglang():
        _, found = step(logits, [{"temperature": 1.0}], given=[[0]])
    assert found.next_token_token_ids_logprobs_val[0].item() == -120.0


def test_greedy_tokens_are_the_same(patch):
    logits = torch.randint(-3, 3, (64, V), generator=torch.Generator().manual_seed(1)).float()  # many ties
    mixed = [{"temperature": 1.0}] + [GREEDY] * 63
    want = logits.argmax(-1)
    tokens, _ = step(logits, [GREEDY] * 64)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, want)
    tokens, _ = step(logits, mixed)
    assert torch.equal(tokens[1:].long(), want[1:])
    tokens, output = step(logits, [GREEDY] * 64, logprobs=False)
    assert torch.equal(tokens, want) and output.next_token_logprobs is None
    assert patch.calls["Sampler.forward"] == 2
    assert patch.fallbacks == {"Sampler.forward: argmax alone, which is SGLang's already": 1}


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 0.7},
        {"top_k": 6},
        {"top_p": 0.8, "temperature": 1.2},
        {"min_p": 0.15},
        {"top_k": 12, "top_p": 0.85, "min_p": 0.05},
        {"top_k": 30},
    ],
)
def test_tokens_come_from_sglangs_distribution(patch, request_):
    n, vocab = 20_000, 30
    logits = 1.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(8))
    told = steps.info([request_], vocab)
    probs = torch.softmax(logits / told.temperatures, -1)
    _, kept, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs, told.top_ks, told.top_ps, told.min_ps, told.need_min_p_sampling, None, torch.zeros(1),
        return_filtered_probs=True,
    )  # fmt: skip
    wanted = torch.zeros(vocab, dtype=torch.float64)
    wanted[ids[0].long()] = kept[0].double()
    torch.manual_seed(5)
    tokens, _ = step(logits.expand(n, vocab), [request_] * n)
    assert patch.calls["Sampler.forward"] == 1
    assert chi_square(tokens, wanted / wanted.sum()) < 4
    shifted = wanted.roll(1) / wanted.sum()
    seen = torch.bincount(tokens.long(), minlength=vocab).double() / n
    assert (seen - shifted).abs().max() > 0.02, "the test must tell another distribution"


def test_top_p_of_what_top_k_keeps_where_the_backend_renormalises(patch):
    """FlashInfer's min_p path: top_p = 0.6 keeps 2 of the 3 renormalised tokens, and all 3 of the whole."""
    probs = torch.tensor([[0.25, 0.2, 0.15] + [0.04] * 10])
    requests, n = {"top_k": 3, "top_p": 0.6, "min_p": 0.01}, 500
    seen = {}
    for backend in ("pytorch", "flashinfer"):
        with steps.arguments(sampling_backend=backend):
            tokens, _ = step(probs.log().expand(n, 13), [requests] * n)
            seen[backend] = set(tokens.tolist())
    assert seen == {"pytorch": {0, 1, 2}, "flashinfer": {0, 1}}


def test_a_draw_is_a_function_of_seed_and_position():
    requests = [{"temperature": 0.9, "top_p": 0.95, "sampling_seed": seed} for seed in (7, 8, 7, 7)]
    logits = logits_of(1).mul(0.2).expand(4, V)
    places = torch.tensor([5, 5, 5, 6])
    with steps.arguments(enable_deterministic_inference=True), rlkernel.patch_sglang() as patch:
        own = steps.sampler()
        assert own.enable_deterministic
        tokens, output = step(logits, requests, positions=places, own=own)
        alone, one = step(logits[:1], requests[:1], positions=places[:1], own=own)
        assert patch.calls["Sampler.forward"] == 2 and not patch.fallbacks
    assert tokens[0] == tokens[2] == alone[0] and len({*tokens[[0, 1, 3]].tolist()}) == 3
    assert torch.equal(output.next_token_logprobs[:1], one.next_token_logprobs)
    want = rlkernel.sample(logits, temperature=0.9, top_p=0.95, filter_order="joint", seeds=torch.tensor(
        [7, 8, 7, 7]), positions=places)  # fmt: skip
    assert torch.equal(tokens.long(), want.token_ids.long())


def test_a_seed_with_min_p():
    """SGLang's own draw refuses it."""
    requests = [{"min_p": 0.05, "sampling_seed": seed} for seed in range(40)]
    logits = logits_of(1).expand(40, V)
    with steps.arguments(enable_deterministic_inference=True):
        own = steps.sampler()
        with pytest.raises(AssertionError, match="wrong results"):
            step(logits, requests, own=own)
        with rlkernel.patch_sglang():
            tokens, _ = step(logits, requests, own=own)
            again, _ = step(logits.flip(0), requests[::-1], own=own, positions=torch.arange(40).flip(0))
    probs = torch.softmax(logits[0], -1)
    assert bool((probs[tokens.long()] >= 0.05 * probs.max()).all()) and len({*tokens.tolist()}) > 1
    assert torch.equal(again.flip(0), tokens)


def test_without_the_prompts_deterministic_inference_is_left_to_sglang():
    logits, requests = logits_of(2), [GREEDY] * 2  # SGLang's draw with a seed needs its kernels
    with steps.arguments(enable_deterministic_inference=True):
        own = steps.sampler()
        stock = step(logits, requests, own=own)
        with rlkernel.patch_sglang(["sampler"]) as patch, pytest.warns(UserWarning, match="deterministic"):
            found = step(logits, requests, own=own)
    assert not patch.calls and torch.equal(found[0], stock[0])
    assert torch.equal(found[1].next_token_logprobs, stock[1].next_token_logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_that_a_trainer_has(patch, dtype):
    logits = logits_of(5, 4097, dtype)
    with rlkernel.batch_invariant():
        for requests, heat in (([GREEDY] * 5, 1.0), ([{"temperature": 0.7}] * 5, 0.7)):
            tokens, output = step(logits, requests, tops=[1, 0, 0, 0, 0])
            want = rlkernel.logprob(logits, tokens.long(), temperature=heat).logprobs
            assert torch.equal(output.next_token_logprobs, want)
            one, alone = step(logits[2:3], [GREEDY])  # the row has the same bits alone
            if heat == 1.0:
                assert one == tokens[2] and alone.next_token_logprobs == output.next_token_logprobs[2]
    assert patch.calls["Sampler.forward"] == 4 and not patch.fallbacks


def test_low_precision_logits_are_not_rounded_again(patch):
    logits = logits_of(4, dtype=torch.bfloat16)
    tokens, output = step(logits, BATCHES["tempered"])
    truth = torch.log_softmax(logits.double() / heats(BATCHES["tempered"]), -1)
    want = truth.gather(1, tokens.long()[:, None])[:, 0]
    assert output.next_token_logprobs.dtype == torch.float32
    torch.testing.assert_close(output.next_token_logprobs.double(), want, rtol=1e-6, atol=1e-5)


def test_rows_of_a_padded_vocabulary(patch):
    """Logits are a view of rows that are longer."""
    padded = torch.full((4, V + 52), 99.0)
    padded[:, :V] = logits_of(4)
    view = padded[:, :V]
    torch.manual_seed(2)
    tokens, output = step(view, BATCHES["mixed"], TOPS)
    torch.manual_seed(2)
    again, want = step(view.contiguous(), BATCHES["mixed"], TOPS)
    assert torch.equal(tokens, again) and torch.equal(output.next_token_logprobs, want.next_token_logprobs)
    own = home.LogitsProcessorOutput(next_token_logits=view)
    steps.sampler()(own, steps.info(BATCHES["mixed"], V), True, TOPS, [None] * 4, torch.arange(4))
    assert torch.equal(own.next_token_top_logprobs_idx[0], want.next_token_top_logprobs_idx[0])
    assert torch.equal(padded[:, :V], logits_of(4)), "the logits stay what they are"


def test_an_empty_batch(patch):
    tokens, output = step(torch.empty(0, V), [])
    assert tokens.shape == output.next_token_logprobs.shape == (0,)


def test_rows_without_a_distribution(patch, monkeypatch):
    """NaN, and a grammar that allows nothing: SGLang's draw would end the process."""
    logits = logits_of(3)
    logits[0, 9], logits[1] = torch.nan, -torch.inf
    requests = [{"temperature": 1.0}] * 3
    tokens, output = step(logits, requests, [2, 2, 2])
    assert tokens[:2].tolist() == [0, 0] and bool(output.next_token_logprobs[:2].isnan().all())
    assert output.next_token_logprobs[2].isfinite()
    monkeypatch.setenv("SGLANG_SANITIZE_NAN_LOGITS", "1")  # then they are numbers
    tokens, output = step(logits, requests)
    assert bool(output.next_token_logprobs.isfinite().all())


@pytest.mark.parametrize("tops", [[-1, -1], [-1, 0], [-1, 2]])
def test_fewer_than_none_of_the_likeliest_are_none(patch, tops):
    """SGLang lets a request ask for -1 of them, and nothing comes of it."""
    _, output = step(logits_of(2), [{"temperature": 0.8}] * 2, tops)
    found = output.next_token_top_logprobs_idx
    assert patch.calls["Sampler.forward"] == 1
    assert found is None if max(tops) < 1 else [len(row) for row in found] == [0, 2]


def test_a_grammars_rows_name_as_many_of_the_likeliest_as_are_asked_for(patch):
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [4, 30]] = torch.tensor([1.0, 2.0])
    _, output = step(logits, [{"temperature": 1.0}], tops=[4], given=[[4, 5]])
    ids, values = output.next_token_top_logprobs_idx[0], output.next_token_top_logprobs_val[0]
    assert ids[:2].tolist() == [30, 4] and len({*ids.tolist()}) == 4
    assert bool((values[2:] == torch.finfo(torch.float32).min).all()), "SGLang has no -inf"
    assert output.next_token_token_ids_logprobs_val[0][1] == torch.finfo(torch.float32).min


class OwnSampler(Sampler):
    pass


LEFT = {
    "OwnSampler is a sampler of its own": {"own": OwnSampler},
    "return_sampling_mask": {"mask": True},
    "rl_on_policy_target": {"fields": {"rl_on_policy_target": "fsdp"}},
    "token_ids_logprobs has an id outside the vocabulary": {"given": [[-1]] * 2},
    "logits is torch.float64": {"dtype": torch.float64},
}


@pytest.mark.filterwarnings("ignore:rlkernel.patch_sglang")
@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_sglang_has_its_bits(reason):
    case = LEFT[reason]
    logits = logits_of(2, dtype=case.get("dtype", torch.float32))
    with steps.arguments(**case.get("fields", {})):
        own = steps.sampler(case.get("own", Sampler))

        def run():
            torch.manual_seed(4)
            sampling = steps.info([{"temperature": 0.8, "top_k": 9}] * 2, V, mask=case.get("mask", False))
            return step(logits, [], given=case.get("given"), own=own, sampling=sampling)

        stock = run()
        with rlkernel.patch_sglang() as patch:
            found = run()
    assert not patch.calls and reason in str(patch.fallbacks)
    assert torch.equal(found[0], stock[0])
    assert torch.equal(found[1].next_token_logprobs, stock[1].next_token_logprobs)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_sglang")
def test_deterministic_inference_that_drafts_has_sglangs_logprobs():
    """Drafted tokens have theirs from SGLang, and the first token of a response is no other's."""
    logits, requests = logits_of(2), [GREEDY] * 2
    with steps.arguments(enable_deterministic_inference=True, speculative_algorithm="EAGLE"):
        own = steps.sampler()
        _, stock = step(logits, requests, own=own)
        with rlkernel.patch_sglang() as patch:
            _, found = step(logits, requests, own=own)
    assert not patch.calls and "speculative decoding" in str(patch.fallbacks)
    assert torch.equal(found.next_token_logprobs, stock.next_token_logprobs)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_sglang")
def test_watermarks_are_left_to_sglang():
    logits, told = logits_of(2), steps.info([{"temperature": 0.8}] * 2, V)
    with rlkernel.patch_sglang() as patch:
        output = home.LogitsProcessorOutput(next_token_logits=logits.clone())
        arguments = (output, told, True, [0, 0], [None, None], torch.arange(2))
        tokens = steps.sampler()(*arguments, logprob_logits=logits + 1)
    assert "watermarks" in str(patch.fallbacks)
    want = torch.log_softmax(logits / 0.8 + 1 / 0.8, -1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(output.next_token_logprobs, want)


def test_processors_of_requests_come_first(patch, monkeypatch):
    def force(logits, sampling_info):
        logits[:, 5] = 100.0

    monkeypatch.setattr(home, "apply_custom_logit_processor", force)
    told = steps.info([{"temperature": 1.0}] * 2, V)
    told.has_custom_logit_processor = True
    tokens, output = step(logits_of(2), [], sampling=told)
    assert tokens.tolist() == [5, 5] and bool((output.next_token_logprobs == 0).all())


class Copies(TorchDispatchMode):
    """How many tensors of as many numbers as the logits are made meanwhile."""

    def __init__(self, logits):
        super().__init__()
        self.size, self.count = logits.numel(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.count += x.numel() >= self.size
        return out


@pytest.mark.parametrize("name", BATCHES)
def test_no_copy_of_the_logits_is_made(name):
    logits = logits_of(4, 50_000)
    own, told = steps.sampler(), steps.info(BATCHES[name], 50_000)

    def copies():
        output = home.LogitsProcessorOutput(next_token_logits=logits.clone())
        with Copies(logits) as made:
            own(output, told, True, TOPS, [None] * 4, torch.arange(4))
        return made.count

    stock = copies()
    with rlkernel.patch_sglang():
        assert copies() == 0 < stock
