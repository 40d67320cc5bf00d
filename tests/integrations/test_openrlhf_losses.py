"""What stands in the place of OpenRLHF's losses, beside OpenRLHF's own: values, gradients, metrics."""

import itertools
import math

import pytest
import torch
from accuracy import check
from doors import random
from openrlhf_cases import batch, check_left_to_openrlhf, losses, nothing_left_behind, upstream

import rlkernel

assert nothing_left_behind and upstream  # fixtures of every test here

NAMES = ("loss", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
BOUNDS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
KINDS = {
    "ppo": BOUNDS,
    "dual": BOUNDS | {"dual_clip": 1.5},
    "gspo": {"clip_eps_low": 0.03, "clip_eps_high": 0.04, "policy_loss_type": "gspo"},
    "gspo dual": {"policy_loss_type": "gspo", "dual_clip": 1.05, "clip_eps_low": 0.02},
}
GATES = {
    "icepop": {"is_correction_level": "token", "is_correction_threshold": [0.8, 1.3]},
    "tis": {
        "is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.2],
    },
    "tis above": {
        "is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.0, 1.2],
    },
    "seq": {"is_correction_level": "seq", "is_correction_threshold": [0.9, 1.1]},
    "token kl": {"is_correction_level": "token", "is_correction_gating": "binary_kl"},
    "seq kl": {"is_correction_level": "seq", "is_correction_gating": "binary_kl"},
    "token tv": {"is_correction_level": "token", "is_correction_gating": "tv"},
    "seq tv": {"is_correction_level": "seq", "is_correction_gating": "tv"},
}  # fmt: skip
for name in ("token kl", "seq kl", "token tv", "seq tv"):
    # what a single bound of the command line becomes is [0, HIGH]: see the test of those below
    GATES[name]["is_correction_threshold"] = [-1.0, 0.03 if "kl" in name else 0.095]
WHOLE = {"dp_size": 4, "batch_num_tokens": torch.tensor(123.0), "global_batch_size": torch.tensor(17.0)}


def run(options, dtype, given, whole=None):
    """The results by name, and the gradient."""
    made = {k: v if k == "action_mask" else v.to(dtype) for k, v in given.items()}
    leaf = made["log_probs"].clone().requires_grad_()
    found = losses.PolicyLoss(**options)(**made | {"log_probs": leaf}, **whole or {})
    (grad,) = torch.autograd.grad(found[0], leaf)
    return dict(zip(NAMES, (None if x is None else x.detach() for x in found), strict=True)), grad


def check_policy(options, *cases):
    stock = [[run(options, dtype, *case) for dtype in (torch.float64, torch.float32)] for case in cases]
    with rlkernel.patch_openrlhf() as patch:
        found = [run(options, torch.float32, *case) for case in cases]
        assert patch.calls == {"PolicyLoss.forward": len(cases)} and not patch.fallbacks, patch.fallbacks
    for case, (got, grad), ((want, exact), (theirs, rounded)) in zip(cases, found, stock, strict=True):
        mask, where = case[0]["action_mask"] != 0, f"{options} {case[1:]}"
        check(f"{where}: loss", got["loss"], theirs["loss"], want["loss"], exact.abs().sum().item())
        check(f"{where}: gradient", grad, rounded, exact)
        assert not grad[~mask].any()
        for name in NAMES[1:]:
            assert (got[name] is None) == (want[name] is None), (where, name)
            if want[name] is not None:
                assert got[name].dim() == 0 and got[name].dtype == torch.float32
                assert got[name].item() == pytest.approx(want[name].item(), abs=2e-6), (where, name)
    return found[-1][0]


@pytest.mark.parametrize("by_token", [True, False], ids=["tokens", "sequences"])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_losses_are_openrlhfs(kind, by_token):
    """Of a micro-batch, and as a part of a larger batch."""
    given = batch(3, rows=7, tokens=19, drift=0.7)
    found = check_policy(KINDS[kind] | {"token_level_loss": by_token}, (given, None), (given, WHOLE))
    assert 0 < found["clip_ratio"] < 1 and found["ppo_kl"] != 0 and found["vllm_kl"] is None


@pytest.mark.parametrize("by_token", [True, False], ids=["tokens", "sequences"])
@pytest.mark.parametrize("gate", GATES)
def test_corrections_are_openrlhfs(gate, by_token):
    given = batch(4, rows=9, tokens=17, drift=0.2)
    options = BOUNDS | GATES[gate] | {"token_level_loss": by_token, "dual_clip": 3.0}
    found = check_policy(options, (given, None), (given, WHOLE))
    assert 0 < found["is_filter_ratio"] < 1 and found["clip_ratio"] > 0 and found["vllm_kl"] != 0


@pytest.mark.parametrize("kind", ["gspo", "gspo dual"])
def test_gspo_with_a_correction_takes_the_ratio_to_the_rollout(kind):
    options = KINDS[kind] | {"is_correction_level": "seq"}
    found = check_policy(options, (batch(5), None), (batch(6, rows=3), WHOLE))
    assert found["vllm_kl"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_and_masks_of_numbers(kind):
    small = batch(6, rows=2, tokens=5)
    check_policy(
        KINDS[kind],
        (batch(5, rows=1, tokens=1), None),
        (small | {"action_mask": small["action_mask"].long()}, {"batch_num_tokens": 7, "dp_size": 2}),
        (small | {"action_mask": small["action_mask"].float()}, {"global_batch_size": 2.5}),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bf16(kind):
    given = {k: v if v.dtype == torch.bool else v.bfloat16() for k, v in batch(7).items()}
    want, exact = run(KINDS[kind], torch.float64, given)
    stock, rounded = run(KINDS[kind], torch.bfloat16, given)
    with rlkernel.patch_openrlhf():
        got, grad = run(KINDS[kind], torch.bfloat16, given)
    assert got["loss"].dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert (got["loss"] - want["loss"]).abs() <= (stock["loss"] - want["loss"]).abs() + 1e-5
    check("gradient", grad, rounded, exact)


def test_beyond_the_bound_of_the_ratio_nothing_comes_back():
    given = batch(8, rows=3, tokens=6)
    given["old_log_probs"][:, 0] = given["log_probs"][:, 0] - 30.0
    given["action_mask"][:, 0] = True
    want = run(BOUNDS, torch.float32, given)
    with rlkernel.patch_openrlhf():
        got = run(BOUNDS, torch.float32, given)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("gate", [None, *GATES])
def test_what_the_mask_hides_does_not_matter(gate):
    """A NaN there is OpenRLHF's NaN."""
    given, options = batch(9), BOUNDS | GATES.get(gate, {})
    hidden = {
        k: v if v.dtype == torch.bool else v.masked_fill(~given["action_mask"], math.nan)
        for k, v in given.items()
    }
    assert run(options, torch.float32, hidden)[0]["loss"].isnan()
    with rlkernel.patch_openrlhf():
        want, got = run(options, torch.float32, given), run(options, torch.float32, hidden)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("gate", ["icepop", "tis", "seq"])
def test_a_token_that_the_rollout_thought_impossible_is_rejected(gate):
    """Its ratio is infinite: out of the bounds, or the upper one, as ``is_filter_ratio`` says."""
    given = batch(rows=2)
    given["rollout_log_probs"][0, 0] = -math.inf
    want, theirs = run(KINDS["ppo"] | GATES[gate], torch.float32, given)
    with rlkernel.patch_openrlhf():
        got, grad = run(KINDS["ppo"] | GATES[gate], torch.float32, given)
    assert want["is_filter_ratio"] > 0
    torch.testing.assert_close((got["loss"], grad), (want["loss"], theirs))
    torch.testing.assert_close(got["is_filter_ratio"], want["is_filter_ratio"])


def test_no_token_at_all_is_a_loss_of_0():
    given = batch(10) | {"action_mask": torch.zeros(6, 11, dtype=torch.bool)}
    assert run(BOUNDS, torch.float32, given)[0]["loss"].isnan()
    with rlkernel.patch_openrlhf() as patch:
        for options in (BOUNDS, KINDS["gspo"], BOUNDS | GATES["icepop"], BOUNDS | GATES["token kl"]):
            got, grad = run(options, torch.float32, given)
            assert got["loss"] == got["clip_ratio"] == got["ppo_kl"] == 0 and not grad.any()
        assert not patch.fallbacks


def test_equal_policies_pass_a_divergence_that_is_bounded_above_alone():
    """One bound of the command line becomes [0, HIGH].  OpenRLHF's binary divergence of nearly equal
    policies is below 0 as often as not in fp32, and those tokens are dropped; here it is 0 or above."""
    given = batch(11, rows=40, tokens=50)
    given["old_log_probs"][:20] -= 10  # of which fp64 gets the sign no better
    given["log_probs"][:20] -= 10
    given["rollout_log_probs"] = given["old_log_probs"] + random(12, 40, 50, scale=1e-5)
    gate = {"is_correction_level": "token", "is_correction_gating": "binary_kl"}
    options = BOUNDS | gate | {"is_correction_threshold": [0.0, 0.05]}
    assert run(options, torch.float32, given)[0]["is_filter_ratio"] > 0.3
    plain, exact = run(BOUNDS, torch.float64, given)
    with rlkernel.patch_openrlhf():
        got, grad = run(options, torch.float32, given)
    assert got["is_filter_ratio"] == 0
    torch.testing.assert_close(got["loss"].double(), plain["loss"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-4, atol=1e-8)


def test_a_loss_that_was_made_before_is_replaced_too_and_may_be_written_to():
    loss, given = losses.PolicyLoss(), {k: v for k, v in batch(13).items() if k != "rollout_log_probs"}
    leaf = given["log_probs"].requires_grad_()
    with rlkernel.patch_openrlhf(["losses"]) as patch:
        found, *_ = loss(**given)
        found += 0.5 * leaf.sum()
        found.backward()
        assert patch.calls == {"PolicyLoss.forward": 1}
    assert leaf.grad.isfinite().all()


def without(given, *names):
    return {k: v for k, v in given.items() if k not in names}


LEFT = {
    "policy_loss_type is unknown": ({"policy_loss_type": "x"}, {}),
    "action_mask is no tensor": ({}, {"action_mask": None}),
    "old_log_probs has not log_probs's shape": ({}, {"old_log_probs": torch.zeros(6, 1)}),
    "rollout_log_probs is no tensor": (GATES["icepop"], {"rollout_log_probs": None}),
    "log_probs is torch.int64": ({}, {"log_probs": torch.zeros(6, 11, dtype=torch.int64)}),
    "advantages requires a gradient": ({}, {"advantages": torch.ones(6, 11, requires_grad=True)}),
    "the number of items is not above 0": ({}, {"batch_num_tokens": torch.tensor(0.0)}),
    "the number of items is not one number": ({}, {"batch_num_tokens": torch.ones(6, 11)}),
    "dp_size is no number of ranks": ({}, {"dp_size": 0.5, "batch_num_tokens": 3}),
    "clip_eps_low and clip_eps_high are no numbers": ({"clip_eps_low": -0.1}, {}),
    "clip_eps_low and clip_eps_high are no numbers >= 0": ({"clip_eps_high": math.inf}, {}),
    "dual_clip is no number above 1": ({"dual_clip": math.inf}, {}),
    "is_correction_threshold is not LOW <= HIGH": (
        GATES["icepop"] | {"is_correction_threshold": [5.0, 0.5]},
        {},
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_openrlhf(reason):
    options, changes = LEFT[reason]
    check_left_to_openrlhf(lambda: losses.PolicyLoss(**options)(**batch(14) | changes), reason)


# values


def values(seed=0):
    given = batch(seed)
    old = random(seed + 1, *given["advantages"].shape)
    return {
        "values": old + random(seed + 2, *old.shape, scale=0.3),
        "old_values": old,
        "returns": given["advantages"],
        "action_mask": given["action_mask"],
    }


def run_value(loss, dtype, given, whole):
    made = {k: v if k == "action_mask" else v.to(dtype) for k, v in given.items()}
    leaf = made["values"].clone().requires_grad_()
    found = loss(**made | {"values": leaf}, **whole)
    (grad,) = torch.autograd.grad(found, leaf)
    return found.detach(), grad


@pytest.mark.parametrize("by_token", [True, False], ids=["tokens", "sequences"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_losses_are_openrlhfs(clip, by_token):
    loss = losses.ValueLoss(clip, by_token)
    for dtype, whole in itertools.product((torch.float32, torch.bfloat16), ({}, WHOLE)):
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in values(20).items()}
        truth = run_value(loss, torch.float64, given, whole)
        stock = run_value(loss, dtype, given, whole)
        with rlkernel.patch_openrlhf() as patch:
            got = run_value(loss, dtype, given, whole)
            assert patch.calls == {"ValueLoss.forward": 1} and not patch.fallbacks
        for name, *of in zip(("loss", "gradient"), got, stock, truth, strict=True):
            check(name, *of)
        assert not got[1][~given["action_mask"]].any()


def test_value_losses_that_are_left_to_openrlhf():
    given = values(21)
    for options, changes, reason in (
        ((0.2,), {"action_mask": None}, "action_mask is no tensor"),
        ((-0.2,), {}, "clip_eps is no number >= 0"),
        ((math.inf,), {}, "clip_eps is no number >= 0"),
        ((0.2,), {"old_values": None}, "old_values is no tensor"),
        ((0.2,), {"batch_num_tokens": 0}, "the number of items is not above 0"),
    ):
        check_left_to_openrlhf(lambda o=options, c=changes: losses.ValueLoss(*o)(**given | c), reason)
    with rlkernel.patch_openrlhf():
        losses.ValueLoss(None)(**given | {"old_values": None})


# preferences


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ipo": True}], ids=str)
@pytest.mark.parametrize("pairs", [1, 5])
def test_dpo_is_openrlhfs(options, pairs):
    sums = [random(30 + i, pairs, scale=3.0) - 20 for i in range(4)]
    loss = losses.DPOLoss(0.3, **options)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.to(dtype) for x in sums]

        def step(of, rounded=rounded):
            made = [x.to(of).clone() for x in rounded]
            leaves = [x.requires_grad_() for x in made[:2]]
            found, *rewards = loss(*made)
            return [found.detach(), *rewards, *torch.autograd.grad(found, leaves)]

        truth, stock = step(torch.float64), step(dtype)
        with rlkernel.patch_openrlhf() as patch:
            got = step(dtype)
            assert patch.calls == {"DPOLoss.forward": 1} and not patch.fallbacks, patch.fallbacks
        assert not got[1].requires_grad and got[1].shape == (pairs,)
        for i, of in enumerate(zip(got, stock, truth, strict=True)):
            check(f"result {i}", *of)


def test_preferences_that_are_left_to_openrlhf():
    sums = [random(40 + i, 3) for i in range(4)]
    for options, changes, reason in (
        ({"beta": 0.0}, {}, "beta is no number above 0"),
        ({"beta": 0.1, "label_smoothing": 1.5}, {}, "label_smoothing is no number in [0, 1]"),
        ({"beta": 0.1}, {0: torch.zeros(1)}, "logps have not one shape"),
        ({"beta": 0.1}, {2: torch.zeros(3, requires_grad=True)}, "the reference requires a gradient"),
        ({"beta": 0.1}, {1: None}, "policy_rejected_logps is no tensor"),
        ({"beta": 0.1}, dict.fromkeys(range(4), torch.zeros(2, 2)), "logps are not [B]"),
    ):
        given = [changes.get(i, x) for i, x in enumerate(sums)]
        check_left_to_openrlhf(lambda o=options, g=given: losses.DPOLoss(**o)(*g), reason)
