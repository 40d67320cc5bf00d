"""What torchrun runs in the place of LLaMA-Factory's ``launcher.py``, which it runs in turn."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys


def main() -> None:
    from rlkernel.integrations.llamafactory.install import LAUNCHERS, register

    register()
    spec = importlib.util.find_spec(LAUNCHERS[_is_v1()])
    assert spec is not None and spec.origin is not None
    runpy.run_path(spec.origin, run_name="__main__")


def _is_v1() -> bool:
    from llamafactory.extras.misc import is_env_enabled

    return bool(is_env_enabled("USE_V1"))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # no top level
    main()
