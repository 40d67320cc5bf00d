"""policy_loss: one body of tests for every backend, against fp64; its peers have a file of their own."""

import itertools
import math

import pytest
import torch
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_cases import NEEDS, check_against_fp64, run, to

import rlkernel
from rlkernel import RolloutCorrection
from rlkernel.calls.policy_loss import (
    KL_WEIGHTS,
    LEVELS,
    POLICY_METRICS,
)
from rlkernel.ops.policy_loss import rule as names
from rlkernel.reference.policy_loss import make_inputs
from rlkernel.runtime import debug

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
pytestmark = pytest.mark.usefixtures("poison")

EXTRAS = {"beta": 0.1, "entropy_coef": 0.01, "correction": "icepop"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", names.LOSS_TYPES)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, loss_type, level):
    for per_token, extras in ((True, False), (False, True)):
        inputs = make_inputs(4, 75, device=device, per_token=per_token, extras=extras)
        modes = ("token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean")  # a unit each
        for mode in modes[2 if extras else 0 :: 2] if is_slow(backend, device) else modes:
            options = {"loss_type": loss_type, "importance_sampling_level": level, "loss_agg_mode": mode}
            options |= NEEDS.get(loss_type, {}) | (EXTRAS if extras else {})
            check_against_fp64(backend, inputs, **options)


@pytest.mark.parametrize("weight", [False, *KL_WEIGHTS[1:]])
@ON_EVERY_BACKEND
def test_bounded_kl_matches_fp64(backend, device, weight):
    """Some tokens beyond each bound, and all that the KL may be multiplied by, at a ratio of the sequence."""
    inputs = make_inputs(3, 40, device=device, extras=True)
    inputs["rollout_logprobs"][0, :2] = torch.tensor([torch.nan, -2000.0])  # no logprob; a ratio of infinity
    inputs["mask"][0, :2] = True
    difference = (inputs["logprobs"] - inputs["ref_logprobs"])[inputs["mask"]].abs()
    assert 0.1 < (difference > 0.4).double().mean() < 0.9
    assert ((difference < 0.4) & (difference**2 / 2 > 0.05)).double().mean() > 0.02
    correction = RolloutCorrection("none") if weight != "rollout" else None
    for estimator in ("k1", "k2", "k3", "k3+"):
        options = {"beta": 0.3, "kl_estimator": estimator, "use_bias_correction_kl": weight}
        options |= {"kl_input_clamp": 0.4, "kl_output_clamp": 0.05, "correction": correction}
        check_against_fp64(backend, inputs, importance_sampling_level="sequence", **options)


@ON_EVERY_BACKEND
def test_token_counts_match_fp64(backend, device):
    """Sequences of one prompt share a mean; also in parts, and packed."""
    inputs = make_inputs(6, 50, device=device, extras=True)
    inputs["mask"][2] = False
    own = inputs["mask"].sum(-1)
    counts = own.view(3, 2).sum(-1).repeat_interleave(2).float()
    options = EXTRAS | {"loss_agg_mode": "seq-mean-token-mean", "num_items_in_batch": 3}
    whole = check_against_fp64(backend, inputs | {"token_counts": counts}, **options)
    terms = run("reference", to(inputs, torch.float64), **(EXTRAS | {"loss_agg_mode": "token-sum"}))[2]
    by_hand = terms / (counts.double()[:, None] * 3)
    torch.testing.assert_close(whole[2], by_hand, rtol=1e-14, atol=1e-16)
    parts = [
        run(backend, {k: v[a:b] for k, v in (inputs | {"token_counts": counts}).items()}, **options)
        for a, b in ((0, 1), (1, 6))
    ]
    assert_equal(
        "in parts",
        torch.cat([p[2] for p in parts]),
        run(backend, inputs | {"token_counts": counts}, **options)[2],
    )
    flat = {k: v.flatten() for k, v in inputs.items() if k != "advantages"}
    flat["advantages"] = inputs["advantages"].flatten()
    offsets = torch.arange(0, 301, 50, device=device)
    packed = run(backend, flat | {"token_counts": counts, "cu_seqlens": offsets}, **options)
    assert_equal("packed", packed[2].view(6, 50), torch.cat([p[2] for p in parts]))


COUNTED = {"loss_agg_mode": "seq-mean-token-mean", "num_items_in_batch": 3}


@pytest.mark.parametrize("packed", [False, True])
@ON_EVERY_BACKEND
def test_token_counts_that_are_none_are_refused(backend, device, packed, monkeypatch):
    """0 is one where no token is: of a prompt all of whose samples the mask hides."""
    inputs = make_inputs(3, 20, device=device)
    inputs["mask"][1] = False
    if packed:
        inputs = {k: v.flatten() for k, v in inputs.items()}
        inputs["cu_seqlens"] = torch.tensor([0, 20, 40, 57], device=device)  # and padding

    def loss(*counts):
        return run(backend, inputs | {"token_counts": torch.tensor(counts, device=device)}, **COUNTED)[0]

    wrong = [(0, bad, ">= 1 and finite") for bad in (0.0, 0.5, -3.0, math.nan, math.inf)]
    wrong += [(1, bad, "0 or >= 1, and finite") for bad in (0.5, -3.0, math.nan, math.inf)]
    wanted = loss(20.0, 1.0, 1.0)
    with debug.checks():
        assert_equal("a prompt without a token", loss(20.0, 0.0, 1.0), wanted)
        for place, bad, want in wrong:
            counts = [20.0, 20.0, 20.0]
            counts[place] = bad
            with pytest.raises(ValueError, match=rf"^token_counts\[{place}\] must be {want}, got {bad}$"):
                loss(*counts)
    monkeypatch.setattr(debug, "may_read", lambda x: False)  # as of a tensor on a GPU
    assert_equal("unread", loss(20.0, 0.0, 0.0), wanted)
    for bad in (-3.0, math.nan, math.inf):
        assert loss(20.0, 20.0, bad).isnan()


@pytest.mark.parametrize("estimator", names.KL)
@ON_EVERY_BACKEND
def test_kl_estimators_match_fp64(backend, device, estimator):
    inputs = make_inputs(3, 40, device=device, extras=True)
    del inputs["rollout_logprobs"]
    for times_ratio in (False, True):
        options = {"beta": 0.3, "kl_estimator": estimator, "use_bias_correction_kl": times_ratio}
        check_against_fp64(backend, inputs, **options)


@ON_EVERY_BACKEND
def test_clips_match_fp64(backend, device):
    inputs = make_inputs(4, 64, device=device, drift=0.8)
    for delta, dual, bound in itertools.product((None, 1.6), (None, 2.5), (None, 0.7)):
        options = {"delta": delta, "clip_ratio_c": dual, "log_ratio_clip": bound, "epsilon_high": 0.28}
        check_against_fp64(backend, inputs, **options)
        check_against_fp64(backend, inputs, importance_sampling_level="sequence", **options)


@ON_EVERY_BACKEND
def test_a_delta_below_the_upper_bound_has_the_gradient_of_the_bound_that_holds(backend, device):
    """Between the two, where A < 0, the loss is ``-r A``, which is not flat."""
    inputs = make_inputs(4, 40, device=device, drift=0.4)
    for delta, level in itertools.product((0.7, 1.0, 1.1), LEVELS):
        check_against_fp64(backend, inputs, delta=delta, importance_sampling_level=level)
    between = {"logprobs": 0.1, "old_logprobs": 0.0, "advantages": -1.0, "mask": True}
    between = {k: torch.full((1, 1), x, device=device) for k, x in between.items()}
    _, _, grad = run(backend, between, delta=1.0)
    torch.testing.assert_close(grad.item(), math.exp(0.1))


@ON_EVERY_BACKEND
def test_packed_is_padded(backend, device):
    inputs = make_inputs(5, 33, device=device, extras=True, per_token=False)
    lengths = torch.tensor([33, 0, 1, 20, 33], device=device)
    inside = torch.arange(33, device=device) < lengths[:, None]
    inputs["mask"] &= inside
    packed = {k: v[inside] if v.dim() == 2 else v for k, v in inputs.items()}
    packed["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    for level, mode in itertools.product(LEVELS, ("token-mean", "seq-mean-token-mean")):
        options = EXTRAS | {"importance_sampling_level": level, "loss_agg_mode": mode}
        a, b = run(backend, inputs, **options), run(backend, packed, **options)
        for name, x, y in zip(("loss", "metrics", "grad", "grad_entropy"), a, b, strict=True):
            x = x[inside] if x.dim() == 2 else x
            if backend == "reference":  # PyTorch's sums follow the shape
                torch.testing.assert_close(y, x, rtol=1e-7, atol=1e-7)
            else:
                assert_equal(name, y, x)


@ON_EVERY_BACKEND
def test_what_the_mask_hides_is_never_read(backend, device):
    inputs = make_inputs(4, 50, device=device, extras=True)
    inputs["mask"][2] = False  # a sequence without a token
    clean = run(backend, inputs, importance_sampling_level="sequence", **EXTRAS)
    for poison in (torch.nan, torch.inf, -torch.inf):
        dirty = {
            k: torch.where(inputs["mask"], v, poison) if v.is_floating_point() else v
            for k, v in inputs.items()
        }
        for got, want in zip(
            run(backend, dirty, importance_sampling_level="sequence", **EXTRAS), clean, strict=True
        ):
            assert_equal(str(poison), got, want)
            assert bool(got.isfinite().all())
    assert not bool(clean[2][~inputs["mask"]].any())


@ON_EVERY_BACKEND
def test_a_batch_without_a_token_gives_a_connected_zero(backend, device):
    for shape in ((3, 7), (2, 0), (0, 5)):
        inputs = make_inputs(3, 7, device=device, extras=True)
        inputs = {k: v[: shape[0], : shape[1]] for k, v in inputs.items()}
        inputs["mask"] = torch.zeros(shape, dtype=torch.bool, device=device)
        for mode in names.AGGREGATIONS:
            loss, metrics, grad, _ = run(backend, inputs, loss_agg_mode=mode, **EXTRAS)
            assert loss.item() == 0 and not bool(grad.any()) and not bool(metrics.any())


@pytest.mark.parametrize("length", [1, 70_000])
@ON_EVERY_BACKEND
def test_lengths(backend, device, length):
    if is_slow(backend, device) and backend != "emulated-warp32":
        length = min(length, 3000)
    inputs = make_inputs(1, length, device=device)
    check_against_fp64(backend, inputs, importance_sampling_level="sequence")


@pytest.mark.parametrize("level", LEVELS)
@ON_EVERY_BACKEND
def test_bits_depend_on_the_sequence_alone(backend, device, level):
    inputs = make_inputs(7, 300, device=device, extras=True)
    options = EXTRAS | {"importance_sampling_level": level, "loss_agg_mode": "token-sum"}
    whole = run(backend, inputs, **options)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3], device=device)
    for rows in (order, order[:3], order[2:3]):
        part = run(backend, {k: v[rows] for k, v in inputs.items()}, **options)
        assert_equal("grad", part[2], whole[2][rows])
        assert_equal("grad_entropy", part[3], whole[3][rows])
    for _ in range(3 if is_slow(backend, device) else 100):
        for got, want in zip(run(backend, inputs, **options), whole, strict=True):
            assert_equal("again", got, want)


