"""``patch_vllm`` without vLLM: idle, or an error that says so. With it: tests/integrations/in_vllm."""

import importlib.metadata
import logging
import sys
from typing import NamedTuple

import pytest
import torch
from doors import ROOT, check_idle_entry_point

import rlkernel
from rlkernel.integrations import vllm as integration
from rlkernel.integrations._environment import restore
from rlkernel.integrations.vllm import contract, switch


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    for name in (*switch.OWN, switch.PLUGINS):
        monkeypatch.delenv(name, raising=False)


def test_the_entry_point_is_idle_and_imports_no_vllm_unless_it_is_asked_for():
    check_idle_entry_point("vllm")


def test_without_vllm_the_call_says_what_is_missing_and_the_entry_point_logs_it_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)  # its import fails
    monkeypatch.setattr(sys.modules[integration.register.__module__], "_failed", False)
    with pytest.raises(ImportError, match="needs vLLM: pip install 'vllm>="):
        rlkernel.patch_vllm()
    monkeypatch.setenv(switch.SWITCH, "sampler")
    # another test's framework may have switched off every logger that was there, as some do
    monkeypatch.setattr(logging.getLogger("rlkernel.patch_vllm"), "disabled", False)
    caplog.set_level(logging.WARNING, logger="rlkernel.patch_vllm")
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
        ({"return_support": -1}, r"return_support must be an integer in \[0, 2\*\*31\), got -1"),
        ({"return_support": True}, "return_support must be an integer .*, got True"),
        (
            {"return_support": 5, "ops": ("sampler",)},
            r"ops must name 'sampler' and 'support' where return_support is 5, got \('sampler',\)",
        ),
        ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
        (
            {"batch_invariant": True, "ops": ("sampler",)},
            r"ops must name 'attention' where batch_invariant is set, got \('sampler',\)",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.patch_vllm(**options)


def test_the_environment_is_asked_and_given_back(monkeypatch):
    assert switch.asked() is None and not switch.is_on()
    request = switch.Asked(("sampler", "support", "attention"), True, 64, True)
    before = switch.ask(request)
    assert switch.asked() == request
    restore(before)
    assert switch.asked() is None
    monkeypatch.setenv(switch.SWITCH, "prompt_logprobs, sampler")
    assert switch.asked() == switch.Asked(("sampler", "prompt_logprobs"), False)
    monkeypatch.setenv(switch.SWITCH, "smapler")
    with pytest.raises(ValueError, match=r"VLLM_RLKERNEL must name some of .*, got \('smapler',\)"):
        switch.asked()
    monkeypatch.setenv(switch.SWITCH, "sampler,support")
    monkeypatch.setenv(switch.SUPPORT, "all")
    with pytest.raises(ValueError, match=r"VLLM_RLKERNEL_SUPPORT must be an integer .*, got 'all'"):
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


class Sample(NamedTuple):
    """Of vLLM's CompletionOutput what is read."""

    token_ids: list
    sampling_mask: object


class Mask(NamedTuple):
    token_ids: list


class Request(NamedTuple):
    outputs: list


KEPT = [[[3, 7], [], [-1]], [[5]], []]  # of three samples; an empty list: all were, [-1]: not known


@pytest.mark.parametrize("kind", ["requests", "samples", "lists"])
def test_kept_tokens_become_what_logprob_takes(kind):
    samples = [Sample([0] * len(kept), Mask(kept) if kept else None) for kept in KEPT]
    outputs = {"requests": [Request(samples[:2]), Request(samples[2:])], "samples": samples, "lists": KEPT}
    ids, offsets, known = integration.support_of(iter(outputs[kind]))
    assert ids.tolist() == [3, 7, 5] and ids.dtype == torch.int32
    assert offsets.tolist() == [0, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert known.tolist() == [[True, True, False], [True, False, False], [False, False, False]]
    wide = integration.support_of(outputs[kind], length=4)
    assert wide.known.shape == (3, 4) and wide.offsets.tolist()[5:7] == [3, 3]
    logits = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[7, 1, 2, 0], [5, 0, 0, 0], [0, 0, 0, 0]])
    out = rlkernel.logprob(logits, targets, support_ids=wide.ids, support_offsets=wide.offsets).logprobs
    assert out[0, 0] == pytest.approx(logits[0, 0, [3, 7]].log_softmax(-1)[1].item(), abs=1e-6)
    assert out[1, 0] == 0


def test_outputs_without_their_support_are_refused():
    for sample in (Sample([1, 2], None), Sample([1, 2], Mask([[1]]))):
        with pytest.raises(
            ValueError, match="outputs must have the support of each of their tokens, got [01] of 2"
        ):
            integration.support_of([sample])
    with pytest.raises(ValueError, match="length must be at least 3, that of the longest sample, got 2"):
        integration.support_of(KEPT, length=2)
    assert integration.support_of([]).known.shape == (0, 0)
