"""A process of a pool, which steps its blocks of the shards' environments."""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Connection

import numpy as np

from lockstep.config.settings import SettingsError
from lockstep.distributed.shared_memory import SharedMemory
from lockstep.envs.base import load_adapter
from lockstep.envs.episodes import Seeds
from lockstep.envs.pool.exchange import exchange_of
from lockstep.envs.settings import EnvConfig
from lockstep.system.numerics import configure_torch


class _Block:
    """A process's block of one shard's environments, and its part of the shared arrays."""

    def __init__(
        self, memory: SharedMemory, begin: int, config: EnvConfig, seeds: Seeds, num_envs: int, rows: slice
    ) -> None:
        self._shard = load_adapter(config.adapter).make(config, seeds=seeds, num_envs=rows.stop - rows.start)
        shard = self._shard
        self.facts = shard.observation_space, shard.action_space, shard.frames_per_step, shard.emulator
        spaces_of = shard.observation_space, shard.action_space
        whole, _ = exchange_of(memory, begin, *spaces_of, num_envs, len(config.metrics))
        self._exchange = whole[rows]
        self._action = tuple(self._exchange.action.values())

    def reset(self) -> None:
        self._shard.reset(self._exchange.obs)

    def step(self) -> None:
        x = self._exchange
        self._shard.send(self._action)
        step = self._shard.recv(x.obs)
        x.reward[:], x.terminated[:], x.truncated[:], x.first[:] = step[:4]
        if x.metrics is not None:
            x.metrics[:] = step.metrics

    def load(self, state: dict[str, np.ndarray]) -> None:
        def count() -> None:
            self._exchange.replayed[0] += 1

        self._shard.load_state_dict(state, self._exchange.obs, count)

    def close(self) -> None:
        self._shard.close()


def serve(pipe: Connection, memory: SharedMemory, jitter: float, threads: int) -> None:
    """Serve requests in a process of the pool until the other end of the pipe closes."""
    configure_torch(threads)  # the same settings as in inline runs
    pause = np.random.default_rng()
    slices: dict[int, _Block] = {}
    while True:
        try:
            shard, name, *arguments = pipe.recv()
        except (EOFError, OSError):
            break
        value = None
        try:
            if name == "make":
                slices[shard] = _Block(memory, *arguments)
                value = slices[shard].facts
            elif name == "close":
                slices.pop(shard).close()
            else:
                if jitter and name == "step":
                    time.sleep(pause.uniform(0.0, jitter))
                getattr(slices[shard], name)(*arguments)
            kind = "done"
        except BaseException as error:
            kind, value = "error", traceback.format_exc()
            if isinstance(error, SettingsError):
                kind, value = "mistake", str(error)
        try:
            pipe.send((shard, kind, value))
        except OSError:
            break
    for block in slices.values():
        block.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # because shutting down the interpreter takes longest
