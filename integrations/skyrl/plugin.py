"""What each of Ray's processes calls when it starts, and needs nothing of SkyRL."""

from __future__ import annotations

from rlkernel.integrations.skyrl.install import logger
from rlkernel.integrations.skyrl.install import register as _register
from rlkernel.integrations.skyrl.switch import forget_job, is_strict


def register() -> None:
    """What ``SKYRL_RLKERNEL`` asks for, once; an error of a process that is not strict is only told."""
    forget_job()
    try:
        _register()
    except Exception as error:
        logger.warning("rlkernel leaves everything to SkyRL: %s: %s", type(error).__name__, error)
        if is_strict():
            raise
