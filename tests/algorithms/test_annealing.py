"""Hyperparameters that change over a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sentences import says
from tiny import EXPERIMENTS, options

from lockstep import recipes
from lockstep.algorithms.annealing import annealings
from lockstep.algorithms.dqn import DQNConfig
from lockstep.config.serialization import from_json, to_json
from lockstep.config.settings import SettingsError
from lockstep.export.hub import foreign_code
from lockstep.launchers.launch import train
from lockstep.run.folder import RunFolder

FIRST = {"learning_rate": 0.4, "discount": 0.9, "clip": 0.2, "epsilon": 1.0}


def values(form: str, samples: list[int], name: str = "learning_rate") -> list[float]:
    """Of a run of 1,000 samples in iterations of 100."""
    annealing = annealings({name: form}, FIRST, 1000, 100)[name]
    return [annealing(each) for each in samples]


@pytest.mark.parametrize(
    ("form", "samples", "expected"),
    [
        ("constant", [0, 900], [0.4, 0.4]),
        ("linear", [0, 500, 900], [0.4, 0.2, 0.04]),
        ("linear:0.2", [0, 500, 1000], [0.4, 0.3, 0.2]),
        # (1 + cos π/4) / 2 = 0.853553 of the way is left after a quarter
        ("cosine", [0, 250, 500, 1000], [0.4, 0.4 * 0.8535533905932737, 0.2, 0.0]),
        ("cosine:0.2", [500, 2000], [0.3, 0.2]),
        # by the end of the first iteration, a half of the 200 samples are there
        ("warmup:200", [0, 100, 200, 900], [0.2, 0.4, 0.4, 0.4]),
        ("warmup:200,linear", [0, 100, 200, 600, 1000], [0.2, 0.4, 0.4, 0.2, 0.0]),
        ("warmup:0.2k,cosine:0.2", [0, 600, 1000], [0.2, 0.3, 0.2]),
        ("0:0.4,500:0.2,1k:0.1", [0, 250, 500, 750, 1000, 5000], [0.4, 0.3, 0.2, 0.15, 0.1, 0.1]),
        ("300:0.4,300:0.1", [0, 299, 300], [0.4, 0.4, 0.1]),
        ("100:0.5", [0, 100], [0.5, 0.5]),
    ],
)
def test_forms_by_hand(form: str, samples: list[int], expected: list[float]) -> None:
    assert values(form, samples) == pytest.approx(expected)


def test_a_user_s_function_takes_progress_or_samples(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def share(progress):\n    return 2 * progress\n\n"
        "def count(samples, progress):\n    return samples + progress\n\n"
        "def other(step):\n    return 1.0\n\ndef below(progress):\n    return -1.0\n"
    )
    assert values(f"{file}:share", [0, 250, 1000]) == [0, 0.5, 2]
    assert values(f"{file}:count", [100]) == [100.1]
    with pytest.raises(SettingsError, match=r"share, .* epsilon, returned 2\.0 after 1,000 samples.* from 0 to 1"):
        values(f"{file}:share", [1000], "epsilon")
    for name, words in (("other", ("progress", "samples")), ("below", ("-1.0", "at least 0")), ("gone", ("gone",))):
        with pytest.raises(SettingsError) as error:
            values(f"{file}:{name}", [0])
        assert says([str(error.value)], *words)


@pytest.mark.parametrize(
    ("name", "form", "words"),
    [
        ("rate", "linear", ("algorithm.anneal", "'rate'", "learning_rate, clip, epsilon")),
        ("discount", "linear", ("'discount'", "learning_rate, clip, epsilon")),
        ("clip", "quadratic", ("clip=quadratic", "linear", "cosine")),
        ("clip", "linear:0.1:0.2", ("clip=linear:0.1:0.2",)),
        ("clip", "constant:1", ("clip=constant:1",)),
        ("clip", "linear:-1", ("clip=linear:-1", "at least 0", "-1")),
        ("clip", "linear:inf", ("clip=linear:inf", "finite")),
        ("epsilon", "0:1,100:1.5", ("epsilon", "from 0 to 1", "1.5")),
        ("clip", "linear,cosine", ("clip=linear,cosine",)),
        ("clip", "warmup", ("clip=warmup",)),
        ("clip", "warmup:10:20", ("clip=warmup:10:20",)),
        ("clip", "warmup:10:20,linear", ("clip=warmup:10:20,linear",)),
        ("clip", "0:x", ("clip=0:x",)),
        ("clip", "0:1:2", ("clip=0:1:2",)),
        ("clip", "5:1,0:2", ("must not fall",)),
        ("clip", "warmup:1k", ("warm-up", "1,000", "--total-steps")),
    ],
)
def test_wrong_forms_are_explained(name: str, form: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        annealings({name: form}, FIRST, 1000, 100)
    assert says([str(error.value)], *words)


def test_an_experiment_is_checked_and_keeps_them() -> None:
    experiment = recipes.ppo_cartpole()
    assert "anneal" not in to_json(experiment)["algorithm"]
    annealed = experiment.replace(**{"algorithm.anneal": {"learning_rate": "cosine"}})
    annealed.validate()
    assert annealed.identity() != experiment.identity() and from_json(to_json(annealed)) == annealed
    with pytest.raises(SettingsError, match=r"algorithm\.anneal"):
        experiment.replace(**{"algorithm.anneal": {"epsilon": "cosine"}}).validate()
    assert foreign_code(to_json(annealed)) == []
    evil = experiment.replace(**{"algorithm.anneal": {"clip": "linear", "learning_rate": "os:abort"}})
    assert foreign_code(to_json(evil)) == ["os:abort"], "is not pulled"


def test_learning_uses_them(tmp_path: Path) -> None:
    like = EXPERIMENTS["cartpole-lag-1"]()  # 3 iterations of 64 samples
    anneal = {"learning_rate": "linear:0", "clip": "0:0.3,128:0.1", "entropy_coef": "0:0,64:0,64:0.5"}
    result = train(like.replace(**{"algorithm.anneal": anneal}), options=options(tmp_path / "run"))
    lines: Any = RunFolder(result.run).records()
    rate = like.algorithm.learning_rate
    assert [line["hyper/learning_rate"] for line in lines] == pytest.approx([rate, rate * 2 / 3, rate / 3])
    assert [line["hyper/clip"] for line in lines] == pytest.approx([0.3, 0.2, 0.1])
    assert [line["hyper/entropy_coef"] for line in lines] == [0, 0.5, 0.5]
    same = like.replace(**{"algorithm.anneal": {"learning_rate": "linear"}})
    plain = train(like, options=options(tmp_path / "plain"))
    assert train(same, options=options(tmp_path / "same")).digest == plain.digest, "it is anneal_learning_rate"


def test_exploration_uses_them() -> None:
    experiment = recipes.dqn_cartpole().replace(**{"algorithm.anneal": {"epsilon": "0:0.5,1000:0.25"}})
    algorithm = experiment.algorithm.build()
    algorithm.annealings = experiment.annealings(algorithm)
    numbers = [algorithm.exploration(0.0, samples, range(2), 2) for samples in (0, 500, 2000)]
    assert [each.numbers.flatten().tolist() for each in numbers if each] == [[0.5] * 2, [0.375] * 2, [0.25] * 2]
    assert algorithm.hyperparameters(0.0)["epsilon"] == 1.0, "without it"


def test_an_annealed_epsilon_differs_between_environments_too() -> None:
    """ε of 0.5 and then 0.25, of which the second of two environments has the square."""
    config = DQNConfig(epsilon_spread=1.0)  # its epsilon_end, 0.01, has no meaning then
    algorithm = config.build()
    algorithm.annealings = annealings({"epsilon": "0:0.5,1000:0.25"}, algorithm.hyperparameters(0.0), 2000, 100)
    numbers = [algorithm.exploration(0.0, samples, range(2), 2).numbers.flatten().tolist() for samples in (0, 2000)]
    assert numbers == [pytest.approx([0.5, 0.25]), pytest.approx([0.25, 0.0625])]
