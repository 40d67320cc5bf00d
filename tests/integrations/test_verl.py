"""What stands in the place of verl's functions, beside verl's own: values, gradients, metrics."""

import itertools
import types

import numpy as np
import pytest
import tiny
import torch
from accuracy import check
from verl_cases import (
    actor_config,
    batch,
    check_against_verl,
    core,
    differentiated,
    nothing_left_behind,
    random,
    rewards,
    upstream,
    weights_of,
)

import rlkernel
from rlkernel.integrations.verl import fused_head

torch_functional = pytest.importorskip("verl.utils.torch_functional")
torch_head = pytest.importorskip("verl.utils.experimental.torch_functional")
triton_head = pytest.importorskip("verl.utils.kernel.linear_cross_entropy")

assert nothing_left_behind and upstream  # fixtures of every test here

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


class FlashAttn(torch.autograd.Function):
    """flash-attn's cross entropy, which writes its gradient over the logits."""

    @staticmethod
    def forward(ctx, logits, labels, inplace_backward):
        ctx.save_for_backward(labels)
        ctx.logits, ctx.inplace = logits, inplace_backward
        loss = torch.nn.functional.cross_entropy(logits.detach().float(), labels, reduction="none")
        return loss, torch.zeros_like(loss)

    @staticmethod
    def backward(ctx, grad, _):
        (labels,) = ctx.saved_tensors
        p = ctx.logits.detach().float().softmax(-1)
        kept = (labels != -100)[:, None]
        found = ((p.scatter_add(1, labels.clamp(min=0)[:, None], -kept.float())) * kept * grad[:, None]).to(
            ctx.logits.dtype
        )
        if ctx.inplace:
            ctx.logits.data.copy_(found)
        return found, None, None


@pytest.fixture
def flash_attn(monkeypatch):
    def cross_entropy_loss(logits, labels, inplace_backward):
        return FlashAttn.apply(logits, labels, inplace_backward)

    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.setattr(torch_functional, "cross_entropy_loss", cross_entropy_loss, raising=False)
    monkeypatch.delenv("VERL_DISABLE_FLASH_ATTN_CE", raising=False)


# logits


@pytest.mark.parametrize("shape", [(1, 7), (5, 50), (2, 3, 33), (1, 1, 2)], ids=str)
@DTYPES
def test_logprobs_are_verls(dtype, shape):
    logits = random(0, *shape, scale=3.0)
    labels = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1))

    def call(x):
        return torch_functional.logprobs_from_logits(logits=x, labels=labels)

    (got,), _ = check_against_verl(call, [logits], dtype, [random(2, *shape[:-1])], "logprobs_from_logits")[0]
    assert got.dtype == torch.float32 and got.shape == shape[:-1]


@pytest.mark.parametrize("inplace", [True, False])
@DTYPES
def test_logprobs_are_verls_with_flash_attn(flash_attn, dtype, inplace):
    logits, labels = random(0, 2, 3, 33, scale=3.0), torch.tensor([[5, -100, 0], [32, 7, 7]])

    def call(x):
        return torch_functional.logprobs_from_logits(x, labels, inplace)

    def exact(x):
        found = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return found.masked_fill(labels == -100, 0)

    (got,), (grad,) = check_against_verl(
        call, [logits], dtype, [random(2, 2, 3)], "logprobs_from_logits", exact
    )[0]
    assert got[0, 1] == 0 and not grad[0, 1].any()


@pytest.mark.parametrize(
    ("available", "disabled", "asked", "overwritten"),
    [(1, "0", True, True), (1, "0", False, False), (1, "1", True, False), (0, "0", True, False)],
)
def test_logits_are_overwritten_where_verl_overwrites_them(
    flash_attn, monkeypatch, available, disabled, asked, overwritten
):
    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", bool(available))
    monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", disabled)

    def changed():
        logits = random(0, 4, 9).requires_grad_() * 1
        before = logits.detach().clone()
        torch_functional.logprobs_from_logits(logits, torch.tensor([1, 2, 3, 8]), asked).sum().backward()
        return not torch.equal(before, logits.detach())

    with rlkernel.patch_verl():
        assert changed() == overwritten
    assert changed() == overwritten


def test_logprobs_of_a_no_grad_pass_leave_the_logits_alone(flash_attn):
    logits = random(0, 4, 9)
    before = logits.clone()
    with rlkernel.patch_verl(), torch.no_grad():
        torch_functional.logprobs_from_logits(logits[:1].expand(4, 9), torch.tensor([1, 2, 3, 8]))
    assert torch.equal(before, logits)


