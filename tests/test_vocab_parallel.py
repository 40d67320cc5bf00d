"""logprob and linear_logprob of a vocabulary that ranks share out: on two and four ranks, over gloo."""

import pytest
import ranks
import torch
import triton_interpreter
from accuracy import check
from backends import INTERPRETED, is_slow, of, running
from bitwise import assert_equal
from linear_logprob_cases import with_bias
from logprob_cases import upstream_like

import rlkernel
from rlkernel.drivers import linear_products, linear_tiles, vocab_parallel
from rlkernel.ops import _vocab_parallel
from rlkernel.reference import linear_logprob as head_reference
from rlkernel.reference import logprob as logits_reference

pytestmark = [ranks.pytestmark, pytest.mark.slow]

VOCAB = 133
# In tiles of 8 rows two are left over, with and without those that have no gradient: one row alone is a
# product with a vector, which a library may round otherwise than the product that the other pass makes.
ROWS = 21
CUTS = {2: (0, 37, VOCAB), 4: (0, 60, 61, 94, VOCAB)}  # uneven, one of a single entry
PER_ROW = torch.rand(ROWS, generator=torch.Generator().manual_seed(2)) + 0.3

# op, dtype, options; of linear_logprob with a bias
CASES = {
    "logits": ("logprob", torch.float32, {}),
    "logits, entropy": ("logprob", torch.bfloat16, {"return_entropy": True, "temperature": PER_ROW}),
    "logits, in place": ("logprob", torch.float32, {"return_entropy": True, "inplace_backward": True}),
    # the index is an entry, and the number that another entry has on its own rank
    "logits, ignored entry": ("logprob", torch.float32, {"ignore_index": 0}),
    "head": ("linear_logprob", torch.float32, {"return_entropy": True, "temperature": 0.7}),
    "head, bf16": ("linear_logprob", torch.bfloat16, {"return_entropy": True, "softcap": 6.0}),
    "head, all": (
        "linear_logprob",
        torch.float32,
        {"softcap": 4.0, "logit_scale": 1.7, "temperature": PER_ROW, "return_entropy": True},
    ),
    "head, ignored entry": ("linear_logprob", torch.float32, {"ignore_index": 0}),
}
OUTPUTS = ("logprobs", "entropy", "lse")
# 1 swallows each of the next two; together they would have been seen
ADDED = (1.0, 2.0**-24, 2.0**-24, 2.0**-23)
ALSO_COMPILED = ("logits", "head")


def _inputs(op, dtype, options):
    """Tensors by name, the whole vocabulary's; and upstream gradients, one of a row exactly 0."""
    if op == "logprob":
        inputs = logits_reference.make_inputs(ROWS, VOCAB, dtype=dtype, ignored=0.2)
    else:
        inputs = with_bias(head_reference.make_inputs(ROWS, 32, VOCAB, dtype=dtype, ignored=0.2))
    if "ignore_index" in options:
        ids = inputs["target_ids"]
        ids[ids == -100] = options["ignore_index"]
        ids[:4] = torch.tensor([37, 60, 61, 94])
    upstream = upstream_like(inputs["target_ids"])
    for g in upstream:
        g[5] = 0
    return inputs, upstream


def _leaves(inputs):
    return {k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}


def _shard(inputs, begin, end):
    part = {
        "logits": lambda x: x[:, begin:end],
        "weight": lambda x: x[begin:end],
        "bias": lambda x: x[begin:end],
    }
    return {k: part[k](v) if k in part else v for k, v in inputs.items()}


def _whole(name, shards):
    return torch.cat(shards, 1 if name == "logits" else 0)


def _run(function, leaves, upstream, options):
    given = dict(leaves)
    if options.get("inplace_backward"):
        given["logits"] = leaves["logits"] * 1
    out = function(**given, **options)
    loss = sum((o * g.to(o.dtype)).sum() for o, g in zip(out, upstream, strict=True) if o is not None)
    loss.backward()
    return [None if x is None else x.detach() for x in out], {
        k: v.grad for k, v in leaves.items() if v.requires_grad
    }


