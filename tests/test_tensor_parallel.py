"""Sums that ranks share out: the tree of ``matmul``, the layers over it, the level of ``batch_invariant``."""

import sys
import types

import pytest
import ranks
import torch
import torch.nn.functional as F
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal
from matmul_cases import HALVES_AND_FLOAT, probe
from test_matmul import torchs

import rlkernel
from rlkernel import tensor_parallel as tp
from rlkernel.drivers import rank_tree

BACKENDS = of("matmul")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)
INVARIANT = [pair for pair in BACKENDS if pair.values[0] != "reference"]
ON_INVARIANT_BACKENDS = pytest.mark.parametrize(("backend", "device"), INVARIANT)
DTYPES = pytest.mark.parametrize("dtype", HALVES_AND_FLOAT, ids=str)
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 128, 129, 257)
LEVEL = "tensor_parallel"


def pairwise(nodes):
    """The declared tree, written another way."""
    if len(nodes) == 1:
        return nodes[0]
    half = len(nodes) // 2
    return pairwise(nodes[:half]) + pairwise(nodes[half:])


def cut(a, b, count, **options):
    """What each of ``count`` ranks adds up of a product, and the sum of it."""
    parts = zip(a.tensor_split(count, -1), b.tensor_split(count, 0), strict=True)
    options |= {"out_dtype": torch.promote_types(a.dtype, torch.float32), "segments": 8 // count}
    return pairwise([rlkernel.matmul(x, y, **options) for x, y in parts])


@DTYPES
@ON_INVARIANT_BACKENDS
def test_parts_of_a_tree_add_up_to_it(backend, device, dtype):
    """Segments of an odd length; in every number of rows a row has its bits."""
    slow = is_slow(backend, device)
    inner, columns = (8 * 5, 18) if slow else (8 * 37, 37)
    most = 70 if slow else 257
    a, weight = probe(most, inner, 2, dtype).to(device), probe(columns, inner, 1, dtype).to(device)
    bias = torch.randn(columns, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    with running(backend):
        whole = rlkernel.matmul(a, weight.t(), bias, segments=8)
        for count in (1, 2, 4, 8):
            for rows in (1, 70) if slow else ROWS:
                found = (cut(a[-rows:], weight.t(), count) + bias.float()).to(dtype)
                assert_equal(f"{count} ranks, {rows} rows", found, whole[-rows:])
        if dtype == torch.float32:  # one chain has other bits, and so has the sum of two plain products
            assert not torch.equal(rlkernel.matmul(a, weight.t(), bias), whole)
            halves = zip(a.chunk(2, 1), weight.t().chunk(2), strict=True)
            assert not torch.equal(sum(rlkernel.matmul(x, y) for x, y in halves) + bias, whole)


@pytest.mark.parametrize("segments", [2, 4, 8])
@DTYPES
@ON_EVERY_BACKEND
def test_a_tree_is_as_exact_as_torch(backend, device, dtype, segments):
    g = torch.Generator().manual_seed(segments)
    a, weight = (torch.randn(rows, 72, generator=g).to(device, dtype) for rows in (13, 24))
    bias, upstream = (torch.randn(s, generator=g).to(device, dtype) for s in ((24,), (13, 24)))
    leaves = [x.detach().requires_grad_() for x in (a, weight.t(), bias)]
    with running(backend):
        out = rlkernel.matmul(*leaves, segments=segments)
    got = out, *torch.autograd.grad(out, leaves, upstream)
    theirs = torchs(a, weight.t(), bias, upstream)
    exact = torchs(*(x.double() for x in (a, weight.t(), bias, upstream)))
    for name, x, y, truth in zip(("out", "a", "b", "bias"), got, theirs, exact, strict=True):
        check(name, x, y, truth)


def test_leaves_are_added_in_the_declared_order():
    """1 swallows 2^-24, but not two of them: of eight leaves, each of one element."""
    a = torch.tensor([[1.0, 2.0**-24, 2.0**-24, 2.0**-24, 2.0**-24, 2.0**-24, -1.0, 0.0]])
    out = rlkernel.matmul(a, torch.ones(8, 1), segments=8)
    # (1 + 2^-24 is 1) + 2^-23, and 2^-23 + (-1 + 0)
    assert out.item() == (1 + 2.0**-23) + (2.0**-23 - 1) == 2.0**-22
    assert sum(a[0]).item() == 0  # one after the other


def test_blocks_of_a_tree_change_no_bit(monkeypatch):
    from rlkernel.drivers import matmul as driver

    a, b = probe(70, 64, 1), probe(64, 50, 2)
    bias = torch.arange(50.0)
    whole = rlkernel.matmul(a, b, bias, segments=8)
    monkeypatch.setattr(driver, "CPU_ROWS", 9)
    monkeypatch.setattr(driver, "CPU_NODES", 9 * 8 * 7)
    assert_equal("out", rlkernel.matmul(a, b, bias, segments=8), whole)
    monkeypatch.setattr(driver, "CPU_NODES", 1)
    assert_equal("out", rlkernel.matmul(a, b, bias, segments=8), whole)


@ON_EVERY_BACKEND
def test_batches_and_empty_sums(backend, device):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 3, 5, 16, generator=g).to(device), torch.randn(3, 16, 4, generator=g).to(device)
    with running(backend):
        found = rlkernel.matmul(a, b, segments=4)
        alone = [[rlkernel.matmul(x, y, segments=4) for x, y in zip(z, b, strict=True)] for z in a]
        check("out", found, a @ b, a.double() @ b.double())
        if backend != "reference":
            assert_equal("batch", found, torch.stack([torch.stack(rows) for rows in alone]))
        for shape in ((0, 8, 3), (3, 0, 2), (3, 8, 0)):
            m, k, n = shape
            out = rlkernel.matmul(
                torch.ones(m, k, device=device), torch.ones(k, n, device=device), segments=8
            )
            assert_equal(f"{shape}", out, torch.full((m, n), float(k), device=device))


def test_exp_and_log_that_round_every_element_alike():
    from rlkernel.drivers import elementary

    g = torch.Generator().manual_seed(5)
    edges = torch.tensor(
        [0.0, -0.0, -torch.inf, torch.inf, torch.nan, -1e-300, -745, -800, 1e-17, 690], dtype=torch.float64
    )
    x = torch.cat([edges, torch.randn(5001, generator=g, dtype=torch.float64) * 50])
    positive = torch.cat(
        [edges.abs(), (x[10:] / 9).exp(), 1 + torch.randn(999, generator=g, dtype=torch.float64) * 1e-3]
    )
    for ours, theirs, numbers in ((elementary.exp, torch.exp, x), (elementary.log, torch.log, positive)):
        with rlkernel.batch_invariant():
            found = ours(numbers)
        torch.testing.assert_close(found, theirs(numbers), rtol=1e-15, atol=1e-300, equal_nan=True)
        assert_equal("alone", torch.cat([ours(numbers[i : i + 1]) for i in range(50)]), found[:50])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 3}, "segments must be one of 1, 2, 4, 8, got 3"),
        ({"segments": True}, "segments must be"),
        ({"segments": 8}, "segments must divide K = 12, got 8"),
        ({"grad_segments": 2}, "grad_segments must divide N = 5, got 2"),
    ],
    ids=str,
)
def test_segments_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.matmul(torch.ones(2, 12), torch.ones(12, 5), **options)


