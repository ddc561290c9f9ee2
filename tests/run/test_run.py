from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from lockstep import envs
from lockstep.algorithms import PPOConfig
from lockstep.cli.recipe import load_recipe
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.config.user_code import digests_of, load_object
from lockstep.envs.settings import EnvConfig
from lockstep.launchers.launch import resume, train
from lockstep.models import StandardModelConfig
from lockstep.recipes import RECIPES, ppo_cartpole
from lockstep.run import ledger
from lockstep.run.consistency import platform_warning
from lockstep.run.folder import RunFolder
from lockstep.run.lock import RunBusy
from lockstep.run.platform import this_platform
from lockstep.run.rows import diverged, keep_rows
from lockstep.sweep import Run
from lockstep.sweep.queue import Queue

ROOT = str(Path(__file__).parents[2])


@dataclasses.dataclass(frozen=True)
class LSTMByName(StandardModelConfig):
    """A model without the memory that its settings name."""

    core: Literal["none", "gru", "lstm"] = "lstm"

    def build(self, *args: Any, **settings: Any) -> Any:
        return StandardModelConfig().build(*args, **settings)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_folder_gives_back_what_it_was_made_with() -> None:
    experiment, options = ppo_cartpole(), RunOptions(run="a/b", eval_every=7, tensorboard=False)
    RunFolder.create(experiment, Layout.parse("processes:2,env_threads=3"), options)
    folder = RunFolder.open("a/b")
    assert folder.experiment() == experiment
    assert folder.layout() == Layout("processes", 2, env_threads=3)
    assert folder.options() == options
    facts = json.loads((folder.path / "run.json").read_text())
    assert facts["versions"]["torch"] and facts["python"] and facts["command"]
    assert len(set(facts["first_env_seeds"])) == folder.experiment().env.num_envs


def test_a_path_will_do_for_a_folder_and_what_cannot_be_kept_leaves_none() -> None:
    RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run=Path("a")))  # type: ignore[arg-type]
    assert RunFolder.open("a").options().run == "a"
    with pytest.raises(SettingsError, match=r"object object at .* settings"):
        RunFolder.create(dataclasses.replace(ppo_cartpole(), seed=object()), Layout(), RunOptions(run="b"))  # type: ignore[arg-type]
    assert not Path("b").exists()


@pytest.mark.parametrize(
    ("changes", "options", "layout", "words"),
    [
        ({}, {}, "process:2", "Unknown layout 'process:2'"),
        ({}, {"checkpoint_every": "5"}, "inline", "checkpoint_every='5' must be a whole number"),
        ({"env": EnvConfig(id=int)}, {}, "inline", "env.id=<class 'int'> must be a text"),  # type: ignore[arg-type]
        (
            {"model": LSTMByName(), "algorithm": PPOConfig(minibatches=1)},
            {},
            "inline",
            "model.core=lstm asks for a memory, but StandardModel has none",
        ),
    ],
)
def test_mistakes_in_python_are_explained_and_leave_no_folder(
    changes: dict[str, Any], options: dict[str, Any], layout: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        train(ppo_cartpole().replace(**changes), layout, RunOptions(run="a", **options))
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("program", "name"), [("/x/lockstep/__main__.py", "lockstep"), ("/bin/lockstep", "lockstep")])
def test_the_command_can_be_repeated(program: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program, "train", "my recipe.py:make"])
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="a"))
    assert folder.facts()["command"] == f"{name} train 'my recipe.py:make'"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    experiment = RECIPES[name]()
    folder = RunFolder.create(experiment, Layout(), RunOptions(run=name))
    assert folder.experiment() == experiment
    assert folder.experiment().identity() == experiment.identity()
    assert json.loads((folder.path / "experiment.json").read_text()) == json.loads(json.dumps(to_json(experiment)))


def test_unnamed_folders_are_unique_and_tell_what_they_hold() -> None:
    paths = [RunFolder.create(ppo_cartpole(), Layout(), RunOptions()).path for _ in range(5)]
    assert len(set(paths)) == 5
    for path in paths:
        assert re.fullmatch(r"runs/CartPole-v1-ppo-s1-\d{8}-\d{6}(-\d)?", str(path))


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "my_env.py:make", "/a/b/my env.py:make", "lockstep/Memory-v0"])
def test_unnamed_folder_of_any_environment_is_one_level_deep(env_id: str) -> None:
    experiment = ppo_cartpole()
    experiment = experiment.replace(env=dataclasses.replace(experiment.env, id=env_id))
    path = RunFolder.create(experiment, Layout(), RunOptions()).path
    assert path.parent == Path("runs")
    assert re.fullmatch(r"[A-Za-z0-9.-]+", path.name)


