"""sampling: typical_p and XTC, which keep a band of the logits, against definitions that sort in fp64."""

import math

import pytest
import sampling_peers as peers
import torch
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import PAIRS, VOCABULARIES, everything, sample, skip_unless_sampling, support

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in PAIRS if not is_slow(*pair.values)]
)
pytestmark = pytest.mark.usefixtures("poison")
BEFORE = {
    "alone": {},
    "top_k top_p": {"top_k": 40, "top_p": 0.9},
    "k first": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "filter_order": "top_k_first"},
    "joint min_p": {"top_p": 0.8, "min_p": 0.01, "filter_order": "joint"},
    "one": {"top_k": 1},
}


def typical_sets(z, ids, temperature, share, slack=3e-6):
    """The tokens that typical-p keeps of ``ids`` for certain, and those that a rounding may add."""
    d = {i: (z[i] - max(z)) / temperature for i in ids}
    total = math.fsum(math.exp(x) for x in d.values())
    surprise = {i: math.log(total) - x for i, x in d.items()}
    entropy = math.fsum(math.exp(-s) * s for s in surprise.values())
    far = {i: abs(s - entropy) for i, s in surprise.items()}

    def radius(part):
        mass = 0.0
        for i in sorted(ids, key=far.__getitem__):
            mass += math.exp(-surprise[i])
            if mass >= part:
                break
        return far[i]

    rounding = slack * max(1.0, *(abs(x) for x in d.values()))
    least, most = radius(share * (1 - slack)) - rounding, radius(min(1.0, share * (1 + slack))) + rounding
    return {i for i in ids if far[i] < least}, {i for i in ids if far[i] <= most}


def excluded_sets(z, ids, temperature, threshold):
    """What XTC leaves of ``ids``, once for each way to round at the threshold."""
    total = math.fsum(math.exp((z[i] - max(z)) / temperature) for i in ids)
    sets = []
    for slack in (1 - 3e-6, 1 + 3e-6):
        reaches = [z[i] for i in ids if math.exp((z[i] - max(z)) / temperature) / total >= threshold * slack]
        sets.append({i for i in ids if z[i] <= min(reaches, default=math.inf)})
    return sets


def listed(out, row, z):
    """The kept tokens of a row, all of one that is whole."""
    ids = support(out, row)
    return set(ids) if ids else {i for i, x in enumerate(z) if x > -math.inf}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_every_vocabulary(backend, device, dtype, name):
    """Stage by stage: what the other filters leave, what typical_p leaves of it, what XTC leaves of that."""
    slow = is_slow(backend, device)
    x = torch.randn(len(VOCABULARIES), 333, generator=torch.Generator().manual_seed(len(name)))
    made = [shape(row[None]) for shape, row in zip(VOCABULARIES.values(), x, strict=True)]
    logits = torch.cat(made[:: 3 if slow else 1]).to(dtype).to(device)
    t = torch.tensor([1.0, 0.6, 2.0]).repeat(4)[: len(logits)].to(device)
    options = {"temperature": t, "return_support": 333, "return_rank": True} | BEFORE[name]
    before = sample(backend, logits, **options)
    typical = [0.5] if slow else [1e-3, 0.2, 0.5, 0.95]
    for i, share in enumerate(typical):
        method = ("grouped", "gumbel")[i % 2]
        kept = sample(backend, logits, typical_p=share, method=method, **options)
        both = sample(backend, logits, typical_p=share, xtc_probability=1, xtc_threshold=0.08, **options)
        for row, z in enumerate(logits.double().tolist()):
            where = f"row {row}, typical_p={share}"
            first, second = listed(before, row, z), listed(kept, row, z)
            least, most = typical_sets(z, sorted(first), t[row].item(), share)
            assert least <= second <= most and second, f"{where}: {sorted(second ^ most)} of {len(first)}"
            third = listed(both, row, z)
            assert third in excluded_sets(z, sorted(second), t[row].item(), 0.08), where
            for out, ids in ((kept, second), (both, third)):
                check_statistics(out, row, z, t[row].item(), ids, where)


