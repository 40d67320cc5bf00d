"""``batch_invariant`` where it is left in another order, and calls that torch itself refuses."""

import threading

import pytest
import torch
import torch.nn.functional as F

import rlkernel
from rlkernel import batch_invariant_ops as names
from rlkernel.runtime import invariance

g = torch.Generator().manual_seed(0)
ROWS = torch.randn(3, 4, generator=g)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    g.manual_seed(1)  # a test's numbers are the same whichever tests ran before it
    yield
    assert not rlkernel.batch_invariant.is_enabled() and not invariance.settings


def test_what_was_enabled_is_disabled_inside_a_block_without_it():
    names.enable_batch_invariant_mode()
    with names.set_batch_invariant_mode(False):
        names.disable_batch_invariant_mode()
    assert not names.is_batch_invariant_mode_enabled()


def test_what_is_not_done_when_it_returns_is_not_decorated():
    """The block would be over before it runs."""

    def generator():
        yield rlkernel.batch_invariant.is_enabled()

    async def coroutine():
        return rlkernel.batch_invariant.is_enabled()

    for function in (generator, coroutine):
        with pytest.raises(ValueError, match="func must be done when it returns, got .*inside of it"):
            rlkernel.batch_invariant()(function)


def test_a_block_ends_while_another_thread_has_suspended_it():
    entered, leave, errors = threading.Event(), threading.Event(), []

    def run():
        try:
            with rlkernel.batch_invariant():
                entered.set()
                leave.wait(20)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(20)
    with names.set_batch_invariant_mode(False), names.set_batch_invariant_mode(False):
        leave.set()
        thread.join()
    assert not errors


def test_a_block_inside_what_was_compiled_is_refused():
    @torch.compile(backend="eager")
    def run(x):
        with rlkernel.batch_invariant():
            return x @ x.t()

    with pytest.raises(RuntimeError, match="must be entered outside of what torch.compile made"):
        run(ROWS)


def test_mean_dim_of_integers_is_fp32_and_log_softmax_has_the_last_dimension():
    """As in the package whose names these are."""
    found = names.mean_dim(torch.tensor([[1, 2], [5, 7]]), 1)
    assert found.dtype == torch.float32 and found.tolist() == [1.5, 6.0]
    with pytest.raises(ValueError, match="dim must be the last dimension of 2, got 0"):
        names.log_softmax(ROWS, dim=0)


