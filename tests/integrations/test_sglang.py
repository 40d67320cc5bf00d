"""``patch_sglang`` without SGLang: idle, or an error that says so. With it: tests/integrations/in_sglang."""

import logging
import sys

import pytest
import torch
from doors import check_idle_entry_point

import rlkernel
from rlkernel.integrations import sglang as integration
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations.sglang import contract, given_ids, switch


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    for name in (*switch.OWN, switch.PLUGINS):
        monkeypatch.delenv(name, raising=False)


def test_the_entry_point_is_idle_and_imports_no_sglang_unless_it_is_asked_for():
    check_idle_entry_point("sglang")


def test_without_sglang_the_call_says_what_is_missing_and_the_entry_point_logs_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)  # its import fails
    missing = f"rlkernel.patch_sglang() needs SGLang: pip install 'sglang{contract.SUPPORTED}'"
    with pytest.raises(ImportError) as told:
        rlkernel.patch_sglang()
    assert str(told.value) == missing
    monkeypatch.setenv(switch.SWITCH, "sampler")
    # another test's framework may have switched off every logger that was there, as some do
    monkeypatch.setattr(logging.getLogger("rlkernel.patch_sglang"), "disabled", False)
    caplog.set_level(logging.WARNING, logger="rlkernel.patch_sglang")
    integration.register()
    assert f"rlkernel leaves everything to SGLang: ImportError: {missing}" in caplog.text
    monkeypatch.setenv(switch.STRICT, "1")
    with pytest.raises(ImportError):
        integration.register()


@pytest.mark.parametrize(
    ("text", "names"),
    [("1", switch.PARTS), ("prompt_logprobs, sampler", switch.PARTS), ("0", None), ("", None)],
)
def test_how_the_variable_is_read(monkeypatch, text, names):
    monkeypatch.setenv(switch.SWITCH, text)
    asked = switch.asked()
    assert (asked and asked.parts) == names
    monkeypatch.setenv(switch.SWITCH, "attention")
    with pytest.raises(ValueError, match=r"SGLANG_RLKERNEL must name some of .*, got \('attention',\)"):
        switch.asked()


def test_ids_that_requests_ask_for():
    lists = [[3, 4], None, [], [9]]
    assert given_ids.table(lists, torch.device("cpu")).tolist() == [[3, 4], [-1, -1], [-1, -1], [9, -1]]
    assert given_ids.table([], torch.device("cpu")).shape == (0, 0)
    assert given_ids.asks(lists) and not given_ids.asks([None, None]) and not given_ids.asks(None)
    assert not given_ids.outside(lists, 10) and given_ids.outside(lists, 9)
    assert given_ids.outside([[-1]], 9) and not given_ids.outside(None, 9)


def test_tokens_without_a_probability_are_named_by_the_lowest_other_ids():
    ids = torch.tensor([[5, 0, -1, -1], [1, 2, 3, 4]])
    assert all_named(ids, 10).tolist() == [[5, 0, 1, 2], [1, 2, 3, 4]]
