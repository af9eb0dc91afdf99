# SPDX-License-Identifier: Apache-2.0
"""What surrounds a program: locale, caches, home, file kinds and lengths of paths. The control groups are in
test_machine.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mxdraft.errors import TransferError
from mxdraft.files import default_cache
from mxdraft.runtime import Engine, Model
from programs import BOTH, TIMEOUT_S, Arg, errors, limited, run

MEASURING = b"measuring what steps cost"
GENERATE: list[Arg] = ["generate", "-p", "x", "-n", "3", "-t", "1"]


# ---- locale ----


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LOCPATH with a locale whose decimal point is a comma."""
    folder = tmp_path_factory.mktemp("locale")
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("localedef or its sources are missing")
    subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", folder / "de_DE.UTF-8"], capture_output=True, check=True
    )
    return folder


IN_GERMAN = """
import csv, io, json, locale, re, sys
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline
bundle, cache = sys.argv[1:]
with Model(bundle) as model, Engine(model, ctx=64, threads=1) as engine:
    engine.measure_costs(cache)
    before = engine.step_costs
    locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
    assert f"{0.5:n}" == "0,5"
    with Engine(model, ctx=64, threads=1) as other:
        assert other.load_costs(cache)
        assert max(abs(a - b) for a, b in zip(other.step_costs, before)) < 1e-9
    (file,) = __import__("pathlib").Path(cache).iterdir()
    engine.measure_costs(cache)
    assert "," not in file.read_text(encoding="ascii")
    results = engine.bench(3, 3, 1)
    with Timeline(engine, max_tokens=3) as timeline:
        for _ in timeline.generate([5, 6, 7]):
            pass
        assert timeline.stats == json.loads(timeline.stats_json)
        assert timeline.stats["decode_s"] > 0
    assert json.loads(results["json"])["row_step_s"]["median"] > 0
    assert {len(row) for row in csv.reader(io.StringIO(results["csv"]))} == {4}
    assert not re.search(r"\\d,\\d", results["table"])
    try:
        Timeline(engine, top_p=1.5)
    except UsageError as error:
        assert str(error) == "top_p 1.5 is not in (0, 1]"
    assert f"{0.5:n}" == "0,5"  # the locale is still the program's own
"""


def test_numbers_are_the_same_in_any_locale(german: Path, bundle: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_GERMAN, bundle, tmp_path],
        env=os.environ | {"LOCPATH": str(german)},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@BOTH
def test_command_lines_in_another_locale(program: Sequence[str], german: Path, bundle: Path) -> None:
    env = {"LOCPATH": str(german), "LC_ALL": "de_DE.UTF-8"}
    result = run(program, *GENERATE, "-m", bundle, "--draft", "off", "--stats", "json", env=env)
    assert json.loads(result.stderr.splitlines()[-1])["prefill_s"] > 0
    assert re.search(rb"plan: weights [0-9]+\.[0-9] ", result.stderr)
    text = run(program, *GENERATE, "-m", bundle, "--temp", "0.5", "--seed", "1", "--draft", "off", env=env)
    assert re.search(rb"first token after [0-9]+\.[0-9]{3} s", text.stderr)


# ---- the cache ----


