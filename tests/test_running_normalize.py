"""running_normalize: against fp64 over everything that was seen, and TRL's former RunningMoments."""

import math

import pytest
import ranks
import torch
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel
from rlkernel.calls.running_normalize import RunningNormalizeCall
from rlkernel.reference.running_normalize import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("running_normalize"))
pytestmark = pytest.mark.usefixtures("poison")


def run(backend, x, state, mask=None, **options):
    skip_unless_able(backend, "running_normalize", x)
    with running(backend):
        return rlkernel.running_normalize(x, state, mask, **options)


def nothing(device="cpu"):
    return torch.zeros(3, dtype=torch.float64, device=device)


# one chunk and a tail; many chunks; offset 1000 with a spread of 0.3 loses its variance in a sum of squares
@pytest.mark.parametrize("sizes", [(1, 1, 2), (5, 0, 4500, 3), (2048, 2049)], ids=str)
@pytest.mark.parametrize("offset, spread", [(0.0, 1.0), (1000.0, 0.3)])
@ON_EVERY_BACKEND
def test_matches_fp64_over_all_that_was_seen(backend, device, sizes, offset, spread):
    g = torch.Generator().manual_seed(len(sizes))
    state, seen = nothing(device), torch.zeros(0, dtype=torch.float64, device=device)
    for i, n in enumerate(sizes):
        x = (torch.randn(n, generator=g) * spread + offset).to(device)
        options = {"eps": 1e-4, "eps_in": "std"} if i % 2 else {"eps": 1e-8}
        out, state = run(backend, x, state, **options)
        seen = torch.cat([seen, x.double()])
        spread_seen = seen.var() if len(seen) > 1 else torch.ones_like(seen[0])
        scale = spread_seen.sqrt() + 1e-4 if i % 2 else (spread_seen + 1e-8).sqrt()
        torch.testing.assert_close(out.double(), (x.double() - seen.mean()) / scale, rtol=2e-7, atol=2e-7)
    exact = torch.stack([torch.tensor(len(seen)).to(seen), seen.mean(), seen.var(correction=0) * len(seen)])
    torch.testing.assert_close(state, exact, rtol=5e-14, atol=5e-14)


class TrlRunningMoments:
    """The arithmetic of TRL's former RunningMoments (from trlx), which 1.16 has no more: population variance
    merged by Chan's formula, and a standard deviation with Bessel's correction."""

    def __init__(self):
        self.mean, self.std, self.var, self.count = 0, 1, 1, 1e-24

    def update(self, xs):
        n = xs.numel()
        var, mean = torch.var_mean(xs, correction=0)
        delta, total = mean - self.mean, self.count + n
        merged = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.mean = self.mean + delta * n / total
        self.var, self.count = merged / total, total
        self.std = (self.var * total / (total - 1)).float().sqrt()


@ON_EVERY_BACKEND
def test_trls_running_moments_say_the_same(backend, device):
    theirs, g = TrlRunningMoments(), torch.Generator().manual_seed(0)
    with running(backend):
        ours = rlkernel.RunningMoments(device)
        for n in (7, 30, 2, 100):
            x = torch.randn(n, generator=g).to(device) * 2 + 1
            theirs.update(x)
            out = ours.normalize(x, eps=torch.finfo(torch.float32).eps, eps_in="std")
            torch.testing.assert_close(ours.mean.float(), theirs.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(ours.std().float(), theirs.std, rtol=1e-6, atol=1e-6)
            expected = (x - theirs.mean) / (theirs.std + torch.finfo(torch.float32).eps)
            torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)
            scaled = ours.normalize(x, update=False, eps=0.0, shift_mean=False) - ours.mean.float()
            torch.testing.assert_close(scaled, (x - theirs.mean) / theirs.std, rtol=2e-6, atol=2e-6)


