# SPDX-License-Identifier: Apache-2.0
"""mxdraft bench: what it reports, in which forms, about which machine. Speeds need only be present."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from clib import REPOSITORY
from mxdraft.errors import CapacityError, UsageError
from mxdraft.runtime import Engine, Model, Timeline

PYTHON = (sys.executable, "-m", "mxdraft.cli")
C = (os.environ.get("MXDRAFT_CLI", str(REPOSITORY / "build" / "host" / "mxdraft")),)
BOTH = pytest.mark.parametrize("program", [C, PYTHON], ids=["c", "python"])
SHORT = ("-t", "1", "--prompt-tokens", "20", "-n", "5", "--repeat", "2")
THROTTLE = "sys/devices/platform/soc/soc:firmware/get_throttled"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)

Report = dict[str, Any]


def run(
    program: Sequence[str], *arguments: str | Path, code: int = 0, sysroot: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``bench``; with ``sysroot`` on a machine that has only the files in it."""
    done = subprocess.run(
        [*program, "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | ({"MXDRAFT_SYSROOT": str(sysroot)} if sysroot else {}),
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, object]], Path]:
    """A system root with the given files."""

    def make(files: dict[str, object]) -> Path:
        for name, content in files.items():
            path = tmp_path / "machine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n", encoding="utf-8")
        return tmp_path / "machine"

    return make


def report(bundle: Path, *arguments: str, sysroot: Path | None = None) -> Report:
    result: Report = json.loads(
        run(C, "-m", bundle, *SHORT, "--json", "-", *arguments, sysroot=sysroot).stdout
    )
    return result


