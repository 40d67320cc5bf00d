"""Names of ops in a profile: there for whoever looks, by themselves; nobody pays for them who does not."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import backends
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import rlkernel
from rlkernel import dispatch
from rlkernel.bench import cases
from rlkernel.runtime import ranges

ROOT = Path(__file__).parents[1]
OPS = cases.modules()


def seen(work):
    """The ranges of rlkernel that a profile of ``work()`` shows, each with the one around it."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        work()
    events = [e for e in found.events() if e.name.startswith("rlkernel::")]
    return [(e.name, around(e)) for e in sorted(events, key=lambda e: e.time_range.start)]


def around(event):
    while (event := event.cpu_parent) is not None:
        if event.name.startswith("rlkernel::"):
            return event.name
    return None


@pytest.fixture
def nvtx(monkeypatch):
    """What NVTX is told: a name for a range that begins, None for its end."""
    told = []
    monkeypatch.setattr(torch._C, "_nvtx", None, raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append(None))
    return told


def composed():
    """A loss that looks at the whole batch: the op is made of others, which are named in their order."""
    hidden, lm_head = torch.randn(2, 3, 8, requires_grad=True), torch.randn(11, 8)
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)

    def loss(hidden):
        return rlkernel.linear_policy_loss(
            hidden, lm_head, ids, None, mask[:, 0], mask, loss_type="kl_cov"
        ).loss

    return loss, hidden


WHOLE = "rlkernel::linear_policy_loss"
PARTS = [f"rlkernel::{op}[native]" for op in ("linear_logprob", "policy_loss_select", "policy_loss")]


@pytest.mark.parametrize("op", OPS)
def test_a_profile_names_every_op_on_every_backend(op):
    names = [name for name in ("native", "triton", "reference") if dispatch.has(name, op)]
    if not backends.INTERPRETED and not torch.cuda.is_available():
        names.remove("triton")
    for name in names:
        device = "cuda" if name == "triton" and not backends.INTERPRETED else "cpu"

        def work(name=name, device=device):
            with rlkernel.use_backend(name):
                rlkernel.warm_up(op, device=device)

        passes = ("", ".backward") if OPS[op].GRADIENTS else ("",)
        assert seen(work) == [(f"rlkernel::{op}{which}[{name}]", None) for which in passes]


def test_ranges_stand_inside_each_other():
    loss, hidden = composed()
    assert seen(lambda: loss(hidden).backward()) == [
        (WHOLE, None),
        *((part, WHOLE) for part in PARTS),
        ("rlkernel::policy_loss.backward[native]", None),
        ("rlkernel::linear_logprob.backward[native]", None),
    ]


def test_nobody_pays_who_does_not_look(monkeypatch):
    """Calls of a microsecond ask two variables: not one function of ours runs for it."""

    def asked(*_, **__):
        raise AssertionError("this is on the way of every call")

    x = torch.randn(3, 8)
    for call in (rlkernel.rms_norm, rlkernel.whiten):
        call(x)
    monkeypatch.setattr(ranges, "_range", asked)
    rlkernel.warm_up(device="cpu")
    for name in ("of", "watched"):
        monkeypatch.setattr(ranges, name, asked)
    rlkernel.rms_norm(x)  # the short way, in C++
    rlkernel.whiten(x)
    ids = torch.zeros(3, dtype=torch.int64)
    rlkernel.sample(x, seeds=ids)
    logits = x.clone().requires_grad_()
    rlkernel.logprob(logits, ids).logprobs.sum().backward()
    with pytest.raises(AssertionError, match="of every call"):
        seen(lambda: rlkernel.rms_norm(x))


def test_a_graph_is_neither_broken_nor_made_anew():
    loss, hidden = composed()

    def step(hidden):
        return loss(rlkernel.rms_norm(hidden))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(hidden).backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = [pair for pair in seen(lambda: compiled(hidden).backward()) if "[" in pair[0]]
    backward = [f"rlkernel::{op}.backward[native]" for op in ("linear_logprob", "rms_norm")]
    # that of the policy loss is a multiplication, in the graph
    assert sorted(name for name, _ in found) == sorted(["rlkernel::rms_norm[native]", *PARTS, *backward])
    for name, node in found:
        assert node == name.partition("[")[0].replace(".", "_")


def test_nvtx_gets_the_names_where_it_is_asked_for(nvtx):
    loss, hidden = composed()
    with rlkernel.nvtx_ranges():
        loss(hidden)
    assert nvtx == [WHOLE, PARTS[0], None, PARTS[1], None, PARTS[2], None, None]
    nvtx.clear()
    loss(hidden)
    assert not nvtx


def test_a_block_counts_for_all_threads_and_restores_what_it_found(nvtx):
    x = torch.randn(3, 8)
    with rlkernel.nvtx_ranges():
        other = threading.Thread(target=rlkernel.rms_norm, args=(x,))
        other.start()
        other.join()
        assert nvtx == ["rlkernel::rms_norm[native]", None]
        with pytest.raises(KeyError), rlkernel.nvtx_ranges(False):
            rlkernel.rms_norm(x)
            raise KeyError
        assert len(nvtx) == 2 and ranges.nvtx
    assert not ranges.nvtx and not ranges._blocks


def test_a_range_ends_where_its_op_raises(nvtx):
    with rlkernel.nvtx_ranges(), rlkernel.debug.checks(), pytest.raises(ValueError, match="must be finite"):
        rlkernel.whiten(torch.tensor([1.0, float("nan")]))
    assert nvtx == ["rlkernel::whiten[native]", None]


def test_what_emit_nvtx_makes_a_range_of_is_not_made_one_twice(nvtx, monkeypatch):
    with rlkernel.nvtx_ranges():
        assert seen(lambda: rlkernel.whiten(torch.ones(2))) == [("rlkernel::whiten[native]", None)]
        assert nvtx == ["rlkernel::whiten[native]", None]
        monkeypatch.setattr(torch._C._autograd, "_profiler_type", lambda: SimpleNamespace(name="NVTX"))
        assert seen(lambda: rlkernel.whiten(torch.ones(2))) == [("rlkernel::whiten[native]", None)]
    assert len(nvtx) == 2


def test_the_variable_is_a_block_around_the_process(nvtx, monkeypatch):
    monkeypatch.setenv(ranges.VARIABLE, "1")
    try:
        ranges.set_up()
        assert ranges.nvtx
        with rlkernel.nvtx_ranges(False):
            assert not ranges.nvtx
        assert ranges.nvtx
    finally:
        monkeypatch.delenv(ranges.VARIABLE)
        ranges.set_up()
    assert not ranges.nvtx


def test_a_torch_without_nvtx_is_refused(monkeypatch):
    monkeypatch.delattr(torch._C, "_nvtx", raising=False)
    message = "needs a torch built for CUDA or ROCm, got"
    with pytest.raises(RuntimeError, match=f"nvtx_ranges {message}"), rlkernel.nvtx_ranges():
        pass
    with rlkernel.nvtx_ranges(False):
        pass
    monkeypatch.setenv(ranges.VARIABLE, "1")
    with pytest.raises(RuntimeError, match=f"RLKERNEL_NVTX=1 {message}"):
        ranges.set_up()
    assert not ranges._always


def test_the_example_of_the_page_prints_what_it_says(capsys):
    page = (ROOT / "docs/profiling.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    exec(compile(code, "docs/profiling.md", "exec"), {})
    printed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    told = [line.split()[1:3] for line in code.splitlines() if line.startswith("# rlkernel::")]
    assert printed == told and told
