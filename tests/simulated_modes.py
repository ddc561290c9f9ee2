"""The two torch modes of the simulated GPU: Functions sees every call from Python, Kernels every kernel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from simulated_books import (
    BACK,
    COPY,
    CPU,
    FILL,
    KERNEL,
    PAGEABLE,
    PEER,
    PINNED,
    SORTED,
    STAGED,
    Books,
    tensors,
    unseen,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Names of kernels, without "aten::", with the overload where only that one is meant.
_ANY_DEVICES = {
    *("_to_copy", "_local_scalar_dense", "detach", "detach_", "lift_fresh", "set_", "record_stream"),
    *("view_as", "expand_as", "reshape_as", "_has_same_storage_numel", "is_same_size"),
}
"""Take tensors of several devices."""
_CPU_SCALARS = {
    *("where", "masked_fill", "masked_fill_", "index_put", "index_put_", "_index_put_impl_"),
    *("fill", "fill_", "lerp", "lerp_"),
}
"""Take a CPU's tensor without dimensions beside a GPU's tensors, as all pointwise kernels do."""
_NUMBERS = {"_local_scalar_dense", "item", "is_nonzero"}
"""Read a number. Inference mode leaves the last ones whole."""
_WAITS = _NUMBERS | {
    *("equal", "nonzero", "masked_select", "repeat_interleave.Tensor", "_unique2", "unique_dim", "unique_consecutive")
}
"""Have a result that the host needs, or whose shape it needs."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_NEW = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_NO_KERNEL = (
    _NEW
    | _NUMBERS
    | {
        *("detach", "detach_", "alias", "view", "_unsafe_view", "_reshape_alias", "lift_fresh", "set_", "is_same_size"),
        "record_stream",
    }
)
_SORTS = {
    *("scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_"),
    *("scatter.src", "scatter_.src", "embedding_dense_backward"),
}
"""Are deterministic if they should be, by way of a sort."""
_NOT_DETERMINISTIC = {
    *(
        "kthvalue",
        "median.dim",
        "nanmedian.dim",
        "histc",
        "put_",
        "_ctc_loss_backward",
        "_embedding_bag_dense_backward",
    ),
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    "upsample_trilinear3d_backward",
}
_NOT_DETERMINISTIC_IN_FLOATS = {"cumsum", "cumsum_"}


class _Kernel(NamedTuple):
    """What a kernel's name says."""

    name: str
    names: frozenset[str]
    """With and without the overload."""
    runs: bool
    accesses: bool
    special: bool
    """Whether deterministic algorithms change what it does."""
    waits: bool


@functools.cache
def _kernel(func: Any) -> _Kernel:
    name = func._schema.name.removeprefix("aten::")
    names = frozenset((name, f"{name}.{func._overloadname}"))
    runs = not (func.is_view or name in _NO_KERNEL)
    special = bool(names & (_NEW | _SORTS | _NOT_DETERMINISTIC | _NOT_DETERMINISTIC_IN_FLOATS))
    return _Kernel(name, names, runs, runs or name in _NUMBERS, special, bool(names & _WAITS))


