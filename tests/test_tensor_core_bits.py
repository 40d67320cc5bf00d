"""Triton's kernels on the bit model of tensor cores: what no batch and no tile may change, and mutants.

The interpreter ignores numbers of warps and stages; on a GPU they decide who computes a tile's chains and
when their operands arrive, not what is added to what.
"""

import contextlib

import pytest
import torch
from backends import INTERPRETED, NO_INTERPRETER
from bitwise import assert_equal
from matmul_cases import ROWS, probe, surroundings

pytest.importorskip("triton", reason="Triton is not installed")
if not INTERPRETED:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

import paged_cases  # noqa: E402
import tensor_core  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import triton_interpreter  # noqa: E402

import rlkernel  # noqa: E402
from rlkernel.consistency import vendor  # noqa: E402
from rlkernel.triton_ops import matmul as triton_matmul  # noqa: E402
from rlkernel.triton_ops import paged_prefix_attention as triton_paged  # noqa: E402

ON_EVERY_GPU = pytest.mark.parametrize("target", ["sm_80", "sm_90"])
pytestmark = pytest.mark.usefixtures("poison")


@contextlib.contextmanager
def on(target):
    with tensor_core.interpreted_as(target), rlkernel.use_backend("triton"):
        yield


def product(a, weight, **options):
    return rlkernel.matmul(a, weight.t(), out_dtype=torch.float32, **options)


@pytest.mark.parametrize(("target", "dtype"), [("sm_80", torch.bfloat16), ("sm_90", torch.float16)])
def test_a_row_of_a_product_has_its_bits_in_any_batch(target, dtype):
    a, weight = probe(257, 130, 1, dtype), probe(18, 130, 2, dtype)
    with on(target):
        for name, got, want in surroundings(lambda x: product(x, weight), a, ROWS):
            assert_equal(name, got, want)


def test_a_row_of_a_product_of_fp32_does():
    a, weight = probe(129, 35, 1), probe(18, 35, 2)
    with on("sm_90"):
        for name, got, want in surroundings(lambda x: product(x, weight), a, (1, 16, 33, 64)):
            assert_equal(name, got, want)


@ON_EVERY_GPU
def test_a_gradient_of_a_row_and_a_sum_in_parts_do(target):
    weight, rows = probe(136, 32, 1, torch.bfloat16), probe(65, 136, 2, torch.bfloat16)

    def gradient(g):
        x = g.new_zeros(len(g), 32, requires_grad=True)
        return torch.autograd.grad(rlkernel.matmul(x, weight.t()), x, g)[0]

    with on(target):
        for name, got, want in surroundings(gradient, rows, (1, 16, 33)):
            assert_equal(name, got, want)
        for name, got, want in surroundings(lambda x: product(x, weight.t(), segments=4), rows[:40], (1, 17)):
            assert_equal(f"{name} in parts", got, want)


@ON_EVERY_GPU
def test_tiles_and_steps_change_no_bit(target, monkeypatch):
    """Products as forward, and as the gradients of rows and weight: a step continues the last one's chain."""
    a, weight, g = (probe(*shape, shape[0], torch.bfloat16) for shape in ((70, 88), (40, 88), (70, 40)))
    operands = {"out": (a, weight.t()), "a": (g, weight), "weight": (g.t(), a)}

    def check(name, wanted):
        for which, (left, right) in operands.items():
            assert_equal(f"{which} in {name}", product(left, right.t()), wanted[which])

    with on(target):
        wanted = {which: product(left, right.t()) for which, (left, right) in operands.items()}
        for tile in ((16, 64), (64, 32), (128, 64)):
            with monkeypatch.context() as patch:
                forced = triton_matmul.Tile(*tile, 4, 2)
                patch.setattr(triton_matmul, "SLOW", forced)
                patch.setattr(triton_matmul, "TILES", {16: ((None, forced),)})
                check(tile, wanted)
        for step in (16, 32):
            monkeypatch.setattr(triton_matmul, "STEP", {16: step})
            check(f"steps of {step}", wanted)


