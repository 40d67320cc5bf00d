"""linear_logprob: which products it does, which logits it keeps from forward, and what memory it takes."""

import types

import linear_logprob_cases
import pytest
import torch
from backends import is_slow, of, running
from bitwise import assert_equal
from linear_logprob_cases import NAMES, Flops, Storages, able, check_against_fp64, of_dtypes, run
from logprob_cases import upstream_like

import rlkernel
from rlkernel.bench.cases import MODELS
from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers import linear_chosen, linear_products, linear_tiles
from rlkernel.drivers import linear_logprob as driver
from rlkernel.drivers.linear_kept import Layout
from rlkernel.drivers.linear_policy_loss_plan import Resident
from rlkernel.drivers.linear_tiles import Tile
from rlkernel.reference.linear_logprob import make_inputs
from rlkernel.runtime import gpu, workspace

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("linear_logprob"))
pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_logprob_cases.small_tiles


@ON_EVERY_BACKEND
def test_gemms_are_not_done_for_nothing(backend, device, small_tiles, monkeypatch):
    """4 GEMMs, 3 without one gradient, 2 with a frozen head, and only the rows that matter; one less when the
    workspace has kept all logits."""
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    n, h, v = 24, 16, 96
    inputs = make_inputs(n, h, v, device=device, ignored=0)
    able(backend, inputs)
    unit = 2 * n * h * v

    def flops(needs, live_rows=n, ignored_rows=0, **options):
        upstream = torch.zeros(n)
        upstream[:live_rows] = 1
        changed = dict(inputs, target_ids=inputs["target_ids"].clone())
        changed["target_ids"][n - ignored_rows :] = -100
        with Flops() as counter:
            run(backend, changed, [upstream.to(device), None, None], needs, **options)
        return counter.total / unit

    assert flops((True, True, False)) == 4 - 2 * (8 * 48) / (n * v)  # two tiles were kept
    if is_slow(backend, device):  # the driver is the one of native
        return
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    assert flops((True, True, False)) == 3
    assert flops((False, True, False)) == 2
    if device == "cuda":  # so little work is not worth a count of rows, which the host would wait for
        assert flops((True, True, False), live_rows=n // 2, ignored_rows=n // 2) == 3
        monkeypatch.setattr(linear_chosen, "WORTH_A_COUNT", 0)
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2  # other rows than those kept
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    assert flops((True, True, False)) == 4
    assert flops((False, True, False)) == 3
    assert flops((True, False, False)) == 2
    assert flops((True, True, False), live_rows=n // 2) == 1 + 3 / 2
    assert flops((True, True, False), live_rows=n // 2, ignored_rows=n // 2) == 2
    assert flops((True, True, False), live_rows=0) == 1


@of_dtypes("linear_logprob", "fp32")  # whose gradients go over the kept logits
def test_kept_logits_change_no_bit(backend, device, dtype, small_tiles, monkeypatch):
    """Whether all, some or none of the logits outlive forward, and whoever takes the workspace meanwhile."""
    inputs = make_inputs(19, 32, 133, dtype=dtype, device=device, ignored=0.2)
    other = make_inputs(19, 32, 133, dtype=dtype, device=device, seed=5)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])

    def gradients(between=lambda: None, backwards=1):
        leaves = [inputs[n].clone().requires_grad_() for n in NAMES[:2]]
        with running(backend):
            out = rlkernel.linear_logprob(*leaves, inputs["target_ids"], return_entropy=True)
            between()
            loss = sum((o * g).sum() for o, g in zip(out, upstream, strict=True))
            for _ in range(backwards):
                grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        return grads

    def score():
        with torch.no_grad():
            rlkernel.linear_logprob(**other)

    def train():
        run(backend, other, upstream_like(other["target_ids"]), (True, True, False), return_entropy=True)

    some = gradients()
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    none = gradients()
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    cases = {"some": some, "all": gradients(), "after a backward": gradients(backwards=2)}
    cases["after scoring"] = gradients(score)
    if not is_slow(backend, device):
        cases["after training"] = gradients(train)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            cases["saved elsewhere"] = gradients(score)
    for name, grads in cases.items():
        for leaf, a, b in zip(NAMES, grads, none, strict=False):
            if device == "cuda":  # tiles are larger where nothing was kept, and the library sums by shape
                rounding = torch.finfo(dtype).eps
                torch.testing.assert_close(a, b, rtol=rounding, atol=1e-5 * b.abs().max().item())
            else:
                assert_equal(f"{leaf} {name}", a, b)


@pytest.mark.parametrize("ignored", [0, 0.3], ids=["all rows", "some rows"])
@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_workspace_is_all_the_memory_there_is(dtype, head, ignored, monkeypatch):
    """What forward and backward make, beside gradients and per-row numbers, lies in the workspace."""
    monkeypatch.setattr(linear_tiles, "CPU_TILE", Tile(64, 128))
    n, h, v = 512, 40, 1000
    inputs = make_inputs(n, h, v, dtype=dtype, ignored=ignored)
    able("native", inputs)

    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    weight.requires_grad_(head == "trained")
    with rlkernel.use_backend("native"):
        rlkernel.linear_logprob(
            hidden, weight, inputs["target_ids"]
        ).logprobs.sum().backward()  # takes the workspace
        buffers = {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
        with Storages() as storages:
            out = rlkernel.linear_logprob(hidden, weight, inputs["target_ids"], return_entropy=True)
            # of a frozen head the gradient of the entropy wants the logits again
            (out.logprobs.sum() + out.entropy.sum()).backward()
    assert buffers == {b.memory.untyped_storage().data_ptr() for b in workspace._buffers.values()}
    known = buffers | {x.untyped_storage().data_ptr() for x in (hidden, weight)}
    sizes = {size for address, size in storages.seen.items() if address not in known and size > 4 * 4 * n}
    gradients = {dtype.itemsize * n * h} | ({dtype.itemsize * v * h} if head == "trained" else set())
    pieces = {bytes * rows * h for rows in (64, 128, v % 128) for bytes in (2, 4)}  # of a chunk or a slice
    assert gradients <= sizes <= gradients | pieces, f"made tensors of {sorted(sizes)} bytes, not {gradients}"


@ON_EVERY_BACKEND
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "with entropy"])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)], ids=["trained", "frozen"])
def test_rounds_of_the_hidden_gradient_change_no_bit(
    backend, device, needs, entropy, small_tiles, monkeypatch
):
    """Where the limit does not hold the fp32 sums of all rows, some are summed at a time."""
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    inputs = make_inputs(45, 24, 133, dtype=torch.bfloat16, device=device, ignored=0.2)
    inputs = linear_logprob_cases.with_bias(inputs)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])
    upstream = [upstream[0], upstream[1] if entropy else None, None]

    def gradients(rows):
        monkeypatch.setattr(
            linear_products.Scratch, "_rows_of_sums", lambda self, tokens, used: min(rows, self.n)
        )
        return run(backend, inputs, upstream, needs, return_entropy=entropy)[1]

    whole = gradients(64)
    for rows in (8, 16, 40):
        for name, a, b in zip(NAMES, gradients(rows), whole, strict=False):
            assert_equal(f"{name} by {rows} rows", a, b)


