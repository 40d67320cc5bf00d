"""FlashInfer's own Python, over stand-ins of its kernels, which need a GPU.

What rlkernel calls are the functions and wrappers of the flashinfer-python that is installed, or else of the
one that requirements/constraints.txt pins: they check, plan and allocate as on a GPU.  Below them stands
torch, which computes by the rule of the kernels, on a CPU and in the dtype that it gets.
"""

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import math
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import peer_sources
import pytest
import torch

import rlkernel

# what its Python imports and does not need for what is tested here
ABSENT = (
    "cuda", "cudnn", "cutlass", "flashinfer.cute_dsl", "flashinfer.decode", "flashinfer.mla", "pynvml",
    "tvm_ffi",
)  # fmt: skip
MODULES = ("cascade", "prefill", "sampling", "topk")
CAUSAL = 1  # MaskMode


class Nothing:
    """Whatever is done with it."""

    def __init__(self, *args, **kwargs): ...
    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else self  # a decorator changes nothing

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index):
        return self

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return ()


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        absent = name.startswith(tuple(f"{n}." for n in ABSENT)) or name in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        nothing = Nothing()
        module.__getattr__ = nothing.__getattr__
        return module

    def exec_module(self, module): ...


def _installed() -> Path | None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:  # a test may have put something in its place
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def python() -> types.SimpleNamespace:
    """Its modules; they stand in ``sys.modules`` only where the package is installed."""
    if _installed():
        return types.SimpleNamespace(
            **{name: importlib.import_module(f"flashinfer.{name}") for name in MODULES}
        )
    package = types.ModuleType("flashinfer")  # its own __init__ imports every kernel of every GPU
    package.__path__, package.__spec__ = [str(_fetched())], importlib.machinery.ModuleSpec("flashinfer", None)
    before, finder = dict(sys.modules), AbsentModules()
    sys.modules["flashinfer"] = package
    sys.meta_path.insert(0, finder)
    try:
        os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp())  # it begins a log there
        found = {name: importlib.import_module(f"flashinfer.{name}") for name in MODULES}
    finally:
        sys.meta_path.remove(finder)
        for name in [x for x in sys.modules if x.partition(".")[0] in ("flashinfer", *ABSENT)]:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]
    return types.SimpleNamespace(**found)


def _fetched() -> Path:
    return peer_sources.folder("flashinfer-python") / "flashinfer-python/flashinfer"


def exported() -> set[str]:
    """The names that the package itself has."""
    folder = _installed() or _fetched()
    body = ast.parse((folder / "__init__.py").read_text()).body
    return {alias.asname or alias.name for x in body if isinstance(x, ast.ImportFrom) for alias in x.names}


class Attention:
    """The compiled modules of its batch prefill: what is planned, and what each run has."""

    def __init__(self, backend: str) -> None:
        self.backend = backend  # where nothing in a call is against it
        self.plans: list[tuple] = []
        self.dims: tuple[int, int] | None = None  # of queries and values, of the last run

    def module(self, backend: str) -> types.SimpleNamespace:
        """``fa2``, or ``fa3`` of Hopper, which has other arguments."""
        names = ("plan", "ragged_run", "paged_run")
        return types.SimpleNamespace(
            **{name: functools.partial(getattr(self, name), backend) for name in names}
        )

    def plan(self, backend, floats, ints, pinned, q_starts, kv_starts, kv_lens, rows, batch, heads, kv_heads,
             page_size, graph, qk_dim, vo_dim, causal, window_left, *split):  # fmt: skip
        assert floats.numel() * floats.element_size() >= 128 * 2**20
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in (q_starts, kv_starts, kv_lens))
        assert len(q_starts) == len(kv_starts) == len(kv_lens) + 1 == batch + 1 and rows == q_starts[-1]
        assert bool((kv_lens > 0).all()), "a request without keys"
        assert bool((kv_lens >= q_starts.diff()).all()) or not causal
        assert len(split) in ((4, 5) if backend == "fa2" else (0,))  # of 0.7.2, and of 0.7.4
        self.plans.append((backend, heads, kv_heads, qk_dim, vo_dim, page_size, causal, window_left))
        return [len(self.plans) - 1]

    def ragged_run(self, backend, floats, ints, plan, q, k, v, q_starts, kv_starts, out, lse, mask_mode,
                   layout, window_left, pdl, *rest):  # fmt: skip
        assert all(x.is_contiguous() for x in (q, k, v))
        planned = backend, q.shape[1], k.shape[1], q.shape[2], v.shape[2], 1, mask_mode == CAUSAL, window_left
        assert self.plans[plan[0]] == planned
        spans = zip(_spans(q_starts), _spans(kv_starts), strict=True)
        requests = [(at, k[of], v[of]) for at, of in spans]
        self.dims = q.shape[2], v.shape[2]
        attend(requests, q, (out, lse), mask_mode == CAUSAL, window_left, *_options(backend, rest))

    def paged_run(self, backend, floats, ints, plan, q, k_cache, v_cache, q_starts, page_starts, pages, last,
                  out, lse, mask_mode, layout, window_left, pdl, *rest):  # fmt: skip
        size = k_cache.shape[1]
        planned = backend, q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3], size
        assert self.plans[plan[0]] == (*planned, mask_mode == CAUSAL, window_left)
        assert bool((last >= 1).all()) and bool((last <= size).all()) and len(pages) == page_starts[-1]
        requests = []
        for at, of, keys in zip(_spans(q_starts), _spans(page_starts), last.tolist(), strict=True):
            own = pages[of].long()
            keys += (len(own) - 1) * size
            requests.append((at, *(x[own].flatten(0, 1)[:keys] for x in (k_cache, v_cache))))
        attend(requests, q, (out, lse), mask_mode == CAUSAL, window_left, *_options(backend, rest))


