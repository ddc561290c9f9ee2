"""Identities of recipes and small experiments.

A published run is found by its identity, so no change may alter one by accident. After an intended change,
`python tests/test_identities.py` records them again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import EXPERIMENTS

from lockstep.config.names import _CLASSES, FORMER, current_name, is_registered, name_of, reference_of
from lockstep.config.serialization import _hash, from_json, to_json
from lockstep.config.user_code import load_object
from lockstep.experiment import Experiment
from lockstep.launchers.launch import resume
from lockstep.recipes import RECIPES
from lockstep.reproducibility.verify import verify
from lockstep.run import ledger
from lockstep.run.folder import RunFolder
from lockstep.run.ledger import differing_platform
from lockstep.run.platform import this_platform

FILE = Path(__file__).with_name("identities.json")
EARLIER_RUN = Path(__file__).with_name("earlier_run")
"""PPO on CartPole, 3 of 6 iterations, of a version that named classes by their modules."""
EARLIER_DIGEST = "d16478d411154f2b52a1ef9728c1fbff71023fe194b579c2307faad312b2ee00"
"""Of the same run when that version had trained it to its end on the platform that the folder names."""
MAKERS: dict[str, Callable[[], Experiment]] = {
    **{f"recipe {name}": make for name, make in RECIPES.items()},
    **{f"small {name}": make for name, make in EXPERIMENTS.items()},
}


def recorded() -> dict[str, list[str]]:
    """The identity and the one that earlier versions recorded, by the experiment's name."""
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", MAKERS)
def test_an_experiment_keeps_its_identities(name: str) -> None:
    assert list(MAKERS[name]().identities()) == recorded()[name]


def test_no_recorded_experiment_has_gone() -> None:
    assert set(recorded()) == set(MAKERS)


@pytest.mark.parametrize("name", _CLASSES)
def test_a_name_leads_to_its_class_and_back(name: str) -> None:
    assert name_of(load_object(reference_of(name))) == name and is_registered(name)
    assert current_name(FORMER.get(name, name)) == name and reference_of(FORMER.get(name, name)) == _CLASSES[name]


def test_former_names_stay() -> None:
    assert _hash(FORMER) == "a0bf5e5c2f0b81be21c967320de9c5f9dc004529c9957284c79d654195eb931c"


@pytest.mark.parametrize("name", MAKERS)
def test_no_identity_depends_on_where_a_class_is(name: str) -> None:
    assert "lockstep." not in json.dumps(to_json(MAKERS[name](), whole=True))


@pytest.fixture
def earlier(tmp_path: Path) -> RunFolder:
    shutil.copytree(EARLIER_RUN, tmp_path / "run")
    return RunFolder.open(tmp_path / "run")


def test_a_run_of_an_earlier_version_opens(earlier: RunFolder) -> None:
    experiment = earlier.experiment()
    head, _ = ledger.read(earlier.ledger)
    assert "lockstep.experiment:Experiment" in (earlier.path / "experiment.json").read_text()
    assert experiment.identities() == (experiment.identity(), head["experiment"])
    assert from_json(to_json(experiment)) == experiment


def test_a_run_of_an_earlier_version_resumes_and_verifies(earlier: RunFolder) -> None:
    head, _ = ledger.read(earlier.ledger)
    same = not differing_platform(head["platform"], this_platform(head["settings"]))
    result = resume(earlier.path)
    assert result.iterations == 6 and (not same or result.digest == EARLIER_DIGEST)
    if same:  # else its first half has the bits of another platform
        assert verify(earlier.path, iterations="all").ok


def test_runs_of_two_versions_do_not_differ_in_names(earlier: RunFolder) -> None:
    head, lines = ledger.read(earlier.ledger)
    assert (
        ledger.compare(head, lines, ledger.ledger_head(earlier.experiment()) | {"platform": head["platform"]}, lines)
        is None
    )


def test_a_changed_setting_is_found_in_a_run_of_an_earlier_version(earlier: RunFolder) -> None:
    head, lines = ledger.read(earlier.ledger)
    other = ledger.ledger_head(earlier.experiment().replace(seed=2)) | {"platform": head["platform"]}
    found = ledger.compare(head, lines, other, lines)
    assert found is not None and "seed" in str(found)
    forged = ledger.ledger_head(earlier.experiment()) | {"experiment": "0" * 64, "platform": head["platform"]}
    assert ledger.compare(head, lines, forged, lines) is not None


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: make().identities() for name, make in MAKERS.items()}, indent=1) + "\n")
