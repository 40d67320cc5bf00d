"""linear_logprob over the support of a filtered rollout, against fp64 and against logprob."""

import pytest
import torch
from accuracy import check
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from logprob_cases import upstream_like
from support_cases import masked, supports

import rlkernel
from rlkernel.calls.linear_logprob import LinearLogprobCall
from rlkernel.drivers import linear_logprob_support as support_driver
from rlkernel.ops.linear_logprob import op
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.runtime import gpu, workspace

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
pytestmark = pytest.mark.usefixtures("poison")


def run(backend, hidden, weight, target_ids, upstream=None, bias=None, **options):
    """Outputs, and the gradients of hidden, weight and bias."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    with running(backend):
        out = rlkernel.linear_logprob(*leaves[:2], target_ids, bias=leaves[2], **options)
        return out, None if upstream is None else gradients(out, leaves, upstream)


def gradients(out, leaves, upstream):
    used = [(o, g.to(o.dtype)) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
    outputs, grads = zip(*used, strict=True)
    return torch.autograd.grad(outputs, [x for x in leaves if x is not None], grads)


def by_torch(hidden, weight, target_ids, upstream, bias=None, logit_scale=1.0, softcap=None, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    u = leaves[0].to(wide) @ leaves[1].to(wide).mT
    u = (u if bias is None else u + leaves[2].to(wide)) * logit_scale
    out = masked(u if softcap is None else softcap * torch.tanh(u / softcap), target_ids, **options)
    return out, gradients(out, leaves, upstream)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def check_against_fp64(backend, upstream, **inputs):
    truth, true_grads = by_torch(upstream=upstream, **{k: double(v) for k, v in inputs.items()})
    torchs, torch_grads = by_torch(upstream=upstream, **inputs)
    ours, grads = run(backend, upstream=upstream, **inputs)
    for name, a, b, c in zip(ours._fields, ours, torchs, truth, strict=True):
        if a is not None:
            check(name, a, b, c, magnitude=3)
    for name, a, b, c in zip(("hidden", "weight", "bias"), grads, torch_grads, true_grads, strict=False):
        check(f"gradient of {name}", a, b, c)


HEADS = {
    "plain": {},
    "bias and temperature": {"bias": torch.linspace(-1, 1, 700), "temperature": 0.7},
    "everything": {
        "bias": torch.linspace(-1, 1, 700),
        "temperature": torch.linspace(0.5, 2, 12),
        "logit_scale": 0.5,
        "softcap": 4.0,
    },
}


def on(device, head):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in HEADS[head].items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, head):
    inputs = make_inputs(12, 48, 700, dtype=dtype, device=device, ignored=0.15)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 700, (0, 1, 5, 200))
    options = on(device, head)
    if dtype != torch.float32 and "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, upstream, **inputs, **support, **options, return_entropy=True)


@pytest.mark.parametrize("sizes", [(0,), (3, 17)], ids=["all whole", "all filtered"])
@ON_EVERY_BACKEND
def test_rows_of_one_kind(backend, device, sizes):
    inputs = make_inputs(6, 16, 90, device=device)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 90, sizes)
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, upstream, **inputs, **support, return_entropy=True)
    if sizes == (0,):
        want, want_grads = run(backend, **inputs, upstream=upstream, return_entropy=True)
        got, grads = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
        for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
            assert_equal("whole rows", a, b)


@ON_EVERY_BACKEND
def test_small_chunks_change_nothing_but_the_memory(backend, device):
    """Supports of one row, and uses of one token, that reach over several chunks."""
    inputs = make_inputs(9, 2048, 60, device=device, dtype=torch.bfloat16, ignored=0)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 60, (60, 0, 45))
    upstream = upstream_like(inputs["target_ids"])
    with workspace.limited(2**20):
        assert support["support_ids"].numel() > 4 * (2**20 // (12 * 2048))
        check_against_fp64(backend, upstream, **inputs, **support, return_entropy=True)


@ON_EVERY_BACKEND
def test_only_what_is_asked_for_gets_a_gradient(backend, device):
    inputs = make_inputs(6, 32, 80, device=device)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 80, (7, 0))
    hidden, weight, target_ids = inputs.values()
    upstream = [upstream_like(target_ids)[0], None, None]
    _, (want_hidden, want_weight) = run(backend, **inputs, **support, upstream=upstream)
    for trained in (0, 1):
        leaves = [hidden.clone(), weight.clone()]
        leaves[trained].requires_grad_()
        with running(backend):
            out = rlkernel.linear_logprob(*leaves, target_ids, **support)
            (grad,) = torch.autograd.grad(out.logprobs, leaves[trained], upstream[0])
        torch.testing.assert_close(grad, (want_hidden, want_weight)[trained], rtol=1e-5, atol=1e-6)


@ON_EVERY_BACKEND
def test_rows_that_do_not_count(backend, device):
    """NaN in ignored rows reaches no gradient; no rows give a zero that is connected to the graph."""
    inputs = make_inputs(4, 16, 50, device=device, ignored=0)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 50, (6, 6, 0))
    inputs["target_ids"][1] = -100
    if backend != "reference":  # which multiplies all rows
        inputs["hidden"][1] = torch.nan
    upstream = upstream_like(inputs["target_ids"])
    out, grads = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    assert all(x.isfinite().all() for x in (*out, *grads))
    assert all((x[1] == 0).all() for x in (*out, grads[0]))
    none = {"support_ids": support["support_ids"][:0], "support_offsets": support["support_offsets"][:1] * 0}
    empty = {**inputs, "hidden": inputs["hidden"][:0], "target_ids": inputs["target_ids"][:0]}
    _, grads = run(backend, **empty, **none, upstream=[g[:0] for g in upstream], return_entropy=True)
    assert (grads[1] == 0).all()


@pytest.mark.parametrize("captured", [False, True])
def test_room_behind_the_ids_costs_nothing_but_under_capture(captured, monkeypatch):
    """``sample`` returns its ids in a buffer; what lies behind them changes no bit."""
    inputs = make_inputs(6, 32, 80)
    support = supports(inputs["target_ids"], 80, (7, 0))
    upstream = upstream_like(inputs["target_ids"])
    # before both calls: under capture the head is multiplied by all rows, and a library's product of more
    # rows may have other bits
    monkeypatch.setattr(gpu, "capturing", lambda device: captured)
    want, want_grads = run("auto", **inputs, **support, upstream=upstream, return_entropy=True)
    rows = []
    gather = support_driver._gather
    monkeypatch.setattr(support_driver, "_gather", lambda *a: rows.append(len(a[1])) or gather(*a))
    room = support["support_ids"].new_full((1000,), -1)
    support["support_ids"] = torch.cat([support["support_ids"], room])
    got, grads = run("auto", **inputs, **support, upstream=upstream, return_entropy=True)
    for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
        assert_equal("with room", a, b)
    assert (sum(rows) > 1000) == captured


@ON_EVERY_BACKEND
def test_room_without_a_support(backend, device):
    """As ``sample`` returns it where it filtered no row."""
    inputs = make_inputs(5, 16, 50, device=device)
    skip_unless_able(backend, "linear_logprob", inputs["hidden"], inputs["weight"])
    rows = inputs["target_ids"].shape[0]
    support = {"support_ids": torch.full((7,), -1, dtype=torch.int32, device=device)}
    support["support_offsets"] = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    upstream = upstream_like(inputs["target_ids"])
    got, grads = run(backend, upstream=upstream, **inputs, **support)
    want, wanted = run(backend, upstream=upstream, **inputs)
    names = (*want._fields, "hidden", "weight")
    for name, a, b in zip(names, (*got, *grads), (*want, *wanted), strict=True):
        if a is not None:
            assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_same_bits_every_time_and_without_gradients(backend, device):
    inputs = make_inputs(8, 64, 300, device=device, dtype=torch.bfloat16)
    skip_unless_able(backend, "linear_logprob", *inputs.values())
    support = supports(inputs["target_ids"], 300, (20, 0, 150))
    upstream = upstream_like(inputs["target_ids"])
    first, grads = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    again, grads_again = run(backend, **inputs, **support, upstream=upstream, return_entropy=True)
    for a, b in zip((*first, *grads), (*again, *grads_again), strict=True):
        assert_equal("again", b, a)
    with running(backend), torch.no_grad():
        scored = rlkernel.linear_logprob(**inputs, **support, return_entropy=True)
    for a, b in zip(first, scored, strict=True):
        assert_equal("without gradients", b, a)


def test_rollout_and_trainer_without_logits():
    """A rollout from bf16 logits, replayed from hidden states: half of the tokens are off without the
    support, none is with it."""
    inputs = make_inputs(200, 64, 500, dtype=torch.bfloat16, scale=2.5, ignored=0)
    hidden, weight, _ = inputs.values()
    rows = torch.arange(200)
    out = rlkernel.sample(
        (hidden.float() @ weight.float().T), top_p=0.8, seeds=rows, positions=rows, return_support=500
    )
    twin = {"support_ids": out.support_ids, "support_offsets": out.support_offsets}
    for support, most, least in ((twin, 0.0, 0.0), ({}, 1.0, 0.5)):
        got = rlkernel.linear_logprob(hidden, weight, out.token_ids, **support).logprobs
        ratio = (got - out.processed_logprobs).exp()
        far = ((ratio < 0.9) | (ratio > 1.1)).float().mean().item()
        assert least <= far <= most, f"{far:.1%} of the tokens outside [0.9, 1.1]"
    shifted = {**twin, "support_ids": (twin["support_ids"] + 1) % 500}
    wrong = rlkernel.linear_logprob(hidden, weight, out.token_ids, **shifted).logprobs
    assert ((wrong - out.processed_logprobs).abs() > 0.1).float().mean() > 0.5, "a support off by one is seen"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_in_order_as_a_gpu_takes_them(dtype):
    """Both ways of summing, over keys that reach across chunks; the sum is rounded once."""
    g = torch.Generator().manual_seed(0)
    keys = torch.tensor([0] * 3 + [2] * 40 + [3] + [7] * 25 + [9, 11])
    source, index = torch.randn(5, 4096, generator=g), torch.randint(0, 5, keys.shape, generator=g)
    grad = torch.randn(keys.shape, generator=g)
    grad[50] = 0
    source[4, 7] = torch.nan
    index[grad == 0] = 4
    index[(grad != 0) & (index == 4)] = 3
    want = torch.zeros(12, 4096, dtype=torch.float64).index_add_(
        0, keys, torch.where(grad[:, None] == 0, 0, grad[:, None].double() * source.double()[index])
    )
    for limit in (2**20, 2**26):
        with workspace.limited(limit):
            for ordered in (False, True):
                out = torch.zeros(12, 4096, dtype=dtype)
                support_driver.add_products(out, keys, grad, source, index, torch.float32, ordered)
                error = (out.double() - want).abs()
                assert (error <= torch.finfo(dtype).eps * want.abs() + 2e-5).all()
    with pytest.raises(AssertionError):
        out = torch.zeros(12, 4096, dtype=dtype)
        support_driver.add_products(out, keys, grad, source, (index + 1) % 4, torch.float32)
        assert ((out.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2e-5).all()


def test_gradcheck():
    inputs = make_inputs(4, 3, 9, dtype=torch.float64, ignored=0.3)
    support = supports(inputs["target_ids"], 9, (4, 0, 1))
    leaves = [inputs["hidden"], inputs["weight"], torch.rand(9).double()]
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda h, w, b: tuple(
                rlkernel.linear_logprob(
                    h, w, inputs["target_ids"], bias=b, temperature=0.7, softcap=3.0, logit_scale=0.6,
                    return_entropy=True, **support,
                )
            ),
            [x.requires_grad_() for x in leaves],
        )  # fmt: skip


def test_bad_support_is_named():
    inputs = make_inputs(2, 4, 5)
    with pytest.raises(ValueError, match=r"support_ids\[1\] = 5 is outside \[0, 5\)"):
        rlkernel.linear_logprob(
            **inputs, support_ids=torch.tensor([0, 5]), support_offsets=torch.tensor([0, 1, 2])
        )
    with pytest.raises(ValueError, match="support_offsets must be given together"):
        rlkernel.linear_logprob(**inputs, support_ids=torch.tensor([0, 1]))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_compiles_as_one_graph(frozen):
    inputs = make_inputs(5, 16, 40)
    support = supports(inputs["target_ids"], 40, (6, 0))
    upstream = upstream_like(inputs["target_ids"])
    hidden, weight, target_ids = inputs.values()

    def loss(h, w):
        out = rlkernel.linear_logprob(
            h * 2, w, target_ids, temperature=0.8, return_entropy=not frozen, **support
        )
        return sum((o * g).sum() for o, g in zip(out, upstream, strict=True) if o is not None)

    grads = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        fn(*leaves).backward()
        grads.append([x.grad for x in leaves if x.grad is not None])
    for a, b in zip(*grads, strict=True):
        assert_equal("grad", b, a)


def test_opcheck():
    inputs = make_inputs(5, 16, 40, ignored=0)
    support = supports(inputs["target_ids"], 40, (6, 0))
    hidden, weight, target_ids = inputs.values()
    call = LinearLogprobCall(
        hidden.requires_grad_(), weight.requires_grad_(), None, target_ids, 0.7, 1.0, None, -100,
        torch.float32, torch.float32, True, **support,
    )  # fmt: skip
    torch.library.opcheck(op.node, op.flat(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(17, 1, 120, 299), (0, 17)], ids=["all filtered", "half whole"])
def test_in_batch_invariant_it_has_the_bits_of_logprob_over_the_whole_head(dtype, sizes):
    """So a trainer that keeps no logits agrees with an engine that has them; without the mode it does not."""
    hidden, weight, target_ids = make_inputs(400, 203, 300, dtype=dtype, scale=3.0, ignored=0).values()
    support = supports(target_ids, 300, sizes)
    large = torch.arange(100).repeat(2)  # terms that cancel, so that sums in another order are far apart
    hidden[:, :200] = 64 * (large % 3 - 1)
    weight[:, 100:200] = -weight[:, :100]
    whole = support["support_offsets"].diff() == 0

    def differences():
        logits = torch.nn.functional.linear(hidden, weight)
        want, filtered = (rlkernel.logprob(logits, target_ids, temperature=0.7, **x) for x in ({}, support))
        options = {"temperature": 0.7, "logits_dtype": dtype}
        found = rlkernel.linear_logprob(hidden, weight, target_ids, **options, **support).logprobs
        return found != torch.where(whole, want.logprobs, filtered.logprobs)

    with rlkernel.batch_invariant():
        assert not differences().any()
    assert differences().any()
