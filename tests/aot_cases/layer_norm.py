"""Calls of ``layer_norm``, forward and backward, with and without weight and bias."""

import torch

from rlkernel.calls.layer_norm import LayerNormCall
from rlkernel.triton_ops import layer_norm


def cases():
    def run(length, dtype, weighted, biased):
        x = torch.ones(2, 3, 4, length, dtype=dtype)[:, :, :2]
        weight, bias = (torch.ones(length, dtype=dtype) if given else None for given in (weighted, biased))
        call = LayerNormCall(x, weight, bias, 1e-5, True, (True, weighted, biased))
        layer_norm.backward(call, layer_norm.forward(call), x)

    return {
        "fp32": lambda: run(1000, torch.float32, True, True),
        "bf16": lambda: run(4096, torch.bfloat16, True, True),
        "fp16 bias long": lambda: run(8193, torch.float16, False, True),
    }