def test_rounds_of_hidden_gradients_want_logits_again(small_tiles, monkeypatch):
    """Of the rows behind the first round, and only where the weight's gradient wants all rows at once."""
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    n, h, v = 40, 16, 96
    inputs = make_inputs(n, h, v, dtype=torch.bfloat16, ignored=0)
    able("native", inputs)

    def products(rows, needs):
        monkeypatch.setattr(linear_products.Scratch, "_rows_of_sums", lambda *_: rows)
        with Flops() as counter:
            run("native", inputs, [torch.ones(n), torch.ones(n), None], needs, return_entropy=True)
        return counter.total / (2 * n * h * v)

    assert products(40, (True, True, False)) == 4
    assert products(24, (True, True, False)) == 4 + 16 / 40
    assert products(8, (True, True, False)) == 4 + 32 / 40
    assert products(8, (False, True, False)) == 3
    # with a frozen head: logits and direction, then again, as the entropy has a gradient
    assert products(8, (True, False, False)) == products(40, (True, False, False)) == 4


def test_workspace_does_not_depend_on_the_number_of_tokens():
    """It grows to the limit, where logits are kept, and never beyond."""
    sizes = []
    with workspace.limited(2**21):
        for n in (4000, 16000):
            workspace.release()
            inputs = make_inputs(n, 8, 300, ignored=0)
            able("native", inputs)
            run("native", inputs, [torch.ones(n), None, None], (True, True, False))
            sizes.append(sum(b.memory.numel() for b in workspace._buffers.values()))
    assert sizes[0] == sizes[1] <= 2**21


