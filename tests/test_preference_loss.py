"""preference_loss: one body of tests for every backend, against fp64; margins, edges, errors."""

import itertools

import pytest
import torch
from backends import is_slow, of
from bitwise import assert_equal
from preference_calls import arguments, check_against_fp64, run

import rlkernel
from rlkernel.calls.preference_loss import PREFERENCE_DIVERGENCES, PREFERENCE_METRICS
from rlkernel.ops.preference_loss import rule as names
from rlkernel.reference.preference_loss import make_inputs
from rlkernel.runtime import debug

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("preference_loss"))
pytestmark = pytest.mark.usefixtures("poison")

PAIRED = [name for name in names.TERMS if name not in names.UNPAIRED]


@pytest.mark.parametrize("loss_type", names.TERMS)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, loss_type):
    for drift in (0.05, 2.0):
        inputs, options = arguments(loss_type, make_inputs(12, 75, device=device, drift=drift))
        check_against_fp64(backend, inputs, **options)


@pytest.mark.parametrize("divergence", PREFERENCE_DIVERGENCES[1:])
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


@ON_EVERY_BACKEND
def test_a_pair_with_an_empty_side_is_none(backend, device):
    for loss_type in names.TERMS:
        inputs, options = arguments(loss_type, make_inputs(12, 40, device=device))
        inputs["mask"][[1, 8]] = False  # of the pairs 1 and 2
        rows = torch.tensor([0, 3, 4, 5, 6, 9, 10, 11], device=device)
        if loss_type in names.UNPAIRED:
            rows = torch.tensor([0, *range(2, 8), *range(9, 12)], device=device)
        rest = {k: None if v is None else v[rows] for k, v in inputs.items()}
        extra = {} if loss_type in names.UNPAIRED else {"nll_coef": 0.0}
        got, want = (run(backend, x, **options, **extra) for x in (inputs, rest))
        if loss_type == "sft":  # the likelihood counts chosen tokens, whatever became of the other side
            continue
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[-1][rows], want[-1])
        assert not bool(got[-1][[1, 8]].any())
        pairs = PREFERENCE_METRICS.index("pairs")
        assert got[1][pairs] == want[1][pairs]


@ON_EVERY_BACKEND
def test_a_batch_without_a_token_gives_a_connected_zero(backend, device):
    for shape in ((4, 7), (2, 0), (0, 5)):
        for loss_type in names.TERMS if shape == (4, 7) else ("sigmoid", "kto", "aot"):
            inputs, options = arguments(loss_type, make_inputs(4, 7, device=device))
            inputs = {k: None if v is None else v[: shape[0], : shape[1]] if v.dim() == 2 else v[: shape[0]]
                      for k, v in inputs.items()}  # fmt: skip
            inputs["mask"] = torch.zeros(shape, dtype=torch.bool, device=device)
            loss, metrics, *_, grad = run(backend, inputs, **options)
            assert loss.item() == 0 and not bool(grad.any()) and bool(metrics.isfinite().all())


@pytest.mark.parametrize("margin", [50.0, 900.0, 1e5])
@ON_EVERY_BACKEND
def test_margins_of_any_size(backend, device, margin):
    """The tails of the logistic function: no overflow, no 0 * infinity."""
    for loss_type in [name for name in PAIRED if name not in names.REFERENCE_FREE]:
        inputs, options = arguments(loss_type, make_inputs(4, 9, device=device))
        for row in (0, 3):
            inputs["ref_logprobs"][row] += margin if row else -margin
            check_against_fp64(backend, inputs, **options, beta=1.0)
    for drift in (1e-4, 30.0):
        for loss_type in ("orpo", "simpo"):
            inputs, options = arguments(loss_type, make_inputs(4, 9, device=device))
            inputs["logprobs"] = inputs["logprobs"].abs() * -drift
            check_against_fp64(backend, inputs, **options)


@ON_EVERY_BACKEND
def test_orpo_of_a_certain_sequence(backend, device):
    """Where the chosen tokens are certain, the derivative has a limit: -beta Q / (1 - Q)."""
    inputs = make_inputs(2, 6, device=device)
    inputs |= {"mask": torch.ones_like(inputs["mask"]), "ref_logprobs": None}
    inputs["logprobs"][0], inputs["logprobs"][1] = 0.0, -0.7
    if backend == "reference":  # its gradient is autograd's, 0 * infinity
        return
    loss, *_, grad = run(backend, inputs, loss_type="orpo", nll_coef=0.0, beta=0.3)
    odds = torch.tensor(-0.7).exp() / -torch.expm1(torch.tensor(-0.7))
    assert loss.item() == 0 and not bool(grad[1].any())
    torch.testing.assert_close(grad[0].cpu(), (-0.3 * odds / 6).expand(6))


