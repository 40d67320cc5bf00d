"""The recipe of GRPO with rollouts of vLLM, in its short form: what it says of rollout and trainer is so."""

import recipes


def test_the_ratio_is_one_with_rlkernel_alone(capfd):
    found = recipes.run("grpo_vllm", "--short", "--threads", "1", "--workspace", "4", "--quiet")
    printed = capfd.readouterr().out
    stock, patched = found["stock"]["rollout"], found["patched"]["rollout"]
    assert stock["tokens"] > 12 * 128 and patched["tokens"] > 12 * 128
    assert patched["equal"] == patched["tokens"] and patched["max"] == patched["kl"] == 0
    assert patched["ratios"] == [1, 1]
    assert stock["equal"] < stock["tokens"] / 2 and stock["max"] > 0.05 and stock["kl"] > 1e-4
    for mode in ("stock", "patched"):
        assert recipes.rise(found[mode]["reward"]) > 0.1
    assert not found["patched"]["fallbacks"]
    assert found["patched"]["summary"]["peak_mib"] < found["stock"]["summary"]["peak_mib"]
    assert f"{patched['equal']:>7} of {patched['tokens']:<5}                   0" in printed
