"""Sizes that the host reckons for a launch; Triton's own functions, for kernels too, take microseconds."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0
