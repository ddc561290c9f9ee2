from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import extras
from lockstep.config.extras import EXTRAS, install_command
from lockstep.run import platform

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have lockstep installed in site-packages; returns the folder of a repository that is not the working one."""
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "lockstep" / "config" / "extras.py"))
    folder = tmp_path / "my checkout"
    (folder / "lockstep").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    return folder


def test_extras_have_different_modules() -> None:
    """If two extras shared one, doctor could call a missing extra installed, and errors could name the wrong one."""
    modules = [extra.module for extra in EXTRAS.values()]
    assert sorted(modules) == sorted(set(modules))


def test_a_checkout_is_named_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert install_command("ray").endswith(f'pip install -e "{ROOT}[ray]"')
    monkeypatch.chdir(ROOT)
    assert install_command("atari,mujoco").endswith('pip install -e ".[atari,mujoco]"')


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({"url": "file://FOLDER"}, "FOLDER[ray]"),
        (
            {"url": "https://example.org/l.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "lockstep[ray] @ git+https://example.org/l.git@abc",
        ),
        ({"url": "file:///gone"}, ".[ray]"),
        ({}, ".[ray]"),
    ],
)
def test_an_installation_is_named_by_where_it_came_from(
    origin: dict[str, Any], source: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = origin.get("url", "").replace("FOLDER", str(elsewhere).replace(" ", "%20"))
    monkeypatch.setattr(extras, "_origin", lambda: {**origin, "url": url})
    words = shlex.split(install_command("ray").partition(" (")[0])
    assert words[-2:] == ["install", source.replace("FOLDER", str(elsewhere))]


def test_the_pip_is_that_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: str(Path(sys.executable).with_name("pip")))
    assert install_command("ray").startswith("pip install ")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/other/pip")
    assert install_command("ray").startswith(f"{shlex.quote(sys.executable)} -m pip install ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert install_command("ray").startswith("uv pip install --python ")


@pytest.mark.parametrize("extra", [name for name, extra in EXTRAS.items() if extra.environments])
def test_the_platform_has_all_that_an_extra_with_environments_installs(extra: str) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(rf"^{extra} = \[(.*)\]$", project, re.MULTILINE)
    assert listed is not None
    installed = set(re.findall(r'"([a-z0-9_-]+)', listed[1]))
    assert installed <= set(EXTRAS[extra].environments) <= set(platform._LIBRARIES)


def test_nothing_installs_lockstep_from_an_index() -> None:
    index = re.compile(
        r"""(pip|uv|pipx)\b[^\n`#]*\b(install|add|run)\b[^\n`#]*[\s"'`]lockstep\b(?!\[[^\]]*\] @)[\["'`\s]"""
    )
    files = [
        *ROOT.glob("*.md"),
        *(f for d in ("lockstep", "docs", "examples", "benchmarks") for f in (ROOT / d).rglob("*")),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.name != "extras.py"
        for match in index.finditer(path.read_text())
    ]
    assert not found