@pytest.mark.parametrize("shape", [(1, 7), (5, 50), (2, 3, 33)], ids=str)
@DTYPES
def test_entropies_are_verls(dtype, shape):
    def call(x):
        return torch_functional.entropy_from_logits(x)

    logits, upstream = random(0, *shape, scale=3.0), [random(2, *shape[:-1])]
    (got,), _ = check_against_verl(call, [logits], dtype, upstream, "entropy_from_logits")[0]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("chunk", [2, 2048])
@DTYPES
def test_chunked_entropies_are_verls(dtype, chunk):
    def call(x):
        return torch_functional.entropy_from_logits_with_chunking(x, chunk_size=chunk)

    name, logits = "entropy_from_logits_with_chunking", random(0, 5, 50, scale=3.0)
    exact = torch_functional.entropy_from_logits  # verl's own with chunks is fp32 in any case
    (got,), _ = check_against_verl(call, [logits], dtype, [random(2, 5)], name, exact)[0]
    assert got.dtype == torch.float32


def test_what_is_impossible_has_no_part_in_an_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert torch_functional.entropy_from_logits(logits).isnan()
    with rlkernel.patch_verl():
        assert torch_functional.entropy_from_logits(logits).item() == pytest.approx(np.log(2), rel=1e-6)


def test_an_engine_compiles_the_entropy():
    """As verl's engines do, which then have one graph."""
    logits = random(0, 5, 50)
    with rlkernel.patch_verl():
        compiled = torch.compile(
            torch_functional.entropy_from_logits, dynamic=True, fullgraph=True, backend="aot_eager"
        )
        x = logits.clone().requires_grad_()
        got = compiled(x)
        got.sum().backward()
    y = logits.clone().requires_grad_()
    want = torch_functional.entropy_from_logits(y)
    want.sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x.grad, y.grad)


def test_checkpointing_of_the_entropy():
    x = random(0, 5, 50).requires_grad_()
    with rlkernel.patch_verl():
        torch.utils.checkpoint.checkpoint(
            torch_functional.entropy_from_logits, x, use_reentrant=False
        ).sum().backward()
    assert x.grad.abs().sum() > 0