def linear_gradients(x, weight, bias, upstream, run=F.linear):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t is not None], upstream)]


# K, N; an odd number of elements in each segment of both
SIZES = ((8 * 5, 8 * 3), (8 * 33, 8 * 9))
BATCHES = {2: (1, 2, 3, 7, 8, 17, 33), 4: (1, 3, 33)}  # by the number of ranks, which take turns


def layer_cases(count):
    for dtype in HALVES_AND_FLOAT:
        for k, n in SIZES[: 1 if count > 2 else 2]:
            g = torch.Generator().manual_seed(k)
            bias, upstream = torch.randn(n, generator=g).to(dtype), probe(33, n, 6, dtype)
            yield f"{dtype} {k} {n}", probe(33, k, 4, dtype), probe(n, k, 5, dtype), bias, upstream


def of_rank(x, rank, count, dim):
    return x.tensor_split(count, dim)[rank]


def _layers(rank, count):
    """For each case and number of rows what a rank computes: forward and gradients."""
    group, found = torch.distributed.group.WORLD, {}
    for name, x, weight, bias, upstream in layer_cases(count):
        for rows in BATCHES[count]:
            row = linear_gradients(
                of_rank(x[:rows], rank, count, 1), of_rank(weight, rank, count, 1), bias, upstream[:rows],
                lambda *t: tp.row_parallel_linear(*t, group),
            )  # fmt: skip
            parts = [of_rank(t, rank, count, 0) for t in (weight, bias)]
            column = linear_gradients(
                x[:rows], *parts, of_rank(upstream[:rows], rank, count, 1),
                lambda *t: tp.column_parallel_linear(*t, group),
            )  # fmt: skip
            gathered = linear_gradients(
                x[:rows], *parts, upstream[:rows],
                lambda *t: tp.column_parallel_linear(*t, group, gather_output=True),
            )  # fmt: skip
            found[name, rows] = row, column, gathered
    return found


