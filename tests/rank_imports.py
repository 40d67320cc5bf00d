"""What ranks import: once, in the process that they are forks of (``ranks.run``)."""

import contextlib
import gc
import importlib
import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

for name in (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "pytest",
    "hypothesis",
    "rlkernel.integrations.hf",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "accelerate",
    "datasets",
    "deepspeed",
    "megatron.core.models.gpt",
    "trl.trainer.grpo_trainer",
    "trl.trainer.dpo_trainer",
):
    with contextlib.suppress(Exception):  # what is not here, or cannot be imported, its own tests tell of
        importlib.import_module(name)
gc.collect()
gc.freeze()  # what is here is here for good: no rank looks through it again
