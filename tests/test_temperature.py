"""A temperature is one number on every backend: rounded to the dtype of use, then checked, then used."""

import pytest
import torch
from backends import of, running
from bitwise import assert_equal
from support_cases import masked, supports

import rlkernel
from rlkernel.reference.logprob import make_inputs

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
OUTSIDE = [1e-45, 1e-39, 1e-300, 1e39, 1e300, 10**400, float("inf"), float("nan"), 0.0, -0.0, -1.0]
EXTREMES = [1e-36, 1e-20, 1e20, HUGE, 3.4028235e38]  # the last one rounds to HUGE
MASK = torch.ones(2, 3, dtype=torch.bool)


def _logits(shape=(6, 33), dtype=torch.float32):
    inputs = make_inputs(*shape, dtype=dtype, ignored=0)
    return inputs["logits"], inputs["target_ids"]


def _logprob(t, dtype=torch.float32):
    logits, ids = _logits(dtype=dtype)
    logits.requires_grad_()
    return rlkernel.logprob(logits, ids, temperature=t, return_entropy=True), (logits,)


def _logprob_support(t, dtype=torch.float32):
    logits, ids = _logits(dtype=dtype)
    logits.requires_grad_()
    support = supports(ids, 33, (5, 0, 1))
    return rlkernel.logprob(logits, ids, temperature=t, return_entropy=True, **support), (logits,)


def _head(dtype):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(6, 8, generator=g), torch.randn(33, 8, generator=g)
    ids = torch.arange(6) * 5
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


def _linear_logprob(t, dtype=torch.float32):
    *leaves, ids = _head(dtype)
    return rlkernel.linear_logprob(*leaves, ids, temperature=t, return_entropy=True), leaves


def _linear_logprob_support(t, dtype=torch.float32):
    *leaves, ids = _head(dtype)
    support = supports(ids, 33, (5, 0, 1))
    return rlkernel.linear_logprob(*leaves, ids, temperature=t, return_entropy=True, **support), leaves


def _linear_logprob_statistics(t, dtype=torch.float32):
    *leaves, ids = _head(dtype)
    return rlkernel.linear_logprob_statistics(*leaves, ids, temperature=t, return_entropy=True), leaves


def _linear_policy_loss(t, dtype=torch.float32):
    *leaves, ids = _head(dtype)
    if isinstance(t, torch.Tensor) and t.dim():
        t = t.view(2, 3)
    arguments = leaves[0].view(2, 3, 8), leaves[1], ids.view(2, 3), None, torch.ones(2, dtype=dtype), MASK
    return rlkernel.linear_policy_loss(*arguments, temperature=t, return_entropy=True), leaves


CALLS = {
    "logprob": (_logprob, "logprob"),
    "logprob support": (_logprob_support, "logprob"),
    "linear_logprob": (_linear_logprob, "linear_logprob"),
    "linear_logprob support": (_linear_logprob_support, "linear_logprob"),
    "linear_logprob_statistics": (_linear_logprob_statistics, "linear_logprob"),
    "linear_policy_loss": (_linear_policy_loss, "linear_policy_loss"),
}
EVERYWHERE = [
    pytest.param(call, *pair.values, id=f"{name}-{pair.id}", marks=pair.marks)
    for name, (call, op) in CALLS.items()
    for pair in of(op)
    if pair.values[1] == "cpu"
]
everywhere = pytest.mark.parametrize(("call", "backend", "device"), EVERYWHERE)


