"""Every Triton kernel compiles for the GPUs that rlkernel names, holds its values in registers, and fits.

See triton_aot.py for what is compiled.  A kernel that spills, or grows by more than a quarter over what was
measured when it was written (Triton 3.7.1), fails here; raise a figure below only together with the reason.
"""

import re
import sys
from pathlib import Path

import pytest

from rlkernel.bench.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent / "codegen"))

import portable

triton = pytest.importorskip("triton", reason="Triton is not installed")

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDER, NEWER = VERSION < (3, 7), VERSION > (3, 7)
COMPILED, TARGETS = portable.TARGETS, portable.KEPT

# registers a thread, per target in the order of TARGETS; None where the case launches another kernel
REGISTERS = {
    ("gae: padded", "gae_kernel"): (96, 102, 104, 95),
    ("gae: padded mask last", "gae_kernel"): (96, 104, 104, 81),
    ("gae: packed mask", "gae_kernel"): (102, 120, 118, 95),
    ("gae: lams holes", "gae_kernel"): (96, 104, 104, 81),
    ("whiten: plain", "moments_kernel"): (64, 64, 64, 30),
    ("whiten: plain", "scale_kernel"): (32, 40, 38, 31),
    ("whiten: mask weights std", "moments_kernel"): (64, 64, 64, 30),
    ("whiten: mask weights std", "scale_kernel"): (46, 48, 48, 31),
    ("whiten: of fp64", "moments_kernel"): (64, 64, 64, 30),
    ("whiten: of fp64", "scale_kernel"): (46, 46, 46, 31),
    ("whiten: running", "moments_kernel"): (64, 64, 64, 30),
    ("whiten: running", "scale_kernel"): (51, 57, 57, 38),
    ("kl_shaped_rewards: k1 per token", "kl_kernel"): (48, 40, 46, 25),
    ("kl_shaped_rewards: k3 per sequence", "kl_kernel"): (91, 78, 98, 52),
    ("kl_shaped_rewards: k2 packed", "kl_kernel"): (40, 40, 44, 28),
    ("kl_shaped_rewards: k3 packed per sequence", "kl_kernel"): (79, 79, 80, 56),
    ("group_advantages: grpo", "group_kernel"): (32, 32, 30, 24),
    ("group_advantages: grpo ids mask", "group_kernel"): (32, 32, 32, 24),
    ("group_advantages: grpo offsets batch", "batch_kernel"): (64, 64, 64, 32),
    ("group_advantages: grpo offsets batch", "group_kernel"): (32, 32, 32, 33),
    ("group_advantages: dr_grpo", "group_kernel"): (32, 32, 32, 22),
    ("group_advantages: rloo weighted", "group_kernel"): (32, 40, 40, 26),
    ("group_advantages: opo", "group_kernel"): (32, 32, 32, 24),
    ("group_advantages: maxrl", "group_kernel"): (32, 32, 28, 22),
    ("group_advantages: grpo_loo", "group_kernel"): (32, 32, 32, 27),
    ("group_advantages: grpo_passk", "group_kernel"): (32, 32, 32, 30),
    ("group_advantages: gdpo", "group_kernel"): (40, 40, 40, 35),
    ("group_advantages: gdpo", "moments_kernel"): (64, 64, 64, 30),
    ("group_advantages: gdpo", "scale_kernel"): (46, 46, 46, 31),
    ("group_advantages: gdpo batch", "batch_kernel"): (64, 64, 64, 30),
    ("group_advantages: gdpo batch", "group_kernel"): (48, 48, 48, 45),
    ("group_advantages: gdpo batch", "moments_kernel"): (64, 64, 64, 30),
    ("group_advantages: gdpo batch", "scale_kernel"): (46, 46, 46, 31),
    ("group_advantages: remax", "group_kernel"): (29, 29, 27, 12),
    ("linear_logprob: fused bf16", "product_kernel"): (203, 255, 210, 156),
    ("linear_logprob: fused bf16", "merge_kernel"): (40, 40, 40, 38),
    ("linear_logprob: fused bf16 entropy", "product_kernel"): (206, 255, 210, 156),
    ("linear_logprob: fused bf16 entropy", "merge_kernel"): (56, 48, 48, 46),
    ("linear_logprob: fused bf16 entropy softcap", "product_kernel"): (207, 168, 177, 178),
    ("linear_logprob: fused bf16 entropy softcap", "merge_kernel"): (56, 48, 48, 46),
    ("linear_logprob: fused bf16 entropy head", "product_kernel"): (217, 149, 193, 181),
    ("linear_logprob: fused bf16 entropy head", "merge_kernel"): (56, 48, 48, 46),
    ("linear_logprob: fused bf16 statistics", "product_kernel"): (208, 255, 254, 158),
    ("linear_logprob: fused bf16 statistics", "merge_kernel"): (72, 64, 72, 54),
    ("linear_logprob: fused fp16 entropy odd H", "product_kernel"): (210, 194, 237, 105),
    ("linear_logprob: fused fp16 entropy odd H", "merge_kernel"): (56, 48, 48, 46),
    ("linear_logprob: fused gradient bf16", "row_gradient_kernel"): (30, 30, 30, 35),
    ("linear_logprob: fused gradient bf16", "logits_gradient_kernel"): (99, 168, 168, 84),
    ("linear_logprob: fused gradient bf16", "gradient_product_kernel"): (166, 180, 168, 64),
    ("linear_logprob: fused gradient bf16 of weight", "row_gradient_kernel"): (30, 30, 30, 35),
    ("linear_logprob: fused gradient bf16 of weight", "logits_gradient_kernel"): (99, 168, 168, 84),
    ("linear_logprob: fused gradient bf16 of weight", "gradient_product_kernel"): (168, 154, 168, 64),
    ("linear_logprob: fused gradient bf16 entropy, in slices", "row_gradient_kernel"): (32, 32, 32, 36),
    ("linear_logprob: fused gradient bf16 entropy, in slices", "logits_gradient_kernel"): (
        100,
        215,
        168,
        104,
    ),
    ("linear_logprob: fused gradient bf16 entropy, in slices", "gradient_product_kernel"): (
        227,
        216,
        125,
        103,
    ),
    ("linear_logprob: fused gradient bf16 of weight, in chunks", "row_gradient_kernel"): (30, 30, 30, 35),
    ("linear_logprob: fused gradient bf16 of weight, in chunks", "logits_gradient_kernel"): (
        99,
        168,
        168,
        84,
    ),
    ("linear_logprob: fused gradient bf16 of weight, in chunks", "gradient_product_kernel"): (
        168,
        246,
        128,
        64,
    ),
    ("linear_logprob: fused gradient bf16 softcap", "row_gradient_kernel"): (30, 30, 30, 35),
    ("linear_logprob: fused gradient bf16 softcap", "logits_gradient_kernel"): (105, 108, 230, 154),
    ("linear_logprob: fused gradient bf16 softcap", "gradient_product_kernel"): (166, 180, 168, 64),
    ("linear_logprob: fused gradient bf16 entropy head", "row_gradient_kernel"): (40, 40, 40, 45),
    ("linear_logprob: fused gradient bf16 entropy head", "logits_gradient_kernel"): (142, 128, 123, 120),
    ("linear_logprob: fused gradient bf16 entropy head", "gradient_product_kernel"): (168, 154, 168, 64),
    ("linear_logprob: fused gradient fp16 entropy odd H", "row_gradient_kernel"): (32, 32, 32, 36),
    ("linear_logprob: fused gradient fp16 entropy odd H", "logits_gradient_kernel"): (157, 128, 124, 74),
    ("linear_logprob: fused gradient fp16 entropy odd H", "gradient_product_kernel"): (164, 121, 128, 64),
    ("linear_logprob_fp8: rows, a scale each", "fp8_product_kernel"): (171, 160, 158, 89),
    ("linear_logprob_fp8: blocks of 128", "fp8_product_kernel"): (255, 232, 161, 116),
    ("linear_logprob_fp8: blocks of 128 odd H", "fp8_product_kernel"): (255, 234, 164, 113),
    ("linear_logprob_fp8: blocks of 64", "fp8_product_kernel"): (164, 154, 182, 123),
    ("linear_logprob_fp8: one scale fnuz", "fp8_product_kernel"): (173, 128, 124, 112),
    ("linear_logprob_fp8: blocks of 128 fnuz", "fp8_product_kernel"): (255, 190, 162, 144),
    ("logprob: forward bf16 entropy", "forward_kernel"): (48, 40, 48, 61),
    ("logprob: forward bf16", "forward_kernel"): (39, 32, 40, 49),
    ("logprob: forward fp16 entropy", "forward_kernel"): (40, 40, 40, 61),
    ("logprob: forward fp32 entropy", "forward_kernel"): (40, 32, 40, 48),
    ("logprob: forward bf16 entropy odd V", "forward_kernel"): (59, 61, 60, 65),
    ("logprob: forward bf16 entropy small V", "forward_kernel"): (46, 47, 42, 45),
    ("logprob: forward bf16 V = 1", "forward_kernel"): (26, 24, 24, 31),
    ("logprob: backward bf16", "backward_kernel"): (32, 33, 37, 51),
    ("logprob: backward bf16 all", "backward_kernel"): (36, 35, 35, 53),
    ("logprob: backward fp16 all", "backward_kernel"): (36, 35, 35, 54),
    ("logprob: backward fp32 all", "backward_kernel"): (36, 35, 35, 41),
    ("logprob: backward bf16 all odd V", "backward_kernel"): (100, 91, 91, 82),
    ("logprob: tile forward fp32 first", "forward_kernel"): (38, 32, 38, 46),
    ("logprob: tile forward fp32 middle", "forward_kernel"): (32, 32, 40, 46),
    ("logprob: tile forward fp32 head last", "forward_kernel"): (35, 47, 44, 62),
    ("logprob: tile forward bf16 head last", "forward_kernel"): (48, 48, 72, 116),
    ("logprob: tile backward fp32 to bf16", "backward_kernel"): (31, 31, 32, 38),
    ("logprob: tile backward fp32 to bf16 head", "backward_kernel"): (48, 48, 48, 63),
    ("logprob: tile backward fp32 head", "backward_kernel"): (48, 48, 48, 62),
    ("logprob: tile exp fp32 to bf16", "exp_kernel"): (26, 26, 26, 35),
    ("logprob: tile exp fp32 to bf16 head", "exp_kernel"): (32, 32, 41, 62),
    ("logprob: support bf16", "support_forward_kernel"): (48, 48, 48, 32),
    ("logprob: support bf16", "support_backward_kernel"): (30, 28, 32, 22),
    ("logprob: support bf16 entropy", "support_forward_kernel"): (48, 48, 52, 40),
    ("logprob: support bf16 entropy", "support_backward_kernel"): (32, 30, 32, 24),
    ("logprob: support fp16 entropy", "support_forward_kernel"): (48, 48, 54, 40),
    ("logprob: support fp16 entropy", "support_backward_kernel"): (32, 30, 32, 20),
    ("logprob: support fp32 gathered", "support_forward_kernel"): (48, 45, 48, 36),
    ("logprob: support fp32 gathered", "support_backward_kernel"): (32, 32, 32, 18),
    ("attention: bf16 D = 128", "paged_attention_kernel"): (221, 177, 128, 230),
    ("attention: bf16 D = 128", "paged_merge_kernel"): (32, 32, 34, 46),
    ("attention: fp32 D = 64", "paged_attention_kernel"): (64, 80, 88, 128),
    ("attention: fp32 D = 64", "paged_merge_kernel"): (32, 32, 34, 40),
    ("matmul: bf16 M = 1", "matmul_kernel"): (64, 64, 52, 56),
    ("matmul: bf16 M = 64", "matmul_kernel"): (128, 96, 68, 86),
    ("matmul: bf16 M = 512", "matmul_kernel"): (176, None, None, 84),
    ("matmul: bf16 M = 512", "matmul_descriptor_kernel"): (None, 168, 168, None),
    ("matmul: bf16 M = 512 to fp32", "matmul_kernel"): (170, None, None, 82),
    ("matmul: bf16 M = 512 to fp32", "matmul_descriptor_kernel"): (None, 94, 184, None),
    ("matmul: bf16 M = 512 by pointers", "matmul_kernel"): (176, 128, 202, 84),
    ("matmul: fp16 M = 512 odd K", "matmul_kernel"): (168, 128, 128, 38),
    ("matmul: fp32 M = 1", "matmul_kernel"): (68, 68, 58, 66),
    ("matmul: fp32 M = 512", "matmul_kernel"): (117, 128, 109, 98),
    ("matmul: bf16 gradient of a", "matmul_kernel"): (128, None, None, 84),
    ("matmul: bf16 gradient of a", "matmul_descriptor_kernel"): (None, 180, 168, None),
    ("matmul: bf16 gradient of b", "matmul_kernel"): (168, None, None, 92),
    ("matmul: bf16 gradient of b", "matmul_descriptor_kernel"): (None, 181, 168, None),
    ("matmul: bf16 gradient of a, of fp32", "matmul_kernel"): (202, 206, 194, 48),
    ("matmul: fp32 gradient of a", "matmul_kernel"): (128, 128, 150, 115),
    ("matmul: fp32 gradient of b", "matmul_kernel"): (140, 140, 156, 116),
    ("paged_prefix_attention: bf16 D = 64 window sinks", "paged_attention_kernel"): (168, 112, 86, 215),
    ("paged_prefix_attention: bf16 D = 64 window sinks", "paged_merge_kernel"): (32, 32, 32, 42),
    ("paged_prefix_attention: bf16 D = 128", "paged_attention_kernel"): (227, 179, 132, 234),
    ("paged_prefix_attention: bf16 D = 128", "paged_merge_kernel"): (32, 32, 34, 46),
    ("paged_prefix_attention: bf16 D = 128 softcap window", "paged_attention_kernel"): (233, 181, 144, 255),
    ("paged_prefix_attention: bf16 D = 128 softcap window", "paged_merge_kernel"): (32, 32, 34, 45),
    ("paged_prefix_attention: bf16 D = 192, Dv = 128", "paged_attention_kernel"): (241, 187, 200, 179),
    ("paged_prefix_attention: bf16 D = 192, Dv = 128", "paged_merge_kernel"): (32, 32, 34, 46),
    ("paged_prefix_attention: bf16 D = 256 softcap", "paged_attention_kernel"): (204, 173, 138, 245),
    ("paged_prefix_attention: bf16 D = 256 softcap", "paged_merge_kernel"): (32, 32, 34, 45),
    ("paged_prefix_attention: fp32 D = 64", "paged_attention_kernel"): (100, 69, 70, 130),
    ("paged_prefix_attention: fp32 D = 64", "paged_merge_kernel"): (32, 32, 34, 40),
    ("paged_prefix_attention: fp32 D = 128 window", "paged_attention_kernel"): (95, 75, 73, 111),
    ("paged_prefix_attention: fp32 D = 128 window", "paged_merge_kernel"): (32, 32, 34, 46),
    ("paged_prefix_attention: fp32 D = 256", "paged_attention_kernel"): (100, 110, 94, 170),
    ("paged_prefix_attention: fp32 D = 256", "paged_merge_kernel"): (32, 32, 34, 46),
    ("prefix_shared_attention: bf16 D = 64", "attention_forward_kernel"): (185, 144, 138, 249),
    ("prefix_shared_attention: bf16 D = 64", "attention_delta_kernel"): (34, 38, 40, 41),
    ("prefix_shared_attention: bf16 D = 64", "attention_query_grad_kernel"): (162, 107, 80, 211),
    ("prefix_shared_attention: bf16 D = 64", "attention_key_grad_kernel"): (254, 205, 166, 361),
    ("prefix_shared_attention: bf16 D = 64", "attention_sum_kernel"): (32, 38, 38, 12),
    ("prefix_shared_attention: bf16 D = 128 stored", "attention_forward_kernel"): (255, 254, 230, 308),
    ("prefix_shared_attention: bf16 D = 128 stored", "attention_delta_kernel"): (36, 38, 40, 41),
    ("prefix_shared_attention: bf16 D = 128 stored", "attention_query_grad_kernel"): (232, 186, 170, 344),
    ("prefix_shared_attention: bf16 D = 128 stored", "attention_key_grad_kernel"): (216, 255, 255, 387),
    ("prefix_shared_attention: bf16 D = 128 stored", "attention_sum_kernel"): (54, 56, 56, 21),
    ("prefix_shared_attention: bf16 D = 128", "attention_forward_kernel"): (255, 254, 230, 308),
    ("prefix_shared_attention: bf16 D = 128", "attention_delta_kernel"): (36, 38, 40, 41),
    ("prefix_shared_attention: bf16 D = 128", "attention_key_grad_kernel"): (216, 254, 255, 387),
    ("prefix_shared_attention: bf16 D = 128", "attention_query_grad_kernel"): (
        232,
        182,
        170,
        344,
    ),
    ("prefix_shared_attention: bf16 D = 128", "attention_sum_kernel"): (54, 56, 56, 21),
    ("prefix_shared_attention: bf16 D = 128 softcap stored", "attention_forward_kernel"): (
        233,
        172,
        204,
        255,
    ),
    ("prefix_shared_attention: bf16 D = 128 softcap stored", "attention_delta_kernel"): (36, 38, 40, 41),
    ("prefix_shared_attention: bf16 D = 128 softcap stored", "attention_key_grad_kernel"): (
        239,
        237,
        252,
        264,
    ),
    ("prefix_shared_attention: bf16 D = 128 softcap stored", "attention_query_grad_kernel"): (
        214,
        173,
        167,
        287,
    ),
    ("prefix_shared_attention: bf16 D = 128 softcap stored", "attention_sum_kernel"): (54, 56, 56, 21),
    ("prefix_shared_attention: bf16 D = 128 bitwise", "attention_forward_kernel"): (255, 191, 232, 302),
    ("prefix_shared_attention: bf16 D = 256 softcap", "attention_forward_kernel"): (247, 188, 244, 229),
    ("prefix_shared_attention: bf16 D = 256 softcap", "attention_delta_kernel"): (36, 38, 38, 39),
    ("prefix_shared_attention: bf16 D = 256 softcap", "attention_query_grad_kernel"): (125, 121, 122, 318),
    ("prefix_shared_attention: bf16 D = 256 softcap", "attention_key_grad_kernel"): (218, 204, 206, 418),
    ("prefix_shared_attention: bf16 D = 256 softcap", "attention_sum_kernel"): (54, 56, 56, 21),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128", "attention_forward_kernel"): (195, 144, 181, 164),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128", "attention_delta_kernel"): (36, 38, 40, 41),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128", "attention_query_grad_kernel"): (127, 230, 212, 272),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128", "attention_key_grad_kernel"): (196, 163, 212, 290),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128", "attention_sum_kernel"): (54, 56, 56, 21),
    ("prefix_shared_attention: bf16 D = 192, Dv = 128 bitwise", "attention_forward_kernel"): (
        187,
        154,
        183,
        167,
    ),
    ("prefix_shared_attention: fp32 D = 128", "attention_forward_kernel"): (128, 198, 192, 280),
    ("prefix_shared_attention: fp32 D = 128", "attention_delta_kernel"): (36, 35, 48, 40),
    ("prefix_shared_attention: fp32 D = 128", "attention_query_grad_kernel"): (64, 78, 80, 389),
    ("prefix_shared_attention: fp32 D = 128", "attention_key_grad_kernel"): (210, 206, 206, 218),
    ("prefix_shared_attention: fp32 D = 128", "attention_sum_kernel"): (51, 54, 54, 22),
    ("prefix_shared_attention: around vendors, bf16 D = 128", "around_merge_kernel"): (32, 32, 36, 32),
    ("prefix_shared_attention: around vendors, bf16 D = 128", "around_gather_kernel"): (26, 26, 26, 10),
    ("prefix_shared_attention: around vendors, bf16 D = 128", "around_reduce_kernel"): (48, 48, 46, 28),
    ("prefix_shared_attention: around vendors, bf16 D = 192", "around_merge_kernel"): (32, 32, 38, 31),
    ("prefix_shared_attention: around vendors, bf16 D = 192", "around_gather_kernel"): (26, 26, 26, 10),
    ("prefix_shared_attention: around vendors, bf16 D = 192", "around_reduce_kernel"): (48, 48, 48, 30),
    ("prefix_shared_attention: around vendors, fp32 D = 64", "around_merge_kernel"): (44, 42, 48, 35),
    ("prefix_shared_attention: around vendors, fp32 D = 64", "around_gather_kernel"): (34, 34, 34, 16),
    ("prefix_shared_attention: around vendors, fp32 D = 64", "around_reduce_kernel"): (64, 64, 64, 33),
    ("layer_norm: fp32", "layer_forward_kernel"): (96, 96, 104, 35),
    ("layer_norm: fp32", "layer_backward_kernel"): (128, 104, 103, 52),
    ("layer_norm: fp32", "layer_sums_kernel"): (18, 30, 20, 12),
    ("layer_norm: fp32", "norm_total_kernel"): (48, 64, 56, 38),
    ("layer_norm: bf16", "layer_forward_kernel"): (102, 102, 102, 50),
    ("layer_norm: bf16", "layer_backward_kernel"): (127, 102, 103, 54),
    ("layer_norm: bf16", "layer_sums_kernel"): (18, 22, 24, 12),
    ("layer_norm: bf16", "norm_total_kernel"): (48, 64, 56, 38),
    ("layer_norm: fp16 bias long", "layer_forward_kernel"): (76, 79, 79, 39),
    ("layer_norm: fp16 bias long", "layer_backward_kernel"): (97, 80, 90, 42),
    ("layer_norm: fp16 bias long", "layer_sums_kernel"): (28, 30, 30, 9),
    ("layer_norm: fp16 bias long", "norm_total_kernel"): (48, 64, 56, 38),
    ("rotary: bf16", "rotary_kernel"): (32, 32, 32, 14),
    ("rotary: bf16 cached part", "rotary_kernel"): (30, 30, 30, 16),
    ("rotary: fp16 cached interleaved", "rotary_kernel"): (30, 28, 28, 11),
    ("rotary: fp32", "rotary_kernel"): (32, 32, 32, 10),
    ("swiglu: fp32 silu", "swiglu_forward_kernel"): (40, 40, 40, 25),
    ("swiglu: fp32 silu", "swiglu_backward_kernel"): (64, 64, 63, 33),
    ("swiglu: bf16 silu packed", "swiglu_forward_kernel"): (34, 34, 36, 23),
    ("swiglu: bf16 silu packed", "swiglu_backward_kernel"): (48, 50, 53, 41),
    ("swiglu: fp16 gelu", "swiglu_forward_kernel"): (48, 43, 48, 32),
    ("swiglu: fp16 gelu", "swiglu_backward_kernel"): (70, 65, 69, 40),
    ("swiglu: bf16 gelu_tanh", "swiglu_forward_kernel"): (34, 34, 34, 25),
    ("swiglu: bf16 gelu_tanh", "swiglu_backward_kernel"): (54, 52, 56, 45),
    ("rms_norm: fp32", "rms_forward_kernel"): (35, 35, 35, 29),
    ("rms_norm: fp32", "rms_backward_kernel"): (96, 96, 108, 51),
    ("rms_norm: fp32", "rms_weight_kernel"): (30, 30, 30, 10),
    ("rms_norm: fp32", "norm_total_kernel"): (48, 64, 56, 38),
    ("rms_norm: bf16 heads", "rms_forward_kernel"): (41, 45, 46, 19),
    ("rms_norm: bf16 heads", "rms_backward_kernel"): (64, 63, 62, 21),
    ("rms_norm: bf16 heads", "rms_weight_kernel"): (15, 30, 30, 12),
    ("rms_norm: bf16 heads", "norm_total_kernel"): (48, 64, 56, 38),
    ("rms_norm: bf16 residual", "rms_forward_kernel"): (108, 108, 106, 40),
    ("rms_norm: bf16 residual", "rms_backward_kernel"): (128, 128, 130, 64),
    ("rms_norm: bf16 residual", "rms_weight_kernel"): (15, 30, 30, 12),
    ("rms_norm: bf16 residual", "norm_total_kernel"): (48, 64, 56, 38),
    ("rms_norm: fp16 residual long", "rms_forward_kernel"): (105, 102, 104, 34),
    ("rms_norm: fp16 residual long", "rms_backward_kernel"): (128, 128, 130, 62),
    ("rms_norm: fp16 residual long", "rms_weight_kernel"): (15, 30, 30, 10),
    ("rms_norm: fp16 residual long", "norm_total_kernel"): (48, 64, 56, 38),
    ("value_loss: fp32 clipped", "chunk_kernel"): (79, 78, 76, 42),
    ("value_loss: fp32 clipped", "total_kernel"): (64, 64, 64, 64),
    ("value_loss: fp32 clipped", "multiply_kernel"): (26, 26, 26, 10),
    ("value_loss: bf16 clipped packed", "chunk_kernel"): (79, 78, 78, 42),
    ("value_loss: bf16 clipped packed", "total_kernel"): (64, 64, 64, 59),
    ("value_loss: bf16 clipped packed", "multiply_kernel"): (26, 26, 26, 14),
    ("value_loss: fp16 huber", "chunk_kernel"): (74, 64, 80, 36),
    ("value_loss: fp16 huber", "total_kernel"): (64, 61, 61, 60),
    ("value_loss: fp16 huber", "multiply_kernel"): (26, 27, 27, 14),
    ("value_loss: fp32 clipped huber packed", "chunk_kernel"): (79, 78, 80, 49),
    ("value_loss: fp32 clipped huber packed", "total_kernel"): (64, 64, 64, 59),
    ("value_loss: fp32 clipped huber packed", "multiply_kernel"): (26, 26, 26, 10),
    ("policy_loss: clipped", "sequence_kernel"): (97, 101, 103, 68),
    ("policy_loss: clipped", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: clipped, everything", "sequence_kernel"): (184, 186, 176, 78),
    ("policy_loss: clipped, everything", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: sequence, everything", "sequence_kernel"): (194, 194, 179, 95),
    ("policy_loss: sequence, everything", "values_kernel"): (36, 32, 40, 24),
    # more than when it was written: tokens outside of their support are told apart from those that count
    ("policy_loss: cispo", "sequence_kernel"): (110, 114, 112, 60),
    ("policy_loss: cispo", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: cispo_mask", "sequence_kernel"): (94, 95, 94, 69),
    ("policy_loss: cispo_mask", "values_kernel"): (40, 36, 37, 27),
    ("policy_loss: bounded kl", "sequence_kernel"): (192, 196, 180, 83),
    ("policy_loss: bounded kl", "values_kernel"): (40, 36, 37, 27),
    ("policy_loss: sapo", "sequence_kernel"): (107, 106, 104, 72),
    ("policy_loss: sapo", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: gmpo", "sequence_kernel"): (128, 128, 128, 76),
    ("policy_loss: gmpo", "values_kernel"): (36, 32, 40, 24),
    ("policy_loss: dppo_tv", "sequence_kernel"): (92, 92, 95, 66),
    ("policy_loss: dppo_tv", "values_kernel"): (40, 36, 40, 26),
    ("preference_loss: sigmoid", "sums_kernel"): (40, 40, 40, 31),
    ("preference_loss: sigmoid", "loss_kernel"): (105, 107, 108, 117),
    ("preference_loss: sigmoid", "gradient_kernel"): (28, 28, 28, 16),
    ("preference_loss: several, everything", "sums_kernel"): (128, 128, 128, 56),
    ("preference_loss: several, everything", "loss_kernel"): (206, 206, 193, 166),
    ("preference_loss: several, everything", "gradient_kernel"): (35, 35, 35, 29),
    ("preference_loss: weighted, js", "sums_kernel"): (40, 40, 40, 31),
    ("preference_loss: weighted, js", "loss_kernel"): (119, 119, 120, 125),
    ("preference_loss: weighted, js", "gradient_kernel"): (28, 28, 28, 16),
    ("preference_loss: discopop, alpha", "sums_kernel"): (40, 40, 40, 31),
    ("preference_loss: discopop, alpha", "loss_kernel"): (110, 110, 109, 129),
    ("preference_loss: discopop, alpha", "gradient_kernel"): (28, 28, 28, 16),
    ("preference_loss: simpo", "sums_kernel"): (40, 40, 40, 31),
    ("preference_loss: simpo", "loss_kernel"): (108, 108, 108, 119),
    ("preference_loss: simpo", "gradient_kernel"): (28, 28, 28, 16),
    ("preference_loss: aot_unpaired", "sums_kernel"): (40, 40, 40, 31),
    ("preference_loss: aot_unpaired", "loss_kernel"): (104, 104, 104, 95),
    ("preference_loss: aot_unpaired", "gradient_kernel"): (28, 28, 28, 16),
    ("preference_loss: kto packed", "sums_kernel"): (79, 78, 78, 42),
    ("preference_loss: kto packed", "loss_kernel"): (87, 90, 89, 73),
    ("preference_loss: kto packed", "gradient_kernel"): (32, 32, 32, 23),
    ("policy_loss: dppo_kl", "sequence_kernel"): (96, 91, 94, 72),
    ("policy_loss: dppo_kl", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: vespo", "sequence_kernel"): (171, 172, 166, 78),
    ("policy_loss: vespo", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: kl_cov", "sequence_kernel"): (80, 80, 105, 65),
    ("policy_loss: kl_cov", "values_kernel"): (40, 36, 40, 26),
    ("policy_loss: choice of kl_cov", "selection_sums_kernel"): (40, 40, 40, 25),
    ("policy_loss: choice of kl_cov", "selection_batch_kernel"): (30, 30, 26, 12),
    ("policy_loss: choice of kl_cov", "selection_count_kernel"): (44, 44, 44, 35),
    ("policy_loss: choice of kl_cov", "selection_cut_kernel"): (60, 48, 58, 32),
    ("policy_loss: choice of kl_cov", "selection_ties_kernel"): (32, 32, 32, 24),
    ("policy_loss: choice of kl_cov", "selection_kernel"): (80, 80, 80, 50),
    ("policy_loss: choice of clip_cov", "selection_sums_kernel"): (40, 40, 40, 26),
    ("policy_loss: choice of clip_cov", "selection_batch_kernel"): (30, 30, 26, 12),
    ("policy_loss: choice of clip_cov", "selection_count_kernel"): (48, 48, 50, 47),
    ("policy_loss: choice of clip_cov", "selection_cut_kernel"): (60, 48, 58, 32),
    ("policy_loss: choice of clip_cov", "selection_ties_kernel"): (32, 32, 39, 33),
    ("policy_loss: choice of clip_cov", "selection_kernel"): (80, 80, 100, 56),
    ("policy_loss: every rejection", "weights_kernel"): (40, 40, 40, 23),
    ("policy_loss: every rejection", "mean_weight_kernel"): (32, 32, 32, 13),
    ("policy_loss: every rejection", "sequence_kernel"): (186, 183, 174, 81),
    ("policy_loss: every rejection", "values_kernel"): (40, 36, 40, 26),
    ("sample_linear: fused bf16 gumbel", "draw_kernel"): (188, 209, 203, 142),
    ("sample_linear: fused bf16 gumbel", "finish_kernel"): (40, 40, 40, 44),
    ("sample_linear: fused bf16 gumbel", "record_kernel"): (80, 80, 92, 47),
    ("sample_linear: fused bf16 head", "draw_kernel"): (246, 255, 138, 185),
    ("sample_linear: fused bf16 head", "finish_kernel"): (40, 40, 40, 44),
    ("sample_linear: fused bf16 head", "record_kernel"): (80, 80, 92, 47),
    ("sample_linear: fused bf16", "draw_kernel"): (248, 182, 168, 184),
    ("sample_linear: fused bf16", "finish_kernel"): (40, 40, 40, 44),
    ("sample_linear: fused bf16", "record_kernel"): (80, 80, 92, 47),
    ("sample_linear: fused fp16 odd H", "draw_kernel"): (247, 191, 241, 184),
    ("sample_linear: fused fp16 odd H", "finish_kernel"): (40, 40, 40, 44),
    ("sample_linear: fused fp16 odd H", "record_kernel"): (80, 80, 92, 47),
    ("sampling: bf16", "statistics_kernel"): (72, 64, 77, 53),
    ("sampling: bf16", "finish_kernel"): (52, 50, 54, 52),
    ("sampling: fp16 odd V", "statistics_kernel"): (80, 95, 96, 78),
    ("sampling: fp16 odd V", "finish_kernel"): (48, 48, 48, 58),
    ("sampling: fp32 gumbel", "statistics_kernel"): (112, 80, 96, 56),
    ("sampling: fp32 gumbel", "finish_kernel"): (52, 50, 54, 52),
    ("sampling: bf16 forced rank", "statistics_kernel"): (96, 96, 102, 74),
    ("sampling: bf16 forced rank", "finish_kernel"): (40, 48, 48, 58),
    ("sampling: bf16 top-k top-p", "statistics_kernel"): (72, 64, 72, 54),
    ("sampling: bf16 top-k top-p", "finish_kernel"): (128, 128, 128, 67),
    ("sampling: bf16 band", "statistics_kernel"): (72, 64, 72, 54),
    ("sampling: bf16 band", "finish_kernel"): (128, 128, 128, 73),
    ("sampling: bf16 band odd V", "statistics_kernel"): (192, 156, 198, 72),
    ("sampling: bf16 band odd V", "finish_kernel"): (102, 110, 108, 69),
    ("sampling: fp32 band gumbel", "statistics_kernel"): (118, 94, 95, 58),
    ("sampling: fp32 band gumbel", "finish_kernel"): (128, 123, 116, 71),
    ("sampling: bf16 everything", "statistics_kernel"): (191, 155, 193, 72),
    ("sampling: bf16 everything", "finish_kernel"): (126, 128, 126, 75),
    ("sampling: bf16 ranks of ties", "statistics_kernel"): (72, 64, 72, 54),
    ("sampling: bf16 ranks of ties", "finish_kernel"): (128, 128, 128, 69),
    ("sampling: bf16 everything odd V", "statistics_kernel"): (192, 156, 198, 72),
    ("sampling: bf16 everything odd V", "finish_kernel"): (112, 112, 108, 67),
    ("sampling: fp32 everything gumbel joint", "statistics_kernel"): (234, 201, 222, 80),
    ("sampling: fp32 everything gumbel joint", "finish_kernel"): (114, 117, 113, 65),
}

# bytes of shared memory of a program, where it is more than the 1 KiB that reductions take
SHARED = {
    "linear_logprob: fused bf16": (65536, 147480, 147504, 32768),
    "linear_logprob: fused bf16 entropy": (65536, 147480, 147504, 32768),
    "linear_logprob: fused bf16 entropy softcap": (65536, 131104, 131120, 32768),
    "linear_logprob: fused bf16 entropy head": (65536, 131104, 131120, 32768),
    "linear_logprob: fused bf16 statistics": (65536, 147480, 147504, 32768),
    "linear_logprob: fused fp16 entropy odd H": (8192, 8192, 16400, 4096),
    "linear_logprob: fused gradient bf16": (49152, 147480, 147676, 32768),
    "linear_logprob: fused gradient bf16 of weight": (49152, 147512, 147676, 32768),
    "linear_logprob: fused gradient bf16 entropy, in slices": (49152, 147480, 147676, 32768),
    "linear_logprob: fused gradient bf16 of weight, in chunks": (49152, 147512, 147676, 32768),
    "linear_logprob: fused gradient bf16 softcap": (49152, 147480, 147676, 32768),
    "linear_logprob: fused gradient bf16 entropy head": (49152, 147512, 147676, 32768),
    "linear_logprob: fused gradient fp16 entropy odd H": (8192, 8192, 16400, 4096),
    "linear_logprob_fp8: rows, a scale each": (32768, 65536, 98320, 16384),
    "linear_logprob_fp8: blocks of 128": (32768, 65536, 98320, 16384),
    "linear_logprob_fp8: blocks of 128 odd H": (32768, 65536, 98320, 16384),
    "linear_logprob_fp8: blocks of 64": (32768, 32768, 36880, 12288),
    "linear_logprob_fp8: one scale fnuz": (32768, 65536, 65536, 32768),
    "linear_logprob_fp8: blocks of 128 fnuz": (32768, 65536, 65536, 32768),
    # the stages of keys and values, or of queries and gradients
    "attention: bf16 D = 128": (53248, 65536, 65568, 32768),
    "attention: fp32 D = 64": (14400, 14400, 14400, 8192),
    "matmul: bf16 M = 1": (30720, 30720, 30720, 10240),
    "matmul: bf16 M = 64": (49152, 65536, 65552, 16384),
    # what a tile passes through on its way to memory stands beside the stages of the next
    "matmul: bf16 M = 512": (65536, 147480, 147676, 32768),
    "matmul: bf16 M = 512 to fp32": (65536, 98328, 98352, 32768),
    "matmul: bf16 M = 512 by pointers": (65536, 98304, 98320, 32768),
    "matmul: fp16 M = 512 odd K": (8192, 8192, 8192, 4096),
    "matmul: fp32 M = 1": (6144, 6144, 6144, 6144),
    "matmul: fp32 M = 512": (16384, 16384, 16384, 16384),
    "matmul: bf16 gradient of a": (49152, 147480, 147676, 24576),
    "matmul: bf16 gradient of b": (49152, 147512, 147676, 24576),
    "matmul: bf16 gradient of a, of fp32": (10240, 10240, 10240, 6144),
    "matmul: fp32 gradient of a": (16384, 16384, 16384, 16384),
    "matmul: fp32 gradient of b": (16384, 16384, 16384, 16384),
    "paged_prefix_attention: bf16 D = 64 window sinks": (24576, 32768, 32800, 24576),
    "paged_prefix_attention: bf16 D = 128": (53248, 65536, 65568, 32768),
    "paged_prefix_attention: bf16 D = 128 softcap window": (53248, 65536, 65568, 32768),
    "paged_prefix_attention: bf16 D = 192, Dv = 128": (86016, 106496, 106528, 24576),
    "paged_prefix_attention: bf16 D = 256 softcap": (67584, 81920, 82464, 32768),
    "paged_prefix_attention: fp32 D = 64": (38976, 38976, 38976, 8192),
    "paged_prefix_attention: fp32 D = 128 window": (59456, 59456, 59456, 16384),
    "paged_prefix_attention: fp32 D = 256": (66624, 66624, 66624, 16384),
    "prefix_shared_attention: bf16 D = 64": (49664, 66048, 82496, 16384),
    "prefix_shared_attention: bf16 D = 128 stored": (98304, 181248, 164416, 32768),
    "prefix_shared_attention: bf16 D = 128": (98304, 164864, 164416, 32768),
    "prefix_shared_attention: bf16 D = 128 softcap stored": (65536, 123392, 115008, 32768),
    "prefix_shared_attention: bf16 D = 128 bitwise": (50176, 50048, 74656, 32768),
    "prefix_shared_attention: bf16 D = 256 softcap": (102400, 131072, 147488, 32768),
    "prefix_shared_attention: bf16 D = 192, Dv = 128": (86016, 196608, 180272, 32768),
    "prefix_shared_attention: bf16 D = 192, Dv = 128 bitwise": (47680, 57920, 74336, 32768),
    "prefix_shared_attention: fp32 D = 128": (65536, 65536, 65536, 32768),
    # sums over 64 tokens change the layout
    "sample_linear: fused bf16 gumbel": (49152, 73752, 73776, 24576),
    "sample_linear: fused bf16 head": (49152, 98328, 73776, 24576),
    "sample_linear: fused bf16": (49152, 98328, 131292, 24576),
    "sample_linear: fused fp16 odd H": (8192, 8192, 16400, 4096),
    "sampling: bf16": (2048,) * 4,
    "sampling: fp16 odd V": (2048,) * 4,
    "sampling: fp32 gumbel": (4096,) * 4,
    "sampling: bf16 forced rank": (2048,) * 4,
    "sampling: bf16 everything odd V": (4096,) * 4,
    "sampling: bf16 band odd V": (4096,) * 4,
    # so do the addresses of the candidates that are gathered
    "sampling: bf16 top-k top-p": (16384, 16384, 16384, 8192),
    "sampling: bf16 ranks of ties": (16384, 16384, 16384, 8192),
    "sampling: bf16 band": (16384, 16384, 16384, 8192),
    "sampling: fp32 band gumbel": (16384, 16384, 16384, 8192),
    "sampling: bf16 everything": (16384, 16384, 16384, 8192),
    "sampling: fp32 everything gumbel joint": (16384, 16384, 16384, 8192),
}


# bytes of shared memory that a program can have
MOST_SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}


@pytest.fixture(scope="module")
def reports():
    """What compiling says, for each target: once for all workers and for `make check-codegen`."""
    return portable.reports()


# bytes that Triton 3.9 spills beyond eight registers, which 3.6 does not fit either
NEWER_SPILLS = {
    ("sm_80", "finish_kernel"): 104,
    ("sm_100", "draw_kernel"): 416,
    ("sm_100", "product_kernel"): 48,
    ("gfx950", "attention_forward_kernel"): 36,
}


@pytest.mark.parametrize("target", COMPILED)
def test_no_kernel_spills(reports, target):
    for case, kernels in reports[target]["cases"].items():
        for kernel, used in kernels.items():
            spilled = used["spilled"]
            allowed = 32 if OLDER or NEWER else 0
            if NEWER:
                allowed = NEWER_SPILLS.get((target, kernel), allowed)
            assert spilled <= allowed, f"{kernel} spills {spilled} bytes on {target} ({case})"


@pytest.mark.parametrize("target", COMPILED)
def test_every_kernel_fits(reports, target):
    for case, kernels in reports[target]["cases"].items():
        for kernel, used in kernels.items():
            assert used["shared"] <= MOST_SHARED[target], f"{kernel} cannot run on {target} ({case}): {used}"


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
@pytest.mark.parametrize(("target", "unit"), [("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma")])
def test_described_tiles_are_copied_and_multiplied_by_the_units_for_tiles(reports, target, unit):
    cases, kernel = reports[target]["cases"], "matmul_descriptor_kernel"
    found = {case: kernels[kernel]["units"] for case, kernels in cases.items() if kernel in kernels}
    assert len(found) == 4
    for case, (copies, multiplies) in found.items():  # and nothing else
        assert copies == "cp.async.bulk.tensor" and multiplies.startswith(unit), (case, copies, multiplies)


TILED = ("product_kernel", "logits_gradient_kernel", "gradient_product_kernel")


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
def test_hoppers_fused_tiles_are_copied_by_descriptors(reports):
    """Of 128 x 256 where the sums have room; by no warps of their own, which gave wrong sums there."""
    wide = 0
    for case, kernels in reports["sm_90"]["cases"].items():
        if case.startswith("linear_logprob: fused") and "odd H" not in case:
            for kernel in set(kernels) & set(TILED):
                copies, multiplies = kernels[kernel]["units"]
                assert copies == "cp.async.bulk.tensor" and multiplies.startswith("wgmma"), (case, kernel)
                wide += multiplies.endswith("m64n256k16")
                assert not kernels[kernel]["specialized"], (case, kernel)
    assert wide >= 5


@pytest.mark.parametrize("target", [name for name in COMPILED if name.startswith("gfx")])
def test_amds_matrix_cores_multiply(reports, target):
    """In 16 bits: a tile whose operands were converted to fp32 would be six times as slow."""
    for case, kernels in reports[target]["cases"].items():
        for kernel in set(kernels) & {*TILED, "matmul_kernel"} if "fp32" not in case else ():
            units = kernels[kernel]["units"]
            assert units and all(unit.endswith(("bf16", "f16", "bf16_1k")) for unit in units), (
                case,
                kernel,
                units,
            )


@pytest.mark.skipif(OLDER, reason="what was measured is Triton 3.7.1")
def test_gradients_of_attention_fill_hoppers_tensor_cores(reports):
    """Plain runs 64 columns of scores at a time, masked ones 32; the sums as wide as a head or half of it."""
    cases = reports["sm_90"]["cases"]
    key, query = "attention_key_grad_kernel", "attention_query_grad_kernel"
    for case, kernel, columns in (
        ("bf16 D = 64", key, {32, 64}),
        ("bf16 D = 128", key, {32, 64, 128}),
        ("bf16 D = 128", query, {32, 64, 128}),
        ("bf16 D = 128 stored", key, {32, 64, 128}),
        ("bf16 D = 128 stored", query, {32, 128}),  # scores of masked runs: of the others it reads gradients
        ("bf16 D = 192, Dv = 128", query, {32, 64, 256}),
    ):
        units = cases[f"prefix_shared_attention: {case}"][kernel]["units"]
        stores = "cp.async.bulk.tensor" in units
        assert stores == case.endswith("stored"), (case, kernel, units)
        found = {int(re.search(r"m64n(\d+)k16", unit)[1]) for unit in units if "wgmma" in unit}
        assert found == columns, (case, kernel, units)


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_pages_are_copied_ahead_of_the_products(reports, target):
    """A turn waits for its own keys alone: were their pages loaded beside them, it would wait for all."""
    for case, kernels in reports[target]["cases"].items():
        if "paged_attention_kernel" in kernels and "bf16" in case:
            assert kernels["paged_attention_kernel"]["ahead"] >= 2, (case, kernels)


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm_")])
def test_tensor_cores_take_sixteen_of_k_at_a_time(reports, target):
    """In every tile of every kernel, which ``tensor_core.py`` supposes: no TF32, and no part of a group.

    FP8 comes 32 at a time where it is multiplied as FP8."""
    cases = reports[target]["cases"]
    every = [kernels[k]["units"] for kernels in cases.values() for k in kernels if k != "fp8_product_kernel"]
    found = {unit for units in every for unit in units} - {"cp.async.bulk.tensor"}
    assert found and all(unit.endswith(("k16", "kind::f16")) for unit in found), sorted(found)


@pytest.mark.parametrize(
    ("target", "fp8", "decoded"),
    [
        ("sm_80", "m16n8k16", "m16n8k16"),
        ("sm_90", "k16", "k16"),  # whose tensor cores keep too few bits of a sum of FP8
        ("sm_100", "kind::f8f6f4", "kind::f16"),
    ],
)
def test_fp8_is_multiplied_as_fp8(reports, target, fp8, decoded):
    """Where a GPU has instructions for the FP8 of the weight; elsewhere as float16."""
    cases = {
        k: v["fp8_product_kernel"]["units"] for k, v in reports[target]["cases"].items() if "_fp8: " in k
    }
    assert len(cases) == 6
    for case, (unit,) in cases.items():
        assert unit.endswith(decoded if case.endswith("fnuz") else fp8), (case, unit)


@pytest.mark.skipif(OLDER or NEWER, reason="these registers are of another Triton, 3.7.1")
@pytest.mark.parametrize("target", TARGETS)
def test_registers_and_shared_memory_are_what_was_measured(reports, target):
    column = TARGETS.index(target)
    for case, kernels in reports[target]["cases"].items():
        for kernel, used in kernels.items():
            expected = REGISTERS[case, kernel][column]
            assert expected is not None, f"{case} launches {kernel} on {target}, which nobody measured"
            assert used["registers"] <= expected * 1.25 + 8, (
                f"{kernel} takes {used['registers']} registers on {target}, expected {expected} ({case})"
            )
            shared = SHARED.get(case, (1024,) * 4)[column]
            assert used["shared"] <= shared, f"{kernel} takes {used['shared']} bytes of shared memory"


def test_the_code_is_no_worse_than_the_ledger_says(reports):
    """As `make check-codegen` asks it, which writes the ledger anew with ARGS=--write."""
    ledger = Ledger.load()
    if ledger.compilers.get("triton") != portable.version():
        pytest.skip("the ledger is of another Triton")
    problems = ledger.differences("triton", portable.records(reports))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_has_a_case(reports, target):
    compiled = {kernel for kernels in reports[target]["cases"].values() for kernel in kernels}
    column = TARGETS.index(target)
    elsewhere = {kernel for (_, kernel), figures in REGISTERS.items() if figures[column] is None}
    missing = set(reports[target]["kernels"]) - compiled - elsewhere
    assert not missing, f"nothing in tests/aot_cases compiles {', '.join(sorted(missing))}"
    known = {place for place, figures in REGISTERS.items() if figures[column] is not None}
    stale = known - {(c, k) for c, kernels in reports[target]["cases"].items() for k in kernels}
    assert not stale, f"REGISTERS lists cases that do not exist: {sorted(stale)}"


@pytest.mark.parametrize("target", TARGETS)
def test_lengths_temperatures_and_ignore_index_recompile_nothing(reports, target):
    binaries = reports[target]["binaries"]
    assert set(binaries) == {
        *("forward_kernel", "backward_kernel", "product_kernel", "merge_kernel"),
        *("row_gradient_kernel", "logits_gradient_kernel", "gradient_product_kernel"),
        *("support_forward_kernel", "support_backward_kernel"),
        *("chunk_kernel", "total_kernel", "multiply_kernel", "gae_kernel"),
        *("layer_forward_kernel", "layer_backward_kernel", "layer_sums_kernel"),
        *("rms_forward_kernel", "rms_backward_kernel", "rms_weight_kernel", "norm_total_kernel"),
        *("moments_kernel", "scale_kernel", "kl_kernel", "batch_kernel", "group_kernel"),
        *("sums_kernel", "loss_kernel", "gradient_kernel"),
        *("statistics_kernel", "finish_kernel"),
        *("attention_forward_kernel", "attention_delta_kernel", "attention_query_grad_kernel"),
        *("attention_key_grad_kernel", "attention_sum_kernel"),
        *("around_merge_kernel", "around_gather_kernel", "around_reduce_kernel"),
        *("paged_attention_kernel", "paged_merge_kernel"),
    }
    assert set(binaries.values()) == {1}, f"more than one binary of a kernel on {target}: {binaries}"


@pytest.mark.parametrize("target", TARGETS)
def test_a_planted_spill_is_seen(reports, target):
    assert reports[target]["planted"]["spilled"] > 0
