"""linear_divergence: which products it does, and what memory it takes."""

import types

import linear_divergence_cases
import pytest
import torch
from bitwise import assert_equal
from linear_divergence_cases import BETAS, NAMES, check_against_fp64, inputs_of, run
from linear_logprob_cases import Flops, Storages

import rlkernel
from rlkernel.calls.linear_divergence import LinearDivergenceCall
from rlkernel.drivers import linear_divergence as driver
from rlkernel.drivers import linear_tiles
from rlkernel.drivers.linear_divergence_plan import backward_plan, forward_plan
from rlkernel.drivers.linear_products import Scratch
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference.linear_divergence import make_inputs
from rlkernel.runtime import workspace

pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_divergence_cases.small_tiles


@pytest.mark.parametrize("beta", BETAS)
def test_products_are_not_done_for_nothing(beta, small_tiles):
    """One of each model forward and backward, one more a gradient, and of the rows that count alone; with a
    frozen head none of them twice."""
    n, size, vocab = 24, 16, 96
    inputs, unit = inputs_of(n, size, vocab, teacher_size=2 * size), 2 * n * size * vocab

    def products(needs=NAMES, live=n, kept=n):
        grad, mask = (torch.arange(n) < live).float(), torch.arange(n) < kept
        with Flops() as counter:
            run("native", inputs, grad, needs, beta=beta, mask=mask)
        return counter.total / unit

    assert products(()) == 1 + 2
    assert products() == 2 * (1 + 2) + 2
    assert products(("weight",)) == 2 * (1 + 2) + 1
    assert products(("hidden",)) == products(("hidden",), live=0) == (1 + 2) + 1
    assert products(("bias",)) == 2 * (1 + 2)
    assert products(live=n // 2) == (1 + 2) + (1 + 2 + 2) / 2
    assert products(kept=n // 2) == (2 * (1 + 2) + 2) / 2
    assert products(live=0) == 1 + 2
    assert products(kept=0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_that_are_there_are_not_computed_again(dtype, softcap, masked, small_tiles):
    """Of as many rows as the workspace holds; whoever takes it in between costs the products, and no bit."""
    n, size, vocab = 8, 16, 133
    inputs, unit = inputs_of(n, size, vocab, teacher_size=2 * size, dtype=dtype), 2 * n * size * vocab
    mask = torch.arange(n) % 4 > 0 if masked else None
    options = {"beta": 0.3, "softcap": softcap, "teacher_softcap": 9.0, "mask": mask}
    share = 1 if mask is None else mask.float().mean().item()

    def gradients(between, grad=None):
        leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
        with rlkernel.use_backend("native"), Flops() as counter:
            out = rlkernel.linear_divergence(**leaves, **options).divergence
            between()
            grad = torch.linspace(1, 2, n) if grad is None else grad
            found = torch.autograd.grad(out, [leaves[name] for name in NAMES], grad, retain_graph=True)
            again = torch.autograd.grad(out, [leaves[name] for name in NAMES], grad)
        for name, x, y in zip(NAMES, found, again, strict=True):
            assert_equal(f"the second gradient of {name}", y, x)
        return found, counter.total / unit

    def another():
        rlkernel.linear_logprob(torch.randn(3, 8), torch.randn(50, 8), torch.arange(3))

    found, products = gradients(lambda: None)
    assert products == pytest.approx(share * ((1 + 2) + 2 + (1 + 2) + 2))  # the second time they are gone
    for between in (another, workspace.release):
        others, products = gradients(between)
        extra = 2 * 3 * 8 * 50 / unit if between is another else 0
        assert products - extra == pytest.approx(share * (3 * (1 + 2) + 4))
        for name, x, y in zip(NAMES, found, others, strict=True):
            assert_equal(name, y, x)
    grad = torch.linspace(1, 2, n) * (torch.arange(n) != 5)  # fewer rows than forward had
    _, products = gradients(lambda: None, grad)
    rows = n if mask is None else int(mask.sum())
    assert products == pytest.approx(((1 + 2) * rows + 2 * (1 + 2 + 2) * (rows - 1)) / n)
    with workspace.limited(2**20):  # the logits of both may not leave room for what backward needs
        check_against_fp64("native", inputs, **options)


@pytest.mark.parametrize("mask", [None, "half"], ids=["all rows", "some rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_workspace_is_all_the_memory_there_is(dtype, mask, softcap, monkeypatch):
    """What forward and backward make, beside gradients and per-row numbers, lies in the workspace."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(64, 128))
    n, size, teacher_size, vocab = 512, 40, 56, 1000
    inputs = inputs_of(n, size, vocab, teacher_size, biases=False, dtype=dtype)
    keeps = None if mask is None else torch.arange(n) % 2 > 0
    options = {"beta": 0.3, "mask": keeps, "softcap": softcap, "teacher_softcap": softcap}
    run("native", inputs, **options)  # takes the workspace
    buffers = {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
    leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
    with rlkernel.use_backend("native"), Storages() as storages:
        out = rlkernel.linear_divergence(**leaves, return_entropy=True, **options)
        out.divergence.sum().backward()
    assert buffers == {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
    known = buffers | {x.untyped_storage().data_ptr() for x in leaves.values()}
    sizes = {size for address, size in storages.seen.items() if address not in known and size > 8 * n}
    gradients = {dtype.itemsize * rows * size for rows in (n, vocab)}
    pieces = {
        bytes * rows * wide
        for rows in (64, 128, vocab % 128)
        for wide in (size, teacher_size)
        for bytes in (2, 4)
    }  # of a chunk or a slice, converted
    assert gradients <= sizes <= gradients | pieces, f"made tensors of {sorted(sizes)} bytes, not {gradients}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("masked", [False, True])
def test_workspace_does_not_depend_on_the_number_of_tokens(dtype, masked):
    """It grows to the limit, both models' parts together, and never beyond."""
    sizes = []
    with workspace.limited(2**21):
        for n in (4000, 12000):
            workspace.release()
            inputs = inputs_of(n, 100, 1500, dtype=dtype)  # in several slices backward
            run("native", inputs, beta=0.3, mask=torch.arange(n) % 4 > 0 if masked else None)
            sizes.append(sum(b.memory.numel() for b in workspace._buffers.values()))
    assert sizes[0] == sizes[1] <= 2**21, f"{sizes} bytes for a limit of {2**21}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("which", ["weight", "teacher_weight"])
def test_a_weight_by_columns_is_copied_a_slice_at_a_time(dtype, which):
    inputs = inputs_of(20, 100, 6000, dtype=dtype)
    inputs[which] = inputs[which].T.contiguous().T
    with workspace.limited(2**21):
        workspace.release()
        run("native", inputs, beta=0.3)
        assert sum(b.memory.numel() for b in workspace._buffers.values()) <= 2**21
        check_against_fp64("native", inputs, beta=0.3)


def on_a_gpu(n, vocab, sizes, dtypes, dense=(True, True)):
    """As much of a call as plans are made from, and a workspace for each pass."""

    def tensor(rows, size, dtype, is_dense=True):
        stride = (lambda i: 1) if is_dense else (lambda i: rows)
        return types.SimpleNamespace(
            device=torch.device("cuda"), shape=(rows, size), dtype=dtype, stride=stride
        )

    models = [
        x for size, dtype, is_dense in zip(sizes, dtypes, dense, strict=True)
        for x in (tensor(n, size, torch.bfloat16), None, tensor(vocab, size, dtype, is_dense), None)
    ]  # fmt: skip
    hidden, _, weight, bias, teacher_hidden, _, teacher_weight, teacher_bias = models
    wider = [torch.promote_types(torch.bfloat16, dtype) for dtype in dtypes]
    call = LinearDivergenceCall(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, None, 0.5, 1.0,
        1.0, None, wider[0], 1.0, None, wider[1], False,
    )  # fmt: skip
    return call, driver._models(call)


@pytest.mark.parametrize("limit", [2**26, 2**28, 2**30])
@pytest.mark.parametrize("dense", [(True, True), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_both_parts_are_within_the_limit_of_a_gpu(dtypes, dense, limit):
    many = {"gradients": True, "hidden_gradient": True, "weight_gradient": True}
    for n in (1, 100, 1000, 8192, 100_000):
        for vocab, sizes in ((151936, (1024, 4096)), (32000, (4096, 896)), (1000, (64, 64))):
            call, (own, other) = on_a_gpu(n, vocab, sizes, dtypes, dense)
            for gathered in (False, True):
                with workspace.limited(limit):
                    forward = [
                        driver._Pair(call, n, gathered, forward_plan(call), whole_rows=True, direction=frozen)
                        for frozen in (False, True)
                    ]
                    held = driver._held_until_backward(call, n, gathered)
                    plan, mask = backward_plan(call, n), None if gathered else torch.ones(1)
                    teacher = Scratch(*other, n, gathered, gradients=False, plan=plan)
                    more = {"plan": plan, "mask": mask, "beside": teacher.size}
                    student = Scratch(*own, n, gathered, **many, **more)
                assert all(pair.size <= limit for pair in forward), (n, vocab, gathered, "forward")
                assert held <= limit and (n > 100 or vocab > 1000 or held > 0), (n, vocab, gathered, "held")
                assert student.size + teacher.size <= limit, (n, vocab, gathered, plan)


def test_no_plan_follows_the_rows_where_bits_must_not():
    call, _ = on_a_gpu(8192, 151936, (1024, 4096), (torch.bfloat16, torch.bfloat16))
    with rlkernel.batch_invariant():
        assert len({backward_plan(call, n) for n in (1, 256, 1024, 8192, 100_000)}) == 1
    assert backward_plan(call, 1024).tokens == 1024 and backward_plan(call, 0).tokens == 1


@pytest.mark.parametrize("needs", [NAMES, ("hidden",)], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_rounds_of_the_hidden_gradient_change_no_bit(needs, gathered, small_tiles, monkeypatch):
    """Where the limit does not hold the fp32 sums of all rows, some are summed at a time."""
    inputs = inputs_of(45, 24, 133, dtype=torch.bfloat16)
    mask = torch.arange(45) % 7 > 0 if gathered else None

    def gradients(rows):
        monkeypatch.setattr(Scratch, "_rows_of_sums", lambda self, tokens, used: min(rows, self.n))
        return run("native", inputs, needs=needs, beta=0.3, softcap=5.0, mask=mask)

    whole = gradients(64)
    for rows in (8, 16, 40):
        for name, x in gradients(rows).items():
            assert_equal(f"{name} by {rows} rows", x, whole[name])


def test_the_gradient_of_the_weight_accumulates_in_fp32(monkeypatch):
    """A chunk a token: a bf16 sum would stop growing at 2^8 times what a token adds."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(1, 32))
    inputs = make_inputs(1, 8, 64, dtype=torch.bfloat16, apart=2.0)
    one = run("native", inputs, torch.ones(1), beta=1.0)["grad of weight"].float()
    many = {name: x.expand(600, -1) if "hidden" in name else x for name, x in inputs.items()}
    got = run("native", many, torch.ones(600), beta=1.0)["grad of weight"].float()
    torch.testing.assert_close(got, 600 * one, rtol=2**-6, atol=1e-3)
