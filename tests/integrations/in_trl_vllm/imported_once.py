"""What most files of this folder import, for `tests/run_files.py`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "in_vllm/imported_once.py"))

from trl import GRPOConfig, GRPOTrainer  # noqa: E402, F401
