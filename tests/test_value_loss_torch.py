"""value_loss: how autograd and torch.compile use it, and what it says of bad input."""

import pytest
import torch
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from value_loss_cases import CLIP, double, make_inputs, run

import rlkernel
from rlkernel.calls.value_loss import ValueLossCall
from rlkernel.ops.value_loss import op

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("value_loss"))
pytestmark = pytest.mark.usefixtures("poison")


@ON_EVERY_BACKEND
def test_upstream_gradient_and_retained_graph(backend, device):
    inputs = make_inputs(3, 50, device=device)
    skip_unless_able(backend, "value_loss", inputs["values"])
    values = inputs["values"].clone().requires_grad_()
    with running(backend):
        out = rlkernel.value_loss(**inputs | {"values": values}, **CLIP)
    assert not out.metrics.requires_grad
    out.loss.backward(retain_graph=True)
    once = values.grad.clone()
    out.loss.backward()
    assert_equal("twice", values.grad, 2 * once)
    assert_equal("scaled", run(backend, inputs, upstream=-4.0, **CLIP)[2], -4 * once)


ROW = torch.zeros(2, 3)
STARTS = torch.tensor([0, 2, 3])
BAD = [
    (dict(values=torch.zeros(2, 3, dtype=torch.int64)), "values must be float16, .* got int64"),
    (dict(values=torch.zeros(3)), r"values must be \[B, L\], or \[N\] with cu_seqlens, got \(3,\)"),
    (dict(cu_seqlens=STARTS), r"values must be \[N\] with cu_seqlens, got \(2, 3\)"),
    (dict(returns=torch.zeros(2, 2)), r"returns must have values' shape \(2, 3\), got \(2, 2\)"),
    (dict(returns=torch.zeros(2, 3).long()), "returns must be float16"),
    (dict(returns=torch.zeros(2, 3, requires_grad=True)), "returns must not require a gradient"),
    (dict(mask=torch.ones(3)), r"mask must have values' shape \(2, 3\), got \(3,\)"),
    (dict(mask=[1]), "mask must be a tensor, got list"),
    (dict(old_values=ROW), "cliprange_value must be given with old_values, got None"),
    (dict(cliprange_value=0.2), "old_values must be given with cliprange_value, got None"),
    (dict(old_values=ROW, cliprange_value=-1.0), "cliprange_value must be >= 0 and finite, got -1.0"),
    (dict(loss="mae"), "loss must be one of 'mse', 'huber', got 'mae'"),
    (dict(loss="huber", huber_delta=0), "huber_delta must be > 0 and finite, got 0"),
    (dict(loss_agg_mode="mean"), "loss_agg_mode must be one of 'token-mean', .*, got 'mean'"),
    (dict(dp_size=0), "dp_size must be an integer >= 1, got 0"),
    (dict(dp_size=2), "num_items_in_batch must be given with dp_size > 1 and 'token-mean', got None"),
    (dict(num_items_in_batch=0), "num_items_in_batch must be > 0 and finite, got 0"),
    (dict(num_items_in_batch=torch.tensor(-1.0)), "num_items_in_batch must be > 0 and finite, got -1.0"),
    (dict(num_items_in_batch=torch.ones(2)), r"num_items_in_batch must be one number, got shape \(2,\)"),
    (dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=0), "loss_scale_factor must be > 0"),
]
BAD_PACKED = [
    (dict(cu_seqlens=STARTS.float()), r"cu_seqlens must be an int32 or int64 tensor .*, got float32 \(3,\)"),
    (dict(cu_seqlens=STARTS[None]), r"cu_seqlens must be .* tensor \[S \+ 1\], got int64 \(1, 3\)"),
    (dict(cu_seqlens=STARTS + 1), r"cu_seqlens must rise from 0 to at most 3, got \[1, 3, 4\]"),
    (dict(cu_seqlens=torch.tensor([0, 2, 1])), r"cu_seqlens must rise from 0 to at most 3, got \[0, 2, 1\]"),
    (dict(cu_seqlens=STARTS * 2), r"cu_seqlens must rise from 0 to at most 3, got \[0, 4, 6\]"),
    (dict(loss_agg_mode="seq-mean-token-sum-norm"), "loss_scale_factor must be given with cu_seqlens"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(values=ROW, returns=ROW, mask=ROW.bool())
    with pytest.raises(ValueError, match=message):
        rlkernel.value_loss(**good | change)


@pytest.mark.parametrize(("change", "message"), BAD_PACKED, ids=[m[:40] for _, m in BAD_PACKED])
def test_bad_packed_input_is_named(change, message):
    good = dict(values=ROW[0], returns=ROW[0], mask=ROW[0].bool(), cu_seqlens=STARTS)
    with pytest.raises(ValueError, match=message):
        rlkernel.value_loss(**good | change)


@pytest.mark.parametrize("backend", ["native", "emulated-warp32", "emulated-warp64", "triton"])
@pytest.mark.parametrize("starts", [[5, 9000, 2, -7, 4000], [0, 2**40, 3], [-(2**40), 1]], ids=str)
def test_offsets_that_are_none_are_no_illegal_access(backend, starts, monkeypatch):
    """What a GPU does outside debug mode: nothing outside of the tensors is read or written."""
    from rlkernel.ops import _packing

    monkeypatch.setattr(_packing, "check", lambda *args: None)
    inputs = make_inputs(1, 4200)
    packed = {k: v[0] for k, v in inputs.items()} | {"cu_seqlens": torch.tensor(starts)}
    skip_unless_able(backend, "value_loss", packed["values"])
    assert run(backend, packed, **CLIP)[2].shape == (4200,)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_compiles_as_one_graph(backend, packed):
    inputs = make_inputs(4, 40, packed=packed)
    skip_unless_able(backend, "value_loss", inputs["values"])

    def step(values, items):
        out = rlkernel.value_loss(**inputs | {"values": values * 2}, **CLIP, num_items_in_batch=items)
        return out.loss * 3, out.metrics

    for items in (None, 55.0, torch.tensor(55)):
        results = []
        for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            values = inputs["values"].clone().requires_grad_()
            with rlkernel.use_backend(backend):
                loss, metrics = fn(values, items)
                loss.backward()
            results.append((loss.detach(), metrics, values.grad))
        for name, a, b in zip(("loss", "metrics", "grad"), *results, strict=True):
            assert_equal(name, a, b)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("items", [None, 7.0, torch.tensor(7.0)], ids=["own", "number", "tensor"])
def test_opcheck(items, packed):
    inputs = make_inputs(4, 40, packed=packed)
    values = inputs["values"].requires_grad_()
    tensors = values, inputs["returns"], inputs["mask"], inputs["old_values"], inputs.get("cu_seqlens")
    call = ValueLossCall(*tensors, items, 0.2, 0.5, "mean", 2.0, values.dtype)
    torch.library.opcheck(op.node, op.flat(call))


def test_forced_backend_never_falls_back():
    inputs = double(make_inputs(2, 5))
    with rlkernel.use_backend("native"), pytest.raises(NotImplementedError, match="native: .*float64"):
        rlkernel.value_loss(**inputs, **CLIP)
