"""sample, score_tokens and sample_linear of a vocabulary that ranks share out: to the bit as on one rank."""

import pytest
import ranks
import torch
import triton_interpreter
from backends import INTERPRETED, is_slow, of, running
from sampling_cases import bitmask
from test_sample_linear import exact, logits_of

import rlkernel
from rlkernel.calls.sampling import RECORD, SPLIT
from rlkernel.drivers import vocab_parallel_sampling as driver
from rlkernel.drivers.vocab_parallel_sampling import Shards

pytestmark = [ranks.pytestmark, pytest.mark.slow]

ROWS, VOCAB = 5, SPLIT + 133
LONG = 2 * SPLIT + 133
# The entries of each rank: in any order, uneven, cut inside and between splits, some of one entry or none.
TWO = {
    "between splits": ((0, SPLIT), (SPLIT, VOCAB)),
    "inside a split": ((0, 37), (37, VOCAB)),
    "the last part first": ((SPLIT - 1, VOCAB), (0, SPLIT - 1)),
    "one has none": ((0, VOCAB), (VOCAB, VOCAB)),
}
FOUR = {
    "one and none": ((0, 60), (60, 61), (61, 61), (61, LONG)),
    "each inside a split": ((0, 4000), (4000, 4200), (4200, 4201), (4201, LONG)),
    "a split of three": (
        (SPLIT + 9, SPLIT + 50),
        (SPLIT + 50, 2 * SPLIT + 7),
        (2 * SPLIT + 7, LONG),
        (0, SPLIT + 9),
    ),
}
IDS = torch.tensor([3, SPLIT + 1, 36, 37, VOCAB - 1])
SAID = torch.tensor([[1, 2, 1, 2], [36, 37, 36, -1], [SPLIT, 5, SPLIT, 5], [7, 7, 7, 7], [9, -1, -1, -1]])
EACH = {"return_entropy": True, "return_rank": True, "return_support": 64}


def _per_row(*values):
    return torch.tensor(values)


# What the records tell, and what they do not.
RECORDS = {
    "plain": {"temperature": 0.7, "return_entropy": True, "return_support": 3},
    "gumbel": {"method": "gumbel", "temperature": _per_row(0.0, 1.0, 0.3, 2.0, 1.0)},
    "greedy": {"temperature": 0.0, "return_support": 2, "return_logprobs": ("raw",)},
    "greedy, softmax": {"temperature": 0.0, "greedy_logprobs": "softmax", "return_entropy": True},
    "a filter that is off": {"top_k": 0, "top_p": 1.0},
}
ROWS_DEALT = {
    "rank": {"return_rank": True},
    "rank of ties": {"return_rank": True, "rank_ties": "max", "ranking": "raw", "logit_bias": {SPLIT: 9.0}},
    "every filter": EACH | {"top_k": 50, "top_p": 0.9, "min_p": 1e-3, "top_n_sigma": 3.0, "typical_p": 0.9},
    "thresholds, joint": EACH
    | {"epsilon_cutoff": 1e-4, "eta_cutoff": 1e-3, "top_a": 1e-3, "top_p": 0.8, "filter_order": "joint"},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02, "return_support": 64, "top_k": 60},
    "by row": EACH
    | {"top_k": _per_row(0, 3, 40, 0, 1), "min_p": _per_row(0.0, 0.1, 0.0, 1e-3, 0.0), "method": "gumbel"},
    "mask, bias": EACH
    | {"token_bitmask": bitmask(torch.arange(VOCAB).expand(ROWS, -1) % 3 > 0), "logit_bias": {0: 2.0}},
    "biases": {"logit_bias": [{3: 5.0}, None, {SPLIT: -torch.inf}, {}, {37: 9.0, 36: 9.0}]},
    "dense bias": {"logit_bias": torch.linspace(-1, 1, VOCAB)},
    "dense biases": {"logit_bias": torch.linspace(-1, 1, ROWS * VOCAB).view(ROWS, VOCAB), "top_logprobs": 2},
    "token bias": {"logit_bias": rlkernel.TokenBias(IDS[:, None], torch.arange(5.0)[:, None]), "top_k": 9},
    "penalties": {
        "penalties": rlkernel.Penalties(
            SAID, SAID[:, :2], repetition=_per_row(1.0, 1.2, 2.0, 0.5, 1.0), frequency=0.3, presence=0.1,
            dry=rlkernel.Dry(multiplier=_per_row(0.0, 1.0, 0.5, 0.1, 0.0)), no_repeat_ngram=3,
            bad_words=[[[1, 2]], None, [[5, SPLIT]], [], [[9]]],
        )
    },
    "one other": {"top_logprobs": 1, "logprob_token_ids": IDS[:1]},
    "others": {"top_logprobs": 4, "logprob_token_ids": IDS[:, None], "ranking": "raw", "top_p": 0.5},
    "processed": {"top_logprobs": 3, "logprob_token_ids": IDS[:2], "ranking": "processed", "top_k": 3},
}  # fmt: skip
CASES = RECORDS | ROWS_DEALT
FEW = ("plain", "gumbel", "every filter")  # where a row costs milliseconds
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _inputs(vocab, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, vocab, generator=g) * 3).to(dtype)
    return logits, {"seeds": torch.arange(ROWS) * 2**40 - 1, "positions": torch.arange(ROWS) + 5}


