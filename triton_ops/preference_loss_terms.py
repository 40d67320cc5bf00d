"""The losses of pairs and their derivatives, in fp64."""

import triton
import triton.language as tl

from rlkernel.calls.preference_loss import PREFERENCE_DIVERGENCES, PREFERENCE_TERMS
from rlkernel.triton_ops._names import Names

Term = Names(PREFERENCE_TERMS)
Divergence = Names(PREFERENCE_DIVERGENCES)


@triton.jit
def log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def expm1(x):
    u = tl.exp(x)
    near = tl.where(u == 1.0, x, (u - 1.0) * (x / tl.log(u)))
    return tl.where(tl.abs(x) < 1.0, near, u - 1.0)


@triton.jit
def softplus(x):
    return log1p(tl.exp(-tl.abs(x))) + tl.where(x > 0, x, 0.0)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    inverse = 1.0 / (1.0 + e)
    return tl.where(x > 0, inverse, e * inverse)


@triton.jit
def log1mexp(x):
    half = tl.full((), -0.6931471805599453, tl.float64)
    far = log1p(-tl.exp(tl.where(x < half, x, half)))
    return tl.where(x < half, far, tl.log(-expm1(tl.where(x < half, half, x))))


@triton.jit
def smoothed(z, e):
    value = (1.0 - e) * softplus(-z) + tl.where(e == 0.0, 0.0, e * softplus(z))
    return value, e * sigmoid(z) - (1.0 - e) * sigmoid(-z)


@triton.jit
def score(x, exponent, DIVERGENCE: tl.constexpr):
    """f'(exp(x)) less a constant, and its derivative."""
    if DIVERGENCE == Divergence.forward_kl:
        value, slope = -expm1(-x), tl.exp(-x)
    elif DIVERGENCE == Divergence.js_divergence:
        value, slope = tl.full((), 0.6931471805599453, tl.float64) - softplus(-x), sigmoid(-x)
    elif DIVERGENCE == Divergence.alpha_divergence:
        t = exponent * x
        bounded = tl.where(t > 80.0, 80.0, t)
        value, slope = expm1(bounded) / exponent, tl.where(t > 80.0, 0.0, tl.exp(bounded))
    else:
        value, slope = x, x * 0.0 + 1.0
    return value, slope


