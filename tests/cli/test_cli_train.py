from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sentences import says

import lockstep
from lockstep.cli.main import main
from lockstep.cli.recipe import load_recipe
from lockstep.cli.sweep_arguments import read
from lockstep.cli.train import TrainArguments, derived_facts
from lockstep.config.needs import declared, parts
from lockstep.config.serialization import flat, from_json, to_json
from lockstep.experiment import Experiment
from lockstep.recipes import RECIPES, ppo_cartpole
from lockstep.run.folder import RunFolder
from lockstep.training.prepare import prepare

Captured = pytest.CaptureFixture[str]
SMALL = (
    *("--total-steps", "600", "--env.num-envs", "8", "--algorithm.rollout", "32", "--algorithm.minibatches", "2"),
    *("--env.adapter", "gymnasium", "--display", "none", "--no-tensorboard"),
)
"""Three iterations."""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["train", *arguments, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    assert not list(Path().iterdir()), "a dry run creates nothing"
    return json.loads(captured.out)


def complaint(capsys: Captured, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert not list(Path().iterdir()), "a mistake creates nothing"
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", captured.err).split())


@pytest.mark.parametrize("recipe", ["ppo-cartpole", "ppo-memory"])
def test_dry_run_round_trips_through_json(recipe: str, capsys: Captured) -> None:
    printed = dry_run(capsys, recipe)
    experiment = from_json(printed["experiment"])
    assert experiment == prepare(RECIPES[recipe](), lockstep.Layout())
    assert to_json(experiment) == printed["experiment"]
    assert printed["derived"]["identity"] == experiment.identity()


def test_a_dry_run_checks_the_callback(capsys: Captured) -> None:
    assert "missing.py" in complaint(capsys, "ppo-cartpole", "--callback", "missing.py:follow", "--dry-run")


def test_flags_reach_every_part(capsys: Captured) -> None:
    flags = (
        "--env.id Acrobot-v1 --env.num-envs 16 --env.options max_episode_steps=77 --total-steps 2.5M --seed 7 "
        "--precision bf16 --model.core lstm --model.hidden-sizes 32 16 --scheme.lag 1 --scheme.shards 8 "
        "--algorithm.learning-rate 1e-3 --algorithm.no-anneal-learning-rate --algorithm.optimizer.eps 1e-8 "
        "--algorithm.minibatches 2 --normalize.observations --torch-threads 2 --layout processes:2,env_processes=2 "
        "--run here --checkpoint-every 9 --eval-every 4 --display plain --no-tensorboard --scheme.acting-batch 0"
    )
    printed = dry_run(capsys, "ppo-cartpole", "--env.adapter", "gymnasium", *flags.split())
    settings = printed["experiment"]
    assert settings["env"]["id"] == "Acrobot-v1" and settings["env"]["num_envs"] == 16
    assert settings["env"]["options"] == {"max_episode_steps": 77}
    assert settings["total_steps"] == 2_500_000 and settings["seed"] == 7 and settings["precision"] == "bf16"
    assert settings["model"]["core"] == "lstm" and settings["model"]["hidden_sizes"] == [32, 16]
    assert settings["scheme"] == {**settings["scheme"], "lag": 1, "shards": 8, "acting_batch": 0}
    assert settings["algorithm"]["learning_rate"] == 1e-3
    assert settings["algorithm"]["anneal_learning_rate"] is False
    assert settings["algorithm"]["optimizer"]["eps"] == 1e-8
    assert settings["normalize"]["observations"] is True and settings["torch_threads"] == 2
    assert printed["layout"] == "processes:2,env_processes=2"
    expected = {"run": "here", "checkpoint_every": 9, "eval_every": 4, "display": "plain", "tensorboard": False}
    assert expected.items() <= printed["options"].items()


def test_environment_options_keep_their_types(capsys: Captured) -> None:
    path = Path("my_env.py")
    path.write_text(
        "import gymnasium\n"
        "def make(**options):\n"
        "    assert options == {'a': 1, 'b': 0.5, 'c': True, 'd': 'x=y', 'e': 1000.0, 'type': 'x'}, options\n"
        "    assert [type(value) for value in options.values()] == [int, float, bool, str, float, str]\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    flags = ["--env.id", "my_env.py:make", "--env.options", "a=1", "b=0.5", "c=true", "d=x=y", "e=1e3", "type=x"]
    assert main(["train", "ppo-cartpole", *flags, "--env.adapter", "gymnasium", "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["experiment"]
    assert printed["env"]["options"] == {"a": 1, "b": 0.5, "c": True, "d": "x=y", "e": 1000.0, "type": "x"}
    assert to_json(from_json(printed)) == printed


def test_derived_facts() -> None:
    facts = derived_facts(prepare(ppo_cartpole(), lockstep.Layout()), lockstep.Layout())
    experiment = ppo_cartpole()
    samples = experiment.env.num_envs * experiment.algorithm.rollout
    assert facts["samples_per_iteration"] == samples
    assert facts["total_samples"] == facts["iterations"] * samples >= experiment.total_steps
    assert facts["gradient_steps_per_iteration"] == experiment.algorithm.gradient_steps(samples)[0] == 40
    # 4 floats of observation, 1 of action, 12 numbers.
    assert facts["rollout_megabytes"] == round(samples * 17 * 4 / 1e6, 1)


def test_dry_run_for_people(capsys: Captured) -> None:
    assert main(["train", "ppo-cartpole", "--dry-run", "--seed", "77"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^seed +77$", printed, re.MULTILINE)
    assert re.search(r"^env\.id +CartPole-v1$", printed, re.MULTILINE)
    assert "samples per iteration" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ppo-cartpole", "--model.core-size", "0"], "model.core_size=0"),
        (
            ["dqn-cartpole", "--model.returns", "categorical", "--model.v-min", "9", "--model.v-max", "9"],
            "model.v_min=9",
        ),
        (["dqn-cartpole", "--model.numbers", "0"], "model.numbers=0"),
        (["sac-mujoco", "--model.critics", "0"], "model.critics=0"),
        (["mpc-pendulum", "--model.elites", "999"], "model.elites=999"),
    ],
)
def test_a_dry_run_finds_a_models_bad_settings(arguments: list[str], text: str, capsys: Captured) -> None:
    assert main(["train", *arguments, "--dry-run"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["train needs a recipe", "ppo-cartpole"]),
        (["--seed", "1"], ["train needs a recipe as its first argument"]),
        (["ppo-cartpol"], ["no recipe 'ppo-cartpol'", "Did you mean ppo-cartpole"]),
        (["ppo-cartpole", "--env.ids", "x"], ["--env.ids", "--env.id STR"]),
        (["ppo-cartpole", "--algorithm.lr", "1e-3"], ["no setting --algorithm.lr", "mean --algorithm.learning-rate?"]),
        (["ppo-cartpole", "--hs=8"], ["no setting --hs", "--help-all"]),
        (["ppo-cartpole", "--algorithm.gae", "1"], ["--algorithm.gae-lambda"]),
        (["ppo-cartpole", "--gamma", "0.9"], ["no setting --gamma", "mean --algorithm.discount?", "0.98"]),
        (["ppo-cartpole", "--batch-size", "64"], ["--algorithm.minibatches", "512 samples", "batches of 128"]),
        (["dqn-cartpole", "--batch_size=64"], ["mean --algorithm.batch-size?"]),
        (["dqn-cartpole", "--n-steps", "3"], ["mean --algorithm.n-step?"]),
        (["ppo-cartpole", "--numEnvs", "16"], ["mean --env.num-envs?"]),
        (["ppo-cartpole", "--anneal-lr"], ["--algorithm.no-anneal-learning-rate"]),
        (["ppo-cartpole", "--clip", "0.1"], ["--algorithm.clip or --normalize.clip?"]),
        (["ppo-cartpole", "--cuda"], ["mean --layout?", "device=0"]),
        (["ppo-cartpole", "--capture-video"], ["lockstep record"]),
        (
            ["ppo-cartpole", "--buffer-size", "9"],
            ["no setting --buffer-size for this recipe", "--algorithm.replay.cap"],
        ),
        (["sac-mujoco", "--ent-coef", "0.1"], ["--algorithm.initial-temperature?", "no-learn-temperature"]),
        (["ppo-cartpole", "CartPole-v1"], ["CartPole-v1 is not a flag", "--env.id CartPole-v1"]),
        (["ppo-cartpole", "-lr", "1e-3"], ["-lr is not a flag", "--lr"]),
        (["ppo"], ["ppo-cartpole", "ppo-atari", "ppo-mujoco", "lockstep train ppo-"]),
        (["cartpole"], ["ppo-cartpole, pqn-cartpole, dqn-cartpole"]),
        (["rainbow"], ["rainbow-atari"]),
        (["halfcheetah"], ["ppo-mujoco", "sac-mujoco"]),
        (["CartPole-v1"], ["an environment, not a recipe", "lockstep train ppo-cartpole --env.id CartPole-v1"]),
        (["Pendulum-v1"], ["lockstep train ppo-mujoco --env.id Pendulum-v1"]),
        (["ALE/Pong-v5"], ["an environment, not a recipe", "lockstep train ppo-atari --env.id Pong"]),
        (["gymnasium.envs.classic_control:CartPoleEnv"], ["an environment, not a recipe"]),
        (["ppo-cartpole", "--precision", "fp16"], ["fp16", "bf16", "fp32"]),
        (["ppo-cartpole", "--seed", "one"], ["--seed", "one"]),
        (["ppo-cartpole", "--total-steps", "10X"], ["10X", "10M"]),
        (["ppo-cartpole", "--env.options", "five"], ["five", "name=value"]),
        (["ppo-cartpole", "--env.num-envs", "7"], ["num_envs=7", "scheme.shards=4", "--env.num-envs 8"]),
        (["ppo-cartpole", "--env.id", "CartPol-v1"], ["CartPol-v1", "CartPole-v1"]),
        (["ppo-cartpole", "--layout", "process:2"], ["Unknown layout 'process:2'", "processes:N"]),
        (["ppo-cartpole", "--layout", "processes:9"], ["processes:9", "scheme.shards=4"]),
        (["ppo-cartpole", "--scheme.shards", "3"], ["scheme.shards=3", "power of two"]),
        (
            ["ppo-cartpole", "--scheme.lag", "async", "--layout", "inline"],
            ["--scheme.lag async with --layout inline", "--layout auto", "cpu:a1-l1"],
        ),
        (["ppo-cartpole", "--scheme.lag", "asinc"], ["asinc", "async"]),
        (["ppo-cartpole", "--scheme.lag", "-1"], ["scheme.lag=-1", "async"]),
        (["ppo-cartpole", "--scheme.max-lag", "-1"], ["scheme.max_lag=-1", "at least 0"]),
        (["ppo-cartpole", "--checkpoint-every", "0"], ["--checkpoint-every 0", "at least 1"]),
        (["ppo-cartpole", "--algorithm.minibatches", "7"], ["algorithm.minibatches=7", "divisor"]),
        (["ppo-cartpole", "--normalize.clip", "0"], ["normalize.clip=0"]),
        (["ppo-cartpole", "--run", ""], ["--run has an empty name"]),
        (["ppo-cartpole", "--algorithm.max-grad-norm", "0"], ["algorithm.max_grad_norm=0", "large number"]),
        (["ppo-cartpole", "--env.id", "gymnasium:CartPole-v9"], ["gymnasium:CartPole-v9"]),
        (["missing.py:recipe"], ["no Python file", "missing.py"]),
        (["lockstep.recipes:missing"], ["lockstep.recipes:missing"]),
        (["lockstep.recipes:RECIPES"], ["gives a dict", "returns a lockstep.Experiment"]),
        (["lockstep.config.user_code:load_file"], ["cannot be called without arguments", "'path'"]),
    ],
)
def test_mistakes(arguments: list[str], texts: list[str], capsys: Captured) -> None:
    complained = complaint(capsys, *arguments)
    for text in texts:
        assert text in complained


@pytest.mark.parametrize("verb", [["train"], ["submit", "--run", "r"]])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ppo-cartpole", "--eval-opponents", "random", "--eval-every", "1"], "CartPole-v1 has no other agents"),
        (["dqn-cartpole", "--algorithm.n-step", "1", "--algorithm.replay.hindsight", "4"], "CartPole-v1 has none"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before(
    verb: list[str], arguments: list[str], told: str, capsys: Captured
) -> None:
    assert main([verb[0], *arguments, *verb[1:], "--dry-run"]) == 2
    assert told in capsys.readouterr().err


def test_recipe_of_a_users_file() -> None:
    Path("mine.py").write_text(
        "from lockstep import recipes\n\ndef recipe():\n    return recipes.ppo_cartpole().replace(seed=5)\n"
    )
    experiment = load_recipe("mine.py:recipe")
    assert isinstance(experiment, Experiment) and experiment.seed == 5


def test_arguments_default_to_the_recipe() -> None:
    arguments = TrainArguments(ppo_cartpole())
    assert arguments.layout == "auto" and arguments.options.run is None and not arguments.dry_run


@pytest.mark.slow
def test_train_resume_and_the_rest(capsys: Captured) -> None:
    """One run through every verb; the last line of train and of resume is the digest."""
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r", "--checkpoint-every", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"digest: [0-9a-f]{64}", last)
    ledger = RunFolder.open("r").ledger.read_bytes()

    assert main(["resume", "r", "--checkpoint", "1", "--display", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert RunFolder.open("r").ledger.read_bytes() == ledger
    assert main(["resume", "r", "--checkpoint", "best", "--display", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert main(["resume", "r", "--checkpoint", "newest", "--display", "none"]) == 2
    assert says(capsys.readouterr().err, "latest, best or an iteration", "r has: ")
    metrics = RunFolder.open("r").metrics.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in metrics] == [1, 2, 3]

    assert main(["train", "ppo-cartpole", *SMALL, "--run", "s", "--seed", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["run"] == "s" and not result["stopped"] and f"digest: {result['digest']}" != last

    assert main(["train", "r", "--seed", "2", "--run", "like-s", "--display", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == result["digest"]
    for flags in (["--total-steps", "1k"], ["--algorithm.no-anneal-clip"], ["--env.num-envs=2"]):
        assert main(["resume", "r", *flags]) == 2
        assert says(capsys.readouterr().err.replace("\n", " "), flags[0].partition("=")[0], "learned")

    assert main(["eval", "r", "--episodes", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["episodes"] == 2 and told["actions"] == "sampled"
    assert main(["eval", "r", "--episodes", "1"]) == 0
    assert "These actions were sampled; --greedy takes" in capsys.readouterr().out
    assert main(["eval", "r", "--episodes", "1", "--greedy"]) == 0
    assert "greedy actions" in (printed := capsys.readouterr().out) and "--greedy" not in printed
    assert main(["plot", "r", "s", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["file"]).stat().st_size > 0
    assert main(["verify", "r", "--iterations", "1"]) == 0
    assert "the same bits" in capsys.readouterr().out
    assert main(["verify", "r", "--iterations", "1", "--seed", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["diff", "r", "r"]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["diff", "r", "s", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["settings"] == ["seed: 1 != 2"]


@pytest.mark.slow
def test_a_run_as_a_recipe_may_have_another_warm_start(capsys: Captured) -> None:
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r"]) == 0
    assert main(["train", "r", "--warm-start.run", "r", "--display", "none", "--run", "w"]) == 0
    began = RunFolder.open("w").experiment().warm_start
    capsys.readouterr()
    assert main(["train", "w", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experiment"]["warm_start"]["digest"] == began.digest
    assert main(["train", "w", "--warm-start.run", "w", "--display", "none", "--run", "x"]) == 0
    again = RunFolder.open("x").experiment().warm_start
    assert (began.run, again.run) == ("r", "w") and began.digest != again.digest
    capsys.readouterr()
    assert main(["train", "w", "--warm-start.parts", "trunks", "--dry-run", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["experiment"]["warm_start"]
    assert (other["run"], other["parts"]) == ("r", ["trunks"]) and other["digest"] not in ("", began.digest)
    (run,) = read(["s", "w", "--warm-start.parts", "trunks"])[1]
    assert run.experiment.warm_start.digest == "", "the run computes it when it begins"
    assert main(["train", "w", "--warm-start.run", "", "--dry-run"]) == 0
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_as_a_recipe_finds_its_files_where_it_began(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as Mine\n")
    monkeypatch.chdir(home)
    own = ["--env.id", "mine.py:Mine", "--env.adapter", "gymnasium"]
    assert main(["train", "ppo-cartpole", *SMALL, *own, "--run", "r"]) == 0
    assert main(["train", "r", "--seed", "2", "--display", "none", "--run", "s"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["train", "home/r", "--dry-run"]) == 2
    assert says(capsys.readouterr().err.replace("\n", " "), "mine.py", f"relative to {home}")


def test_the_folder_may_stand_anywhere_among_the_flags_of_resume(capsys: Captured) -> None:
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    options = RunFolder.open("r").options()
    assert main(["resume", "--layout", "inline", "r", "--checkpoint-every", "7"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert RunFolder.open("r").options() == options and options.display == "none"
    assert main(["resume", "--layout", "inline", "runs/nothing"]) == 2
    assert "runs/nothing does not exist" in capsys.readouterr().err
    assert main(["resume", "--json"]) == 2
    assert says(capsys.readouterr().err, "resume needs", "run")


def test_resume_keeps_the_runs_folder(capsys: Captured) -> None:
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r"]) == 0
    capsys.readouterr()
    assert main(["resume", "r", "--run", "elsewhere"]) == 2
    assert "elsewhere" in capsys.readouterr().err
    assert not Path("elsewhere").exists()


def test_package_offers_train_as_function_and_module() -> None:
    import lockstep

    assert callable(lockstep.train) and callable(lockstep.verify)
    options = lockstep.RunOptions(run="r", display="none", tensorboard=False)
    result = lockstep.train(ppo_cartpole().replace(total_steps=10), options=options)
    assert isinstance(result, lockstep.Result) and result.run == Path("r")
    assert list(inspect.signature(lockstep.train).parameters)[:2] == ["experiment", "layout"]


def test_a_run_that_has_ended_says_how_to_go_on(capsys: Captured) -> None:
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r"]) == 0
    assert main(["train", "ppo-cartpole", *SMALL, "--run", "r", "--dry-run"]) == 2
    assert says(capsys.readouterr().err, "--run r ", "not empty")
    assert main(["resume", "r"]) == 0
    assert "has completed all of its" in (told := capsys.readouterr().err) and "--warm-start.run r" in told


def test_arguments_of_an_environment_that_were_not_given_are_named(capsys: Captured) -> None:
    Path("mine.py").write_text(
        "import gymnasium\n"
        "class Sized(gymnasium.Env):\n"
        "    def __init__(self, size):\n"
        "        raise TypeError('f() missing 1 required positional argument: x')\n"
    )
    arguments = ["train", "ppo-cartpole", "--env.adapter", "gymnasium", "--env.id", "mine.py:Sized", "--dry-run"]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "mine.py:Sized" in told and "'size'" in told
    with pytest.raises(TypeError, match="x"):  # its own mistake
        main([*arguments, "--env.options", "size=1"])
    assert main([*arguments[:-2], "mine.py:Size", "--dry-run"]) == 2
    assert "It has Sized." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dqn-cartpole", "--env.id", "Pendulum-v1"), "the action space is Box"),
        (("ppo-cartpole", "--model.squash"), "Use --model.no-squash"),
        (("ppo-cartpole", "--model.encoder", "nature"), "model.encoder=nature needs images"),
        (("ppo-cartpole", "--env.id", "far.py:Far"), "nearly all would be clipped"),
    ],
)
@pytest.mark.parametrize("flags", [("--dry-run",), ("--display", "none")])
def test_what_the_model_refuses_leaves_no_folder(
    arguments: tuple[str, ...],
    words: str,
    flags: tuple[str, ...],
    capsys: Captured,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = tmp_path_factory.mktemp("mine")
    (mine / "far.py").write_text(FAR)
    monkeypatch.setenv("LOCKSTEP_USER_FILES", str(mine))
    assert words in complaint(capsys, *arguments, *flags)


FAR = """
import gymnasium

class Far(gymnasium.Env):
    action_space = gymnasium.spaces.Box(100, 200, (1,))
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}
"""


def test_options_may_be_named_again(capsys: Captured) -> None:
    flags = ["--env.options", "length=3", "--seed", "2", "--env.options=symbols=5"]
    printed = dry_run(capsys, "ppo-cartpole", *flags, "--env.id", "lockstep/Memory-v0")["experiment"]
    assert printed["env"]["options"] == {"length": 3, "symbols": 5} and printed["seed"] == 2
    flags = ["--algorithm.anneal", "learning_rate=cosine", "--algorithm.anneal", "clip=linear"]
    printed = dry_run(capsys, "ppo-cartpole", *flags)["experiment"]
    assert printed["algorithm"]["anneal"] == {"learning_rate": "cosine", "clip": "linear"}
    twice = complaint(capsys, "ppo-cartpole", "--algorithm.anneal", "clip=linear", "clip=cosine")
    assert "--algorithm.anneal names clip twice" in twice
    again = complaint(capsys, "ppo-cartpole", "--env.options", "g=1", "h=2", "--env.options=g=3")
    assert "--env.options names g twice" in again


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ppo-cartpole", "--model.core-size", "32"), "without --model.core gru, lstm, mingru or transformer."),
        (("ppo-memory", "--model.core-size", "32"), ""),
        (("ppo-memory", "--model.core", "transformer", "--model.core-memory", "8", "--precision", "fp32"), ""),
        (("ppo-memory", "--model.core-memory", "8"), "--model.core-memory has no effect without --model.core transf"),
        (("ppo-memory", "--model.core-layers", "2"), "--model.core-layers has no effect without --model.core transf"),
        (("ppo-memory", "--model.core-heads", "2"), "--model.core-heads has no effect without --model.core transf"),
        (("dqn-cartpole", "--model.noisy-sigma", "0.1"), "--model.noisy-sigma has no effect without --model.noisy."),
        (("dqn-cartpole", "--model.noisy-sigma", "0.1", "--model.noisy"), ""),
        (("dqn-cartpole", "--algorithm.replay.alpha", "0.5"), "without --algorithm.replay.prioritized"),
        (
            ("dqn-cartpole", "--algorithm.samples", "8"),
            "--algorithm.samples has no effect without --model.returns imp",
        ),
        (("ppo-cartpole", "--normalize.clip", "5"), "without --normalize.observations or --normalize.returns"),
        (("ppo-cartpole", "--normalize.clip", "5", "--normalize.returns"), ""),
        (("ppo-cartpole", "--algorithm.rnd.share", "0.5"), "--algorithm.rnd.share has no effect without"),
        (("ppo-cartpole", "--model.initial-std", "0.5"), "--model.initial-std 0.5 has no effect, since the actions of"),
        (("ppo-cartpole", "--model.dense-size", "64"), "--model.dense-size has no effect without --model.encoder auto"),
        (("ppo-cartpole", "--model.encoder", "auto", "--model.dense-size", "64"), "the observations are not images."),
        (("ppo-cartpole", "--eval-episodes", "20"), "--eval-episodes has no effect without --eval-every above 0."),
        (("ppo-cartpole", "--eval-greedy"), "--eval-greedy has no effect without --eval-every above 0."),
        (("ppo-cartpole", "--eval-episodes", "20", "--eval-every", "5"), ""),
        (("r2d2-memory", "--algorithm.rollout", "20"), "of a rollout's 20 steps (--algorithm.rollout)"),
        (("sac-hidden", "--algorithm.rollout", "20"), "of a rollout's 20 steps (--algorithm.rollout)"),
        (("sac-mujoco", "--algorithm.rollout", "32"), ""),
    ],
)
def test_settings_that_do_nothing_are_told(arguments: tuple[str, ...], told: str, capsys: Captured) -> None:
    assert main(["train", *arguments, "--dry-run"]) == 0
    error = capsys.readouterr().err
    assert told in error if told else not error


def test_what_needs_something_is_a_setting_of_a_recipe() -> None:
    experiments = [recipe() for recipe in RECIPES.values()]
    names = {name for experiment in experiments for name in flat(to_json(experiment, whole=True))}
    needs = [
        ({prefix + name for name in need.of}, need)
        for experiment in experiments
        for prefix, settings in parts(experiment)
        for need in declared(settings, "needs")
    ]
    assert len({need for _, need in needs}) > 20
    for of, need in needs:
        assert of | {*need.others} <= names


def test_a_users_algorithm_says_what_its_settings_need(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from lockstep.algorithms.ppo import PPOConfig\nfrom lockstep.config.needs import Need\n"
        "from lockstep.recipes import ppo_cartpole\n\n"
        "@dataclass(frozen=True)\nclass Mine(PPOConfig):\n    bonus: float = 0.0\n    scale: float = 1.0\n"
        "    needs: ClassVar[tuple[Need, ...]] = (Need(('scale',), ('algorithm.bonus',), words='above 0'),)\n\n"
        "def recipe():\n    return ppo_cartpole().replace(algorithm=Mine())\n"
    )
    recipe = f"{tmp_path}/mine.py:recipe"
    assert main(["train", recipe, "--algorithm.scale", "2", "--algorithm.rnd.share", "0.5", "--dry-run"]) == 0
    told = capsys.readouterr().err
    assert "--algorithm.scale has no effect without --algorithm.bonus above 0." in told
    assert "--algorithm.rnd.share has no effect" in told, "what the bases declare remains"
    assert main(["train", recipe, "--algorithm.scale", "2", "--algorithm.bonus", "1", "--dry-run"]) == 0
    assert "has no effect" not in capsys.readouterr().err


def test_a_users_file_may_import_its_neighbors(tmp_path: Path, capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "lengths_of_mine.py").write_text("STEPS = 1234\n")
    (tmp_path / "below" / "mine.py").write_text(
        "from lengths_of_mine import STEPS\nfrom lockstep.recipes import ppo_cartpole\n\n"
        "def recipe():\n    return ppo_cartpole().replace(total_steps=STEPS)\n"
    )
    (tmp_path / "registers_mine.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    for arguments in (("below/mine.py:recipe",), ("ppo-cartpole", "--env.id", "registers_mine:Mine-v0")):
        assert main(["train", *arguments, "--dry-run", "--json"]) == 0
    assert '"total_steps": 1234' in capsys.readouterr().out
