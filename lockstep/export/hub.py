"""Runs on the Hugging Face Hub (extra `hub`): uploaded with a model card, downloaded as a run's folder."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.algorithms.annealing import is_function
from lockstep.config.names import is_registered
from lockstep.config.options import check_episodes
from lockstep.config.settings import SettingsError, require
from lockstep.envs.settings import RANDOM
from lockstep.evaluation.policy import find_checkpoint
from lockstep.evaluation.scores import evaluate
from lockstep.evaluation.video import record_video
from lockstep.export.card import CURVE, VIDEO, card, public_facts
from lockstep.reports.plots import plot
from lockstep.run.checkpoint import Checkpoint, latest, list_checkpoints, open_checkpoint
from lockstep.run.files import writing
from lockstep.run.folder import RunFolder

_LARGE = 1_000_000
"""Bytes above which ledger and metrics are compressed."""
_LINES = ("ledger.jsonl", "metrics.jsonl")
_OURS = re.compile(
    r"experiment\.json|run\.json|weights\.safetensors|(?:ledger|metrics)\.jsonl(?:\.gz)?|checkpoints/\d{8,}/(?:manifest\.json|[\w-]+\.safetensors)|README\.md"
    rf"|{re.escape(CURVE)}|{re.escape(VIDEO)}"
)
"""Files of a run's repository; push leaves all other files alone."""
_ENTRIES = {"experiment.json": {"$type"}, "run.json": {"options", "command", "layout"}}
"""Files that every run needs, and the entries they must have."""
_OF_FILES = re.compile("path|file|dir|args|url")
"""Options whose values may be paths."""


@dataclass(frozen=True)
class Pushed:
    """A run on the Hub."""

    url: str
    commit: str
    files: list[str]
    size: int
    """Bytes of these files."""
    notes: list[str]
    """Notes on files that could not be uploaded."""


def push(
    run: Path | str,
    repo: str,
    *,
    checkpoint: str | None = None,
    episodes: int = 10,
    greedy: bool = False,
    record: bool = False,
    private: bool = False,
) -> Pushed:
    """Upload a run: settings, ledger, metrics, the latest and the best checkpoint, learning curve, video, model card.

    If the repository exists, this adds a commit, which deletes the checkpoints of former commits.

    Args:
        run: folder of the run.
        repo: NAME/REPOSITORY.
        checkpoint: the checkpoint whose score the card shows: latest (also None), best, or an iteration.
        episodes: the number of episodes for the score; as many on test levels if training was limited to some levels.
        greedy: evaluate the most likely actions.
        record: record a video if the run has none.
        private: whether a new repository is private.

    Raises:
        SettingsError: there is no such run or checkpoint; huggingface_hub is not installed; there is no token, or the
            Hub does not accept it; the Hub cannot be reached.
    """
    check_episodes(episodes, "--episodes")
    folder = RunFolder.open(run)
    experiment = folder.experiment()
    scored = find_checkpoint(run, checkpoint)
    for name in _LINES:
        if not (folder.path / name).is_file():
            raise folder.damaged(name, "it is missing")
    hub = _hub(repo)
    if hub.token is None:
        raise SettingsError(
            f"Pushing to {repo} needs a token of the Hugging Face Hub, but none was found. Make one with write access "
            "at huggingface.co/settings/tokens, and give it in the variable HF_TOKEN, or log in once with: hf "
            "auth login"
        )
    with _explained(repo):  # before minutes are spent on evaluation
        hub.create_repo(repo, private=private, exist_ok=True)
        if private and not hub.model_info(repo).private:
            raise SettingsError(
                f"{repo} exists and is public: --private is for a new repository. Make it private in its "
                "settings on the Hub, or choose another name. Nothing was uploaded."
            )
    checkpoints = _shared_checkpoints(folder)
    if all(scored.iteration != each.iteration for each in checkpoints):
        checkpoints.append(scored)
    facts = public_facts(folder.facts())
    lines = {name: (folder.path / name).read_bytes() for name in _LINES}
    files, notes = _files(folder, facts, lines, checkpoints, record=record)
    levels = ("test", "train") if experiment.env.num_levels else ("train",)
    name = f"{scored.iteration:08d}"
    scores = [evaluate(run, episodes=episodes, greedy=greedy, checkpoint=name, levels=each) for each in levels]
    foreign = foreign_code(folder.read("experiment.json"))
    files["README.md"] = card(
        folder, repo, facts, lines["ledger.jsonl"], scores, checkpoints, list(files), foreign
    ).encode()
    with _explained(repo):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        outdated = [path for path in hub.list_repo_files(repo) if path not in files and _OURS.fullmatch(path)]
        done = hub.create_commit(
            repo,
            [
                *(CommitOperationAdd(path, data) for path, data in files.items()),
                *(CommitOperationDelete(path) for path in outdated),
            ],
            commit_message=f"{experiment.env.id}, iteration {checkpoints[0].iteration}",
        )
    size = sum(len(data) if isinstance(data, bytes) else data.stat().st_size for data in files.values())
    return Pushed(f"{hub.endpoint}/{repo}", done.oid, list(files), size, notes)


