"""rms_norm, swiglu and rotary against the layers of the vLLM that is installed."""

import doctest
import inspect

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

import rlkernel

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def noise(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def config():
    with set_current_vllm_config(VllmConfig()):
        yield


@DTYPES
def test_rms_norm(dtype):
    """But for the order of the sum, which is torch's there: a bit of the result at most."""
    x, residual, weight = noise(9, 200, dtype=dtype), noise(9, 200, dtype=dtype) / 2, noise(200, dtype=dtype)
    layer = RMSNorm(200, eps=1e-5, dtype=dtype)
    layer.weight.data.copy_(weight)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    want = layer.forward_native(x.clone())
    got = rlkernel.rms_norm(x, weight, eps=1e-5)
    torch.testing.assert_close(got, want, **close)
    normed, summed = layer.forward_native(x.clone(), residual.clone())
    out = rlkernel.rms_norm(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(out.summed, summed)
    # it norms the sum before that is rounded, as transformers does not
    torch.testing.assert_close(
        out.normed, normed, rtol=4 * torch.finfo(dtype).eps, atol=0.01 if dtype != torch.float32 else 1e-6
    )
    if dtype == torch.float32:
        mutant = rlkernel.rms_norm(x, weight, eps=1e-2)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(mutant, want, **close)


@DTYPES
def test_swiglu(dtype):
    """In fp32 but for the last place of the exponential, in bf16 but for what that turns over."""
    x = noise(9, 2 * 130, dtype=dtype)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(rlkernel.swiglu(x), SiluAndMul().forward_native(x), **close)
    for approximate, activation in (("none", "gelu"), ("tanh", "gelu_tanh")):
        want = GeluAndMul(approximate).forward_native(x)
        torch.testing.assert_close(rlkernel.swiglu(x, activation=activation), want, **close)
    with rlkernel.batch_invariant():
        assert torch.equal(SiluAndMul().forward_native(x), rlkernel.swiglu(x))


@DTYPES
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 48])
def test_rotary_to_the_bit(dtype, neox, rotary_dim):
    layer = RotaryEmbedding(64, rotary_dim, 512, 10000.0, neox, dtype)
    q, k = noise(7, 4 * 64, dtype=dtype), noise(7, 2 * 64, dtype=dtype)
    positions = torch.tensor([0, 5, 5, 511, 3, 2, 100])
    want = layer.forward_native(positions, q.clone(), k.clone())
    cos, sin = layer.cos_sin_cache.chunk(2, -1)
    heads = (x.view(7, -1, 64) for x in (q, k))
    options = {"positions": positions, "rotary_dim": rotary_dim, "interleaved": not neox}
    out = rlkernel.rotary(*heads, cos, sin, **options)
    for ours, theirs in zip(out, want, strict=True):
        assert torch.equal(ours.flatten(1), theirs)
    rlkernel.rotary(q.view(7, -1, 64), k.view(7, -1, 64), cos, sin, **options, inplace=True)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])


def test_the_docstrings_example():
    text = inspect.getdoc(rlkernel.patch_vllm)
    example = doctest.DocTestParser().get_doctest(text, {"rlkernel": rlkernel}, "patch_vllm", None, 0)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted and not result.failed