@ON_EVERY_BACKEND
def test_aot_sorts_the_batch(backend, device):
    """Equal log-ratios keep the order of the batch; a NaN reaches the loss, whatever else is missing."""
    inputs = make_inputs(8, 20, device=device)
    for side in ("logprobs", "ref_logprobs", "mask"):
        inputs[side][1] = inputs[side][0]
        inputs[side][5] = inputs[side][4]
    for loss_type in names.SORTED:
        check_against_fp64(backend, inputs, loss_type=[loss_type, "sigmoid"], loss_weights=[2.0, 0.5])
        odd = inputs | {"mask": inputs["mask"].clone(), "logprobs": inputs["logprobs"].clone()}
        odd["mask"][7] = False
        odd["logprobs"][0][odd["mask"][0]] = torch.nan
        assert bool(run(backend, odd, loss_type=loss_type)[0].isnan())


@ON_EVERY_BACKEND
def test_running_delta_is_the_mean_of_the_batches_means(backend, device):
    state, means = torch.zeros(2, device=device), []
    for seed in range(3):
        inputs = make_inputs(8, 20, device=device, seed=seed)
        out = run(backend, inputs, loss_type="bco_pair", running_delta=state)
        means.append(torch.cat(out[2:4]).double().mean().item())
        state = out[5]
        torch.testing.assert_close(state.cpu(), torch.tensor([sum(means) / len(means), seed + 1.0]))
        shifted = torch.nn.functional.softplus(state[0] - out[2]) + torch.nn.functional.softplus(
            out[3] - state[0]
        )
        torch.testing.assert_close(out[0], shifted.mean())


@pytest.mark.parametrize("loss_type", names.TERMS)
def test_gradcheck(loss_type):
    inputs, options = arguments(loss_type, make_inputs(6, 4, dtype=torch.float64, extras=True, drift=0.7))
    aligned, nll_mask = inputs.pop("log_sum_sq_probs"), inputs.pop("nll_mask")
    if loss_type not in names.UNPAIRED:
        options |= {"nll_coef": 0.2, "nll_mask": nll_mask, "ld_alpha": 0.4}
    if loss_type in names.DIFFERENCES:
        options |= {"f_divergence_type": "js_divergence"}
    x = inputs.pop("logprobs").requires_grad_()
    assert aligned is not None  # a weight has no gradient, and a difference quotient would see one

    def loss(x):
        return rlkernel.preference_loss(x, **inputs, **options).loss

    assert torch.autograd.gradcheck(loss, (x,))


@ON_EVERY_BACKEND
def test_kl_of_each_sequence(backend, device):
    inputs, options = arguments("kto", make_inputs(6, 20, device=device))
    options["kl"] = torch.tensor(0.7, device=device)
    a = run(backend, inputs, **options)
    options["kl"] = torch.full((6,), 0.7, device=device)
    b = run(backend, inputs, **options)
    assert_equal("grad", a[-1], b[-1])
    check_against_fp64(backend, inputs, **options | {"kl": torch.arange(6.0, device=device)})


@ON_EVERY_BACKEND
def test_kl_of_sequences_without_a_token_is_nobodys(backend, device):
    inputs, options = arguments("kto", make_inputs(8, 20, device=device))
    inputs["mask"][[1, 4]] = False
    kl = torch.tensor([0.1, torch.nan, 0.7, 0.3, torch.inf, 0.9, 0.2, 0.5], device=device)
    kept = [0, 2, 3, 5, 6, 7]
    got = run(backend, inputs, **options | {"kl": kl})
    less = {k: v[kept] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    want = run(backend, less, **options | {"kl": kl[kept]})
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(got[-1][kept], want[-1])
    assert not got[-1][[1, 4]].any()
    torch.testing.assert_close(got[1][PREFERENCE_METRICS.index("kl")], kl[kept].mean(), rtol=1e-6, atol=1e-7)
    check_against_fp64(backend, inputs, **options | {"kl": kl})


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired"])
@ON_EVERY_BACKEND
def test_pairs_that_do_not_count_are_not_sorted_among_the_others(backend, device, loss_type):
    """Theirs would be in the middle, and shift the partners of all that are larger."""
    inputs = make_inputs(14, 12, device=device, drift=1.0)
    inputs["mask"][:, 4:] = True
    inputs["mask"][7 + 2], inputs["mask"][5] = False, False  # rejected of pair 2, chosen of pair 5
    # in the middle by one key, at an end by the other
    inputs["logprobs"][2], inputs["ref_logprobs"][2] = -0.01, -5.0
    inputs["logprobs"][7 + 5], inputs["ref_logprobs"][7 + 5] = -5.0, -0.01
    kept = [i for i in range(14) if i % 7 not in (2, 5)]
    options = {"loss_type": loss_type, "label_smoothing": 0.2}
    got = run(backend, inputs, **options)
    want = run(backend, {k: v[kept] for k, v in inputs.items()}, **options)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[-1][kept], want[-1])
    assert not got[-1][[2, 5, 9, 12]].any() and want[-1].any()
    check_against_fp64(backend, inputs, **options)


