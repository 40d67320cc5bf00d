"""gae: one body of tests for every backend, against fp64 and against verl's own function."""

import types

import emulation
import pytest
import torch
from accuracy import check, check_rounded_once, error
from backends import is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_sources import load

import rlkernel
from rlkernel import native
from rlkernel.benchmarks import _peers
from rlkernel.calls.gae import GaeCall
from rlkernel.reference.gae import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("gae"))
pytestmark = pytest.mark.usefixtures("poison")


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


def test_a_walk_in_fp32_would_be_seen():
    inputs = make_inputs(3, 300, masked=0.3)
    with rlkernel.use_backend("reference"):
        rough, exact = rlkernel.gae(**inputs), rlkernel.gae(**{k: wide(v) for k, v in inputs.items()})
    with pytest.raises(AssertionError, match="units, not 1/2"):
        check_rounded_once("advantages", rough.advantages, exact.advantages)


# one token; a tail shorter than a thread's tokens; past a tile of 1024; several tiles and a tail
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 1024), (3, 1030), (2, 2500)], ids=str)
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 1.0), (0.9, 0.0), (0.0, 0.5)])
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, shape, gamma, lam):
    if backend == "triton" and is_slow(backend, device):
        shape = (1, min(shape[1], 530))  # past its tile of 512
    inputs = make_inputs(*shape, device=device, masked=0.3)
    last = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    check_against_fp64(backend, **inputs, gamma=gamma, lam=lam)
    check_against_fp64(backend, inputs["rewards"], inputs["values"], gamma=gamma, lam=lam, last_values=last)


@ON_EVERY_BACKEND
def test_matches_fp64_packed(backend, device):
    long = 530 if backend == "triton" else 1030
    lengths = [5, 0, long, 1, 0, 0, 77, 0]
    inputs = packed(make_inputs(8, long, device=device), lengths)
    check_against_fp64(backend, **inputs, last_values=torch.arange(8.0, device=device))


@ON_EVERY_BACKEND
def test_holes_of_zero(backend, device):
    """A hole decays what is behind it, and hides whatever stands there; padded and packed."""
    length = 530 if backend == "triton" else 1100
    inputs = make_inputs(3, length, device=device, masked=0.3)
    inputs["mask"][0, -200:] = False
    options = {"gamma": 0.97, "lam": 0.9, "holes": "zero"}
    ours = check_against_fp64(backend, **inputs, **options)
    filled = {k: torch.where(inputs["mask"], inputs[k], 0) for k in ("rewards", "values")}
    for name, a, b in zip(ours._fields, ours, run(backend, **filled, gamma=0.97, lam=0.9), strict=True):
        assert_equal(name, a, torch.where(inputs["mask"], b, 0))
    dirty = {k: torch.where(inputs["mask"], inputs[k], torch.nan) for k in ("rewards", "values")}
    flat = packed(dirty | {"mask": inputs["mask"]}, [length, 3, 400])
    assert_equal("packed", run(backend, **flat, **options).advantages[:length], ours.advantages[0])
    assert (ours.advantages - run(backend, **inputs, gamma=0.97, lam=0.9).advantages).abs().max() > 0.01


@ON_EVERY_BACKEND
def test_a_lambda_for_each_sequence(backend, device):
    length = 530 if backend == "triton" else 1100
    inputs = make_inputs(4, length, device=device, masked=0.2)
    lams = torch.tensor([0.0, 1.0, 0.95, 0.5], dtype=torch.float64, device=device)
    ours = check_against_fp64(backend, **inputs, lam=lams)
    one = [run(backend, **{k: v[i : i + 1] for k, v in inputs.items()}, lam=lams[i].item()) for i in range(4)]
    assert_equal("a number", torch.cat([x.advantages for x in one]), ours.advantages)
    flat = run(backend, **packed(inputs, [length, 5, 0, length]), lam=lams)
    assert_equal("packed", flat.returns[-length:], ours.returns[3])
    # VAPO's: advantages of one lambda, returns of another
    split = run(backend, **inputs, lam=lams, return_lam=1.0, gamma=0.9)
    assert_equal("advantages", split.advantages, run(backend, **inputs, lam=lams, gamma=0.9).advantages)
    assert_equal("returns", split.returns, run(backend, **inputs, lam=1.0, gamma=0.9).returns)


