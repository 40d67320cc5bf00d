"""group_advantages: against fp64 written out by hand.  With verl and TRL: test_group_advantages_peers."""

import emulation
import pytest
import torch
from accuracy import check_rounded_once
from backends import INTERPRETED, of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel
from rlkernel import native
from rlkernel.calls.group_advantages import ESTIMATORS, UNGROUPED, GroupAdvantagesCall
from rlkernel.reference.group_advantages import make_inputs

BACKENDS = of("group_advantages")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
pytestmark = pytest.mark.usefixtures("poison")
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
    if estimator == "grpo_loo":
        others = [torch.cat([r[:i], r[i + 1 :]]) for i in range(n)]
        return torch.stack([
            (r[i] - x.mean()) / (x.std() + eps) if n > 2 else (r[i] - x.mean()) if n > 1 else r[i] * 0
            for i, x in enumerate(others)
        ])  # fmt: skip
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


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "grpo_passk", "remax"]
)
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
    check_rounded_once(estimator, got, expected)
    wide = rlkernel.group_advantages(r.double(), estimator=estimator, **groups, **extra)
    torch.testing.assert_close(wide, expected, rtol=1e-14, atol=1e-14)


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


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "grpo_passk"])
@ON_EVERY_BACKEND
def test_bits_of_a_group_depend_on_it_alone(backend, device, estimator):
    r = make_inputs(9, 13, device=device)["rewards"] + 1000
    extra = {k: v.view(9, 13) for k, v in extras(estimator, 117, device).items()}
    whole = run(backend, r, estimator=estimator, **extra)
    assert_equal("again", run(backend, r, estimator=estimator, **extra), whole)
    for rows in (slice(4, 5), slice(3, 9), torch.tensor([5, 0, 8])):
        part = run(backend, r[rows], estimator=estimator, **{k: v[rows] for k, v in extra.items()})
        assert_equal(str(rows), part, whole[rows])


@ON_EVERY_BACKEND
def test_a_group_without_a_token_is_as_one_of_equal_lengths(backend, device):
    """opo's mean over its tokens would be 0 / 0; one reward alone, and equal ones, give 0 all the same."""
    r = torch.tensor([3.0, 1.5, 0.1, 0.1, 0.1, 2.0, 5.0, 6.0, 1.0], device=device)
    starts = torch.tensor([0, 2, 5, 6, 9], device=device)
    lengths = torch.tensor([0, 0, 0, 0, 0, 0, 4, 0, 2], device=device)
    for singletons in ("zero", "reward"):
        options = {"group_offsets": starts, "estimator": "opo", "singletons": singletons}
        got = run(backend, r, lengths=lengths, **options)
        alike = run(backend, r, lengths=torch.where(lengths.cumsum(0) == 0, 7, lengths), **options)
        torch.testing.assert_close(got, alike, rtol=1e-6, atol=0)
        assert got[:2].tolist() == [0.75, -0.75] and got[2:5].tolist() == [0, 0, 0]
        assert got[5].item() == (2.0 if singletons == "reward" else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@ON_EVERY_BACKEND
def test_a_large_offset_costs_no_digits_and_equal_rewards_give_zero(backend, device, dtype):
    """E[r^2] - E[r]^2 in fp32 gave 150,024 here, and 61 for eight times 1000.1, in one library."""
    r = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3], dtype=dtype, device=device)
    skip_unless_able(backend, "group_advantages", r)
    torch.testing.assert_close(
        run(backend, r, group_size=4).double(), by_hand(r, "grpo"), rtol=1e-6, atol=1e-7
    )
    x = r.cpu()  # how much is lost is luck, and differs between devices
    naive = (x - x.mean()) / ((x.square().mean() - x.mean().square()).clamp(min=1e-6).sqrt())
    if dtype == torch.float32:
        assert (naive - by_hand(x, "grpo")).abs().max() > 1  # the mutant
    for value in (0.1, 1000.1, -3e30):
        same = torch.full((21,), value, dtype=dtype, device=device)
        for estimator in ("grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "grpo_passk", "gdpo"):
            for eps in (1e-4, 0.0):
                out = run(
                    backend, same, group_size=7, estimator=estimator, eps=eps, **extras(estimator, 21, device)
                )
                assert (out == 0).all(), (estimator, value)


@ON_EVERY_BACKEND
def test_reinforce_plus_plus_is_whitening(backend, device):
    r, lengths = torch.randn(10).to(device), torch.arange(1, 11, device=device)
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


@ON_EVERY_BACKEND
def test_any_ids(backend, device):
    """Any int64, unsorted, negative, huge, all of one hash bucket; groups of many lanes and tiles."""
    sizes = [1, 300, 2, 37, 129]
    ids = torch.tensor([2**62, -(2**63), -1, 2**63 - 1, 0]).repeat_interleave(torch.tensor(sizes))
    r = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(3)) + 1000
    expected = torch.cat([by_hand(x, "grpo") for x in r.split(sizes)])
    mixed = torch.randperm(len(r), generator=torch.Generator().manual_seed(4))
    got = run(backend, r[mixed].to(device), group_ids=ids[mixed].to(device)).cpu()
    torch.testing.assert_close(got.double(), expected[mixed], rtol=1e-6, atol=1e-7)
    apart = torch.arange(40) * 2**32
    alone = run(backend, torch.randn(40).to(device), group_ids=apart.to(device), singletons="reward")
    assert (alone != 0).all()
    narrow = run(backend, r[mixed][:50].to(device), group_ids=(mixed[:50] % 5).to(torch.int8).to(device))
    wide = run(backend, r[mixed][:50].to(device), group_ids=(mixed[:50] % 5).to(device))
    assert_equal("int8", narrow, wide)