def table(dtype):
    """With zeros of both signs, NaN, infinities and the least number."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(7)).to(dtype)
    x[::3] = torch.tensor([-0.0, 0.0, -torch.inf])
    x[1, :2] = torch.tensor([torch.finfo(dtype).smallest_normal / 2, torch.nan])
    return x


IDS = torch.randint(40, (3, 17), generator=torch.Generator().manual_seed(8))


def _embedded(weight, embed):
    weight = weight.detach().clone().requires_grad_()
    out = embed(weight)
    return [out.detach(), *torch.autograd.grad(out, weight, torch.ones_like(out) * 3.3)]


def _embedding(rank, count):
    group = torch.distributed.group.WORLD
    found = {
        dtype: _embedded(
            of_rank(table(dtype), rank, count, 0),
            lambda w: tp.vocab_parallel_embedding(IDS, w, group, padding_idx=11),
        )
        for dtype in HALVES_AND_FLOAT
    }
    with pytest.raises(ValueError, match=r"ids must be in \[0, 40\), got 0 ... 40"):
        tp.vocab_parallel_embedding(
            torch.tensor([0, 40]), of_rank(table(torch.float32), rank, count, 0), group
        )
    return found


# op, dtype, options; 13 entries in a part of the vocabulary
HEADS = {
    "logits": ("logprob", torch.float32, {"return_entropy": True, "temperature": 0.7}),
    "logits, bf16": ("logprob", torch.bfloat16, {"return_entropy": True}),
    "head": ("linear_logprob", torch.float32, {"return_entropy": True, "softcap": 6.0}),
    "head, bf16": ("linear_logprob", torch.bfloat16, {"temperature": 1.3}),
}


def _scored(case, rank=0, count=1, **group):
    """Outputs and gradients of the rank's part of a vocabulary of 104."""
    op, dtype, options = HEADS[case]
    g = torch.Generator().manual_seed(11)
    hidden, weight, bias = (torch.randn(*s, generator=g) for s in ((19, 24), (104, 24), (104,)))
    ids = torch.randint(104, (19,), generator=g)
    ids[3] = -100
    if op == "logprob":
        leaves = {"logits": of_rank((hidden @ weight.t() + bias), rank, count, 1)}
    else:
        leaves = {
            "hidden": hidden,
            **dict(weight=of_rank(weight, rank, count, 0), bias=of_rank(bias, rank, count, 0)),
        }
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in leaves.items()}
    out = [x for x in getattr(rlkernel, op)(**leaves, target_ids=ids, **options, **group) if x is not None]
    loss = sum((x * torch.linspace(-1, 1 + i, 19)).sum() for i, x in enumerate(out))
    return [x.detach() for x in out], dict(
        zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
    )


