"""That function of it."""


def parallel(*_, **__):
    raise AssertionError("no test here fills a data set in several processes")
