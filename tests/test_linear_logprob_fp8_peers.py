"""FP8 heads against what engines run: PyTorch's scaled product, and vLLM's own rounding of activations."""

import importlib
import types
import typing

import peer_sources
import pytest
import torch
from backends import needs_interpreter
from fp8_cases import LARGEST, make, run

import rlkernel
from rlkernel.calls.linear_logprob import Head, LinearLogprobCall
from rlkernel.drivers import linear_logprob_fp8 as driver

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
HEAD = Head(None, 1.0, 1.0, None, -100, torch.float32, torch.bfloat16)
FOLDER = "vllm/model_executor/layers/quantization"


def rounded(hidden, scheme, fp8=FN, scale=None):
    """(FP8 hidden, scales) of the driver."""
    group = {"token": hidden.shape[1], "static": 0}.get(scheme, 128)
    call = LinearLogprobCall.of(
        hidden, torch.empty(1, hidden.shape[1]).to(fp8), torch.zeros(len(hidden), dtype=torch.int64), HEAD,
        return_entropy=False, input_scheme=scheme, input_group=group, input_scale=scale,
    )  # fmt: skip
    return driver.quantised(hidden, call)[:2]


def states(rows, columns):
    """Hidden states as models have them: bf16, some columns a hundred times as large, a row of zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    x[:, ::61] *= 100
    x[1] = 0
    x[2] *= 1e-6
    return x.bfloat16()


def vllm(fp8, row, column, **options):
    """The torch path of vLLM's ``QuantFP8`` for groups of ``row`` x ``column``, -1: of all, as it is."""
    names = ("_GroupShape", "GroupShape", "group_broadcast", "prep_scale_for_group_broadcast")
    path = f"{FOLDER}/utils/quant_utils.py"
    utils = peer_sources.load("vllm", path, *names, NamedTuple=typing.NamedTuple, ClassVar=typing.ClassVar)
    utils.GroupShape.PER_TOKEN = utils.GroupShape(1, -1)
    given = {"_FP8_DTYPE": fp8, "_FP8_MIN": -LARGEST[fp8], "_FP8_MAX": LARGEST[fp8]}
    given["_FP8_MIN_SCALING_FACTOR"] = 1.0 / (LARGEST[fp8] * 512.0)
    path = f"{FOLDER}/input_quant_fp8.py"
    peer = peer_sources.load("vllm", path, "QuantFP8", CustomOp=object, **given, **vars(utils)).QuantFP8
    shape = utils.GroupShape(row, column)
    own = {"static": False, "num_token_padding": None, "column_major_scales": False, "use_ue8m0": False}
    own |= {"group_shape": shape, "group_size": column, "is_group_quant": shape.is_per_group()}
    layer = types.SimpleNamespace(**own | options)
    layer._quantize_group_native = types.MethodType(peer._quantize_group_native, layer)
    return types.MethodType(peer.forward_native, layer)


@pytest.mark.parametrize("columns", [256, 300])
@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=["fn", "fnuz"])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_groups_are_rounded_as_vllm_does(fp8, ue8m0, columns):
    x = states(40, columns)
    codes, scale = vllm(fp8, 1, 128, use_ue8m0=ue8m0)(x)
    got, got_scale = rounded(x, "group_ue8m0" if ue8m0 else "group", fp8)
    # the least scale of its torch path, up to a power of two; its CUDA kernels have ours, 1e-10 / 448
    least = scale < 2.0 / (LARGEST[fp8] * 512.0)
    assert 0 < least.sum() <= 2 * scale.shape[1]
    assert torch.equal(got_scale[~least], scale[~least])
    same = got.view(torch.uint8) == codes.view(torch.uint8)
    assert same[~least.repeat_interleave(128, 1)[:, :columns]].all()


@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=["fn", "fnuz"])
def test_tokens_are_rounded_as_vllm_does(fp8):
    x = states(40, 300)
    codes, scale = vllm(fp8, 1, -1)(x)
    got, got_scale = rounded(x, "token", fp8)
    assert torch.equal(got_scale, scale)
    # its torch path multiplies with 1 / scale where its CUDA kernel divides: ties fall on either side
    far = got.float() != codes.float()
    assert far.float().mean() < 0.01
    step = (got.float() - codes.float()).abs()
    assert (step <= 0.13 * codes.float().abs() + 0.002).all()


