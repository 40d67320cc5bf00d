"""The vendors' varlen kernels: which can be called, with which arguments, within which limits."""

import inspect
import types

import pytest
import torch
import varlen_stand_ins as vendors
from varlen_stand_ins import KERNELS, install

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.drivers import prefix_shared_attention_flash as driver
from rlkernel.drivers import prefix_shared_attention_varlen as varlen
from rlkernel.native.prefix_shared_attention import flash


def changed(function, without=None, more=None):
    """The function with a parameter left out, or one more that must be given, as another version has it."""

    def other(*a, **kw):
        return function(*a, **kw)

    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != without]
    if more:
        parameters.insert(0, inspect.Parameter(more, inspect.Parameter.POSITIONAL_OR_KEYWORD))
    other.__signature__ = inspect.Signature(parameters)
    return other


def test_other_signatures_are_refused(monkeypatch):
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    real = vendors.FlashAttention2
    forward, backward = real._flash_attn_varlen_forward, real._flash_attn_varlen_backward

    def reasons(**functions):
        module = types.SimpleNamespace(**functions)
        adapter = install("fa2", monkeypatch, {"flash_attn.flash_attn_interface": module})
        return adapter.reasons(q, 0.0, True)

    names = {"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward}
    assert reasons(**names) == []
    older = names | {"_flash_attn_varlen_forward": changed(forward, without="softcap")}
    assert reasons(**older) == ["FlashAttention 2: its _flash_attn_varlen_forward has no parameter softcap"]
    newer = names | {"_flash_attn_varlen_backward": changed(backward, more="sm_count")}
    assert reasons(**newer) == ["FlashAttention 2: its _flash_attn_varlen_backward needs sm_count"]
    (reason,) = reasons(_flash_attn_varlen_forward=forward)
    assert reason == "FlashAttention 2: flash_attn.flash_attn_interface has no _flash_attn_varlen_backward"
    missing = install("fa3", monkeypatch, {})
    assert missing.reasons(q, 0.0, False) == ["FlashAttention 3: flash_attn_interface is not installed"]


def test_parameters_of_a_custom_op():
    """FlashAttention's functions are torch.library.custom_ops, whose Python signature is *args, **kwargs."""

    @torch.library.custom_op("rlkernel_test::varlen", mutates_args=("dq",))
    def op(q: torch.Tensor, dq: torch.Tensor, scale: float, window: int = -1) -> torch.Tensor:
        dq.copy_(q * scale)
        return q + window

    q, dq = torch.ones(2), torch.zeros(2)
    function = varlen.ByName(op, "f", "scale q dq")
    values = {"q": q, "dq": dq, "scale": 3.0, "softcap": 1.0}
    assert not function.reason and function(values).tolist() == [0, 0] and dq.tolist() == [3, 3]
    assert varlen.ByName(op, "f", "q dq").reason == "its f needs scale"
    assert varlen.ByName(op, "f", "q dq scale softcap").reason == "its f has no parameter softcap"
    optional = varlen.ByName(op, "f", "q dq scale softcap? window?")
    assert not optional.reason and optional.names == ["q", "dq", "scale", "window"]
    assert optional(values | {"window": 4}).tolist() == [5, 5]


def test_torch_has_these_functions():
    """The installed torch's schemas, and the stand-in's parameters beside them."""
    forward, backward = varlen.Aten().functions
    assert not forward.reason and not backward.reason
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        schema = getattr(torch.ops.aten, name).default._schema
        played = varlen._parameters(getattr(vendors.Aten, name))[0]
        assert [a.name for a in schema.arguments] == played[: len(schema.arguments)]


def test_limits(monkeypatch):
    def reasons(name, dtype=torch.bfloat16, head_dim=64, softcap=0.0, needs_grad=True, capability=(9, 0)):
        adapter = install(name, monkeypatch)
        monkeypatch.setattr(varlen, "DTYPES", (torch.float16, torch.bfloat16))
        monkeypatch.setattr(varlen, "capability", lambda device: capability)
        return adapter.reasons(torch.zeros(3, 2, head_dim, dtype=dtype), softcap, needs_grad)

    for name in KERNELS:
        assert not reasons(name) and not reasons(name, torch.float16, 192)
        assert "q must be float16 or bfloat16, got float32" in reasons(name, torch.float32)[0]
        assert "must be a multiple of 8 and at most 256, got 100" in reasons(name, head_dim=100)[0]
        assert "got 264" in reasons(name, head_dim=264)[0]
        assert "compute capability must be" in reasons(name, capability=(7, 5))[0]
    assert "must be 9, got 10.0" in reasons("fa3", capability=(10, 0))[0]
    assert not reasons("fa2", capability=(10, 0))
    assert "not deterministic above head dim 192" in reasons("fa3", head_dim=256)[0]
    assert not reasons("fa3", head_dim=256, needs_grad=False)
    for wide, said in ((192, "must be at most 128, or 256, on 10 and 11, got 192"), (256, "no softcap")):
        (reason,) = reasons("fa4", head_dim=wide, softcap=1.0, capability=(10, 0))
        assert reason.startswith("FlashAttention 4: ") and said in reason
    assert not reasons("fa4", head_dim=256, capability=(10, 3)) and not reasons("fa4", head_dim=192)
    for major in (8, 12):
        assert f"must be 9 to 11, got {major}.0" in reasons("fa4", capability=(major, 0))[0]
    q = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    assert "got 264" in install("fa2", monkeypatch).reasons(q, 0.0, True, 264)[0]  # values are wider
    assert "it has no softcap" in reasons("aten", softcap=30.0)[0] and not reasons("fa2", softcap=30.0)
    assert "needs an A100" in reasons("aten", head_dim=256, capability=(8, 6))[0]


def test_a_kernel_that_can_do_backward_goes_first(monkeypatch):
    """So that a rollout takes the trainer's; what cannot do backward runs where nothing else can."""
    install("fa2", monkeypatch)
    q, rule = torch.zeros(3, 2, 256, dtype=torch.bfloat16), AttentionRule(1.0, 0.0, 0, False)
    fa3, aten = varlen.FlashAttention3(), varlen.Aten()
    monkeypatch.setattr(varlen, "KERNELS", (fa3, aten))
    assert driver._kernel(q, rule) is aten and driver._kernel(q[..., :64], rule) is fa3
    assert driver._kernel(q, rule._replace(softcap=1.0)) is fa3
    monkeypatch.setattr(varlen, "KERNELS", (aten,))
    with pytest.raises(NotImplementedError, match="it has no softcap"):
        driver._kernel(q, rule._replace(softcap=1.0))


@pytest.mark.parametrize(("capability", "first"), [((8, 0), 2), ((9, 0), 3), ((10, 0), 4), ((12, 0), 2)])
def test_who_is_asked_first_where_all_are_there(monkeypatch, capability, first):
    every, first = varlen.KERNELS, f"FlashAttention {first}"
    install("fa2", monkeypatch)
    monkeypatch.setattr(varlen, "capability", lambda device: capability)
    monkeypatch.setattr(varlen, "KERNELS", tuple(type(kernel)() for kernel in every))
    q, rule = torch.zeros(3, 2, 64, dtype=torch.bfloat16), AttentionRule(1.0, 0.0, 0, False)
    assert driver._kernel(q, rule).name == first
    # one that lacks what backward needs, as releases before it had no deterministic one
    older = vendors.FlashAttention4._flash_attn_bwd
    monkeypatch.setattr(vendors.FlashAttention4, "_flash_attn_bwd", changed(older, without="deterministic"))
    monkeypatch.setattr(varlen, "KERNELS", tuple(type(kernel)() for kernel in every))
    assert driver._kernel(q, rule).name == ("FlashAttention 2" if capability == (10, 0) else first)
    if capability == (10, 0):
        said = driver.path(q, q, rule)
        assert said.startswith("FlashAttention 2 (FlashAttention 3: compute capability must be 9, got 10.0; ")
        assert said.endswith("FlashAttention 4: its _flash_attn_bwd has no parameter deterministic)")


def test_cpu_tensors_are_refused():
    q = torch.zeros(3, 2, 64)
    for reasons in (flash.unsupported_flash, driver.reasons):
        assert reasons(q, q, None, False) == ["q must be on an NVIDIA GPU, got cpu"]


def test_rocm_is_refused(monkeypatch):
    """Its flash attention has the schema of CUDA's, and not yet one contract."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = driver.device_reasons(types.SimpleNamespace(device=torch.device("cuda", 0)))
    assert reason.startswith("q must be on an NVIDIA GPU, got cuda:0 of ROCm")


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_the_deterministic_flag_is_put_back(before):
    stands = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        with pytest.raises(KeyError), varlen.deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled() == before[0]
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before[1]
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
    finally:
        torch.use_deterministic_algorithms(stands, warn_only=warns)