def check_statistics(out, row, z, temperature, ids, where):
    token = out.token_ids[row].item()
    e = [math.exp((x - max(z)) / temperature) for x in z]
    mass, total = math.fsum(e[i] for i in ids), math.fsum(e)
    assert out.valid[row] and token in ids and out.kept_count[row] == len(ids), where
    assert math.isclose(out.kept_mass[row], mass / total, rel_tol=1e-5), where
    want = (z[token] - max(z)) / temperature - math.log(mass)
    assert math.isclose(out.processed_logprobs[row], want, rel_tol=1e-5, abs_tol=2e-5), where
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    assert out.rank[row] == 1 + order.index(token), where


@ON_EVERY_BACKEND
def test_several_splits(backend, device):
    vocab = 4160 if is_slow(backend, device) else 9001
    logits = 2 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(5)).to(device)
    logits[0, 4100] = 12.0  # so likely that it is no surprise
    options = {"return_support": vocab, "return_rank": True}
    kept = sample(backend, logits, typical_p=0.7, **options)
    both = sample(backend, logits, typical_p=0.7, xtc_probability=1, xtc_threshold=1e-3, **options)
    for row, z in enumerate(logits.double().tolist()):
        least, most = typical_sets(z, range(vocab), 1.0, 0.7)
        assert least <= listed(kept, row, z) <= most
        assert listed(both, row, z) in excluded_sets(z, sorted(listed(kept, row, z)), 1.0, 1e-3)
        check_statistics(both, row, z, 1.0, listed(both, row, z), f"row {row}")
    assert both.kept_count[1] < kept.kept_count[1] < vocab


@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.95])
@ON_EVERY_BACKEND
def test_hugging_faces_warper(backend, device, typical_p):
    """Behind top_k, top_p and min_p in the order of ``generate``, to the token."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(9))
    logits *= torch.tensor([0.2, 0.5, 1.0, 2.0, 3.0, 6.0])[:, None]
    for filters in ({}, {"top_k": 60, "top_p": 0.9, "min_p": 0.001}):
        theirs = peers.hf_processed(logits.double(), 0.8, typical_p=typical_p, **filters)
        out = sample(
            backend, logits.to(device), temperature=0.8, typical_p=typical_p, filter_order="top_k_first",
            return_support=300, **filters,
        )  # fmt: skip
        for row in range(6):
            assert support(out, row) == theirs[row].isfinite().nonzero().flatten().tolist()
        ours = out.processed_logprobs.cpu().double() - theirs.gather(1, out.token_ids.cpu()[:, None])[:, 0]
        assert ours.abs().max() < 1e-5


@ON_EVERY_BACKEND
def test_xtc_leaves_the_last_of_those_that_reach_the_threshold(backend, device):
    """As llama.cpp and text-generation-webui: in the order of probability all that reach it but the last go.
    Of what top_k leaves, the third has 0.11 of 0.91."""
    p = [0.4, 0.2, 0.2, 0.11, 0.05, 0.04]
    logits = torch.tensor(p, device=device).log().expand(5, 6)
    thresholds = torch.tensor([0.3, 0.2001, 0.1, 0.05, 0.6], device=device)
    out = sample(backend, logits, xtc_probability=1.0, xtc_threshold=thresholds, return_support=6)
    want = [[], [], [3, 4, 5], [4, 5], []]  # one alone above the threshold stays
    assert [support(out, row) for row in range(5)] == want
    for row, ids in enumerate(want):
        if ids:
            assert peers.xtc_kept(torch.tensor(p), thresholds[row].item()).nonzero().flatten().tolist() == ids
    out = sample(
        backend, logits, top_k=4, xtc_probability=1.0, xtc_threshold=0.115, return_support=6
    )  # 0.11 of 0.91 is more
    assert support(out, 0) == [3]


@ON_EVERY_BACKEND
def test_ties_stay_together(backend, device):
    """Nothing but an order of ids could tell them apart; elsewhere a sort does."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, -1.0], [1.0] * 5], device=device)
    out = sample(backend, logits, xtc_probability=1, xtc_threshold=0.1, return_support=5)
    assert support(out, 0) == [1, 2, 3, 4] and out.kept_count.tolist() == [4, 5]
    assert peers.xtc_kept(logits[0].softmax(-1).cpu(), 0.1).sum() == 2
    out = sample(backend, logits, typical_p=0.01, return_support=5)
    assert support(out, 0) == [1, 2, 3] and out.kept_count.tolist() == [3, 5]
    assert peers.hf_processed(logits.cpu(), typical_p=0.01).isfinite().sum(-1).tolist() == [3, 5]
    masked = sample(backend, logits, top_k=3, typical_p=0.01, return_support=5)
    assert support(masked, 0) in ([0], [1, 2]) and masked.kept_count[1] == 3, "of the ties that top_k leaves"