def _hard(vocab):
    """Rows of NaN, +inf, nothing, one rank's nothing, ties across every cut."""
    logits, key = _inputs(vocab)
    logits[0, 40], logits[1, vocab - 1], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 40:] = -torch.inf
    logits[4] = 1.5
    return logits, key


def _differences(got, want):
    """The fields that are not the same to the bit."""
    named = zip(got._fields, got, want, strict=True)
    return [name for name, a, b in named if not ((a is b is None) or _same(a, b))]


def _same(a, b):
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros(a.shape, dtype=torch.bool)
    return torch.equal(*(x.masked_fill(nan, 0).view(bits.get(x.dtype, x.dtype)) for x in (a, b)))


def _apart(rank, kind, names, spans, vocab):
    """What is not as on one rank, by case: nothing."""
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    triton_interpreter.install()
    found = {}
    for cut, span in spans.items():
        here = slice(*span[rank])
        shard = {"group": torch.distributed.group.WORLD, "vocab_start": here.start}
        for name in names:
            slow = is_slow(name, "cpu")
            if slow and cut != "inside a split":
                continue

            def compare(what, function, mine, whole, options, name=name, cut=cut, shard=shard):
                with running(name):
                    found[cut, name, what] = _differences(
                        function(*mine, **options, **shard), function(*whole, **options)
                    )

            for case, options in CASES.items():
                if (slow and case not in FEW) or (vocab != VOCAB and case not in (*RECORDS, "every filter")):
                    continue
                for kind in ("fp32",) if slow else DTYPES:
                    logits, key = _inputs(vocab, DTYPES[kind])
                    compare(f"{case}, {kind}", rlkernel.sample, (logits[:, here],), (logits,), key | options)
            logits, key = _hard(vocab)
            logits = logits.view(1, ROWS, vocab)
            for case in ("plain",) if slow else ("plain", "every filter"):
                options = {k: v.view(1, ROWS) for k, v in key.items()} | CASES[case]
                compare(f"hard, {case}", rlkernel.sample, (logits[..., here],), (logits,), options)
            logits, _ = _inputs(vocab)
            for case in ("plain", "every filter"):
                mine, whole = ((x, IDS) for x in (logits[:, here], logits))
                compare(f"score, {case}", rlkernel.score_tokens, mine, whole, CASES[case])
            if slow:
                continue
            for rows in (0, 1):
                for case in ("plain", "every filter"):
                    part = {k: v[:rows] for k, v in key.items()} | CASES[case]
                    mine, whole = ((x[:rows],) for x in (logits[:, here], logits))
                    compare(f"{rows} rows, {case}", rlkernel.sample, mine, whole, part)
            _compare_heads(found, (cut, name), vocab, here, shard)
    return found


HEADS = {
    "head": {"temperature": 0.7, "return_entropy": True},
    "head, softcap": {"softcap": 4.0, "method": "gumbel"},
    "head, filtered": {"top_k": 30, "top_p": 0.8, "return_support": 40, "store_logits": True},
}


