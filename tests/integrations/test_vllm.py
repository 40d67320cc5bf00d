"""``patch_vllm`` without vLLM: idle, or an error that says so. With it: tests/integrations/in_vllm."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import rlkernel
from rlkernel.integrations import vllm as integration
from rlkernel.integrations.vllm import contract, switch

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    for name in (switch.SWITCH, switch.STRICT, switch.PLUGINS):
        monkeypatch.delenv(name, raising=False)


def test_the_entry_point_is_idle_and_imports_no_vllm_unless_it_is_asked_for():
    code = """
import sys
from rlkernel.integrations.vllm import register
register()
register()
assert not any(name.partition(".")[0] == "vllm" for name in sys.modules), "vllm"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_without_vllm_the_call_says_what_is_missing_and_the_entry_point_logs_it_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)  # its import fails
    monkeypatch.setattr(sys.modules[integration.register.__module__], "_failed", False)
    with pytest.raises(ImportError, match="needs vLLM: pip install 'vllm>="):
        rlkernel.patch_vllm()
    monkeypatch.setenv(switch.SWITCH, "sampler")
    integration.register()
    integration.register()
    assert [r.getMessage() for r in caplog.records if "leaves everything to vLLM" in r.getMessage()] == [
        f"rlkernel leaves everything to vLLM: ImportError: rlkernel.patch_vllm() needs vLLM: "
        f"pip install 'vllm{contract.SUPPORTED}'"
    ]


def test_a_strict_entry_point_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(sys.modules[integration.register.__module__], "_failed", False)
    monkeypatch.setenv(switch.SWITCH, "sampler")
    monkeypatch.setenv(switch.STRICT, "1")
    with pytest.raises(ImportError):
        integration.register()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": "sampler"}, "ops must be names, got 'sampler'"),
        ({"ops": ("sampler", "x")}, r"ops must name some of \('sampler', .*got \('sampler', 'x'\)"),
        ({"ops": ()}, "ops must name some of"),
        ({"strict": 1}, "strict must be True or False, got 1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.patch_vllm(**options)


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None and not switch.is_on()
    before = switch.ask(("sampler",), strict=True)
    assert switch.asked() == switch.Asked(("sampler",), True)
    switch.restore(before)
    assert switch.asked() is None
    monkeypatch.setenv(switch.SWITCH, "prompt_logprobs, sampler")
    assert switch.asked() == switch.Asked(("sampler", "prompt_logprobs"), False)
    monkeypatch.setenv(switch.SWITCH, "smapler")
    with pytest.raises(ValueError, match=r"VLLM_RLKERNEL must name some of .*, got \('smapler',\)"):
        switch.asked()


def test_a_list_of_plugins_that_leaves_us_out_is_seen(monkeypatch):
    point = importlib.metadata.EntryPoint(
        "rlkernel", "rlkernel.integrations.vllm:register", "vllm.general_plugins"
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] * (group == point.group))
    assert switch.left_out() == ""
    monkeypatch.setenv(switch.PLUGINS, "other,rlkernel")
    assert switch.left_out() == ""
    monkeypatch.setenv(switch.PLUGINS, "other")
    assert switch.left_out() == "VLLM_PLUGINS=other leaves 'rlkernel' out"
    monkeypatch.delenv(switch.PLUGINS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "is not installed with its entry point" in switch.left_out()


def test_the_entry_point_of_the_package_is_the_function():
    tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    name, _, function = points["vllm.general_plugins"][switch.ENTRY_POINT].partition(":")
    assert getattr(sys.modules[name], function) is integration.register