def _options(backend, rest):
    """The cap and the scale."""
    return rest[8:10] if backend == "fa2" else rest[4:6]


def _spans(starts):
    return [slice(a, b) for a, b in itertools.pairwise(starts.tolist())]


def attend(requests, q, results, causal, window_left, softcap, scale) -> None:
    """Of each request its rows, which end with its last key, and its keys and values."""
    out, lse = results
    assert q.is_contiguous() and lse.dtype == torch.float32 and out.dtype == q.dtype
    for at, k, v in requests:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
        s = torch.einsum("qhd,khd->hqk", q[at].double(), k) * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        key, row = torch.arange(len(k)), torch.arange(len(k) - len(q[at]), len(k))[:, None]
        if causal:
            s = s.masked_fill(key > row, -math.inf)
        if window_left >= 0:
            s = s.masked_fill(key < row - window_left, -math.inf)
        out[at] = torch.einsum("hqk,khd->qhd", s.softmax(2), v).to(out.dtype)
        lse[at] = (s.logsumexp(2).T / math.log(2)).float()


def merge_state(v_a, s_a, v_b, s_b, v_merged, s_merged) -> None:
    s_merged.copy_(torch.logaddexp2(s_a, s_b))
    weights = ((s - s_merged).exp2()[..., None].double() for s in (s_a, s_b))
    v_merged.copy_(sum(v.double() * w for v, w in zip((v_a, v_b), weights, strict=True)))


@contextlib.contextmanager
def over(monkeypatch: pytest.MonkeyPatch, package: str, op: str) -> Iterator[types.ModuleType]:
    """rlkernel's module of an op over a package that may not be installed; it takes CPU tensors here."""
    if importlib.util.find_spec(package) is None:
        stand_in = types.ModuleType(package)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, stand_in)
    modules = tuple(f"rlkernel.{package}{name}" for name in ("", "._attention", f".{op}"))
    for loaded in modules:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    yield importlib.import_module(modules[-1])
    for loaded in modules:
        sys.modules.pop(loaded, None)
    vars(rlkernel).pop(package, None)


