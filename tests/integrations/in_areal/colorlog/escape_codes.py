"""Of colorlog the escape codes."""


def parse_colors(text):
    return ""
