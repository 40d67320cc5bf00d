"""``paged_prefix_attention`` on every backend against torch's attention over the gathered keys."""

import backends
import pytest
import torch
from accuracy import check
from backends import running, skip_unless_able
from paged_cases import LAYOUTS, OP, OPTIONS, STEPS, TABLES, Request, dense, group, make, options_of

import rlkernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_backend = pytest.mark.parametrize(("backend", "device"), backends.of(OP))


def run(backend, inputs, **options):
    able = (inputs[name] for name in ("query", "key_cache", "value_cache"))
    skip_unless_able(backend, OP, *able)
    with running(backend):
        found = rlkernel.paged_prefix_attention(**inputs, **options, return_lse=True)
    assert rlkernel.last_backend(OP) == ("native" if backend in backends.EMULATED else backend)
    return found


def agrees(backend, inputs, largest_score=0.0, **options):
    out, lse = run(backend, inputs, **options)
    dtype = inputs["query"].dtype
    torchs, truth = dense(inputs, dtype, **options), dense(inputs, torch.float64, **options)
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    # a weight is off by what the score before it is off by
    check("out", out, torchs[0], truth[0], largest_score)
    check("lse", lse, torchs[1], truth[1])
    return out


@every_backend
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("option", OPTIONS)
def test_rows_see_what_they_see_alone(backend, device, step, option):
    options = options_of(option, device=device)
    inputs = make(STEPS[step], window=options.get("window"), device=device)
    # what no row sees is NaN; scores are of the size of 2, whose last digit the library's order decides
    assert agrees(backend, inputs, largest_score=2.0, **options).isfinite().all()


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(backend, device, dtype):
    out = agrees(backend, make(STEPS["both at once"], dtype=dtype, head_dim=64, device=device))
    assert out.dtype == dtype


def test_fp64_is_fp64_throughout():
    inputs = make(STEPS["both at once"], dtype=torch.float64)
    out, lse = run("reference", inputs)
    truth = dense(inputs, torch.float64)
    torch.testing.assert_close((out, lse), truth, rtol=1e-13, atol=1e-13)


@every_backend
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "v_dim"),
    [(4, 4, 16, None), (7, 1, 16, None), (6, 2, 40, 24), (2, 1, 1, 3), (14, 2, 64, None), (3, 1, 128, 67)],
)
def test_heads_of_any_number_and_dim(backend, device, heads, kv_heads, head_dim, v_dim):
    inputs = make(STEPS["both at once"], heads, kv_heads, head_dim, v_dim, device=device)
    assert agrees(backend, inputs).shape == (len(inputs["query"]), heads, v_dim or head_dim)


@every_backend
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 100, 128])
def test_blocks_of_any_size(backend, device, block_size):
    out = agrees(backend, make(STEPS["decode of several"], block_size=block_size, device=device))
    assert out.isfinite().all()  # the places of a block behind the last key hold NaN


@every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_of_any_strides(backend, device, layout, dtype):
    inputs = LAYOUTS[layout](make(STEPS["both at once"], dtype=dtype, device=device))
    assert not inputs["key_cache"].is_contiguous()
    assert agrees(backend, inputs).is_contiguous()


@every_backend
def test_sinks_of_any_stride(backend, device):
    inputs = make(STEPS["both at once"], device=device)
    sinks = torch.linspace(-1, 2, 8, device=device)[::2]
    out = agrees(backend, inputs, sinks=sinks)
    assert torch.equal(out, agrees(backend, inputs, sinks=sinks.contiguous()))


@every_backend
def test_a_step_without_rows(backend, device):
    inputs = make([Request((), 5, 0)], device=device)
    out, lse = run(backend, inputs)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
    for name in TABLES:  # and without requests
        inputs[name] = inputs[name][: int(name == "cu_seqlens_q")]
    out, _ = run(backend, inputs)
    assert out.shape == (0, 4, 16)


@every_backend
def test_large_scores_do_not_overflow(backend, device):
    inputs = make(STEPS["decode of several"], device=device)
    for name in ("query", "key_cache"):
        inputs[name] = inputs[name] * 30
    largest = dense(inputs, torch.float64)[1].abs().max().item()
    assert largest > 88  # whose exp is more than fp32 holds
    agrees(backend, inputs, largest_score=largest)


@every_backend
def test_a_plan_is_used_by_many_layers(backend, device):
    plan = None
    for seed in range(2):
        inputs = make(STEPS["both at once"], seed=seed, device=device)
        if plan is None:
            tables = {name: inputs[name] for name in TABLES}
            plan = rlkernel.paged_prefix_plan(**tables, block_size=16)
        agrees(backend, {**inputs, **tables, "plan": plan} if seed == 0 else inputs)


