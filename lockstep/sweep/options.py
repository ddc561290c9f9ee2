"""How a sweep is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.config.settings import Options, SettingsError
from lockstep.sweep.stopping import StopRule


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run. Nothing here changes what a run learns, only whether it is stopped early."""

    slots: int = 0
    """Runs at once, at most; 0: as many as the cores and GPUs of this machine hold (on Slurm 256, of a search 4)."""
    runs_per_gpu: int = 1
    """Runs that share a GPU. More keep it busier with small networks, and must fit into its memory together. On Slurm
    each run has its own, but for those of a search."""
    stop_early: str = ""
    """Stop hopeless runs: median@200k stops, at every 200k samples, those whose score is below the median of the other
    runs of the same environment; 20@1M those whose score is below 20. For searching settings, not for evidence."""
    search: Options = field(default_factory=dict)
    """Settings to search with Optuna (needs the extra optuna), each within a range or among values:
    algorithm.learning_rate=log:1e-5..1e-3 algorithm.epochs=1..8 model.core=none,lstm."""
    population: int | None = None
    """Members of a population, which take over each other's weights while what --search names changes. More find better
    settings, and each costs a run a generation."""
    generations: int | None = None
    """Of a population; default: 10, or as many as it was begun with. --total-steps are those of one. More change
    settings more often, and can follow later."""
    rivals: bool = False
    """Let members of a population play against those of the generation before, in environments of several agents
    (docs/multiagent.md). Self-play against several policies is harder to get stuck in than against one."""
    trials: int | None = None
    """Of a search; default: 20, or as many as it was begun with. More find better settings, and can follow later."""
    objective: str | None = None
    """Metric (docs/metrics.md) that a search, or a population, maximizes; default: score/mean. Of a trial it is
    averaged over the seeds."""
    retry_failed: bool = False
    """Let runs that failed go on from their checkpoints."""
    retry_stopped: bool = False
    """Let runs that a rule stopped early go on from their checkpoints, as under another rule."""
    drop: str = ""
    """First take runs that wait, or have failed, out of the queue, by name, as in 'ppo-atari-*'. Their folders stay. Of
    a population, members that have failed: others succeed them."""
    status: bool = False
    """Only print what has become of each run. May be asked for while the sweep runs."""
    slurm: bool = False
    """Hand each run, or a whole search, to Slurm as a job (needs the extra slurm), instead of running it here."""
    slurm_options: Options = field(default_factory=dict)
    """Further options of the jobs, by sbatch's names: partition=gpu time=600 (minutes) mem=16GB."""
    ray: bool = False
    """Run on a Ray cluster (needs the extra ray): the one that RAY_ADDRESS names, else one of this machine."""
    dry_run: bool = False
    """Print which runs there would be (with --slurm also the jobs), and do nothing."""
    overview: Literal["auto", "live", "plain", "none"] = "auto"
    """Live table, plain lines, or nothing; auto is live on a terminal and plain elsewhere."""
    json: bool = False
    """Print one JSON document to standard output; progress goes to standard error."""

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        if self.slots < 0 or self.runs_per_gpu < 1:
            raise SettingsError(
                f"--slots {self.slots} must be 0 (as many as fit) or more, and --runs-per-gpu {self.runs_per_gpu} at "
                "least 1."
            )
        if self.slurm and self.ray:
            raise SettingsError("--slurm and --ray are two places for the same runs. Leave one of them out.")
        if self.drop and (self.status or self.dry_run):
            raise SettingsError(
                f"--drop {self.drop} changes the queue, --status and --dry-run only look. Leave one out."
            )
        if self.stop_early:
            StopRule.parse(self.stop_early)


LASTING = ("slots", "runs_per_gpu", "stop_early")
"""Options that a sweep keeps for when it is continued."""
