from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.config.settings import SettingsError
from lockstep.models import MLP, ModelOutput, StandardModelConfig, make_distribution
from lockstep.models.base import PolicyModel
from lockstep.models.capture import Inference

ENVS = 6
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (5,))
MASKED = spaces.Dict(
    camera=spaces.Box(0, 255, (3, 15, 15), np.uint8), arm=VECTOR, action_mask=spaces.Box(0, 1, (4,), np.uint8)
)


def observe(space: spaces.Space[Any], draw: torch.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: observe(entry, draw) for key, entry in space.items()}
    shape = (1, ENVS, *space.shape)  # type: ignore[misc]
    if space.dtype == np.uint8:
        return torch.randint(0, int(space.high.max()) + 1, shape, dtype=torch.uint8, generator=draw)  # type: ignore
    return torch.randn(shape, generator=draw)


def inputs(model: PolicyModel, space: spaces.Space[Any], seed: int, previous: bool = False) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    start, state = torch.rand(1, ENVS, generator=draw) < 0.5, torch.randn(ENVS, model.state_size, generator=draw)
    action = torch.randint(0, 4, (1, ENVS), generator=draw) if previous else None
    return observe(space, draw), start, state, action, torch.randn(1, ENVS, generator=draw) if previous else None


def flat(results: tuple[ModelOutput, Tensor]) -> list[Tensor]:
    return [results[0].policy, results[0].value, results[1]]


class Calls(TorchFunctionMode):
    """How many calls of torch are made."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_tuples_of_tensors_stay_tuples() -> None:
    """A list means something else as an index: parameters of several kinds of action are put in order by one."""
    space = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))
    model = (
        StandardModelConfig().build(VECTOR, space, precision="fp32", normalize_observations=False, seed=1).for_acting()
    )
    inference = Inference(model)
    with torch.inference_mode():
        for seed in range(3):
            given = inputs(model, VECTOR, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                torch.set_warn_always(True)
                try:
                    results = flat(inference(*given))
                finally:
                    torch.set_warn_always(False)
            assert all(torch.equal(a, b) for a, b in zip(results, flat(model(*given)), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (VECTOR, {"separate_value_network": True}),
        (VECTOR, {"core": "gru", "core_size": 8, "previous_action_reward": True}),
        (IMAGE, {"encoder": "nature", "core": "lstm", "core_size": 8}),
        (VECTOR, {"core": "mingru", "core_size": 8}),
        (VECTOR, {"core": "transformer", "core_size": 8, "core_memory": 3, "core_layers": 2}),
        (IMAGE, {"encoder": "impala", "channels": (4, 8)}),
        (MASKED, {"core": "gru", "core_size": 8, "separate_value_network": True}),
    ],
)
def test_the_same_bits_with_fewer_calls(space: spaces.Space[Any], settings: dict[str, Any], precision: Any) -> None:
    model = (
        StandardModelConfig(**settings)
        .build(space, spaces.Discrete(4), precision=precision, normalize_observations=True, seed=1)
        .for_acting()
    )
    inference, previous = Inference(model), "previous_action_reward" in settings
    with torch.inference_mode():
        for seed in range(4):
            given = inputs(model, space, seed, previous)
            with Calls() as eager:
                expected = flat(model(*given))
            with Calls() as recorded:
                results = flat(inference(*given))
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
            if seed == 1:
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
                inference.refresh()
            if seed == 2:
                model.set_observation_statistics(torch.tensor(3.0), torch.tensor(2.0))
                inference.refresh()
            if seed in (1, 3):  # neither recorded, nor computing anew what depends on weights
                assert recorded.count < eager.count


class Mean(PolicyModel):
    """What stays the same in the tests' own models."""

    state_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.distribution = make_distribution(spaces.Discrete(2))
        self.weight = torch.nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.encoder = MLP(5, (3,), "relu").requires_grad_(False)

    def forward(
        self,
        obs: Any,
        start: Tensor,
        state: Tensor,
        prev_action: Tensor | None = None,
        prev_reward: Tensor | None = None,
    ) -> tuple[ModelOutput, Tensor]:
        value = self.encoder(obs).mean(-1) * self.factor(obs)
        return ModelOutput(value.unsqueeze(-1).expand(-1, -1, 2), value), state

    def factor(self, obs: Tensor) -> Tensor:
        return self.weight

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        raise NotImplementedError

    def for_acting(self) -> Mean:
        return self


class Looks(Mean):
    def factor(self, obs: Tensor) -> Tensor:
        return self.weight if obs.mean() > 0 else -self.weight