@ON_EVERY_BACKEND
def test_a_wrong_merge_would_be_seen(backend, device):
    """The mutant: a mean of the batches' variances, which is what one gets without the term of the means."""
    first, second = torch.full((50,), 1.0, device=device), torch.full((50,), 3.0, device=device)
    state = run(backend, second, run(backend, first, nothing(device)).state).state
    assert state.tolist() == [100.0, 2.0, 100.0]


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    inputs = make_inputs(4, 700, device=device)
    clean = run(backend, **inputs)
    dirty = run(backend, **inputs | {"x": torch.where(inputs["mask"], inputs["x"], torch.nan)})
    for name, a, b in zip(clean._fields, dirty, clean, strict=True):
        assert_equal(name, a, b)
    assert (clean.normalized[~inputs["mask"]] == 0).all()
    hidden = run(backend, **inputs | {"mask": torch.zeros_like(inputs["mask"])})
    assert_equal("state", hidden.state, inputs["state"])
    assert (hidden.normalized == 0).all()
    assert_equal("evaluation", run(backend, **inputs, update=False).state, inputs["state"])
    bounded = run(backend, **inputs, clip=0.5).normalized
    assert_equal("clip", bounded, clean.normalized.clamp(-0.5, 0.5))


@ON_EVERY_BACKEND
def test_equal_values_give_exactly_zero(backend, device):
    """Three times 0.1 is no multiple of it in fp64."""
    for n in (3, 10, 49):
        for dtype in (torch.float32, torch.float64) if backend == "reference" else (torch.float32,):
            x = torch.full((n,), 0.1, dtype=dtype, device=device)
            first = run(backend, x, nothing(device), eps=0.0)
            assert first.state[2] == 0 and not first.normalized.any()
            assert not run(backend, x, first.state, eps=0.0).normalized.any()


@ON_EVERY_BACKEND
def test_the_first_values(backend, device):
    """One value is its own mean; equal values deviate by exactly 0, also with eps = 0."""
    assert run(backend, torch.tensor([7.0], device=device), nothing(device)).normalized.tolist() == [0]
    same = torch.full((30,), 1000.1, device=device)
    out, state = run(backend, same, nothing(device), eps=0.0)
    assert (out == 0).all() and state[2] == 0
    out, state = run(backend, same, nothing(device), update=False)
    torch.testing.assert_close(out, same)
    assert state.tolist() == [0, 0, 0]
    empty = run(backend, same[:0], nothing(device))
    assert empty.normalized.shape == (0,) and empty.state.tolist() == [0, 0, 0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(0, 99))
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_how_it_is_cut_into_calls_does_not_matter(backend, sizes, seed):
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)) + 1000
    state = nothing()
    for part in x.split(sizes):
        state = run(backend, part, state).state
    torch.testing.assert_close(state, run(backend, x, nothing()).state, rtol=1e-12, atol=1e-12)


@ON_EVERY_BACKEND
def test_ranks_are_merged_in_their_order(backend, device):
    """What RunningMoments does with what it gathered."""
    parts = [make_inputs(50, seed=s, device=device)["x"] for s in range(3)]
    states = torch.stack([run(backend, x, nothing(device)).state for x in parts])
    got = run(backend, parts[0], states, update=False)
    for x in parts[1:]:
        assert_equal("state", run(backend, x, states, update=False).state, got.state)
    want = run(backend, torch.cat(parts), nothing(device)).state
    torch.testing.assert_close(got.state, want, rtol=1e-14, atol=1e-14)


