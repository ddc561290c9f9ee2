from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import envs, recipes
from lockstep.core.rollout import Rollout
from lockstep.models import StandardModel
from lockstep.models.normalize import NormalizeConfig, Normalizers, RunningMoments, batch_sums, discounted_returns


def test_batch_sums_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, float("nan")]], [[5.0, 6.0], [7.0, 8.0]]])
    valid = torch.tensor([[True, False], [True, True]])
    assert batch_sums(x, valid).tolist() == [3, 13, 16, 1 + 25 + 49, 4 + 36 + 64]
    assert batch_sums(x, valid).dtype == torch.float64
    assert batch_sums(torch.zeros(2, 2, 0), valid).tolist() == [3]


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 20), min_size=1, max_size=5), st.floats(-1e3, 1e3))
def test_merged_moments_are_those_of_all_samples(seed: int, sizes: list[int], offset: float) -> None:
    rng = np.random.default_rng(seed)
    chunks = [rng.standard_normal((size, 3)) * [1, 10, 0.1] + offset for size in sizes]
    moments = RunningMoments.empty(3)
    for chunk in chunks:
        moments = moments.merged(batch_sums(torch.from_numpy(chunk), torch.ones(len(chunk), dtype=torch.bool)))
    everything = np.concatenate(chunks)
    assert moments.count == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(moments.std, np.sqrt(everything.var(0) + 1e-8), rtol=1e-3, atol=1e-6)


def test_moments_before_the_first_sample_change_nothing() -> None:
    assert RunningMoments.empty(2).mean.tolist() == [0, 0]
    assert RunningMoments.empty(2).std.tolist() == [1, 1]
    nothing = RunningMoments.empty(2).merged(batch_sums(torch.ones(3, 2), torch.zeros(3, dtype=torch.bool)))
    assert nothing.std.tolist() == [1, 1]


def test_a_constant_is_divided_by_a_hundred_thousandth_of_one_at_least() -> None:
    moments = RunningMoments.empty(1).merged(batch_sums(torch.full((9, 1), 0.1), torch.ones(9, dtype=torch.bool)))
    assert moments.std.item() == pytest.approx(1e-4)


def test_discounted_returns_by_hand() -> None:
    reward = torch.tensor([[1.0, 0.0], [2.0, 1.0], [4.0, 1.0]])
    done = torch.tensor([[False, True], [True, False], [False, False]])
    returns, carry = discounted_returns(reward, done, torch.tensor([8.0, 2.0]), 0.5)
    assert returns.tolist() == [[5.0, 1.0], [4.5, 1.0], [4.0, 1.5]]
    assert carry.tolist() == [4.0, 1.5]
    _, carry = discounted_returns(reward, torch.ones(3, 2, dtype=torch.bool), torch.zeros(2), 0.5)
    assert carry.tolist() == [0.0, 0.0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 12))
def test_discounted_returns_equal_explicit_sums_and_may_be_cut_anywhere(seed: int, steps: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    reward, done = torch.from_numpy(rng.standard_normal((steps, 2))), torch.from_numpy(rng.random((steps, 2)) < 0.3)
    returns, _ = discounted_returns(reward, done, torch.zeros(2).double(), 0.9)
    for env in range(2):
        for t in range(steps):
            ends = [s for s in range(t) if done[s, env]]
            begin = ends[-1] + 1 if ends else 0
            explicit = sum(0.9 ** (t - s) * reward[s, env].item() for s in range(begin, t + 1))
            assert returns[t, env].item() == pytest.approx(explicit, abs=1e-9)
    cut = min(cut, steps)
    first, carry = discounted_returns(reward[:cut], done[:cut], torch.zeros(2).double(), 0.9)
    second, _ = discounted_returns(reward[cut:], done[cut:], carry, 0.9)
    assert torch.equal(torch.cat([first, second]), returns)


def rollout(seed: int = 0) -> Rollout:
    """Three steps of two CartPoles; the second environment spends step 1 on its reset."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.zeros(3, 2, dtype=torch.bool)
    terminated, valid = flags.clone(), ~flags
    terminated[0, 1], valid[1, 1] = True, False
    reward = torch.tensor([[1.0, 2.0], [1.0, 0.0], [1.0, 3.0]])
    return Rollout(
        obs=torch.randn(4, 2, 4, generator=generator),
        start=torch.zeros(4, 2, dtype=torch.bool),
        action=torch.zeros(3, 2, dtype=torch.int64),
        reward=reward,
        prev_action=None,
        prev_reward=None,
        log_prob=torch.zeros(3, 2),
        value=torch.zeros(4, 2),
        terminated=terminated,
        truncated=flags,
        valid=valid,
        core_state=torch.zeros(2, 0),
    )


def normalizers(config: NormalizeConfig) -> tuple[Normalizers, StandardModel]:
    experiment = recipes.ppo_cartpole().replace(normalize=config)
    model = experiment.model.build(
        *envs.spaces(experiment.env),
        precision="fp32",
        normalize_observations=config.observations,
        observation_clip=config.clip,
        seed=1,
    )
    assert isinstance(model, StandardModel)
    return Normalizers.initial(config, experiment.algorithm.discount, envs.spaces(experiment.env)[0]), model


def test_normalizers_take_valid_samples_of_a_rollout() -> None:
    before, model = normalizers(NormalizeConfig(observations=True, returns=True, clip=2.0))
    carry = torch.tensor([10.0, 10.0])
    data = rollout()
    sums = before.rollout_sums(data, carry)
    after = before.merged(sums)
    seen = data.obs[:3][data.valid].double()
    assert after.observations is not None and after.returns is not None and before.observations is not None
    torch.testing.assert_close(after.observations.mean, seen.mean(0).float())
    torch.testing.assert_close(after.observations.std, seen.std(0, correction=0).float(), rtol=1e-5, atol=1e-6)
    discount = before.discount
    returns = np.array([10 * discount + 1, 10 * discount + 2, 0, 0, 0])
    returns[2] = returns[0] * discount + 1
    returns[3], returns[4] = returns[2] * discount + 1, 3
    assert after.returns.std.item() == pytest.approx(returns.std(), rel=1e-5)
    assert carry.tolist() == pytest.approx([returns[3], 3])
    expected = (data.reward / after.returns.std).clamp(-2, 2)
    assert torch.equal(after.scale_rewards(data.reward), expected)
    assert torch.equal(before.scale_rewards(data.reward), data.reward.clamp(-2, 2))
    assert before.observations.count == 0, "versions that still collect keep their statistics"
    after.apply(model)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, getattr(after.observations, name.rpartition(".")[2]))


def test_normalizers_restore_their_state() -> None:
    fresh, _ = normalizers(NormalizeConfig(observations=True, returns=True))
    grown = fresh.merged(fresh.rollout_sums(rollout(), torch.zeros(2)))
    state = grown.state()
    assert set(state) == {"observations", "returns"}
    restored = fresh.loaded(state)
    assert all(torch.equal(restored.state()[name], tensor) for name, tensor in state.items())
    with pytest.raises(AssertionError):
        fresh.loaded({"returns": state["returns"]})


def test_without_normalization_nothing_happens() -> None:
    none, model = normalizers(NormalizeConfig())
    data = rollout()
    assert none.rollout_sums(data, torch.zeros(2)).shape == (0,)
    assert none.scale_rewards(data.reward) is data.reward
    assert none.merged(torch.zeros(0, dtype=torch.float64)).state() == {}
    none.apply(model)