@pytest.mark.parametrize("estimator", ["grpo", "gdpo", "grpo_passk"])
@ON_EVERY_BACKEND
def test_the_batchs_scale_over_many_chunks(backend, device, estimator):
    """Of several columns, with rewards that do not count."""
    g = torch.Generator().manual_seed(5)
    r = (torch.randn(2100, 2, generator=g) + 1000).to(device)
    mask = (torch.rand(2100, 2, generator=g) > 0.3).to(device)
    options = {"group_size": 350, "estimator": estimator, "scale_rewards": "batch", "mask": mask,
               "reward_weights": torch.tensor([1.0, 0.5], device=device)}  # fmt: skip
    expected = rlkernel.group_advantages(r.double(), **options)
    got = run(backend, torch.where(mask, r, torch.nan), **options)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_backend_has_every_estimator(estimator):
    """Forced, so that none can fall back; within one unit in the last place of the reference in fp64."""
    g = torch.Generator().manual_seed(6)
    r = torch.randn(60, generator=g) + 3
    mask = torch.rand(60, generator=g) > 0.2
    groups = {} if estimator in UNGROUPED else {"group_ids": torch.randint(0, 9, (60,), generator=g)}
    options = {"estimator": estimator, "mask": mask, **groups, **extras(estimator, 60)}
    if estimator == "gdpo":
        r, options["mask"] = torch.stack([r, r.sin()], 1), torch.stack([mask, mask], 1)
        options["reward_weights"] = torch.tensor([1.0, 0.3])
    for singletons in ("zero", "reward"):
        for unbiased in (True, False):
            more = {"singletons": singletons, "unbiased": unbiased}
            exact = rlkernel.group_advantages(r.double(), **options, **more)
            for backend, _ in (p.values for p in BACKENDS if INTERPRETED or p.values[0] != "triton"):
                got = run(backend, r, **options, **more)
                torch.testing.assert_close(got.double(), exact, rtol=3e-7, atol=3e-7, msg=backend)


def test_nan_stays_in_its_group():
    """Where nobody looked, as on a GPU outside debug mode."""
    from rlkernel import dispatch

    r = torch.rand(12, 1)
    r[5] = torch.nan
    for estimator in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk"):
        lengths = torch.ones(12) if estimator == "opo" else None
        for name in dispatch.BACKENDS:
            if rlkernel.explain("group_advantages", r)[name]:
                continue
            with rlkernel.use_backend(name):
                call = GroupAdvantagesCall(
                    r, None, None, 4, None, None, None, lengths, estimator, "group", True, 1e-4, "zero", 0.0,
                    "std",
                )  # fmt: skip
                out = dispatch.pick("group_advantages", r).forward(call).advantages
            assert out[4:8].isnan().all() and out[:4].isfinite().all() and out[8:].isfinite().all(), name


