"""The short way of a public call: it gives what the long one gives, to the bit, and is taken only where
nothing but the kernel is left to be decided.  Both are asked for each call: a way that is lost is seen.
"""

import functools
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import rlkernel
from rlkernel import dispatch, native
from rlkernel.calls.matmul import MatmulCall
from rlkernel.runtime import debug

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("layer_norm", "rms_norm", "swiglu", "logprob")


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def plain(op, dtype=torch.float32, shape=(3, 37)):
    """The tensors of a call that the short way takes."""
    x = drawn(*shape, dtype=dtype)
    if op == "layer_norm":
        return x, drawn(shape[-1], dtype=dtype), drawn(shape[-1], dtype=dtype, seed=1)
    if op == "rms_norm":
        return x, drawn(shape[-1], dtype=dtype)
    if op == "swiglu":
        return x, drawn(*shape, dtype=dtype, seed=1)
    return x, torch.arange(x[..., 0].numel()).view(shape[:-1]) % shape[-1]


way = functools.cache(dispatch.direct)


def short(op, *args, **kwargs):
    """What the short way makes of a call, None where it declines."""
    return way(op)(args, kwargs)


def long(op, *args, **kwargs):
    return getattr(rlkernel, op).__wrapped__(*args, **kwargs)


def parts(found):
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


def are_equal(a, b):
    return type(a) is type(b) and all(
        torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous()
        for x, y in zip(parts(a), parts(b), strict=True)
    )


@pytest.fixture(autouse=True)
def _chosen_before():
    """The first call of an op chooses its backend, the long way."""
    for op in OPS:
        long(op, *plain(op))
        assert rlkernel.last_backend(op) == "native"


TAKEN = {
    "layer_norm": [{}, {"eps": 0.25}, {"eps": 0.0}],
    "rms_norm": [{}, {"eps": 0.5, "rounding": "after_weight"}, {"weight_offset": 1.0, "residual": None}],
    "swiglu": [{}, {"activation": "gelu_tanh"}, {"activation": "gelu", "rounding": "after_product"}],
    "logprob": [{}, {"temperature": 0.7}, {"return_entropy": True, "ignore_index": 0, "group": None}],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_it_has_the_bits_of_the_long_way(op, dtype):
    for shape in ((37,), (1, 2), (3, 37), (2, 3, 130), (2, 1, 3, 64), (90, 300)):
        for options in TAKEN[op]:
            call = plain(op, dtype, shape)
            assert are_equal(short(op, *call, **options), long(op, *call, **options)), (shape, options)
    wide = drawn(4, 6, 80, dtype=dtype)
    for view in (wide[..., :40], wide[:, :-1], wide[:, 2], wide[:1].expand(3, 6, 80), wide[2:, ::2, 3:9]):
        _, *rest = plain(op, dtype, view.shape)
        assert are_equal(short(op, view, *rest), long(op, view, *rest)), view.stride()


@pytest.mark.parametrize("op", OPS)
def test_arguments_are_taken_by_place_and_by_name(op):
    names = {"layer_norm": ("x", "weight", "bias"), "rms_norm": ("x", "weight"), "swiglu": ("gate", "up")}
    call = plain(op)
    named = dict(zip(names.get(op, ("logits", "target_ids")), call, strict=True))
    wanted = long(op, *call)
    assert are_equal(short(op, **dict(reversed(named.items()))), wanted)
    assert are_equal(short(op, call[0], **dict([*named.items()][1:])), wanted)
    assert short(op, *call, **named) is None  # twice
    assert short(op, *call, unknown=1) is None
    assert short(op) is None
    with pytest.raises(TypeError, match=f"{op}.. got .* 'unknown'"):
        getattr(rlkernel, op)(*call, unknown=1)


def test_what_is_absent():
    x, weight, bias = plain("layer_norm")
    for rest in ((), (weight,), (None, bias), (weight.double().float(), None)):
        assert are_equal(short("layer_norm", x, *rest), long("layer_norm", x, *rest))
    assert are_equal(short("rms_norm", x), long("rms_norm", x))
    narrow = x.bfloat16()  # beside weights of fp32
    assert are_equal(short("layer_norm", narrow, weight, bias), long("layer_norm", narrow, weight, bias))


@pytest.mark.parametrize("op", OPS)
def test_a_parameter_is_plain(op):
    first, *rest = plain(op)
    with torch.no_grad():
        assert are_equal(short(op, torch.nn.Parameter(first), *rest), long(op, first, *rest))
    with torch.inference_mode():
        found = short(op, first, *rest)
    assert all(x.is_inference() for x in parts(found)) and are_equal(found, long(op, first, *rest))


class Marked(torch.Tensor):
    pass


def _dual(x):
    return forward_ad.make_dual(x, torch.ones_like(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.int32),
        lambda x: x.to("meta"),
        lambda x: x.as_subclass(Marked),
        lambda x: FakeTensorMode().from_tensor(x),
        lambda x: x.to_sparse(),
        lambda x: x.tolist(),
        lambda x: x[:0],
        lambda x: x.mT.contiguous().mT,
        lambda x: None,
    ],
    ids=["fp64", "int", "meta", "subclass", "fake", "sparse", "list", "empty", "columns", "none"],
)
@pytest.mark.parametrize("op", OPS)
def test_other_tensors_are_declined(op, change):
    first, *rest = plain(op)
    assert short(op, first, *rest) is not None
    assert short(op, change(first.clone()), *rest) is None


