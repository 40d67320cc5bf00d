"""The set that a filter keeps, in pass B of ``sampling``: device functions over the survivors of a row.

Survivors are the groups of 64 tokens whose maximum passes a bound, listed in ascending order in global
memory; their tokens are read again from the logits.  The last token that is kept is found by halving an
interval of values, whose ends are values of tokens, until one is left.  Counts and masses are integers, so
the result does not depend on the order of any sum.
"""

import triton
import triton.language as tl

from rlkernel.calls import sampling as calls
from rlkernel.triton_ops.sampling_kernels import FIXED_POINT, GROUP, masses

LEAST_EXCLUDED = tl.constexpr(calls.LEAST_EXCLUDED)
BATCH = tl.constexpr(32)  # groups that are read at a time
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
UNLIMITED = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # as a mass


@triton.jit
def list_groups(listed, group_max, groups, top, bound, N: tl.constexpr):
    """List the groups with a finite maximum m and ``m - top >= bound``; without a top, those with
    ``m >= bound``, which may be -inf.  Returns their number."""
    n = tl.full((), 0, tl.int32)
    tl.debug_barrier()  # others may still be reading the former list
    for start in range(0, groups, N):
        g = start + tl.arange(0, N)
        m = tl.load(group_max + g, mask=g < groups, other=float("-inf"))
        if top is None:
            keep = ((g < groups) & (m >= bound)).to(tl.int32)
        else:
            keep = ((m > float("-inf")) & (m - top >= bound)).to(tl.int32)
        tl.store(listed + n + tl.cumsum(keep, axis=0) - 1, g, mask=keep != 0)
        n += tl.sum(keep)
    tl.debug_barrier()
    return n


