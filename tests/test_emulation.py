"""The sources that CUDA and HIP compile, run on the CPU: right, one set of bits, and planted bugs are found.

The tests of an op run on these kernels too (tests/backends.py); here are the kernels and the emulation alone.
"""

import emulation
import numpy as np
import pytest
import torch

import rlkernel
from rlkernel import native
from rlkernel.native.prefix_shared_attention.kernels import attention_merge, gather_kv, segment_reduce
from rlkernel.reference import preference_loss, value_loss

WARPS = (32, 64)
IGNORED = -100


@pytest.fixture(scope="module", params=WARPS)
def kernels(request):
    module = emulation.module(request.param)
    yield module
    module.configure()


def tensor(array):
    return None if array is None else torch.from_numpy(array)


def tile_fields(logits, target_ids, temperature, vocab_start=0, bias=None, logit_scale=1.0, softcap=0.0):
    """What every kernel's arguments start with, for float32 rows."""
    return {
        "logits": tensor(logits), "vocab_start": vocab_start, "target_ids": tensor(target_ids),
        "ignore_index": IGNORED, "temperature": float(temperature), "bias": tensor(bias),
        "logit_scale": logit_scale, "softcap": softcap,
    }  # fmt: skip


OUTPUTS = ("logprobs", "entropy", "lse", "row_max", "log_sum")


def forward(kernels, logits, target_ids, temperature=1.0, tiles=1, **mapping):
    """logprobs, entropy, lse, row_max, log_sum, with the vocabulary in `tiles` parts."""
    rows = len(logits)
    outputs = [np.full(rows, np.nan, np.float32) for _ in OUTPUTS]
    state = torch.full((4, rows), torch.nan) if tiles > 1 else None
    parts = np.array_split(np.arange(logits.shape[1]), tiles)
    for i, part in enumerate(parts):
        tile = np.ascontiguousarray(logits[:, part]) if tiles > 1 else logits
        fields = tile_fields(tile, target_ids, temperature, int(part[0]), **mapping)
        results = dict(zip(OUTPUTS, map(tensor, outputs), strict=True))
        kernels.logprob_forward(**fields, state=state, first=i == 0, last=i == tiles - 1, **results)
    return outputs


def backward(kernels, logits, target_ids, temperature, results, grads):
    out = np.full_like(logits, np.nan)
    _, entropy, _, row_max, log_sum = map(tensor, results)
    names = ("grad_logprobs", "grad_entropy", "grad_lse")
    kernels.logprob_backward(
        **tile_fields(logits, target_ids, temperature), **dict(zip(names, map(tensor, grads), strict=True)),
        entropy=entropy, row_max=row_max, log_sum=log_sum, out=tensor(out),
    )  # fmt: skip
    return out


def truth(logits, target_ids, temperature, grads=(1.0, 0.0, 0.0)):
    """logprobs, entropy, lse and the gradient of their weighted sums, in float64."""
    z = logits.astype(np.float64) / temperature
    top = z.max(1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(1, keepdims=True))
    log_p = z - lse
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1, keepdims=True)
    onehot = np.arange(z.shape[1]) == target_ids[:, None]
    gradient = grads[0] * (onehot - p) - grads[1] * p * (log_p + entropy) + grads[2] * p
    return (z * onehot).sum(1) - lse[:, 0], entropy[:, 0], lse[:, 0], gradient / temperature


def rows_of(rows, vocab, seed=0):
    random = np.random.default_rng(seed)
    logits = (4 * random.standard_normal((rows, vocab))).astype(np.float32)
    return logits, random.integers(0, vocab, rows)


