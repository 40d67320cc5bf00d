"""How far a sample is from a distribution."""

import torch


def chi_square(tokens, p):
    """Of a sample from p, in units of its standard deviation above its mean."""
    expected = p * len(tokens)
    seen = torch.bincount(tokens.long(), minlength=len(p)).double()
    assert not bool(seen[p == 0].any())
    kept = p > 0
    value, freedom = ((seen - expected) ** 2 / expected)[kept].sum().item(), int(kept.sum()) - 1
    return (value - freedom) / (2 * freedom) ** 0.5
