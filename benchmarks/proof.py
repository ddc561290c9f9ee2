"""The many-seed proof, as one durable queue.

    lockstep sweep runs/seeds benchmarks/proof.py:runs      # trains what is not there yet; goes on after any end
    python benchmarks/proof_report.py runs/seeds            # evaluates what has ended; writes into benchmarks/seeds/

A part of it: benchmarks/proof.py:minatar, :mujoco, :atari, :portable or :standardized; or a row of their tables, as in
:hopper-sac. Seeds vary slowest within a part, so that a queue that is stopped early has as many of them for every
algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep import RunOptions, recipes
from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, R2D2Config
from lockstep.algorithms.base import OptimizerConfig
from lockstep.algorithms.dqn import DQNConfig
from lockstep.config.options import Levels
from lockstep.config.user_code import load_object
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig
from lockstep.scheme import Scheme
from lockstep.sweep import Run

_ALONE = Scheme(shards=1)
"""Small networks are computed fastest in one piece."""


@dataclass(frozen=True)
class Proof:
    """One row of the table: an algorithm on a task."""

    label: str
    experiment: Experiment
    """Of the first seed."""
    seeds: int
    episodes: int = 30
    """Of the evaluation of each final policy."""
    greedy: bool = False
    """Whether the evaluation takes the most likely actions, as scores of continuous control are published."""
    levels: tuple[Levels, ...] = ("train",)
    """Which levels the evaluations play: a row for each."""
    published: str = "—"

    def run(self, name: str, seed: int) -> Run:
        return Run(self.experiment.replace(seed=seed), options=_KEPT, label=name)


_KEPT = RunOptions(checkpoint_every=100, tensorboard=False)


def _minatar() -> dict[str, Proof]:
    """Ten algorithms on MinAtar's Breakout; only what is no default of a recipe or of its algorithm was chosen here."""
    many = recipes.ppo_minatar().replace(scheme=_ALONE, total_steps=1_000_000, precision="fp32")
    few = many.replace(env=replace(many.env, num_envs=16))
    ppo = few.replace(algorithm=replace(few.algorithm, rollout=64, minibatches=8, learning_rate=1e-3))
    behind = Scheme(shards=1, lag=1)
    dqn = recipes.dqn_minatar().replace(scheme=_ALONE, total_steps=300_000, precision="fp32")
    learned = replace(dqn.algorithm, epsilon_fraction=0.2)
    assert isinstance(learned, DQNConfig)
    dqn = dqn.replace(algorithm=learned)
    rainbow = replace(
        learned,
        double=True,
        n_step=3,
        epsilon_start=0.0,
        epsilon_end=0.0,
        replay=replace(learned.replay, prioritized=True, alpha=0.5, beta=0.4),
    )
    recurrent = R2D2Config(
        rollout=16,
        batch_size=32,
        updates=4,
        warmup=1_000,
        burn_in=4,
        unroll=16,
        n_step=3,
        learning_rate=5e-4,
        optimizer=OptimizerConfig(eps=1e-5),
        discount=0.99,
        target_period=62,
        replay=replace(learned.replay, prioritized=True, alpha=0.6),
    )

    def network(**settings: Any) -> QModelConfig:
        return QModelConfig(encoder="minatar", **settings)

    experiments = {
        "PPO": ppo,
        "IMPALA": few.replace(
            algorithm=IMPALAConfig(
                rollout=32,
                epochs=3,
                minibatches=4,
                learning_rate=1e-3,
                entropy_coef=0.03,
                optimizer=OptimizerConfig("adam"),
            ),
            scheme=behind,
        ),
        "APPO": many.replace(
            algorithm=APPOConfig(rollout=32, epochs=4, minibatches=4, learning_rate=1e-3, clip=0.2), scheme=behind
        ),
        "A2C": few.replace(
            algorithm=A2CConfig(
                rollout=8,
                learning_rate=2e-3,
                entropy_coef=0.05,
                value_coef=0.5,
                optimizer=OptimizerConfig("rmsprop", eps=1e-5, decay=0.99),
            )
        ),
        "DQN": dqn,
        "C51": dqn.replace(model=network(returns="categorical")),
        "QR-DQN": dqn.replace(model=network(returns="quantiles", numbers=51)),
        "IQN": dqn.replace(
            model=network(returns="implicit", numbers=32),
            algorithm=replace(learned, samples=8, target_samples=8),
        ),
        "Rainbow": dqn.replace(
            model=network(returns="categorical", dueling=True, noisy=True, stream_size=128), algorithm=rainbow
        ),
        "R2D2": dqn.replace(
            env=replace(dqn.env, num_envs=16), model=network(core="lstm", core_size=128), algorithm=recurrent
        ),
    }
    return {f"minatar-{label.lower().replace('-', '')}": Proof(label, each, 10) for label, each in experiments.items()}


