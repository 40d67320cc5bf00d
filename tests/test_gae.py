"""gae: one body of tests for every backend, against fp64."""

import emulation
import pytest
import torch
from accuracy import check_rounded_once, error
from backends import is_slow, of, skip_unless_able
from bitwise import assert_equal
from gae_cases import ON_EVERY_BACKEND, check_against_fp64, packed, run, wide
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel
from rlkernel import native
from rlkernel.calls.gae import GaeCall
from rlkernel.reference.gae import make_inputs

pytestmark = pytest.mark.usefixtures("poison")


def test_a_walk_in_fp32_would_be_seen():
    inputs = make_inputs(3, 300, masked=0.3)
    with rlkernel.use_backend("reference"):
        rough, exact = rlkernel.gae(**inputs), rlkernel.gae(**{k: wide(v) for k, v in inputs.items()})
    with pytest.raises(AssertionError, match="units, not 1/2"):
        check_rounded_once("advantages", rough.advantages, exact.advantages)


# one token; a tail shorter than a thread's tokens; past a tile of 1024; several tiles and a tail
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 1024), (3, 1030), (2, 2500)], ids=str)
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 1.0), (0.9, 0.0), (0.0, 0.5)])
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, shape, gamma, lam):
    if backend == "triton" and is_slow(backend, device):
        shape = (1, min(shape[1], 530))  # past its tile of 512
    inputs = make_inputs(*shape, device=device, masked=0.3)
    last = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    check_against_fp64(backend, **inputs, gamma=gamma, lam=lam)
    check_against_fp64(backend, inputs["rewards"], inputs["values"], gamma=gamma, lam=lam, last_values=last)


@ON_EVERY_BACKEND
def test_matches_fp64_packed(backend, device):
    long = 530 if backend == "triton" else 1030
    lengths = [5, 0, long, 1, 0, 0, 77, 0]
    inputs = packed(make_inputs(8, long, device=device), lengths)
    check_against_fp64(backend, **inputs, last_values=torch.arange(8.0, device=device))


@ON_EVERY_BACKEND
def test_holes_of_zero(backend, device):
    """A hole decays what is behind it, and hides whatever stands there; padded and packed."""
    length = 530 if backend == "triton" else 1100
    inputs = make_inputs(3, length, device=device, masked=0.3)
    inputs["mask"][0, -200:] = False
    options = {"gamma": 0.97, "lam": 0.9, "holes": "zero"}
    ours = check_against_fp64(backend, **inputs, **options)
    filled = {k: torch.where(inputs["mask"], inputs[k], 0) for k in ("rewards", "values")}
    for name, a, b in zip(ours._fields, ours, run(backend, **filled, gamma=0.97, lam=0.9), strict=True):
        assert_equal(name, a, torch.where(inputs["mask"], b, 0))
    dirty = {k: torch.where(inputs["mask"], inputs[k], torch.nan) for k in ("rewards", "values")}
    flat = packed(dirty | {"mask": inputs["mask"]}, [length, 3, 400])
    assert_equal("packed", run(backend, **flat, **options).advantages[:length], ours.advantages[0])
    assert (ours.advantages - run(backend, **inputs, gamma=0.97, lam=0.9).advantages).abs().max() > 0.01


@ON_EVERY_BACKEND
def test_a_lambda_for_each_sequence(backend, device):
    length = 530 if backend == "triton" else 1100
    inputs = make_inputs(4, length, device=device, masked=0.2)
    lams = torch.tensor([0.0, 1.0, 0.95, 0.5], dtype=torch.float64, device=device)
    ours = check_against_fp64(backend, **inputs, lam=lams)
    one = [run(backend, **{k: v[i : i + 1] for k, v in inputs.items()}, lam=lams[i].item()) for i in range(4)]
    assert_equal("a number", torch.cat([x.advantages for x in one]), ours.advantages)
    flat = run(backend, **packed(inputs, [length, 5, 0, length]), lam=lams)
    assert_equal("packed", flat.returns[-length:], ours.returns[3])
    # VAPO's: advantages of one lambda, returns of another
    split = run(backend, **inputs, lam=lams, return_lam=1.0, gamma=0.9)
    assert_equal("advantages", split.advantages, run(backend, **inputs, lam=lams, gamma=0.9).advantages)
    assert_equal("returns", split.returns, run(backend, **inputs, lam=1.0, gamma=0.9).returns)


