"""SWIFT's command with rlkernel under it: ``python -m rlkernel.integrations.swift rlhf ...``.

    NPROC_PER_NODE=8 python -m rlkernel.integrations.swift rlhf --rlhf_type grpo --...
    python -m rlkernel.integrations.swift --plugin       # the path for swift rlhf --external_plugins

``SWIFT_RLKERNEL`` names the parts, or everything is replaced.
"""

from __future__ import annotations

import importlib.util
import sys

from rlkernel.integrations.swift import switch

PACKAGE = "rlkernel.integrations.swift"


def main(arguments: list[str]) -> None:
    if arguments == ["--plugin"]:
        found = importlib.util.find_spec(f"{PACKAGE}.plugin")
        assert found is not None
        print(found.origin)
        return
    if arguments[:1] != ["rlhf"]:
        sys.exit(f"usage: python -m {PACKAGE} rlhf [arguments of swift rlhf], or --plugin")
    from swift.cli.main import ROUTE_MAPPING, cli_main

    switch.ask()
    sys.argv = ["swift", *arguments]
    cli_main({**ROUTE_MAPPING, "rlhf": f"{PACKAGE}.rlhf"})


if __name__ == "__main__":
    main(sys.argv[1:])
