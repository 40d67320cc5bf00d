"""sampling against the samplers that people use: same support, same numbers; what differs is a test too."""

import pytest
import sampling_peers as peers
import torch
from backends import INTERPRETED, NO_INTERPRETER, is_slow, needs_interpreter, running
from sampling_cases import PAIRS, bitmask, sample, skip_unless_sampling, support

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
# the others keep what the oracle of test_sampling_filters.py keeps, as these do
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in PAIRS if not is_slow(*pair.values)]
)
FILTERS = {
    "none": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_k top_p": {"top_k": 40, "top_p": 0.8},
    "min_p top_p": {"min_p": 0.02, "top_p": 0.7},
    "top_k min_p": {"top_k": 6, "min_p": 0.02},
    "all": {"min_p": 0.01, "top_k": 30, "top_p": 0.85},
}
ROWS, VOCAB = 6, 700


@pytest.fixture
def logits():
    made = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(21))
    assert all(len(row.unique()) == VOCAB for row in made), "ties have tests of their own"
    return made


def check_same(out, processed):
    """``out`` kept the tokens whose ``processed`` log-probability is finite, and has that of its token."""
    processed = processed.to(out.token_ids.device)
    for row, values in enumerate(processed):
        kept = values.isfinite().nonzero().flatten().tolist()
        assert (support(out, row) or list(range(VOCAB))) == kept, f"row {row}"
    theirs = processed.gather(1, out.token_ids[:, None])[:, 0]
    assert (out.processed_logprobs - theirs).abs().max() < 5e-6


@pytest.mark.parametrize("name", FILTERS)
@ON_FAST_BACKENDS
def test_vllms_sampler(backend, device, name, logits):
    processed = peers.vllm_processed(logits, 0.8, **FILTERS[name])
    options = {"temperature": 0.8, "return_support": VOCAB} | FILTERS[name]
    check_same(sample(backend, logits.to(device), **options), processed)


@ON_FAST_BACKENDS
def test_vllms_raw_logprobs_and_ranks(backend, device, logits):
    theirs = peers.vllm_sampler("raw_logprobs", logits, 0.8, num_logprobs=4, top_p=0.9)
    token_ids, table = theirs.sampled_token_ids[:, 0].long(), theirs.logprobs_tensors
    skip_unless_sampling(backend, logits.to(device))
    with running(backend):
        out = rlkernel.score_tokens(logits.to(device), token_ids.to(device), return_rank=True, top_logprobs=4)
    assert (out.raw_logprobs.cpu() - table.logprobs[:, 0]).abs().max() < 5e-6
    assert torch.equal(out.rank.cpu(), table.selected_token_ranks)
    assert torch.equal(out.top_ids.cpu(), table.logprob_token_ids[:, 1:].long())
    assert (out.top_logprobs.cpu() - table.logprobs[:, 1:]).abs().max() < 5e-6


@ON_FAST_BACKENDS
def test_vllms_allowed_tokens_and_bias(backend, device, logits):
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    bias = {0: {3: 9.0, 5: -4.0}, 2: {690: 12.0}}
    dense = torch.zeros_like(logits)
    for row, entries in bias.items():
        dense[row, list(entries)] = torch.tensor(list(entries.values()))
    # vLLM masks before it adds the bias: to an allowed token it is all the same
    processed = peers.vllm_processed(
        logits, allowed=allowed, processors=[peers.vllm_logit_bias(bias)], top_p=0.9
    )
    out = sample(
        backend, logits.to(device), token_bitmask=bitmask(allowed).to(device), logit_bias=dense.to(device),
        top_p=0.9, return_support=VOCAB,
    )  # fmt: skip
    check_same(out, processed)


@ON_FAST_BACKENDS
def test_vllms_penalties(backend, device, logits, monkeypatch):
    g = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, VOCAB + 40, (ROWS, 60), generator=g).clamp(max=VOCAB)  # V is padding
    output = torch.randint(0, VOCAB + 40, (ROWS, 30), generator=g).clamp(max=VOCAB)
    output[:, :3] = 5
    values = {
        "repetition": 1 + torch.rand(ROWS, generator=g),
        "frequency": torch.rand(ROWS, generator=g) - 0.5,
        "presence": torch.rand(ROWS, generator=g) - 0.5,
    }
    theirs = peers.vllm_penalised(monkeypatch, logits, prompt, output, **values)
    monkeypatch.undo()
    rows = {name: value.to(device) for name, value in values.items()}
    penalties = rlkernel.Penalties(output.to(device), prompt.to(device), **rows)
    options = {"top_k": 30, "return_support": VOCAB}
    check_same(
        sample(backend, logits.to(device), penalties=penalties, **options),
        peers.vllm_processed(theirs, top_k=30),
    )


