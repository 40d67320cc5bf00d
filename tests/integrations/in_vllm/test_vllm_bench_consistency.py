"""``rlkernel.bench consistency --part engines``: engines of both modes, by turns."""

import torch

from rlkernel.bench.consistency import engines, models


def test_engine_and_trainer_agree_under_the_mode_alone():
    row = engines.measured("Qwen3", torch.bfloat16, models.SHORT, seconds=0, least=1)
    tokens = 3 * engines.SAMPLES * len(models.SHORT.prompts) * models.SHORT.new
    assert row["batch_invariant"]["equal"] == row["batch_invariant"]["tokens"] == tokens
    assert row["batch_invariant"]["max_abs_difference"] == 0 < row["default"]["max_abs_difference"]
    assert list(row["cost"]) == list(engines.WORK)
