"""linear_policy_loss: which path runs, what it costs, and how autograd and torch.compile use it."""

import functools
import logging

import linear_policy
import pytest
import torch
from backends import is_slow, running
from bitwise import assert_equal
from linear_logprob_cases import Flops, Storages
from linear_policy import (
    ALL,
    LEAVES,
    ON_EVERY_BACKEND,
    able,
    check_bits,
    make_inputs,
    packed,
    prepare,
    run,
    with_bias,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.drivers import linear_chosen, linear_tiles
from rlkernel.drivers import linear_policy_loss as policy_driver
from rlkernel.drivers import linear_policy_loss_plan as policy_plan
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.runtime import gpu, workspace

pytestmark = pytest.mark.usefixtures("poison")
room = linear_policy.room


@ON_EVERY_BACKEND
def test_three_gemms(backend, device, room, monkeypatch):
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    inputs = make_inputs(4, 8, 16, 96, device=device, full=True)
    able(backend, inputs)
    unit = 2 * 32 * 16 * 96

    def flops(needs=(True, True, False), live=4, masked=0, **options):
        changed = inputs | {"advantages": inputs["advantages"].clone(), "mask": inputs["mask"].clone()}
        changed["advantages"][live:] = 0
        changed["mask"][:masked] = False
        with Flops() as counter:
            run(backend, changed, needs, loss_type="reinforce", **options)
        return counter.total / unit

    assert flops() == 3
    if is_slow(backend, device):
        return
    assert 3 <= flops(algorithm="two_pass") <= 4, "as much as the workspace keeps for linear_logprob"
    assert flops(entropy_coef=0.1) == 3
    assert flops((False, True, False)) == 2
    assert flops((True, False, False)) == 2
    assert flops((True, False, False), entropy_coef=0.1) == 2
    assert flops((False, False, False)) == 1
    on_gpu = device == "cuda"
    if on_gpu:  # so little work is not worth a count of rows, which the host would wait for
        assert flops(masked=2) == 3
        monkeypatch.setattr(linear_chosen, "WORTH_A_COUNT", 0)
    assert flops(masked=2) == 1.5
    assert flops(masked=4) == 0
    # on a GPU the host would wait for each block to hear of them
    assert flops(live=2) == (3 if on_gpu else 1 + 2 / 2), "rows without a derivative"
    assert flops(live=0) == (3 if on_gpu else 1)
    assert flops(importance_sampling_level="sequence") == 3


def test_the_path_is_chosen_and_told(monkeypatch, caplog):
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(8, 48))
    monkeypatch.setattr(workspace, "_limit", 40_000)
    inputs = make_inputs(2, 64, 16, 133, full=True)
    able("native", inputs)
    caplog.set_level(logging.DEBUG, "rlkernel")

    def told(**options):
        caplog.clear()
        check_bits("native", inputs, **options)
        return " ".join(r.message for r in caplog.records)

    assert "in one pass: " in told()
    assert "in two passes: the logits of the 8 chunks of rows that a sequence spans take" in told(
        importance_sampling_level="sequence"
    )
    assert "in two passes: as asked" in told(algorithm="two_pass")
    monkeypatch.setattr(workspace, "_limit", 5_000)
    assert "in two passes: the logits of one chunk of rows take" in told()
    refused = "algorithm must be 'auto' or 'two_pass' here, got 'one_pass': the .* MiB, .*; 1 MiB are enough"
    with pytest.raises(ValueError, match=refused):
        run("native", inputs, algorithm="one_pass")
    monkeypatch.setattr(workspace, "_limit", 1 << 20)
    assert "in one pass: " in told(importance_sampling_level="sequence")


