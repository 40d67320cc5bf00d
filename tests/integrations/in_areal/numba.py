"""numba, without a compiler."""


def njit(*args, **options):
    return args[0] if args else lambda function: function
