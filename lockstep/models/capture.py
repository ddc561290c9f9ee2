"""Inference without the cost of Python modules: a forward pass is recorded once, as a flat list of torch calls.

The calls run the same kernels as the model, in the same order and on the same shapes, so the bits are equal. Results
that depend only on the weights (casts, folded convolution kernels) are computed once per version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.models.arithmetic import arithmetic
from lockstep.models.base import ModelOutput, PolicyModel
from lockstep.system.generators import no_draws

_FORWARD_DREW = (
    "Models act in evaluation mode, in which torch.nn.Dropout does nothing: draw only while self.training is true. A "
    "model that explores by noise takes it from set_noise."
)


class Inputs(NamedTuple):
    """The arguments of PolicyModel.forward."""

    obs: Any
    start: Tensor
    state: Tensor
    prev_action: Tensor | None
    prev_reward: Tensor | None

    def leaves(self) -> list[Tensor]:
        """All tensors."""
        leaves = [self.start, self.state, *(self.obs.values() if isinstance(self.obs, dict) else (self.obs,))]
        if self.prev_action is not None and self.prev_reward is not None:
            leaves += self.prev_action, self.prev_reward
        return leaves

    def map(self, fn: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs after a function has been applied to each tensor."""
        return Inputs(*(map_structure(fn, x) for x in self))


class Inference:
    """Calls a model with inputs of one shape. A forward pass cannot be recorded if its calls depend on the values of
    its input, or if it changes the model. In this case the model itself is called.

    Args:
        model: made by for_acting. Call refresh after its weights or statistics have changed.
        fixed: whether results that depend only on the weights keep their addresses, as CUDA graphs require.
    """

    def __init__(self, model: PolicyModel, *, fixed: bool = False) -> None:
        self._model, self._fixed = model.eval(), fixed
        self._recorded: Program | None = None
        self._layout: list[Any] | None = None
        """Shapes and strides of the inputs with which the calls were recorded."""
        self._stale = False
        self._draws_nothing = False
        """Whether a call has shown that the model itself draws no random numbers."""

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """The context for acting: for evaluating the model and sampling from its distribution."""
        return arithmetic(self._model)

    def __call__(
        self, obs: Any, start: Tensor, state: Tensor, prev_action: Tensor | None, prev_reward: Tensor | None
    ) -> tuple[ModelOutput, Tensor]:
        """As PolicyModel.forward, in inference mode."""
        return self.evaluate(Inputs(obs, start, state, prev_action, prev_reward))

    def evaluate(self, inputs: Inputs) -> tuple[ModelOutput, Tensor]:
        """As PolicyModel.forward, in inference mode."""
        leaves = inputs.leaves()
        if self._stale or self._layout != [(x.shape, x.stride()) for x in leaves]:
            self.prepared(inputs)
        if self._recorded is None:
            return self._called(inputs)
        policy, value, state = self._recorded.run(*leaves)
        return ModelOutput(policy, value), state

    def _called(self, inputs: Inputs) -> tuple[ModelOutput, Tensor]:
        """Call the model itself."""
        if self._draws_nothing:
            return _checked(self._model, inputs, self._model(*inputs))
        with no_draws(f"{type(self._model).__name__}.forward", inputs.start.device, _FORWARD_DREW):
            answer = self._model(*inputs)
        self._draws_nothing = True
        return _checked(self._model, inputs, answer)

    def prepared(self, inputs: Inputs) -> Program | None:
        """The recorded calls for inputs of these shapes, with current weights; None if the model itself is called.
        After this, evaluate only runs these calls, so that a CUDA graph can capture it."""
        layout = [(x.shape, x.stride()) for x in inputs.leaves()]
        if layout != self._layout:
            self._layout, self._stale = layout, False
            self._model.weights_changed()
            self._recorded = self._record(inputs)
        if self._stale:
            self._stale = False
            if self._recorded is None:
                self._model.weights_changed()
            else:
                self._recorded.refresh(in_place=self._fixed)
        return self._recorded

    def load(self, vector: Tensor, *, lasts: bool) -> bool:
        """Take the parameters of a learner's model from one vector and return True; then call refresh. If the vector's
        layout may differ from this model's, do nothing and return False.

        Args:
            vector: fp32 [N], the parameters.
            lasts: whether the vector does not change until the next call. Then it need not be copied.
        """
        return False

    def set_noise(self, uniform: Tensor | None) -> None:
        """As PolicyModel.set_noise, from the next call on."""
        self._model.set_noise(uniform)
        self.refresh()

    def refresh(self) -> None:
        """Use the model's current weights and statistics from the next call on."""
        self._stale = True

    def _record(self, inputs: Inputs) -> Program | None:
        recorder = _Recorder()
        try:
            # Only outside inference mode do tensors count in-place changes.
            with torch.inference_mode(False), torch.no_grad():
                copies = inputs.map(torch.clone)
                with no_draws(f"{type(self._model).__name__}.forward", inputs.start.device, _FORWARD_DREW), recorder:
                    answer = self._model(*copies)
            output, state = _checked(self._model, inputs, answer)
            return Program(recorder.calls, copies.leaves(), [output.policy, output.value, state])
        except _NotRecordable:
            return None


