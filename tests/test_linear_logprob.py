"""linear_logprob: one body of tests for every backend, against fp64."""

import pytest
import torch
from accuracy import check
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel import tile_products, tiles, workspace
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.tile_products import Tile

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
pytestmark = pytest.mark.usefixtures("poison")
NAMES = ("hidden", "weight", "bias")


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles in both directions, with ragged ends, on shapes that a CPU test can afford; backward finds
    some of them kept and multiplies the others again."""
    monkeypatch.setattr(tile_products, "kept_tiles", lambda tiles, size, used: min(tiles, 2))
    monkeypatch.setattr(tile_products, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(tile_products, "GPU_TILE", Tile(8, 48))


def able(backend, inputs, **options):
    skip_unless_able(
        backend,
        "linear_logprob",
        inputs["hidden"],
        inputs["weight"],
        compute_dtype=inputs["hidden"].dtype,
        **options,
    )


def run(backend, inputs, upstream=None, needs=(True, True, True), **options):
    """Outputs and the gradients of hidden, weight and bias, on one backend."""
    leaves = {k: v.detach().clone() for k, v in inputs.items()}
    wanted = [
        leaves[n].requires_grad_() for n, need in zip(NAMES, needs, strict=True) if need and n in leaves
    ]
    with running(backend):
        out = rlkernel.linear_logprob(**leaves, **options)
        if upstream is None:
            return out, []
        used = [(o, g) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
        loss = sum((o * g.to(o.dtype)).sum() for o, g in used)
        return out, list(torch.autograd.grad(loss, wanted))


def upstream_like(target_ids, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(target_ids.shape, generator=g).to(target_ids.device) for _ in range(3)]


def check_against_fp64(backend, inputs, upstream=None, needs=(True, True, True), **options):
    """Outputs and gradients within the budget; PyTorch's own error is the reference's in this dtype."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    wide_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    algorithm = options.pop("algorithm", "auto")
    wide_options.pop("algorithm", None)
    truth, true_grads = run("reference", wide, upstream, needs, **wide_options)
    torchs, torch_grads = run("reference", inputs, upstream, needs, **options)
    ours, grads = run(backend, inputs, upstream, needs, **options, algorithm=algorithm)
    for name, a, b, c in zip(ours._fields, ours, torchs, truth, strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            check(name, a, b, c, magnitude=1)
    wanted = [n for n, need in zip(NAMES, needs, strict=True) if need and n in inputs]
    for name, a, b, c in zip(wanted, grads, torch_grads, true_grads, strict=True):
        assert a.dtype == inputs[name].dtype
        check(f"grad of {name}", a, b, c)


def with_bias(inputs):
    vocab = inputs["weight"].shape[0]
    bias = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    return inputs | {"bias": bias.to(inputs["weight"])}


# one element; V smaller than a tile; N and V past several tiles with ragged ends; H odd
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 33), (19, 32, 133), (3, 65, 500)], ids=str)
@DTYPES
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, shape, small_tiles):
    inputs = with_bias(make_inputs(*shape, dtype=dtype, device=device, ignored=0.2))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    check_against_fp64(backend, inputs, upstream, temperature=0.7, return_entropy=True)


OPTIONS = {
    "plain": {},
    "per-row temperature": {"temperature": torch.rand(19, generator=torch.Generator().manual_seed(2)) + 0.3},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.25},
    "negative scale": {"logit_scale": -1.5},
    "all": {"softcap": 4.0, "logit_scale": 1.7, "temperature": 0.8, "return_entropy": True},
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
@ON_EVERY_BACKEND
def test_options(backend, device, option, bias, small_tiles):
    inputs = make_inputs(19, 16, 133, device=device)
    inputs = with_bias(inputs) if bias else inputs
    able(backend, inputs)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[option].items()}
    upstream = upstream_like(inputs["target_ids"])
    if not options.get("return_entropy"):
        upstream[1] = None
    check_against_fp64(backend, inputs, upstream, **options)