@pytest.mark.parametrize("loss_type", sorted(names.TERMS))
@ON_EVERY_BACKEND
def test_a_token_outside_its_support_leaves_the_masks(backend, device, loss_type):
    inputs = make_inputs(4, 20, device=device, extras=True)
    del inputs["log_sum_sq_probs"]
    inputs, options = arguments(loss_type, inputs)
    mask = inputs["mask"]
    mask[:, 3:9] = True
    inputs["nll_mask"] |= mask
    inputs["logprobs"][0, 4] = inputs["logprobs"][2, 5] = inputs["logprobs"][3, 6] = -torch.inf
    outside = inputs["logprobs"] == -torch.inf
    if inputs["ref_logprobs"] is not None:
        inputs["ref_logprobs"][1, 7] = inputs["ref_logprobs"][2, 5] = -torch.inf
        outside = outside | (inputs["ref_logprobs"] == -torch.inf)
    got = run(backend, inputs, **options)
    kept = {"mask": mask & ~outside, "nll_mask": inputs["nll_mask"] & (inputs["logprobs"] != -torch.inf)}
    want = run(backend, inputs | kept, **options)
    assert got[0].isfinite() and got[1].isfinite().all() and got[-1].isfinite().all()
    count = PREFERENCE_METRICS.index("outside_support")
    assert got[1][count] == outside.sum() > 0 and want[1][count] == 0
    assert_equal("loss", got[0], want[0])
    assert_equal("metrics", got[1][:count], want[1][:count])
    assert_equal("grad", got[-1], want[-1])
    assert not got[-1][inputs["logprobs"] == -torch.inf].any()


@ON_EVERY_BACKEND
def test_a_token_of_the_likelihood_alone_is_counted_outside_of_the_support(backend, device):
    inputs = make_inputs(4, 10, device=device)
    inputs["mask"][:] = True
    inputs["mask"][:, :3] = False  # a prompt, as ORPO has it in its likelihood
    inputs["nll_mask"] = torch.ones_like(inputs["mask"])
    inputs["logprobs"][0, 1] = inputs["logprobs"][1, 5] = -torch.inf  # of the second both masks hold it
    inputs["ref_logprobs"][1, 0] = -torch.inf  # which the likelihood does not ask
    got = run(backend, inputs, nll_coef=1.0)
    kept = {name: inputs[name] & (inputs["logprobs"] != -torch.inf) for name in ("mask", "nll_mask")}
    want = run(backend, inputs | kept, nll_coef=1.0)
    assert got[1][PREFERENCE_METRICS.index("outside_support")] == 2
    assert got[0].isfinite()
    assert_equal("loss", got[0], want[0])
    assert_equal("grad", got[-1], want[-1])


@ON_EVERY_BACKEND
def test_padding_is_not_outside_of_the_support(backend, device):
    inputs = {k: v.flatten() for k, v in make_inputs(4, 10, device=device).items()}
    inputs |= {"mask": torch.ones_like(inputs["mask"]), "cu_seqlens": torch.tensor([0, 8, 15, 20, 30])}
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(device)
    inputs["logprobs"][[3, 31, 39]] = inputs["ref_logprobs"][[4, 35]] = -torch.inf
    assert run(backend, inputs)[1][PREFERENCE_METRICS.index("outside_support")] == 2


@ON_EVERY_BACKEND
def test_a_nan_is_counted_and_raises_in_debug_mode(backend, device):
    inputs = make_inputs(4, 9, device=device)
    inputs["mask"][0, 1] = True
    inputs["logprobs"][0, 1] = torch.nan
    out = run(backend, inputs)
    assert out[1][PREFERENCE_METRICS.index("not_finite")] == 1 and bool(out[0].isnan())
    with (
        debug.checks(),
        pytest.raises(ValueError, match=r"logprobs\[0, 1\] must be finite where the mask is set"),
    ):
        run(backend, inputs)