def _mujoco() -> dict[str, Proof]:
    """Five algorithms on three tasks. Tianshou's settings where it has the algorithm; the published figures are its own
    ten seeds' after as many steps (PPO's in runs of 3M, whose learning rate falls more slowly)."""
    tianshou = {
        ("PPO", "HalfCheetah-v4"): "5650 ± 1226",
        ("PPO", "Hopper-v4"): "2483 ± 852",
        ("PPO", "Walker2d-v4"): "3410 ± 686",
        ("DDPG", "HalfCheetah-v4"): "9137 ± 784",
        ("TD3", "HalfCheetah-v4"): "7546 ± 717",
        ("SAC", "HalfCheetah-v4"): "9059 ± 1051",
        ("DDPG", "Hopper-v4"): "1241 ± 792",
        ("TD3", "Hopper-v4"): "1583 ± 639",
        ("SAC", "Hopper-v4"): "3388 ± 115",
        ("DDPG", "Walker2d-v4"): "175 ± 118",
        ("TD3", "Walker2d-v4"): "1663 ± 445",
        ("SAC", "Walker2d-v4"): "3387 ± 1182",
    }
    proofs = {}
    for task in ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"):
        experiments = {"PPO": recipes.ppo_mujoco(task).replace(scheme=_ALONE, precision="fp32")}
        for recipe in (recipes.ddpg_mujoco, recipes.td3_mujoco, recipes.sac_mujoco, recipes.mpo_mujoco):
            base = recipe()
            algorithm = base.algorithm
            if algorithm.name in ("ddpg", "sac"):
                algorithm = replace(algorithm, learning_rate=1e-3, actor_learning_rate=1e-3)
            if algorithm.name == "sac":
                algorithm = replace(algorithm, learn_temperature=False, initial_temperature=0.2)
            if algorithm.name == "mpo":
                algorithm = replace(algorithm, updates=32)
            experiments[algorithm.name.upper()] = base.replace(
                env=replace(base.env, id=task),
                algorithm=algorithm,
                scheme=_ALONE,
                total_steps=300_000,
                precision="fp32",
            )
        for label, each in experiments.items():
            name = f"{task.removesuffix('-v4').lower()}-{label.lower()}"
            greedy = label in ("SAC", "MPO")
            proofs[name] = Proof(label, each, 3, greedy=greedy, published=tianshou.get((label, task), "—"))
    return proofs


