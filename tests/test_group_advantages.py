"""group_advantages: against fp64 written out by hand, verl's own functions and TRL's formulas."""

import pytest
import torch
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.ops.group_advantages import ESTIMATORS, UNGROUPED
from rlkernel.reference.group_advantages import make_inputs

BACKENDS = of("group_advantages")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
GROUPED = [e for e in ESTIMATORS if e not in UNGROUPED]


def run(backend, rewards, **options):
    with running(backend):
        return rlkernel.group_advantages(rewards, **options)


def extras(estimator, n, device="cpu"):
    """What an estimator needs beside rewards."""
    g = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 50, (n,), generator=g).to(device)
    return {"opo": {"lengths": lengths}, "remax": {"baselines": torch.rand(n, generator=g).to(device)}}.get(
        estimator, {}
    )


def by_hand(r, estimator, eps=1e-4, lengths=None, baselines=None):
    """One group, in fp64, as the papers write it."""
    r = r.double()
    n, mean = len(r), r.mean()
    std = r.std() if n > 1 else torch.zeros(())
    if estimator in ("grpo", "gdpo"):
        return (r - mean) / (std + eps)
    if estimator == "rloo":
        return r - (r.sum() - r) / (n - 1) if n > 1 else r * 0
    if estimator == "opo":
        return r - (lengths * r).sum() / lengths.sum()
    if estimator == "maxrl":
        return (r - mean) / (mean + eps)
    if estimator == "grpo_passk":
        top = r.topk(2) if n > 1 else None
        out = torch.zeros_like(r)
        if top is not None:
            out[r.argmax()] = (top.values[0] - top.values[1]) / (std + eps)
        return out
    return r - (baselines if estimator == "remax" else mean)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk", "remax"])
@ON_EVERY_BACKEND
def test_matches_the_papers(backend, device, estimator):
    sizes = [4, 1, 7, 2, 33]
    n = sum(sizes)
    r = torch.randn(n, generator=torch.Generator().manual_seed(1)).to(device) + 2
    extra = extras(estimator, n, device)
    parts = [{k: v.split(sizes)[i] for k, v in extra.items()} for i in range(len(sizes))]
    expected = torch.cat([by_hand(x, estimator, **p) for x, p in zip(r.split(sizes), parts, strict=True)])
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0)
    groups = {} if estimator == "remax" else {"group_offsets": offsets}
    got = run(backend, r, estimator=estimator, **groups, **extra)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7)
    wide = rlkernel.group_advantages(r.double(), estimator=estimator, **groups, **extra)
    torch.testing.assert_close(wide, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", GROUPED)
@ON_EVERY_BACKEND
def test_every_way_of_naming_groups_is_the_same(backend, device, estimator):
    r = make_inputs(6, 5, device=device)["rewards"]
    extra = extras(estimator, 30, device)
    flat = r.view(-1)
    ids = torch.arange(6, device=device).repeat_interleave(5)
    rows = run(backend, r, estimator=estimator, **{k: v.view(6, 5) for k, v in extra.items()}).view(-1)
    offsets = torch.arange(0, 31, 5, device=device)
    assert_equal("size", run(backend, flat, group_size=5, estimator=estimator, **extra), rows)
    assert_equal("offsets", run(backend, flat, group_offsets=offsets, estimator=estimator, **extra), rows)
    assert_equal("ids", run(backend, flat, group_ids=7 - 3 * ids, estimator=estimator, **extra), rows)
    mixed = torch.randperm(30, generator=torch.Generator().manual_seed(2)).to(device)
    scattered = run(backend, flat[mixed], group_ids=ids[mixed], estimator=estimator,
                    **{k: v[mixed] for k, v in extra.items()})  # fmt: skip
    torch.testing.assert_close(scattered, rows[mixed], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk"])
@ON_EVERY_BACKEND
def test_bits_of_a_group_depend_on_it_alone(backend, device, estimator):
    r = make_inputs(9, 13, device=device)["rewards"] + 1000
    extra = {k: v.view(9, 13) for k, v in extras(estimator, 117, device).items()}
    whole = run(backend, r, estimator=estimator, **extra)
    assert_equal("again", run(backend, r, estimator=estimator, **extra), whole)
    for rows in (slice(4, 5), slice(3, 9), torch.tensor([5, 0, 8])):
        part = run(backend, r[rows], estimator=estimator, **{k: v[rows] for k, v in extra.items()})
        assert_equal(str(rows), part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@ON_EVERY_BACKEND
def test_a_large_offset_costs_no_digits_and_equal_rewards_give_zero(backend, device, dtype):
    """E[r^2] - E[r]^2 in fp32 gave 150,024 here, and 61 for eight times 1000.1, in one library."""
    r = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3], dtype=dtype, device=device)
    skip_unless_able(backend, "group_advantages", r)
    torch.testing.assert_close(
        run(backend, r, group_size=4).double(), by_hand(r, "grpo"), rtol=1e-6, atol=1e-7
    )
    naive = (r - r.mean()) / ((r.square().mean() - r.mean().square()).clamp(min=1e-6).sqrt())
    if dtype == torch.float32:
        assert (naive - by_hand(r, "grpo")).abs().max() > 1  # the mutant
    for value in (0.1, 1000.1, -3e30):
        same = torch.full((21,), value, dtype=dtype, device=device)
        for estimator in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk", "gdpo"):
            for eps in (1e-4, 0.0):
                out = run(
                    backend, same, group_size=7, estimator=estimator, eps=eps, **extras(estimator, 21, device)
                )
                assert (out == 0).all(), (estimator, value)


@pytest.fixture(scope="module")
def verl():
    try:
        return _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(str(reason))


def for_verl(n, tokens=6):
    """Scores as verl has them: a reward at the last token of responses of several lengths."""
    g = torch.Generator().manual_seed(n)
    r = torch.randn(n, generator=g) + 1
    lengths = torch.randint(1, tokens + 1, (n,), generator=g)
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    scores = torch.zeros(n, tokens)
    scores[torch.arange(n), lengths - 1] = r
    ids = torch.tensor([0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1])
    return r, lengths, mask, scores, ids


VERL = {"eps": 1e-6, "singletons": "reward"}


@pytest.mark.parametrize(
    "function, options",
    [
        ("compute_grpo_outcome_advantage", {"estimator": "grpo"}),
        ("compute_grpo_vectorized_outcome_advantage", {"estimator": "grpo"}),
        ("compute_grpo_outcome_advantage", {"estimator": "dr_grpo"}),
        ("compute_rloo_outcome_advantage", {"estimator": "rloo"}),
        ("compute_rloo_vectorized_outcome_advantage", {"estimator": "rloo", "singletons": "zero"}),
        ("compute_opo_outcome_advantage", {"estimator": "opo"}),
        (
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            {"estimator": "reinforce_plus_plus_baseline"},
        ),
        ("compute_gdpo_outcome_advantage", {"estimator": "gdpo"}),
    ],
)
@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device, verl, function, options):
    r, lengths, mask, scores, ids = for_verl(12)
    more = {"norm_adv_by_std_in_grpo": False} if options["estimator"] == "dr_grpo" else {}
    expected, _ = getattr(verl, function)(scores, mask, ids.numpy(), **more)
    whitens = options["estimator"] in ("gdpo", "reinforce_plus_plus_baseline")
    extra = {"lengths": lengths} if whitens or options["estimator"] == "opo" else {}
    if options["estimator"] == "gdpo":
        extra["reward_weights"], r = torch.ones(1), r[:, None]
    ours = run(backend, r, group_ids=ids, **(VERL | options), **extra)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=2e-5, atol=2e-5)


