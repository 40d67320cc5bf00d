"""Gather and cascade over vendors' kernels, with stand-ins of the vendors' contracts in their place."""

import itertools
import math
import random

import emulation
import pytest
import torch
import varlen_stand_ins as vendors
from backends import EMULATED, INTERPRETED, NO_INTERPRETER
from bitwise import assert_equal
from varlen_stand_ins import KERNELS, PASSES, install, replace

import rlkernel
from rlkernel import dispatch
from rlkernel import native as compiled
from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule, OutGrads
from rlkernel.drivers import prefix_shared_attention_flash as driver
from rlkernel.drivers import prefix_shared_attention_varlen as varlen
from rlkernel.drivers.prefix_shared_attention import cascade, gathers
from rlkernel.native import prefix_shared_attention as native
from rlkernel.native.prefix_shared_attention import flash
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.reference import prefix_shared_attention as reference


def groups(*samples):
    """Prompts of some tokens with completions of some: (prompt, completion, completion, ...) each."""
    lengths, parents, completion = [], [], []
    for prompt, *completions in samples:
        root = len(lengths)
        lengths += [prompt, *completions]
        parents += [-1, *(root for _ in completions)]
        completion += [False, *(True for _ in completions)]
    return PrefixLayout.of(lengths, parents, completion)[0]


def forest(seed, size=12):
    r = random.Random(seed)
    parents = [r.randrange(-1, s) for s in range(size)]
    completion: list[bool] = []
    for parent in parents:
        completion.append((parent >= 0 and completion[parent]) or r.random() < 0.4)
    return PrefixLayout.of([r.randrange(0, 7) for _ in parents], parents, completion)[0]


LAYOUTS = {
    "group": groups((7, 3, 1, 5)),
    "ragged": groups((4, 1, 9), (3,), (5, 2, 2, 2), (0, 4, 3), (1, 6)),
    "no prompt": groups((0, 3), (0, 4)),
    "one row": groups((1,)),
    "many": groups((40, *[1] * 30)),
    "tree": PrefixLayout.of([5, 3, 4, 2, 3, 1, 4], [-1, 0, 0, 1, 1, 2, 3], [False] * 3 + [True] * 4)[0],
    **{f"forest {seed}": forest(seed) for seed in range(6)},
}
RULES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "window": {"window": 5},
    "sinks": {"sinks": True},
}


needs_triton = pytest.mark.skipif(not INTERPRETED, reason=NO_INTERPRETER)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    return install(request.param, monkeypatch)


def force(monkeypatch, way):
    monkeypatch.setattr(driver, "gathers", lambda *_: way == "gather")


def inputs(layout, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, v_dim=None, **rule):
    """(q, k, v), layout, rule, sinks, the gradient of out: what both() takes."""
    made = reference.make_inputs(layout, heads, kv_heads, head_dim, v_dim, dtype=dtype)
    sinks = torch.linspace(-1, 2, heads, dtype=dtype) if rule.pop("sinks", False) else None
    options = {"scale": 0.4, "softcap": 0.0, "window": 0, "bitwise": False} | rule
    generator = torch.Generator().manual_seed(9)
    shape = *made["q"].shape[:2], v_dim or head_dim
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return (made["q"], made["k"], made["v"]), layout, AttentionRule(**options), sinks, grad


def both(impl, tensors, layout, rule, sinks, grad):
    call = AttentionCall(*tensors, layout, rule, sinks)
    results = impl.forward(call)
    return *results, *impl.backward(call, results, OutGrads(grad))


NAMES = ("out", "lse", "dq", "dk", "dv")


def error(got, want):
    """The largest difference, NaN where there is one."""
    found = [
        float((g.double() - w.double()).abs().max()) for g, w in zip(got, want, strict=True) if w.numel()
    ]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def matters(name, way, rule):
    """A cascade has no window and torch's kernel no softcap: gathers() and reasons() say so."""
    return not (way == "cascade" and rule == "window") and not (name == "aten" and rule == "softcap")


