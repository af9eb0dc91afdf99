# SPDX-License-Identifier: Apache-2.0
"""What holds for every file of the repository: its licence and its white space."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = re.compile(r".*\.(c|h|py|sh)|Makefile|\.ci/run")
LICENCE = re.compile(r"(#!.*\n)?(/\*|#) SPDX-License-Identifier: Apache-2\.0\b")


def texts() -> dict[str, str]:
    """The text files that git has or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    found = {}
    for name in set(names.splitlines()):
        data = (REPOSITORY / name).read_bytes() if (REPOSITORY / name).is_file() else b"\0"
        if b"\0" not in data:
            found[name] = data.decode("utf-8")
    return found


def test_sources_begin_with_their_licence() -> None:
    sources = {name: text for name, text in texts().items() if SOURCE.fullmatch(name)}
    assert len(sources) > 100
    assert [name for name, text in sources.items() if not LICENCE.match(text)] == []


def test_white_space() -> None:
    wrong = {
        name
        for name, text in texts().items()
        if re.search(r"[ \t\r]$|\n\n\Z|[^\n]\Z", text, re.MULTILINE)
        or (name != "Makefile" and "\t" in text and not name.endswith(".npz"))
    }
    assert wrong == set()