@triton.jit
def load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V):
    """``(z, token ids)`` [BATCH, 64] of the groups listed from ``start`` on; z is -inf where none is."""
    j = start + tl.arange(0, BATCH)
    here = j < n
    g = tl.load(listed + j, mask=here, other=0)
    column = tl.arange(0, GROUP)[None, :]
    tokens = g[:, None] * GROUP + column
    inside = here[:, None] & (tokens < V)
    if adjusted is not None:
        z = tl.load(adjusted + tokens, mask=inside, other=float("-inf"))
    else:
        z = tl.load(x_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if bitmask is not None:  # two words for each group
        first = tl.load(bitmask + 2 * g, mask=here, other=0)
        second = tl.load(bitmask + 2 * g + 1, mask=here & (64 * g + 32 < V), other=0)
        word = tl.where(column < 32, first[:, None], second[:, None])
        z = tl.where(((word >> (column & 31)) & 1) != 0, z, float("-inf"))
    return z, tl.where(inside, tokens, NO_TOKEN)


@triton.jit
def sums_before(x):
    """For each entry of x [BATCH, 64], the sum of those before it, row by row."""
    rows = tl.sum(x, axis=1)
    return (tl.cumsum(rows, axis=0) - rows)[:, None] + (tl.cumsum(x, axis=1) - x)


@triton.jit
def middle(lo, hi):
    """A number of [lo, hi), where lo < hi; no sum overflows."""
    m = 0.5 * lo + 0.5 * hi
    return tl.maximum(tl.where(m >= hi, lo, m), lo)


@triton.jit
def count_above(z, m, value):
    """Number and mass of the z above ``value``, the largest z that is not, and the smallest that is."""
    up = z > value
    count = tl.sum(up.to(tl.int32))
    mass = tl.sum(tl.where(up, m, 0))
    return count, mass, tl.max(tl.where(up, float("-inf"), z)), tl.min(tl.where(up, z, float("inf")))


@triton.jit
def halve(k, limit, count, mass, below, over, lo, hi, n_lo, n_hi, m_hi):
    """The half of [lo, hi] that holds the last token of which fewer than k tokens, and a mass less than
    ``limit``, are above; with the number of tokens from lo on, and the number and mass of those above hi."""
    left = (count < k) & (mass < limit)
    hi = tl.where(left, below, hi)
    n_hi = tl.where(left, count, n_hi)
    m_hi = tl.where(left, mass, m_hi)
    lo = tl.where(left, lo, over)
    n_lo = tl.where(left, n_lo, count)
    return lo, hi, n_lo, n_hi, m_hi


@triton.jit
def kth_group(group_max, groups, top, k, N: tl.constexpr):
    """A value that at least k group maxima reach, hardly more than k where possible; -inf if there are less.

    At least k tokens are as large, so no smaller one is among the first k.
    """
    lo = tl.full((), float("inf"), tl.float32)
    n_lo = tl.full((), 0, tl.int32)
    for start in range(0, groups, N):
        g = start + tl.arange(0, N)
        m = tl.load(group_max + g, mask=g < groups, other=float("-inf"))
        finite = m > float("-inf")
        lo = tl.minimum(lo, tl.min(tl.where(finite, m, float("inf"))))
        n_lo += tl.sum(finite.to(tl.int32))
    if n_lo < k:
        lo = tl.full((), float("-inf"), tl.float32)
    else:
        hi = top
        while (lo < hi) & (n_lo > k + k // 8 + 8):
            value = middle(lo, hi)
            count = tl.full((), 0, tl.int32)
            below = tl.full((), float("-inf"), tl.float32)
            over = tl.full((), float("inf"), tl.float32)
            for start in range(0, groups, N):
                g = start + tl.arange(0, N)
                m = tl.load(group_max + g, mask=g < groups, other=float("-inf"))
                up = m > value
                count += tl.sum(up.to(tl.int32))
                below = tl.maximum(below, tl.max(tl.where(up, float("-inf"), m)))
                over = tl.minimum(over, tl.min(tl.where(up, m, float("inf"))))
            hi = tl.where(count < k, below, hi)
            lo = tl.where(count < k, lo, over)
            n_lo = tl.where(count < k, n_lo, count)
    return lo


@triton.jit
def survey(listed, n, x_ptr, adjusted, bitmask, V, top, bound, c):
    """Number, mass and smallest of the tokens among the survivors with ``z - top >= bound``."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0, tl.int64)
    lowest = top
    for start in range(0, n, BATCH):
        z, _ = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        among = (z > float("-inf")) & (z - top >= bound)
        count += tl.sum(among.to(tl.int32))
        mass += tl.sum(tl.where(among, masses(tl.exp2((z - top) * c)), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(among, z, top)))
    return count, mass, lowest


@triton.jit
def find_pivot(
    listed, n, x_ptr, adjusted, bitmask, V, top, c, k, limit, lo, n_lo, candidates, ROOM: tl.constexpr
):  # fmt: skip
    """``(pivot, its ties and all above it, those above it, their mass)``.

    The pivot is the smallest of the ``n_lo`` tokens from ``lo`` on of which fewer than k tokens, and a mass
    less than ``limit``, are above.  The first passes read the survivors; as soon as the interval holds no
    more than ROOM tokens they are gathered in ``candidates``, and the rest is done in registers.
    """
    hi = top
    n_hi = tl.full((), 0, tl.int32)
    m_hi = tl.full((), 0, tl.int64)
    while (lo < hi) & (n_lo - n_hi > ROOM):
        value = middle(lo, hi)
        count = tl.full((), 0, tl.int32)
        mass = tl.full((), 0, tl.int64)
        below = tl.full((), float("-inf"), tl.float32)
        over = tl.full((), float("inf"), tl.float32)
        for start in range(0, n, BATCH):
            z, _ = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            m = masses(tl.exp2((z - top) * c))
            part = count_above(z, m, value)
            count += part[0]
            mass += part[1]
            below = tl.maximum(below, part[2])
            over = tl.minimum(over, part[3])
        lo, hi, n_lo, n_hi, m_hi = halve(k, limit, count, mass, below, over, lo, hi, n_lo, n_hi, m_hi)
    if lo < hi:
        gathered = tl.full((), 0, tl.int32)
        tl.debug_barrier()  # the candidates of an earlier search have been read
        for start in range(0, n, BATCH):
            z, _ = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            keep = ((z >= lo) & (z <= hi)).to(tl.int32)
            tl.store(candidates + gathered + sums_before(keep), z, mask=keep != 0)
            gathered += tl.sum(keep)
        tl.debug_barrier()
        i = tl.arange(0, ROOM)
        z = tl.load(candidates + i, mask=i < gathered, other=float("-inf"))
        m = masses(tl.exp2((z - top) * c))
        n_top = n_hi  # what lies above the candidates
        m_top = m_hi
        while lo < hi:
            count, mass, below, over = count_above(z, m, middle(lo, hi))
            lo, hi, n_lo, n_hi, m_hi = halve(
                k, limit, n_top + count, m_top + mass, below, over, lo, hi, n_lo, n_hi, m_hi
            )
    return hi, n_lo, n_hi, m_hi


@triton.jit
def kept_ties(pivot, n_from, n_above, m_above, top, c, k, limit):
    """How many of the pivot's ties are kept, and the mass of one."""
    m = masses(tl.exp2((pivot - top) * c))
    room = tl.minimum(n_from, k) - n_above
    by_mass = (limit - 1 - m_above) // tl.maximum(m, 1) + 1  # with the first whose sum reaches the limit
    return tl.where(m > 0, tl.minimum(room, by_mass), room).to(tl.int32), m


@triton.jit
def tie_id(listed, n, x_ptr, adjusted, bitmask, V, pivot, number):
    """The id of the tie with that number, from 1, in ascending order."""
    found = tl.full((), NO_TOKEN, tl.int32)
    seen = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while (start < n) & (seen < number):
        z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        tie = (z == pivot).to(tl.int32)
        hit = (tie != 0) & (seen + sums_before(tie) + 1 == number)
        found = tl.minimum(found, tl.min(tl.where(hit, tokens, NO_TOKEN)))
        seen += tl.sum(tie)
        start += BATCH
    return found


@triton.jit
def is_kept(z, tokens, pivot, last, high):
    """From the pivot's first ties on; not above ``high``, where there is one."""
    kept = (z > pivot) | ((z == pivot) & (tokens <= last))
    if high is not None:
        kept = kept & (z <= high)
    return kept


@triton.jit
def mean_of_kept(listed, n, x_ptr, adjusted, bitmask, V, top, t, c, pivot, last, mass):
    """The mean of z - top over the kept tokens, of integers: in any order the same."""
    total = tl.full((), 0, tl.int64)
    t32 = t.to(tl.float32)
    for start in range(0, n, BATCH):
        z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        e = tl.exp2((z - top) * c)
        among = is_kept(z, tokens, pivot, last, None) & (e > 0.0)
        total += tl.sum(tl.where(among, masses(tl.where(among, e * ((top - z) / t32), 0.0)), 0))
    return (-t * (total.to(tl.float64) / mass.to(tl.float64))).to(tl.float32)


@triton.jit
def radius_about(mean, target, listed, n, x_ptr, adjusted, bitmask, V, top, c, pivot, last):
    """How far from ``mean`` the kept tokens reach that have a mass of ``target``, the nearest ones first.

    An interval of distances is halved; its ends become distances of tokens, until one is left.
    """
    lo = tl.full((), 0.0, tl.float32)
    hi = tl.maximum(tl.abs(mean), tl.abs(pivot - top - mean))
    while lo < hi:
        value = middle(lo, hi)
        mass = tl.full((), 0, tl.int64)
        below = tl.full((), 0.0, tl.float32)
        over = hi
        for start in range(0, n, BATCH):
            z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            far = tl.abs(z - top - mean)
            among = is_kept(z, tokens, pivot, last, None)
            near = among & (far <= value)
            mass += tl.sum(tl.where(near, masses(tl.exp2((z - top) * c)), 0))
            below = tl.maximum(below, tl.max(tl.where(near, far, 0.0)))
            over = tl.minimum(over, tl.min(tl.where(among & (far > value), far, float("inf"))))
        reached = mass >= target
        hi = tl.where(reached, below, hi)
        lo = tl.where(reached, lo, over)
    return hi


@triton.jit
def narrow(listed, n, x_ptr, adjusted, bitmask, V, top, t, c, pivot, last, count, mass, typical, threshold):
    """``(pivot, last, high, count, mass)`` of what typical-p and XTC leave of the kept set, each off at 1."""
    high = top
    if typical < 1.0:
        mean = mean_of_kept(listed, n, x_ptr, adjusted, bitmask, V, top, t, c, pivot, last, mass)
        target = tl.ceil(typical.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
        radius = radius_about(mean, target, listed, n, x_ptr, adjusted, bitmask, V, top, c, pivot, last)
        count = tl.full((), 0, tl.int32)
        mass = tl.full((), 0, tl.int64)
        lowest = top
        high = pivot
        for start in range(0, n, BATCH):
            z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            among = is_kept(z, tokens, pivot, last, None) & (tl.abs(z - top - mean) <= radius)
            count += tl.sum(among.to(tl.int32))
            mass += tl.sum(tl.where(among, masses(tl.exp2((z - top) * c)), 0))
            lowest = tl.minimum(lowest, tl.min(tl.where(among, z, top)))
            high = tl.maximum(high, tl.max(tl.where(among, z, pivot)))
        last = tl.where(lowest > pivot, NO_TOKEN, last)
        pivot = lowest
    if threshold < 1.0:
        # what it leaves has a mass: tokens too unlikely for one are not looked at
        share = tl.log(threshold.to(tl.float64) * (mass.to(tl.float64) * (1.0 / FIXED_POINT)))
        least = (t * tl.maximum(share, LEAST_EXCLUDED)).to(tl.float32)
        found = high
        for start in range(0, n, BATCH):
            z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            among = is_kept(z, tokens, pivot, last, high) & (z - top >= least)
            found = tl.minimum(found, tl.min(tl.where(among, z, high)))
        dropped = tl.full((), 0, tl.int32)
        dropped_mass = tl.full((), 0, tl.int64)
        for start in range(0, n, BATCH):
            z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
            above = (z > found) & (z <= high)
            dropped += tl.sum(above.to(tl.int32))
            dropped_mass += tl.sum(tl.where(above, masses(tl.exp2((z - top) * c)), 0))
        high = found
        count -= dropped
        mass -= dropped_mass
    return pivot, last, high, count, mass


@triton.jit
def token_at_mass(listed, n, x_ptr, adjusted, bitmask, V, top, c, pivot, last, high, below):
    """The first kept token, by id, of which the masses up to and with it exceed ``below``."""
    found = tl.full((), NO_TOKEN, tl.int32)
    passed = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int32)
    while (start < n) & (passed <= below):
        z, tokens = load_survivors(listed, n, start, x_ptr, adjusted, bitmask, V)
        m = tl.where(is_kept(z, tokens, pivot, last, high), masses(tl.exp2((z - top) * c)), 0)
        total = tl.sum(m)
        if passed + total > below:
            found = tl.min(tl.where(passed + sums_before(m) + m > below, tokens, NO_TOKEN))
        passed += total
        start += BATCH
    return found