@BOTH
def test_every_form_tells_the_same(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    paths = tmp_path / "b.csv", tmp_path / "b.json"
    table = run(program, "-m", bundle, *SHORT, "--csv", paths[0], "--json", paths[1]).stdout
    assert sorted(tmp_path.iterdir()) == sorted(paths)  # nothing temporary is left
    result: Report = json.loads(paths[1].read_text(encoding="utf-8"))
    assert [result[key] for key in ("prompt_tokens", "generated_tokens", "repeat", "threads")] == [
        20,
        5,
        2,
        1,
    ]
    assert table.startswith(
        "prompt 20, generated 5, repetitions 2, threads 1, precision full, mxd_matmul_mxfp4_"
    )
    prefill = re.search(r"^prefill +([\d.]+) +([\d.]+) +([\d.]+)  tok/s$", table, re.MULTILINE)
    assert prefill
    assert [float(value) for value in prefill.groups()] == pytest.approx(
        list(result["prefill_tok_per_s"].values()), rel=1e-4
    )

    rows = list(csv.DictReader(io.StringIO(paths[0].read_text(encoding="utf-8"))))
    assert [row["measure"] for row in rows] == list(result)
    for row in rows:
        value = result[row["measure"]]
        if isinstance(value, dict):
            assert {name: float(row[name]) for name in value} == value
            assert 0 < value["min"] <= value["median"] <= value["max"], row["measure"]
        else:
            assert (row["median"] or None) == (None if value is None else str(value))
            assert row["min"] == row["max"] == ""


@BOTH
def test_dash_replaces_the_table(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    as_json = run(program, "-m", bundle, *SHORT, "--json=-", "--csv", tmp_path / "b.csv").stdout
    assert json.loads(as_json)["repeat"] == 2
    assert (tmp_path / "b.csv").read_text(encoding="utf-8").startswith("measure,median,min,max\n")
    as_csv = run(program, "-m", bundle, *SHORT, "--csv", "-").stdout
    assert as_csv.startswith("measure,median,min,max\n")


@BOTH
def test_refusals(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    both = run(program, "-m", bundle, "--csv", "-", "--json", "-", code=2)
    assert "--csv and --json cannot both go to standard output" in both.stderr
    missing = tmp_path / "none" / "b.json"
    unwritable = run(program, "-m", bundle, *SHORT, "--json", missing, code=6)
    assert f"mxdraft: error: cannot write {missing}: No such file or directory" in unwritable.stderr
    assert unwritable.stdout.startswith("prompt 20")  # what was measured is not lost
    run(program, "-m", bundle, *SHORT, "--ctx", "16", code=4)


def test_documented_keys(bundle: Path) -> None:
    table = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8").partition("| bench key |")[2]
    cells = "\n".join(re.findall(r"^\|([^|]*)\|", table.split("\n## ")[0], re.MULTILINE))
    documented = re.findall(r"`([a-z]\w+)`", cells) + [f"row_cost_{n}" for n in WIDTHS[1:]]
    assert sorted(documented) == sorted(report(bundle))


def test_relations_between_measures(bundle: Path) -> None:
    base, full = (report(bundle, "--precision", precision) for precision in ("base", "full"))
    assert base["row_cost_1"]["median"] == 1
    assert full["bytes_per_token"] > base["bytes_per_token"] > 500_000
    with (
        Model(bundle) as model,
        Engine(model, precision="base", threads=1, draft="off") as engine,
        Timeline(engine, max_tokens=5, ignore_eos=True) as sequence,
    ):
        list(sequence.generate(range(20)))
        stats = sequence.stats
    assert base["bytes_per_token"] == stats["bytes_read"] / 4


def test_widths_that_do_not_fit_the_context_are_left_out(bundle: Path) -> None:
    result = report(bundle, "--ctx", "10", "--prompt-tokens", "4", "-n", "4")
    assert [result[f"row_cost_{n}"] is None for n in WIDTHS] == [n > 10 for n in WIDTHS]
    assert result["batch48_tok_per_s"] is not None  # in an engine of their own


def test_generation_that_fills_the_context_is_told(bundle: Path) -> None:
    assert report(bundle, "--ctx", "23", "-n", "50")["generated_tokens"] == 3


def test_too_little_memory_for_48_sequences(bundle: Path, machine: Any) -> None:
    with Model(bundle) as model:
        one = model.plan(ctx=64, threads=1).total
        assert model.plan(ctx=17, threads=1, max_seqs=48).total > one
    meminfo = {"proc/meminfo": f"MemAvailable: {one // 1024 + 1} kB"}
    result = report(bundle, "--ctx", "64", sysroot=machine(meminfo))
    assert result["batch48_tok_per_s"] is result["sequence_cost_48"] is None
    assert result["decode_tok_per_s"] is not None


@pytest.mark.parametrize(
    ("path", "word", "flags", "throttled"),
    [
        (THROTTLE, "0", 0, False),
        (THROTTLE, "50005", 0x50005, True),
        (THROTTLE, "8", 8, True),
        (THROTTLE, "50000", 0x50000, False),  # at some time since the start, not now
        ("sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled", "0x2", 2, True),
        ("sys/nothing", "1", None, None),
    ],
)
def test_throttling_is_recorded(
    bundle: Path, machine: Any, path: str, word: str, flags: int | None, throttled: bool | None
) -> None:
    result = report(bundle, sysroot=machine({path: word}))
    assert (result["throttle_flags"], result["throttled"]) == (flags, throttled)


def test_throttling_is_in_table_and_csv(bundle: Path, machine: Any, tmp_path: Path) -> None:
    sysroot = machine({THROTTLE: "50005", "sys/class/thermal/thermal_zone1/temp": "85500"})
    table = run(C, "-m", bundle, *SHORT, "--csv", tmp_path / "b.csv", sysroot=sysroot).stdout
    assert re.search(r"^throttled +yes +0x50005$", table, re.MULTILINE)
    assert re.search(r"^temperature +85\.50 +85\.50 +85\.50  C$", table, re.MULTILINE)
    lines = (tmp_path / "b.csv").read_text(encoding="utf-8").splitlines()
    assert "throttled,1,," in lines
    assert "throttle_flags,327685,," in lines


def test_python_refuses_what_the_command_line_cannot_say(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, ctx=32, threads=1) as engine:
        for numbers in ((0, 5, 1), (5, 1, 1), (5, 5, 0), (5, 5, 1001)):
            with pytest.raises(UsageError, match=f"prompt of {numbers[0]} tokens"):
                engine.bench(*numbers)
        with pytest.raises(CapacityError):
            engine.bench(32, 2, 1)
        with Timeline(engine), pytest.raises(UsageError, match="are open"):
            engine.bench(5, 5, 1)
        assert json.loads(engine.bench(5, 5, 1)["json"])["repeat"] == 1  # nothing was left open


# ---- the machine ----

CACHE = "sys/devices/system/cpu/cpu0/cache/index{}/size"


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 0),
        ({CACHE.format(0): "32K", CACHE.format(1): "48K", CACHE.format(2): "512K"}, 512 << 10),
        ({CACHE.format(0): "64K", CACHE.format(2): "1024K", CACHE.format(3): "32M"}, 32 << 20),
        ({CACHE.format(0): "nonsense", CACHE.format(1): "65536"}, 65536),
    ],
)
def test_last_level_cache(
    internals: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, files: dict[str, object], size: int
) -> None:
    monkeypatch.setenv("MXDRAFT_SYSROOT", str(machine(files)))
    assert internals[1].mxd_last_level_cache() == size


@pytest.mark.parametrize(("zones", "expected"), [({}, None), ({0: 41200, 3: 60100, 4: 39000}, 60.1)])
def test_hottest_zone(
    internals: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    zones: dict[int, int],
    expected: float | None,
) -> None:
    files = {f"sys/class/thermal/thermal_zone{zone}/temp": value for zone, value in zones.items()}
    monkeypatch.setenv("MXDRAFT_SYSROOT", str(machine(files)))
    value = internals[1].mxd_temperature()
    assert value == pytest.approx(expected) if expected else value != value
