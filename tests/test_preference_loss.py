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


def packed_of(inputs):
    """Sequences of these lengths one behind the other, some tokens of padding behind them, and which tokens they
    are in the padded form."""
    length = inputs["logprobs"].shape[1]
    lengths = torch.tensor([length, 0, 1, length - 3, 7, length], device=inputs["logprobs"].device)
    inside = torch.arange(length, device=lengths.device) < lengths[:, None]
    padded = {k: v & inside if v.dtype == torch.bool else v for k, v in inputs.items()}

    def pack(x):
        return torch.cat([x[inside], x.flatten()[:5]])

    packed = {k: pack(v) for k, v in inputs.items()}
    packed["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return padded, packed, inside


@ON_EVERY_BACKEND
def test_packed_is_padded(backend, device):
    padded, packed, inside = packed_of(make_inputs(6, 33, device=device, extras=True))
    packed["mask"][-5:] = True  # behind the last sequence: padding
    options = {"loss_type": ["sigmoid", "sft", "aot"], "nll_coef": 0.1, "ld_alpha": 0.3}
    weighted = {"loss_type": ["ipo"], "use_weighting": True, "nll_coef": 0.1}
    for more in (options, weighted):
        a, b = run(backend, padded, **more), run(backend, packed, **more)
        for name, x, y in zip(OUTPUTS, a, b, strict=True):
            if name == "grad":
                assert not bool(y[-5:].any())
                x, y = x[inside], y[:-5]
            if x is None or backend == "reference":  # PyTorch's sums follow the shape
                assert (x is None) == (y is None)
                torch.testing.assert_close(y, x)
            else:
                assert_equal(name, y, x)


@ON_EVERY_BACKEND
def test_what_the_mask_hides_is_never_read(backend, device):
    inputs = make_inputs(8, 50, device=device, extras=True)
    inputs["mask"][2] = False
    inputs["nll_mask"] |= inputs["mask"]
    options = {
        "loss_type": ["sigmoid", "orpo", "aot_unpaired", "simpo", "sft"],
        "ld_alpha": 0.5,
    }
    clean = run(backend, inputs, **options)
    either = inputs["mask"] | inputs["nll_mask"]
    for poison in (torch.nan, torch.inf, -torch.inf):
        dirty = dict(inputs)
        dirty["logprobs"] = torch.where(either, inputs["logprobs"], poison)
        dirty["ref_logprobs"] = torch.where(inputs["mask"], inputs["ref_logprobs"], poison)
        for name, got, want in zip(OUTPUTS, run(backend, dirty, **options), clean, strict=True):
            if want is not None:
                assert_equal(f"{name} {poison}", got, want)
                assert bool(got.isfinite().all())
    assert not bool(clean[-1][~either].any())


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


@ON_EVERY_BACKEND
def test_a_long_sequence_loses_nothing(backend, device):
    """A log-ratio of 0.35 between sums of 140,000; summed in fp32, it would be off by some hundredths."""
    length = 70_000 if not is_slow(backend, device) or backend == "emulated-warp32" else 5000
    inputs = make_inputs(2, length, device=device)
    inputs["mask"][:] = True
    g = torch.Generator().manual_seed(2)
    inputs["ref_logprobs"] = (-2 - torch.rand(2, length, generator=g)).to(device)
    inputs["logprobs"] = inputs["ref_logprobs"] + 5e-6
    exact = (inputs["logprobs"].double() - inputs["ref_logprobs"].double()).sum(1)
    out = run(backend, inputs)
    rewards = torch.cat([out[2], out[3]]).double()
    assert ((rewards - 0.1 * exact).abs() <= 1e-7 * (0.1 * exact).abs()).all()
    check_against_fp64(backend, inputs)


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
def test_bits_depend_on_the_pair_alone(backend, device):
    inputs = make_inputs(12, 300, device=device, extras=True)
    options = {
        "loss_type": ["sigmoid", "exo_pair", "orpo"],
        "label_smoothing": [0, 0.1, 0],
        "nll_coef": 0.2,
        "use_weighting": True,
        "ld_alpha": 0.5,
        "num_items_in_batch": 7,
        "num_tokens_in_batch": 900,
    }
    whole = run(backend, inputs, **options)
    order = torch.tensor([4, 0, 5, 2, 1, 3], device=device)
    for pairs in (order, order[:3], order[2:3]):
        rows = torch.cat([pairs, pairs + 6])
        part = run(backend, {k: v[rows] for k, v in inputs.items()}, **options)
        assert_equal("grad", part[-1], whole[-1][rows])
        assert_equal("rewards", torch.cat(part[2:4]), torch.cat(whole[2:4])[rows])
    for _ in range(3 if is_slow(backend, device) else 100):
        for name, got, want in zip(OUTPUTS, run(backend, inputs, **options), whole, strict=True):
            assert want is None or assert_equal(name, got, want) is None


def test_bits_do_not_depend_on_threads():
    inputs = make_inputs(16, 3000, extras=True)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(run("native", inputs, ld_alpha=0.3, nll_coef=0.1))
    finally:
        torch.set_num_threads(before)
    for name, a, b in zip(OUTPUTS, *results, strict=True):
        assert a is None or assert_equal(name, a, b) is None


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
        shifted = torch.nn.functional.softplus(state[0] - out[2]) + torch.nn.functional.softplus(out[3] - state[0])
        torch.testing.assert_close(out[0], shifted.mean())


def check_a_long_sequence(backend):
    test_a_long_sequence_loses_nothing(backend, "cpu")


MUTANTS = {
    "a mask that multiplies": (
        "preference_loss.cuh",
        "if (present) {\n        const double weight = i < cutoff ? 1 : p.ld_alpha;",
        "{\n        const double weight = (i < cutoff ? 1 : p.ld_alpha) * present;",
    ),
    "sums in fp32": ("preference_loss.cuh", "s[kLogps] += x * weight;", "s[kLogps] = float(s[kLogps] + x * weight);"),
    "the derivative's sign": ("preference_loss_terms.h", "rejected = beta * sigmoid(v);", "rejected = -beta * sigmoid(v);"),
    "the tail's weight": ("preference_loss_terms.h", "whole ? head : head * b.ld_alpha", "head"),
    "the token behind the cutoff": ("preference_loss.cuh", "found = i + 1;", "found = i;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant):
    import emulation

    from rlkernel import native

    header, text, fault = MUTANTS[mutant]
    module = emulation.load(emulation.build_module(32, {header: (text, fault)}))
    inputs = make_inputs(4, 400)
    inputs["ref_logprobs"][~inputs["mask"]] = torch.nan
    with native.emulated(module), pytest.raises(AssertionError):
        check_against_fp64("native", inputs, loss_type=["bco_pair", "sigmoid"], ld_alpha=0.5)
        check_a_long_sequence("native")


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


def test_hypothesis_shapes_and_masks():
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    from hypothesis import strategies as st

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(st.integers(0, 5), st.integers(0, 40), st.sampled_from(list(names.TERMS)), st.integers(0, 99))
    def every_shape(pairs, length, loss_type, seed):
        g = torch.Generator().manual_seed(seed)
        inputs, options = arguments(loss_type, make_inputs(max(2 * pairs, 1), max(length, 1), seed=seed))
        inputs = {k: None if v is None else v[: 2 * pairs, :length] if v.dim() == 2 else v[: 2 * pairs]
                  for k, v in inputs.items()}  # fmt: skip
        inputs["mask"] &= torch.rand(2 * pairs, 1, generator=g) > 0.3
        inputs["logprobs"] = torch.where(inputs["mask"], inputs["logprobs"], torch.nan)
        if loss_type not in names.UNPAIRED:
            options["ld_alpha"] = (seed % 3) / 2
        check_against_fp64("native", inputs, **options)

    every_shape()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logprobs_get_a_gradient_of_their_dtype(dtype):
    inputs = to(make_inputs(4, 20), dtype)
    out = run("native", inputs)
    assert out[-1].dtype == dtype and out[0].dtype == torch.float32


@ON_EVERY_BACKEND
def test_strides_and_counts_as_tensors(backend, device):
    inputs = make_inputs(6, 40, device=device)
    wide = {k: torch.stack([v, v], -1)[..., 0] for k, v in inputs.items()}  # a stride of 2
    for name, a, b in zip(OUTPUTS, run(backend, wide), run(backend, inputs), strict=True):
        assert a is None or assert_equal(name, a, b) is None
    counts = {"num_items_in_batch": 11, "num_tokens_in_batch": 300}
    tensors = {k: torch.tensor(v, device=device) for k, v in counts.items()}
    a, b = (run(backend, inputs, nll_coef=0.3, **x) for x in (counts, tensors))
    assert_equal("grad", a[-1], b[-1])
    assert_equal("loss", a[0], b[0])
    numbers = torch.ones_like(inputs["mask"], dtype=torch.float32) * inputs["mask"]
    assert_equal("grad", run(backend, inputs | {"mask": numbers})[-1], run(backend, inputs)[-1])


@ON_EVERY_BACKEND
def test_kl_of_each_sequence(backend, device):
    inputs, options = arguments("kto", make_inputs(6, 20, device=device))
    options["kl"] = torch.tensor(0.7, device=device)
    a = run(backend, inputs, **options)
    options["kl"] = torch.full((6,), 0.7, device=device, requires_grad=True)
    b = run(backend, inputs, **options)
    assert_equal("grad", a[-1], b[-1])
    check_against_fp64(backend, inputs, **options | {"kl": torch.arange(6.0, device=device)})


@ON_EVERY_BACKEND
def test_a_nan_is_counted_and_raises_in_debug_mode(backend, device):
    inputs = make_inputs(4, 9, device=device)
    inputs["mask"][0, 1] = True
    inputs["logprobs"][0, 1] = torch.nan
    out = run(backend, inputs)
    assert out[1][PREFERENCE_METRICS.index("not_finite")] == 1 and bool(out[0].isnan())
    with debug.checks(), pytest.raises(ValueError, match=r"logprobs\[0, 1\] must be finite where the mask is set"):
        run(backend, inputs)


def test_under_compile_as_one_node():
    inputs = make_inputs(4, 30, extras=True)
    leaf = inputs.pop("logprobs").requires_grad_()
    options = {"loss_type": ["sigmoid", "sft", "aot"], "loss_weights": [0.8, 1.0, 0.3], "use_weighting": True}
    options |= {"loss_type": ["sigmoid", "sft", "bco_pair"], "running_delta": torch.tensor([0.1, 2.0])}

    def loss(x):
        out = rlkernel.preference_loss(x * 1, **inputs, **options)
        return out.loss, out.metrics, out.chosen_rewards

    want = loss(leaf)
    (grad,) = torch.autograd.grad(want[0], leaf)
    got = torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf)
    for name, a, b in zip(OUTPUTS, got, want, strict=False):
        assert_equal(name, a.detach(), b.detach())
    assert_equal("grad", torch.autograd.grad(got[0], leaf)[0], grad)


def test_opcheck():
    from rlkernel.ops import preference_loss as module

    for loss_type, nll in (("sigmoid", True), ("kto", False)):
        inputs, _ = arguments(loss_type, make_inputs(4, 12, extras=True))
        rule = names.build(
            loss_type=loss_type, loss_weights=None, beta=0.1, label_smoothing=0.0, gamma=0.5, discopop_tau=0.05,
            f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, ld_alpha=None, use_weighting=nll,
            nll_coef=0.1, desirable_weight=1.0, undesirable_weight=1.0, num_items_in_batch=None,
            num_tokens_in_batch=None, dp_size=1, has_reference=True,
        )  # fmt: skip
        assert module._rule(*module._flat(rule)) == rule
        tensors = (
            inputs["logprobs"].requires_grad_(), inputs["ref_logprobs"], inputs["mask"],
            inputs["nll_mask"] if nll else None, inputs["log_sum_sq_probs"] if nll else None, None,
            inputs.get("labels"), None, None, None, None,
        )  # fmt: skip
        torch.library.opcheck(module._op, (*tensors, *module._flat(rule)))


def test_peak_memory_is_one_gradient():
    from rlkernel.bench.memory import peak_extra

    inputs = make_inputs(64, 1024)
    x = inputs.pop("logprobs").requires_grad_()

    def step():
        with rlkernel.use_backend("native"):
            return torch.autograd.grad(rlkernel.preference_loss(x, **inputs).loss, x)

    step()
    assert peak_extra(step, "cpu") <= x.numel() * 4 + 64 * 1024


def test_retained_graph_and_a_second_upstream():
    inputs = make_inputs(4, 12)
    x = inputs.pop("logprobs").requires_grad_()
    loss = rlkernel.preference_loss(x, **inputs).loss
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert_equal("again", torch.autograd.grad(loss * 2, x)[0], first * 2)


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
    "loss_type must be of pairs or of single sequences, got 'sigmoid' and 'kto'": {"loss_type": ["sigmoid", "kto"]},
    "loss_type must be a name or 1 to 16 of them, got 0": {"loss_type": []},
    "beta must be > 0 and finite, got 0": {"beta": 0},
    "label_smoothing must be in \\[0, 1\\], got 1.5": {"label_smoothing": 1.5},
    "label_smoothing must be in \\[0, 0.5\\) with loss_type 'robust', got 0.5": {
        "loss_type": "robust",
        "label_smoothing": 0.5,
    },
    "label_smoothing must be in \\(0, 1\\) with loss_type 'exo_pair', got 0": {"loss_type": "exo_pair"},
    "label_smoothing must be 0 with loss_type 'hinge', got 0.1": {"loss_type": "hinge", "label_smoothing": 0.1},
    "discopop_tau must be > 0": {"discopop_tau": -1},
    "ld_alpha must be in \\[0, 1\\], got 2": {"ld_alpha": 2},
    "use_weighting must be False with loss_type 'aot'": {"loss_type": "aot", "use_weighting": True},
    "log_sum_sq_probs must be given with use_weighting": {"use_weighting": True},
    "ref_logprobs must be None with loss_type 'orpo'": {"loss_type": "orpo"},
    "ref_logprobs must have logprobs' shape \\(4, 12\\) or one sum for each of 4": {"ref_logprobs": torch.zeros(3)},
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
    with pytest.raises(ValueError, match="logprobs must hold chosen and as many rejected sequences, got 3 in all"):
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
    assert [name for name in itertools.chain(names.TERMS, DIVERGENCES) if name not in text] == []