class Kernels(TorchDispatchMode):
    """Refuses what CUDA refuses, and counts kernels, copies and syncs."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Each process would import the compiler for two seconds to be told so."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        books, given = self._books, tensors(args, kwargs)
        devices = [*map(books.device, given)]
        on = next((device for device in devices if device is not CPU), None) if given else books.default
        if on is None:
            return func(*args, **kwargs)
        name, names, runs, accesses, special, waits = _kernel(func)
        if accesses:
            books.shared.check(func, args, kwargs)
            books.streams.access(func, args, kwargs, given, devices, on)
        if name == "copy_":
            return self._copy(func, args, kwargs)
        if any(device != on for device in devices):
            self._check_devices(func, name, args, list(zip(given, devices, strict=True)), on)
        if special and torch.are_deterministic_algorithms_enabled():
            self._check_determinism(names, args)
        if waits:
            if name in _NUMBERS:
                books.note(BACK, args[0].nbytes)
            books.wait()
        if name in _INDEXING:
            self._count_indices([x for x in args[1] if x is not None])
        result = func(*args, **kwargs)
        if name == "clone":
            books.note(COPY, args[0].nbytes)
        elif runs:
            books.note(KERNEL)
        for x in tensors(result):
            if not any(x is y for y in given):
                books.put(x, on)
                if runs:
                    books.streams.made(x, on)
        return result

    def _check_devices(self, func: Any, name: str, args: Any, given: list[Any], on: torch.device) -> None:
        if name in _ANY_DEVICES:
            return
        scalars = torch.Tag.pointwise in func.tags or name in _CPU_SCALARS
        indices = {id(x) for x in args[1]} if name in _INDEXING and self._books.device(args[0]) == on else set()
        for x, device in given:
            host = device.type == "cpu" and (id(x) in indices or (scalars and x.dim() == 0))
            if device != on and not host:
                self._books.refuse(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{on} and {device}: {name}, shape {list(x.shape)}"
                )

    def _check_determinism(self, names: frozenset[str], args: Any) -> None:
        books = self._books
        fills: Any = torch.utils.deterministic  # whose one setting type checkers cannot see
        if names & _NEW and fills.fill_uninitialized_memory:
            books.note(FILL)
        if names & _SORTS:
            books.note(SORTED)
        floats = names & _NOT_DETERMINISTIC_IN_FLOATS and args[0].is_floating_point()
        if names & _NOT_DETERMINISTIC or floats:
            only = torch.is_deterministic_algorithms_warn_only_enabled()
            text = (
                f"{min(names)} does not have a deterministic implementation, but you set "
                f"'torch.use_deterministic_algorithms(True{', warn_only=True' if only else ''})'"
            )
            if not only:
                books.refuse(text)
            books.fault(text)
            warnings.warn(text, stacklevel=2)

    def _count_indices(self, indices: list[Tensor]) -> None:
        for index in indices:
            if self._books.device(index).type == "cpu" and index.dim():
                self._books.note(PINNED if self._books.is_pinned(index) else PAGEABLE, index.nbytes)
                self._books.wait()
            if index.dtype in (torch.bool, torch.uint8):  # the host needs to know how many are true
                self._books.wait()

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """dst.copy_(src, non_blocking): what is gathered, spread or cast where, as in torch's Copy.cu."""
        books, dst, src = self._books, args[0], args[1]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        to, of, size = books.device(dst), books.device(src), src.nbytes
        if not dst.numel():
            return func(*args, **kwargs)
        if to.type == of.type:
            books.note(COPY if to == of else PEER, size)
            return func(*args, **kwargs)
        cast, whole = dst.dtype != src.dtype, src.expand_as(dst).is_contiguous()
        direct = not cast and dst.shape == src.shape and _same_order(dst, src)
        if of.type == "cpu":
            staged = not direct and (not whole or (cast and waits))
            kind = STAGED if staged else PINNED if books.is_pinned(src) else PAGEABLE
            books.note(kind, size)
            if not direct and (not dst.is_contiguous() or (cast and not waits)):
                books.note(KERNEL)
            if waits:
                books.wait()
            result = func(*args, **kwargs)
            if kind == PINNED and not waits and books.tape is None:
                books.departs(src)
            return result
        if not direct and (not whole or cast):
            books.note(KERNEL)
        later = not waits and books.is_pinned(dst) and (direct or dst.is_contiguous())
        books.note(BACK, size)
        if not later:
            books.wait()
        result = func(*args, **kwargs)
        if later and books.tape is None:
            books.arrives(dst)
        return result


