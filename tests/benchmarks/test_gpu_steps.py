"""benchmarks/gpu.py without a GPU: a step that fails, crashes or hangs is reported and stops no other."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
from gpu_steps.correctness import _differences
from gpu_steps.profiles import _counted
from gpu_steps.step import Context, Outcome, Task, do

HERE = Path(__file__)


def well(context: Context) -> Outcome:
    return Outcome(True, "all is well", {"report": sorted(context.report), "peers": context.peers})


def badly(context: Context) -> Outcome:
    return Outcome(False, "two digests differ")


def raising(context: Context) -> Outcome:
    context.save(Outcome(True, "stopped early", {"done": 3}))
    raise ValueError("what went wrong")


def crashing(context: Context) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hanging(context: Context) -> Outcome:
    context.save(Outcome(True, "so far, so good", {"done": 1}))
    print("x" * 3 * gpu._LOG_BYTES, flush=True)
    time.sleep(600)
    raise AssertionError


def planted(*names: str, limit: float = 60.0) -> list[gpu.Step]:
    return [gpu.Step(name, f"{HERE.stem}:{name}", limit, 1) for name in names]


def _slowness() -> float:
    """How many times as long as usual a process takes to start on this machine, which others may use, too."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    return tmp_path / "out"


def test_steps_that_go_wrong_do_not_stop_the_others(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [*planted("badly", "raising", "crashing"), *planted("hanging", limit=15.0 * _slowness()), *planted("well")]
    assert not gpu.run(steps, out, 900.0, peers=["script.py --seed 1"])
    entries = json.loads((out / "report.json").read_text())["steps"]
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "badly": "failed",
        "raising": "failed",
        "crashing": "crashed",
        "hanging": "too long",
        "well": "ok",
    }
    assert "what went wrong" in entries["raising"]["summary"] and entries["raising"]["data"] == {"done": 3}
    assert "-9" in entries["crashing"]["summary"]
    assert "so far, so good" in entries["hanging"]["summary"] and entries["hanging"]["data"] == {"done": 1}
    before = ["badly", "crashing", "hanging", "raising"]
    assert entries["well"]["data"] == {"report": before, "peers": ["script.py --seed 1"]}
    log = (out / "log.txt").read_text()
    assert "in hanging" in log and "... left out ..." in log and len(log) < 2 * gpu._LOG_BYTES
    assert {path.name for path in out.iterdir()} == {"report.json", "log.txt"}
    assert "all is well" in capsys.readouterr().out.splitlines()[-1]


def test_results_are_added_to_those_of_before_and_steps_without_time_are_skipped(out: Path) -> None:
    assert gpu.run(planted("well"), out, 300.0)
    assert gpu.run(planted("badly"), out, 0.0)
    entries = json.loads((out / "report.json").read_text())["steps"]
    assert [entries[name]["status"] for name in ("well", "badly")] == ["ok", "skipped"]


def value(number: int) -> int:
    if number == 1:
        raise ValueError("one")
    if number == 2:
        os._exit(7)
    if number == 3:
        time.sleep(600)
    return number


def test_tasks_that_go_wrong_cost_their_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE.parent), str(HERE.parents[2] / "benchmarks"))))
    found: dict[str, tuple[bool, object]] = {}
    tasks = [Task(str(number), value, (number,)) for number in range(6)]
    assert do(tasks, 2, 20.0, lambda: 100.0, lambda task, ok, said: found.update({task.name: (ok, said)})) == 0
    assert {name for name, (ok, _) in found.items() if ok} == {"0", "4", "5"}
    assert "ValueError: one" in str(found["1"]) and "exit code 7" in str(found["2"]) and "20 s" in str(found["3"])


def test_tasks_without_time_are_counted() -> None:
    assert do([Task("0", value, (0,))] * 3, 2, 20.0, lambda: 0.0, lambda *_: None) == 3


def test_another_digest_is_wrong_and_so_is_an_error() -> None:
    results = {
        "ppo": {"inline": {"digest": "a"}, "a0-l0": {"digest": "b", "difference": "iteration 1"}},
        "td3": {"inline": {"error": "out of memory"}, "a0-l0": {"digest": "c"}},
    }
    assert _differences(results) == ["ppo a0-l0: another digest. iteration 1", "td3 inline: out of memory"]
    assert _differences({"ppo": {"inline": {"digest": "a"}, "a0-l0": {"digest": "a"}}}) == []


def event(name: str, device: str, start: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(name=name, device_type=kind, time_range=span, self_cpu_time_total=end - start)


def test_a_profile_is_counted_by_phase() -> None:
    events = [
        event("lockstep collecting", "CPU", 0.0, 1000.0),
        event("lockstep collecting", "CUDA", 0.0, 1000.0),  # the range as the GPU saw it, which is no kernel
        event("lockstep learning", "CPU", 2000.0, 6000.0),
        event("cudaLaunchKernel", "CPU", 10.0, 14.0),
        event("cudaGraphLaunch", "CPU", 20.0, 30.0),
        event("cudaStreamSynchronize", "CPU", 40.0, 90.0),
        event("gemm", "CUDA", 50.0, 450.0),
        event("Memcpy HtoD (Pageable -> Device)", "CUDA", 500.0, 600.0),
        event("cudaLaunchKernel", "CPU", 1500.0, 1510.0),  # between the phases
        event("aten::mm", "CPU", 2100.0, 2400.0),
        event("gemm", "CUDA", 2200.0, 4200.0),
    ]
    found = _counted(events, 2)
    collecting, learning = found["collecting"], found["learning"]
    assert (collecting["wall_ms"], collecting["gpu_ms"]) == (0.5, 0.25)
    assert (collecting["launches"], collecting["graph_launches"], collecting["waits"]) == (1.0, 0.5, 0.5)
    assert collecting["copies"] == {"Memcpy HtoD (Pageable -> Device)": 0.5}
    assert learning["top_kernels_ms"] == {"gemm": [1.0, 0.5]} and learning["top_cpu_ms"] == {"aten::mm": 0.15}
    assert (learning["wall_ms"], learning["launches"]) == (2.0, 0.0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("simulated_gpu") is None, reason="there is no simulated GPU")
# What is exchanged between GPUs, test_simulated_gpu.py exchanges, too; losses are those of every experiment there.
@pytest.mark.parametrize(
    "name", ["facts", *(pytest.param(name, marks=pytest.mark.full) for name in ("exchange", "losses", "profile-ppo"))]
)
def test_a_step_is_rehearsed(name: str, tmp_path: Path) -> None:
    assert gpu.run([step for step in gpu.STEPS if step.name == name], tmp_path, 200.0, rehearse=True)
    entry = json.loads((tmp_path / "report.json").read_text())["steps"][name]
    assert entry["status"] == "ok" and entry["data"]
