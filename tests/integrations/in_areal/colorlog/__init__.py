"""colorlog, without colours."""

import logging


class ColoredFormatter(logging.Formatter):
    def __init__(self, fmt=None, datefmt=None, **colours):
        super().__init__("%(message)s")

    def format(self, record):
        return record.getMessage()
