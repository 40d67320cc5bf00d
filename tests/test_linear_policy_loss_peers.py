"""linear_policy_loss against the real ``LigerFusedLinearGRPOLoss``: values, gradients and metrics."""

import pytest
import torch
from backends import skip_unless_able

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.ops.policy_loss import policy_loss_preset
from rlkernel.reference.linear_policy_loss import make_inputs

B, L, H, V = 4, 11, 16, 133

# Liger's loss_type: what it is here. It divides by all sequences; its cispo's epsilon_high is the cap itself.
LOSSES = {
    "grpo": policy_loss_preset("grpo") | {"num_items_in_batch": B},
    "bnpo": policy_loss_preset("bnpo"),
    "dapo": policy_loss_preset("dapo") | {"epsilon_high": 0.2},
    "dr_grpo": policy_loss_preset("dr_grpo") | {"num_items_in_batch": B, "loss_scale_factor": 20.0},
    "cispo": {"loss_type": "cispo_cap", "loss_agg_mode": "token-mean"},
    "sapo": policy_loss_preset("sapo") | {"num_items_in_batch": B},
    "luspo": policy_loss_preset("luspo") | {"num_items_in_batch": B},
    "vespo": policy_loss_preset("vespo"),
}
BOTH_LEVELS = ("grpo", "bnpo", "dapo", "dr_grpo")  # Liger refuses the others with a ratio of sequences
CASES = [
    *(
        (loss, "token", extras)
        for loss in LOSSES
        if loss not in ("luspo", "vespo")
        for extras in (False, True)
    ),
    *((loss, "sequence", extras) for loss in BOTH_LEVELS for extras in (False, True)),
    # Liger's luspo forgets the mask where a term is that of a token, as TRL's does
    ("luspo", "sequence", False),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))


def both(loss_type, level, extras, bias=False, **liger_options):
    """(value, clip fraction, gradients) of rlkernel and of Liger."""
    chunked = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed")
    inputs = make_inputs(B, L, H, V, extras=True, drift=0.4, temperature=0.8)
    skip_unless_able("native", "linear_policy_loss", inputs["hidden"], inputs["weight"])
    inputs["advantages"] = inputs["advantages"][:, 0].contiguous()
    ref, rollout = inputs.pop("ref_logprobs"), inputs.pop("rollout_logprobs")
    names = ["hidden", "weight"]
    if bias:
        names.append("bias")
        inputs["bias"] = torch.randn(V, generator=torch.Generator().manual_seed(1))
    for name in names:
        inputs[name].requires_grad_()
    ours = LOSSES[loss_type] | {"importance_sampling_level": level}
    ratio = None
    if extras:
        ours |= {"beta": 0.1, "ref_logprobs": ref, "rollout_logprobs": rollout, "correction": "token_tis"}
        ratio = (inputs["old_logprobs"] - rollout).exp().clamp(max=2)
    with rlkernel.use_backend("native"):
        out = rlkernel.linear_policy_loss(**inputs, temperature=0.8, **ours)
    grads = torch.autograd.grad(2 * out.loss, [inputs[n] for n in names])
    liger = chunked.LigerFusedLinearGRPOLoss(
        beta=0.1 if extras else 0.0, compiled=False, use_ref_model=extras, loss_type=loss_type,
        temperature=0.8,
        importance_sampling_level=level, max_completion_length=20, epsilon_low=0.2, epsilon_high=0.2,
        **liger_options,
    )  # fmt: skip
    loss, metrics = liger(
        inputs["hidden"], inputs["weight"], inputs["target_ids"], inputs["mask"].float(),
        inputs["advantages"], inputs.get("bias"), ref_per_token_logps=ref if extras else None,
        old_per_token_logps=inputs["old_logprobs"], vllm_is_ratio=ratio,
    )  # fmt: skip
    want = torch.autograd.grad(2 * loss, [inputs[n] for n in names])
    clipped = out.metrics[:2].sum()
    return (out.loss, clipped, grads), (loss, metrics[-1], want)


@pytest.mark.parametrize(("loss_type", "level", "extras"), CASES)
def test_is_ligers(loss_type, level, extras):
    ours, theirs = both(loss_type, level, extras, bias=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    if loss_type not in ("sapo", "cispo", "vespo"):
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-7)
    for a, b in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("option", [{"delta": 1.3}, {"use_bias_correction_kl": True}], ids=str)
def test_options_are_ligers(option, monkeypatch):
    monkeypatch.setitem(LOSSES, "grpo", LOSSES["grpo"] | option)
    for level in ("token", "sequence"):
        ours, theirs = both("grpo", level, True, **option)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        for a, b in zip(ours[2], theirs[2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-6 * max(1.0, b.abs().max().item()))
