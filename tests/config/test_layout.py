"""What a layout's text means, and which texts are mistakes."""

from __future__ import annotations

import pytest

from lockstep.config.layout import Layout
from lockstep.config.layout_fit import check_fit
from lockstep.config.settings import SettingsError


@pytest.mark.parametrize(
    "text",
    [
        "inline",
        "processes:3",
        "torchrun",
        "cpu:a2-l2",
        "a0-l1,2,3",
        "a0-l1,2,3-d2",
        "cpu:a1-l3-d2,jitter=0.01",
        "acpu,cpu-l0",
        "processes:2,env_threads=4,stall_timeout=30",
        "cpu:a1-l1,env_processes=2,jitter=0.01,learner_delay=0.5",
        "inline,device=0",
        "processes:4,device=0+2+3,graphs=1",
        "a0-l0,1,ipc=0",
        "torchrun,device=local",
        "processes:2,pin=1",
        "cpu:a2-l1,pin=1,nice=10",
        "ray:2",
        "ray:a2-l3,restarts=5,compress=1",
        "ray:a4-l2,collector.gpus=0.25,learner.gpus=1",
        "ray:a4+-l1,restarts=9",
        "ray:2,worker.cpus=2,worker.desk=1",
    ],
)
def test_text_and_layout_are_two_forms_of_one_thing(text: str) -> None:
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout


def test_roles_and_devices() -> None:
    layout = Layout.parse("cpu:a2-l3")
    assert (layout.collectors, layout.learners, layout.processes) == (("cpu",) * 2, ("cpu",) * 3, 5)
    layout = Layout.parse("a0-l1,2,3-d2")
    assert layout.collectors == ("0", "4"), "the second copy has GPUs of its own"
    assert layout.learners == ("1", "2", "3", "5", "6", "7")
    assert layout.device_of("collector", 1) == "cuda:4"
    assert layout.device_of("learner", 0) == "cuda:1"
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse("inline,device=1").device_of("learner", 0) == "cuda:1"
    assert Layout.parse("processes:2").device_of("learner", 1) == "cpu"