@ON_EVERY_BACKEND
def test_off_changes_no_bit(backend, device):
    logits = 3 * torch.randn(3, 150, generator=torch.Generator().manual_seed(3)).to(device)
    options = {"top_p": 0.9, "temperature": 0.7} | everything(150)
    want = sample(backend, logits, **options)
    ones = torch.ones(3, device=device)
    for off in (
        {"typical_p": 1.0, "xtc_probability": 0},
        {"typical_p": ones, "xtc_probability": 0 * ones},
        {"typical_p": ones, "xtc_probability": 1, "xtc_threshold": 1},
    ):
        got = sample(backend, logits, **off, **options)
        for name, a, b in zip(want._fields, got, want, strict=True):
            assert_equal(name, a, b)
    whole = sample(backend, logits, **everything(150))
    got = sample(backend, logits, typical_p=ones, xtc_probability=ones, xtc_threshold=0.9, **everything(150))
    for name, a, b in zip(want._fields, got, whole, strict=True):
        assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_a_row_depends_on_nothing_but_itself(backend, device):
    """Alone, in any batch, and of the given token, whose seed and position say whether XTC was drawn."""
    logits = 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(1)).to(device)
    seeds, positions = torch.arange(6, device=device) * 7 - 3, torch.arange(6, device=device)
    half = torch.full((6,), 0.5, device=device)
    asked = {"return_support": 200, "return_rank": True, "temperature": 1.3, "top_k": 100}
    band = {"typical_p": 0.9, "xtc_probability": half, "xtc_threshold": 0.02}
    out = sample(backend, logits, seeds=seeds, positions=positions, **band, **asked)
    with running(backend):
        again = rlkernel.score_tokens(
            logits, out.token_ids, seeds=seeds, positions=positions, **band, **asked
        )
    for name, a, b in zip(out._fields, again, out, strict=True):
        if b is not None:
            assert_equal(name, a, b)
    pick = [4, 1]
    few = band | {"xtc_probability": half[pick]}
    less = sample(backend, logits[pick], seeds=seeds[pick], positions=positions[pick], **few, **asked)
    for name in ("token_ids", "processed_logprobs", "kept_mass", "kept_count", "rank"):
        assert_equal(name, getattr(less, name), getattr(out, name)[pick])
    never = sample(backend, logits, seeds=seeds, positions=positions, typical_p=0.9, **asked)
    assert 0 < (never.kept_count != out.kept_count).sum() < 6, "some rows were drawn, others were not"


@ON_FAST_BACKENDS
def test_xtc_is_drawn_as_often_as_asked(backend, device):
    n = 4000
    logits = torch.tensor([2.0, 1.9, 0.0], device=device).expand(n, 3)
    p = torch.tensor([0.1, 0.5, 0.9], device=device)[torch.arange(n, device=device) % 3]
    out = sample(backend, logits, seeds=5, positions=torch.arange(n, device=device), xtc_probability=p)
    drawn = out.kept_count == 2
    for i, want in enumerate((0.1, 0.5, 0.9)):
        assert abs(drawn[i::3].double().mean() - want) < 4 * math.sqrt(want * (1 - want) / (n / 3))
    # the token is another draw than that of the row
    share = (out.token_ids[drawn] == 1).double().mean()
    want = logits[0, 1:].double().softmax(-1)[0].item()
    assert abs(share - want) < 4 * math.sqrt(want * (1 - want) / drawn.sum().item())


