from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.models import MLP, ObservationLayout, StandardModel, StandardModelConfig
from lockstep.models.base import PolicyModel
from lockstep.models.encoders import features_of
from lockstep.models.layers import PixelConv2d

STEPS, ENVS = 3, 4
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-np.inf, np.inf, (5,))
_OF_VECTORS, _OF_IMAGES = ("hidden-sizes", "activation"), ("dense-size", "initialization", "channels")
MIXED = spaces.Dict(camera=spaces.Box(0, 255, (3, 15, 15), np.uint8), arm=VECTOR, speed=spaces.Box(0, 1, (1,)))
TUPLE = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2])])

Precision = Literal["bf16", "fp32"]


def build(
    obs: spaces.Space = VECTOR,
    action: spaces.Space | None = None,
    precision: Precision = "fp32",
    normalize: bool = False,
    seed: int = 1,
    **settings: Any,
) -> StandardModel:
    return StandardModelConfig(**settings).build(
        obs, action or spaces.Discrete(4), precision=precision, normalize_observations=normalize, seed=seed
    )


def observe(space: spaces.Space, steps: int = STEPS, envs: int = ENVS, seed: int = 0) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: observe(entry, steps, envs, seed) for key, entry in space.items()}
    rng, shape = np.random.default_rng(seed), (steps, envs, *space.shape)  # type: ignore[misc]
    if space.dtype == np.uint8:
        return torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def run(model: StandardModel, obs: Any, **inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = obs if isinstance(obs, Tensor) else next(iter(obs.values()))
    steps, envs = first.shape[:2]
    given = {"start": torch.zeros(steps, envs, dtype=torch.bool), "state": torch.zeros(envs, model.state_size)}
    if model.uses_previous:
        shape, dtype = model.distribution.action_shape, model.distribution.action_dtype
        given["prev_action"] = torch.zeros(steps, envs, *shape, dtype=dtype)
        given["prev_reward"] = torch.zeros(steps, envs)
    output, state = model(obs, **{**given, **inputs})
    return output.policy, output.value, state


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
@pytest.mark.parametrize("action", [spaces.Discrete(4), spaces.MultiDiscrete([3, 2]), spaces.Box(-1, 1, (2,)), TUPLE])
@pytest.mark.parametrize("obs", [VECTOR, IMAGE, MIXED])
def test_shapes(obs: spaces.Space, action: spaces.Space, core: Any) -> None:
    model = build(obs, action, core=core, core_size=8, dense_size=16, previous_action_reward=core == "gru")
    assert model.state_size == {"none": 0, "gru": 8, "lstm": 16}[core]
    policy, value, state = run(model, observe(obs))
    assert policy.shape == (STEPS, ENVS, model.distribution.num_params) and policy.dtype == torch.float32
    assert value.shape == (STEPS, ENVS) and value.dtype == torch.float32
    assert state.shape == (ENVS, model.state_size)
    (policy.sum() + value.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_equal_seeds_give_equal_bits_and_leave_torch_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = build(IMAGE, core="lstm", seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = build(IMAGE, core="lstm", seed=7), build(IMAGE, core="lstm", seed=8)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.policy_head.linear.weight, other.policy_head.linear.weight)


def test_head_gains() -> None:
    model = build(VECTOR, spaces.Box(-1, 1, (3,)))
    assert model.value_head is not None
    policy, value = model.policy_head.linear.weight, model.value_head.linear.weight
    torch.testing.assert_close(torch.linalg.svdvals(policy), torch.full((3,), 0.01))
    torch.testing.assert_close(torch.linalg.svdvals(value), torch.ones(1))
    assert not model.policy_head.linear.bias.any() and not model.value_head.linear.bias.any()


def test_impala_initialization_follows_the_encoder_unless_it_is_given() -> None:
    def gram(**settings: Any) -> Tensor:
        weight = build(IMAGE, encoder="impala", **settings).get_parameter(
            "trunks.0.encoder.images.0.convolutions.0.weight"
        )
        return weight.flatten(1) @ weight.flatten(1).T

    assert torch.equal(gram(), gram(initialization="impala"))
    assert not torch.allclose(gram(), 2 * torch.eye(16), atol=0.1)
    torch.testing.assert_close(gram(initialization="orthogonal"), 2 * torch.eye(16), rtol=1e-4, atol=1e-4)


def test_fixup_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(SettingsError, match=r"but model\.encoder=nature"):
        StandardModelConfig(encoder="nature", initialization="fixup").validate()
    with pytest.raises(SettingsError, match=r"model\.initialization=fixup .*84x84 .*--model\.encoder impala"):
        build(spaces.Box(0, 255, (3, 84, 84), np.uint8), initialization="fixup")
    with pytest.raises(SettingsError, match=r"model\.initialization=fixup .*Box\(-1\.0, 1\.0, \(3,\)"):
        StandardModelConfig(initialization="fixup").check(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    names = dict(build(spaces.Box(0, 255, (3, 20, 20), np.uint8), initialization="fixup").named_parameters())
    assert "trunks.0.encoder.images.0.blocks.0.0.shift_first" in names


def test_small_images_get_an_encoder_that_can_see_them() -> None:
    layers = [m for m in build(MIXED).modules() if isinstance(m, PixelConv2d)]
    assert [layer.kernel_size for layer in layers] == [(3, 3)]
    layers = [m for m in build(IMAGE).modules() if isinstance(m, PixelConv2d)]
    assert [layer.kernel_size for layer in layers] == [(8, 8)]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("core", ["none", "lstm", "mingru", "transformer"])
@pytest.mark.parametrize(("obs", "encoder"), [(IMAGE, "nature"), (IMAGE, "impala"), (MIXED, "auto")])
def test_a_row_depends_on_itself_alone(obs: spaces.Space, encoder: Any, core: Any, precision: Precision) -> None:
    model = build(obs, precision=precision, encoder=encoder, core=core, core_size=16).for_acting()
    mine, others = observe(obs, 1, 8), observe(obs, 1, 8, seed=9)
    mixed = (
        {k: torch.cat([mine[k][:, :3], others[k][:, 3:]], 1) for k in mine}
        if isinstance(mine, dict)
        else (torch.cat([mine[:, :3], others[:, 3:]], 1))
    )
    for a, b in zip(run(model, mine), run(model, mixed), strict=True):
        rows = (slice(None, 3),) if a.shape[0] == 8 else (slice(None), slice(None, 3))
        assert torch.equal(a[rows], b[rows])


@pytest.mark.parametrize("encoder", ["nature", "impala", "mlp"])
def test_bf16_is_close_to_fp32(encoder: Any) -> None:
    obs = observe(IMAGE)
    exact, rough = (run(build(IMAGE, precision=p, encoder=encoder), obs) for p in ("fp32", "bf16"))
    assert not torch.equal(rough[1], exact[1])
    torch.testing.assert_close(rough[1], exact[1], rtol=0.05, atol=0.05)
    torch.testing.assert_close(rough[0], exact[0], rtol=0.05, atol=0.002)


@pytest.mark.parametrize("settings", [{}, {"encoder": "impala"}, {"core": "gru"}, {"separate_value_network": True}])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_acting_computes_the_bits_that_training_does(precision: Precision, settings: dict[str, Any]) -> None:
    model, obs = build(IMAGE, precision=precision, dense_size=32, **settings), observe(IMAGE)
    other = build(IMAGE, precision=precision, seed=2, dense_size=32, **settings)
    run(other, obs)[1].sum().backward()
    actor = other.for_acting()
    assert all(parameter.grad is None for parameter in actor.parameters())
    own, acting = dict(model.named_parameters()), dict(actor.named_parameters())
    assert own.keys() == acting.keys()
    stored = {parameter.dtype for parameter in actor.parameters()}
    assert stored == ({torch.float32, torch.bfloat16} if precision == "bf16" else {torch.float32})
    with torch.inference_mode():
        for name, parameter in acting.items():
            assert not parameter.requires_grad and parameter.shape == own[name].shape
            parameter.copy_(own[name])
        results = run(actor, obs)
    for a, b in zip(results, run(model, obs), strict=True):
        assert torch.equal(a, b)
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_observation_statistics_reach_both_networks() -> None:
    model = build(VECTOR, normalize=True, separate_value_network=True)
    plain = build(VECTOR, separate_value_network=True)
    obs = 40 * observe(VECTOR)
    mean, std = torch.arange(5.0), torch.arange(1.0, 6.0)
    for normalizing in (model, model.for_acting()):
        normalizing.set_observation_statistics(mean, std)
        for a, b in zip(run(normalizing, obs), run(plain, ((obs - mean) / std).clamp(-10, 10)), strict=True):
            assert torch.equal(a, b)


def test_a_mask_forbids_actions_and_is_not_observed() -> None:
    space = spaces.Dict(action_mask=spaces.Box(0, 1, (4,)), arm=VECTOR)
    model = build(space)
    obs = {"arm": observe(VECTOR), "action_mask": (torch.rand(STEPS, ENVS, 4) < 0.5).float()}
    obs["action_mask"][..., 0] = 1
    allowed, everything = obs["action_mask"].bool(), {**obs, "action_mask": torch.ones(STEPS, ENVS, 4)}
    policy, value, _ = run(model, obs)
    free, free_value, _ = run(model, everything)
    assert torch.equal(value, free_value) and torch.equal(policy[allowed], free[allowed])
    assert not policy.softmax(-1)[~allowed].any()


def test_previous_action_and_reward_count_unless_the_episode_starts() -> None:
    model, obs = build(previous_action_reward=True), observe(VECTOR)
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[1, 2] = True
    previous = {"prev_action": torch.ones(STEPS, ENVS, dtype=torch.int64), "prev_reward": torch.ones(STEPS, ENVS)}
    others = {"prev_action": 2 * previous["prev_action"], "prev_reward": previous["prev_reward"]}
    rewarded = {**previous, "prev_reward": 3 * previous["prev_reward"]}
    value = run(model, obs, start=start, **previous)[1]
    for changed in (others, rewarded):
        assert torch.equal(value == run(model, obs, start=start, **changed)[1], start)


def test_the_core_remembers_within_an_episode_only() -> None:
    model, obs = build(core="gru", core_size=8), observe(VECTOR)
    start = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    start[2, 1] = True
    last = run(model, obs, start=start)[1][-1]
    obs[0] += 1
    assert torch.equal(last == run(model, obs, start=start)[1][-1], start[-1])


def test_separate_networks_share_nothing() -> None:
    model = build(separate_value_network=True, core="lstm", core_size=8)
    assert model.state_size == 32
    run(model, observe(VECTOR))[1].sum().backward()
    assert all(parameter.grad is None for parameter in (*model.trunks[0].parameters(), *model.policy_head.parameters()))
    assert all(parameter.grad is not None for parameter in model.trunks[1].parameters())


@pytest.mark.parametrize("std", ["free", "state"])
def test_deviation_depends_on_the_state_only_if_asked_to(std: Any) -> None:
    model = build(VECTOR, TUPLE, std=std)
    log_std = run(model, observe(VECTOR))[0][..., [5, 6]]
    assert torch.equal(log_std, torch.zeros_like(log_std)) == (std == "free")
    if model.policy_head.log_std is not None:
        model.policy_head.log_std.data = torch.tensor([-1.0, 2.0])
        policy = run(model, observe(VECTOR))[0]
        assert torch.equal(policy[..., [5, 6]], torch.tensor([-1.0, 2.0]).expand(STEPS, ENVS, 2))
        means = model.policy_head.linear(model.trunks[0](observe(VECTOR), None, None, None)[0])
        assert torch.equal(policy[..., [0, 1, 2, 3, 4, 7, 8, 9, 10]], means)


@pytest.mark.parametrize("std", ["free", "state"])
def test_the_deviation_before_learning(std: Any) -> None:
    model = build(VECTOR, TUPLE, std=std, initial_std=0.5)
    policy = run(model, observe(VECTOR))[0]
    torch.testing.assert_close(policy[..., [5, 6]].exp(), torch.full((STEPS, ENVS, 2), 0.5), rtol=0.1, atol=0)
    others = run(build(VECTOR, TUPLE, std=std), observe(VECTOR))[0]
    means = [column for column in range(policy.shape[-1]) if column not in (5, 6)]
    assert torch.equal(policy[..., means], others[..., means]), "it changes nothing else"
    with pytest.raises(SettingsError, match=r"model.initial_std=6 .*0\.01 and 5"):
        build(VECTOR, TUPLE, initial_std=6)


def test_a_free_deviation_beyond_its_bound_heeds_the_sum_of_all_gradients() -> None:
    model = build(action=spaces.Box(-1, 1, (1,)))
    log_std = model.policy_head.log_std
    assert log_std is not None
    log_std.data.fill_(2.04)
    params = model(observe(VECTOR), torch.zeros(STEPS, ENVS, dtype=torch.bool), torch.zeros(ENVS, 0))[0].policy
    assert params[..., 1].eq(2).all()
    pulls = torch.tensor([-0.5, 1.0]).repeat(STEPS * ENVS // 2).view(STEPS, ENVS)  # half of them lead further out
    (params[..., 1] * pulls).sum().backward()
    assert log_std.grad is not None and float(log_std.grad) == pytest.approx(STEPS * ENVS / 4)
    log_std.grad = None
    params = model(observe(VECTOR), torch.zeros(STEPS, ENVS, dtype=torch.bool), torch.zeros(ENVS, 0))[0].policy
    (params[..., 1] * -pulls).sum().backward()
    assert log_std.grad is not None and float(log_std.grad) == 0


def test_a_setting_that_came_later_leaves_experiments_what_they_were() -> None:
    assert "initial_std" not in to_json(StandardModelConfig())
    assert from_json(to_json(StandardModelConfig(initial_std=0.5))).initial_std == 0.5


class Flat(nn.Module):
    """A user's encoder of plain torch layers."""

    out_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)

    def forward(self, obs: Tensor) -> Tensor:
        return self.layer(obs)


@dataclasses.dataclass(frozen=True)
class FlatConfig(StandardModelConfig):
    def build_encoder(self, observation_space: spaces.Space, **_: Any) -> nn.Module:
        return Flat()


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_users_encoder_of_plain_layers_works_in_bf16(core: Any) -> None:
    config = FlatConfig(core=core, core_size=8)
    model = config.build(VECTOR, spaces.Discrete(2), precision="bf16", normalize_observations=False, seed=1)
    obs = observe(VECTOR)
    with torch.inference_mode():
        for a, b in zip(run(model, obs), run(model.for_acting(), obs), strict=True):
            assert torch.equal(a, b)


class Normalizing(Flat):
    """An encoder that takes statistics."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def set_observation_statistics(self, mean: Tensor, std: Tensor) -> None:
        self.mean.copy_(mean)


@dataclasses.dataclass(frozen=True)
class NormalizingConfig(StandardModelConfig):
    def build_encoder(self, observation_space: spaces.Space, **_: Any) -> nn.Module:
        return Normalizing()


def test_a_users_encoder_is_given_statistics() -> None:
    model = NormalizingConfig().build(VECTOR, spaces.Discrete(2), precision="fp32", normalize_observations=True, seed=1)
    for each in (model, model.for_acting()):
        each.set_observation_statistics(torch.arange(5.0), torch.ones(5))
        (encoder,) = (module for module in each.modules() if isinstance(module, Normalizing))
        assert torch.equal(encoder.mean, torch.arange(5.0))
    assert PolicyModel.state_size == 0, "of models without memory, which need not say so"


@pytest.mark.parametrize("config", [FlatConfig, NormalizingConfig])
def test_settings_of_encoders_say_nothing_about_a_users_encoder(config: type[StandardModelConfig]) -> None:
    assert StandardModelConfig(encoder="mlp").warnings(MIXED, spaces.Discrete(2))
    assert not config(encoder="mlp").warnings(MIXED, spaces.Discrete(2))


@pytest.mark.parametrize("features", [None, 6.0])
def test_a_users_encoder_without_the_number_of_its_features_is_refused(features: float | None) -> None:
    class Unknown(Flat):
        out_features = features  # type: ignore[assignment]

    with pytest.raises(SettingsError, match=r"Unknown.* out_features.*"):
        features_of(Unknown())


def test_a_users_encoder_that_returns_other_features_than_it_declares_is_an_error() -> None:
    class Five(Flat):
        out_features = 5

    class FiveConfig(StandardModelConfig):
        def build_encoder(self, observation_space: spaces.Space, **_: Any) -> nn.Module:
            return Five()

    model = FiveConfig().build(VECTOR, spaces.Discrete(2), precision="fp32", normalize_observations=False, seed=1)
    with pytest.raises(SettingsError, match=r"encoder Five returned features \[\d+, \d+, 6\], .* out_features is 5"):
        run(model, observe(VECTOR))


def test_settings_survive_json() -> None:
    config = StandardModelConfig(hidden_sizes=(32,), core="gru", squash=True)
    assert from_json(to_json(config)) == config
    assert config.recurrent and not config.uses_previous
    assert StandardModelConfig(previous_action_reward=True).uses_previous


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"hidden_sizes": ()}, "hidden_sizes"),
        ({"channels": (16, 0)}, "channels"),
        ({"core_size": 0}, "core_size"),
        ({"dense_size": -2}, "dense_size"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=rf"model\.{text}="):
        build(**settings)


@pytest.mark.parametrize("settings", [{"squash": True}, {"std": "state"}])
def test_what_shapes_continuous_actions_is_refused_without_them(settings: dict[str, Any]) -> None:
    assert build(action=TUPLE, **settings)
    with pytest.raises(SettingsError, match=r"Discrete\(4\) .*--model.no-squash and --model.std free"):
        build(**settings)


def test_a_deviation_of_discrete_actions_is_told_to_have_no_effect() -> None:
    config, one = StandardModelConfig(initial_std=0.5), spaces.Discrete(4)
    (warning,) = config.warnings(VECTOR, one)
    assert warning == "--model.initial-std 0.5 has no effect, since the actions of Discrete(4) are discrete."
    assert config.warnings(VECTOR, TUPLE) == StandardModelConfig().warnings(VECTOR, one) == []


def test_settings_of_layers_that_observations_do_not_need_are_told() -> None:
    one, images = spaces.Discrete(4), StandardModelConfig(hidden_sizes=(8,), activation="relu")
    told = [f"--model.{name} has no effect, because the observations are images alone." for name in _OF_VECTORS]
    assert images.warnings(IMAGE, one) == told
    assert not images.warnings(MIXED, one) and not images.warnings(VECTOR, one)
    vectors = StandardModelConfig(dense_size=64, initialization="glorot", channels=(8,))
    told = [f"--model.{name} has no effect, because the observations are not images." for name in _OF_IMAGES]
    assert vectors.warnings(VECTOR, one) == told
    assert not vectors.warnings(IMAGE, one) and not vectors.warnings(MIXED, one)


def test_a_mask_of_the_wrong_size_is_named() -> None:
    with pytest.raises(SettingsError, match="3 entries"):
        build(spaces.Dict(action_mask=spaces.MultiBinary(3), arm=VECTOR))


def test_parts_make_a_model_without_the_config() -> None:
    from lockstep.models import GRU, ObservationEncoder, Trunk, make_distribution

    encoder = ObservationEncoder(ObservationLayout.of(VECTOR), None, lambda size: MLP(size, (8,), "relu"))
    model = StandardModel(Trunk(encoder, lambda size: GRU(size, 4)), None, make_distribution(TUPLE))
    assert run(model, observe(VECTOR))[2].shape == (ENVS, 4)
