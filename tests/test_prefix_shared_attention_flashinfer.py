"""``prefix_shared_attention`` over FlashInfer, with a stand-in of its wrapper, which needs a GPU."""

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import math
import sys
import types
from pathlib import Path

import pytest
import torch
import varlen_stand_ins as vendors

import rlkernel
from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionResults, AttentionRule, OutGrads
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.reference import prefix_shared_attention as reference

RULE = AttentionRule(0.4, 0.0, 0, False)
TREE = PrefixLayout.of([5, 3, 4, 2, 3, 1, 4], [-1, 0, 0, 1, 1, 2, 3], [False] * 3 + [True] * 4)[0]
LAYOUTS = {
    "tree": TREE,
    "group": PrefixLayout.of([7, 3, 1, 5], [-1, 0, 0, 0], [False, True, True, True])[0],
    "no prompt": PrefixLayout.of([3, 4], [-1, -1], [True, True])[0],
}


# fmt: off
class Wrapper:
    """``BatchPrefillWithRaggedKVCacheWrapper`` of flashinfer-python 0.7.2."""

    plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
                 jit_args=None, jit_kwargs=None, variant_owns_mask=False):
        assert kv_layout == "NHD" and float_workspace_buffer.numel() >= 128 * 2**20

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
             custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
             use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
             rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
             non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
             max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None,
             seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None,
             o_indptr=None):
        Wrapper.plans += 1
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu"
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, q_data_type,
                      kv_data_type)
        self.tables = (qo_indptr, kv_indptr)
        self.options = (sm_scale, causal, window_left, -1, logits_soft_cap or 0.0)

    def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
            return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, kv_cache_sf=None):
        assert self.shape == (q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, k.dtype)
        Wrapper.dims = q.shape[2], v.shape[2]
        assert q.shape[2] == k.shape[2] and (q.shape[2] == v.shape[2] or Wrapper.dims == (192, 128))
        assert all(x.is_contiguous() for x in (q, k, v)) and lse_base == "log2" and lse_layout == "NH"
        longest = (max(2, int(x.diff().max())) for x in self.tables)
        out, lse = attend(q, k, v, *self.tables, *longest, *self.options, -5e4)
        return (out, lse.T.contiguous() / math.log(2)) if return_lse else out
# fmt: on

attend = vendors.attend


@pytest.fixture
def backend(monkeypatch):
    """rlkernel.flashinfer's module of the op, over the stand-in."""
    if importlib.util.find_spec("flashinfer") is None:
        package = types.ModuleType("flashinfer")
        package.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
        monkeypatch.setitem(sys.modules, "flashinfer", package)
    modules = tuple(f"rlkernel.flashinfer{name}" for name in ("", "._attention", ".prefix_shared_attention"))
    for loaded in modules:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    backend = importlib.import_module(modules[-1])
    library = types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(backend, "library", lambda: (library, ""))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    Wrapper.plans = 0
    yield backend
    for loaded in modules:
        sys.modules.pop(loaded, None)
    vars(rlkernel).pop("flashinfer", None)


def case(layout, dtype=torch.float64, heads=4, kv_heads=2, dims=(16, 16), **options):
    made = reference.make_inputs(layout, heads, kv_heads, *dims, dtype=dtype)
    sinks = torch.linspace(-1, 2, heads, dtype=dtype) if options.pop("sinks", False) else None
    return AttentionCall(made["q"], made["k"], made["v"], layout, RULE._replace(**options), sinks)


@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"window": 5}, {"softcap": 2.0}, {"sinks": True}], ids=str
)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_the_reference(name, heads, kv_heads, options, backend):
    call = case(LAYOUTS[name], torch.float64, heads, kv_heads, **options)
    (out, lse), (want, want_lse) = backend.forward(call), reference.forward(call)
    assert out.is_contiguous() and lse.is_contiguous() and lse.shape == want_lse.shape
    # sinks reach it as fp32
    assert (out - want).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)
    assert (lse - want_lse).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(
    ("dims", "given"),
    [((192, 128), (192, 128)), ((64, 32), (64, 64)), ((32, 64), (64, 64)), ((128, 192), (192, 192))],
    ids=str,
)
def test_values_of_another_head_dim(dims, given, options, backend):
    """Those of multi-head latent attention go in as they are."""
    call = case(TREE, dims=dims, **options)
    (out, lse), (want, want_lse) = backend.forward(call), reference.forward(call)
    assert Wrapper.dims == given and out.is_contiguous() and out.shape == want.shape
    assert (out - want).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)
    assert (lse - want_lse).abs().max() <= (1e-11 if "sinks" not in options else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_strides(dtype, backend):
    call = case(TREE, dtype, sinks=True)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in call[:3]]
    out, lse = backend.forward(AttentionCall(*by_head, *call[3:]))
    assert out.dtype == dtype and out.is_contiguous() and lse.dtype == torch.float32
    want, want_lse = reference.forward(call)
    assert (out.double() - want.double()).abs().max() <= 4 * torch.finfo(dtype).eps
    assert (lse - want_lse).abs().max() <= 1e-5


