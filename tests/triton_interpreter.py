"""Corrections of Triton's interpreter, which is wrong for bf16 (upstream closes that as unsupported).

The interpreter holds bf16 as uint16.  It truncates fp32 -> bf16 where the hardware rounds to nearest even,
multiplies the raw integers in ``tl.dot``, and does the same in arithmetic and reductions.  ``install``
makes each of them compute in fp32 and round once.

``tl.dot`` becomes one chain for each element over K in order, rounded as often as the instructions of a
tensor core would: NumPy's library chooses another order for another shape, processor or release, so that no
equality of bits could be tested with it; ``tensor_core.py`` has the sums of single GPUs. ``install`` also
looks the language up once a launch, not once a call of a device function (ten times faster), makes the types
and shapes of tensors once and not at every operation (half of what is left), converts and spreads only
operands that differ (a quarter of the rest), scans by doubling, all elements at a time and not one after
another (fifty times faster, and nearer to a GPU's order), leaves out checks of integer overflow whose result
nothing reads outside of debug mode, and silences NumPy's warnings for what a GPU computes without comment:
inf - inf, 0 / 0.

``TRITON_INTERPRET=1`` must be set before Triton is imported for the first time.
"""

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton_shortcuts

_installed = False


def install() -> None:
    """Correct the interpreter of this process; nothing happens without ``TRITON_INTERPRET=1``."""
    global _installed
    if _installed or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    _correct_casts(interpreter)
    _correct_dot(interpreter)
    _correct_arithmetic(interpreter)
    _correct_reductions(interpreter)
    _scan_by_doubling(interpreter)
    _patch_the_language_once(interpreter)
    _know_types_again(interpreter)
    _convert_only_what_differs(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _installed = True


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN becomes the canonical one, whose payload cannot carry over."""
    bits = np.array(x, dtype=np.float32, order="C").view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _is_bf16(handle: Any) -> bool:
    return getattr(handle.dtype, "scalar", None) is not None and handle.dtype.scalar.name == "bf16"


def _correct_casts(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain, rounding = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_bf16(src):
            wide = handle_of(bf16_to_fp32(src.data), tl.float32)
            return wide if dst_type.scalar == tl.float32 else cast_impl(self, wide, dst_type)
        if dst_type.scalar == tl.bfloat16:
            return handle_of(fp32_to_bf16(src.data), tl.bfloat16)
        return plain(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        truncate = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        if not truncate and tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return rounding(self, src, dst_type, rounding_mode)

    def get_bf16(self: Any, value: float) -> Any:
        return handle_of(fp32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.cast_impl, builder.create_fp_to_fp, builder.get_bf16 = cast_impl, create_fp_to_fp, get_bf16


def dot_in_order(a: np.ndarray, b: np.ndarray, sums: np.ndarray, dtype: str, precision: str) -> np.ndarray:
    """``sums + a @ b`` in the dtype of ``sums``: over K in order, sixteen products to a rounding."""
    wide = np.float64 if sums.dtype.kind == "f" else sums.dtype  # holds a product of two fp32 exactly
    a, b = a.astype(wide), b.astype(wide)
    # NumPy adds up along the first axis row by row, and in other orders where there is nothing but that axis
    at_once = a.ndim == 2 and 1 < sums.size <= 2048  # of larger ones, the products leave the cache
    for start in range(0, a.shape[-1], 16):
        if at_once:
            x, y = a[:, start : start + 16].T, b[start : start + 16]
            terms = np.empty((len(y) + 1, *sums.shape), wide)
            terms[0] = sums
            np.multiply(x[:, :, None], y[:, None, :], out=terms[1:])
            sums = np.add.reduce(terms, axis=0).astype(sums.dtype)
            continue
        total = sums.astype(wide)
        for k in range(start, min(start + 16, a.shape[-1])):
            total += a[..., :, k, None] * b[..., None, k, :]
        sums = total.astype(sums.dtype)
    return sums


multiply = dot_in_order  # what ``tl.dot`` computes; ``tensor_core`` has that of one GPU


def _correct_dot(interpreter: Any) -> None:
    handle_of = interpreter.TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
        x, y = (bf16_to_fp32(operand.data) if _is_bf16(operand) else operand.data for operand in (a, b))
        product = multiply(x, y, d.data, a.dtype.scalar.name, input_precision.name)
        return handle_of(product, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _correct_arithmetic(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def widened(handle: Any) -> Any:
        return handle_of(bf16_to_fp32(handle.data), tl.float32) if _is_bf16(handle) else handle

    def through_fp32(name: str) -> None:
        plain = getattr(builder, name)

        def op(self: Any, *args: Any) -> Any:
            operands = [a for a in args if isinstance(a, handle_of)]
            if not any(map(_is_bf16, operands)):
                return plain(self, *args)
            result = plain(self, *(widened(a) if isinstance(a, handle_of) else a for a in args))
            if result.data.dtype == np.bool_:  # a comparison
                return handle_of(result.data, tl.int1)
            return handle_of(fp32_to_bf16(result.data), tl.bfloat16) if _is_bf16(operands[-1]) else result

        setattr(builder, name, op)

    plain_fma = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Rounded once, as GPUs do: the interpreter rounds the product too."""
        if x.data.dtype != np.float32 or z.data.dtype != np.float32:
            return plain_fma(self, x, y, z)
        with np.errstate(over="ignore", invalid="ignore"):
            exact = x.data.astype(np.float64) * y.data + z.data
            return handle_of(exact.astype(np.float32), z.dtype.scalar)

    builder.create_fma = create_fma
    # ternary_op is also tl.where, to which widening and rounding change nothing
    for name in ("binary_op", "ternary_op", "unary_op", "create_fma"):
        through_fp32(name)


def _correct_reductions(interpreter: Any) -> None:
    import triton.language as tl

    handle_of = interpreter.TensorHandle

    def converted(tensor: Any, bf16: bool) -> Any:
        data = fp32_to_bf16(tensor.handle.data) if bf16 else bf16_to_fp32(tensor.handle.data)
        dtype = tl.bfloat16 if bf16 else tl.float32
        shaped = tl.block_type(dtype, list(tensor.shape)) if tensor.type.is_block() else dtype
        return tl.tensor(handle_of(data, dtype), shaped)

    def through_fp32(kind: Any) -> None:
        plain = kind.apply_impl

        def apply_impl(self: Any, tensors: Any) -> Any:
            low = [t.dtype == tl.bfloat16 for t in tensors]
            result = plain(
                self, tuple(converted(t, False) if b else t for t, b in zip(tensors, low, strict=True))
            )
            if not isinstance(result, (tuple, list)):
                return converted(result, True) if low[0] else result
            return tuple(converted(r, True) if b else r for r, b in zip(result, low, strict=False))

        kind.apply_impl = apply_impl

    through_fp32(interpreter.ReduceOps)
    through_fp32(interpreter.ScanOps)

    min_max = interpreter.ReduceOps.min_max
    # nanmax warns of rows that are NaN throughout
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def quiet_min_max(self: Any, tensors: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return min_max(self, tensors, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    interpreter.ReduceOps.min_max = quiet_min_max


def _scan_by_doubling(interpreter: Any) -> None:
    def generic_scan(self: Any, tensors: Any) -> Any:
        axis, length = self.axis, tensors[0].handle.data.shape[self.axis]
        place = np.arange(length).reshape(
            [-1 if i == axis else 1 for i in range(tensors[0].handle.data.ndim)]
        )
        step = 1
        while step < length:  # each element joins what the one ``step`` before it has of those before that
            before = [self.to_tensor(np.roll(x.handle.data, step, axis), x.dtype) for x in tensors]
            joined = self.combine_fn.fn(*before, *tensors)
            joined = joined if isinstance(joined, tuple) else (joined,)
            tensors = [
                self.to_tensor(np.where(place < step, x.handle.data, y.handle.data), x.dtype)
                for x, y in zip(tensors, joined, strict=True)
            ]
            step *= 2
        return tensors

    interpreter.ScanOps.generic_scan = generic_scan


def _patch_the_language_once(interpreter: Any) -> None:
    import triton.language as tl

    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched = False

    def patch_once(function: Any) -> Any:
        return interpreter._LangPatchScope() if patched else patch_lang(function)

    def call_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal patched
        outermost, scope = not patched, patch_once(everything)
        patched = True
        try:
            with np.errstate(all="ignore"):
                launch(self, *args, **kwargs)
        finally:
            patched = not outermost
            scope.restore()

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = call_grid
    interpreter.InterpretedFunction.__call__ = call_device_function


def _know_types_again(interpreter: Any) -> None:
    """For each result of each operation the interpreter makes a table of dtypes, a shape and a name."""
    import triton.language as tl

    plain_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = plain_dtype(dtype)
        return np_dtypes[name]

    plain_block, blocks = tl.block_type.__init__, {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape) if all(type(n) is int for n in shape) else None
        if key is None or key not in blocks:
            plain_block(self, element_ty, shape)
            self.sizes = tuple(self.shape)
            if key is None:
                return
            blocks[key] = self
        self.element_ty = element_ty
        _take_shape(self, blocks[key])

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        new = object.__new__(tl.block_type)
        new.element_ty = scalar_ty
        _take_shape(new, self)
        return new

    def set_name(self: Any, name: str) -> None:
        """It follows from the rest, and is read when an error is reported."""

    plain_tensor, shapes = tl.tensor.__init__, {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in shapes:
            plain_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    plain_equal = tl.dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        if type(self) is type(other) is tl.dtype:
            return self.name == other.name
        return plain_equal(self, other)

    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__ = init_block
    tl.block_type.with_element_ty = with_element_ty
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", set_name)
    tl.tensor.__init__ = init_tensor
    tl.dtype.__eq__ = equal


def _take_shape(block: Any, other: Any) -> None:
    block.shape, block.numel, block.sizes = other.shape, other.numel, other.sizes


def _convert_only_what_differs(interpreter: Any) -> None:
    """Most operands of an operation have one dtype, and one shape or that of a number."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    # by identity: types of pointers have no hash
    floats = {id(t) for t in (tl.float32, tl.float64)}
    bounds = {
        id(t): (t.get_int_min_value(), t.get_int_max_value())
        for t in (tl.int32, tl.int64, tl.uint32, tl.uint64)
    }
    plain_check = TritonSemantic.binary_op_type_checking_impl

    def holds(dtype: Any, number: Any) -> bool:
        """An operation of such a tensor and this number is one of the tensor's dtype."""
        if id(dtype) in floats:
            return type(number) in (int, float)
        low, high = bounds.get(id(dtype), (1, 0))
        return type(number) is int and low <= number <= high

    def check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: Any = False, allow_rhs_ptr: Any = False,
        arithmetic_check: Any = True, div_or_mod: Any = False,
    ) -> Any:  # fmt: skip
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            numbers = lhs.dtype is rhs.dtype and (id(lhs.dtype) in floats or id(lhs.dtype) in bounds)
            moved = allow_lhs_ptr and lhs.dtype.is_ptr() and id(rhs.dtype) in bounds
            if numbers or moved:
                return self.broadcast_impl_value(lhs, rhs)
            return plain_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if left and arithmetic_check and holds(lhs.dtype, rhs):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        if right and arithmetic_check and holds(rhs.dtype, lhs):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return plain_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    plain_broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            sizes = left.sizes
            if sizes == right.sizes:
                return lhs, rhs
            if len(sizes) == len(right.sizes):
                sizes = tuple(map(max, sizes, right.sizes))
                pairs = (*zip(left.sizes, sizes, strict=True), *zip(right.sizes, sizes, strict=True))
                if all(n == 1 or n == most for n, most in pairs):
                    return broadcast(self, lhs, sizes), broadcast(self, rhs, sizes)
            return plain_broadcast(self, lhs, rhs)
        if left.is_block():
            return lhs, splat(self, rhs, left)
        return (splat(self, lhs, right), rhs) if right.is_block() else (lhs, rhs)

    def broadcast(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        if x.type.sizes == sizes:
            return x
        return tl.tensor(self.builder.create_broadcast(x.handle, sizes), tl.block_type(x.dtype, list(sizes)))

    def splat(self: Any, x: Any, like: Any) -> Any:
        kind = like.with_element_ty(x.type)
        return tl.tensor(self.builder.create_splat(kind, x.handle), kind)

    TritonSemantic.binary_op_type_checking_impl = check
    TritonSemantic.broadcast_impl_value = broadcast_impl_value

    semantic = interpreter.interpreter_semantic
    shortcuts = triton_shortcuts.install(interpreter, semantic)
    calls: dict[Any, Any] = {}

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if (obj, name) not in calls:
            calls[obj, name] = member, call_of(obj, name, getattr(member, "__wrapped__", member))
        known, call = calls[obj, name]
        assert known is member, f"{name} of Triton's language is another one than at the first launch"
        scope.set_attr(obj, name, call)

    def call_of(obj: Any, name: str, plain: Any) -> Any:
        """Without a look whether it is given the semantic."""

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return plain(*args, **kwargs)

        return shortcuts.of(name, call) if obj is tl.tensor else call

    interpreter._patch_attr = patch_attr
