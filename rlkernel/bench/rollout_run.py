"""The report of ``examples/vllm_rollout.py`` as a table for ``readme``: vLLM by itself and patched."""

from typing import Any

from rlkernel.bench.trainer_step import measured, page

MODES = {"stock": "vLLM", "patched": "`patch_vllm()`"}
MEASURED = {
    "rollout, CPU time, s": ("rollout_cpu", "{:.2f}"),
    "rollout, peak extra memory, MiB": ("rollout_mib", "{:.0f}"),
    "scoring of prompts, CPU time, s": ("scoring_cpu", "{:.2f}"),
    "scoring of prompts, peak extra memory, MiB": ("scoring_mib", "{:.0f}"),
}


def markdown(stored: dict[str, Any]) -> str:
    settings = stored["settings"]
    return page(
        stored,
        f"A rollout of {settings['prompts']} prompts, {settings['samples']} samples of "
        f"{settings['tokens']} tokens each, top-p 0.95 of top-k 1000 with log-probabilities; and "
        f"`prompt_logprobs` of {settings['prompts']} prompts of {settings['scored']} tokens. fp32, "
        f"{settings['layers']} layers of {settings['hidden']}, V={settings['vocabulary']}.",
        ["", *MODES.values(), "vLLM / patched"],
        measured(stored, MODES, MEASURED),
        f"largest difference of a prompt's log-probability: {stored['logprob_difference']:.1e}",
    )