@ON_EVERY_BACKEND
def test_backward_in_larger_tiles_than_forward(backend, device, small_tiles, monkeypatch):
    """As a GPU has it where the logits are not there any more."""
    inputs = make_inputs(19, 16, 133, device=device, ignored=0.2)
    able(backend, inputs)
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: 0)
    monkeypatch.setattr(driver, "backward_plan", lambda *_: Tile(64, 40))
    check_against_fp64(backend, inputs, upstream_like(inputs["target_ids"]), return_entropy=True)


def test_backward_on_a_gpu_takes_all_rows_that_leave_a_wide_slice():
    def plan(n, limit, device="cuda"):
        weight = types.SimpleNamespace(
            device=torch.device(device), shape=(151936, 4096), dtype=torch.bfloat16
        )
        with workspace.limited(limit):
            return linear_tiles.tile_plan(weight, HEAD), linear_tiles.backward_plan(weight, HEAD, n)

    forward, backward = plan(8192, workspace.GPU_LIMIT)
    assert forward == Tile(1536, 16896) and backward == Tile(8192, 16896)
    assert plan(8000, workspace.GPU_LIMIT)[1] == Tile(8192, 16896)
    assert plan(1500, workspace.GPU_LIMIT)[1] == Tile(1536, 84480)
    for n in (20_000, 30_000, 10**6):
        _, (tokens, wide) = plan(n, workspace.GPU_LIMIT)
        sums = 0 if tokens >= n else 4 * 4096 * wide
        assert tokens >= forward.tokens and tokens * (6 * wide + 6 * 4096) + sums <= workspace.GPU_LIMIT, n
    forward, backward = plan(8192, workspace.DEFAULT_LIMIT, "cpu")
    assert forward == backward


