"""The error budget of every op: twice what PyTorch itself loses, plus one unit in the last place."""

import torch


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute difference; NaN and infinities must stand at the same places."""
    got, truth = got.detach().double().cpu(), truth.detach().double().cpu()
    assert got.shape == truth.shape, f"shape {tuple(got.shape)}, truth has {tuple(truth.shape)}"
    special = ~truth.isfinite()
    same = torch.equal(got[special].nan_to_num(7e77), truth[special].nan_to_num(7e77))
    assert same and bool(got[~special].isfinite().all()), f"non-finite values differ: {got} against {truth}"
    return (got - truth)[~special].abs().max().item() if bool((~special).any()) else 0.0


def check(
    name: str, got: torch.Tensor, torchs: torch.Tensor, truth: torch.Tensor, magnitude: float = 0.0
) -> None:
    """``magnitude``: of the numbers whose difference the result is, where it may itself come out smaller."""
    ours, theirs = error(got, truth), error(torchs, truth)
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    ulp = torch.finfo(got.dtype).eps * max(largest, magnitude)
    assert ours <= 2 * theirs + ulp, f"{name}: {ours:.3e} from fp64, PyTorch {theirs:.3e}, one ulp {ulp:.1e}"


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