def test_what_is_not_known_needs_the_whole_batch(monkeypatch, caplog):
    """Whose logprobs a derivative needs is looked up, not assumed: with a new loss, field or tensor it is two
    passes, through the public functions."""
    from rlkernel.ops import linear_policy_loss as op

    assert op._reach("grpo", op._PLAIN) == "token"
    assert op._reach("grpo", op._PLAIN._replace(level=1)) == op._reach("vespo", op._PLAIN) == "sequence"
    assert op._reach("novel", op._PLAIN) == op._reach("clip_cov", op._PLAIN) == "batch"
    assert op._reach("grpo", op._PLAIN._replace(normalize=True)) == "batch"
    changed = op._PLAIN._replace(log_clip=1.0)
    assert op._reach("grpo", changed) == "token"
    monkeypatch.setattr(policy_rule, "REACH_KNOWS", policy_rule.REACH_KNOWS - {"log_clip"})
    assert op._reach("grpo", changed) == "batch"

    inputs = with_bias(make_inputs(3, 9, 16, 133, extras=True))
    able("native", inputs)
    options = ALL | {"log_ratio_clip": 0.3}
    caplog.set_level(logging.DEBUG, "rlkernel")
    for form in (inputs, packed(inputs)):
        check_bits("native", form, **options, return_entropy=True)
    assert "two passes: the loss needs the logprobs of the whole batch" in caplog.text
    with pytest.raises(ValueError, match="got 'one_pass': the loss needs the logprobs of the whole batch"):
        run("native", inputs, **options, algorithm="one_pass")


def test_steps_hold_what_they_need():
    """Against the definition: at each step, every block to finish and all blocks it needs are there."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        count = int(torch.randint(1, 12, (), generator=g))
        need = [k + int(torch.randint(0, 3, (), generator=g)) for k in range(count)]
        need = [min(max(need[: k + 1]), count - 1) for k in range(count)]
        blocks = max(last - k + 1 for k, last in enumerate(need)) + int(torch.randint(0, 3, (), generator=g))
        held, finished, known = set(), [], []
        for step in policy_plan.steps_of(need, blocks):
            assert len(step.finish) > 0
            held |= set(step.compute)
            known += step.compute
            assert len(held) <= blocks and max(need[k] for k in step.finish) <= max(known)
            assert set(step.finish) <= held
            held -= set(step.finish)
            finished += step.finish
        assert finished == known == list(range(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_retained_graph_double_use_and_scale(backend, dtype, room):
    inputs = make_inputs(2, 9, 16, 133, dtype=dtype)
    able(backend, inputs)
    leaves, wanted = prepare(inputs, (True, True, False))
    with running(backend):
        loss = rlkernel.linear_policy_loss(**leaves).loss
        once = torch.autograd.grad(loss, wanted, retain_graph=True)
        before = [g.clone() for g in once]
        for g in once:
            g.mul_(3)  # what a caller does to its gradients is not kept
        fourfold = torch.autograd.grad(4 * loss, wanted, retain_graph=True)
        twice = torch.autograd.grad(loss + loss, wanted, retain_graph=True)
        none = torch.autograd.grad(0 * loss, wanted)
    for name, a, b, c, d in zip(LEAVES, before, fourfold, twice, none, strict=False):
        assert_equal(name, b, 4 * a)
        assert_equal(name, c, 2 * a)
        assert (d == 0).all()


def test_gradients_add_up_over_micro_batches():
    inputs = make_inputs(4, 9, 16, 133)
    able("native", inputs)
    tokens = inputs["mask"].sum()
    _, want = run("native", inputs)
    for items in (float(tokens), tokens, tokens.float()):
        sums = [0, 0]
        for rows in (slice(0, 1), slice(1, 4)):
            part = {k: v if k == "weight" else v[rows] for k, v in inputs.items()}
            _, (dh, dw) = run("native", part, num_items_in_batch=items)
            sums = [torch.cat([sums[0], dh]) if rows.start else dh, sums[1] + dw]
        torch.testing.assert_close(sums, want, rtol=0, atol=1e-6)


def test_dW_accumulates_in_fp32(monkeypatch):
    """512 steps of equal gradients: a bf16 accumulator would stop growing after 2^8 of them."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(1, 32))
    monkeypatch.setattr(workspace, "_limit", 4_000)
    inputs = dict(
        hidden=torch.ones(1, 512, 8), weight=torch.zeros(64, 8), target_ids=torch.zeros(1, 512).long(),
        old_logprobs=None, advantages=torch.ones(1, 512), mask=torch.ones(1, 512, dtype=torch.bool),
    )  # fmt: skip
    inputs |= {k: inputs[k].bfloat16() for k in ("hidden", "weight")}
    able("native", inputs)
    for scale in (1.0, 0.5):
        _, (_, grad) = run("native", inputs, upstream=scale, loss_agg_mode="token-sum", algorithm="one_pass")
        want = torch.full((8,), -scale * 512 * 63 / 64)
        torch.testing.assert_close(grad[0].float(), want, rtol=2**-8, atol=0)


