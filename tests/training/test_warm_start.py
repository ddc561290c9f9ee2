"""Runs that begin with what another one has learned."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentences import says
from tiny import EXPERIMENTS, cut

from lockstep import recipes
from lockstep.agent import Agent
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import flat, from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.core.digests import state_digest
from lockstep.experiment import Experiment, WarmStart
from lockstep.launchers.launch import resume, train
from lockstep.models.normalize import NormalizeConfig
from lockstep.reports.runs import labels
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint
from lockstep.run.folder import RunFolder
from lockstep.training.prepare import prepare
from lockstep.training.warm_start import load, weights

pytestmark = pytest.mark.usefixtures("processes_are_there_already")
Captured = pytest.CaptureFixture[str]


def cartpole(iterations: int = 3) -> Experiment:
    """PPO on CartPole, its observations and rewards normalized."""
    full = cut(recipes.ppo_cartpole, rollout=32, epochs=4, env={"adapter": "gymnasium"})
    normalize = NormalizeConfig(observations=True, returns=True)
    return full.replace(normalize=normalize, total_steps=iterations * full.samples_per_iteration)


def options(path: Path) -> RunOptions:
    return RunOptions(run=str(path), checkpoint_every=1, display="none", tensorboard=False)


def learned(run: Path, iteration: int | None = None) -> dict[str, torch.Tensor]:
    """What a run's learner holds in a checkpoint."""
    found = checkpoint.find(RunFolder.open(run).checkpoints, iteration)
    return checkpoint.open_checkpoint(found).part("learner")[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, to be read only."""
    path = tmp_path_factory.mktemp("warm") / "source"
    train(cartpole(), None, options(path))
    return path


def after(source: Path, *parts: str, checkpoint: str = "latest") -> Experiment:
    """The same networks with another seed, begun with what the source has learned."""
    return cartpole().replace(seed=7, warm_start=WarmStart(str(source), checkpoint, parts))


def begun(experiment: Experiment) -> dict[str, torch.Tensor]:
    agent = Agent(experiment)
    load(agent, weights(experiment))
    return agent.state()


def test_version_0_is_what_the_other_run_ended_with(source: Path) -> None:
    experiment = prepare(after(source), Layout())
    assert experiment.warm_start.checkpoint == "3"
    held = {name: x for name, x in learned(source).items() if name.startswith(("parameter.", "normalizer."))}
    assert experiment.warm_start.digest == state_digest(held) == state_digest(begun(experiment))
    at_random = Agent(experiment).state()
    assert held.keys() == at_random.keys() and state_digest(at_random) != state_digest(held)
    assert prepare(after(source, checkpoint="1"), Layout()).warm_start.digest != experiment.warm_start.digest


@pytest.mark.parametrize("name", ["mpo", "dqn-prioritized-frames"])
def test_target_networks_begin_so_too(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]()
    train(experiment, None, options(tmp_path / "run"))
    state = begun(prepare(experiment.replace(seed=3, warm_start=WarmStart(str(tmp_path / "run"))), Layout()))
    before = learned(tmp_path / "run")
    targets = [name for name in state if name.startswith("target.")]
    assert targets
    for target in targets:
        parameter = target.replace("target.", "parameter.", 1)
        assert torch.equal(state[target], state[parameter]) and torch.equal(state[parameter], before[parameter])


def test_the_rest_begins_at_random(source: Path) -> None:
    experiment = prepare(after(source, "trunks.0", "normalizer"), Layout())
    state, random, before = begun(experiment), Agent(experiment).state(), learned(source)
    taken = [name for name in state if name.startswith(("parameter.trunks.0.", "normalizer."))]
    assert 0 < len(taken) < len(state)
    for name in state:
        assert torch.equal(state[name], (before if name in taken else random)[name])


def test_every_layout_and_a_repetition_give_the_same_bits_when_the_source_is_gone(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "source")
    experiment = after(copy)
    results = {
        layout: train(experiment, layout, options(tmp_path / str(number)))
        for number, layout in enumerate(["inline", "processes:2", "cpu:a1-l1"])
    }
    cold = train(experiment.replace(warm_start=WarmStart()), None, options(tmp_path / "cold"))
    assert len({result.digest for result in results.values()}) == 1 and cold.digest != results["inline"].digest
    shutil.rmtree(copy)
    run = results["inline"].run
    assert verify(run, Layout.parse("processes:2"), "all").ok
    again = replay(run, None, options(tmp_path / "again"))
    assert again.ok and RunFolder(again.run).weights.read_bytes() == RunFolder(run).weights.read_bytes()
    shutil.rmtree(run / "checkpoints" / "00000003")
    assert resume(run).digest == results["inline"].digest


def test_a_run_that_ended_before_its_first_checkpoint_begins_so_again(source: Path, tmp_path: Path) -> None:
    whole = train(after(source), None, options(tmp_path / "whole"))
    late = dataclasses.replace(options(tmp_path / "run"), checkpoint_every=3)
    train(after(source), None, late)
    for path in (tmp_path / "run" / "checkpoints" / "00000003", tmp_path / "run" / ".checkpointed"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert resume(tmp_path / "run").digest == whole.digest


def test_a_policy_goes_on_from_where_it_was(source: Path, tmp_path: Path) -> None:
    """What balances the pole for a while does so at once where it is what a run begins with."""
    long = train(cartpole(40), None, dataclasses.replace(options(tmp_path / "long"), checkpoint_every=40))
    warm = train(after(long.run), None, options(tmp_path / "warm"))
    cold = train(after(long.run).replace(warm_start=WarmStart()), None, options(tmp_path / "cold"))
    assert warm.score is not None and cold.score is not None
    assert warm.score > 1.5 * cold.score


def test_networks_that_differ_are_told_with_what_fits(source: Path, tmp_path: Path) -> None:
    experiment = after(source)
    deeper = experiment.replace(model=dataclasses.replace(experiment.model, hidden_sizes=(16, 8)))  # type: ignore[call-arg]
    told = r"trunks\.0\S+ is \[8, 16\] here, but absent there, and \d more\. .* --warm-start\.parts normalizer"
    for layout in ("inline", "processes:2"):
        with pytest.raises(SettingsError, match=told):
            train(deeper, layout, options(tmp_path / "run"))
    plain = experiment.replace(normalize=NormalizeConfig())
    told = r"normalizer\.\S+ is absent here, but \[.*--warm-start\.parts trunks policy_head value_head$"
    with pytest.raises(SettingsError, match=told):
        train(plain, None, options(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_mistakes_are_explained(source: Path, tmp_path: Path, capsys: Captured) -> None:
    def told(*flags: str) -> str:
        assert main(["train", "ppo-cartpole", *flags, "--dry-run"]) == 2
        return capsys.readouterr().err

    assert "--warm-start.run /" in (message := told("--warm-start.run", str(tmp_path / "none"))), message
    assert "none does not exist" in message
    message = told("--warm-start.run", str(source), "--warm-start.checkpoint", "77")
    assert says(message, "00000077", ": 1, 2, 3.") and "resume" not in message
    message = told("--warm-start.run", str(source), "--warm-start.parts", "head")
    assert "--warm-start.parts head " in message and "policy_head" in message
    assert main(["train", "ppo-cartpole", "--warm-start.parts", "trunks", "--dry-run"]) == 0
    message = capsys.readouterr().err
    assert says(message, "--warm-start.parts", "without --warm-start.run")
    assert "checkpoint has no effect" not in message and "digest has no effect" not in message


def test_a_folder_has_one_name(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    names = ("source", "./source/", str(source), Path("source"), f"../{source.parent.name}/source")
    found = [prepare(cartpole().replace(warm_start=WarmStart(name)), Layout()) for name in names]  # type: ignore[arg-type]
    assert len({each.identity() for each in found[:4]}) == 1 and found[0].warm_start.run == "source"
    monkeypatch.chdir(tmp_path)
    assert prepare(after(source), Layout()).warm_start.run == str(source), "elsewhere"


def test_a_checkpoint_that_was_set_aside_can_be_begun_with(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    resume(copy, None, options(copy), checkpoint="2", stop_after=2)
    start = prepare(after(copy, checkpoint="00000003.superseded"), Layout()).warm_start
    assert (
        start.checkpoint == "00000003.superseded" and start.digest == prepare(after(source), Layout()).warm_start.digest
    )
    assert weights(prepare(after(copy, checkpoint="00000003.superseded"), Layout()))


def test_processes_of_torchrun_do_as_the_first_says(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may see the source no more, or a newer checkpoint of it."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("lockstep.launchers.launch._start", lambda job, agent: job)
    job: Any = train(after(tmp_path / "gone"), "torchrun", options(tmp_path / "run"))
    assert job.experiment.warm_start.digest == "" and not (tmp_path / "run").exists()


def test_what_changed_since_is_refused(source: Path, tmp_path: Path) -> None:
    result = train(after(source), None, options(tmp_path / "run"))
    kept = RunFolder(result.run).weights
    tensors = load_file(kept)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, kept)
    with pytest.raises(SettingsError, match=r"weights\.safetensors .*warm_start\.digest is "):
        verify(result.run, Layout())
    kept.write_bytes(b"torn")
    with pytest.raises(SettingsError, match=r"weights\.safetensors.* is damaged"):
        verify(result.run, Layout())
    kept.unlink()
    assert verify(result.run, Layout()).ok  # from the run itself
    moved = source.rename(source.with_name("moved"))
    with pytest.raises(SettingsError, match=r"weights\.safetensors.* missing\b.*--warm-start\.run .* exist"):
        verify(result.run, Layout())
    moved.rename(source)
    other = dataclasses.replace(RunFolder(result.run).experiment().warm_start, digest="0" * 64)
    with pytest.raises(SettingsError, match=r"checkpoints/.*warm_start\.digest is 00000000"):
        train(after(source).replace(warm_start=other), None, options(tmp_path / "other"))


def test_experiments_without_one_are_what_they_were() -> None:
    experiment = recipes.ppo_cartpole()
    assert "warm_start" not in to_json(experiment)
    warm = experiment.replace(warm_start=WarmStart("runs/a", parts=("trunks",)))
    assert from_json(json.loads(json.dumps(to_json(warm)))) == warm and warm.identity() != experiment.identity()


def test_runs_are_told_apart_by_what_they_began_with() -> None:
    def told(*starts: WarmStart) -> list[str]:
        return labels([flat(to_json(cartpole().replace(warm_start=start))) for start in starts])

    first, second = WarmStart("a", "3", digest="1"), WarmStart("b", "3", digest="2")
    assert told(WarmStart(), first, second) == ["", "run=a", "run=b"]
    assert told(first, dataclasses.replace(first, checkpoint="2", digest="3")) == ["checkpoint=3", "checkpoint=2"]


def test_the_optimizer_goes_on(source: Path, tmp_path: Path) -> None:
    experiment = prepare(cartpole().replace(seed=7, warm_start=WarmStart(str(source), optimizer=True)), Layout())
    before = learned(source)
    moments = {name: x for name, x in before.items() if name.startswith("optimizer.")}
    assert moments.keys() == {"optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step"}
    taken = weights(experiment)
    assert all(torch.equal(taken[name], moment) for name, moment in moments.items())
    assert state_digest(begun(experiment)) == state_digest(begun(prepare(after(source), Layout())))

    results = [
        train(experiment, layout, options(tmp_path / str(number)), stop_after=stop)
        for number, (layout, stop) in enumerate((("inline", 1), ("processes:2", None), ("cpu:a1-l1", None)))
    ]
    assert resume(results[0].run).digest == results[1].digest == results[2].digest
    anew = train(after(source), None, options(tmp_path / "anew"))
    assert anew.digest != results[1].digest
    steps = [float(learned(run)["optimizer.step"]) for run in (source, results[1].run, anew.run)]
    assert steps == [steps[0], 2 * steps[0], steps[0]]


def test_an_optimizer_that_is_another_one(source: Path, capsys: Captured) -> None:
    experiment = cartpole()
    optimizer = dataclasses.replace(experiment.algorithm.optimizer, name="rmsprop")
    other = experiment.replace(
        algorithm=dataclasses.replace(experiment.algorithm, optimizer=optimizer),
        warm_start=WarmStart(str(source), optimizer=True),
    )
    with pytest.raises(SettingsError, match=r"\badam\b.*\brmsprop\b.*--warm-start.optimizer"):
        begun(prepare(other, Layout()))
    assert main(["train", "ppo-cartpole", "--warm-start.run", str(source), "--warm-start.optimizer",
                 "--warm-start.parts", "trunks", "--dry-run"]) == 2  # fmt: skip
    assert "not those of parts (trunks)" in capsys.readouterr().err


def test_an_optimizer_by_default_leaves_identities_as_they_were(source: Path) -> None:
    assert "optimizer" not in to_json(WarmStart(str(source))) and to_json(WarmStart("x", optimizer=True))["optimizer"]
