"""`lockstep eval RUN`, `lockstep record RUN` and `lockstep plot RUN …`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lockstep.cli.common import clean_end, parse, progress_to_stderr, say, say_json
from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError


@dataclass(frozen=True)
class EvalArguments(EvaluationSettings):
    """Play whole episodes with a trained policy and report raw scores."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    checkpoint: str | None = None
    """latest, best, an iteration, or all, which evaluates all checkpoints that the run has kept (train with
    --keep-checkpoints). Default: latest."""
    levels: str = field(default="train", kw_only=True)
    """Levels to play if the run was trained on some of them (env.num_levels). train plays the same levels, test all
    others, and FIRST..LAST, as in 1001..1005, these levels once in each attempt."""
    plot: str | None = None
    """With --checkpoint all: the image to write (.png, .svg or .pdf). It also shows the training score."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class RecordArguments:
    """Record a video of a trained policy."""

    run: tyro.conf.Positional[str]
    """The run's folder."""
    out: str | None = None
    """The .mp4 file to write. Default: video.mp4 in the run's folder."""
    episodes: int = 1
    """Episodes to show."""
    greedy: bool = False
    """Take the most likely action, like an exported policy. By default actions are drawn from the policy."""
    checkpoint: str | None = None
    """latest, best, or an iteration. Default: latest."""
    seed: int | None = None
    """Seed of the environment and of action noise. Default: the experiment's."""
    max_steps: int = 10_000
    """The maximum number of environment steps in the video."""
    fps: int | None = None
    """Frames per second. Default: real time for Atari, otherwise 30."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class PlotArguments:
    """Plot learning curves. Runs that differ only in their seed become one line with a band."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs, or of sweeps with all their runs."""
    out: str | None = None
    """Image to write: .png, .svg or .pdf. Default: learning-curve.png in the folder if there is one, else here."""
    x: Literal["samples", "frames", "updates", "time"] = "samples"
    """The x axis."""
    metric: str = "score/mean"
    """A metric in metrics.jsonl; docs/metrics.md defines them."""
    json: bool = False
    """Print one JSON document."""


def evaluate(arguments: list[str]) -> int:
    """Run `lockstep eval`."""
    given = parse(EvalArguments, "eval", arguments)
    if given.checkpoint == "all":
        return _evaluate_all(given)
    if given.plot:
        raise SettingsError(f"--plot {given.plot} draws the scores of all checkpoints: add --checkpoint all.")
    from lockstep.envs.adapters import OF_TASK
    from lockstep.envs.mixed import shares
    from lockstep.evaluation.attempts import evaluate_either
    from lockstep.evaluation.scores import Evaluation
    from lockstep.evaluation.statistics import readable
    from lockstep.reports.scales import capped_mean
    from lockstep.run.folder import RunFolder

    folder = RunFolder.open(given.run)
    with progress_to_stderr(given.json), clean_end():
        result = evaluate_either(folder.path, given, given.checkpoint)
    sampled = shares(folder.experiment().env.id)
    metrics = result.metrics if isinstance(result, Evaluation) else {}
    scores = {name.removeprefix(OF_TASK): x for name, x in metrics.items() if name.startswith(OF_TASK)}
    every = all(x.known for x in scores.values())
    capped = capped_mean({task: x.mean for task, x in scores.items()}) if every else None
    if given.json:
        of_tasks: dict[str, object] = {"shares_of_samples": sampled} if sampled else {}
        if capped is not None:
            of_tasks["capped_mean"] = {"scale": capped[0], "value": capped[1]}
        say_json({"run": given.run, **result.to_json(), **of_tasks})
    else:
        say(str(result))
        if capped is not None:
            say(f"The mean of {len(scores)} tasks is {readable(capped[1])} ({capped[0]}, each at most 1).")
        if result.acting not in ("greedy", "deterministic"):
            say(f"These actions were {result.acting}; --greedy takes the most likely ones, as an exported policy does.")
    return 0


def _evaluate_all(given: EvalArguments) -> int:
    """Run `lockstep eval` for all checkpoints."""
    from lockstep.evaluation.attempts import evaluate_checkpoints, table
    from lockstep.reports.plots import check_suffix, plot_checkpoints
    from lockstep.run.folder import RunFolder

    run = RunFolder.open(given.run).path
    with progress_to_stderr(given.json), clean_end():
        if given.plot:
            check_suffix(Path(given.plot))
        points = evaluate_checkpoints(run, given)
        if given.plot:
            plot_checkpoints(run, points, given.plot)
    if given.json:
        say_json({"run": given.run, "checkpoints": [point.to_json() for point in points]})
        return 0
    say(f"{table(points)}\n\nThe last line: {points[-1].result}")
    if given.plot:
        say(f"wrote {given.plot}")
    return 0


def record(arguments: list[str]) -> int:
    """Run `lockstep record`."""
    given = parse(RecordArguments, "record", arguments)
    from lockstep.evaluation.policy import acting_of, load_policy
    from lockstep.evaluation.video import record_video
    from lockstep.run.folder import RunFolder

    run = RunFolder.open(given.run).path
    out = Path(given.out) if given.out else run / "video.mp4"
    with progress_to_stderr(given.json), clean_end():
        path = record_video(
            run,
            out,
            episodes=given.episodes,
            greedy=given.greedy,
            checkpoint=given.checkpoint,
            seed=given.seed,
            max_steps=given.max_steps,
            fps=given.fps,
        )
        acting = acting_of(load_policy(run, given.checkpoint).model, greedy=given.greedy)
    more = "" if acting in ("greedy", "deterministic") else "; --greedy takes the most likely ones"
    return _written(path, f": {acting} actions{more}", json=given.json)


def plot(arguments: list[str]) -> int:
    """Run `lockstep plot`."""
    given = parse(PlotArguments, "plot", arguments)
    from lockstep.reports.plots import plot as draw
    from lockstep.reports.runs import listed
    from lockstep.run.folder import RunFolder

    runs = [RunFolder.open(run).path for run in listed(given.runs)]
    home = Path(given.runs[0]) if len(given.runs) == 1 else Path()
    out = Path(given.out) if given.out else home / "learning-curve.png"
    return _written(draw(runs, out, x=given.x, metric=given.metric), json=given.json)


def _written(path: Path, how: str = "", *, json: bool) -> int:
    if json:
        say_json({"file": str(path)})
    else:
        say(f"wrote {path}{how}")
    return 0
