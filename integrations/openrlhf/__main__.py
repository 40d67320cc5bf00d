"""Run a module of OpenRLHF with rlkernel under it: ``python -m rlkernel.integrations.openrlhf MODULE ...``.

    deepspeed --module rlkernel.integrations.openrlhf openrlhf.cli.train_dpo --...
    python -m rlkernel.integrations.openrlhf openrlhf.cli.train_ppo_ray --...

``OPENRLHF_RLKERNEL`` names the parts, or everything is replaced.
"""

from __future__ import annotations

import runpy
import sys

from rlkernel.integrations.openrlhf import switch
from rlkernel.integrations.openrlhf.processes import watch


def main(arguments: list[str]) -> None:
    # DeepSpeed's launcher puts --local_rank in front of what it was given
    place = next((i for i, text in enumerate(arguments) if not text.startswith("-")), None)
    if place is None:
        sys.exit("usage: python -m rlkernel.integrations.openrlhf MODULE [its arguments]")
    switch.ask()
    watch()
    sys.argv = ["", *arguments[:place], *arguments[place + 1 :]]  # runpy names the file
    runpy.run_module(arguments[place], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
