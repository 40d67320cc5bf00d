"""sampling: what the filters keep, token by token, against an oracle that sorts in fp64."""

import pytest
import sampling_peers as peers
import torch
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import (
    FEW,
    FILTERS,
    PAIRS,
    VOCABULARIES,
    bitmask,
    check_kept,
    everything,
    grid,
    kept,
    per_row,
    sample,
    support,
)

import rlkernel
from rlkernel.calls.sampling import FILTER_ORDERS

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
ORDERS = pytest.mark.parametrize("order", FILTER_ORDERS)
pytestmark = pytest.mark.usefixtures("poison")


def check_grid(backend, device, vocab, dtype, order, **options):
    seed = FILTER_ORDERS.index(order) + 3 * (dtype == torch.float32)
    logits, filters, temperatures = grid(vocab, is_slow(backend, device), dtype, device, seed)
    out = sample(
        backend, logits, temperature=temperatures, filter_order=order, **per_row(filters, device),
        **everything(vocab), **options,
    )  # fmt: skip
    for row, (z, t) in enumerate(zip(logits.double().tolist(), temperatures.tolist(), strict=True)):
        check_kept(out, row, z, t, filters[row], order)
    return out


# bf16 has ties everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ORDERS
@ON_EVERY_BACKEND
def test_every_filter_on_every_vocabulary(backend, device, order, dtype):
    check_grid(backend, device, 333, dtype, order)


@ORDERS
@ON_EVERY_BACKEND
def test_several_splits(backend, device, order):
    """Vocabularies of more than one split: random, sorted in the worst way, with a peak in each group."""
    slow = is_slow(backend, device)
    names = ("top_p", "all") if slow else FEW
    made = [VOCABULARIES[name] for name in ("random", "ascending", "spread")][: 2 if slow else 3]
    x = torch.randn(1, 4160 if slow else 9001, generator=torch.Generator().manual_seed(5))
    logits = torch.cat([shape(x) for shape in made for _ in names]).to(device)
    filters = [FILTERS[name] for _ in made for name in names]
    method = "gumbel" if order == "joint" else "grouped"
    out = sample(
        backend, logits, filter_order=order, method=method, **per_row(filters, device),
        **everything(logits.shape[1]),
    )  # fmt: skip
    for row, z in enumerate(logits.double().tolist()):
        check_kept(out, row, z, 1.0, filters[row], order)


@ON_EVERY_BACKEND
def test_huge_vocabulary(backend, device):
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    vocab, options = 151936, [FILTERS[name] for name in ("top_p", "all", "p of nearly all")]
    logits = 3 * torch.randn(len(options), vocab, generator=torch.Generator().manual_seed(1))
    logits = logits.to(device)
    out = sample(backend, logits, **per_row(options, device), **everything(vocab))
    for row, z in enumerate(logits.double().tolist()):
        check_kept(out, row, z, 1.0, options[row])


@ON_EVERY_BACKEND
def test_ties_go_to_the_lowest_id(backend, device):
    """vLLM and HF keep every token that ties with the k-th; here k is k."""
    logits = torch.zeros(4, 100, device=device)
    logits[1:, 40:] = 1
    options = [{"top_k": 3}, {"top_k": 3}, {"top_k": 63}, {"top_k": 60}]
    out = sample(backend, logits, **per_row(options, device), **everything(100))
    want = [[0, 1, 2], [40, 41, 42], [0, 1, 2, *range(40, 100)], list(range(40, 100))]
    assert [support(out, row) for row in range(4)] == want
    top = out.top_ids.tolist()
    assert top == [[0, 1, 2], *[[40, 41, 42]] * 3]


