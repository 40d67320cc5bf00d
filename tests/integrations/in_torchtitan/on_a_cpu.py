"""torchtitan on a CPU, without vLLM: imported before anything of it."""

import sys
import types
from pathlib import Path
from unittest import mock

import torch
from torch.nn.attention import flex_attention

# it takes a machine without a GPU for one with CUDA
with mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    import torchtitan.tools.utils  # noqa: F401

import torchtitan.experiments
import torchtitan.models.common.attention as attention

# the package's own __init__ imports vLLM, for its generator
rl = types.ModuleType("torchtitan.experiments.rl")
rl.__path__ = [str(Path(torchtitan.experiments.__file__).parent / "rl")]
sys.modules["torchtitan.experiments.rl"] = rl

# its metrics want TensorBoard, of which nothing is written here
board = types.ModuleType("torch.utils.tensorboard")
board.SummaryWriter = object
sys.modules.setdefault("torch.utils.tensorboard", board)


def dense_attention(q, k, v, *, block_mask, scale, enable_gqa, **_):
    """In place of compiled FlexAttention, which has no backward on a CPU."""
    size = q.shape[0], 1, q.shape[2], k.shape[2]
    mask = flex_attention.create_mask(block_mask.mask_mod, *size, device=q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return out, None


attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
attention._compiled_create_block_mask = flex_attention.create_block_mask  # minutes to compile
