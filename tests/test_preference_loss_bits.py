"""preference_loss: what its bits depend on, long sequences, layouts, compiled graphs, memory."""

import pytest
import torch
from backends import is_slow, of
from bitwise import assert_equal
from preference_calls import OUTPUTS, arguments, check_against_fp64, run, to

import rlkernel
from rlkernel.ops.preference_loss import rule as names
from rlkernel.reference.preference_loss import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("preference_loss"))
pytestmark = pytest.mark.usefixtures("poison")


def packed_of(inputs):
    """Sequences of these lengths one behind the other, with padding behind the last; the same padded; and
    which tokens they are there."""
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


def check_a_long_sequence(backend):
    test_a_long_sequence_loses_nothing(backend, "cpu")


MUTANTS = {
    "a mask that multiplies": (
        "preference_loss/kernel.cuh",
        "if (present) {\n        const double weight = i < cutoff ? 1 : p.ld_alpha;",
        "{\n        const double weight = (i < cutoff ? 1 : p.ld_alpha) * present;",
    ),
    "sums in fp32": (
        "preference_loss/kernel.cuh",
        "s[kLogps] += x * weight;",
        "s[kLogps] = float(s[kLogps] + x * weight);",
    ),
    "the derivative's sign": (
        "preference_loss/terms.h",
        "rejected = beta * sigmoid(v);",
        "rejected = -beta * sigmoid(v);",
    ),
    "the tail's weight": ("preference_loss/terms.h", "whole ? head : head * b.ld_alpha", "head"),
    "the token behind the cutoff": ("preference_loss/kernel.cuh", "found = i + 1;", "found = i;"),
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


def test_hypothesis_shapes_and_masks():
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    from hypothesis import strategies as st

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(
        st.integers(0, 5), st.integers(0, 40), st.sampled_from(list(names.TERMS)), st.integers(0, 99)
    )
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
    from rlkernel.calls.preference_loss import PreferenceLossCall
    from rlkernel.ops.preference_loss import op

    for loss_type, nll in (("sigmoid", True), ("kto", False)):
        inputs, _ = arguments(loss_type, make_inputs(4, 12, extras=True))
        rule = names.build(
            loss_type=loss_type, loss_weights=None, beta=0.1, label_smoothing=0.0, gamma=0.5,
            discopop_tau=0.05,
            f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, ld_alpha=None, use_weighting=nll,
            nll_coef=0.1, desirable_weight=1.0, undesirable_weight=1.0, num_items_in_batch=None,
            num_tokens_in_batch=None, dp_size=1, has_reference=True,
        )  # fmt: skip
        tensors = (
            inputs["logprobs"].requires_grad_(), inputs["ref_logprobs"], inputs["mask"],
            inputs["nll_mask"] if nll else None, inputs["log_sum_sq_probs"] if nll else None, None,
            inputs.get("labels"), None, None, None, None,
        )  # fmt: skip
        torch.library.opcheck(op.node, op.flat(PreferenceLossCall(*tensors, rule)))


def test_peak_memory_is_one_gradient_and_a_mask():
    from rlkernel.bench.memory import peak_extra

    inputs = make_inputs(64, 1024)
    x = inputs.pop("logprobs").requires_grad_()

    def step():
        with rlkernel.use_backend("native"):
            return torch.autograd.grad(rlkernel.preference_loss(x, **inputs).loss, x)

    step()
    assert peak_extra(step, "cpu") <= x.numel() * 5 + 64 * 1024


def test_retained_graph_and_a_second_upstream():
    inputs = make_inputs(4, 12)
    x = inputs.pop("logprobs").requires_grad_()
    loss = rlkernel.preference_loss(x, **inputs).loss
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert_equal("again", torch.autograd.grad(loss * 2, x)[0], first * 2)
