"""warm_up: every op runs once outside of a capture, and what is asked for wrongly is refused."""

import pytest
import torch

import rlkernel
from rlkernel import dispatch
from rlkernel.bench import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_op_is_run_where_none_is_named():
    ran = rlkernel.warm_up()
    missing = set(cases.modules()) - set(ran)
    assert not missing, f"warm_up leaves out {', '.join(sorted(missing))}"
    assert all(backend in dispatch.BACKENDS for backend in ran.values())
    assert all(rlkernel.last_backend(op) == backend for op, backend in ran.items() if op in cases.modules())


def test_named_ops_run_alone_on_the_backend_that_is_forced():
    with rlkernel.use_backend("reference"):
        assert rlkernel.warm_up("logprob", "gae", device="cpu") == {
            "logprob": "reference",
            "gae": "reference",
        }


def test_what_ran_before_is_not_said_to_have_run():
    rlkernel.warm_up("gae", device="cpu")
    assert "gae" not in rlkernel.warm_up("logprob", device="cpu")
    assert rlkernel.last_backend("gae") is not None  # nor is it forgotten


def test_the_forward_and_the_backward_are_run_with_the_sizes_that_are_given(monkeypatch):
    seen = []
    function = rlkernel.logprob

    def logprob(logits, *args, **options):
        seen.append((tuple(logits.shape), logits.dtype, logits.requires_grad))
        return function(logits, *args, **options)

    monkeypatch.setattr(rlkernel, "logprob", logprob)
    rlkernel.warm_up("logprob", device="cpu", dtype=torch.bfloat16, V=4096)
    assert seen == [((3, 4096), torch.bfloat16, True)]


def test_a_step_of_ones_own_is_run_and_its_ops_are_told():
    runs = []

    def step():
        rewards = torch.zeros(2, 3, device=DEVICE)
        runs.append(rlkernel.whiten(rewards))

    assert set(rlkernel.warm_up(step, "logprob", device=DEVICE)) == {"whiten", "logprob"}
    assert len(runs) == 3


def test_generators_stay_where_they_were():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    rlkernel.warm_up("sampling", "policy_loss", device="cpu")
    assert torch.equal(torch.rand(2), want)


def test_it_runs_where_gradients_are_off():
    with torch.no_grad():
        assert rlkernel.warm_up("logprob", device="cpu")
    with torch.inference_mode():
        assert rlkernel.warm_up("logprob", device="cpu")


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (("logprop",), {}, "what must be functions, or ops of .*logprob.*, got 'logprop'"),
        ((3,), {}, "what must be functions, or ops of .*, got 3"),
        (("logprob",), {"H": 8}, "sizes must be among N, V of these ops, got H=8"),
        (("logprob",), {"V": 0}, "V must be >= 1, got 0"),
    ],
)
def test_errors_say_what_is_wrong(what, options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.warm_up(*what, device="cpu", **options)


def test_an_op_that_is_named_must_run(monkeypatch):
    with rlkernel.use_backend("flashinfer"):
        with pytest.raises(NotImplementedError, match="no backend can run gae"):
            rlkernel.warm_up("gae", device="cpu")
        assert rlkernel.warm_up(device="cpu") == {}


def test_not_while_a_graph_is_captured(monkeypatch):
    from rlkernel.runtime import gpu

    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
        rlkernel.warm_up("gae", device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_what_was_warmed_up_can_be_captured():
    logits = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    rlkernel.warm_up("logprob", V=4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rlkernel.logprob(logits, ids).logprobs
    graph.replay()
    assert torch.equal(captured, rlkernel.logprob(logits, ids).logprobs)