def test_bits_do_not_depend_on_threads():
    inputs = make_inputs(16, 3000, extras=True)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(run("native", inputs, **EXTRAS))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert_equal("threads", a, b)


@pytest.mark.parametrize("level", LEVELS)
@ON_EVERY_BACKEND
def test_bits_do_not_depend_on_the_padding(backend, device, level):
    """The gradient of a sequence in a wider batch is its own, wherever its end cuts a vector."""
    if backend == "reference":
        pytest.skip("the reference promises no bits")
    lengths = (43, 17, 130) if is_slow(backend, device) else (*range(1, 80), 1030)
    inputs = make_inputs(len(lengths), max(lengths) + 5, device=device)
    inputs["mask"] = (
        torch.arange(max(lengths) + 5, device=device) < torch.tensor(lengths, device=device)[:, None]
    )
    options = {"importance_sampling_level": level, "loss_agg_mode": "token-sum", "epsilon": 0.9}
    wide = run(backend, inputs, **options)[-1]
    for row, n in enumerate(lengths):
        cut = {
            k: x[row : row + 1, :n].contiguous() if x.dim() > 1 else x[row : row + 1]
            for k, x in inputs.items()
        }
        assert_equal(f"{n} tokens", run(backend, cut, **options)[-1][0], wide[row, :n])


