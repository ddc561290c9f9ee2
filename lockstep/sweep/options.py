"""The options of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.settings import Options, SettingsError
from lockstep.sweep.stopping import StopRule


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep. They do not change what a run learns, only whether it is stopped early."""

    suite: str | None = None
    """Train recipes on every task of a suite, in place of --env.id: atari100k, atari57, mujoco or minatar."""
    slots: int = 0
    """The maximum number of runs at once; 0 fills the cores and GPUs of this machine (on Slurm 256 runs, or 4 of a
    search)."""
    runs_per_gpu: int = 1
    """Runs that share a GPU. More keep it busy with small networks, and must fit into its memory together. On Slurm
    each run has its own GPU, except in a search."""
    stop_early: str = ""
    """Stop runs with low scores, by a rule such as median@200k or 20@1M. The first one stops, at every 200k samples,
    runs whose score is below the median of the other runs of the same environment. The second one stops runs whose
    score is below 20 after 1M samples, 2M and so on. Use it to search, not for evidence."""
    search: Options = field(default_factory=dict)
    """Settings to search with Optuna (needs the extra optuna), each with a range or values. For example,
    algorithm.learning_rate=log:1e-5..1e-3 algorithm.epochs=1..8 model.core=none,lstm."""
    population: int | None = None
    """Members of a population (population-based training). The worst take over the weights of the best, and settings of
    --search change. More members find better settings; each costs a run per generation."""
    generations: int | None = None
    """Generations of a population, each of --total-steps. More change settings more often, and can be added later.
    Default: 10, or as before."""
    evolution: Literal["", "sample-factory"] = ""
    """How a population changes after each generation. With sample-factory, settings of most members mutate, and only
    the worst take over weights (docs/sweep.md), which keeps more variety. Default: only members that take over weights
    change."""
    gap: float | None = None
    """How much higher the objective of another member must be before its weights are taken over. It is for --evolution
    sample-factory (the paper's duels: 0.35 of a win rate). Higher keeps more variety. Default: 0."""
    rivals: bool = False
    """Let members of a population play against the previous generation, in environments of several agents
    (docs/multiagent.md). Self-play gets stuck less easily against several policies than against one."""
    trials: int | None = None
    """Trials of a search. More find better settings, and can be added later. Default: 20, or as before."""
    objective: str | None = None
    """Metric (docs/metrics.md) that a search or a population maximizes, averaged over the seeds of a trial. Default:
    score/mean."""
    retry_failed: bool = False
    """Continue failed runs from their checkpoints."""
    retry_stopped: bool = False
    """Continue runs that --stop-early stopped from their checkpoints, for example under another rule."""
    drop: str = ""
    """Remove waiting and failed runs from the queue by name, as in 'ppo-atari-*'. Their folders stay. In a population,
    others take the place of failed members."""
    status: bool = False
    """Only print the state of each run. Works while the sweep runs."""
    slurm: bool = False
    """Submit each run, or a whole search, to Slurm as a job (needs the extra slurm) instead of running it here."""
    slurm_options: Options = field(default_factory=dict)
    """Further options of the jobs, by sbatch's names: partition=gpu time=600 (minutes) mem=16GB."""
    ray: bool = False
    """Run on a Ray cluster (needs the extra ray): the one that RAY_ADDRESS names, else one of this machine."""
    dry_run: bool = False
    """Print the runs that would start (with --slurm also the jobs), and do nothing."""
    overview: Literal["auto", "live", "plain", "none"] = "auto"
    """A live table, plain lines, or nothing. auto is live on a terminal and plain elsewhere."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if self.slots < 0 or self.runs_per_gpu < 1:
            raise SettingsError(
                f"--slots {self.slots} must be 0 (as many as fit) or more, and --runs-per-gpu {self.runs_per_gpu} at "
                "least 1."
            )
        if self.slurm and self.ray:
            raise SettingsError("--slurm and --ray choose different places for the same runs. Leave one of them out.")
        if self.drop and (self.status or self.dry_run):
            raise SettingsError(
                f"--drop {self.drop} changes the queue, but --status and --dry-run only show it. Leave one out."
            )
        if self.stop_early:
            StopRule.parse(self.stop_early)


LASTING = ("slots", "runs_per_gpu", "stop_early")
"""Options that a continued sweep keeps."""
