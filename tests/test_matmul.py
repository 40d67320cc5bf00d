"""matmul: against fp64, and the bits of a row against those of the same row in every surrounding."""

import os
import subprocess
import sys

import matmul_cases
import pytest
import seam_calls
import torch
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal
from matmul_cases import HALVES_AND_FLOAT, ROWS, digest, probe, surroundings

import rlkernel
from rlkernel import native
from rlkernel.calls.matmul import MatmulCall
from rlkernel.reference.matmul import make_inputs

BACKENDS = of("matmul")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
INVARIANT = [pair for pair in BACKENDS if pair.values[0] != "reference"]  # torch's library, which is none
ON_INVARIANT_BACKENDS = pytest.mark.parametrize(("backend", "device"), INVARIANT)
DTYPES = pytest.mark.parametrize("dtype", HALVES_AND_FLOAT, ids=str)
pytestmark = pytest.mark.usefixtures("poison")


def run(backend, a, b, bias=None, upstream=None, **options):
    """The product, and the gradients of what takes part where an upstream gradient is given."""
    leaves = [None if x is None else x.detach().requires_grad_(upstream is not None) for x in (a, b, bias)]
    with running(backend):
        out = rlkernel.matmul(*leaves, **options)
    if upstream is None:
        return out
    return out, *torch.autograd.grad(out, [x for x in leaves if x is not None], upstream)


