"""The example of the page: under batch_invariant the trainer's log-probability is the rollout's."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

_SPEC = importlib.util.spec_from_file_location(
    "zero_kl", Path(__file__).parents[2] / "examples" / "zero_kl.py"
)
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


def test_the_difference_is_zero_under_the_mode_alone(capsys):
    found = example.run(example.parse(["--short"]))
    for report in found["batch_invariant"]:
        assert report.identical and report.tokens == 36
        assert report.max_abs_difference == report.kl.k1 == report.kl.k3 == 0
    assert any(report.max_abs_difference > 0 for report in found["default"])
    example.show(found)
    assert "all 72 log-probabilities are the same number: ratio 1, KL 0." in capsys.readouterr().out


def test_a_difference_is_said(capsys):
    found = example.run(example.parse(["--short", "--steps", "1"]))
    example.show({**found, "batch_invariant": found["default"]})
    assert "log-probabilities differ: that should not be" in capsys.readouterr().out