@ON_EVERY_BACKEND
def test_vllms_runner_draws_the_same_tokens(backend, device):
    """``method="gumbel"``, token by token: vLLM's Triton kernel with the same seeds and positions."""
    if device == "cpu" and not INTERPRETED:
        pytest.skip(NO_INTERPRETER)
    rows = 8 if is_slow(backend, device) else 48
    g = torch.Generator().manual_seed(8)
    logits = (2 * torch.randn(rows, 1500, generator=g)).to(device)
    t = torch.tensor([0.0, 0.6, 1.0, 1.3], device=device).repeat(rows // 4)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(device)
    positions = torch.randint(0, 2**40, (rows,), generator=g).to(device)
    theirs = peers.vllm_runner_tokens(logits, t, seeds, positions)
    got = sample(backend, logits, temperature=t, seeds=seeds, positions=positions, method="gumbel")
    assert torch.equal(got.token_ids, theirs)
    other = sample(backend, logits, temperature=t, seeds=seeds, positions=positions + 1, method="gumbel")
    assert not torch.equal(other.token_ids, theirs)


@needs_interpreter
@ON_FAST_BACKENDS
def test_vllms_runner_keeps_the_same_by_min_p(backend, device, logits):
    processed = peers.vllm_runner_min_p(logits, 0.03).log_softmax(-1)
    check_same(sample(backend, logits.to(device), min_p=0.03, return_support=VOCAB), processed)


@pytest.mark.parametrize("name", FILTERS)
@ON_FAST_BACKENDS
def test_hugging_faces_processors(backend, device, name, logits):
    """Their min_p comes last: top_p takes its share of what top_k alone has left."""
    processed = peers.hf_processed(logits, 0.8, **FILTERS[name])
    options = {"temperature": 0.8, "return_support": VOCAB, "filter_order": "top_k_first"} | FILTERS[name]
    check_same(sample(backend, logits.to(device), **options), processed)


@pytest.mark.parametrize(
    "filters", [{"top_k": 50, "top_p": 0.9, "min_p": 0.05}, {"top_p": 0.8, "min_p": 0.1}]
)
@ON_FAST_BACKENDS
def test_hugging_faces_order_over_many_rows(backend, device, filters):
    """vLLM's order keeps other sets of more than a third of them."""
    many = 3 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(6))
    kept = peers.hf_processed(many, **filters).isfinite().sum(-1)
    for order, least, most in (("top_k_first", 0, 0), ("sequential", 70, 200)):
        out = sample(backend, many.to(device), **filters, filter_order=order)
        assert least <= (out.kept_count.cpu() != kept).sum() <= most, order


