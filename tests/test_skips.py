"""A backend, a compiler or a framework that is lost fails the run; none of them turns into a skip."""

import ast
import importlib.metadata
import re
from pathlib import Path

import backends
import pytest
import skips
import torch

import rlkernel
from rlkernel import dispatch, info
from rlkernel.bench import cases

HERE = Path(__file__).parent


def test_the_interpreter_runs_triton_where_there_is_no_gpu():
    assert backends.INTERPRETED or skips.gpu() or skips.old_triton()


@pytest.mark.parametrize("op", dispatch.ops())
def test_no_backend_refuses_the_plain_call(op):
    """Small dense inputs of make_inputs, in fp32: a backend that has the op runs them, on every device."""
    function = getattr(rlkernel, getattr(cases.modules([op])[op], "FUNCTION", op))
    pairs = [param.values for param in backends.of(op) if not any(m.args[0] for m in param.marks)]
    assert ("native", "cpu") in pairs or not dispatch.has("native", op)
    assert ("reference", "cpu") in pairs
    for backend, device in pairs:
        with backends.running(backend):
            function(**info._inputs(op, device))
            assert rlkernel.last_backend(op) == ("native" if backend in backends.EMULATED else backend)


@pytest.mark.parametrize(
    ("reasons", "algorithm", "outcome"),
    [
        ([], "fused", None),
        (["algorithm 'fused' is a Triton kernel"], "fused", "skip"),
        (["algorithm 'fused' is a Triton kernel"], "tiled", "fail"),
        (["algorithm 'fused' is a Triton kernel", "no such dtype"], "fused", "fail"),
        (["no such dtype"], "fused", "fail"),
    ],
)
def test_only_what_is_known_is_skipped(monkeypatch, reasons, algorithm, outcome):
    monkeypatch.setattr(dispatch, "reasons", lambda *_, **__: {"native": reasons})
    try:
        backends.skip_unless_able("emulated-warp32", "linear_logprob", torch.zeros(1), algorithm=algorithm)
    except (pytest.skip.Exception, pytest.fail.Exception) as exception:
        assert type(exception).__name__.lower().startswith(outcome or "nothing")
    else:
        assert outcome is None


def test_a_backend_that_always_refuses_is_a_failure(monkeypatch):
    from rlkernel.native import logprob

    logits, ids = torch.zeros(2, 3), torch.tensor([0, 1])
    backends.skip_unless_able("native", "logprob", logits, ids)
    monkeypatch.setattr(logprob, "unsupported", lambda *tensors, **options: ["no kernels here"])
    for backend in ("native", "emulated-warp64"):
        with pytest.raises(pytest.fail.Exception, match=f"{backend} must run this logprob"):
            backends.skip_unless_able(backend, "logprob", logits, ids)


@pytest.mark.parametrize(
    ("reason", "holder", "value", "lost"),
    [
        (skips.NO_INTERPRETER, "gpu", True, False),
        (skips.NO_INTERPRETER, "gpu", False, True),
        ("needs a CUDA or ROCm device", "gpu", False, False),
        ("needs a CUDA or ROCm device", "gpu", True, True),
        ("needs TRL, which rlkernel does not depend on", "another_python", False, True),
        ("verl: verl 0.9.1 does not import here: no", "another_python", False, True),
        ("Triton is not installed", "gpu", False, True),
        ("flashinfer is not installed", "gpu", False, False),
        ("a reason that nobody has heard of", "gpu", False, True),
        ("", "gpu", False, True),
    ],
)
def test_a_reason_holds_where_the_machine_lacks_what_it_names(monkeypatch, reason, holder, value, lost):
    monkeypatch.setattr(skips, "old_triton", lambda: False)
    monkeypatch.setattr(skips, holder, lambda: value)
    assert skips.out_of_order(reason) == lost


@pytest.mark.parametrize(
    ("requirement", "old"),
    [("triton==3.6.0; platform_system == 'Linux'", True), ("triton==3.7.0", True), ("triton==3.7.1", False),
     ("triton==3.10.0", False), ("pytorch-triton-rocm==3.6.0", False), ("sympy", False)],
)  # fmt: skip
def test_only_torch_itself_may_ask_for_an_older_triton(monkeypatch, requirement, old):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy", requirement])
    assert skips.old_triton() == old


def reasons_in(tree):
    """Every reason of a skip that a file spells out, with an x for what is filled in."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", "")
        given = [k.value for k in node.keywords if k.arg == "reason"]
        given += node.args[:1] if name == "skip" else []
        for text in given if name in ("skip", "skipif", "importorskip") else ():
            if isinstance(text, ast.Constant):
                yield text.value
            elif isinstance(text, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "x" for part in text.values]
                if len("".join(parts)) > 2 * len(parts) + 2:  # else it is all filled in
                    yield "".join(parts)


def test_every_reason_has_its_rule():
    files = [path for path in HERE.rglob("*.py") if path.name != "test_summary.py"]
    found = {(path.name, reason) for path in files for reason in reasons_in(ast.parse(path.read_text()))}
    assert len(found) > 30
    assert not [x for x in sorted(found) if not any(re.match(text, x[1]) for text, _ in skips.RULES)]
