"""Run a module of OpenRLHF with rlkernel under it: ``python -m rlkernel.integrations.openrlhf MODULE ...``.

    deepspeed --module rlkernel.integrations.openrlhf openrlhf.cli.train_dpo --...
    python -m rlkernel.integrations.openrlhf openrlhf.cli.train_ppo_ray --...

``OPENRLHF_RLKERNEL`` names the parts, or everything is replaced.
"""

from __future__ import annotations

import sys

from rlkernel.integrations._module import run_module
from rlkernel.integrations.openrlhf import switch
from rlkernel.integrations.openrlhf.processes import watch


def main(arguments: list[str]) -> None:
    run_module("openrlhf", arguments, _prepare)  # DeepSpeed's launcher puts --local_rank in front


def _prepare() -> None:
    switch.ask()
    watch()


if __name__ == "__main__":
    main(sys.argv[1:])
