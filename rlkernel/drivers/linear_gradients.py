"""From the gradients of tiles of logits to those of hidden states, lm_head and bias."""

from typing import Protocol

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, Needs
from rlkernel.drivers.linear_products import Scratch, rows_of


class Fill(Protocol):
    """Writes to ``dz`` the gradient of what the product gave, of the rows [a, b) and the entries [v0, v1)."""

    def __call__(self, logits: Tensor, v0: int, v1: int, a: int, b: int, dz: Tensor) -> None: ...


def head_gradients(
    scratch: Scratch, rows: Tensor | None, needs: Needs, bias_dtype: torch.dtype | None, fill: Fill
) -> LinearGrads:
    """Those of ``needs``, from the logits of ``rows`` that ``scratch`` multiplies tile by tile."""
    hidden, weight, n = scratch.source, scratch.weight, scratch.n
    # without a gather every element is written, else rows go where they belong
    new_hidden = hidden.new_empty if rows is None and n else hidden.new_zeros
    dhidden = new_hidden(hidden.shape) if needs[0] else None
    dweight = (weight.new_empty if n else weight.new_zeros)(weight.shape) if needs[1] else None
    with_bias = needs[2] and bias_dtype is not None
    dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if with_bias else None
    for begin, end in scratch.rounds():
        # after one round the weight's and the bias's are complete
        into_weight, into_bias = (dweight, dbias) if begin == 0 else (None, None)
        of_all = into_weight is not None or into_bias is not None
        for v0, v1, w in scratch.weight_slices():
            dw_slice = rows_of(into_weight, v0, v1)
            dw = None if dw_slice is None else scratch.weight_gradient(dw_slice)
            for a, b in scratch.chunks() if of_all else scratch.chunks(begin, end):
                h = scratch.hidden(rows, a, b)
                logits = scratch.logits(h, w, v0, a)
                dz = scratch.gradient(logits)
                fill(logits, v0, v1, a, b, dz)
                if dhidden is not None and a < end:
                    sums = scratch.round_sums(dhidden, a, b, begin)
                    scratch.accumulate(sums, dz, w, v0 == 0)
                    if v1 == weight.shape[0]:
                        scratch.store_round(dhidden, rows, a, b, sums)
                if dw is not None:
                    scratch.accumulate(dw, dz.T, h, a == 0)
                if into_bias is not None:
                    into_bias[v0:v1] += dz.sum(0, dtype=torch.float32)
            if dw is not None and dw_slice is not None and dw is not dw_slice:
                dw_slice.copy_(dw)
    return LinearGrads(dhidden, dweight, None if dbias is None else dbias.to(bias_dtype))
