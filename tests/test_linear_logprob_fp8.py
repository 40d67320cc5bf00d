"""linear_logprob with an FP8 head: every layout of scales and every rounding of hidden, by fp64."""

import linear_logprob_cases
import pytest
import ranks
import torch
from accuracy import check
from backends import is_slow, needs_interpreter, of, running
from bitwise import assert_equal
from fp8_cases import INPUTS, LAYOUTS, check_against_fp64, make, quantise, run, widened
from logprob_cases import upstream_like

import rlkernel
from rlkernel import dispatch
from rlkernel.calls.linear_logprob import LinearLogprobCall
from rlkernel.drivers import linear_logprob_fp8 as driver
from rlkernel.drivers.linear_logprob_fp8 import Codes
from rlkernel.ops import linear_logprob as public
from rlkernel.runtime import gpu

pytestmark = pytest.mark.usefixtures("poison")

# the tiles of an emulated GPU are those of native, whose operands differ
EVERY = [p for p in of("linear_logprob") if not p.values[0].startswith("emulated")]
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), EVERY)
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
small_tiles = linear_logprob_cases.small_tiles


def on(device, inputs):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


@pytest.fixture(autouse=True)
def _only_what_a_gpu_can(request):
    """On a GPU the product of FP8 with FP8 is Triton's."""
    values = getattr(request.node, "callspec", None)
    if (
        values is not None
        and values.params.get("backend") == "native"
        and values.params.get("device") == "cuda"
    ):
        pytest.skip("native refuses: the product of FP8 with FP8 on a GPU is a Triton kernel")


# what engines run, in every dtype of theirs
PAIRED = [
    (dtype, *x) for dtype in (torch.float32, torch.float16) for x in (("rows", "token"), ("blocks", "group"))
]


# V and H past several tiles and blocks with ragged ends
@pytest.mark.parametrize(
    ("dtype", "layout", "rounding"),
    [*((torch.bfloat16, layout, rounding) for layout in LAYOUTS for rounding in INPUTS), *PAIRED],
    ids=lambda x: str(x).removeprefix("torch."),
)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, layout, rounding, small_tiles):
    inputs = on(device, make(11, 70, 133, layout, dtype=dtype, ignored=0.2))
    scale = INPUTS[rounding]
    check_against_fp64(backend, inputs, input_scale=scale.to(device) if rounding == "static" else scale)


# one element; one row; blocks of 128 with a whole one, several, and an end of one column and one row
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 129, 257), (3, 256, 128), (5, 200, 385)], ids=str)
@pytest.mark.parametrize("rounding", ["wide", "group"])
@ON_EVERY_BACKEND
def test_blocks_of_128(backend, device, rounding, shape):
    inputs = on(device, make(*shape, block=(128, 128), ignored=0))
    check_against_fp64(backend, inputs, input_scale=INPUTS[rounding], softcap=5.0, logit_scale=0.8)


@pytest.mark.parametrize("layout", LAYOUTS)
@ON_EVERY_BACKEND
def test_e4m3fnuz(backend, device, layout):
    """AMD's: other numbers for the same bits, and rounding up to 224."""
    inputs = on(device, make(7, 64, 133, layout, fp8=FNUZ))
    for rounding in ("wide", "token", "group"):
        check_against_fp64(backend, inputs, input_scale=INPUTS[rounding])


@pytest.mark.parametrize("rounding", ["wide", "group"])
@ON_EVERY_BACKEND
def test_frozen_head(backend, device, rounding, small_tiles):
    """Forward computes the direction of the hidden gradient; other upstream gradients recompute."""
    inputs = on(device, make(11, 70, 133, ignored=0.2))
    g = upstream_like(inputs["target_ids"])
    for upstream in ([g[0], None, None], g):
        check_against_fp64(backend, inputs, upstream, ("hidden",), input_scale=INPUTS[rounding], softcap=5.0)


@pytest.mark.parametrize("needs", [("hidden", "bias"), ("hidden",), ("bias",)], ids=str)
@ON_EVERY_BACKEND
def test_as_under_graph_capture(backend, device, needs, small_tiles, monkeypatch):
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    inputs = on(device, make(11, 70, 133, ignored=0.3))
    check_against_fp64(backend, inputs, needs=needs, input_scale="group")


