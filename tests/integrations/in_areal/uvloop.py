"""uvloop, without a loop."""


def install():
    pass
