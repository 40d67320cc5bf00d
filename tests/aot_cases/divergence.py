"""Calls of ``divergence``, forward and backward: of each kind, masked, of equal and of different widths."""

import torch

from rlkernel.calls.divergence import DivergenceCall
from rlkernel.triton_ops import divergence


def cases():
    def run(vocab, dtype, teacher_dtype, beta, masked, entropy):
        logits, teacher = (torch.ones(2, 5, vocab, dtype=x)[:, :4] for x in (dtype, teacher_dtype))
        mask = torch.ones(2, 4, dtype=torch.bool) if masked else None
        call = DivergenceCall(logits, teacher, mask, beta, 0.8, entropy)
        divergence.backward(call, divergence.forward(call), torch.ones(2, 4))

    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "bf16 forward": lambda: run(151936, bf16, bf16, 0.0, True, True),
        "bf16 reverse": lambda: run(151936, bf16, bf16, 1.0, False, False),
        "bf16 mixed": lambda: run(151936, bf16, bf16, 0.5, True, False),
        "fp32 mixed": lambda: run(1000, fp32, fp32, 0.5, False, True),
        "fp32 beside bf16": lambda: run(33001, fp32, bf16, 1.0, True, True),
        "fp16 forward": lambda: run(32000, torch.float16, torch.float16, 0.0, False, False),
    }