def torchs(a, b, bias=None, upstream=None, out_dtype=None):
    """What one writes with torch in the same dtype."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (a, b, bias)]
    wide = out_dtype in (None, a.dtype)
    left, right = leaves[:2] if wide else (x.to(out_dtype) for x in leaves[:2])
    out = left @ right
    out = out if bias is None else out + leaves[2]
    return out, *torch.autograd.grad(out, [x for x in leaves if x is not None], upstream)


def check_against_fp64(backend, a, b, bias=None, **options):
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    wanted = options.get("out_dtype") or a.dtype
    g = torch.Generator().manual_seed(9)
    upstream = torch.randn(*shape, a.shape[-2], b.shape[-1], generator=g).to(wanted).to(a.device)
    got = run(backend, a, b, bias, upstream, **options)
    theirs = torchs(a, b, bias, upstream, **options)
    wide = [None if x is None else x.double() for x in (a, b, bias, upstream)]
    exact = torchs(*wide)
    # cuBLAS adds some shapes in parts, whose errors are smaller than those of one chain, which ours is: the
    # chain's are as large as what it adds up
    masses = torchs(*(None if x is None else x.abs() for x in wide))
    for name, x, y, truth, mass in zip(("out", "a", "b", "bias"), got, theirs, exact, masses, strict=False):
        assert x.dtype == y.dtype and x.shape == y.shape
        apart = x.dtype == torch.float32 and x.device.type == "cuda"
        check(name, x, y, truth, magnitude=mass.max().item() if apart else 0.0)


def operands(m, k, n, dtype=torch.float32, device="cpu", layout="weight"):
    inputs = make_inputs(m, k, n, dtype=dtype, device=device, seed=m + k + n)
    a, b = inputs.values()
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    if layout == "dense":
        b = b.contiguous()
    elif layout == "strided":  # neither operand has a dense dimension, and a is transposed too; nor the bias
        a = torch.stack([a.t(), a.t()], -1)[..., 0].t()
        b, bias = torch.stack([b, b], -1)[..., 1], torch.stack([bias, bias], -1)[..., 1]
    return a, b, bias


# one element; ends of every unit of 8 lanes, of tiles and of parts of K
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (13, 64, 33), (40, 259, 17)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape):
    a, b, bias = operands(*shape, dtype, device)
    check_against_fp64(backend, a, b, bias)
    check_against_fp64(backend, a, b, out_dtype=torch.float32)


@pytest.mark.parametrize("layout", ["dense", "strided"])
@DTYPES
@ON_EVERY_BACKEND
def test_layouts(backend, device, dtype, layout):
    check_against_fp64(backend, *operands(21, 75, 19, dtype, device, layout))


@pytest.mark.parametrize(
    "left, right",
    [
        ((2, 3, 5, 9), (9, 4)),
        ((3, 5, 9), (3, 9, 4)),
        ((2, 1, 5, 9), (3, 9, 4)),
        ((5, 9), (2, 9, 4)),
        ((2, 5, 9), (1, 9, 4)),
    ],
    ids=str,
)
@ON_EVERY_BACKEND
def test_batches(backend, device, left, right):
    g = torch.Generator().manual_seed(1)
    a, b, bias = (torch.randn(*shape, generator=g).to(device) for shape in (left, right, (4,)))
    check_against_fp64(backend, a, b, bias)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
@ON_EVERY_BACKEND
def test_nothing_to_add_or_to_write(backend, device, shape):
    m, k, n = shape
    a, b, bias = (
        torch.ones(m, k, device=device),
        torch.ones(k, n, device=device),
        torch.ones(n, device=device),
    )
    out, *grads = run(backend, a, b, bias, torch.ones(m, n, device=device))
    assert_equal("out", out, torch.full((m, n), 1.0 + k, device=device))
    assert_equal("a", grads[0], torch.full((m, k), float(n), device=device))
    assert_equal("b", grads[1], torch.full((k, n), float(m), device=device))
    assert_equal("bias", grads[2], torch.full((n,), float(m), device=device))
    batched = run(backend, a.expand(0, m, k), b)
    assert batched.shape == (0, m, n)


@DTYPES
@ON_INVARIANT_BACKENDS
def test_a_row_has_its_bits_in_any_batch(backend, device, dtype):
    inner, columns = (70, 18) if is_slow(backend, device) else (299, 37)  # two steps of Triton's
    weight = probe(columns, inner, 1, dtype).to(device)
    a = probe(257, inner, 2, dtype).to(device)
    for b in (weight.t(), weight.t().contiguous())[: 1 if is_slow(backend, device) else 2]:
        for name, got, want in surroundings(
            lambda x, b=b: run(backend, x, b, out_dtype=torch.float32), a, ROWS
        ):
            assert_equal(name, got, want)


@ON_INVARIANT_BACKENDS
def test_a_gradient_of_a_row_has_its_bits_in_any_batch(backend, device):
    inner = 70 if is_slow(backend, device) else 299
    weight, upstream = probe(inner, 37, 1).to(device), probe(140, inner, 2).to(device)

    def gradient(g):
        x = g.new_zeros(len(g), 37, requires_grad=True)
        with running(backend):
            return torch.autograd.grad(rlkernel.matmul(x, weight.t()), x, g)[0]

    for name, got, want in surroundings(gradient, upstream, (1, 2, 7, 16, 33, 128)):
        assert_equal(name, got, want)


@ON_INVARIANT_BACKENDS
def test_columns_and_layouts_do_not_show(backend, device):
    a, weight = probe(40, 299, 3).to(device), probe(70, 299, 4).to(device)
    upstream = probe(40, 70, 5).to(device)
    whole = run(backend, a, weight.t(), None, upstream)
    dense = run(backend, a, weight.t().contiguous(), None, upstream)
    for name, x, y in zip(("out", "a", "b"), dense, whole, strict=True):
        assert_equal(name, x, y)
    for n in (1, 3, 16, 33):
        assert_equal(f"{n} columns", run(backend, a, weight[:n].t()), whole[0][:, :n])
    assert_equal("a batch", run(backend, a.view(2, 20, 299), weight.t()).view(40, 70), whole[0])
    each = run(backend, a.view(2, 20, 299), weight.t().expand(2, 299, 70))
    assert_equal("matrices one by one", each.view(40, 70), whole[0])
    part = run(backend, a, weight.t(), upstream=upstream)[2]
    assert_equal("the gradient of b again", part, whole[2])


def split_by_rows(a, b):
    """The mutant: K in two halves where there are rows enough, as libraries do it."""
    half = a.shape[1] // 2
    whole = rlkernel.matmul(a, b)
    if len(a) < 8:
        return whole
    return rlkernel.matmul(a[:, :half], b[:half]) + rlkernel.matmul(a[:, half:], b[half:])


def test_a_split_that_depends_on_the_batch_would_be_seen():
    weight, a = probe(37, 299, 1), probe(257, 299, 2)
    with pytest.raises(AssertionError, match="the first 1"):
        for name, got, want in surroundings(lambda x: split_by_rows(x, weight.t()), a, ROWS):
            assert_equal(name, got, want)


def declared(a, b, bias=None):
    """The sum as the documentation has it, of numbers whose products and partial sums fp64 holds exactly."""
    pairs = a.dtype == b.dtype == torch.bfloat16
    least = torch.finfo(torch.float32).tiny if pairs else 0

    def flushed(x):
        return torch.where(x.abs() < least, x * 0, x)  # of its sign

    missing = -a.shape[1] % (16 if pairs else 8)
    a = torch.nn.functional.pad(flushed(a.double()), (0, missing))
    b = torch.nn.functional.pad(flushed(b.double()), (0, 0, 0, missing))
    lanes = torch.zeros(8, len(a), b.shape[1])
    for j in range(a.shape[1]):
        k, lane = (j ^ 1, j // 2 % 8) if pairs else (j, j % 8)
        lanes[lane] = flushed((a[:, k, None] * b[k] + lanes[lane].double()).float())
    while len(lanes) > 1:  # l and l + 4, then l and l + 2, then the last two
        half = len(lanes) // 2
        lanes = flushed(lanes[:half] + lanes[half:])
    return lanes[0] if bias is None else flushed(lanes[0] + flushed(bias))


def exact_operands():
    """14 bits of mantissa: products have more than fp32 holds, so that two roundings differ from one."""
    g = torch.Generator().manual_seed(6)
    a, weight = (torch.randint(-(2**14), 2**14, (m, 203), generator=g) / 2.0**14 for m in (21, 18))
    return a, weight, torch.randn(18, generator=g)


def test_the_declared_bits():
    a, weight, bias = exact_operands()
    want = declared(a, weight.t(), bias)
    for b in (weight.t(), weight.t().contiguous()):
        for rows in (21, 6, 5, 3, 1):  # few are multiplied otherwise, where b is dense along its columns
            assert_equal("out", run("native", a[:rows], b, bias), want[:rows])
        assert_equal(
            "bf16", run("native", a.bfloat16(), b.bfloat16()), declared(a.bfloat16(), b.bfloat16()).bfloat16()
        )
    upstream = exact_operands()[0][:, :18]
    _, grad_a, grad_b, grad_bias = run("native", a, weight.t(), bias, upstream)
    assert_equal("a", grad_a, declared(upstream, weight))
    assert_equal("b", grad_b, declared(a.t(), upstream))
    assert_equal("bias", grad_bias, declared(torch.ones(1, 21), upstream)[0])
    assert not torch.equal(declared(a, weight.t()), declared(a.bfloat16(), weight.t().bfloat16()))
    two_roundings = (a[:, :8, None] * weight.t()[:8]).sum(1)
    assert not torch.equal(two_roundings, declared(a[:, :8], weight.t()[:8]))


@pytest.mark.parametrize("inner", [16, 35, 64, 211])
def test_the_declared_bits_of_bf16(inner):
    g = torch.Generator().manual_seed(inner)
    bias = torch.randn(18, generator=g)
    # of one size; and products on both sides of the least normal number, which count as 0 below it
    for scale in (1.0, 2.0**-63):
        a, weight = ((torch.randn(m, inner, generator=g) * scale).bfloat16() for m in (21, 18))
        for rows in (a, a[:6], a[:2]):
            for b in (weight.t(), weight.t().contiguous()):
                assert_equal(
                    f"scale {scale}", run("native", rows, b, out_dtype=torch.float32), declared(rows, b)
                )
        upstream, row = a[:, :1] * weight[:, 0], bias * scale**2
        out, grad_a, grad_b, grad_bias = run("native", a, weight.t(), row, upstream)
        assert_equal("out", out, declared(a, weight.t(), row).bfloat16())
        assert_equal("a", grad_a, declared(upstream, weight).bfloat16())
        assert_equal("b", grad_b, declared(a.t(), upstream).bfloat16())
        assert_equal("bias", grad_bias, declared(torch.ones(1, 21).bfloat16(), upstream)[0])
    kept = (a.double() @ weight.t().double()).abs() >= torch.finfo(torch.float32).tiny
    assert 0.1 < kept.double().mean() < 1  # or the scale shows nothing


def test_processes_that_flush_or_round_otherwise_have_the_declared_bits_of_bf16():
    a, weight = (matmul_cases.near_the_least(m, 67, m, torch.bfloat16) for m in (21, 18))
    want = run("native", a, weight.t(), out_dtype=torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        got = run("native", a, weight.t(), out_dtype=torch.float32)
        left = torch.tensor([1e-39]) * 1
    finally:
        torch.set_flush_denormal(False)
    assert_equal("flushing", got, want)
    assert left.item() == 0 and (torch.tensor([1e-39]) * 1).item() != 0  # each setting is as it was


@pytest.mark.parametrize("isa", native.extension().built()["cpu"][:-1])
def test_threads_and_instruction_sets_do_not_show(isa):
    """A process on a narrower one, beside this one."""
    want = digest(1)
    assert digest(2) == want
    done = subprocess.run(
        [sys.executable, matmul_cases.__file__, "1", "2"],
        env=os.environ | {"RLKERNEL_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [want, want], done.stderr[-2000:]


@ON_EVERY_BACKEND
def test_nan_and_inf_reach_their_row_and_column_alone(backend, device):
    a, b, _ = operands(20, 35, 21, device=device)
    a[3, 30], b[34, 7] = torch.nan, torch.inf
    out = run(backend, a, b)
    rest = torch.ones(20, 21, dtype=torch.bool, device=device)
    rest[3], rest[:, 7] = False, False
    assert out[3].isnan().all() and out[rest].isfinite().all()
    others = torch.arange(20, device=device) != 3
    assert_equal("inf", out[others, 7], torch.inf * a[others, 34].sign())


def test_a_weight_is_read_where_it_is():
    """No copy of a transposed weight, forward or backward; its gradient is as dense as the weight."""
    recording = seam_calls.Recording(native.extension().cpu)
    layer = torch.nn.Linear(24, 40)
    x = torch.randn(2, 3, 24, requires_grad=True)
    with native.emulated(recording), rlkernel.use_backend("native"):
        out = rlkernel.matmul(x, layer.weight.t(), layer.bias)
        out.backward(torch.ones_like(out))
    forward, *backward = recording.calls["matmul"]
    assert forward["b"].data_ptr() == layer.weight.data_ptr() and forward["a"].data_ptr() == x.data_ptr()
    assert any(layer.weight.data_ptr() in (c["a"].data_ptr(), c["b"].data_ptr()) for c in backward)
    assert layer.weight.grad.is_contiguous()
    wanted = torch.autograd.grad(torch.nn.functional.linear(x, layer.weight, layer.bias).sum(), layer.weight)[
        0
    ]
    torch.testing.assert_close(layer.weight.grad, wanted)


@ON_EVERY_BACKEND
def test_upstream_gradients_of_any_strides(backend, device):
    """That of a sum has none at all."""
    a, b, bias = operands(6, 9, 5, device=device)
    upstream = torch.ones((), device=device).expand(6, 5)
    for x, y in zip(
        run(backend, a, b, bias, upstream), run(backend, a, b, bias, upstream.contiguous()), strict=True
    ):
        assert_equal("gradient", x, y)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@ON_EVERY_BACKEND
def test_only_the_needed_gradients(backend, device, needs):
    inputs = operands(6, 9, 5, device=device)
    leaves = [x.clone().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    with running(backend):
        rlkernel.matmul(*leaves).sum().backward()
    assert [x.grad is not None for x in leaves] == [*needs]


def test_fp64_stays_fp64():
    a, b, bias = (x.double() for x in operands(6, 9, 5))
    out = rlkernel.matmul(a, b, bias)
    assert rlkernel.last_backend("matmul") == "reference"
    torch.testing.assert_close(out, a @ b + bias, rtol=1e-15, atol=1e-15)


@ON_EVERY_BACKEND
def test_autocast_has_no_part_in_the_sums(backend, device):
    """Of a product whose bias or whose gradient would show it, were the product itself rounded first."""
    if device != "cpu":
        pytest.skip("a CPU's autocast")
    a, b, _ = operands(3, 40, 7, torch.bfloat16)
    grad = torch.linspace(-1, 1, 21).view(3, 7)

    def both(on):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            return run(backend, a, b, torch.full((7,), 1e-3), grad, out_dtype=torch.float32)

    for ours, theirs in zip(both(True), both(False), strict=True):
        assert_equal(backend, ours, theirs)


def test_autocast_is_that_of_torch():
    a, b, bias = operands(6, 9, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rlkernel.matmul(a, b, bias)
    assert out.dtype == torch.bfloat16
    assert_equal("autocast", out, rlkernel.matmul(a.bfloat16(), b.bfloat16(), bias))


A, B = torch.zeros(2, 3), torch.zeros(3, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a": A.long()}, "a must be float16, .*, got int64"),
        ({"a": A[0]}, r"a must have two dimensions or more, got \(3,\)"),
        ({"b": B[0]}, r"b must have two dimensions or more, got \(4,\)"),
        ({"b": B.bfloat16()}, "b must be float32 as a is, got bfloat16"),
        ({"b": B.t()}, r"b must be \[..., 3, N\] as a is \[..., M, K\], got \(4, 3\)"),
        (
            {"a": A.expand(2, 2, 3), "b": B.expand(3, 3, 4)},
            r"b must have batch dimensions .* a's \(2,\), got \(3,\)",
        ),
        ({"bias": torch.zeros(3)}, r"bias must be \[4\], got \(3,\)"),
        ({"bias": torch.zeros(4).long()}, "bias must be float16, .*, got int64"),
        ({"out_dtype": torch.bfloat16}, "out_dtype must be float32, got bfloat16"),
        ({"out_dtype": "float32"}, "out_dtype must be float32, got 'float32'"),
        (
            {"a": A.half(), "b": B.half(), "out_dtype": torch.int8},
            "out_dtype must be float32 or float16, got int8",
        ),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.matmul(**{"a": A, "b": B, **change})


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias):
    from rlkernel.ops.matmul import op

    a, b, row = operands(5, 9, 4)
    call = MatmulCall(
        a[None].requires_grad_(), b[None].requires_grad_(), row if bias else None, torch.float32
    )
    torch.library.opcheck(op.node, op.flat(call))


def test_compiles_without_a_graph_break():
    layer = torch.nn.Linear(9, 4)
    compiled = torch.compile(
        lambda x: rlkernel.matmul(x, layer.weight.t(), layer.bias) * 2, fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(2, 5, 9)
    eager = rlkernel.matmul(x, layer.weight.t(), layer.bias) * 2
    assert_equal("compiled", compiled(x), eager)
    want = torch.autograd.grad(eager.square().sum(), layer.weight)[0]
    assert_equal("gradient", torch.autograd.grad(compiled(x).square().sum(), layer.weight)[0], want)
