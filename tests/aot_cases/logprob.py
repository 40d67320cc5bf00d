"""Calls of ``logprob`` on small CPU tensors, whose kernels are compiled for every GPU and not launched."""

import torch

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads, State, Tile
from rlkernel.triton_ops import logprob


def cases():
    def rows(vocab, dtype):
        return torch.empty(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2)

    def head_tile(vocab, dtype, head):
        logits, ids, t = rows(vocab, dtype)
        if head:
            return Tile(logits, 4096, ids, t, -100, torch.ones(vocab), 0.5, 30.0)
        return Tile(logits, 4096, ids, 1.0, -100)

    def results(entropy=True):
        t = torch.ones(2)
        return LogprobResults(t, t if entropy else None, t, t, t)

    def run_forward(vocab, dtype, entropy, per_row):
        logits, ids, t = rows(vocab, dtype)
        logprob.forward(LogprobCall(logits, ids, t if per_row else 0.7, -100, entropy))

    def run_backward(vocab, dtype, grads, per_row):
        logits, ids, t = rows(vocab, dtype)
        upstream = RowGrads(*(t if name in grads else None for name in RowGrads._fields))
        logprob.backward(
            LogprobCall(logits, ids, t if per_row else 0.7, -100, True, True), results(), upstream
        )

    def run_tile_forward(dtype, head, first, last):
        logprob.tile_forward(head_tile(8192, dtype, head), torch.ones(len(State), 2), first, last, results())

    def run_tile_backward(dtype, out_dtype, head):
        grads, out = RowGrads(*(torch.ones(2),) * 3), torch.empty(2, 8192, dtype=out_dtype)
        logprob.tile_backward(head_tile(8192, dtype, head), grads, results(), out)

    def run_tile_exp(out_dtype, head):
        out = torch.empty(2, 8192, dtype=out_dtype)
        logprob.tile_exp(head_tile(8192, torch.float32, head), torch.ones(2), out)

    def run_support(vocab, dtype, entropy, per_row, gathered):
        logits, targets, t = rows(vocab, dtype)
        ids, offsets = torch.zeros(6, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        source, temperature = logits[0, :6] if gathered else logits, t if per_row else 0.7
        call = LogprobCall(source, targets, temperature, -100, entropy, False, ids, offsets, gathered)
        stats = results(entropy)._replace(values=logits[0, :6])
        logprob._support_forward(call, stats)
        grads = RowGrads(t, t if entropy else None, None if gathered else t)
        logprob._support_backward(call, stats, grads, torch.zeros(6) if gathered else logits)

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    everything = "logprobs entropy lse"
    return {
        "forward bf16 entropy": lambda: run_forward(151936, bf16, True, False),
        "forward bf16": lambda: run_forward(151936, bf16, False, False),
        "forward fp16 entropy": lambda: run_forward(151936, fp16, True, False),
        "forward fp32 entropy": lambda: run_forward(151936, fp32, True, False),
        "forward bf16 entropy odd V": lambda: run_forward(50257, bf16, True, True),
        "forward bf16 entropy small V": lambda: run_forward(100, bf16, True, False),
        "forward bf16 V = 1": lambda: run_forward(1, bf16, False, False),
        "backward bf16": lambda: run_backward(151936, bf16, "logprobs", False),
        "backward bf16 all": lambda: run_backward(151936, bf16, everything, False),
        "backward fp16 all": lambda: run_backward(151936, fp16, everything, False),
        "backward fp32 all": lambda: run_backward(151936, fp32, everything, False),
        "backward bf16 all odd V": lambda: run_backward(50257, bf16, everything, True),
        "tile forward fp32 first": lambda: run_tile_forward(fp32, False, True, False),
        "tile forward fp32 middle": lambda: run_tile_forward(fp32, False, False, False),
        "tile forward fp32 head last": lambda: run_tile_forward(fp32, True, False, True),
        "tile forward bf16 head last": lambda: run_tile_forward(bf16, True, False, True),
        "tile backward fp32 to bf16": lambda: run_tile_backward(fp32, bf16, False),
        "tile backward fp32 to bf16 head": lambda: run_tile_backward(fp32, bf16, True),
        "tile backward fp32 head": lambda: run_tile_backward(fp32, fp32, True),
        "tile exp fp32 to bf16": lambda: run_tile_exp(bf16, False),
        "tile exp fp32 to bf16 head": lambda: run_tile_exp(bf16, True),
        "support bf16": lambda: run_support(151936, bf16, False, False, False),
        "support bf16 entropy": lambda: run_support(50257, bf16, True, True, False),
        "support fp16 entropy": lambda: run_support(151936, fp16, True, False, False),
        "support fp32 gathered": lambda: run_support(151936, fp32, True, False, True),
    }
