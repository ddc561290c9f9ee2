"""Examples of Ray on Kubernetes, on Slurm and as a job: what they ask for exists, and what they start can run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import clusters
import pytest

from lockstep.cli.main import main
from lockstep.config.layout import Layout

yaml = pytest.importorskip("yaml", reason="a package that Ray needs")
jsonschema = pytest.importorskip("jsonschema", reason="a package that Ray needs")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "ray"
SCHEMA = Path(__file__).parent / "data" / "rayjob.schema.json"


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())


def layout_of(words: list[str]) -> Layout:
    return Layout.parse(words[words.index("--layout") + 1])


def check(words: list[str], capsys: pytest.CaptureFixture[str]) -> Layout:
    """Check that lockstep takes a command; returns its layout."""
    assert words[:2] == ["lockstep", "train"]
    assert main([*words[1:], "--dry-run"]) == 0, capsys.readouterr().err
    return layout_of(words)


def test_kuberay_knows_all_fields_of_the_job(rayjob: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert not list(validator.iter_errors(rayjob))
    wrong = json.loads(json.dumps(rayjob))
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    wrong["spec"]["backoffLimit"] = "three"
    assert len(list(validator.iter_errors(wrong))) == 2


def test_the_job_s_command_fits_its_cluster(rayjob: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    shell, option, script = shlex.split(rayjob["spec"]["entrypoint"])
    assert [shell, option] == ["sh", "-c"]
    assert subprocess.run(["sh", "-n", "-c", script], check=False).returncode == 0
    resuming, training = re.findall(r"exec (lockstep (?:resume|train) [^;]*);", script)
    words = shlex.split(training)
    layout = check(words, capsys)
    assert shlex.split(resuming)[2] == words[words.index("--run") + 1]
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pods = {}
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["cpu"] == "1"
        pods[group["groupName"]] = group["replicas"]
    assert pods == {"learners": layout.learning, "collectors": len(layout.collectors)}
    mounts = [
        container["volumeMounts"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    ]
    assert all(words[-1].startswith(each["mountPath"]) for of_pod in mounts for each in of_pod)


@pytest.mark.parametrize("exists", [False, True])
def test_a_script_for_slurm(exists: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The programs of Slurm note what they are told; the first node of the allocation is the head."""
    programs = clusters.make(tmp_path)
    clusters.script(programs / "scontrol", "printf 'node7\\nnode8\\nnode9\\n'")
    noted = f'printf "%s\\n" "$@" > {tmp_path}/told\necho "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" > {tmp_path}/token'
    clusters.script(programs / "srun", noted)
    run = tmp_path / "free"
    if exists:
        run.mkdir()
    given = {"SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "4"}
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "RUN": str(run)}
    subprocess.run(["bash", EXAMPLES / "slurm.sh"], env={**given, **paths}, check=True, timeout=60)
    assert re.fullmatch(r"token [0-9a-f]{64}\n", (tmp_path / "token").read_text())
    told = (tmp_path / "told").read_text().splitlines()
    starting, command = told[: (end := told.index("--"))], told[end + 1 :]
    assert starting[1:] == [
        *("ray", "symmetric-run", "--address", "node7:6379", "--min-nodes", "3", "--num-cpus", "4"),
        "--include-dashboard=false",
    ]
    assert command[:2] == ["env", "RAY_ADDRESS=node7:6379"]
    if exists:
        assert command[2:5] == ["lockstep", "resume", str(run)]
    else:
        layout = check(command[2:], capsys)
        directives = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", (EXAMPLES / "slurm.sh").read_text()))
        assert int(directives["nodes"]) * int(directives["cpus-per-task"]) >= layout.processes


def test_ray_starts_its_nodes_with_these_options() -> None:
    symmetric = pytest.importorskip("ray.scripts.symmetric_run", reason="Ray is not installed")
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed")
    assert {"address", "min_nodes"} <= {each.name for each in symmetric.symmetric_run.params}
    assert {"num_cpus", "include_dashboard"} <= {each.name for each in scripts.start.params}


def test_a_job_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = pytest.importorskip("ray.dashboard.modules.job.cli", reason="Ray is not installed")
    programs = tmp_path / "bin"
    programs.mkdir()
    clusters.script(programs / "ray", f'printf "%s\\n" "$@" > {tmp_path}/told')
    paths = {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["sh", EXAMPLES / "submit.sh", "http://head:8265"], env=paths, check=True, timeout=60)
    words = (tmp_path / "told").read_text().splitlines()
    assert words[:2] == ["job", "submit"]
    context = job.submit.make_context("submit", words[2:])
    assert context.params["address"] == "http://head:8265" and context.params["no_wait"]
    assert check(list(context.params["entrypoint"]), capsys).growing
