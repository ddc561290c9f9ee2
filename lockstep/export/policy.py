"""`lockstep export`: writes a trained policy for torch.export, TorchScript or ONNX, and compares its actions.

Shape legend: B environments.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import lockstep
from lockstep.config.extras import install_command
from lockstep.config.options import EvaluationSettings
from lockstep.config.settings import SettingsError
from lockstep.core.arrays import map_structure
from lockstep.core.rng import stream
from lockstep.evaluation.policy import Player, Policy, acting_of, load_policy
from lockstep.export.step import FEEDBACK, ExportedPolicy, normal_quantile
from lockstep.models.base import ActionDistribution, Described
from lockstep.models.policies import PoliciesSpace
from lockstep.run.checkpoint import find
from lockstep.run.files import writing
from lockstep.run.folder import RunFolder
from lockstep.system.numerics import torch_configured

Format = Literal["torch", "torchscript", "onnx"]
SUFFIXES: dict[Format, str] = {"torch": ".pt2", "torchscript": ".ts", "onnx": ".onnx"}
Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""One step of a policy, from named inputs [B, ...] to named outputs [B, ...]."""

_ROWS = 8
"""Environments that are played for the comparison of actions."""
_TOLERANCE = 1e-4
"""Tolerance between two fp32 programs; relative for numbers above 1."""
_MEANING = {
    "start": "whether this is the first observation of an episode (or of a new life, if the protocol says so)",
    "state": "the core's state: next_state of the previous step; any numbers at a start",
    "prev_action": "next_prev_action of the previous step; anything at a start",
    "prev_reward": "the reward that came with the observation, as training saw it; anything at a start",
    "noise": "fresh uniform numbers in [0, 1) at every step, from which the action is drawn",
    "action": "in the form that the environment takes",
    "policy": "parameters of the action distribution",
    "value": "the state's value, in the units of training's scaled rewards",
    "next_state": "pass it as state at the next step",
    "next_prev_action": "pass it as prev_action at the next step",
}


@dataclass(frozen=True)
class Check:
    """How an exported policy acted on observations of the run's environments."""

    observations: int
    """Number of observations compared."""
    equal: int
    """The number of observations on which it took the same action as the run's model in fp32."""
    difference: float
    """The largest difference between the policy parameters of the two."""
    equal_in_training: int
    """The number of observations on which the run's model acts alike in fp32 and in the precision of training."""
    as_alone: bool
    """Whether it takes the same action for a single environment as for this environment in a batch."""


@dataclass(frozen=True)
class Export:
    """An exported file, and the result of its comparison."""

    path: Path
    description: Path
    """A JSON file with names, shapes and meanings of inputs and outputs."""
    iteration: int
    """The checkpoint's iteration."""
    precision: str
    """The precision of training."""
    check: Check
    acting: str = "greedy"
    """How it chooses actions: greedy takes the most likely one, sampled draws one, and so on."""

    @property
    def ok(self) -> bool:
        """Whether the file acts like the run's model."""
        check = self.check
        same = check.equal_in_training == check.observations or self.precision != "fp32"
        return check.equal == check.observations and same and check.as_alone

    def __str__(self) -> str:
        check, count = self.check, f"{self.check.observations:,}"
        told = [f"wrote {self.path} (checkpoint of iteration {self.iteration}, fp32) and {self.description.name}"]
        if self.acting == "greedy":
            told.append("it takes the most likely actions, like eval --greedy; export --sample draws them")
        elif self.acting != "deterministic":
            told.append(f"its actions are {self.acting} from its noise input, like those of eval")
        apart = f"numbers differ by at most {check.difference:.1g}"
        told.append(f"actions: {check.equal:,} of {count} equal to the model's, {apart}")
        if not check.as_alone:
            told.append("for a single environment it takes another action than for the same one in a batch")
        if self.precision != "fp32":
            same = f"{check.equal_in_training:,} of {count}"
            told.append(f"in the precision of training ({self.precision}), {same} actions are equal")
        return "\n".join(told)


