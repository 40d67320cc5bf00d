"""Names for numbers that kernels compare with, from the tuples of ``rlkernel.calls``; fixed orders."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


class Names(tl.constexpr):
    """``Names(("a", "b")).b`` is 1, in a kernel that finds it among its module's globals and outside of one.

    Kernels may read no other globals than ``tl.constexpr``.  Triton takes an attribute from the value, its
    interpreter from the object; before each launch Triton asks whether a global is what it was.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(namedtuple("Names", names)(*range(len(names))))
        self._count = len(names)

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):  # what Triton and copy ask of any object
            raise AttributeError(name)
        number: int = getattr(self.value, name)
        return number

    def __len__(self) -> int:
        return self._count

    def __deepcopy__(self, memo: Any) -> "Names":
        return self

    def __ne__(self, other: object) -> bool:  # once a launch: the same object costs no comparison of values
        return self is not other and (not isinstance(other, Names) or self.value != other.value)

    def __eq__(self, other: object) -> bool:
        return not self != other

    __hash__ = tl.constexpr.__hash__


def fixed_order(sizes: list[str], tensors: list[str]) -> Callable[..., Any]:
    """``triton.jit`` without what alignment and sizes would specialise: one binary, hence one order.

    Triton picks the order of a float reduction by the layout, and the layout by the alignment of arguments.
    """

    def jit(function):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return triton.jit(
            function,
            do_not_specialize=[name for name in names if name in sizes],
            do_not_specialize_on_alignment=[name for name in names if name in tensors],
        )

    return jit


@triton.jit
def store_all(out, values):
    """A tuple of numbers behind each other: in the order of the names that ``out`` is read by."""
    for k in tl.static_range(len(values)):
        tl.store(out + k, values[k].to(out.dtype.element_ty))
