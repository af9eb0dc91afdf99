"""The schedule section: file and section hold the same settings, and anything else is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mxdraft.bundle.schedule import Schedule, Weights
from mxdraft.errors import RefusedError

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
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError, match=r"schedule\.toml"):
        Schedule.read(path, 30)
