"""A mode of torch in which every operation has the same bits on every CPU.

Inside it, operations that round once for each number, in a way that IEEE 754 fixes, stay torch's: sums of two numbers,
products, quotients, comparisons, everything that only moves numbers. Operations whose bits depend on the CPU or its
libraries are replaced (lockstep.portable.operations): products of matrices, convolutions, sums over an axis, square
roots, exponentials and their relatives, random initial weights. Any other operation on floating-point numbers is
refused by name, so that nothing slips through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from lockstep.portable import numbers
from lockstep.portable.elementwise import refusal
from lockstep.portable.operations import OPERATIONS

_NAMES = """
    abs add all alias amax amin aminmax any argmax argmin argsort as_strided bitwise_and bitwise_not bitwise_or
    cat ceil clamp clamp_max clamp_min clone constant_pad_nd contiguous copy cummax detach diagonal diagonal_copy diff
    div empty empty_like empty_strided eq equal expand expand_copy eye fill flatten flip floor floor_divide full
    full_like gather ge gt index index_fill index_put index_select isfinite isinf isnan item le leaky_relu
    leaky_relu_backward lift_fresh lift_fresh_copy logical_and logical_not logical_or logical_xor lt masked_fill
    masked_scatter masked_select max maximum max_pool2d_with_indices max_pool2d_with_indices_backward min minimum
    movedim mul narrow ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like permute
    reciprocal relu remainder repeat repeat_interleave reshape resize resolve_conj resolve_neg roll round rsub
    scalar_tensor scatter scatter_add select select_backward select_scatter set_ sgn sign slice slice_backward
    slice_scatter sort split split_with_sizes squeeze stack sub t threshold_backward to topk transpose tril triu
    trunc unbind unflatten unfold unsqueeze view where zero zeros zeros_like _local_scalar_dense _reshape_alias _to_copy
    _unsafe_view c10d::send c10d::recv
"""
_EXACT = frozenset(_NAMES.split())
"""Operations that torch computes with the same bits everywhere; _ALPHA lists those that must not scale an argument."""
_ALPHA = {"add", "sub", "rsub"}
"""Operations with a factor alpha, which the CPU may multiply and add with a single rounding."""


def _floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, (list, tuple)) and any(map(_floating, value))


def _scaled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of _ALPHA: the factor is applied first."""
    kwargs = dict(kwargs)
    alpha = kwargs.pop("alpha", 1)
    if len(args) > 2:
        args, alpha = args[:2], args[2]
    if alpha != 1:
        scaled = 0 if func._schema.name == "aten::rsub" else 1
        args = tuple(x * alpha if place == scaled else x for place, x in enumerate(args))
    return func(*args, **kwargs)


class PortableArithmetic(TorchDispatchMode):
    """A context in which operations are portable.

    Raises:
        SettingsError: from operations that portable arithmetic does not cover.
    """

    _ways: ClassVar[dict[Any, Callable[..., Any] | None]] = {}
    """What replaces an operation, by operation. None leaves it to torch."""

    def __enter__(self) -> Self:
        numbers.enter(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        numbers.enter(-1)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, which takes a second in every process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            way = self._ways[func]
        except KeyError:
            way = self._ways[func] = self._way(func)
        return func(*args, **kwargs) if way is None else way(*args, **kwargs)

    def _way(self, func: Any) -> Callable[..., Any] | None:
        name = func._schema.name.removeprefix("aten::")
        base = name.removesuffix("_") if not name.startswith("__") else name
        replacement = OPERATIONS.get(name) or OPERATIONS.get(base)
        if replacement is not None and not func._can_decompose():  # other overloads have other arguments
            return _of_floats(func, _into(func, name, replacement))
        if base in _ALPHA:
            return lambda *args, **kwargs: _scaled(func, args, kwargs)
        if base in _EXACT or name in _EXACT:
            return None
        return lambda *args, **kwargs: self._decompose(func, args, kwargs)

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation by those that it consists of; refuse it if it is elementary."""
        with self:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        found = func(*args, **kwargs)
        if not (_floating(args) or _floating(list(kwargs.values())) or _floating(found)):
            return found
        raise refusal(f"torch's operation {func}")


def _of_floats(func: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement that leaves whole numbers to torch, whose results are exact."""

    def replaced(first: Any, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in (first, *args) if isinstance(x, Tensor)]
        if given and not any(map(_floating, given)):
            found = func(first, *args, **kwargs)
            if not _floating(found):
                return found
            first = first.to(found.dtype) if isinstance(first, Tensor) else first
        return replacement(first, *args, **kwargs)

    return replaced


def _into(func: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement that writes where an operation in place, or one with an output, writes."""
    outs = [argument.name for argument in func._schema.arguments if argument.is_out]
    if outs:

        def to_out(*args: Any, **kwargs: Any) -> Tensor:
            target, found = kwargs.pop(outs[0]), replacement(*args, **kwargs)
            return target.resize_(found.shape).copy_(found)

        return to_out
    written = func._schema.arguments and func._schema.arguments[0].alias_info
    if name.endswith("_") and written and written.is_write:
        return lambda target, *args, **kwargs: target.copy_(replacement(target, *args, **kwargs))
    return replacement