@BOTH
def test_missing_folders_of_the_cache_are_made(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    for name, place in (
        ("MXDRAFT_CACHE", "own/a/b"),
        ("XDG_CACHE_HOME", "shared/c"),
        ("HOME", "home/d"),
        ("MXDRAFT_CACHE", "own/e//"),
    ):
        env = {"MXDRAFT_CACHE": "", "XDG_CACHE_HOME": "", name: f"{tmp_path}/{place}"}
        runs = [run(program, *GENERATE, "-m", bundle, env=env) for _ in range(2)]
        assert [MEASURING in result.stderr for result in runs] == [True, False]
    assert len([*tmp_path.rglob("costs-*")]) == 4
    relative = run(program, *GENERATE, "-m", bundle, env={"MXDRAFT_CACHE": "f/g"}, cwd=tmp_path)
    assert relative.returncode == 0
    assert len([*(tmp_path / "f" / "g").iterdir()]) == 1


@BOTH
@pytest.mark.parametrize("home", ["", "relative/home", None], ids=["empty", "relative", "unset"])
def test_home_that_is_none(program: Sequence[str], bundle: Path, tmp_path: Path, home: str | None) -> None:
    env = {"MXDRAFT_CACHE": "", "XDG_CACHE_HOME": "relative/cache"} | ({} if home is None else {"HOME": home})
    unset = ["env", "-u", "HOME"] if home is None else []
    for _ in range(2):
        result = run([*unset, *program], *GENERATE, "-m", bundle, env=env, cwd=tmp_path)
        assert result.returncode == 0
        assert MEASURING in result.stderr
    assert [*tmp_path.iterdir()] == []


def test_cache_folder_of_the_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXDRAFT_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_cache() == Path("/home/x/.cache/mxdraft")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert default_cache() == Path("/shared/mxdraft")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(TransferError, match="set HOME or MXDRAFT_CACHE"):
        default_cache()


@BOTH
def test_cache_that_cannot_be_written(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    command: list[Arg] = [*GENERATE, "-m", bundle]
    env = {"MXDRAFT_CACHE": str(tmp_path / "cache")}
    cut = run(limited("-f 0", program), *command, env=env)
    assert (cut.returncode, errors(cut)) == (0, [])
    assert [*(tmp_path / "cache").iterdir()] == []  # nothing half-written
    assert MEASURING in run(program, *command, env=env).stderr
    (costs,) = (tmp_path / "cache").iterdir()
    name = costs.name
    kinds: dict[str, Any] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "loop": lambda path: path.symlink_to(path),
        "device": lambda path: path.symlink_to("/dev/full"),
    }
    for kind, make in kinds.items():
        for place in (name, f"{name}.part"):
            folder = tmp_path / f"{kind}-{place}"
            folder.mkdir()
            make(folder / place)
            result = run(program, *command, env={"MXDRAFT_CACHE": str(folder)})
            assert (result.returncode, errors(result)) == (0, [])
            assert MEASURING in result.stderr
    assert Path("/dev/full").is_char_device()


@BOTH
def test_leftovers_of_programs_that_died_are_written_over(
    program: Sequence[str], bundle: Path, tmp_path: Path
) -> None:
    """In containers all have process 1, so a name by process is no name of its own."""
    command: list[Arg] = [*GENERATE, "-m", bundle]
    env = {"MXDRAFT_CACHE": str(tmp_path)}
    run(program, *command, env=env)
    (costs,) = tmp_path.iterdir()
    good = costs.read_bytes()
    costs.unlink()
    (tmp_path / f"{costs.name}.part").write_bytes(good[:30] + b"9" * 1000)
    (tmp_path / f"{costs.name}.1").write_bytes(b"of another version")
    assert MEASURING in run(program, *command, env=env).stderr
    assert MEASURING not in run(program, *command, env=env).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [costs.name, f"{costs.name}.1"]


def test_costs_that_cannot_be_are_measured_again(bundle: Path, tmp_path: Path) -> None:
    with Model(bundle) as model, Engine(model, ctx=64, threads=1, precision="full") as engine:
        engine.measure_costs(tmp_path)
        (file,) = tmp_path.iterdir()
        numbers = file.read_text(encoding="ascii").split()
        one = float(numbers[0])

        def write(*places: tuple[int, str]) -> None:
            changed = numbers.copy()
            for place, value in places:
                changed[place] = value
            file.write_text(" ".join(changed) + "\n", encoding="ascii")

        for value in ("0.001", "0.500", "3500000000.000", "0x10", "1e2", "100", "100.0", "+1.000", "1,000"):
            write(*((place, value) for place in range(len(numbers))))
            assert not engine.load_costs(tmp_path), value
        for wrong in (
            [(place, f"{65 * one:.3f}") for place in range(1, 16)],  # sixteen rows like 65 single ones
            [(17, f"{5 * one:.3f}")],  # base precision slower than full
            [(16, f"{17 * one:.3f}")],  # a drafter that takes seventeen steps
        ):
            write(*wrong)
            assert not engine.load_costs(tmp_path), wrong
        write()
        assert engine.load_costs(tmp_path)


# ---- kinds of files, long paths ----


@BOTH
def test_pipes_and_devices_as_files(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run(program, "info", "-m", tmp_path / "pipe")  # must not wait for a writer
    assert (result.returncode, b"not a regular file" in result.stderr) == (6, True)
    assert run(program, "info", "-m", "/dev/zero").returncode == 6
    endless = run(program, "tokenize", "-m", bundle, "-f", "/dev/zero")
    assert (endless.returncode, b"/dev/zero: more than 16 MiB" in endless.stderr) == (4, True)
    assert run(program, "tokenize", "-m", bundle, "-f", "/dev/null").stdout == b"\n"
    tokenize = [*program, "tokenize", "-m", str(bundle), "-f", str(tmp_path / "pipe")]
    with subprocess.Popen(tokenize, stdout=subprocess.PIPE) as process:
        (tmp_path / "pipe").write_bytes(b"hello")
        expected = run(program, "tokenize", "-m", bundle, "-p", "hello")
        assert process.communicate(timeout=TIMEOUT_S)[0] == expected.stdout


@BOTH
def test_long_paths_do_not_hide_the_reason(program: Sequence[str], tmp_path: Path) -> None:
    deep = str(tmp_path) + "/\u00e9\u6f22d" * 480
    for path, code, reason in (
        (deep[: -len(deep) // 2], 3, b": no such file"),
        (deep + "/d" * 1000, 6, b": cannot open: "),
        ("x" * 300, 6, b": cannot open: "),
    ):
        result = run(program, "info", "-m", path)
        assert result.returncode == code
        (line,) = errors(result)
        assert reason in line
        assert line.decode("utf-8").startswith(f"mxdraft: error: {path[:60]}")
        assert run(program, "tokenize", "-m", "x", "-f", path).returncode == code


@BOTH
def test_long_lists_of_ids_decode(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    """In time that grows with their number, not its square: that would take an hour."""
    word = run(program, "tokenize", "-m", bundle, "-p", "81", "--decode").stdout
    (tmp_path / "ids").write_bytes(b"\n81\t " * 2_000_000)
    decoded = run(program, "tokenize", "-m", bundle, "--decode", "-f", tmp_path / "ids")
    assert decoded.returncode == 0
    assert decoded.stdout == word * 2_000_000
