"""policy_loss against slime: its own functions, in value and gradient."""

import pytest
from policy_cases import run
from policy_peers import check_same
from policy_sources import KEPT, drifting, slime_results


def slime_loss(inputs, **changes):
    return slime_results(inputs, **changes)[0]


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_is_slimes_preset(name, per_token):
    inputs = drifting(rollout=0.7)
    mode = "token-sum" if per_token else "seq-mean-token-mean"  # its sums are divided outside
    options = {"epsilon_high": 0.28, "correction": f"slime:{name}", "beta": 0.2, "loss_agg_mode": mode}
    options |= {} if per_token else {"num_items_in_batch": 1}
    kept = run("reference", inputs, **options)[1][KEPT]
    assert name == "tis" or 0.5 < kept < 0.97
    changes = {"use_tis": True, "calculate_per_token_loss": per_token}
    changes["custom_tis_function_path"] = None if name == "tis" else "icepop_function"
    # its KL is in fp32
    check_same(inputs, lambda x: slime_loss(x, **changes), inputs, 1e-6, **options)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_is_slimes_loss_of_rollouts(algorithm, unbiased, estimator):
    """Several samples of a rollout share a mean; the KL of GSPO takes the token's own ratio."""
    inputs = drifting()
    inputs["ref_logprobs"][:, ::5] += 4.0  # k3 beyond the bound of low_var_kl, which alone has one
    counts = inputs["mask"].sum(-1).double().view(4, 3).sum(-1).repeat_interleave(3)
    options = {"beta": 0.2, "epsilon_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"}
    options |= {"loss_type": "cispo" if algorithm == "cispo" else "grpo", "num_items_in_batch": 1}
    options["importance_sampling_level"] = "sequence" if algorithm == "gspo" else "token"
    options["use_bias_correction_kl"] = "token" if unbiased else False
    bounded = {"kl_estimator": "k3", "kl_output_clamp": 10.0}
    options |= bounded if estimator == "low_var_kl" else {"kl_estimator": estimator}
    changes = {"advantage_estimator": algorithm, "use_unbiased_kl": unbiased, "kl_loss_type": estimator}
    ours = {k: v for k, v in inputs.items() if k != "rollout_logprobs"} | {"token_counts": counts}
    theirs = {k: v for k, v in inputs.items() if k != "rollout_logprobs"}
    rest = {"rollout_logprobs": inputs["rollout_logprobs"], "token_counts": counts}
    check_same(ours, lambda x: slime_loss(x | rest, **changes), theirs, 1e-6, **options)