@contextlib.contextmanager
def attention(monkeypatch: pytest.MonkeyPatch, op: str, choice: str) -> Iterator[types.ModuleType]:
    """rlkernel's module of an op where FlashInfer's own choice is ``fa2`` or ``fa3``; see ``kernels_of``."""
    found, kernels = python(), Attention(choice)
    prefill = found.prefill

    def built(backend, *args):
        return types.SimpleNamespace(build_and_load=lambda: kernels.module(backend))

    for name in (
        "gen_batch_prefill_module", "_gen_batch_prefill_primary_module",
        "_gen_batch_prefill_independent_paged_module",
    ):  # fmt: skip
        monkeypatch.setattr(prefill, name, built)
    monkeypatch.setattr(prefill, "get_batch_prefill_uri", lambda *args: "stand_in")
    monkeypatch.setattr(prefill, "determine_attention_backend", lambda *args, **kwargs: choice)
    monkeypatch.setattr(prefill, "get_compute_capability", lambda device: (9, 0))
    for name in ("is_sm100a_supported", "is_sm110a_supported", "is_sm12x_supported"):
        monkeypatch.setattr(prefill, name, lambda device: False)
    independent = prefill._LazyBatchPrefillIndependentModule  # it loads under a CUDA device
    monkeypatch.setattr(independent, "get", lambda self, device: self._spec.build_and_load())
    monkeypatch.setattr(prefill, "torch", _TorchWithoutPinnedMemory())
    compiled = types.SimpleNamespace(merge_state=merge_state)
    monkeypatch.setattr(found.cascade, "get_cascade_module", lambda: compiled)
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper")
    assert {*names, "merge_state"} <= exported()
    library = types.SimpleNamespace(
        **{name: getattr(prefill, name) for name in names},
        merge_state=found.cascade.merge_state,
        kernels=kernels,
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    prefill.get_batch_prefill_module.cache_clear()
    with over(monkeypatch, "flashinfer", op) as module:
        monkeypatch.setattr(module, "library", lambda: (library, ""))
        yield module
    prefill.get_batch_prefill_module.cache_clear()


def kernels_of(backend: types.ModuleType) -> Attention:
    """The compiled attention below rlkernel's module of an op."""
    return backend.library()[0].kernels


class _TorchWithoutPinnedMemory:
    """torch as prefill.py has it: without a GPU there is no memory that its copies could be pinned for."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, pin_memory=False, **kwargs):
        return torch.empty(*args, **kwargs)


class Sampling:
    """The compiled module of its sampling: each row's token is the least likely one that is kept."""

    def sampling_from_probs(self, probs, samples, valid, indices, *stream):
        self._drawn(probs, samples, stream)

    def top_p_sampling_from_probs(self, probs, samples, valid, indices, rows_p, p, *stream):
        self._drawn(probs, samples, stream, p=_either(rows_p, p))

    def top_k_sampling_from_probs(self, probs, samples, valid, indices, rows_k, k, *stream):
        self._drawn(probs, samples, stream, k=_either(rows_k, k))

    def min_p_sampling_from_probs(self, probs, samples, valid, indices, rows_p, p, *stream):
        self._drawn(probs, samples, stream, min_p=_either(rows_p, p))

    def top_k_top_p_sampling_from_probs(self, probs, samples, valid, indices, rows_k, k, rows_p, p, *stream):
        self._drawn(probs, samples, stream, k=_either(rows_k, k), p=_either(rows_p, p))

    def top_k_renorm_probs(self, probs, renormed, rows_k, k, deterministic, states):
        renormed.copy_(renormalized(probs, _either(rows_k, k)))

    def _drawn(self, probs, samples, stream, **kept):
        deterministic, seeds, _, offsets, _ = stream
        assert deterministic and samples.dtype == torch.int32
        assert probs.dtype == torch.float32 and probs.is_contiguous() and not probs.isnan().any()
        assert seeds.shape == offsets.shape == probs.shape[:1] and seeds.dtype == offsets.dtype == torch.int64
        assert seeds.is_contiguous() and offsets.is_contiguous()
        assert not isinstance(kept.get("k"), torch.Tensor) or kept["k"].dtype == torch.int32
        samples.copy_(last_kept(probs, **kept))


def _either(rows, value):
    return value if rows is None else rows


def last_kept(probs, k=None, p=2.0, min_p=0.0):
    """The least likely token that kernels keep: fewer than k are likelier, and they have less than p."""
    k = probs.shape[1] if k is None else k
    k, p, min_p = (torch.as_tensor(x).reshape(-1, 1) for x in (k, p, min_p))
    likelier = probs[:, None, :] > probs[:, :, None]
    count, mass = likelier.sum(-1), (likelier * probs[:, None, :]).sum(-1)
    kept = (count < k) & (mass < p) & (probs >= min_p * probs.amax(-1, keepdim=True)) & (probs > 0)
    return torch.where(kept, probs, 2.0).argmin(-1).to(torch.int32)


def renormalized(probs, k):
    """What ``k`` leaves of each row, with sum 1."""
    likelier = (probs[:, None, :] > probs[:, :, None]).sum(-1)
    kept = torch.where(likelier < torch.as_tensor(k).reshape(-1, 1), probs, 0)
    return kept / kept.sum(-1, keepdim=True)


@contextlib.contextmanager
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """``flashinfer.sampling``."""
    found = python()
    module = found.sampling
    built = types.SimpleNamespace(build_and_load=Sampling)
    monkeypatch.setattr(module, "gen_sampling_module", lambda: built)
    if hasattr(module, "_get_row_states_buffer"):  # one of a CUDA stream
        monkeypatch.setattr(module, "_get_row_states_buffer", lambda name, device: None)
    monkeypatch.setattr(found.topk, "top_k", top_k)
    monkeypatch.setitem(sys.modules, "flashinfer.topk", found.topk)  # imported where it is called
    module.get_sampling_module.cache_clear()
    yield module
    module.get_sampling_module.cache_clear()


def top_k(x, k, *, sorted, deterministic):
    assert sorted and deterministic
    return torch.topk(x, k)