def _atari() -> dict[str, Proof]:
    """The proofs of learning.py with more seeds, Pong's no longer than their scores rise; Breakout for its published
    budget, at CleanRL's learning rate; and Procgen with levels that training does not see."""
    published = {
        "pong-ppo": "20.36 ± 0.20 at 10M (CleanRL)",
        "pong-impala": "19.09 ± 0.34 at 50M, Machado protocol (Cleanba)",
        "pong-dqn": "20.25 ± 0.41 at 10M (CleanRL)",
        "breakout-ppo": "414.7 ± 28.1 at 10M (CleanRL)",
    }
    proofs = load_object(f"{Path(__file__).parent / 'learning.py'}:PROOFS")
    experiments = {name: proofs[name].experiment() for name in published}
    impala = experiments["pong-impala"]
    steady = replace(impala.algorithm, anneal_learning_rate=False)
    experiments["pong-impala"] = impala.replace(total_steps=4_000_000, algorithm=steady)
    dqn = experiments["pong-dqn"]
    experiments["pong-dqn"] = dqn.replace(total_steps=600_000, algorithm=replace(dqn.algorithm, epsilon_fraction=0.25))
    breakout = experiments["breakout-ppo"]
    long = breakout.replace(total_steps=10_000_000, algorithm=replace(breakout.algorithm, learning_rate=2.5e-4))
    procgen = recipes.ppo_procgen()
    levels = replace(procgen.env, num_levels=200)
    return {
        **{
            name: Proof(name.split("-")[1].upper(), experiments[name], 3, published=known)
            for name, known in published.items()
        },
        "breakout40m-ppo": Proof("PPO", long, 1, published=published["breakout-ppo"]),
        "starpilot-ppo": Proof(
            "PPO",
            procgen.replace(env=levels, total_steps=1_000_000),
            1,
            episodes=300,
            levels=("train", "test"),
            published="30.99 ± 1.96 at 25M (CleanRL)",
        ),
    }


def _portable() -> dict[str, Proof]:
    """Recipes of small networks as they are, in portable arithmetic: to be compared with the other tables' rows."""
    proofs = {"cartpole-ppo-portable": Proof("PPO, portable", recipes.ppo_cartpole(), 10, published="500 is the most")}
    of_fp32 = _mujoco()
    for name in ("halfcheetah-ppo", "hopper-ppo", "walker2d-ppo"):
        proof = of_fp32[name]
        recipe = recipes.ppo_mujoco(proof.experiment.env.id)
        proofs[f"{name}-portable"] = replace(proof, label="PPO, portable", experiment=recipe)
    of_minatar = _minatar()
    for name in ("minatar-ppo", "minatar-dqn"):
        proof = of_minatar[name]
        env = replace(proof.experiment.env, adapter="compiled")
        experiment = proof.experiment.replace(env=env, precision="portable")
        proofs[f"{name}-portable"] = replace(proof, label=f"{proof.label}, portable", experiment=experiment, seeds=3)
    sac = of_fp32["hopper-sac"]
    experiment = sac.experiment.replace(precision="portable")
    proofs["hopper-sac-portable"] = replace(sac, label="SAC, portable", experiment=experiment)
    return proofs


def _standardized() -> dict[str, Proof]:
    """APPO with and without standardized advantages, as Sample Factory has them, at two entropy coefficients."""
    known = _minatar()["minatar-appo"]
    base = known.experiment.replace(env=replace(known.experiment.env, adapter="compiled"), precision="portable")
    assert isinstance(base.algorithm, APPOConfig)
    proofs = {}
    for entropy in (0.01, 0.003):
        for standardized in (False, True):
            algorithm = replace(base.algorithm, entropy_coef=entropy, standardize_advantages=standardized)
            name = f"minatar-appo-{'standardized' if standardized else 'plain'}-{entropy:g}"
            label = f"APPO, entropy {entropy:g}{', standardized' if standardized else ''}"
            proofs[name] = replace(known, label=label, experiment=base.replace(algorithm=algorithm), seeds=5)
    return proofs


PARTS = {
    "minatar": _minatar(),
    "mujoco": _mujoco(),
    "atari": _atari(),
    "portable": _portable(),
    "standardized": _standardized(),
}


def _queued(proofs: Mapping[str, Proof]) -> list[Run]:
    seeds = range(1, 1 + max(proof.seeds for proof in proofs.values()))
    return [proof.run(name, seed) for seed in seeds for name, proof in proofs.items() if seed <= proof.seeds]


def runs() -> list[Run]:
    return [run for proofs in PARTS.values() for run in _queued(proofs)]


def __getattr__(name: str) -> list[Run]:
    """The runs of a part, or of a row of its table."""
    rows = {row: proof for proofs in PARTS.values() for row, proof in proofs.items()}
    if name not in PARTS and name not in rows:
        raise AttributeError(f"there is neither a part nor a row {name}; rows are {', '.join(rows)}")
    return _queued(PARTS[name] if name in PARTS else {name: rows[name]})
