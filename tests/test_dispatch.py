"""Which backend runs, why the others do not, and that a named one never falls back."""

import hashlib
import logging
import threading
import types

import pytest
import torch

import rlkernel
from rlkernel import dispatch

LOGITS, IDS = torch.zeros(2, 3), torch.tensor([0, 1])


def able(**functions):
    return types.SimpleNamespace(unsupported=lambda *tensors, **options: [], **functions)


def unable(*reasons):
    return types.SimpleNamespace(unsupported=lambda *tensors, **options: list(reasons))


@pytest.fixture
def backends(monkeypatch):
    """A dict from backend to module that stands in for what can be imported."""
    modules = {}
    monkeypatch.setattr(
        dispatch,
        "_import",
        lambda name, op: (modules[name], "") if name in modules else (None, f"has no {op}"),
    )
    return modules


def test_takes_the_first_that_can(backends):
    backends |= {"native": unable("no such dtype"), "triton": able(), "reference": able()}
    assert dispatch.pick("logprob", LOGITS) is backends["triton"]
    assert rlkernel.last_backend("logprob") == "triton"


def test_a_forced_backend_runs_or_raises_with_its_reasons(backends):
    backends |= {"native": unable("too wide", "too long"), "reference": able()}
    with rlkernel.use_backend("native"), pytest.raises(NotImplementedError) as caught:
        dispatch.pick("logprob", LOGITS, IDS)
    assert "native: too wide; too long" in str(caught.value)
    assert "reference" not in str(caught.value)
    assert "(2, 3) float32 on cpu, (2,) int64 on cpu" in str(caught.value)


def test_the_error_lists_every_backend(backends):
    backends["native"] = unable("no")
    with pytest.raises(NotImplementedError) as caught:
        dispatch.pick("logprob", LOGITS)
    for name in dispatch.BACKENDS:
        assert f"  {name}: " in str(caught.value)


def test_options_reach_the_backend(backends):
    seen = {}
    backends["native"] = types.SimpleNamespace(unsupported=lambda *t, **options: seen.update(options) or [])
    dispatch.pick("logprob", LOGITS, algorithm="fused")
    assert seen == {"algorithm": "fused"}


def test_an_op_may_have_an_order_of_its_own(backends, monkeypatch):
    import rlkernel.ops.logprob as op

    backends |= {"native": able(), "triton": able()}
    monkeypatch.setattr(op, "ORDER", ("triton", "native"), raising=False)
    assert dispatch.pick("logprob", LOGITS) is backends["triton"]


def test_explain_gives_every_backend_and_reason(backends):
    backends |= {"native": unable("why not"), "reference": able()}
    reasons = rlkernel.explain("logprob", LOGITS, IDS)
    assert list(reasons) == list(dispatch.BACKENDS)
    assert reasons["native"] == ["why not"] and reasons["reference"] == []
    assert reasons["triton"] == ["has no logprob"]


def test_use_backend_nests_and_survives_an_exception():
    def forced():
        return dispatch._forced.get()

    with rlkernel.use_backend("reference"):
        with pytest.raises(KeyError), rlkernel.use_backend("native"):
            assert forced() == "native"
            raise KeyError
        assert forced() == "reference"
        with rlkernel.use_backend("auto"):
            assert forced() == "auto"
        assert forced() == "reference"
    assert forced() == "auto"


def test_use_backend_holds_for_its_own_thread():
    seen = []
    with rlkernel.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch._forced.get()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


def test_backward_on_another_thread_uses_the_backend_of_forward():
    """Autograd runs GPU backwards on its own threads, and a caller may leave the block before backward."""
    leaf = torch.zeros(2, 3, requires_grad=True)
    with rlkernel.use_backend("reference"):
        out = rlkernel.logprob(leaf, IDS)
    used = []
    from rlkernel.reference import logprob as reference

    backward = reference.backward
    try:
        reference.backward = lambda *args: used.append("reference") or backward(*args)
        out.logprobs.sum().backward()
    finally:
        reference.backward = backward
    assert used == ["reference"]


@pytest.mark.parametrize("call", [lambda: rlkernel.use_backend("cudnn").__enter__()])
def test_unknown_backend(call):
    with pytest.raises(ValueError, match="name must be 'auto' or one of 'native', .*, got 'cudnn'"):
        call()


def test_unknown_op_lists_the_known_ones():
    for ask in (rlkernel.explain, rlkernel.last_backend):
        with pytest.raises(ValueError, match="op must be one of .*'linear_logprob'.*, got 'logp'"):
            ask("logp")


def test_what_ran_is_logged_once(caplog, backends):
    backends |= {"native": able(), "reference": able()}
    dispatch._last.pop("logprob", None)
    with caplog.at_level(logging.DEBUG, "rlkernel"):
        dispatch.pick("logprob", LOGITS)
        dispatch.pick("logprob", LOGITS)
    assert [r.getMessage() for r in caplog.records] == ["logprob runs on native"]


@pytest.mark.parametrize(
    ("package", "module", "seen"),
    [
        ("", "raise ImportError('needs a driver')", ["needs a driver"]),
        ("raise ImportError('needs a driver')", "", ["needs a driver"]),
        ("", "import no_such_module_anywhere", ["No module named 'no_such_module_anywhere'"]),
        ("", "1 / 0", ZeroDivisionError),
        ("1 / 0", "", ZeroDivisionError),
        ("", "no_such_name", NameError),
        ("", "def broken(:", SyntaxError),
        ("", "raise RuntimeError('CUDA error')", RuntimeError),
    ],
)
def test_a_backend_that_is_broken_is_an_error_and_one_that_lacks_its_package_is_not(
    monkeypatch, tmp_path, package, module, seen
):
    """A fault in a backend's own code must not look like a machine without it: its tests would be skipped."""
    name = "backend_" + hashlib.sha256(f"{package}|{module}".encode()).hexdigest()[:12]
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(package)
    (tmp_path / name / "logprob.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(dispatch.BACKENDS, name, name)
    if isinstance(seen, list):
        assert rlkernel.explain("logprob", LOGITS, IDS)[name] == seen
        assert dispatch.has(name, "logprob") == (package == "")
        return
    with pytest.raises(seen):
        rlkernel.explain("logprob", LOGITS, IDS)
    with rlkernel.use_backend(name), pytest.raises(seen):
        dispatch.pick("logprob", LOGITS, IDS)
    if package:
        with pytest.raises(seen):
            dispatch.has(name, "logprob")