@pytest.mark.parametrize("method", ["grouped", "gumbel"])
@ON_FAST_BACKENDS
def test_tokens_are_distributed_as_processed(backend, device, method):
    n = 20000
    logits = torch.randn(130, generator=torch.Generator().manual_seed(2)).to(device) * 2
    out = sample(
        backend, logits.expand(n, 130), method=method, seeds=torch.arange(n, device=device), typical_p=0.6,
        xtc_probability=1, xtc_threshold=0.1, return_support=130,
    )  # fmt: skip
    ids = support(out, 0)
    assert 3 < len(ids) < 100
    counts = torch.bincount(out.token_ids.cpu(), minlength=130)
    assert counts[ids].sum() == n
    want = n * logits.double().cpu()[ids].softmax(-1)
    chi = ((counts[ids] - want) ** 2 / want).sum().item()
    assert chi < len(ids) + 5 * math.sqrt(2 * len(ids))


@ON_EVERY_BACKEND
def test_processed_logprobs_of_other_tokens(backend, device):
    """The likeliest tokens may be none of the kept ones."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 0.5, 0.0]], device=device)
    asked = {"ranking": "processed", "top_logprobs": 3, "logprob_token_ids": torch.tensor([0, 2, -1])}
    out = sample(backend, logits, xtc_probability=1, xtc_threshold=0.19, return_support=5, **asked)
    want = logits.double().cpu()
    for row, ids in ((0, [1, 2, 3, 4]), (1, [0, 1, 3, 4])):
        assert support(out, row) == ids
        want[row, [i for i in range(5) if i not in ids]] = -torch.inf
    want = want.log_softmax(-1)
    assert out.top_ids.tolist() == [[0, 1, 2], [2, 1, 3]]
    top = want.gather(1, out.top_ids.cpu())
    assert torch.allclose(out.top_logprobs.cpu().double(), top, atol=1e-5)
    assert torch.allclose(out.id_logprobs[:, :2].cpu().double(), want[:, [0, 2]], atol=1e-5)
    assert (out.id_logprobs[:, 2] == -torch.inf).all()


def test_greedy_rows_are_not_filtered():
    logits = torch.tensor([[1.0, 2.0, 0.0]]).expand(2, 3)
    skip_unless_sampling("native", logits.contiguous())
    for backend in ("reference", "native"):
        out = sample(backend, logits, temperature=torch.tensor([0.0, 1.0]), xtc_probability=1, typical_p=0.3)
        assert out.token_ids[0] == 1 and out.kept_count[0] == 1 and out.processed_logprobs[0] == 0


def test_scores_need_the_seeds_of_the_draw():
    with pytest.raises(ValueError, match="^seeds must be given with xtc_probability.*, got None$"):
        rlkernel.score_tokens(torch.zeros(2, 5), torch.tensor([0, 1]), xtc_probability=0.5)
    rlkernel.score_tokens(torch.zeros(2, 5), torch.tensor([0, 1]), typical_p=0.5)


def test_a_wrong_band_fails(monkeypatch):
    """One token more, and XTC that keeps the likeliest of those it should drop."""
    from rlkernel.reference import sampling as reference

    right = reference._typical
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_typical", lambda s, kept, share: right(s, kept, share * 1.2))
        with pytest.raises(AssertionError, match="row"):
            test_every_vocabulary("reference", "cpu", torch.float32, "alone")
    monkeypatch.setattr(reference, "_exclude", lambda s, kept, threshold: kept & (s.d < 0))
    with pytest.raises(AssertionError, match="row"):
        test_every_vocabulary("reference", "cpu", torch.float32, "alone")
