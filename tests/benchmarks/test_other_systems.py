"""Comparisons with other systems: what they are told, how their scripts are run, and what is made of their answers.

The systems themselves are not installed here: scripts of the same form stand for them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from children import until
from other_systems import compare as comparing
from other_systems import installed, systems
from other_systems.compare import Comparison, System, compare
from other_systems.installed import PeerError
from other_systems.task import comparable, task_of
from peers import main

from lockstep import Layout, recipes
from lockstep.algorithms import PPOConfig
from lockstep.config.settings import SettingsError
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.scheme import Scheme

SCRIPTS = Path(comparing.__file__).parent
METER = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
import time
from _script import Meter, end_with, read_task
task = read_task()
"""
ENDLESS = METER + "end_with(task['parent']); import os, pathlib; pathlib.Path({pid!r}).write_text(str(os.getpid()))\n"


def cartpole() -> Experiment:
    return Experiment(
        env=EnvConfig("CartPole-v1", 8, "gymnasium"),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True),
        algorithm=PPOConfig(rollout=16, minibatches=2, epochs=3),
        scheme=Scheme(shards=1),
        precision="fp32",
    )


def peer(script: Path, name: str = "Other", **changes: Any) -> systems.Peer:
    fields: dict[str, Any] = {
        "name": name,
        "environment": "none",
        "requirements": (),
        "script": str(script),
        "packages": ("pytest",),
        "unable": lambda task: "",
        "layouts": lambda task: [{"speed": 1.0}],
    }
    return systems.Peer(**(fields | changes))


def script(folder: Path, text: str) -> Path:
    path = folder / f"script{len(list(folder.iterdir()))}.py"
    path.write_text(text, encoding="utf-8")
    return path


def run(script: Path, **task: Any) -> dict[str, Any]:
    settings = {"seconds": 0.2, "warmup": 0.0, "packages": ["pytest"], **task}
    return comparing._run_script(peer(script), Path(sys.executable), settings)


@pytest.mark.envpool
def test_a_task_has_the_environments_of_the_experiment() -> None:
    classic = EnvConfig("Breakout", 64, "ale", "classic")
    task = task_of(comparable(recipes.ppo_atari().replace(env=classic)), threads=2)
    assert task["env"]["library"] == "envpool" and task["env"]["id"] == "Breakout-v5"
    options = task["env"]["options"]
    assert options["episodic_life"] and options["reward_clip"] and options["repeat_action_probability"] == 0.0
    assert task["model"]["encoder"] == "nature" and task["model"]["activation"] == "relu"
    machado = task_of(comparable(recipes.appo_atari()), threads=2)
    options = machado["env"]["options"]
    assert not options["episodic_life"] and options["repeat_action_probability"] == 0.25
    assert (machado["model"]["core"], machado["model"]["core_size"]) == ("lstm", 512)
    assert (machado["model"]["encoder"], machado["model"]["activation"]) == ("convnet_simple", "elu")
    assert machado["algorithm"]["name"] == "appo"


@pytest.mark.envpool
def test_a_task_with_replay_has_its_ratio_and_memory() -> None:
    task = task_of(comparable(recipes.dqn_atari()), threads=2)
    assert json.loads(json.dumps(task)) == task
    assert (task["env"]["library"], task["env"]["id"], task["model"]["encoder"]) == ("envpool", "Breakout-v5", "nature")
    algorithm = task["algorithm"]
    assert (algorithm["name"], algorithm["batch_size"], algorithm["capacity"]) == ("dqn", 32, 1_000_000)
    assert algorithm["rollout"] * task["num_envs"] == 4 * algorithm["updates"]
    other, torchrl, samples = (systems.PEERS[name] for name in ("stable-baselines3", "torchrl", "sample-factory"))
    assert other.unable(task) == "" and torchrl.unable(task) and samples.unable(task)
    sac = task_of(comparable(recipes.sac_mujoco()), threads=2)
    assert sac["env"]["id"] == "HalfCheetah-v4" and sac["model"]["mlp_sizes"] == [256, 256]
    assert sac["algorithm"]["updates"] == sac["algorithm"]["rollout"] * sac["num_envs"]


@pytest.mark.envpool
@pytest.mark.parametrize("name", ["rainbow-atari", "c51-atari", "r2d2-atari", "td3-mujoco", "mpc-pendulum"])
def test_what_was_added_to_replay_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="--peers cannot compare"):
        comparable(recipes.RECIPES[name]())