def results(call, t, dtype=torch.float32):
    """All outputs, and the gradients of all logprobs together."""
    out, leaves = call(t, dtype)
    loss = out.loss if hasattr(out, "loss") else out.logprobs.sum() + out.entropy.sum()
    grads = torch.autograd.grad(loss, leaves)
    return {k: v.detach() for k, v in out._asdict().items() if v is not None}, grads


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("t", OUTSIDE)
def test_what_the_dtype_of_use_has_no_number_for_is_refused(name, t):
    call = CALLS[name][0]
    rounds_out = 0 < t < 1e301
    want = "> 0 and finite" + (r" as float32, from 1\.18e-38 to 3\.4e\+38" if rounds_out else "") + ", got"
    with pytest.raises(ValueError, match=f"^temperature must be {want}"):
        call(t)
    if t == 10**400:
        return
    for tensor in (torch.tensor(t, dtype=torch.float64), torch.full((6,), t, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^temperature\[0(, 0)?\] must be > 0 and finite"):
            call(tensor)


@pytest.mark.parametrize(
    "name", ["logprob", "logprob support", "linear_logprob", "linear_logprob_statistics"]
)
def test_fp64_has_a_range_of_its_own(name):
    call = CALLS[name][0]
    for t in (1e-45, 1e39):
        assert not call(t, torch.float64)[0].logprobs.isnan().any()
        assert not call(torch.tensor(t, dtype=torch.float64), torch.float64)[0].logprobs.isnan().any()
    for t in (1e-310, float("inf")):
        with pytest.raises(ValueError, match="must be > 0 and finite(, got inf| as float64, from 2.23e-308)"):
            call(t, torch.float64)


@everywhere
def test_a_number_has_the_bits_of_a_tensor(call, backend, device):
    for t in (0.7, 1.3, 1 / 3):  # none of them is a float32
        with running(backend):
            want, want_grads = results(call, torch.full((6,), t))
            for same in (t, torch.tensor(t), torch.tensor(t, dtype=torch.float64)):
                got, grads = results(call, same)
                for key in want:
                    assert_equal(key, got[key], want[key])
                for a, b in zip(grads, want_grads, strict=True):
                    assert_equal("gradient", a, b)


@everywhere
@pytest.mark.parametrize("per_row", [False, True], ids=["number", "tensor"])
def test_the_ends_of_the_range(call, backend, device, per_row):
    """What fp32 can hold is right; at the very end 1 / T times anything is beyond it."""
    for t in (TINY, *EXTREMES):
        used = torch.tensor(t, dtype=torch.float32).item()
        with running("reference"):
            want, want_grads = results(call, used, torch.float64)
        with running(backend):
            got, grads = results(call, torch.full((6,), used) if per_row else t)
        keys = ("logprobs", "entropy", "lse", "is_top1")
        pairs = [(key, got[key], want[key]) for key in keys if key in want]
        if t > TINY:
            pairs += [("gradient", a, b) for a, b in zip(grads, want_grads, strict=True)]
        for key, a, b in pairs:
            assert not a.isnan().any(), f"{key} at {t}"
            scale = 1.0 if key != "gradient" else b.abs().max().clamp(min=1e-30).item()
            torch.testing.assert_close(
                a.double() / scale,
                b.to(a.dtype).double() / scale,
                rtol=2e-5,
                atol=2e-5,
                msg=lambda m, key=key, t=t: f"{key} at {t}: {m}",
            )


@pytest.mark.parametrize("t", [0.7, torch.tensor(0.7, dtype=torch.float64)], ids=["number", "tensor"])
def test_fp64_supports_keep_the_digits_of_the_temperature(t):
    """Masses are integers of 2^-40: that, and no rounding of 0.7 to fp32 (2e-8), is what is left."""
    logits, ids = _logits((7, 501), torch.float64)
    support = supports(ids, 501, (40, 0, 1, 300))
    want = masked(logits, ids, 0.7, return_entropy=True, **support)
    got = rlkernel.logprob(logits, ids, temperature=t, return_entropy=True, **support)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=501 * 2.0**-41)


def test_fp64_supports_of_a_head_keep_the_digits_of_the_temperature():
    hidden, weight, ids = _head(torch.float64)
    support = supports(ids, 33, (5, 0, 1))
    want = masked(hidden @ weight.T, ids, 0.7, **support)[0]
    got = rlkernel.linear_logprob(hidden, weight, ids, temperature=0.7, **support).logprobs
    torch.testing.assert_close(got, want, rtol=1e-12, atol=33 * 2.0**-44)


def test_fp64_supports_have_the_bits_of_a_rollout():
    logits, _ = _logits((7, 501), torch.float64)
    options = {
        "temperature": 0.7,
        "top_p": 0.8,
        "seeds": 3,
        "return_support": 501,
        "return_logprobs": ("processed",),
    }
    drawn = rlkernel.sample(logits, **options)
    support = {"support_ids": drawn.support_ids, "support_offsets": drawn.support_offsets}
    again = rlkernel.logprob(logits, drawn.token_ids, temperature=0.7, **support)
    assert_equal("logprobs", again.logprobs, drawn.processed_logprobs)