@pytest.mark.parametrize("softcap", [None, 4.0])
@DTYPES
@ON_EVERY_BACKEND
def test_frozen_head(backend, device, dtype, softcap, small_tiles):
    """Forward computes the direction of the hidden gradient; other upstream gradients recompute."""
    inputs = with_bias(make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2))
    able(backend, inputs)
    g = upstream_like(inputs["target_ids"])
    for upstream in ([g[0], None, None], g):
        check_against_fp64(
            backend,
            inputs,
            upstream,
            needs=(True, False, False),
            temperature=0.8,
            softcap=softcap,
            return_entropy=True,
        )


@ON_EVERY_BACKEND
def test_frozen_head_whose_vocabulary_is_one_tile(backend, device):
    """Triton's direction once read a maximum that nothing had written: the state of a single tile."""
    inputs = make_inputs(5, 32, 133, device=device)
    able(backend, inputs)
    upstream = [upstream_like(inputs["target_ids"])[0], None, None]
    check_against_fp64(backend, inputs, upstream, needs=(True, False, False))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)], ids=["trained", "frozen"])
@ON_EVERY_BACKEND
def test_as_under_graph_capture(backend, device, needs, small_tiles, monkeypatch):
    """A captured graph cannot leave rows out: it computes them all and gives zeros where zeros belong."""
    monkeypatch.setattr(tiles, "capturing", lambda device: True)
    inputs = with_bias(make_inputs(19, 32, 133, device=device, ignored=0.3))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    upstream[0][::2] = 0
    for g in ([upstream[0], None, None], upstream):
        check_against_fp64(backend, inputs, g, needs, temperature=0.8, softcap=4.0, return_entropy=True)


@pytest.mark.parametrize("needs", [(True, False, True), (False, True, False), (False, False, True)], ids=str)
@ON_EVERY_BACKEND
def test_only_the_needed_gradients(backend, device, needs, small_tiles):
    inputs = with_bias(make_inputs(19, 16, 133, device=device))
    able(backend, inputs)
    check_against_fp64(backend, inputs, upstream_like(inputs["target_ids"]), needs, return_entropy=True)