def by_python(rewards, values, mask, gamma, lam):
    """The recurrence on Python's own doubles, which is quicker than tensors of one token."""
    advantages, carry, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            carry = rewards[t] + gamma * next_value - values[t] + gamma * lam * carry
            advantages[t], next_value = carry, values[t]
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param(
            *p.values, id=p.id, marks=[*p.marks, pytest.mark.slow] if is_slow(*p.values) else p.marks
        )
        for p in of("gae")
    ],
)
def test_a_sequence_of_70000(backend, device):
    length = 20_000 if backend == "triton" and device == "cpu" else 70_000  # the interpreter takes 40 s
    inputs = make_inputs(1, length, device=device)
    exact = by_python(*(x[0].tolist() for x in inputs.values()), 0.9999, 0.95)
    if backend == "reference":  # the truth of the other tests
        inputs = {k: wide(x) for k, x in inputs.items()}
    ours = run(backend, **packed(inputs, [length]), gamma=0.9999).advantages
    assert error(ours, exact) <= torch.finfo(torch.float32).eps * exact.abs().max().item()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
@ON_EVERY_BACKEND
def test_nothing(backend, device, shape):
    x = torch.empty(shape, device=device)
    out = run(backend, x, x, whiten=True)
    assert out.advantages.shape == out.returns.shape == shape
    offsets = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    assert run(backend, x.view(-1), x.view(-1), cu_seqlens=offsets).returns.shape == (0,)


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    """Observations in the middle, padding on both sides: NaN and inf there change no bit."""
    inputs = make_inputs(4, 1100, device=device, masked=0.4)
    inputs["mask"][1, :50], inputs["mask"][1, -600:], inputs["mask"][2] = False, False, False
    clean = run(backend, **inputs)
    dirty = dict(inputs)
    dirty["rewards"] = torch.where(inputs["mask"], inputs["rewards"], torch.nan)
    dirty["values"] = torch.where(inputs["mask"], inputs["values"], torch.inf)
    for name, a, b in zip(clean._fields, run(backend, **dirty), clean, strict=True):
        assert_equal(name, a, b)
        assert (a[~inputs["mask"]] == 0).all(), name
    for dtype in (torch.float32,) if is_slow(backend, device) else (torch.float32, torch.int64, torch.uint8):
        assert_equal("mask", run(backend, **inputs | {"mask": inputs["mask"].to(dtype)})[0], clean[0])