def by_python(rewards, values, mask, gamma, lam):
    """The recurrence on Python's own doubles, which is quicker than tensors of one token."""
    advantages, carry, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            carry = rewards[t] + gamma * next_value - values[t] + gamma * lam * carry
            advantages[t], next_value = carry, values[t]
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param(
            *p.values, id=p.id, marks=[*p.marks, pytest.mark.slow] if is_slow(*p.values) else p.marks
        )
        for p in of("gae")
    ],
)
def test_a_sequence_of_70000(backend, device):
    length = 20_000 if backend == "triton" and device == "cpu" else 70_000  # the interpreter takes 40 s
    inputs = make_inputs(1, length, device=device)
    exact = by_python(*(x[0].tolist() for x in inputs.values()), 0.9999, 0.95)
    if backend == "reference":  # the truth of the other tests
        inputs = {k: wide(x) for k, x in inputs.items()}
    ours = run(backend, **packed(inputs, [length]), gamma=0.9999).advantages
    assert error(ours, exact) <= torch.finfo(torch.float32).eps * exact.abs().max().item()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
@ON_EVERY_BACKEND
def test_nothing(backend, device, shape):
    x = torch.empty(shape, device=device)
    out = run(backend, x, x, whiten=True)
    assert out.advantages.shape == out.returns.shape == shape
    offsets = torch.zeros(shape[0] + 1, dtype=torch.int64, device=device)
    assert run(backend, x.view(-1), x.view(-1), cu_seqlens=offsets).returns.shape == (0,)


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    """Observations in the middle, padding on both sides: NaN and inf there change no bit."""
    inputs = make_inputs(4, 1100, device=device, masked=0.4)
    inputs["mask"][1, :50], inputs["mask"][1, -600:], inputs["mask"][2] = False, False, False
    clean = run(backend, **inputs)
    dirty = dict(inputs)
    dirty["rewards"] = torch.where(inputs["mask"], inputs["rewards"], torch.nan)
    dirty["values"] = torch.where(inputs["mask"], inputs["values"], torch.inf)
    for name, a, b in zip(clean._fields, run(backend, **dirty), clean, strict=True):
        assert_equal(name, a, b)
        assert (a[~inputs["mask"]] == 0).all(), name
    for dtype in (torch.float32,) if is_slow(backend, device) else (torch.float32, torch.int64, torch.uint8):
        assert_equal("mask", run(backend, **inputs | {"mask": inputs["mask"].to(dtype)})[0], clean[0])


