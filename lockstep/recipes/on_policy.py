"""Recipes for algorithms that learn from freshly collected rollouts."""

from __future__ import annotations

from lockstep.algorithms import A2CConfig, APPOConfig, IMPALAConfig, PPOConfig, PQNConfig
from lockstep.algorithms.base import OptimizerConfig
from lockstep.envs.base import load_adapter
from lockstep.envs.settings import EnvConfig
from lockstep.experiment import Experiment
from lockstep.models import QModelConfig, StandardModelConfig
from lockstep.models.normalize import NormalizeConfig
from lockstep.models.rnd import RNDConfig
from lockstep.scheme import Scheme


def ppo_cartpole() -> Experiment:
    """PPO on CartPole: solved within 60k steps, a minute on one core (tuned here on five seeds)."""
    return Experiment(
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True),
        algorithm=PPOConfig(
            rollout=64,
            epochs=10,
            minibatches=4,
            learning_rate=1e-3,
            clip=0.2,
            discount=0.98,
            gae_lambda=0.9,
            entropy_coef=0.0,
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        total_steps=100_000,
        precision="portable",
    )


def ppo_atari(game: str = "Breakout") -> Experiment:
    """PPO on Atari, Machado protocol, Nature CNN (settings of the Cleanba paper's synchronous PPO, arXiv:2310.00036).

    `--scheme.lag 1` is the paper's asynchronous PPO.

    The paper uses the IMPALA ResNet: `--model.encoder impala`. The Nature CNN is the default because a CPU computes it
    about eight times as fast.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=PPOConfig(rollout=128, epochs=4, minibatches=4, learning_rate=2.5e-4, clip=0.1),
        scheme=Scheme(shards=8, acting_batch=32),
    )


def ppo_atari_small(game: str = "Breakout") -> Experiment:
    """PPO with eight environments on Atari, Nature CNN (settings of the PyTorchRL paper, arXiv:2007.02622, table 1)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=8, protocol="baselines"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=PPOConfig(
            rollout=128,
            epochs=3,
            minibatches=4,
            learning_rate=2.5e-4,
            clip=0.15,
            anneal_clip=True,
            entropy_coef=0.01,
            value_coef=1.0,
        ),
        scheme=Scheme(shards=4),
        total_steps=10_000_000,
    )


def a2c_atari(game: str = "Breakout") -> Experiment:
    """A2C on Atari, Machado protocol, Nature CNN (settings of OpenAI Baselines; Mnih et al. 2016, arXiv:1602.01783)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=16, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=A2CConfig(),
        scheme=Scheme(shards=4, acting_batch=8),
    )


def impala_atari(game: str = "Breakout") -> Experiment:
    """IMPALA on Atari, Machado protocol, Nature CNN, one version behind (settings of the Cleanba paper).

    The paper uses the IMPALA ResNet: `--model.encoder impala`.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="nature"),
        algorithm=IMPALAConfig(),
        scheme=Scheme(shards=4, lag=1),
    )


def appo_atari(game: str = "Breakout") -> Experiment:
    """APPO on Atari, Machado protocol, CNN and LSTM, one version behind (Petrenko et al. 2020, arXiv:2006.11751).

    The network is the paper's simplified network, and the hyperparameters are those of its Table A.5. The value loss,
    which has a factor of a half here, has the weight of Sample Factory's.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="machado"),
        model=StandardModelConfig(encoder="convnet_simple", core="lstm", core_size=512),
        algorithm=appo_of_sample_factory(minibatches=2),
        scheme=Scheme(shards=4, lag=1),
    )


def appo_of_sample_factory(minibatches: int, value_clip: float = 0.0) -> APPOConfig:
    """The hyperparameters of Table A.5 of Petrenko et al. 2020. Choose minibatches so that each has 2,048 samples."""
    return APPOConfig(
        rollout=32,
        epochs=1,
        minibatches=minibatches,
        learning_rate=1e-4,
        anneal_learning_rate=False,
        optimizer=OptimizerConfig(eps=1e-6),
        max_grad_norm=4.0,
        discount=0.99,
        clip=0.1,
        entropy_coef=0.003,
        value_coef=1.0,  # of half a squared error. Sample Factory weighs the whole one by 0.5.
        value_clip=value_clip,
    )


def ppo_mujoco(task: str = "HalfCheetah-v4") -> Experiment:
    """PPO on MuJoCo, normalized observations and returns (CleanRL's settings, Tianshou's deviation, no value_clip)."""
    return Experiment(
        env=EnvConfig(id=task, num_envs=8),
        model=StandardModelConfig(encoder="mlp", separate_value_network=True, initial_std=0.6),
        algorithm=PPOConfig(
            rollout=256,
            epochs=10,
            minibatches=32,
            learning_rate=3e-4,
            clip=0.2,
            entropy_coef=0.0,
        ),
        scheme=Scheme(shards=4, acting_batch=8),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=1_000_000,
        precision="portable",
    )


def ppo_procgen(game: str = "StarpilotEasy-v0") -> Experiment:
    """PPO on Procgen, easy levels, IMPALA ResNet (Cobbe et al. 2020, arXiv:1912.01588; CleanRL's settings)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=64),
        model=StandardModelConfig(encoder="impala"),
        algorithm=PPOConfig(
            rollout=256,
            epochs=3,
            minibatches=8,
            learning_rate=5e-4,
            anneal_learning_rate=False,
            discount=0.999,
            clip=0.2,
            value_clip=0.2,
        ),
        scheme=Scheme(shards=4),
        normalize=NormalizeConfig(returns=True),
        total_steps=25_000_000,
    )


