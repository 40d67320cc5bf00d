"""Arithmetic of Triton's interpreter without the layers that most of its operations do not need.

An addition of two tiles of one dtype goes through seven calls, which look for overflow, casts, pointers and
constants, and spreads each operand over the shape of the other before NumPy does it again. ``of`` gives the
operators of ``tl.tensor`` a way of their own for what most kernels compute: two operands of one dtype of 32
or 64 bits, int32 and int64, a tile and a number that its dtype holds, a pointer and an offset, and
``x[:, None]``. What is none of these goes the way that it went before. Both ways are the same calls of NumPy
on the same numbers in the same order of memory, so that they have the same bits:
``test_triton_interpreter.py`` compares them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or}
WHOLE = slice(None)


def in_order(data: np.ndarray) -> bool:
    """Whether it lies in memory row by row."""
    return data.ndim < 2 or data.flags.c_contiguous


class Shortcuts:
    """The operators of ``tl.tensor`` under one interpreter."""

    def __init__(self, interpreter: Any) -> None:
        import triton.language as tl

        self.tl, self.handle_of = tl, interpreter.TensorHandle
        floats = {tl.float32: np.float32, tl.float64: np.float64}
        ints = {tl.int32: np.int32, tl.int64: np.int64, tl.uint32: np.uint32, tl.uint64: np.uint64}
        # by identity: types of pointers have no hash
        self.numbers = {id(t): np.dtype(kind) for t, kind in (floats | ints).items()}
        self.bits = {id(t): np.dtype(kind) for t, kind in ints.items()} | {id(tl.int1): np.dtype(np.bool_)}
        self.bounds = {id(t): (t.get_int_min_value(), t.get_int_max_value()) for t in ints}
        self.offsets = {id(tl.int32): np.dtype(np.int32), id(tl.int64): np.dtype(np.int64)}
        self.types: dict[Any, Any] = {}
        self.joined: dict[Any, Any] = {}

    def of(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The method of this name, which calls ``plain`` where it has no shorter way."""
        if name == "__getitem__":
            return self._getitem(plain)
        bare = name.removeprefix("__").removesuffix("__")
        if bare in COMPARISONS:
            return self._operator(COMPARISONS[bare], self.numbers, True, False, plain)
        for table, kinds in ((ARITHMETIC, self.numbers), (BITWISE, self.bits)):
            if bare in table:
                return self._operator(table[bare], kinds, False, bare == "add", plain)
            if bare[:1] == "r" and bare[1:] in table:
                return self._reflected(table[bare[1:]], kinds, plain)
        return plain

    def _operator(
        self, ufunc: Any, kinds: dict[int, Any], compares: bool, adds: bool, plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        tensor, constexpr, handle_of = self.tl.tensor, self.tl.constexpr, self.handle_of
        int1, int64, offsets, bitwise = self.tl.int1, self.tl.int64, {*self.offsets}, {*BITWISE.values()}

        def operator(x: Any, y: Any, **options: Any) -> Any:
            kind = kinds.get(id(x.dtype))
            if kind is None:
                return (self._moved(x, y) if adds else None) or plain(x, y, **options)
            left, out = x.handle, None
            if left.data.dtype is not kind:
                return plain(x, y, **options)
            if type(y) is tensor:
                right = y.handle.data
                if right.dtype is not kinds.get(id(y.dtype)):
                    return plain(x, y, **options)
                if y.dtype is not x.dtype:
                    ints = ufunc not in bitwise and id(x.dtype) in offsets and id(y.dtype) in offsets
                    if not (ints and in_order(left.data) and in_order(right)):
                        return plain(x, y, **options)
                    out = int64
                sizes = self._sizes(x.type, y.type, left.data, right)
            else:
                right = self._number(y.value if type(y) is constexpr else y, x.dtype, kind, compares)
                sizes = None if right is None else self._sizes(x.type, None, left.data, right)
            if sizes is None:
                return plain(x, y, **options)
            found = handle_of(ufunc(left.data, right), out or left.dtype.scalar)
            return tensor(found, self._type(int1 if compares else out or x.dtype, sizes))

        return operator

    def _reflected(self, ufunc: Any, kinds: dict[int, Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Of a number and a tensor."""
        tensor, constexpr, handle_of = self.tl.tensor, self.tl.constexpr, self.handle_of

        def operator(x: Any, y: Any, **options: Any) -> Any:
            kind, data = kinds.get(id(x.dtype)), x.handle.data
            if kind is None or data.dtype is not kind:
                return plain(x, y, **options)
            left = self._number(y.value if type(y) is constexpr else y, x.dtype, kind)
            sizes = None if left is None else self._sizes(x.type, None, data, left)
            if sizes is None:
                return plain(x, y, **options)
            return tensor(handle_of(ufunc(left, data), x.dtype.scalar), self._type(x.dtype, sizes))

        return operator

    def _moved(self, x: Any, y: Any) -> Any:
        """A pointer and a signed offset; None where they are something else."""
        if not (type(y) is self.tl.tensor and x.dtype.is_ptr() and id(y.dtype) in self.offsets):
            return None
        pointers, offset = x.handle, y.handle.data
        sizes = self._sizes(x.type, y.type, pointers.data, offset)
        if sizes is None or offset.dtype is not self.offsets[id(y.dtype)]:
            return None
        if not (pointers.data.shape == offset.shape or in_order(pointers.data) and in_order(offset)):
            return None
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        found = self.handle_of(pointers.data + width * offset.astype(np.uint64), pointers.dtype)
        if sizes and (not x.type.is_block() or x.type.sizes != sizes):
            return self.tl.tensor(found, self.tl.block_type(x.dtype, list(sizes)))
        return self.tl.tensor(found, x.type)

    def _number(self, value: Any, dtype: Any, kind: Any, compared: bool = False) -> Any:
        """A number of the dtype; None for what is not one that it holds.

        The plain way makes +0 of -0. What is compared it first makes a tensor of a dtype that follows from
        the number alone: of int32 or wider, of fp32 where the number is one of its normal ones.
        """
        if id(dtype) in self.bounds:
            low, high = self.bounds[id(dtype)]
            return kind.type(value) if type(value) is int and low <= value <= high else None
        if kind.kind != "f" or type(value) not in (int, float):
            return None
        if compared and not (kind.itemsize == 4 and (type(value) is float or abs(value) < 2**31)):
            return None
        if compared and not (value == 0 or 2.0**-126 <= abs(value) < 2.0**127 or abs(value) == np.inf):
            return None
        return kind.type(value or 0)

    def _sizes(self, left: Any, right: Any, x: Any, y: Any) -> Any:
        """The shape of what comes out, () for numbers; None where the plain way must look at the operands.

        It does at what is spread from a number over a tile that does not lie in memory row by row: the plain
        way makes a tile of the number, which decides in which order of memory the result lies.
        """
        if not left.is_block():
            if right is None or not right.is_block():
                return () if x.ndim == 1 else None
            return right.sizes if in_order(y) else None
        if right is None or not right.is_block():
            return left.sizes if in_order(x) else None
        if left.sizes == right.sizes:
            return left.sizes
        key = left.sizes, right.sizes
        if key not in self.joined:
            whole = tuple(map(max, *key)) if len(key[0]) == len(key[1]) else ()
            fits = all(n in (1, most) for sizes in key for n, most in zip(sizes, whole, strict=False))
            self.joined[key] = whole if whole and fits else None
        return self.joined[key]

    def _type(self, dtype: Any, sizes: tuple[int, ...]) -> Any:
        if not sizes:
            return dtype
        key = id(dtype), sizes
        if key not in self.types:
            self.types[key] = self.tl.block_type(dtype, list(sizes))
        return self.types[key]

    def _getitem(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def getitem(x: Any, slices: Any, **options: Any) -> Any:
            data = x.handle.data
            if not (type(slices) is tuple and x.type.is_block()):
                return plain(x, slices, **options)
            kept = sum(1 for s in slices if type(s) is slice and s == WHOLE)
            if kept != data.ndim or kept + sum(1 for s in slices if s is None) != len(slices):
                return plain(x, slices, **options)
            found = data[slices]
            kind = self.tl.block_type(x.dtype, list(found.shape))
            return self.tl.tensor(self.handle_of(found, x.handle.dtype.scalar), kind)

        return getitem


def install(interpreter: Any, semantic: Any) -> Shortcuts:
    """What needs no operand: handles without a look at their width, constants and types that are told apart
    at first sight."""
    import triton.language as tl

    core = tl.core
    shortcuts = Shortcuts(interpreter)

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    plain_unwrap, as_they_are = (
        core._unwrap_if_constexpr,
        {tl.tensor, int, float, bool, type(None), str, tl.dtype},
    )

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind in as_they_are:
            return o
        return o.value if kind is tl.constexpr else plain_unwrap(o)

    plain_cast = type(semantic).cast

    def cast(self: Any, input: Any, dst_ty: Any, *options: Any, **named: Any) -> Any:
        same = dst_ty.scalar is input.type.scalar and not input.type.scalar.is_ptr()
        return input if same else plain_cast(self, input, dst_ty, *options, **named)

    interpreter.TensorHandle.__init__ = init_handle
    core._unwrap_if_constexpr = unwrap
    type(semantic).cast = cast
    return shortcuts