BAD = {
    "f_divergence_type must be one of 'reverse_kl', 'forward_kl'": {"f_divergence_type": "kl"},
    "f_divergence_type must be 'reverse_kl' with loss_type 'nca_pair'": {
        "loss_type": "nca_pair",
        "f_divergence_type": "forward_kl",
    },
    "loss_weights must have one number for each of 2 losses, got 1": {
        "loss_type": ["sigmoid", "sft"],
        "loss_weights": [1.0],
    },
    "loss_type must be of pairs or of single sequences, got 'sigmoid' and 'kto'": {
        "loss_type": ["sigmoid", "kto"]
    },
    "loss_type must be a name or 1 to 16 of them, got 0": {"loss_type": []},
    "beta must be > 0 and finite, got 0": {"beta": 0},
    "label_smoothing must be in \\[0, 1\\], got 1.5": {"label_smoothing": 1.5},
    "label_smoothing must be in \\[0, 0.5\\) with loss_type 'robust', got 0.5": {
        "loss_type": "robust",
        "label_smoothing": 0.5,
    },
    "label_smoothing must be in \\(0, 1\\) with loss_type 'exo_pair', got 0": {"loss_type": "exo_pair"},
    "label_smoothing must be 0 with loss_type 'hinge', got 0.1": {
        "loss_type": "hinge",
        "label_smoothing": 0.1,
    },
    "discopop_tau must be > 0": {"discopop_tau": -1},
    "ld_alpha must be in \\[0, 1\\], got 2": {"ld_alpha": 2},
    "use_weighting must be False with loss_type 'aot'": {"loss_type": "aot", "use_weighting": True},
    "log_sum_sq_probs must be given with use_weighting": {"use_weighting": True},
    "ref_logprobs must be None with loss_type 'orpo'": {"loss_type": "orpo"},
    "ref_logprobs must have logprobs' shape \\(4, 12\\) or one sum for each of 4": {
        "ref_logprobs": torch.zeros(3)
    },
    "mask must have logprobs' shape \\(4, 12\\), got \\(4, 11\\)": {"mask": torch.ones(4, 11)},
    "nll_mask must have logprobs' shape": {"nll_mask": torch.ones(4, 11)},
    "labels must be None with a loss of pairs": {"labels": torch.ones(4)},
    "labels must be given with an unpaired loss": {"loss_type": "kto"},
    "kl must be None with a loss_type other than 'kto'": {"kl": 0.1},
    "kl must be one number or have shape \\(4,\\)": {
        "loss_type": "kto",
        "labels": torch.ones(4),
        "kl": torch.zeros(3),
    },
    "kl must be real numbers, got complex64": {
        "loss_type": "kto",
        "labels": torch.ones(4),
        "kl": torch.zeros(4, dtype=torch.complex64),
    },
    "running_delta must be None": {"running_delta": torch.zeros(2)},
    "running_delta must be \\[2\\]": {"loss_type": "bco_pair", "running_delta": torch.zeros(3)},
    "num_items_in_batch must be > 0": {"num_items_in_batch": 0},
    "logprobs must be float16": {"logprobs": torch.zeros(4, 12, dtype=torch.int64)},
    "logprobs must be \\[2B, L\\], or": {"logprobs": torch.zeros(4)},
    "logprobs must be \\[N\\] with cu_seqlens": {"cu_seqlens": torch.tensor([0, 12])},
    "ref_logprobs must not require a gradient": {"ref_logprobs": torch.zeros(4, 12, requires_grad=True)},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_is_named(message):
    with pytest.raises(ValueError, match=message):
        rlkernel.preference_loss(**(make_inputs(4, 12) | BAD[message]))


def test_an_odd_number_of_sequences_is_refused():
    with pytest.raises(
        ValueError, match="logprobs must hold chosen and as many rejected sequences, got 3 in all"
    ):
        rlkernel.preference_loss(**make_inputs(3, 5))


def test_offsets_are_looked_at():
    inputs = {k: v[0] for k, v in make_inputs(1, 12).items()}
    for offsets in ([0, 5, 13], [1, 5, 12], [0, 8, 4]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 12"):
            rlkernel.preference_loss(**inputs, cu_seqlens=torch.tensor(offsets))


def test_an_unknown_loss_type_lists_exactly_the_known_ones():
    with pytest.raises(ValueError) as raised:
        rlkernel.preference_loss(**make_inputs(2, 2), loss_type="dop")
    known = ", ".join(map(repr, names.TERMS))
    assert str(raised.value) == f"loss_type must be one of {known}, got 'dop'"


@pytest.mark.parametrize("name", names.PRESETS)
def test_presets_run(name):
    preset = rlkernel.preference_loss_preset(name)
    inputs = make_inputs(4, 9)
    types = [preset["loss_type"]] if isinstance(preset["loss_type"], str) else preset["loss_type"]
    if all(name in names.REFERENCE_FREE for name in types):
        inputs["ref_logprobs"] = None
    if "kto" in types:
        inputs["labels"] = torch.tensor([1, 0, 1, 0])
    assert bool(run("native", inputs, **preset)[0].isfinite())


def test_every_name_is_documented():
    text = rlkernel.preference_loss.__doc__
    assert [name for name in itertools.chain(names.TERMS, PREFERENCE_DIVERGENCES) if name not in text] == []