@pytest.fixture
def launched(monkeypatch):
    """The kernels that products launch, as on a Hopper GPU."""
    names = []
    for name in ("_by_pointers", "_by_descriptors"):
        plain = getattr(triton_matmul, name)

        def launch(*args, plain=plain, name=name):
            names.append(name)
            plain(*args)

        monkeypatch.setattr(triton_matmul, name, launch)
    monkeypatch.setattr(triton_matmul, "generation", lambda: 9)
    return names


def test_a_row_has_its_bits_in_any_batch_by_descriptors(launched):
    """Those of few rows, which pointers load, too."""
    a, weight = probe(257, 136, 1, torch.bfloat16), probe(72, 136, 2, torch.bfloat16)
    with on("sm_90"):
        for name, got, want in surroundings(lambda x: product(x, weight), a, (1, 64, 65, 129)):
            assert_equal(name, got, want)
    assert {*launched} == {"_by_pointers", "_by_descriptors"}


def layout(x, across):
    return x.t().contiguous().t() if across else x.contiguous()


@pytest.mark.parametrize(
    ("across", "dtype"),
    [
        ((False, False), torch.bfloat16),
        ((True, False), torch.float16),
        ((False, True), torch.bfloat16),
        ((True, True), torch.bfloat16),
    ],
    ids=str,
)
def test_descriptors_have_the_bits_of_pointers(across, dtype, launched, monkeypatch):
    """In every layout, to either dtype, where tiles end beyond rows, columns and K."""
    a, b = (layout(probe(*s, 3, dtype), x) for s, x in zip(((136, 72), (72, 264)), across, strict=True))
    bias = probe(1, 264, 4)[0]

    def run():
        return [rlkernel.matmul(a, b, bias, out_dtype=wide) for wide in (dtype, torch.float32)]

    with on("sm_90"):
        described = run()
        assert launched == ["_by_descriptors"] * 2
        monkeypatch.setattr(triton_matmul, "generation", lambda: 8)
        for got, want in zip(described, run(), strict=True):
            assert_equal(str(want.dtype), got, want)
        assert launched[2:] == ["_by_pointers"] * 2


A, B = torch.zeros(72, 64).bfloat16(), torch.zeros(64, 72).bfloat16()
SHIFTED = torch.zeros(72 * 64 + 1).bfloat16()[1:].view(72, 64)
NOT_DESCRIBED = {
    "few rows": (A[:64], B),
    "few columns": (A, B[:, :64]),
    "a short K": (A[:, :56], B[:56]),
    "an address in between": (SHIFTED, B),
    "rows in between": (torch.zeros(72, 65).bfloat16()[:, :64], B),
    "rows that overlap": (A, B[:1].expand(64, 72)),
    "no dense dimension": (A, torch.zeros(64, 72, 2).bfloat16()[..., 0]),
    "a batch": (A.expand(2, 72, 64), B.expand(2, 64, 72)),
    "fp32": (A.float(), B.float()),
}


@pytest.mark.parametrize("case", NOT_DESCRIBED)
def test_what_a_descriptor_cannot_copy_is_loaded_by_pointers(case, launched):
    with on("sm_90"):
        rlkernel.matmul(A, B)
        assert launched == ["_by_descriptors"]
        rlkernel.matmul(*NOT_DESCRIBED[case])
    assert launched[1:] == ["_by_pointers"]


@pytest.mark.parametrize("across", [(True, False), (False, True), (True, True)], ids=str)
def test_a_step_along_k_that_is_too_long_to_count(across, monkeypatch):
    """Of 2^31 elements in truth: more than a test has memory for."""
    a, b = probe(24, 200, 5, torch.bfloat16), probe(200, 40, 6, torch.bfloat16)
    strided = [layout(x, turned) for x, turned in zip((a, b), (across[0], not across[1]), strict=True)]
    launched, plain = [], triton_matmul.matmul_kernel

    class Launches(dict):
        def __missing__(self, grid):
            return lambda *args, **options: (
                launched.append((args[3], args[6])) or plain[grid](*args, **options)
            )

    monkeypatch.setattr(triton_matmul, "matmul_kernel", Launches())
    with on("sm_80"):
        want = rlkernel.matmul(*strided)
        assert max(launched[0]) > 1, "one of them has steps"
        monkeypatch.setattr(triton_matmul, "REACH", 64 * 24)
        assert_equal("product", rlkernel.matmul(*strided), want)
    assert launched[1] == (1, 1)
    far = torch.empty_strided((1, 4, 65), (0, 1, 2**25), dtype=torch.bfloat16, device="meta")
    monkeypatch.undo()
    assert triton_matmul._within_reach(far, 2, 64).stride(2) == 1
    assert triton_matmul._within_reach(far[..., :64], 2, 64).stride(2) == 2**25, (
        "one step, which is the first"
    )