def test_what_torchrun_did_not_start_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"--layout torchrun .*--layout processes:2"):
        train(ppo_cartpole(), "torchrun", RunOptions(run="r"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(SettingsError, match=r"5 processes for scheme\.shards=4"):
        train(ppo_cartpole(), "torchrun", RunOptions(run="r"))
    assert not Path("r").exists()


def test_only_rank_0_makes_the_folder_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert RunFolder.create(ppo_cartpole(), Layout("torchrun"), RunOptions(run="r")).path == Path("r")
    assert not Path("r").exists()
    monkeypatch.setenv("RANK", "0")
    RunFolder.create(ppo_cartpole(), Layout("torchrun"), RunOptions(run="r"))
    assert RunFolder.open("r").experiment() == ppo_cartpole()


def test_existing_run_is_never_overwritten() -> None:
    RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    before = {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
    with pytest.raises(SettingsError, match="lockstep resume r"):
        RunFolder.create(ppo_cartpole().replace(seed=2), Layout(), RunOptions(run="r"))
    assert {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()} == before


def test_folder_with_other_things_is_refused_and_an_empty_one_used() -> None:
    Path("full").mkdir()
    Path("full/note.txt").write_text("mine")
    with pytest.raises(SettingsError) as error:
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="full"))
    assert "resume" not in str(error.value) and "choose another folder" in str(error.value)
    Path("empty").mkdir()
    assert RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="empty")).path == Path("empty")


def test_open_names_the_runs_that_exist() -> None:
    RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="runs/pong"))
    with pytest.raises(SettingsError, match=r"runs/pnog does not exist.* runs: pong"):
        RunFolder.open("runs/pnog")
    with pytest.raises(SettingsError, match=r"pong/run\.json is a file\. Give the folder"):
        RunFolder.open("runs/pong/run.json")
    with pytest.raises(SettingsError, match=r"runs is not the folder of a run.*pong"):
        RunFolder.open("runs")
    for n in range(6):
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run=f"runs/{n}"))
    with pytest.raises(SettingsError, match=r"newest of 7 .*runs: \d(, \d){4}\."):
        RunFolder.open("runs/pnog")
    with pytest.raises(SettingsError, match=r"newest of 7 .* report, compare and plot .*: runs\."):
        RunFolder.open("runs")


def test_a_path_that_the_system_refuses_is_named() -> None:
    """A name that is too long stands for folders of others, which tests that run as root can read."""
    for use in (RunFolder.open, load_recipe):
        with pytest.raises(SettingsError, match=r"Cannot read x+.*: File name too long"):
            use("x" * 300)


def test_open_names_the_runs_of_a_sweep() -> None:
    Queue.make(Path("s1")).add([Run(ppo_cartpole())])
    for seed in (1, 2):
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run=f"s1/runs/pong-s{seed}"))
    what = r"s1 is the folder of a sweep, not of a run.*in s1/runs: pong-s2, pong-s1\. report, compare.*: s1\."
    with pytest.raises(SettingsError, match=what):
        RunFolder.open("s1")


def test_damaged_settings_are_named() -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    path = folder.path / "experiment.json"
    path.write_text(path.read_text()[:-10])
    with pytest.raises(SettingsError, match=r"r/experiment.json cannot be read"):
        folder.experiment()


