"""The repository as a whole: its documents, pins and files agree with each other."""

from __future__ import annotations

import importlib
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[1]
LONGEST_MODULE = 500


@cache
def tracked() -> tuple[Path, ...]:
    """The project's files: those that git knows, or all in the source folders where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    paths = [ROOT / name for name in listing if name]
    if not paths:
        folders = ("lockstep", "tests", "docs", "examples", "benchmarks")
        paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    return tuple(path for path in paths if path.is_file())


def texts(*suffixes: str) -> dict[Path, str]:
    """The text of every file (of these suffixes, if any are given) by its path."""
    result = {}
    for path in tracked():
        if suffixes and path.suffix not in suffixes:
            continue
        try:
            result[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            assert path.suffix in (".png", ".webp", ".mp4", ".gif", ".safetensors"), f"{path} is neither text nor known"
    return result


def documents() -> list[Path]:
    return sorted(path for path in tracked() if path.suffix == ".md")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown text."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.}])/(?:work|home/\w+|root|farm|opt/\w+|tmp/\w)/",
    "the host of a package registry": r"(?:pypi|pythonhosted|npmjs|anaconda)\.(?:org|com)|download\.pytorch",
    "the number of an issue": r"\bissue #?\d",
    "unfinished work": r"\b(?:TODO|FIXME|XXX)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_project_speaks_of_itself_alone(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts().items()
        if path != Path(__file__).resolve()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "see /home/me/project for it"),
        ("the host of a package registry", "https://files.pythonhosted.org/x"),
        ("the number of an issue", "as in issue #12"),
        ("unfinished work", "# TODO: later"),
    ],
)
def test_forbidden_words_are_recognized(what: str, line: str) -> None:
    assert re.search(FORBIDDEN[what], line)


def broken_links(document: Path, text: str) -> list[str]:
    """The relative links of a document that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    assert not broken_links(document, document.read_text(encoding="utf-8"))


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A *title*, twice\n[1](page.md#a-title-twice) [2](page.md#other) [3](none.md) [4](https://x.org/none)\n"
    page.write_text(text)
    assert broken_links(page, text) == ["page.md#other", "none.md"]


def uneven_rows(text: str) -> list[str]:
    """The rows of Markdown tables that have more or fewer cells than their heads, as rows of other tables have."""
    uneven, head = [], 0
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and head and cells != head:
            uneven.append(line)
        head = (head or cells) if cells else 0
    return uneven


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_even(document: Path) -> None:
    assert not uneven_rows(document.read_text(encoding="utf-8"))


def test_uneven_rows_are_found() -> None:
    assert uneven_rows("| a | b |\n|---|---|\n| 1 | 2 \\| 3 |\n\n| a |\n|---|\n| 1 | 2 |\n") == ["| 1 | 2 |"]


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in documents() if ROOT / "docs" in path.parents}
    assert not [page for page in sorted(pages - {"index.md"}) if f"({page})" not in index]


def test_every_recipe_is_documented() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in RECIPES if f"`{name}`" not in readme]


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version and lockstep.__version__ == version[1]


def test_what_make_installs_is_pinned() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    installed = ("dependencies", "atari", "envpool", "mujoco", "ray", "dev")
    lists = dict(re.findall(rf"^({'|'.join(installed)}) = (\[\n(?: .*\n)+\]|\[.*\])$", project, re.M))
    assert set(lists) == set(installed)
    names = {
        re.split(r"[\[>=;]", requirement)[0].strip()
        for requirements in lists.values()
        for requirement in re.findall(r'"(.+?)"', requirements)
    }
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([a-z0-9-]+)==[\w.]+(?: ; python_version [<>]=? \"3\.\d+\")?$", constraints, re.M))
    assert len(pinned) > 80
    assert not {name.lower().replace("_", "-") for name in names} - pinned
    unpinned = [line for line in constraints.splitlines() if line and line[0] != "#" and "==" not in line]
    assert not unpinned


def test_modules_stay_short() -> None:
    lengths = {path: text.count("\n") for path, text in texts(".py").items() if (ROOT / "tests") not in path.parents}
    assert not {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST_MODULE}


def is_importable(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def test_code_in_strings_and_documents_imports_what_exists() -> None:
    """Tests write programs, and documents show some. What has moved there would be noticed only when they run."""
    gone = {
        f"{path.relative_to(ROOT)}: {name} of {module}"
        for path, text in texts(".py", ".md").items()
        if path.name != "test_architecture.py"  # it invents modules
        for module, names in re.findall(r"\bfrom (lockstep(?:\.\w+)*) import (\w+(?:, \w+)*)", text)
        for name in names.split(", ")
        if not is_importable(module, name)
    }
    assert not gone