def test_base_two_read_as_natural_is_found(monkeypatch, backend):
    monkeypatch.setattr(
        sys.modules["rlkernel.flashinfer._attention"], "math", types.SimpleNamespace(log=lambda x: 1.0)
    )
    call = case(TREE)
    assert (backend.forward(call)[1] - reference.forward(call)[1]).abs().max() > 0.1


def test_layers_share_a_plan(backend):
    call = case(TREE)
    for _ in range(3):
        backend.forward(call)
    assert Wrapper.plans == 1
    for others in (case(TREE, window=3), case(TREE, heads=6), case(LAYOUTS["group"]), call):
        out, _ = backend.forward(others)
        assert (out - reference.forward(others)[0]).abs().max() <= 1e-11
    assert Wrapper.plans == 5


def test_no_rows(backend):
    layout = PrefixLayout((), (), ())
    out, lse = backend.forward(case(layout, torch.bfloat16))
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and Wrapper.plans == 0


def on_gpu(monkeypatch, dtype=torch.bfloat16, head_dim=64):
    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.version, "hip", None)
    return torch.zeros(3, 2, head_dim, dtype=dtype).as_subclass(OnGpu)


def test_it_says_why_not(monkeypatch, backend):
    assert backend.unsupported(on_gpu(monkeypatch)) == []
    assert backend.unsupported(on_gpu(monkeypatch), rule=RULE._replace(window=3, softcap=1.0)) == []
    q = on_gpu(monkeypatch)
    assert backend.unsupported(q, needs_grad=True) == ["flashinfer has no backward, a gradient is asked for"]
    (reason,) = backend.unsupported(q, rule=RULE._replace(bitwise=True))
    assert reason.startswith("parity must be 'fast'")
    (reason,) = backend.unsupported(on_gpu(monkeypatch, torch.float32))
    assert reason == "q must be float16 or bfloat16, got float32"
    assert backend.unsupported(on_gpu(monkeypatch, head_dim=96)) == [
        "the head dim must be one of 64, 128, 256, or 192 with values of 128, got 96 with values of 96"
    ]
    for dims, is_able in {(192, 128): True, (64, 32): True, (192, 192): False, (192, 64): False}.items():
        wide, v = (on_gpu(monkeypatch, head_dim=d) for d in dims)
        assert (backend.unsupported(wide, wide, v) == []) == is_able, dims
    assert backend.unsupported(torch.zeros(3, 2, 64).bfloat16()) == ["q must be on an NVIDIA GPU, got cpu"]
    monkeypatch.setattr(backend, "library", lambda: (None, "flashinfer does not import here: no such tool"))
    assert backend.unsupported(q) == ["flashinfer does not import here: no such tool"]


def test_backward_is_an_error(backend):
    empty = (torch.zeros(0),)
    with pytest.raises(NotImplementedError, match="no backward"):
        backend.backward(case(TREE), AttentionResults(*empty, *empty), OutGrads(*empty))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_stand_in_has_the_signatures_of_the_package():
    package = importlib.util.find_spec("flashinfer")
    tree = ast.parse((Path(package.submodule_search_locations[0]) / "prefill.py").read_text())
    (real,) = (
        n
        for n in tree.body
        if isinstance(n, ast.ClassDef) and n.name == "BatchPrefillWithRaggedKVCacheWrapper"
    )
    for name in ("__init__", "plan", "run"):
        *_, function = (n for n in real.body if isinstance(n, ast.FunctionDef) and n.name == name)
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        needed = arguments[: len(function.args.args) - len(function.args.defaults)]
        played = [
            p.name for p in inspect.signature(getattr(Wrapper, name)).parameters.values() if p.name != "args"
        ]
        # a later version may have more, as long as nobody has to give them
        assert [a for a in arguments if a in played] == played and set(needed) <= set(played), name