@pytest.mark.parametrize("name", FILTERS)
@ON_FAST_BACKENDS
def test_sglangs_flashinfer_path_with_min_p(backend, device, name, logits):
    p, f = logits.double().softmax(-1), {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    kept = torch.stack([peers.sglang_flashinfer_kept(row, **f) for row in p])
    processed = p.log().masked_fill(~kept, -torch.inf).log_softmax(-1)
    options = {"filter_order": "top_k_first", "return_support": VOCAB} | FILTERS[name]
    check_same(sample(backend, logits.to(device), **options), processed)


@pytest.mark.parametrize("top_k, top_p", [(20, 0.7), (700, 0.9), (5, 0.999), (40, 0.3)])
@ON_FAST_BACKENDS
def test_flashinfers_two_orders(backend, device, top_k, top_p, logits):
    p = logits.double().softmax(-1)
    for theirs, ours in (("top_k_first", "sequential"), ("joint", "joint")):
        kept = torch.stack([peers.flashinfer_kept(row, top_k, top_p, theirs) for row in p])
        processed = p.log().masked_fill(~kept, -torch.inf).log_softmax(-1)
        out = sample(
            backend, logits.to(device), top_k=top_k, top_p=top_p, filter_order=ours, return_support=VOCAB
        )
        check_same(out, processed)


@pytest.mark.parametrize("name", FILTERS)
@ON_FAST_BACKENDS
def test_sglangs_torch_sampler_is_joint(backend, device, name, logits):
    p, f = logits.double().softmax(-1), {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    kept = torch.stack([peers.sglang_kept(row, **f) for row in p])
    processed = p.log().masked_fill(~kept, -torch.inf).log_softmax(-1)
    options = {"filter_order": "joint", "return_support": VOCAB} | FILTERS[name]
    check_same(sample(backend, logits.to(device), **options), processed)


THRESHOLDS = {
    "epsilon": {"epsilon_cutoff": 0.003},
    "eta": {"eta_cutoff": 0.003},
    "eta below its entropy": {"eta_cutoff": 0.2},
    "epsilon above all": {"epsilon_cutoff": 0.9},
}


@pytest.mark.parametrize("name", THRESHOLDS)
@ON_FAST_BACKENDS
def test_hugging_faces_epsilon_and_eta(backend, device, name, logits):
    logits = logits * torch.tensor([0.2, 0.5, 1.0, 1.0, 2.0, 4.0])[:, None]
    options = {"temperature": 0.8, "return_support": VOCAB} | THRESHOLDS[name]
    processed = peers.hf_processed(logits, 0.8, **THRESHOLDS[name])
    check_same(sample(backend, logits.to(device), **options), processed)


@pytest.mark.parametrize("top_a", [0.01, 0.2, 1.0])
@ON_FAST_BACKENDS
def test_text_generation_webuis_top_a(backend, device, top_a, logits):
    logits = logits * torch.tensor([0.2, 0.5, 1.0, 1.0, 2.0, 4.0])[:, None]
    processed = peers.top_a_processed(logits, top_a)
    check_same(sample(backend, logits.to(device), top_a=top_a, return_support=VOCAB), processed)


def test_trls_logprobs_are_the_tempered_ones(logits):
    """TRL 1.16 has no sampler: its trainers give the filters to vLLM or transformers and train on this."""
    utils = pytest.importorskip("trl.trainer.utils", reason="needs TRL")
    out = rlkernel.sample(logits, temperature=0.7, seeds=3, top_p=0.9)
    theirs = utils.selective_log_softmax((logits / 0.7)[None], out.token_ids[None])[0]
    assert (out.tempered_logprobs - theirs).abs().max() < 5e-6
    assert (out.processed_logprobs - theirs).min() > 0.01, "the mismatch of training on other numbers"


# What is different on purpose


def test_ties_of_the_kth_token_are_all_kept_elsewhere():
    """vLLM, Hugging Face and FlashInfer keep whatever is as large as the k-th logit: more than k tokens."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    ours = support(sample("reference", logits, top_k=2, return_support=6), 0)
    assert ours == [0, 1]
    flashinfer = peers.flashinfer_kept(logits[0].softmax(-1), 2, 1.0, "joint").nonzero().flatten().tolist()
    hf = peers.hf_processed(logits, top_k=2)[0].isfinite().nonzero().flatten().tolist()
    assert flashinfer == hf == [0, 1, 2, 3, 5]
    assert peers.vllm_processed(logits, top_k=2)[0].isfinite().nonzero().flatten().tolist() == hf


def test_ties_at_the_edge_of_a_nucleus_are_broken_by_the_sort_elsewhere():
    """vLLM and Hugging Face sort ascending, so which of the equal tokens go is up to the sort; here those
    with the highest ids go.  The number of tokens is the same; FlashInfer keeps all of the equal ones."""
    logits = torch.zeros(1, 8)
    out = sample("reference", logits, top_p=0.3, return_support=8)
    assert support(out, 0) == [0, 1, 2]
    assert peers.vllm_processed(logits, top_p=0.3).isfinite().sum() == 3
    assert peers.hf_processed(logits, top_p=0.3).isfinite().sum() == 3
    assert peers.flashinfer_kept(logits[0].softmax(-1), 8, 0.3, "joint").sum() == 8


def test_epsilon_behind_top_k_is_of_what_is_left_elsewhere():
    """Hugging Face renormalises before each processor; here a threshold is of the tempered probability."""
    logits = torch.tensor([[0.4, 0.2, 0.11, 0.1, 0.1, 0.09]]).log()
    options = {"top_k": 3, "epsilon_cutoff": 0.12}
    assert peers.hf_processed(logits, **options).isfinite().sum() == 3, "0.11 of 0.71"
    assert sample("reference", logits, **options).kept_count.item() == 2


def test_a_share_that_is_met_exactly_keeps_one_token_more_in_sglang():
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert peers.sglang_kept(p, 3, 0.5, 0.0).tolist() == [True, True, False]
    assert sample("reference", p.log().float()[None], top_p=0.5).kept_count.item() == 1