@pytest.mark.parametrize("generation", [0, 7, 8, 11, 12])
def test_other_gpus_load_by_pointers(generation, launched, monkeypatch):
    monkeypatch.setattr(triton_matmul, "generation", lambda: generation)
    with on("sm_80"):
        rlkernel.matmul(A, B)
    assert launched == ["_by_pointers"]


@ON_EVERY_GPU
def test_log_probabilities_under_the_mode_have_the_bits_of_the_models_product(target):
    """The tile of logits that ``linear_logprob`` multiplies, and the logits of a model's head."""
    hidden, weight = (probe(rows, 72, rows, torch.bfloat16) * 2**-6 for rows in (40, 50))
    ids = torch.arange(40) % 50
    with on(target), rlkernel.batch_invariant():
        whole = rlkernel.linear_logprob(hidden, weight, ids, logits_dtype=torch.bfloat16).logprobs
        logits = torch.nn.functional.linear(hidden, weight)
        assert_equal("logprob over linear", whole, rlkernel.logprob(logits, ids).logprobs)
        wide = rlkernel.linear_logprob(hidden, weight, ids).logprobs
        for rows in (1, 16, 33):
            part = rlkernel.linear_logprob(hidden[-rows:], weight, ids[-rows:]).logprobs
            assert_equal(f"{rows} rows", part, wide[-rows:])


@ON_EVERY_GPU
def test_attention_of_a_request_has_its_bits_in_any_step(target, monkeypatch):
    """And in blocks of another height."""
    shared = paged_cases.group("a", 128, [9, 20, 1], [5, 1, 1])
    inputs = paged_cases.make([*shared, paged_cases.Request((), 3, 3)], dtype=torch.bfloat16)
    blocks = triton_paged._blocks(inputs["query"], inputs["value_cache"])
    with on(target):
        assert not paged_cases.differing("triton", inputs)
        want = paged_cases.run("triton", inputs)
        monkeypatch.setattr(triton_paged, "_blocks", lambda *_: blocks._replace(q=16))
        for name, x, y in zip(("out", "lse"), paged_cases.run("triton", inputs), want, strict=True):
            assert_equal(name, x, y)


@ON_EVERY_GPU
def test_attention_of_a_sequence_has_its_bits_beside_others(target):
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(96, heads, 16, generator=g).bfloat16() for heads in (4, 2, 2))
    v[::3] *= 256

    def run(lengths, first):
        rows = slice(first, first + sum(lengths))
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return rlkernel.attention(q[rows], k[rows], v[rows], cu_seqlens_q=starts)

    with on(target):
        whole = run([7, 70, 19], 0)
        assert_equal("the first", run([7], 0), whole[:7])
        assert_equal("the last two", run([70, 19], 7), whole[7:])


