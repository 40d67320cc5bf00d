"""torchtitan, what it needs and stand-ins come first on the path (../test_torchtitan.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import on_a_cpu  # noqa: F401