@pytest.mark.parametrize("op", OPS)
def test_where_a_tangent_or_a_transform_follows_it_declines(op):
    first, *rest = plain(op)
    with forward_ad.dual_level():
        assert short(op, first, *rest) is None and short(op, _dual(first), *rest) is None
    seen = []

    def looked(x):
        seen.append(short(op, x, *rest))
        return x.sum()

    torch.func.grad(looked)(first)
    torch.func.jvp(looked, (first,), (first,))
    torch.func.vmap(looked)(first[None])
    assert seen == [None] * 3


@pytest.mark.parametrize("op", OPS)
def test_where_torch_is_recorded_it_declines(op):
    """A record of torch's operations has not what a kernel writes, but that memory was taken for it."""
    first, *rest = plain(op)
    seen = []

    def looked(x):
        seen.append(short(op, x, *rest))
        return x + 1

    for before in (False, True):
        make_fx(looked, pre_dispatch=before)(first)
    torch.jit.trace(looked, first, check_trace=False)
    assert seen == [None] * 3 and short(op, first, *rest) is not None


@pytest.mark.parametrize("op", OPS)
def test_negated_values_are_declined(op):
    """The imaginary part of conjugated numbers has its values, but for their sign, in every other place."""
    first, *rest = plain(op, shape=(2, 1))
    part = torch.complex(first, -first).conj().imag
    assert part.is_neg() and torch.equal(part, first)
    assert short(op, part, *rest) is None and short(op, first, *rest) is not None
    assert are_equal(getattr(rlkernel, op)(part, *rest), long(op, first, *rest))


@pytest.mark.parametrize("op", OPS)
def test_where_a_setting_is_on_it_declines(op):
    call = plain(op)
    with rlkernel.use_backend("reference"):
        assert short(op, *call) is None
    with rlkernel.use_backend("native"), rlkernel.use_backend("auto"):
        assert short(op, *call) is not None
    with native.emulated(native.extension().cpu):
        assert short(op, *call) is None
    assert rlkernel.explain(op, *call)["native"] == []
    with dispatch.asking() as answer:
        getattr(rlkernel, op)(*call)
    assert answer
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert short(op, *call) is None
    assert short(op, *call) is not None


@pytest.mark.parametrize("op", OPS)
def test_what_ran_is_what_is_told(op):
    call = plain(op)
    with rlkernel.use_backend("reference"):
        getattr(rlkernel, op)(*call)
    assert rlkernel.last_backend(op) == "reference"
    assert short(op, *call) is None
    getattr(rlkernel, op)(*call)
    assert rlkernel.last_backend(op) == "native" and short(op, *call) is not None


def test_debug_checks_and_ranks_take_the_long_way(monkeypatch):
    logits, ids = plain("logprob")
    with debug.checks():
        assert short("logprob", logits, ids) is None
        with debug.checks(False):
            assert short("logprob", logits, ids) is not None
    for value, debugs in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("RLKERNEL_DEBUG", value)
        assert (short("logprob", logits, ids) is None) == debugs == debug.enabled()
    with rlkernel.batch_invariant():
        assert short("logprob", logits, ids) is not None
        with rlkernel.batch_invariant(level="tensor_parallel"):
            assert short("logprob", logits, ids) is None


