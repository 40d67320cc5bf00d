"""What the sampling tests share: filters, vocabularies that are hard on them, and an oracle that sorts."""

import math

import torch
from backends import of, running, skip_unless_able

import rlkernel
from rlkernel.calls.sampling import Sampling

# Warps of 64 give the bits that warps of 32 give: test_same_bits_on_warps_of_32_and_of_64.
PAIRS = [pair for pair in of("sampling") if pair.values[0] != "emulated-warp64"]
THRESHOLDS = {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_a": 0.0}
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": math.inf} | THRESHOLDS
FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "top_k top_p": {"top_k": 20, "top_p": 0.8},
    "top_k min_p": {"top_k": 7, "min_p": 0.1},
    "min_p top_p": {"min_p": 0.02, "top_p": 0.7},
    "top_n_sigma top_k top_p": {"top_n_sigma": 2.0, "top_k": 40, "top_p": 0.95},
    "all": {"top_k": 30, "top_p": 0.85, "min_p": 0.01, "top_n_sigma": 1.5},
    "k of 1": {"top_k": 1},
    "large k": {"top_k": 200},
    "k and p of most": {"top_k": 190, "top_p": 0.99},
    "tiny p": {"top_p": 1e-6},
    "p of nearly all": {"top_p": 0.9999},
    "min_p of 1": {"min_p": 1.0},
    "k beyond V": {"top_k": 10**6},
    "epsilon": {"epsilon_cutoff": 0.01},
    "eta": {"eta_cutoff": 0.02},
    "top_a": {"top_a": 0.2},
    "thresholds above all": {"epsilon_cutoff": 1.0, "eta_cutoff": 1.0},
    "thresholds top_p": {"epsilon_cutoff": 1e-3, "eta_cutoff": 3e-3, "top_a": 0.02, "top_p": 0.8},
}
# one of every kind, where a row costs milliseconds
FEW = ("none", "top_k", "top_p", "min_p top_p", "all", "k and p of most", "thresholds top_p")


