"""`lockstep submit RECIPE …`: one run as a Slurm job, on one node or several."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from lockstep.cli.common import is_main_process, progress_to_stderr, say, say_json
from lockstep.cli.recipe import asked
from lockstep.cli.train import report
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import Options, SettingsError
from lockstep.config.user_code import look_for_files_in
from lockstep.experiment import Experiment
from lockstep.launchers.slurm import executor, refusals, script, submitit
from lockstep.run.finding import is_run, require_empty
from lockstep.run.folder import RunFolder
from lockstep.system.output import print_warning


@dataclass(frozen=True)
class SubmitArguments:
    """Submit one run to Slurm: lockstep submit ppo-atari --nodes 2 --tasks-per-node 4 --run runs/pong

    The job trains the run, or continues it if it exists already.
    """

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    layout: str = "torchrun"
    """The layout. With torchrun, every task is a process that collects and learns. With a0-l1,2,3-d2, each of two tasks
    starts a group of collectors and learners. Any other layout, such as processes:8, runs in a single task. Options
    follow, as in torchrun,env_threads=2."""
    preset: str | None = None
    """As for train."""
    nodes: int = 1
    """Nodes of the job. More than one needs --layout torchrun, or a layout that ends with -dN for N tasks."""
    tasks_per_node: int = 1
    """Processes on each node. The total can be at most the number of shards."""
    slurm_options: Options = field(default_factory=dict)
    """Further options of the job, by sbatch's names: partition=cpu time=600 (minutes) mem=16GB. "setup=module load
    cuda" runs a shell command before the program starts."""
    dry_run: bool = False
    """Print the batch script without submitting it."""
    json: bool = False
    """Print one JSON document. Progress goes to standard error."""


@dataclass
class RunJob:
    """The function that every task of the job runs. Shortly before its time limit, submitit requeues the job, which
    then continues from the newest checkpoint."""

    experiment: dict[str, Any]
    layout: str
    options: dict[str, Any]
    directory: str
    """The folder from which the job was submitted. Paths of files and of the run are relative to it."""
    command: list[str]
    """The command that the run records."""

    def __call__(self) -> str:
        from lockstep.launchers.launch import resume, train

        layout, options = Layout.parse(self.layout), RunOptions(**self.options)
        if layout.copies > 1 or layout.launcher.started_externally:
            submitit().helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        os.chdir(self.directory)
        look_for_files_in(self.directory)
        sys.argv[:] = self.command
        # Only learner 0 inspects the folder, since it may change before the others would. They follow its decision.
        if is_main_process() and is_run(Path(str(options.run))):
            result = resume(str(options.run), layout, options)
        else:
            result = train(from_json(self.experiment), layout, options)
        report(result, json=False)
        return result.digest

    def checkpoint(self) -> Any:
        """The job that continues this one."""
        return submitit().helpers.DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint


def submit(arguments: list[str]) -> int:
    """Run `lockstep submit`."""
    given, _ = asked(
        "submit", arguments, lambda experiment, layout: SubmitArguments(experiment, layout=layout), "torchrun"
    )
    with progress_to_stderr(given.json):
        layout = Layout.parse(given.layout)
        job = _job(given, layout)
        run = Path(str(given.options.run))
        settings = _settings(given, layout)
        made = executor(run.with_name(f"{run.name}.slurm"), settings, given.slurm_options, dry_run=given.dry_run)
        text = script(made)
        with refusals(given.slurm_options):
            submitted = None if given.dry_run else made.submit(job)
    if given.json:
        say_json({"run": str(run), "job": submitted and submitted.job_id, "script": text})
    elif submitted is None:
        say(text)
    else:
        say(f"job {submitted.job_id}: {run}\nlog: {submitted.paths.stdout}")
    return 0


def _job(given: SubmitArguments, layout: Layout) -> RunJob:
    """The job, after all checks that are possible before it runs."""
    from lockstep.training import callbacks
    from lockstep.training.prepare import checked_agent, prepare, prepare_options

    processes = given.nodes * given.tasks_per_node
    if given.nodes < 1 or given.tasks_per_node < 1:
        raise SettingsError(f"--nodes {given.nodes} and --tasks-per-node {given.tasks_per_node} must be at least 1.")
    if processes not in (1, layout.copies) and not layout.launcher.started_externally:
        raise SettingsError(
            f"--layout {layout} starts its processes itself, on one machine, so --nodes {given.nodes} "
            f"--tasks-per-node {given.tasks_per_node} would start it {processes} times. Use --layout torchrun, or "
            f"a layout with a group for each task, such as cpu:a1-l1-d{processes}, or leave them out."
        )
    if given.options.run is None:
        raise SettingsError(
            "submit needs --run FOLDER, on a file system that all nodes share: the job's processes meet there, and a "
            "requeued job continues there."
        )
    if layout.launcher.started_externally and layout.uses_gpus and layout.device != "0":
        raise SettingsError(
            "submit gives each task its own GPU, which the task sees as GPU 0. Use --layout "
            f"{layout.launcher_name},device=0."
        )
    if layout.copies > 1 and layout.uses_gpus and given.tasks_per_node > 1 and "gpus_per_task" in given.slurm_options:
        raise SettingsError(
            f"With --slurm-options gpus_per_task={given.slurm_options['gpus_per_task']}, each task sees only its own "
            f"GPUs, but --layout {layout} numbers all GPUs of a node. Leave it out: submit asks for the layout's GPUs."
        )
    workers = processes if layout.launcher.started_externally else layout.workers
    here = dataclasses.replace(layout.anywhere(), workers=workers)
    experiment = prepare(given.experiment, here)
    prepare_options(experiment, here, given.options)  # the job names opponents itself
    if given.options.callback is not None:
        callbacks.check(given.options.callback, layout)
    run = Path(given.options.run)
    if not is_run(run):
        require_empty(given.options.run)
        for warning in checked_agent(experiment).warnings():
            print_warning(warning)
    elif RunFolder(run).experiment().identity() != experiment.identity():
        raise SettingsError(f"--run {run} holds a run of another experiment. Choose another folder.")
    return RunJob(to_json(experiment), str(layout), dataclasses.asdict(given.options), os.getcwd(), list(sys.argv))


def _settings(given: SubmitArguments, layout: Layout) -> dict[str, Any]:
    """The job's requirements, by sbatch's names."""
    from lockstep.sweep.slots import needs

    tasks = given.nodes * given.tasks_per_node
    if tasks > 1 and layout.copies == tasks:  # each task starts one group on its share of the node's GPUs
        of_node = given.tasks_per_node
        collectors, learners = (each[: len(each) // tasks] for each in (layout.collectors, layout.learners))
        one = dataclasses.replace(layout, collectors=collectors, learners=learners, copies=1)
        wanted = needs(one, given.experiment.torch_threads)
        wanted = dataclasses.replace(wanted, gpus=of_node * wanted.gpus)
    else:
        wanted = needs(layout, given.experiment.torch_threads)
    gpus = {"gpus_per_task" if layout.launcher.started_externally else "gpus_per_node": wanted.gpus}
    return {
        "job_name": Path(str(given.options.run)).name,
        "nodes": given.nodes,
        "ntasks_per_node": given.tasks_per_node,
        "cpus_per_task": wanted.cores,
        **(gpus if wanted.gpus else {}),
    }