def test_keep_rows_keeps_what_the_checkpoint_saw() -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    keep_rows(folder.metrics, 3)
    lines = [f'{{"iteration": {i}, "samples": {i * 10}}}\n' for i in (1, 2, 2, 3, 4)]
    folder.metrics.write_text("".join(lines) + '{"iteration": 5, "sam')
    keep_rows(folder.metrics, 3)
    assert folder.metrics.read_text() == "".join(lines[:4])
    keep_rows(folder.metrics, 0)
    assert folder.metrics.read_text() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (RunOptions(checkpoint_every=0), "--checkpoint-every 0"),
        (RunOptions(keep_checkpoints=0), "--keep-checkpoints 0"),
        (RunOptions(eval_every=-1), "--eval-every -1"),
        (RunOptions(eval_episodes=0), "--eval-episodes 0"),
        (RunOptions(eval_episodes=1_000_001), "--eval-episodes 1000001 .* 1 to 1,000,000"),
    ],
)
def test_options_out_of_range(options: RunOptions, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        options.validate()


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_missing_tracker_names_the_extra(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=rf'pip install .*\[{tracker}\]"'):
        dataclasses.replace(RunOptions(), **{tracker: "project"}).validate()


USERS = """
from dataclasses import dataclass
from lockstep.experiment import Experiment
from lockstep.models import StandardModelConfig
from lockstep.recipes import ppo_cartpole

@dataclass(frozen=True)
class Model(StandardModelConfig):
    extra: int = 3

def recipe():
    return ppo_cartpole().replace(model=Model())
"""


def test_a_users_file_is_found_again_from_anywhere_and_its_place_is_no_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = []
    monkeypatch.setenv("LOCKSTEP_USER_FILES", "")
    for place in ("a", "b"):
        (tmp_path / place / "elsewhere").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        Path("mine.py").write_text(USERS)
        experiment = load_object("mine.py:recipe")()
        identities.append(experiment.identity())
        RunFolder.create(experiment, Layout(), RunOptions(run="r"))
        monkeypatch.chdir("elsewhere")
        again = RunFolder.open("../r").experiment()
        assert again == experiment and again.identity() == identities[-1]
        assert pickle.loads(pickle.dumps(again)) == experiment
        monkeypatch.setenv("LOCKSTEP_USER_FILES", "")
    assert identities[0] == identities[1]
    assert to_json(again)["model"]["$type"] == "mine.py:Model"


def test_of_two_runs_files_with_one_name_each_run_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_USER_FILES", "")
    for place, extra in (("a", 3), ("b", 4)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        Path("mine.py").write_text(USERS.replace("extra: int = 3", f"extra: int = {extra}\n    of: str = {place!r}"))
        RunFolder.create(load_object("mine.py:recipe")(), Layout(), RunOptions(run="r"))
    monkeypatch.chdir(tmp_path)
    for place in ("a", "b", "a"):
        assert type(RunFolder.open(f"{place}/r").experiment().model)().of == place  # type: ignore[attr-defined]


def test_files_that_settings_name_are_known_by_their_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_USER_FILES", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.py", "elsewhere/b.py", "c.py", "d.py", "e.py", "f.py", "g.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    settings = {
        "env": {
            "id": "pettingzoo/c.py:make",
            "opponents": ["random", "adversary=b.py:play", "a.py:play", "runs/a.py:5", "far-sighted=g.py:play"],
        },
        "tasks": "mixed/d.py:First@gymnasium+Pong@ale*3+e.py:Second@f.py:Steps*2",
        "model": {"$type": "lockstep.models.policy:StandardModelConfig", "size": 3, "note": "a.py", "none": None},
        "algorithm": {"$type": "a.py:Own", "rnd": {"$type": "missing.py:Own"}},
    }
    digests = digests_of(settings)
    assert digests == {
        named: hashlib.sha256(f"# {name}\n".encode()).hexdigest()[:16]
        for named, name in (("b.py", "elsewhere/b.py"), *((f"{each}.py", f"{each}.py") for each in "acdefg"))
    }
    assert list(digests) == sorted(digests)
    here, there = ({"libraries": {}, "code": code} for code in (digests, {**digests, "a.py": "0" * 16}))
    assert ledger.differing_platform(here, there) == (f"code.a.py: {digests['a.py']} != {'0' * 16}",)
    assert ledger.differing_platform(here, {"libraries": {}}) == (), "what earlier versions did not look at"
    assert ledger.platform_or_code(["code.a.py: 1 != 2"]) == "your own code"
    assert ledger.platform_or_code(["code.a.py: 1 != 2", "torch: 1 != 2"]) == "this platform"


def test_a_task_of_several_is_known_by_the_contents_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lockstep.envs.classic import CartPole\n\nclass First(CartPole): ...\n\nclass Second(CartPole): ...\n"
    )
    (tmp_path / "tasks.txt").write_text("mine.py:First\nmine.py:Second\n")
    for env_id in ("mixed/mine.py:First+mine.py:Second", "mixed/tasks.txt"):
        settings = to_json(dataclasses.replace(ppo_cartpole(), env=envs.resolve(EnvConfig(id=env_id))))
        before = this_platform(settings)
        assert ledger.differing_platform(before, this_platform(settings)) == ()
        with (tmp_path / "mine.py").open("a") as file:
            file.write("# changed\n")
        changed = ledger.differing_platform(before, this_platform(settings))
        assert len(changed) == 1 and changed[0].startswith("code.mine.py: ")