@ON_EVERY_BACKEND
def test_offsets_that_nobody_checked_stay_inside(backend, device):
    """On a GPU outside debug mode nobody reads them: they are bent into [0, N]."""
    from rlkernel.dispatch import pick

    if backend == "reference":
        pytest.skip("PyTorch checks its own indices")
    r = torch.rand(12, 1, device=device)
    offsets = torch.tensor([-5, 3, 2, 90], device=device)
    call = GroupAdvantagesCall(
        r, None, None, 1, offsets, None, None, None, "grpo", "group", True, 1e-4, "zero", 0.0, "std"
    )
    with running(backend):
        out = pick("group_advantages", r).forward(call).advantages
    assert out.shape == (12,)


def test_bits_do_not_depend_on_threads_or_schedule():
    r = torch.randn(4000, 8, generator=torch.Generator().manual_seed(7))
    threads = torch.get_num_threads()
    with rlkernel.use_backend("native"):
        expected = rlkernel.group_advantages(r)
        torch.set_num_threads(3)
        try:
            for _ in range(20):
                assert_equal("three threads", rlkernel.group_advantages(r), expected)
        finally:
            torch.set_num_threads(threads)
    few, ids, results = r[:30].flatten(), torch.arange(240) % 11, []
    for warp in (32, 64):
        module = emulation.module(warp)
        for seed, blocks in ((0, 1 << 20), (1, 3), (2, 1)):
            module.configure(seed, blocks)
            results.append(run(f"emulated-warp{warp}", few, group_ids=ids, scale_rewards="batch"))
        module.configure()
    for out in results[1:]:
        assert_equal("schedule", out, results[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "original, replacement",
    [
        (
            "const double d = reward - s.first, deviation = d - s.above;",
            "const double d = reward, deviation = d;",
        ),
        ("s.above = team.sum(s.above) / s.count;", "s.above = s.above / s.count;"),
        ("const bool starts = task == 0 || a.ends[task - 1] <= task;", "const bool starts = true;"),
        ("const double freedom = a.unbiased ? count - 1 : count;", "const double freedom = count;"),
    ],
)
def test_a_planted_fault_is_found(original, replacement):
    r = make_inputs(4, 50)["rewards"].flatten() + 1000
    ids = torch.arange(200) % 4
    broken = emulation.load(emulation.build_module(32, {"group_advantages/terms.h": (original, replacement)}))
    wrong = 0
    for seed in range(4):
        broken.configure(seed)
        with native.emulated(broken), rlkernel.use_backend("native"):
            got = rlkernel.group_advantages(r, group_ids=ids, mask=r > 1000.05)
        with rlkernel.use_backend("reference"):
            exact = rlkernel.group_advantages(r.double(), group_ids=ids, mask=r > 1000.05)
        wrong += not torch.allclose(got.double(), exact, rtol=1e-6, atol=1e-7)
    assert wrong


def test_compiles_without_a_graph_break():
    r = make_inputs(4, 5)["rewards"].view(-1)

    def step(r, ids):
        return rlkernel.group_advantages(r, group_ids=ids, estimator="rloo") * 2

    ids = torch.arange(20) % 4
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal("compiled", compiled(r, ids), step(r, ids))


@pytest.mark.parametrize("estimator", ["grpo", "opo", "gdpo"])
def test_opcheck(estimator):
    from rlkernel.ops.group_advantages import op

    r, each = make_inputs(20, 3)["rewards"], torch.rand(20)
    call = GroupAdvantagesCall(
        r, r > 0.1, torch.arange(20) % 4, 1, None, torch.ones(3), None, each, estimator, "group", True, 1e-4,
        "zero", 0.0, "std",
    )  # fmt: skip
    torch.library.opcheck(op.node, op.flat(call))
