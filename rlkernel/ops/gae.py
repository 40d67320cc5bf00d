"""Generalised advantage estimation over token sequences."""

import torch
from torch import Tensor

from rlkernel.calls.gae import HOLES, GaeCall, GaeOutput, GaeResults
from rlkernel.opaque import Op
from rlkernel.ops import _packing, _validate
from rlkernel.ops._typed import typed
from rlkernel.ops.whiten import whiten as _whiten
from rlkernel.types import Holes


@typed
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    return_lam: float | Tensor | None = None,
    holes: Holes = "skip",
    cu_seqlens: Tensor | None = None,
    last_values: Tensor | None = None,
    whiten: bool = False,
) -> GaeOutput:
    """Advantages and returns of every token, by one backward walk over each sequence.

    Equal to, with ``next`` the next token of the sequence whose mask is set,

        delta_t = rewards_t + gamma * values_next - values_t
        advantages_t = delta_t + gamma * lam * advantages_next
        returns_t = advantages_t + values_t

    After the last token ``values_next`` is ``last_values`` and ``advantages_next`` is 0.  Tokens whose mask
    is not set (observations, tool output, padding) are stepped over: what they hold, NaN included, is never
    used, what comes behind them is carried to what comes before, and their results are 0.  With ``holes``
    "zero" they are tokens of reward and value 0, over which ``next`` does not step (OpenRLHF); they are never
    read and their results are 0 all the same.

    A sequence's bits depend on that sequence alone (batch-invariant), and are the same packed and padded; the
    same call gives the same bits (run-to-run).  ``whiten=True`` mixes the batch: advantages are then run-to-
    run only.

    Args:
        rewards: [B, L], or packed [N] with ``cu_seqlens``; floats.
        values: of the same shape; floats.
        mask: of the same shape, nonzero where a token counts; None means everywhere.
        gamma: discount in [0, 1].
        lam: the lambda of the estimator in [0, 1], one number or [B] or [S]; 1 makes ``returns`` the
            discounted rewards to go.
        return_lam: another lambda for ``returns``, whose advantages are then not those returned (VAPO); a
            second walk.
        holes: what tokens under the mask are: "skip" or "zero".
        cu_seqlens: [S + 1] integers that rise from 0; sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``,
            and tokens behind the last are padding.
        last_values: [B] or [S], the value after each sequence's last token, for one that was cut off; None
            means 0: the sequence ended.  Not with ``holes`` "zero", where padding is part of a sequence.
        whiten: also ``rlkernel.whiten(advantages, mask)``.

    Returns:
        GaeOutput(advantages, returns) in fp32 (fp64 when an input is fp64); constants without a gradient.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  What ``cu_seqlens`` holds
            is checked on a CPU, and on a GPU only in debug mode (``RLKERNEL_DEBUG=1``), because that
            synchronises; debug mode also raises for a token that counts and is not finite.

    Schulman et al. (arXiv 1506.02438); the mask as verl's ``compute_gae_advantage_return``, which whitens and
    leaves the carried advantage under the mask instead of 0.

    Examples:
        >>> rewards = torch.tensor([[0.0, 0.0, 1.0]])
        >>> rlkernel.gae(rewards, torch.zeros(1, 3), gamma=0.5, lam=1.0).advantages
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    _validate.constant("rewards", rewards)
    _packing.form("rewards", rewards, cu_seqlens)
    _validate.constant("values", values)
    _validate.like("values", values, "rewards", rewards)
    mask = _validate.mask(mask, "rewards", rewards)
    gamma = _validate.fraction("gamma", gamma)
    _validate.choice("holes", holes, HOLES)
    if cu_seqlens is not None:
        cu_seqlens = _packing.offsets("cu_seqlens", cu_seqlens, "rewards", rewards.device)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards, values = _validate.rows(rewards, dtype), _validate.rows(values, dtype)
    rows = len(rewards) if cu_seqlens is None else cu_seqlens.numel() - 1
    lam = _lambda("lam", lam, rows, rewards)
    if return_lam is not None:
        return_lam = _lambda("return_lam", return_lam, rows, rewards)
    if last_values is not None:
        if holes == "zero":
            raise ValueError("last_values must be None with holes = 'zero', got a tensor")
        _validate.constant("last_values", last_values)
        if last_values.shape != (rows,):
            raise ValueError(f"last_values must have shape {(rows,)}, got {tuple(last_values.shape)}")
        _validate.same_device("last_values", last_values, "rewards", rewards.device)
        last_values = last_values.to(dtype).contiguous()
    if cu_seqlens is not None:
        cu_seqlens, mask, last_values, lam, return_lam = _packing.padded(
            cu_seqlens, mask, rewards, last_values, lam, return_lam
        )
    call = GaeCall(rewards, values, mask, gamma, lam, cu_seqlens, last_values, holes)
    advantages, returns = op(call)
    if return_lam is not None:
        returns = op(call._replace(lam=return_lam))[1]
    return GaeOutput(_whiten(advantages, mask) if whiten else advantages, returns)


def _lambda(name: str, lam: float | Tensor, rows: int, rewards: Tensor) -> float | Tensor:
    """One number, or one for each sequence, in double as the walk is."""
    if not isinstance(lam, Tensor):
        return _validate.fraction(name, lam)
    _validate.constant(name, lam)
    if lam.shape != (rows,):
        raise ValueError(f"{name} must be a number or have shape {(rows,)}, got {tuple(lam.shape)}")
    _validate.same_device(name, lam, "rewards", rewards.device)
    _validate.look(name, lam, _validate.Range(0.0, 1.0).holds, "in [0, 1]")
    return lam.to(torch.float64).contiguous()


op = Op(
    "gae",
    GaeCall,
    GaeResults,
    pick=("rewards", "values"),
    forward=_validate.finite_in_debug("rewards", "values"),
    like=lambda call: GaeResults(*(call.rewards.new_empty(call.rewards.shape) for _ in range(2))),
    look=lambda call: _packing.check(call.cu_seqlens, len(call.rewards)),
)
