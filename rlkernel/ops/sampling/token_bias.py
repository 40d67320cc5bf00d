"""Biases of few tokens of each row, without a tensor as wide as the vocabulary."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _scalars, _validate
from rlkernel.ops.sampling.numbers import Rows, of_width
from rlkernel.runtime import debug


class TokenBias(NamedTuple):
    """Biases of some tokens: [K] the same for all rows, or [..., K] for each.

    Equal to ``z[row, token_ids[row, k]] += values[row, k]``; ``-inf`` bans a token.  Ids outside [0, V) are
    padding.  Of a token that stands twice in a row the smaller value counts, so that no order of the entries
    does.  ``values`` are a number or have the shape of ``token_ids``.

    Examples:
        >>> ban = rlkernel.TokenBias(torch.tensor([1]), -torch.inf)
        >>> rlkernel.sample(torch.tensor([[1.0, 3.0, 2.0]]), temperature=0.0, logit_bias=ban).token_ids
        tensor([2])
    """

    token_ids: Tensor
    values: Tensor | float

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[int, float] | None], vocab: int, device: torch.device | str = "cpu"
    ) -> "TokenBias":
        """Of one ``{token: bias}`` for each row, or None where a row has none."""
        for i, row in enumerate(rows):
            if row is not None and not isinstance(row, Mapping):
                raise TypeError(f"logit_bias[{i}] must be a dict or None, got {type(row).__name__}")
        width = max([0, *[len(row) for row in rows if row]])  # torch.compile traces no default of max
        ids = torch.full((len(rows), width), -1, dtype=torch.int64, device="cpu")
        values = torch.zeros(len(rows), width, dtype=torch.float64, device="cpu")
        for i, row in enumerate(rows):
            name = "logit_bias" if len(rows) == 1 else f"logit_bias[{i}]"
            for token, value in (row or {}).items():
                id = _scalars.as_int(token)
                if id is None or not 0 <= id < vocab:
                    raise ValueError(f"logit_bias must have token ids in [0, {vocab}) as keys, got {token!r}")
                if not _scalars.is_number(value):
                    raise ValueError(f"{name}[{token}] must be a number, got {type(value).__name__}")
                if not _scalars.rounded(value, torch.float32) < math.inf:  # logits are fp32 at least
                    raise ValueError(f"{name}[{token}] must be finite or -inf, got {value}")
            if row:
                ids[i, : len(row)] = torch.tensor(list(row), device="cpu")
                wide = [_scalars.rounded(x, torch.float64) for x in row.values()]
                values[i, : len(row)] = torch.tensor(wide, dtype=torch.float64, device="cpu")
        return cls(ids.to(device), values.to(device))

    def flat(self, rows: Rows) -> "TokenBias":
        """For each row: [B, K]."""
        ids, values = self
        width = of_width("logit_bias.token_ids", ids, rows)
        if isinstance(values, Tensor) and values.dim() and values.shape != ids.shape:
            want = f"one value or have shape {tuple(ids.shape)}"
            raise ValueError(f"logit_bias.values must be {want}, got {tuple(values.shape)}")
        if not isinstance(values, Tensor) and not _scalars.is_number(values):
            raise TypeError(f"logit_bias.values must be numbers or a tensor, got {type(values).__name__}")
        if isinstance(values, Tensor):
            _validate.without_gradient("logit_bias.values", values)
            values = values.expand(ids.shape).expand(*rows.shape, width).reshape(rows.total, width)
        return TokenBias(ids.expand(*rows.shape, width).reshape(rows.total, width), values)

    def at_each(self, places: int) -> "TokenBias":
        """Of [B, K] for each request, [B, places, K]."""
        ids, values = self
        if isinstance(values, Tensor) and values.dim():
            values = values[:, None].expand(-1, places, -1)
        return TokenBias(ids[:, None].expand(-1, places, -1), values)

    def of_rows(self, a: int, b: int, z: Tensor) -> "TokenBias":
        """Those of the rows from ``a`` to ``b`` of ``z``; raises ValueError for what is off in any."""
        self._looked_at(z)
        ids, values = self
        return TokenBias(ids[a:b], values[a:b] if isinstance(values, Tensor) and values.dim() else values)

    def add_to(self, z: Tensor) -> None:
        """Add to the rows of ``z`` [B, V], in place."""
        ids, values = self
        _validate.same_device("logit_bias.token_ids", ids, "logits", z.device)
        bias, inside = self._looked_at(z)
        if ids.shape[1] == 0:
            return
        # padding becomes a second entry like the row's first one; of a row without any, token 0 as it is
        first = inside.to(torch.int32).argmax(-1, keepdim=True)
        place = torch.where(inside, torch.arange(ids.shape[1], device=ids.device), first)
        some = inside.any(-1, keepdim=True)
        index = torch.where(some, ids.long().gather(1, place), 0)
        candidates = z.gather(1, index) + torch.where(some, bias.gather(1, place), 0)
        z.scatter_reduce_(1, index, candidates, "amin", include_self=False)

    def _looked_at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The values as ``z`` has them, and which of the ids are tokens."""
        ids, values = self
        bias = torch.as_tensor(values, dtype=z.dtype, device=z.device).detach().expand(ids.shape)
        inside = (ids >= 0) & (ids < z.shape[1])
        if debug.may_read(bias):
            wrong = inside & ~(bias < torch.inf)
            if wrong.any():
                at = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(f"logit_bias must be finite or -inf, got {bias[at].item()} of row {at[0]}")
        return bias, inside


LogitBias = Tensor | TokenBias | Mapping[int, float] | Sequence[Mapping[int, float] | None]