def test_a_task_is_json_and_has_batches_and_epochs() -> None:
    task = task_of(comparable(cartpole()), threads=3)
    assert json.loads(json.dumps(task)) == task
    assert task["env"] == {
        "library": "gymnasium",
        "id": "CartPole-v1",
        "atari": False,
        "image": False,
        "options": {},
    }
    assert (task["num_envs"], task["threads"]) == (8, 3)
    assert {key: task["algorithm"][key] for key in ("rollout", "epochs", "minibatches")} == {
        "rollout": 16,
        "epochs": 3,
        "minibatches": 2,
    }
    assert task["model"]["mlp_sizes"] == [64, 64] and task["model"]["separate_value_network"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"algorithm": recipes.impala_atari().algorithm}, "impala"),
        ({"normalize": recipes.ppo_mujoco().normalize}, "normalization"),
        ({"env": EnvConfig("Pendulum-v1", 8, "gymnasium")}, "Box"),
        ({"env": EnvConfig("CartPole-v1", 8, "gymnasium", random_actions=True)}, "random actions"),
    ],
)
def test_what_others_cannot_train_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(SettingsError, match=f"--peers cannot compare.*{what}"):
        comparable(cartpole().replace(**changes))


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("count", [16, 20, 32, 64, 320, 640])
@pytest.mark.parametrize("library", ["envpool", "gymnasium", "vizdoom"])
def test_sample_factory_always_steps_all_environments(cores: int, count: int, library: str) -> None:
    task = {"threads": cores, "num_envs": count, "env": {"library": library, "image": library != "gymnasium"}}
    layouts = systems.PEERS["sample-factory"].layouts(task)
    assert any(layout["serial_mode"] for layout in layouts)
    for layout in layouts:
        pools = layout["num_workers"] * layout["num_envs_per_worker"]
        assert layout["num_envs_per_worker"] % layout["worker_num_splits"] == 0
        assert count % pools == 0 if library == "envpool" else count == pools


def test_who_can_train_what() -> None:
    other, recurrent = systems.PEERS["stable-baselines3"], {**task_of(cartpole(), threads=1)}
    assert other.unable(recurrent) == ""
    recurrent["model"] = {**recurrent["model"], "core": "lstm"}
    assert "recurrent" in other.unable(recurrent)
    assert systems.PEERS["sample-factory"].unable(recurrent) == ""


def test_names_and_files(tmp_path: Path) -> None:
    file = tmp_path / "ppo_atari_envpool.py"
    for text, what in (
        ("rllib", "no peer 'rllib'"),
        ("cleanrl", "your copy of CleanRL"),
        (f"leanrl={file}", "no such"),
    ):
        with pytest.raises(SettingsError, match=what):
            systems.find(text)
    file.write_text("")
    found = systems.find(f"leanrl={file}")
    task = {"threads": 2, "env": {"image": True}}
    assert found.layouts(task) == [{"torch_threads": 2, "file": str(file), "flags": ["--compile"]}]
    assert systems.find("torchrl") is systems.PEERS["torchrl"]


def test_a_rate_is_that_of_whole_iterations_after_the_first(tmp_path: Path) -> None:
    # The first iteration takes a second; the others a fiftieth, for 10 samples each.
    text = METER + (
        "meter, seen = Meter(task), 0\ntime.sleep(1)\n"
        "while not meter.mark(seen := seen + 10): time.sleep(0.02)\n"
        "print('more')"
    )
    answer = run(script(tmp_path, text))
    assert answer["samples"] % 10 == 0 and answer["seconds"] >= 0.2
    assert answer["samples_per_second"] == pytest.approx(answer["samples"] / answer["seconds"])
    # Of sleeps that only ever last longer: at most the nominal rate, and no trace of the first second's.
    assert answer["samples_per_second"] <= 10 / 0.02
    assert answer["versions"] == {"pytest": pytest.__version__}


def test_a_failed_script_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"code 3\b(.|\n)*what it said"):
        run(script(tmp_path, "import sys; print('what it said'); sys.exit(3)"))


def test_a_script_that_hangs_is_ended_with_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    text = ENDLESS.format(pid=str(pid)) + "import subprocess\nsubprocess.run(['sleep', '600'])"
    monkeypatch.setattr(comparing, "_PATIENCE", (5.0, 0.0))
    with pytest.raises(PeerError, match="no answer within 5 s"):
        run(script(tmp_path, text))
    assert not Path(f"/proc/{pid.read_text()}").exists()
    # Killed with it, but as an orphan, for which nobody here can wait.
    until(lambda: int(pid.read_text()) not in groups(), "what the script had started to end")


