"""Vendors' varlen attention kernels behind one contract, forward and backward, each called by name.

lse is [Hq, T] in natural log; a row without keys has +inf (FlashAttention 2, torch) or -inf (3, 4).  backward
takes the out and the lse of whole rows, so that the parts of a row's keys can be computed one by one; its
gradients do not depend on how threads race.

Signatures are those of ``flash_attn_interface.py`` in flash-attn 2.8 and in FlashAttention 3, of
``flash_attn/cute/interface.py`` at flash-attention's commit 0251105a, and in torch 2.13 of
``aten::_flash_attention_forward``.  They change: a function that lacks a parameter, or wants one more, is
refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
Grads = tuple[Tensor, Tensor, Tensor]


class Saved(NamedTuple):
    """What backward reads of forward, whole rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Sequences(NamedTuple):
    """What a call computes: int32 tables of B + 1 offsets each, the longest sequences, and the rule."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool  # aligned at the end of each sequence
    window: int = 0  # positions that a row sees, itself included; 0: all
    softcap: float = 0.0

    @property
    def tables(self) -> tuple[Tensor, Tensor, int, int]:
        # FlashAttention 2 turns a batch of single rows to another kernel, whose bits depend on the device
        return self.cu_q, self.cu_k, max(2, self.max_q), self.max_k

    def sides(self, every: int | None) -> tuple[int | None, int | None]:
        """What a row sees to its left and to its right besides itself, ``every`` for all."""
        return (self.window - 1 if self.window else every), (0 if self.causal else every)


class ByName:
    """A function that takes its arguments by name; ``reason`` says why it cannot be called so.

    ``parameters`` are the names that it takes, a question mark behind those that only some versions have.
    """

    def __init__(self, function: Callable[..., Any], name: str, parameters: str) -> None:
        known, needed = _parameters(function)
        asked = parameters.split()
        self.function = function
        self.names = [n for n in asked if not n.endswith("?")]
        self.names += [n[:-1] for n in asked if n.endswith("?") and n[:-1] in known]
        missing = [n for n in self.names if n not in known]
        unknown = [n for n in needed if n not in self.names]
        self.reason = ""
        if missing:
            self.reason = f"its {name} has no parameter {missing[0]}"
        elif unknown:
            self.reason = f"its {name} needs {unknown[0]}"

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """With those of the values that it has a parameter for."""
        return self.function(**{name: values[name] for name in self.names})


def _parameters(function: Any) -> tuple[list[str], list[str]]:
    """The names of all parameters, and of those without a default."""
    # a torch.library.custom_op, then an operator: Python sees only *args of both
    overload = getattr(function, "_opoverload", None) or getattr(function, "default", None)
    if overload is not None:
        arguments = overload._schema.arguments
        return [a.name for a in arguments], [a.name for a in arguments if not a.has_default_value()]
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters], [p.name for p in parameters if p.default is p.empty]


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def library(name: str) -> Any:
    """The module, or in one line why there is none."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a build for another CUDA fails with an error of any kind
        return f"{name} does not import here: {error}"


