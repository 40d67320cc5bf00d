"""Of loguru the logger, over logging's."""

import logging

logger = logging.getLogger("skyrl")
