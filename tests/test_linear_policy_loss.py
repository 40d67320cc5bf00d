"""linear_policy_loss: linear_logprob, then policy_loss; one body of tests for every backend."""

import linear_policy
import pytest
import torch
from backends import is_slow, running
from bitwise import assert_equal
from linear_policy import (
    ALL,
    LEAVES,
    ON_EVERY_BACKEND,
    able,
    check_against_fp64,
    check_bits,
    make_inputs,
    packed,
    per_sequence,
    run,
    wide,
    with_bias,
)

import rlkernel
from rlkernel.calls.policy_loss import (
    LEVELS,
    POLICY_METRICS,
)
from rlkernel.drivers import linear_policy_loss as policy_driver
from rlkernel.drivers import linear_policy_loss_plan as policy_plan
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.ops.policy_loss import rule as names
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS, RolloutCorrection
from rlkernel.runtime import gpu, workspace

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
pytestmark = pytest.mark.usefixtures("poison")
room = linear_policy.room


# one element; rows and vocabulary past several tiles with ragged ends; H odd
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 13, 33, 133), (2, 3, 65, 500)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape, room):
    inputs = with_bias(make_inputs(*shape, dtype=dtype, device=device, extras=True))
    able(backend, inputs)
    if shape[0] == 1:
        inputs["mask"][:] = True
    check_against_fp64(backend, inputs, **ALL)
    check_against_fp64(backend, packed(inputs), **ALL, loss_agg_mode="seq-mean-token-mean")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", names.LOSS_TYPES)
def test_every_loss_is_the_composition(loss_type, level, room):
    """One pass or two as the loss allows it: new loss types need nothing here."""
    inputs = with_bias(make_inputs(5, 19, 16, 133, extras=True, drift=0.4))
    able("native", inputs)
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    if loss_type == "dro":
        options["dro_beta"] = 0.3
    plain = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "rollout_logprobs")}
    for mode in names.AGGREGATIONS:
        check_bits("native", per_sequence(plain), **options, loss_agg_mode=mode, loss_scale_factor=19.0)
        check_bits("native", packed(inputs), **options, **ALL, loss_agg_mode=mode, loss_scale_factor=19.0)
    check_against_fp64("native", inputs, **options, **ALL)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_is_the_composition(correction, room):
    inputs = make_inputs(5, 19, 16, 133, extras=True, drift=0.05)
    able("native", inputs)
    for options in ({}, {"loss_agg_mode": "seq-mean-token-mean", "beta": 0.1, "kl_estimator": "k1+"}):
        check_bits("native", inputs, correction=correction, **options)
        check_bits("native", packed(inputs), correction=correction, **options)


@pytest.mark.parametrize(
    "rule",
    [
        RolloutCorrection(max_staleness=2, staleness_decay=0.5, denominator="shrink"),
        RolloutCorrection("sequence", stale_only=True),
        CORRECTIONS["icepop"]._replace(veto=0.9, denominator="shrink"),
        RolloutCorrection(tv_threshold=0.03, m2_threshold=1.5e-3, max_staleness=2),
    ],
    ids=["stale", "stale only", "veto", "moments"],
)
def test_staleness_and_rejection_are_the_composition(rule, room):
    inputs = make_inputs(5, 19, 16, 133, extras=True, drift=0.05)
    able("native", inputs)
    versions = torch.randint(0, 4, (5, 19), generator=torch.Generator().manual_seed(4))
    for staleness in (versions, versions[:, 0].contiguous()):
        old = inputs | {"staleness": staleness}
        check_bits("native", old, correction=rule, loss_agg_mode="seq-mean-token-mean")
        check_bits("native", old, correction=rule, loss_type="vespo")
    check_bits("native", packed(inputs | {"staleness": versions}), correction=rule)


@pytest.mark.parametrize("weight", ["token", "score", "rollout"])
def test_bounded_kl_and_shared_means_are_the_composition(weight, room):
    inputs = make_inputs(6, 19, 16, 133, extras=True, drift=0.5)
    able("native", inputs)
    if weight != "rollout":
        del inputs["rollout_logprobs"]
    counts = inputs["mask"].sum(-1).view(3, 2).sum(-1).repeat_interleave(2).float()
    options = {"beta": 0.1, "use_bias_correction_kl": weight, "kl_input_clamp": 0.4, "kl_output_clamp": 0.05}
    check_bits("native", inputs, **options)
    options |= {"loss_agg_mode": "seq-mean-token-mean", "num_items_in_batch": 3}
    check_bits("native", inputs | {"token_counts": counts}, **options)
    check_bits("native", packed(inputs) | {"token_counts": counts[[0, *range(6)]]}, **options)