@ON_EVERY_BACKEND
def test_gemms_are_not_done_for_nothing(backend, device, small_tiles, monkeypatch):
    """4 GEMMs, 3 without one gradient, 2 with a frozen head, and only the rows that matter; one less when the
    workspace has kept all logits."""
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    n, h, v = 24, 16, 96
    inputs = make_inputs(n, h, v, device=device, ignored=0)
    able(backend, inputs)
    unit = 2 * n * h * v

    def flops(needs, live_rows=n, ignored_rows=0, **options):
        upstream = torch.zeros(n)
        upstream[:live_rows] = 1
        changed = dict(inputs, target_ids=inputs["target_ids"].clone())
        changed["target_ids"][n - ignored_rows :] = -100
        with _Flops() as counter:
            run(backend, changed, [upstream.to(device), None, None], needs, **options)
        return counter.total / unit

    assert flops((True, True, False)) == 4 - 2 * (8 * 48) / (n * v)  # two tiles were kept
    monkeypatch.setattr(tile_products, "kept_tiles", lambda tiles, size, used: tiles)
    assert flops((True, True, False)) == 3
    assert flops((False, True, False)) == 2
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2  # other rows than those kept
    monkeypatch.setattr(tile_products, "kept_tiles", lambda tiles, size, used: 0)
    assert flops((True, True, False)) == 4
    assert flops((False, True, False)) == 3
    assert flops((True, False, False)) == 2
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2
    assert flops((True, True, False), live_rows=n // 2, ignored_rows=n // 2) == 2
    assert flops((True, True, False), live_rows=0) == 1


@DTYPES
@ON_EVERY_BACKEND
def test_kept_logits_change_no_bit(backend, device, dtype, small_tiles, monkeypatch):
    """Whether all, some or none of the logits outlive forward, and whoever takes the workspace meanwhile."""
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2)
    other = make_inputs(19, 32, 133, dtype=dtype, device=device, seed=5)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])

    def gradients(between=lambda: None, backwards=1):
        leaves = [inputs[n].clone().requires_grad_() for n in NAMES[:2]]
        with running(backend):
            out = rlkernel.linear_logprob(*leaves, inputs["target_ids"], return_entropy=True)
            between()
            loss = sum((o * g).sum() for o, g in zip(out, upstream, strict=True))
            for _ in range(backwards):
                grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        return grads

    def score():
        with torch.no_grad():
            rlkernel.linear_logprob(**other)

    def train():
        run(backend, other, upstream_like(other["target_ids"]), (True, True, False), return_entropy=True)

    some = gradients()
    monkeypatch.setattr(tile_products, "kept_tiles", lambda tiles, size, used: 0)
    none = gradients()
    monkeypatch.setattr(tile_products, "kept_tiles", lambda tiles, size, used: tiles)
    cases = {"some": some, "all": gradients(), "after a backward": gradients(backwards=2)}
    cases |= {"after scoring": gradients(score), "after training": gradients(train)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        cases["saved elsewhere"] = gradients(score)
    for name, grads in cases.items():
        for leaf, a, b in zip(NAMES, grads, none, strict=False):
            assert_equal(f"{leaf} {name}", a, b)


class _Flops(TorchDispatchMode):
    """Operations of matrix products, in place or not."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.total += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["auto", "fused"])
@DTYPES
@ON_EVERY_BACKEND
def test_no_grad_gives_the_bits_of_grad(backend, device, dtype, algorithm, small_tiles):
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device)
    able(backend, inputs, algorithm=algorithm)
    options = dict(temperature=0.8, return_entropy=True, algorithm=algorithm)
    with running(backend), torch.no_grad():
        old = rlkernel.linear_logprob(**inputs, **options)
    for needs in ((True, True, False), (True, False, False), (False, True, False)):
        new, _ = run(backend, inputs, upstream_like(inputs["target_ids"]), needs, **options)
        for name, a, b in zip(old._fields, old, new, strict=True):
            assert_equal(name, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_fused_forward(backend, device, dtype):
    for shape in ((1, 1, 1), (19, 40, 133), (3, 65, 700)):
        inputs = with_bias(make_inputs(*shape, dtype=dtype, device=device, ignored=0.2))
        able(backend, inputs, algorithm="fused")
        check_against_fp64(
            backend, inputs, upstream_like(inputs["target_ids"]), algorithm="fused", return_entropy=True,
            temperature=0.7, softcap=6.0, logit_scale=1.2,
        )  # fmt: skip


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device, small_tiles):
    inputs = with_bias(make_inputs(19, 33, 133, device=device))
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    out, grads = run(backend, inputs, upstream, return_entropy=True)
    for _ in range(3 if is_slow(backend, device) else 20):
        again, grads_again = run(backend, inputs, upstream, return_entropy=True)
        for name, a, b in zip([*out._fields, *NAMES], [*again, *grads_again], [*out, *grads], strict=True):
            assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_rows_that_do_not_matter_change_nothing(backend, device, small_tiles):
    """NaN in an ignored row does not reach the gradient of the weight."""
    inputs = make_inputs(19, 16, 133, device=device, ignored=0.3)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    ignored = inputs["target_ids"] == -100
    clean, grads = run(backend, inputs, upstream, return_entropy=True)
    dirty = dict(inputs, hidden=torch.where(ignored[:, None], torch.nan, inputs["hidden"]))
    if backend != "reference":  # a plain product spreads it
        out, dirty_grads = run(backend, dirty, upstream, return_entropy=True)
        for name, a, b in zip([*out._fields, *NAMES], [*out, *dirty_grads], [*clean, *grads], strict=False):
            assert_equal(name, a, b)
    nothing = dict(inputs, target_ids=torch.full_like(inputs["target_ids"], -100))
    out, grads = run(backend, nothing, upstream, return_entropy=True)
    assert all((x == 0).all() for x in (*out, *grads)), "a fully ignored batch"


@ON_EVERY_BACKEND
def test_empty_batch_stays_connected(backend, device):
    inputs = with_bias(make_inputs(3, 16, 133, device=device))
    able(backend, inputs)
    inputs = dict(inputs, hidden=inputs["hidden"][:0], target_ids=inputs["target_ids"][:0])
    out, grads = run(backend, inputs, upstream_like(inputs["target_ids"]), return_entropy=True)
    assert out.logprobs.sum().item() == 0 and out.logprobs.shape == (0,)
    assert [tuple(g.shape) for g in grads] == [(0, 16), (133, 16), (133,)]
    assert all((g == 0).all() for g in grads)


@ON_EVERY_BACKEND
def test_shapes_and_strides_of_users(backend, device, small_tiles):
    inputs = make_inputs(3 * 7, 16, 133, device=device)
    able(backend, inputs)
    hidden = inputs["hidden"].view(3, 7, 16)[:, :-1]  # what a model returns, less its last position
    ids = inputs["target_ids"].view(3, 7)[:, :-1]
    weight = inputs["weight"].T.contiguous().T  # column-major
    with running(backend):
        got = rlkernel.linear_logprob(hidden, weight, ids, temperature=torch.full((3, 6), 0.7, device=device))
        want = rlkernel.linear_logprob(
            hidden.reshape(-1, 16).contiguous(), weight.contiguous(), ids.reshape(-1), temperature=0.7
        )
    assert got.logprobs.shape == (3, 6)
    torch.testing.assert_close(got.logprobs.view(-1), want.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_retained_graph_and_double_use(backend, small_tiles):
    inputs = make_inputs(9, 16, 133)
    able(backend, inputs)
    hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
    with running(backend):
        out = rlkernel.linear_logprob(hidden, weight, inputs["target_ids"], return_entropy=True)
        loss = out.logprobs.sum() + out.logprobs.pow(2).sum() + out.entropy.sum()
        loss.backward(retain_graph=True)
        first = hidden.grad.clone(), weight.grad.clone()
        loss.backward()
    assert_equal("hidden", hidden.grad, 2 * first[0])
    assert_equal("weight", weight.grad, 2 * first[1])


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_dW_accumulates_in_fp32(backend, monkeypatch):
    """512 token chunks of equal gradients: a bf16 accumulator would stop growing after 2^8 of them."""
    monkeypatch.setattr(tile_products, "CPU_TILE", Tile(1, 32))
    n = 512
    inputs = dict(
        hidden=torch.ones(n, 8), weight=torch.zeros(64, 8), target_ids=torch.zeros(n, dtype=torch.int64)
    )
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    able(backend, inputs)
    if backend == "triton":
        inputs = {k: v[:300] if k != "weight" else v for k, v in inputs.items()}
    n = len(inputs["hidden"])
    _, (_, grad) = run(backend, inputs, [torch.ones(n), None, None])
    torch.testing.assert_close(grad[0].float(), torch.full((8,), n * 63 / 64), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_dtype_rounds_the_product(dtype, small_tiles):
    inputs = make_inputs(19, 64, 133, dtype=dtype, ignored=0)
    rounded = (inputs["hidden"].double() @ inputs["weight"].double().T).bfloat16()
    want = rlkernel.logprob(rounded, inputs["target_ids"]).logprobs
    for backend in ("native", "reference"):
        able(backend, inputs)
        got = run(backend, inputs, logits_dtype=torch.bfloat16)[0].logprobs
        exact = run(backend, inputs)[0].logprobs
        # a product on the edge between two bf16 values may fall on the other side
        assert (got - want).abs().median() < 1e-6 < (exact - want).abs().median()


def test_gradcheck():
    inputs = with_bias(make_inputs(7, 5, 23, dtype=torch.float64, ignored=0.2))
    ids = inputs.pop("target_ids")
    leaves = [x.requires_grad_() for x in inputs.values()]
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda h, w, b: tuple(
                rlkernel.linear_logprob(
                    h, w, ids, bias=b, temperature=0.7, softcap=3.0, logit_scale=1.3, return_entropy=True
                )
            ),
            leaves,
        )


def test_workspace_is_all_the_memory_there_is(monkeypatch):
    """What forward and backward make, beside gradients and per-row numbers, lies in the workspace."""
    monkeypatch.setattr(tile_products, "CPU_TILE", Tile(64, 128))
    n, h, v = 512, 32, 1000
    inputs = make_inputs(n, h, v, ignored=0)
    able("native", inputs)

    class Storages(TorchDispatchMode):
        seen: dict[int, int] = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return out

    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    with rlkernel.use_backend("native"):
        rlkernel.linear_logprob(
            hidden, weight, inputs["target_ids"]
        ).logprobs.sum().backward()  # takes the workspace
        buffers = {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
        with Storages() as storages:
            out = rlkernel.linear_logprob(hidden, weight, inputs["target_ids"], return_entropy=True)
            out.logprobs.sum().backward()
    assert buffers == {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
    known = buffers | {x.untyped_storage().data_ptr() for x in (hidden, weight)}
    sizes = {size for address, size in storages.seen.items() if address not in known and size > 4 * 4 * n}
    assert sizes == {4 * n * h, 4 * v * h}, f"made tensors of {sorted(sizes)} bytes beside the two gradients"


def test_workspace_does_not_depend_on_the_number_of_tokens():
    """It grows to the limit, where logits are kept, and never beyond."""
    sizes = []
    with workspace.limited(2**21):
        for n in (4000, 16000):
            workspace.release()
            inputs = make_inputs(n, 8, 300, ignored=0)
            able("native", inputs)
            run("native", inputs, [torch.ones(n), None, None], (True, True, False))
            sizes.append(sum(b.memory.numel() for b in workspace._buffers.values()))
    assert sizes[0] == sizes[1] <= 2**21


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_as_one_graph(backend, frozen, small_tiles):
    inputs = make_inputs(9, 16, 133)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])

    def loss(h, w, t):
        out = rlkernel.linear_logprob(h * 2, w, inputs["target_ids"], temperature=t, return_entropy=True)
        if frozen:
            return (out.logprobs * upstream[0]).sum()
        return sum((o * g).sum() for o, g in zip(out, upstream, strict=True))

    for t in (0.7, torch.full((9,), 0.7)):
        grads = []
        for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            hidden = inputs["hidden"].clone().requires_grad_()
            weight = inputs["weight"].clone().requires_grad_(not frozen)
            with rlkernel.use_backend(backend):
                fn(hidden, weight, t).backward()
            grads.append((hidden.grad, weight.grad))
        assert_equal("hidden", grads[1][0], grads[0][0])
        if not frozen:
            assert_equal("weight", grads[1][1], grads[0][1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_opcheck(frozen, return_entropy, small_tiles):
    inputs = with_bias(make_inputs(9, 16, 133))
    head = (None, 0.7, 1.0, None, -100, torch.float32, torch.float32)
    args = (
        inputs["hidden"].requires_grad_(),
        inputs["weight"].requires_grad_(not frozen),
        inputs["bias"].requires_grad_(not frozen),
        inputs["target_ids"],
        *head,
        return_entropy,
        "auto",
        frozen,
    )
    torch.library.opcheck(torch.ops.rlkernel.linear_logprob.default, args)


def test_autocast_uses_its_dtype_and_accumulates_fp32(small_tiles):
    inputs = make_inputs(19, 32, 133)
    low = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(
            "native", inputs, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
        )
    want, _ = run("native", low, return_entropy=True)
    assert_equal("logprobs", got.logprobs, want.logprobs)
    assert [g.dtype for g in grads] == [torch.float32] * 2


def test_mixed_dtypes_compute_in_the_wider(small_tiles):
    inputs = make_inputs(19, 32, 133)
    mixed = dict(inputs, hidden=inputs["hidden"].bfloat16())
    check_against_fp64(
        "native", mixed, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
    )
    mixed = dict(inputs, weight=inputs["weight"].bfloat16())
    check_against_fp64(
        "native", mixed, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
    )


def test_gradient_checkpointing(small_tiles):
    inputs = make_inputs(9, 16, 133)
    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    op = lambda h: rlkernel.linear_logprob(h * 2, weight, inputs["target_ids"]).logprobs  # noqa: E731
    want = torch.autograd.grad(op(hidden).sum(), (hidden, weight))
    out = torch.utils.checkpoint.checkpoint(op, hidden, use_reentrant=False)
    for name, a, b in zip(NAMES, torch.autograd.grad(out.sum(), (hidden, weight)), want, strict=False):
        assert_equal(name, a, b)


def test_against_the_real_trl():
    chunked = pytest.importorskip("trl.kernels.chunked_logprob", reason="TRL is not installed")
    inputs = make_inputs(19, 32, 133, ignored=0)
    ours, grads = run(
        "native", inputs, upstream_like(inputs["target_ids"])[:2] + [None], (True, True, False),
        temperature=0.8, softcap=6.0, logit_scale=1.2, return_entropy=True,
    )  # fmt: skip
    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    theirs = chunked.ChunkedLogProbFunction.apply(
        hidden, weight, None, inputs["target_ids"], 0.8, 48, 6.0, 1.2, ("entropy",)
    )
    g = upstream_like(inputs["target_ids"])
    loss = (theirs[0] * g[0]).sum() + (theirs[1] * g[1]).sum()
    want = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(ours.logprobs, theirs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(grads, list(want), rtol=0, atol=2e-5)


BAD = [
    (dict(hidden=torch.zeros(2, 4).int()), "hidden must be float16"),
    (dict(weight=torch.zeros(5, 3)), r"weight must be \[V, 4\] with V >= 1, got \(5, 3\)"),
    (dict(weight=torch.zeros(0, 4)), r"weight must be \[V, 4\] with V >= 1, got \(0, 4\)"),
    (dict(bias=torch.zeros(4)), r"bias must be \[5\], got \(4,\)"),
    (
        dict(target_ids=torch.zeros(3, dtype=torch.int64)),
        r"target_ids must have the shape \(2,\) .* got \(3,\)",
    ),
    (dict(target_ids=torch.tensor([0, 5])), r"target_ids\[1\] = 5 is outside \[0, 5\)"),
    (dict(temperature=-1), "temperature must be > 0 and finite, got -1"),
    (dict(softcap=0.0), "softcap must be > 0 and finite, or None, got 0.0"),
    (dict(logit_scale=float("inf")), "logit_scale must be finite, got inf"),
    (dict(logits_dtype=torch.int8), "logits_dtype must be float16, bfloat16 or float32, got torch.int8"),
    (
        dict(hidden=torch.zeros(2, 4).half(), weight=torch.zeros(5, 4).half(), logits_dtype=torch.bfloat16),
        "logits_dtype must be float32 or the float16 of the inputs, got bfloat16",
    ),
    (dict(algorithm="magic"), "algorithm must be one of 'auto', 'tiled', 'fused', got 'magic'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(hidden=torch.zeros(2, 4), weight=torch.zeros(5, 4), target_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_logprob(**good | change)


def test_a_named_algorithm_never_falls_back():
    inputs = make_inputs(2, 4, 5)
    with (
        rlkernel.use_backend("native"),
        pytest.raises(NotImplementedError, match="native: algorithm 'fused' is a Triton"),
    ):
        rlkernel.linear_logprob(**inputs, algorithm="fused")


MUTANTS = {
    "drops the ragged end": lambda k: {
        "tile_forward": lambda x, v, *r: k.tile_forward(x, v, *r) if v < 96 else None
    },
    "restarts at every tile": lambda k: {
        "tile_forward": lambda *a: k.tile_forward(*a[:9], True, *a[10:]),
    },
    "scale missing in the gradient": lambda k: {
        "tile_backward": lambda *a: k.tile_backward(*a[:5], a[5], 1.0, *a[7:]),
    },
    "target kept in the direction": lambda k: {
        "tile_exp": lambda x, v, ids, *r: k.tile_exp(x, v, torch.full_like(ids, 10**6), *r),
    },
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_body_fails_on(mutant, monkeypatch, small_tiles):
    from rlkernel.native import logprob as kernels

    for name, wrong in MUTANTS[mutant](_Copy(kernels)).items():
        monkeypatch.setattr(kernels, name, wrong)
    inputs = make_inputs(19, 32, 133)
    able("native", inputs)
    with pytest.raises(AssertionError):
        check_against_fp64(
            "native", inputs, upstream_like(inputs["target_ids"]), logit_scale=1.5, return_entropy=True
        )
        g = upstream_like(inputs["target_ids"])
        check_against_fp64("native", inputs, [g[0], None, None], (True, False, False))


class _Copy:
    def __init__(self, module):
        self.__dict__.update(vars(module))
