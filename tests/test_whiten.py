"""whiten: against fp64 written out by hand and verl's own function."""

import emulation
import pytest
import torch
from accuracy import check_rounded_once
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel
from rlkernel import native
from rlkernel.benchmarks import _peers
from rlkernel.calls.whiten import WhitenCall
from rlkernel.reference.whiten import make_inputs

BACKENDS = of("whiten")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
pytestmark = pytest.mark.usefixtures("poison")


def run(backend, x, mask=None, **options):
    with running(backend):
        return rlkernel.whiten(x, mask, **options)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("shape", [(2,), (3, 127), (2, 5000)], ids=str)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, shape, offset):
    inputs = make_inputs(*shape, device=device, masked=0)
    x = inputs["x"] + offset
    for eps, place, unbiased in ((1e-8, "variance", True), (1e-4, "std", True), (0.0, "std", False)):
        y = x.double()
        spread = y.var(correction=int(unbiased))
        scale = (spread + eps).sqrt() if place == "variance" else spread.sqrt() + eps
        options = {"eps": eps, "eps_in": place, "unbiased": unbiased}
        got = run(backend, x, **options)
        check_rounded_once("whitened", got, (y - y.mean()) / scale)
        kept = run(backend, x, shift_mean=False, **options)
        check_rounded_once("with its mean", kept, (y - y.mean()) / scale + y.mean())


@pytest.mark.parametrize(
    ("backend", "device"), [p for p in of("whiten") if not p.values[0].startswith("emulated")]
)
def test_more_chunks_than_are_merged_at_a_time(backend, device):
    """Triton merges 256 moments of 2048 elements; what comes behind them is far from the rest."""
    x = torch.randn(2**19 + 3 * 2048 + 5, generator=torch.Generator().manual_seed(0))
    x[2**19 :] += torch.tensor([50.0, -200.0]).repeat_interleave(2 * 2048)[: len(x) - 2**19]
    mask = torch.ones(len(x), dtype=torch.bool)
    mask[::7] = mask[2**19 + 2048 : 2**19 + 2 * 2048] = False  # a chunk that counts for nothing
    y = x[mask].double()
    want = (y - y.mean()) / (y.var() + 1e-8).sqrt()
    got = run(backend, x.to(device), mask.to(device)).cpu()
    torch.testing.assert_close(got[mask].double(), want, rtol=2e-7, atol=1e-7)
    assert (got[~mask] == 0).all()


@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device):
    try:
        verl = _peers.verl_core_algos().verl_F
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    inputs = make_inputs(6, 50, device=device)
    for shift in (True, False):
        expected = verl.masked_whiten(inputs["x"], inputs["mask"].float(), shift)
        got = run(backend, **inputs, shift_mean=shift)
        torch.testing.assert_close(got[inputs["mask"]], expected[inputs["mask"]], rtol=1e-6, atol=1e-6)
        assert (got[~inputs["mask"]] == 0).all()


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    inputs = make_inputs(4, 30, device=device)
    clean = run(backend, **inputs)
    assert_equal("again", run(backend, **inputs), clean)
    dirty = torch.where(inputs["mask"], inputs["x"], torch.nan)
    assert_equal("dirty", run(backend, dirty, inputs["mask"]), clean)
    chosen = run(backend, inputs["x"][inputs["mask"]])
    torch.testing.assert_close(clean[inputs["mask"]], chosen, rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_weights_stand_for_repetitions(backend, device):
    x, weights = torch.randn(7, device=device), torch.tensor([1, 4, 2, 0, 3, 1, 9], device=device)
    repeated = run(backend, x.repeat_interleave(weights))
    got = run(backend, x, weights=weights.float())
    torch.testing.assert_close(got.repeat_interleave(weights), repeated, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@ON_EVERY_BACKEND
def test_equal_elements_give_exactly_zero(backend, device, dtype):
    """Three times 0.1, and 0.1 by most weights, are no multiples of it in fp64."""
    for n in (1, 3, 10, 49):
        x = torch.full((n,), 0.1, dtype=dtype, device=device)
        skip_unless_able(backend, "whiten", x)
        for weights in (None, torch.rand(n, device=device) + 0.1):
            for eps_in in ("variance", "std"):
                assert not run(backend, x, weights=weights, eps=0.0, eps_in=eps_in).any()


@ON_EVERY_BACKEND
def test_one_element_or_none_gives_zero(backend, device):
    """verl raises there, which stops a run in which one rank has nothing."""
    x = torch.randn(3, 4, device=device)
    mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
    assert (run(backend, x, mask) == 0).all()
    mask[1, 2] = True
    assert (run(backend, x, mask) == 0).all() and (run(backend, x[:0]) == 0).all()
    assert (run(backend, torch.full((50,), 0.1, device=device), eps=0.0) == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, dtype=torch.int64)}, "x must be float16, .*, got int64"),
        ({"x": torch.zeros(3, requires_grad=True)}, "x must not require a gradient"),
        ({"mask": torch.ones(4)}, r"mask must have x's shape \(3,\), got \(4,\)"),
        ({"weights": torch.ones(4)}, r"weights must have x's shape \(3,\), got \(4,\)"),
        ({"eps": -1e-8}, "eps must be >= 0 and finite, got -1e-08"),
        ({"eps_in": "var"}, "eps_in must be one of 'variance', 'std', got 'var'"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.whiten(**{"x": torch.zeros(3), **change})


def test_debug_mode_names_the_element():
    x = torch.tensor([1.0, torch.inf])
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"x\[1\] must be finite .*, got inf"):
        rlkernel.whiten(x)


