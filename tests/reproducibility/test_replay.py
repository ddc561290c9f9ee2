"""Where timing decides, the ledger says what it decided: repeated on any layout, a run ends with the same bits."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import Child
from free_running import forge, free, remembering
from sentences import says
from tiny import cut, options
from workers import Ran, ran_of

from lockstep import recipes
from lockstep.algorithms.offpolicy import OffPolicyConfig
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.core.schedule import Recorded
from lockstep.experiment import Experiment
from lockstep.launchers.launch import launch, resume, train
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify
from lockstep.run import checkpoint, ledger
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import LedgerError
from lockstep.transport.free_running import Pace

INLINE = Layout()
FLAGS = (
    *("train", "ppo-cartpole", "--env.adapter", "gymnasium", "--env.num-envs", "8", "--scheme.lag", "async"),
    *("--algorithm.rollout", "8", "--algorithm.epochs", "1", "--algorithm.minibatches", "1"),
    *("--scheme.acting-batch", "0", "--total-steps", "1M", "--display", "plain", "--no-tensorboard"),
    "--normalize.observations",
)
REPLAYING = (
    *(
        "train",
        "dqn-cartpole",
        "--scheme.lag",
        "async",
        "--algorithm.warmup",
        "200",
        "--algorithm.replay.capacity",
        "2k",
    ),
    *(
        "--algorithm.updates",
        "4",
        "--total-steps",
        "1M",
        "--checkpoint-every",
        "2",
        "--display",
        "plain",
        "--no-tensorboard",
    ),
)


def atari() -> Experiment:
    scheme = {"lag": "async", "max_lag": 1, "shards": 2}
    return cut(recipes.impala_atari, epochs=1, env={"num_envs": 4}, scheme=scheme)


FREE: dict[str, tuple[Callable[[], Experiment], str, str]] = {
    "lstm": (lambda: free(lstm=True), "cpu:a2-l1", "cpu:a1-l2"),
    "normalized-each-step": (
        lambda: free(10, normalize=True, refresh="step"),
        "cpu:a2-l2,jitter=0.003",
        "cpu:a3-l1,jitter=0.003",
    ),
    "appo": (lambda: free(appo=True, max_lag=0, acting_batch=4), "cpu:a3-l1", "cpu:a2-l2"),
    "atari": (atari, "cpu:a2-l1", "cpu:a1-l2"),
    "dqn-slow-learner": (remembering, "cpu:a2-l1,learner_delay=0.1", "cpu:a1-l2"),
    "dqn-slow-collector": (lambda: remembering(updates=1), "cpu:a1-l1,jitter=0.1", "cpu:a2-l2"),
    "r2d2-each-step": (
        lambda: remembering(r2d2=True, refresh="step", max_lag=3),
        "cpu:a2-l2,jitter=0.003",
        "cpu:a3-l1,jitter=0.003",
    ),
}
"""Each with the layout that it ran on, and another to repeat it on."""


pytestmark = pytest.mark.usefixtures("processes_are_there_already", "own_folder")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """Free-running runs, to be read only."""
    folder = tmp_path_factory.mktemp("free")

    @functools.cache
    def ran(name: str) -> Ran:
        make, layout, _ = FREE[name]
        return ran_of(train(make(), Layout.parse(layout), options(folder / name, checkpoint_every=4)))

    return ran


def events(run: Path) -> list[list[dict[str, Any]]]:
    """By iteration and batch slot."""
    return [line["events"] for line in ledger.read(run / "ledger.jsonl")[1]]


def again(run: Path, layout: str = "inline", name: str = "again") -> Ran:
    """Its repetition, found to be equal by replay itself too."""
    found = replay(run, Layout.parse(layout), options(Path(name)))
    assert found.ok and found.difference is None
    return Ran(found.digest, RunFolder(found.run).ledger.read_bytes(), found.run)


def check_events(experiment: Experiment, recorded: list[list[dict[str, Any]]]) -> None:
    """The bounds on the lag and on the number of rollouts, and that each one of a shard is taken once, in order."""
    number = dict.fromkeys(range(experiment.scheme.shards), 0)
    pace = Pace.of(experiment)
    for iteration, slots in enumerate(recorded):
        if iteration < pace.even:
            assert [event["shard"] for event in slots] == list(number)
        for event in slots:
            assert event["rollout"] == number[event["shard"]]
            number[event["shard"]] += 1
            steps, versions = ([pair[i] for pair in event["versions"]] for i in (0, 1))
            assert steps[0] == 0 and steps == sorted(set(steps)) and steps[-1] < experiment.algorithm.rollout
            assert versions == sorted(set(versions)) and versions[-1] <= iteration
            assert versions[0] >= iteration - experiment.scheme.max_lag
            assert len(versions) == 1 or experiment.scheme.refresh == "step"
        assert pace.least(iteration) <= sum(number.values()) <= pace.most(iteration)


# ------------------------------------------------------------------------------------------------------- replay


# test_whatever_was_decided_is_repeated_on_any_layout has an LSTM, and dqn-slow-learner a DQN.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in ("lstm", "dqn-slow-collector") else ()) for name in FREE],
)
def test_a_free_running_run_is_repeated(name: str, recorded: Callable[[str], Ran]) -> None:
    make, _, other = FREE[name]
    run = recorded(name)
    experiment = make()
    check_events(experiment, events(run.run))
    assert len(events(run.run)) == experiment.iterations
    assert again(run.run) == run
    assert again(run.run, other, "other") == run


HAND: list[list[tuple[int, int, tuple[tuple[int, int], ...]]]] = [
    [(0, 0, ((0, 0),)), (1, 0, ((0, 0),)), (0, 1, ((0, 0),)), (1, 1, ((0, 0),))],
    [(1, 2, ((0, 0), (5, 1))), (0, 2, ((0, 0), (2, 1))), (2, 0, ((0, 0),)), (3, 0, ((0, 0),))],
    [(2, 1, ((0, 0), (1, 1), (4, 2))), (3, 1, ((0, 0), (7, 2))), (0, 3, ((0, 1),)), (1, 3, ((0, 2),))],
    [(3, 2, ((0, 1), (3, 2), (6, 3))), (2, 2, ((0, 1),)), (0, 4, ((0, 1), (1, 2))), (1, 4, ((0, 3),))],
]
"""By iteration: (shard, rollout, versions). What timing may decide at a lag of up to 2, and rarely does."""
REMEMBERED: list[list[tuple[int, int, tuple[tuple[int, int], ...]]]] = [
    [(s, 0, ((0, 0),)) for s in range(4)],
    [(s, 1, ((0, 0),)) for s in range(4)],
    [],
    [(0, 2, ((0, 1), (4, 2))), (0, 3, ((0, 1), (7, 3))), (2, 2, ((0, 1),))],
    [(0, 4, ((0, 3),)), (1, 2, ((0, 2), (5, 4))), (2, 3, ((0, 2),)), (2, 4, ((0, 4),)), (3, 2, ((0, 2), (1, 3)))],
]
"""The same with replay."""


def by_hand(experiment: Experiment) -> Recorded:
    hand = REMEMBERED if experiment.algorithm.replays else HAND
    decided = [[{"shard": s, "rollout": r, "versions": v} for s, r, v in slots] for slots in hand]
    schedule = experiment.schedule()
    return Recorded(schedule.lag, schedule.iterations, schedule.shards, schedule.by_shard, decided)


@pytest.mark.parametrize("kind", ["lstm", "normalized", "dqn", "r2d2"])
def test_whatever_was_decided_is_repeated_on_any_layout(kind: str) -> None:
    experiment = free(len(HAND), lstm=kind == "lstm", normalize=kind == "normalized", refresh="step")
    if kind in ("dqn", "r2d2"):
        experiment = remembering(len(REMEMBERED), r2d2=kind == "r2d2", refresh="step")
    schedule = by_hand(experiment)
    alone = ran_of(launch(experiment, INLINE, options(Path("inline")), recorded=schedule))
    assert events(alone.run) == json.loads(json.dumps(schedule.events))
    for layout in ("cpu:a1-l1,jitter=0.003", "cpu:a2-l2", "cpu:a1-l3" if kind == "normalized" else "cpu:a3-l1"):
        split = launch(experiment, Layout.parse(layout), options(Path(layout.replace(":", "-"))), recorded=schedule)
        assert ran_of(split) == alone, layout

    others = [[{**event, "versions": event["versions"][:1]} for event in slots] for slots in schedule.events]
    fewer = dataclasses.replace(schedule, events=others)
    assert ran_of(launch(experiment, INLINE, options(Path("fewer")), recorded=fewer)).digest != alone.digest


def test_when_replay_took_a_rollout_changes_what_is_learned() -> None:
    experiment = remembering(len(REMEMBERED), refresh="step")
    schedule = by_hand(experiment)
    alone = ran_of(launch(experiment, INLINE, options(Path("inline")), recorded=schedule))
    three, five = schedule.events[3:]
    early = [*schedule.events[:3], [*three[:2], five[0], three[2]], five[1:]]
    result = launch(experiment, INLINE, options(Path("early")), recorded=dataclasses.replace(schedule, events=early))
    assert ran_of(result).digest != alone.digest


@pytest.mark.parametrize("name", ["dqn-slow-learner", "dqn-slow-collector", "r2d2-each-step"])
def test_metrics_say_how_often_samples_were_learned_from(name: str, recorded: Callable[[str], Ran]) -> None:
    experiment, run = FREE[name][0](), recorded(name).run
    taken = [len(slots) for slots in events(run)]
    lines = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    assert [line["samples"] for line in lines] == [8 * sum(taken[: i + 1]) for i in range(len(taken))]
    assert "replay/ratio" not in lines[0] and lines[1]["updates"] == experiment.algorithm.gradient_steps(32)[0]
    updates, step = experiment.algorithm.gradient_steps(32)
    for i, line in enumerate(lines[1:], start=1):
        assert line["replay/ratio"] == pytest.approx(i * updates * step / (8 * sum(taken[1 : i + 1])))
        assert 1 / 2 <= line["replay/ratio"] / (updates * step / 32) <= 2
        assert ("lag/policy_versions" in line) == bool(taken[i])
    if name == "dqn-slow-learner":
        assert sum(taken) > 4 * len(taken)
    if name == "dqn-slow-collector":
        assert sum(taken) < 4 * len(taken)


def test_a_repetition_is_repeated_and_verified(recorded: Callable[[str], Ran]) -> None:
    run = recorded("lstm")
    first = again(run.run)
    assert again(first.run, name="second") == run
    assert json.loads(Path("again/replay.json").read_text()) == {"of": str(run.run)}
    for path, count, layout in ((run.run, "all", INLINE), (first.run, 2, Layout.parse("cpu:a1-l1"))):
        verdict = verify(path, layout, count)  # type: ignore[arg-type]
        assert verdict.ok, verdict.message


def test_a_deterministic_run_is_repeated_too() -> None:
    run = ran_of(train(cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}), INLINE, options(Path("run"))))
    assert again(run.run, "processes:2") == run


# ------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("kind", "so_far", "numbers"),
    [
        ("lstm", 3, [4, 4, 2, 2]),
        ("dqn", 4, [4, 2, 3, 2]),
        pytest.param("noisy", 4, [4, 2, 3, 2], marks=pytest.mark.full),  # as dqn, with noise
    ],
)
def test_a_resumed_run_is_repeated_as_a_whole(kind: str, so_far: int, numbers: list[int]) -> None:
    """From a checkpoint at which shards had reached different rollouts, and on another layout each time."""
    experiment = free(9, lstm=True, normalize=True, refresh="step", max_lag=2)
    if kind != "lstm":
        experiment = remembering(10, refresh="step")
    if kind == "noisy":
        experiment = experiment.replace(model=dataclasses.replace(experiment.model, noisy=True))  # type: ignore[call-arg]
    launch(experiment, INLINE, options(Path("run")), stop_after=so_far, recorded=by_hand(experiment))
    saved = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints"))
    assert saved.iteration == so_far
    assert [saved.part(f"shard-{shard:03d}")[1]["rollouts"] for shard in range(4)] == numbers
    Path("run/replay.json").unlink()  # as if a free-running run had come so far

    for layout, stop in (("cpu:a2-l1", so_far + 3), ("cpu:a1-l2,jitter=0.003", None)):
        result = resume("run", Layout.parse(layout), options(Path("run"), checkpoint_every=1), stop_after=stop)
    run = ran_of(result)
    assert result.iterations == experiment.iterations
    check_events(experiment, events(run.run))
    assert events(run.run)[:so_far] == json.loads(json.dumps(by_hand(experiment).events[:so_far]))
    assert any("noise" in event for slots in events(run.run) for event in slots) == (kind == "noisy")
    assert again(run.run) == run
    assert again(run.run, "cpu:a2-l1", "split") == run


def test_a_checkpoint_holds_the_newest_version_alone(recorded: Callable[[str], Ran]) -> None:
    run = recorded("normalized-each-step").run
    decided = events(run)
    for path in checkpoint.list_checkpoints(run / "checkpoints"):
        saved = checkpoint.open_checkpoint(path)
        tensors, meta = saved.part("learner")
        assert meta["versions"] == [saved.iteration]
        assert {name.split(".")[1] for name in tensors if name.startswith("version.")} == {str(saved.iteration)}
        learned = [event["shard"] for slots in decided[: saved.iteration] for event in slots]
        for shard in range(4):
            assert saved.part(f"shard-{shard:03d}")[1]["rollouts"] == learned.count(shard)


def test_stopped_by_a_signal_and_resumed(start: Callable[..., Child]) -> None:
    """With processes of its own."""
    child = start(*FLAGS, "--layout", "cpu:a2-l1", "--run", "run")
    child.until(lambda: Path("run/ledger.jsonl").exists() and len(events_so_far()) >= 5, "some iterations")
    child.signal(signal.SIGTERM)
    assert child.wait() == 130, child.output()
    stopped = len(events(Path("run")))
    assert checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints")).iteration == stopped
    assert resume("run", options=options(Path("run")), stop_after=stopped + 3).iterations == stopped + 3
    found = replay("run", INLINE, options(Path("again")))
    assert found.ok and found.iterations == stopped + 3
    assert Path("again/ledger.jsonl").read_bytes() == Path("run/ledger.jsonl").read_bytes()


@pytest.mark.parametrize("kind", ["learner", "collector"])
def test_killed_and_resumed_with_replay(kind: str, start: Callable[..., Child]) -> None:
    """With processes of its own."""
    child = start(*REPLAYING, "--layout", "cpu:a2-l1", "--run", "run")
    child.until(lambda: Path("run/ledger.jsonl").exists() and len(events_so_far()) >= 6, "some iterations")
    os.kill(child.tree()[kind][0], signal.SIGKILL)
    assert child.wait() == 1
    assert re.search(rf"{kind.capitalize()} \d of \d .*SIGKILL", child.output()), child.output()
    saved = checkpoint.open_checkpoint(checkpoint.latest("run/checkpoints")).iteration
    assert resume("run", options=options(Path("run")), stop_after=saved + 4).iterations == saved + 4
    check_events(RunFolder.open("run").experiment(), events(Path("run")))
    verdict = verify("run", INLINE, "all")
    assert verdict.ok and verdict.iterations == saved + 4, verdict.message


def events_so_far() -> list[bytes]:
    return Path("run/ledger.jsonl").read_bytes().splitlines()[1:]


# --------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_run_freely_is_refused(recorded: Callable[[str], Ran]) -> None:
    run = recorded("lstm").run
    for layout in ("inline", "processes:2"):
        with pytest.raises(SettingsError, match=f"--scheme.lag async with --layout {layout}: .* cpu:a1-l1"):
            train(free(), Layout.parse(layout), options(Path("refused")))
        with pytest.raises(SettingsError, match=f"--scheme.lag async with --layout {layout}: .* cpu:a1-l1"):
            resume(run, Layout.parse(layout))
    with pytest.raises(SettingsError, match=r"--layout processes:2 .*free-running.* cpu:aC-lL"):
        replay(run, Layout.parse("processes:2"), options(Path("refused")))
    assert not Path("refused").exists()

    with pytest.raises(SettingsError, match=r"scheme.max_lag=0 with replay.*--scheme.max-lag 1 or more"):
        train(remembering(max_lag=0), Layout.parse("cpu:a1-l1"), options(Path("refused")))
    tiny = remembering(lag=1, max_lag=4)
    with pytest.raises(SettingsError, match=r"algorithm.replay.slack=0.1 .*--scheme.lag async"):
        train(replace_slack(tiny, 0.1), INLINE, options(Path("refused")))
    with pytest.raises(SettingsError, match=r"algorithm.replay.slack=-1 .*at least 0"):
        train(replace_slack(remembering(), -1), Layout.parse("cpu:a1-l1"), options(Path("refused")))
    assert not Path("refused").exists()

    repeated = again(run).run
    with pytest.raises(SettingsError, match=r"another run.*replay.json"):
        resume(repeated)
    with pytest.raises(SettingsError, match="runs/nothing does not exist"):
        replay("runs/nothing")


def replace_slack(experiment: Experiment, slack: float) -> Experiment:
    algorithm = experiment.algorithm
    assert isinstance(algorithm, OffPolicyConfig)
    memory = dataclasses.replace(algorithm.replay, slack=slack)
    return experiment.replace(algorithm=dataclasses.replace(algorithm, replay=memory))


def test_the_command(recorded: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded("lstm")
    quiet = ("--display", "none", "--no-tensorboard")
    assert main(["replay", str(run.run), "--run", "here", *quiet]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "run: here" and printed[-1] == f"digest: {run.digest}"
    assert says(printed, "Replayed: all 6 recorded iterations", str(run.run), "same bits")
    assert main(["replay", str(run.run), "--layout", "cpu:a1-l1", "--run", "there", "--json", *quiet]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "run": "there",
        "digest": run.digest,
        "iterations": 6,
        "difference": None,
        "stopped": False,
        "warning": None,
    }

    line = ledger.read(run.run / "ledger.jsonl")[1][2]
    parameters = {**line["parameters"], next(iter(line["parameters"])): "0" * 16}
    forged = forge(run.run, 2, parameters=parameters)
    assert main(["replay", str(forged), "--run", "wrong", *quiet]) == 1
    printed = capsys.readouterr().out
    assert says(printed, f"differs from {forged}", "Iteration 2: parameter ")
    assert f"0000000000000000 != {line['parameters'][next(iter(parameters))]}" in printed
    assert main(["replay", str(forged), "--run", "wrong-again", "--json", *quiet]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["iteration"] == 2

    assert main(["replay", str(run.run), "--layout", "processes:2", *quiet]) == 2
    assert "cannot repeat a free-running run" in capsys.readouterr().err


def test_an_interrupted_replay_claims_nothing_of_the_rest(
    recorded: Callable[[str], Ran], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("lstm").run
    monkeypatch.setattr("lockstep.reproducibility.replay.launch", lambda *a, **k: launch(*a, **{**k, "stop_after": 2}))
    quiet = ("--display", "none", "--no-tensorboard")
    assert main(["replay", str(run), "--run", "some", *quiet]) == 130
    printed = capsys.readouterr().out.splitlines()
    assert says(printed[-1], "stopped after 2 iterations", "same bits", str(run))
    forged = forge(run, 1, parameters={"made_up": "0" * 16})
    assert main(["replay", str(forged), "--run", "other", "--json", *quiet]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"] and found["difference"]["iteration"] == 1


def test_a_changed_event_is_found(recorded: Callable[[str], Ran]) -> None:
    run = recorded("normalized-each-step")
    slots = events(run.run)[4]
    slot = next(i for i in range(3) if slots[i]["shard"] != slots[i + 1]["shard"])
    slots[slot], slots[slot + 1] = slots[slot + 1], slots[slot]
    found = replay(forge(run.run, 4, events=slots), INLINE, options(Path("exchanged")))
    assert not found.ok and found.difference is not None and found.difference.iteration == 4

    path = run.run / "ledger.jsonl"
    edited = Path(shutil.copytree(run.run, "edited"))
    text = path.read_text()
    (edited / "ledger.jsonl").write_text(re.sub(r'("iteration":3.*?"rollout":)\d+', r"\g<1>77", text, count=1))
    with pytest.raises(LedgerError, match=r"is invalid from iteration 3 "):
        replay(edited, INLINE, options(Path("refused")))


@pytest.mark.parametrize(("name", "took"), [("normalized-each-step", 3), ("dqn-slow-learner", 0)])
def test_a_number_of_rollouts_that_cannot_have_been_decided_is_refused(
    name: str, took: int, recorded: Callable[[str], Ran]
) -> None:
    """On-policy every iteration takes four; with replay the first that learns takes at least two at this slack."""
    run = recorded(name).run
    iteration = 4 if name == "normalized-each-step" else 1
    slots = events(run)[iteration][:took]
    with pytest.raises(LedgerError, match=rf"iteration {iteration}: {took} rollouts"):
        replay(forge(run, iteration, events=slots), INLINE, options(Path("refused")))


@pytest.mark.parametrize("layout", ["inline", "cpu:a2-l1"])
@pytest.mark.parametrize(
    "change",
    [
        *({"rollout": 99}, {"shard": 9}, {"versions": [[0, 99]]}, {"versions": [[0, 0]]}, {"versions": []}),
        *({"versions": [[0, 3], [1, 999], [2, 4]]}, {"versions": [[0, 3], [999, 4]]}, {"versions": [[0, 3, 1]]}),
        {"versions": "none"},
    ],
)
def test_what_cannot_have_been_decided_is_refused(
    layout: str, change: dict[str, Any], recorded: Callable[[str], Ran]
) -> None:
    """Else a collector would wait for a version that never comes."""
    run = recorded("normalized-each-step").run
    slots = events(run)[4]
    forged = forge(run, 4, events=[{**slots[0], **change}, *slots[1:]])
    with pytest.raises(LedgerError, match=r"impossible decision in iteration 4\b"):
        replay(forged, Layout.parse(layout), options(Path("refused")))
    assert not Path("refused").exists()


def test_edited_settings_are_not_replayed(recorded: Callable[[str], Ran]) -> None:
    copy = Path(shutil.copytree(recorded("lstm").run, "edited"))
    settings = json.loads((copy / "experiment.json").read_text())
    settings["scheme"]["lag"] = 0
    (copy / "experiment.json").write_text(json.dumps(settings))
    with pytest.raises(SettingsError, match=r"contradicts its own ledger: settings: scheme\.lag"):
        replay(copy, INLINE, options(Path("never")))
    assert not Path("never").exists()
