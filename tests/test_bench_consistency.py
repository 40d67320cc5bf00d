"""``rlkernel.bench consistency``: what it measures holds, what breaks is seen, and its tables say both."""

import copy
import functools
import json

import pytest
import torch

from rlkernel.bench import cli
from rlkernel.bench.consistency import command, models, operators, pairs, tables

needs_transformers = pytest.mark.skipif(not command._able("models"), reason="transformers is not installed")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("consistency") / "report.json"
    some = {name: models.FAMILIES[name] for name in ("Qwen3", "Gemma 2", "gpt-oss")}
    parts = ",".join(part for part in ("operators", "models") if command._able(part))
    with pytest.MonkeyPatch.context() as patch:  # tests/integrations/test_hf_invariant.py has them all
        patch.setattr(models, "FAMILIES", some)
        assert cli.main(["consistency", "--short", "--part", parts, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_operator_is_invariant_under_the_mode(stored):
    rows = {(row["name"], row["dtype"]): row for row in stored["operators"]}
    made = list(operators.cases(operators.SHORT, torch.float32))
    assert len(rows) == 2 * len(made)
    for row in rows.values():
        assert row["batch_invariant"]["changed_sizes"] == [] and row["batch_invariant"]["sizes"] == 9
        assert row["cost"] and all(cost["ratio"] > 0 for cost in row["cost"].values())
    assert rows["sample", "float32"]["default"]["changed_sizes"], (
        "multinomial draws in the order of the batch"
    )


@needs_transformers
def test_models_agree_under_the_mode_and_not_without(stored):
    rows = stored["models"]
    sizes = models.SHORT
    tokens = 2 * len(sizes.prompts) * sizes.new  # alone and together
    ways = {"Qwen3": 3, "Gemma 2": 3, "gpt-oss": 2}
    for row in rows:
        ours = row["batch_invariant"]
        assert ours["equal"] == ours["tokens"] == tokens * ways[row["family"]]
        assert ours["max_abs_difference"] == ours["k1"] == ours["k3"] == 0
        assert list(row["cost"]) == [
            label for label, _ in models.steps(models.made("Qwen3", torch.float32, sizes, "default"), sizes)
        ]
    assert any(row["default"]["max_abs_difference"] > 0 for row in rows if row["dtype"] == "bfloat16")


@needs_transformers
def test_tables_and_sentences_say_what_was_found(stored):
    text = tables.text(stored)
    for line in tables.sentences(stored):
        assert line in text and f"- {line}\n" in tables.markdown(stored)
    equal = sum(row["batch_invariant"]["equal"] for row in stored["models"])
    assert (
        f"under batch_invariant {equal:,} of {equal:,} tokens are bit-equal, max |difference| 0, KL 0" in text
    )
    page = tables.markdown(stored)
    assert page.startswith("`") and "**transformers alone" in page and "| Qwen3 | float32 |" in page
    assert page.count("| float32 |") == len(stored["operators"]) // 2 + len(stored["models"])
    refused = copy.deepcopy(stored)
    refused["models"][0]["batch_invariant"] = {"refused": "torch's elu must be invariant"}
    del refused["models"][0]["cost"]
    assert "- Qwen3: torch's elu must be invariant" in tables.markdown(refused)
    assert "nothing is promised: Qwen3" in tables.markdown(refused)
    assert tables.broken(refused) == tables.broken(stored) == []
    refused["models"][1]["batch_invariant"]["equal"] -= 3
    assert "Qwen3 bfloat16: 3 of 72" in tables.broken(refused)[0]


def test_an_operator_that_the_batch_reaches_ends_with_status_1(monkeypatch, capsys):
    """A mutant: its rows know how many they are, in one size of batch alone."""

    def odd(first, end):
        return torch.zeros(end - first, 3) + (end - first == 7)

    made = operators.Operator("odd", "", 34, odd, odd, {"1": (lambda: None, lambda: None)})
    monkeypatch.setattr(operators, "cases", lambda sizes, dtype: [functools.partial(lambda: made)])
    monkeypatch.setattr(operators, "name_of", lambda make: "odd")
    arguments = ["consistency", "--short", "--part", "operators", "--dtype", "float32"]
    assert cli.main(arguments) == 1
    found = capsys.readouterr()
    assert "odd float32: rows have other bits in batches of [7]" in found.err
    assert "8 of 9" in found.out and "under batch_invariant 0." in found.out


def test_pairs_are_of_the_two_modes_by_turns():
    seen = []

    def call():
        seen.append(pairs.batch_invariant.is_enabled())
        torch.ones(600, 600).exp().sum()

    found = pairs.pairs(call, call, seconds=0, least=4)
    assert len(found.default) == len(found.batch_invariant) == 4
    assert any(seen) and not all(seen)
    assert not pairs.batch_invariant.is_enabled()
    summary = pairs.Pairs([1.0, 1.0, 2.0, 4.0], [2.0, 3.0, 8.0, 4.0]).summary()
    assert summary["ratio"] == 2.5 and summary["pairs"] == 4
    assert summary["ratio_quartiles"][0] < 2.5 < summary["ratio_quartiles"][1]


ERRORS = {
    "--part must be of operators, models, engines, got kernels": ["--part", "kernels"],
    "--dtype must be of float32, bfloat16, float16, got float64": ["--dtype", "float64"],
    "--threads must be >= 1, got 0": ["--threads", "0"],
    "alone, got --op gae --gate 1": ["--op", "gae", "--gate", "1"],
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_option(text, capsys):
    assert cli.main(["consistency", *ERRORS[text]]) == 2
    assert text in capsys.readouterr().err
    assert cli.main(["speed", "--short"]) == 2


def test_a_gpu_has_the_part_models(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["consistency", "--device", "cuda"]) == 2
    assert "--device must be one that torch finds here, cpu, got cuda" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["consistency", "--device", "cuda", "--part", "operators"]) == 2
    assert "--part must be models with --device cuda, got operators" in capsys.readouterr().err


def test_a_part_whose_package_is_not_here_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "_able", lambda part: part == "operators")
    assert cli.main(["consistency", "--part", "engines"]) == 2
    assert "--part engines must have vllm installed, got none" in capsys.readouterr().err
