from __future__ import annotations

import contextlib
import copy
import dataclasses
import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sentences import says

pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")

from hub_server import READER, TOKEN, Repository, StandIn

import lockstep
from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import to_json
from lockstep.config.settings import SettingsError
from lockstep.evaluation.scores import Evaluation, evaluate
from lockstep.experiment import WarmStart
from lockstep.export import hub
from lockstep.export.card import card, public_command, public_facts
from lockstep.recipes import RECIPES
from lockstep.run import ledger
from lockstep.run.checkpoint import latest, open_checkpoint
from lockstep.run.consistency import platform_warning
from lockstep.run.folder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")  # by huggingface_hub itself
REPO = "me/cartpole"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of PPO, limited to some levels; both checkpoints are kept."""
    base = recipes.ppo_cartpole()
    experiment = base.replace(
        env=dataclasses.replace(base.env, num_envs=4, adapter="gymnasium", num_levels=20),
        algorithm=dataclasses.replace(base.algorithm, epochs=1),
        total_steps=2 * 64 * 4,
    )
    path = tmp_path_factory.mktemp("runs") / "cartpole"
    options = RunOptions(run=str(path), checkpoint_every=1, keep_checkpoints=2, display="none", tensorboard=False)
    lockstep.train(experiment, Layout.parse("inline"), options)
    return path


@contextlib.contextmanager
def serving() -> Iterator[StandIn]:
    """The Hub, as far as this process sees."""
    server = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.address)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # its storage has a protocol of its own
        yield server
    server.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def uploaded(run: Path) -> Repository:
    with serving() as server:
        hub.push(run, REPO, episodes=1)
        return server.repositories[REPO]


@pytest.fixture
def pushed(server: StandIn, uploaded: Repository) -> Repository:
    """What the Hub holds once the run was pushed; a test may change it."""
    server.repositories[REPO] = copy.deepcopy(uploaded)
    return server.repositories[REPO]


def test_a_pulled_run_is_the_run_that_was_pushed(
    run: Path, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_LARGE", 1000)  # both ledger and metrics are compressed
    (run / "video.mp4").write_bytes(b"a video")
    pushed = hub.push(run, REPO, episodes=3)
    stored = server.repositories[REPO]
    assert set(pushed.files) == set(stored.files) and not pushed.notes
    assert {"ledger.jsonl.gz", "metrics.jsonl.gz", "replay.mp4", "learning-curve.png", "README.md"} <= set(stored.files)
    assert any(path.endswith("learner.safetensors") for path in stored.lfs)

    pulled = hub.pull(REPO, tmp_path / "pulled")
    names = {path.relative_to(pulled).as_posix() for path in pulled.rglob("*") if path.is_file()}
    for name in names - {"run.json", "README.md", "learning-curve.png"}:
        assert (pulled / name).read_bytes() == (run / name).read_bytes(), name
    assert {"experiment.json", "ledger.jsonl", "metrics.jsonl", "video.mp4", "run.json"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["pulled"]

    evaluated = [lockstep.evaluate(path, episodes=4, levels="test") for path in (run, pulled)]
    assert evaluated[0].scores == evaluated[1].scores
    assert lockstep.verify(pulled, Layout.parse("inline"), "all").ok
    options = dataclasses.replace(RunFolder.open(pulled).options(), display="none")
    assert lockstep.resume(pulled, options=options).iterations == 2


def test_the_card_says_what_it_scores_and_no_path_of_the_machine(run: Path, server: StandIn) -> None:
    facts = json.loads((run / "run.json").read_text())
    facts |= {"command": f"lockstep train ppo-cartpole --run {run} --seed 1", "directory": str(run.parent)}
    (run / "run.json").write_text(json.dumps(facts))
    result = hub.push(run, REPO, episodes=3)
    text = server.repositories[REPO].files["README.md"].decode()
    for wanted in ("mean_reward", "lockstep train ppo-cartpole --seed 1", f"lockstep pull {REPO}", "CartPole-v1"):
        assert wanted in text
    assert "levels 20 to 2147483646" in text and "levels 0 to 19" in text  # test and train
    assert RunFolder.open(run).experiment().identity() in text
    told = text.encode() + server.repositories[REPO].files["run.json"]
    assert str(run.parent).encode() not in told and not re.search(rb"/(?:tmp|home|srv)/", told)
    assert result.url == f"{server.address}/{REPO}" and "trains other runs" not in text


def test_the_card_of_a_sweeps_run_says_how_to_train_it_alone(run: Path, server: StandIn) -> None:
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"command": "lockstep sweep runs/set ppo-cartpole --seed 1..3"}))
    hub.push(run, REPO, episodes=1)
    text = server.repositories[REPO].files["README.md"].decode()
    assert "lockstep sweep runs/set ppo-cartpole --seed 1..3" in text
    assert "`lockstep train run`" in text


def test_what_a_run_began_with_comes_along(run: Path, server: StandIn, tmp_path: Path) -> None:
    source = shutil.copytree(run, tmp_path / "source")
    warm = RunFolder.open(source).experiment().replace(warm_start=WarmStart(str(source)))
    options = RunOptions(run=str(tmp_path / "warm"), display="none", tensorboard=False)
    pushed = hub.push(lockstep.train(warm, "inline", options).run, REPO, episodes=1)
    assert f"experiment.json names {source}" in " ".join(pushed.notes)
    shutil.rmtree(source)
    pulled = hub.pull(REPO, tmp_path / "pulled")
    assert RunFolder(pulled).weights.read_bytes() == RunFolder(tmp_path / "warm").weights.read_bytes()
    assert lockstep.verify(pulled, Layout.parse("inline"), "all").ok


def test_pushing_again_replaces_checkpoints_and_leaves_other_files(run: Path, server: StandIn) -> None:
    hub.push(run, REPO, episodes=1)
    stored = server.repositories[REPO]
    stored.files["checkpoints/00000000/learner.safetensors"] = b"of another run"
    stored.files["notes.txt"] = b"by hand"
    hub.push(run, REPO, episodes=1)
    assert "notes.txt" in stored.files and "checkpoints/00000000/learner.safetensors" not in stored.files
    assert len(stored.commits) == 2


def test_private_repositories_and_the_command_line(
    run: Path, server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), REPO, "--episodes", "1", "--private", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["url"].endswith(REPO)
    assert server.repositories[REPO].private
    assert main(["pull", REPO, "--to", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": str(tmp_path / "new")}


def refused(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(SettingsError) as error:
        function(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_explained(run: Path, pushed: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no repository me/none" in refused(hub.pull, "me/none", tmp_path / "a")
    assert "NAME/REPOSITORY" in refused(hub.pull, "none", tmp_path / "a")
    assert "exists" in refused(hub.pull, "me/none", tmp_path)
    assert "no such revision" in refused(hub.pull, REPO, tmp_path / "a", revision="v9")
    del pushed.files["experiment.json"]
    assert "no run of lockstep" in refused(hub.pull, REPO, tmp_path / "a")
    monkeypatch.setenv("HF_TOKEN", READER)
    assert says(refused(hub.push, run, "me/other", episodes=1), "token", "write")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "needs a token" in refused(hub.push, run, REPO, episodes=1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    told = refused(hub.pull, REPO, tmp_path / "a")
    assert "cannot be reached" in told and ". Check the network" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["me/..", "-me/x", "me/a--b", "me/x.git", "me/" + 100 * "x"])
def test_names_that_the_hub_does_not_take(name: str, run: Path, server: StandIn, tmp_path: Path) -> None:
    for reason in (refused(hub.pull, name, tmp_path / "a"), refused(hub.push, run, name)):
        assert "repository name" in reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("run.json", {"command": 5}),
        ("run.json", {"options": []}),
        ("run.json", {"options": {"checkpoint_every": "often"}}),
        ("run.json", {"layout": "nonsense"}),
        ("run.json", {"versions": 3}),
        ("run.json", {"resumed": [3]}),
        ("run.json", {"resumed": [{"iteration": "3"}]}),
        ("metrics.jsonl", {"samples": "many"}),
    ],
)
def test_entries_of_another_kind_are_not_pulled(
    name: str, changes: dict[str, Any], pushed: Repository, tmp_path: Path
) -> None:
    files = pushed.files
    first, *others = files[name].splitlines() if name == "metrics.jsonl" else [files[name]]
    files[name] = b"\n".join([json.dumps({**json.loads(first), **changes}).encode(), *others, b""])
    reason = refused(hub.pull, REPO, tmp_path / "a")
    assert f"The run in {REPO} is damaged" in reason and ".a.partial" not in reason
    assert not list(tmp_path.iterdir())


def test_a_command_that_no_shell_would_take_is_pulled_as_text(pushed: Repository, tmp_path: Path) -> None:
    files = pushed.files
    facts = {**json.loads(files["run.json"]), "command": "lockstep train it's", "resumed": [{}]}
    files["run.json"] = json.dumps(facts).encode()
    pulled = hub.pull(REPO, tmp_path / "a")
    assert "it" in json.loads((pulled / "run.json").read_text())["command"]


def test_a_pulled_run_of_several_machines_is_warned_of_without_their_names(pushed: Repository, tmp_path: Path) -> None:
    node = {"process": "Collector 1 of 2", "host": "barn", "differs": ["cpu.model: a != b"]}
    pushed.files["run.json"] = json.dumps({**json.loads(pushed.files["run.json"]), "nodes": [node]}).encode()
    pulled = RunFolder.open(hub.pull(REPO, tmp_path / "a"))
    warning = platform_warning(pulled, ledger.read(pulled.ledger)[0])
    assert warning is not None and "of Collector 1 of 2: cpu.model: a != b" in warning and "barn" not in warning


def test_the_card_of_an_unfinished_run_says_how_far_it_came(run: Path, server: StandIn, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    experiment = RunFolder.open(run).experiment().replace(total_steps=500_000)
    options = RunOptions(run=str(stopped), display="none", tensorboard=False)
    lockstep.train(experiment, Layout(), options, stop_after=2)
    hub.push(stopped, REPO, episodes=1)
    assert "512 samples of 500,000, seed" in server.repositories[REPO].files["README.md"].decode()
    hub.push(run, REPO, episodes=1)
    assert "512 samples, seed" in server.repositories[REPO].files["README.md"].decode()


def test_the_card_describes_the_ledger_that_was_uploaded(
    run: Path, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = shutil.copytree(run, tmp_path / "training")
    whole = (training / "ledger.jsonl").read_bytes()
    (training / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))

    def evaluating(*args: Any, **kwargs: Any) -> Evaluation:
        (training / "ledger.jsonl").write_bytes(whole)  # an iteration has ended meanwhile
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(hub, "evaluate", evaluating)
    hub.push(training, REPO, episodes=1)
    files = server.repositories[REPO].files
    card = files["README.md"].decode()
    assert f"`{hashlib.sha256(files['ledger.jsonl']).hexdigest()}`" in card and "| iterations recorded | 1 |" in card


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_pulled(run: Path, server: StandIn, tmp_path: Path) -> None:
    hub.push(run, REPO, episodes=1, checkpoint="1")
    stored = server.repositories[REPO]
    checkpoints = sorted(path for path in stored.files if path.endswith("learner.safetensors"))
    assert len(checkpoints) == 2
    for name in checkpoints:
        whole = stored.files[name]
        stored.files[name] = whole[:-1] + b"?"
        assert "SHA-256" in refused(hub.pull, REPO, tmp_path / "a")
        assert not list(tmp_path.iterdir())
        stored.files[name] = whole
    assert hub.pull(REPO, tmp_path / "a").is_dir()


def test_foreign_code_wants_trust(pushed: Repository, tmp_path: Path) -> None:
    settings = json.loads(pushed.files["experiment.json"])
    settings["env"] |= {"id": "os:system", "options": {"command": "true"}}
    pushed.files["experiment.json"] = json.dumps(settings).encode()
    assert "os:system" in refused(hub.pull, REPO, tmp_path / "a")
    assert hub.pull(REPO, tmp_path / "a", trust=True).is_dir()
    settings["model"]["$type"] = "theirs.py:Model"
    assert hub.foreign_code(settings) == ["os:system", "theirs.py:Model"]
    assert hub.foreign_code({"env": {"opponents": ["random", "runs/a@3#0f", "os:system"]}}) == ["os:system"]
    numbers = {"agent_start_dir": 0, "profile": 2.0, "direction": True}
    assert hub.foreign_code({"env": {"id": "MiniGrid-Empty-5x5-v0", "options": numbers}}) == []


def test_the_card_says_what_is_needed_and_not_uploaded(
    run: Path, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved, score = RunFolder.open(run), open_checkpoint(latest(run / "checkpoints")), evaluate(run, episodes=1)
    told = partial(card, folder, REPO, folder.facts(), folder.ledger.read_bytes(), [score], [saved], [])
    text = told(["/home/al ice/p/env.py:make"])
    assert f"lockstep pull {REPO} --to run --trust" in text
    assert says(text, "`experiment.json`", "`env.py:make`")
    assert "--trust" not in told() and "env.py:make" not in told()

    other = RunFolder(shutil.copytree(run, tmp_path / "match"))
    settings = json.loads((other.path / "experiment.json").read_text())
    settings["env"]["opponents"] = ["random", "/srv/runs/a@3#0f", "mine.py:play"]
    (other.path / "experiment.json").write_text(json.dumps(settings))
    monkeypatch.setattr(hub, "evaluate", lambda *_, **__: score)  # there are no such opponents
    notes = hub.push(other.path, REPO, episodes=1).notes
    assert says(notes, "no /srv/runs/a@3,", "verify")
    assert "experiment.json names /srv/runs/a@3#0f" in notes and not any("mine.py" in note for note in notes)


@pytest.mark.parametrize(
    "kind",
    [
        "lockstep.evil.py:Model",  # a file, found where run.json says
        "lockstep/evil.py:Model",
        "lockstep.experiment:EnvConfig",  # imported there, not at home
        "lockstep.config.settings:SettingsError",  # no settings
        "lockstep.export.hub:pull",
        "lockstep.nowhere:Model",
        "lockstep.experiment:Experiment.replace",
        7,
    ],
)
def test_a_name_of_ours_does_not_make_code_ours(kind: object) -> None:
    assert hub.foreign_code({"env": {"$type": kind}}) == [str(kind)]


def test_an_environment_from_elsewhere_is_seen_under_any_type() -> None:
    found = hub.foreign_code({"$type": "lockstep.experiment:EnvConfig", "id": "os:system"})
    assert found == ["lockstep.experiment:EnvConfig", "os:system"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vzd_path", "/usr/bin/perl"),
        ("vzd_path", "perl"),
        ("iwad_path", "README"),
        ("game_args", "x"),
        ("config", "+logfile /tmp/x"),
        ("scene", "README.md"),
        ("xml_file", "x"),
        ("words", ["a"]),
        ("nested", {"a": 1}),
        ("none", None),
    ],
)
@pytest.mark.parametrize("where", ["options", "curriculum"])
def test_options_that_may_name_files_or_programs_are_foreign(where: str, name: str, value: object) -> None:
    env = {
        "$type": "lockstep.envs.base:EnvConfig",
        "id": "Basic-v1",
        where: {name: value, "frame_skip": 2, "a": "full"},
    }
    assert hub.foreign_code({"env": env}) == [f"{name}={value}"]


def test_packed_lines_that_are_damaged_are_not_pulled(pushed: Repository, tmp_path: Path) -> None:
    pushed.files["metrics.jsonl.gz"] = gzip.compress(b"{}")[:-4]
    assert f"The run in {REPO} is damaged: metrics.jsonl.gz" in refused(hub.pull, REPO, tmp_path / "a")


def test_nothing_is_made_on_the_hub_for_a_mistake(run: Path, server: StandIn) -> None:
    assert "--episodes 0 " in refused(hub.push, run, REPO, episodes=0)
    (run / "metrics.jsonl").rename(run / "elsewhere")
    assert says(refused(hub.push, run, REPO), "metrics.jsonl", "missing")
    (run / "elsewhere").rename(run / "metrics.jsonl")
    assert not server.repositories


def test_a_public_repository_is_not_pushed_to_as_if_it_were_private(run: Path, pushed: Repository) -> None:
    assert "exists and is public" in refused(hub.push, run, REPO, episodes=1, private=True)


@pytest.mark.parametrize("name", ["experiment.json", "run.json"])
@pytest.mark.parametrize("text", [b"[]", b"{", b"{}", b"\xff"])
def test_a_damaged_file_is_not_pulled(name: str, text: bytes, pushed: Repository, tmp_path: Path) -> None:
    pushed.files[name] = text
    assert f"{name} of {REPO} is damaged" in refused(hub.pull, REPO, tmp_path / "a")


def test_all_recipes_are_ours() -> None:
    for make in RECIPES.values():
        experiment = make()
        assert hub.foreign_code(to_json(experiment)) == [experiment.env.id] * (":" in experiment.env.id)


def test_nothing_but_a_run_s_files_comes_along(pushed: Repository, tmp_path: Path) -> None:
    files = pushed.files
    checkpoint = next(path for path in files if path.endswith("manifest.json")).rpartition("/")[0]
    files[f"{checkpoint}/lockstep.evil.py"] = b"raise SystemExit"
    facts = json.loads(files["run.json"])
    options = {**facts["options"], "wandb": "theirs", "trackio": "theirs"}
    files["run.json"] = json.dumps({**facts, "directory": f"runs/x/{checkpoint}", "options": options}).encode()
    pulled = hub.pull(REPO, tmp_path / "a")
    assert not list(pulled.rglob("*.py"))
    assert json.loads((pulled / "run.json").read_text()) == facts


@pytest.mark.parametrize(
    ("command", "public"),
    [
        ("lockstep train ppo-atari --run /srv/me/x --seed 1", "lockstep train ppo-atari --seed 1"),
        ("lockstep train /srv/me/my.py:recipe --run=x", "lockstep train my.py:recipe"),
        ("lockstep train ppo --env.options rom=/srv/me/a.bin b=1", "lockstep train ppo --env.options rom=a.bin b=1"),
        ("lockstep train ppo --wandb secret --run 'a b'", "lockstep train ppo"),
        ("lockstep train '/home/al ice/p/env.py:make'", "lockstep train env.py:make"),
        ("lockstep train ppo --wandb=me --seed 1", "lockstep train ppo --seed 1"),
        ("lockstep train ppo --eval-opponents random runs/a --seed 1", "lockstep train ppo --seed 1"),
        (
            "lockstep sweep /srv/x p.py:r --slurm --slurm-options account=me mem=1 --seed 1..3",
            "lockstep sweep x p.py:r --slurm --seed 1..3",
        ),
        ("lockstep sweep x p.py:r --slurm-options=mem=1 account=me --seed 1", "lockstep sweep x p.py:r --seed 1"),
        ("lockstep sweep x p.py:r --slurm_options account=me --seed 1", "lockstep sweep x p.py:r --seed 1"),
        ("lockstep train examples/custom_env.py:recipe", "lockstep train examples/custom_env.py:recipe"),
    ],
)
def test_a_command_without_paths(command: str, public: str) -> None:
    assert public_command(command) == public


def test_facts_of_resumptions_name_no_folders() -> None:
    part = {"command": "lockstep resume /data/me/a", "options": {"eval_episodes": 3, "eval_opponents": ["/data/me/b"]}}
    found = public_facts({**part, "resumed": [{"iteration": 2, **part}]})
    public = {"command": "lockstep resume a", "options": {"eval_episodes": 3}}
    assert found == {**public, "resumed": [{"iteration": 2, **public}]}
