"""What torchrun runs in the place of LLaMA-Factory's ``launcher.py``, which it runs in turn."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    from rlkernel.integrations.llamafactory.install import register

    register()
    launcher = "llamafactory.v1.launcher" if _is_v1() else "llamafactory.launcher"
    runpy.run_module(launcher, run_name="__main__", alter_sys=True)


def _is_v1() -> bool:
    from llamafactory.extras.misc import is_env_enabled

    return bool(is_env_enabled("USE_V1"))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # its modules are no packages
    main()
