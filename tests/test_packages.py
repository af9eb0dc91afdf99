# SPDX-License-Identifier: Apache-2.0
"""The house: who imports whom, from the ground up; each package says what its files are for."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from mxdraft.ship.targets import REPOSITORY

TOOLCHAIN = REPOSITORY / "toolchain"
# Rooms of one floor do not know each other; a room knows what is below it.
FLOORS = (
    {"errors"},
    {"files", "mx"},
    {"checkpoint", "runtime"},
    {"bundle", "ship"},
    {"train", "store"},
    {"export", "measure"},
    {"pack", "verify", "trace", "bench"},
    {"cli"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LISTED = [
    path
    for root in (TOOLCHAIN / "mxdraft", REPOSITORY / "bench")
    for path in sorted(root.rglob("__init__.py"))
]


def modules() -> dict[str, Path]:
    """Every module of the distribution and of the benchmarks, by dotted name."""
    paths = [*(TOOLCHAIN / "mxdraft").rglob("*.py"), *(REPOSITORY / "bench").rglob("*.py")]
    found = {}
    for path in paths:
        parts = path.relative_to(REPOSITORY if "bench" in path.parts else TOOLCHAIN).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports() -> dict[str, set[str]]:
    """What each module imports of these, anywhere in its text but for the type checker alone."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        asked: list[str] = []
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not _is_for_types(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                asked += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                asked += [each if each in known else str(node.module) for each in names]
        graph[name] = {each for each in asked if each in known and each != name}
    return graph


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room(module: str) -> str | None:
    """The package, or the module outside of one, that ``module`` belongs to; None: mxdraft itself."""
    root, *parts = module.split(".")
    return "bench" if root == "bench" else parts[0] if parts else None


def test_every_room_knows_only_what_is_below_it() -> None:
    upward = {
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if (a := room(module)) != (b := room(other)) and a is not None and b is not None
        if FLOOR[a] <= FLOOR[b]
    }
    assert upward == set()


def test_no_module_imports_itself_by_detours() -> None:
    TopologicalSorter(imports()).prepare()  # raises CycleError


def test_flat_modules_are_few() -> None:
    flat = {path.stem for path in (TOOLCHAIN / "mxdraft").glob("*.py")} - {"__init__"}
    assert flat == {"errors", "mx", "pack"}


@pytest.mark.parametrize("face", LISTED, ids=lambda path: str(path.parent.relative_to(REPOSITORY)))
def test_a_package_lists_its_files(face: Path) -> None:
    text = ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^(\w+(?:\.py|/))  ", text, re.MULTILINE)
    files = {path.name for path in face.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{path.parent.name}/" for path in face.parent.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)
