"""The model card of a run: a description, its scores with their protocol, and how to repeat it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.evaluation.scores import Evaluation
from lockstep.evaluation.statistics import readable
from lockstep.experiment import Experiment
from lockstep.reproducibility.verify import checkpoint_digest
from lockstep.run import ledger
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.folder import RunFolder

VIDEO, CURVE = "replay.mp4", "learning-curve.png"
"""Names of algorithms as the Hub shows them."""
_FOLDERS, _KEPT = re.compile(r"(^|=)(?:~|\.{1,2})?/.*/"), r"\1"
"""A file's folders, and what to keep of them."""
_PRIVATE = ("run", "wandb", "trackio", "eval_opponents")
"""Options that name folders or accounts."""


def card(
    folder: RunFolder,
    repo: str,
    facts: dict[str, Any],
    recorded: bytes,
    evaluations: Sequence[Evaluation],
    checkpoints: Sequence[Checkpoint],
    shown: Sequence[str],
    foreign: Sequence[str] = (),
) -> str:
    """The README.md of a run's repository, in Markdown with the Hub's metadata at its head.

    Args:
        folder: the run.
        repo: NAME/REPOSITORY.
        facts: the contents of run.json, cleaned by public_facts.
        recorded: the uploaded ledger. That of the run may have grown meanwhile.
        evaluations: evaluations of one checkpoint. The first becomes the score in the metadata.
        checkpoints: the uploaded checkpoints, newest first.
        shown: the uploaded pictures and videos.
        foreign: code from outside lockstep that the run needs and that is not uploaded.
    """
    experiment = folder.experiment()
    head, _ = ledger.read(folder.ledger)
    iterations = recorded.count(b"\n") - 1
    name = f"{experiment.algorithm.name.upper()} on {experiment.env.id}"
    scores = "\n".join(f"| {_interval(result)} | {result.protocol} |" for result in evaluations)
    pictures = f"![Learning curve]({CURVE})\n\n" if CURVE in shown else ""
    film = f"A video of it is in [{VIDEO}]({VIDEO}).\n\n" if VIDEO in shown else ""
    versions = {**facts.get("versions", {}), "python": facts.get("python")}
    told = ", ".join(f"{library} {version}" for library, version in versions.items() if version)
    kept = ", ".join(str(checkpoint.iteration) for checkpoint in checkpoints)
    digest = checkpoint_digest(checkpoints[0].path)
    collected, wanted = checkpoints[0].iteration * experiment.samples_per_iteration, experiment.total_steps
    samples = f"{collected:,} samples" + (f" of {wanted:,}" if collected < wanted else "")
    command, others = facts.get("command", "unknown"), ""
    if command.startswith("lockstep sweep"):
        others = "That trains other runs as well; `lockstep train run` trains this one from the beginning.\n\n"
    cpu = head["platform"]["cpu"]["model"]
    trust, needed = "", ""
    if foreign:
        named = ", ".join(f"`{_FOLDERS.sub(_KEPT, each)}`" for each in foreign)
        trust, needed = " --trust", f" It needs code that is not here, where `experiment.json` looks for it: {named}."
    return f"""---
{_metadata(name, experiment, evaluations[0])}
---

# {name}

Trained with lockstep: everything here can be repeated, bit by bit.{needed}

| score (95% interval) | protocol |
|---|---|
{scores}

{pictures}{film}## Use it

    pip install ".[hub]"    # in a checkout of lockstep
    lockstep pull {repo} --to run{trust}
    lockstep eval run --episodes 30
    lockstep record run

`lockstep resume run` continues the training, `lockstep export run` writes the policy for other programs.

## How it was trained

{_indented(command)}

{others}Layout {facts.get("layout")}, {samples}, seed {experiment.seed}; {told}; {cpu}.
All settings are in `experiment.json`, all metrics in `metrics.jsonl`. Checkpoints: after iterations {kept}.

## Proof

| | |
|---|---|
| experiment | `{head["experiment"]}` |
| iterations recorded | {iterations:,} |
| SHA-256 of the ledger | `{hashlib.sha256(recorded).hexdigest()}` |
| digest after iteration {checkpoints[0].iteration:,} | `{digest}` |

`lockstep verify run` computes the first iterations again and compares every bit with the ledger (`--iterations all`:
every iteration); bits are comparable on an equal processor with equal versions.
"""


def public_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The contents of run.json without paths and names of machines and accounts of the user."""
    kept = {name: value for name, value in facts.items() if name != "directory"} | _public_part(facts)
    if "nodes" in facts:
        kept["nodes"] = [{name: value for name, value in each.items() if name != "host"} for each in facts["nodes"]]
    if "resumed" in facts:
        kept["resumed"] = [{**each, **_public_part(each)} for each in facts["resumed"]]
    return kept


def _public_part(facts: dict[str, Any]) -> dict[str, Any]:
    """The options and the command with which a run began or was resumed."""
    options = {name: value for name, value in facts.get("options", {}).items() if name not in _PRIVATE}
    return {"options": options, "command": public_command(facts.get("command", ""))}


def public_command(command: str) -> str:
    """A command without --run and accounts, and with the names of files alone."""
    kept, words = [], _words(command)
    while words:
        word = words.pop(0)
        flag, given, _ = word.partition("=")
        name = flag.replace("_", "-")
        several = name in ("--slurm-options", "--eval-opponents")
        if not several and name not in [f"--{each}" for each in _PRIVATE]:
            kept.append(_FOLDERS.sub(_KEPT, word))
            continue
        values = len(words) if several else 0 if given else 1
        while words and values and not words[0].startswith("--"):
            words.pop(0)
            values -= 1
    return shlex.join(kept)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # shlex.join did not write it
        return command.split()


def _metadata(name: str, experiment: Experiment, score: Evaluation) -> str:
    """The card's head, as YAML whose values are JSON."""
    task = Path(experiment.env.id).name
    found = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": task, "type": task},
        "metrics": [{"type": "mean_reward", "name": "mean_reward", "value": f"{score.mean:.2f} +/- {score.std:.2f}"}],
    }
    entries: dict[str, Any] = {
        "library_name": "lockstep",
        "tags": [task, experiment.algorithm.name, "reinforcement-learning", "deep-reinforcement-learning", "lockstep"],
        "model-index": [{"name": name, "results": [found]}],
    }
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items())


def _interval(result: Evaluation) -> str:
    interval = f" ({readable(result.interval[0])} to {readable(result.interval[1])})" if result.interval else ""
    return f"{readable(result.mean)} ± {readable(result.std)}{interval}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