@pytest.mark.parametrize("rounding", ["wide", "group"])
@ON_EVERY_BACKEND
def test_same_bits_every_time_and_with_gradients(backend, device, rounding, small_tiles):
    inputs = on(device, make(11, 70, 133, "blocks", ignored=0.2))
    upstream, options = upstream_like(inputs["target_ids"]), {"input_scale": INPUTS[rounding]}
    out, grads = run(backend, inputs, upstream, return_entropy=True, **options)
    for _ in range(2 if is_slow(backend, device) else 10):
        again, grads_again = run(backend, inputs, upstream, return_entropy=True, **options)
        for a, b in zip([*again, *grads_again], [*out, *grads], strict=True):
            assert_equal("again", a, b)
    with torch.no_grad():
        alone, _ = run(backend, inputs, return_entropy=True, **options)
    for name, a, b in zip(out._fields, alone, out, strict=True):
        assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_rows_that_do_not_matter_change_nothing(backend, device, small_tiles):
    """NaN in an ignored row reaches no gradient; in another it reaches its own row alone."""
    inputs = on(device, make(11, 70, 133, ignored=0.3))
    ignored, upstream = inputs["target_ids"] == -100, upstream_like(inputs["target_ids"])
    clean, grads = run(backend, inputs, upstream, return_entropy=True, input_scale="group")
    dirty = inputs | {"hidden": torch.where(ignored[:, None], torch.nan, inputs["hidden"])}
    out, dirty_grads = run(backend, dirty, upstream, return_entropy=True, input_scale="group")
    for a, b in zip([*out, *dirty_grads], [*clean, *grads], strict=True):
        assert_equal("dirty", a, b)
    row = int((~ignored).nonzero()[0])
    hidden = inputs["hidden"].clone()
    hidden[row, 3] = torch.inf
    with running(backend):
        out = rlkernel.linear_logprob(**(inputs | {"hidden": hidden}), input_scale="group").logprobs
    assert out[row].isnan() and (out.isnan().sum() == 1), out
    nothing = inputs | {"target_ids": torch.full_like(inputs["target_ids"], -100)}
    out, grads = run(backend, nothing, upstream, return_entropy=True, input_scale="token")
    assert all((x == 0).all() for x in (*out, *grads)), "a fully ignored batch"


@ON_EVERY_BACKEND
def test_empty_batch_stays_connected(backend, device):
    inputs = on(device, make(3, 70, 133))
    inputs |= {"hidden": inputs["hidden"][:0], "target_ids": inputs["target_ids"][:0]}
    for scale in (None, "token", "group"):
        out, grads = run(backend, inputs, upstream_like(inputs["target_ids"]), input_scale=scale)
        assert out.logprobs.shape == (0,) and [tuple(g.shape) for g in grads] == [(0, 70), (133,)]


@ON_EVERY_BACKEND
def test_a_row_of_zeros_and_a_small_one(backend, device):
    """The least scales keep 0 / 0 away; numbers under them round to 0 or to a multiple of the least."""
    inputs = on(device, make(4, 70, 133, ignored=0))
    inputs["hidden"][0] = 0
    inputs["hidden"][1] *= 1e-9
    for scale in ("token", "group", "group_ue8m0"):
        out, _ = run(backend, inputs, input_scale=scale)
        assert out.logprobs.isfinite().all()
        check_against_fp64(backend, inputs, input_scale=scale)


@ON_EVERY_BACKEND
def test_scales_in_other_dtypes_and_shapes(backend, device, small_tiles):
    inputs = on(device, make(5, 64, 96, "rows", block=(32, 32)))
    want, _ = run(backend, inputs, input_scale="token")
    got, _ = run(backend, inputs | {"weight_scale": inputs["weight_scale"][:, None]}, input_scale="token")
    assert_equal("[V, 1]", got.logprobs, want.logprobs)
    power = torch.full((3, 2), 0.25, device=device)
    want, _ = run(backend, inputs | {"weight_scale": power}, input_scale="group")
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        got, _ = run(backend, inputs | {"weight_scale": power.to(dtype)}, input_scale="group")
        assert_equal(str(dtype), got.logprobs, want.logprobs)
    one, _ = run(backend, inputs | {"weight_scale": torch.tensor([0.25], device=device)}, input_scale="group")
    torch.testing.assert_close(one.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)


