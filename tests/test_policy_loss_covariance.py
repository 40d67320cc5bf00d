"""The tokens that kl_cov and clip_cov pick: by every backend, against the definition spelled out."""

import math
import struct

import pytest
import torch
from backends import is_slow, of, running

import rlkernel
from rlkernel.calls.policy_loss import CovariancePick, PolicySelectCall
from rlkernel.ops.policy_loss import covariance
from rlkernel.reference import policy_loss as reference
from rlkernel.reference.policy_loss import make_inputs

LOW, HIGH = 0.8, 1.2  # of the ratio
EVERY = pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
BOTH = pytest.mark.parametrize("by_hash", [False, True], ids=["kl_cov", "clip_cov"])


def picked(backend, inputs, by_hash=False, ratio=0.1, low=0.05, high=9.0, seed=0):
    x = {"old_logprobs": None, "cu_seqlens": None, **inputs}
    names = ("logprobs", "old_logprobs", "advantages", "mask", "cu_seqlens")
    with running(backend):
        pick = CovariancePick(by_hash, ratio, low, high, LOW, HIGH, seed & 0xFFFFFFFF)
        return covariance.selected(PolicySelectCall(*map(x.get, names), pick))


def uniform(logprob, position, seed):
    """The hash of a token, in [0, 1)."""
    (h,) = struct.unpack("<I", struct.pack("<f", logprob))
    h ^= (position * 0x9E3779B1 + seed * 0x85EBCA77) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ h >> shift) * factor) & 0xFFFFFFFF
    return ((h ^ h >> 16) + 2**31) % 2**32 / 2**32


def expected(inputs, by_hash=False, ratio=0.1, low=0.05, high=9.0, seed=0):
    """The same as one list of bools, token by token."""
    logprobs, mask = inputs["logprobs"].flatten(), inputs["mask"].flatten().tolist()
    old, advantages = inputs.get("old_logprobs"), inputs["advantages"]
    old = logprobs if old is None else old.flatten()
    offsets, length = inputs.get("cu_seqlens"), inputs["logprobs"].shape[-1]
    starts = list(range(0, len(mask), length)) if offsets is None else offsets[:-1].tolist()
    ends = [*starts[1:], len(mask)]
    sequence = [s for s, (a, b) in enumerate(zip(starts, ends, strict=True)) for _ in range(a, b)]
    if advantages.numel() != len(mask):
        advantages = advantages.flatten()[sequence]
    counted = [i for i, m in enumerate(mask) if m]
    if not counted:
        return [False] * len(mask)
    a, b = (x.flatten()[counted] for x in (advantages, logprobs))
    cov = ((a - a.double().mean().to(a)) * (b - b.double().mean().to(b))).tolist()
    wanted = max(1, int(len(counted) * ratio))
    if not by_hash:
        first = {i: -c for i, c in zip(counted, cov, strict=True) if not math.isnan(c)}
    else:
        r = (b - old[counted]).exp()
        kept = (r * a <= r.clamp(LOW, HIGH) * a).tolist()
        inside = [i for i, c, k in zip(counted, cov, kept, strict=True) if k and low < c < high]
        first = {i: uniform(old[i].item(), i - starts[sequence[i]], seed) for i in inside}
    chosen = {*sorted(first, key=first.get)[:wanted]}  # what is alike stays in the order of the batch
    return [i in chosen for i in range(len(mask))]


def pack(inputs):
    """Three of the sequences behind each other, with an empty one between them."""
    edges = torch.tensor([0, 3, 3, 20, 41])
    flat = {k: v[0] if v.dim() == 2 else v for k, v in inputs.items()}
    return flat | {"cu_seqlens": edges, "advantages": inputs["advantages"].flatten()[:4]}


@BOTH
@EVERY
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 41), (3, 300), (17, 1100)])
def test_picks_what_the_definition_picks(shape, by_hash, backend, device):
    if is_slow(backend, device) and math.prod(shape) > 1000:
        pytest.skip("the interpreter's and the emulation's tokens cost too much")
    for case in range(4):
        inputs = make_inputs(*shape, seed=case, per_token=case % 2 == 0, drift=0.1)
        if case == 3:  # ties, also of 0 and -0
            inputs["logprobs"] = (inputs["logprobs"] * 2).round() / 2
            inputs["advantages"] = inputs["advantages"].sign()
        if case == 1:  # the mean in fp32 would be off by as much as the advantages differ
            inputs["advantages"] = inputs["advantages"] * 1e-3 + 1000
        if case == 2:
            del inputs["old_logprobs"]
        for ratio in (1e-4, 0.3, 1.0):
            want = expected(inputs, by_hash, ratio, seed=case - 2)
            on = {k: v.to(device) for k, v in inputs.items()}
            got = picked(backend, on, by_hash, ratio, seed=case - 2)
            assert got.flatten().tolist() == want