def test_roles_on_ray() -> None:
    layout = Layout.parse("ray:a2-l3")
    assert (layout.launcher_name, layout.split, layout.processes, layout.learning) == ("ray", True, 5, 3)
    assert layout.device_of("learner", 2) == "cpu"
    assert layout.groups(8) == 2
    layout = Layout.parse("ray:a2+-l1")
    assert (layout.growing, layout.processes, layout.groups(8)) == (True, 3, 8)
    layout = Layout.parse("ray:3")
    assert (layout.launcher_name, layout.split, layout.processes, layout.learning) == ("ray", False, 3, 3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("proceses:2", "Unknown layout .* Did you mean processes:2\\?"),
        ("4", "Did you mean processes:4\\?"),
        ("gpu:a1-l1", "inline,device=0"),
        ("auto:2", "auto chooses the number"),
        ("device=0", "Did you mean inline,device=0\\?"),
        ("processes:2 env_threads=2", "processes:2,env_threads=2"),
        ("processes:2,,pin=1", "empty option"),
        ("torchrun:2", "torchrun takes no number"),
        ("inline,env_thread=2", "Did you mean env_threads\\?"),
        ("", "Unknown layout"),
        ("inline:2", "inline takes no number.* processes:2"),
        ("processes", "number of processes, 1 or more, as in processes:2"),
        ("processes:0", "number of processes, 1 or more, as in processes:2"),
        ("processes:²", "number of processes, 1 or more, as in processes:2"),
        ("cpu:a2", "collectors and learners, 1 or more each, as in cpu:a2-l1"),
        ("cpu:a0-l1", "numbers of processes"),
        ("cpu:a1,1-l1", "numbers of processes"),
        ("a0-lx", "numbers of GPUs, or cpu"),
        ("a0,-l1", "numbers of GPUs, or cpu"),
        ("a0-l1-d0", "at least one copy"),
        ("cpu:a99999999999-l1", "more than 100,000 processes"),
        ("cpu:a90000-l1-d90000", "more than 100,000 processes"),
        ("a0-l1-d99999999999", "more than 100,000 processes"),
        pytest.param("processes:" + "9" * 5000, "more than 100,000 processes", id="digits"),
        ("processes:2,pin=1,pin=0", "pin twice"),
        ("inline,threads=2", "env_threads=N"),
        ("inline,device=²", "must be cpu, or the number of a GPU"),
        ("inline,pin=1", "processes that lockstep starts"),
        ("torchrun,pin=1", "processes that lockstep starts"),
        ("inline,env_threads=two", "env_threads=two must be a whole number"),
        ("inline,env_threads=0", "must be positive"),
        ("inline,stall_timeout=0", "must be positive"),
        ("cpu:a1-l1,jitter=-1", "must not be negative"),
        ("processes:2,pin=2", "must be 0 or 1"),
        ("cpu:a1-l1,nice=-5", "nice must be 0 to 19"),
        ("cpu:a1-l1,nice=20", "nice must be 0 to 19"),
        ("cpu:a1-l1,nice=high", "nice=high must be a whole number"),
        ("processes:2,nice=10", "apart from learners, as in cpu:a2-l1,nice=10.* leave nice= out"),
        ("inline,nice=10", "apart from learners"),
        ("ray:a2-l1,nice=10", "Elsewhere, start the whole run with the command nice"),
        ("auto,nice=10", "leave nice= out, or name a layout"),
        ("inline,device=gpu", "must be cpu, or the number"),
        ("processes:2,device=0+", "or several as in device=0\\+1"),
        ("processes:2,device=0+cpu", "must be cpu, or the number of a GPU, or several"),
        ("processes:2,device=0+1+2", "3 GPUs for 2 processes.* or name fewer GPUs"),
        ("inline,device=0+1", "2 GPUs for 1 process, "),
        ("processes:2,device=local", "for torchrun. Here, device=0\\+1"),
        ("processes:4,device=0,1", r"for several GPUs, write device=0\+1"),
        ("processes:4,device=0,1,3,env_threads=2", r"write device=0\+1\+3"),
        ("cpu:a1-l1,device=0", "names its devices already"),
        ("cpu:a1-l1,device=0+1", "names its devices already"),
        ("a0-l0,cpu", "all learners must .* Use a0-l0 or a0-lcpu,cpu"),
        ("a0,cpu,1-l0", "all collectors must .* Use a0,1-l0 or acpu,cpu,cpu-l0"),
        ("ray", "as in ray:2 or ray:a2-l1"),
        ("ray:0", "as in ray:2 or ray:a2-l1"),
        ("ray:a0-l1", "numbers of processes"),
        ("ray:2,device=0", "leave device= out"),
        ("ray:2,compress=2", "compress 0 or 1"),
        ("ray:2,learner.gpus=1", "no learner processes.*worker.gpus"),
        ("ray:2,worker.gpus=1.5", "whole if it is above 1"),
        ("ray:2,worker.cpus=0.5", "whole number of cores"),
        ("ray:2,worker.desk=1,worker.desk=2", "worker.desk twice"),
        ("ray:2,worker.desk=0", "positive"),
        ("ray:a1-l1,collector.gpus=1", "Add learner.gpus"),
        ("processes:2,worker.gpus=1", "are for ray"),
        ("auto,worker.cpus=2", "resources"),
        ("ray:2,worker.memory=1", "manages itself.*worker.cpus"),
        ("ray:2,worker.GPU=1", "manages itself.*worker.gpus"),
        ("ray:2,boss.gpus=1", "boss.gpus=1.*collector.gpus"),
        ("ray:2,restarts=-1", "at least 0"),
        ("processes:2,restarts=1", "is for ray:N"),
    ],
)
def test_mistakes_say_what_is_allowed(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        (Layout("processes", 0), "give a number of processes, 1 or more"),
        (Layout("processes", collectors=("cpu",) * 2), "numbers of collectors and learners, 1 or more each"),
        (Layout("processes", learners=("cpu",)), "numbers of collectors and learners, 1 or more each"),
    ],
)
def test_roles_without_processes_are_named(layout: Layout, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        layout.validate()


def test_gpus_are_dealt_to_processes_in_blocks() -> None:
    def dealt(text: str) -> list[str]:
        layout = Layout.parse(text)
        return [layout.device_of("learner", index).removeprefix("cuda:") for index in range(layout.workers)]

    assert dealt("processes:4,device=0+1") == ["0", "0", "1", "1"]
    assert dealt("processes:3,device=2+0") == ["2", "2", "0"]
    assert dealt("processes:2,device=1") == ["1", "1"]
    assert Layout.parse("processes:4,device=0+2+1").gpus == (0, 1, 2) and Layout.parse("processes:4").gpus == ()
    assert Layout.parse("a3-l1,1").gpus == (1, 3)


def test_torchrun_deals_the_gpus_of_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    local, listed = Layout.parse("torchrun,device=local"), Layout.parse("torchrun,device=0+1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for place, gpu in enumerate(["0", "0", "1", "1"]):
        monkeypatch.setenv("LOCAL_RANK", str(place))
        assert local.device_of("learner", 4 + place) == local.device_of("collector", 4 + place) == f"cuda:{place}"
        assert local.gpus == (place,)
        assert listed.device_of("learner", 4 + place) == f"cuda:{gpu}"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SettingsError, match=r"needs GPU 3, .* has 2 .*Start 2 processes on it, or use device=0"):
        check_fit(local, shards=8)
    check_fit(listed, shards=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(SettingsError, match="2 GPUs for 1 process,"):
        check_fit(listed, shards=8)


def test_torchrun_and_srun_start_a_group_for_each_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPUs of the first copy, or, where a machine has several groups, of the copy with the group's place."""
    layout = Layout.parse("a0-l1,2,2-d4")
    assert not layout.launcher.started_externally and layout.gpus == tuple(range(12))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert layout.launcher.started_externally and not layout.launcher.leads
    assert layout.gpus == (3, 4, 5) and layout.processes_here == 8
    assert [layout.device_of("learner", index) for index in (9, 10, 11)] == ["cuda:4", "cuda:5", "cuda:5"]
    assert layout.device_of("collector", 0) == "cuda:3", "collectors are counted in their group"
    assert [layout.learners_beside(index) for index in (9, 11)] == [1, 2]
    assert not Layout.parse("a0-l1").launcher.started_externally, "as before: each starts a separate run"


@pytest.mark.parametrize("place", ["0", "1"])
@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        (
            {"SLURM_GPUS_PER_TASK": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            r"\(SLURM_GPUS_PER_TASK=4, CUDA.*--gpus-per-node",
        ),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:4"}, r"\(SLURM_TRES_PER_TASK=gres/gpu:4\).*--gpu-bind=none"),
        ({"SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7"}, r"Slurm shows each task only its own GPUs \(SLURM_STEP_GPUS=0,1,2,"),
        ({"SLURM_JOB_GPUS": "0,1,2,3"}, r"2 groups on this machine need GPUs 0 to 7: start fewer groups here\.$"),
    ],
)
def test_groups_on_one_node_must_all_see_all_of_its_gpus(
    place: str, variables: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tasks of a node say so, or the first would wait for the second."""
    ranks = {"RANK": place, "WORLD_SIZE": "2", "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | variables).items():
        monkeypatch.setenv(name, value)
    layout = Layout.parse("a0-l1,2,3-d2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    check_fit(layout, shards=8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(SettingsError, match=rf"needs GPU 7, but .*{advice}"):
        check_fit(layout, shards=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_fit(layout, shards=8)  # one on each of two nodes


@pytest.mark.parametrize(
    ("text", "role"), [("processes:5", "processes"), ("cpu:a5-l1", "collectors"), ("cpu:a1-l5", "learners")]
)
def test_every_process_needs_a_shard(text: str, role: str) -> None:
    with pytest.raises(SettingsError, match=f"5 {role} for scheme.shards=4"):
        check_fit(Layout.parse(text), shards=4)


@pytest.mark.parametrize(("count", "advice"), [(0, "cpu:aC-lL.*different bits"), (2, "a0-lcpu, .* the same bits")])
def test_gpus_must_exist(count: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(SettingsError, match=rf"GPU {count}\b.* has {count}\b.*{advice}"):
        check_fit(Layout.parse(f"a{count}-lcpu"), shards=4)


def test_a_text_is_parsed_and_taken_for_no_launcher() -> None:
    assert Layout.of("processes:2") == Layout.of(Layout("processes", 2)) == Layout("processes", 2)
    assert Layout.of(None) == Layout("auto")
    with pytest.raises(SettingsError, match=r"'processes:2'.*Layout\.parse"):
        check_fit(Layout("processes:2"), shards=4)  # type: ignore[arg-type]


def test_what_can_be_checked_of_a_layout_anywhere_is_on_the_cpu() -> None:
    for text, here in (("a0-l1,2,graphs=1", "cpu:a1-l2"), ("inline,device=3,graphs=1,jitter=1", "inline,jitter=1")):
        layout = Layout.parse(text).anywhere()
        assert layout == Layout.parse(here)
        check_fit(layout, shards=4)