@ON_EVERY_BACKEND
def test_shapes_and_strides_of_users(backend, device, small_tiles):
    inputs = on(device, make(6, 70, 133, ignored=0))
    want, _ = run(backend, inputs, input_scale="group")
    hidden = inputs["hidden"].view(2, 3, 70)
    wide = torch.stack([hidden, hidden], -1)[..., 0]  # as columns of a wider tensor
    weight = inputs["weight"].view(torch.uint8).T.contiguous().T.view(inputs["weight"].dtype)
    changed = {"hidden": wide, "weight": weight, "target_ids": inputs["target_ids"].view(2, 3)}
    with running(backend):
        got = rlkernel.linear_logprob(**(inputs | changed), input_scale="group")
    assert got.logprobs.shape == (2, 3)
    # a unit or two of the logits, of which the reference's product on a GPU may have others
    atol = 8e-6 if (backend, device) == ("reference", "cuda") else 2e-6
    torch.testing.assert_close(got.logprobs.view(-1), want.logprobs, rtol=0, atol=atol)


def test_the_gradient_passes_the_rounding():
    """That of hidden is dz @ W with W as its scales have it, also where a static scale saturates."""
    inputs = make(5, 64, 96, dtype=torch.float32, ignored=0)
    tiny = torch.tensor(1e-4)
    codes = (inputs["hidden"] * (1 / tiny)).clamp(-448, 448).to(FN)
    rounded = codes.double() * tiny.double()
    assert (codes.float().abs() == 448).any()
    scale = inputs["weight_scale"].repeat_interleave(16, 0).repeat_interleave(32, 1)[:96, :64]
    weight = inputs["weight"].double() * scale.double()
    leaf = rounded.clone().requires_grad_()
    want = torch.log_softmax(leaf @ weight.T + inputs["bias"].double(), -1)
    want.gather(-1, inputs["target_ids"][:, None]).sum().backward()
    out, (grad, _) = run("reference", widened(inputs), [torch.ones(5), None, None], input_scale=tiny)
    torch.testing.assert_close(out.logprobs, want.detach().gather(-1, inputs["target_ids"][:, None])[:, 0])
    torch.testing.assert_close(grad, leaf.grad)


@needs_interpreter
def test_the_bits_of_a_row_do_not_follow_the_others():
    """Nor the slice of the vocabulary: K is one chain. An outlier makes sums in another order visible."""
    from rlkernel.triton_ops import linear_logprob_fp8

    weight, scale = quantise(torch.randn(300, 256, generator=torch.Generator().manual_seed(1)), "blocks")
    x = torch.randn(150, 256, generator=torch.Generator().manual_seed(2))
    x[:, ::17] *= 4096
    call = LinearLogprobCall.of(
        x, weight, torch.zeros(150, dtype=torch.int64), rlkernel.calls.linear_logprob.Head(
            None, 1.0, 1.0, None, -100, torch.float32, torch.float32
        ), return_entropy=False, weight_scale=scale, weight_block=(128, 128), input_scheme="group",
        input_group=128,
    )  # fmt: skip
    codes = driver.quantised(x, call)
    whole = torch.empty(150, 300)
    linear_logprob_fp8.multiply(codes, weight, scale, (128, 128), 0, whole)
    for rows in (slice(0, 1), slice(137, 140)):
        few = Codes(codes.values[rows], codes.scale[rows], 128)
        for a, b in ((0, 300), (128, 300), (40, 47)):
            out = torch.empty(len(few.values), b - a)
            linear_logprob_fp8.multiply(few, weight[a:b], scale, (128, 128), a, out)
            assert_equal(f"{rows} {a}", out, whole[rows, a:b])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rounding", INPUTS)