def _compare_heads(found, where, vocab, here, shard):
    """Of products without rounding, so that no order of their sums counts."""
    for case, options in HEADS.items():
        for dtype in DTYPES.values():
            x = exact(ROWS, vocab, "cpu", dtype)
            own = x | {"weight": x["weight"][here]}
            head = {k: v for k, v in options.items() if k == "softcap"}
            plain = {k: v for k, v in options.items() if k not in ("softcap", "store_logits")}
            bias = (torch.arange(vocab) % 7 - 3.0).to(dtype)
            with running(where[1]):
                got = rlkernel.sample_linear(**own, bias=bias[here], **options, **shard)
                z = logits_of(x, bias=bias, **head)
                want = rlkernel.sample(z, seeds=x["seeds"], positions=x["positions"], **plain)
            found[(*where, f"{case}, {dtype}")] = _differences(got, want)


def _backends():
    every = [p.values for p in of("sampling")]
    every = [name for name, device in every if device == "cpu" and (name != "triton" or INTERPRETED)]
    return [name for name in every if name != "emulated-warp64"]


@pytest.mark.parametrize(("spans", "vocab"), [(TWO, VOCAB), (FOUR, LONG)], ids=["2 ranks", "4 ranks"])
def test_is_the_whole_vocabulary(spans, vocab, tmp_path):
    """Everything that is returned, of every rank, is to the bit what one rank says of the whole rows."""
    count = len(next(iter(spans.values())))
    names = [x for x in _backends() if count == 2 or not is_slow(x, "cpu")]
    reports = ranks.run(_apart, ["ops"], tmp_path, names, spans, vocab, count=count)["ops"]
    for rank, report in enumerate(reports):
        assert len(report) > 100
        assert {where: apart for where, apart in report.items() if apart} == {}, f"rank {rank}"


def _sent(rank):
    """Bytes that this rank hands to others, by what is asked of it."""
    sent, (logits, key) = [], _inputs(VOCAB)
    spans = TWO["inside a split"]
    here = slice(*spans[rank])
    exchange, gather = torch.distributed.all_to_all_single, driver.gathered
    counted = {}

    def exchanged(out, x, *arguments, **options):
        sent.append(x.numel() * x.element_size())
        return exchange(out, x, *arguments, **options)

    def gathered(x, group):
        sent.append(x.numel() * x.element_size())
        return gather(x, group)

    driver.dist.all_to_all_single, driver.gathered = exchanged, gathered
    try:
        for case in ("plain", "every filter"):
            sent.clear()
            with rlkernel.use_backend("native"):
                rlkernel.sample(
                    logits[:, here],
                    group=torch.distributed.group.WORLD,
                    vocab_start=here.start,
                    **key,
                    **CASES[case],
                )
            counted[case] = list(sent)
    finally:
        driver.dist.all_to_all_single, driver.gathered = exchange, gather
    return counted


def test_what_is_sent(on_two):
    """Records and the entries of a split that others have begun; or the other ranks' rows of the shard."""
    for (begin, end), counted in zip(TWO["inside a split"], on_two["sent"], strict=True):
        edge, records = counted["plain"]
        assert edge == (4 * ROWS * (SPLIT - 37) if begin else 0)
        assert records == 8 * len(RECORD) * ROWS  # each rank has one split
        shard, found = counted["every filter"]
        assert shard == 4 * ROWS * (end - begin)
        assert found < 1024 * ROWS


def _planted(rank):
    """What is not as on one rank where the entries of a split are not brought together."""
    logits, key = _inputs(VOCAB)
    here, moved = slice(*TWO["inside a split"][rank]), driver._moved
    driver._moved = lambda *_: None
    try:
        with rlkernel.use_backend("native"):
            got = rlkernel.sample(
                logits[:, here], group=torch.distributed.group.WORLD, vocab_start=here.start, **key
            )
            return _differences(got, rlkernel.sample(logits, **key))
    finally:
        driver._moved = moved


def test_a_split_that_stays_apart_is_seen(on_two):
    for apart in on_two["planted"]:
        assert "tempered_logprobs" in apart


def _seeds(rank):
    """Tokens of seeds that nobody gave, each rank's generator at its own place."""
    torch.manual_seed(rank)
    logits, _ = _inputs(VOCAB)
    here = slice(*TWO["between splits"][rank])
    shard = {"group": torch.distributed.group.WORLD, "vocab_start": here.start}
    tokens = [rlkernel.sample(logits[:, here], **shard, **o).token_ids for o in ({}, {"top_p": 0.9})]
    torch.manual_seed(0)
    return tokens, [rlkernel.sample(logits, **o).token_ids for o in ({}, {"top_p": 0.9})]