def _heads(rank, count):
    here = {"group": torch.distributed.group.WORLD, "vocab_start": 104 // count * rank}
    with rlkernel.batch_invariant(LEVEL):
        found = {case: _scored(case, rank, count, **here) for case in HEADS}
        begin, end = (104 // count * rank + (rank > 0), 104 // count * (rank + 1) + (rank + 1 < count))
        with pytest.raises(ValueError, match=r"vocab_start must share out equal parts.*got the shards \[0, "):
            rlkernel.logprob(
                torch.randn(19, end - begin), IDS[0, :1].expand(19), **here | {"vocab_start": begin}
            )
    return found, {case: _scored(case, rank, count, **here) for case in HEADS}


def _sums(rank, count):
    """Numbers whose sum shows its order, and of which no number of ranks is a divisor."""
    group = torch.distributed.group.WORLD
    return [rank_tree.summed(probe(9, n, rank), torch.float32, group) for n in (0, 1, 5, 8)]


def _refused(rank, count):
    """Layers that others cut, and sums of a library."""
    import torch.distributed as dist
    from torch.distributed.tensor import parallel

    mesh = dist.init_device_mesh("cpu", (count,))
    x, found = torch.randn(3, 16), []
    theirs = parallel.parallelize_module(torch.nn.Linear(16, 16), mesh, parallel.RowwiseParallel())
    part = torch.nn.Linear(16 // count, 16)

    def megatrons():  # a plain product of a part, and a library's sum
        dist.all_reduce(part(of_rank(x, rank, count, 1)))

    deepspeed = types.ModuleType("deepspeed.comm")
    deepspeed.inference_all_reduce = lambda x, group=None: x
    sys.modules["deepspeed.comm"] = deepspeed

    def auto_tps():
        deepspeed.inference_all_reduce(part(of_rank(x, rank, count, 1)))

    for run in (auto_tps, lambda: theirs(of_rank(x, rank, count, 1)), megatrons):
        with rlkernel.batch_invariant(LEVEL), pytest.raises(RuntimeError) as error:
            run()
        found.append(str(error.value))
        with rlkernel.batch_invariant(LEVEL, strict=False) as loose:
            run()
        assert [row for row in loose.report() if row.backend == "torch, not invariant"]
    with rlkernel.batch_invariant(LEVEL):
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 8))
        model(x).sum().backward()  # whose gradients are those of other data
    dist.all_reduce(x)
    assert dist.all_reduce is dist.distributed_c10d.all_reduce
    del sys.modules["deepspeed.comm"]
    return found


JOBS = {"layers": _layers, "embedding": _embedding, "sums": _sums, "heads": _heads, "refused": _refused}


def _on_ranks(rank, kind, count):
    return JOBS[kind](rank, count)


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    kinds = [kind for kind in JOBS if request.param == 2 or kind != "refused"]
    return ranks.run(_on_ranks, kinds, folder, request.param, count=request.param)


@ranks.pytestmark
def test_layers_on_ranks_have_the_bits_of_whole_ones(found):
    count = len(found["layers"])
    for name, x, weight, bias, upstream in layer_cases(count):
        for rows in BATCHES[count]:
            with rlkernel.batch_invariant(LEVEL):
                whole = linear_gradients(x[:rows], weight, bias, upstream[:rows])
            for rank, report in enumerate(found["layers"]):
                where = f"{name}, {rows} rows, rank {rank} of {count}"
                row, column, gathered = report[name, rows]
                wanted = zip(row, whole, (None, 1, 1, None), strict=True)
                for part, (got, want, dim) in enumerate(wanted):
                    want = want if dim is None else of_rank(want, rank, count, dim)
                    assert_equal(f"row-parallel {where}: {part}", got, want)
                for part, (got, want, dim) in enumerate(zip(column, whole, (1, None, 0, 0), strict=True)):
                    want = want if dim is None else of_rank(want, rank, count, dim)
                    assert_equal(f"column-parallel {where}: {part}", got, want)
                assert_equal(f"gathered {where}", gathered[0], whole[0])
                assert_equal(f"gathered {where}: x", gathered[1], whole[1])


@ranks.pytestmark
def test_an_embedding_on_ranks_is_exact(found):
    for dtype in HALVES_AND_FLOAT:
        out, grad = _embedded(table(dtype), lambda w: F.embedding(IDS, w, padding_idx=11))
        for rank, report in enumerate(found["embedding"]):
            assert_equal("out", report[dtype][0], out)  # signs of zeros too
            assert_equal("weight", report[dtype][1], of_rank(grad, rank, len(found["embedding"]), 0))


@ranks.pytestmark
def test_ranks_are_added_in_the_order_of_the_tree(found):
    count = len(found["sums"])
    for i, n in enumerate((0, 1, 5, 8)):
        want = pairwise([probe(9, n, rank) for rank in range(count)])
        for report in found["sums"]:
            assert_equal("sum", report[i], want)
        if count > 2 and n:
            assert not torch.equal(want, sum(probe(9, n, rank) for rank in range(count)))


@ranks.pytestmark
def test_a_vocabulary_on_ranks_has_the_bits_of_the_whole_one(found):
    count, apart = len(found["heads"]), 0
    for case in HEADS:
        with rlkernel.batch_invariant(LEVEL):
            outputs, grads = _scored(case)
        plain, _ = _scored(case)
        for x, y in zip(outputs, plain, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        for rank, (inside, outside) in enumerate(found["heads"]):
            got, got_grads = inside[case]
            for x, want in zip(got, outputs, strict=True):
                assert_equal(f"{case} on rank {rank} of {count}", x, want)
            for name, want in grads.items():
                dim = {"logits": 1, "hidden": None}.get(name, 0)
                part = want if dim is None else of_rank(want, rank, count, dim)
                assert_equal(f"{case} on rank {rank} of {count}: {name}", got_grads[name], part)
            apart += sum(not torch.equal(x, y) for x, y in zip(outside[case][0], plain, strict=True))
    assert apart  # without the level they follow the ranks


@ranks.pytestmark
def test_layers_that_others_cut_are_refused(found):
    for of_deepspeed, of_torch, of_others in found.get("refused", []):
        assert "inference_all_reduce must be one of integers" in of_deepspeed
        assert "linear must be invariant" in of_torch and "got a DTensor" in of_torch
        assert "all_reduce must be one of integers" in of_others and "DeepSpeed's AutoTP" in of_others


def test_the_level_gives_rows_their_bits_in_every_batch():
    from rlkernel.consistency import assert_invariant

    for dtype in HALVES_AND_FLOAT:
        weight, bias = probe(24, 296, 1, dtype), probe(1, 24, 2, dtype)[0]
        x = probe(257, 296, 3, dtype)
        with rlkernel.batch_invariant(LEVEL):
            assert_invariant(lambda x, w=weight, b=bias: F.linear(x, w, b), x, sizes=ROWS[:-1], rows=5)
        # sums that 8 does not divide are one chain, as under "batch"
        with rlkernel.batch_invariant(LEVEL):
            odd = F.linear(x[:, :295], weight[:23, :295])
        assert_equal("odd", odd, rlkernel.matmul(x[:, :295], weight[:23, :295].t()))


def test_levels_nest_and_leave_nothing_behind():
    x, layer = probe(5, 64, 1), torch.nn.Linear(64, 16)
    plain = layer(x)
    with rlkernel.batch_invariant():
        chain = layer(x)
    tree = rlkernel.matmul(x, layer.weight.t(), layer.bias, segments=8)
    assert not torch.equal(chain, tree)
    with rlkernel.batch_invariant():
        with pytest.raises(KeyError), rlkernel.batch_invariant(LEVEL) as mode:
            assert_equal("inner", layer(x), tree)
            with rlkernel.batch_invariant():
                assert_equal("batch in it", layer(x), chain)
            with torch.inference_mode():
                assert_equal("inference", layer(x), tree)
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(x).dtype == torch.bfloat16
            with rlkernel.use_backend("reference"):
                assert_equal("whatever backend is forced", layer(x[0]), tree[0])
            raise KeyError
        assert_equal("outer", layer(x), chain)
    assert [row.op for row in mode.report()].count("linear") == 1
    rlkernel.batch_invariant.enable(LEVEL)
    assert_equal("enabled", layer(x), tree)
    rlkernel.batch_invariant.disable()
    assert_equal("after", layer(x), plain)
    assert type(layer(x).grad_fn).__name__ == "AddmmBackward0"
    with rlkernel.batch_invariant(LEVEL), pytest.raises(RuntimeError, match="linear must be invariant"):
        layer.double()(x.double())


def imaginary(x):
    """As torch gives the imaginary part of what was conjugated: negated where it is read."""
    return torch.complex(x, -x).conj().imag


@pytest.mark.parametrize("layer", [tp.row_parallel_linear, tp.column_parallel_linear])
@pytest.mark.parametrize("negated", [imaginary, lambda x: torch._neg_view(-x)], ids=["strided", "dense"])
def test_negated_tensors_are_taken_for_what_they_are(layer, negated):
    """As arguments, as upstream gradients, and where hooks for saved tensors make them so."""
    g = torch.Generator().manual_seed(3)
    x, weight, bias, upstream = (torch.randn(*s, generator=g) for s in ((3, 16), (8, 16), (8,), (3, 8)))
    want = linear_gradients(x, weight, bias, upstream, layer)
    cases = {
        "arguments": linear_gradients(x, weight, bias, upstream, lambda *t: layer(*map(negated, t))),
        "upstream": linear_gradients(x, weight, bias, negated(upstream), layer),
    }
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, negated):
        cases["saved"] = linear_gradients(x, weight, bias, upstream, layer)
    for case, found in cases.items():
        for i, (got, whole) in enumerate(zip(found, want, strict=True)):
            assert_equal(f"{case}: result {i}", got, whole)


one = torch.ones
ERRORS = {
    "x as weight": (lambda: tp.row_parallel_linear(one(2, 8), one(4, 16)), r"weight must be \[N, 8\]"),
    "K": (lambda: tp.row_parallel_linear(one(2, 12), one(4, 12)), "weight must have a K of all ranks"),
    "N": (lambda: tp.column_parallel_linear(one(2, 8), one(4, 8)), "weight must have a N of all ranks"),
    "bias": (lambda: tp.row_parallel_linear(one(2, 8), one(4, 8), one(3)), r"bias must be \[4\]"),
    "dtype": (lambda: tp.row_parallel_linear(one(2, 8).half(), one(4, 8)), "weight must be float16"),
    "group": (lambda: tp.row_parallel_linear(one(2, 8), one(8, 8), None, 3), "group must be a torch"),
    "table": (lambda: tp.vocab_parallel_embedding(IDS, one(3)), r"weight must be \[V / ranks, H\]"),
    "plan": (lambda: tp.plan_of(torch.nn.Linear(8, 8)), "model must be one of transformers"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_what_is_off(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()