def test_an_opponent_is_known_by_the_file_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "runs" / "a").mkdir(parents=True)
    for name in ("model", "policies", "algorithm"):
        (tmp_path / "theirs" / f"{name}.py").write_text(f"# {name}\n")
    experiment = {
        "model": {"$type": "model.py:Model"},
        "env": {"id": "connect_four_v3", "policies": "policies.py:name_of"},
        "algorithm": {"$type": "algorithm.py:Own"},
    }
    for name, contents in (("experiment", experiment), ("run", {"directory": str(tmp_path / "theirs")})):
        (tmp_path / "theirs" / "runs" / "a" / f"{name}.json").write_text(json.dumps(contents))
    for policies, side in (("shared", ""), ("separate", "second-side="), ("separate", "second.side=")):
        names = ["random", "theirs/runs/a@5#0123456789abcdef", "gone@5#0123456789abcdef"]
        code = this_platform({"env": {"policies": policies, "opponents": [side + name for name in names]}})["code"]
        assert code == {
            f"{name}.py": hashlib.sha256(f"# {name}\n".encode()).hexdigest()[:16] for name in ("model", "policies")
        }, "its algorithm does not play"


def test_environments_that_would_start_from_one_seed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.envs.episodes.derive_seed", lambda *indices: indices[2] // 2)
    with pytest.raises(SettingsError, match="same seed"):
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))


def test_a_file_system_without_locks_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with folder.locked():
        pass
    assert "r cannot be locked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("experiment.json", "[]", "experiment"),
        ("run.json", "[]", "experiment"),
        ("run.json", "{}", "options"),
        ("run.json", "[]", "layout"),
        ("run.json", '{"layout": 3}', "layout"),
        ("run.json", '{"options": {"eval_every": "5"}}', "options"),
        ("run.json", '{"resumed": {}}', "facts"),
    ],
)
def test_files_that_hold_something_else_are_damaged(name: str, text: str, read: str) -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    (folder.path / name).write_text(text)
    with pytest.raises(SettingsError, match=rf"r/{name} cannot be read: .*damaged"):
        getattr(folder, read)()


def test_a_setting_that_is_lacking_is_named_and_a_user_s_mistake_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    experiment = json.loads((folder.path / "experiment.json").read_text())
    del experiment["model"]
    (folder.path / "experiment.json").write_text(json.dumps(experiment))
    with pytest.raises(SettingsError, match=r"experiment\.json: .*\bmodel\b"):
        folder.experiment()
    (tmp_path / "mine.py").write_text("class Model: pass\nlen(3)\n")
    (folder.path / "experiment.json").write_text(json.dumps({**experiment, "model": {"$type": "mine.py:Model"}}))
    with pytest.raises(TypeError, match="has no len"):
        folder.experiment()


@pytest.mark.parametrize("named", ["builtins:int", 5, "lockstep.recipes:ppo_cartpole"])
def test_what_is_no_name_of_settings_is_said(named: object) -> None:
    with pytest.raises(SettingsError, match=rf"{re.escape(repr(named))} .*settings"):
        from_json({"$type": named, "a": 1})


def test_an_error_in_a_file_is_shown_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import numpy as np\n\nNUMBERS = np.arange(3).reshape(2)\n")
    with pytest.raises(SettingsError, match=r"cannot reshape.*mine\.py, line 3: NUMBERS = np"):
        load_object(f"{file}:make")
    file = tmp_path / "other.py"
    file.write_text("import no_such_module\n")
    with pytest.raises(SettingsError, match=r"no_such_module.*other\.py, line 1: import no_such_module"):
        load_object(f"{file}:make")
    file.write_text("")
    with pytest.raises(SettingsError, match=r"other\.py has no make\."):
        load_object(f"{file}:make")
    with pytest.raises(SettingsError, match=r"'no_such'.*package\.module:name"):
        load_object("no_such:make")


def test_the_process_that_trains_a_run_is_named() -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    with folder.locked():
        with pytest.raises(RunBusy, match=rf"another process, {os.getpid()}\."), folder.locked():
            pass
        gone = subprocess.Popen(["true"])
        gone.wait()
        (folder.path / ".lock").write_text(f"{gone.pid} {socket.gethostname()}\n")
        with pytest.raises(RunBusy, match=rf"{gone.pid}, .*ended"), folder.locked():
            pass
        (folder.path / ".lock").write_text("7 elsewhere\n")
        with pytest.raises(RunBusy, match="7 on elsewhere"), folder.locked():
            pass


def test_a_process_that_an_environment_forked_does_not_keep_the_run_locked() -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from lockstep.run.files import locked\n"
        "with open('r/.lock', 'a') as file, locked(file, 0.0) as mine:\n"
        "    assert mine\n"
        "    if forked := os.fork():\n"
        "        print(forked, flush=True)\n"
        "        time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    try:
        with pytest.raises(RunBusy), folder.locked():
            pass
        process.kill()
        process.wait()
        os.kill(forked, 0)
        with folder.locked():
            pass
    finally:
        os.kill(forked, signal.SIGKILL)
        process.stdout.close()


