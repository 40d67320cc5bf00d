"""Calls of ``matmul``: tiles of each height, forward as a linear layer has it, and both backward products.

Those of 16 bits with many rows, aligned and in no batch, are copied by descriptors where a GPU has them.
"""

import torch

from rlkernel.calls.matmul import MatmulCall
from rlkernel.triton_ops import matmul


def cases():
    def forward(dtype, rows, size=1024, out_dtype=None, bias=False, batch=1):
        a, weight = (torch.empty(batch, n, size, dtype=dtype) for n in (rows, 512))
        row = torch.empty(512, dtype=dtype) if bias else None
        return lambda: matmul.forward(MatmulCall(a, weight.mT, row, out_dtype or dtype))

    def backward(dtype, upstream, needs):
        a, weight = torch.empty(1, 256, 1024, dtype=dtype), torch.empty(1, 512, 1024, dtype=dtype)
        call = MatmulCall(a, weight.mT, None, dtype, needs=needs)
        return lambda: matmul.backward(call, None, torch.empty(1, 256, 512, dtype=upstream))

    of_a, of_b = (True, False, False), (False, True, False)
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    return {
        "bf16 M = 1": forward(bf16, 1),
        "bf16 M = 64": forward(bf16, 64),
        "bf16 M = 512": forward(bf16, 512, bias=True),
        "bf16 M = 512 to fp32": forward(bf16, 512, out_dtype=fp32),
        "bf16 M = 512 by pointers": forward(bf16, 512, batch=2),
        "fp16 M = 512 odd K": forward(fp16, 512, 1023),
        "fp32 M = 1": forward(fp32, 1),
        "fp32 M = 512": forward(fp32, 512, bias=True),
        "bf16 gradient of a": backward(bf16, bf16, of_a),
        "bf16 gradient of b": backward(bf16, bf16, of_b),
        "bf16 gradient of a, of fp32": backward(bf16, fp32, of_a),
        "fp32 gradient of a": backward(fp32, fp32, of_a),
        "fp32 gradient of b": backward(fp32, fp32, of_b),
    }