def pull(repo: str, to: Path | str | None = None, *, revision: str | None = None, trust: bool = False) -> Path:
    """Download a run that push uploaded into a new folder, as if it had been trained here.

    Args:
        repo: NAME/REPOSITORY.
        to: the folder; None takes runs/REPOSITORY.
        revision: branch, tag or commit; None takes the newest.
        trust: accept settings that name code from outside lockstep. An environment, for example, may be any function.

    Returns:
        The folder.

    Raises:
        SettingsError: the folder exists; the repository does not exist, or holds no run; it names foreign code and
            trust is off; a checkpoint is damaged; huggingface_hub is not installed; the Hub cannot be reached.
    """
    hub = _hub(repo)
    target = Path(to) if to else Path("runs") / repo.partition("/")[2]
    if target.exists():
        raise SettingsError(f"{target} exists. Nothing was downloaded: choose another folder with --to.")
    scratch = target.with_name(f".{target.name}.partial")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed download
        scratch.mkdir()
    try:
        with _explained(repo, "read"):
            found = hub.model_info(repo, revision=revision)
            for name in filter(_OURS.fullmatch, (entry.rfilename for entry in found.siblings or ())):
                hub.hf_hub_download(repo, name, revision=found.sha, local_dir=scratch)
        shutil.rmtree(scratch / ".cache", ignore_errors=True)
        if missing := [name for name in _ENTRIES if not (scratch / name).is_file()]:
            raise SettingsError(
                f"{repo} holds no run of lockstep (it has no {' or '.join(missing)}). Give a repository that push made."
            )
        settings, facts = (_object(scratch / name, repo) for name in _ENTRIES)
        if not trust and (foreign := foreign_code(settings)):
            raise SettingsError(
                f"The run in {repo} names code from outside lockstep, which would run here whenever you use it: "
                f"{', '.join(foreign)}. If you trust its author and have this code, pull it with --trust."
            )
        for packed in scratch.glob("*.jsonl.gz"):
            try:
                with gzip.open(packed) as source, packed.with_suffix("").open("wb") as out:
                    shutil.copyfileobj(source, out)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise SettingsError(f"The run in {repo} is damaged: {packed.name}: {error}") from error
            packed.unlink()
        if (scratch / VIDEO).is_file():
            (scratch / VIDEO).rename(scratch / "video.mp4")
        copied = RunFolder(scratch)
        for check in (copied.layout, copied.options, copied.records if copied.metrics.is_file() else copied.facts):
            try:
                check()
            except SettingsError as error:
                reason = str(error).replace(f"{scratch}/", "")
                raise SettingsError(f"The run in {repo} is damaged: {reason}") from error
        latest(scratch / "checkpoints")  # raises if there is none
        for checkpoint in list_checkpoints(scratch / "checkpoints"):
            open_checkpoint(checkpoint)
        # Clean them again, since another program may have uploaded them: these entries choose where users' files are
        # looked up and whose account receives metrics.
        (scratch / "run.json").write_text(json.dumps(public_facts(facts), indent=2) + "\n")
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _object(path: Path, repo: str) -> dict[str, Any]:
    """A downloaded JSON file, which must have the entries that are used."""
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and _ENTRIES[path.name] <= found.keys():
            return found
    raise SettingsError(f"{path.name} of {repo} is damaged: push did not upload it in this form. Push the run again.")


def foreign_code(settings: Any) -> list[str]:
    """The names in an experiment's JSON that are, or may be, code from outside lockstep, which runs when the experiment
    is used."""
    if isinstance(settings, list):
        return [name for each in settings for name in foreign_code(each)]
    if not isinstance(settings, dict):
        return []
    named = [str(settings["$type"])] if "$type" in settings else []
    found = [name for name in named if not is_registered(name)]
    if ":" in str(settings.get("id")):
        found.append(str(settings["id"]))
    if isinstance(opponents := settings.get("opponents"), list):
        found += [str(name) for name in opponents if ":" in str(name)]
    if ":" in str(settings.get("policies")):
        found.append(str(settings["policies"]))
    if ":" in (curriculum := str(settings.get("curriculum") or "")) and "env" in settings:
        found.append(curriculum)
    if isinstance(anneal := settings.get("anneal"), dict):
        found += [str(form) for form in anneal.values() if is_function(str(form))]
    for options in (settings.get("options"), settings.get("curriculum")):
        if isinstance(options, dict):
            found += [f"{name}={value}" for name, value in options.items() if not _is_plain(name, value)]
    return [*found, *foreign_code(list(settings.values()))]


