"""Calls of the product of FP8 with FP8: each layout of scales, each FP8, and H with and without a tail."""

import torch

from rlkernel.drivers.linear_logprob_fp8 import Codes
from rlkernel.triton_ops import linear_logprob_fp8


def cases():
    def run(dtype, size, group, block, out_dtype=torch.float32):
        hidden, weight = torch.empty(200, size).to(dtype), torch.empty(300, size).to(dtype)
        codes = Codes(hidden, torch.ones(200, -(-size // group)), group)
        scale = torch.ones(-(-300 // block[0]), -(-size // block[1]))
        out = torch.empty(200, 300, dtype=out_dtype)
        linear_logprob_fp8.multiply(codes, weight, scale, block, 0, out)

    fn, fnuz, bf16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
    return {
        "rows, a scale each": lambda: run(fn, 4096, 4096, (1, 4096), bf16),
        "blocks of 128": lambda: run(fn, 4096, 128, (128, 128)),
        "blocks of 128 odd H": lambda: run(fn, 4000, 128, (128, 128)),
        "blocks of 64": lambda: run(fn, 4096, 64, (64, 64)),
        "one scale fnuz": lambda: run(fnuz, 4096, 4096, (300, 4096)),
        "blocks of 128 fnuz": lambda: run(fnuz, 4096, 128, (128, 128)),
    }
