"""num_items_in_batch means the same in every loss, as a number and as a tensor."""

import math

import linear_policy
import pytest
import torch
from backends import is_slow, of, running
from preference_calls import arguments

import rlkernel
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.reference import policy_loss, preference_loss, value_loss
from rlkernel.runtime import debug

LOSSES = ("policy_loss", "linear_policy_loss", "value_loss", "preference_loss")
PAIRS = pytest.mark.parametrize(
    ("name", "backend", "device"),
    [pytest.param(name, *p.values, id=f"{name}-{p.id}", marks=p.marks) for name in LOSSES for p in of(name)],
)
pytestmark = pytest.mark.usefixtures("poison")


def call(name, backend, device, mode="token-mean", **counts):
    """Loss and gradient of a small batch."""
    options = {"loss_agg_mode": mode} | counts
    if name == "policy_loss":
        inputs, leaf = policy_loss.make_inputs(3, 20, device=device), "logprobs"
    elif name == "linear_policy_loss":
        inputs, leaf = linear_policy.make_inputs(3, 5, 8, 30, device=device), "hidden"
    elif name == "value_loss":
        inputs, leaf = value_loss.make_inputs(3, 20, device=device), "values"
    else:
        inputs, leaf = preference_loss.make_inputs(4, 20, device=device), "logprobs"
        inputs, options = arguments("cpo", inputs)
        options |= counts
    if mode == "seq-mean-token-sum-norm":
        options["loss_scale_factor"] = 7.0
    inputs[leaf] = inputs[leaf].requires_grad_()
    with running(backend):
        out = getattr(rlkernel, name)(**inputs, **options)
        (grad,) = torch.autograd.grad(out.loss, inputs[leaf])
    return out.loss.detach(), grad


def modes(name, backend, device):
    if name == "preference_loss":
        return ["pairs"]
    return ["token-mean", "token-sum"] if is_slow(backend, device) else list(policy_rule.AGGREGATIONS)


@PAIRS
def test_a_number_and_a_tensor_divide_alike(name, backend, device):
    for mode in modes(name, backend, device):
        one = call(name, backend, device, mode, num_items_in_batch=1.0)
        for count in (0.25, 1, 64):
            divided = 1 if mode == "token-sum" or name == "preference_loss" else count
            for given in (count, torch.tensor(count), torch.tensor([count], device=device)):
                got = call(name, backend, device, mode, num_items_in_batch=given)
                for x, y in zip(got, one, strict=True):
                    if name != "preference_loss":  # which adds the likelihood, of another count
                        torch.testing.assert_close(x, y / divided, rtol=1e-6, atol=0)
                number = call(name, backend, device, mode, num_items_in_batch=float(count))
                for x, y in zip(got, number, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("backend", "device"), of("preference_loss"))
def test_both_counts_of_a_preference_loss(backend, device):
    counts = ("num_items_in_batch", "num_tokens_in_batch")
    one = call("preference_loss", backend, device, **dict.fromkeys(counts, 1.0))
    for count in (0.25, 64):
        for given in (count, torch.tensor(count, device=device)):
            got = call("preference_loss", backend, device, **dict.fromkeys(counts, given))
            for x, y in zip(got, one, strict=True):
                torch.testing.assert_close(x, y / count, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0, -3.0, math.nan, math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_count_that_is_none_is_refused(name, value):
    shown = {0: "0(.0)?", -3.0: "-3.0", math.nan: "nan", math.inf: "inf"}[value]
    for mode in ("token-mean", "token-sum"):
        for given in (value, torch.tensor(float(value))):
            with pytest.raises(ValueError, match=f"num_items_in_batch must be > 0 and finite, got {shown}$"):
                call(name, "native", "cpu", mode, num_items_in_batch=given)
    for wrong in (True, "3", torch.ones(2)):
        with pytest.raises(ValueError, match="num_items_in_batch must be (a number or a tensor|one number)"):
            call(name, "native", "cpu", num_items_in_batch=wrong)


@pytest.mark.parametrize("value", [0.0, -3.0, math.nan, math.inf])
@PAIRS
def test_where_nobody_may_look_such_a_count_makes_the_loss_nan(name, backend, device, value, monkeypatch):
    monkeypatch.setattr(debug, "may_read", lambda x: False)  # as of a tensor on a GPU
    loss, _ = call(name, backend, device, num_items_in_batch=torch.tensor(value, device=device))
    assert loss.isnan()
    good, _ = call(name, backend, device, num_items_in_batch=torch.tensor(4, device=device))
    assert good.isfinite()