MUTANTS = {
    "the gradient of a clipped token": (
        "policy_loss/terms.h", "keep(not_(frozen), -x.ratio * x.advantage)", "-x.ratio * x.advantage",
    ),
    "a mask that multiplies": (
        "policy_loss/sequence.h", "x.logprob = keep(inside, at.load(p.logprobs))",
        "x.logprob = at.load(p.logprobs) * keep(inside, one)",
    ),
    "the share of a sequence": ("policy_loss/sequence.h", "static_cast<float>(1 / divisor) :", "1.0f :"),
    "a weight without effect": ("policy_loss/sequence.h", "keep(w.kept, t.chain * w.weight)", "t.chain"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant):
    import emulation

    from rlkernel import native

    header, *change = MUTANTS[mutant]
    module = emulation.load(emulation.build_module(32, {header: tuple(change)}))
    inputs = make_inputs(3, 40, extras=True, drift=0.6)
    inputs["logprobs"][~inputs["mask"]] = torch.nan
    with native.emulated(module), pytest.raises(AssertionError):
        check_against_fp64("native", inputs, loss_agg_mode="seq-mean-token-mean", **EXTRAS)


@ON_EVERY_BACKEND
def test_k3_keeps_its_digits(backend, device):
    """exp(d) - d - 1 in fp32 is noise for a d of 1e-4; half of it negative."""
    inputs = make_inputs(2, 64, device=device)
    inputs["old_logprobs"] = inputs["logprobs"] - 1e-4 * torch.rand(2, 64, device=device)
    exact = to(inputs, torch.float64)
    d = (exact["logprobs"] - exact["old_logprobs"])[inputs["mask"]]
    got = run(backend, inputs)[1][POLICY_METRICS.index("approx_kl_k3")].double()
    want = (torch.expm1(d) - d).mean()
    assert abs(got - want) < 1e-5 * want + 1e-11
    assert abs((d.float().exp() - d.float() - 1).mean() - want) > 1e-2 * want  # the mutant


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_options_are_fp64_where_the_log_probabilities_are(sign):
    """0.7 and 1.05 are no fp32 numbers."""
    new, old = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[-1.2]], dtype=torch.float64)
    advantages, mask = torch.full_like(new, sign), torch.ones(1, 1, dtype=torch.bool)

    def loss(**options):
        return rlkernel.policy_loss(new, old, advantages, mask, **options).loss.item()

    tau, ratio = 0.7 if sign > 0 else 1.05, math.exp(0.2)
    want = -sign * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    assert loss(loss_type="sapo", tau_pos=0.7, tau_neg=1.05) == pytest.approx(want, rel=1e-14)
    k, rate = (0.7, 1.05) if sign > 0 else (1.05, 0.7)
    options = {
        "vespo_k_pos": 0.7, "vespo_k_neg": 1.05, "vespo_lambda_pos": 1.05, "vespo_lambda_neg": 0.7,
    }  # fmt: skip
    want = sign * math.exp(rate + k * 0.2 - rate * ratio)
    assert loss(loss_type="vespo", **options) == pytest.approx(want, rel=1e-14)


