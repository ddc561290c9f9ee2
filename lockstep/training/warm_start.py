"""Warm starts. A run begins with the parameters and statistics of another run instead of random and empty ones.

They become version 0. A run keeps a copy of them in its folder, so that it can be started, verified and repeated when
the other run no longer exists.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.agent import Agent, below
from lockstep.config.settings import SettingsError
from lockstep.core.digests import state_digest
from lockstep.experiment import Experiment, WarmStart
from lockstep.learners.optimizer import MOMENTS
from lockstep.run.checkpoint import Checkpoint, CheckpointError, find, iteration_of, list_checkpoints, open_checkpoint
from lockstep.run.folder import RunFolder


def resolved(experiment: Experiment) -> Experiment:
    """The experiment with the iteration of the checkpoint that its warm start names, and the digest of the weights.

    Raises:
        SettingsError: the run, the checkpoint or a part does not exist.
    """
    start = experiment.warm_start
    if not start.run or start.digest:
        return experiment
    start = dataclasses.replace(start, run=_place(start.run))
    saved = _saved(start)
    digest = state_digest(_taken(saved, start))
    name = saved.path.name
    checkpoint = str(saved.iteration) if name.isdecimal() else name  # the name of a set-aside one is not a number
    return experiment.replace(warm_start=dataclasses.replace(start, checkpoint=checkpoint, digest=digest))


def weights(experiment: Experiment, kept: Path | None = None) -> dict[str, Tensor]:
    """The initial weights of a resolved experiment, by the names of Agent.state; empty without a warm start.

    Args:
        kept: the run's copy. Without one, the weights are read from the run that the warm start names.

    Raises:
        SettingsError: the weights are missing, damaged or have changed.
    """
    start = experiment.warm_start
    if not start.run:
        return {}
    if kept is not None and kept.is_file():
        try:
            tensors, place = safetensors.torch.load_file(kept), str(kept)
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{kept}, the run's initial weights, is damaged: {error}. Restore it.") from error
    else:
        try:
            saved = _saved(start)
        except SettingsError as error:
            lost = "" if kept is None else f"{kept}, the run's initial weights, is missing. "
            raise SettingsError(f"{lost}{error}") from error
        tensors, place = _taken(saved, start), str(saved.path)
    if (digest := state_digest(tensors)) != start.digest:
        raise SettingsError(
            f"{place} has changed since the run began: warm_start.digest is {start.digest[:8]}…, but the file's digest "
            f"is {digest[:8]}…. Restore it from a copy, or leave the digest out to begin a run with these weights."
        )
    return tensors


def packed(tensors: dict[str, Tensor]) -> bytes:
    """A run's copy of its initial weights; empty without a warm start."""
    return safetensors.torch.save(tensors) if tensors else b""


def load(agent: Agent, tensors: dict[str, Tensor]) -> None:
    """Load weights into a new agent and its target network. Without weights, the agent stays unchanged.

    Raises:
        SettingsError: the weights do not fit the agent's networks or its optimizer.
    """
    if not tensors:
        return
    _check_optimizer(agent.experiment, below("optimizer.", tensors))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    state = agent.state()
    parts = agent.experiment.warm_start.parts
    learned = {name: tensor for name, tensor in state.items() if name.startswith(("parameter.", "normalizer."))}
    own = {name: tensor for name, tensor in learned.items() if _is_of(name, parts)}
    misfits = [
        f"{_bare(name)} is {_shape(own, name)} here, but {_shape(tensors, name)} there"
        for name in dict.fromkeys([*own, *tensors])
        if _shape(own, name) != _shape(tensors, name)
    ]
    if misfits:
        raise SettingsError(
            f"The networks of {agent.experiment.warm_start.run} are not those of this experiment: {misfits[0]}"
            f"{f', and {len(misfits) - 1} more' if misfits[1:] else ''}. {_advice(own, tensors)}"
        )
    targets = {f"target.{name}": tensor for name, tensor in below("parameter.", tensors).items()}
    agent.load({**state, **tensors, **targets})


def _place(run: str) -> str:
    """A folder's normalized path. It is relative unless an absolute path is given that is outside the current folder,
    so that runs can be moved together."""
    path = os.path.relpath(run) if os.path.isabs(run) else os.path.normpath(run)
    return os.path.abspath(run) if os.path.isabs(run) and path.startswith("..") else path


def _saved(start: WarmStart) -> Checkpoint:
    flag = f"--warm-start.run {start.run}"
    try:
        directory = RunFolder.open(start.run).checkpoints
    except SettingsError as error:
        raise SettingsError(f"{flag}: {error}") from error
    try:
        return open_checkpoint(find(directory, start.checkpoint), only=("learner",))
    except CheckpointError as error:
        reason = str(error).partition(". ")[0]  # the rest advises users who resume the run
        available = ", ".join(str(iteration_of(path)) for path in list_checkpoints(directory)) or "none"
        raise SettingsError(
            f"{flag} --warm-start.checkpoint {start.checkpoint}: {reason}. Give another one; the run has: {available}."
        ) from error


def _check_optimizer(experiment: Experiment, held: dict[str, Tensor]) -> None:
    own = experiment.algorithm.optimizer.name
    moments = {name for name in held if not name.startswith("step")}
    if moments and moments != set(MOMENTS[own]):
        held_name = next((name for name, known in MOMENTS.items() if moments == set(known)), "another one")
        raise SettingsError(
            f"The optimizer of {experiment.warm_start.run} is {held_name}, but here it is {own}: use the same one "
            "(--algorithm.optimizer.name), or leave out --warm-start.optimizer."
        )


def _taken(saved: Checkpoint, start: WarmStart) -> dict[str, Tensor]:
    """A checkpoint's weights of the parts that the warm start names; of all parts if it names none."""
    tensors, _ = saved.part("learner")
    parts = start.parts
    known = {name: tensor for name, tensor in tensors.items() if name.startswith(("parameter.", "normalizer."))}
    for part in parts:
        if not any(_is_of(name, (part,)) for name in known):
            raise SettingsError(
                f"--warm-start.parts {part} is not a part of the networks in {saved.path}, which has "
                f"{', '.join(_parts(known))}. Parts of these can be named, too, such as {_bare(next(iter(known)))}."
            )
    taken = {name: tensor for name, tensor in known.items() if _is_of(name, parts)}
    if start.optimizer:
        taken |= {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.")}
    return taken


def _is_of(name: str, parts: tuple[str, ...]) -> bool:
    return not parts or any(f"{_bare(name)}.".startswith(f"{part}.") for part in parts)


def _bare(name: str) -> str:
    return name.removeprefix("parameter.")


def _parts(names: dict[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(_bare(name).partition(".")[0] for name in names))


def _shape(tensors: dict[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "absent"


def _advice(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    names = {**own, **tensors}
    differing = {_bare(name).partition(".")[0] for name in names if _shape(own, name) != _shape(tensors, name)}
    fitting = [part for part in _parts(names) if part not in differing]
    if not fitting:
        return "Give the experiment that run's model, or train it from the beginning."
    return f"Give the experiment that run's model, or take the parts that fit: --warm-start.parts {' '.join(fitting)}"