def export(
    run: Path | str,
    out: Path | str | None = None,
    *,
    format: Format = "torch",
    checkpoint: str | int | None = None,
    observations: int = 1000,
    sample: bool = False,
) -> Export:
    """Write a run's policy as one file, its normalizers inside, and compare its actions with the model's.

    It computes in fp32 regardless of the training precision, takes one step of any number of environments, and takes
    the most likely action or draws one. See ExportedPolicy for its inputs and outputs; the JSON file next to it lists
    them.

    Args:
        run: folder of the run.
        out: file to write; None takes policy.pt2, policy.ts or policy.onnx in the run's folder.
        format: torch (torch.export), torchscript or onnx.
        checkpoint: latest (also None), best, or an iteration.
        observations: number of observations to compare actions on; rounded up to whole steps.
        sample: draw actions from the policy, like evaluate without greedy. The file then takes noise, too.

    Raises:
        SettingsError: there is no such run or checkpoint, a library is not installed, or the model cannot be exported.
    """
    if format not in SUFFIXES:
        raise SettingsError(f"Unknown format {format!r}. Choose one of {', '.join(SUFFIXES)}.")
    if observations < 1:
        raise SettingsError(f"--observations {observations} is out of range: it must be at least 1.")
    folder = RunFolder.open(run)
    out = Path(out) if out else folder.path / f"policy{SUFFIXES[format]}"
    if out.suffix != SUFFIXES[format]:
        raise SettingsError(f"Cannot write {format} to {out}: end its name in {SUFFIXES[format]}, or use --format.")
    name = find(folder.checkpoints, checkpoint).name  # while the run is training, latest may soon be another one
    trained, plain = load_policy(folder.path, name), load_policy(folder.path, name, precision="fp32")
    acting = acting_of(trained.model, greedy=not sample)
    if acting_of(trained.model, greedy=False) == "deterministic":
        acting = "deterministic"
    if sample and acting == "deterministic":
        raise SettingsError(
            f"--sample: the policy of {run} gives a single action, so there is nothing to draw. Leave it out."
        )
    with torch_configured(trained.experiment.torch_threads):
        player = Player(trained.model, trained.experiment, EvaluationSettings(num_envs=_ROWS), purpose="export")
        try:
            space = plain.experiment.model.policy_space(player.env.observation_space)
            module = ExportedPolicy(plain.model, space, trained.experiment.model.uses_previous, sample)
            example = module.example(space, 2)
            with contextlib.ExitStack() as held:
                with writing(out):
                    out.parent.mkdir(parents=True, exist_ok=True)
                    scratch = held.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent))
                partial = Path(scratch) / out.name
                outputs = _write(module, example, partial, format)
                check = _compare(player, plain, list(example), load(partial), observations)
                description = _describe(trained, folder, player, example, outputs, check, out.name, format, acting)
                beside = Path(scratch) / f"{out.name}.json"
                with writing(out):
                    beside.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
                    os.replace(partial, out)
                    os.replace(beside, out.with_name(beside.name))
        finally:
            player.close()
    return Export(
        out, out.with_name(f"{out.name}.json"), trained.iteration, trained.experiment.precision, check, acting
    )


def load(path: Path | str) -> Run:
    """An exported file as a function."""
    path = Path(path)
    if path.suffix == SUFFIXES["torch"]:
        return torch.export.load(path).module()
    if path.suffix == SUFFIXES["torchscript"]:
        with _quiet():
            return torch.jit.load(path)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: x.numpy() for name, x in inputs.items()}
        return {name: torch.from_numpy(np.array(x)) for name, x in zip(names, session.run(None, given), strict=True)}

    return run


# ----------------------------------------------------------------------------------------------------- writing


@torch.no_grad()
def _write(module: ExportedPolicy, example: dict[str, Tensor], path: Path, format: Format) -> dict[str, Tensor]:
    """Write a file; returns the outputs for the example."""
    outputs = module(example)
    absent = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if format == "onnx" and absent:
        raise SettingsError(
            f"Writing and comparing ONNX needs {' and '.join(absent)}, which is not installed. Install what export "
            f"needs with: {install_command('export')}. Or use --format torch."
        )
    try:
        with _quiet():
            if format == "torchscript":
                torch.jit.save(torch.jit.trace(module, (example,), strict=False, check_trace=False), path)
                return outputs
            batch = torch.export.Dim("batch", min=1)
            shapes = ({name: {0: batch} for name in example},)
            program = torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
            if format == "torch":
                torch.export.save(program, path)
                return outputs
            names: dict[str, Any] = {"input_names": list(example), "output_names": list(outputs)}
            if module.sample:
                program = program.run_decompositions({torch.ops.aten.special_ndtri.default: normal_quantile})
            names["dynamic_shapes"] = shapes  # otherwise the batch gets a name such as s29
            torch.onnx.export(program, (), path, **names, dynamo=True, external_data=False, verbose=False)
    except Exception as error:  # a compiler may raise anything
        others = " or ".join(other for other in SUFFIXES if other != format)
        cause: BaseException = error
        while cause.__cause__ is not None:  # the innermost one names the unsupported operation
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0].rstrip('.')}"
        raise SettingsError(
            f"The model cannot be exported to {format}: {reason}. "
            f"Try --format {others}. Your own models must use operations that {format} supports."
        ) from error
    return outputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress and the deprecation warnings of exporters; failures raise."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


# ---------------------------------------------------------------------------------------------------- comparing


