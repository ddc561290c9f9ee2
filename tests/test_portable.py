"""Portable arithmetic: digests of experiments do not depend on the make of the CPU, and what is not covered is refused.

`python tests/test_portable.py` writes the digests that are expected, after an intended change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import options, portable

from lockstep import replay, resume, train, verify
from lockstep.algorithms.base import LossOutput
from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.config.settings import SettingsError
from lockstep.run import ledger, platform
from lockstep.run.consistency import require_same_arithmetic
from lockstep.run.folder import RunFolder

FILE = Path(__file__).with_name("portable.json")
EXPECTED: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
"""One list for all machines."""
PLAIN = {
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "",
    "ATEN_CPU_CAPABILITY": "default",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
}
"""What makes kernels, torch, the C library and NumPy compute as on the first CPUs of 64 bits."""
NAMES = [
    *("portable-pendulum", "portable-cartpole-lags", "portable-minatar-ppo", "portable-minatar-dqn"),
    "portable-spread-lag-1",
    *("squashed", "ppo-lstm", "memory-gru-lag-2"),
    *("tuple-dict-mask", "cartpole-gradient-lag-3", "dqn-prioritized-frames", "rainbow-lag-1", "iqn"),
    *("r2d2-uniform-lag-1", "sac-prioritized-lag-1", "sac-discrete", "td3", "ddpg-drifting-noise", "mpo", "mpc-lag-1"),
    *("pqn", "sac-gru-lag-1", "der", "hindsight", "policies-lag-1", "crossq"),
    *("portable-cartpole-a2c", "portable-minatar-impala-lag-1", "portable-pendulum-appo-lag-2"),
]
"""PPO, DQN, Rainbow, IQN, R2D2, A2C, IMPALA and APPO on vectors and MinAtar, several policies, DQN with hindsight,
data-efficient Rainbow on Atari, and SAC, TD3, DDPG and MPO learn with kernels. In the others, torch's operations are
replaced."""
DEAR = "ppo-lstm"
"""Its convolutions take half a minute. The DQN of frames has those, too, and the GRU and PPO of `squashed` the rest."""
SOME = ("portable-pendulum", "portable-minatar-dqn", "memory-gru-lag-2", "sac-prioritized-lag-1", "squashed")
"""What `make test` trains for a CPU without vectors. Kernels are compiled anew for such a CPU, which takes ten seconds
or more for each experiment. These five have Gaussians, sines, convolutions, a core and torch's replaced operations."""


def digest(name: str, folder: Path, layout: str = "inline") -> str:
    return train(portable(name), layout, options(folder / "run")).digest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == DEAR else ()) for name in EXPECTED]
)
def test_digests_are_the_same_on_every_machine(name: str, tmp_path: Path) -> None:
    assert digest(name, tmp_path) == EXPECTED[name]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first time it compiles all kernels, which Numba keeps for each kind of CPU
def test_digests_are_those_of_a_cpu_without_vectors(full: bool, tmp_path: Path) -> None:
    names = NAMES if full else SOME
    command = [sys.executable, __file__, str(tmp_path / "digests.json"), *names]
    quickly = {} if full else {"NUMBA_OPT": "1"}  # compiled in less time, to code that is slower
    subprocess.run(command, env={**os.environ, **PLAIN, **quickly}, check=True, timeout=1100)
    assert json.loads((tmp_path / "digests.json").read_text()) == {name: EXPECTED[name] for name in names}


@pytest.mark.parametrize("layout", ["processes:2", "a1-l1"])
@pytest.mark.parametrize(
    "name", ["memory-gru-lag-2", "sac-prioritized-lag-1", "sac-discrete", "iqn", "mpo", "policies-lag-1"]
)
def test_layouts_do_not_change_digests(name: str, layout: str, tmp_path: Path) -> None:
    assert digest(name, tmp_path, f"cpu:{layout}" if "-" in layout else layout) == EXPECTED[name]


def test_a_run_in_another_version_of_the_arithmetic_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(platform, "PORTABLE", 3)
        run = Path(train(portable("portable-pendulum"), options=options(tmp_path / "run"), stop_after=2).run)
    for repeat in (verify, replay, resume):
        with pytest.raises(SettingsError, match="in version 3 of portable arithmetic, and this lockstep has version 2"):
            repeat(run)
    head, _ = ledger.read(run / "ledger.jsonl")
    del head["platform"]["portable"]
    with pytest.raises(SettingsError, match="in version 1"):
        require_same_arithmetic(RunFolder.open(run), head)
    head["settings"]["precision"] = "fp32"
    require_same_arithmetic(RunFolder.open(run), head)


class Rounded(PPO):
    """PPO with a term that portable arithmetic has no operation for."""

    def loss(self, model: Any, batch: Any, hyper: dict[str, float]) -> LossOutput:
        found = super().loss(model, batch, hyper)
        return found._replace(total=torch.nn.functional.gelu(found.total))


@dataclass(frozen=True)
class RoundedConfig(PPOConfig):
    name = "test-rounded"

    def build(self) -> PPO:
        return Rounded(self)


def test_a_users_loss_may_use_what_is_covered_and_nothing_else(tmp_path: Path) -> None:
    experiment = portable("cartpole-lag-1")
    of_user = experiment.replace(algorithm=RoundedConfig(rollout=8, minibatches=2))
    with pytest.raises(SettingsError, match=r"does not cover torch's operation aten\.gelu.*--precision fp32"):
        train(of_user, options=options(tmp_path / "run"))


def write(file: Path, names: list[str]) -> None:
    """Write the digests of portable experiments whose environments compute alike on every CPU."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: digest(name, Path(folder) / name) for name in names}
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else FILE, sys.argv[2:] or NAMES)
