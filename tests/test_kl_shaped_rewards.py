"""kl_shaped_rewards: against fp64 written out by hand, and the penalties of verl, SkyRL and OpenRLHF."""

import math
from typing import Optional, Union

import emulation
import pytest
import torch
from accuracy import check
from backends import of, running
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_sources import load

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.calls.kl_shaped_rewards import KL_ESTIMATORS, KlShapedRewardsCall
from rlkernel.reference import kl_shaped_rewards as reference

BACKENDS = of("kl_shaped_rewards")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
pytestmark = pytest.mark.usefixtures("poison")


def make_inputs(*shape, **options):
    inputs = reference.make_inputs(*shape, **options)
    del inputs["beta"]  # every test has its own
    return inputs


def run(backend, *tensors, **options):
    with running(backend):
        return rlkernel.kl_shaped_rewards(*tensors, **options)


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device, kl_estimator):
    inputs = make_inputs(5, 30, device=device)
    scores = torch.randn(5, 30, device=device)
    kl = verls_kl(kl_estimator)(inputs["logprobs"], inputs["ref_logprobs"])
    got = run(backend, **inputs | {"rewards": scores}, beta=0.3, kl_estimator=kl_estimator)
    mask = inputs["mask"]
    torch.testing.assert_close(got[mask], (scores - 0.3 * kl)[mask], rtol=1e-5, atol=1e-6)
    assert (got[~mask] == 0).all()


def verls_kl(kl_estimator):
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    return lambda new, ref: verl.kl_penalty(new, ref, kl_estimator)


def skyrls_kl(kl_estimator):
    source = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
    kl = load("skyrl", source, "compute_approx_kl", Optional=Optional).compute_approx_kl
    return lambda new, ref: kl(new, ref, kl_estimator_type=kl_estimator)


def openrlhfs_kl(kl_estimator):
    given = {"Optional": Optional, "Union": Union}
    kl = load("openrlhf", "openrlhf/models/utils.py", "compute_approx_kl", **given).compute_approx_kl
    return lambda new, ref: kl(new, ref, kl_estimator=kl_estimator)


# differences on either side of each bound, and what overflows without one
FAR = (
    -120.0,
    -20.5,
    -19.5,
    -10.5,
    -8.0,
    -2.4,
    -2.2,
    -0.5,
    0.0,
    0.5,
    4.4,
    4.6,
    9.5,
    10.5,
    11.5,
    19.5,
    20.5,
    120.0,
)
K3 = {"kl_input_clamp": 20.0, "kl_output_clamp": 10.0}


@pytest.mark.parametrize(
    "peer, kl_estimator, bounds",
    [(peer, name, K3 if name == "k3" else {}) for peer in (verls_kl, skyrls_kl) for name in KL_ESTIMATORS]
    + [(openrlhfs_kl, name, {"kl_output_clamp": 10.0}) for name in ("k1", "k2", "k3")],
)
@ON_EVERY_BACKEND
def test_peers_bounds(backend, device, peer, kl_estimator, bounds):
    new, ref = torch.tensor([FAR], device=device), torch.zeros(1, len(FAR), device=device)
    theirs = peer(kl_estimator)(new, ref)
    ours = -run(backend, torch.zeros_like(new), new, ref, beta=1.0, kl_estimator=kl_estimator, **bounds)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    if bounds:
        free = -run(backend, torch.zeros_like(new), new, ref, beta=1.0, kl_estimator=kl_estimator)
        assert theirs.abs().max() == 10 and free.max() > 100


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@ON_EVERY_BACKEND
def test_bounds(backend, device, kl_estimator):
    """Each alone and both, at ends of vectors and of chunks; NaN that counts shows, also behind them."""
    inputs = make_inputs(2, 2051, device=device)
    inputs["ref_logprobs"] = inputs["logprobs"] + torch.linspace(-3, 3, 2051, device=device)
    inputs["logprobs"][1, -1], inputs["mask"][1, -1] = torch.nan, True
    for bounds in ({"kl_input_clamp": 1.5}, {"kl_output_clamp": 0.7}, K3, {**K3, "kl_input_clamp": 0.25}):
        got = run(backend, **inputs, beta=0.3, kl_estimator=kl_estimator, **bounds)
        expected = by_hand(inputs, 0.3, kl_estimator, *map(bounds.get, K3))
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert got.isnan().sum() == 1