def ppo_procgen_memory(game: str = "StarpilotEasy-v0") -> Experiment:
    """PPO on Procgen with a Fixup ResNet and a GRU (settings of the PyTorchRL paper, arXiv:2007.02622, appendix A.3).

    The paper trains on 500M samples of Obstacle Tower, with four learners that have 16 environments each. The learning
    rate falls at the same shares of this recipe's budget; another total_steps needs another algorithm.anneal.
    """
    return Experiment(
        env=EnvConfig(id=game, num_envs=64),
        model=StandardModelConfig(encoder="impala", initialization="fixup", core="gru", core_size=256),
        algorithm=PPOConfig(
            rollout=800,
            epochs=2,
            minibatches=8,
            learning_rate=4e-4,
            anneal_learning_rate=False,
            anneal={"learning_rate": "0:4e-4,5M:4e-4,5M:1e-4,20M:1e-4,20M:2.5e-5"},
            clip=0.15,
            entropy_coef=0.01,
            value_coef=0.2,
        ),
        scheme=Scheme(shards=4),
        total_steps=25_000_000,
    )


def ppo_memory() -> Experiment:
    """PPO with an LSTM on a task that no policy without memory can solve (tuned here). --model.core none shows this.

    Only the last action of an episode matters, so gae_lambda and discount are lower than usual.
    """
    return Experiment(
        env=EnvConfig(id="lockstep/Memory-v0", num_envs=128),
        model=StandardModelConfig(encoder="mlp", core="lstm", core_size=64),
        algorithm=PPOConfig(
            rollout=32,
            epochs=4,
            minibatches=4,
            learning_rate=3e-3,
            clip=0.2,
            discount=0.9,
            gae_lambda=0.5,
        ),
        scheme=Scheme(shards=4),
        total_steps=300_000,
        precision="portable",
    )


def ppo_rnd_minigrid(task: str = "Empty-16x16-v0") -> Experiment:
    """PPO with random network distillation on a MiniGrid task with one late reward (tuned here; Burda et al. 2018).

    Episodes end after 100 steps, and the goal takes at least 27, so random actions hardly ever find it.
    `--algorithm.rnd.coef 0` trains with PPO alone.
    """
    return Experiment(
        env=EnvConfig(id=f"MiniGrid-{task}", num_envs=32, options={"max_episode_steps": 100}),
        model=StandardModelConfig(encoder="symbols"),
        algorithm=PPOConfig(
            rollout=128,
            epochs=4,
            minibatches=4,
            learning_rate=5e-4,
            anneal_learning_rate=False,
            clip=0.2,
            entropy_coef=0.001,
            rnd=RNDConfig(coef=0.5, features=64),
        ),
        scheme=Scheme(shards=4),
        normalize=NormalizeConfig(observations=True),
        total_steps=160_000,
        precision="fp32",
    )


def ppo_minatar(game: str = "Breakout") -> Experiment:
    """PPO on MinAtar, with the network of Young and Tian 2019, arXiv:1903.03176 (other settings chosen here)."""
    return Experiment(
        env=EnvConfig(id=f"MinAtar/{game}-v1", num_envs=64),
        model=StandardModelConfig(encoder="minatar"),
        algorithm=PPOConfig(rollout=128, epochs=4, minibatches=16, learning_rate=2.5e-3, clip=0.2),
        scheme=Scheme(shards=4),
        total_steps=5_000_000,
        precision="portable",
    )


