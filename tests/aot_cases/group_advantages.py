"""Calls of ``group_advantages`` of every estimator."""

import functools

import torch

from rlkernel.calls.group_advantages import GroupAdvantagesCall
from rlkernel.triton_ops import group_advantages


def cases():
    one, three = torch.zeros(12, 1), torch.zeros(12, 3)
    ids, offsets = torch.arange(12), torch.tensor([0, 5, 12])
    weights, each = torch.ones(3), torch.ones(12)

    plain = GroupAdvantagesCall(
        one, None, None, 4, None, None, None, None, "grpo", "group", True, 1e-4, "reward", 1e-8, "std"
    )

    def case(estimator, **changes):
        return functools.partial(group_advantages.forward, plain._replace(estimator=estimator, **changes))

    return {
        "grpo": case("grpo"),
        "grpo ids mask": case("grpo", group_ids=ids, mask=one == 0),
        "grpo offsets batch": case("grpo", scale_rewards="batch", group_offsets=offsets),
        "dr_grpo": case("dr_grpo", scale_rewards="none"),
        "rloo weighted": case("rloo", rewards=three, reward_weights=weights, mask=three == 0),
        "opo": case("opo", lengths=each),
        "maxrl": case("maxrl"),
        "grpo_loo": case("grpo_loo", group_ids=ids, mask=one == 0),
        "grpo_passk": case("grpo_passk"),
        "gdpo": case("gdpo", rewards=three, reward_weights=weights, mask=three == 0, lengths=each),
        "gdpo batch": case("gdpo", rewards=three, scale_rewards="batch", reward_weights=weights),
        "remax": case("remax", baselines=each),
    }
