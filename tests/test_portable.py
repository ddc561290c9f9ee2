"""Portable arithmetic: digests of experiments do not depend on the make of the CPU, and what is not covered is refused.

`python tests/test_portable.py` writes the digests that are expected, after an intended change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from tiny import EXPERIMENTS, cut, options

from lockstep import recipes, train
from lockstep.algorithms import A2CConfig
from lockstep.algorithms.ppo import PPOConfig
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.models.rnd import RNDConfig

pytest.importorskip("numba")

from lockstep.models.portable import portable_distribution

FILE = Path(__file__).with_name("portable.json")
EXPECTED: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
"""One list for all machines."""
PLAIN = {
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "",
    "ATEN_CPU_CAPABILITY": "default",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
}
"""What makes kernels, torch and the C library compute as on the first CPUs of 64 bits."""


def digest(name: str, folder: Path) -> str:
    return train(EXPERIMENTS[name](), options=options(folder / "run")).digest


@pytest.mark.parametrize("name", EXPECTED)
def test_digests_are_the_same_on_every_machine(name: str, tmp_path: Path) -> None:
    assert digest(name, tmp_path) == EXPECTED[name]


@pytest.mark.slow
def test_digests_are_those_of_a_cpu_without_vectors(tmp_path: Path) -> None:
    environment = {**os.environ, **PLAIN, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, __file__, str(tmp_path / "digests.json")]
    subprocess.run(command, env=environment, check=True, timeout=900)
    assert json.loads((tmp_path / "digests.json").read_text()) == EXPECTED


def portable(**changes: Any) -> Experiment:
    return cut(recipes.ppo_cartpole, env={"adapter": "gymnasium"}, precision="portable").replace(**changes)


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        (lambda: cut(recipes.ppo_cartpole, model={"core": "gru"}, precision="portable"), r"model\.core=gru"),
        (lambda: cut(recipes.ppo_mujoco, model={"squash": True}, precision="portable"), r"model\.squash=True"),
        (lambda: portable(algorithm=PPOConfig(rnd=RNDConfig(coef=0.5))), r"algorithm\.rnd\.coef=0\.5"),
        (lambda: portable(algorithm=A2CConfig()), "algorithm=a2c"),
        (lambda: portable(scheme=replace(portable().scheme, gradient_lag="async")), r"scheme\.gradient_lag=async"),
        (lambda: recipes.dqn_cartpole().replace(precision="portable"), "model=QModelConfig, algorithm=dqn"),
    ],
)
def test_settings_that_are_not_covered_are_refused(experiment: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=f"precision=portable does not cover .*{said}.*--precision fp32"):
        experiment().validate()


def test_observations_and_actions_that_are_not_covered_are_refused(tmp_path: Path) -> None:
    images = cut(recipes.ppo_atari, precision="portable")
    with pytest.raises(SettingsError, match="precision=portable does not cover images"):
        train(images, options=options(tmp_path / "images"))
    with pytest.raises(SettingsError, match="precision=portable does not cover actions of MultiDiscrete"):
        portable_distribution(spaces.MultiDiscrete([2, 3]))


def write(file: Path) -> None:
    """Write the digests of the portable experiments whose environments compute alike on every CPU."""
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in EXPERIMENTS if name.startswith("portable-") and name != "portable-mujoco"]
        found = {name: digest(name, Path(folder) / name) for name in names}
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else FILE)
