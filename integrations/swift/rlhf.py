"""What stands for ``swift/cli/rlhf.py`` under ``python -m rlkernel.integrations.swift``: a file that SWIFT's
command starts, with torchrun or without."""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    del sys.path[0]  # of this file, whose neighbours are modules of a package
    from rlkernel.integrations.swift.install import register

    register()
    runpy.run_module("swift.cli.rlhf", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
