"""The package is layered: a folder imports only itself and lower ones, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
LAYERS = [
    "config", "system", "core", "kernels", "portable", "distributed", "models", "envs", "algorithms", "scheme",
    "experiment", "agent", "run", "buffers", "collectors", "transport", "learners", "evaluation", "training",
    "launchers", "reproducibility", "recipes", "reports", "export", "speed", "sweep", "cli",
]
# fmt: on
"""Folders and modules of the package, lowest first. `lockstep` itself, which names what users import, is above all.
Modules that it does not name may import its version."""


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Every name that a module imports from the package, be it for types alone or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: write the whole name, lockstep.…"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "lockstep")


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Of each module, the modules that it imports. What is no module is a name in the one before the dot."""

    def home(name: str) -> str:
        while name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {module: {home(n) for n in imports(module, ast.parse(text))} - {module} for module, text in sources.items()}


def height(module: str) -> int:
    folder = module.split(".")[1:2]
    return LAYERS.index(folder[0]) if folder and folder != ["__main__"] else len(LAYERS)


def upward(arrows: Mapping[str, set[str]]) -> set[str]:
    return {f"{a} -> {b}" for a, found in arrows.items() for b in found if b != "lockstep" and height(b) > height(a)}


def circular(arrows: Mapping[str, set[str]]) -> set[str]:
    """The modules that lead back to themselves."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = arrows[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return {module for module in arrows if module in reached(module)}


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "lockstep").rglob("*.py")}
    return graph({".".join(p.parts).removesuffix(".__init__"): path.read_text("utf-8") for p, path in paths.items()})


def test_no_folder_imports_from_above(arrows: dict[str, set[str]]) -> None:
    assert not upward(arrows), "Imports from a higher layer. Move what is shared down, or pass it as an argument"


def test_no_modules_import_each_other(arrows: dict[str, set[str]]) -> None:
    assert not circular(arrows), "Imports in a circle. Move what both need into a lower module"


def test_circles_and_upward_arrows_are_found() -> None:
    inner = "if TYPE_CHECKING:\n    from lockstep.cli.help import show\ndef f():\n    import lockstep.core.a as a"
    sources = {
        "lockstep": "",
        "lockstep.core.a": "from lockstep.core import b",
        "lockstep.core.b": inner,
        "lockstep.cli.help": "import torch",
    }
    assert upward(graph(sources)) == {"lockstep.core.b -> lockstep.cli.help"}
    assert circular(graph(sources)) == {"lockstep.core.a", "lockstep.core.b"}