class Varlen:
    """A vendor's kernels: where they are and what they are called, their limits, how they are called."""

    name: str
    devices: tuple[str, range]  # compute capabilities: in words, and the majors
    module: str
    calls: tuple[tuple[str, str], ...]  # forward, backward: the name in the module, the parameters
    every: int | None = -1  # what it calls a window without an end

    @functools.cached_property
    def functions(self) -> tuple[ByName, ByName] | str:
        """forward and backward, or why there are none."""
        module = library(self.module)
        if isinstance(module, str):
            return module
        found = []
        for path, parameters in self.calls:
            name = path.rpartition(".")[2]
            try:
                found.append(ByName(attrgetter(path)(module), name, parameters))
            except AttributeError:
                return f"{self.module} has no {name}"
        forward, backward = found
        return forward, backward

    def limits(self, q: Tensor, head_dim: int, softcap: float, needs_grad: bool) -> list[str]:
        """What this vendor alone cannot do."""
        return []

    def reasons(self, q: Tensor, softcap: float, needs_grad: bool, head_dim: int = 0) -> list[str]:
        """``head_dim``: that of all tensors of a call, where it is not q's."""
        found = self._reasons(q, softcap, needs_grad, head_dim or q.shape[2])
        return [f"{self.name}: {reason}" for reason in found]

    def _reasons(self, q: Tensor, softcap: float, needs_grad: bool, head_dim: int) -> list[str]:
        found = []
        if q.dtype not in DTYPES:
            found.append(f"q must be float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            want = f"a multiple of 8 and at most {MAX_HEAD_DIM}"
            found.append(f"the head dim must be {want}, got {head_dim}")
        if found:
            return found
        words, majors = self.devices
        if capability(q.device)[0] not in majors:
            got = ".".join(map(str, capability(q.device)))
            found.append(f"compute capability must be {words}, got {got}")
        found += self.limits(q, head_dim, softcap, needs_grad)
        if found:  # an import takes seconds
            return found
        if isinstance(functions := self.functions, str):
            return [functions]
        return [function.reason for function in functions if function.reason]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, s: Sequences) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._found()[0](_values(q, k, v, s, self.every))
        want = (q.shape[1], q.shape[0])
        if lse.shape != want:  # [B, H, longest] before FlashAttention 2.6
            raise RuntimeError(f"{self.name}'s lse must have shape [Hq, T] = {want}, got {tuple(lse.shape)}")
        return out.contiguous(), lse.contiguous()

    def backward(self, grad_out: Tensor, saved: Saved, s: Sequences) -> Grads:
        _, function = self._found()
        q, k, v, out, lse = saved
        grad_out, out, lse = aligned(grad_out), aligned(out), lse.contiguous()
        values = _values(q, k, v, s, self.every)
        values |= {"dout": grad_out, "grad_out": grad_out, "out": out}
        values |= {"lse": lse, "softmax_lse": lse, "logsumexp": lse}
        if "dq" in function.names:  # written into memory of the caller
            dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
            function(values | {"dq": dq, "dk": dk, "dv": dv})
            return dq, dk, dv
        # of dropout, which there is none of
        values["rng_state"] = torch.zeros(2, dtype=torch.uint64, device=q.device)
        values["unused"] = torch.empty(0, dtype=torch.float32, device=q.device)
        with deterministic():
            dq, dk, dv = function(values)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

    def _found(self) -> tuple[ByName, ByName]:
        functions = self.functions
        assert not isinstance(functions, str)
        return functions