class MakesInference(Protocol):
    """Kernels that may evaluate models faster: see lockstep.algorithms.kernel_table."""

    def inference(self, model: Any) -> Inference | None:
        """The object that evaluates an acting copy of a model; None if the model does this itself."""


def inference_of(kernels: MakesInference | None, model: PolicyModel, *, fixed: bool = False) -> Inference:
    """The object that evaluates an acting copy of a model, given its experiment's kernels. `fixed` is as for
    Inference."""
    found = None if kernels is None else kernels.inference(model)
    return Inference(model, fixed=fixed) if found is None else found


def _checked(model: PolicyModel, inputs: Inputs, answer: Any) -> tuple[ModelOutput, Tensor]:
    """What a model's forward returned.

    Raises:
        SettingsError: it is not an output and a state, or has other shapes than PolicyModel.forward says.
    """
    who = f"{type(model).__name__}.forward"
    if not (type(answer) is tuple and len(answer) == 2 and isinstance(answer[0], ModelOutput)):
        raise SettingsError(f"{who} returned a {type(answer).__name__}. It must return (ModelOutput(...), state).")
    output, state = answer
    rows, numbers = tuple(inputs.start.shape), model.distribution.num_params
    for what, found, wanted, advice in (
        ("policy", output.policy, (*rows, numbers), f"[T, B, P], with the {numbers} parameters of its distribution"),
        ("value", output.value, rows, "[T, B]: a last layer of one unit needs .squeeze(-1)"),
        ("state", state, tuple(inputs.state.shape), "[B, K], with its state_size K (0 without memory)"),
    ):
        if not isinstance(found, Tensor):
            raise SettingsError(f"{who} returned a {type(found).__name__} as {what}. It must be {advice}.")
        if found.shape != wanted:
            raise SettingsError(
                f"{who} returned {what} of shape {list(found.shape)}, but {list(wanted)} is needed: {advice}."
            )
    return output, state


class _NotRecordable(Exception):
    """The forward pass is not a fixed list of calls."""


class _Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    changed: list[Tensor]
    """The arguments that it changes in place."""


class _Recorder(TorchFunctionMode):
    """Records every call of torch that makes or changes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, tuple(kwargs.values()))))
        if any(x.is_inference() for x in given):
            raise _NotRecordable  # such a tensor does not count in-place changes
        versions = [x._version for x in given]
        result = func(*args, **kwargs)
        changed = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        if not changed and any(result is x for x in given):
            return result  # a cast that casts nothing
        if changed or next(_tensors(result), None) is not None:
            self.calls.append(_Call(func, args, kwargs, result, changed))
        elif getattr(func, "__name__", "") not in _SHAPES_ALONE:
            raise _NotRecordable  # a number from a tensor, on which later calls may depend
        return result


_SHAPES_ALONE = frozenset(
    {"__get__", "__len__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"}
    | {"is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "storage_offset", "type"}
    | {"is_same_size", "result_type", "promote_types", "can_cast", "__hash__", "__repr__"}
)
"""Functions whose results depend only on a tensor's shape or type, and not on its values."""