@BOTH
@EVERY
def test_packed(by_hash, backend, device):
    inputs = pack(make_inputs(4, 41, per_token=False, drift=0.1))
    for ratio in (0.1, 0.6):
        want = expected(inputs, by_hash, ratio)
        got = picked(backend, {k: v.to(device) for k, v in inputs.items()}, by_hash, ratio)
        assert got.tolist() == want and any(want)


@EVERY
def test_of_ties_the_first_are_picked(backend, device):
    """Covariances +-1 in halves; more of them tie with the least than are wanted."""
    signs = torch.tensor([[1.0, -1.0] * 40])
    inputs = {"logprobs": signs - 3, "advantages": signs, "mask": signs > -2}
    inputs["advantages"][0, :40] *= -1
    inputs = {k: v.to(device) for k, v in inputs.items()}
    for ratio, want in ((0.1, range(40, 48)), (0.5, range(40, 80)), (0.6, [*range(8), *range(40, 80)])):
        assert picked(backend, inputs, ratio=ratio).nonzero()[:, 1].tolist() == list(want)


@EVERY
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_never_more_than_are_wanted(backend, device, packed):
    """Where all advantages are equal, so are all covariances: 0, of either sign."""
    inputs = make_inputs(5, 50, per_token=False)
    if packed:
        inputs = pack(make_inputs(5, 41, per_token=False))
    inputs["advantages"] = torch.full_like(inputs["advantages"], 0.25)
    inputs = {k: v.to(device) for k, v in inputs.items()}
    tokens = int(inputs["mask"].sum())
    for ratio in (0.01, 0.3, 0.77, 1.0):
        got = picked(backend, inputs, ratio=ratio)
        wanted = max(1, int(tokens * ratio))
        want = inputs["mask"].flatten().cumsum(0) <= wanted
        assert torch.equal(got.flatten(), want & inputs["mask"].flatten()) and got.sum() == wanted


@EVERY
def test_clip_cov_picks_as_many_as_are_wanted(backend, device):
    """Also of sequences that are copies of each other, and so have the same hashes."""
    inputs = make_inputs(1, 60, drift=0.05)
    inputs = {k: v.repeat(5, 1).to(device) for k, v in inputs.items()}
    options = {"by_hash": True, "low": -9.0, "high": 9.0}
    candidates = picked(backend, inputs, ratio=1.0, **options)
    for ratio in (0.05, 0.2, 0.9):
        got = picked(backend, inputs, ratio=ratio, **options)
        assert got.sum() == min(int(inputs["mask"].sum() * ratio), candidates.sum())
        assert not (got & ~candidates).any()


@BOTH
@EVERY
def test_nothing_to_pick(by_hash, backend, device):
    inputs = {k: v.to(device) for k, v in make_inputs(3, 40).items()}
    for mask, logprob in ((False, 0.0), (True, torch.nan)):
        chosen = inputs | {"mask": torch.full_like(inputs["mask"], mask)}
        chosen["logprobs"] = inputs["logprobs"].index_fill(0, torch.tensor([1], device=device), logprob)
        assert not picked(backend, chosen, by_hash).any()
    none = {k: v[:0] for k, v in inputs.items()}
    assert picked(backend, none, by_hash).shape == (0, 40)


@BOTH
@EVERY
def test_what_the_mask_hides_has_no_say(by_hash, backend, device):
    inputs = {k: v.to(device) for k, v in make_inputs(4, 70, drift=0.1).items()}
    mask = inputs["mask"]
    want = picked(backend, inputs, by_hash)
    for hidden in (torch.nan, torch.inf, -1e30):
        other = {k: torch.where(mask, v, hidden) for k, v in inputs.items() if k != "mask"}
        assert torch.equal(picked(backend, other | {"mask": mask}, by_hash), want)


