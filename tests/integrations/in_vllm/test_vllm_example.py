"""The examples that run vLLM by itself and patched, in their short forms."""

import json
import sys
from pathlib import Path

import forked

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name, folder, **options):
    """What it prints and what it writes."""
    short = [text for option, value in options.items() for text in (f"--{option}", str(value))]
    command = [sys.executable, str(EXAMPLES / name), *short, "--json", str(folder / "result.json")]
    run = forked.run(command)
    assert run.returncode == 0, run.stdout[-2000:]
    return run.stdout, json.loads((folder / "result.json").read_text())


def test_a_rollout_with_and_without_the_patch(tmp_path):
    options = {"runs": 1, "vocabulary": 2048, "scored": 64, "tokens": 2, "prompts": 2, "samples": 2}
    printed, result = example("vllm_rollout.py", tmp_path, **options)
    assert 0 <= result["logprob_difference"] < 1e-4
    for mode in ("stock", "patched"):
        assert len(result[mode]["rollout_cpu"]) == 2 and min(result[mode]["rollout_cpu"]) > 0
    assert "| rollout, CPU time, s |" in printed and "patch_vllm()" in printed


def test_decode_steps_of_both_kinds_of_attention(tmp_path):
    options = {"requests": 3, "prompts": 256, "apart": 64, "pairs": 2, "heads": "2/1", "hidden": 128}
    printed, result = example("vllm_attention.py", tmp_path, **options)
    assert [(case["prompt"], case["shared"]) for case in result["cases"]] == [(256, True), (64, False)]
    together, apart = (case["summary"] for case in result["cases"])
    assert together["fewer_bytes"] > 1.5 and apart["fewer_bytes"] == 1
    for case in result["cases"]:
        for mode in ("stock", "patched"):
            assert len(case[mode]["step"]) == 2
            assert all(0 < a < b for a, b in zip(case[mode]["attention"], case[mode]["step"], strict=True))
    assert (
        "| 2/1 | 3 | a prompt of 256 tokens |" in printed and "| 2/1 | 3 | nothing of 64 tokens |" in printed
    )
