"""Mathematical functions of single numbers, for Numba kernels, with identical bits on every CPU.

IEEE 754 fixes the result of every operation in this file, and the code fixes their order. No function calls the C
library, whose results differ between versions and CPUs, and the compiler may neither reorder nor contract operations.
There are no branches, so the compiler vectorizes a loop over contiguous arrays for any width of the CPU's vectors.

Errors are in ulp (units in the last place of the exact result, in the type of the result) and were measured. IEEE 754
leaves the sign and payload of NaN open, so only these bits may differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.instructions import bitcast, copysign, instruction, scalar, select, sqrt

_f = np.float32


# Numba computes with int64 wherever it sees int32, which would halve the width of vectors. So what needs integers of
# 32 bits is written for LLVM.
_INT = ir.IntType(32)
_ROUND = _f(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, in the lowest bits
_ROUND64 = 6755399441055744.0  # 1.5 * 2**52


@instruction
def _power_of_two(typingctx: Any, x: Any) -> Any:
    """2**n of a float32 n + _ROUND, for n from -126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.shl(builder.bitcast(arguments[0], _INT), _INT(23))
        return builder.bitcast(builder.add(bits, _INT(127 << 23)), ir.FloatType())

    return types.float32(types.float32), generate


def _exponent_bits(builder: Any, x: Any) -> tuple[Any, Any]:
    bits = builder.bitcast(x, _INT)
    return bits, builder.ashr(builder.sub(bits, _INT(0x3F3504F3)), _INT(23))


@instruction
def _exponent(typingctx: Any, x: Any) -> Any:
    """The float32 e of x = m * 2**e, for a positive normal float32 x and m from sqrt(1/2) to sqrt(2)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(_exponent_bits(builder, arguments[0])[1], ir.FloatType())

    return types.float32(types.float32), generate


@instruction
def _mantissa(typingctx: Any, x: Any) -> Any:
    """The float32 m of x = m * 2**e, as for _exponent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, exponent = _exponent_bits(builder, arguments[0])
        return builder.bitcast(builder.sub(bits, builder.shl(exponent, _INT(23))), ir.FloatType())

    return types.float32(types.float32), generate


_ZERO, _HALF, _ONE, _TWO = _f(0), _f(0.5), _f(1), _f(2)
_INF, _NAN = _f(np.inf), _f(np.nan)
_WHOLE = _f(2.0**23)  # from here on, every float32 is a whole number


@scalar
def round(x):
    """The nearest whole float32, the even one of two. Exact."""
    near = copysign((abs(x) + _WHOLE) - _WHOLE, x)
    return select(abs(x) < _WHOLE, near, x)


@scalar
def floor(x):
    """The greatest whole float32 that is at most x. Exact."""
    near = round(x)
    return select(near > x, near - _ONE, near)


_LOG2E = _f(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = _f(0.693359375), _f(-2.12194440054690583e-4)
_EXP = tuple(map(_f, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)))


@scalar
def exp(x):
    """e**x of a float32, denormal results included. Error at most 1 ulp."""
    x = select(x > _f(89), _f(89), x)
    x = select(x < _f(-104), _f(-104), x)
    n = (x * _LOG2E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_EXP[0] * r + _EXP[1]) * r + _EXP[2]) * r + _EXP[3]) * r + _EXP[4]) * r + _EXP[5]
    p = (p * (r * r) + r) + _ONE
    half = n * _HALF + _ROUND  # in two steps, because 2**n may be denormal or too large
    rest = (n - (half - _ROUND)) + _ROUND
    return (p * _power_of_two(half)) * _power_of_two(rest)


@scalar
def expm1(x):
    """e**x - 1 of a float32, without cancellation near 0. Error at most 8 ulp."""
    t = tanh(_HALF * x)
    return select(abs(x) < _ONE, (_TWO * t) / (_ONE - t), exp(x) - _ONE)


_LOG = tuple(
    map(
        _f,
        (
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ),
    )
)
_LEAST_NORMAL, _2_TO_24 = _f(2.0**-126), _f(2.0**24)


@scalar
def log(x):
    """The natural logarithm of a float32, also of denormal ones. Error at most 1 ulp."""
    tiny = x < _LEAST_NORMAL
    y = select(tiny, x * _2_TO_24, x)
    e = _exponent(y) - select(tiny, _f(24), _ZERO)
    f = _mantissa(y) - _ONE
    z = f * f
    p = ((((_LOG[0] * f + _LOG[1]) * f + _LOG[2]) * f + _LOG[3]) * f + _LOG[4]) * f + _LOG[5]
    p = ((p * f + _LOG[6]) * f + _LOG[7]) * f + _LOG[8]
    p = (p * f) * z + e * _LN2_LOW
    result = (f + (p - _HALF * z)) + e * _LN2_HIGH
    result = select(x == _INF, x, result)
    result = select(x == _ZERO, -_INF, result)
    return select(x >= _ZERO, result, _NAN)