@ON_EVERY_BACKEND
def test_k3_keeps_its_digits(backend, device):
    """exp(d) - d - 1 in fp32 is 270 times too large at d = 1e-5, and can be negative."""
    d = torch.tensor([[1e-5, -1e-5, 1e-3, 0.0]], device=device)
    zeros = torch.zeros_like(d)
    got = -run(backend, zeros, d, zeros, beta=1.0, kl_estimator="k3")
    expected = torch.expm1(-d.double()) + d.double()
    assert (got >= 0).all()
    assert ((d.exp() - d - 1) - expected).abs().max() > (got - expected).abs().max()
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-12)


@ON_EVERY_BACKEND
def test_a_reward_per_sequence_goes_to_its_last_token(backend, device):
    inputs = make_inputs(4, 20, device=device)
    inputs["mask"][1], inputs["mask"][2, 12:] = False, False
    got = run(backend, **inputs, beta=0.1)
    penalty = run(backend, **inputs | {"rewards": torch.zeros(4, 20, device=device)}, beta=0.1)
    paid = (got - penalty).cpu()
    for i, kept in enumerate(inputs["mask"].cpu()):
        where = kept.nonzero()[-1:].flatten().tolist()
        torch.testing.assert_close(paid[i].sum(), inputs["rewards"][i].cpu() * len(where))
        assert paid[i].nonzero().flatten().tolist() == where
    lengths = [20, 3, 0, 7]
    tokens = {k: x for k, x in inputs.items() if k != "rewards"}
    flat = {k: torch.cat([x[i][:n] for i, n in enumerate(lengths)]) for k, x in tokens.items()}
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    packed = run(backend, inputs["rewards"], **flat, beta=0.1, cu_seqlens=offsets)
    for i, n in enumerate(lengths):
        alone = {k: x[i : i + 1, :n] for k, x in tokens.items()}
        expected = run(backend, inputs["rewards"][i : i + 1], **alone, beta=0.1)[0]
        assert_equal("packed", packed[offsets[i] : offsets[i + 1]], expected)


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    inputs = make_inputs(4, 20, device=device)
    clean = run(backend, **inputs, beta=0.1, kl_estimator="k3")
    for name in ("logprobs", "ref_logprobs"):
        inputs[name] = torch.where(inputs["mask"], inputs[name], torch.nan)
    assert_equal("dirty", run(backend, **inputs, beta=0.1, kl_estimator="k3"), clean)


@ON_EVERY_BACKEND
def test_feeds_gae(backend, device):
    inputs = make_inputs(3, 12, device=device)
    shaped = run(backend, **inputs, beta=0.05)
    returns = rlkernel.gae(shaped, torch.zeros_like(shaped), inputs["mask"], lam=1.0).returns
    first = inputs["mask"].int().argmax(1, keepdim=True)
    torch.testing.assert_close(returns.gather(1, first)[:, 0], shaped.sum(1), rtol=1e-6, atol=1e-6)


