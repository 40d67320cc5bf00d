"""``consistency.compare``: every figure against its formula, and every input that is no plain number."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import rlkernel
from rlkernel.consistency import Report, bits, compare, statistics
from rlkernel.consistency.styles import STYLES

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def draw(rows=6, length=11, seed=0, dtype=torch.float64, drift=0.3):
    g = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64)
    train = rollout + drift * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < 0.7
    mask[1] = False
    mask[2] = True
    return train.to(dtype), rollout.to(dtype), mask


def formulas(train, rollout, sequences):
    """What the docstring says, of a list of (train, rollout) per sequence that counts."""
    delta = train - rollout
    r = delta.exp()
    sums = torch.stack([(a - b).sum() for a, b in sequences])
    w = sums.exp()
    shares = [50.0, 90.0, 95.0, 99.0, 99.9]
    return {
        "kl": ((-delta).mean(), delta.square().mean() / 2, (r - 1 - delta).mean()),
        "kl_reverse": ((r * delta).mean(), (r * delta**2).mean() / 2, (r * delta - r + 1).mean()),
        "chi2_token": (r * r).mean() - 1,
        "chi2_sequence": (w * w).mean() - 1,
        "ess_token": r.sum() ** 2 / (len(r) * r.square().sum()),
        "ess_sequence": w.sum() ** 2 / (len(w) * w.square().sum()),
        "ratio_mean": r.mean(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "sequence_ratios": (w.min(), w.mean(), w.max()),
        "mean_difference": delta.mean(),
        "mean_abs_difference": delta.abs().mean(),
        "std_abs_difference": delta.abs().std(),
        "max_abs_difference": delta.abs().max(),
        "outside_clip": ((r < 0.8).double().mean(), (r > 1.28).double().mean()),
        "percentiles": dict(
            zip(shares, delta.abs().quantile(torch.tensor(shares, dtype=torch.float64) / 100), strict=True)
        ),
    }


def check(report, want):
    for name, value in want.items():
        got = getattr(report, name)
        if isinstance(value, dict):
            assert list(got) == list(value)
            got, value = list(got.values()), tuple(value.values())
        got, value = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, value))
        assert list(got) == pytest.approx([float(x) for x in value], rel=1e-11, abs=1e-14), name


@pytest.fixture(params=[7, 32768], ids=["small chunks", "one chunk"])
def chunk(request, monkeypatch):
    """Chunks that cut sequences, and one that holds all."""
    monkeypatch.setattr(statistics, "CHUNK", request.param)


def per_row(train, rollout, mask):
    return [(a[m], b[m]) for a, b, m in zip(train, rollout, mask, strict=True) if m.any()]


def test_padded_rows_have_their_formulas(chunk):
    train, rollout, mask = draw()
    report = compare(train, rollout, mask, clip=(0.2, 0.28))
    check(report, formulas(train[mask], rollout[mask], per_row(train, rollout, mask)))
    assert report.tokens == report.compared == int(mask.sum()) and report.sequences == 5
    assert report.equal == 0 and not report.identical
    assert isinstance(report, Report) and rlkernel.consistency.compare is compare


def test_packed_rows_have_their_formulas(chunk):
    train, rollout, mask = (x.reshape(-1) for x in draw())
    offsets = torch.tensor([0, 9, 9, 30, 31, 58])  # an empty one, and padding behind the last
    sequences = [
        (train[a:b][mask[a:b]], rollout[a:b][mask[a:b]])
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if mask[a:b].any()
    ]
    want = formulas(torch.cat([a for a, _ in sequences]), torch.cat([b for _, b in sequences]), sequences)
    report = compare(train, rollout, mask, cu_seqlens=offsets, clip=(0.2, 0.28))
    check(report, want)
    assert report.tokens == int(mask[:58].sum())
    first = report.worst[0]
    place = int(offsets[first.row]) + first.position
    assert (first.train, first.rollout) == (train[place].item(), rollout[place].item())
    ids = torch.arange(5).repeat_interleave(offsets.diff())
    check(compare(train[:58], rollout[:58], mask[:58], sequence_ids=ids, clip=(0.2, 0.28)), want)


def test_ids_that_begin_anew_in_each_row(chunk):
    train, rollout, mask = draw()
    ids = (torch.arange(11) > 4).long().expand(6, 11)
    report = compare(train, rollout, mask, sequence_ids=ids, clip=(0.2, 0.28))
    halves = [
        x
        for part in (slice(0, 5), slice(5, 11))
        for x in per_row(train[:, part], rollout[:, part], mask[:, part])
    ]
    check(report, formulas(train[mask], rollout[mask], halves))
    worst = report.worst[0]
    assert train[worst.row, worst.position].item() == worst.train


def test_chunks_and_repeats_have_the_same_bits(monkeypatch):
    train, rollout, mask = draw(dtype=torch.float32)
    every = [compare(train, rollout, mask) for _ in range(2)]
    tokens = [x.token_statistics for x in every]
    assert all(torch.equal(a, b) for a, b in zip(tokens[0][1:-1], tokens[1][1:-1], strict=True))
    assert tokens[0].codeviation == tokens[1].codeviation
    assert every[0].worst == every[1].worst and every[0].tails == every[1].tails


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_the_mask_hides_is_never_seen(junk, chunk):
    train, rollout, mask = draw()
    clean = compare(train, rollout, mask, advantages=torch.ones(6), bounds=(0.5, 2.0))
    for where in (train, rollout):
        where[~mask] = junk
    advantages = torch.ones_like(train).masked_fill(~mask, math.nan)
    for kept in (mask, mask.long() * 3, mask.double()):
        dirty = compare(train, rollout, kept, advantages=advantages, bounds=(0.5, 2.0))
        assert torch.equal(clean.token_statistics.means, dirty.token_statistics.means)
        assert torch.equal(clean.sequence_statistics.sums, dirty.sequence_statistics.sums)
        assert (clean.tokens, clean.worst) == (dirty.tokens, dirty.worst)
        assert clean.tails == dirty.tails


def test_what_is_no_number_or_has_no_mass_is_counted_and_left_out(chunk):
    train, rollout, _ = draw()
    clean = compare(train[:, 6:].contiguous(), rollout[:, 6:].contiguous())
    train[0, :6] = torch.tensor([math.nan, -1, math.inf, -math.inf, -2.0, -math.inf])
    rollout[0, :6] = torch.tensor([-1, math.nan, -1, -1.0, -math.inf, -math.inf])
    mask = torch.ones_like(train, dtype=torch.bool)
    mask[1:, :6] = False
    report = compare(train, rollout, mask)
    assert (report.tokens, report.compared, report.invalid) == (36, 30, 3)
    assert (report.no_mass_train, report.no_mass_rollout, report.no_mass_both) == (1, 1, 1)
    assert report.equal == 1  # both without mass
    assert list(report.kl) == pytest.approx(list(clean.kl), rel=1e-12)
    assert report.percentiles == pytest.approx(clean.percentiles) and report.ess_token == pytest.approx(
        clean.ess_token
    )
    shown = [(x.row, x.position) for x in report.worst[:6]]
    assert shown[:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)] and shown[5] not in shown[:5]
    assert [x.ulps for x in report.worst[:5]] == [None] * 5 and report.worst[5].ulps > 0
    assert [x.difference for x in report.worst[3:5]] == [-math.inf, math.inf]


def test_nan_on_both_sides_is_not_equal():
    x = torch.tensor([[math.nan, -1.0]])
    report = compare(x, x.clone())
    assert (report.tokens, report.equal, report.invalid) == (2, 1, 1) and not report.identical


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_nothing_to_compare(shape):
    x = torch.zeros(shape)
    report = compare(x, x, torch.zeros(shape), advantages=torch.zeros(shape))
    assert (report.tokens, report.compared, report.sequences, report.worst) == (0, 0, 0, ())
    assert not report.identical  # nothing was shown
    every = [*report.kl, *report.kl_reverse, report.chi2_token, report.chi2_sequence, report.ess_token]
    every += [report.ess_sequence, report.ratio_mean, report.ratio_max, report.equal_fraction, report.clipped]
    every += [*report.percentiles.values(), *report.sequence_ratios, *report.outside_clip]
    every += [report.mean_difference, report.max_abs_difference, report.std_abs_difference]
    assert all(math.isnan(x) for x in every)
    packed = compare(x.reshape(-1), x.reshape(-1), cu_seqlens=torch.tensor([0]))
    assert packed.tokens == 0


def test_identical():
    _, x, mask = draw(dtype=torch.bfloat16)
    other = x.float().masked_fill(~mask, 1.0)
    report = compare(other, x, mask)  # the same numbers in a wider dtype
    assert report.identical and report.equal_fraction == 1 and report.worst == ()
    assert report.ulp_histogram[0] == report.tokens and report.ulp_max == 0
    assert (*report.kl, *report.kl_reverse) == (0,) * 6 and report.ess_token == report.ess_sequence == 1
    assert report.chi2_token == report.chi2_sequence == 0 and report.ratio_min == report.ratio_max == 1


@pytest.mark.parametrize("pair", [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
def test_sides_of_two_dtypes_are_compared_in_the_wider(pair):
    train, rollout, mask = draw()
    a, b = train.to(pair[0]), rollout.to(pair[1])
    wide = torch.promote_types(*pair)
    mixed, widened = compare(a, b, mask), compare(a.to(wide), b.to(wide), mask)
    assert mixed.dtypes == pair and mixed.ulp_histogram == widened.ulp_histogram
    assert mixed.kl == widened.kl and mixed.worst == widened.worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ulps_are_steps_to_the_next_number(dtype):
    x = torch.tensor([-1.0, -0.25, 0.0, -0.0, -100.0], dtype=dtype)
    y = x.clone()
    for n in range(5):
        assert bits.ulps(x, y).tolist() == [n] * 5
        if dtype in (torch.float32, torch.float64):
            y = torch.nextafter(y, torch.full_like(y, 200.0))
        else:  # which nextafter does not take: by the integers, away from -0
            step = y.view(torch.int16)
            y = torch.where(y < 0, step - 1, (step & 0x7FFF) + 1).view(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    around = torch.tensor([tiny], dtype=dtype)
    assert bits.ulps(around, -around).item() == 2 * bits.ulps(around, around * 0).item()


def test_ulps_that_no_integer_holds_are_the_largest_one():
    x = torch.tensor([-1e308, 1e308, -1.0], dtype=torch.float64)
    y = torch.tensor([1e308, -1e308, 1.0], dtype=torch.float64)
    most = torch.iinfo(torch.int64).max
    assert bits.ulps(x, y).tolist() == [most, most, 2 * 0x3FF0000000000000]
    assert bits.bit_lengths(torch.tensor([0, 1, 2, 3, 4, 2**31 - 1, 2**31, 2**54 - 1, most])).tolist() == [
        0, 1, 2, 2, 3, 31, 32, 54, 63,
    ]  # fmt: skip


def test_the_histogram_is_of_powers_of_two():
    rollout = torch.full((1, 6), -1.0)
    steps = torch.tensor([[0, 1, 2, 3, 4, 9]], dtype=torch.int32)
    report = compare((rollout.view(torch.int32) + steps).view(torch.float32), rollout)
    assert report.ulp_histogram[:6] == (1, 1, 2, 1, 1, 0) and sum(report.ulp_histogram) == 6
    assert report.ulp_max == 9 and [x.ulps for x in report.worst] == [9, 4, 3, 2, 1]


def test_signed_zeros_are_not_the_same_bits():
    zero = torch.zeros(1, 2)
    report = compare(zero, -zero)
    assert report.equal == 0 and report.ulp_max == 0 and report.worst == ()


def test_the_worst_tokens_in_order_and_ties_by_place(chunk):
    rollout = torch.full((4, 8), -1.0)
    train = rollout.clone()
    for place, far in {(3, 1): 0.5, (0, 6): 0.25, (2, 0): 0.25, (1, 1): 0.25, (2, 7): 0.125}.items():
        train[place] += far
    report = compare(train, rollout, worst=3)
    assert [(x.row, x.position) for x in report.worst] == [(3, 1), (0, 6), (1, 1)]
    assert len(compare(train, rollout, worst=0).worst) == 0
    assert len(compare(train, rollout, worst=99).worst) == 5


def test_differences_that_a_naive_formula_loses():
    """k3 of 1e-7 is 5e-15: exp(x) - 1 - x gives noise in fp32 and four digits in fp64."""
    rollout = torch.zeros(1, 1, dtype=torch.float64)
    report = compare(rollout + 1e-7, rollout)
    assert report.kl.k3 == pytest.approx(1e-14 / 2, rel=1e-6)
    assert report.kl_reverse.k3 == pytest.approx(1e-14 / 2, rel=1e-6)
    assert report.chi2_token == pytest.approx(2e-7, rel=1e-6)


@pytest.mark.parametrize("far", [400.0, -400.0, 1e9, -1e9])
def test_ratios_that_overflow_are_infinite_and_the_rest_stands(far, chunk):
    rollout = torch.full((3, 9), -1.0, dtype=torch.float64)
    train = rollout.clone()
    train[1, 4] += far
    report = compare(train, rollout, advantages=torch.ones(3), bounds=(0.5, 2.0))
    assert report.max_abs_difference == pytest.approx(abs(far)) and report.kl.k1 == pytest.approx(-far / 27)
    assert report.outside_clip == (pytest.approx((far < 0) / 27), pytest.approx((far > 0) / 27))
    assert report.ess_token == pytest.approx(1 / 27 if far > 0 else 26 / 27)
    assert report.ess_sequence == pytest.approx(1 / 3 if far > 0 else 2 / 3)
    assert not any(math.isnan(x) for x in (*report.kl, *report.kl_reverse, report.chi2_token))
    assert report.chi2_token == math.inf if far > 0 else report.chi2_token < 0


def test_which_tokens_the_clip_range_holds_back():
    rollout = torch.full((2, 4), -2.0)
    train = rollout + torch.tensor([0.5, -0.5, 0.1, -0.1])
    report = compare(train, rollout, advantages=torch.tensor([1.0, -1.0]), clip=(0.2, 0.2))
    assert report.outside_clip == (0.25, 0.25) and report.clipped == 0.25  # one of each row
    assert compare(train, rollout, advantages=torch.tensor([1.0, 0.0])).clipped == 0.125
    assert compare(train, rollout).clipped is None
    packed = compare(
        train.reshape(-1), rollout.reshape(-1), cu_seqlens=torch.tensor([0, 4, 7]),
        advantages=torch.tensor([1.0, -1.0]),
    )  # fmt: skip
    assert packed.clipped == 2 / 7


def test_strides_and_gradients_of_users():
    train, rollout, mask = draw()
    want = compare(train, rollout, mask)
    asked = train.T.contiguous().T.requires_grad_()
    got = compare(asked, rollout[:, ::1], mask.T.contiguous().T)
    assert torch.equal(got.token_statistics.means, want.token_statistics.means)


class Sizes(TorchFunctionMode):
    """The largest result of any operation."""

    most = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return result


def test_nothing_larger_than_the_tokens_is_made(monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 64)
    train, rollout, mask = draw(8, 512)
    with Sizes() as sizes:
        compare(train, rollout, mask)
    assert sizes.most <= train.numel()


ERRORS = {
    "train_logprobs must be float16": lambda x: compare(x.long(), x),
    "rollout_logprobs must be a tensor, got list": lambda x: compare(x, x.tolist()),
    r"rollout_logprobs must have train_logprobs' shape \(2, 3\), got \(2, 2\)": lambda x: compare(
        x, x[:, 1:]
    ),
    r"mask must have train_logprobs' shape \(2, 3\), got \(3,\)": lambda x: compare(x, x, x[0] > 0),
    r"train_logprobs must be \[B, L\], or \[N\] with cu_seqlens, got \(3,\)": lambda x: compare(x[0], x[0]),
    r"train_logprobs must be \[N\] with cu_seqlens, got \(2, 3\)": lambda x: compare(
        x, x, cu_seqlens=torch.tensor([0, 2])
    ),
    r"cu_seqlens must rise from 0 to at most 3, got \[0, 4\]": lambda x: compare(
        x[0], x[0], cu_seqlens=torch.tensor([0, 4])
    ),
    "sequence_ids must be None where cu_seqlens are given": lambda x: compare(
        x[0], x[0], cu_seqlens=torch.tensor([0, 3]), sequence_ids=torch.zeros(3).long()
    ),
    "sequence_ids must be integers, got float32": lambda x: compare(x, x, sequence_ids=x),
    r"sequence_ids must have train_logprobs' shape \(2, 3\), got \(3,\)": lambda x: compare(
        x, x, sequence_ids=torch.zeros(3).long()
    ),
    "advantages must have train_logprobs' shape": lambda x: compare(x, x, advantages=torch.zeros(5)),
    r"clip must be two numbers, \(low, high\), got 0.2": lambda x: compare(x, x, clip=0.2),
    r"clip\[1\] must be >= 0 and finite, got -1": lambda x: compare(x, x, clip=(0.2, -1)),
    r"bounds\[1\] must be > 2 and finite, got 1.0": lambda x: compare(x, x, bounds=(2.0, 1.0)),
    r"bounds must be two numbers, \(low, high\), got 2.0": lambda x: compare(x, x, bounds=2.0),
    "worst must be an integer >= 0, got -1": lambda x: compare(x, x, worst=-1),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_argument(text):
    with pytest.raises(ValueError, match=text):
        ERRORS[text](torch.zeros(2, 3))


def test_what_the_page_shows_runs(capsys):
    page = Path(__file__).parent.parent / "docs/consistency.md"
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if not snippet.startswith("rlkernel."):  # a signature
            exec(snippet, names)
    assert "furthest apart" in capsys.readouterr().out and "projected" in names


def test_a_report_is_the_same_inside_batch_invariant():
    """Its figures are fp64, which that mode refuses in a model; the mode holds again behind them."""
    train, rollout = (-torch.rand(3, 40, generator=torch.Generator().manual_seed(i)) for i in range(2))
    given = {"advantages": torch.ones(3, 40), "bounds": (0.5, 2.0)}
    want = compare(train, rollout, **given)
    with rlkernel.batch_invariant() as mode:
        got = compare(train, rollout, **given)
        assert (str(got), got.chi2_sequence, got.sequence_ratios) == (
            str(want), want.chi2_sequence, want.sequence_ratios
        )  # fmt: skip
        for style in STYLES:
            assert got.to_metrics(style) == want.to_metrics(style)
        with pytest.raises(RuntimeError, match="torch's exp"):
            train.double().exp()
    assert not mode.report()