_TANH_TOP = tuple(
    map(
        _f,
        (
            -2.76076847742355e-16,
            2.00018790482477e-13,
            -8.60467152213735e-11,
            5.12229709037114e-08,
            1.48572235717979e-05,
            6.37261928875436e-04,
            4.89352455891786e-03,
        ),
    )
)
_TANH_BOTTOM = tuple(map(_f, (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)))
_TANH_END = _f(9.1)


@scalar
def tanh(x):
    """The hyperbolic tangent of a float32. Error at most 6 ulp."""
    y = select(x > _TANH_END, _TANH_END, x)
    y = select(y < -_TANH_END, -_TANH_END, y)
    z = y * y
    p = ((_TANH_TOP[0] * z + _TANH_TOP[1]) * z + _TANH_TOP[2]) * z + _TANH_TOP[3]
    p = ((p * z + _TANH_TOP[4]) * z + _TANH_TOP[5]) * z + _TANH_TOP[6]
    q = ((_TANH_BOTTOM[0] * z + _TANH_BOTTOM[1]) * z + _TANH_BOTTOM[2]) * z + _TANH_BOTTOM[3]
    result = (y * p) / q
    result = select(result > _ONE, _ONE, result)
    result = select(result < -_ONE, -_ONE, result)
    return select(abs(x) < _f(4e-4), x, result)


@scalar
def sigmoid(x):
    """1 / (1 + e**-x) of a float32. Error at most 3 ulp."""
    t = exp(-abs(x))
    return select(x >= _ZERO, _ONE, t) / (_ONE + t)


_ATANH = tuple(_f(2.0 / n) for n in (17, 15, 13, 11, 9, 7, 5, 3))


@scalar
def softplus(x):
    """log(1 + e**x) of a float32. Error at most 3 ulp."""
    t = exp(-abs(x))
    s = t / (_TWO + t)  # log(1 + t) is twice the inverse hyperbolic tangent of s, which is at most 1/3
    z = s * s
    p = (((_ATANH[0] * z + _ATANH[1]) * z + _ATANH[2]) * z + _ATANH[3]) * z + _ATANH[4]
    p = ((p * z + _ATANH[5]) * z + _ATANH[6]) * z + _ATANH[7]
    return select(x <= _ZERO, _ZERO, x) + (_TWO * s + s * (z * p))


# Wichura's algorithm AS 241, PPND7.
_NEAR_TOP = tuple(map(_f, (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00)))
_NEAR_BOTTOM = tuple(map(_f, (6.7187563600e01, 7.8757757664e01, 1.7895169469e01)))
_FAR_TOP = tuple(map(_f, (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00)))
_FAR_BOTTOM = tuple(map(_f, (1.2021132975e-01, 7.3700164250e-01)))
_END_TOP = tuple(map(_f, (1.7337203997e-02, 4.2868294337e-01, 3.0812263860e00, 6.6579051150e00)))
_END_BOTTOM = tuple(map(_f, (1.2258202635e-02, 2.4197894225e-01)))


@scalar
def ndtri(p):
    """The number that a standard normal variable is below with probability p, of a float32. Error at most 5 ulp."""
    q = p - _HALF
    z = _f(0.180625) - q * q
    near = ((_NEAR_TOP[0] * z + _NEAR_TOP[1]) * z + _NEAR_TOP[2]) * z + _NEAR_TOP[3]
    near = q * (near / (((_NEAR_BOTTOM[0] * z + _NEAR_BOTTOM[1]) * z + _NEAR_BOTTOM[2]) * z + _ONE))
    r = sqrt(-log(select(q < _ZERO, p, _ONE - p)))
    s = r - _f(1.6)
    far = ((_FAR_TOP[0] * s + _FAR_TOP[1]) * s + _FAR_TOP[2]) * s + _FAR_TOP[3]
    far = far / ((_FAR_BOTTOM[0] * s + _FAR_BOTTOM[1]) * s + _ONE)
    s = r - _f(5)
    end = ((_END_TOP[0] * s + _END_TOP[1]) * s + _END_TOP[2]) * s + _END_TOP[3]
    end = end / ((_END_BOTTOM[0] * s + _END_BOTTOM[1]) * s + _ONE)
    tail = select(r <= _f(5), far, end)
    tail = select(r == _INF, _INF, tail)
    return select(abs(q) <= _f(0.425), near, copysign(tail, q))


