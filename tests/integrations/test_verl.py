"""What stands in the place of verl's functions, beside verl's own: values, gradients, metrics."""

import types

import numpy as np
import pytest
import tiny
import torch
from accuracy import check
from doors import differentiated, random, with_flash_attn
from verl_cases import (
    actor_config,
    batch,
    check_against_verl,
    core,
    nothing_left_behind,
    upstream,
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


@pytest.fixture
def flash_attn(monkeypatch):
    with_flash_attn(monkeypatch, torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE")
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
        ({"temperature": -1.0}, "the temperature is no number above 0"),
        ({"temperature": float("inf")}, "the temperature is no number above 0"),
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
        ((1.0, "none", "two"), "the group of ranks is none that torch knows by its name"),
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
