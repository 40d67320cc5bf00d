"""preference_loss: one body of tests for every backend, against fp64."""

import itertools

import pytest
import torch
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal

import rlkernel
from rlkernel import debug
from rlkernel.ops import _preference_rule as names
from rlkernel.reference.preference_loss import make_inputs
from rlkernel.types import DIVERGENCES, PREFERENCE_METRICS

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("preference_loss"))
pytestmark = pytest.mark.usefixtures("poison")

PAIRED = [name for name in names.TERMS if name not in names.UNPAIRED]
OUTPUTS = ("loss", "metrics", "chosen_rewards", "rejected_rewards", "logps", "running_delta", "grad")


def run(backend, inputs, upstream=1.0, **options):
    """The outputs and the gradient of logprobs."""
    inputs = dict(inputs)
    inputs["logprobs"] = inputs["logprobs"].detach().clone().requires_grad_()
    with running(backend):
        out = rlkernel.preference_loss(**inputs, **options)
        (grad,) = torch.autograd.grad(out.loss * upstream, inputs["logprobs"])
    return out.loss.detach(), *out[1:], grad


def to(inputs, dtype):
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def arguments(loss_type, inputs):
    """Inputs and options with which a loss type can be called."""
    options = {"loss_type": loss_type}
    device, rows = inputs["logprobs"].device, len(inputs["logprobs"])
    if loss_type in names.UNPAIRED:
        inputs = inputs | {"labels": torch.arange(rows, device=device) % 3 == 0}
        options |= {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    if loss_type == "kto":
        options["kl"] = 0.7
    if loss_type in names.REFERENCE_FREE:
        inputs = inputs | {"ref_logprobs": None}
    if loss_type in names.SMOOTHED:
        options["label_smoothing"] = 0.1
    return inputs, options


def check_against_fp64(backend, inputs, **options):
    truth = run("reference", to(inputs, torch.float64), **options)
    torchs = run("reference", inputs, **options)
    ours = run(backend, inputs, **options)
    size = truth[1][PREFERENCE_METRICS.index("preference_loss")].abs().item() + 1e-3
    for name, a, b, c in zip(OUTPUTS, ours, torchs, truth, strict=True):
        if c is None:
            assert a is None
            continue
        assert a.dtype == torch.float32
        check(name, a, b, c, magnitude=size if name == "loss" else 0.0)


@pytest.mark.parametrize("loss_type", names.TERMS)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, loss_type):
    for drift in (0.05, 2.0):
        inputs, options = arguments(loss_type, make_inputs(12, 75, device=device, drift=drift))
        check_against_fp64(backend, inputs, **options)


@pytest.mark.parametrize("divergence", DIVERGENCES[1:])
@ON_EVERY_BACKEND
def test_divergences_match_fp64(backend, device, divergence):
    for loss_type in names.DIFFERENCES[:: 3 if is_slow(backend, device) else 1]:
        inputs, options = arguments(loss_type, make_inputs(8, 40, device=device, drift=0.1))
        for alpha in (0.5, 1.7) if divergence == "alpha_divergence" else (0.5,):
            options |= {"f_divergence_type": divergence, "f_alpha_divergence_coef": alpha}
            check_against_fp64(backend, inputs, **options)


@ON_EVERY_BACKEND
def test_everything_at_once_matches_fp64(backend, device):
    inputs = make_inputs(12, 75, device=device, extras=True)
    inputs["running_delta"] = torch.tensor([0.3, 7.0], device=device)
    options = {
        "loss_type": ["sigmoid", "bco_pair", "sft", "sppo_hard", "orpo", "sigmoid_norm"],
        "loss_weights": [0.8, 0.2, 1.0, -0.1, 0.5, 2.0],
        "label_smoothing": [0.1, 0, 0, 0, 0, 0.2],
        "nll_coef": 0.3,
        "ld_alpha": 0.4,
        "use_weighting": True,
        "dp_size": 2,
        "num_items_in_batch": 40,
        "num_tokens_in_batch": 900,
        "upstream": 3.0,
    }
    check_against_fp64(backend, inputs, **options)
    sums = torch.where(inputs["mask"], inputs["ref_logprobs"], 0).sum(1)
    check_against_fp64(backend, inputs | {"ref_logprobs": sums}, **options)