@of_dtypes("linear_logprob", "fp32")  # whose gradients go over the kept logits
@pytest.mark.parametrize(("vocab", "joined"), [(112, True), (133, False)], ids=["side by side", "with gaps"])
def test_backward_takes_all_rows_of_kept_logits(
    backend, device, dtype, vocab, joined, small_tiles, monkeypatch
):
    """As a GPU has it where there is room: one product a slice for each gradient, if tiles have no gaps."""
    if backend == "reference":
        pytest.skip("the reference says what the op means, not how to compute it")
    inputs = make_inputs(45, 16, vocab, dtype=dtype, device=device, ignored=0.2)
    inputs = linear_logprob_cases.with_bias(inputs)
    able(backend, inputs)
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    monkeypatch.setattr(linear_products, "kept_plans", lambda plan, n, _: [plan._replace(tokens=n), plan])
    n = int((inputs["target_ids"] != -100).sum()) if device == "cpu" else 45
    upstream = upstream_like(inputs["target_ids"])
    seen = []
    accumulate = linear_products.Scratch.accumulate

    def counted(self, out, a, b, first):
        seen.append(a.shape)
        return accumulate(self, out, a, b, first)

    monkeypatch.setattr(linear_products.Scratch, "accumulate", counted)
    check_against_fp64(backend, inputs, upstream, return_entropy=True)
    widths = [48, 48, vocab - 96]
    if joined:
        assert seen == [shape for wide in widths for shape in ((n, wide), (wide, n))]
    else:
        assert len(seen) == 2 * 3 * -(-n // 8)


HEAD = Head(None, 1.0, 1.0, None, -100, torch.float32, torch.bfloat16)


def gpu_call(n, vocab, size, dtype=torch.bfloat16):
    """As much of the tensors of a GPU as sizes are computed from, and a head."""
    device = torch.device("cuda")
    hidden, weight = (
        types.SimpleNamespace(device=device, shape=shape, dtype=dtype, stride=lambda i: 1)
        for shape in ((n, size), (vocab, size))
    )
    return hidden, weight, HEAD._replace(compute_dtype=dtype)


@pytest.mark.parametrize(
    ("n", "slices"), [(1, 1), (256, 1), (512, 1), (1024, 3), (1500, 9), (1536, 9), (1537, 9)]
)
def test_few_rows_on_a_gpu_take_few_slices_of_the_vocabulary(n, slices):
    """As few as leave room for what the limit held before: kept logits, one pass of linear_policy_loss."""
    hidden, weight, head = gpu_call(n, 151936, 4096)
    plan, whole = linear_tiles.tile_plan(weight, head, n), linear_tiles.tile_plan(weight, head)
    assert plan.tokens == whole.tokens and -(-151936 // plan.vocab) == slices
    every = {"gradients": True, "hidden_gradient": True, "weight_gradient": True}
    for gathered in (False, True):
        before, after = (
            (
                linear_products.Scratch(hidden, weight, head, n, gathered, gradients=True, keep=True, plan=x),
                Resident(hidden, weight, head, n, gathered, blocks=1, plan=x, **every),
            )
            for x in (whole, plan)
        )
        assert after[0].size <= workspace.GPU_LIMIT
        assert bool(before[0].backward_of_kept) == bool(after[0].backward_of_kept), "logits until backward"
        assert after[1].size <= workspace.GPU_LIMIT or before[1].size > workspace.GPU_LIMIT, "one pass"


def kept(n, vocab, limit):
    """The workspace of a forward pass on a GPU that keeps what it can."""
    hidden, weight, head = gpu_call(n, vocab, 4096)
    with workspace.limited(limit):
        own = linear_products.Scratch(hidden, weight, head, n, False, gradients=False, keep=True)
    assert own.size <= limit
    return own


@pytest.mark.parametrize("vocab", [128256, 151936])
def test_backward_on_a_gpu_takes_all_rows_of_kept_logits_where_there_is_room(vocab):
    limits = range(2**32, 6 * 2**30, 2**25)
    plans = [kept(8192, vocab, limit).backward_of_kept for limit in limits]
    steps = [plan for i, plan in enumerate(plans) if i == 0 or plan != plans[i - 1]]
    assert steps == [None, Tile(4096, 16896), Tile(8192, 16896)], "neither, the logits, all rows beside them"
    with rlkernel.batch_invariant():  # the bits of the weight's gradient follow the chunks
        assert kept(8192, vocab, 6 * 2**30).backward_of_kept == Tile(4096, 16896)


@pytest.mark.parametrize("n", [1, 5, 128, 129, 640, 1000])
@pytest.mark.parametrize(("vocab", "plan"), [(112, Tile(8, 48)), (133, Tile(128, 48)), (40, Tile(128, 64))])
def test_kept_tiles_lie_behind_each_other(n, vocab, plan):
    """In the order of the loops, each at a whole line, with no more between them than rounds it."""
    layout = Layout(n, vocab, *plan)
    end = tiles = 0
    gaps = set()
    for v0 in range(0, vocab, plan.vocab):
        wide = min(plan.vocab, vocab - v0)
        for a in range(0, n, plan.tokens):
            index, start = layout.at(v0, a)
            assert index == tiles and start % 128 == 0 and 0 <= start - end < 128
            gaps |= {start - end} if a else set()
            end, tiles = start + min(plan.tokens, n - a) * wide, tiles + 1
            assert 0 <= layout.size(tiles) - end < 128
    assert tiles == layout.tiles and layout.size(0) == 0
    assert gaps <= {0} or not layout.is_joined


def test_short_tiles_that_are_kept_take_no_more_than_their_rows():
    for n, vocab in ((4224, 128256), (6500, 128256), (5700, 151936)):
        assert kept(n, vocab, 2**32).backward_of_kept, n


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("limit", [2**28, 2**30, 2**32])
def test_plans_of_a_gpu_keep_to_the_limit(model, limit):
    vocab, size = MODELS[model]["V"], MODELS[model]["H"]
    every = {"gradients": True, "hidden_gradient": True, "weight_gradient": True}
    with workspace.limited(limit):
        for dtype in (torch.bfloat16, torch.float32):
            for n in (1, 77, 300, 1000, 2000, 5000, 40_000):
                hidden, weight, head = gpu_call(n, vocab, size, dtype)
                for plan in (None, linear_tiles.backward_plan(weight, head, n)):
                    own = linear_products.Scratch(hidden, weight, head, n, True, plan=plan, **every)
                    assert own.size <= limit + 16 * workspace.ALIGNMENT, (n, dtype, own.plan)


def test_no_plan_follows_the_rows_where_bits_must_not():
    _, weight, head = gpu_call(256, 151936, 4096)
    with rlkernel.batch_invariant():
        plans = {linear_tiles.tile_plan(weight, head, n) for n in (None, 1, 256, 1024, 8192)}
        plans |= {linear_tiles.backward_plan(weight, head, n) for n in (1, 256, 1024, 8192)}
    assert plans == {linear_tiles.tile_plan(weight, head)}


def test_backward_on_a_gpu_counts_rows_where_that_pays(small_tiles, monkeypatch):
    """All rows are masked where there is little to do, or kept logits are worth more than fewer rows."""
    monkeypatch.setattr(linear_products, "kept_tiles", lambda tiles, *_: tiles)
    monkeypatch.setattr(gpu, "runs_ahead", lambda device: True)
    n, h, v = 24, 16, 96
    inputs = make_inputs(n, h, v, ignored=0)
    able("native", inputs)

    def products(live, ignored, count):
        """Of all rows, and whether both gradients are those of the rows that count alone."""
        monkeypatch.setattr(linear_chosen, "WORTH_A_COUNT", 0 if count else 2**60)
        upstream = (torch.arange(n) < live).float()
        changed = dict(inputs, target_ids=inputs["target_ids"].clone())
        changed["target_ids"][n - ignored :] = -100
        with Flops() as counter:
            _, grads = run("native", changed, [upstream, None, None], (True, True, False))
        monkeypatch.setattr(linear_chosen, "WORTH_A_COUNT", 0)
        alone = dict(inputs, hidden=inputs["hidden"][:live], target_ids=inputs["target_ids"][:live])
        _, want = run("native", alone, [upstream[:live], None, None], (True, True, False))
        torch.testing.assert_close(grads[0][:live], want[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(grads[1], want[1], rtol=0, atol=1e-6)
        assert (grads[0][live:] == 0).all()
        return counter.total / (2 * n * h * v)

    assert products(n, 0, count=False) == products(n, 0, count=True) == 3
    assert products(4, 12, count=False) == 3
    assert products(20, 0, count=True) == 3, "the kept logits of all rows"
    assert products(12, 0, count=True) == 1 + 3 / 2, "new logits of half of them"
    assert products(12, 12, count=True) == 3 / 2, "kept, of the rows that are not ignored"
    assert products(10, 12, count=True) == 3 / 2, "and they are the ones that are masked"
    assert products(4, 12, count=True) == 1 / 2 + 3 / 6


@pytest.mark.parametrize(
    ("ready", "mode", "captured", "may"),
    [(False, 2, False, True), (True, 1, False, True), (True, 2, False, False), (True, 0, True, False)],
)
def test_the_host_waits_where_it_may(ready, mode, captured, may, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: ready)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    device, work = torch.device("cuda"), linear_chosen.WORTH_A_COUNT
    assert gpu.may_wait(device) == linear_chosen.is_counted(device, work) == may
    assert not linear_chosen.is_counted(device, work - 1)
    assert linear_chosen.is_counted(torch.device("cpu"), 0), "a CPU has nothing to wait for"


def test_rocm_is_asked_whether_its_library_writes_fp32(monkeypatch):
    """Here the library of a CPU stands for it, which does not, and then a stand-in that does."""
    asked = linear_tiles.writes_fp32.__wrapped__
    assert asked(torch.bfloat16, torch.device("cpu")), "CUDA is not asked"
    monkeypatch.setattr(torch.version, "hip", "7")
    assert not asked(torch.bfloat16, torch.device("cpu"))
    for product in (torch.ops.aten.mm, torch.ops.aten.addmm):
        monkeypatch.setattr(product, "dtype_out", lambda *arguments, out: out)
    assert asked(torch.bfloat16, torch.device("cpu"))
