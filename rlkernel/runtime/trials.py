"""What runs only where it is asked for, because no GPU has passed its tests yet."""

from rlkernel.runtime import debug

STORE_SCORES = "RLKERNEL_STORE_SCORES"


def stores_scores() -> bool:
    """Whether the backward pass of ``prefix_shared_attention`` may store gradients of scores.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return debug.flag(STORE_SCORES)