@ON_EVERY_BACKEND
def test_skipped_tokens_might_as_well_not_be_there(backend, device):
    inputs = make_inputs(3, 300, device=device, masked=0.5)
    out = run(backend, **inputs)
    for i in range(3):
        kept = inputs["mask"][i]
        alone = run(backend, inputs["rewards"][i : i + 1, kept], inputs["values"][i : i + 1, kept])
        for a, b in zip(out, alone, strict=True):
            torch.testing.assert_close(a[i, kept], b[0], rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_nan_that_counts_reaches_what_came_before_and_no_more(backend, device):
    inputs = make_inputs(3, 1500, device=device, masked=0)
    clean = run(backend, **inputs)
    inputs["rewards"][1, 700] = torch.nan
    out = run(backend, **inputs)
    for a, b in zip(out, clean, strict=True):
        assert a[1, :701].isnan().all()
        assert_equal("after", a[1, 701:], b[1, 701:])
        assert_equal("other rows", a[[0, 2]], b[[0, 2]])


@ON_EVERY_BACKEND
def test_any_strides_and_dtypes(backend, device):
    inputs = make_inputs(4, 60, device=device)
    expected = run(backend, **inputs)
    views = {k: torch.cat([x, x[:, :3]], 1)[:, :-3] for k, x in inputs.items()}
    for x in views.values():
        assert x.stride(0) == 63
    transposed = {k: x.T.contiguous().T for k, x in inputs.items()}
    for given_inputs in (views, transposed):
        for a, b in zip(run(backend, **given_inputs), expected, strict=True):
            assert_equal("view", a, b)
    row = {k: x[:1].expand(4, 60) for k, x in inputs.items()}
    for a, b in zip(run(backend, **row), expected, strict=True):
        assert_equal("expanded", a, b[:1].expand(4, 60))
    half = {k: x.bfloat16() if k != "mask" else x for k, x in inputs.items()}
    rounded = {k: x.float() if k != "mask" else x for k, x in half.items()}
    for a, b in zip(run(backend, **half), run(backend, **rounded), strict=True):
        assert_equal("bf16", a, b)


@ON_EVERY_BACKEND
def test_bits_of_a_sequence_depend_on_it_alone(backend, device):
    """Alone, in another order, at another address, packed, and with more padding behind it."""
    b = 3 if is_slow(backend, device) else 5
    inputs = make_inputs(b, 1100, device=device, masked=0.2)
    options = {"last_values": torch.arange(float(b), device=device)}
    whole = run(backend, **inputs, **options)
    order = torch.tensor([3, 1, 4, 0, 2], device=device) % b
    variants = {
        "again": (slice(None), inputs),
        "permuted": (order, {k: x[order] for k, x in inputs.items()}),
        "alone": (slice(2, 3), {k: x[2:3].clone() for k, x in inputs.items()}),
    }
    for name, (index, given_inputs) in variants.items():
        out = run(backend, **given_inputs, last_values=options["last_values"][index])
        for one, two in zip(out, whole, strict=True):
            assert_equal(name, one, two[index])
    flat = run(backend, **packed(inputs, [1100] * b), **options)
    more = {k: torch.cat([x, x.new_zeros(b, 600)], 1) for k, x in inputs.items()}
    longer = run(backend, **more, **options)
    for one, two, three in zip(flat, longer, whole, strict=True):
        assert_equal("packed", one.view(b, 1100), three)
        assert_equal("padded", two[:, :1100], three)


def test_bits_do_not_depend_on_threads_or_schedule():
    inputs = make_inputs(8, 3000)
    threads = torch.get_num_threads()
    with rlkernel.use_backend("native"):
        skip_unless_able("native", "gae", inputs["rewards"], inputs["values"])
        whole = rlkernel.gae(**inputs)
        torch.set_num_threads(3)
        try:
            assert_equal("three threads", rlkernel.gae(**inputs).advantages, whole.advantages)
        finally:
            torch.set_num_threads(threads)
    few = {k: x[:2] for k, x in inputs.items()}
    results = []
    for warp in (32, 64):
        module = emulation.module(warp)
        for seed, blocks in ((0, 1 << 20), (1, 2), (2, 1)):
            module.configure(seed, blocks)
            results.append(run(f"emulated-warp{warp}", **few))
        module.configure()
    for out in results[1:]:
        assert_equal("schedule", out.advantages, results[0].advantages)
        assert_equal("schedule", out.returns, results[0].returns)


@pytest.mark.slow
@pytest.mark.parametrize(
    "original, replacement",
    [
        ("if (!first.counts) return second;", ""),  # tokens under the mask count
        ("first.decay * second.gain + first.slope * second.value + first.gain", "second.gain + first.gain"),
        ("__syncthreads();  // the groups are written", ""),
        ("if (lane == kLanes - 1) after = nothing();", ""),
    ],
)
def test_a_planted_fault_is_found(original, replacement):
    inputs = make_inputs(2, 1500, masked=0.4)
    exact = rlkernel.gae(**{k: wide(x) for k, x in inputs.items()})
    broken = emulation.load(emulation.build_module(32, {"gae/kernel.cuh": (original, replacement)}))
    wrong = 0
    for seed in range(4):
        broken.configure(seed)
        with native.emulated(broken), rlkernel.use_backend("native"):
            out = rlkernel.gae(**inputs)
        wrong += not torch.allclose(out.advantages.double(), exact.advantages, atol=1e-4)
    assert wrong


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0)])
@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device, gamma, lam):
    """verl's values and mask, where the mask is set; under it verl leaves what is carried, and we 0."""
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    inputs = make_inputs(6, 200, device=device, masked=0.3)
    mask = inputs["mask"]
    advantages, returns = verl.compute_gae_advantage_return(
        inputs["rewards"], inputs["values"], mask.float(), gamma, lam
    )
    ours = run(backend, **inputs, gamma=gamma, lam=lam)
    whitened = rlkernel.whiten(ours.advantages, mask)
    torch.testing.assert_close(ours.returns[mask], returns[mask], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(whitened[mask], advantages[mask], rtol=2e-5, atol=2e-5)
    assert (ours.returns[~mask] == 0).all() and (returns[~mask] != 0).any()
    with running(backend):
        assert_equal(
            "whiten=True",
            rlkernel.gae(**inputs, gamma=gamma, lam=lam, whiten=True).advantages,
            rlkernel.whiten(ours.advantages, mask),
        )


@ON_EVERY_BACKEND
def test_reinforce_plus_plus_returns_are_gae_without_values(backend, device):
    try:
        verl = _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")
    inputs = make_inputs(6, 200, device=device, masked=0.3)
    config = type("Config", (), {"gamma": 0.98})
    advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        inputs["rewards"], inputs["mask"].float(), config=config
    )
    zeros = torch.zeros_like(inputs["values"])
    ours = run(backend, inputs["rewards"], zeros, inputs["mask"], gamma=0.98, lam=1.0)
    torch.testing.assert_close(ours.returns, returns, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        rlkernel.whiten(ours.returns, inputs["mask"]), advantages, rtol=2e-5, atol=2e-5
    )