@ON_EVERY_BACKEND
def test_verl_says_the_same_of_passk_and_remax(backend, device, verl):
    r, _, mask, scores, ids = for_verl(12)
    ids[8] = 0  # verl refuses groups of one
    for scaled in (True, False):
        config = {"norm_adv_by_std_in_grpo": scaled}
        expected, _ = verl.compute_grpo_passk_outcome_advantage(scores, mask, ids.numpy(), config=config)
        scale = "group" if scaled else "none"
        ours = run(backend, r, group_ids=ids, estimator="grpo_passk", scale_rewards=scale, eps=1e-6)
        torch.testing.assert_close(ours[:, None] * mask, expected, rtol=2e-5, atol=2e-5)
    baselines = torch.rand(12)
    expected, _ = verl.compute_remax_outcome_advantage(scores, baselines, mask)
    ours = run(backend, r, estimator="remax", baselines=baselines)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=2e-5, atol=2e-5)


def trl_nanstd(x, **dims):
    count = (~x.isnan()).sum(**dims)
    mean = x.nanmean(**dims, keepdim=True) if dims else x.nanmean()
    return ((x - mean).square().nansum(**dims) / (count - 1)).sqrt()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@ON_EVERY_BACKEND
def test_trl_says_the_same(backend, device, scale):
    """GRPOTrainer's own sequence, with rewards that no function gave (NaN there, a mask here)."""
    r = make_inputs(5, 4, seed=3)["rewards"]
    r[1, 2], r[3, 0] = torch.nan, torch.nan
    std = trl_nanstd(r, dim=1)[:, None] if scale == "group" else trl_nanstd(r)
    expected = r - r.nanmean(1, keepdim=True)
    expected = (expected if scale == "none" else expected / (std + 1e-4)).nan_to_num(nan=0.0)
    ours = run(backend, r, mask=~r.isnan(), scale_rewards=scale)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    others = (r.nansum(1, keepdim=True) - r) / ((~r.isnan()).sum(1, keepdim=True) - 1)
    rloo = run(backend, r, mask=~r.isnan(), estimator="rloo")
    torch.testing.assert_close(rloo, (r - others).nan_to_num(nan=0.0), rtol=1e-4, atol=1e-5)


