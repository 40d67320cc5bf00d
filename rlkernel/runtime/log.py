"""``RLKERNEL_LOG``: what rlkernel's logger says, on standard error, without a line of code."""

import logging
import os

LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "RLKERNEL_LOG"


def asked() -> str:
    """The level that ``RLKERNEL_LOG`` names, empty where it is not set; raises ValueError for no level."""
    name = os.environ.get(VARIABLE, "")
    if name and name.lower() not in LEVELS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(map(repr, LEVELS))}, got {name!r}")
    return name.upper()


def set_up() -> None:
    """Show what the logger "rlkernel" says from the level that ``RLKERNEL_LOG`` names; unset: as Python does.

    "debug" names the backend of each op the first time that it runs, and the way that an op chose where it
    has several.

    Raises:
        ValueError: the variable names no level.
    """
    level = asked()
    if not level:
        return
    logger = logging.getLogger("rlkernel")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[rlkernel %(levelname)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # once, whatever the root logger shows