LEFT = {
    "logits is torch.float64": lambda: (random(0, 3, 5).double(), torch.zeros(3, dtype=torch.int64)),
    "logits is on a device of type meta": lambda: (
        torch.zeros(3, 5, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_verl_is_counted_and_told_once(reason):
    arguments = LEFT[reason]()
    want = torch_functional.logprobs_from_logits(*arguments)
    with rlkernel.patch_verl() as patch:
        with pytest.warns(UserWarning, match=f"leaves logprobs_from_logits to verl: {reason}") as told:
            for _ in range(2):
                got = torch_functional.logprobs_from_logits(*arguments)
        assert len(told) == 1 and patch.fallbacks == {f"logprobs_from_logits: {reason}": 2}
        assert not patch.calls
    assert got.dtype == want.dtype and (got.is_meta or torch.equal(got, want))


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
def test_errors_of_verl_stay_verls():
    with rlkernel.patch_verl() as patch:
        with pytest.raises(RuntimeError):
            torch_functional.logprobs_from_logits(random(0, 3, 5), torch.zeros(2, 2, dtype=torch.int64))
        with pytest.raises(RuntimeError):
            torch_functional.entropy_from_logits_with_chunking(random(0, 2, 3, 5))
        with pytest.raises(AttributeError):
            torch_functional.logprobs_from_logits(random(0, 3, 5), [1, 2, 3])
        assert len(patch.fallbacks) == 3


# the fused head


def head_by_hand(hidden, weight, ids, temperature):
    z = (hidden @ weight.T / temperature).log_softmax(-1)
    return z.gather(-1, ids.long()[..., None])[..., 0], -(z.exp() * z).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [(5,), (2, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_fused_head_is_verls(dtype, rows, temperature):
    hidden, weight = random(0, *rows, 16), random(1, 37, 16)
    ids = torch.randint(37, rows, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    head = torch_head.FusedLinearForPPO(chunk_size=2)

    def call(h, w):
        return head(h, w, ids, temperature=temperature)

    def exact(h, w):
        return head_by_hand(h, w, ids, temperature)

    upstream, name = [random(3, *rows), random(4, *rows)], "FusedLinearForPPO"
    (logprobs, entropy), _ = check_against_verl(call, [hidden, weight], dtype, upstream, name, exact)[0]
    assert logprobs.dtype == torch.float32 and entropy.dtype == dtype and logprobs.shape == rows


@pytest.mark.parametrize("used", [0, 1], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["none", "hidden", "weight"])
def test_gradients_that_nobody_wants(used, frozen):
    ids = torch.tensor([1, 5, 36])

    def grads():
        leaves = [random(0, 3, 16), random(1, 37, 16)]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i != frozen)
        torch_head.FusedLinearForPPO()(*leaves, ids)[used].sum().backward()
        return [leaf.grad for leaf in leaves]

    want = grads()
    with rlkernel.patch_verl():
        got = grads()
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


def test_autocast_has_its_dtype():
    """fp32 hidden states and weight, of which autocast multiplies bf16: the entropy is fp32, as in verl."""
    hidden, weight, ids = random(0, 3, 16), random(1, 37, 16), torch.tensor([1, 5, 36])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = torch_head.FusedLinearForPPO()(hidden, weight, ids)
        with rlkernel.patch_verl():
            got = torch_head.FusedLinearForPPO()(hidden, weight, ids)
    exact = torch_head.FusedLinearForPPO()(hidden, weight, ids)
    for mine, theirs, truth in zip(got, want, exact, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        assert 0 < (mine - truth).abs().max() < 2 * (theirs - truth).abs().max()


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"hidden_states": random(0, 3, 16).double(), "vocab_weights": random(1, 37, 16).double()},
            "torch.float64",
        ),
        ({"temperature": torch.tensor(0.7)}, "the temperature is no number"),
    ],
)
def test_a_head_that_is_left_to_verl(change, reason):
    given = {"hidden_states": random(0, 3, 16), "vocab_weights": random(1, 37, 16)}
    given |= {"input_ids": torch.tensor([1, 5, 36])} | change
    want = torch_head.FusedLinearForPPO()(**given)
    with rlkernel.patch_verl() as patch:
        got = torch_head.FusedLinearForPPO()(**given)
        assert not patch.calls and reason in str(patch.fallbacks)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
def test_liger_is_asked_for_by_name(monkeypatch):
    given = random(0, 3, 16), random(1, 37, 16), torch.tensor([1, 5, 36])
    liger = types.SimpleNamespace(apply=lambda *_: (torch.full((3,), -7.0), torch.full((3,), 8.0)))
    monkeypatch.setattr(torch_head, fused_head.LIGER, liger)
    with rlkernel.patch_verl() as patch:
        logprobs, entropy = torch_head.FusedLinearForPPO(impl_backend="liger")(*given)
        assert (logprobs == 7).all() and (entropy == 8).all()
        assert patch.fallbacks == {"FusedLinearForPPO: the backend 'liger' is asked for by name": 1}
        torch_head.FusedLinearForPPO(impl_backend="torch")(*given)
        monkeypatch.setattr(torch_head, fused_head.LIGER, None)  # where verl takes its own
        torch_head.FusedLinearForPPO(impl_backend="liger")(*given)
        assert patch.calls == {"FusedLinearForPPO": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_triton_head_is_verls_torch_head(dtype):
    """verl's own runs on GPUs alone; its layouts are Megatron's: hidden states [L, 1, H], labels [1, L]."""
    labels, upstream = torch.tensor([[1, 5, 36, 0, 7]]), [random(2, 5), random(3, 5)]
    leaves = [random(0, 5, 1, 16).to(dtype), random(1, 37, 16).to(dtype)]

    def exact(h, w):
        return head_by_hand(h[:, 0], w, labels[0], 0.7)

    def stock(h, w):
        return torch_head.FusedLinearForPPO()(h[:, 0], w, labels[0], 0.7)

    def call(h, w):
        return triton_head.linear_cross_entropy(h, w, labels, 0.7, "none", None)

    truth = differentiated(exact, leaves, torch.float64, upstream)
    theirs = differentiated(stock, leaves, dtype, upstream)
    with rlkernel.patch_verl() as patch:
        got = differentiated(call, leaves, dtype, upstream)
        assert patch.calls == {"linear_cross_entropy": 1}
        assert triton_head.linear_cross_entropy(*leaves, labels)[0].shape == (5,)  # the rest by default
    assert all(x.dtype == torch.float32 and x.shape == (5,) for x in got[0])
    for of in zip(got[0] + list(got[1]), theirs[0] + list(theirs[1]), truth[0] + list(truth[1]), strict=True):
        check("the Triton head", *of)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((1.0, "mean"), "the reduction is not 'none'"),
        ((1.0, "none", "two"), "ranks share out the vocabulary"),
    ],
)
def test_a_triton_head_that_is_left_to_verl(monkeypatch, arguments, reason):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"one": 1, "two": 2}[group])
    given = random(0, 3, 16), random(1, 37, 16), torch.tensor([1, 5, 36])
    with rlkernel.patch_verl() as patch:
        monkeypatch.setattr(triton_head.LinearCrossEntropy, "forward", staticmethod(lambda ctx, *x: x[0] + 1))
        assert torch.equal(triton_head.linear_cross_entropy(*given, *arguments), given[0] + 1)
        assert reason in str(patch.fallbacks) and not patch.calls
        triton_head.linear_cross_entropy(*given, 1.0, "None", "one")
        assert patch.calls == {"linear_cross_entropy": 1}


