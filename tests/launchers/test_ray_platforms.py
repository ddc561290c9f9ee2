"""Nodes of a Ray cluster that do not compute alike."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from free_running import free, with_async
from tiny import cut, options

from lockstep import recipes
from lockstep.config.layout import Layout
from lockstep.config.settings import SettingsError
from lockstep.experiment import Experiment
from lockstep.launchers.inline import run_inline
from lockstep.launchers.ray.platforms import Node, Platforms, this_node
from lockstep.run import ledger
from lockstep.run.consistency import platform_warning
from lockstep.run.folder import RunFolder
from lockstep.training.job import Job
from lockstep.training.loops import work

pytestmark = pytest.mark.usefixtures("own_folder")
OTHER_CPU = {"cpu": {"model": "Another", "features": "avx", "capability": "DEFAULT"}}


def lagging(precision: str = "fp32") -> Experiment:
    return cut(recipes.ppo_cartpole, epochs=1, precision=precision, scheme={"lag": 1})


def job(experiment: Experiment, layout: str = "ray:a2-l1") -> Job:
    options_, parsed = options(Path("run")), Layout.parse(layout)
    return Job(RunFolder.create(experiment, parsed, options_), experiment, parsed, options_)


def platforms(of: Job, **changes: Any) -> tuple[Platforms, Node]:
    """Learner 0 has answered; also a node in which these entries differ."""
    here = this_node(of)
    compared = Platforms(of)
    compared.first(dataclasses.replace(here, host="mill"))
    return compared, Node("barn", {**here.platform, **changes})


def test_a_scheme_that_promises_equal_bits_needs_nodes_that_compute_alike() -> None:
    compared, other = platforms(job(lagging()), **OTHER_CPU)
    compared.other("Collector 0 of 2", False, dataclasses.replace(other, platform=this_node(job_again()).platform))
    with pytest.raises(SettingsError) as caught:
        compared.other("Collector 1 of 2", False, other)
    said = str(caught.value)
    for part in (
        *("Collector 1 of 2 is on barn", "not like mill", "cpu.model: ", " != Another", "--precision portable"),
        *("ray start --resources", "ray:a2-l1,collector.alike=1,learner.alike=1", "--scheme.lag async"),
    ):
        assert part in said
    with pytest.raises(
        SettingsError, match="install the same versions and files on all nodes and use --precision port"
    ):
        compared.other("Collector 1 of 2", False, Node("barn", {**other.platform, "torch": "1.0"}))
    early = Platforms(job_again())
    early.other("Collector 1 of 2", False, other)  # before learner 0
    with pytest.raises(SettingsError, match="Collector 1 of 2 is on barn"):
        early.first(Node("mill", this_node(job_again()).platform))


def job_again() -> Job:
    found = RunFolder.open("run")
    return Job(found, found.experiment(), found.layout(), found.options())


def test_portable_arithmetic_needs_the_same_libraries_on_any_processors() -> None:
    compared, other = platforms(job(lagging("portable")), **OTHER_CPU)
    compared.other("Collector 0 of 2", False, other)
    with pytest.raises(SettingsError, match=r"torch: .* != 1\.0.*install the same versions"):
        compared.other("Collector 1 of 2", False, Node("barn", {**other.platform, "torch": "1.0"}))


def test_where_timing_decides_nodes_are_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    found = job(free())
    compared, other = platforms(found, **OTHER_CPU)
    for number, node in enumerate((dataclasses.replace(other, platform=this_node(found).platform), other, other)):
        compared.other(f"Collector {number} of 3", False, node)
    assert capfd.readouterr().err.count("warning: Collector 1 of 3 is on barn, which is not like mill") == 1
    noted = json.loads(Path("run/run.json").read_text())["nodes"]
    assert [(each["process"], each["host"], len(each["differs"])) for each in noted] == [
        ("Collector 0 of 3", "barn", 0),
        ("Collector 1 of 3", "barn", 3),
        ("Collector 2 of 3", "barn", 3),
    ]
    told = platform_warning(found.folder, ledger.ledger_head(found.experiment))
    assert told is not None
    assert "Recorded, and of Collector 1 of 3 on barn, Collector 2 of 3 on barn: cpu.model" in told


def test_learners_that_apply_the_same_gradients_must_compute_alike() -> None:
    compared, other = platforms(job(free(), "ray:a2-l2"), **OTHER_CPU)
    with pytest.raises(SettingsError, match=r"Learner 1 of 2 is on barn.* each applies the same gradients"):
        compared.other("Learner 1 of 2", True, other)


def test_learners_of_asynchronous_gradients_need_not() -> None:
    compared, other = platforms(job(with_async(free()), "ray:a2-l2"), **OTHER_CPU)
    compared.other("Learner 1 of 2", True, other)


def test_a_run_that_continues_elsewhere_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    begun = dataclasses.replace(job(lagging()), layout=Layout(), stop_after=1)
    run_inline(work, begun)
    (checkpoint,) = begun.folder.checkpoints.glob("0*")
    continued = dataclasses.replace(job_again(), checkpoint=checkpoint)
    continued.folder.note_resumption(1, continued.layout, continued.options, ())
    Platforms(continued).first(Node("barn", {**this_node(continued).platform, **OTHER_CPU}))
    assert "has changed since the run started" in capfd.readouterr().err
    (resumed,) = begun.folder.facts()["resumed"]
    assert [each.partition(":")[0] for each in resumed["differs"]] == ["cpu.model", "cpu.features", "cpu.capability"]