@ON_EVERY_BACKEND
def test_bits_are_those_of_linear_logprob(backend, device, room):
    """With and without gradients, whatever the path: a rollout scored by one is trained on by the other."""
    inputs = with_bias(make_inputs(4, 15, 32, 133, device=device))
    able(backend, inputs)
    if backend == "reference":
        pytest.skip("the reference computes ignored rows, which the product's bits may depend on")
    options = {"entropy_coef": 0.01, "temperature": 0.7, "softcap": 6.0, "logit_scale": 1.2}
    slow = is_slow(backend, device)
    for level in LEVELS[: 1 if slow else 3]:
        for algorithm in ("auto", "two_pass")[: 1 if slow else 2]:
            ours, _ = check_bits(
                backend, inputs, importance_sampling_level=level, algorithm=algorithm, **options
            )
        with running(backend), torch.no_grad():
            alone = rlkernel.linear_policy_loss(**inputs, importance_sampling_level=level, **options)
        for name, a, b in zip(ours._fields, alone, ours, strict=True):
            assert_equal(name, a, b)
        assert (ours.logprobs[~inputs["mask"]] == 0).all()


def test_one_pass_and_two_have_the_same_loss_and_gradients(room):
    """The loss to the bit.  The GEMMs of the gradients are the same ones in another order and at other
    places in memory, which shows in the last bit of the products of a library (seen with MKL on AVX2)."""
    inputs = with_bias(make_inputs(4, 16, 32, 133, full=True))
    able("native", inputs)
    for dtype in (torch.float32, torch.bfloat16):
        low = {k: v.to(dtype) if k in LEAVES else v for k, v in inputs.items()}
        one, two = (run("native", low, loss_type="reinforce", algorithm=a) for a in ("one_pass", "two_pass"))
        assert_equal("loss", one[0].loss, two[0].loss)
        for a, b in zip(one[1][:2], two[1][:2], strict=True):  # hidden, weight
            scale = b.abs().max().item() * (1e-6 if dtype == torch.float32 else 2**-8)
            torch.testing.assert_close(a, b, rtol=0, atol=scale)


@ON_EVERY_BACKEND
def test_as_under_graph_capture(backend, device, room, monkeypatch):
    """A captured graph cannot leave rows out, nor read offsets: it computes all and gives the same."""
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    inputs = with_bias(make_inputs(3, 13, 32, 133, device=device, extras=True))
    able(backend, inputs)
    for level in ("token", "sequence"):
        check_against_fp64(backend, inputs, importance_sampling_level=level, **ALL)
        check_against_fp64(backend, packed(inputs), importance_sampling_level=level, **ALL)


NEEDS = [
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, False, True),
    (False, True, True),
]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@ON_EVERY_BACKEND
def test_only_the_needed_gradients(backend, device, needs, room):
    inputs = with_bias(make_inputs(3, 11, 16, 133, device=device))
    able(backend, inputs)
    for entropy_coef in (0.0, 0.02):
        check_against_fp64(backend, inputs, needs, entropy_coef=entropy_coef)


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device, room):
    inputs = with_bias(make_inputs(3, 13, 33, 133, device=device, extras=True))
    able(backend, inputs)
    out, grads = run(backend, inputs, **ALL)
    for _ in range(2 if is_slow(backend, device) else 20):
        again, grads_again = run(backend, inputs, **ALL)
        for name, a, b in zip([*out._fields, *LEAVES], [*again, *grads_again], [*out, *grads], strict=True):
            assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_what_the_mask_hides_is_never_read(backend, device, room):
    inputs = make_inputs(3, 13, 16, 133, device=device, extras=True)
    able(backend, inputs)
    clean, grads = run(backend, inputs, **ALL)
    hidden = ~inputs["mask"]
    dirty = {k: v.clone() for k, v in inputs.items()}
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages"):
        dirty[name][hidden] = torch.nan
    dirty["target_ids"][hidden] = -100
    dirty["hidden"][hidden] = torch.inf
    out, dirty_grads = run(backend, dirty, **ALL)
    for name, a, b in zip([*out._fields, *LEAVES], [*out, *dirty_grads], [*clean, *grads], strict=False):
        assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_nothing_counts(backend, device, room):
    inputs = with_bias(make_inputs(3, 5, 16, 133, device=device))
    able(backend, inputs)
    masked = inputs | {"mask": torch.zeros_like(inputs["mask"])}
    empty = {k: v if k in ("weight", "bias") else v[:0] for k, v in inputs.items()}
    for nothing in (masked, empty):
        out, grads = run(backend, nothing, entropy_coef=0.1)
        assert out.loss.item() == 0 and out.logprobs.shape == nothing["mask"].shape
        assert [g.shape for g in grads] == [nothing[n].shape for n in LEAVES]
        assert all((g == 0).all() for g in (out.logprobs, out.entropy, *grads))