# losses

BOUNDS = {"clip_ratio": 0.3, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
SETTINGS = {
    "vanilla": BOUNDS | {"clip_ratio_c": 1.5},
    "gspo": BOUNDS,
    "sapo": {"tau_pos": 1.3, "tau_neg": 1.7},
    "gpg": {},
    "cispo": BOUNDS,
    "geo_mean": BOUNDS,
    "dppo_tv": {"clip_ratio": 0.3, "clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.05},
    "dppo_kl": {"clip_ratio": 0.3, "clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.05},
    "dro": {"policy_loss": {"dro_beta": 0.7}},
    "reinforce": {},
}
MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip
WHOLE = {"dp_size": 4, "batch_num_tokens": 123, "global_batch_size": 17, "loss_scale_factor": 9}


def loss_of(mode, given, agg, config, weights=None):
    if mode == "reinforce":
        given = {"rollout_log_prob" if k == "old_log_prob" else k: v for k, v in given.items()}
        return core.compute_policy_loss_reinforce(
            **given, loss_agg_mode=agg, config=config, rollout_is_weights=weights
        )
    return core.get_policy_loss_fn(mode)(
        **given, loss_agg_mode=agg, config=config, rollout_is_weights=weights
    )


def check_loss(mode, *cases):
    """Of each case: the batch, the aggregation, weights, and what is known of the global batch."""
    stock = [(run_loss(mode, torch.float64, *case), run_loss(mode, torch.float32, *case)) for case in cases]
    with rlkernel.patch_verl() as patch:
        found = [run_loss(mode, torch.float32, *case) for case in cases]
        assert patch.calls == {f"compute_policy_loss_{mode}": len(cases)} and not patch.fallbacks
    for case, got, (truth, theirs) in zip(cases, found, stock, strict=True):
        mask, where = case[0]["response_mask"] != 0, f"{mode} {case[1:]}"
        check(f"{where}: loss", got[0], theirs[0], truth[0], magnitude=truth[1].abs().sum().item())
        check(f"{where}: gradient", got[1], theirs[1], truth[1])
        assert not got[1][~mask].any()
        assert got[2].keys() == theirs[2].keys()
        for key, value in got[2].items():
            assert isinstance(value, float) and value == pytest.approx(truth[2][key], abs=2e-6), (where, key)
    return found[-1][2]


def run_loss(mode, dtype, given, agg, weights=None, whole=None):
    config = actor_config(**SETTINGS[mode], global_batch_info=whole or {})
    made = {k: v if k == "response_mask" else v.to(dtype) for k, v in given.items()}
    leaf = made["log_prob"].clone().requires_grad_()
    weights = None if weights is None else weights.to(dtype)
    loss, metrics = loss_of(mode, made | {"log_prob": leaf}, agg, config, weights)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, metrics


@pytest.mark.parametrize("mode", SETTINGS)
def test_policy_losses_are_verls(mode):
    """Of every aggregation, with weights and without, of a micro-batch and as a part of a larger batch."""
    given = batch(3, rows=7, tokens=19, drift=0.7)
    weights = [None] if mode == "dro" else [None, weights_of(4, given["log_prob"].shape)]
    metrics = check_loss(mode, *((given, *case) for case in itertools.product(MODES, weights, (None, WHOLE))))
    if mode == "vanilla":
        assert metrics["actor/pg_clipfrac"] > 0 and metrics["actor/pg_clipfrac_lower"] > 0
    if mode.startswith("dppo"):
        assert 0 < metrics["actor/pg_clipfrac"] < 1 and metrics["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("mode", SETTINGS)
def test_losses_of_one_token_and_masks_of_numbers(mode):
    small = batch(6, rows=2, tokens=5)
    check_loss(
        mode,
        (batch(5, rows=1, tokens=1), "token-mean"),
        (small | {"response_mask": small["response_mask"].long()}, "token-mean"),
        (small | {"response_mask": small["response_mask"].float()}, "seq-mean-token-mean"),
    )


@pytest.mark.parametrize("mode", SETTINGS)
def test_bf16_logprobs(mode):
    given = {k: v if v.dtype == torch.bool else v.bfloat16() for k, v in batch(7).items()}
    config = actor_config(**SETTINGS[mode])
    exact = {k: v if v.dtype == torch.bool else v.double() for k, v in given.items()}
    want, _ = loss_of(mode, exact, "token-mean", config)
    stock, _ = loss_of(mode, given, "token-mean", config)
    with rlkernel.patch_verl():
        leaf = given["log_prob"].clone().requires_grad_()
        got, _ = loss_of(mode, given | {"log_prob": leaf}, "token-mean", config)
        got.backward()
    assert got.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    assert (got - want).abs() <= (stock - want).abs() + 1e-5


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "sapo", "dppo_tv", "geo_mean"])
def test_bounds_of_the_ratio(mode):
    """Beyond verl's bound of the logarithm nothing comes back."""
    given = batch(8, rows=3, tokens=6)
    given["old_log_prob"][:, 0] = given["log_prob"][:, 0] - 30.0
    if mode == "gspo":
        given["old_log_prob"] = given["log_prob"] - 12.0
    if mode != "geo_mean":  # which has no bound
        config = actor_config(**SETTINGS[mode])

        def run():
            leaf = given["log_prob"].clone().requires_grad_()
            loss, _ = loss_of(mode, given | {"log_prob": leaf}, "token-mean", config)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        want = run()
        with rlkernel.patch_verl():
            got = run()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_a_loss_may_be_written_to():
    """verl subtracts the entropy from the very tensor."""
    given, config = batch(9), actor_config()
    with rlkernel.patch_verl():
        leaf = given["log_prob"].clone().requires_grad_()
        loss, _ = loss_of("vanilla", given | {"log_prob": leaf}, "token-mean", config)
        loss -= 0.5 * leaf.sum()
        loss += 1.0
        loss.backward()
        with torch.no_grad():
            loss_of("vanilla", given, "token-mean", config)
    assert (leaf.grad[~given["response_mask"]] == -0.5).all()


def test_a_batch_without_a_token_is_0():
    given, config = batch(9), actor_config()
    given["response_mask"][:] = False
    assert loss_of("vanilla", given, "token-mean", config)[0].isnan()
    with rlkernel.patch_verl():
        loss, metrics = loss_of("vanilla", given, "token-mean", config)
    assert loss == 0 and set(metrics.values()) == {0.0}


def test_weights_of_0_leave_the_gradient_at_0():
    """verl's IcePop; the shares of clipped tokens do not count these tokens here."""
    given, config = batch(3, drift=0.7), actor_config(**SETTINGS["vanilla"])
    weights = weights_of(4, given["log_prob"].shape)
    weights[:, ::2] = 0

    def run():
        leaf = given["log_prob"].clone().requires_grad_()
        loss, _ = loss_of("vanilla", given | {"log_prob": leaf}, "token-mean", config, weights)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    want = run()
    with rlkernel.patch_verl():
        got = run()
    torch.testing.assert_close(got, want)
    assert not got[1][:, ::2].any()


def test_bypass_mode_runs_on_the_losses_here():
    """verl's own function, which calls two of the others by name."""
    given = batch(3)
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_rs": "token_k1"}
    correction |= {"rollout_is_threshold": 2.0, "rollout_rs_threshold": "0.5_2.0"}
    for kind, function in (("reinforce", "reinforce"), ("ppo_clip", "vanilla")):
        config = actor_config(policy_loss={"rollout_correction": correction | {"loss_type": kind}})
        want = loss_of("bypass_mode", given, "token-mean", config)
        with rlkernel.patch_verl() as patch:
            got = loss_of("bypass_mode", given, "token-mean", config)
            assert patch.calls == {f"compute_policy_loss_{function}": 1}
        torch.testing.assert_close(got[0], want[0])
        assert got[1] == pytest.approx(want[1], abs=1e-6)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("mode", "change", "settings", "reason"),
    [
        (
            "dro",
            {"rollout_is_weights": torch.ones(6, 11)},
            {"policy_loss": {"dro_beta": 0.7}},
            "there are rollout",
        ),
        ("vanilla", {"advantages": torch.ones(6, 1)}, {}, "advantages has not log_prob's shape"),
        ("vanilla", {"log_prob": torch.zeros(6, 11, 1)[..., 0].to_sparse()}, {}, "nested or sparse"),
        (
            "vanilla",
            {"advantages": torch.ones(6, 11, requires_grad=True)},
            {},
            "advantages requires a gradient",
        ),
        ("vanilla", {}, {"clip_ratio_c": 1.0}, "clip_ratio_c is not above 1"),
        ("vanilla", {"config": None}, {}, "there is no config"),
        ("vanilla", {"config": types.SimpleNamespace()}, {}, "the config is none of an actor"),
        ("vanilla", {"loss_agg_mode": "mean"}, {}, "loss_agg_mode is unknown"),
        ("vanilla", {}, {"global_batch_info": {"dp_size": 2}}, "dp_size is above 1 without batch_num_tokens"),
        ("vanilla", {}, {"global_batch_info": {"batch_num_tokens": 0}}, "batch_num_tokens is not above 0"),
        ("vanilla", {}, {"global_batch_info": {"group": 1}}, "global_batch_info has further entries"),
        ("dro", {}, {"policy_loss": {"dro_beta": 0.0}}, "dro_beta is not above 0"),
    ],
)
def test_losses_that_are_left_to_verl(mode, change, settings, reason):
    given = batch(3) | {"loss_agg_mode": "token-mean", "config": actor_config(**settings)} | change

    def run():
        try:
            loss, metrics = core.get_policy_loss_fn(mode)(**given)
            return loss.detach(), metrics
        except Exception as error:
            return type(error), str(error)

    want = run()
    with rlkernel.patch_verl() as patch:
        got = run()
        assert reason in str(patch.fallbacks) and not patch.calls
    assert str(got) == str(want)


def test_the_value_loss_is_verls():
    mask = batch(3, rows=7, tokens=19)["response_mask"]
    values, returns, old = random(0, 7, 19), random(1, 7, 19), random(2, 7, 19)
    cases = list(itertools.product(MODES, ({}, WHOLE)))

    def run(dtype, agg, whole):
        leaf = values.to(dtype).requires_grad_()
        others = {"returns": returns.to(dtype), "values": old.to(dtype), "response_mask": mask}
        loss, fraction = core.compute_value_loss(
            vpreds=leaf, **others, cliprange_value=0.5, loss_agg_mode=agg, **whole
        )
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], fraction

    stock = [(run(torch.float32, *case), run(torch.float64, *case)) for case in cases]
    with rlkernel.patch_verl() as patch:
        found = [run(torch.float32, *case) for case in cases]
        assert patch.calls == {"compute_value_loss": len(cases)}
    for case, got, (theirs, truth) in zip(cases, found, stock, strict=True):
        for name, *of in zip(("loss", "gradient", "fraction"), got, theirs, truth, strict=True):
            check(f"{case}: {name}", *of)
        assert 0 < got[2] < 1 and got[2].dim() == 0


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
def test_value_losses_that_are_left_to_verl():
    x, mask = random(0, 2, 3), torch.ones(2, 3)
    with rlkernel.patch_verl() as patch:
        core.compute_value_loss(x, x, x, mask, torch.tensor(0.5))
        core.compute_value_loss(x, x[:1], x, mask, 0.5)
        with pytest.raises(ValueError, match="batch_num_tokens is required"):
            core.compute_value_loss(x, x, x, mask, 0.5, dp_size=2)
        assert patch.fallbacks.total() == 3 and not patch.calls


