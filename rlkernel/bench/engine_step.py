"""The report of ``examples/deepspeed_step.py`` as a table for ``readme``: a step of an engine, two ways."""

from typing import Any

from rlkernel.bench.trainer_step import measured, page

MODES = {"stock": "logits", "score": "`score()`"}
MEASURED = {
    "CPU time of the step, s": ("cpu_seconds", "{:.2f}"),
    "peak extra memory, MiB": ("peak_mib", "{:.0f}"),
}


def markdown(stored: dict[str, Any]) -> str:
    settings = stored["settings"]
    return page(
        stored,
        f"A PPO step of an engine under ZeRO-{settings['stage']}: {settings['samples']} samples of "
        f"{settings['length']} tokens, fp32, {settings['layers']} layers of {settings['hidden']}, "
        f"V={settings['vocabulary']}.",
        ["", *MODES.values(), "logits / `score()`"],
        measured(stored, MODES, MEASURED),
        f"largest difference of a step's mean logprob: {stored['logprob_difference']:.1e}",
    )
