"""Gradient clipping and optimizers in portable arithmetic.

Shape legend: P parameters, G groups of them.
"""

from __future__ import annotations

import numpy as np

from lockstep.kernels.cache import compiled
from lockstep.kernels.denormals import denormal, root, shrunk
from lockstep.kernels.instructions import select
from lockstep.kernels.math import sqrt

_ZERO, _ONE = np.float32(0), np.float32(1)
_LANES = 64
"""Parts of a sum: enough for LLVM to compute with vectors."""
_TOGETHER = 1024
"""Numbers that are scaled before they are squared, so that they are still in the cache then: a multiple of _LANES."""


@compiled
def _add_squares(x: np.ndarray, sums: np.ndarray) -> None:
    """Add the square of each number to a part of a sum, float64 [64]: number i belongs to part i mod 64."""
    for i in range(0, len(x) - len(x) % _LANES, _LANES):
        for lane in range(_LANES):
            number = np.float64(x[i + lane])
            sums[lane] += number * number
    for i in range(len(x) - len(x) % _LANES, len(x)):
        number = np.float64(x[i])
        sums[i % _LANES] += number * number


@compiled
def _root(sums: np.ndarray) -> float:
    """The square root of a sum, whose parts are added in order."""
    total = 0.0
    for lane in range(_LANES):
        total += sums[lane]
    return sqrt(total)


@compiled
def norm(gradient: np.ndarray) -> float:
    """The Euclidean norm, summed in float64: number i belongs to part i mod 64, and the parts are added in order."""
    sums = np.zeros(_LANES)
    _add_squares(gradient, sums)
    return _root(sums)


@compiled
def power(base: float, exponent: int) -> float:
    """base to a whole power of at least 0, by squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


@compiled
def clip(gradient: np.ndarray, factor: np.float32, divisor: np.float32, largest: float) -> float:
    """Multiply a gradient by a factor, divide the product by a divisor, and scale the quotient down to a norm, in
    place. Returns the quotient's norm."""
    sums = np.zeros(_LANES)
    for begin in range(0, len(gradient), _TOGETHER):
        part = gradient[begin : begin + _TOGETHER]
        if factor != _ONE:
            for i in range(len(part)):
                part[i] *= factor
        if divisor != _ONE:
            for i in range(len(part)):
                part[i] /= divisor
        _add_squares(part, sums)
    found = _root(sums)
    if found > largest:
        scale = np.float32(largest / (found + 1e-6))
        for i in range(len(gradient)):
            gradient[i] *= scale
    return found


@compiled
def adam(
    x: np.ndarray,
    gradient: np.ndarray,
    factor: np.float32,
    divisor: np.float32,
    largest: float,
    first: np.ndarray,
    second: np.ndarray,
    steps: int,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> float:
    """One step of Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1) with a clipped gradient.

    Args:
        x: parameters, float32 [P].
        gradient: float32 [P].
        factor, divisor: what it is multiplied and divided by first.
        largest: norm to which the gradient is scaled down.
        first, second: moments, float32 [P].
        steps: the number of this step, from 1.
        rate, beta1, beta2, eps: hyperparameters.

    Returns:
        The gradient's norm before it was clipped.
    """
    found = clip(gradient, factor, divisor, largest)
    step = np.float32(rate / (1.0 - power(beta1, steps)))
    scale = np.float32(np.float64(1.0) / sqrt(1.0 - power(beta2, steps)))
    b1, b2, e = np.float32(beta1), np.float32(beta2), np.float32(eps)
    c1, c2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    # A denormal m moves no parameter above this: m / e * step is less than half the distance to the nearest float32.
    moved = np.float32(2.0**-100 * step / eps)
    for i in range(len(x)):
        g = gradient[i]
        m = shrunk(b1, first[i]) + c1 * g
        v = shrunk(b2, second[i]) + c2 * (g * g)
        first[i], second[i] = m, v
        rests = denormal(m) and abs(x[i]) > moved
        x[i] -= step * (select(rests, _ZERO, m) / (root(v) * scale + e))
    return found


@compiled
def radam(
    x: np.ndarray,
    gradient: np.ndarray,
    largest: float,
    first: np.ndarray,
    second: np.ndarray,
    steps: int,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> float:
    """One step of rectified Adam (Liu et al. 2020, https://arxiv.org/abs/1908.03265, algorithm 2). In the first steps,
    the variance of the second moment is unknown, and parameters move by the mean gradient alone. As in torch, this
    lasts as long as ρ is at most 5. Other arguments and the result are those of adam."""
    found = clip(gradient, _ONE, _ONE, largest)
    decayed = power(beta2, steps)
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * steps * decayed / (1.0 - decayed)
    rectified, factor = length > 5.0, 1.0
    if rectified:
        share = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        factor = sqrt(share) * sqrt(1.0 - decayed)
    step = np.float32(rate / (1.0 - power(beta1, steps)) * factor)
    b1, b2, e = np.float32(beta1), np.float32(beta2), np.float32(eps)
    c1, c2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    for i in range(len(x)):
        g = gradient[i]
        m = shrunk(b1, first[i]) + c1 * g
        v = shrunk(b2, second[i]) + c2 * (g * g)
        first[i], second[i] = m, v
        x[i] -= step * (m / (root(v) + e)) if rectified else step * m
    return found


@compiled
def adam_of_groups(
    x: np.ndarray,
    gradient: np.ndarray,
    factor: np.float32,
    divisor: np.float32,
    largest: float,
    first: np.ndarray,
    second: np.ndarray,
    groups: np.ndarray,
    rates: np.ndarray,
    beta1: float,
    beta2: float,
    eps: float,
    norms: np.ndarray,
) -> None:
    """One step of Adam for several groups of parameters. Other arguments are those of adam.

    Args:
        groups: where each begins and ends among the parameters, and the number of its step: int64 [G, 3].
        rates: float64 [G].
        norms: of gradients before they were clipped, float64 [G]; written.
    """
    for g in range(len(groups)):
        begin, end, steps = groups[g]
        own, moments = (x[begin:end], gradient[begin:end]), (first[begin:end], second[begin:end])
        norms[g] = adam(*own, factor, divisor, largest, *moments, steps, rates[g], beta1, beta2, eps)


@compiled
def follow(target: np.ndarray, x: np.ndarray, weight: np.float32) -> None:
    """Move the parameters of a target network, float32 [P], towards others [P] by a share of the distance."""
    copied = weight == _ONE  # since the sum below is rounded
    for i in range(len(x)):
        target[i] = x[i] if copied else target[i] + (x[i] - target[i]) * weight


@compiled
def rmsprop(
    x: np.ndarray,
    gradient: np.ndarray,
    largest: float,
    second: np.ndarray,
    rate: float,
    decay: float,
    eps: float,
    under: bool,
) -> float:
    """One step of RMSProp without momentum, not centered. Other arguments and the result are those of adam.

    Args:
        under: whether eps is added under the root, as in TensorFlow.
    """
    found = clip(gradient, _ONE, _ONE, largest)
    r, d, c = np.float32(rate), np.float32(decay), np.float32(1.0 - decay)
    # A sum with 0 is exact.
    within, beside = np.float32(eps if under else 0.0), np.float32(0.0 if under else eps)
    for i in range(len(x)):
        g = gradient[i]
        v = shrunk(d, second[i]) + c * (g * g)
        second[i] = v
        x[i] -= r * (g / (root(v + within) + beside))
    return found
