"""Replay that is filled from data: which step gets what, equal results on every layout, and refusals."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tiny import EXPERIMENTS, options

from lockstep import envs, recipes, resume, train
from lockstep.buffers import replay_placement
from lockstep.buffers.data import fill, load, rollouts
from lockstep.buffers.data_sources import data_bytes
from lockstep.buffers.mapped import read_arrays
from lockstep.buffers.replay import Replay
from lockstep.buffers.sequences import SequenceReplay
from lockstep.cli.train import _replay_facts
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.models.continuous import Deterministic
from lockstep.models.distributions import EpsilonGreedy
from lockstep.training.prepare import prepare

BOX, TWO = spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(2, start=1)


def small(path: Path, **changes: Any) -> Experiment:
    """Two environments in two shards, with rollouts of two steps and returns of two."""
    changes = {"rollout": 2, "n_step": 2, "discount": 0.5, "batch_size": 2, "replay.data": str(path), **changes}
    experiment = recipes.dqn_cartpole().replace(**{f"algorithm.{name}": value for name, value in changes.items()})
    return experiment.replace(**{"env.num_envs": 2, "scheme.shards": 2, "scheme.acting_batch": 0})


def two_episodes() -> dict[str, np.ndarray]:
    """Three steps until a time limit, then two until a termination: seven steps with last observations."""
    return {
        "observations": np.array([[0.0], [1], [2], [5], [6]]),
        "next_observations": np.array([[1.0], [2], [3], [6], [7]]),
        "actions": np.array([1, 2, 1, 2, 2]),
        "rewards": np.array([1.0, 2, 4, 8, 16]),
        "terminations": np.array([False, False, False, False, True]),
        "truncations": np.array([False, False, True, False, False]),
    }


def test_a_stream_is_cut_into_equal_pieces(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", allow_pickle=False, **two_episodes())
    experiment = small(tmp_path / "data.npz")
    data = load(experiment, BOX, TWO)
    # The stream 0 1 2 (3) 5 6 (7) has seven steps, so each environment gets four.
    first, second = (next(rollouts(data, experiment, shard, 1000)) for shard in (0, 1))
    assert first.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 5]
    assert second.obs[:, 0, 0].tolist() == [5, 6, 7, 7, 7]
    assert first.valid[:, 0].tolist() == [True, True, True, False]
    assert second.valid[:, 0].tolist() == [True, True, False, False]
    assert first.truncated[:, 0].tolist() == [False, False, True, False]
    assert second.terminated[:, 0].tolist() == [False, True, False, False]
    assert first.start[:, 0].tolist() == [True, False, False, False, True]
    memory = Replay(experiment, first)
    fill(memory, experiment, 0, data, first, EpsilonGreedy(TWO))
    batch = memory.batch(np.array([0, 1, 2]), np.zeros(3, np.int64), np.ones(3))
    assert batch.action.tolist() == [[0, 1, 0]]
    assert batch.reward.tolist() == [[1 + 2 / 2, 2 + 4 / 2, 4]]
    assert batch.discount.tolist() == [[0.25, 0.25, 0.5]]  # a time limit is bootstrapped
    assert batch.next_obs[0, :, 0].tolist() == [2, 3, 3]
    other = Replay(experiment, second)
    fill(other, experiment, 1, data, second, EpsilonGreedy(TWO))
    batch = other.batch(np.array([0, 1]), np.zeros(2, np.int64), np.ones(2))
    assert batch.reward.tolist() == [[8 + 16 / 2, 16]] and batch.discount.tolist() == [[0, 0]]


def test_processes_share_what_they_read_of_uncompressed_files(tmp_path: Path) -> None:
    """However the file is written, the data is the same."""
    arrays = {**two_episodes(), "observations": np.arange(5, dtype=np.float32)[:, None]}
    paths = {name: tmp_path / f"{name}.npz" for name in ("stored", "packed")}
    np.savez(paths["stored"], allow_pickle=False, **arrays)
    np.savez_compressed(paths["packed"], allow_pickle=False, **arrays)
    columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.savez(tmp_path / "columns.npz", allow_pickle=False, columns=columns)
    assert np.array_equal(read_arrays(tmp_path / "columns.npz")["columns"], columns)
    assert all(isinstance(x, np.memmap) for x in read_arrays(paths["stored"]).values())
    assert not any(isinstance(x, np.memmap) for x in read_arrays(paths["packed"]).values())
    assert list(read_arrays(paths["stored"], ("rewards",))) == ["rewards"]
    with zipfile.ZipFile(paths["stored"], "a") as file:
        file.writestr("README.txt", "where this comes from")
    assert read_arrays(paths["stored"]).keys() == arrays.keys()
    loaded = {name: load(small(path), BOX, TWO) for name, path in paths.items()}
    assert len({data.digest for data in loaded.values()}) == 1
    assert loaded["stored"].obs.tolist() == loaded["packed"].obs.tolist() == [[0], [1], [2], [3], [4]]
    before = paths["stored"].read_bytes()
    loaded["stored"].obs.zero_()
    assert paths["stored"].read_bytes() == before, "a map is private"


def test_the_size_of_data_is_known_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole observes four float32 numbers: 46 bytes with what follows, the action, the reward and two flags."""
    count, path = 7, tmp_path / "data.npz"
    arrays = {"observations": np.zeros((count, 4)), "rewards": np.zeros(count), "actions": np.zeros(count, int)}
    experiment = small(path)

    def size() -> tuple[int, int]:
        shared, own = data_bytes(experiment)
        assert shared % count == own % count == 0
        return shared // count, own // count

    np.savez(path, allow_pickle=False, **arrays)
    assert size() == (8, 38), "only actions have the environment's type"
    facts = [_replay_facts(experiment, Layout.parse(text)) for text in ("inline", "processes:2", "cpu:a2-l2")]
    held = [round(count * (8 + learners * 38) / 1e6, 1) for learners in (1, 2, 2)]
    assert [each["data_megabytes"] for each in facts] == held
    needed = 2 * replay_placement.replay_bytes(experiment) + 2 * count * 38
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: needed)
    replay_placement.require(experiment, 2, 2)
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: needed - 1)
    with pytest.raises(SettingsError, match=r"algorithm\.replay\.capacity"):
        replay_placement.require(experiment, 2, 2)
    monkeypatch.setattr(replay_placement, "available_bytes", lambda: 0)  # not even enough for the data
    with pytest.raises(
        SettingsError, match=r"beside 0\.0 MB of algorithm\.replay\.data.* Store fewer steps\. Processes"
    ):
        replay_placement.require(experiment, 2, 2)

    arrays = {name: x.astype(np.int64 if name == "actions" else np.float32) for name, x in arrays.items()}
    flags = {name: np.zeros(count, bool) for name in ("terminations", "truncations")}
    whole = arrays | flags | {"next_observations": arrays["observations"]}
    np.savez(path, allow_pickle=False, **whole)
    assert size() == (45, 1), "a truncation is one that does not terminate, which is computed"
    np.savez(path, allow_pickle=False, **(arrays | flags))
    assert size() == (29, 17), "what follows is put together"
    clipped = experiment.replace(**{"env.reward_clip": True})
    assert data_bytes(clipped) == (count * 25, count * 21)
    np.savez_compressed(path, allow_pickle=False, **whole)
    assert size() == (0, 46)
    path.unlink()
    assert {data_bytes(each) for each in (experiment, recipes.dqn_cartpole(), recipes.ppo_cartpole())} == {(0, 0)}