@pytest.mark.parametrize("vocab", [4, 64, 200])
@ON_EVERY_BACKEND
def test_a_share_that_is_met_exactly_needs_no_further_token(backend, device, vocab):
    """Of equal tokens, one half of the mass is one half of the tokens; the next fp32 above needs one more."""
    logits = torch.full((3, vocab), -7.5, device=device)
    half = torch.tensor(0.5)
    top_p = torch.stack([half, half.nextafter(torch.tensor(1.0)), half.nextafter(torch.tensor(0.0))]).to(
        device
    )
    for order in FILTER_ORDERS:
        out = sample(backend, logits, top_p=top_p, filter_order=order, return_support=vocab)
        assert out.kept_count.tolist() == [vocab // 2, vocab // 2 + 1, vocab // 2]
        assert support(out, 1) == list(range(vocab // 2 + 1))


@ON_EVERY_BACKEND
def test_of_what_each_order_takes_its_share(backend, device):
    logits = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.1, 0.1], device=device).log().expand(2, 6)
    for order, want in (("sequential", 2), ("joint", 3), ("top_k_first", 2)):
        out = sample(backend, logits, top_k=3, top_p=0.65, filter_order=order)
        # of 0.4 and 0.2 and 0.1, six sevenths are in the first two; of all, 0.6 is less than 0.65
        assert out.kept_count.tolist() == [want, want], order
    for order, want in (("sequential", 1), ("joint", 2), ("top_k_first", 2)):
        out = sample(backend, logits, top_k=3, top_p=0.61, min_p=0.45, filter_order=order)
        # min_p leaves 0.4 and 0.2, of which 0.4 is two thirds; of the first three it is four sevenths
        assert out.kept_count.tolist() == [want, want], order
    out = sample(
        backend, logits, top_k=4, top_p=0.8, min_p=0.45, filter_order="top_k_first", return_support=6
    )
    assert support(out, 0) == [0, 1], "three are in the nucleus, and min_p cuts the third"


@ON_EVERY_BACKEND
def test_numbers_and_tensors_of_one_value_are_the_same(backend, device):
    """Also as 0-d tensors, fp64 and small integers: values reach the kernels as fp32 and int64."""
    logits = 2 * torch.randn(3, 150, generator=torch.Generator().manual_seed(3)).to(device)
    values = {
        "temperature": 0.75,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "top_n_sigma": 2.5,
        "positions": 7,
    }
    want = sample(backend, logits, **values, **everything(150))
    rows = {name: torch.full((3,), value, device=device) for name, value in values.items()}
    wide = {
        n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else torch.uint8)
        for n, v in values.items()
    }
    for changed in (rows, {name: value.to(device) for name, value in wide.items()}):
        got = sample(backend, logits, **changed, **everything(150))
        for name, a, b in zip(got._fields, got, want, strict=True):
            assert_equal(name, a, b)


@pytest.mark.parametrize("share", [0.9, 0.01], ids=["most allowed", "few allowed"])
@ON_EVERY_BACKEND
def test_token_bitmask(backend, device, share):
    if is_slow(backend, device) and share > 0.5:
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    vocab = 333
    logits, filters, temperatures = grid(vocab, is_slow(backend, device), torch.float32, device, seed=4)
    g = torch.Generator().manual_seed(6)
    allowed = torch.rand(logits.shape, generator=g).to(device) < share
    allowed.scatter_(
        1, logits.argmax(-1, keepdim=True), True
    )  # a row without any token has a test of its own
    allowed[0] = True
    out = sample(
        backend, logits, temperature=temperatures, token_bitmask=bitmask(allowed), **per_row(filters, device),
        **everything(vocab),
    )  # fmt: skip
    z = logits.double().masked_fill(~allowed, -torch.inf)
    for row, t in enumerate(temperatures.tolist()):
        check_kept(out, row, z[row].tolist(), t, filters[row], masked=True)
    raw = logits.double().log_softmax(-1).gather(1, out.token_ids[:, None])[:, 0]
    assert (out.raw_logprobs - raw).abs().max() < 1e-4, "raw knows no mask"