GOOD = {
    "rewards": torch.zeros(2),
    "logprobs": torch.zeros(2, 3),
    "ref_logprobs": torch.zeros(2, 3),
    "beta": 0.1,
}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"rewards": torch.zeros(3)},
            r"rewards must have logprobs' shape \(2, 3\) or one reward for each of 2 sequences, got \(3,\)",
        ),
        (
            {"ref_logprobs": torch.zeros(2, 4)},
            r"ref_logprobs must have logprobs' shape \(2, 3\), got \(2, 4\)",
        ),
        ({"logprobs": torch.zeros(2, 3, requires_grad=True)}, "logprobs must not require a gradient"),
        ({"mask": torch.ones(2)}, r"mask must have logprobs' shape \(2, 3\), got \(2,\)"),
        ({"beta": -0.1}, "beta must be >= 0 and finite, got -0.1"),
        ({"kl_input_clamp": 0.0}, "kl_input_clamp must be finite and > 0, got 0"),
        ({"kl_output_clamp": math.inf}, "kl_output_clamp must be finite and > 0, got inf"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of 'k1', 'abs', 'k2', 'k3', got 'k4'"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"logprobs must be \[N\] with cu_seqlens, got \(2, 3\)"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.kl_shaped_rewards(**{**GOOD, **change})


def by_hand(inputs, beta, kl_estimator, kl_input=None, kl_output=None):
    """In fp64, with the reward of each row at its last token that counts."""
    d = inputs["logprobs"].double() - inputs["ref_logprobs"].double()
    d = d if kl_input is None else d.clamp(-kl_input, kl_input)
    kl = {"k1": d, "abs": d.abs(), "k2": d * d / 2, "k3": torch.expm1(-d) + d}[kl_estimator]
    out = -beta * (kl if kl_output is None else kl.clamp(-kl_output, kl_output))
    for i, kept in enumerate(inputs["mask"]):
        if kept.any():
            out[i, kept.nonzero()[-1, 0]] += inputs["rewards"][i].double()
    return torch.where(inputs["mask"], out, 0)


# one token, a chunk of 2048 and its neighbours, three chunks with nothing that counts in the last of them
@pytest.mark.parametrize("length, tail", [(1, 0), (2047, 0), (2049, 1), (5000, 1500)])
@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, length, tail, kl_estimator):
    inputs = make_inputs(3, length, device=device)
    inputs["mask"][:, length - tail :] = False
    inputs["mask"][1, length // 2 :] = False
    got = run(backend, **inputs, beta=0.3, kl_estimator=kl_estimator)
    with rlkernel.use_backend("reference"):
        torchs = rlkernel.kl_shaped_rewards(**inputs, beta=0.3, kl_estimator=kl_estimator)
    check(kl_estimator, got, torchs, by_hand(inputs, 0.3, kl_estimator), magnitude=1)
    flat = {k: x if k == "rewards" else x.flatten() for k, x in inputs.items()}
    if length == 1:  # as many sequences as tokens: what is meant must be said
        flat["rewards"] = inputs["rewards"][:, None]
    offsets = torch.arange(0, 3 * length + 1, length, device=device, dtype=torch.int32)
    packed = run(backend, **flat, beta=0.3, kl_estimator=kl_estimator, cu_seqlens=offsets)
    assert_equal("packed", packed.view(3, length), got)


@ON_EVERY_BACKEND
def test_extreme_differences(backend, device):
    """exp overflows where torch's does; NaN and infinity that count show."""
    d = [-120.0, -88.7, -85.0, -20.0, 1e-7, 30.0, 200.0, torch.nan, torch.inf]
    new = torch.tensor([d], device=device)
    zeros = torch.zeros_like(new)
    got = -run(backend, zeros, new, zeros, beta=1.0, kl_estimator="k3")
    expected = torch.expm1(-new) + new
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@ON_EVERY_BACKEND
def test_without_a_weight_an_infinite_estimate_takes_nothing_away(backend, device, kl_estimator):
    logprobs = torch.tensor([[-100.0, -1.0, -2.0]], device=device)
    ref_logprobs = torch.tensor([[-0.5, -torch.inf, -3.0]], device=device)
    for rewards, want in (([[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]]), ([4.0], [[0.0, 0.0, 4.0]])):
        tensors = torch.tensor(rewards, device=device), logprobs, ref_logprobs
        got = run(backend, *tensors, beta=0.0, kl_estimator=kl_estimator)
        assert got.tolist() == want


@ON_EVERY_BACKEND
def test_bits_of_a_sequence_depend_on_it_alone(backend, device):
    inputs = make_inputs(5, 2100, device=device)
    whole = run(backend, **inputs, beta=0.1, kl_estimator="k3")
    assert_equal("again", run(backend, **inputs, beta=0.1, kl_estimator="k3"), whole)
    order = torch.tensor([3, 1, 4, 0, 2], device=device)
    for index in (order, slice(2, 3)):
        part = run(backend, **{k: x[index] for k, x in inputs.items()}, beta=0.1, kl_estimator="k3")
        assert_equal(str(index), part, whole[index])
    views = {k: torch.cat([x, x], 1)[:, :2100] if x.dim() == 2 else x for k, x in inputs.items()}
    assert_equal("view", run(backend, **views, beta=0.1, kl_estimator="k3"), whole)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    kl_estimator=st.sampled_from(KL_ESTIMATORS),
)
@pytest.mark.parametrize("backend", ["native", "reference", "emulated-warp32"])
def test_any_lengths_and_masks(backend, lengths, seed, masked, kl_estimator):
    inputs = make_inputs(len(lengths), 40, seed=seed, masked=masked)
    for name in ("logprobs", "ref_logprobs"):
        inputs[name] = torch.where(inputs["mask"], inputs[name], torch.nan)
    flat = {
        k: x if k == "rewards" else torch.cat([x[i, :n] for i, n in enumerate(lengths)])
        for k, x in inputs.items()
    }
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    got = run(backend, **flat, beta=0.2, kl_estimator=kl_estimator, cu_seqlens=offsets).split(lengths)
    for i, n in enumerate(lengths):
        alone = {k: x[i : i + 1] if k == "rewards" else x[i : i + 1, :n] for k, x in inputs.items()}
        torch.testing.assert_close(
            got[i].double(), by_hand(alone, 0.2, kl_estimator)[0], rtol=1e-5, atol=1e-7
        )