class Lists(Mean):
    def factor(self, obs: Tensor) -> Tensor:
        return self.weight * sum(obs.flatten().tolist())


class ThroughNumpy(Mean):
    def factor(self, obs: Tensor) -> Tensor:
        return self.weight * float(obs.numpy().mean())


class Counts(Mean):
    def factor(self, obs: Tensor) -> Tensor:
        self.weight.add_(1)
        return self.weight.clone()


class Overwrites(Mean):
    """Changes only what it has made itself, through a view."""

    def factor(self, obs: Tensor) -> Tensor:
        rows = obs.clone()
        rows[0, :3].mul_(self.weight).add_(1)
        torch.sub(rows[0, 3:], 1, out=rows[0, 3:])
        a, b = rows.split(3, 1)
        return torch.cat([b, a], 1).sum(-1)


@pytest.mark.parametrize(
    ("kind", "recordable"), [(Mean, True), (Looks, False), (Lists, False), (ThroughNumpy, False), (Overwrites, True)]
)
def test_what_depends_on_values_is_run_as_it_is(kind: type[Mean], recordable: bool) -> None:
    model = kind()
    inference, runs = Inference(model), list[Any]()
    model.register_forward_pre_hook(lambda *_: runs.append(None))
    with torch.inference_mode():
        for seed in range(6):
            given = inputs(model, VECTOR, seed)
            before = len(runs)
            results = flat(inference(*given))
            if seed:  # the first call tries to record
                assert len(runs) - before == (0 if recordable else 1)
            assert all(torch.equal(a, b) for a, b in zip(results, flat(model(*given)), strict=True))


def test_a_model_that_changes_itself_is_run_as_it_is() -> None:
    model, twin = Counts(), Counts()
    twin.load_state_dict(model.state_dict())
    inference = Inference(model)
    with torch.inference_mode():
        given = inputs(model, VECTOR, 0)
        inference(*given)  # tries to record, and runs
        model.weight.copy_(twin.weight)
        for _ in range(3):
            assert torch.equal(inference(*given)[0].value, twin(*given)[0].value)


def test_other_shapes_are_recorded_anew() -> None:
    model = Mean()
    inference = Inference(model)
    with torch.inference_mode():
        obs, start, state, *_ = inputs(model, VECTOR, 0)
        for size in (6, 2, 6):
            given = obs[:, :size], start[:, :size], state[:size], None, None
            assert torch.equal(inference(*given)[0].value, model(*given)[0].value)


class Wrong(PolicyModel):
    """A user's model with a mistake in what forward returns; one that reads numbers is not recorded."""

    state_size = 0

    def __init__(self, mistake: str, reads: bool) -> None:
        super().__init__()
        self.mistake, self.reads, self.layer = mistake, reads, torch.nn.Linear(4, 3)
        self.distribution = make_distribution(spaces.Discrete(2))

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        pass

    def for_acting(self) -> Wrong:
        return self

    def forward(self, obs: Tensor, start: Tensor, state: Tensor, *previous: Tensor | None) -> Any:  # type: ignore[override]
        policy, value = self.layer(obs).split([2, 1], -1)
        output = ModelOutput(policy * float(obs.sum()) if self.reads else policy, value.squeeze(-1))
        policy = output.policy
        return {
            "width": (ModelOutput(torch.cat([policy, policy], -1), output.value), state),
            "value": (ModelOutput(policy, output.value.unsqueeze(-1)), state),
            "state": (ModelOutput(policy, output.value), state[0]),
            "none": (ModelOutput(policy, None), state),  # type: ignore[arg-type]
            "alone": ModelOutput(policy, output.value),
        }[self.mistake]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("width", r"policy of shape \[1, 3, 4\], but \[1, 3, 2\] is needed"),
        ("value", r"value of shape \[1, 3, 1\], but \[1, 3\] is needed: .*squeeze\(-1\)"),
        ("state", r"state of shape \[0\], but \[3, 0\] is needed"),
        ("none", "a NoneType as value"),
        ("alone", r"a ModelOutput. It must return \(ModelOutput\(...\), state\)"),
    ],
)
def test_a_forward_with_wrong_results_is_refused_by_name(mistake: str, words: str, reads: bool) -> None:
    start, state = torch.zeros(1, 3, dtype=torch.bool), torch.zeros(3, 0)
    with pytest.raises(SettingsError, match=f"Wrong.forward returned .*{words}"), torch.inference_mode():
        Inference(Wrong(mistake, reads))(torch.zeros(1, 3, 4), start, state, None, None)
