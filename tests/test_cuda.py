"""What only a GPU can show: graphs, synchronisations, streams."""

import pytest
import torch
from bitwise import assert_equal

import rlkernel
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.reference.preference_loss import make_inputs as preference_loss_inputs
from rlkernel.reference.value_loss import make_inputs as value_loss_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
BACKENDS = pytest.mark.parametrize("backend", ["native", "triton"])


def step(leaves, ids):
    out = rlkernel.linear_logprob(*leaves, ids, temperature=0.8, return_entropy=True)
    loss = out.logprobs.sum() - 0.01 * out.entropy.sum()
    return out.logprobs, *torch.autograd.grad(loss, leaves)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_and_backward_replay_in_a_graph(backend, dtype):
    inputs = make_inputs(300, 64, 1000, dtype=dtype, device="cuda", ignored=0)
    leaves = [inputs[k].requires_grad_() for k in ("hidden", "weight")]
    with rlkernel.use_backend(backend):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step(leaves, inputs["target_ids"])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(leaves, inputs["target_ids"])
        fresh = make_inputs(300, 64, 1000, dtype=dtype, device="cuda", seed=1, ignored=0)
        with torch.no_grad():
            leaves[0].copy_(fresh["hidden"])
        inputs["target_ids"].copy_(fresh["target_ids"])
        want = step(leaves, inputs["target_ids"])
        graph.replay()
    for name, a, b in zip(("logprobs", "hidden", "weight"), captured, want, strict=True):
        assert_equal(name, a, b)


@BACKENDS
def test_logprob_does_not_synchronise(backend):
    logits = torch.randn(64, 4000, device="cuda", requires_grad=True)
    ids = torch.randint(0, 4000, (64,), device="cuda")
    with rlkernel.use_backend(backend):
        rlkernel.logprob(logits, ids, return_entropy=True).logprobs.sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = rlkernel.logprob(logits, ids, temperature=0.9, return_entropy=True)
            (grad,) = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), logits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert grad.isfinite().all()


@BACKENDS
def test_runs_on_the_current_stream(backend):
    """A kernel on the null stream would read the logits before the slow product that makes them has ended."""
    a = torch.randn(4096, 4096, device="cuda")
    ids = torch.randint(0, 4096, (4096,), device="cuda")
    want = (a @ a @ a).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.cuda.synchronize()
    with rlkernel.use_backend(backend), torch.cuda.stream(torch.cuda.Stream()):
        got = rlkernel.logprob(a @ a @ a, ids).logprobs
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@BACKENDS
def test_value_loss_replays_in_a_graph_and_does_not_synchronise(backend):
    inputs = value_loss_inputs(7, 5000, device="cuda", packed=True, clipped=True)
    values = inputs.pop("values").requires_grad_()
    items = torch.tensor(4321.0, device="cuda")

    def step():
        out = rlkernel.value_loss(values, **inputs, cliprange_value=0.2, num_items_in_batch=items)
        return *out, *torch.autograd.grad(out.loss, values)

    with rlkernel.use_backend(backend):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            values.mul_(1.5)
        torch.cuda.set_sync_debug_mode("error")
        try:
            want = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
    for name, a, b in zip(("loss", "metrics", "grad"), captured, want, strict=True):
        assert_equal(name, a, b)


@BACKENDS
def test_preference_loss_replays_in_a_graph_and_does_not_synchronise(backend):
    inputs = preference_loss_inputs(8, 3000, device="cuda", extras=True)
    logprobs = inputs.pop("logprobs").requires_grad_()
    options = {"loss_type": ["sigmoid", "bco_pair", "aot", "sft"], "ld_alpha": 0.5}
    options["running_delta"] = torch.tensor([0.1, 3.0], device="cuda")

    def step():
        out = rlkernel.preference_loss(logprobs, **inputs, **options)
        return *out, *torch.autograd.grad(out.loss, logprobs)

    with rlkernel.use_backend(backend):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            logprobs.mul_(1.5)
        torch.cuda.set_sync_debug_mode("error")
        try:
            want = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
    for k, (a, b) in enumerate(zip(captured, want, strict=True)):
        assert_equal(f"output {k}", a, b)