def test_a_script_ends_after_whoever_started_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    path = script(tmp_path, ENDLESS.format(pid=str(pid)) + "time.sleep(600)")
    (tmp_path / "task.json").write_text(json.dumps({"parent": 0}))  # no process has this id: the parent is gone
    answer = str(tmp_path / "answer.json")
    process = os.spawnv(os.P_NOWAIT, sys.executable, ["python", str(path), str(tmp_path / "task.json"), answer])
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def groups() -> list[int]:
    """The process groups of all processes that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state not in "ZX":
            found.append(int(group))
    return found


ANSWER = METER + (
    "meter, seen = Meter(task), 0\n"
    "while not meter.mark(seen := seen + 10): time.sleep(0.01 / task['layout']['speed'])\n"
)


def test_systems_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tmp_path / "once"
    failing = f"import pathlib\nif pathlib.Path({str(once)!r}).exists(): raise SystemExit('no more')\n{ANSWER}"
    failing += f"pathlib.Path({str(once)!r}).touch()\n"
    fast_and_slow = [{"speed": 0.1}, {"speed": 1.0}]
    others = {
        "steady": peer(script(tmp_path, ANSWER), "Steady", layouts=lambda task: fast_and_slow),
        "failing": peer(script(tmp_path, failing), "Failing"),
        "unable": peer(Path("none"), "Unable", unable=lambda task: "it knows no CartPole"),
    }
    monkeypatch.setattr(comparing, "find", others.__getitem__)
    monkeypatch.setattr(comparing, "python_of", lambda *_: Path(sys.executable))
    said: list[str] = []
    found = compare(cartpole(), Layout(), list(others), rounds=2, seconds=0.2, say=said.append)
    assert [each.name for each in found.systems] == ["lockstep", "Steady"]
    assert found.systems[1].layout == "speed=1.0"
    assert [len(each.rates) for each in found.systems] == [2, 2] and min(found.systems[0].rates) > 0
    assert set(found.skipped) == {"Failing", "Unable"} and "no more" in found.skipped["Failing"]
    order = [text.split(":")[1].split()[0] for text in said if text.startswith("round") and "samples/s" in text]
    assert order == ["lockstep", "Steady", "Failing", "lockstep", "Steady"]
    assert json.loads(json.dumps(found.to_json()))["systems"][1]["samples_per_second"]["min"] <= 10 / 0.01


def test_ratios_by_hand() -> None:
    systems = (
        System("lockstep", "inline", {"lockstep": "1.0"}, (100.0, 300.0, 200.0)),
        System("Sample Factory", "x=1", {"sample-factory": "2.1.1"}, (50.0, 100.0, 200.0)),
    )
    found = Comparison({}, 0.0, systems, {"torchrl": "no"})
    assert found.ratios(systems[1]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    table = found.table()
    assert "| Sample Factory 2.1.1 | 100 | 50 to 200 | 2.00 | 1.00 to 3.00 | `x=1` |" in table
    assert "| lockstep 1.0 | 200 | 100 to 300 | 1.00 | 1.00 to 1.00 | `inline` |" in table
    assert "torchrl is missing: no" in table


def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_PEERS", str(tmp_path))
    with pytest.raises(PeerError, match=r"other .*installed(.|\n)*No matching distribution"):
        installed.python_of("other", ("--no-index", "there-is-no-such-package"))

    def run(command: list[str], peer: str) -> None:
        if "venv" in command:
            Path(command[-1]).mkdir()

    monkeypatch.setattr(installed, "_run", run)
    python = installed.python_of("other", ("one==1",))
    assert python.parent.parent.joinpath("installed").read_text() == "one==1\n"
    monkeypatch.setattr(installed, "_run", pytest.fail)
    assert installed.python_of("other", ("one==1",)) == python


def test_a_mistake_on_the_command_line() -> None:
    with pytest.raises(SettingsError, match="no peer 'rllib'"):
        main(["ppo-cartpole", "--peers", "rllib"])
    with pytest.raises(SettingsError, match="--peers needs names"):
        main(["ppo-cartpole", "--peers", "--seconds", "1"])
    with pytest.raises(SettingsError, match=r"[Dd]id you mean"):
        main(["ppo-cartpole", "--algorithm.epoch", "1", "--peers", "torchrl"])


def test_a_recipe_with_flags_is_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def answer(*given: Any, **how: Any) -> Comparison:
        asked.extend([*given, how])
        return Comparison({}, 0.0, tuple(System(name, "inline", {}, (1.0,)) for name in ("lockstep", "torchrl")))

    monkeypatch.setattr("peers.compare", answer)
    flags = ["--env.num-envs", "16", "--layout", "processes:2", "--peers", "torchrl", "--rounds", "1", "--json"]
    main(["ppo-cartpole", *flags])
    experiment, layout, names, how = asked
    assert (experiment.env.num_envs, str(layout), names, how["rounds"]) == (16, "processes:2", ["torchrl"], 1)
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["systems"]] == ["lockstep", "torchrl"]


def test_every_peer_has_its_script_and_pins() -> None:
    for each in systems.PEERS.values():
        assert (SCRIPTS / each.script).is_file()
        assert all("==" in requirement for requirement in each.requirements)


def test_meter_waits_for_the_warm_up(tmp_path: Path) -> None:
    text = METER + (
        "begin, meter, seen = time.perf_counter(), Meter(task), 0\n"
        "while not meter.mark(seen := seen + 1): time.sleep(0.02)\n"
        "assert time.perf_counter() - begin >= task['warmup'] + task['seconds']\n"
    )
    begin = time.perf_counter()
    run(script(tmp_path, text), warmup=0.5)
    assert time.perf_counter() - begin >= 0.7