@ON_EVERY_BACKEND
def test_nan_that_counts_reaches_everything(backend, device):
    x = torch.randn(3, 900, device=device)
    x[1, 5] = torch.nan
    assert run(backend, x).isnan().all()
    x[1, 5] = torch.inf
    assert run(backend, x).isnan().all()


@ON_EVERY_BACKEND
def test_any_strides_and_dtypes(backend, device):
    inputs = make_inputs(6, 70, device=device)
    expected = run(backend, **inputs)
    turned = run(backend, **{k: x.T for k, x in inputs.items()})
    assert_equal("transposed", turned.T.contiguous(), expected)
    views = {k: torch.cat([x, x], 1)[:, :70] for k, x in inputs.items()}
    assert_equal("view", run(backend, **views), expected)
    assert_equal("flat", run(backend, **{k: x.flatten() for k, x in inputs.items()}), expected.flatten())
    half = inputs["x"].bfloat16()
    assert_equal("bf16", run(backend, half, inputs["mask"]), run(backend, half.float(), inputs["mask"]))
    assert run(backend, inputs["x"].sum()) == 0
    x = inputs["x"].double()
    skip_unless_able(backend, "whiten", x)
    assert run(backend, x).dtype == torch.float64


def test_bits_do_not_depend_on_threads_or_schedule():
    inputs = make_inputs(9, 8000)
    threads = torch.get_num_threads()
    with rlkernel.use_backend("native"):
        expected = rlkernel.whiten(**inputs)
        torch.set_num_threads(3)
        try:
            for _ in range(20):
                assert_equal("three threads", rlkernel.whiten(**inputs), expected)
        finally:
            torch.set_num_threads(threads)
    few = {k: x[0] for k, x in inputs.items()}
    results = []
    for warp in (32, 64):
        module = emulation.module(warp)
        for seed, blocks in ((0, 1 << 20), (1, 2), (2, 1)):
            module.configure(seed, blocks)
            results.append(run(f"emulated-warp{warp}", **few))
        module.configure()
    for out in results[1:]:
        assert_equal("schedule", out, results[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "original, replacement",
    [
        ("__syncthreads();  // the groups' moments are written", ""),
        ("__syncthreads();  // the groups' moments are read: the next chunk may overwrite them", ""),
        ("part = lane & distance ? merge(other, part) : merge(part, other);", "part = other;"),
        ("if (own.count == 0) first = x[k];", "first = x[k];"),
    ],
)
def test_a_planted_fault_is_found(original, replacement):
    inputs = make_inputs(7, 2100)
    right = run("emulated-warp32", **inputs)
    broken = emulation.load(emulation.build_module(32, {"whiten/moments.cuh": (original, replacement)}))
    wrong = 0
    for seed in range(6):
        broken.configure(seed, 2)
        with native.emulated(broken), rlkernel.use_backend("native"):
            wrong += not torch.equal(rlkernel.whiten(**inputs), right)
    assert wrong


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    offset=st.sampled_from([0.0, 1000.0]),
    unbiased=st.booleans(),
    eps_in=st.sampled_from(["variance", "std"]),
)
@pytest.mark.parametrize("backend", ["native", "reference", "emulated-warp32"])
def test_any_shape_and_mask(backend, shape, seed, masked, offset, unbiased, eps_in):
    inputs = make_inputs(*shape, seed=seed, masked=masked)
    mask = inputs["mask"]
    x = torch.where(mask, inputs["x"] + offset, torch.nan)
    out = run(backend, x, mask, unbiased=unbiased, eps=1e-4, eps_in=eps_in)
    kept = x[mask].double()
    assert (out[~mask] == 0).all()
    if len(kept) < 2:
        assert (out == 0).all()
    else:
        spread = kept.var(correction=int(unbiased))
        scale = (spread + 1e-4).sqrt() if eps_in == "variance" else spread.sqrt() + 1e-4
        torch.testing.assert_close(out[mask].double(), (kept - kept.mean()) / scale, rtol=3e-7, atol=2e-7)


def test_a_wrong_variance_would_be_seen():
    """The mutant: E[x^2] - E[x]^2 in fp32."""
    x = torch.tensor([1000.0, 1000.1, 1000.2, 1000.3])
    wrong = (x - x.mean()) / (x.square().mean() - x.mean().square()).clamp(min=1e-8).sqrt()
    right = rlkernel.whiten(x, unbiased=False)
    torch.testing.assert_close(
        right.double(), rlkernel.whiten(x.double(), unbiased=False), rtol=1e-7, atol=1e-7
    )
    assert (wrong - right).abs().max() > 1


def test_compiles_without_a_graph_break():
    inputs = make_inputs(3, 20)
    compiled = torch.compile(
        lambda x, mask: rlkernel.whiten(x, mask) * 2, fullgraph=True, backend="aot_eager"
    )
    assert_equal("compiled", compiled(**inputs), rlkernel.whiten(**inputs) * 2)


@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted):
    from rlkernel.ops.whiten import op

    x, mask = make_inputs(3, 20).values()
    call = WhitenCall(x, mask, x.abs() if weighted else None, True, True, 1e-8, "std")
    torch.library.opcheck(op.node, op.flat(call))