@triton.jit
def mutant_kernel(
    a, b, out, M, N, K, MUTANT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """``a`` [M, K] with ``b`` [K, N], dense; K is a multiple of 64 of which each part is a multiple of BK."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    k = tl.arange(0, BK)
    if MUTANT == "turned":  # in each sixteen, as a layout of registers may have it
        k = k // 16 * 16 + 15 - k % 16
    parts: tl.constexpr = 2 if MUTANT == "halves" else 1
    total = tl.zeros((BM, BN), tl.float32)
    for part in range(parts):
        sums = tl.zeros((BM, BN), tl.float32)
        for k0 in range(part * K // parts, (part + 1) * K // parts, BK):
            x = tl.load(a + m[:, None] * K + k0 + k[None, :], mask=(m < M)[:, None], other=0.0)
            y = tl.load(b + (k0 + k)[:, None] * N + n[None, :], mask=(n < N)[None, :], other=0.0)
            if MUTANT == "steps":
                sums += tl.dot(x, y)
            else:
                sums = tl.dot(x, y, sums)
        total += sums
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def mutant(name):
    """A product whose low tiles have the fault, or shorter steps."""

    def product(a, b, dtype, bias=None):
        out = torch.empty(1, a.shape[1], b.shape[2], dtype=dtype)
        low = a.shape[1] <= 16
        kind, rows, step = (
            (name if low or name == "steps" else "none"),
            (16 if low else 64),
            (32 if low else 64),
        )
        mutant_kernel[(triton.cdiv(a.shape[1], rows),)](
            a.contiguous(), b.contiguous(), out, *a.shape[1:2], b.shape[2], a.shape[2], kind, rows, 16, step
        )
        return out

    return product


def quiet(rows):
    """Sums of 2^24 and 1.5, and again: to nearest no order shows, cut off towards 0 a new sum does."""
    a = torch.zeros(rows, 128)
    a[:, 0], a[:, 32], a[:, 64] = 4096, 1.5, 1.5
    weight = torch.ones(5, 128)
    weight[:, 0] = 4096
    return a.bfloat16(), weight.bfloat16()


def loud(rows):
    return probe(rows, 128, 1, torch.bfloat16), probe(5, 128, 2, torch.bfloat16)


PLAIN = "fp32"  # sums as the interpreter has them without the model: exact within sixteen, then to nearest
SEEN = {
    ("none", loud): set(),
    ("none", quiet): set(),
    ("halves", loud): {"sm_80", "sm_90", PLAIN},
    ("halves", quiet): {"sm_80", "sm_90"},
    ("steps", loud): {"sm_80", "sm_90", PLAIN},
    ("steps", quiet): {"sm_80", "sm_90"},
    ("turned", loud): {"sm_80"},  # sm_90 adds all sixteen at once
}


@pytest.mark.parametrize(("name", "inputs"), SEEN, ids=lambda x: getattr(x, "__name__", x))
def test_mutants_are_seen_on_the_gpu_that_shows_them(monkeypatch, name, inputs):
    monkeypatch.setattr(triton_matmul, "_product", mutant(name))
    a, weight = inputs(40)
    seen = set()
    for model in ("sm_80", "sm_90", PLAIN):
        known = tensor_core.interpreted_as(model) if model != PLAIN else contextlib.nullcontext()
        with known, rlkernel.use_backend("triton"):
            try:
                for where, got, want in surroundings(lambda x: product(x, weight), a, (1, 16, 17)):
                    assert_equal(where, got, want)
            except AssertionError:
                seen.add(model)
    assert seen == SEEN[name, inputs]


@pytest.mark.parametrize(
    ("target", "name", "rows"),
    [
        ("sm_80", "none", 40),
        ("sm_90", "none", 40),
        ("sm_90", "none", 1),
        ("sm_80", "halves", 1),
        ("sm_90", "halves", 16),
        ("sm_80", "steps", 40),
        ("sm_90", "steps", 1),
        ("sm_80", "turned", 1),
        ("sm_80", "turned", 16),
        ("sm_90", "turned", 16),
        ("sm_80", PLAIN, 1),
        ("sm_90", PLAIN, 1),
    ],
)
def test_a_comparison_with_a_library_sees_them(monkeypatch, target, name, rows):
    """Of ``batch_invariant(vendor=True)``, whose numbers must tell apart what tensor cores add otherwise."""
    a, b = torch.zeros(rows, 128).bfloat16(), torch.zeros(5, 128).bfloat16().t()
    library = mutant("none" if name == PLAIN else name)

    def multiply(x, y):
        elsewhere = triton_interpreter.dot_in_order if name == PLAIN else triton_interpreter.multiply
        with monkeypatch.context() as patch:
            patch.setattr(triton_interpreter, "multiply", elsewhere)
            return library(x[None], y[None], x.dtype)[0]

    monkeypatch.setattr(vendor, "multiply", multiply)
    with on(target):
        same = vendor._has_our_bits(a, b, rlkernel.matmul)
    assert same == ((name, target) in {("none", "sm_80"), ("none", "sm_90"), ("turned", "sm_90")})
