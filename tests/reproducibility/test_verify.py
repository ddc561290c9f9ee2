from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from sentences import says

from lockstep import recipes
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.core.digests import fast_digest
from lockstep.experiment import Experiment
from lockstep.launchers.launch import train
from lockstep.models.normalize import NormalizeConfig
from lockstep.reproducibility.devices import layout_to_repeat
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import diff, verify
from lockstep.run import checkpoint, ledger
from lockstep.run.checkpoint import CheckpointError
from lockstep.run.folder import RunFolder
from lockstep.run.rows import diverged

ITERATIONS = 5
INLINE = Layout()


def experiment(**changes: Any) -> Experiment:
    full = recipes.ppo_cartpole()
    return full.replace(
        env=dataclasses.replace(full.env, adapter="gymnasium", num_envs=8),
        algorithm=dataclasses.replace(full.algorithm, rollout=8, epochs=2, **changes),
        total_steps=8 * 8 * ITERATIONS,
    )


def options(path: Path) -> RunOptions:
    return RunOptions(run=str(path), checkpoint_every=2, keep_checkpoints=2, display="none", tensorboard=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, to be read only."""
    path = tmp_path_factory.mktemp("verify") / "run"
    train(experiment(), INLINE, options(path))
    return path


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return shutil.copytree(recorded, tmp_path / "run")


def forge(run: Path, head: dict[str, Any] | None = None, lines: dict[int, dict[str, Any]] | None = None) -> None:
    """Rewrite the ledger with changed entries and a valid chain."""
    old_head, old_lines = ledger.read(run / "ledger.jsonl")
    (run / "ledger.jsonl").unlink()
    writer = ledger.Ledger.create(run / "ledger.jsonl", {**old_head, **(head or {})})
    for i, entry in enumerate(old_lines):
        writer.append({**entry, **(lines or {}).get(i, {})})
    writer.close()


# ----------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize(("asked", "count"), [(None, 3), (1, 1), ("all", ITERATIONS)])
def test_an_honest_run_is_verified(recorded: Path, tmp_path: Path, asked: Any, count: int) -> None:
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    verdict = verify(recorded, INLINE, asked, workdir=tmp_path)
    assert (verdict.ok, verdict.iterations, verdict.difference, verdict.warning) == (True, count, None, None)
    assert says(verdict.message, f"{count} of {ITERATIONS} recorded iterations", "layout inline")
    assert list(tmp_path.iterdir()) == []
    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before


def test_two_processes_give_the_bits_of_one(recorded: Path) -> None:
    verdict = verify(recorded, Layout.parse("processes:2"), "all")
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("iteration", [0, 3, ITERATIONS - 1])
def test_one_changed_character_is_found_and_its_iteration_named(run: Path, iteration: int) -> None:
    rows = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    start = rows[iteration + 1].index('"obs":"') + len('"obs":"')
    old = rows[iteration + 1]
    rows[iteration + 1] = old[:start] + ("0" if old[start] != "0" else "1") + old[start + 1 :]
    (run / "ledger.jsonl").write_text("".join(rows))
    verdict = verify(run, INLINE)
    assert not verdict.ok
    assert verdict.difference is not None
    assert verdict.difference.iteration == iteration
    assert f"iteration {iteration} " in verdict.message


def test_a_line_forged_with_its_chain_is_found_by_running_it_again(run: Path) -> None:
    _, lines = ledger.read(run / "ledger.jsonl")
    gradient = {**lines[1]["gradient"], "2": "0" * 16}
    forge(run, lines={1: {"gradient": gradient}})
    verdict = verify(run, INLINE)
    assert not verdict.ok
    assert verdict.difference is not None
    assert (verdict.difference.iteration, verdict.difference.where) == (1, "gradient of shard 2")
    assert verdict.difference.a == "0" * 16
    assert "Iteration 1: gradient of shard 2 " in verdict.message
    assert verify(run, INLINE, 1).ok


def test_another_seed_is_not_the_same_run(recorded: Path) -> None:
    verdict = verify(recorded, INLINE, 1, seed=2)
    assert not verdict.ok
    assert verdict.difference is not None
    assert (verdict.difference.iteration, verdict.difference.where) == (0, "rollout of shard 0, obs")
    assert verdict.difference.settings == ("seed: 1 != 2",)


def test_settings_edited_after_the_run_are_named(run: Path) -> None:
    path = run / "experiment.json"
    text = json.loads(path.read_text())
    text["algorithm"]["learning_rate"] = 0.5
    path.write_text(json.dumps(text))
    verdict = verify(run, INLINE)
    assert not verdict.ok
    assert verdict.difference is not None
    assert verdict.difference.where == "settings: algorithm.learning_rate"
    assert verdict.difference.b == "0.5"


def change_newest(run: Path, prefix: str) -> None:
    """Change the tensors of the newest checkpoint whose names begin so, all of its digests being made to fit."""
    directory = run / "checkpoints"
    saved = checkpoint.open_checkpoint(checkpoint.latest(directory))
    parts = []
    for name in saved.names():
        tensors, meta = saved.part(name)
        for key in [key for key in tensors if key.startswith(prefix)]:
            tensors[key] += 1
        parts.append(checkpoint.write_part(directory, saved.iteration, name, tensors, meta))
    checkpoint.finish(directory, saved.iteration, parts, saved.meta, keep=9)


def test_weights_that_the_ledger_does_not_record_are_named(run: Path) -> None:
    change_newest(run, "parameter.value_head.linear.bias")
    verdict = verify(run, INLINE, 1)
    assert not verdict.ok
    assert verdict.difference is not None
    assert verdict.difference.where == f"parameter value_head.linear.bias in checkpoint {ITERATIONS:08d}"


def test_optimizer_state_that_was_changed_is_found_by_running_everything(run: Path) -> None:
    change_newest(run, "optimizer.")
    assert verify(run, INLINE, 1).ok
    verdict = verify(run, INLINE, "all")
    assert not verdict.ok
    assert verdict.difference is not None
    assert verdict.difference.where == "digest of the state afterwards"


def test_normalizers_that_the_ledger_does_not_record_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(experiment().replace(normalize=NormalizeConfig(observations=True)), INLINE, options(run))
    change_newest(run, "normalizer.")
    difference = verify(run, INLINE, 1).difference
    assert difference is not None
    assert difference.where == f"normalizer observations in checkpoint {ITERATIONS:08d}"


def test_a_shards_part_of_the_newest_checkpoint_that_is_damaged_is_found(run: Path) -> None:
    part = checkpoint.latest(run / "checkpoints") / "shard-002.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shard-002\.safetensors"):
        verify(run, INLINE, 1)


def test_scores_that_were_edited_are_found_by_running_again(run: Path) -> None:
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    changed = next(row for row in rows if row.get("score/iteration_mean") is not None)
    changed["score/iteration_mean"] += 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = verify(run, iterations="all")
    assert verdict.difference is not None and not verdict.ok
    assert verdict.difference.where == "score/iteration_mean in metrics.jsonl"
    assert verdict.difference.iteration == changed["iteration"] - 1


def test_a_layout_may_be_a_text(recorded: Path) -> None:
    assert "layout inline,env_processes=1," in verify(recorded, "inline,env_processes=1", 1).message


def test_without_a_checkpoint_the_verdict_says_so(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    verdict = verify(run, INLINE, 1)
    assert verdict.ok and "no checkpoint" in verdict.message


def test_a_ledger_cut_at_its_end_is_found(run: Path) -> None:
    rows = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(rows[:-1]))
    verdict = verify(run, INLINE, 1)
    assert not verdict.ok
    assert verdict.difference is not None
    assert (verdict.difference.a, verdict.difference.b) == (str(ITERATIONS - 1), str(ITERATIONS))


def test_another_platform_is_warned_of(run: Path) -> None:
    platform = ledger.read(run / "ledger.jsonl")[0]["platform"]
    forge(run, head={"platform": {**platform, "torch": "1.0.0"}})
    verdict = verify(run, INLINE, 1)
    assert verdict.ok
    assert verdict.warning is not None
    assert f"torch: 1.0.0 != {platform['torch']}" in verdict.warning


def test_a_repetition_gives_no_advice_for_new_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = dataclasses.replace(recipes.ppo_cartpole().model, encoder="auto", dense_size=8)
    train(experiment().replace(model=model, total_steps=64), INLINE, options(tmp_path / "run"))
    assert "--model.dense-size has no effect" in capsys.readouterr().err
    assert verify(tmp_path / "run", INLINE).ok
    assert replay(tmp_path / "run", INLINE, options(tmp_path / "again")).ok
    assert "no effect" not in capsys.readouterr().err


def of_layout(run: Path, layout: str) -> Path:
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "layout": layout}))
    return run


@pytest.mark.parametrize(
    ("recorded_with", "repeated_with"),
    [
        ("a3-l1,2", "inline,device=0"),
        ("processes:2,device=1,graphs=1", "inline,device=0"),
        ("acpu,cpu-l1", "acpu-l0"),
        ("a0-lcpu", "a0-lcpu"),
        ("cpu:a1-l1", "inline"),
    ],
)
def test_the_devices_of_the_run_are_those_of_its_repetition(
    recorded_with: str, repeated_with: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    model = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: model)
    monkeypatch.setattr("lockstep.reproducibility.verify._rerun", lambda *rest: asked.append(str(rest[2])))
    verdict = verify(of_layout(run, recorded_with))
    assert verdict.ok and ("A GPU" in (verdict.warning or "")) == ("0" in repeated_with)
    verify(run, "auto,stall_timeout=600")
    assert asked == [repeated_with, f"{repeated_with},stall_timeout=600"]
    other = "inline" if "device" in repeated_with or "a" in repeated_with[:1] else "inline,device=0"
    with pytest.raises(SettingsError, match=f"different bits than a CPU.* Use --layout ({repeated_with}|auto)"):
        verify(run, other)
    with pytest.raises(SettingsError, match="different bits than a CPU"):
        replay(run, other)


def test_a_run_of_gpus_needs_a_gpu_to_be_checked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    of_layout(run, "acpu-l0,1")
    for check in (verify, replay):
        with pytest.raises(SettingsError, match=r"collectors on CPUs and learners on GPUs.*machine with .*acpu-l0"):
            check(run)


def test_a_run_of_gpus_whose_layout_is_refused_now_is_not_repeated_on_the_cpu(run: Path) -> None:
    head = {"platform": {"gpu": ["A GPU"]}}
    of_layout(run, "a0,cpu-l0")
    with pytest.raises(SettingsError, match=r"on a GPU, .* cannot repeat: .*all collectors"):
        layout_to_repeat(RunFolder(run), head, Layout.of(None))
    assert layout_to_repeat(RunFolder(run), {"platform": {"gpu": []}}, Layout.of(None)) == Layout.of(None)


def test_what_cannot_be_verified_is_an_error_that_says_why(run: Path) -> None:
    with pytest.raises(SettingsError, match=f"--iterations 6 .* 1 to {ITERATIONS}, or all"):
        verify(run, INLINE, ITERATIONS + 1)
    with pytest.raises(SettingsError, match="without torchrun"):
        verify(run, Layout.parse("torchrun"))
    with pytest.raises(SettingsError):
        verify(run / "absent", INLINE)
    (run / "ledger.jsonl").write_text((run / "ledger.jsonl").read_text().splitlines(keepends=True)[0])
    with pytest.raises(SettingsError, match="nothing to verify"):
        verify(run, INLINE)
    (run / "ledger.jsonl").unlink()
    verdict = verify(run, INLINE)
    assert not verdict.ok
    assert "There is no ledger" in verdict.message


def test_a_signal_before_the_repetition_begins_leaves_no_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr("lockstep.reproducibility.verify.launch", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["verify", str(run)]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(scratch.iterdir())


# ------------------------------------------------------------------------------------------------------- diff


def test_arguments_of_other_kinds_are_errors_that_name_them(recorded: Path, tmp_path: Path) -> None:
    for wrong in ("some", 1.5):
        with pytest.raises(SettingsError, match=f"iterations {wrong} is not possible"):
            verify(recorded, iterations=wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="not an existing folder"):
        verify(recorded, workdir=tmp_path / "none")


def test_diff_of_equal_runs_is_nothing(recorded: Path, run: Path) -> None:
    assert diff(recorded, run) is None


def test_diff_names_the_first_tensor_and_the_setting_behind_it(recorded: Path, tmp_path: Path) -> None:
    train(experiment(learning_rate=2e-3), INLINE, options(tmp_path / "other"), stop_after=1)
    found = diff(recorded, tmp_path / "other")
    assert found is not None
    assert (found.iteration, found.where.split()[0]) == (0, "parameter")
    assert found.settings == ("algorithm.learning_rate: 0.001 != 0.002",)


def test_diff_names_where_a_shorter_run_ends(recorded: Path, tmp_path: Path) -> None:
    train(experiment(), INLINE, options(tmp_path / "short"), stop_after=2)
    found = diff(recorded, tmp_path / "short")
    assert found is not None
    assert (found.iteration, found.where, found.b) == (2, "length", "2 iterations")


def test_the_checkpoint_holds_what_verify_reads(recorded: Path) -> None:
    path = checkpoint.latest(recorded / "checkpoints")
    _, lines = ledger.read(recorded / "ledger.jsonl")
    tensors = load_file(path / "learner.safetensors")
    found = {name: fast_digest(tensors[f"parameter.{name}"]) for name in lines[-1]["parameters"]}
    assert found == lines[-1]["parameters"]
    assert any(name.startswith("optimizer.") for name in tensors)


def test_a_run_that_went_on_after_it_had_diverged_is_repeated(tmp_path: Path) -> None:
    wild = experiment(learning_rate=1e30, max_grad_norm=1e30).replace(total_steps=2 * 8 * 8)
    train(wild, INLINE, dataclasses.replace(options(tmp_path / "run"), on_nonfinite="continue"))
    assert diverged(RunFolder(tmp_path / "run").metrics)
    assert verify(tmp_path / "run", INLINE, "all").ok
    assert replay(tmp_path / "run", INLINE, options(tmp_path / "again")).ok