@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=["fn", "fnuz"])
def test_a_static_scale_rounds_as_vllm_does(fp8):
    x, scale = states(40, 300), torch.tensor(0.013)
    codes, _ = vllm(fp8, -1, -1, static=True)(x, scale)
    got, _ = rounded(x, "static", fp8, scale)
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))
    assert (got.float().abs() == LARGEST[fp8]).any(), "nothing saturates"


@pytest.mark.parametrize("scheme", ["tensor", "rows"])
def test_the_product_is_that_of_torch(scheme):
    """``torch._scaled_mm``, which vLLM calls on a CPU and SGLang and vLLM fall back to on a GPU."""
    inputs = make(11, 64, 144, scheme, ignored=0)
    del inputs["bias"]
    x, weight, scale = inputs["hidden"], inputs["weight"], inputs["weight_scale"]
    if scheme == "tensor":
        static = x.float().abs().max() / 448
        codes, of_input = rounded(x, "static", scale=static)
        of_input, of_weight, option = of_input.view(1), scale.view(1), static
    else:
        codes, of_input = rounded(x, "token")
        of_weight, option = scale.view(1, -1), "token"
    for dtype in (torch.float32, torch.bfloat16) if scheme == "tensor" else (torch.bfloat16,):
        try:
            logits = torch._scaled_mm(codes, weight.t(), scale_a=of_input, scale_b=of_weight, out_dtype=dtype)
        except RuntimeError as error:
            assert "primitive" in str(error)
            pytest.skip("torch's library has no FP8 product for this processor")
        want = rlkernel.logprob(logits, inputs["target_ids"]).logprobs
        for backend in ("native", "reference"):
            got, _ = run(backend, inputs, input_scale=option, logits_dtype=dtype)
            near = (
                1e-5
                if dtype == torch.float32
                else 2e-6 + 2**-8 * logits.abs().max().item() * (got.logprobs != want)
            )
            assert ((got.logprobs - want).abs() <= near).all()
            # a product between two bf16 values may fall on the other side, in a row of many
            assert dtype == torch.float32 or ((got.logprobs - want).abs() < 1e-5).float().mean() > 0.5


@needs_interpreter
def test_the_product_of_blocks_is_that_of_vllm():
    """Its Triton kernel, which scales each step of K. The numbers of FP8 come as fp32: the interpreter has no
    FP8, and the products are the same."""
    import triton
    import triton.language as tl

    path = f"{FOLDER}/utils/fp8_utils.py"
    peer = peer_sources.load("vllm", path, "_w8a8_triton_block_scaled_mm", triton=triton, tl=tl)
    kernel = triton.jit(peer._w8a8_triton_block_scaled_mm)
    inputs = make(11, 256, 300, block=(128, 128), ignored=0)
    del inputs["bias"]
    codes, of_input = rounded(inputs["hidden"], "group")
    a, b, of_weight, logits = (
        codes.float(),
        inputs["weight"].float(),
        inputs["weight_scale"],
        torch.empty(11, 300),
    )
    strides = *a.stride(), 1, 256, *logits.stride(), *of_input.stride(), 1, of_weight.stride(0)
    kernel[(3,)](
        a, b, logits, of_input, of_weight, 11, 300, 256, 128, 128, *strides,
        BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=128, GROUP_SIZE_M=32,
    )  # fmt: skip
    want = rlkernel.logprob(logits, inputs["target_ids"]).logprobs
    for backend in ("triton", "native", "reference"):
        got, _ = run(backend, inputs, input_scale="group")
        torch.testing.assert_close(got.logprobs, want, rtol=0, atol=1e-5)
    multiply = importlib.import_module("rlkernel.triton_ops.linear_logprob_fp8").multiply
    ours = torch.empty(11, 300)
    multiply(driver.Codes(codes, of_input, 128), inputs["weight"], of_weight, (128, 128), 0, ours)
    torch.testing.assert_close(ours, logits, rtol=1e-6, atol=1e-5)
