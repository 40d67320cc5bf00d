"""What a backend is asked for ``kl_shaped_rewards``, and what it answers."""

from typing import NamedTuple

from torch import Tensor

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")


class KlShapedRewardsCall(NamedTuple):
    """Checked and normalised; of one dtype, rows dense, and padding a sequence of its own."""

    rewards: Tensor  # like logprobs, or one for each sequence
    logprobs: Tensor  # [B, L], or packed [N]
    ref_logprobs: Tensor
    mask: Tensor | None  # bool
    beta: float
    kl_estimator: str  # one of KL_ESTIMATORS
    kl_input: float  # bounds of |d| and of |kl|, infinite where there is none
    kl_output: float
    per_sequence: bool  # rewards
    cu_seqlens: Tensor | None  # int64, [S + 1]


class KlShapedRewardsResults(NamedTuple):
    rewards: Tensor  # of the shape of logprobs, 0 where the mask is not set