def test_the_bytes_that_stay_in_the_file_are_those_in_maps_of_it(tmp_path: Path) -> None:
    path = cartpole(tmp_path / "given.npz", 9)
    with np.load(path) as given:
        arrays = {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in given.items()}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **arrays)
    for name in ("given.npz", "data.npz"):
        experiment = small(tmp_path / name)
        data = load(experiment, *envs.spaces(experiment.env))
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(tmp_path / name))]
        inside = {True: 0, False: 0}
        for x in (data.obs, data.next_obs, data.action, data.reward, data.terminated, data.truncated):
            inside[any(int(a, 16) <= x.data_ptr() < int(b, 16) for a, b in ranges)] += x.nbytes
        assert data_bytes(experiment) == (inside[True], inside[False]), name


def test_rows_in_any_order_are_single_steps(tmp_path: Path) -> None:
    order = np.array([3, 0, 2, 1, 4])
    np.savez(tmp_path / "data.npz", allow_pickle=False, **{name: x[order] for name, x in two_episodes().items()})
    experiment = small(tmp_path / "data.npz")
    data = load(experiment, BOX, TWO)
    assert data.ends.all()
    first = next(rollouts(data, experiment, 0, 1000))
    assert first.obs[:, 0, 0].tolist() == [5, 6, 0, 1, 2, 3, 1]
    assert first.truncated[:, 0].tolist() == [True, False, True, False, True, False]