CASES = [case for case in itertools.product(KERNELS, ("gather", "cascade"), RULES) if matters(*case)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, way, rule", CASES)
@pytest.mark.usefixtures("poison")
def test_matches_the_reference(name, way, rule, layout, monkeypatch):
    install(name, monkeypatch)
    force(monkeypatch, way)
    case = inputs(LAYOUTS[layout], **RULES[rule])
    for field, got, want in zip(NAMES, both(flash, *case), both(reference, *case), strict=True):
        assert got.is_contiguous() and got.dtype == want.dtype and got.shape == want.shape, field
        assert error([got], [want]) <= 1e-11, field


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 1), (6, 3), (8, 1)])
@pytest.mark.parametrize("way", ["gather", "cascade"])
def test_grouped_heads(heads, kv_heads, way, monkeypatch):
    install("fa2", monkeypatch)
    force(monkeypatch, way)
    case = inputs(LAYOUTS["forest 1"], heads, kv_heads, sinks=True)
    assert error(both(flash, *case), both(reference, *case)) <= 1e-11


@pytest.mark.parametrize("dims", [(24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("name, way, rule", CASES)
@pytest.mark.usefixtures("poison")
def test_values_of_another_head_dim(name, way, rule, dims, monkeypatch):
    """The vendors' kernels have one: they get zeros behind, of which nothing comes out."""
    install(name, monkeypatch)
    force(monkeypatch, way)
    case = inputs(LAYOUTS["tree"], head_dim=dims[0], v_dim=dims[1], **RULES[rule])
    for field, got, want in zip(NAMES, both(flash, *case), both(reference, *case), strict=True):
        assert got.is_contiguous() and got.dtype == want.dtype and got.shape == want.shape, field
        assert error([got], [want]) <= 1e-11, field


def in_fp64(tensors, layout, rule, sinks, grad):
    return [x.double() for x in tensors], layout, rule, sinks.double(), grad.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["gather", "cascade"])
@pytest.mark.usefixtures("poison")
def test_narrow_types(kernel, way, dtype, monkeypatch):
    """Over the compiled merge, gather and reduction: at most twice the error of the same kernel, dense."""
    force(monkeypatch, way)
    case = inputs(LAYOUTS["ragged"], head_dim=64, dtype=dtype, sinks=True)
    got, truth, plain = both(flash, *case), both(reference, *in_fp64(*case)), both(reference, *case)
    tensors, layout, rule, sinks, grad = case
    repeated, index = layout.repeated()
    dense_case = [x[index] for x in tensors], repeated, rule, sinks, grad[index]
    dense, dense_truth = both(flash, *dense_case), both(reference, *in_fp64(*dense_case))
    unit = torch.finfo(dtype).eps
    for at, field in enumerate(NAMES):
        g, t = [got[at]], [truth[at]]
        if field in ("out", "lse"):
            allowed = 2 * error([dense[at]], [dense_truth[at]]) + torch.finfo(got[at].dtype).eps
        else:  # two terms are rounded before they are added up
            allowed = 2 * error([plain[at]], t) + 2 * unit * float(truth[at].abs().max())
        assert error(g, t) <= allowed, field


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "vendor, way, name, rule", [("fa2", "gather", "ragged", "window"), ("fa3", "cascade", "tree", "sinks")]
)
@pytest.mark.usefixtures("poison")
def test_triton_has_the_bits_of_the_compiled_kernels(vendor, way, name, rule, dtype, monkeypatch):
    """A whole pass and its gradients: so all that the tests of the compiled kernels show holds for it."""
    install(vendor, monkeypatch)
    force(monkeypatch, way)
    case = inputs(LAYOUTS[name], head_dim=24, v_dim=16, dtype=dtype, **RULES[rule])
    with compiled.emulated(emulation.module(EMULATED["emulated-warp32"])):
        want = both(flash, *case)
    for field, got, w in zip(NAMES, both(PASSES["triton"], *case), want, strict=True):
        assert got.is_contiguous()
        assert_equal(field, got, w)


def test_launches(kernel, monkeypatch):
    """What runs: gather is one call each way, a group's cascade two, whatever the number of completions."""

    def launches(layout, way):
        force(monkeypatch, way)
        vendors.CALLS.clear()
        both(flash, *inputs(layout))
        assert vendors.CALLS.count("forward") == vendors.CALLS.count("backward")
        return vendors.CALLS.count("forward")

    assert launches(LAYOUTS["many"], "gather") == 1
    assert launches(LAYOUTS["many"], "cascade") == 2
    assert launches(groups(*[(5, 2, 3)] * 8), "cascade") == 2  # eight groups side by side
    assert launches(LAYOUTS["ragged"], "cascade") == 2  # a prompt alone, completions without one
    assert launches(LAYOUTS["tree"], "cascade") == 4  # a row with three segments above it
    assert launches(LAYOUTS["no prompt"], "cascade") == 1


def test_without_sharing_nothing_is_copied(kernel, monkeypatch):
    replace(monkeypatch, gather_kv=None)
    case = inputs(LAYOUTS["no prompt"], window=2)
    assert error(both(flash, *case), both(reference, *case)) <= 1e-11


@pytest.mark.parametrize("r", [1, 2, 4, 7])
def test_the_rule_of_a_group(r):
    """gather where P <= (Hq / Hkv - 1) * L, whatever G."""
    rule = AttentionRule(1.0, 0.0, 0, False)
    for prompt, length, n in [(64, 64, 16), (65, 64, 2), (192, 64, 8), (193, 64, 8), (1, 50, 3)]:
        layout = groups((prompt, *[length] * n), (prompt, *[length] * n))
        assert gathers(layout, rule, 2 * r, 2) == (prompt <= (r - 1) * length)
    layout = groups((500, 3, 3))
    assert not gathers(layout, rule, 2 * r, 2)
    assert gathers(layout, rule._replace(window=9), 2 * r, 2)
    assert gathers(layout, rule._replace(bitwise=True), 2 * r, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_ask_each_key_once(name):
    """Own and other calls together: the pairs that the layout's row tables allow, none of them twice."""
    layout = LAYOUTS[name]
    tables, counts = cascade(layout), torch.zeros(layout.total, layout.total, dtype=torch.int64)
    for first, end in map(layout.rows, range(len(layout.lengths))):
        counts[first:end, first:end] += torch.ones(end - first, end - first).tril().long()
    for call in tables.calls:
        cu_rows, cu_keys = (x[slice(*call.cu_seqlens)] for x in (tables.cu_rows, tables.cu_keys))
        assert int(cu_rows[-1]) == call.rows[1] - call.rows[0]
        assert int(cu_keys[-1]) == call.keys[1] - call.keys[0]
        asked, answered = set(), set()
        for rows, keys in vendors.sequences(cu_rows + call.rows[0], cu_keys + call.keys[0]):
            counts[rows, keys] += 1
            if rows.start < rows.stop and keys.start < keys.stop:
                asked |= set(range(rows.start, rows.stop))
                answered |= set(range(keys.start, keys.stop))
        assert asked == {i for run in call.asked for i in range(*run)}
        assert answered == {i for run in call.answered for i in range(*run)}
    first, last, pos = layout.row_tables()
    seen = (first[None] <= first[:, None]) & (first[:, None] < last[None]) & (pos[:, None] >= pos[None])
    assert torch.equal(counts, seen.long())


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("name", ["ragged", "tree", "forest 2"])
def test_gather_has_the_bits_of_the_dense_call(kernel, name, window, monkeypatch):
    layout = LAYOUTS[name]
    tensors, _, rule, sinks, _ = inputs(layout, dtype=torch.float32, window=window, bitwise=True, sinks=True)
    repeated, index = layout.repeated()
    forward, longest = kernel.forward, []
    monkeypatch.setattr(kernel, "forward", lambda *a: longest.append(a[3].tables[2:]) or forward(*a))
    out, lse = flash.forward(AttentionCall(*tensors, layout, rule, sinks))
    dense = flash.forward(AttentionCall(*(x[index] for x in tensors), repeated, rule, sinks))
    assert torch.equal(out[index], dense[0]) and torch.equal(lse[:, index], dense[1])
    assert len(longest) == 2 and longest[0] == longest[1]  # what vendors choose their kernels by


def test_a_cascade_has_other_bits(monkeypatch):
    """So the test above can fail: what parity="bitwise" must not take."""
    install("fa2", monkeypatch)
    force(monkeypatch, "cascade")
    layout = LAYOUTS["many"]
    tensors, _, rule, sinks, _ = inputs(layout, dtype=torch.float32)
    repeated, index = layout.repeated()
    out, _ = flash.forward(AttentionCall(*tensors, layout, rule, sinks))
    dense = flash.forward(AttentionCall(*(x[index] for x in tensors), repeated, rule, sinks))
    assert not torch.equal(out[index], dense.out)


def test_strided_and_expanded(kernel, monkeypatch):
    """Views of transformers, views whose rows start anywhere, gradients of a sum and of a mean over rows."""
    layout = LAYOUTS["forest 0"]
    (q, k, v), _, rule, sinks, grad = inputs(layout)
    want = both(reference, (q, k, v), layout, rule, sinks, grad)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    odd = [torch.cat([x, x[..., :1]], 2)[..., : x.shape[2]] for x in (q, k, v)]
    for way in ("gather", "cascade"):
        force(monkeypatch, way)
        for tensors in (by_head, odd):
            assert error(both(flash, tensors, layout, rule, sinks, grad), want) <= 1e-11
        for expanded in (grad[:1, :1, :1].expand_as(grad), grad[:1].expand_as(grad)):
            got = both(flash, (q, k, v), layout, rule, sinks, expanded)
            assert error(got, both(reference, (q, k, v), layout, rule, sinks, expanded)) <= 1e-11


def test_no_rows(kernel):
    out, lse, *grads = both(flash, *inputs(groups()))
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0) and [len(x) for x in grads] == [0, 0, 0]


@pytest.mark.parametrize("name", ["ragged", "tree"])
def test_the_public_op(kernel, name, monkeypatch):
    """As on a GPU, but for the device: autograd, sinks, a module's transposed views."""
    monkeypatch.setattr(native, "_path", lambda q: flash)
    (q, k, v), layout, rule, _, grad = inputs(LAYOUTS[name])
    results = []
    for backend in ("native", "reference"):
        leaves = [x.transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
        leaves.append(torch.linspace(-1, 2, 4, dtype=torch.float64, requires_grad=True))
        with rlkernel.use_backend(backend):
            views = [x.transpose(0, 1) for x in leaves[:3]]
            out = rlkernel.prefix_shared_attention(*views, layout, scale=rule.scale, sinks=leaves[3])
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert vendors.CALLS and error(*results) <= 1e-11


@pytest.fixture
def without_the_extension(monkeypatch):
    """As on an NVIDIA GPU whose compiled kernels were not built, but for the device."""
    monkeypatch.setattr(driver, "device_reasons", lambda q: [])
    monkeypatch.setattr(native, "kernels_for", lambda device: "rlkernel._C cannot be loaded")


@needs_triton
@pytest.mark.parametrize("vendor, name", [("fa2", "ragged"), ("aten", "tree")])
@pytest.mark.usefixtures("without_the_extension")
def test_the_public_op_without_the_extension(vendor, name, monkeypatch):
    """Nothing is asked for by name: it runs over the vendor's kernels, and so it does without gradients."""
    install(vendor, monkeypatch)
    tensors, layout, rule, sinks, grad = inputs(LAYOUTS[name], dtype=torch.float32, sinks=True)
    want = both(reference, *in_fp64(tensors, layout, rule, sinks, grad))
    leaves, results = [x.clone().requires_grad_() for x in tensors], []
    for needs_grad in (True, False):
        vendors.CALLS.clear()
        with torch.set_grad_enabled(needs_grad):
            options = {"scale": rule.scale, "sinks": sinks, "return_lse": True}
            results.append(rlkernel.prefix_shared_attention(*leaves, layout, **options))
        assert rlkernel.last_backend("prefix_shared_attention") == "triton" and vendors.CALLS
    for a, b in zip(*results, strict=True):
        assert_equal("a pass without gradients", a.detach(), b)
    assert vendors.CALLS.count("backward") == 0
    out, lse = results[0]
    out.backward(grad)
    assert vendors.CALLS.count("backward") > 0
    assert error([out.detach(), lse.detach(), *(x.grad for x in leaves)], want) <= 1e-5


@needs_triton
def test_the_path_is_told(monkeypatch):
    """By explain: whose kernels are taken, and why not others or not the vendors' at all."""
    install("aten", monkeypatch)
    layout = LAYOUTS["group"]
    (q, k, v), *_ = inputs(layout, dtype=torch.float32)

    def path(backend="triton", **options):
        found = rlkernel.explain("prefix_shared_attention", q, k, v, layout, **options)
        assert found["triton"] == [] and set(found.paths) <= {"native", "triton"}
        return found.paths[backend]

    own = "Triton's own kernels: "
    assert path() == f"{own}q must be on an NVIDIA GPU, got cpu"
    assert path("native") == "torch's flash kernels"
    assert path("native", softcap=3.0).startswith("products over tiles of rows")
    with monkeypatch.context() as patch:
        patch.setattr(driver, "device_reasons", lambda q: [])
        assert path() == f"{own}the vendors' kernels are native's, which can run this"
        patch.setattr(native, "kernels_for", lambda device: "rlkernel._C cannot be loaded")
        assert path() == "torch's flash attention, with Triton's kernels around it"
        assert path(softcap=3.0) == f"{own}torch's flash attention: it has no softcap"
        patch.setattr(varlen, "KERNELS", (varlen.FlashAttention3(), varlen.Aten()))
        patch.setattr(varlen, "library", lambda name: vendors.MODULES[name] if name == "torch" else "absent")
        assert path() == "torch's flash attention (FlashAttention 3: absent), with Triton's kernels around it"
        patch.setattr(varlen, "DTYPES", (torch.float16, torch.bfloat16))
        assert "q must be float16 or bfloat16, got float32" in path()
    assert dispatch.reasons("logprob", q[0], torch.zeros(4, dtype=torch.int64)).paths == {}


def worst(layout, monkeypatch, way="cascade"):
    force(monkeypatch, way)
    case = inputs(layout)
    found = error(both(flash, *case), both(reference, *case))
    return math.inf if math.isnan(found) else found


@pytest.mark.parametrize(
    "name, mutate",
    [
        ("group", lambda calls: ()),  # no call on segments above
        ("tree", lambda calls: calls[1:]),  # one of them left out
        # what a vendor says about rows without keys, and about keys without rows, read
        ("ragged", lambda calls: tuple(c._replace(asked=(c.rows,)) for c in calls)),
        ("ragged", lambda calls: tuple(c._replace(answered=(c.keys,)) for c in calls)),
    ],
)
def test_mutants_of_the_calls_are_found(kernel, name, mutate, monkeypatch):
    layout, real = LAYOUTS[name], driver.cascade
    assert worst(layout, monkeypatch) <= 1e-11
    monkeypatch.setattr(driver, "cascade", lambda *a: real(*a)._replace(calls=mutate(real(*a).calls)))
    assert worst(layout, monkeypatch) > 1e-3


def test_mutants_of_the_sums_are_found(kernel, monkeypatch):
    layout = LAYOUTS["tree"]
    merge, _, reduce = flash.AROUND
    replace(monkeypatch, attention_merge=lambda *a: None)
    assert worst(layout, monkeypatch) > 1e-3
    replace(monkeypatch, attention_merge=lambda o, l, p, pl, *s: merge(o, l, p, pl + 0.1, *s))
    assert worst(layout, monkeypatch) > 1e-3
    assert worst(layout, monkeypatch, "gather") <= 1e-11
    replace(monkeypatch, segment_reduce=lambda k, v, i, o: reduce(k, v, i.flip(0), o))
    assert worst(layout, monkeypatch, "gather") > 1e-3


def test_the_parts_own_lse_is_wrong_in_backward(kernel, monkeypatch):
    """What autograd through a merge comes to: vendors' backward takes no gradient of a lse."""

    class Naive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sequences):
            out, lse = kernel.forward(q, k, v, sequences)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.sequences = sequences
            return out, lse

        @staticmethod
        def backward(ctx, grad, _):
            saved = varlen.Saved(*ctx.saved_tensors)
            return *kernel.backward(grad.contiguous(), saved, ctx.sequences), None

    layout = LAYOUTS["group"]
    tensors, _, rule, sinks, grad = inputs(layout)
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    tables, n = cascade(layout), layout.n_prefix
    own, own_lse = Naive.apply(q, k, v, driver._own(tables, rule))
    part, part_lse = Naive.apply(q[n:], k[:n], v[:n], driver._above(tables, tables.calls[0], rule))
    lse = torch.logaddexp(own_lse[:, n:], part_lse)
    merged = [torch.exp(x - lse).T[..., None] * o for x, o in ((own_lse[:, n:], own[n:]), (part_lse, part))]
    out = torch.cat([own[:n], merged[0] + merged[1]])
    want = both(reference, tensors, layout, rule, sinks, grad)
    assert error([out.detach()], want[:1]) <= 1e-11
    out.backward(grad)
    assert error([q.grad, k.grad], want[2:4]) > 1e-2


BIG = {
    "groups": groups((300, 40, 70, 1), (5, 130), (0, 64), (64,), (129, 3, 3)),
    "tree": PrefixLayout.of([100, 30, 70, 20, 33, 5, 90], [-1, 0, 0, 1, 1, 2, 3], [False] * 3 + [True] * 4)[
        0
    ],
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the vendors' own kernels need a GPU")
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 50}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", BIG)
@pytest.mark.parametrize("way", ["gather", "cascade"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("poison")
def test_the_vendors_own_kernels(name, way, layout, head_dim, options, monkeypatch):
    """bf16 against fp64, each way: errors of a few units, and one set of bits: again, with Triton's kernels
    around them as with the compiled ones, and bitwise those of dense."""
    if way == "cascade" and "window" in options:
        pytest.skip("a cascade has no window")
    adapter = KERNELS[name]()
    case = inputs(BIG[layout], head_dim=head_dim, dtype=torch.bfloat16, **options)
    tensors, layout, rule, sinks, grad = case
    if reasons := adapter.reasons(tensors[0].cuda(), rule.softcap, True):
        pytest.skip("; ".join(reasons))
    monkeypatch.setattr(varlen, "KERNELS", (adapter,))
    force(monkeypatch, way)
    on_gpu = [x.cuda() for x in tensors], layout, rule, None if sinks is None else sinks.cuda(), grad.cuda()
    built = not isinstance(compiled.kernels_for("cuda"), str)
    passes = [impl for impl in PASSES.values() if built or impl is not flash]
    got, *others = [both(impl, *on_gpu) for impl in passes * 2]
    for other in others:
        for field, a, b in zip(NAMES, other, got, strict=True):
            assert_equal(field, a, b)
    wide_sinks = None if sinks is None else sinks.double()
    truth = both(reference, [x.double() for x in tensors], layout, rule, wide_sinks, grad.double())
    plain = both(reference, *case)  # rounded once
    for field, g, p, t in zip(NAMES, got, plain, truth, strict=True):
        rounded = 1e-3 if field == "lse" else 2 * torch.finfo(torch.bfloat16).eps
        assert error([g.cpu()], [t]) <= 2 * error([p], [t]) + rounded * float(t.abs().max()), field
    if way == "gather":
        bitwise = rule._replace(bitwise=True)
        repeated, index = layout.repeated()
        index = index.cuda()
        out, lse = passes[0].forward(AttentionCall(*on_gpu[0], layout, bitwise, on_gpu[3]))
        copies = (x[index] for x in on_gpu[0])
        dense = passes[0].forward(AttentionCall(*copies, repeated, bitwise, on_gpu[3]))
        assert torch.equal(out[index], dense[0]) and torch.equal(lse[:, index], dense[1])
