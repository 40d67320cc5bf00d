"""rotary: transformers' own function and vLLM's formula are met to the bit; one body for every backend."""

import sys

import instruction_sets
import pytest
import torch
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.calls.rotary import ROUNDINGS, RotaryCall
from rlkernel.ops.rotary import op
from rlkernel.reference.rotary import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("rotary"))
pytestmark = pytest.mark.usefixtures("poison")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def upstream(x):
    g = torch.Generator().manual_seed(x.shape[-1])
    return torch.randn(x.shape, generator=g).to(x)


def run(backend, inputs, function=rlkernel.rotary, grads=upstream, **options):
    """The heads that come out, and the gradients of those that went in, by name."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in ("q", "k")}
    with running(backend):
        out = function(**inputs | leaves, **options)
        found = torch.autograd.grad(list(out), list(leaves.values()), [grads(x) for x in out])
    outs = {"q": out[0].detach(), "k": out[1].detach()}
    return outs | {f"grad_{name}": x for name, x in zip(leaves, found, strict=True)}


def halved(x, cos, sin, interleaved):
    """vLLM's ``ApplyRotaryEmb.forward_static``: x [T, H, R], cos and sin [T, R / 2]."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def vllms(q, k, cos, sin, positions, rotary_dim, interleaved):
    """vLLM's ``RotaryEmbedding.forward_native``."""
    cos, sin = cos[positions], sin[positions]
    return tuple(
        torch.cat([halved(x[..., :rotary_dim], cos, sin, interleaved), x[..., rotary_dim:]], -1)
        for x in (q, k)
    )


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transformers_function_to_the_bit(backend, device, dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    few = ((1, 2, 2, 12, 1), (2, 1, 1, 6, 1))
    whole = ((2, 7, 4, 64, 2), (1, 33, 3, 10, 1), (3, 1, 5, 128, 5))
    for batch, tokens, heads, dim, kv_heads in few if is_slow(backend, device) else whole:
        inputs = make_inputs(batch, tokens, heads, dim, kv_heads=kv_heads, dtype=dtype, device=device)
        inputs["cos"] = inputs["cos"] * torch.linspace(0.9, 1.1, dim, device=device).to(
            dtype
        )  # halves differ
        want = run("reference", inputs, llama.apply_rotary_pos_emb)
        got = run(backend, inputs)
        for name, x in want.items():
            assert_equal(name, got[name], x)
        assert got["q"].is_contiguous() == want["q"].is_contiguous()
        swapped = {name: x.transpose(1, 2) if name in "qk" else x for name, x in inputs.items()}
        other = run(
            backend, swapped, unsqueeze_dim=2, grads=lambda x: upstream(x.transpose(1, 2)).transpose(1, 2)
        )
        for name, x in want.items():
            assert_equal(f"{name}, heads last", other[name].transpose(1, 2), x)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("interleaved", [False, True])
def test_vllms_formula_to_the_bit(backend, device, interleaved):
    """A table of all positions, of half as many columns as turn, and a part of the head that does not."""
    for dtype in (torch.float32, torch.bfloat16):
        for dim, rotary_dim in ((10, 6), (40, 36), (16, 16)):
            inputs = make_inputs(1, 5, 3, dim, packed=True, kv_heads=2, dtype=dtype, device=device)
            table = make_inputs(1, 9, 1, 2 * rotary_dim, packed=True, rotary_dim=rotary_dim, device=device)
            cache = torch.cat([table["cos"][:, : rotary_dim // 2], table["sin"][:, : rotary_dim // 2]], -1)
            cos, sin = cache.chunk(2, -1)
            positions = torch.tensor([8, 0, 3, 3, 1], device=device)
            inputs |= {"cos": cos, "sin": sin, "positions": positions}
            options = {"rotary_dim": rotary_dim, "interleaved": interleaved}
            want = run("reference", inputs, vllms, **options)
            for name, x in run(backend, inputs, **options).items():
                assert_equal(name, x, want[name])
            again = run(backend, inputs | {"positions": positions.int()}, **options)
            assert_equal("int32", again["q"], want["q"])
            gathered = inputs | {"cos": cos[positions], "sin": sin[positions], "positions": None}
            assert_equal("gathered", run(backend, gathered, **options)["k"], want["k"])


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_fp64(backend, device, dtype):
    inputs = make_inputs(2, 3, 2, 12, rotary_dim=8, kv_heads=1, dtype=dtype, device=device)
    double = {name: x.double() for name, x in inputs.items()}
    for rounding in ROUNDINGS:
        for interleaved in (False, True):
            options = {"rounding": rounding, "interleaved": interleaved}
            truth = run("reference", double, grads=lambda x: upstream(x.to(dtype)).double(), **options)
            ours, torchs = (run(b, inputs, **options) for b in (backend, "reference"))
            for name, exact in truth.items():
                assert ours[name].dtype == dtype
                check(f"{name} {options}", ours[name], torchs[name], exact)
                assert_equal(f"{name} {options}", ours[name], torchs[name])


def test_one_rounding_is_nearer():
    inputs = make_inputs(4, 50, 4, 64, dtype=torch.bfloat16)
    inputs["cos"], inputs["sin"] = (
        x.float() for x in make_inputs(4, 50, 4, 64).values() if x.shape[-1] == 64 and x.dim() == 3
    )
    truth = rlkernel.rotary(**{name: x.double() for name, x in inputs.items()}).q
    lost = {r: (rlkernel.rotary(**inputs, rounding=r).q - truth).abs().max() for r in ROUNDINGS}
    assert lost["after_sum"] < 0.8 * lost["before_sum"]
    assert rlkernel.rotary(**inputs, rounding="after_sum").q.dtype == torch.bfloat16


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_nothing(backend, device, dtype):
    inputs = {k: x.to(device, dtype) for k, x in make_inputs(1, 3, 2, 8).items()}
    want = run(backend, inputs)
    for other in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=other):
            found = run(backend, inputs)
        for name, x in want.items():
            assert_equal(name, found[name], x)


@ON_EVERY_BACKEND
def test_in_place(backend, device):
    for packed, dim, rotary_dim in ((True, 12, 12), (False, 12, 8)):
        inputs = make_inputs(2, 3, 2, dim, rotary_dim=rotary_dim, packed=packed, device=device)
        with running(backend):
            want = rlkernel.rotary(**inputs)
            mine = {name: x.clone() for name, x in inputs.items()}
            version = mine["q"]._version
            got = rlkernel.rotary(**mine, inplace=True)
        assert got.q is mine["q"] and got.k is mine["k"] and mine["q"]._version > version
        for name in "qk":
            assert_equal(name, mine[name], getattr(want, name))
    with torch.inference_mode(), running(backend):
        frozen = {name: x.clone() for name, x in inputs.items()}
        assert_equal("inference", rlkernel.rotary(**frozen, inplace=True).q, want.q)


@ON_EVERY_BACKEND
def test_in_place_of_memory_that_is_written_twice(backend, device):
    """The second turn would begin with what the first has written."""
    inputs = make_inputs(2, 3, 2, 8, device=device)
    fused = torch.randn(2, 3, 40, device=device)
    heads = [fused.unflatten(-1, (5, 8)).transpose(1, 2)[:, a:b] for a, b in ((0, 3), (3, 5), (2, 4))]
    one = fused[..., :8].unsqueeze(1)
    table = {"cos": inputs["cos"], "sin": inputs["sin"], "inplace": True}
    shared = "k must share no memory with q where inplace is True, got two views of one"
    with running(backend):
        for q, k in ((inputs["q"], inputs["q"]), (heads[0], heads[0][:, 1:]), (heads[0], heads[2])):
            kept = q.clone()
            with pytest.raises(ValueError, match=shared):
                rlkernel.rotary(q, k, **table)
            assert_equal("nothing is written", q, kept)
        for name, given in (
            ("q", (one.expand(2, 2, 3, 8), None)),
            ("k", (one, one.clone().expand(2, 2, 3, 8))),
        ):
            with pytest.raises(
                ValueError, match=f"{name} must not be expanded with inplace=True, got strides"
            ):
                rlkernel.rotary(*given, **table)
        overlapping = one.new_zeros(96).as_strided((2, 2, 3, 8), (48, 24, 7, 1))
        with pytest.raises(ValueError, match="q must hold elements that share no memory with inplace=True"):
            rlkernel.rotary(overlapping, None, **table)
        # neighbours in one tensor, as a fused projection has them, are two
        want = rlkernel.rotary(heads[0], heads[1], inputs["cos"], inputs["sin"])
        got = rlkernel.rotary(heads[0], heads[1], **table)
    assert_equal("q", got.q, want.q)
    assert_equal("k", got.k, want.k)


@ON_EVERY_BACKEND
def test_any_strides_one_sided_and_empty(backend, device):
    inputs = make_inputs(2, 3, 4, 10, device=device)
    qkv = torch.randn(2, 3, 4, 30, device=device)
    for change in (
        lambda x: x[..., 10:20],
        lambda x: x[..., ::3],
        lambda x: x[:, :, 1:2].expand(2, 3, 4, 30)[..., :10],
    ):
        view = change(qkv).transpose(1, 2)
        want = run(backend, inputs | {"q": view.contiguous()})
        for name, x in run(backend, inputs | {"q": view}).items():
            assert_equal(name, x, want[name])
    whole = run(backend, inputs)
    with running(backend):
        alone = rlkernel.rotary(inputs["q"], None, inputs["cos"], inputs["sin"])
        assert alone.k is None
        assert_equal("alone", alone.q, whole["q"])
        leaves = {name: inputs[name].detach().requires_grad_() for name in "qk"}
        out = rlkernel.rotary(**inputs | leaves)
        (grad,) = torch.autograd.grad(out.k, leaves["k"], upstream(out.k), retain_graph=True)
        assert_equal("of the keys alone", grad, whole["grad_k"])
        (sums,) = torch.autograd.grad(out.q.sum(), leaves["q"])
        ones = run(backend, inputs, grads=torch.ones_like)
        assert_equal("of a sum", sums, ones["grad_q"])
        one = {name: x[:1] if name in ("cos", "sin") else x for name, x in inputs.items()}
        same = {name: x[:1].expand_as(x) if name in ("cos", "sin") else x for name, x in inputs.items()}
        assert_equal("one row of angles", rlkernel.rotary(**one).q, rlkernel.rotary(**same).q)
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4)):
        empty = run(backend, make_inputs(*shape, device=device))
        assert empty["grad_q"].numel() == empty["k"].numel() == 0
        inputs = {k: x.new_zeros(()).expand(x.shape) for k, x in make_inputs(*shape, device=device).items()}
        empty = run(backend, inputs, grads=lambda x: x.new_zeros(()).expand(x.shape))
        assert empty["grad_q"].numel() == empty["k"].numel() == 0


@ON_EVERY_BACKEND
def test_a_token_does_not_feel_the_others(backend, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(
            1, 9 if is_slow(backend, device) else 65, 3, 20, packed=True, dtype=dtype, device=device
        )
        count = len(inputs["q"])
        whole = run(backend, inputs)
        grad = upstream(inputs["q"])
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(device)
        for rows in (slice(0, 1), slice(1, 8), slice(count - 1, count), order):
            part = {name: x[rows] for name, x in inputs.items()}
            got = run(backend, part, grads=lambda x, grad=grad, rows=rows: grad[rows])
            for name, x in got.items():
                assert_equal(f"{name} of {rows}", x, whole[name][rows])
        dirty = inputs | {"q": inputs["q"].clone()}
        dirty["q"][::2], dirty["q"][1, 0, 3] = torch.nan, torch.inf
        got = run(backend, dirty)
        assert_equal("beside NaN", got["q"][3::2], whole["q"][3::2])
        partner = (3 + 10) % 20
        touched = torch.zeros(20, dtype=torch.bool)
        touched[[3, partner]] = True
        assert got["q"][1, 0].isfinite().cpu().equal(~touched)


def results():
    found = []
    for dtype in DTYPES:
        for interleaved in (False, True):
            inputs = make_inputs(2, 5, 3, 70, rotary_dim=54, dtype=dtype)
            found += run("native", inputs, interleaved=interleaved).values()
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_do_not_show(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


def test_a_second_derivative_is_refused():
    inputs = make_inputs(1, 2, 1, 4)
    q = inputs["q"].detach().requires_grad_()
    (grad,) = torch.autograd.grad(rlkernel.rotary(**inputs | {"q": q}).q.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="rotary has no second derivative"):
        grad.sum().backward()


def test_the_wrong_convention_is_found():
    """The mutants: GPT-J's pairs for GPT-NeoX's, and angles of the neighbour."""
    inputs = make_inputs(1, 5, 2, 16)
    right = rlkernel.rotary(**inputs).q
    assert not torch.equal(rlkernel.rotary(**inputs, interleaved=True).q, right)
    late = inputs | {name: inputs[name].roll(1, 1) for name in ("cos", "sin")}
    assert not torch.equal(rlkernel.rotary(**late).q, right)


Q, W = torch.zeros(5, 2, 8), torch.zeros(5, 8)
GOOD = {"q": Q, "k": Q, "cos": W, "sin": W}
BAD = [
    (dict(q=torch.zeros(5, 8)), r"q must be \[T, H, D\] or \[B, H, T, D\], got \(5, 8\)"),
    (dict(k=torch.zeros(4, 2, 8)), r"k must have q's shape \(5, any, 8\), got \(4, 2, 8\)"),
    (dict(k=Q.half()), "k must have q's dtype float32, got float16"),
    (dict(cos=W[:4], sin=W[:4]), r"cos must have the shape \(5, W\) of q's tokens, got \(4, 8\)"),
    (dict(sin=torch.zeros(5, 4)), r"sin must have cos' shape \(5, 8\), got \(5, 4\)"),
    (dict(rotary_dim=7), "rotary_dim must be even, from 2 to the 8 elements of a head, got 7"),
    (dict(rotary_dim=6), "cos must have 6 or 3 columns, got 8"),
    (dict(cos=torch.zeros(5, 10), sin=torch.zeros(5, 10)), "rotary_dim must be even, .* got 10"),
    (dict(unsqueeze_dim=2), r"unsqueeze_dim must be in \[0, 1\] for q of 3, got 2"),
    (dict(positions=torch.tensor([0, 1, 5, 1, 1])), r"positions\[2\] must be in \[0, 4\], got 5"),
    (dict(positions=torch.zeros(4).long()), r"positions must have the shape \(5,\) of .*, got \(4,\)"),
    (dict(rounding="never"), "rounding must be one of 'before_sum', 'after_sum', got 'never'"),
    (dict(inplace=True, q=Q.clone().requires_grad_()), "inplace must be False where q or k requires"),
    (dict(cos=W.clone().requires_grad_()), "cos must not require a gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.rotary(**GOOD | change)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_compiles_as_one_graph(backend):
    inputs = make_inputs(2, 3, 2, 8)

    def step(q, k):
        out = rlkernel.rotary(q * 2, k, inputs["cos"], inputs["sin"])
        return out.q * 3, out.k

    def in_place(q, k):
        rlkernel.rotary(q, k, inputs["cos"], inputs["sin"], inplace=True)
        return q, k

    results = []
    for compiled in (False, True):
        fn, free = (
            torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f for f in (step, in_place)
        )
        leaves = [inputs[name].detach().requires_grad_() for name in "qk"]
        with rlkernel.use_backend(backend):
            out = fn(*leaves)
            grads = torch.autograd.grad(out[0].sum() + out[1].square().sum(), leaves)
            results.append((*(x.detach() for x in out), *grads, *free(*(x.detach().clone() for x in leaves))))
    for a, b in zip(*results, strict=True):
        assert_equal("compiled", b, a)


def test_compiles_with_a_part_of_a_head_that_is_a_symbol():
    q, cos, sin = torch.randn(3, 2, 8), torch.randn(9, 1), torch.randn(9, 1)
    given = {"positions": torch.tensor([4, 0, 8]), "rotary_dim": 2}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda given: rlkernel.rotary(q, None, cos, sin, **given).q,
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    assert_equal("compiled", compiled(given), rlkernel.rotary(q, None, cos, sin, **given).q)


def test_opcheck():
    inputs = make_inputs(1, 2, 2, 8, packed=True)
    for name in "qk":
        inputs[name] = inputs[name].contiguous().requires_grad_()
    call = RotaryCall(
        **inputs, positions=None, heads=1, rotary_dim=8, interleaved=False, rounding=ROUNDINGS[0]
    )
    torch.library.opcheck(op.node, op.flat(call))