@every_backend
def test_under_torch_compile(backend, device):
    inputs = make(STEPS["both at once"], device=device)
    skip_unless_able(backend, OP, *(inputs[name] for name in ("query", "key_cache", "value_cache")))
    plan = rlkernel.paged_prefix_plan(*(inputs[name] for name in TABLES), 16)
    compiled = torch.compile(rlkernel.paged_prefix_attention, fullgraph=True, backend="aot_eager")
    with running(backend):
        want = rlkernel.paged_prefix_attention(**inputs, plan=plan)
        got = compiled(**inputs, plan=plan)
        with pytest.raises(Exception, match="plan must be given"):
            compiled(**inputs)
    assert torch.equal(got, want)


GOOD = make(group("a", 64, [3, 4]))
BAD = {
    "query must be [T, Hq, D]": {"query": GOOD["query"][0]},
    "key_cache must have query's dtype float32, got float16": {"key_cache": GOOD["key_cache"].half()},
    "key_cache must have query's head dim 16, got 8": {"key_cache": GOOD["key_cache"][..., :8]},
    "value_cache must be [13, 16, 2, Dv], as key_cache": {"value_cache": GOOD["value_cache"][:, :8]},
    "query must have a multiple of the 2 heads of key_cache, got 3": {"query": GOOD["query"][:, :3]},
    "query must not require a gradient": {"query": GOOD["query"].clone().requires_grad_()},
    "sinks must have shape (4,), one a head, got (3,)": {"sinks": torch.zeros(3)},
    "block_table must be int32 or int64, got float32": {"block_table": GOOD["block_table"].float()},
    "seq_lens must be [B] with B = 2, got (1,)": {"seq_lens": GOOD["seq_lens"][:1]},
    "cu_seqlens_q must be [B + 1] with B = 2, got (2,)": {"cu_seqlens_q": GOOD["cu_seqlens_q"][:2]},
    "cu_seqlens_q must begin with 0, got 1": {"cu_seqlens_q": GOOD["cu_seqlens_q"] + 1},
    "cu_seqlens_q[2] must be >= cu_seqlens_q[1] = 3, got 2": {"cu_seqlens_q": torch.tensor([0, 3, 2])},
    "plan must be of 2 rows, the query's, got 1": {"cu_seqlens_q": torch.tensor([0, 1, 1])},
    "seq_lens[1] must be at least the request's 1 rows, got 0": {"seq_lens": torch.tensor([67, 0])},
    "seq_lens[1] must be at most 96, the keys of its blocks, got 97": {"seq_lens": torch.tensor([67, 97])},
    "scale must be > 0 and finite, got 0": {"scale": 0.0},
    "softcap must be > 0 and finite, got -1": {"softcap": -1.0},
    "window must be >= 1, or None, got 0": {"window": 0},
    "plan must be a PagedPlan, got tuple": {"plan": (1, 2)},
    "block_table must be >= 0 where a key is read, got -1": {
        "block_table": GOOD["block_table"].clamp(max=-1)
    },
    "block_table must be below the 13 blocks of key_cache where a key is read, got 13": {
        "block_table": GOOD["block_table"].clamp(min=13, max=13)
    },
    "block_table must be below the 13 blocks of key_cache where a key is read, got 2147483647": {
        "block_table": GOOD["block_table"].long() + 2**32  # the blocks themselves in 32 bits
    },
    "seq_lens[0] must be at most 96, the keys of its blocks, got 2147483647": {
        "seq_lens": GOOD["seq_lens"].long() + 2**32
    },
    "seq_lens[0] must be at least the request's 2147483647 rows, got 67": {
        "cu_seqlens_q": GOOD["cu_seqlens_q"].long() + torch.tensor([0, 2**32, 0])
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_refused(message):
    with pytest.raises(ValueError) as error:
        rlkernel.paged_prefix_attention(**{**GOOD, **BAD[message]})
    assert message in str(error.value)


def test_a_plan_of_another_step_is_refused():
    tables = [GOOD[name] for name in TABLES]
    for other in (
        rlkernel.paged_prefix_plan(*tables, 16, window=9),
        rlkernel.paged_prefix_plan(*tables, 32),
        rlkernel.paged_prefix_plan(tables[0][:1], tables[1][:1], torch.tensor([0, 2]), 16),
    ):
        with pytest.raises(ValueError, match="^plan must be of"):
            rlkernel.paged_prefix_attention(**GOOD, plan=other)