def test_a_file_may_leave_out_what_follows_a_termination(tmp_path: Path) -> None:
    arrays = {name: x[3:] for name, x in two_episodes().items() if name != "next_observations"}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **arrays)
    assert load(small(tmp_path / "data.npz"), BOX, TWO).next_obs[0].tolist() == [6]


def test_continuous_actions_are_scaled() -> None:
    distribution = Deterministic(spaces.Box(np.array([-2, 0]), np.array([2, 1]), dtype=np.float32))
    sent = np.array([[-2, 0.5], [1, 1]], np.float32)
    stored = distribution.from_env(sent)
    assert stored.tolist() == [[-1, 0], [0.5, 1]]
    assert (distribution.to_env(stored.numpy()) == sent).all()


def test_entries_of_observations_have_names(tmp_path: Path) -> None:
    arrays = two_episodes()
    named = {name.replace("bservations", "bservations/place"): x for name, x in arrays.items()}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **named)
    data = load(small(tmp_path / "data.npz"), spaces.Dict({"place": BOX}), TWO)
    assert data.obs["place"][:, 0].tolist() == [0, 1, 2, 5, 6]
    assert next(rollouts(data, small(tmp_path / "data.npz"), 0, 1000)).obs["place"][3, 0].tolist() == [3]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rewards": None}, "lacks rewards"),
        ({"next_observations": None}, "row 2 is the last one of an episode that does not terminate"),
        ({"observations": np.zeros((5, 2))}, r"observations is float64 \[5, 2\], but must contain numbers \[5, 1\]"),
        ({"actions": np.zeros(5)}, "actions is float64"),
        ({"actions": np.array([1, 2, 3, 1, 1])}, "the action in row 2, 3, is not in the action space"),
        ({"rewards": np.array([0, np.nan, 0, 0, 0])}, "rewards has NaN or an infinity in row 1"),
        ({"rewards": np.array([0, 0, 1e300, 0, 0])}, "rewards in row 2, 1e.300, does not fit float32"),
        ({"terminations": np.zeros(5)}, "terminations is float64"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    arrays = {name: x for name, x in (two_episodes() | change).items() if x is not None}
    np.savez(tmp_path / "data.npz", allow_pickle=False, **arrays)
    with pytest.raises(SettingsError, match=told):
        load(small(tmp_path / "data.npz"), BOX, TWO)


def test_more_than_the_capacity_changed_and_missing_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, allow_pickle=False, **two_episodes())
    with pytest.raises(SettingsError, match="capacity 14 or more"):
        load(small(path, **{"replay.capacity": 13}), BOX, TWO)
    load(small(path, **{"replay.capacity": 14}), BOX, TWO)
    with pytest.raises(SettingsError, match=r"algorithm\.replay\.data=.*algorithm\.replay\.data_digest"):
        load(small(path, **{"replay.data_digest": "0" * 64}), BOX, TWO)
    with pytest.raises(SettingsError, match=r"algorithm\.replay\.data=\S*none\.npz "):
        load(small(tmp_path / "none.npz"), BOX, TWO)
    path.write_bytes(b"nothing")
    with pytest.raises(SettingsError, match=r"algorithm\.replay\.data=\S*data\.npz .*numpy\.savez"):
        load(small(path), BOX, TWO)


