"""Operations on float32 that may be denormal (below 2**-126), at full speed and with the same bits.

Many CPUs take a hundred times as long for an instruction that reads or writes a denormal number. Moments of gradients
often contain them. If a unit of ReLU is dead, its moments shrink by a factor at each step, until the product with the
factor is rounded to the same denormal number. These functions express a number as a multiple of 2**-149, and compute
with this whole number instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lockstep.kernels.instructions import fused, instruction, scalar, select, sqrt

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_LEAST_NORMAL = 1 << 23
"""The first number that is not denormal, as bits."""
_MAGNITUDE, _SIGN = 0x7FFFFFFF, 0x80000000
_WHOLE = 2.0**23
"""From here to its double, neighboring float32 are 1 apart, so a sum is rounded to a whole number. Its bits, too, grow
by 1."""
_TWO, _ONE, _SCALE = np.float32(2), np.float32(1), np.float32(2.0**-75)


def _magnitude(builder: Any, x: Any) -> tuple[Any, Any]:
    """The bits of a float32, and those of its magnitude."""
    bits = builder.bitcast(x, _INT)
    return bits, builder.and_(bits, _INT(_MAGNITUDE))


@instruction
def denormal(typingctx: Any, x: Any) -> Any:
    """Whether a float32 is denormal or 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, magnitude = _magnitude(builder, arguments[0])
        return builder.icmp_unsigned("<", magnitude, _INT(_LEAST_NORMAL))

    return types.boolean(types.float32), generate


@instruction
def units(typingctx: Any, x: Any) -> Any:
    """The magnitude of a denormal float32 in units of 2**-149, as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, magnitude = _magnitude(builder, arguments[0])
        return builder.sitofp(magnitude, _FLOAT)

    return types.float32(types.float32), generate


@instruction
def shrunk(typingctx: Any, factor: Any, x: Any) -> Any:
    """factor * x for float32 numbers, with a factor from 0 to 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor, x = arguments
        bits, magnitude = _magnitude(builder, x)
        small = builder.icmp_unsigned("<", magnitude, _INT(_LEAST_NORMAL))
        whole, nothing = ir.Constant(_FLOAT, _WHOLE), ir.Constant(_FLOAT, -0.0)
        number = builder.select(small, builder.sitofp(magnitude, _FLOAT), x)
        found = fused(context, builder, factor, number, builder.select(small, whole, nothing))
        multiple = builder.sub(builder.bitcast(found, _INT), builder.bitcast(whole, _INT))
        product = builder.or_(multiple, builder.and_(bits, _INT(_SIGN)))
        return builder.select(small, builder.bitcast(product, _FLOAT), found)

    return types.float32(types.float32, types.float32), generate


@scalar
def root(x):
    """The square root of a float32 of at least 0, correctly rounded."""
    small = denormal(x)
    return sqrt(select(small, _TWO * units(x), x)) * select(small, _SCALE, _ONE)