class Program:
    """Recorded calls as one Python function, without calls that the results do not need."""

    def __init__(self, calls: list[_Call], inputs: list[Tensor], results: list[Tensor]) -> None:
        self._scope: dict[str, Any] = {}
        """The names in the function's code: kernels, arguments, weights, and results that depend only on weights."""
        self._names = {id(x): f"in{i}" for i, x in enumerate(inputs)}
        self._varying = set(self._names.values())
        """The names of tensors that differ from call to call."""
        self._once: list[_Call] = []
        """Calls whose results depend only on weights."""
        lines = [line for call in calls for line in self._line(call)]
        names, arguments = [self._name(result) for result in results], set(self._names_of(inputs))
        body, live = [], set(names)
        for text, read, written, in_place in reversed(lines):
            if in_place or live & written:
                # Tensors are deleted after their last use, so that their memory is reused while it is in the cache.
                unused = sorted(((read | written) & self._varying) - live - arguments)
                body += [f" del {', '.join(unused)}"] if unused else []
                body.append(f" {text}")
                live |= read | written
        self.uses = [name in live for name in self._names_of(inputs)]
        """For each input: whether the results depend on it."""
        code = [f"def run({', '.join(self._names_of(inputs))}):", *reversed(body), f" return {', '.join(names)}"]
        exec("\n".join(code), self._scope)
        self.run: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._scope["run"]

    def refresh(self, *, in_place: bool) -> None:
        """Recompute the results that depend only on weights.

        Args:
            in_place: whether results keep their addresses, as a CUDA graph of this program requires.
        """
        renamed: dict[int, Any] = {}

        def now(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(now(y) for y in x)
            return renamed.get(id(x), x)

        for call in self._once:
            again = call.function(*now(call.args), **{name: now(value) for name, value in call.kwargs.items()})
            for before, after in zip(_tensors(call.result), _tensors(again), strict=True):
                renamed[id(before)] = after
                if not in_place:
                    self._scope[self._names[id(before)]] = after
                elif id(before._base) not in renamed:  # else it is a view, and has changed with what it shows
                    before.copy_(after)

    def _line(self, call: _Call) -> Iterator[tuple[str, set[str], set[str], bool]]:
        """A call as text, with the names that it reads and writes, and whether it writes in place. Yields nothing for a
        call that depends only on weights."""
        read = {self._name(x) for x in _tensors((call.args, tuple(call.kwargs.values())))}
        if any(self._name(x) not in self._varying for x in call.changed):
            raise _NotRecordable  # it changes weights, or results computed from them
        varying = bool(read & self._varying)
        written = [self._names.setdefault(id(x), f"v{len(self._names)}") for x in _tensors(call.result)]
        if not varying:
            self._scope.update(zip(written, _tensors(call.result), strict=True))
            self._once.append(call)
            return
        self._varying |= set(written)
        listed = [self._text(x) for x in call.args]
        listed += [f"{name}={self._text(x)}" for name, x in call.kwargs.items()]
        text = f"{self._constant(call.function)}({', '.join(listed)})"
        if isinstance(call.result, Tensor):
            text = f"{written[0]} = {text}"
        elif written:
            if len(written) != len(call.result):
                raise _NotRecordable  # nested results
            text = f"{', '.join(written)}, = {text}"
        yield text, read, set(written), bool(call.changed)

    def _name(self, x: Tensor) -> str:
        """A tensor's name. A tensor that no call has returned is a weight or a constant."""
        if id(x) not in self._names:
            self._names[id(x)] = f"w{len(self._names)}"
            self._scope[self._names[id(x)]] = x
        return self._names[id(x)]

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return self._name(x)
        if isinstance(x, (list, tuple)) and next(_tensors(x), None) is not None:
            inner = "".join(f"{self._text(y)}, " for y in x)  # tuples and lists differ as indices
            return f"[{inner}]" if isinstance(x, list) else f"({inner})"
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        name = f"k{len(self._scope)}"
        self._scope[name] = x
        return name

    def _names_of(self, tensors: list[Tensor]) -> list[str]:
        return [self._names[id(x)] for x in tensors]


def _tensors(x: Any) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
