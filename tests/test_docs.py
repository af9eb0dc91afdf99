# SPDX-License-Identifier: Apache-2.0
"""The documents: what they link to and name exists, their commands parse, their compiler lines build."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from mxdraft.cli import cli

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(REPOSITORY)
    for pattern in ("*.md", "docs/*.md", "runtime/*.md", "runtime/*/*.md", "targets/*.md", "models/*/*.md")
    for path in REPOSITORY.glob(pattern)
)
FOLDERS = ("bench", "docs", "models", "runtime", "targets", "tests", "toolchain")
FOREIGN = {"streamline_annotate.h"}  # ARM's, which this repository has no copy of
PLACEHOLDER = re.compile(r"\bNAME\b")


def text_of(page: Path) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def code_of(page: Path) -> Iterator[str]:
    """Code spans, which may go over a line end, and the lines of code blocks."""
    prose, *blocks = re.split(r"^```.*\n|^```$", text_of(page), flags=re.MULTILINE)
    while blocks:
        yield from blocks.pop(0).splitlines()
        prose += blocks.pop(0)
    yield from (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose))


def exists(path: str) -> bool:
    return any(REPOSITORY.glob(PLACEHOLDER.sub("*", path)))


def missing(code: str) -> Iterator[str]:
    """The files that a span or line of code names and the repository lacks."""
    for word in code.split():
        path, _, test = word.rstrip(".,;:)").partition("::")
        if path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not exists(path):
            yield path
        if re.fullmatch(r"[\w-]+\.(c|h|md|py)", path) and path not in FOREIGN:
            found = [file for folder in FOLDERS for file in (REPOSITORY / folder).rglob(path)]
            if not found and not exists(path):
                yield path
            elif test and not any(f"def {test}(" in file.read_text(encoding="utf-8") for file in found):
                yield word


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_and_paths_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page))
    broken = [link for link in links if "://" not in link and not (REPOSITORY / page.parent / link).exists()]
    assert broken + [path for code in code_of(page) for path in missing(code)] == []


@pytest.mark.parametrize(
    "code", ["runtime/src/gone.c", "see gone.py", "test_docs.py::test_gone", "docs/*.txt"]
)
def test_missing_files_are_noticed(code: str) -> None:
    assert list(missing(code))


def test_where_is_table_names_two_files_and_a_test() -> None:
    table = text_of(Path("CONTRIBUTING.md")).split("## Where is")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| a")]
    assert len(rows) >= 20
    for change, files, tests in rows:
        paths = [span for span in re.findall(r"`([^`]+)`", files) if "/" in span]
        assert 1 <= len(paths) <= 2, change
        assert all(exists(path) for path in paths), change
        assert re.search(r"`test_\w+\.py`", tests), change


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of mxdraft that a page shows, each from the command on; continued lines as one."""
    code = "\n".join(code_of(page)).replace("\\\n", " ").replace("\n" + " " * 8, " ")
    for line in re.findall(r"\bmxdraft ([a-z][^\n]*)", code):
        yield line.split("→")[0].replace("[", " ").replace("]", " ").split()


def options(words: list[str]) -> tuple[str, set[str]]:
    """The command that a line calls, and the options that it knows."""
    command: click.Command = cli
    name = []
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            break
        command, name = found, [*name, words.pop(0)]
    with click.Context(command) as context:
        known = {o for p in command.get_params(context) for o in (*p.opts, *p.secondary_opts)}
    return " ".join(name), known


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    for words in commands(page):
        line = " ".join(words)
        name, known = options(words)
        if name:
            given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert given <= known, line


LINES = re.findall(r"^cc .*", text_of(Path("docs/building.md")), re.MULTILINE)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("line", LINES, ids=["program", "library"])
def test_one_line_of_a_compiler_builds(line: str, compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is missing (Debian package {compiler})")
    command, output = line.removeprefix("cc ").rsplit(" ", 1)
    made = tmp_path / output
    subprocess.run(f"{compiler} {command} {made}", shell=True, cwd=REPOSITORY, check=True)
    if output.endswith(".so"):
        assert ctypes.CDLL(str(made)).mxd_version
    else:
        told = subprocess.run([made, "info", "--cpu"], capture_output=True, text=True, check=True).stdout
        assert "matmul_mxfp4" in told