def ppo_self_play(game: str = "classic/connect_four-v3") -> Experiment:
    """PPO on a game of PettingZoo, where one policy plays all sides (settings chosen here).

    One side wins what the other loses, so training scores are 0. `--eval-every 25 --eval-opponents random` shows more.

    Rewards are not discounted and advantages are not normalized. Otherwise a side that loses whatever it does would
    learn to lose late as firmly as it learns to win, and would not explore moves that the other side cannot answer.
    """
    return Experiment(
        env=EnvConfig(id=f"pettingzoo/{game}", num_envs=64),
        model=StandardModelConfig(encoder="mlp", hidden_sizes=(256, 256)),
        algorithm=PPOConfig(
            rollout=32,
            epochs=4,
            minibatches=8,
            learning_rate=1e-3,
            clip=0.2,
            discount=1.0,
            entropy_coef=0.05,
            normalize_advantages=False,
        ),
        scheme=Scheme(shards=4),
        total_steps=2_000_000,
        precision="fp32",
    )


def mappo_mpe(task: str = "simple_spread_v3") -> Experiment:
    """MAPPO on a particle world of MPE: PPO whose critic observes all agents (Yu et al. 2022, arXiv:2103.01955).

    All agents share one policy. With `--env.central-state none --model.critic-only`, the critic sees only what its
    agent sees, which is IPPO. The world is lockstep's compiled one if there is one, otherwise mpe2's.

    Learning rate, epochs, layer sizes and discount are the paper's. The paper takes 10 gradient steps on 128 matches of
    25 steps, for 20M steps in total. This recipe takes 40 on 32 matches, which learns more from few samples.
    """
    known = f"mpe/{task}" in load_adapter("compiled").ids()
    world = f"mpe/{task}" if known else f"pettingzoo/mpe2.{task}:parallel_env"
    return Experiment(
        env=EnvConfig(id=world, num_envs=96, central_state="observations"),
        model=StandardModelConfig(
            encoder="mlp", hidden_sizes=(64, 64), activation="relu", critic_only=("state",), separate_value_network=True
        ),
        algorithm=PPOConfig(
            rollout=25,
            epochs=10,
            minibatches=4,
            learning_rate=7e-4,
            anneal_learning_rate=False,
            clip=0.2,
            max_grad_norm=10.0,
            value_coef=1.0,
        ),
        scheme=Scheme(shards=4, acting_batch=24),
        normalize=NormalizeConfig(observations=True, returns=True),
        total_steps=3_000_000,
        precision="portable",
    )


def pqn_cartpole() -> Experiment:
    """PQN on CartPole (settings of its authors' code; Gallici et al. 2024, arXiv:2407.04811)."""
    return Experiment(
        env=EnvConfig(id="CartPole-v1", num_envs=32),
        model=QModelConfig(encoder="mlp", hidden_sizes=(256, 256), activation="relu", layer_norm=True),
        algorithm=PQNConfig(
            rollout=64,
            epochs=4,
            minibatches=16,
            learning_rate=1e-4,
            anneal_learning_rate=True,
            return_lambda=0.95,
            reward_scale=0.1,
            epsilon_end=0.2,
            epsilon_fraction=0.2,
        ),
        scheme=Scheme(shards=4, acting_batch=32),
        total_steps=500_000,
        precision="portable",
    )


def pqn_minatar(game: str = "Breakout") -> Experiment:
    """PQN on MinAtar (settings of its authors' code; Gallici et al. 2024, arXiv:2407.04811)."""
    return Experiment(
        env=EnvConfig(id=f"MinAtar/{game}-v1", num_envs=128, adapter="compiled"),
        model=QModelConfig(encoder="minatar", layer_norm=True),
        algorithm=PQNConfig(learning_rate=5e-4, anneal_learning_rate=True, epsilon_end=0.05),
        scheme=Scheme(shards=4, acting_batch=64),
        total_steps=10_000_000,
        precision="portable",
    )


def pqn_atari(game: str = "Breakout") -> Experiment:
    """PQN on Atari, baselines protocol, Nature CNN (settings of its authors' code; Gallici et al. 2024)."""
    return Experiment(
        env=EnvConfig(id=game, num_envs=128, protocol="baselines"),
        model=QModelConfig(encoder="nature", layer_norm=True),
        algorithm=PQNConfig(),
        scheme=Scheme(shards=8, acting_batch=32),
        total_steps=50_000_000,
    )