@triton.jit
def pair_term(
    x, y, score_x, slope_x, score_y, slope_y, mean_c, mean_r, per_c, per_r, delta, e, beta, gamma, tau,
    exponent, TERM: tl.constexpr, DIVERGENCE: tl.constexpr,
):  # fmt: skip
    """The loss of pairs, its derivatives by the sums of their sides, and the log odds."""
    zero = tl.zeros_like(x)
    z = beta * (score_x - score_y)
    normed = score_x * per_c - score_y * per_r
    loss, chosen, rejected, odds, by_z, by_normed = zero, zero, zero, zero, zero, zero
    if TERM == Term.sigmoid:
        loss, by_z = smoothed(z, e)
    elif TERM == Term.hinge:
        loss, by_z = tl.where(z < 1.0, 1.0 - z, z - z), tl.where(z < 1.0, -1.0, z - z)
    elif TERM == Term.ipo:
        d = normed - 1.0 / (2.0 * beta)
        loss, by_normed = d * d, 2.0 * d
    elif TERM == Term.exo_pair:
        right, wrong, log_right, log_wrong = sigmoid(z), sigmoid(-z), log1p(zero - e), tl.log(zero + e)
        loss = right * (-softplus(-z) - log_right) + wrong * (-softplus(z) - log_wrong)
        by_z = right * wrong * (z - log_right + log_wrong)
    elif TERM == Term.nca_pair:
        u, v = beta * x, beta * y
        loss = softplus(-u) + 0.5 * softplus(u) + 0.5 * softplus(v)
        chosen, rejected = beta * (0.5 * sigmoid(u) - sigmoid(-u)), beta * 0.5 * sigmoid(v)
    elif TERM == Term.robust:
        loss = ((1.0 - e) * softplus(-z) - e * softplus(z)) / (1.0 - 2.0 * e)
        by_z = -((1.0 - e) * sigmoid(-z) + e * sigmoid(z)) / (1.0 - 2.0 * e)
    elif TERM == Term.bco_pair:
        u, v = beta * x - delta, beta * y - delta
        loss = softplus(-u) + softplus(v)
        chosen, rejected = -beta * sigmoid(-u), beta * sigmoid(v)
    elif TERM == Term.sppo_hard:
        u, v = x - 0.5 / beta, y + 0.5 / beta
        loss, chosen, rejected = u * u + v * v, 2.0 * u, 2.0 * v
    elif TERM == Term.apo_zero:
        u, v = sigmoid(-beta * x), sigmoid(beta * y)
        loss = u + v
        chosen, rejected = -beta * u * sigmoid(beta * x), beta * v * sigmoid(-beta * y)
    elif TERM == Term.apo_down:
        u, v = sigmoid(beta * x), sigmoid(-beta * (x - y))
        by_v = beta * v * sigmoid(beta * (x - y))
        loss = u + v
        chosen, rejected = beta * u * sigmoid(-beta * x) - by_v, by_v
    elif TERM == Term.discopop:
        # exp(-z) * m in one exponential where z < 0: the product of the two would be infinity * 0
        m, rest, plain = sigmoid(z / tau), sigmoid(-z / tau), softplus(-z)
        below = tl.exp(tl.where(z < 0, z / tau - z, 0.0)) * rest
        blend = tl.where(z < 0, below, tl.exp(tl.where(z < 0, 0.0, -z)) * m)
        loss = plain * rest + blend
        by_z = -sigmoid(-z) * rest - blend + (blend * rest - plain * m * rest) / tau
    elif TERM == Term.sigmoid_norm:
        loss, slope = smoothed(beta * normed, e)
        by_normed = beta * slope
    elif TERM == Term.orpo:
        odds = mean_c - mean_r - (log1mexp(mean_c) - log1mexp(mean_r))
        wrong = sigmoid(-odds)
        p, q = tl.exp(mean_c), tl.exp(mean_r)
        # a token that is certain has the limit of the derivative
        near = q / (q * -expm1(mean_c) + p * -expm1(mean_r))
        of_chosen = tl.where(mean_c > -0.5, near, wrong / -expm1(mean_c))
        of_rejected = tl.where(wrong == 0, 0.0, wrong / -expm1(mean_r))
        loss = beta * softplus(-odds)
        chosen, rejected = -beta * of_chosen * per_c, beta * of_rejected * per_r
    elif TERM == Term.simpo:
        score_c, slope_c = score(mean_c, exponent, DIVERGENCE)
        score_r, slope_r = score(mean_r, exponent, DIVERGENCE)
        loss, slope = smoothed(beta * (score_c - score_r) - gamma, e)
        chosen, rejected = beta * slope * slope_c * per_c, -beta * slope * slope_r * per_r
    elif TERM == Term.ipo_sum:
        d = score_x - score_y - 1.0 / (2.0 * beta)
        loss, by_z = d * d, 2.0 * d / beta
    if (
        (TERM == Term.sigmoid)
        | (TERM == Term.hinge)
        | (TERM == Term.exo_pair)
        | (TERM == Term.robust)
        | (TERM == Term.discopop)
        | (TERM == Term.ipo_sum)
    ):
        # 0 * infinity: where the loss is flat, the score may have no end
        chosen = tl.where(by_z == 0, 0.0, beta * by_z * slope_x)
        rejected = tl.where(by_z == 0, 0.0, -beta * by_z * slope_y)
    if (TERM == Term.ipo) | (TERM == Term.sigmoid_norm):
        chosen = tl.where(by_normed == 0, 0.0, by_normed * slope_x * per_c)
        rejected = tl.where(by_normed == 0, 0.0, -by_normed * slope_y * per_r)
    return loss, chosen, rejected, odds
