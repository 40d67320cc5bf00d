"""The report of ``examples/deepspeed_step.py`` as a table for ``readme``: a step of an engine, two ways."""

from typing import Any

from rlkernel.bench import render

MODES = {"stock": "logits", "score": "`score()`"}
MEASURED = {
    "CPU time of the step, s": ("cpu_seconds", "{:.2f}"),
    "peak extra memory, MiB": ("peak_mib", "{:.0f}"),
}


def markdown(stored: dict[str, Any]) -> str:
    settings = stored["settings"]
    rows = [["", *MODES.values(), "logits / `score()`"], ["---"] * 4]
    for label, (key, form) in MEASURED.items():
        values = [stored[mode]["summary"][key] for mode in MODES]
        rows.append([label, *(form.format(value) for value in values), f"{values[0] / values[-1]:.1f}x"])
    return "\n".join(
        [
            "  \n".join(f"`{line}`" for line in render.provenance(stored["header"])),
            "",
            f"A PPO step of an engine under ZeRO-{settings['stage']}: {settings['samples']} samples of "
            f"{settings['length']} tokens, fp32, {settings['layers']} layers of {settings['hidden']}, "
            f"V={settings['vocabulary']}.",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"- largest difference of a step's mean logprob: {stored['logprob_difference']:.1e}",
            "",
        ]
    )