def test_opcheck(frozen, rounding, small_tiles):
    inputs = make(5, 64, 96, dtype=torch.float32)
    scale = INPUTS[rounding]
    fields = public._fp8.fields(
        inputs["hidden"], inputs["weight"], inputs["weight_scale"], inputs["weight_block_size"], scale
    )
    call = LinearLogprobCall(
        inputs["hidden"].requires_grad_(), inputs["weight"], inputs["bias"].requires_grad_(not frozen),
        inputs["target_ids"], 0.7, 1.0, None, -100, torch.float32, torch.float32, True, need_direction=frozen,
        **fields,
    )  # fmt: skip
    before = inputs["weight"].clone()
    # the check of the schema compares tensors by arithmetic that torch has not for FP8
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(public.op.node, public.op.flat(call), test_utils=checks)
    assert_equal("weight", inputs["weight"].view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("rounding", INPUTS)
def test_compiles_as_one_graph(rounding, small_tiles):
    inputs = make(5, 64, 96)
    upstream = upstream_like(inputs["target_ids"])

    def loss(h, b):
        more = inputs | {"hidden": h * 2, "bias": b}
        out = rlkernel.linear_logprob(**more, return_entropy=True, input_scale=INPUTS[rounding])
        return sum((o * g).sum() for o, g in zip(out, upstream, strict=True))

    found = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [inputs[name].clone().requires_grad_() for name in ("hidden", "bias")]
        fn(*leaves).backward()
        found.append([x.grad for x in leaves])
    for a, b in zip(*found, strict=True):
        assert_equal("compiled", a, b)


def test_autocast_rounds_hidden_to_its_dtype_first():
    inputs = make(5, 64, 96, dtype=torch.float32)
    low = inputs | {"hidden": inputs["hidden"].bfloat16()}
    for scale in (None, "token"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, (grad, _) = run("native", inputs, upstream_like(inputs["target_ids"]), input_scale=scale)
        want, _ = run("native", low, input_scale=scale)
        assert_equal("logprobs", got.logprobs, want.logprobs)
        assert grad.dtype == torch.float32


def test_logits_are_rounded_as_an_engine_rounds_them(small_tiles):
    inputs = make(9, 64, 96, ignored=0)
    del inputs["bias"]
    exact, _ = run("reference", inputs, input_scale="group")
    for backend in ("native", "reference", *(["triton"] if dispatch.has("triton", "linear_logprob") else [])):
        if backend == "triton" and not of("linear_logprob")[1:]:
            continue
        got, _ = run(backend, inputs, input_scale="group", logits_dtype=torch.bfloat16)
        assert 1e-4 < (got.logprobs - exact.logprobs).abs().max() < 0.1


def _on_ranks(rank, kind):
    """A head of two ranks, whose blocks are counted from the first row of each, and the gradient of all."""
    found = {}
    for layout in LAYOUTS:
        for scale in (None, "token", "group"):
            inputs = make(7, 70, 133, layout, ignored=0.2)
            cuts = (0, 64, 133)
            here = slice(cuts[rank], cuts[rank + 1])
            whole = inputs["weight_scale"]
            blocks = slice(cuts[rank] // 16, -(-cuts[rank + 1] // 16))
            part = (
                {"tensor": whole, "rows": whole[here], "blocks": whole[blocks]}[layout]
                if whole.dim()
                else whole
            )
            own = inputs | {
                "weight": inputs["weight"][here], "bias": inputs["bias"][here], "weight_scale": part,
                "group": torch.distributed.group.WORLD, "vocab_start": cuts[rank],
            }  # fmt: skip
            upstream = upstream_like(inputs["target_ids"])
            options = {"return_entropy": True, "temperature": 0.7, "input_scale": scale}
            out, grads = run("native", own, upstream, **options)
            found[layout, scale] = tuple(out), grads
    with pytest.raises(ValueError, match="must be the same on every rank of group"):
        run("native", own, input_scale="token" if rank else "group")
    return found


@ranks.pytestmark
@pytest.mark.slow
def test_ranks_that_share_out_the_vocabulary(tmp_path):
    first, second = ranks.run(_on_ranks, ["fp8"], tmp_path)["fp8"]
    for (layout, scale), (out, (grad, bias)) in first.items():
        other, (other_grad, other_bias) = second[layout, scale]
        for a, b in zip((*out, grad), (*other, other_grad), strict=True):
            assert_equal(f"{layout} {scale}", a, b)
        inputs = make(7, 70, 133, layout, ignored=0.2)
        judged = rlkernel.LogprobOutput(*out), [grad, torch.cat([bias, other_bias])]
        check_against_fp64("native", inputs, ours=judged, input_scale=scale)


@pytest.mark.parametrize("scale", [None, "group"])
def test_batch_invariant(scale):
    """Inside the mode rows have the bits of their own, in parts of the vocabulary too."""
    inputs = make(9, 64, 128, ignored=0)
    for level in ("batch", "tensor_parallel"):
        with rlkernel.batch_invariant(level=level):
            whole, (grad, _) = run("native", inputs, upstream_like(inputs["target_ids"]), input_scale=scale)
            for row in (0, 8):
                one = inputs | {k: inputs[k][row : row + 1] for k in ("hidden", "target_ids")}
                upstream = [g[row : row + 1] for g in upstream_like(inputs["target_ids"])]
                alone, (one_grad, _) = run("native", one, upstream, input_scale=scale)
                assert_equal("logprobs", alone.logprobs, whole.logprobs[row : row + 1])
                assert_equal("hidden", one_grad, grad[row : row + 1])
        truth, _ = run("reference", widened(inputs), input_scale=scale)
        torchs, _ = run("reference", inputs, input_scale=scale)
        check(level, whole.logprobs, torchs.logprobs, truth.logprobs, magnitude=1)
