import types


class Actor:
    pass


def concurrent_endpoint(method):
    return method


def current_rank():
    return types.SimpleNamespace(rank=0)