def test_bits_do_not_depend_on_the_schedule():
    inputs, results = make_inputs(2, 4500), []
    for warp in (32, 64):
        module = emulation.module(warp)
        for seed, blocks in ((0, 1 << 20), (1, 2), (2, 1)):
            module.configure(seed, blocks)
            results.append(run(f"emulated-warp{warp}", **inputs, beta=0.1, kl_estimator="k3"))
        module.configure()
    for out in results[1:]:
        assert_equal("schedule", out, results[0])


def test_fp64_stays_fp64():
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in make_inputs(2, 9).items()}
    got = rlkernel.kl_shaped_rewards(**inputs, beta=0.1, kl_estimator="k3")
    torch.testing.assert_close(got, by_hand(inputs, 0.1, "k3"), rtol=1e-14, atol=1e-14)
    with pytest.raises(NotImplementedError, match="native: .*must be at most fp32, got float64"):
        run("native", **inputs, beta=0.1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_a_graph_break(dynamic):
    """Where all is dynamic, numbers are symbols."""
    inputs = make_inputs(3, 20)
    torch._dynamo.reset()

    def step(clamp, rewards, logprobs, ref_logprobs, mask):
        return rlkernel.kl_shaped_rewards(
            rewards, logprobs, ref_logprobs, mask, beta=0.1, kl_input_clamp=clamp, kl_output_clamp=clamp
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for clamp in (0.5, 0.25, None):
        assert_equal("compiled", compiled(clamp, **inputs), step(clamp, **inputs))


def test_opcheck():
    from rlkernel.ops.kl_shaped_rewards import op

    inputs = make_inputs(3, 20)
    call = KlShapedRewardsCall(*inputs.values(), 0.1, "k3", 20.0, math.inf, True, None)
    torch.library.opcheck(op.node, op.flat(call))
    flat = [x.reshape(-1) for x in list(inputs.values())[1:]]
    offsets = torch.tensor([0, 20, 25, 60])
    call = KlShapedRewardsCall(flat[0], *flat, 0.1, "k1", math.inf, 10.0, False, offsets)
    torch.library.opcheck(op.node, op.flat(call))
