"""Calls of ``divergence``, forward and backward: of each kind, masked, of equal and of different widths; and
as ``linear_divergence`` calls it, of fp32 rows whose gradient is written in the dtype of a product."""

import torch

from rlkernel.calls.divergence import DivergenceCall
from rlkernel.triton_ops import divergence


def cases():
    def run(vocab, dtype, teacher_dtype, beta, masked, entropy):
        logits, teacher = (torch.ones(2, 5, vocab, dtype=x)[:, :4] for x in (dtype, teacher_dtype))
        mask = torch.ones(2, 4, dtype=torch.bool) if masked else None
        call = DivergenceCall(logits, teacher, mask, beta, 0.8, entropy)
        divergence.backward(call, divergence.forward(call), torch.ones(2, 4))

    def run_on_products(vocab, dtype, beta):
        """Forward of whole rows; backward of a slice of them, into a tile of another dtype."""
        logits, teacher = torch.ones(4, vocab), torch.ones(4, vocab)
        call = DivergenceCall(logits, teacher, None, beta, 0.8, False)
        results = divergence.forward(call)
        tile = call._replace(logits=torch.ones(4, 1024), teacher_logits=torch.ones(4, 1024))
        divergence.gradient_into(tile, results, torch.ones(4), torch.empty(4, 1024, dtype=dtype))

    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "bf16 forward": lambda: run(151936, bf16, bf16, 0.0, True, True),
        "bf16 reverse": lambda: run(151936, bf16, bf16, 1.0, False, False),
        "bf16 mixed": lambda: run(151936, bf16, bf16, 0.5, True, False),
        "fp32 mixed": lambda: run(1000, fp32, fp32, 0.5, False, True),
        "fp32 beside bf16": lambda: run(33001, fp32, bf16, 1.0, True, True),
        "fp16 forward": lambda: run(32000, torch.float16, torch.float16, 0.0, False, False),
        "fp32 forward, bf16 gradient": lambda: run_on_products(151936, bf16, 0.0),
        "fp32 reverse, bf16 gradient": lambda: run_on_products(151936, bf16, 1.0),
        "fp32 mixed, bf16 gradient": lambda: run_on_products(151936, bf16, 0.5),
        "fp32 mixed, fp16 gradient": lambda: run_on_products(32000, torch.float16, 0.5),
    }