def test_seeds_that_nobody_gave_are_the_first_ranks(on_two):
    for tokens, want in on_two["seeds"]:
        assert torch.equal(torch.stack(tokens), torch.stack(want))


def _part_of_the_ranks(rank):
    """Two groups of two, in one of which the ranks stand the other way round; each has rows of its own."""
    mine = (0, 2) if rank % 2 == 0 else (1, 3)
    groups = {both: torch.distributed.new_group(both) for both in ((0, 2), (1, 3))}
    logits, key = _inputs(VOCAB)
    logits = logits.roll(rank % 2, 0)
    here = slice(*TWO["inside a split"][mine.index(rank) ^ rank % 2])
    report = []
    for case in ("plain", "every filter"):
        options = key | CASES[case]
        out = rlkernel.sample(logits[:, here], group=groups[mine], vocab_start=here.start, **options)
        report.append(_differences(out, rlkernel.sample(logits, **options)))
    return report


def test_groups_of_some_of_the_ranks(tmp_path):
    for report in ranks.run(_small, ["groups"], tmp_path, count=4)["groups"]:
        assert report == [[], []]


def _dtensors(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits, key = _inputs(VOCAB)
    x = exact(ROWS, VOCAB, "cpu")
    report = []
    for placement in (Shard(1), Replicate()):
        for options in (key, key | {"top_k": 9}):
            spread = distribute_tensor(logits, mesh, [placement])
            report.append(
                _differences(rlkernel.sample(spread, **options), rlkernel.sample(logits, **options))
            )
    spread = x | {"weight": distribute_tensor(x["weight"], mesh, [Shard(0)])}
    report.append(_differences(rlkernel.sample_linear(**spread), rlkernel.sample_linear(**x)))
    return report


def test_dtensors(on_two):
    for report in on_two["dtensors"]:
        assert report == [[]] * 5


def _compiled(rank):
    """A graph that is whole refuses; one that may break has the same tokens."""
    logits, key = _inputs(VOCAB)
    here = slice(*TWO["between splits"][rank])

    def both(x):
        out = rlkernel.sample(x * 1, **key, group=torch.distributed.group.WORLD, vocab_start=here.start)
        return out.token_ids + 0

    said = "nothing"
    try:
        torch.compile(both, backend="eager", fullgraph=True)(logits[:, here])
    except Exception as error:
        said = str(error)
    broken = torch.compile(both, backend="eager")(logits[:, here])
    return "sample(group=) and its kin must be called outside" in said, broken, both(logits[:, here])


def test_compiled(on_two):
    for refused, broken, eager in on_two["compiled"]:
        assert refused
        assert torch.equal(broken, eager)


def _errors(rank):
    """What each bad call says."""
    world = torch.distributed.group.WORLD
    x, ids = torch.zeros(3, 5), torch.tensor([0, 9, 4])
    good = {"group": world, "vocab_start": 5 * rank, "seeds": 0}
    head = torch.zeros(5, 4)
    calls = {
        "gap": lambda: rlkernel.sample(x, group=world, vocab_start=6 * rank),
        "none": lambda: rlkernel.sample(x, group=world),
        "alone": lambda: rlkernel.sample(x, vocab_start=0),
        "type": lambda: rlkernel.sample(x, group="tp", vocab_start=0),
        "rows": lambda: rlkernel.sample(x[: 2 + rank], **good),
        "dtype": lambda: rlkernel.sample(x.to(torch.float16 if rank else torch.float32), **good),
        "temperature": lambda: rlkernel.sample(x, **good, temperature=1.0 + rank),
        "seeds": lambda: rlkernel.sample(x, **good | {"seeds": torch.arange(3) + rank}),
        "top_p": lambda: rlkernel.sample(x, **good, top_p=torch.tensor([0.5, 0.5, 0.5 + rank / 4])),
        "outside": lambda: rlkernel.score_tokens(x, ids + 1, **good),
        "bias": lambda: rlkernel.sample(x, **good, logit_bias={10: 1.0}),
        "a dict in another order": lambda: rlkernel.sample(
            x, **good, logit_bias={1: 2.0, 3: 4.0} if rank else {3: 4.0, 1: 2.0}
        ),
        "width": lambda: rlkernel.sample(x, **good, logit_bias=torch.zeros(5)),
        "row of a bias": lambda: rlkernel.sample(x, **good, logit_bias=[{1: 1.0}] * 2),
        "inf": lambda: rlkernel.sample(
            x, **good, logit_bias=rlkernel.TokenBias(ids[:, None], torch.tensor([[0.0], [torch.inf], [0.0]]))
        ),
        "penalties": lambda: rlkernel.sample(x, **good, penalties=rlkernel.Penalties(ids[:2, None])),
        "a row's penalty": lambda: rlkernel.sample(
            x, **good, penalties=rlkernel.Penalties(ids[:, None], repetition=torch.tensor([1.0, 1.0, -1.0]))
        ),
        "top": lambda: rlkernel.sample(x, **good, top_logprobs=11),
        "store": lambda: rlkernel.sample_linear(x[:, :4], head, top_k=3, store_logits=False, **good),
        "hidden": lambda: rlkernel.sample_linear(x[: 2 + rank, :4], head, **good),
        "softcap": lambda: rlkernel.sample_linear(x[:, :4], head, softcap=1.0 + rank, **good),
    }  # fmt: skip
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def test_errors_name_the_argument(on_two):
    same = "must be the same on every rank of group, got here"
    for rank, said in enumerate(on_two["errors"]):
        seeds, share = torch.arange(3) + rank, torch.tensor([0.5, 0.5, 0.5 + rank / 4])
        assert said == {
            "gap": "vocab_start must follow the entries of another rank, got the shards [0, 5), [6, 11)",
            "none": "vocab_start must be given with group: the first vocabulary entry of this rank",
            "alone": "vocab_start must be None without a group, got 0",
            "type": "group must be a torch.distributed process group, got str",
            "rows": "logits must have the same rows on every rank of group, got [2, 3]",
            "dtype": "logits must have the same dtype on every rank of group, got ['float32', 'float16']",
            "temperature": f"temperature {same} {1.0 + rank}",
            "seeds": f"seeds {same} {seeds!r}",
            "top_p": f"top_p {same} {share!r}",
            "outside": "token_ids[1] = 10 is outside [0, 10)",
            "bias": "logit_bias must have token ids in [0, 10) as keys, got 10",
            "a dict in another order": "nothing",
            "width": "logit_bias must have shape (10,) or (3, 10), got (5,)",
            "row of a bias": "logit_bias must be one dict or None for each of 3 rows, got 2",
            "inf": "logit_bias must be finite or -inf, got inf of row 1",
            "penalties": "penalties.output_token_ids must hold one row for each of 3 rows, got (2, 1)",
            "a row's penalty": "penalties.repetition[2] must be > 0 and finite, got -1.0",
            "top": "top_logprobs must be an integer in [0, 10], got 11",
            "store": "store_logits must be True or 'auto' with a filter, got False",
            "hidden": "hidden must have the same rows on every rank of group, got [2, 3]",
            "softcap": f"softcap {same} {1.0 + rank}",
        }


SMALL = {
    "sent": _sent, "planted": _planted, "seeds": _seeds, "dtensors": _dtensors, "compiled": _compiled,
    "errors": _errors, "groups": _part_of_the_ranks,
}  # fmt: skip


def _small(rank, kind):
    return SMALL[kind](rank)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return ranks.run(_small, [x for x in SMALL if x != "groups"], tmp_path_factory.mktemp("ranks"))


def test_who_has_which_split():
    cuts = (
        (SPLIT + 9, SPLIT + 50),
        (SPLIT + 50, 2 * SPLIT + 7),
        (2 * SPLIT + 7, LONG),
        (0, SPLIT + 9),
        (LONG, LONG),
    )
    shards = Shards("", 0, cuts)
    assert shards.vocab == LONG
    # a split is where its first entry is
    assert [b - a for a, b in map(shards.splits, range(5))] == [0, 1, 0, 2, 0]
    assert [shards.holder(rank) for rank in range(5)] == [3, 3, 1, None, None]
    assert [b - a for a, b in map(shards.edge, range(5))] == [41, SPLIT - 50, 126, 0, 0]
    assert [shards.rows(7, rank) for rank in range(5)] == [(0, 2), (2, 4), (4, 6), (6, 7), (7, 7)]
