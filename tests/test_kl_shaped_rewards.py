"""kl_shaped_rewards: against fp64 written out by hand and verl's own penalty."""

import pytest
import torch
from backends import of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.ops.kl_shaped_rewards import KL_ESTIMATORS
from rlkernel.reference import kl_shaped_rewards as reference

BACKENDS = of("kl_shaped_rewards")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)


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
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(str(reason))
    inputs = make_inputs(5, 30, device=device)
    scores = torch.randn(5, 30, device=device)
    kl = verl.kl_penalty(inputs["logprobs"], inputs["ref_logprobs"], kl_penalty=kl_estimator)
    got = run(backend, **inputs | {"rewards": scores}, beta=0.3, kl_estimator=kl_estimator)
    mask = inputs["mask"]
    torch.testing.assert_close(got[mask], (scores - 0.3 * kl)[mask], rtol=1e-5, atol=1e-6)
    assert (got[~mask] == 0).all()


@ON_EVERY_BACKEND
def test_verl_cuts_k3_and_we_do_not(backend, device):
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(str(reason))
    new, ref = torch.tensor([[-9.0]], device=device), torch.tensor([[-1.0]], device=device)
    assert verl.kl_penalty(new, ref, "k3").item() == 10
    got = run(backend, torch.zeros_like(new), new, ref, beta=1.0, kl_estimator="k3")
    torch.testing.assert_close(got.double(), 9 - torch.tensor([[8.0]]).double().exp())


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
    torch.testing.assert_close(returns.gather(1, first)[:, 0], shaped.sum(1), rtol=1e-5, atol=1e-5)


GOOD = {
    "rewards": torch.zeros(2),
    "logprobs": torch.zeros(2, 3),
    "ref_logprobs": torch.zeros(2, 3),
    "beta": 0.1,
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": torch.zeros(3)}, r"rewards must have logprobs' shape \(2, 3\) or .* \(2,\), got \(3,\)"),
        (
            {"ref_logprobs": torch.zeros(2, 4)},
            r"ref_logprobs must have logprobs' shape \(2, 3\), got \(2, 4\)",
        ),
        ({"logprobs": torch.zeros(2, 3, requires_grad=True)}, "logprobs must not require a gradient"),
        ({"mask": torch.ones(2)}, r"mask must have logprobs' shape \(2, 3\), got \(2,\)"),
        ({"beta": -0.1}, "beta must be >= 0 and finite, got -0.1"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of 'k1', 'abs', 'k2', 'k3', got 'k4'"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"logprobs must be \[N\] with cu_seqlens, got \(2, 3\)"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.kl_shaped_rewards(**{**GOOD, **change})
