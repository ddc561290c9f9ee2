"""Settings that every test shares."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in worker processes
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # and NumPy
# Ray keeps the token of a process's first cluster, and refuses requests of later ones, which do not know it.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import clusters
import pytest
import simulated_gpu
import torch
from children import Child
from forks import Forks
from hypothesis import HealthCheck, settings
from workers import Workers

torch.set_num_threads(1)
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy
settings.load_profile("lockstep")
LONGEST = (
    *("test_portable", "test_ray", "test_simulated_gpu", "test_layouts", "test_examples", "test_shard_env"),
    *("test_resume", "test_export", "test_replay", "test_sweep_runs", "test_gpu_steps", "test_device_rollout"),
    *("test_failures", "test_growing", "test_sweep_slurm", "test_sweep_population", "test_output"),
)
"""Files that take half a minute of a core or more, the longest first. The first one compiles the kernels that others
load."""
SLOW = (
    "benchmarks/test_gpu_steps.py",
    "benchmarks/test_other_systems.py",
    "buffers/test_replay_on_gpu.py",
    "distributed/test_device_memory.py",
    "distributed/test_local_group.py",
    "envs/test_atari.py",
    "envs/test_check_env.py",
    "envs/test_compiled",
    "envs/test_dict_actions.py",
    "envs/test_doom.py",
    "envs/test_mixed.py",
    "envs/test_shard_env.py",
    "envs/test_subprocess.py",
    "envs/test_vizdoom.py",
    "export/test_export.py",
    "faults",
    "kernels/test_cache.py",
    "kernels/test_math.py",
    "launchers/test_failures.py",
    "launchers/test_hosts.py",
    "launchers/test_ray.py",
    "launchers/test_supervisor.py",
    "reproducibility/test_replay.py",
    "reproducibility/test_verify.py",
    "speed/test_bench.py",
    "speed/test_hot_path.py",
    "speed/test_parts.py",
    "speed/test_trial.py",
    "sweep/test_sweep_population.py",
    "sweep/test_sweep_ray.py",
    "sweep/test_sweep_runs.py",
    "sweep/test_sweep_search.py",
    "sweep/test_sweep_slurm.py",
    "system/test_graphs.py",
    "system/test_numerics.py",
    "system/test_output.py",
    "test_examples.py",
    "test_golden.py",
    "test_gpu.py",
    "test_layouts.py",
    "test_portable.py",
    "test_simulated_gpu.py",
    "test_resume.py",
    "test_warnings.py",
    "training/test_agreement.py",
    "training/test_terminal.py",
)
"""Folders and files that `make test-quick` leaves out, besides tests that are marked as slow."""
FORKS = pytest.StashKey[Forks]()
LONG = {"start", "cluster", "workers", "processes_are_there_already", "recorded"}
"""Fixtures that start processes, or train for long. `make test-quick` leaves out the tests that use them, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--simulated-gpu", action="store_true", help="run tests that need a GPU on a simulated one")
    parser.addoption("--full", action="store_true", help="run what `make test-full` alone runs, too")
    parser.addoption("--real-processes", action="store_true", help="fork no process in the place of a new Python")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: one more than there are cores, since many tests wait for what takes a certain time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--real-processes"):
        forks = Forks()
        forks.install()
        config.stash[FORKS] = forks


def pytest_unconfigure(config: pytest.Config) -> None:
    if FORKS in config.stash:
        config.stash[FORKS].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fixtures of the test start their processes as the test does, too."""
    if FORKS in item.config.stash:
        item.config.stash[FORKS].real = item.get_closest_marker("real_processes") is not None
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available() and not config.getoption("--simulated-gpu"):
        missing["gpu"] = pytest.mark.skip(reason="no CUDA device on this machine; --simulated-gpu runs these, too")
    if importlib.util.find_spec("envpool") is None:
        missing["envpool"] = pytest.mark.skip(reason="EnvPool is not installed (it has no release for Python 3.10)")
    order = {name: number for number, name in enumerate(LONGEST)}  # or one worker would be left with them at the end
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    here, slow = Path(__file__).parent, pytest.mark.slow
    for item in items:
        place = item.path.relative_to(here).as_posix()
        if place.startswith(SLOW) or LONG & set(getattr(item, "fixturenames", ())):
            item.add_marker(slow)
        for name, skip in missing.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Tests and modules live to the end. To search them for garbage again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _simulated_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that need a GPU have simulated ones, if those are asked for; faults fail them."""
    if not (request.config.getoption("--simulated-gpu") and request.node.get_closest_marker("gpu")):
        yield
        return
    with simulated_gpu.simulated():
        yield
        assert not simulated_gpu.faults()


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether every combination is asked for, and not only those that together have every part."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts lockstep in a process of its own; ends with the test."""
    children: list[Child] = []

    def begin(*arguments: str) -> Child:
        children.append(Child(arguments, tmp_path))
        return children[-1]

    yield begin
    for child in children:
        child.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, where the stand-ins of Slurm's programs note what they were told."""
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{clusters.make(tmp_path)}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go where nothing else is."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def processes_are_there_already(workers: Workers) -> Iterator[None]:
    """Runs of all layouts of several processes are those of workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.launchers.processes.run_processes", workers.run)
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Processes for the runs of all tests that ask for them."""
    workers = Workers()
    yield workers
    workers.close()
