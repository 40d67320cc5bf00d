"""axolotl compiles its packing with it, which no training of preferences or of rewards calls."""


def njit(function):
    return function