BAD = {
    "layer_norm": [
        (lambda x, w, b: (x, w[:-1], b), {}, "weight must have the shape"),
        (lambda x, w, b: (x, w, b[None]), {}, "bias must have the shape"),
        (lambda x, w, b: (x, w.long(), b), {}, "weight must be float16"),
        (lambda x, w, b: (x, w, b), {"eps": -1.0}, "eps must be"),
        (lambda x, w, b: (x, w, b), {"eps": float("nan")}, "eps must be"),
        (lambda x, w, b: (x[0, 0], w, b), {}, "x must be"),
        (lambda x, w, b: (x, 3.0, b), {}, "weight must be a tensor or None"),
    ],
    "rms_norm": [
        (lambda x, w: (x, w[:, None]), {}, "weight must have the shape"),
        (lambda x, w: (x, w), {"rounding": "never"}, "rounding must be one of"),
        (lambda x, w: (x, w), {"weight_offset": float("inf")}, "weight_offset must be"),
        (lambda x, w: (x, w), {"residual": 1}, "residual must be a tensor or None"),
    ],
    "swiglu": [
        (lambda g, u: (g, u[:-1]), {}, "up must have gate's shape"),
        (lambda g, u: (g, u.mT), {}, "up must have gate's shape"),
        (lambda g, u: (g, u.half()), {}, "up must have gate's dtype"),
        (lambda g, u: (g, u), {"activation": "relu"}, "activation must be one of"),
        (lambda g, u: (g, u), {"rounding": None}, "rounding must be one of"),
    ],
    "logprob": [
        (lambda x, i: (x, i[:-1]), {}, "target_ids must have the shape"),
        (lambda x, i: (x, i[:, None]), {}, "target_ids must have the shape"),
        (lambda x, i: (x, i.float()), {}, "target_ids must be integers"),
        (lambda x, i: (x, i + 35), {}, r"target_ids\[2\] = 37 is outside"),
        (lambda x, i: (x, i - 1), {}, r"target_ids\[0\] = -1 is outside"),
        (lambda x, i: (x, i), {"temperature": 0.0}, "temperature must be > 0"),
        (lambda x, i: (x, i), {"temperature": 1e39}, "temperature must be > 0"),
        (lambda x, i: (x, i), {"ignore_index": 2**63}, "ignore_index must be an integer of 64 bits"),
        (lambda x, i: (x, i), {"support_ids": torch.tensor([0])}, "support_offsets must be given"),
        (lambda x, i: (x, i), {"vocab_start": 3}, "vocab_start must be None"),
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_what_is_off_is_declined_and_worded_by_the_long_way(op):
    for change, options, message in BAD[op]:
        call = change(*plain(op))
        assert short(op, *call, **options) is None, message
        with pytest.raises(ValueError, match=f"^{message}"):
            getattr(rlkernel, op)(*call, **options)


def test_values_that_are_as_good_take_the_long_way():
    x, weight, bias = plain("layer_norm")
    for call in ((x, weight.double(), bias), (x, torch.stack([weight] * 2, 1)[:, 0], bias)):
        assert short("layer_norm", *call) is None
        assert torch.equal(rlkernel.layer_norm(*call), rlkernel.layer_norm(x, weight, bias))
    logits, ids = plain("logprob")
    assert short("logprob", logits, ids.int()) is None
    assert short("logprob", logits, ids, temperature=torch.ones(3)) is None
    many = drawn(2, 3, 4, 5, 8)[:, :2, :, :3, :5]
    assert short("rms_norm", many) is None
    assert torch.equal(rlkernel.rms_norm(many), rlkernel.rms_norm(many.contiguous()))


def gradients(function, call, upstream, wanted):
    """Of the tensors whose places are wanted."""
    leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(call)]
    out = function(*leaves)
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], upstream)
    return out.grad_fn.name(), out.detach(), *found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "swiglu"])
def test_with_gradients_it_has_the_bits_of_the_long_way(op, dtype, monkeypatch):
    """Forward, and the backend's backward, whose short way is taken away for the comparison."""
    seen = []
    of_backend = native.short_way(f"{op}_backward")
    module = dispatch.able(op, ("native",), drawn(1, dtype=dtype))[1]

    def watched(args, kwargs):
        seen.append(of_backend(args, kwargs))
        return seen[-1]

    for shape in ((37,), (1, 2), (3, 37), (2, 3, 130), (90, 300)):
        for options in TAKEN[op]:
            call = plain(op, dtype, shape)
            assert short(op, *[x.clone().requires_grad_() for x in call], **options)[0] is module
            for wanted in ((0,), (1,), tuple(range(len(call)))):
                for upstream in (drawn(*shape, dtype=dtype, seed=3), drawn(1, dtype=dtype).expand(shape)):
                    with monkeypatch.context() as patch:
                        patch.setattr(module, "short_way", lambda name: watched)
                        got = gradients(
                            lambda *x, o=options: getattr(rlkernel, op)(*x, **o), call, upstream, wanted
                        )
                        patch.setattr(module, "short_way", lambda name: lambda args, kwargs: None)
                        want = gradients(lambda *x, o=options: long(op, *x, **o), call, upstream, wanted)
                    assert got[0] == want[0] and are_equal(got[1:], want[1:]), (shape, options, wanted)
                    assert seen.pop() is not None or not upstream.is_contiguous()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "swiglu"])