# a weight without a gradient: their difference quotient is the derivative at a fixed weight, which is the one
# that stands where the old log-probabilities are the new ones
WEIGHTED = {"cispo", "cispo_cap", "cispo_mask", "dppo_tv", "dppo_kl", "vespo"}


@pytest.mark.parametrize("loss_type", names.LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])  # the third's is not that of its value
def test_gradcheck(loss_type, level):
    inputs = make_inputs(2, 4, dtype=torch.float64, extras=True, drift=0.05)
    x, entropy = (inputs.pop(k).requires_grad_() for k in ("logprobs", "entropy"))
    if loss_type in WEIGHTED:
        inputs["old_logprobs"] = None
        del inputs["rollout_logprobs"], inputs["ref_logprobs"]
        options = {"entropy_coef": 0.01}
    else:
        options = {
            "beta": 0.1,
            "entropy_coef": 0.01,
            "correction": RolloutCorrection(high=1.05),
            "epsilon": 0.9,
        }
    options |= {"loss_type": loss_type, "importance_sampling_level": level} | NEEDS.get(loss_type, {})
    if loss_type in ("clip_cov", "kl_cov"):
        options["cov_ratio"] = 1.0  # every token: a choice among them is no function of the log-probabilities
        options |= {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0} if loss_type == "clip_cov" else {}

    def loss(x, entropy):
        return rlkernel.policy_loss(x, **inputs, entropy=entropy, **options).loss

    assert torch.autograd.gradcheck(loss, (x, entropy))