def test_primitives(kernels):
    """Votes and shuffles are as wide as the warp; a shuffle of half a wavefront stays in its half."""
    warp = kernels.warp_size
    expected = [sum(1 << t % warp for t in range(warp * (i // warp), warp * (i // warp + 1)) if t % 3 == 0)
                for i in range(128)]  # fmt: skip
    assert kernels.ballots(128) == expected
    assert kernels.neighbours(128, 5, 32) == [i ^ 5 for i in range(128)]
    assert kernels.neighbours(128, warp // 2, warp) == [i ^ warp // 2 for i in range(128)]
    assert kernels.histogram(3, 96, 7) == [3 * len(range(i, 96, 7)) for i in range(7)]


@pytest.mark.parametrize("pushed", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_clusters(kernels, size, pushed):
    """Blocks of a cluster have memories of their own, which the others read and write."""
    expected = [sum(b * b for b in range(c, c + size)) for c in range(0, 3 * size, size) for _ in range(size)]
    for seed in range(6):
        kernels.configure(seed)
        assert kernels.cluster_sums(3, size, 64, pushed) == expected
    kernels.configure()


def schedules_that_find(kernels, fault, pushed):
    """How many of twelve schedules give wrong sums, and the errors of the others that are found."""
    expected = [sum(b * b for b in range(4))] * 4
    wrong, errors = 0, set()
    for seed in range(12):
        kernels.configure(seed)
        try:
            wrong += kernels.cluster_sums(1, 4, 64, pushed, fault) != expected
        except RuntimeError as error:
            errors.add(str(error))
    kernels.configure()
    return wrong, errors


@pytest.mark.parametrize("pushed", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("fault", ["no barrier", "a barrier of the block"])
def test_a_missing_barrier_of_a_cluster_is_found(kernels, fault, pushed):
    wrong, errors = schedules_that_find(kernels, fault, pushed)
    assert wrong > 0 and not errors


def test_memory_of_a_block_that_has_left_is_found(kernels):
    _, errors = schedules_that_find(kernels, "it leaves early", pushed=False)
    assert len(errors) > 0 and all("of a cluster is used when it has left the kernel" in e for e in errors)


def test_elementary_functions(kernels):
    x = np.random.default_rng(0).uniform(0, 1, 4000)

    def worst_ulp(function, exact, points):
        points = points.astype(np.float32)
        got = np.array([function(float(v)) for v in points], np.float32)
        right = exact(points.astype(np.float64))
        return np.max(np.abs(got - right) / np.spacing(np.abs(right).astype(np.float32)))

    assert worst_ulp(kernels.log, np.log, 1 + 1e5 * x**8) <= 1
    assert worst_ulp(kernels.exp, np.exp, -30 * x) <= 1
    assert worst_ulp(kernels.expm1, np.expm1, -20 * x**4) <= 4
    assert worst_ulp(lambda v: kernels.tanh(v)[0], np.tanh, 20 * x - 10) <= 2
    assert worst_ulp(lambda v: kernels.tanh(v)[1], lambda v: 1 / np.cosh(v) ** 2, 20 * x - 10) <= 24
    tiny = 1e-12 * x[1:]
    assert np.allclose([kernels.log(1 + v) for v in tiny], np.log1p(tiny), rtol=1e-3)  # p -> 1


def test_narrow_types(kernels):
    """Round to nearest even, denormals and overflow of fp16 as numpy's; bf16 by its definition."""
    random = np.random.default_rng(1)
    x = (random.standard_normal(4000) * np.exp2(random.integers(-28, 18, 4000))).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    assert np.array_equal([kernels.through_f16(float(v)) for v in x], expected)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
    assert np.array_equal([kernels.through_bf16(float(v)) for v in x], rounded)
    assert np.isnan(kernels.through_bf16(float("nan"))) and np.isnan(kernels.through_f16(float("nan")))


@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 4099, 50257])
def test_matches_fp64(kernels, vocab):
    logits, target_ids = rows_of(5, vocab)
    grads = np.array([0.7, -0.4, 0.3], np.float32)
    results = forward(kernels, logits, target_ids, 0.7)
    gradient = backward(kernels, logits, target_ids, 0.7, results, [np.full(5, g, np.float32) for g in grads])
    logprobs, entropy, lse, expected = truth(logits, target_ids, np.float32(0.7), grads)
    assert np.allclose(results[0], logprobs, rtol=1e-6, atol=1e-6)
    assert np.allclose(results[1], entropy, rtol=1e-6, atol=1e-6)
    assert np.allclose(results[2], lse, rtol=1e-6, atol=1e-6)
    assert np.allclose(gradient, expected, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("vocab", [257, 4099])
def test_bits_do_not_depend_on_the_schedule(kernels, vocab):
    """Whatever the order of threads and blocks, and whether blocks take one row each or many."""
    logits, target_ids = rows_of(6, vocab)
    kernels.configure()
    expected = forward(kernels, logits, target_ids, 0.9)
    for seed, max_blocks in ((1, 6), (2, 6), (3, 1), (4, 2)):
        kernels.configure(seed, max_blocks)
        got = forward(kernels, logits, target_ids, 0.9)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True)), (seed, max_blocks)
    kernels.configure()


def test_bits_do_not_depend_on_the_alignment(kernels):
    """An odd stride gives rows of each alignment: reads get narrower, elements stay with their threads."""
    logits, target_ids = rows_of(4, 4097)
    shifted = np.empty((4, 4099), np.float32)[:, 1:4098]
    shifted[:] = logits
    expected, got = forward(kernels, logits, target_ids), forward(kernels, shifted, target_ids)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def test_both_warp_sizes_give_the_same_bits():
    """Reductions step through groups of 32 lanes on both, so one tree serves warps and wavefronts.

    What is left between the vendors is 2^x: each has its own instruction.
    """
    logits, target_ids = rows_of(3, 50257)
    results = [forward(emulation.module(warp), logits, target_ids, 1.3) for warp in WARPS]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("tiles", [2, 5])
def test_state_carries_over_tiles(kernels, tiles):
    logits, target_ids = rows_of(4, 1000)
    logits[0, :400] = -np.inf  # a tile of nothing, then values
    target_ids[0] = 900
    got, whole = forward(kernels, logits, target_ids, 0.8, tiles), forward(kernels, logits, target_ids, 0.8)
    for a, b in zip(got, whole, strict=True):
        assert np.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_rows_at_the_edge(kernels):
    """Ignored rows give 0 whatever they hold; a target outside the vocabulary, NaN, +inf, only -inf: NaN."""
    logits, target_ids = rows_of(6, 300)
    logits[0], target_ids[0] = np.nan, IGNORED
    target_ids[1] = 300
    target_ids[2] = -1
    logits[3, 7] = np.nan
    logits[4, 7] = np.inf
    logits[5] = -np.inf
    logprobs, entropy, lse, row_max, log_sum = results = forward(kernels, logits, target_ids)
    assert all(x[0] == 0 for x in results)
    assert np.isnan(logprobs[1:]).all() and np.isnan(log_sum[1:5]).all()
    assert np.isfinite(lse[1:3]).all() and np.isnan(lse[3:5]).all() and lse[5] == -np.inf
    assert np.isnan(entropy[3:]).all()
    ones = np.ones(6, np.float32)
    gradient = backward(kernels, logits, target_ids, 1.0, results, (ones, ones, None))
    assert (gradient[0] == 0).all() and np.isnan(gradient[1:]).all()


@pytest.mark.slow
def test_sanitizers_find_nothing():
    run = emulation.run_sanitized(32)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_a_read_out_of_bounds_is_found():
    """The vector at a row's end read whole."""
    run = emulation.run_sanitized(32, {"vec.cuh": ("if (i >= count) break;", "(void)count;")})
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr and "read_part" in run.stderr


def broken(name, original, replacement):
    return emulation.load(emulation.build_module(32, {name: (original, replacement)}))


def disagreements(kernels, logits, target_ids, max_blocks):
    """How many of eight schedules give a wrong result."""
    expected = truth(logits, target_ids, 1.0)[0]
    wrong = 0
    for seed in range(8):
        kernels.configure(seed, max_blocks)
        wrong += not np.allclose(forward(kernels, logits, target_ids)[0], expected, atol=1e-5)
    return wrong


@pytest.mark.parametrize(
    "barrier, max_blocks",
    [
        ("the partials are written", 8),
        ("the partials are read", 1),  # shows where a block goes on to another row
    ],
)
def test_a_missing_barrier_is_found(barrier, max_blocks):
    logits, target_ids = rows_of(8, 5000)
    kernels = emulation.module(32)
    assert disagreements(kernels, logits, target_ids, max_blocks) == 0
    with emulation.left_out(kernels, "reduce.cuh", barrier):
        assert disagreements(kernels, logits, target_ids, max_blocks) > 0


def value_losses(kernels, schedules):
    """Loss, metrics and gradient of two chunks and a tail in two sequences, under each (seed, max_blocks)."""
    inputs = value_loss.make_inputs(2, 4500, clipped=True)
    results = []
    with native.emulated(kernels), rlkernel.use_backend("native"):
        for seed, max_blocks in schedules:
            kernels.configure(seed, max_blocks)
            values = inputs["values"].clone().requires_grad_()
            out = rlkernel.value_loss(**inputs | {"values": values}, cliprange_value=0.2)
            out.loss.backward()
            results.append(torch.cat([out.loss.detach()[None], out.metrics, values.grad.flatten()]))
    kernels.configure()
    return results


def test_value_loss_does_not_depend_on_the_schedule(kernels):
    first, *others = value_losses(kernels, [(0, 1 << 20), (1, 6), (2, 6), (3, 1), (4, 2)])
    assert all(torch.equal(first, other) for other in others)


def test_value_loss_has_the_same_bits_with_both_warp_sizes():
    first, second = (value_losses(emulation.module(warp), [(0, 1 << 20)])[0] for warp in WARPS)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "barrier, max_blocks",
    [
        ("the chunk's partials are written", 8),
        ("the chunk's partials are read: the next chunk may overwrite them", 1),
        ("the groups' totals are written", 8),
    ],
)
def test_a_barrier_missing_in_value_loss_is_found(barrier, max_blocks):
    kernels = emulation.module(32)
    right = value_losses(kernels, [(0, 8)])[0]
    with emulation.left_out(kernels, "value_loss/kernel.cuh", barrier):
        results = value_losses(kernels, [(s, max_blocks) for s in range(8)])
    assert not all(torch.equal(right, result) for result in results)


def supports(kernels, schedules):
    """Statistics and gradient of filtered rows, some of which hold NaN, under each (seed, max_blocks)."""
    logits = torch.from_numpy(rows_of(6, 900)[0])
    logits[1:4, 5] = torch.nan
    ids, offsets = torch.arange(900).repeat(6), torch.arange(0, 5401, 900)
    results = []
    with native.emulated(kernels), rlkernel.use_backend("native"):
        for seed, max_blocks in schedules:
            kernels.configure(seed, max_blocks)
            x = logits.clone().requires_grad_()
            targets = torch.arange(6)
            out = rlkernel.logprob(x, targets, support_ids=ids, support_offsets=offsets, return_entropy=True)
            (out.logprobs + out.entropy).sum().backward()
            results.append(torch.cat([*(o.detach() for o in out), x.grad.flatten()]).nan_to_num(7.0))
    kernels.configure()
    return results


def test_supports_do_not_depend_on_the_schedule(kernels):
    first, *others = supports(kernels, [(0, 1 << 20), (1, 6), (2, 6), (3, 1), (4, 2)])
    assert all(torch.equal(first, other) for other in others)


def test_a_barrier_missing_in_supports_is_found():
    """The one that only a block shows which goes on to another row, after a row that holds NaN."""
    kernels = emulation.module(32)
    right = supports(kernels, [(0, 6)])[0]
    try:
        with emulation.left_out(kernels, "logprob/support.cuh", "what a former row left is read"):
            results = supports(kernels, [(seed, 1) for seed in range(8)])
    except RuntimeError as error:  # a row that some threads take for a broken one
        assert "divergent barrier" in str(error)
    else:
        assert not all(torch.equal(right, result) for result in results)


def preference_losses(kernels, schedules):
    """Loss, metrics, rewards and gradient of sorted pairs with tails, under each (seed, max_blocks)."""
    inputs = preference_loss.make_inputs(6, 900)
    options = {"loss_type": ["sigmoid", "aot", "sft"], "ld_alpha": 0.5}
    results = []
    with native.emulated(kernels), rlkernel.use_backend("native"):
        for seed, max_blocks in schedules:
            kernels.configure(seed, max_blocks)
            x = inputs["logprobs"].clone().requires_grad_()
            out = rlkernel.preference_loss(**inputs | {"logprobs": x}, **options)
            out.loss.backward()
            parts = (out.loss.detach()[None], out.metrics, out.chosen_rewards, out.logps, x.grad.flatten())
            results.append(torch.cat(parts))
    kernels.configure()
    return results


def test_preference_loss_does_not_depend_on_the_schedule(kernels):
    first, *others = preference_losses(kernels, [(0, 1 << 20), (1, 6), (2, 6), (3, 1), (4, 2)])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "barrier, max_blocks",
    [
        ("the groups' sums are written", 6),
        ("the groups' sums are read: the next ones may overwrite them", 1),
        ("the place is written", 6),
    ],
)
def test_a_barrier_missing_in_preference_loss_is_found(barrier, max_blocks):
    kernels = emulation.module(32)
    right = preference_losses(kernels, [(0, 8)])[0]
    try:
        with emulation.left_out(kernels, "preference_loss/kernel.cuh", barrier):
            results = preference_losses(kernels, [(seed, max_blocks) for seed in range(8)])
    except RuntimeError as error:  # a sum that decides where to go on, and not all threads have the same
        assert "divergent barrier" in str(error)
    else:
        assert not all(torch.equal(right, result) for result in results)


def prefix_kernels(kernels, schedules):
    """Merge, gather and reduction of rows over several turns of a block, under each (seed, max_blocks)."""
    generator = torch.Generator().manual_seed(0)
    out, part = torch.randn(2, 200, 3, 40, generator=generator)
    lse, part_lse = 4 * torch.randn(2, 3, 200, generator=generator)
    index = torch.randint(200, (900,), generator=generator)
    offsets = torch.arange(0, 901, 9)
    results = []
    with native.emulated(kernels):
        for seed, max_blocks in schedules:
            kernels.configure(seed, max_blocks)
            merged, total = out.clone(), lse.clone()
            attention_merge(merged, total, part, part_lse, torch.zeros(3))
            k, v = gather_kv(merged, part, index)
            dk, dv = segment_reduce(out, part, index, offsets)
            results.append(torch.cat([x.flatten() for x in (merged, total, k, v, dk, dv)]).nan_to_num(7.0))
    kernels.configure()
    return results


def test_prefix_kernels_do_not_depend_on_the_schedule(kernels):
    first, *others = prefix_kernels(kernels, [(0, 1 << 20), (1, 6), (2, 6), (3, 1), (4, 2)])
    assert all(torch.equal(first, other) for other in others)


def test_prefix_kernels_have_the_same_bits_with_both_warp_sizes():
    first, second = (prefix_kernels(emulation.module(warp), [(0, 1 << 20)])[0] for warp in WARPS)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "barrier, max_blocks",
    [
        ("the rows' weights are written", 8),
        ("the rows' weights are read: the next turn may overwrite them", 1),
    ],
)
def test_a_barrier_missing_in_the_prefix_kernels_is_found(barrier, max_blocks):
    kernels = emulation.module(32)
    right = prefix_kernels(kernels, [(0, 8)])[0]
    with emulation.left_out(kernels, "prefix_shared_attention/kernel.cuh", barrier):
        results = prefix_kernels(kernels, [(s, max_blocks) for s in range(8)])
    assert not all(torch.equal(right, result) for result in results)


@pytest.mark.slow
def test_a_fault_in_the_prefix_kernels_is_found():
    """A row's last source left out."""
    right = prefix_kernels(emulation.module(32), [(0, 8)])[0]
    kernels = broken("prefix_shared_attention/kernel.cuh", "k < end; ++k", "k < end - 1; ++k")
    assert not torch.equal(right, prefix_kernels(kernels, [(0, 8)])[0])


@pytest.mark.slow
def test_a_divergent_barrier_is_found():
    barrier = "__syncthreads();  // the partials are written"
    kernels = broken("reduce.cuh", barrier, f"if (lane == 0) {barrier}")
    logits, target_ids = rows_of(2, 5000)
    with pytest.raises(RuntimeError, match=r"divergent barrier in block 0: .*\d+ threads wait at reduce.cuh"):
        forward(kernels, logits, target_ids)