def _on_ranks(rank, kind, backends, cuts):
    """Outputs and gradients of this rank, of each case on each backend: twice, and compiled."""
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    triton_interpreter.install()
    linear_tiles.CPU_TILE = linear_tiles.Tile(8, 48)
    linear_products.kept_tiles = lambda tiles, *_: min(tiles, 2)
    report, begin, end = {}, cuts[rank], cuts[rank + 1]
    sharded = {"group": torch.distributed.group.WORLD, "vocab_start": begin}
    for name in backends:
        for case, (op, dtype, options) in CASES.items():
            inputs, upstream = _inputs(op, dtype, options)
            function = getattr(rlkernel, op)
            ways = [function, function]
            if name == "native" and case in ALSO_COMPILED:
                ways.append(torch.compile(function, fullgraph=True, backend="aot_eager"))
            with running(name):
                report[name, case] = [
                    _run(way, _leaves(_shard(inputs, begin, end)), upstream, options | sharded)
                    for way in ways
                ]
    report["sum"] = [
        vocab_parallel.summed_in_rank_order(torch.full((rows, 3), ADDED[rank]), sharded["group"])
        for rows in (0, 1, 5, 8)
    ]
    return report


def _backends():
    every = [p.values for p in of("linear_logprob")]
    return [name for name, device in every if device == "cpu" and (name != "triton" or INTERPRETED)]


@pytest.mark.parametrize("count", CUTS, ids="{} ranks".format)
def test_is_the_whole_vocabulary(count, tmp_path):
    """Outputs and every gradient, by fp64: at most twice what torch loses on the whole head; the same bits on
    every rank and every time."""
    names = [x for x in _backends() if count == 2 or not is_slow(x, "cpu")]
    found = ranks.run(_on_ranks, ["ops"], tmp_path, names, CUTS[count], count=count)["ops"]
    total = torch.tensor(1.0)
    for other in ADDED[1:count]:
        total = total + other
    for report in found:
        for x in report["sum"]:
            assert_equal("sum", x, total.expand(x.shape))
    for case, (op, dtype, options) in CASES.items():
        inputs, upstream = _inputs(op, dtype, options)
        plain = {k: v for k, v in options.items() if k != "inplace_backward"}
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        with rlkernel.use_backend("reference"):
            torchs = _run(getattr(rlkernel, op), _leaves(inputs), upstream, plain)
            truth = _run(getattr(rlkernel, op), _leaves(wide), upstream, plain)
        for name in names:
            _is_the_whole(f"{case}, {name}", [x[name, case][0] for x in found], torchs, truth, dtype)
            _has_the_same_bits(f"{case}, {name}", [x[name, case] for x in found])


