"""Acting: the environments of one or more shards, the policy that acts in them, and the buffers that both fill.

Shape legend: T time, B environments of a shard, A rows of an acting batch (one or more shards), K core state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.agent import Agent, below
from lockstep.algorithms.offpolicy import drifting
from lockstep.buffers.rollout_buffers import ActingGroup, RolloutBuffer
from lockstep.collectors.at_once import CompiledActing, ShardRollout
from lockstep.collectors.between_rollouts import restore, saved
from lockstep.collectors.checking import Played, RolloutCheck
from lockstep.collectors.device_rollout import DeviceRollout
from lockstep.collectors.on_device import DeviceActing
from lockstep.collectors.preemption import Preemption
from lockstep.collectors.scores import ended_episodes
from lockstep.collectors.stepping import ActingShard, BatchEnvs
from lockstep.core.arrays import map_structure, named_leaves
from lockstep.core.digests import Digests
from lockstep.core.rng import stream
from lockstep.core.rollout import Rollout
from lockstep.core.schedule import RolloutId
from lockstep.envs.base import StepResult
from lockstep.envs.finite import FiniteCheck, floats
from lockstep.models.action_spaces import composite
from lockstep.models.arithmetic import arithmetic
from lockstep.models.base import Exploring, PolicyModel, SendsTensors
from lockstep.models.capture import Inference, Inputs
from lockstep.models.distributions import Distribution
from lockstep.models.gaussian import standard_normal
from lockstep.system.graphs import Capture

_FIELDS = ("start", "action", "reward", "log_prob", "value", "terminated", "truncated", "valid")


class _Open:
    """A rollout buffer with its fields as numpy arrays, which environments write into."""

    def __init__(self, buffer: RolloutBuffer) -> None:
        self.buffer = buffer
        self.fields = {name: getattr(buffer.whole, name).numpy() for name in _FIELDS}
        self.obs = map_structure(lambda leaf: leaf.numpy(), buffer.whole.obs)
        self.floats = floats(self.obs)
        self.digests = {shard: Digests.of(rollout) for shard, rollout in buffer.shards.items()}
        self._actions, self._rewards = buffer.actions.numpy(), buffer.rewards.numpy()
        self._carried = [x for _, x in named_leaves(self.obs)] + [self.fields["start"], self._actions, self._rewards]

    def acting(self, state: Tensor) -> dict[str, np.ndarray]:
        """What compiled functions read and write when they act: see lockstep.collectors.at_once.

        Args:
            state: of cores, [A, K].
        """
        return {**self.fields, "actions": self._actions, "rewards": self._rewards, "state": state.numpy()}

    def follow(self, before: _Open, member: ActingShard) -> None:
        """Begin a shard's rows with the last step of its rollout in another buffer, or in this one."""
        for to, origin in zip(self._carried, before._carried, strict=True):
            to[0, member.rows] = origin[member.last, member.rows]

    def at(self, t: int, rows: slice) -> Any:
        """The observations of some rows at one step, to write into."""
        return map_structure(lambda leaf: leaf[t, rows], self.obs)