class Killed(BaseException):
    """In place of SIGKILL: nothing is cleaned up."""


@pytest.mark.parametrize("moment", range(7))
def test_a_run_that_was_killed_while_its_folder_was_made_is_begun_by_the_same_command(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = moment

    def killing(call: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **options)

        return called

    with pytest.raises(Killed), monkeypatch.context() as patch:
        for name in ("os.fsync", "os.replace", "fcntl.flock"):
            patch.setattr(name, killing(getattr(*{"os": (os, name[3:]), "fc": (fcntl, name[6:])}[name[:2]])))
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"), b"weights", "another")
    with pytest.raises(SettingsError, match="before it began"):
        resume("r")
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    assert folder.experiment() == ppo_cartpole()
    assert not folder.weights.exists() and not (folder.path / "replay.json").exists(), "of the run that did not begin"
    with pytest.raises(SettingsError, match=r"--run r .*not empty"):
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))


@pytest.mark.parametrize("found", ["checkpoints/00000001/manifest.json", "notes.txt", "run.json"])
def test_a_folder_with_anything_else_is_not_taken_over(found: str) -> None:
    file = Path("r") / found
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(SettingsError, match=r"--run r .*not empty"):
        RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))


def test_a_folder_that_cannot_be_locked_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(SettingsError, match=re.escape(str(tmp_path))), RunFolder(tmp_path).locked():
        pass


@pytest.mark.parametrize(
    ("recorded", "resumed", "lost"),
    [(2, [], False), (3, [], True), (5, [{"checkpoint_every": 5}], False), (6, [{"checkpoint_every": 5}], True)],
)
def test_a_run_begins_again_unless_it_must_have_had_a_checkpoint(
    recorded: int, resumed: list[dict[str, int]], lost: bool
) -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r", checkpoint_every=2))
    facts = {**json.loads((folder.path / "run.json").read_text()), "resumed": resumed}
    (folder.path / "run.json").write_text(json.dumps(facts))
    folder.ledger.write_text("{}\n" * (1 + recorded))
    with pytest.raises(SettingsError, match=f"records {recorded} iterations") if lost else contextlib.nullcontext():
        folder.begin_again(ppo_cartpole())
    assert folder.ledger.exists() == lost


def test_a_resumption_takes_the_place_of_those_that_it_repeats() -> None:
    folder = RunFolder.create(ppo_cartpole(), Layout(), RunOptions(run="r"))
    for iteration, every in ((2, 10), (5, 20), (5, 30), (9, 40), (5, 50)):
        folder.note_resumption(iteration, Layout(), RunOptions(checkpoint_every=every, eval_episodes=every), ())
    found = [(each["iteration"], each["checkpoint_every"]) for each in folder.facts()["resumed"]]
    assert found == [(2, 10), (5, 50)]
    assert [each["options"]["eval_episodes"] for each in folder.facts()["resumed"]] == [10, 50]


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ([{"loss/value": None}, {"loss/value": 1.0, "loss/policy": 2.0}], []),
        ([{"loss/value": 1.0}, {"loss/value": None, "loss/policy": 2.0}], ["loss/value"]),
        ([{"loss/value": None}, {"eval/score": 1.0}], ["loss/value"]),
        ([], []),
    ],
)
def test_a_run_has_diverged_if_its_last_losses_are_no_numbers(
    lines: list[dict[str, float | None]], lost: list[str]
) -> None:
    folder = RunFolder(Path())
    assert diverged(folder.metrics) == []
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diverged(folder.metrics) == lost


ANOTHER = {"model": "another", "features": "", "capability": "NO AVX"}


@pytest.mark.parametrize(
    ("precision", "changed", "said"),
    [
        ("portable", {"cpu": ANOTHER}, "an environment's library may"),
        ("portable", {"torch": "1.0"}, "so bits may differ, too"),
        ("fp32", {"cpu": ANOTHER}, "so bits may differ, too"),
    ],
)
def test_another_processor_matters_less_in_portable_arithmetic(
    precision: str, changed: dict[str, Any], said: str
) -> None:
    folder: Any = SimpleNamespace(facts=dict)
    settings = {"precision": precision}
    head = {"platform": {**this_platform(settings), **changed}, "settings": settings}
    warning = platform_warning(folder, head)
    assert warning is not None and said in warning