REFUSED_BY_TORCH = {
    "mm of two dtypes": lambda: torch.mm(ROWS, ROWS.t().bfloat16()),
    "mm of three dimensions": lambda: torch.mm(ROWS[None], ROWS.t()[None]),
    "mm of shapes": lambda: torch.mm(ROWS, ROWS),
    "mm into another dtype": lambda: torch.mm(ROWS, ROWS.t(), out=torch.empty(3, 3, dtype=torch.bfloat16)),
    "bmm of two dimensions": lambda: torch.bmm(ROWS, ROWS.t()),
    "addmm of a longer base": lambda: torch.addmm(torch.zeros(2, 3), ROWS[:1], ROWS.t()),
    "addmm of a deeper base": lambda: torch.addmm(torch.zeros(2, 3, 3), ROWS, ROWS.t()),
    "addmm of another dtype": lambda: torch.addmm(torch.zeros(3).bfloat16(), ROWS, ROWS.t()),
    "addmm_ of a row": lambda: torch.zeros(3, 3).addmm_(ROWS[:1], ROWS.t()),
    "mv of shapes": lambda: torch.mv(ROWS, ROWS[:, 0]),
    "dot of two dtypes": lambda: torch.dot(ROWS[0], ROWS[0].half()),
    "sum of no dimension": lambda: ROWS.sum(2),
    "mean of no dimension": lambda: ROWS.mean(-3),
    "sum of one twice": lambda: ROWS.sum((1, -1)),
    "mean as integers": lambda: ROWS.mean(1, dtype=torch.int64),
    "norm of no dimension": lambda: torch.linalg.vector_norm(ROWS, dim=2),
    "softmax of no dimension": lambda: ROWS.softmax(2),
    "silu of integers": lambda: F.silu(torch.arange(3)),
    "gelu of another kind": lambda: F.gelu(ROWS, approximate="erf"),
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_what_torch_does_not_take_is_an_error_inside_too(name):
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
        REFUSED_BY_TORCH[name]()
    with (
        rlkernel.batch_invariant(strict=False) as mode,
        pytest.raises((RuntimeError, IndexError, NotImplementedError, ValueError)),
    ):
        REFUSED_BY_TORCH[name]()
    assert not mode.report()


TAKEN_BY_TORCH = {
    "sum over a number's dimension": lambda: torch.tensor(3.0).sum(0),
    "deviation of one element": lambda: ROWS[:, :1].var(1, correction=0),
    "deviation of all": lambda: ROWS.std(),
    "nanmean": lambda: torch.where(ROWS > 0, ROWS, torch.nan).nanmean(1),
    "sum as integers": lambda: torch.full((3, 4), 0.5).sum(1, dtype=torch.int64),
    "power in place": lambda: ROWS.clone().pow_(2),
    "sigmoid of integers": lambda: torch.arange(3).sigmoid(),
}


@pytest.mark.parametrize("name", TAKEN_BY_TORCH)
def test_what_torch_takes_has_its_numbers(name):
    want = TAKEN_BY_TORCH[name]()
    with rlkernel.batch_invariant():
        got = TAKEN_BY_TORCH[name]()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_ops_whose_own_figures_are_of_fp64_run_inside():
    """They are of no model: which drafts are kept, and which tokens a correction drops."""
    logits = torch.randn(6, 4, 20, generator=g)
    drafts, drawn = torch.randint(20, (6, 3), generator=g), logits[:, :3].flip(0).log_softmax(-1)
    old, rollout = (-torch.rand(3, 4, generator=g) for _ in range(2))
    correction = rlkernel.RolloutCorrection(m2_threshold=0.01)

    def chain():
        return rlkernel.verify_chain(drafts, logits, draft_logprobs=drawn, seeds=3)

    def loss():
        advantages, mask = old.flip(0), torch.ones(3, 4, dtype=torch.bool)
        options = {"rollout_logprobs": rollout, "correction": correction}
        return rlkernel.policy_loss(old, old, advantages, mask, **options)

    for run in (chain, loss):
        want = run()
        with rlkernel.batch_invariant():
            got = run()
        for a, b in zip(want, got, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)


LONG = torch.randn(45, generator=g) * 2
PLACED = {  # elements that torch rounds by their place or stride
    "pow of tensors": lambda x: x.abs() ** torch.tensor(1.7, dtype=x.dtype),
    "pow of a number": lambda x: 2.5**x,
    "root of halves": lambda x: x.abs() ** -0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLACED)
def test_an_element_has_the_same_bits_at_every_place_and_stride(name, dtype):
    x = LONG.to(dtype).repeat(800)
    with rlkernel.batch_invariant():
        whole = PLACED[name](x)
        for first, end in ((0, 45), (7, 8), (11, 28), (7, 35997)):
            part = x[first:end]
            for layout in (part, part.clone(), torch.stack([part, part], 1)[:, 0]):
                assert torch.equal(PLACED[name](layout), whole[first:end])


def test_gated_halves_have_the_same_bits_at_every_stride():
    x = torch.randn(40, 600, generator=g)
    with rlkernel.batch_invariant():
        for dim in (0, 1):
            assert torch.equal(F.glu(x.t().contiguous().t(), dim), F.glu(x, dim))
        with pytest.raises(ValueError, match=r"dim must be one of even size, got dim 0 of shape \(3, 4\)"):
            F.glu(ROWS, 0)


def attended(x):
    """As models write it where they do not call scaled_dot_product_attention."""
    scores = (x @ x.mT).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(x.dtype).min)
    return scores.softmax(-1, dtype=torch.float32)


SQUARE = torch.eye(3)


def by_heads(x):
    """The same of heads that lie one behind the other, as XGLM and TrOCR have them."""
    return attended(x.flatten(0, 1))


LET_THROUGH_BEFORE = {
    "torch's _softmax": lambda: by_heads(torch.randn(1, 2, 5, 4, generator=g)),
    "that hides keys": lambda: torch.tensor([[[-torch.inf, -1e9, 0.5, 0.7, -1e9]]]).softmax(-1),
    "_softmax": lambda: attended(torch.randn(1, 2, 5, 4, generator=g).half()),
    "mkldnn_rnn_layer": lambda: torch.nn.LSTM(4, 2).requires_grad_(False)(ROWS[None]),
    "_masked_softmax": lambda: torch._masked_softmax(ROWS, ROWS > 0, 1, 2),
    "var_mean.correction": lambda: torch.var_mean(ROWS, 1),
    "mm": lambda: torch.sparse.mm(ROWS.to_sparse(), ROWS.t()),
    "addmm": lambda: torch.sparse.mm(ROWS.to_sparse_csr(), ROWS.t()),
    "logaddexp": lambda: torch.logaddexp(ROWS, ROWS),
    "atanh_": lambda: (ROWS / 9).atanh_(),
    "pow_.Scalar": lambda: ROWS.abs().pow_(1.7),
    "_linalg_solve_ex": lambda: torch.linalg.solve(SQUARE, torch.ones(3, 2)),
    "linalg_solve_triangular": lambda: torch.linalg.solve_triangular(SQUARE, torch.ones(3, 2), upper=False),
    "linalg_lstsq": lambda: torch.linalg.lstsq(SQUARE, torch.ones(3, 2)),
    "_cholesky_solve_helper": lambda: torch.cholesky_solve(torch.ones(3, 2), SQUARE),
    "_fft_r2c": lambda: torch.fft.rfft(ROWS),
}


