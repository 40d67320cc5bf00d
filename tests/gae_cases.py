"""Calls of gae that its tests share: on any backend, packed, and beside fp64."""

import pytest
import torch
from accuracy import check, check_rounded_once
from backends import of, running, skip_unless_able

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("gae"))


def run(backend, rewards, values, mask=None, **options):
    skip_unless_able(backend, "gae", rewards, values)
    with running(backend):
        return rlkernel.gae(rewards, values, mask, **options)


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


WALKED = {}  # in fp32 and in fp64, by what is given


def bytes_of(x):
    return x.detach().cpu().numpy().tobytes() if isinstance(x, torch.Tensor) else x


def check_against_fp64(backend, rewards, values, mask=None, **options):
    """Within the budget; PyTorch's own error is that of the Python loop in fp32."""
    given = {"rewards": rewards, "values": values, "mask": mask, **options}
    key = tuple((k, bytes_of(v)) for k, v in given.items())
    if key not in WALKED:  # by a loop over tokens, for all backends
        with rlkernel.use_backend("reference"):
            WALKED[key] = rlkernel.gae(**given), rlkernel.gae(**{k: wide(v) for k, v in given.items()})
    torchs, exact = WALKED[key]
    ours = run(backend, rewards, values, mask, **options)
    for name, a, b, c in zip(ours._fields, ours, torchs, exact, strict=True):
        assert a.dtype == torch.float32 and c.dtype == torch.float64 and not a.requires_grad
        check(name, a, b, c, magnitude=1)
        if backend != "reference":  # which is the loop in fp32
            check_rounded_once(name, a, c)
    return ours


def packed(inputs, lengths, **options):
    """The first tokens of the rows, packed, as arguments of gae."""
    flat = {k: torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]) for k, x in inputs.items()}
    device = inputs["rewards"].device
    return flat | {"cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0)} | options