def _is_the_whole(where, every, torchs, truth, dtype):
    outputs, grads = every[0]
    grads = {k: v if k == "hidden" else _whole(k, [g[k] for _, g in every]) for k, v in grads.items()}
    for field, a, b, c in zip(OUTPUTS, outputs, torchs[0], truth[0], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            check(f"{where}: {field}", a, b, c, magnitude=1)
    for field, grad in grads.items():
        assert grad.dtype == dtype
        check(f"{where}: {field}", grad, torchs[1][field], truth[1][field])


def _has_the_same_bits(where, every):
    first, first_grads = every[0][0]
    for of_rank in every:
        for outputs, grads in of_rank:
            for field, a, b in zip(OUTPUTS, outputs, first, strict=True):
                if a is not None:
                    assert_equal(f"{where}: {field}", a, b)
            for field, grad in grads.items():
                same = first_grads if field == "hidden" else of_rank[0][1]
                assert_equal(f"{where}: {field}", grad, same[field])


def _special(rank):
    """Rows that are hard: a rank of -inf alone, all of them, NaN, +inf, a large offset, a certain target."""
    logits = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[0, :37] = logits[1, 37:] = logits[2] = -torch.inf
    logits[3, 40], logits[4, 3] = torch.nan, torch.inf
    logits[5] += 1e4
    logits[6, 50] = 40.0
    logits[8], logits[9, :37] = -torch.inf, -torch.inf
    logits[8:, 5] = torch.nan  # where the rank has no maximum
    ids = torch.tensor([50, 3, 7, 7, 7, 90, 50, 50, 7, 50])
    cuts, report = CUTS[2], {}
    for name in _backends():
        with running(name):
            x = logits[:, cuts[rank] : cuts[rank + 1]].clone().requires_grad_()
            group = torch.distributed.group.WORLD
            out = rlkernel.logprob(x, ids, return_entropy=True, group=group, vocab_start=cuts[rank])
            (sum(out)).nan_to_num(0, 0, 0).sum().backward()
        with rlkernel.use_backend("reference"):
            found = []
            for dtype in (torch.float32, torch.float64):
                y = logits.to(dtype, copy=True).requires_grad_()
                want = rlkernel.logprob(y, ids, return_entropy=True)
                (sum(want)).nan_to_num(0, 0, 0).sum().backward()
                found.append((*(w.detach() for w in want), y.grad[:, cuts[rank] : cuts[rank + 1]]))
        report[name] = (*(o.detach() for o in out), x.grad), *found
    return report


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return ranks.run(_small, list(SMALL), tmp_path_factory.mktemp("ranks"))


def test_special_rows(on_two):
    for report in on_two["special"]:
        for name, (ours, torchs, truth) in report.items():
            finite = torch.tensor([0, 1, 5, 6, 7])
            for field, a, b, c in zip((*OUTPUTS, "grad"), ours, torchs, truth, strict=True):
                check(
                    f"{name}: {field}",
                    a[finite],
                    b[finite],
                    c[finite],
                    magnitude=1e4 if field == "lse" else 1,
                )
            for field, a, c in zip(OUTPUTS[:2], ours, truth, strict=False):
                assert a[2:5].isnan().all() and c[2:5].isnan().all(), f"{name}: {field}"
            for field, a, c in zip(OUTPUTS, ours, truth, strict=False):
                assert torch.equal(a.isnan(), c.isnan()), f"{name}: {field}"


def test_one_temperature_of_one_row_has_the_digest_of_its_value():
    """A single number, spread over the rows, may have the stride 0 where there is one row or none."""
    number = torch.tensor(0.9)
    assert _vocab_parallel.digest(number.expand(1)) == _vocab_parallel.digest(number.view(1))
    assert _vocab_parallel.digest(number.expand(0)) == _vocab_parallel.digest(number.new_empty(0))
    assert _vocab_parallel.digest(number.expand(1)) != _vocab_parallel.digest(number.view(1) + 1)


def _errors(rank):
    """What each bad call says."""
    world = torch.distributed.group.WORLD
    x, ids = torch.zeros(3, 5), torch.tensor([0, 9, -100])
    good = {"group": world, "vocab_start": 5 * rank}
    support = {"support_ids": torch.tensor([1]), "support_offsets": torch.tensor([0, 1, 1, 1])}
    calls = {
        "overlap": lambda: rlkernel.logprob(x, ids, group=world, vocab_start=4 * rank),
        "gap": lambda: rlkernel.logprob(x, ids, group=world, vocab_start=6 * rank),
        "late": lambda: rlkernel.logprob(x, ids, group=world, vocab_start=1 + 5 * rank),
        "none": lambda: rlkernel.logprob(x, ids, group=world),
        "negative": lambda: rlkernel.logprob(x, ids, group=world, vocab_start=-1),
        "alone": lambda: rlkernel.logprob(x, ids, vocab_start=0),
        "type": lambda: rlkernel.logprob(x, ids, group="tp", vocab_start=0),
        "outside": lambda: rlkernel.logprob(x, ids + 1, **good),
        "rows": lambda: rlkernel.logprob(x[: 2 + rank], ids[: 2 + rank], **good),
        "entropy": lambda: rlkernel.logprob(x, ids, **good, return_entropy=rank == 0),
        "targets": lambda: rlkernel.logprob(x, ids.clamp(0, 8 + rank), **good),
        "temperature": lambda: rlkernel.logprob(x, ids, **good, temperature=torch.ones(3) + rank),
        "softcap": lambda: rlkernel.linear_logprob(
            x, torch.zeros(5, 5), ids, **good, softcap=2.0 if rank else None
        ),
        "support": lambda: rlkernel.logprob(x, ids, **good, **support),
        "head": lambda: rlkernel.linear_logprob(x, torch.zeros(4, 5), ids, group=world, vocab_start=5 * rank),
        "head, support": lambda: rlkernel.linear_logprob(x, torch.zeros(5, 5), ids, **good, **support),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def test_errors_name_the_argument(on_two):
    follow = "vocab_start must follow the entries of another rank, got the shards "
    same = "must be the same on every rank of group, got here"
    for rank, said in enumerate(on_two["errors"]):
        assert said == {
            "overlap": follow + "[0, 5), [4, 9)",
            "gap": follow + "[0, 5), [6, 11)",
            "late": follow + "[1, 6), [6, 11)",
            "none": "vocab_start must be given with group: the first vocabulary entry of this rank",
            "negative": "vocab_start must be >= 0, got -1",
            "alone": "vocab_start must be None without a group, got 0",
            "type": "group must be a torch.distributed process group, got str",
            "outside": "target_ids[1] = 10 is outside [0, 10)",
            "rows": "target_ids must be the same number of rows on every rank of group, got [2, 3]",
            "entropy": f"return_entropy {same} {rank == 0}",
            "targets": f"target_ids {same} {torch.tensor([0, 8 + rank, 0])!r}",
            "temperature": f"temperature {same} {torch.ones(3) + rank!r}",
            "softcap": f"softcap {same} {2.0 if rank else None}",
            "support": "support_ids must be None with group, got a tensor",
            "head": follow + "[0, 4), [5, 9)",
            "head, support": "support_ids must be None with group, got a tensor",
        }


def _alone(rank, kind):
    inputs, upstream = _inputs("linear_logprob", torch.float32, {})
    group = {"group": torch.distributed.group.WORLD, "vocab_start": 0}
    return [_run(rlkernel.linear_logprob, _leaves(inputs), upstream, x) for x in ({}, group)]


def test_a_group_of_one_is_the_op_itself(tmp_path):
    ((outputs, grads), (grouped, grouped_grads)) = ranks.run(_alone, ["one"], tmp_path, count=1)["one"][0]
    for a, b in zip((*outputs, *grads.values()), (*grouped, *grouped_grads.values()), strict=True):
        if a is not None:
            assert_equal("alone", b, a)


def _logits_dtensor(rank):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    inputs = logits_reference.make_inputs(3, 5, VOCAB)
    logits, ids = inputs["logits"], inputs["target_ids"]
    plain = logits.clone().requires_grad_()
    rlkernel.logprob(plain, ids).logprobs.sum().backward()
    report = []
    for placement in (Shard(2), Replicate()):
        leaf = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        out = rlkernel.logprob(leaf, ids)
        out.logprobs.sum().backward()
        report.append(float((leaf.grad.full_tensor() - plain.grad).abs().max()))
    one = distribute_tensor(logits[..., :1], mesh, [Shard(2)])  # of which a rank has no entry
    report.append(float(rlkernel.logprob(one, ids * 0).logprobs.abs().max()))
    said = []
    for placement, options in ((Shard(2), {"vocab_start": 1}), (Partial(), {})):
        from torch.distributed.tensor import DTensor

        try:
            rlkernel.logprob(DTensor.from_local(logits, mesh, [placement]), ids, **options)
        except ValueError as error:
            said.append(str(error).partition(", got")[0])
    return report, said


def test_logits_that_are_a_dtensor(on_two):
    for rank, (report, said) in enumerate(on_two["logits"]):
        assert max(report) <= 1e-6
        start = f"vocab_start must be {VOCAB * rank}, as the DTensor is split"
        assert said == [start, "logits must be split over the vocabulary once"]


# A call of some rows: the op, its options, what of the inputs differs, and which outputs have a gradient.
WAYS = {
    "3 dimensions": ("logprob", {"rows": (2, 5), "entropy": True}),
    "no rows": ("logprob", {"rows": (0,), "entropy": True}),
    "all ignored": ("logprob", {"rows": (5,), "entropy": True, "ids": -100}),
    "entropy alone": ("logprob", {"rows": (5,), "entropy": True, "of": (1,)}),
    "lse alone": ("logprob", {"rows": (5,), "of": (2,)}),
    "fp16": ("logprob", {"rows": (5,), "dtype": torch.float16, "entropy": True}),
    "fp64": ("logprob", {"rows": (5,), "dtype": torch.float64, "entropy": True}),
    "in place": ("logprob", {"rows": (5,), "entropy": True, "inplace_backward": True}),
    "head": ("linear_logprob", {"rows": (2, 5), "entropy": True, "temperature": 0.7}),
    "head, no rows": ("linear_logprob", {"rows": (0,), "entropy": True}),
    "head, all ignored": ("linear_logprob", {"rows": (5,), "ids": -100}),
    "head, entropy alone": ("linear_logprob", {"rows": (5,), "entropy": True, "of": (1,)}),
    "head, frozen": ("linear_logprob", {"rows": (5,), "frozen": ("weight", "bias")}),
    "head, frozen hidden": ("linear_logprob", {"rows": (5,), "frozen": ("hidden",)}),
    "head, mixed": ("linear_logprob", {"rows": (5,), "hidden_dtype": torch.bfloat16, "entropy": True}),
    "head, fp64": ("linear_logprob", {"rows": (5,), "dtype": torch.float64, "entropy": True}),
    "head, autocast": ("linear_logprob", {"rows": (5,), "autocast": True}),
}
ODD = {"none and all": ((0, 0), (0, 11)), "all and none": ((0, 11), (11, 11)), "one": ((1, 11), (0, 1))}


def _way(
    op, span, shard, rows=(5,), dtype=torch.float32, hidden_dtype=None, ids=None, frozen=(), of=(0, 2), **way
):
    """Outputs and gradients, those of ``span`` of a vocabulary of 11; backward runs twice."""
    g = torch.Generator().manual_seed(6)
    draw = lambda *shape, dtype=dtype: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    target_ids = torch.randint(0, 11, rows, generator=g, dtype=torch.int32)
    if ids is not None:
        target_ids.fill_(ids)
    here = slice(*span)
    if op == "logprob":  # a view, as trainers have it
        leaves = {"logits": draw(*rows[:-1], rows[-1] + 1, 11)[..., here].clone()}
        given = lambda x: {"logits": x["logits"][..., :-1, :] * 1}  # noqa: E731
    else:
        hidden = draw(*rows, 8, dtype=hidden_dtype or dtype)
        leaves = {"hidden": hidden, "weight": draw(11, 8)[here].clone(), "bias": draw(11)[here].clone()}
        given = dict
    leaves = {k: v.requires_grad_(k not in frozen) for k, v in leaves.items()}
    context = torch.autocast("cpu", torch.bfloat16, enabled=way.pop("autocast", False))
    options = {"return_entropy": way.pop("entropy", False), **way, **shard}
    with context:
        out = getattr(rlkernel, op)(**given(leaves), target_ids=target_ids, **options)
    loss = sum((out[i] * torch.linspace(-1, 1, out[i].numel()).view(rows)).sum() for i in of)
    again = not options.get("inplace_backward", False)
    for keep in (True, False)[1 - again :]:
        loss.backward(retain_graph=keep)
    with torch.inference_mode():
        silent = getattr(rlkernel, op)(**given(leaves), target_ids=target_ids, **options)
    return [*out, *silent], {k: v.grad for k, v in leaves.items()}


def _ways(rank):
    """The largest relative difference of each way of calling, of each backend and cut."""
    found = {}
    for cut, spans in ODD.items():
        begin, end = spans[rank]
        shard = {"group": torch.distributed.group.WORLD, "vocab_start": begin}
        for name in ("native", "reference"):
            for case, (op, way) in WAYS.items():
                if name == "native" and torch.float64 in way.values():
                    continue
                with running(name):
                    got, grads = _way(op, (begin, end), shard, **way)
                    want, whole = _way(op, (0, 11), {}, **way)
                whole = {
                    k: v if v is None or k == "hidden" else _part(k, v, begin, end) for k, v in whole.items()
                }
                pairs = zip([*got, *grads.values()], [*want, *whole.values()], strict=True)
                found[cut, name, case] = max(_far(a, b) for a, b in pairs)
    return found


def _part(name, x, begin, end):
    return x[..., begin:end] if name == "logits" else x[begin:end]


def _far(a, b):
    assert (a is None) == (b is None)
    if a is None:
        return 0.0
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape)
    apart = (a.double() - b.double()).abs() / b.double().abs().clamp(min=1)
    return float(apart.max()) if apart.numel() else 0.0


def test_ways_of_calling(on_two):
    """Shards of all entries, of one and of none: as on one rank, but for the order of sums."""
    for found in on_two["ways"]:
        assert len(found) == len(ODD) * (2 * len(WAYS) - 2)
        for where, apart in found.items():
            narrow = {"fp16": 1e-3, "head, mixed": 1e-2, "head, autocast": 2e-2}
            assert apart <= narrow.get(where[-1], 2e-6), (where, apart)


SMALL = {"special": _special, "errors": _errors, "logits": _logits_dtensor, "ways": _ways}


def _small(rank, kind):
    return SMALL[kind](rank)
