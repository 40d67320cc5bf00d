"""What ``print(report)`` shows."""

import math

import pytest
import torch

from rlkernel.consistency import compare


def pair(spread):
    g = torch.Generator().manual_seed(1)
    rollout = -3 * torch.rand(16, 64, generator=g)
    return rollout + spread * torch.randn(16, 64, generator=g), rollout


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 1.0, 100.0])
def test_a_table_is_aligned_and_at_most_thirty_lines(spread):
    train, rollout = pair(spread)
    train[0, :4] = torch.tensor([math.nan, -math.inf, 0.5, 1e9])
    lines = str(compare(train, rollout, advantages=torch.ones(16), worst=50)).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 110
    assert lines[0] == "1,024 tokens of 16 sequences: trainer in float32, rollout in float32"
    assert lines[2] == f"{'left out below':24}1 NaN or +inf, 1 no mass in training"
    assert all(line[24] != " " == line[23] for line in lines[1:12])
    start = lines.index("furthest apart")
    assert len({len(line) for line in lines[start + 1 :]}) == 1
    assert sum(int(line.split("(")[0].split()[-1].replace(",", "")) for line in lines[13:start]) == 1022


def test_a_table_of_equals_and_of_nothing():
    _, rollout = pair(0)
    text = str(compare(rollout, rollout))
    assert f"{'same bits':24}1,024 (100%), all\n" in text and "furthest" not in text and "-0" not in text
    nothing = str(compare(rollout, rollout, rollout > 0))
    assert nothing.splitlines()[1:] == [f"{'same bits':24}0 (of none)", "nothing to compare"]


def test_only_all_is_a_hundred_percent():
    x = torch.zeros(1, 200_000)
    y = x.clone()
    y[0, 7] = -1
    assert f"{'same bits':24}199,999 (99.999%)\n" in str(compare(x, y))
    assert f"{'same bits':24}1 (0.001%)\n" in str(compare(torch.where(x == y, -1.0, y), y))
