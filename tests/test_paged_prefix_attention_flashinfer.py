"""``paged_prefix_attention`` over FlashInfer, with a stand-in of its wrapper, which needs a GPU."""

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from paged_cases import STEPS, TABLES, dense, make

import rlkernel
from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule


# fmt: off
class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` of flashinfer-python 0.7.2."""

    plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
                 variant_owns_mask=False):
        assert kv_layout == "NHD" and float_workspace_buffer.numel() >= 128 * 2**20

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
             packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
             sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
             q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
             prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
             max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None,
             max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None,
             disable_split_kv=False, uniform_q_len=None):
        Wrapper.plans += 1
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in tables)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert bool((paged_kv_indptr.diff() > 0).all()), "a request without keys"
        assert bool((paged_kv_last_page_len >= 1).all()) and bool((paged_kv_last_page_len <= page_size).all())
        self.tables = tables
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type
        self.rule = sm_scale, logits_soft_cap or 0.0, causal

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None,
            kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None,
            uses_spcompress=None):
        k_cache, v_cache = paged_kv_cache
        _, size, kv_heads, _ = k_cache.shape
        assert self.shape == (q.shape[1], kv_heads, q.shape[2], size, q.dtype, k_cache.dtype)
        assert return_lse and lse_base == "log2" and lse_layout == "NH"
        return attend(q, k_cache, v_cache, self.tables, *self.rule)
# fmt: on


def attend(q, k_cache, v_cache, tables, scale, softcap, causal):
    """Each request's rows over its pages; causal ones end with its last key."""
    starts, page_starts, pages, last = (x.tolist() for x in tables)
    assert len(q) == starts[-1]
    group, size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float64)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        own = pages[slice(*page_starts[i : i + 2])]
        keys = (len(own) - 1) * size + last[i]
        k, v = (x[own].flatten(0, 1)[:keys].repeat_interleave(group, 1).double() for x in (k_cache, v_cache))
        s = torch.einsum("qhd,khd->hqk", q[a:b].double(), k) * scale
        s = softcap * torch.tanh(s / softcap) if softcap else s
        if causal:
            at = torch.arange(keys - (b - a), keys)[:, None]
            s = s.masked_fill(torch.arange(keys) > at, -math.inf)
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(2), v).to(q.dtype)
        lse[a:b] = s.logsumexp(2).T / math.log(2)
    return out, lse


def merge_state(v_a, s_a, v_b, s_b):
    s = torch.logaddexp2(s_a, s_b)
    return v_a * (s_a - s).exp2()[..., None].to(v_a.dtype) + v_b * (s_b - s).exp2()[..., None].to(
        v_a.dtype
    ), s


@pytest.fixture
def backend(monkeypatch):
    """rlkernel.flashinfer's module of the op, over the stand-in."""
    if importlib.util.find_spec("flashinfer") is None:
        package = types.ModuleType("flashinfer")
        package.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
        monkeypatch.setitem(sys.modules, "flashinfer", package)
    modules = tuple(f"rlkernel.flashinfer{name}" for name in ("", "._attention", ".paged_prefix_attention"))
    for loaded in modules:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    backend = importlib.import_module(modules[-1])
    library = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper, merge_state=merge_state)
    monkeypatch.setattr(backend, "library", lambda: (library, ""))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    Wrapper.plans = 0
    yield backend
    for loaded in modules:
        sys.modules.pop(loaded, None)
    vars(rlkernel).pop("flashinfer", None)


def call_of(inputs, *, softcap=0.0, sinks=None):
    size = inputs["key_cache"].shape[1]
    plan = rlkernel.paged_prefix_plan(*(inputs[name] for name in TABLES), size)
    return PagedCall(**inputs, plan=plan, rule=PagedRule(0.3, softcap, 0), sinks=sinks)


@pytest.mark.parametrize("step", STEPS)
def test_levels_add_up_to_what_each_row_sees(step, backend):
    check(backend, make(STEPS[step], dtype=torch.float64))


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"sinks": torch.tensor([1.0, -1.0, 0.0, 2.0])}], ids=list
)
def test_options(options, backend):
    check(backend, make(STEPS["both at once"], dtype=torch.float64), **options)


def check(backend, inputs, **options):
    out, lse = backend.forward(call_of(inputs, **options))
    want, want_lse = dense(inputs, torch.float64, scale=0.3, **options)
    assert out.is_contiguous() and lse.is_contiguous() and lse.shape == want_lse.shape
    assert (out - want).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)  # they reach it as fp32
    assert (lse - want_lse).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)


def test_what_is_shared_is_one_request_of_a_level(backend):
    plan = call_of(make(STEPS["many rows of a group"])).plan  # 70 rows, in tiles of 64
    own, shared = backend.levels(plan)
    assert own.causal and not shared.causal
    assert shared.q_starts.tolist() == [0, 70] and shared.page_starts.tolist() == [0, 128 // 16]
    assert own.q_starts.tolist() == list(range(71)) and set(own.last_keys.tolist()) == {7}
    tree = call_of(make(STEPS["a system prompt, prompts, samples"])).plan
    assert [len(level.q_starts) - 1 for level in backend.levels(tree)] == [4, 2, 1]


def test_a_prefill_is_one_request(backend):
    (own,) = backend.levels(call_of(make(STEPS["chunked prefill"])).plan)  # 90 rows behind 1010 keys
    assert own.q_starts.tolist() == [0, 90] and own.page_starts.tolist() == [0, -(-1100 // 16)]


def test_a_lost_level_is_found(monkeypatch, backend):
    levels = backend.levels
    monkeypatch.setattr(backend, "levels", lambda plan: levels(plan)[:1])
    inputs = make(STEPS["decode of several"], dtype=torch.float64)
    out, _ = backend.forward(call_of(inputs))
    assert (out - dense(inputs, torch.float64, scale=0.3)[0]).abs().max() > 0.01


def test_layers_share_a_plan(backend):
    inputs = make(STEPS["both at once"], dtype=torch.float64)
    call = call_of(inputs)
    for _ in range(3):
        backend.forward(call)
    levels = len(backend.levels(call.plan))
    assert Wrapper.plans == levels > 1
    backend.forward(call._replace(rule=call.rule._replace(softcap=1.0)))
    assert Wrapper.plans == 2 * levels
    another = make(STEPS["one row alone"], dtype=torch.float64)
    out, _ = backend.forward(call_of(another))
    assert (out - dense(another, torch.float64, scale=0.3)[0]).abs().max() <= 1e-11


def test_half_precision(backend):
    inputs = make(STEPS["both at once"], dtype=torch.bfloat16, head_dim=64)
    out, lse = backend.forward(call_of(inputs))
    want, _ = dense(inputs, torch.float64, scale=0.3)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float64
    assert (out.double() - want).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * want.abs().max()


def test_no_rows(backend):
    inputs = make(STEPS["one row alone"])
    inputs["query"], inputs["cu_seqlens_q"] = inputs["query"][:0], inputs["cu_seqlens_q"] * 0
    out, lse = backend.forward(call_of(inputs))
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and Wrapper.plans == 0


def test_it_says_why_not(monkeypatch, backend):
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.version, "hip", None)

    def on_gpu(*shape, dtype=torch.bfloat16):
        return torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)

    def reasons(dtype=torch.bfloat16, dims=(64, 64), block=16, **options):
        return backend.unsupported(
            on_gpu(3, 4, dims[0], dtype=dtype),
            *(on_gpu(9, block, 2, d, dtype=dtype) for d in dims),
            **options,
        )

    plan = call_of(make(STEPS["one row alone"])).plan
    assert reasons(rule=PagedRule(1.0, 2.0, 0), plan=plan) == []
    assert reasons(rule=PagedRule(1.0, 0.0, 7)) == ["window must be None: its cascades have none, got 7"]
    assert reasons(plan=plan._replace(block_size=128)) == ["the block size must divide 64, got 128"]
    assert reasons(torch.float32) == ["query must be float16 or bfloat16, got float32"]
    for dims in ((96, 96), (128, 64)):
        assert reasons(dims=dims) == [
            "the head dim must be one of 64, 128, 256, the same for keys and values, "
            f"got {dims[0]} and {dims[1]}"
        ]
    query, cache = on_gpu(3, 4, 64), on_gpu(9, 2, 64, 16).permute(0, 3, 1, 2)
    assert [r.split(", got")[0] for r in backend.unsupported(query, cache, cache)] == [
        f"{name}_cache must be dense in the last dimension" for name in ("key", "value")
    ]
    assert backend.unsupported(torch.zeros(3, 2, 64).bfloat16()) == [
        "query must be on an NVIDIA GPU, got cpu"
    ]
    monkeypatch.setattr(backend, "library", lambda: (None, "flashinfer does not import here: no such tool"))
    assert reasons() == ["flashinfer does not import here: no such tool"]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_stand_in_has_the_signatures_of_the_package():
    package = importlib.util.find_spec("flashinfer")
    folder = Path(package.submodule_search_locations[0])
    tree = ast.parse((folder / "prefill.py").read_text())
    (real,) = (
        n
        for n in tree.body
        if isinstance(n, ast.ClassDef) and n.name == "BatchPrefillWithPagedKVCacheWrapper"
    )
    found = {}
    for name in ("__init__", "plan", "run"):
        *_, found[name] = (n for n in real.body if isinstance(n, ast.FunctionDef) and n.name == name)
    cascade = ast.parse((folder / "cascade.py").read_text()).body
    (found["merge_state"],) = (
        n for n in cascade if isinstance(n, ast.FunctionDef) and n.name == "merge_state"
    )
    for name, function in found.items():
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        needed = arguments[: len(function.args.args) - len(function.args.defaults)]
        mine = merge_state if name == "merge_state" else getattr(Wrapper, name)
        played = [p.name for p in inspect.signature(mine).parameters.values() if p.name != "args"]
        # a later version may have more, as long as nobody has to give them
        assert [a for a in arguments if a in played] == played and set(needed) <= set(played), name