@EVERY
def test_as_many_as_verl_wants(backend, device):
    """``int(tokens * ratio)`` of Python's floats: 28 of 100 for 0.29, where fp32 would say 29."""
    inputs = make_inputs(1, 100) | {"mask": torch.ones(1, 100, dtype=torch.bool)}
    got = picked(backend, {k: v.to(device) for k, v in inputs.items()}, ratio=0.29)
    assert got.sum() == int(100 * 0.29) == 28


@BOTH
@EVERY
def test_place_in_the_batch_changes_nothing(by_hash, backend, device):
    inputs = {k: v.to(device) for k, v in make_inputs(6, 90, drift=0.1).items()}
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    got = picked(backend, inputs, by_hash, 0.2)
    moved = picked(backend, {k: v[order] for k, v in inputs.items()}, by_hash, 0.2)
    assert torch.equal(moved, got[order]) and got.any()


def test_threads_change_nothing():
    inputs = make_inputs(40, 1000, drift=0.1)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            runs.append([picked("native", inputs, by_hash) for by_hash in (False, True)])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *runs))


def test_seeds_pick_other_tokens_and_all_of_them_alike():
    inputs = make_inputs(30, 200, drift=0.02)
    options = {"by_hash": True, "ratio": 0.05, "low": 0.0, "high": math.inf}
    everyone = picked("native", inputs, **options | {"ratio": 1.0})
    share = int(0.05 * inputs["mask"].sum()) / everyone.sum()
    runs = torch.stack([picked("native", inputs, seed=s, **options)[everyone] for s in range(200)]).double()
    spread = (share * (1 - share) / 200).sqrt()
    assert (runs.mean(0) - share).abs().max() < 6 * spread
    together = (runs @ runs.T)[~torch.eye(200, dtype=torch.bool)] / everyone.sum()
    assert abs(together.mean() - share**2) < 0.05 * share**2


def test_seeds_are_those_of_sampling():
    """64 bits, signed or not; the low ones choose."""
    inputs = make_inputs(6, 40, drift=0.1)
    options = {"loss_type": "clip_cov", "cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": math.inf}
    losses = [
        rlkernel.policy_loss(**inputs, **options, seed=seed).loss for seed in (-1, 2**64 - 1, 2**32 - 1, 1)
    ]
    assert all(torch.equal(losses[0], x) for x in losses[1:3]) and not torch.equal(losses[0], losses[3])
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"seed must be an integer of 64 bits, got {seed}"):
            rlkernel.policy_loss(**inputs, **options, seed=seed)
    with pytest.raises(ValueError, match="ignore_index must be an integer of 64 bits"):
        rlkernel.logprob(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), ignore_index=2**63)


@BOTH
def test_the_backend_that_was_asked_for_picks(by_hash, monkeypatch):
    """Also under torch.compile, which sees one node: no plain PyTorch runs in the place of a kernel."""
    inputs = make_inputs(5, 60, drift=0.1)
    want = picked("native", inputs, by_hash)
    calls = []
    select = reference.select
    monkeypatch.setattr(reference, "select", lambda *a: calls.append(a) or select(*a))
    assert torch.equal(picked("reference", inputs, by_hash), want) and len(calls) == 1
    with running("native"):
        compiled = torch.compile(covariance.selected, backend="eager", fullgraph=True)
        tensors = (*(inputs[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")), None)
        pick = CovariancePick(by_hash, 0.1, 0.05, 9.0, LOW, HIGH, 0)
        assert torch.equal(compiled(PolicySelectCall(*tensors, pick)), want) and len(calls) == 1


@BOTH
def test_the_choice_is_one_node_of_a_graph(by_hash):
    inputs = make_inputs(5, 60, drift=0.1)
    pick = CovariancePick(by_hash, 0.1, 0.05, 9.0, LOW, HIGH, 0)
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    call = PolicySelectCall(*(inputs[name] for name in names), None, pick)
    op = covariance.op
    torch.library.opcheck(op.node, op.flat(call))


def test_loss_uses_them():
    inputs = make_inputs(5, 60, drift=0.1)
    far = rlkernel.POLICY_METRICS.index("clip_fraction_far")
    for loss_type in ("kl_cov", "clip_cov"):
        by_hash = loss_type == "clip_cov"
        chosen = picked("native", inputs, by_hash, seed=5)
        out = rlkernel.policy_loss(
            **inputs, loss_type=loss_type, cov_ratio=0.1, clip_cov_lb=0.05, clip_cov_ub=9.0, seed=5
        )
        assert out.metrics[far] == (chosen.sum() / inputs["mask"].sum())