# advantages

CONFIG = types.SimpleNamespace(gamma=0.97, get=lambda name, default=None: default)
UNSCALED = types.SimpleNamespace(get=lambda name, default=None: False)
ESTIMATORS = {
    "grpo": {},
    "grpo_vectorized": {},
    "gdpo": {},
    "grpo_passk": {"config": CONFIG},
    "reinforce_plus_plus_baseline": {},
    "rloo": {},
    "rloo_vectorized": {},
    "opo": {},
    "reinforce_plus_plus": {"config": CONFIG},
    "remax": {"reward_baselines": random(5, 12)},
    "gpg": {"f_norm": 1.5},
    "gae": {"values": random(6, 12, 7), "gamma": 0.97, "lam": 0.9},
}
UNGROUPED = ("gae", "reinforce_plus_plus", "remax")


def check_advantages(estimator, options, seed=0, dense=False):
    token_level, mask, names = rewards(seed)
    if dense:
        token_level = token_level + random(9, *token_level.shape)
    if estimator == "grpo_passk":
        names[8] = names[0]  # verl refuses groups of one
    function = core.get_adv_estimator_fn(estimator)

    def run(dtype):
        given = {"token_level_rewards": token_level.to(dtype), "response_mask": mask.to(dtype)}
        given |= {} if estimator in UNGROUPED else {"index": names}
        cast = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        found = core.get_adv_estimator_fn(estimator)(**given, **cast)
        assert torch.equal(given["token_level_rewards"], token_level.to(dtype))
        return found

    truth, stock = run(torch.float64), run(torch.float32)
    with rlkernel.patch_verl() as patch:
        got = run(torch.float32)
        assert patch.calls == {function.__name__: 1} and not patch.fallbacks
    for name, *of in zip(("advantages", "returns"), got, stock, truth, strict=True):
        # under the mask verl has what nobody reads
        check(f"{estimator}'s {name}", *(x[mask.bool()] for x in of))
        assert of[0].dtype == torch.float32 and not of[0][~mask.bool()].any()
    return got