class ActingBatch:
    """The rows that one inference call serves, in buffers that environments write into.

    Rows of shards that this collector does not hold stay zero. A row's bits depend on the shape of the call and on that
    row alone, so this padding does not change the others.
    """

    def __init__(
        self,
        agent: Agent,
        group: ActingGroup,
        buffers: list[RolloutBuffer],
        environments: BatchEnvs,
        finite_check: FiniteCheck,
        capture: Capture | None = None,
    ) -> None:
        steps, size = agent.experiment.algorithm.rollout, group.size
        self._check = RolloutCheck(finite_check, steps)
        self._experiment = agent.experiment
        self._model, self._distribution = agent.model, agent.model.distribution
        self._explorer = self._distribution if isinstance(self._distribution, Exploring) else None
        self._knows_chances = not isinstance(self._distribution, Distribution) or self._distribution.knows_chances
        self._previous = agent.experiment.model.uses_previous
        self.envs, self.members = environments, environments.members
        self._buffers = [_Open(buffer) for buffer in buffers]
        self._open = self._buffers[0]
        """The buffer that is being written, or was written last."""
        self.rollouts: dict[int, Rollout] = self._open.buffer.shards
        """By shard: the rollout in it, until its turn comes again."""
        self._device = agent.device
        on_gpu = self._device.type != "cpu"
        self._noise = torch.zeros(steps, size, self._distribution.noise_size, pin_memory=on_gpu)
        self._state = torch.zeros(size, agent.model.state_size, device=self._device)
        self._on_device = self._played_there = None
        if (there := environments.on_device()) and isinstance(self._distribution, SendsTensors):
            self._played_there = DeviceRollout(agent, group, there, self._noise, self._state, self._choose, capture)
        elif on_gpu or capture is not None:
            self._on_device = DeviceActing(
                self._distribution,
                self._noise,
                self._state,
                self._choose,
                capture,
                agent.experiment.algorithm.keeps_policy,
            )
        by_host = self._on_device is None and self._played_there is None
        self._policy = torch.zeros(steps if by_host else 0, size, self._distribution.num_params)
        self._raw = torch.zeros(steps, size, pin_memory=on_gpu)
        self._raw_rewards = self._raw.numpy()
        self.received = 0
        """Steps of the present rollout that environments have completed."""
        self._ended = np.zeros((steps, size), bool)
        """Where episodes ended, for the score: a lost life does not end one."""
        self._reported = np.full((steps, size, len(agent.experiment.env.metrics)), np.nan)
        """The metrics of the episodes that ended."""
        self._algorithm = agent.algorithm
        self._random = False
        """Whether actions are drawn uniformly."""
        self._theta = agent.algorithm.noise_theta
        if self._theta < 1:
            for member in self.members:
                begin = stream(agent.experiment.seed, "drift", member.shard)
                shape = (member.num_envs, self._distribution.noise_size)
                if agent.model.portable_operations:
                    with arithmetic(agent.model):
                        member.drift = standard_normal(torch.from_numpy(begin.random(shape, np.float32)))
                else:
                    member.drift = torch.from_numpy(begin.standard_normal(shape, np.float32))
        self._exploring: Tensor | None = None
        """fp32 [A, X]: how each environment explores."""
        self._composite = composite(environments.stepped[0].env.action_space)
        self._uncut = environments.stepped
        """Environments whose rollouts were not cut."""
        self._compiled: list[CompiledActing] = []
        """By environments that one call steps: what acts in them, if a compiled function does."""

    def compile(self, model: PolicyModel) -> None:
        """Act with compiled functions if the model has them. Call it again when environments were loaded."""
        found = [CompiledActing.of(model, each.env, each.rows) for each in self.envs.stepped]
        self._compiled = [each for each in found if each is not None]

    def reset(self) -> None:
        """Start all environments from their first seeds."""
        if self._played_there is not None:
            self._played_there.restart()
        for each in self.envs.stepped:
            each.env.reset(self._open.at(-1, each.rows))
            for member in each.members:
                self._check_start(-1, member, "at the start of its first episode")
        self._open.buffer.whole.start[-1] = True

    def begin(self, lap: int) -> None:
        """Copy the last step of the previous rollout into the first of this one, and draw its random numbers. Only
        what computes enters portable arithmetic, whose operations take time."""
        before, self._open, self.received = self._open, self._buffers[lap % len(self._buffers)], 0
        buffer = self._open.buffer
        self.rollouts = buffer.shards
        self._uncut = self.envs.stepped
        for member in self.members:
            self._open.follow(before, member)
            member.last = -1
        for each in self.envs.stepped:
            if each.env.reseed_due():
                with arithmetic(self._model):  # of an environment in torch
                    each.env.reseed(self._open.at(0, each.rows))
                for member in each.members:
                    self._check_start(0, member, f"when it was started afresh in rollout {lap + member.offset}")
                    buffer.whole.start[0, member.rows] = True
                    member.score[:], member.length[:] = 0, 0
                    member.return_carry.zero_()
        noise = self._noise.numpy()
        for member in self.members:
            self._explore(member, lap + member.offset)
            draw = stream(self._experiment.seed, "action", member.shard, lap + member.offset)
            drawn = draw.random((len(noise), member.num_envs, noise.shape[2]), np.float32)
            if member.drift is not None and not self._random:
                with arithmetic(self._model):
                    drifted, member.drift = drifting(torch.from_numpy(drawn), member.drift, self._theta)
                drawn = drifted.numpy()
            noise[:, member.rows] = drawn
        if self._played_there is not None:
            with arithmetic(self._model):
                self._played_there.begin(buffer)
            return
        buffer.whole.core_state.copy_(self._state)
        if self._on_device is not None:
            self._on_device.begin()

    def _explore(self, member: ActingShard, rollout: int) -> None:
        """Set how a shard's environments explore in a rollout."""
        experiment, size = self._experiment, member.num_envs
        samples = rollout * experiment.samples_per_iteration
        environments = range(member.shard * size, (member.shard + 1) * size)
        progress = min(1.0, samples / experiment.total_steps)
        with arithmetic(self._model):
            how = self._algorithm.exploration(progress, samples, environments, experiment.env.num_envs)
        if how is None:
            return
        self._random = how.random
        if self._exploring is None:
            self._exploring = torch.zeros(self._noise.shape[1], how.numbers.shape[1], device=self._device)
        self._exploring[member.rows] = how.numbers.to(self._device)

    def _check_start(self, t: int, member: ActingShard, when: str) -> None:
        """Look for numbers that are not finite in observations that follow a reset."""
        self._check.start({name: x[t, member.rows] for name, x in self._open.floats.items()}, member, when)

    def check_finite(self, steps: int, lap: int) -> None:
        """Check that environments returned finite numbers in the first steps of a rollout."""
        fields = {name: self._open.fields[name][:steps] for name in ("action", "valid")}
        obs = {name: x[: steps + 1] for name, x in self._open.floats.items()}
        played = Played(obs=obs, reward=self._raw_rewards[:steps], ended=self._ended[:steps], **fields)
        self._check.rollout(played, self.members, lap)

    @property
    def compiled(self) -> bool:
        """Whether a compiled function acts."""
        return bool(self._compiled)

    def act(self, t: int, actor: Inference) -> None:
        """Choose a_t for all rows and send it to the environments. Where these lie on a GPU, play step t there."""
        way = self._random, self._exploring is None
        if self._played_there is not None:
            self._played_there.play(actor, way)
            return
        if self._compiled:
            opened, noise, fields = self._open, self._noise.numpy(), self._open.acting(self._state)
            for each, compiled in zip(self.envs.stepped, self._compiled, strict=True):
                each.env.send(compiled.act(t, noise, opened.obs, fields))
            return
        inputs, rollout = self._inputs(slice(t, t + 1)), self._open.buffer.whole
        if self._on_device is not None:
            acted = self._on_device.act(actor, inputs, way)
            rollout.action[t], rollout.log_prob[t], rollout.value[t] = acted.action, acted.log_prob, acted.value
            if rollout.policy is not None:
                rollout.policy[t] = acted.policy
        else:
            out, self._state = actor.evaluate(inputs)
            policy = out.policy[0]
            choose = self._distribution.sample if self._exploring is None else self._choose
            self._policy[t], rollout.action[t] = policy, choose(policy, self._noise[t])
            rollout.value[t] = out.value[0]
        sent = self._distribution.to_env(rollout.action[t].numpy())
        for each in self._uncut:
            each.env.send(each.of(sent) if self._composite else sent[each.rows])

    def _choose(self, policy: Tensor, noise: Tensor) -> Tensor:
        """Parameters [A, P], noise [A, N] -> actions [A, *action_shape]"""
        if self._exploring is None:
            return self._distribution.sample(policy, noise)
        assert self._explorer is not None
        if self._random:
            return self._explorer.uniform(policy, noise)
        return self._explorer.explore(policy, noise, self._exploring)

    def receive(self, t: int) -> None:
        """Receive what the environments return for a_{t-1}: reward_{t-1} and obs_t."""
        if self._played_there is not None:
            return
        for each in self._uncut:
            self._take(t - 1, t, each.rows, each.env.recv(self._open.at(t, each.rows)))
        self.received = t

    def _take(self, at: int | slice, after: int | slice, rows: slice, step: StepResult) -> None:
        """Write what environments returned for one step or more, and where episodes start after these."""
        fields, clip = self._open.fields, self._experiment.env.reward_clip
        self._raw_rewards[at, rows] = step.reward
        fields["reward"][at, rows] = np.clip(step.reward, -1.0, 1.0) if clip else step.reward
        np.logical_or(step.terminated, step.life_lost, out=fields["terminated"][at, rows])
        fields["truncated"][at, rows] = step.truncated
        np.logical_or(step.terminated, step.truncated, out=self._ended[at, rows])
        np.logical_not(step.first, out=fields["valid"][at, rows])
        np.logical_or(step.first, step.life_lost, out=fields["start"][after, rows])
        if step.metrics is not None:
            self._reported[at, rows] = step.metrics

    def play(self, shards: list[ShardRollout], alive: Callable[[], None], *, bootstrap: bool) -> None:
        """Play all steps, each in one call: what act, receive and finish do, but for the scores."""
        noise, opened, clip = self._noise.numpy(), self._open, self._experiment.env.reward_clip
        fields = opened.acting(self._state)
        for each, shard in zip(self.envs.stepped, shards, strict=True):
            steps = shard.play(noise, opened.obs, fields, bootstrap=bootstrap, clip=clip)
            self._take(slice(None), slice(1, None), each.rows, steps)
            alive()
        self.received = len(noise)

    def preempt(self, t: int, lap: int, preemption: Preemption) -> None:
        """Cut rollouts after t steps, before a_t is chosen. a_t is still computed, for the value of obs_t, but not sent
        to environments."""
        for member in self.members:
            if member.last < 0 and preemption.cut(RolloutId(member.shard, lap + member.offset), t):
                member.last, member.core_state = t, self._state[member.rows].clone()
        self._uncut = [each for each in self.envs.stepped if each.going]

    @property
    def going(self) -> bool:
        """Whether any rollout was not cut."""
        return any(member.last < 0 for member in self.members)

    def finish(self, actor: Inference, *, bootstrap: bool) -> None:
        """Complete the rollout after its last step: bootstrap value and log-probabilities."""
        rollout = self._open.buffer.whole
        if self._played_there is not None:
            self._played_there.finish(actor, self._open.buffer, self._raw, bootstrap=bootstrap)
            self._ended = (rollout.terminated | rollout.truncated).numpy()
            self.received = len(self._ended)
            return
        if bootstrap and self.going:
            inputs = self._inputs(slice(-1, None))
            if self._on_device is not None:
                rollout.value[-1] = self._on_device.value(actor, inputs)
            else:
                rollout.value[-1] = actor.evaluate(inputs)[0].value[0]
        for member in self.members:
            if member.last >= 0:
                self._fill_up(member)
        if self._on_device is None and not self._compiled:
            if self._knows_chances:
                with arithmetic(self._model):  # actions may need less
                    rollout.log_prob.copy_(self._distribution.log_prob(self._policy, rollout.action))
            if rollout.policy is not None:
                rollout.policy.copy_(self._policy)

    def on_device(self, shard: int) -> Rollout | None:
        """A shard's rollout on the GPU that it was played on, until the next one begins; None if it is not there for as
        long as in the host's memory."""
        if self._played_there is None or len(self._buffers) > 1:
            return None
        return self._played_there.shard(shard)

    def _fill_up(self, member: ActingShard) -> None:
        """Pad a cut rollout, so that its bits do not depend on what the buffer held before: repeat its last observation
        and action, and mark the padding invalid."""
        rollout, last, rows = self._open.buffer.whole, member.last, member.rows

        def repeat(leaf: Tensor) -> None:
            leaf[last + 1 :, rows] = leaf[last, rows]

        map_structure(repeat, rollout.obs)
        of_policy = [self._policy] if self._on_device is None else [rollout.log_prob, rollout.policy]
        for leaf in (rollout.action, *(x for x in of_policy if x is not None)):
            repeat(leaf)
        rollout.start[last + 1 :, rows] = False
        rollout.value[last + 1 :, rows] = 0
        for field in (rollout.reward, rollout.terminated, rollout.truncated, rollout.valid):
            field[last:, rows] = 0
        self._raw_rewards[last:, rows], self._ended[last:, rows] = 0, False
        if self._on_device is None:
            self._state = self._state.clone()
        self._state[rows] = member.core_state

    def _inputs(self, at: slice) -> Inputs:
        """What the model sees at one step."""
        buffer = self._open.buffer
        return Inputs(
            map_structure(lambda leaf: leaf[at], buffer.whole.obs),
            buffer.whole.start[at],
            self._state,
            buffer.actions[at] if self._previous else None,
            buffer.rewards[at] if self._previous else None,
        )

    def state(self, member: ActingShard) -> dict[str, Tensor]:
        """A shard's state between two rollouts."""
        of_envs = {f"env.{name}": torch.from_numpy(np.asarray(a)) for name, a in self.envs.state(member).items()}
        return of_envs | saved(member, self._open.buffer, self._state)

    @torch.inference_mode()
    def load(self, states: Mapping[int, dict[str, Tensor]], alive: Callable[[], None] = lambda: None) -> int:
        """Restore what state returned of each shard by replaying the environments' actions. Returns the steps
        replayed."""
        of_envs = {
            member.shard: {name: x.numpy() for name, x in below("env.", states[member.shard]).items()}
            for member in self.members
        }
        replayed = self.envs.load(of_envs, lambda rows: self._open.at(-1, rows), alive)
        for member in self.members:
            restore(member, states[member.shard], self._open.buffer, self._state)
        if self._played_there is not None:
            self._played_there.restart()
        return replayed

    def digests(self, shard: int) -> dict[str, str]:
        """The digest of each field of a shard's rollout."""
        return self._open.digests[shard]()

    def score(self) -> None:
        """Add up raw rewards into episode scores, and list the episodes that ended."""
        for member in self.members:
            rewards, ended, reported = (x[:, member.rows] for x in (self._raw_rewards, self._ended, self._reported))
            valid = self._open.fields["valid"][:, member.rows]
            member.episodes = ended_episodes(member, rewards, valid, ended, reported)
