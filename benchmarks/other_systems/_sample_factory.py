"""Sample Factory's samples a second, with the wrappers that its own examples use. Runs in its virtual environment."""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools
import os
import sys
import tempfile
from typing import Any

from _script import Meter, end_with, make_pool, read_task, use_threads
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

if __name__ != "__main__":  # one of its worker processes, which import this file again
    end_with(os.getppid())

_CONVOLUTIONS = {"nature": "convnet_atari", "convnet_simple": "convnet_simple"}
_LARGE = 10**12


def make_env(task: dict[str, Any], name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """A pool of environments, or a single one where the task's library is gymnasium."""
    if task["env"]["library"] == "gymnasium":
        import gymnasium

        return gymnasium.make(task["env"]["id"])
    from sf_examples.envpool.envpool_wrappers import BatchedRecordEpisodeStatistics, EnvPoolResetFixWrapper

    layout = task["layout"]
    count = task["num_envs"] // (layout["num_workers"] * layout["num_envs_per_worker"])
    threads = max(1, task["threads"] // layout["num_workers"])
    pool = make_pool(task["env"], count, threads)
    pool.closed, pool.viewer = False, None  # which the older gymnasium that Sample Factory needs asks for
    env = EnvPoolResetFixWrapper(pool)
    if task["env"]["atari"]:
        env = BatchedRecordEpisodeStatistics(env, num_envs=count)
    env.num_agents = count
    return env


def arguments(task: dict[str, Any], folder: str) -> list[str]:
    """Sample Factory's command line for the task."""
    algorithm, model, env, normalize = task["algorithm"], task["model"], task["env"], task["normalize"]
    samples = task["num_envs"] * algorithm["rollout"]
    recurrent = model["core"] != "none"
    settings: dict[str, Any] = {
        "env": f"doom_{env['id']}" if env["library"] == "vizdoom" else "the_task",
        "experiment": "bench",
        "train_dir": folder,
        "restart_behavior": "overwrite",
        "device": "cpu",
        "seed": 1,
        "train_for_env_steps": _LARGE,
        "train_for_seconds": _LARGE,
        "save_every_sec": 10**6,
        "save_best_every_sec": 10**6,
        "experiment_summaries_interval": 10**6,
        "summaries_use_frameskip": False,
        "rollout": algorithm["rollout"],
        "recurrence": algorithm["rollout"] if recurrent else 1,
        "batch_size": samples // algorithm["minibatches"],
        "num_batches_per_epoch": algorithm["minibatches"],
        "num_epochs": algorithm["epochs"],
        # Its V-trace ends with an AttributeError where it records its first summaries, so it computes GAE, its default.
        "with_vtrace": False,
        "gae_lambda": algorithm["gae_lambda"],
        "learning_rate": algorithm["learning_rate"],
        "gamma": algorithm["discount"],
        "ppo_clip_ratio": algorithm["clip"],
        "value_loss_coeff": 0.5 * algorithm["value_coef"],  # of the whole squared error
        "exploration_loss_coeff": algorithm["entropy_coef"],
        "max_grad_norm": algorithm["max_grad_norm"],
        "normalize_input": normalize["observations"],
        "normalize_returns": normalize["returns"],
        "use_rnn": recurrent,
        "nonlinearity": model["activation"],
        "actor_critic_share_weights": not model["separate_value_network"],
        "batched_sampling": env["library"] == "envpool",
        **{name: value for name, value in task["layout"].items() if name != "torch_threads"},
    }
    if recurrent:
        settings |= {"rnn_type": model["core"], "rnn_size": model["core_size"]}
    if env["image"]:
        settings |= {"obs_scale": 255.0, "encoder_conv_architecture": _CONVOLUTIONS[model["encoder"]]}
    if env["library"] == "vizdoom":
        settings |= {"res_w": 128, "res_h": 72, "env_frameskip": 4}
        settings["normalize_input_keys"] = "measurements"
    lists = {} if env["image"] else {"encoder_mlp_layers": model["mlp_sizes"]}
    texts = [f"--{name}={value}" for name, value in settings.items()]
    return texts + [text for name, values in lists.items() for text in (f"--{name}", *map(str, values))]


class Count(AlgoObserver):
    """Stops the run when enough has been measured."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._meter: Meter | None = None

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        self._meter = self._meter or Meter(self._task)
        if runner.env_steps and self._meter.mark(sum(runner.env_steps.values())):
            runner.cfg.train_for_env_steps = 0


def main() -> None:
    task = read_task()
    end_with(task["parent"])
    use_threads(task["layout"].get("torch_threads", 1))  # only serial mode leaves it so: else, one for each process
    with tempfile.TemporaryDirectory() as folder:
        argv = arguments(task, folder)
        parser, _ = parse_sf_args(argv=argv)
        if task["env"]["library"] == "vizdoom":
            from sf_examples.vizdoom.doom.doom_params import add_doom_env_args, doom_override_defaults
            from sf_examples.vizdoom.train_vizdoom import register_vizdoom_components

            register_vizdoom_components()
            add_doom_env_args(parser)
            doom_override_defaults(parser)
        else:
            register_env("the_task", functools.partial(make_env, task))
        _, runner = make_runner(parse_full_cfg(parser, argv))
        runner.register_observer(Count(task))
        status = runner.init()
        sys.exit(runner.run() if status == 0 else 1)


if __name__ == "__main__":
    main()