@pytest.mark.parametrize("dense", [False, True], ids=["outcome", "every token"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_verls(estimator, dense):
    check_advantages(estimator, ESTIMATORS[estimator], dense=dense)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "gdpo"])
def test_advantages_that_are_not_scaled(estimator):
    scaled = check_advantages(estimator, {"norm_adv_by_std_in_grpo": True})
    plain = check_advantages(estimator, {"norm_adv_by_std_in_grpo": False})
    assert not torch.equal(scaled[0], plain[0])


def test_passk_that_is_not_scaled():
    check_advantages("grpo_passk", {"config": UNSCALED})


@pytest.mark.parametrize("reward_weights", [None, [1.0, 0.25]])
def test_gdpo_of_several_rewards(reward_weights):
    token_level, mask, names = rewards()
    settings = {"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": reward_weights}
    given = {
        "token_level_rewards": token_level, "response_mask": mask, "index": names, "config": settings,
        "non_tensor_batch": {"format": np.arange(12) % 3, "accuracy": random(1, 12).numpy()},
        "batch": {
            "prompts": torch.zeros(12, 4), "attention_mask": torch.cat([torch.ones(12, 4), mask], 1).long(),
        },
    }  # fmt: skip
    want = core.compute_gdpo_outcome_advantage(**given)[0]
    with rlkernel.patch_verl() as patch:
        got = core.compute_gdpo_outcome_advantage(**given)[0]
        assert patch.calls == {"compute_gdpo_outcome_advantage": 1}
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        with (
            pytest.warns(UserWarning, match="gdpo_reward_keys are not all in the batch"),
            pytest.raises(AssertionError, match="not found in non_tensor_batch"),
        ):
            core.compute_gdpo_outcome_advantage(**given | {"non_tensor_batch": {}})


