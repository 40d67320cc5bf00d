"""``paged_prefix_attention`` over FlashInfer's own Python and stand-ins of its kernels, which need a GPU."""

import flashinfer_library
import pytest
import torch
from flashinfer_library import kernels_of
from paged_cases import STEPS, TABLES, dense, make

import rlkernel
from rlkernel.calls.paged_prefix_attention import PagedCall, PagedRule

FP32 = 4e-6  # FlashInfer's lse, by which levels are merged


@pytest.fixture(params=["fa2", "fa3"])
def backend(request, monkeypatch):
    """rlkernel.flashinfer's module of the op, over FlashInfer's Python."""
    with flashinfer_library.attention(monkeypatch, "paged_prefix_attention", request.param) as backend:
        yield backend


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
    assert (out - want).abs().max() <= FP32
    assert (lse - want_lse).abs().max() <= FP32


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
    kernels = kernels_of(backend)
    assert len(kernels.plans) == levels > 1
    backend.forward(call._replace(rule=call.rule._replace(softcap=1.0)))
    assert len(kernels.plans) == 2 * levels
    another = make(STEPS["one row alone"], dtype=torch.float64)
    out, _ = backend.forward(call_of(another))
    assert (out - dense(another, torch.float64, scale=0.3)[0]).abs().max() <= FP32


def test_half_precision(backend):
    inputs = make(STEPS["both at once"], dtype=torch.bfloat16, head_dim=64)
    out, lse = backend.forward(call_of(inputs))
    want, _ = dense(inputs, torch.float64, scale=0.3)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out.double() - want).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * want.abs().max()


def test_caches_of_other_strides(backend):
    """FlashInfer compiles kernels of their own for a key cache and a value cache that differ in strides."""
    inputs = make(STEPS["both at once"], dtype=torch.float64)
    by_head = inputs["value_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    assert by_head.stride() != inputs["key_cache"].stride()
    check(backend, inputs | {"value_cache": by_head})


def test_no_rows(backend):
    inputs = make(STEPS["one row alone"])
    inputs["query"], inputs["cu_seqlens_q"] = inputs["query"][:0], inputs["cu_seqlens_q"] * 0
    out, lse = backend.forward(call_of(inputs))
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0) and not kernels_of(backend).plans


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