def test_filtered_logits_are_no_attention():
    logits = torch.randn(2, 5, 40, generator=g)
    filtered = logits.masked_fill(logits < 0.5, -torch.inf)
    with rlkernel.batch_invariant():
        assert torch.equal(filtered.softmax(-1)[:1, 2:], filtered[:1, 2:].softmax(-1))
        assert torch.equal(logits[..., :20].log_softmax(-1)[1:], logits[1:, :, :20].log_softmax(-1))
        logits[..., 30:] = -torch.inf  # a vocabulary that is filled up
        assert torch.equal(logits.log_softmax(-1)[1:], logits[1:].log_softmax(-1))


@pytest.mark.parametrize("name", LET_THROUGH_BEFORE)
def test_what_follows_the_batch_is_refused_by_name(name):
    with rlkernel.batch_invariant(), pytest.raises(RuntimeError, match=name):
        LET_THROUGH_BEFORE[name]()


def test_steps_and_whole_sequences_of_a_window_are_refused_in_one_block():
    """The rows of a step would be counted from the window, and have other bits."""
    x = torch.randn(1, 1, 30, 8, generator=g)
    mask = torch.ones(30, 30, dtype=torch.bool).tril().triu(-12)

    def whole():
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def step(keys):
        heads = x[:, :, -1:].expand(1, 2, 1, 8)
        return F.scaled_dot_product_attention(heads, *(x[:, :, -keys:],) * 2, enable_gqa=True)

    with rlkernel.batch_invariant():
        whole()
        step(30)
        with pytest.raises(RuntimeError, match="does not say where its sequence begins"):
            step(13)
    with rlkernel.batch_invariant():
        step(13)
        with pytest.raises(RuntimeError, match="use the attention of rlkernel.register_hf"):
            whole()
    with rlkernel.batch_invariant():
        whole()


ADDED = {
    "bias[expert], backward": lambda place, x, rows: torch.autograd.grad((rows[place] * x).sum(), rows)[0],
    "index_put_": lambda place, x, rows: torch.zeros_like(rows).index_put_((place,), x, accumulate=True),
    "put_": lambda place, x, rows: torch.zeros_like(rows).put_(
        place[:, None] * x.shape[1] + torch.arange(x.shape[1]), x, accumulate=True
    ),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_several_threads_add_to_one_place_has_an_order(name):
    """torch adds fp32 as the threads come: other bits in each run.  The order is that of the indices."""
    g = torch.Generator().manual_seed(0)
    place = torch.randint(3, (4000,), generator=g)
    x = torch.randn(4000, 64, generator=g) * 10.0 ** torch.randint(-3, 4, (4000, 1), generator=g)
    rows = torch.zeros(3, 64, requires_grad=True)
    want = torch.zeros(3, 64).index_add_(0, place, x)
    before = torch.get_num_threads()
    with rlkernel.batch_invariant() as mode:
        for threads in (1, 2, 2, 2):
            torch.set_num_threads(threads)
            try:
                found = ADDED[name](place, x, rows.detach().requires_grad_())
            finally:
                torch.set_num_threads(before)
            assert torch.equal(found, want), threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert any(x.op in ("_index_put_impl_", "put_") and x.calls >= 4 for x in mode.report())


FOLLOWS = {
    "softmax": lambda x, w, b: x.softmax(-1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b),
    "layer_norm, no bias": lambda x, w, b: F.layer_norm(x, x.shape[1:], w) + b,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLLOWS)
def test_no_gradient_follows_the_threads(name, dtype):
    g = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(n, generator=g).to(dtype) for n in ((1400, 31), (31,), (31,)))
    up = (torch.randn(1400, 31, generator=g) * 10.0 ** torch.randint(-2, 3, (1400, 31), generator=g)).to(
        dtype
    )

    def gradients(*tensors):
        tensors = tuple(t.detach().requires_grad_() for t in tensors)
        found = FOLLOWS[name](*tensors)
        return torch.autograd.grad(found, tensors, up[: len(found)].to(found.dtype), allow_unused=True)

    def run(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return gradients(x, w, b), gradients(x[:9], w, b)[0]
        finally:
            torch.set_num_threads(before)

    truth = gradients(*(t.double() for t in (x, w, b)))
    plain = gradients(x, w, b)
    with rlkernel.batch_invariant():
        (want, _), (found, few) = run(1), run(2)
    assert torch.equal(few, found[0][:9])
    for got, same, theirs, exact in zip(found, want, plain, truth, strict=True):
        if got is not None:
            assert torch.equal(got, same)
            assert (got - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-6 * exact.abs().max()


def test_a_number_to_the_power_of_rows_is_torchs_where_that_is_allowed():
    exponents = torch.rand(2, 3, generator=torch.Generator().manual_seed(2))
    calls = (lambda: 10.0**exponents, lambda: torch.pow(2, exponents), lambda: 2 ** exponents.bfloat16())
    want = [call() for call in calls]
    with rlkernel.batch_invariant(strict=False) as mode:
        found = [call() for call in calls]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert {x.backend for x in mode.report() if x.op.startswith("pow")} == {"torch, not invariant"}
