"""``batch_invariant`` as a mode: what it leaves behind, threads, names, and rlkernel's operators in it."""

import contextlib
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from bitwise import assert_equal
from invariant_rows import BIAS, FEW, FUNCTIONS, ROUTER, ROWS, WEIGHT, experts, own_numbers, threads

import rlkernel
from rlkernel import batch_invariant_ops
from rlkernel.consistency import assert_invariant
from rlkernel.consistency.invariance import SIZES
from rlkernel.runtime import invariance

assert own_numbers and threads  # fixtures of the tests here


def bits_of_torch():
    return [f(ROWS[:9]) for f in FUNCTIONS.values()] + [torch.mm(ROWS, ROWS.t()), F.silu(ROWS[:1, :7])]


def environment():
    """Without the name of a cache that torch gives itself, the first time that its compiler is told of."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}


def test_everything_is_as_before_behind_the_block():
    before_block = environment()
    want = bits_of_torch()
    with contextlib.suppress(ZeroDivisionError), rlkernel.batch_invariant():
        with rlkernel.batch_invariant(strict=False):
            assert rlkernel.batch_invariant.is_enabled()
        assert rlkernel.batch_invariant.is_enabled()
        raise ZeroDivisionError
    assert not rlkernel.batch_invariant.is_enabled() and not invariance.settings
    for got, before in zip(bits_of_torch(), want, strict=True):
        assert torch.equal(got, before)
    assert environment() == before_block


def test_one_object_is_entered_again_and_decorates():
    mode = rlkernel.batch_invariant()
    with mode:
        ROWS.mean(-1)
        with mode:
            ROWS.mean(-1)
        assert [row.calls for row in mode.report() if row.op == "mean.dim"] == [1]
    assert [row.calls for row in mode.report() if row.op == "mean.dim"] == [1]

    @rlkernel.batch_invariant()
    def run():
        return rlkernel.batch_invariant.is_enabled()

    assert run() and run() and not rlkernel.batch_invariant.is_enabled()


def test_enable_and_disable():
    mode = rlkernel.batch_invariant
    mode.disable()
    mode.enable()
    mode.enable(strict=False)
    assert mode.is_enabled() and not invariance.settings[-1].strict
    with mode():
        mode.disable()
        assert mode.is_enabled()
    assert not mode.is_enabled()
    for wrong in ({"level": "tp"}, {"strict": 1}):
        with pytest.raises(ValueError, match="must be"):
            mode.enable(**wrong)
    assert not mode.is_enabled()


def test_blocks_of_threads_end_in_any_order():
    first, second = threading.Event(), threading.Event()

    def run():
        with rlkernel.batch_invariant():
            first.set()
            second.wait(20)

    thread = threading.Thread(target=run)
    with rlkernel.batch_invariant():
        thread.start()
        assert first.wait(20)
    assert rlkernel.batch_invariant.is_enabled()
    second.set()
    thread.join()
    assert not rlkernel.batch_invariant.is_enabled()


def test_the_names_of_batch_invariant_ops():
    ops = batch_invariant_ops
    assert not ops.is_batch_invariant_mode_enabled()
    with ops.set_batch_invariant_mode():
        assert ops.is_batch_invariant_mode_enabled()
        want = torch.mm(ROWS, WEIGHT.t()), torch.log_softmax(ROWS, -1), ROWS.mean(-1)
        with ops.set_batch_invariant_mode(False):
            assert not ops.is_batch_invariant_mode_enabled()
            stock = ROWS.mean(-1)
        assert ops.is_batch_invariant_mode_enabled()
    assert torch.equal(stock, ROWS.mean(-1))
    got = ops.matmul_persistent(ROWS, WEIGHT.t()), ops.log_softmax(ROWS, dim=-1), ops.mean_dim(ROWS, 1)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    ops.enable_batch_invariant_mode()
    assert ops.is_batch_invariant_mode_enabled() and ops.get_batch_invariant_attention_block_size().block_n
    ops.disable_batch_invariant_mode()
    assert not ops.is_batch_invariant_mode_enabled()


def test_what_was_compiled_runs_invariant():
    linear = torch.nn.Linear(300, 77)
    compiled = torch.compile(lambda x: F.silu(linear(x)).mean(-1), backend="aot_eager")
    with torch.no_grad():
        compiled(ROWS)
        with rlkernel.batch_invariant() as mode:
            assert_invariant(compiled, ROWS, sizes=FEW, rows=5)
        assert {"linear", "mean.dim"} <= {row.op for row in mode.report()}


def test_linear_logprob_is_logprob_of_the_product():
    hidden, weight, ids = ROWS / 40, WEIGHT, torch.arange(len(ROWS)) % 77
    with rlkernel.batch_invariant():
        want = rlkernel.logprob(F.linear(hidden, weight), ids, temperature=0.7).logprobs

        def run(hidden, ids):
            return rlkernel.linear_logprob(hidden, weight, ids, temperature=0.7).logprobs

        assert_equal("linear_logprob", run(hidden, ids), want)
        assert_invariant(run, (hidden, ids))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_divergence_is_the_divergence_of_both_products(dtype, beta):
    """Under a limit that holds few rows too; another test has the row in other batches."""
    hidden, weight = (ROWS / 40).to(dtype), WEIGHT.repeat(9, 1).to(dtype)
    teacher, teacher_weight = hidden[:, 3:].flip(1), weight[:, 3:].contiguous()
    asked = {"beta": beta, "return_entropy": True}
    with rlkernel.batch_invariant():
        products = F.linear(hidden.float(), weight.float()), F.linear(teacher.float(), teacher_weight.float())
        want = rlkernel.divergence(*products, **asked)
        for limit in (2**28, 2**20):
            with rlkernel.workspace.limited(limit):
                out = rlkernel.linear_divergence(hidden, weight, teacher, teacher_weight, **asked)
            assert_equal(f"divergence, {limit}", out.divergence, want.divergence)
            assert_equal(f"entropy, {limit}", out.entropy, want.entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rlkernels_operators(dtype, threads):
    """Log-probabilities and samples, whose seeds and positions go with the row."""
    x, ids = ROWS.to(dtype), torch.arange(len(ROWS)) % 300

    def run(x, ids):
        options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
        sampled = rlkernel.sample(x / 8, seeds=ids, positions=ids + 3, **options)
        scored = rlkernel.logprob(x, ids, temperature=0.7, return_entropy=True)
        return tuple(sampled), scored.logprobs, scored.entropy

    with rlkernel.batch_invariant():
        assert_invariant(run, (x, ids), sizes=SIZES if threads == 1 else (1, 17), neighbours=())


def scored_by_a_trainer(logits, tokens, temperature=1.0):
    return rlkernel.logprob(logits, tokens, temperature=temperature).logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sampled_token_has_the_number_that_a_trainer_computes(dtype):
    """Of the same logits, also of a distribution that is cut; and it is not so without the mode."""
    logits, n = (ROWS / 8).to(dtype), len(ROWS)
    t = torch.where(torch.arange(n) % 7 == 0, 0.0, 0.6)
    options = {"seeds": 3, "positions": torch.arange(n), "temperature": t, "top_logprobs": 3}
    shift = torch.linspace(-1, 1, 300)

    def sampled():
        plain = rlkernel.sample(logits, greedy_logprobs="softmax", **options)
        given = torch.stack([plain.token_ids, plain.token_ids + 1], 1) % 300
        again = rlkernel.score_tokens(logits, plain.token_ids, logprob_token_ids=given, **options)
        cut = rlkernel.sample(logits, return_support=300, top_p=0.8, **options)
        shifted = rlkernel.sample(logits, logit_bias=shift, **options)
        chain = rlkernel.verify_chain(plain.token_ids[:, None], torch.stack([logits] * 2, 1), seeds=3)
        pairs = [
            (plain.raw_logprobs, scored_by_a_trainer(logits, plain.token_ids)),
            (plain.tempered_logprobs, scored_by_a_trainer(logits, plain.token_ids, t.masked_fill(t == 0, 1))),
            (plain.processed_logprobs, plain.tempered_logprobs),
            (again.tempered_logprobs, plain.tempered_logprobs),
            (again.id_logprobs[:, 0], plain.tempered_logprobs),
            (cut.raw_logprobs, scored_by_a_trainer(logits, cut.token_ids)),
            (shifted.raw_logprobs, scored_by_a_trainer(logits, shifted.token_ids)),
            (
                shifted.tempered_logprobs,
                scored_by_a_trainer(logits.float() + shift, shifted.token_ids, t.masked_fill(t == 0, 1)),
            ),
            (chain.raw_logprobs[:, 0], scored_by_a_trainer(logits, chain.token_ids[:, 0])),
        ]
        first = plain.top_ids == plain.token_ids[:, None]
        return [*pairs, (plain.top_logprobs[first], plain.tempered_logprobs[first.any(1)])]

    with rlkernel.batch_invariant():
        for place, (got, want) in enumerate(sampled()):
            assert_equal(f"pair {place}", got, want)
    assert any(not torch.equal(got, want) for got, want in sampled())


HEADS = {"plain": {}, "softcap": {"softcap": 5.0}, "scaled": {"logit_scale": 0.3, "bias": BIAS}}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_sample_linear_has_the_number_of_linear_logprob(dtype, head, store):
    hidden, weight = (ROWS / 40).to(dtype), WEIGHT.to(dtype)
    options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in HEADS[head].items()}
    for rounded in (torch.float32, dtype):
        asked = options | {"logits_dtype": rounded, "temperature": 0.6}
        with rlkernel.batch_invariant():
            out = rlkernel.sample_linear(hidden, weight, seeds=3, store_logits=store, **asked)
            want = rlkernel.linear_logprob(hidden, weight, out.token_ids, **asked).logprobs
            assert_equal(f"{rounded}", out.tempered_logprobs, want)
            asked |= {"temperature": 1.0}
            raw = rlkernel.linear_logprob(hidden, weight, out.token_ids, **asked).logprobs
            assert_equal(f"raw, {rounded}", out.raw_logprobs, raw)


def test_the_experts_of_a_row_are_those_of_its_logits(threads):
    """Ties go the same way in any batch, and the combination is summed in a fixed order."""
    with rlkernel.batch_invariant():
        logits = F.linear(ROWS, ROUTER).div(400).round()
        assert (logits.sort(-1).values.diff(dim=-1) == 0).any(-1).float().mean() > 0.9
        assert_invariant(lambda x: torch.cat([*x.topk(3)], -1), logits, sizes=FEW)
        first = experts("index_add")(ROWS)
        for _ in range(3):
            assert_equal("again", experts("index_add")(ROWS), first)


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not():
    held, done = threading.Event(), threading.Event()

    def hold():
        with invariance.lock, invariance.aside():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        with rlkernel.batch_invariant():
            os._exit(len(invariance.asides))
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