# The single-precision coefficients of Cephes (Moshier) for erf below 1 and for erfc above.
_ERF = tuple(
    map(
        _f,
        (
            7.853861353153693e-5,
            -8.010193625184903e-4,
            5.188327685732524e-3,
            -2.685381193529856e-2,
            1.128358514861418e-1,
            -3.761262582423300e-1,
            1.128379165726710,
        ),
    )
)
_ERFC_NEAR = tuple(
    map(
        _f,
        (
            2.326819970068386e-2,
            -1.387039388740657e-1,
            3.687424674597105e-1,
            -5.824733027278666e-1,
            6.210004621745983e-1,
            -4.944515323274145e-1,
            3.404879937665872e-1,
            -2.741127028184656e-1,
            5.638259427386472e-1,
        ),
    )
)
_ERFC_FAR = tuple(
    map(
        _f,
        (
            -1.047766399936249e1,
            1.297719955372516e1,
            -7.495518717768503,
            2.921019019210786,
            -1.015265279202700,
            4.218463358204948e-1,
            -2.820767439740514e-1,
            5.641895067754075e-1,
        ),
    )
)


@scalar
def _erf_below_1(x):
    s = x * x
    p = ((((_ERF[0] * s + _ERF[1]) * s + _ERF[2]) * s + _ERF[3]) * s + _ERF[4]) * s + _ERF[5]
    return x * (p * s + _ERF[6])


@scalar
def _erfc_above_1(x):
    safe = select(x < _ONE, _ONE, x)
    q = _ONE / safe
    w = q * q
    n, f = _ERFC_NEAR, _ERFC_FAR
    near = (((n[0] * w + n[1]) * w + n[2]) * w + n[3]) * w + n[4]
    near = (((near * w + n[5]) * w + n[6]) * w + n[7]) * w + n[8]
    far = (((f[0] * w + f[1]) * w + f[2]) * w + f[3]) * w + f[4]
    far = ((far * w + f[5]) * w + f[6]) * w + f[7]
    return (exp(-(safe * safe)) * q) * select(safe < _TWO, near, far)


@scalar
def erf(x):
    """The error function of a float32. Error at most 3 ulp."""
    beyond = copysign(_ONE - _erfc_above_1(abs(x)), x)
    return select(abs(x) < _ONE, _erf_below_1(x), beyond)


@scalar
def erfc(x):
    """1 - erf(x) of a float32. The error is at most 2e-7 of the result, and x**2 ulp where x is large."""
    tail = _erfc_above_1(abs(x))
    return select(abs(x) < _ONE, _ONE - _erf_below_1(x), select(x > _ZERO, tail, _TWO - tail))


_2_OVER_PI = 6.36619772367581382433e-01
_PI_2_HIGH, _PI_2_MIDDLE, _PI_2_LOW = 1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
_LARGEST_ANGLE = 1e6


@scalar
def _sin_or_cos(x, turn):
    """The sine of x + turn * pi / 2."""
    shifted = x * _2_OVER_PI + _ROUND64
    n = shifted - _ROUND64
    quarter = bitcast(shifted) + turn
    a = x - n * _PI_2_HIGH  # exact, as is the next product
    b = n * _PI_2_MIDDLE
    r = a - b
    low = n * _PI_2_LOW - ((a - r) - b)
    y = r - low
    rest = (r - y) - low
    z = y * y
    v = z * y
    p = (((_SIN[0] * z + _SIN[1]) * z + _SIN[2]) * z + _SIN[3]) * z + _SIN[4]
    sine = y - ((z * (0.5 * rest - v * p) - rest) - v * _SIN[5])
    p = (((((_COS[0] * z + _COS[1]) * z + _COS[2]) * z + _COS[3]) * z + _COS[4]) * z + _COS[5]) * z
    w = 1.0 - 0.5 * z
    cosine = w + (((1.0 - w) - 0.5 * z) + (z * p - y * rest))
    result = select((quarter & 1) != 0, cosine, sine)
    result = select((quarter & 2) != 0, -result, result)
    return select(abs(x) <= _LARGEST_ANGLE, result, np.nan)


@scalar
def sin(x):
    """The sine of a float64 up to a million; NaN beyond. Error at most 1 ulp."""
    return _sin_or_cos(x, 0)


@scalar
def cos(x):
    """The cosine of a float64 up to a million; NaN beyond. Error at most 1 ulp."""
    return _sin_or_cos(x, 1)


@scalar
def sin32(x):
    """The sine of a float32 up to a million; NaN beyond. Error at most 0.501 ulp."""
    return _f(_sin_or_cos(np.float64(x), 0))


@scalar
def cos32(x):
    """The cosine of a float32 up to a million; NaN beyond. Error at most 0.501 ulp."""
    return _f(_sin_or_cos(np.float64(x), 1))