@torch.inference_mode()
def _compare(player: Player, plain: Policy, names: list[str], exported: Run, observations: int) -> Check:
    """Let the trained policy play, and compare the actions that the fp32 model and the exported file would have taken.
    Each keeps its own core state."""
    model, distribution = plain.model.for_playing(), plain.model.distribution
    random = stream(plain.experiment.seed, "action-export")
    count = equal = in_training = 0
    as_alone = True
    difference, state = 0.0, torch.zeros(player.env.num_envs, model.state_size)
    fed: dict[str, Tensor] = {"state": state}
    while count < observations:
        obs, start, _, *previous = _copied(player.inputs)
        output, state = model(obs, start, state, *previous)
        if output.policy.isnan().any():
            raise SettingsError(
                f"The policy after iteration {plain.iteration} returns NaN for observations of its environment: the "
                "run has diverged. Nothing was written. Choose an earlier --checkpoint."
            )
        noise = torch.from_numpy(random.random((player.env.num_envs, distribution.noise_size), np.float32))
        drawn = noise if "noise" in names else None
        action = _chosen(distribution, output.policy[0], drawn)
        expected = _batches(distribution.to_env(action.numpy()))
        player.step()
        assert player.output is not None
        in_precision = _chosen(distribution, player.output.policy[0], drawn)
        in_training += _equal(_batches(distribution.to_env(in_precision.numpy())), expected)
        inputs = {
            name: x.clone()
            for name, x in _named(obs, start, previous, {**fed, "noise": noise}).items()
            if name in names
        }
        result = exported(inputs)
        if not count:  # a single environment must get the same action as in a batch
            alone = exported({name: x[:1].clone() for name, x in inputs.items()})
            difference = _apart(alone["policy"], result["policy"][:1])
            as_alone = _equal(_actions(alone), [x[:1] for x in expected]) == 1
        equal += _equal(_actions(result), expected)
        difference = max(difference, _apart(result["policy"], output.policy[0]))
        fed = {into: result[out] for out, into in FEEDBACK.items() if out in result}
        count += player.env.num_envs
    return Check(count, equal, difference, in_training, as_alone)


def _chosen(distribution: ActionDistribution, policy: Tensor, noise: Tensor | None) -> Tensor:
    """The most likely action, or one drawn with the noise."""
    return distribution.mode(policy) if noise is None else distribution.sample(policy, noise)


def _actions(result: dict[str, Tensor]) -> list[np.ndarray]:
    """The outputs of an exported model that form the action."""
    return [x.numpy() for name, x in result.items() if name.startswith("action")]


def _copied(inputs: tuple[Any, ...]) -> list[Any]:
    """A copy of a model's inputs, which the next step does not overwrite."""
    return [None if x is None else map_structure(torch.clone, x) for x in inputs]


def _named(obs: Any, start: Tensor, previous: list[Any], fed: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's inputs [1, B, ...] as inputs [B, ...] of the exported model, by name."""
    named = {f"obs.{key}": x[0] for key, x in obs.items()} if isinstance(obs, dict) else {"obs": obs[0]}
    named["start"] = start[0]
    action, reward = previous
    if reward is not None:
        named |= {"prev_action": action[0], "prev_reward": reward[0]}
    return {**named, **{name: x for name, x in fed.items() if name in ("state", "noise")}}


def _batches(action: Any) -> list[np.ndarray]:
    """An environment's action batch as a list of arrays [B, ...]."""
    return [np.asarray(part) for part in action] if isinstance(action, tuple) else [np.asarray(action)]


def _equal(actions: list[np.ndarray], expected: list[np.ndarray]) -> int:
    """Number of rows that agree in all parts: integers exactly, floats up to rounding."""
    rows = np.ones(len(expected[0]), np.bool_)
    for a, b in zip(actions, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
        close = np.isclose(a, b, _TOLERANCE, _TOLERANCE) if np.issubdtype(b.dtype, np.floating) else a == b
        rows &= close.reshape(len(rows), -1).all(-1)
    return int(rows.sum())


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --------------------------------------------------------------------------------------------------- describing


def _describe(
    policy: Policy,
    folder: RunFolder,
    player: Player,
    example: dict[str, Tensor],
    outputs: dict[str, Tensor],
    check: Check,
    file: str,
    format: Format,
    acting: str,
) -> dict[str, Any]:
    experiment, distribution = policy.experiment, policy.model.distribution
    env = experiment.env

    def table(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            name: {
                "dtype": str(x.dtype).removeprefix("torch."),
                "shape": ["batch", *x.shape[1:]],
                "meaning": _MEANING.get(name.partition(".")[0], "raw observation, as lockstep's models see it"),
            }
            for name, x in tensors.items()
        }

    space = player.env.observation_space
    return {
        "file": file,
        "format": format,
        "versions": {"lockstep": lockstep.__version__, "torch": str(torch.__version__)},
        "run": {"name": folder.path.resolve().name, "experiment": experiment.identity(), "iteration": policy.iteration},
        "environment": {"id": env.id, "adapter": env.adapter, "protocol": env.protocol, "options": dict(env.options)},
        "observation_space": str(policy.experiment.model.policy_space(space)),
        "action_space": str(player.env.action_space),
        **({"policies": list(space.parts)} if isinstance(space, PoliciesSpace) else {}),
        "inputs": table(example),
        "outputs": table(outputs),
        "actions": acting,
        "feedback": {out: into for out, into in FEEDBACK.items() if out in outputs},
        "policy": distribution.description if isinstance(distribution, Described) else type(distribution).__name__,
        "reward_clip": env.reward_clip,
        "precision": {"file": "fp32", "training": experiment.precision},
        "check": asdict(check),
    }
