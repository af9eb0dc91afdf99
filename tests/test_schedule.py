# SPDX-License-Identifier: Apache-2.0
"""The schedule section: file and section hold the same settings, and anything else is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mxdraft.bundle.schedule import Schedule, Weights
from mxdraft.errors import RefusedError, TransferError

SETTINGS = dataclasses.replace(
    Schedule.default(30),
    precision=Weights(1.5, -0.25, 1e-3, -2),
    core_fraction=0.125,
    catch_up=32,
    recent=96,
    monitored_layer=29,
)


def test_file_and_section_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(SETTINGS.toml(), encoding="utf-8")
    assert Schedule.read(path, 30).pack() == SETTINGS.pack()
    assert Schedule.unpack(SETTINGS.pack(), 30).pack() == SETTINGS.pack()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[schedule]\n",
        SETTINGS.toml().replace("catch_up = 32", "catch_up = 33"),
        SETTINGS.toml().replace("catch_up = 32", "catch_up = -1"),
        SETTINGS.toml().replace("alpha", "omega"),
        SETTINGS.toml() + "more = 1\n",
        SETTINGS.toml().replace("recent = 96", "recent = 95"),
        SETTINGS.toml().replace("alpha = 1.5", "alpha = 1e300"),
        SETTINGS.toml().replace("alpha = 1.5", "alpha = nan"),
        SETTINGS.toml().replace("alpha = 1.5", "alpha = 'x'"),
        SETTINGS.toml().replace("alpha = 1.5", "alpha = " + "[" * 500 + "]" * 500),
        SETTINGS.toml().replace("alpha = 1.5", "alpha = " + "[" * 100_000),
        SETTINGS.toml().replace("catch_up = 32", "catch_up = 99999999999999999999"),
        SETTINGS.toml().replace("thresholds = [", "thresholds = [[1], "),
        "schedule = 1\n",
        "schedule." * 5000 + "a = 1\n",
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError, match=r"schedule\.toml(:| is not a schedule:) "):
        Schedule.read(path, 30)


def test_a_schedule_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "schedule.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RefusedError, match=r"is not a schedule: .*utf-8"):
        Schedule.read(path, 30)
    with pytest.raises(RefusedError, match="no such file"):
        Schedule.read(tmp_path / "none.toml", 30)
    with pytest.raises(TransferError, match="not a regular file"):
        Schedule.read(Path("/dev/zero"), 30)
