"""Rewards normalised by the mean and variance of all that were seen so far."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults, RunningOutput
from rlkernel.calls.whiten import EPS_PLACES
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._typed import typed
from rlkernel.types import EpsIn


@typed
def running_normalize(
    x: Tensor,
    state: Tensor,
    mask: Tensor | None = None,
    *,
    update: bool = True,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_in: EpsIn = "variance",
    clip: float | None = None,
) -> RunningOutput:
    """Shift and scale ``x`` by the mean and variance of everything seen so far, ``x`` included.

    A state is ``[count, mean, M2]`` in fp64, where M2 is the sum of squared deviations; zeros: nothing was
    seen.  Equal to

        count, mean, M2 = state merged with that of x[mask]                 with update; in fp64
        var = M2 / (count - 1)                                              count with unbiased=False
        normalized = clamp((x - mean) / sqrt(var + eps), -clip, clip)       / (sqrt(var) + eps), eps_in="std"

    where states merge as Chan, Golub and LeVeque have it.  Until two values were seen the variance is 1.
    Nothing synchronises, and the state is a tensor of one size: the call can be captured in a CUDA graph.
    The same calls in the same order give the same bits (run-to-run), whatever the threads and the launch.

    Args:
        x: [...] floats.
        state: [3] float64 on x's device; or [R, 3], which are merged in their order.
        mask: [...], nonzero where a value counts; None means everywhere.
        update: False leaves the state as it is: evaluation.
        shift_mean: False adds the mean back after scaling, as where only the scale of rewards is normalised.
        unbiased: divide by count - 1.
        eps: >= 0.
        eps_in: "variance" or "std".
        clip: > 0, bound of the results; None means none.

    Returns:
        RunningOutput(normalized, state): ``normalized`` of x's shape in fp32 (fp64 for fp64), 0 where the
        mask is not set, without a gradient; and the new state [3].

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  In debug mode also where
            a value that counts is not finite: it would stay in the state for ever.

    Examples:
        >>> out = rlkernel.running_normalize(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3).double())
        >>> out.normalized, out.state.tolist()
        (tensor([-1.,  0.,  1.]), [3.0, 2.0, 2.0])
    """
    _validate.constant("x", x)
    mask = _validate.mask(mask, "x", x)
    _validate.is_tensor("state", state)
    if state.dtype != torch.float64 or state.dim() not in (1, 2) or state.shape[-1] != 3:
        got = f"{_validate.name(state.dtype)} {tuple(state.shape)}"
        raise ValueError(f"state must be float64 of shape (3,) or (R, 3), got {got}")
    _validate.same_device("state", state, "x", x.device)
    _validate.without_gradient("state", state)
    eps = _validate.number("eps", eps, 0.0)
    _validate.choice("eps_in", eps_in, EPS_PLACES)
    bound = math.inf if clip is None else _validate.number("clip", clip, 0.0)
    if bound == 0:
        raise ValueError(f"clip must be > 0, got {clip}")
    x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    mask = None if mask is None else mask.contiguous()
    states = state.detach().reshape(-1, 3).contiguous()
    call = RunningNormalizeCall(x, mask, states, update, shift_mean, unbiased, eps, eps_in, bound)
    return RunningOutput(*op(call))


def _like(call: RunningNormalizeCall) -> RunningNormalizeResults:
    normalized = torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)
    return RunningNormalizeResults(normalized, call.states.new_empty(3))


op = Op(
    "running_normalize",
    RunningNormalizeCall,
    RunningNormalizeResults,
    pick=("x",),
    forward=_validate.finite_in_debug("x"),
    like=_like,
)


class RunningMoments:
    """The state of ``running_normalize``, updated in place, and merged over the ranks of a process group.

        moments = RunningMoments(device)
        rewards = moments.normalize(scores)

    ``state`` keeps its address, so that a captured graph updates it at every replay.  With ``group`` every
    rank sees the same state: the batches of all ranks are gathered and merged in the order of the ranks,
    which makes it independent of timing.  ``options`` are those of ``running_normalize``.

    Examples:
        >>> moments = rlkernel.RunningMoments()
        >>> moments.normalize(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-1.,  0.,  1.])
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, group: Any = None, distributed: bool = False
    ) -> None:
        """``distributed`` without ``group`` means all ranks."""
        self.state = torch.zeros(3, dtype=torch.float64, device=device)
        self._group, self._distributed = group, distributed or group is not None

    def normalize(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        """``x`` normalised; ``update=False`` leaves the state as it is."""
        if not self._distributed or not options.get("update", True):
            normalized, state = running_normalize(x, self.state, mask, **options)
        else:
            states = torch.cat([self.state[None], self._of_all_ranks(x, mask)])
            normalized, state = running_normalize(x, states, mask, **options | {"update": False})
        self.state.copy_(state)
        return normalized

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take ``x`` into the state."""
        self.normalize(x, mask)

    def _of_all_ranks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        own = running_normalize(x, torch.zeros_like(self.state), mask).state
        ranks = torch.distributed.get_world_size(self._group)
        gathered = own.new_empty(ranks, 3)
        torch.distributed.all_gather(list(gathered), own, group=self._group)
        return gathered

    @property
    def count(self) -> Tensor:
        return self.state[0]

    @property
    def mean(self) -> Tensor:
        return self.state[1]

    def var(self, unbiased: bool = True) -> Tensor:
        """1 until two values were seen."""
        count, _, squares = self.state
        return torch.where(count < 2, 1.0, squares / (count - int(unbiased)).clamp(min=1.0))

    def std(self, unbiased: bool = True) -> Tensor:
        return self.var(unbiased).sqrt()

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.state.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Raises ValueError where it does not hold a state [3]."""
        state = state_dict.get("state")
        if not isinstance(state, Tensor) or state.shape != (3,):
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise ValueError(f"state_dict['state'] must be a tensor of shape (3,), got {got}")
        self.state.copy_(state)
