"""policy_loss against NeMo-RL: its own functions, in value and gradient."""

import pytest
import torch
from peer_sources import load
from policy_cases import run
from policy_peers import check_same
from policy_sources import KEPT, NEMO_RL, drifting, nemo_results

import rlkernel


def nemo_loss(inputs, **changes):
    return nemo_results(inputs, **changes)[0]


@pytest.mark.parametrize("token_level", [True, False])
def test_tokens_outside_a_support_have_nemo_rls_gradient(token_level):
    """There their log-probabilities become 0: the same counts, no gradient, and a constant -A in the loss."""
    tools = load("nemo-rl", "nemo_rl/algorithms/utils.py", "mask_out_neg_inf_logprobs")
    inputs = drifting()
    outside = torch.zeros_like(inputs["mask"])
    outside[0, :3] = outside[4, 1] = outside[7, 2:5] = True
    outside &= inputs["mask"]
    for name in ("logprobs", "old_logprobs"):
        inputs[name] = torch.where(outside, -torch.inf, inputs[name])
    inputs["ref_logprobs"] = torch.where(outside, 0, inputs["ref_logprobs"])
    mode = "token-mean" if token_level else "seq-mean-token-mean"
    options = {"epsilon_high": 0.28, "correction": "nemo_rl:tis", "loss_agg_mode": mode, "beta": 0.2}
    options["use_bias_correction_kl"] = "score"

    def replaced(x):
        return tools.mask_out_neg_inf_logprobs(x, inputs["mask"].double(), "logprobs")

    leaf = inputs["logprobs"].clone().requires_grad_()
    rollout = torch.where(outside, 0, inputs["rollout_logprobs"])  # for a weight of 1, as ours
    theirs = inputs | {"logprobs": replaced(leaf), "old_logprobs": replaced(inputs["old_logprobs"])}
    changes = NEMO_RL["tis"] | {"use_importance_sampling_correction": True, "token_level_loss": token_level}
    loss = nemo_loss(theirs | {"rollout_logprobs": rollout}, **changes)
    (grad,) = torch.autograd.grad(loss, leaf)
    ours, metrics, got, *_ = run("reference", inputs, **options)
    assert metrics[rlkernel.POLICY_METRICS.index("outside_support")] == outside.sum() > 4
    assert (got - grad).abs().max() < 1e-7 and not got[outside].any()
    share, tokens = torch.where(outside, inputs["advantages"], 0).sum(-1), inputs["mask"].sum(-1)
    share = (
        share.sum() / tokens.sum()
        if token_level
        else (share / tokens.clamp(min=1)).sum() / (tokens > 0).sum()
    )
    assert (loss + share - ours).abs() < 1e-7


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("name", NEMO_RL)
def test_is_nemo_rls_preset(name, token_level):
    inputs = drifting(rollout={"seq_mask_tis": 0.005, "icepop": 0.7}.get(name, 0.4))
    mode = "token-mean" if token_level else "seq-mean-token-mean"
    options = {"epsilon_high": 0.28, "correction": f"nemo_rl:{name}", "loss_agg_mode": mode}
    options |= {"beta": 0.2, "kl_estimator": "k3+"}  # the gradient of its k3 is that of k2
    kept = run("reference", inputs, **options)[1][KEPT]
    assert name == "tis" or 0.1 < kept < 0.97
    # it adds 1e-8 to what it divides by
    changes = {"token_level_loss": token_level, "use_importance_sampling_correction": True, **NEMO_RL[name]}
    check_same(inputs, lambda x: nemo_loss(x, **changes), inputs, 1e-7, **options)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("clamps", [(20.0, 10.0), (0.3, 0.05), (None, None)])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_is_nemo_rls_kl(estimator, clamps, on_policy):
    """Multiplied by exp(x - stop(x)), and on request by the ratio to the rollout, within its bounds."""
    inputs = drifting(rollout=0.4)
    first, second = clamps
    ours = {k: v for k, v in inputs.items() if k != "rollout_logprobs" or on_policy}
    options = {"beta": 0.2, "kl_estimator": estimator, "epsilon_high": 0.28}
    options |= {"kl_input_clamp": first, "kl_output_clamp": second}
    changes = {"reference_policy_kl_type": estimator, "use_on_policy_kl_approximation": on_policy}
    changes |= {"kl_input_clamp_value": first, "kl_output_clamp_value": second}
    check_same(
        ours, lambda x: nemo_loss(inputs | x, **changes), ours, 1e-7, **options,
        use_bias_correction_kl="rollout" if on_policy else "score",
    )  # fmt: skip
