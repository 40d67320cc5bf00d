"""examples/vllm_rollout.py, which runs vLLM by itself and patched, in its short form."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_rollout.py"
SHORT = {"runs": 1, "vocabulary": 2048, "scored": 64, "tokens": 2, "prompts": 2, "samples": 2}


def test_a_rollout_with_and_without_the_patch(tmp_path):
    options = [text for name, value in SHORT.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, str(EXAMPLE), *options, "--json", str(tmp_path / "result.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 <= result["logprob_difference"] < 1e-4
    for mode in ("stock", "patched"):
        assert len(result[mode]["rollout_cpu"]) == 2 and min(result[mode]["rollout_cpu"]) > 0
    assert "| rollout, CPU time, s |" in run.stdout and "patch_vllm()" in run.stdout
