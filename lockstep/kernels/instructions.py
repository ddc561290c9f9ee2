"""CPU instructions for Numba kernels. Each is a single operation that IEEE 754 fixes, or moves bits.

The compiler may neither reorder nor contract them. Kernels that multiply and add with a single rounding call `fma`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def scalar(function: Any) -> Any:
    """Compile a function of single numbers that its callers inline."""
    return njit(error_model="numpy", forceinline=True, nogil=True)(function)


def instruction(function: Any) -> Any:
    """Let kernels call a function that types its arguments and returns the generator of LLVM's code for them."""
    return intrinsic(function)


_OTHER = {
    types.float32: types.int32,
    types.float64: types.int64,
    types.int32: types.float32,
    types.int64: types.float64,
}


@instruction
def bitcast(typingctx: Any, x: Any) -> Any:
    """The number with the same bits: float32 and int32, or float64 and int64, into each other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return _OTHER[x](x), generate


@instruction
def sqrt(typingctx: Any, x: Any) -> Any:
    """The square root, correctly rounded: always the CPU's instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.sqrt", [arguments[0].type])
        return builder.call(function, arguments)

    return x(x), generate


def has(context: Any, feature: str) -> bool:
    """Whether the CPU that kernels are compiled for has a feature, as LLVM names it."""
    return f"+{feature}" in context.codegen().magic_tuple()[2].split(",")


def fused(context: Any, builder: Any, a: Any, b: Any, c: Any) -> Any:
    """LLVM's code for a * b + c with a single rounding, of numbers or vectors of one type."""
    kind = a.type
    vector = isinstance(kind, ir.VectorType)
    number = kind.element if vector else kind
    if number == ir.FloatType() and context.codegen().magic_tuple()[0].startswith("x86") and not has(context, "fma"):
        return fused_by_float64(builder, a, b, c)
    name = "llvm.fma." + (f"v{kind.count}" if vector else "") + number.intrinsic_name
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def fused_by_float64(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The same for float32 by other instructions, for CPUs without this one, on which the C library would compute
    numbers one by one.

    A product is exact in float64. The sum with c is rounded to odd: if it is not a float64 itself, it becomes the
    neighboring float64 whose last bit is 1. The result lies on the same side of every float32, and of the middle
    between any two, as the exact sum. So rounding it to float32 gives the result of a single rounding (Boldo and
    Melquiond 2008, https://doi.org/10.1109/TC.2007.70819).
    """

    kind = a.type
    lanes = kind.count if isinstance(kind, ir.VectorType) else 0

    def of(number: Any) -> Any:
        return ir.VectorType(number, lanes) if lanes else number

    def whole(number: int) -> Any:
        return ir.Constant(integers, [number] * lanes if lanes else number)

    floats, integers = of(ir.DoubleType()), of(ir.IntType(64))
    a, b, c = (builder.fpext(x, floats) for x in (a, b, c))
    product = builder.fmul(a, b)
    total = builder.fadd(product, c)
    added = builder.fsub(total, product)
    error = builder.fadd(builder.fsub(product, builder.fsub(total, added)), builder.fsub(c, added))  # exact (Knuth)
    bits = builder.bitcast(total, integers)
    signs = builder.xor(bits, builder.bitcast(error, integers))
    step = builder.or_(builder.ashr(signs, whole(63)), whole(1))  # towards the error: away from 0, or to it
    even = builder.sub(builder.and_(bits, whole(1)), whole(1))
    inexact = builder.sext(builder.fcmp_ordered("!=", error, ir.Constant(floats, None)), integers)  # not for NaN
    bits = builder.add(bits, builder.and_(step, builder.and_(even, inexact)))
    return builder.fptrunc(builder.bitcast(bits, floats), kind)


@instruction
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with a single rounding. All must have the same type. Without the CPU's instruction it is slow, but the
    bits are the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return fused(context, builder, *arguments)

    return a(a, b, c), generate


@instruction
def copysign(typingctx: Any, x: Any, sign: Any) -> Any:
    """x with the sign of another number of the same type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = arguments[0].type
        function = builder.module.declare_intrinsic("llvm.copysign", [number], ir.FunctionType(number, [number] * 2))
        return builder.call(function, arguments)

    return x(x, sign), generate


@instruction
def select(typingctx: Any, condition: Any, x: Any, y: Any) -> Any:
    """x where a bool holds, else y, without a branch. Both have the same type, and both are computed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return x(types.boolean, x, x), generate