def _values(q: Tensor, k: Tensor, v: Tensor, s: Sequences, every: int | None) -> dict[str, Any]:
    """The arguments that forward and backward share, under each name that a vendor has for them."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    cu_q, cu_k, max_q, max_k = s.tables
    left, right = s.sides(every)
    return {
        "q": q, "k": k, "v": v,
        "query": q, "key": k, "value": v,
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        "cum_seq_q": cu_q, "cum_seq_k": cu_k, "max_q": max_q, "max_k": max_k,
        "softmax_scale": s.scale, "scale": s.scale, "causal": s.causal, "is_causal": s.causal,
        "window_size_left": left, "window_size_right": right, "softcap": s.softcap,
        "dropout_p": 0.0, "alibi_slopes": None, "return_debug_mask": False, "deterministic": True,
        # left to itself, a version that can split keys over blocks does so by the batch's longest sequence
        "num_splits": 1, "return_lse": True,
    }  # fmt: skip


class FlashAttention3(Varlen):
    name = "FlashAttention 3"
    devices = ("9", range(9, 10))
    module = "flash_attn_interface"
    calls = (
        (
            "_flash_attn_forward",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal "
            "window_size_left window_size_right softcap num_splits",
        ),
        (
            "_flash_attn_backward",
            "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dq dk dv "
            "softmax_scale is_causal window_size_left window_size_right softcap deterministic",
        ),
    )

    def limits(self, q: Tensor, head_dim: int, softcap: float, needs_grad: bool) -> list[str]:
        is_wide = needs_grad and head_dim > 192  # rounded up to 256, which refuses deterministic=True
        return [f"backward is not deterministic above head dim 192, got {head_dim}"] if is_wide else []


class FlashAttention4(Varlen):
    """That of the CuTe DSL.  It could take a gradient of the lse, which whole rows have no need of."""

    name = "FlashAttention 4"
    # it has a forward on 8 and 12 too, but no backward on 8, and on 12 none that is deterministic
    devices = ("9 to 11", range(9, 12))
    module = "flash_attn.cute.interface"
    calls = (
        (
            "_flash_attn_fwd",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal "
            "window_size_left window_size_right softcap num_splits return_lse",
        ),
        (
            "_flash_attn_bwd",
            "dout q k v out lse cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dq dk dv "
            "softmax_scale causal window_size_left window_size_right softcap deterministic",
        ),
    )
    every = None

    def limits(self, q: Tensor, head_dim: int, softcap: float, needs_grad: bool) -> list[str]:
        if capability(q.device)[0] == 9 or head_dim <= 128:
            return []
        if head_dim != 256:
            return [f"the head dim must be at most 128, or 256, on 10 and 11, got {head_dim}"]
        return ["it has no softcap at head dim 256 on 10 and 11"] if softcap else []


class FlashAttention2(Varlen):
    name = "FlashAttention 2"
    devices = ("8.0 or above", range(8, 100))
    module = "flash_attn.flash_attn_interface"
    calls = (
        (
            "_flash_attn_varlen_forward",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
            "window_size_left window_size_right softcap",
        ),
        (
            "_flash_attn_varlen_backward",
            "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
            "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
            "deterministic",
        ),
    )


class Aten(Varlen):
    """FlashAttention 2 as torch has it: nothing to install, no softcap."""

    name = "torch's flash attention"
    devices = ("8.0 or above", range(8, 100))
    module = "torch"
    calls = (
        (
            "ops.aten._flash_attention_forward",
            "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale "
            "window_size_left window_size_right num_splits?",
        ),
        (
            "ops.aten._flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "rng_state unused scale window_size_left window_size_right",
        ),
    )

    def limits(self, q: Tensor, head_dim: int, softcap: float, needs_grad: bool) -> list[str]:
        found = ["it has no softcap"] if softcap else []
        if needs_grad and head_dim > 192 and capability(q.device) not in ((8, 0), (9, 0), (10, 0)):
            found.append(f"backward above head dim 192 needs an A100, H100 or B200, got {head_dim}")
        return found


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's flash backward adds up dq with atomics, unless the global flag stands and is no mere warning.

    It stands while the kernel is launched, then is what it was; fresh memory is not filled meanwhile.  It
    belongs to the process: another thread that launches at that moment gets its deterministic kernels too.
    """
    options: Any = torch.utils.deterministic
    fills = options.fill_uninitialized_memory
    stands = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        options.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=False)
        yield
    finally:
        torch.use_deterministic_algorithms(stands, warn_only=warns)
        options.fill_uninitialized_memory = fills


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where rows do not start at 16 bytes, which the kernels read at once without asking."""
    unit = 16 // x.element_size()
    rows, heads, last = x.stride()
    is_fine = x.data_ptr() % 16 == 0 and rows > 0 and heads > 0 and last == 1  # 0: expanded
    if is_fine and rows % unit == 0 and heads % unit == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


# 3 runs on 9 alone, for which it was written; elsewhere 4 comes first
KERNELS: tuple[Varlen, ...] = (FlashAttention3(), FlashAttention4(), FlashAttention2(), Aten())


@functools.cache
def has_newer() -> bool:
    """Whether FlashAttention 3 or 4 is installed, be it able to run here or not."""

    def installed(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ImportError:  # the package around it is not there
            return False

    return any(installed(kernel.module) for kernel in KERNELS[:2])