def trl_loop(rewards, values, gamma, lam):
    """The loop of TRL's PPOTrainer, which has no mask: padding holds zeros there."""
    carry, reverse = 0, []
    for t in reversed(range(rewards.shape[1])):
        next_values = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        carry = delta + gamma * lam * carry
        reverse.append(carry)
    advantages = torch.stack(reverse[::-1], axis=1)
    return advantages, advantages + values


@ON_EVERY_BACKEND
def test_trl_says_the_same(backend, device):
    inputs = make_inputs(4, 150, device=device, masked=0)
    expected = trl_loop(inputs["rewards"], inputs["values"], 0.99, 0.9)
    for a, b in zip(run(backend, **inputs, gamma=0.99, lam=0.9), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
    masked=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
@pytest.mark.parametrize("backend", ["native", "reference", "emulated-warp32"])
def test_any_lengths_and_masks(backend, lengths, gamma, lam, seed, masked):
    """Packed is what each sequence gives by itself, and within the budget of fp64."""
    inputs = packed(make_inputs(len(lengths), 40, seed=seed, masked=masked), lengths)
    offsets = inputs["cu_seqlens"].tolist()
    out = check_against_fp64(backend, **inputs, gamma=gamma, lam=lam)
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        alone = {k: x[start:end][None] for k, x in inputs.items() if k != "cu_seqlens"}
        for a, b in zip(run(backend, **alone, gamma=gamma, lam=lam), out, strict=True):
            assert_equal("alone", a[0], b[start:end])


def their_gae(name, inputs, gamma, lam):
    """The walks of frameworks that do not step over a hole, from their own sources."""
    rewards, values, mask = inputs["rewards"], inputs["values"], inputs["mask"].to(inputs["rewards"].dtype)
    if name == "openrlhf":
        kind = load(
            "openrlhf", "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker", ray=None
        )
        walk = kind.RemoteExperienceMaker.get_advantages_and_returns
        return walk(None, values, rewards, mask, gamma, lam)
    if name == "skyrl":
        path = "skyrl/backends/skyrl_train/utils"
        tools = load("skyrl", f"{path}/torch_utils.py", "masked_mean")
        names = "compute_gae_advantage_return", "masked_whiten", "masked_var"
        return load("skyrl", f"{path}/ppo_utils.py", *names, **vars(tools)).compute_gae_advantage_return(
            rewards, values, mask, gamma, lam
        )
    tools = load(
        "slime", "slime/utils/ppo_utils.py", "vanilla_gae", "chunked_gae", "chunked_discounted_returns"
    )
    return getattr(tools, name)(rewards, values, gamma, lam)


@pytest.mark.parametrize("name", ["openrlhf", "skyrl", "vanilla_gae", "chunked_gae"])
def test_openrlhf_skyrl_and_slime_say_the_same(name):
    inputs = {k: wide(x) for k, x in make_inputs(4, 60, masked=0.3).items()}
    advantages, returns = their_gae(name, inputs, 0.97, 0.9)
    options = {"gamma": 0.97, "lam": 0.9}
    if name == "openrlhf":
        ours = rlkernel.gae(**inputs, holes="zero", **options)
        expected = [torch.where(inputs["mask"], x, 0) for x in (advantages, returns)]
    else:  # what stands under the mask is part of the walk
        ours = rlkernel.gae(inputs["rewards"], inputs["values"], **options)
        whitened = rlkernel.whiten(ours.advantages, inputs["mask"]) if name == "skyrl" else ours.advantages
        kept = inputs["mask"] if name == "skyrl" else torch.ones_like(inputs["mask"])
        ours, expected = (whitened * kept, ours.returns), (advantages * kept, returns)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_nemo_rl_says_the_same():
    """Its walk steps over holes; a lambda for each response by its length, another one for the returns."""
    inputs = {k: wide(x) for k, x in make_inputs(4, 60, masked=0.3).items()}
    kind = load(
        "nemo-rl", "nemo_rl/algorithms/advantage_estimator.py", "GeneralizedAdvantageEstimator"
    ).GeneralizedAdvantageEstimator
    config = {"gae_lambda": 0.9, "gae_gamma": 0.97, "normalize_advantages": False, "gae_lambda_value": 1.0}
    config |= {"gae_lambda_policy": None, "length_adaptive_alpha": 0.05}
    loss = {"use_kl_in_reward": False, "reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3"}
    theirs = kind(config, types.SimpleNamespace(**loss))
    theirs._build_token_level_rewards = lambda *_: inputs["rewards"] * inputs["mask"]
    advantages, returns = theirs.compute_advantage(None, None, inputs["mask"].double(), inputs["values"])
    lam = 1 - 1 / (0.05 * inputs["mask"].sum(1).float()).clamp(min=1)
    assert len(lam.unique()) > 1
    ours = rlkernel.gae(**inputs, gamma=0.97, lam=lam, return_lam=1.0)
    torch.testing.assert_close(ours.advantages, advantages)
    torch.testing.assert_close(ours.returns, torch.where(inputs["mask"], returns, 0))


def test_wrong_returns_would_be_seen():
    """The mutant of the tests here: verl's own reading of the mask, with the value of the next token."""
    inputs = make_inputs(3, 50, masked=0.4)
    right = rlkernel.gae(**inputs).advantages
    wrong = trl_loop(inputs["rewards"], inputs["values"], 1.0, 0.95)[0] * inputs["mask"]
    assert error(right, wrong) > 1e-2


GOOD = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": [0.0]}, "rewards must be a tensor, got list"),
        ({"rewards": torch.zeros(2, 3, dtype=torch.int64)}, "rewards must be float16, .* got int64"),
        ({"rewards": torch.zeros(3)}, r"rewards must be \[B, L\], got \(3,\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"rewards must be \[N\] with cu_seqlens, got \(2, 3\)"),
        ({"values": torch.zeros(2, 4)}, r"values must have rewards' shape \(2, 3\), got \(2, 4\)"),
        ({"values": torch.zeros(2, 3, requires_grad=True)}, "values must not require a gradient"),
        ({"mask": torch.ones(2)}, r"mask must have rewards' shape \(2, 3\), got \(2,\)"),
        ({"mask": [1]}, "mask must be a tensor or None, got list"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"lam": -0.1}, r"lam must be in \[0, 1\], got -0.1"),
        ({"lam": float("nan")}, r"lam must be in \[0, 1\], got nan"),
        ({"lam": "x"}, "lam must be a number or a tensor, got str"),
        ({"lam": torch.ones(3)}, r"lam must be a number or have shape \(2,\), got \(3,\)"),
        ({"lam": torch.tensor([0.5, torch.nan])}, r"lam\[1\] must be in \[0, 1\], got nan"),
        ({"return_lam": 2}, r"return_lam must be in \[0, 1\], got 2"),
        ({"holes": "none"}, "holes must be one of 'skip', 'zero', got 'none'"),
        ({"holes": "zero", "last_values": torch.zeros(2)}, "last_values must be None with holes = 'zero'"),
        ({"last_values": torch.zeros(3)}, r"last_values must have shape \(2,\), got \(3,\)"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.gae(**{**GOOD, **change})


@pytest.mark.parametrize(
    "offsets, message",
    [
        ([0, 7], r"cu_seqlens must rise from 0 to at most 6, got \[0, 7\]"),
        ([1, 6], r"cu_seqlens must rise from 0 to at most 6, got \[1, 6\]"),
        ([0, 4, 3, 6], r"cu_seqlens must rise from 0 to at most 6, got \[0, 4, 3, 6\]"),
        ([], "cu_seqlens must be an int32 or int64 tensor"),
        ([0.0, 6.0], "cu_seqlens must be an int32 or int64 tensor"),
    ],
)
def test_bad_offsets_are_named(offsets, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.gae(torch.zeros(6), torch.zeros(6), cu_seqlens=torch.tensor(offsets))


def test_debug_mode_names_the_token():
    inputs = make_inputs(2, 5, masked=0)
    inputs["values"][1, 2] = torch.nan
    with (
        rlkernel.debug.checks(),
        pytest.raises(ValueError, match=r"values\[1, 2\] must be finite .*, got nan"),
    ):
        rlkernel.gae(**inputs)
    inputs["mask"][1, 2] = False
    with rlkernel.debug.checks():
        rlkernel.gae(**inputs)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    inputs = make_inputs(3, 20)

    def step(rewards, values, mask):
        return rlkernel.gae(rewards, values, mask, whiten=True).advantages * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal("compiled", compiled(**inputs), step(**inputs))


@pytest.mark.parametrize("lam", [0.9, torch.linspace(0, 1, 3, dtype=torch.float64)], ids=["one", "each"])
def test_opcheck(lam):
    from rlkernel.ops.gae import op

    inputs = make_inputs(3, 20)
    call = GaeCall(*inputs.values(), 1.0, lam, None, torch.ones(3), "skip")
    torch.library.opcheck(op.node, op.flat(call))
    flat = [x.reshape(-1) for x in inputs.values()]
    call = GaeCall(*flat, 1.0, lam, torch.tensor([0, 20, 25, 60]), None, "zero")
    torch.library.opcheck(op.node, op.flat(call))
