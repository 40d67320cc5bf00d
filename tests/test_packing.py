"""Packed sequences by one rule in every op that takes cu_seqlens: padding behind the last one, and shapes
that fit tokens and sequences alike."""

import linear_policy
import pytest
import torch
from backends import of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.ops import _packing
from rlkernel.reference import gae, policy_loss, preference_loss, value_loss
from rlkernel.runtime import debug, workspace

OPS = ("policy_loss", "linear_policy_loss", "value_loss", "preference_loss", "gae", "kl_shaped_rewards")
PAIRS = pytest.mark.parametrize(
    ("op", "backend", "device"),
    [pytest.param(op, *p.values, id=f"{op}-{p.id}", marks=p.marks) for op in OPS for p in of(op)],
)
pytestmark = pytest.mark.usefixtures("poison")
STARTS, N = [0, 5, 5, 9, 12], 12


def flat(inputs, *keep):
    return {k: v if k in keep else v.reshape(-1, *v.shape[2:])[:N] for k, v in inputs.items()}


def packed(op, device):
    """Keyword arguments, of which some have N tokens and the others a value for each of 4 sequences."""
    starts = {"cu_seqlens": torch.tensor(STARTS, device=device)}
    if op == "linear_policy_loss":
        inputs = flat(linear_policy.make_inputs(2, 8, 6, 30, device=device, per_token=False), "weight")
        inputs["advantages"] = torch.tensor([0.5, 3.0, -1.0, 2.0], device=device)
        return inputs | starts
    if op == "policy_loss":
        inputs = flat(policy_loss.make_inputs(2, 8, device=device))
        inputs["advantages"] = torch.tensor([0.5, 3.0, -1.0, 2.0], device=device)
        return inputs | starts
    if op == "value_loss":
        return flat(value_loss.make_inputs(2, 8, device=device)) | starts
    if op == "preference_loss":
        return flat(preference_loss.make_inputs(2, 8, device=device)) | starts
    if op == "gae":
        inputs = {k: v.to(device) for k, v in flat(gae.make_inputs(2, 8)).items() if k != "last_values"}
        return inputs | starts | {"last_values": torch.arange(4.0, device=device), "whiten": True}
    g = torch.Generator().manual_seed(0)
    noise = {k: torch.randn(N, generator=g).to(device) for k in ("logprobs", "ref_logprobs")}
    mask = torch.rand(N, generator=g).to(device) > 0.2
    return noise | starts | {"rewards": torch.arange(4.0, device=device), "mask": mask, "beta": 0.1}


def run(op, backend, inputs):
    """What an op gives: results for tokens, and others."""
    inputs = dict(inputs)
    options = {"loss_agg_mode": "seq-mean-token-mean"} if "policy" in op or op == "value_loss" else {}
    leaf = {"linear_policy_loss": "hidden", "value_loss": "values"}.get(op, "logprobs")
    with running(backend):
        if op in ("gae", "kl_shaped_rewards"):
            out = getattr(rlkernel, op)(**inputs)
            return list(out) if op == "gae" else [out], []
        inputs[leaf] = inputs[leaf].detach().requires_grad_()
        out = getattr(rlkernel, op)(**inputs, **options)
        (grad,) = torch.autograd.grad(out.loss, inputs[leaf])
    tokens = [grad, out.logprobs] if op == "linear_policy_loss" else [grad]
    return tokens, [out.loss.detach(), out.metrics]


def with_tail(inputs, count=7):
    """Padding that claims to count and holds no numbers."""
    longer = {}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.shape[:1] == (N,):
            fill = 1 if not x.is_floating_point() else torch.nan
            x = torch.cat([x, torch.full_like(x[:count], fill)])
        longer[name] = x
    return longer


@pytest.mark.parametrize("readable", [True, False], ids=["read", "unread"])
@PAIRS
def test_padding_behind_the_last_sequence_counts_nowhere(op, backend, device, readable, monkeypatch):
    inputs = packed(op, device)
    tokens, others = run(op, backend, inputs)
    if not readable:
        monkeypatch.setattr(debug, "may_read", lambda x: False)  # as of a tensor on a GPU
    got, more = run(op, backend, with_tail(inputs))
    by_rows = (op, device) == (
        "linear_policy_loss",
        "cuda",
    )  # padding is multiplied, and sums follow rows
    for x, y in zip(got, tokens, strict=True):
        assert len(x) == N + 7 and not x[N:].any()
        if backend == "reference" or by_rows:
            torch.testing.assert_close(x[:N], y)
        else:
            assert_equal("tokens", x[:N], y)
    tolerance = 1e-5 if by_rows else 1e-6
    for x, y in zip(more, others, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in OPS if op != "linear_policy_loss"])
