"""What people run: ``rlkernel.bench consistency --part engines`` and ``examples/zero_kl.py --vllm``."""

import importlib.util
from pathlib import Path

import torch

from rlkernel.bench.consistency import engines, models

_SPEC = importlib.util.spec_from_file_location(
    "zero_kl", Path(__file__).parents[3] / "examples" / "zero_kl.py"
)
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


def test_engine_and_trainer_agree_under_the_mode_alone():
    row = engines.measured("Qwen3", torch.bfloat16, models.SHORT, seconds=0, least=1)
    tokens = 3 * engines.SAMPLES * len(models.SHORT.prompts) * models.SHORT.new
    assert row["batch_invariant"]["equal"] == row["batch_invariant"]["tokens"] == tokens
    assert row["batch_invariant"]["max_abs_difference"] == 0 < row["default"]["max_abs_difference"]
    assert list(row["cost"]) == list(engines.WORK)


def test_the_example_gives_the_engine_new_weights_and_stays_at_zero():
    found = example.run(example.parse(["--short", "--vllm"]))
    assert [report.identical for report in found["batch_invariant"]] == [True, True]
    assert found["default"][0].max_abs_difference > 0
