"""What the files of this folder import, for `tests/run_files.py`."""

# ruff: noqa: F401, I001
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent))

import sglang_environment  # before SGLang
import sglang.srt.entrypoints.engine
import sglang.srt.layers.sampler
import sglang.srt.server_args
import torch
import transformers
