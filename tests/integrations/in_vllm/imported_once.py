"""What most files of this folder import, for `tests/run_files.py`."""

# ruff: noqa: F401, I001
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent))

import vllm_environment  # before vLLM
import torch
import transformers
import vllm.model_executor.models.qwen2
import vllm.model_executor.models.registry
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker
from vllm import LLM, SamplingParams

# What a model can do its class says, for which vLLM starts a Python, lest CUDA be touched in this process.
vllm.model_executor.models.registry._run_in_subprocess = lambda ask: ask()