@ON_EVERY_BACKEND
def test_bitmask_of_a_padded_vocabulary(backend, device):
    """A mask wider than the logits, as of a lm_head that is padded, and a narrower one, as of a tokenizer
    that knows fewer tokens: what is behind the mask is not allowed, nor does what is behind V count."""
    vocab, options = 333, {"top_p": 0.9, "return_rank": True, "top_logprobs": 5, "return_support": 333}
    logits = 2 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)).to(device)
    allowed = torch.rand(3, 416, generator=torch.Generator().manual_seed(3)).to(device) < 0.5
    wide = bitmask(allowed)
    wide[:, 10] |= -1 << 13  # ids from V on
    exact = bitmask(allowed[:, :vocab])
    want = sample(backend, logits, token_bitmask=exact, **options)
    check_same(sample(backend, logits, token_bitmask=wide, **options), want)
    check_same(sample(backend, logits[None], token_bitmask=wide[None], **options), want)
    known = allowed[:, :vocab] & (torch.arange(vocab, device=device) < 288)
    want = sample(backend, logits, token_bitmask=bitmask(known), **options)
    narrow = exact[:, :9].contiguous()
    check_same(sample(backend, logits, token_bitmask=narrow, **options), want)
    assert torch.equal(narrow, exact[:, :9]), "the mask is not modified"
    assert torch.equal(peers.xgrammar_masked(logits, wide), peers.xgrammar_masked(logits, exact))
    theirs = peers.xgrammar_masked(logits, narrow, vocab_size=288)[:, :288]
    assert torch.equal(theirs.isfinite(), known[:, :288])


def check_same(got, want):
    for name, a, b in zip(got._fields, got, want, strict=True):
        if b is not None:
            assert_equal(name, a.reshape(b.shape), b)


@ON_EVERY_BACKEND
def test_support_that_does_not_fit(backend, device):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8)).to(device)
    options = [{"top_k": 8}, {"top_k": 9}, {}, {"top_k": 3}]
    out = sample(backend, logits, **per_row(options, device), return_support=8)
    assert out.support_overflow.tolist() == [False, True, False, False]
    assert out.kept_count.tolist() == [8, 9, 300, 3]
    assert out.support_offsets.tolist() == [0, 8, 8, 8, 11] and out.support_ids.shape == (32,)
    assert (out.support_ids[11:] == -1).all() and out.support_ids.dtype == torch.int32
    want = [sorted(z.topk(o["top_k"]).indices.tolist()) for z, o in zip(logits, options, strict=True) if o]
    assert [support(out, row) for row in (0, 3)] == [want[0], want[2]]


def test_the_oracle_sees_a_token_too_many_and_one_too_few():
    logits = 3 * torch.randn(1, 333, generator=torch.Generator().manual_seed(0))
    z = logits[0].double().tolist()
    out = sample("reference", logits, top_p=0.9, return_support=333)
    order, low, high = kept(z, 1.0, top_p=0.9)
    assert low == high == out.kept_count[0]
    check_kept(out, 0, z, 1.0, {"top_p": 0.9})
    for count in (low - 1, low + 1):
        ids = torch.tensor(sorted(order[:count]), dtype=torch.int32)
        changed = {"kept_count": torch.tensor([count]), "support_offsets": torch.tensor([0, count])}
        with pytest.raises(AssertionError, match="row 0"):
            check_kept(out._replace(support_ids=ids, **changed), 0, z, 1.0, {"top_p": 0.9})


MUTANTS = {
    "the highest id wins a tie": lambda z: z.flip(-1),
    "the largest logit is forgotten": lambda z: z.scatter(-1, z.argmax(-1, keepdim=True), -torch.inf),
    "logits are halved": lambda z: z / 2,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_filters_fail(mutant, monkeypatch):
    from rlkernel.reference import sampling as reference

    right = reference._filter

    def wrong(softmax, request, greedy):
        changed = reference._softmax(MUTANTS[mutant](softmax.z), softmax.t)
        picked = right(changed, request, greedy)
        return picked._replace(kept=picked.kept.flip(-1)) if "tie" in mutant else picked

    monkeypatch.setattr(reference, "_filter", wrong)
    with pytest.raises(AssertionError):
        check_grid("reference", "cpu", 333, torch.bfloat16, "sequential")
    with running("reference"):
        assert rlkernel.sample(torch.zeros(1, 5), seeds=0).token_ids.shape == (1,)
