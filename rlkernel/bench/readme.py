"""``readme``: tables and the picture of README.md and docs, written from the committed reports.

``<!-- bench:begin NAME -->`` ... ``<!-- bench:end NAME -->`` holds the newest
``benchmarks/results/<date>-NAME.json``; of the names in ``MADE``, what a function makes of all reports.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlkernel.bench import (
    build_tables,
    commands,
    example_tables,
    picture,
    render,
    report,
    status,
    trainer_step,
)
from rlkernel.bench.cases import UsageError
from rlkernel.bench.consistency import tables as consistency

_MARKED = re.compile(r"(<!-- bench:begin (?P<name>\S+) -->\n).*?(<!-- bench:end (?P=name) -->)", re.DOTALL)


def newest(results: Path, name: str) -> Path:
    """The newest report called ``name``; its date leads the file's name.

    Raises:
        UsageError: there is none.
    """
    found = sorted(results.glob(f"????-??-??-{name}.json"))
    if not found:
        known = sorted({path.stem[11:] for path in results.glob("????-??-??-*.json")})
        raise UsageError(
            f"bench:begin must name a report of {results} ({', '.join(known) or 'it has none'}), got {name}"
        )
    return found[-1]


def _of_an_example(name: str, markdown: Callable[[Any], str]) -> Callable[[Path], str]:
    return lambda results: markdown(json.loads(newest(results, name).read_text()))


MADE = {
    "commands": commands.table,
    "picture": picture.svg,
    "status": status.table,
    "status-line": status.line,
    **{
        name: _of_an_example(name, consistency.markdown)
        for name in ("consistency", "consistency-engines", "consistency-operators")
    },
    "build": _of_an_example("build", build_tables.build),
    "wheels": _of_an_example("wheels", build_tables.wheels),
    "clean_machine": _of_an_example("clean_machine", build_tables.clean_machine),
    "grpo_prefix": _of_an_example("grpo_prefix", trainer_step.markdown),
    "grpo_earlier_trl": _of_an_example("grpo_earlier_trl", trainer_step.markdown),
    "deepspeed_step": _of_an_example("deepspeed_step", example_tables.deepspeed_step),
    "llamafactory_step": _of_an_example("llamafactory_step", example_tables.llamafactory_step),
    "torchtitan_step": _of_an_example("torchtitan_step", example_tables.torchtitan_step),
    "megatron_step": _of_an_example("megatron_step", example_tables.megatron_step),
    "openrlhf_step": _of_an_example("openrlhf_step", example_tables.openrlhf_step),
    "sglang_sampler": _of_an_example("sglang_sampler", example_tables.sglang_sampler),
    "skyrl_step": _of_an_example("skyrl_step", example_tables.skyrl_step),
    "swift_step": _of_an_example("swift_step", example_tables.swift_step),
    "areal_step": _of_an_example("areal_step", example_tables.areal_step),
    "verl_step": _of_an_example("verl_step", example_tables.verl_step),
    "packed_grpo": _of_an_example("packed_grpo", example_tables.packed_grpo),
    "vllm_attention": _of_an_example("vllm_attention", example_tables.vllm_attention),
    "vllm_rollout": _of_an_example("vllm_rollout", example_tables.vllm_rollout),
}


def pages(root: Path) -> list[Path]:
    """README.md, and the pages and pictures of docs that hold a table or what is drawn from one."""
    found = (page for page in sorted((root / "docs").rglob("*")) if page.suffix in (".md", ".svg"))
    return [root / "README.md", *(page for page in found if _MARKED.search(page.read_text()))]


def fill(text: str, results: Path) -> str:
    """``text`` with every marked table written anew."""

    def table(match: re.Match[str]) -> str:
        if make := MADE.get(match["name"]):
            return f"{match[1]}{make(results)}{match[3]}"
        stored = report.load(newest(results, match["name"]))
        return f"{match[1]}{render.markdown(stored['rows'], stored['header'])}{match[3]}"

    return _MARKED.sub(table, text)
