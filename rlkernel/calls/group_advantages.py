"""What a backend is asked for ``group_advantages``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

from rlkernel.calls.whiten import WhitenCall

ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "grpo_loo",
    "opo",
    "maxrl",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
)
# what a kernel makes of a group for each of them
KINDS = {
    "dr_grpo": "deviation", "reinforce_plus_plus_baseline": "deviation", "grpo": "scaled", "rloo": "rloo",
    "opo": "opo", "maxrl": "maxrl", "grpo_passk": "passk", "gdpo": "gdpo", "reinforce_plus_plus": "total",
    "remax": "total", "grpo_loo": "leave_one_out",
}  # fmt: skip
UNGROUPED = ("reinforce_plus_plus", "remax")
SCALED = ("grpo", "grpo_passk", "gdpo")  # by one of SCALES
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
SCALES = ("group", "batch", "none")
SINGLETONS = ("zero", "reward")


class GroupAdvantagesCall(NamedTuple):
    """Checked and normalised; groups are named by ids, by offsets, or by one size for all."""

    rewards: Tensor  # [N, K] dense
    mask: Tensor | None  # [N, K] bool, dense
    group_ids: Tensor | None  # [N] int64
    group_size: int
    group_offsets: Tensor | None  # [G + 1] int64
    reward_weights: Tensor | None  # [K]
    baselines: Tensor | None  # [N]
    lengths: Tensor | None  # [N]
    estimator: str  # one of ESTIMATORS
    scale_rewards: str  # one of SCALES
    unbiased: bool
    eps: float
    singletons: str  # one of SINGLETONS
    batch_eps: float
    batch_eps_in: str  # one of EPS_PLACES of whiten

    def whitening(self, x: Tensor, counts: Tensor | None, weights: Tensor | None) -> WhitenCall:
        """What comes behind the groups, where the estimator is one of WHITENED."""
        return WhitenCall(x, counts, weights, True, self.unbiased, self.batch_eps, self.batch_eps_in)


class GroupAdvantagesResults(NamedTuple):
    advantages: Tensor  # [N]
