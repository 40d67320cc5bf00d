"""The error budget of every op: twice what PyTorch itself loses, plus one unit in the last place."""

import torch

from rlkernel import testing

error = testing.largest_error


def check(
    name: str, got: torch.Tensor, torchs: torch.Tensor, truth: torch.Tensor, magnitude: float = 0.0
) -> None:
    testing.assert_within_budget(got, torchs, truth, name, magnitude=magnitude)


def check_rounded_once(name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """What is computed in double: half a unit in the last place of fp32 is lost, and what doubles lose."""
    got, exact = got.detach().cpu(), exact.detach().cpu()
    nearest = exact.float().abs()
    unit = torch.maximum(
        torch.nextafter(nearest, torch.full_like(nearest, torch.inf)) - nearest,
        torch.full_like(nearest, 2.0**-149),
    ).double()
    slack = 1e-13 * max(exact.abs().max().item(), 1.0) if exact.numel() else 0.0
    lost = (got.double() - exact).abs()
    assert (lost <= 0.5 * unit + slack).all(), f"{name}: {(lost / unit).max().item():.3f} units, not 1/2"