@ON_EVERY_BACKEND
def test_skipped_tokens_might_as_well_not_be_there(backend, device):
    inputs = make_inputs(3, 300, device=device, masked=0.5)
    out = run(backend, **inputs)
    for i in range(3):
        kept = inputs["mask"][i]
        alone = run(backend, inputs["rewards"][i : i + 1, kept], inputs["values"][i : i + 1, kept])
        for a, b in zip(out, alone, strict=True):
            torch.testing.assert_close(a[i, kept], b[0], rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_nan_that_counts_reaches_what_came_before_and_no_more(backend, device):
    inputs = make_inputs(3, 1500, device=device, masked=0)
    clean = run(backend, **inputs)
    inputs["rewards"][1, 700] = torch.nan
    out = run(backend, **inputs)
    for a, b in zip(out, clean, strict=True):
        assert a[1, :701].isnan().all()
        assert_equal("after", a[1, 701:], b[1, 701:])
        assert_equal("other rows", a[[0, 2]], b[[0, 2]])


@ON_EVERY_BACKEND
def test_any_strides_and_dtypes(backend, device):
    inputs = make_inputs(4, 60, device=device)
    expected = run(backend, **inputs)
    views = {k: torch.cat([x, x[:, :3]], 1)[:, :-3] for k, x in inputs.items()}
    for x in views.values():
        assert x.stride(0) == 63
    transposed = {k: x.T.contiguous().T for k, x in inputs.items()}
    for given_inputs in (views, transposed):
        for a, b in zip(run(backend, **given_inputs), expected, strict=True):
            assert_equal("view", a, b)
    row = {k: x[:1].expand(4, 60) for k, x in inputs.items()}
    for a, b in zip(run(backend, **row), expected, strict=True):
        assert_equal("expanded", a, b[:1].expand(4, 60))
    half = {k: x.bfloat16() if k != "mask" else x for k, x in inputs.items()}
    rounded = {k: x.float() if k != "mask" else x for k, x in half.items()}
    for a, b in zip(run(backend, **half), run(backend, **rounded), strict=True):
        assert_equal("bf16", a, b)


@ON_EVERY_BACKEND
def test_bits_of_a_sequence_depend_on_it_alone(backend, device):
    """Alone, in another order, at another address, packed, and with more padding behind it."""
    b = 3 if is_slow(backend, device) else 5
    inputs = make_inputs(b, 1100, device=device, masked=0.2)
    options = {"last_values": torch.arange(float(b), device=device)}
    whole = run(backend, **inputs, **options)
    order = torch.tensor([3, 1, 4, 0, 2], device=device) % b
    variants = {
        "again": (slice(None), inputs),
        "permuted": (order, {k: x[order] for k, x in inputs.items()}),
        "alone": (slice(2, 3), {k: x[2:3].clone() for k, x in inputs.items()}),
    }
    for name, (index, given_inputs) in variants.items():
        out = run(backend, **given_inputs, last_values=options["last_values"][index])
        for one, two in zip(out, whole, strict=True):
            assert_equal(name, one, two[index])
    flat = run(backend, **packed(inputs, [1100] * b), **options)
    more = {k: torch.cat([x, x.new_zeros(b, 600)], 1) for k, x in inputs.items()}
    longer = run(backend, **more, **options)
    for one, two, three in zip(flat, longer, whole, strict=True):
        assert_equal("packed", one.view(b, 1100), three)
        assert_equal("padded", two[:, :1100], three)


def test_bits_do_not_depend_on_threads_or_schedule():
    inputs = make_inputs(8, 3000)
    threads = torch.get_num_threads()
    with rlkernel.use_backend("native"):
        skip_unless_able("native", "gae", inputs["rewards"], inputs["values"])
        whole = rlkernel.gae(**inputs)
        torch.set_num_threads(3)
        try:
            assert_equal("three threads", rlkernel.gae(**inputs).advantages, whole.advantages)
        finally:
            torch.set_num_threads(threads)
    few = {k: x[:2] for k, x in inputs.items()}
    results = []
    for warp in (32, 64):
        module = emulation.module(warp)
        for seed, blocks in ((0, 1 << 20), (1, 2), (2, 1)):
            module.configure(seed, blocks)
            results.append(run(f"emulated-warp{warp}", **few))
        module.configure()
    for out in results[1:]:
        assert_equal("schedule", out.advantages, results[0].advantages)
        assert_equal("schedule", out.returns, results[0].returns)


@pytest.mark.slow
@pytest.mark.parametrize(
    "original, replacement",
    [
        ("if (!first.counts) return second;", ""),  # tokens under the mask count
        ("first.decay * second.gain + first.slope * second.value + first.gain", "second.gain + first.gain"),
        ("__syncthreads();  // the groups are written", ""),
        ("if (lane == kLanes - 1) after = nothing();", ""),
    ],
)
def test_a_planted_fault_is_found(original, replacement):
    inputs = make_inputs(2, 1500, masked=0.4)
    exact = rlkernel.gae(**{k: wide(x) for k, x in inputs.items()})
    broken = emulation.load(emulation.build_module(32, {"gae/kernel.cuh": (original, replacement)}))
    wrong = 0
    for seed in range(4):
        broken.configure(seed)
        with native.emulated(broken), rlkernel.use_backend("native"):
            out = rlkernel.gae(**inputs)
        wrong += not torch.allclose(out.advantages.double(), exact.advantages, atol=1e-4)
    assert wrong


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
@pytest.mark.parametrize("backend", ["native", "reference", "emulated-warp32"])
def test_any_lengths_and_masks(backend, lengths, gamma, lam, seed, masked):
    """Packed is what each sequence gives by itself, and within the budget of fp64."""
    inputs = packed(make_inputs(len(lengths), 40, seed=seed, masked=masked), lengths)
    offsets = inputs["cu_seqlens"].tolist()
    out = check_against_fp64(backend, **inputs, gamma=gamma, lam=lam)
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        alone = {k: x[start:end][None] for k, x in inputs.items() if k != "cu_seqlens"}
        for a, b in zip(run(backend, **alone, gamma=gamma, lam=lam), out, strict=True):
            assert_equal("alone", a[0], b[start:end])


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    inputs = make_inputs(3, 20)

    def step(rewards, values, mask):
        return rlkernel.gae(rewards, values, mask, whiten=True).advantages * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal("compiled", compiled(**inputs), step(**inputs))


@pytest.mark.parametrize("lam", [0.9, torch.linspace(0, 1, 3, dtype=torch.float64)], ids=["one", "each"])
def test_opcheck(lam):
    from rlkernel.ops.gae import op

    inputs = make_inputs(3, 20)
    call = GaeCall(*inputs.values(), 1.0, lam, None, torch.ones(3), "skip")
    torch.library.opcheck(op.node, op.flat(call))
    flat = [x.reshape(-1) for x in inputs.values()]
    call = GaeCall(*flat, 1.0, lam, torch.tensor([0, 20, 25, 60]), None, "zero")
    torch.library.opcheck(op.node, op.flat(call))