@pytest.mark.parametrize("kind", ["numbers", "tensor", "list"])
def test_names_of_groups(kind):
    token_level, mask, names = rewards()
    numbers = np.array([int(name.removeprefix("uid-")) for name in names])
    index = {"numbers": numbers, "tensor": torch.from_numpy(numbers), "list": numbers.tolist()}[kind]
    want = core.compute_grpo_outcome_advantage(token_level, mask, names)[0]
    with rlkernel.patch_verl():
        got = core.compute_grpo_outcome_advantage(token_level, mask, index)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_equal_rewards_have_no_advantage():
    """verl divides what its mean has lost by its epsilon."""
    token_level, mask, names = torch.full((12, 1), 0.1), torch.ones(12, 1), np.array(["a"] * 12)
    with rlkernel.patch_verl():
        assert not core.compute_grpo_outcome_advantage(token_level, mask, names)[0].any()


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("function", "change", "reason"),
    [
        ("compute_grpo_outcome_advantage", {"epsilon": torch.tensor(1e-6)}, "epsilon is no number"),
        ("compute_grpo_outcome_advantage", {"index": np.arange(3)}, "index does not name a group for each"),
        (
            "compute_grpo_outcome_advantage",
            {"token_level_rewards": torch.zeros(12, 7, dtype=torch.int64)},
            "token_level_rewards is torch.int64",
        ),
        ("compute_grpo_passk_outcome_advantage", {"config": CONFIG}, "a group has one response"),
        ("compute_grpo_passk_outcome_advantage", {}, "there is no config"),
        ("compute_gpg_outcome_advantage", {"f_norm": torch.tensor(2.0)}, "f_norm is no number"),
        (
            "compute_remax_outcome_advantage",
            {"reward_baselines": torch.zeros(1)},
            "reward_baselines are not one",
        ),
        ("compute_reinforce_plus_plus_outcome_advantage", {}, "gamma is no number in"),
        ("compute_gae_advantage_return", {"gamma": 1.5}, "gamma and lam are no numbers in"),
        (
            "compute_gae_advantage_return",
            {"values": torch.zeros(12, 1)},
            "values has not token_level_rewards's",
        ),
    ],
)
def test_advantages_that_are_left_to_verl(function, change, reason):
    token_level, mask, names = rewards()
    given = {"token_level_rewards": token_level, "response_mask": mask, "index": names}
    if function.split("_")[1] == "gae":
        given = {k: v for k, v in given.items() if k != "index"}
        given |= {"values": random(6, 12, 7), "gamma": 0.9, "lam": 0.9}
    given |= change

    def run():
        try:
            return getattr(core, function)(**given)
        except Exception as error:
            return type(error), str(error)

    want = run()
    with rlkernel.patch_verl() as patch:
        got = run()
        assert reason in str(patch.fallbacks) and not patch.calls
    assert str(got) == str(want)


# whole steps