class Functions(TorchFunctionMode):
    """Says where tensors lie, makes them there, and moves them."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books
        self._own: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: books.device,  # type: ignore[attr-defined]
            Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda x: not self._is_cuda(x),  # type: ignore[attr-defined]
            Tensor.get_device: lambda x: books.device(x).index if self._is_cuda(x) else -1,
            Tensor.is_pinned: lambda x, device=None: books.is_pinned(x),
            Tensor.pin_memory: lambda x, device=None: books.pin(x.clone()),
            Tensor.to: self._to,
            Tensor.type_as: self._to,
            Tensor.cpu: lambda x, **kwargs: self._to(x, "cpu", **kwargs),
            Tensor.cuda: lambda x, device="cuda", *args, **kwargs: self._to(x, device, *args, **kwargs),
            Tensor.tolist: lambda x: self._to(x, "cpu").tolist(),
            Tensor.numpy: self._numpy,
            Tensor.__array__: lambda x, *args, **kwargs: self._numpy(x).__array__(*args, **kwargs),
            Tensor.__setitem__: self._set_item,
            Tensor.__deepcopy__: self._deep_copy,
            Tensor.new_tensor: self._new_tensor,
            torch.tensor: lambda *args, **kwargs: self._of_values(torch.tensor, *args, **kwargs),
            torch.as_tensor: lambda *args, **kwargs: self._of_values(torch.as_tensor, *args, **kwargs),
            torch.asarray: lambda *args, **kwargs: self._of_values(torch.asarray, *args, **kwargs),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (own := self._own.get(func)) is not None:
            return own(*args, **kwargs)
        books, pinned = self._books, kwargs.pop("pin_memory", False)
        if (device := kwargs.get("device")) is not None:
            device = books.wanted(device)
            kwargs["device"] = CPU if device.type == "cuda" else device
            place = device
        else:
            places = map(books.device, tensors(args, kwargs))
            place = next((each for each in places if each is not CPU), None)
        with books.placing(place):
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if device is not None and device.type != "meta":
                books.put(result, device)
            if pinned:
                books.pin(result)
        return result

    def _is_cuda(self, x: Tensor) -> bool:
        return self._books.device(x).type == "cuda"

    def _numpy(self, x: Tensor, *, force: bool = False) -> Any:
        if self._is_cuda(x):
            if not force:
                self._books.refuse(
                    f"can't convert {self._books.device(x)} device type tensor to numpy. Use Tensor.cpu() to copy the "
                    "tensor to host memory first.",
                    TypeError,
                )
            x = self._to(x.detach(), "cpu")
        return x.numpy(force=force)

    def _set_item(self, x: Tensor, index: Any, value: Any) -> None:
        with self._books.placing(self._books.device(x)):
            if isinstance(value, (bool, int, float)) and self._is_cuda(x):  # C++ would make it where x really lies
                value = torch.full((), value, dtype=x.dtype)
            x[index] = value

    def _deep_copy(self, x: Tensor, memo: Any) -> Tensor:
        """Copies memory unseen by Kernels."""
        result = x.__deepcopy__(memo)
        if result.untyped_storage()._cdata != x.untyped_storage()._cdata:
            self._books.put(result, self._books.device(x))
        return result

    def _new_tensor(self, x: Tensor, values: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        kwargs.setdefault("dtype", x.dtype)
        return self._of_values(torch.tensor, values, device=device or self._books.device(x), **kwargs)

    def _of_values(self, make: Callable[..., Tensor], values: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A tensor of numbers that the host has."""
        books, device, pinned = self._books, kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if device is None:
            device = books.device(values) if isinstance(values, Tensor) else CPU
        device = books.wanted(device)
        with books.placing(None):
            result = make(values, *args, **kwargs)
        if device != books.device(result):
            if books.tape is not None:
                books.refuse("a tensor is made of the host's values while a graph is captured")
            result = self._to(result.detach(), device).requires_grad_(result.requires_grad)
        return books.pin(result) if pinned else result

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        books, copy = self._books, kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (books.device(args[0]), args[0].dtype, *args[1:])
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        with torch._C.DisableTorchFunction():
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        here = books.device(x)
        target = here if device is None else books.wanted(device)
        dtype, memory_format = dtype or x.dtype, memory_format or torch.preserve_format
        if target == here or target.type == "meta":
            with books.placing(here):
                place = CPU if target == here else target
                return x.to(place, dtype, copy=copy, memory_format=memory_format)
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "The simulated GPU does not copy tensors that require gradients to other devices."
            )
        with unseen():
            like = torch.empty_like(x, dtype=dtype, device="meta", memory_format=memory_format)
        with books.placing(target):
            result = torch.empty_strided(like.shape, like.stride(), dtype=dtype)
        if target.type == "cpu" and non_blocking:
            books.pin(result)
        return result.copy_(x, non_blocking=non_blocking)


def _same_order(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape have their numbers in the same order, without gaps."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    size = 1
    for stride, count in sorted(zip(x.stride(), x.shape)):
        if count > 1 and stride != size:
            return False
        size *= count
    return x.stride() == y.stride()
