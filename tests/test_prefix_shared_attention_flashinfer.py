"""``prefix_shared_attention`` over FlashInfer's own Python and stand-ins of its kernels, which need a GPU."""

import sys
import types

import flashinfer_library
import pytest
import torch
from flashinfer_library import kernels_of

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


FP32 = 4e-6  # of FlashInfer's lse


@pytest.fixture(params=["fa2", "fa3"])
def backend(request, monkeypatch):
    """rlkernel.flashinfer's module of the op, over FlashInfer's Python."""
    with flashinfer_library.attention(monkeypatch, "prefix_shared_attention", request.param) as backend:
        yield backend


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
    # sinks are divided out by it
    assert (out - want).abs().max() <= (1e-11 if "sinks" not in options else FP32)
    assert (lse - want_lse).abs().max() <= FP32


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
    assert kernels_of(backend).dims == given and out.is_contiguous() and out.shape == want.shape
    assert (out - want).abs().max() <= (1e-11 if "sinks" not in options else FP32)
    assert (lse - want_lse).abs().max() <= FP32


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
    kernels = kernels_of(backend)
    assert len(kernels.plans) == 1
    for others in (case(TREE, window=3), case(TREE, heads=6), case(LAYOUTS["group"]), call):
        out, _ = backend.forward(others)
        assert (out - reference.forward(others)[0]).abs().max() <= 1e-11
    assert len(kernels.plans) == 5 and {choice for choice, *_ in kernels.plans} == {kernels.backend}


def test_no_rows(backend):
    layout = PrefixLayout((), (), ())
    out, lse = backend.forward(case(layout, torch.bfloat16))
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and not kernels_of(backend).plans


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
