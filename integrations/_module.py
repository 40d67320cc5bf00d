"""Run a module of a framework as a program, with rlkernel under it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable


def run_module(framework: str, arguments: list[str], prepare: Callable[[], None]) -> None:
    """Of the ``arguments`` the first that is no option names the module, which has the others, and is run
    after ``prepare``; launchers put options of their own in front of what they are given."""
    place = next((i for i, text in enumerate(arguments) if not text.startswith("-")), None)
    if place is None:
        sys.exit(f"usage: python -m rlkernel.integrations.{framework} MODULE [its arguments]")
    prepare()
    sys.argv = ["", *arguments[:place], *arguments[place + 1 :]]  # runpy names the file
    runpy.run_module(arguments[place], run_name="__main__", alter_sys=True)
