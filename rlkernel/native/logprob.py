"""``logprob`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device.

Also the tile kernels of ``linear_logprob``: the same kernels on a slice of the vocabulary."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads, Tile
from rlkernel.drivers.logprob import unfiltered_ids, with_unfiltered_rows
from rlkernel.native import kernels, sampling, taking_logits

unsupported = taking_logits


def forward(call: LogprobCall) -> LogprobResults:
    if call.support_ids is not None:
        return _supported(call)
    results = LogprobResults.empty(call.target_ids, call.return_entropy)
    tile_forward(_tile(call), None, True, True, results)
    return results


def backward(call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    if call.gathered:
        assert results.values is not None
        out = torch.zeros(results.values.shape, dtype=torch.float32, device=results.values.device)
        _support_backward(call, results, grads, out)
        return (out,)
    out = call.logits
    if not call.inplace_backward:
        out = torch.empty_like(out, memory_format=torch.contiguous_format)
    # to the kernel of whole rows those with a support are ignored ones: it leaves zeros there
    tile = _tile(call if call.support_ids is None else call._replace(target_ids=unfiltered_ids(call)))
    tile_backward(tile, grads, results, out)
    if call.support_ids is not None:
        _support_backward(call, results, grads, out)
    return (out,)


def _supported(call: LogprobCall) -> LogprobResults:
    """The kernel takes rows with a support, ``sampling``'s the others: see the reference."""
    call, logits = _dense(call), call.logits
    assert call.support_ids is not None and call.support_offsets is not None
    values = logits.contiguous() if call.gathered else logits.new_zeros(call.support_ids.shape)
    results = LogprobResults.empty(call.target_ids, call.return_entropy)._replace(values=values)
    kernels(logits.device).logprob_support_forward(
        target_ids=call.target_ids, ignore_index=call.ignore_index, temperature=call.temperature,
        ids=call.support_ids, offsets=call.support_offsets, logits=None if call.gathered else logits,
        values=values, logprobs=results.logprobs, entropy=results.entropy, lse=results.lse,
        row_max=results.row_max, log_sum=results.log_sum,
    )  # fmt: skip
    return results if call.gathered else with_unfiltered_rows(sampling.forward, results, call)


def _support_backward(call: LogprobCall, results: LogprobResults, grads: RowGrads, out: Tensor) -> None:
    """Add the gradients of rows with a support to ``out``: [..., V], or [nnz] where logits are gathered."""
    call, values = _dense(call), results.values
    assert values is not None and call.support_ids is not None and call.support_offsets is not None
    kernels(out.device).logprob_support_backward(
        target_ids=call.target_ids, ignore_index=call.ignore_index, temperature=call.temperature,
        ids=call.support_ids, offsets=call.support_offsets, values=values, grad_logprobs=grads.logprobs,
        grad_entropy=grads.entropy, grad_lse=grads.lse, logprobs=results.logprobs, entropy=results.entropy,
        row_max=results.row_max, log_sum=results.log_sum, out=out, scattered=not call.gathered,
    )  # fmt: skip


def tile_forward(tile: Tile, state: Tensor | None, first: bool, last: bool, results: LogprobResults) -> None:
    """Take the logits of ``tile`` into ``state`` [4, R], whose rows ``State`` names.  The first tile sets it,
    the last one also writes ``results``; one that is both needs none."""
    kernels(tile.logits.device).logprob_forward(
        **_fields(tile), state=state, first=first, last=last, logprobs=results.logprobs,
        entropy=results.entropy, lse=results.lse, row_max=results.row_max, log_sum=results.log_sum,
    )  # fmt: skip


def tile_backward(tile: Tile, grads: RowGrads, results: LogprobResults, out: Tensor) -> None:
    """Write the gradient of the GEMM's result to ``out`` [..., Vt], which may be ``tile.logits`` itself."""
    kernels(tile.logits.device).logprob_backward(
        **_fields(tile), grad_logprobs=grads.logprobs, grad_entropy=grads.entropy, grad_lse=grads.lse,
        entropy=results.entropy, row_max=results.row_max, log_sum=results.log_sum, out=out,
    )  # fmt: skip


def tile_exp(tile: Tile, row_max: Tensor, out: Tensor) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` to ``out`` [R, Vt]; 0 at targets and on ignored rows."""
    kernels(tile.logits.device).logprob_exp(**_fields(tile), row_max=row_max, out=out)


def _fields(tile: Tile) -> dict[str, Any]:
    return {**tile._asdict(), "softcap": tile.softcap or 0.0}


def _dense(call: LogprobCall) -> LogprobCall:
    return call if call.target_ids.is_contiguous() else call._replace(target_ids=call.target_ids.contiguous())


def _tile(call: LogprobCall) -> Tile:
    return Tile(call.logits, 0, call.target_ids.contiguous(), call.temperature, call.ignore_index)