def fused_model(backend):
    """A model as verl's workers make it, with a class of its own, as verl overwrites the class's forward."""
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    model = tiny.make_model(vocab=97, hidden=32)
    model.__class__ = type("Own", (type(model),), {})
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    return model


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_with_fused_kernels(backend):
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))

    def step(kind):
        model = fused_model(kind)
        out = model(input_ids=ids, temperature=0.8, return_dict=True)
        loss = (out.log_probs.flatten() * random(1, 18)).sum() + (out.entropy.flatten() * random(2, 18)).sum()
        loss.backward()
        return out.log_probs.detach(), out.entropy.detach(), [p.grad for p in model.parameters()]

    want = step("torch")
    with rlkernel.patch_verl() as patch:
        got = step(backend)
        name = "FusedLinearForPPO" if backend == "torch" else "linear_cross_entropy"
        assert patch.calls == {name: 1} and not patch.fallbacks
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(mine.flatten(), theirs.flatten(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("whole", [False, True], ids=["micro-batch", "global batch"])
def test_the_loss_of_verls_workers(whole):
    """``ppo_loss`` of a batch as engines hand it on, with entropy and KL, which it adds in place."""
    data = pytest.importorskip("tensordict", reason="needs verl, of whose dependencies it is one").TensorDict
    tools = pytest.importorskip("verl.utils.tensordict_utils")
    losses = pytest.importorskip("verl.workers.utils.losses")
    given, prompts = batch(3, rows=5, tokens=8), torch.ones(5, 2, dtype=torch.int64)
    answers = torch.arange(8) < torch.tensor([8, 3, 5, 1, 8])[:, None]
    tensors = {
        "prompts": prompts, "responses": torch.ones(5, 8, dtype=torch.int64),
        "attention_mask": torch.cat([prompts, answers.long()], 1), "old_log_probs": given["old_log_prob"],
        "response_mask": given["response_mask"] & answers, "advantages": given["advantages"],
        "ref_log_prob": given["old_log_prob"] + 0.1,
    }  # fmt: skip
    known = (2, 77, 9) if whole else (1, None, None)
    config = actor_config(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    count = int(tensors["attention_mask"].sum())

    def run():
        micro_batch = data(dict(tensors), batch_size=[5])
        names = ("dp_size", "batch_num_tokens", "global_batch_size")
        tools.assign_non_tensor(micro_batch, **dict(zip(names, known, strict=True)))
        leaves = [x.requires_grad_() for x in (-random(7, count).abs(), random(8, count).abs())]
        output = {"log_probs": leaves[0] * 1, "entropy": leaves[1] * 1}
        loss, metrics = losses.ppo_loss(config, output, micro_batch)
        values = [x.values if hasattr(x, "values") else x for x in metrics.values()]
        return (
            loss.detach(),
            *torch.autograd.grad(loss, leaves),
            [*metrics],
            torch.tensor([float(x[0] if isinstance(x, list) else x) for x in values]),
        )

    want = run()
    with rlkernel.patch_verl() as patch:
        got = run()
        assert patch.calls == {"compute_policy_loss_vanilla": 1} and not patch.fallbacks
    assert got[3] == want[3]
    for mine, theirs in zip(got[:3] + got[4:], want[:3] + want[4:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def train(steps=3):
    """GRPO by verl's functions: old and new log-probabilities, advantages, policy loss, entropy, KL."""
    model = tiny.make_model(vocab=97, hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = actor_config(loss_agg_mode="seq-mean-token-mean", clip_ratio_c=2.0)
    names, told = np.array(["a", "a", "b", "b"]), []
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 97, (4, 10), generator=g)
        mask = torch.arange(9) < torch.tensor([9, 4, 7, 0])[:, None]
        token_level = torch.zeros(4, 9)
        token_level[:, -1] = torch.randn(4, generator=g)
        advantages, _ = core.get_adv_estimator_fn("grpo")(token_level, mask, names)
        old = None
        for _ in range(2):
            logits = model(ids).logits[:, :-1] / 0.9
            entropy = torch_functional.entropy_from_logits(logits)
            logprobs = torch_functional.logprobs_from_logits(logits, ids[:, 1:], inplace_backward=False)
            old = logprobs.detach() if old is None else old
            loss, metrics = core.get_policy_loss_fn("vanilla")(
                old, logprobs, advantages, mask, loss_agg_mode=config.loss_agg_mode, config=config
            )
            loss -= 0.01 * core.agg_loss(entropy, mask, "token-mean")
            loss += 0.1 * core.agg_loss(core.kl_penalty(logprobs, old, "low_var_kl"), mask, "token-mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append([loss.item(), *metrics.values()])
    return told, [p.detach().clone() for p in model.parameters()]


def test_a_few_steps_of_grpo():
    want = train()
    with rlkernel.patch_verl() as patch:
        got = train()
        assert patch.calls == {
            "compute_grpo_outcome_advantage": 3, "entropy_from_logits": 6, "logprobs_from_logits": 6,
            "compute_policy_loss_vanilla": 6,
        }  # fmt: skip
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-4, atol=2e-5)
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    again = train()
    assert again[0] == want[0], "after the undo the bits are verl's"