@ON_EVERY_BACKEND
def test_shapes_and_strides_of_users(backend, device, room):
    inputs = make_inputs(3, 8, 16, 133, device=device)
    able(backend, inputs)
    want, _ = run(backend, {k: v if k == "weight" else v[:, :-1].contiguous() for k, v in inputs.items()})
    views = {k: v if k == "weight" else v[:, :-1] for k, v in inputs.items()}
    views |= {"weight": inputs["weight"].T.contiguous().T, "mask": views["mask"].long()}
    with running(backend):
        got = rlkernel.linear_policy_loss(**views, temperature=torch.ones(3, 7, device=device))
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-4, atol=1e-5)
    assert got.entropy is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_alone_is_the_sequence_in_a_batch(level, room):
    """Its derivative is batch-invariant; the product's last bits are the GEMM library's."""
    inputs = make_inputs(5, 17, 16, 133, extras=True)
    able("native", inputs)
    options = ALL | {"importance_sampling_level": level, "loss_agg_mode": "token-sum"}
    together, (dh,) = run("native", inputs, (True, False, False), **options)
    for i in range(5):
        one = {k: v if k == "weight" else v[i : i + 1] for k, v in inputs.items()}
        alone, (dh_alone,) = run("native", one, (True, False, False), **options)
        torch.testing.assert_close(alone.logprobs, together.logprobs[i : i + 1], rtol=0, atol=2e-6)
        torch.testing.assert_close(dh_alone, dh[i : i + 1], rtol=0, atol=1e-5)


def test_gradcheck():
    inputs = with_bias(make_inputs(2, 4, 5, 23, dtype=torch.float64, extras=True))
    inputs = {k: wide(v) for k, v in inputs.items()}
    leaves = [inputs.pop(n).requires_grad_() for n in LEAVES]
    options = {"entropy_coef": 0.1, "beta": 0.1, "correction": "token_tis", "loss_type": "sapo"}
    with rlkernel.use_backend("reference"):
        for level in ("token", "sequence"):
            assert torch.autograd.gradcheck(
                lambda h, w, b, level=level: (
                    rlkernel.linear_policy_loss(
                        h, w, bias=b, **inputs, temperature=0.7, importance_sampling_level=level, **options
                    ).loss
                ),
                leaves,
            )


def test_autocast_uses_its_dtype(room):
    inputs = make_inputs(2, 9, 32, 133)
    able("native", inputs)
    low = {k: v.bfloat16() if k in LEAVES else v for k, v in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run("native", inputs)
    want, _ = run("native", low)
    assert_equal("logprobs", got.logprobs, want.logprobs)
    assert [g.dtype for g in grads] == [torch.float32] * 2


def test_logits_dtype_and_mixed_dtypes(room):
    inputs = make_inputs(2, 9, 32, 133)
    able("native", inputs)
    low = {k: v.bfloat16() if k in LEAVES else v for k, v in inputs.items()}
    check_bits("native", low, logits_dtype=torch.bfloat16)
    check_bits("native", inputs, logits_dtype=torch.bfloat16)
    check_bits("native", inputs | {"hidden": low["hidden"]})
    check_bits("native", inputs | {"weight": low["weight"]})


MUTANTS = {
    "the derivative of the neighbouring rows": (
        policy_driver, "_rows_of", lambda f: lambda g, where, first: f(g, where, first).roll(1)
    ),
    "blocks are forgotten": (policy_plan.Resident, "slot", lambda f: lambda self, block: 0),
    "rows that count are dropped": (
        policy_plan.Resident, "compact", lambda f: lambda self, tile, live: tile[: live.numel()]
    ),
    "sequences are cut": (
        policy_plan.Plan, "_whole_sequences", lambda f: lambda self, kept, tokens, total: list(range(total))
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch):
    owner, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(workspace, "_limit", 40_000)
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    inputs = make_inputs(6, 13, 32, 133, drift=0.5, full=True)
    able("native", inputs)
    inputs["advantages"][:, ::3] = 0
    with pytest.raises(AssertionError):
        for level in ("token", "sequence"):
            check_bits("native", inputs, importance_sampling_level=level, algorithm="one_pass")


@ON_EVERY_BACKEND
def test_tokens_outside_their_support_add_nothing(backend, device, room):
    """A head that forbids some tokens, and a batch in which one of these was sampled."""
    inputs = with_bias(make_inputs(4, 19, 16, 133, device=device, extras=True))
    del inputs["ref_logprobs"], inputs["rollout_logprobs"]
    able(backend, inputs)
    inputs["bias"][7:9] = -torch.inf
    inputs["target_ids"][inputs["target_ids"] == 8] = 9
    inputs["target_ids"][:, :2], inputs["mask"][:, :2] = 7, True
    inputs["old_logprobs"][:2, :2] = -torch.inf
    outside = inputs["target_ids"] == 7
    wanted = (outside & inputs["mask"]).sum()
    cases = (inputs["old_logprobs"], "sequence"), (inputs["old_logprobs"], "token"), (None, "token")
    for old, level in cases[: 1 if is_slow(backend, device) else 3]:
        given = inputs | {"old_logprobs": old}
        options = {"importance_sampling_level": level, "temperature": 0.8}
        options["loss_agg_mode"] = "seq-mean-token-mean" if level == "token" else "token-mean"
        out, grads = run(backend, given, **options)
        assert out.loss.isfinite() and out.metrics.isfinite().all()
        assert out.metrics[POLICY_METRICS.index("outside_support")] == wanted
        assert (out.logprobs[outside & inputs["mask"]] == -torch.inf).all()
        assert all(grad.isfinite().all() for grad in grads)
        assert not grads[0][outside].any() and grads[0].any() and not grads[2][7:9].any()
        check_against_fp64(backend, given, **options)