def test_padding_of_fp16_under_autocast(op):
    """torch concatenates no fp16 under autocast of a CPU."""
    inputs = with_tail(packed(op, "cpu"))
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    inputs |= {k: v.half() for k, v in tensors.items() if v.is_floating_point()}
    want = run(op, "native", inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(op, "native", inputs)
    for x, y in zip(sum(got, []), sum(want, []), strict=True):
        assert_equal(op, x, y)


@pytest.mark.parametrize("op", OPS)
def test_offsets_are_refused_in_the_same_words(op):
    inputs = packed(op, "cpu")
    for offsets in ([0, 5, 5, 9, 13], [1, 5, 5, 9, 12], [0, 5, 4, 9, 12]):
        want = rf"^cu_seqlens must rise from 0 to at most {N}, got \[{offsets[0]},"
        with pytest.raises(ValueError, match=want):
            run(op, "native", inputs | {"cu_seqlens": torch.tensor(offsets)})


@pytest.mark.parametrize("op", ["gae", "kl_shaped_rewards"])
def test_offsets_are_looked_at_once_and_by_a_node_too(op, monkeypatch):
    inputs, looks, check = packed(op, "cpu"), [], _packing.check
    monkeypatch.setattr(_packing, "check", lambda *args: looks.append(args) or check(*args))
    run(op, "native", inputs)
    assert len(looks) == 1
    compiled = torch.compile(lambda x: getattr(rlkernel, op)(**x), fullgraph=True, backend="eager")
    compiled(inputs)
    with pytest.raises(ValueError, match=f"^cu_seqlens must rise from 0 to at most {N}, got"):
        compiled(inputs | {"cu_seqlens": torch.tensor([0, 5, 4, 9, 12])})


@PAIRS
def test_a_call_without_a_sequence_is_all_padding(op, backend, device):
    inputs = {
        k: v[:0] if isinstance(v, torch.Tensor) and v.shape == (4,) else v
        for k, v in packed(op, device).items()
    }
    tokens, others = run(op, backend, inputs | {"cu_seqlens": torch.tensor([0], device=device)})
    assert not any(x.any() for x in tokens) and all(x == 0 for x in others[:1])


ALIKE = torch.tensor([0, 2, 2, 3])  # three tokens and three sequences


@pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
def test_as_many_sequences_as_tokens(backend, device):
    """[S, 1] is one for each sequence, [1, N] for each token, and [N] could be either."""
    tensors = {k: v[0, :3].to(device) for k, v in policy_loss.make_inputs(1, 3).items()}
    tensors |= {"mask": torch.ones(3, dtype=torch.bool, device=device), "cu_seqlens": ALIKE.to(device)}
    each = torch.tensor([2.0, 7.0, -3.0], device=device)
    spread = torch.tensor([2.0, 2.0, -3.0], device=device)
    correction = rlkernel.RolloutCorrection("none", staleness_decay=0.5)
    tensors |= {"rollout_logprobs": tensors["old_logprobs"], "correction": correction}
    stale = torch.tensor([0.0, 5.0, 1.0], device=device)

    def result(advantages, staleness):
        return run("policy_loss", backend, tensors | {"advantages": advantages, "staleness": staleness})

    got = result(each[:, None], stale[:, None])
    want = result(spread[None], stale[[0, 0, 2]][None])
    for x, y in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert_equal("per sequence", x, y)
    want = result(each[None], stale[[0, 0, 2]][None])
    assert not torch.equal(got[0][0], want[0][0])
    for name, x in (("advantages", (each, stale[None])), ("staleness", (each[None], stale))):
        with pytest.raises(ValueError, match=rf"{name} must be \[1, 3\], one for each token, or \[3, 1\]"):
            result(*x)


@pytest.mark.parametrize("name", ["advantages", "staleness"])
@pytest.mark.parametrize("op", ["policy_loss", "linear_policy_loss"])
@pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
def test_with_its_padding_as_many_sequences_as_tokens(op, name, backend, device):
    """Three sequences and the padding behind them are four, and so are the tokens."""
    inputs = linear_policy.make_inputs(1, 4, 6, 30, device=device, per_token=False)
    if op == "policy_loss":
        inputs = policy_loss.make_inputs(1, 4, device=device)
    tensors = {k: v if k == "weight" else v[0] for k, v in inputs.items()}
    tensors["mask"] = torch.ones(4, dtype=torch.bool, device=device)
    tensors["cu_seqlens"] = torch.tensor([0, 2, 3, 3], device=device)
    each = torch.tensor([1.0, -2.0, 3.0], device=device)
    of_tokens = torch.tensor([1.0, 1.0, -2.0, 0.0], device=device)
    tensors |= {"rollout_logprobs": tensors["old_logprobs"], "advantages": of_tokens, "staleness": of_tokens}
    tensors["correction"] = rlkernel.RolloutCorrection("none", staleness_decay=0.5)
    got, want = run(op, backend, tensors | {name: each}), run(op, backend, tensors)
    for x, y in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert_equal(name, x, y)


@pytest.mark.parametrize("tight", [False, True], ids=["one step", "steps"])
def test_as_many_sequences_as_tokens_in_a_step_of_linear_policy_loss(tight, monkeypatch, caplog):
    """Of the three rows of a step there are three sequences, one of them empty."""
    lengths = torch.tensor([2, 0, 1, 2, 0, 1, 3, 0, 0, 1, 0, 2])
    inputs = flat(linear_policy.make_inputs(2, 8, 6, 30, per_token=False), "weight")
    inputs["mask"][:] = True
    inputs["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    each = torch.arange(12.0) - 5
    with pytest.raises(ValueError, match="advantages must be"):
        run("linear_policy_loss", "native", inputs | {"advantages": each})
    if tight:
        monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(3, 48))
        monkeypatch.setattr(workspace, "_limit", 2_000)

    def step(advantages):
        leaves = [inputs[name].clone().requires_grad_() for name in ("hidden", "weight")]
        given = inputs | dict(zip(("hidden", "weight"), leaves, strict=True)) | {"advantages": advantages}
        with caplog.at_level("DEBUG", "rlkernel"), running("native"):
            loss = rlkernel.linear_policy_loss(**given, algorithm="one_pass").loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    for x, y in zip(step(each[:, None]), step(each.repeat_interleave(lengths)[None]), strict=True):
        torch.testing.assert_close(x, y)
    rows = [r.args[0] for r in caplog.records if "in one pass" in r.msg]
    assert rows and all((n < 12) == tight for n in rows)


@pytest.mark.parametrize(("backend", "device"), of("preference_loss"))
def test_as_many_sequences_as_tokens_in_preference_loss(backend, device):
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.7], device=device)
    inputs = {"logprobs": logprobs, "mask": logprobs < 0}
    inputs["cu_seqlens"] = torch.tensor([0, 2, 2, 3, 4], device=device)
    tokens = torch.tensor([-1.5, -0.25, -1.0, -2.0], device=device)
    sums = torch.tensor([-1.75, 9.0, -1.0, -2.0], device=device)  # without a token its sum is nobody's
    want = run("preference_loss", backend, inputs | {"ref_logprobs": tokens[None]})
    got = run("preference_loss", backend, inputs | {"ref_logprobs": sums[:, None]})
    for x, y in zip(got[0] + got[1], want[0] + want[1], strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match=r"ref_logprobs must be \[1, 4\], one for each token, or \[4, 1\]"):
        run("preference_loss", backend, inputs | {"ref_logprobs": sums})


@pytest.mark.parametrize(("backend", "device"), of("kl_shaped_rewards"))
def test_as_many_sequences_as_tokens_in_kl_shaped_rewards(backend, device):
    zeros = torch.zeros(3, device=device)
    inputs = {"logprobs": zeros, "ref_logprobs": zeros, "mask": zeros == 0, "beta": 0.1}
    inputs["cu_seqlens"] = ALIKE.to(device)
    rewards = torch.tensor([2.0, 7.0, -3.0], device=device)
    (each,), _ = run("kl_shaped_rewards", backend, inputs | {"rewards": rewards[:, None]})
    (own,), _ = run("kl_shaped_rewards", backend, inputs | {"rewards": rewards[None]})
    assert each.tolist() == [0, 2, -3] and own.tolist() == [2, 7, -3]
    with pytest.raises(ValueError, match=r"rewards must be \[1, 3\], one for each token, or \[3, 1\]"):
        run("kl_shaped_rewards", backend, inputs | {"rewards": rewards})
