from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sentences import says
from tiny import EXPERIMENTS, cut, options, tuple_bandit
from torch import Tensor

import lockstep
from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.evaluation.policy import Policy, load_policy
from lockstep.experiment import Experiment
from lockstep.export import policy as exporting
from lockstep.export.policy import Check, Export, Format, export, load
from lockstep.export.step import EnvironmentAction, normal_quantile
from lockstep.models.action_spaces import make_distribution
from lockstep.models.base import Described
from lockstep.models.continuous import Deterministic, DiagonalGaussian, SquashedGaussian
from lockstep.models.distributions import EpsilonGreedy
from lockstep.run.checkpoint import iteration_of, list_checkpoints

onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="the extra export is not installed",
)


RUNS: dict[str, Callable[[], Experiment]] = {
    "lstm": lambda: cut(recipes.ppo_memory, model={"previous_action_reward": True}),
    "transformer": lambda: cut(recipes.ppo_memory, model={"core": "transformer", "core_memory": 3, "core_layers": 2}),
    "mingru": lambda: cut(recipes.ppo_memory, model={"core": "mingru"}),
    "mask-bf16": lambda: cut(tuple_bandit, precision="bf16"),
    **{name: EXPERIMENTS[name] for name in ("cartpole-lag-1", "memory-gru-lag-2", "tuple-dict-mask", "mpc-lag-1")},
    **{name: EXPERIMENTS[name] for name in ("mujoco-normalized", "sac-prioritized-lag-1", "rainbow-lag-1", "iqn")},
    "pqn-gru-lag-1": EXPERIMENTS["pqn-gru-lag-1"],
    "sac-gru": EXPERIMENTS["sac-gru-lag-1"],
}
IN_ONNX = ("transformer", "tuple-dict-mask", "mujoco-normalized")
"""Their ONNX begins with torch's own export, which would be the same again; others show that its file can be read."""
CASES: list[Any] = [
    *(
        pytest.param(name, "torch", marks=pytest.mark.full if name in IN_ONNX else ())
        for name in RUNS
        if name != "mask-bf16"
    ),
    *((name, "torchscript") for name in ("lstm", "tuple-dict-mask")),
    *(
        pytest.param(name, "onnx", marks=onnx)
        for name in ("lstm", "transformer", "mingru", "tuple-dict-mask", "mujoco-normalized")
    ),
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of three iterations, made when it is first asked for."""
    runs = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        path = runs / name
        if not path.exists():
            lockstep.train(RUNS[name](), Layout.parse("inline"), options(path))
        return path

    return run


@pytest.mark.parametrize(("name", "format"), CASES)
def test_an_exported_policy_acts_as_the_model(
    name: str, format: Format, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / f"policy{exporting.SUFFIXES[format]}"
    done = export(trained(name), out, format=format, observations=80)
    check = done.check
    assert done.ok and check.observations == check.equal == check.equal_in_training == 80, done
    assert check.difference is not None and check.difference < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.json"}
    told = json.loads((tmp_path / f"{out.name}.json").read_text())
    run = load(out)
    assert run is not None
    inputs = {
        key: torch.zeros(3, *entry["shape"][1:], dtype=getattr(torch, entry["dtype"]))
        for key, entry in told["inputs"].items()
    }
    outputs = run(inputs)
    assert set(outputs) == set(told["outputs"])
    for key, entry in told["outputs"].items():
        assert [3, *entry["shape"][1:]] == list(outputs[key].shape)
        assert entry["dtype"] == str(outputs[key].dtype).removeprefix("torch.")
    assert all(told["inputs"][into]["shape"] == told["outputs"][out]["shape"] for out, into in told["feedback"].items())
    assert told["actions"] == done.acting == ("deterministic" if name == "mpc-lag-1" else "greedy")
    distribution = load_policy(trained(name)).model.distribution
    assert isinstance(distribution, Described) and told["policy"] == distribution.description
    if format == "onnx":
        assert_axes_are_named(out, told)


def assert_axes_are_named(path: Path, told: dict[str, Any]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for kind, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        assert {value.name: value.shape for value in values} == {n: each["shape"] for n, each in told[kind].items()}
        assert all(value.shape[0] == "batch" for value in values)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param("tuple-dict-mask", "onnx", marks=onnx),  # logits and means
        ("sac-prioritized-lag-1", "torch"),
        ("rainbow-lag-1", "torchscript"),
    ],
)
def test_an_exported_policy_draws_as_the_model(
    name: str, format: Format, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / f"policy{exporting.SUFFIXES[format]}"
    done = export(trained(name), out, format=format, observations=80, sample=True)
    assert done.ok and done.check.equal == 80, done
    told = json.loads((tmp_path / f"{out.name}.json").read_text())
    assert told["actions"] == done.acting == ("ε-greedy (ε 0.001)" if name == "rainbow-lag-1" else "sampled")
    assert done.acting in str(done)
    if format == "onnx":
        assert_axes_are_named(out, told)
    run, shapes = load(out), {key: [64, *entry["shape"][1:]] for key, entry in told["inputs"].items()}
    inputs = {
        key: torch.zeros(shape, dtype=getattr(torch, told["inputs"][key]["dtype"])) for key, shape in shapes.items()
    }
    drawn = run({**inputs, "noise": torch.rand(shapes["noise"], generator=torch.Generator().manual_seed(1))})
    varied = any(len(x.unique(dim=0)) > 1 for key, x in drawn.items() if key.startswith("action"))
    assert varied is (name != "rainbow-lag-1"), "which takes another action one time in 1,000"


def test_a_policy_of_single_actions_draws_nothing(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--sample"):
        export(trained("mpc-lag-1"), tmp_path / "policy.pt2", sample=True)
    assert not list(tmp_path.iterdir())


def test_the_normal_quantile_in_plain_operations() -> None:
    p = torch.cat([torch.linspace(1e-7, 1 - 1e-7, 10_001), torch.tensor([0.075, 0.5, 0.925])]).double()
    torch.testing.assert_close(normal_quantile(p), torch.special.ndtri(p), rtol=0, atol=1e-6)
    torch.testing.assert_close(normal_quantile(p.float()), torch.special.ndtri(p.float()), rtol=1e-5, atol=1e-5)


def test_training_in_bf16_states_how_many_actions_differ(trained: Callable[[str], Path], tmp_path: Path) -> None:
    done = export(trained("mask-bf16"), tmp_path / "policy.pt2", observations=80)
    assert done.ok and done.check.equal == 80 and done.precision == "bf16"
    assert says(str(done), "bf16", f"{done.check.equal_in_training} of 80 actions")


def test_memory_goes_on_between_steps_and_ends_at_starts(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run = trained("memory-gru-lag-2")
    export(run, tmp_path / "policy.pt2", observations=8)
    step = load(tmp_path / "policy.pt2")
    assert step is not None
    obs, going, start = torch.rand(2, 7), torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    first = step({"obs": obs, "start": start, "state": torch.zeros(2, 16)})
    second = step({"obs": obs, "start": going, "state": first["next_state"]})
    again = step({"obs": obs, "start": start, "state": second["next_state"]})
    assert not torch.allclose(first["policy"], second["policy"], atol=1e-6)
    torch.testing.assert_close(first["policy"], again["policy"])


def test_a_file_that_acts_otherwise_is_noticed(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(path: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        run = load(path)
        assert run is not None
        return lambda inputs: {name: (1 - x if name == "action" else x) for name, x in run(inputs).items()}

    monkeypatch.setattr(exporting, "load", broken)
    command = ["export", str(trained("cartpole-lag-1")), "--out", str(tmp_path / "p.pt2"), "--observations", "16"]
    assert main(command) == 1
    assert "actions: 0 of 16 equal" in capsys.readouterr().out


def test_a_checkpoint_that_is_written_meanwhile_is_not_mixed_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    lockstep.train(RUNS["cartpole-lag-1"](), Layout.parse("inline"), options(run, checkpoint_every=1))
    *_, newest = list_checkpoints(run / "checkpoints")
    newest.rename(tmp_path / "newest")
    loaded = []

    def loading(path: Path, *args: Any, **kwargs: Any) -> Policy:
        policy = load_policy(path, *args, **kwargs)
        loaded.append(policy.iteration)
        if not newest.exists():
            (tmp_path / "newest").rename(newest)
        return policy

    monkeypatch.setattr(exporting, "load_policy", loading)
    done = export(run, tmp_path / "p.pt2", observations=8)
    assert loaded == [done.iteration] * 2 and done.iteration < iteration_of(newest)


def test_the_command_line_writes_into_the_runs_folder(
    trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("cartpole-lag-1")
    assert main(["export", str(run), "--observations", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(run / "policy.pt2") and told["equal"] == told["observations"] == 8
    description = json.loads((run / "policy.pt2.json").read_text())
    assert description["inputs"] == {
        "obs": {"dtype": "float32", "shape": ["batch", 4], "meaning": "raw observation, as lockstep's models see it"}
    }
    assert str(run.parent) not in json.dumps(description)


def test_mistakes_are_explained(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run = trained("cartpole-lag-1")
    with pytest.raises(SettingsError, match=r"name .*\.onnx"):
        export(run, tmp_path / "policy.pt2", format="onnx")
    with pytest.raises(SettingsError, match="--observations 0"):
        export(run, observations=0)
    with pytest.raises(SettingsError, match=r"Cannot write /proc/policy\.pt2"):
        export(run, "/proc/policy.pt2")
    with pytest.raises(SettingsError, match=r"/none .*train"):
        export(tmp_path / "none")


def test_a_file_that_nothing_here_could_run_is_not_written(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    with pytest.raises(SettingsError, match=r"onnxruntime.*not installed"):
        export(trained("cartpole-lag-1"), tmp_path / "policy.onnx", format="onnx")
    assert not list(tmp_path.iterdir())


@onnx
def test_what_a_format_does_not_know_is_named(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="ndtri"):
        export(trained("mpc-lag-1"), tmp_path / "policy.onnx", format="onnx", observations=8)
    assert not list(tmp_path.iterdir())


BOX = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 5.0], np.float32))
DISTRIBUTIONS = [
    make_distribution(spaces.Discrete(3, start=2)),
    make_distribution(BOX),
    make_distribution(BOX, squash=True),
    make_distribution(spaces.Box(-np.inf, 1.0, (2, 2), np.float64)),
    make_distribution(spaces.MultiDiscrete(np.array([[3, 2], [4, 5]]), start=np.array([[1, 0], [0, 7]]))),
    make_distribution(spaces.MultiBinary(4)),
    make_distribution(spaces.Tuple((spaces.Discrete(4, start=1), BOX, spaces.MultiDiscrete([2, 3])))),
    make_distribution(spaces.Dict(speed=BOX, gear=spaces.Discrete(4, start=1))),
    EpsilonGreedy(spaces.Discrete(4, start=-1)),
    Deterministic(BOX),
    DiagonalGaussian(BOX),
    SquashedGaussian(BOX),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: f"{type(d).__name__}-{d.num_params}")
def test_actions_for_the_environment_are_those_of_to_env(distribution: Any) -> None:
    params = 3 * torch.randn(50, distribution.num_params, generator=torch.Generator().manual_seed(1))
    action = distribution.mode(params)
    expected = distribution.to_env(action.numpy())
    expected = expected if isinstance(expected, tuple) else (expected,)
    for (_, tensor), array in zip(EnvironmentAction(distribution).named(action), expected, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)


class Boltzmann(EpsilonGreedy):
    def explore(self, params: torch.Tensor, noise: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return (params / numbers + noise).argmax(-1)


class Reversed(EpsilonGreedy):
    def to_env(self, action: Any) -> Any:
        return self.n - 1 - action


def test_distributions_of_users_are_exported_if_their_actions_are_lockstep_s() -> None:
    (action,) = EnvironmentAction(Boltzmann(spaces.Discrete(4, start=2)))(torch.tensor([0, 3]))
    assert action.tolist() == [2, 5], "exploration is no part of a file"
    with pytest.raises(SettingsError, match=r"Reversed .*to_env"):
        EnvironmentAction(Reversed(spaces.Discrete(4)))


def test_a_policy_that_diverged_is_not_exported(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_policy = exporting.load_policy

    def diverged(*arguments: Any, **named: Any) -> Any:
        policy = load_policy(*arguments, **named)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.fill_(torch.nan)
        return policy

    monkeypatch.setattr(exporting, "load_policy", diverged)
    with pytest.raises(SettingsError, match=r"NaN.* --checkpoint"):
        export(trained("cartpole-lag-1"), tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("precision", "equal", "in_training", "as_alone", "ok"),
    [
        ("fp32", 10, 10, True, True),
        ("fp32", 9, 10, True, False),
        ("fp32", 10, 9, True, False),
        ("bf16", 10, 9, True, True),
        ("bf16", 10, 10, False, False),
    ],
)
def test_an_export_is_as_good_as_the_model_or_not(
    precision: str, equal: int, in_training: int, as_alone: bool, ok: bool
) -> None:
    check = Check(10, equal, 0.0, in_training, as_alone)
    assert Export(Path("policy.pt2"), Path("policy.pt2.json"), 3, precision, check).ok is ok