def _is_plain(name: str, value: Any) -> bool:
    """Whether an environment's option is a number or a word. Other options may name files and programs: EnvPool's Doom
    runs the program in vzd_path, and writes where game_args tell it to."""
    if isinstance(value, str):
        return not _OF_FILES.search(name) and bool(re.fullmatch(r"[\w-]*", value))
    return isinstance(value, (bool, int, float))


def _shared_checkpoints(folder: RunFolder) -> list[Checkpoint]:
    """The newest checkpoint and, if it is a different one, the best."""
    newest = open_checkpoint(latest(folder.checkpoints))
    with contextlib.suppress(SettingsError):
        best = find_checkpoint(folder.path, "best")
        return [newest] if best.iteration == newest.iteration else [newest, best]
    return [newest]


def _files(
    folder: RunFolder,
    facts: dict[str, Any],
    lines: dict[str, bytes],
    checkpoints: list[Checkpoint],
    *,
    record: bool,
) -> tuple[dict[str, bytes | Path], list[str]]:
    """All files to upload except the card, by their names in the repository, and notes on missing ones."""
    files: dict[str, bytes | Path] = {"experiment.json": folder.path / "experiment.json"}
    notes = []
    files["run.json"] = (json.dumps(facts, indent=2) + "\n").encode()
    for name, data in lines.items():
        packed = len(data) > _LARGE
        # Leave the time out, so that equal runs give equal files.
        files[f"{name}.gz" if packed else name] = gzip.compress(data, mtime=0) if packed else data
    begun_with = folder.experiment().warm_start.run
    if folder.weights.is_file():
        files[folder.weights.name] = folder.weights
    elif begun_with:
        notes.append(f"no {folder.weights.name}, which the run began with: others cannot verify it")
    if Path(begun_with).is_absolute():
        notes.append(f"experiment.json names {begun_with}, which the run began with")
    env = folder.experiment().env
    opponents = [env.player(name)[1] for name in env.opponents]
    runs = [name.partition("#")[0] for name in opponents if name != RANDOM and ":" not in name]
    notes += [f"no {name}, against which it plays: others cannot evaluate or verify it" for name in runs]
    named = [name for name in (env.id, env.policies, *opponents) if Path(name).is_absolute()]
    notes += [f"experiment.json names {name}" for name in named]
    for each in checkpoints:
        files |= {f"checkpoints/{each.path.name}/{path.name}": path for path in sorted(each.path.iterdir())}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            files[CURVE] = plot([folder.path], Path(scratch) / CURVE).read_bytes()
        except SettingsError as error:
            notes.append(f"no learning curve: {error}")
    video = folder.path / "video.mp4"
    try:
        if record and not video.is_file():
            record_video(folder.path, video)
        if video.is_file():
            files[VIDEO] = video
    except SettingsError as error:
        notes.append(f"no video: {error}")
    return files, notes


# -------------------------------------------------------------------------------------------------------- the Hub


def _hub(repo: str) -> Any:
    """The Hub's client, for the address in HF_ENDPOINT."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise SettingsError(f"{repo!r} is not the name of a repository. Write NAME/REPOSITORY, as in me/ppo-pong.")
    require("huggingface_hub", "hub", "Sharing runs", "To share a run without it, copy its folder.")
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise SettingsError(f"The Hugging Face Hub does not accept this repository name: {error}") from error

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=get_token())


@contextlib.contextmanager
def _explained(repo: str, doing: str = "write to") -> Iterator[None]:
    """Turn errors of the Hub and of the network into one paragraph; doing: the action that failed."""
    from huggingface_hub import errors

    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise SettingsError(f"{repo} has no such revision. Leave out --revision for the newest one.") from error
    except errors.RepositoryNotFoundError as error:
        raise SettingsError(
            f"There is no repository {repo} on the Hugging Face Hub, or it is private and your token cannot read it. "
            "Correct the name, or give a token with access in the variable HF_TOKEN."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise SettingsError(
                f"The Hugging Face Hub does not let this token {doing} {repo} (HTTP {status}). Make a token with "
                "access at huggingface.co/settings/tokens, and give it in the variable HF_TOKEN."
            ) from error
        reason = " ".join(str(error).split()).rstrip(".")
        raise SettingsError(
            f"The Hugging Face Hub refused {repo} (HTTP {status}): {reason}. Try again later."
        ) from error
    except Exception as error:
        # Large uploads hide the cause; version 2 uses another HTTP library, whose errors pass through.
        cause = error.__cause__ if type(error) is RuntimeError else error
        if not (isinstance(cause, OSError) or type(cause).__module__.startswith("httpx")):
            raise
        reason = " ".join(str(cause).split()).rstrip(".")
        raise SettingsError(
            f"The Hugging Face Hub cannot be reached for {repo}: {type(cause).__name__}: {reason}. "
            "Check the network (and HF_ENDPOINT and HF_HUB_OFFLINE, if set), and try again."
        ) from error