def test_workspace_is_all_the_memory_there_is(monkeypatch):
    """Beside it: gradients and per-row numbers, whatever N."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(64, 128))
    limit = 800_000
    monkeypatch.setattr(workspace, "_limit", limit)
    workspace.release()  # a test before this one may have taken more
    h, v = 32, 1000

    for n in (512, 4096):
        inputs = make_inputs(2, n // 2, h, v, full=True)
        able("native", inputs)
        leaves, wanted = prepare(inputs, (True, True, False))
        with rlkernel.use_backend("native"):
            rlkernel.linear_policy_loss(**leaves).loss.backward()  # takes the workspace
            buffers = {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
            assert sum(b.memory.numel() for b in workspace._buffers.values()) <= limit
            with Storages() as storages:
                torch.autograd.grad(rlkernel.linear_policy_loss(**leaves).loss, wanted)
        known = buffers | {
            x.untyped_storage().data_ptr() for x in (*leaves.values(), *(w.grad for w in wanted))
        }
        made = [size for address, size in storages.seen.items() if address not in known]
        # the state of a row: four numbers; everything else is smaller
        big = {size for size in made if size > max(16 * n, 8 * 64 * h)}
        assert big <= {4 * n * h, 4 * v * h}, f"made tensors of {sorted(big)} bytes beside the two gradients"
        workspace.release()


def test_gradient_checkpointing(room):
    inputs = make_inputs(2, 9, 16, 133)
    able("native", inputs)
    leaves, wanted = prepare(inputs, (True, True, False))
    hidden = leaves.pop("hidden")
    op = lambda h: rlkernel.linear_policy_loss(h * 2, **leaves).loss  # noqa: E731
    want = torch.autograd.grad(op(hidden), wanted)
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(op, hidden, use_reentrant=False), wanted)
    for name, a, b in zip(LEAVES, got, want, strict=False):
        assert_equal(name, a, b)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_compiles_as_one_graph(form, room):
    inputs = with_bias(make_inputs(2, 9, 16, 133, extras=True))
    able("native", inputs)
    inputs = packed(inputs) if form == "packed" else inputs

    def loss(h, w, b, rest):
        out = rlkernel.linear_policy_loss(h * 2, w, bias=b, **rest, **ALL)
        return out.loss * 3, out.logprobs, out.entropy, out.metrics

    results = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves, wanted = prepare(inputs, (True, True, True))
        rest = {k: v for k, v in leaves.items() if k not in LEAVES}
        with rlkernel.use_backend("native"):
            out = fn(*(leaves[n] for n in LEAVES), rest)
            results.append([*out, *torch.autograd.grad(out[0], wanted)])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_equal(f"result {i}", b, a)


def test_a_loss_of_the_whole_batch_compiles_as_one_graph():
    inputs = make_inputs(2, 9, 16, 133)
    able("native", inputs)
    call = functools.partial(rlkernel.linear_policy_loss, **inputs, loss_type="clip_cov", seed=3)
    with rlkernel.use_backend("native"):
        want, got = call(), torch.compile(call, fullgraph=True, backend="aot_eager")()
    for name, a, b in zip(want._fields[:3], got, want, strict=False):
        assert_equal(name, a, b)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, False, False)], ids=str)
def test_opcheck(needs, room):
    from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall
    from rlkernel.calls.policy_loss import PolicyLossCall
    from rlkernel.ops.linear_policy_loss import _OUTSIDE, _PLAIN, op

    inputs = with_bias(make_inputs(2, 9, 16, 133))
    leaves, _ = prepare(inputs, needs)
    mask, fp32 = inputs["mask"], torch.float32
    tensors = torch.zeros(2, 9), None, inputs["old_logprobs"], inputs["advantages"], mask
    policy = PolicyLossCall(*tensors, *[None] * 6, _PLAIN, False)
    for items in (None, torch.tensor(7.0)):
        call = LinearPolicyLossCall(
            leaves["hidden"].view(18, 16), leaves["weight"], leaves["bias"],
            torch.where(mask, inputs["target_ids"], _OUTSIDE).view(-1), 0.7, 1.0, None, _OUTSIDE, fp32, fp32,
            policy, items, "token", True, "auto", fp32, needs,
        )  # fmt: skip
        torch.library.opcheck(op.node, op.flat(call))


BAD = [
    (dict(hidden=torch.zeros(2, 4)), r"hidden must be \[B, L, H\], or \[N, H\] with cu_seqlens, got"),
    (dict(cu_seqlens=torch.tensor([0, 6])), r"hidden must be \[N, H\] with cu_seqlens, got \(2, 3, 4\)"),
    (dict(weight=torch.zeros(5, 3)), r"weight must be \[V, 4\] with V >= 1, got \(5, 3\)"),
    (dict(target_ids=torch.full((2, 3), 5)), r"target_ids\[0\] = 5 is outside \[0, 5\)"),
    (dict(target_ids=torch.full((2, 3), -100)), r"target_ids\[0\] = -100 is outside \[0, 5\)"),
    (dict(mask=torch.ones(2, 2)), r"mask must have logprobs' shape \(2, 3\), got \(2, 2\)"),
    (dict(old_logprobs=torch.zeros(3)), r"old_logprobs must have logprobs' shape \(2, 3\), got \(3,\)"),
    (dict(advantages=torch.zeros(3)), r"advantages must have logprobs' shape \(2, 3\) or .* got \(3,\)"),
    (dict(temperature=-1), "temperature must be > 0 and finite, got -1"),
    (dict(loss_type="magic"), "loss_type must be one of grpo.*, got 'magic'"),
    (
        dict(algorithm="magic"),
        "algorithm must be one of 'auto', 'one_pass', 'two_pass', 'fused', got 'magic'",
    ),
    (dict(epsilonn=0.1), r"options must be among those of policy_loss \(.*epsilon, .*\), got 'epsilonn'"),
    (dict(entropy=torch.zeros(2, 3)), "options must be among those of policy_loss .*, got 'entropy'"),
    (dict(beta=0.1), "ref_logprobs must be given with beta = 0.1, got None"),
    (
        dict(token_counts=torch.tensor([1.0, -1]), num_items_in_batch=2, loss_agg_mode="seq-mean-token-mean"),
        r"token_counts\[1\] must be >= 1 and finite, got -1.0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(
        hidden=torch.zeros(2, 3, 4), weight=torch.zeros(5, 4), target_ids=torch.ones(2, 3).long(),
        old_logprobs=torch.zeros(2, 3), advantages=torch.zeros(2), mask=torch.ones(2, 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_policy_loss(**good | change)


def test_debug_mode_names_the_row(room):
    inputs = make_inputs(2, 5, 16, 133, full=True)
    able("native", inputs)
    inputs["hidden"][1, 2] = torch.nan
    out, _ = run("native", inputs)
    assert out.metrics[rlkernel.POLICY_METRICS.index("not_finite")] == 1
    with (
        rlkernel.debug.checks(),
        pytest.raises(ValueError, match=r"hidden\[7\] must give a logprob that is a number, got nan"),
    ):
        run("native", inputs)


def test_a_named_algorithm_never_falls_back():
    inputs = make_inputs(1, 2, 4, 5)
    with (
        rlkernel.use_backend("reference"),
        pytest.raises(NotImplementedError, match="'one_pass' needs the tile"),
    ):
        rlkernel.linear_policy_loss(**inputs, algorithm="one_pass")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_looks_at_values_while_a_graph_is_captured(level, room, monkeypatch):
    """What a GPU would have to wait for: a number, or how many there are of something."""
    inputs = with_bias(make_inputs(3, 13, 32, 133, extras=True))
    able("native", inputs)
    forward, looked = policy_driver.forward, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique"):
                looked.append(name)
            return func(*args, **(kwargs or {}))

    def watched(*arguments):
        with Watch():
            return forward(*arguments)

    monkeypatch.setattr(policy_driver, "forward", watched)
    run("native", inputs, importance_sampling_level=level, **ALL)
    assert "nonzero" in looked  # a CPU looks
    looked.clear()
    rows = packed(inputs)
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    monkeypatch.setattr(policy_plan.Resident, "leaves_out", False)
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # which passes no operator
    for form in (inputs, rows):
        run("native", form, importance_sampling_level=level, **ALL)
    assert looked == []