def test_a_graph_of_the_short_way_is_one_of_the_long(op):
    call = [x.requires_grad_() for x in plain(op)]
    out = getattr(rlkernel, op)(*call)
    (first,) = torch.autograd.grad(out.sum(), call[0], create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{op} has no second derivative"):
        torch.autograd.grad(first.sum(), call[0])
    out = getattr(rlkernel, op)(*call)
    with torch.no_grad():
        call[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x) or len(packed) - 1, packed.__getitem__
    ):
        getattr(rlkernel, op)(*call).sum().backward()
    assert packed and call[0].grad is not None
    with torch.no_grad():
        assert getattr(rlkernel, op)(*call).grad_fn is None
    frozen = [x.detach() for x in call]
    assert getattr(rlkernel, op)(*frozen).grad_fn is None


def test_of_logits_with_gradients_the_long_way_is_taken():
    logits, ids = plain("logprob")
    assert short("logprob", logits.requires_grad_(), ids) is None


def test_results_are_their_own():
    """Nothing is shared between calls, nor with what was given."""
    call = plain("layer_norm")
    a, b = (short("layer_norm", *call) for _ in range(2))
    assert len({x.untyped_storage().data_ptr() for x in (*call, a, b)}) == 5
    assert a.resize_(200).shape == (200,) and a.grad_fn is None and not a.requires_grad


def test_one_that_is_compiled_sees_no_short_way():
    x, weight, bias = plain("layer_norm")
    whole = torch.compile(lambda *call: rlkernel.layer_norm(*call) * 2, backend="eager", fullgraph=True)
    assert torch.equal(whole(x, weight, bias), rlkernel.layer_norm(x, weight, bias) * 2)


def test_no_reference_is_lost():
    call = plain("logprob")
    objects = [*call, torch.empty_like, rlkernel.LogprobOutput]
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(100):
        short("logprob", *call, return_entropy=True)
        short("logprob", *call, temperature=0.0)
        short("logprob", call[0], call[0])
    assert [sys.getrefcount(x) for x in objects] == before


def product_of(module, a, b, bias=None, dtype=None):
    batched = [x if x.dim() == 3 else x[None] for x in (a, b)]
    found = module.forward(MatmulCall(*batched, bias, dtype or a.dtype)).out
    return found if a.dim() == 3 else found[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_below_autograd_have_the_bits_of_the_op(dtype):
    module = dispatch.able("matmul", ("native",), drawn(1, dtype=dtype))[1]
    for m, k, n in ((1, 1, 1), (3, 7, 5), (16, 64, 33), (5, 1, 4), (1, 300, 9)):
        for batch in ((), (1,), (4,)):
            a, columns = drawn(*batch, m, k, dtype=dtype), drawn(*batch, n, k, dtype=dtype, seed=1)
            bias = drawn(n, dtype=dtype)
            for b in (columns.mT, columns.mT.contiguous()):
                for added in (None, bias):
                    for out_dtype in (None, torch.float32):
                        got = short("product", a, b, added, out_dtype is not None)
                        assert are_equal(got, product_of(module, a, b, added, out_dtype))


def test_a_product_is_written_where_it_is_asked_for():
    a, b, out = drawn(3, 40), drawn(40, 5), torch.full((4, 3, 5), torch.nan)
    made = short("product", a, b, None, False, 2, out[1])
    assert made.data_ptr() == out[1].data_ptr() and are_equal(made, product_of(way_of("matmul"), a, b))
    assert out[[0, 2, 3]].isnan().all()
    for wrong in (out[1, :2], out[:3, :, 0], out[1].bfloat16(), out[1].double(), drawn(5, 3).t()):
        assert short("product", a, b, None, False, 2, wrong) is None
    assert short("product", a, b, None, True, 2, out[1]) is None


def way_of(op):
    return dispatch.able(op, ("native",), drawn(1))[1]


def test_products_that_do_not_fit_are_declined():
    a, b, bias = drawn(3, 4), drawn(4, 5), drawn(5)
    assert short("product", a.requires_grad_(), torch.nn.Parameter(b), bias) is not None
    a = a.detach()
    for call in (
        (a, b.mT),
        (a, b.bfloat16()),
        (a, b[None]),
        (a[None], b.expand(2, 4, 5)),
        (a[0], b),
        (a.double(), b.double()),
        (a[:0], b),
        (a[:, :0], b[:0]),
        (a, b, bias[:4]),
        (a, b, bias[None]),
        (a, b, bias.double()),
        (a, b, None, False, 3),
        (a.as_subclass(Marked), b),
        (a.to("meta"), b.to("meta")),
    ):
        assert short("product", *call) is None
    with native.emulated(native.extension().cpu):
        assert short("product", a, b) is None
    with rlkernel.batch_invariant() as mode, rlkernel.use_backend("reference"):
        assert torch.equal(torch.mm(a, b), short("product", a, b))
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            torch.mm(a, a)
    assert mode.report()[0] == ("mm", "native", 1)
