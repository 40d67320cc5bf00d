"""torchtitan, what it needs and stand-ins come first on the path (../test_torchtitan.py)."""

import sys
import types
from pathlib import Path

import torchtitan.experiments

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

# the package's own __init__ imports vLLM, for its generator
rl = types.ModuleType("torchtitan.experiments.rl")
rl.__path__ = [str(Path(torchtitan.experiments.__file__).parent / "rl")]
sys.modules["torchtitan.experiments.rl"] = rl