@ON_EVERY_BACKEND
def test_trls_gdpo_says_the_same(backend, device):
    """multi_objective_aggregation="normalize_then_sum"."""
    r = torch.stack([make_inputs(5, 4, seed=s)["rewards"] for s in (1, 2, 3)], -1)
    r[0, 1], r[2, 2, 0], r[4, 3, 1] = torch.nan, torch.nan, torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0])
    each = (r - r.nanmean(1, keepdim=True)) / (trl_nanstd(r, dim=1)[:, None] + 1e-4)
    total = torch.where(r.isnan().all(-1), torch.nan, (each * weights).nansum(-1))
    expected = ((total - total.nanmean()) / (trl_nanstd(total) + 1e-4)).nan_to_num(nan=0.0)
    ours = run(backend, r, mask=~r.isnan(), reward_weights=weights, estimator="gdpo", batch_eps=1e-4,
               batch_eps_in="std")  # fmt: skip
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@ON_EVERY_BACKEND
def test_reinforce_plus_plus_is_whitening(backend, device):
    r, lengths = torch.randn(10), torch.arange(1, 11)
    assert_equal("whiten", run(backend, r, estimator="reinforce_plus_plus"), rlkernel.whiten(r))
    tokens = r.repeat_interleave(lengths)
    ours = run(backend, r, estimator="reinforce_plus_plus", lengths=lengths)
    torch.testing.assert_close(ours.repeat_interleave(lengths), rlkernel.whiten(tokens), rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo", "maxrl", "grpo_passk"]),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_what_is_masked_might_as_well_not_be_there(sizes, estimator, seed, masked):
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(sum(sizes), generator=g) + 3
    mask = torch.rand(len(r), generator=g) >= masked
    dirty = torch.where(mask, r, torch.nan)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    out = rlkernel.group_advantages(dirty, group_offsets=offsets, estimator=estimator, mask=mask)
    assert (out[~mask] == 0).all()
    for x, kept, got in zip(r.split(sizes), mask.split(sizes), out.split(sizes), strict=True):
        expected = by_hand(x[kept], estimator)
        torch.testing.assert_close(got[kept].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": [1.0]}, "rewards must be a tensor, got list"),
        ({"rewards": torch.zeros(2, 2, 2)}, r"rewards must be \[N\] or \[G, S\], got \(2, 2, 2\)"),
        ({"estimator": "gropo"}, "estimator must be one of 'grpo', 'dr_grpo', .*, got 'gropo'"),
        ({"scale_rewards": "std"}, "scale_rewards must be one of 'group', 'batch', 'none', got 'std'"),
        ({"singletons": "one"}, "singletons must be one of 'zero', 'reward', got 'one'"),
        ({"group_size": 4}, "group_size must divide the 6 rewards, got 4"),
        ({"group_size": 0}, "group_size must be an integer >= 1, got 0"),
        ({"group_size": None}, "groups must be named by one of .*, got none"),
        ({"group_ids": torch.zeros(6)}, "groups must be named by one of .*, got group_ids, group_size"),
        ({"group_size": None, "group_ids": torch.zeros(6)}, "group_ids must be integers, got float32"),
        (
            {"group_size": None, "group_ids": torch.zeros(5).long()},
            r"group_ids must have one value .* got \(5,\)",
        ),
        ({"group_size": None, "group_offsets": torch.tensor([0, 5])}, "group_offsets must go from 0 to 6"),
        ({"estimator": "opo"}, "lengths must be given with estimator='opo', got None"),
        ({"estimator": "remax"}, "baselines must be given with estimator='remax', got NoneType"),
        ({"baselines": torch.zeros(6)}, "baselines must be None without estimator='remax', got Tensor"),
        ({"reward_weights": torch.ones(2)}, r"reward_weights must be \[K\] for rewards .*, got \(2,\)"),
        ({"eps": -1.0}, "eps must be >= 0 and finite, got -1.0"),
        ({"rewards": torch.tensor([0, 1, 2, torch.nan, 4, 5])}, r"rewards\[3\] must be finite .*, got nan"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.group_advantages(**{"rewards": torch.zeros(6), "group_size": 3, **change})


def test_nothing():
    for estimator in ESTIMATORS:
        out = rlkernel.group_advantages(torch.zeros(0), group_ids=torch.zeros(0).long(), estimator=estimator,
                                        **extras(estimator, 0))  # fmt: skip
        assert out.shape == (0,)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    r = make_inputs(4, 5)["rewards"].view(-1)

    def step(r, ids):
        return rlkernel.group_advantages(r, group_ids=ids, estimator="rloo") * 2

    ids = torch.arange(20) % 4
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal("compiled", compiled(r, ids), step(r, ids))
