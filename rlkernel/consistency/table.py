"""A report as plain text of at most thirty lines."""

from rlkernel.consistency.report import Report

WORST = 5  # tokens that are shown
BARS = 8  # lines of the histogram


def text(report: Report) -> str:
    """What ``print(report)`` shows."""
    train, rollout = (str(x).removeprefix("torch.") for x in report.dtypes)
    lines = [
        f"{report.tokens:,} tokens of {report.sequences:,} sequences: "
        f"trainer in {train}, rollout in {rollout}",
        f"{_name('same bits')}{report.equal:,} ({_percent(report.equal, report.tokens)})"
        + (", all" if report.identical else ""),
    ]
    left_out = {
        "NaN or +inf": report.invalid,
        "no mass in training": report.no_mass_train,
        "no mass in rollout": report.no_mass_rollout,
        "no mass in either": report.no_mass_both,
    }
    if any(left_out.values()):
        told = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
        lines.append(f"{_name('left out below')}{told}")
    if not report.compared:
        return "\n".join([*lines, "nothing to compare"])
    lines += _figures(report)
    if report.equal < report.tokens:
        lines += [*_bars(report), *_worst(report)]
    return "\n".join(lines)


def _figures(report: Report) -> list[str]:
    low, high = report.outside_clip
    clip_low, clip_high = report.clip
    held = "" if report.clipped is None else f", held back {report.clipped:.3%}"
    shares = "  ".join(f"p{share:g} {value:.3g}" for share, value in report.percentiles.items())
    least, mean, most = report.sequence_ratios
    return [
        f"{_name('difference')}mean {report.mean_difference:+.3g}, mean |d| {report.mean_abs_difference:.3g}",
        f"{_name('|d|')}{shares}  max {report.max_abs_difference:.3g}",
        f"{_name('KL(rollout, train)')}{_estimates(report.kl)}",
        f"{_name('KL(train, rollout)')}{_estimates(report.kl_reverse)}",
        f"{_name('chi-square')}tokens {report.chi2_token:.3g}, sequences {report.chi2_sequence:.3g}",
        f"{_name('effective share')}tokens {report.ess_token:.6f}, sequences {report.ess_sequence:.6f}",
        f"{_name('ratio of tokens')}{_extent(report.ratio_min, report.ratio_mean, report.ratio_max)}",
        f"{_name('ratio of sequences')}{_extent(least, mean, most)}",
        f"{_name(f'outside {1 - clip_low:g}..{1 + clip_high:g}')}below {low:.3%}, above {high:.3%}{held}",
    ]


def _bars(report: Report) -> list[str]:
    """The histogram; more buckets than there are lines join their neighbours, all as many."""
    counts = report.ulp_histogram
    apart = [k for k, n in enumerate(counts) if n and k]
    spans = [(0, 0)] if counts[0] else []
    if apart:
        step = -(-(apart[-1] - apart[0] + 1) // (BARS - 1))
        spans += [(k, k + step - 1) for k in range(apart[0], apart[-1] + 1, step)]
    lines = [f"{_name('ULPs apart')}tokens"]
    for first, last in spans:
        inside = sum(counts[first : last + 1])
        least, most = 2**first // 2, min(2**last - 1, report.ulp_max)
        span = f"{least:,}" if least == most else f"{least:,} .. {most:,}"
        lines.append(f"  {_name(span, 22)}{inside:,} ({_percent(inside, report.compared)})")
    return lines


def _worst(report: Report) -> list[str]:
    rows = [("row", "position", "train", "rollout", "difference", "ULPs")]
    for x in report.worst[:WORST]:
        ulps = "" if x.ulps is None else f"{x.ulps:,}"
        values = (f"{x.train:.9g}", f"{x.rollout:.9g}", f"{x.difference:+.3g}")
        rows.append((str(x.row), str(x.position), *values, ulps))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["furthest apart"] + [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    ]


def _name(text: str, width: int = 24) -> str:
    return text.ljust(width) + ("" if len(text) < width else " ")


def _percent(part: int, whole: int) -> str:
    """100% is all of them, and 0% none."""
    if not whole:
        return "of none"
    if 0 < part < whole:
        return f"{min(max(part / whole, 1e-5), 1 - 1e-5):.3%}"
    return f"{part / whole:.0%}"


def _estimates(kl: tuple[float, float, float]) -> str:
    return "  ".join(f"k{i} {value:+.3g}" for i, value in enumerate(kl, 1))


def _extent(least: float, mean: float, most: float) -> str:
    return f"{least:.6g} .. {most:.6g}, mean {mean:.9g}"
