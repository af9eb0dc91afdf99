# SPDX-License-Identifier: Apache-2.0
"""The ``schedule`` section of a bundle: what core tokens are and what they get (runtime/BUNDLE.md).

As a file it is TOML, one table ``[schedule]`` with the fields of ``Schedule``.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple, Self

from mxdraft.errors import BundleError
from mxdraft.files import parsing, read_toml

# Fractions of rows to which the thresholds belong.
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
KV_BLOCK = 32
_MOST = float.fromhex("0x1.fffffep127")  # the largest f32
_LAYOUT = struct.Struct("<12f f3I fI 8f")
MAX_CATCH_UP = 32
_MAX_RECENT = 4096


class Weights(NamedTuple):
    """A consumer's blend: score = alpha * confidence + beta * attention + gamma * history + bias."""

    alpha: float
    beta: float
    gamma: float
    bias: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Settings of the dynamic origin; see ``mxd_schedule`` in runtime/src/schedule.h."""

    compute: Weights
    precision: Weights
    memory: Weights
    core_fraction: float
    catch_up: int
    sinks: int
    recent: int
    core_tokens: float
    monitored_layer: int
    thresholds: tuple[float, ...]

    @classmethod
    def default(cls, layers: int) -> Self:
        """Return what the runtime takes for a bundle without the section."""
        return cls(
            compute=Weights(0, 0, 1, 0),
            precision=Weights(1, 0, 0, 0),
            memory=Weights(0, 1, 0, 0),
            core_fraction=1,
            catch_up=16,
            sinks=4,
            recent=64,
            core_tokens=0.05,
            monitored_layer=layers // 2,
            thresholds=(0.95, 0.92, 0.85, 0.72, 0.5, 0.35, 0.12, 0.02),
        )

    @classmethod
    def unpack(cls, section: bytes, layers: int) -> Self:
        """Read the section of a model with ``layers``. Raises BundleError (SCHEDULE)."""
        if len(section) != _LAYOUT.size:
            raise BundleError("SCHEDULE", f"schedule: {len(section)} bytes, not {_LAYOUT.size}")
        words = _LAYOUT.unpack(section)
        values: list[Any] = [*(Weights(*words[i : i + 4]) for i in (0, 4, 8)), *words[12:18], words[18:]]
        schedule = cls(*values)
        fault = schedule._fault(layers)
        if fault:
            raise BundleError("SCHEDULE", f"schedule: {fault}")
        return schedule

    @classmethod
    def read(cls, path: Path, layers: int) -> Self:
        """Read the TOML file of a model with ``layers``. Raises RefusedError."""
        what = "schedule"
        table = read_toml(path, what)
        with parsing(path, what):
            values: dict[str, Any] = table["schedule"]
            for name in ("compute", "precision", "memory"):
                values[name] = Weights(**values[name])
            schedule = cls(**values | {"thresholds": tuple(values["thresholds"])})
            cls.unpack(schedule.pack(), layers)
            return schedule

    def threshold(self, core_fraction: float) -> float:
        """Return the score of *precision* that this fraction of rows exceeds: ``mxd_schedule_threshold``."""
        if not 0 < core_fraction < 1:
            return -_MOST if core_fraction >= 1 else _MOST
        for i, fraction in enumerate(FRACTIONS):
            if fraction >= core_fraction:
                before, low = (FRACTIONS[i - 1], self.thresholds[i - 1]) if i else (0.0, self.thresholds[0])
                share = (core_fraction - before) / (fraction - before)
                return low + share * (self.thresholds[i] - low)
        return self.thresholds[-1]

    def pack(self) -> bytes:
        """Return the bytes of the section."""
        numbers = (self.core_fraction, self.catch_up, self.sinks, self.recent, self.core_tokens)
        return _LAYOUT.pack(
            *self.compute, *self.precision, *self.memory, *numbers, self.monitored_layer, *self.thresholds
        )

    def table(self) -> dict[str, Any]:
        """Return the file's table, in the precision that the section has."""
        fields = vars(Schedule.unpack(self.pack(), self.monitored_layer + 1))
        return {name: x._asdict() if isinstance(x, Weights) else x for name, x in fields.items()}

    def toml(self) -> str:
        """Return the text of the file."""
        lines = ["[schedule]"]
        for name, value in self.table().items():
            if isinstance(value, dict):
                pairs = (f"{key} = {x:.9g}" for key, x in value.items())
                lines.append(f"{name} = {{ {', '.join(pairs)} }}")
            elif name == "thresholds":
                lines.append(f"{name} = [{', '.join(f'{x:.9g}' for x in value)}]")
            else:
                lines.append(f"{name} = {value:.9g}")
        return "\n".join(lines) + "\n"

    def _fault(self, layers: int) -> str | None:
        floats = (*self.compute, *self.precision, *self.memory, *self.thresholds)
        if not all(map(math.isfinite, floats)):
            return "a weight or threshold is not finite"
        if not (0 <= self.core_fraction <= 1 and 0 <= self.core_tokens <= 1):
            return "a share is not in 0..1"
        if not 1 <= self.catch_up <= MAX_CATCH_UP:
            return f"catch_up {self.catch_up} is not in 1..{MAX_CATCH_UP}"
        if not self.sinks <= KV_BLOCK:
            return f"sinks {self.sinks} is not in 0..{KV_BLOCK}"
        if not KV_BLOCK <= self.recent <= _MAX_RECENT or self.recent % KV_BLOCK:
            return f"recent {self.recent} is not a multiple of {KV_BLOCK} up to {_MAX_RECENT}"
        if not self.monitored_layer < layers:
            return f"layer {self.monitored_layer} of {layers}"
        if list(self.thresholds) != sorted(self.thresholds, reverse=True):
            return "thresholds ascend"
        return None