def test_a_process_group():
    """A group of one rank takes the road of many."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        alone, ranked = rlkernel.RunningMoments(), rlkernel.RunningMoments(distributed=True)
        for seed in range(3):
            inputs = make_inputs(40, seed=seed)
            del inputs["state"]
            got = ranked.normalize(**inputs, clip=2.0)
            assert_equal("normalized", got, alone.normalize(**inputs, clip=2.0))
            assert_equal("state", ranked.state, alone.state)
    finally:
        torch.distributed.destroy_process_group()


def _normalize(rank, kind):
    """Two steps of unequal batches."""
    moments, found = rlkernel.RunningMoments(distributed=True), []
    for step in range(2):
        inputs = make_inputs(40 + 30 * rank, seed=10 * step + rank)
        found.append(moments.normalize(inputs["x"], inputs["mask"], clip=2.0))
        found.append(moments.state.clone())
    # an evaluation: its ranks have batches of their own number, and nobody waits for another one
    for step in range(rank + 1):
        found.append(moments.normalize(make_inputs(9, seed=70 + step)["x"], update=False, clip=2.0))
    found.append(moments.state.clone())
    return found


@ranks.pytestmark
def test_two_ranks(tmp_path):
    """The moments of all rewards, in the same bits on both ranks: merged in the order of the ranks."""
    one, two = ranks.run(_normalize, ["gloo"], tmp_path)["gloo"]
    state = torch.zeros(3, dtype=torch.float64)
    for step in range(2):
        both = [make_inputs(40 + 30 * rank, seed=10 * step + rank) for rank in range(2)]
        x, mask = (torch.cat([b[name].flatten() for b in both]) for name in ("x", "mask"))
        want, state = rlkernel.running_normalize(x, state, mask, clip=2.0)
        assert_equal("state", one[2 * step + 1], two[2 * step + 1])
        torch.testing.assert_close(one[2 * step + 1], state, rtol=1e-14, atol=0)
        got = torch.cat([found[2 * step].flatten() for found in (one, two)])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert state[0] > 150
    for rank, found in enumerate((one, two)):
        assert len(found) == 6 + rank
        assert_equal("state after an evaluation", found[-1], found[3])
        for step in range(rank + 1):
            x = make_inputs(9, seed=70 + step)["x"]
            want, _ = rlkernel.running_normalize(x, found[3], update=False, clip=2.0)
            assert_equal("evaluation", found[4 + step], want)


def test_state_dict():
    moments, address = rlkernel.RunningMoments(), None
    moments.update(torch.randn(20))
    other = rlkernel.RunningMoments()
    address = other.state.data_ptr()
    other.load_state_dict(moments.state_dict())
    assert_equal("state", other.state, moments.state)
    assert other.state.data_ptr() == address and other.count == 20
    with pytest.raises(
        ValueError, match=r"state_dict\['state'\] must be a tensor of shape \(3,\), got \(2,\)"
    ):
        other.load_state_dict({"state": torch.zeros(2)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, dtype=torch.int64)}, "x must be float16, .*, got int64"),
        ({"x": torch.zeros(3, requires_grad=True)}, "x must not require a gradient"),
        ({"mask": torch.ones(4)}, r"mask must have x's shape \(3,\), got \(4,\)"),
        ({"state": torch.zeros(3)}, r"state must be float64 of shape \(3,\) or \(R, 3\), got float32 \(3,\)"),
        ({"state": None}, "state must be a tensor, got NoneType"),
        ({"eps_in": "var"}, "eps_in must be one of 'variance', 'std', got 'var'"),
        ({"clip": 0.0}, "clip must be > 0, got 0.0"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.running_normalize(**{"x": torch.zeros(3), "state": nothing(), **change})


def test_debug_mode_names_the_value():
    x = torch.tensor([1.0, torch.nan])
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"x\[1\] must be finite .*, got nan"):
        rlkernel.running_normalize(x, nothing())


def test_compiles_without_a_graph_break():
    inputs = make_inputs(30)

    def step(x, state, mask):
        out, state = rlkernel.running_normalize(x, state, mask, clip=3.0)
        return out * 2, state

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(**inputs), step(**inputs), strict=True):
        assert_equal("compiled", a, b)


@pytest.mark.parametrize("update", [False, True])
def test_opcheck(update):
    from rlkernel.ops.running_normalize import op

    x, state, mask = make_inputs(30).values()
    call = RunningNormalizeCall(x, mask, state[None], update, True, True, 1e-8, "std", math.inf)
    torch.library.opcheck(op.node, op.flat(call))