def _rows(seed, count, vocab):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def _one_finite(x):
    return torch.where(torch.arange(x.shape[1]) == x.shape[1] // 3, 1.25, -torch.inf).expand_as(x)


def _spread(x):
    """The largest logit of every 64 tokens stands alone, so that no group can be pruned before another."""
    return torch.where(torch.arange(x.shape[1]) % 64 == 13, x + 8, x)


VOCABULARIES = {
    "random": lambda x: 3 * x,
    "ascending": lambda x: (3 * x).sort(-1).values,
    "descending": lambda x: (3 * x).sort(-1, descending=True).values,
    "peaked": lambda x: torch.where(torch.arange(x.shape[1]) == 60 % x.shape[1], 14.0, x),
    "in steps": lambda x: (2 * x).round() / 2,
    "equal": lambda x: torch.zeros_like(x),
    "holes": lambda x: torch.where(x < 0, -torch.inf, 4 * x),
    "one finite": _one_finite,
    "spread": _spread,
    "far below zero": lambda x: 3 * x - 1000,
}


def request(logits, **changes):
    """What ``ops`` hands to a backend, for rows that are not filtered."""
    zeros = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return Sampling(**{"seeds": zeros, "positions": zeros, "raw": True, **changes})


def skip_unless_sampling(backend, logits):
    needs = frozenset({"logprobs", "seeds"})
    skip_unless_able(backend, "sampling", logits, sampling=request(logits), needs=needs)


def sample(backend, logits, **options):
    """``rlkernel.sample`` on one backend; the seeds of the rows are 0, 1, ... unless given."""
    flat = logits.reshape(-1, logits.shape[-1])
    skip_unless_sampling(backend, flat.contiguous())  # ops hands over dense rows
    if "logprob_token_ids" in options:
        options["logprob_token_ids"] = options["logprob_token_ids"].to(logits.device)
    options.setdefault("seeds", torch.arange(flat.shape[0], device=logits.device).view(logits.shape[:-1]))
    with running(backend):
        return rlkernel.sample(logits, **options)


def everything(vocab):
    """Options that ask for all outputs."""
    return {
        "return_entropy": True,
        "return_rank": True,
        "return_support": vocab,
        "top_logprobs": min(3, vocab),
        "logprob_token_ids": torch.tensor([0, vocab - 1]),
    }


def per_row(options, device="cpu"):
    """The filters of every row, absent ones off, as tensors."""
    return {
        name: torch.tensor([row.get(name, off) for row in options], device=device)
        for name, off in OFF.items()
    }


def grid(vocab, slow, dtype, device="cpu", seed=0):
    """Logits [R, vocab]: every vocabulary under every filter; the filters, temperatures of the rows.

    ``slow``: a row costs milliseconds, so a vocabulary has one filter, another one with another ``seed``.
    """
    made = [shape(x[None]) for shape, x in zip(VOCABULARIES.values(), _rows(seed, 99, vocab), strict=False)]
    names = [(FEW[(i + seed) % len(FEW)],) if slow else tuple(FILTERS) for i in range(len(made))]
    logits = torch.cat([x for x, under in zip(made, names, strict=True) for _ in under]).to(dtype)
    options = [FILTERS[name] for under in names for name in under]
    temperatures = torch.tensor([1.0, 0.7, 1.5, 0.25, 3.0])[torch.arange(len(options)) % 5]
    return logits.to(device), options, temperatures.to(device)


def bitmask(allowed):
    """int32 [B, ceil(V / 32)] of the bools ``allowed`` [B, V]: bit i % 32 of word i // 32."""
    padded = torch.nn.functional.pad(allowed.to(torch.int64), (0, -allowed.shape[1] % 32)).unflatten(
        -1, (-1, 32)
    )
    words = (padded << torch.arange(32, device=allowed.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def support(out, row):
    """The kept ids of a row as they were returned."""
    first, last = out.support_offsets.flatten()[row : row + 2].tolist()
    return out.support_ids[first:last].tolist()


def ordered(z):
    """Ids by logit descending, then by id ascending."""
    return sorted((i for i, value in enumerate(z) if value > -math.inf), key=lambda i: (-z[i], i))


def kept(z, temperature, filter_order="sequential", slack=1e-6, **options):
    """The order of the tokens of the row ``z`` (a list), and how many of the first at least and at most are
    kept: the two differ only where a threshold is met within ``slack``.  In fp64, by sorting."""
    order, f = ordered(z), OFF | options
    d = [z[i] - z[order[0]] for i in order]
    weights = [math.exp(x / temperature) for x in d]
    low, high = (_count(d, weights, temperature, f, len(z), filter_order, s * slack) for s in (-1, 1))
    return order, low, high


def _count(d, weights, temperature, f, vocab, filter_order, slack):
    count = len(d)
    first_k = f["top_k"] if 1 <= f["top_k"] < vocab else vocab
    if f["min_p"] > 0:
        cutoff = temperature * math.log(f["min_p"])
        count = min(count, sum(x >= cutoff - slack * max(1, abs(cutoff)) for x in d))
    if f["top_n_sigma"] < math.inf:
        mean = math.fsum(d) / len(d)
        cutoff = -f["top_n_sigma"] * math.sqrt(math.fsum((x - mean) ** 2 for x in d) / len(d))
        count = min(count, sum(x >= cutoff - slack * max(1, abs(cutoff)) for x in d))
    if any(f[name] for name in THRESHOLDS):
        least = _least(d, weights, f)
        count = min(count, sum(x / temperature >= least - slack * max(1, abs(least)) for x in d))
    count = min(count, first_k)
    if f["top_p"] < 1:
        share_of = {"sequential": count, "joint": vocab, "top_k_first": first_k}[filter_order]
        bound = (f["top_p"] + slack) * math.fsum(weights[:share_of])
        before, nucleus = 0.0, 0
        for w in weights:
            if before >= bound:
                break
            before, nucleus = before + w, nucleus + 1
        count = min(count, nucleus)
    return max(count, 1)


def _least(d, weights, f):
    """The least d / T that the thresholds of the tempered probability keep."""
    total = math.fsum(weights)
    p = [w / total for w in weights]
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    eta = f["eta_cutoff"]
    bound = max(f["epsilon_cutoff"], min(eta, math.sqrt(eta) * math.exp(-entropy)), f["top_a"] * p[0] ** 2)
    return min(0.0, math.log(bound / p[0]))  # the likeliest tokens stay


def is_on(options, vocab):
    """Whether any of the filters can leave out a token."""
    f = OFF | options
    others = f["top_p"] < 1 or f["min_p"] > 0 or f["top_n_sigma"] < math.inf or any(f[x] for x in THRESHOLDS)
    return 1 <= f["top_k"] < vocab or others


def check_kept(out, row, z, temperature, options, filter_order="sequential", masked=False):
    """What was kept of the row ``z`` is what the oracle keeps, and the token is one of it."""
    order, low, high = kept(z, temperature, filter_order, **options)
    count, token, ids = out.kept_count[row].item(), out.token_ids[row].item(), support(out, row)
    where = f"row {row}, T={temperature}, {options}"
    assert out.valid[row], where
    if (is_on(options, len(z)) or (masked and len(order) < len(z))) and count < len(z):
        assert low <= count <= high, f"{where}: kept {count}, want {low} to {high}"
        assert ids == sorted(order[:count]), f"{where}: {ids}, want {sorted(order[:count])}"
        assert token in ids, f"{where}: token {token} is not in {ids}"
        share = math.fsum(math.exp((z[i] - z[order[0]]) / temperature) for i in ids)
        total = math.fsum(math.exp((z[i] - z[order[0]]) / temperature) for i in order)
        assert math.isclose(out.kept_mass[row], share / total, rel_tol=2e-6), where
    else:
        assert (count, ids, out.kept_mass[row]) == (len(order), [], 1), where
        assert high == len(order) and z[token] > -math.inf, where
        assert torch.equal(out.processed_logprobs[row], out.tempered_logprobs[row]), where