def cartpole(path: Path, count: int) -> Path:
    draw = np.random.default_rng(1)
    obs = draw.normal(size=(count + 1, 4))
    np.savez(
        path,
        observations=obs[:-1],
        next_observations=obs[1:],
        actions=draw.integers(2, size=count),
        rewards=np.ones(count),
        terminations=draw.random(count) < 0.2,
        truncations=np.zeros(count, bool),
    )
    return path


@pytest.mark.slow
def test_layouts_and_resuming_change_nothing(tmp_path: Path) -> None:
    path = cartpole(tmp_path / "data.npz", 30)
    base = EXPERIMENTS["rainbow-lag-1"]().replace(**{"algorithm.replay.capacity": 4 * 30})
    plain = base.replace(env=recipes.dqn_cartpole().env).replace(**{"env.num_envs": 4})
    experiment = plain.replace(**{"algorithm.replay.data": str(path)})
    whole = train(experiment, "inline", options(tmp_path / "a", 1))
    for layout in ("processes:2", "cpu:a2-l1"):
        assert train(experiment, layout, options(tmp_path / layout[:3])).digest == whole.digest, layout
    assert train(plain, "inline", options(tmp_path / "plain")).digest != whole.digest
    train(experiment, "inline", options(tmp_path / "cut", 1), stop_after=2)
    path.unlink()  # a checkpoint has all of it
    assert resume(tmp_path / "cut", "processes:2").digest == whole.digest


def test_sequences_are_filled(tmp_path: Path) -> None:
    base = EXPERIMENTS["r2d2-uniform-lag-1"]()
    settings = {"replay.data": str(cartpole(tmp_path / "data.npz", 30)), "replay.capacity": 4 * 40}
    experiment = base.replace(**{f"algorithm.{name}": value for name, value in settings.items()})
    data = load(experiment, spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2))
    example = next(rollouts(data, experiment, 0, experiment.algorithm.rollout)).replace(core_state=torch.ones(1, 16))
    memory = SequenceReplay(experiment, example, 0, 6)
    beats: list[int] = []
    fill(memory, experiment, 0, data, example, EpsilonGreedy(spaces.Discrete(2)), lambda: beats.append(memory.count))
    assert beats == list(range(0, memory.count, experiment.algorithm.rollout)), "signs of life"
    assert memory.draw(4, np.random.default_rng(1))[0].max() < memory.count // experiment.algorithm.rollout


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_gives_what_a_file_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("jax")  # which its DataCollector needs
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=12))
    rows: list[tuple[Any, ...]] = []
    for seed in range(4):
        obs, ended = env.reset(seed=seed)[0], False
        while not ended:
            action = len(rows) % 3 % 2
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, after, action, reward, terminated, truncated))
            obs, ended = after, terminated or truncated
    env.create_dataset(dataset_id="cartpole/test-v0", eval_env="CartPole-v1", algorithm_name="fixed")
    names = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations")
    np.savez(
        tmp_path / "data.npz",
        allow_pickle=False,
        **dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True)),
    )
    given = [prepare_with(source) for source in (str(tmp_path / "data.npz"), "minari:cartpole/test-v0")]
    assert given[0] == given[1] != ""
    with pytest.raises(SettingsError, match="Download it: minari download cartpole/none-v0"):
        prepare_with("minari:cartpole/none-v0")


def prepare_with(source: str) -> str:

    experiment = recipes.dqn_cartpole().replace(**{"algorithm.replay.data": source})
    return prepare(experiment, Layout.of("inline")).algorithm.replay.data_digest  # type: ignore[attr-defined]