FLOAT = st.floats(-3, 3, width=32)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", ["native", "emulated-warp32"])
def test_shapes_and_masks_of_any_kind(backend, level, data):
    batch, length = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 70))
    seed = data.draw(st.integers(0, 2**16))
    inputs = make_inputs(max(batch, 1), max(length, 1), seed=seed, extras=True)
    inputs = {k: v[:batch, :length] for k, v in inputs.items()}
    share = data.draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    inputs["mask"] = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share
    hidden = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    inputs = {
        k: torch.where(inputs["mask"], v, hidden) if v.is_floating_point() else v for k, v in inputs.items()
    }
    loss_type = data.draw(st.sampled_from(list(names.LOSS_TYPES)))
    mode = data.draw(st.sampled_from(list(names.AGGREGATIONS)))
    options = {"loss_type": loss_type, "loss_agg_mode": mode, "importance_sampling_level": level}
    check_against_fp64(backend, inputs, **options, **NEEDS.get(loss_type, {}), **EXTRAS)


@pytest.mark.parametrize("backend", ["native", "reference", "triton"])
def test_memory_layouts(backend):
    inputs = make_inputs(4, 30, extras=True)
    skip_unless_able(backend, "policy_loss", inputs["logprobs"])
    want = run(backend, inputs, **EXTRAS)
    wide = {k: torch.stack([v, v], -1)[..., 0] for k, v in inputs.items()}
    turned = {k: v.T.contiguous().T for k, v in inputs.items()}
    for other in (wide, turned):
        assert not other["logprobs"].is_contiguous()
        for got, same in zip(run(backend, other, **EXTRAS), want, strict=True):
            assert_equal("layout", got, same)


@ON_EVERY_BACKEND
def test_upstream_gradient_scales_and_items_divide(backend, device):
    inputs = make_inputs(3, 20, device=device)
    one = run(backend, inputs, loss_agg_mode="token-sum")
    assert_equal("upstream", run(backend, inputs, upstream=4.0, loss_agg_mode="token-sum")[2], one[2] * 4)
    number, tensor = (
        run(backend, inputs, num_items_in_batch=n, dp_size=2) for n in (64, torch.tensor(64, device=device))
    )
    assert_equal("number", number[2], one[2] * 2 / 64)
    assert_equal("tensor", tensor[2], number[2])


@ON_EVERY_BACKEND
def test_loss_and_metrics_may_be_modified_in_place(backend, device):
    """A trainer divides the loss by its accumulation steps and reduces the metrics over its ranks."""
    inputs = make_inputs(3, 20, device=device)
    leaf = inputs.pop("logprobs").requires_grad_()
    with running(backend):
        want = torch.autograd.grad(rlkernel.policy_loss(leaf, **inputs).loss, leaf)[0]
        loss, metrics = rlkernel.policy_loss(leaf, **inputs)
        before = metrics.clone()
        loss += loss.detach()
        loss *= 0.5
        assert_equal("metrics", metrics, before)
        metrics.zero_()
        assert_equal("grad", torch.autograd.grad(loss, leaf, retain_graph=True)[0], want * 0.5)
        assert_equal("grad of two uses", torch.autograd.grad(loss + loss, leaf)[0], want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logprobs_get_a_gradient_of_their_dtype(dtype):
    inputs = to(make_inputs(3, 20), dtype)
    assert run("native", inputs)[2].dtype == dtype


@ON_EVERY_BACKEND
def test_nan_advantages_are_counted_and_raise_in_debug_mode(backend, device):
    inputs = make_inputs(2, 9, device=device)
    inputs["mask"][0, :3] = True
    inputs["advantages"][0, 1] = torch.nan
    assert run(backend, inputs)[1][POLICY_METRICS.index("not_finite")] == 1
    with debug.checks(), pytest.raises(ValueError, match="advantages must be numbers"):
        run(backend, inputs)


def test_peak_memory_is_two_buffers():
    from rlkernel.bench.memory import peak_extra

    inputs = make_inputs(64, 1024)
    x = inputs.pop("logprobs").requires_grad_()

    def step():
        with rlkernel.use_backend("native"):
            return torch.autograd.grad(rlkernel.policy_loss(x, **inputs).loss, x)

    step()
    assert peak_extra(step, "cpu") <= 2 * x.numel() * 4 + 64 * 1024
