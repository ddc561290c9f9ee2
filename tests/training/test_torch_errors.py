"""On a GPU, an operation without a deterministic kernel ends the run, unless the experiment allows it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from sentences import says
from tiny import EXPERIMENTS, options

from lockstep import train
from lockstep.cli.main import main
from lockstep.config.layout import Layout
from lockstep.config.options import RunOptions
from lockstep.config.settings import SettingsError
from lockstep.reproducibility.replay import replay
from lockstep.reproducibility.verify import verify
from lockstep.system.numerics import torch_configured
from lockstep.training.prepare import warn_before_run
from lockstep.training.torch_errors import explained

OWN = """
from dataclasses import dataclass, replace
import torch
from lockstep import recipes
from lockstep.algorithms.ppo import PPO, PPOConfig

@dataclass(frozen=True)
class Settings(PPOConfig):
    def build(self):
        return Scattering(self)

class Scattering(PPO):
    def loss(self, model, batch, hyper):
        torch.use_deterministic_algorithms(True)  # as on a GPU
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        return super().loss(model, batch, hyper)

def recipe():
    return replace(recipes.ppo_cartpole(), algorithm=Settings(rollout=8, epochs=1), precision="fp32", total_steps=512)
"""


def scatter() -> None:
    """Has no deterministic kernel, on the CPU neither."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_gpus_refuse_what_is_not_deterministic_and_cpus_and_those_who_allow_it_do_not() -> None:
    with torch_configured(1):
        scatter()
    with torch_configured(1, "cuda:0"), pytest.raises(RuntimeError, match="put_ does not have a deterministic"):
        scatter()
    warning = "put_ does not have a deterministic"
    with torch_configured(1, "cuda:0", strict=False), pytest.warns(UserWarning, match=warning):
        scatter()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_error_names_the_operation_the_line_and_what_to_do() -> None:
    named = r"^put_ has no deter.*test_torch_errors.py, line .*--allow-nondeterministic"
    with pytest.raises(SettingsError, match=named), torch_configured(1, "cuda:0"), explained():
        scatter()
    with pytest.raises(SettingsError, match=r"^CUBLAS_WORKSPACE_CONFIG has a value"), explained():
        raise RuntimeError("you must set an environment variable: CUBLAS_WORKSPACE_CONFIG=:4096:8")
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")


def test_a_run_ends_at_such_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    try:
        assert main(["train", "own.py:recipe", "--env.adapter", "gymnasium", "--display", "none"]) == 2
    finally:
        torch.use_deterministic_algorithms(False)
    assert says(capsys.readouterr().err, "error: put_ has no deterministic kernel", "own.py, line", "allow-nondetermin")


@pytest.mark.slow
def test_what_an_experiment_allows_is_in_its_identity_and_in_the_answers_about_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = EXPERIMENTS["cartpole-lag-1"]()
    loose = experiment.replace(allow_nondeterministic=True)
    assert loose.identity() != experiment.identity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(loose, "inline", options(tmp_path / "run"))
    assert result.digest == train(experiment, "inline", options(tmp_path / "strict")).digest, "on a CPU"
    verdict, again = verify(tmp_path / "run"), replay(tmp_path / "run", None, options(tmp_path / "again"))
    assert verdict.ok and again.ok
    for warning in (verdict.warning, again.warning):
        assert warning is not None and says(warning, "allow_nondeterministic", "not promised")
    assert verify(tmp_path / "strict").warning is None
    capsys.readouterr()
    for layout, told in (("inline", 0), ("inline,device=0", 1)):
        warn_before_run(loose, Layout.parse(layout), dataclasses.replace(RunOptions(), check_env=False))
        assert capsys.readouterr().err.count("--allow-nondeterministic") == told
