# SPDX-License-Identifier: Apache-2.0
"""Reads ``targets/*.toml``: what a machine is, and how the runtime is built for it and runs on it.

The keys are documented in targets/README.md; this module is what checks them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import printable, read_toml

REPOSITORY = Path(__file__).resolve().parents[3]
ARCHITECTURES = ("x86_64", "aarch64")
OUTPUTS = {"cli": "mxdraft", "library": "libmxdraft.so"}


@dataclass(frozen=True)
class RunSettings:
    """How a board runs a bundle. Bytes are MiB. ``threads`` 0: what the board offers."""

    memory_mib: int
    threads: int
    ctx: int
    kv_mib: int
    precision: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Service:
    """Limits of the systemd unit next to ``RunSettings.memory_mib``. ``cpus``: a CPUAffinity list;
    ``parallel``: answers at once; ``parked``: sequences that the prompt cache keeps besides."""

    cpus: str
    parallel: int
    parked: int

    @property
    def cores(self) -> int:
        """Count the processors in ``cpus``."""
        ranges = [[int(end) for end in part.split("-")] for part in self.cpus.split()]
        return len({core for ends in ranges for core in range(ends[0], ends[-1] + 1)})


@dataclass(frozen=True)
class Target:
    """One file of ``targets/``. ``arch``: host, x86_64 or aarch64; ``cpu``: what every instruction outside
    the dispatched kernels may assume (zig's -mcpu); ``outputs``: of cli, library; ``glibc``: the oldest that
    the library has to run with."""

    name: str
    description: str
    arch: str
    cpu: str
    outputs: tuple[str, ...]
    glibc: str
    run: RunSettings
    service: Service


class _Words(tuple[str, ...]):
    """One word of these."""


class _List(tuple[str, ...]):
    """A list of these words."""


# What each key may be: words, a list of words, a range of whole numbers, or a pattern with its description.
_Rule = _Words | _List | range | tuple[re.Pattern[str], str]

_CPUS = "[0-9]{1,3}(-[0-9]{1,3})?"

_RULES: dict[str, dict[str, _Rule]] = {
    "": {
        "description": (re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,200}"), "a line of text"),
        "arch": _Words(("host", *ARCHITECTURES)),
        "cpu": _Words(("baseline", "cortex_a53")),  # never "native": a build must not depend on its builder
        "outputs": _List(OUTPUTS),
        "glibc": (re.compile(r"2\.[0-9]{1,2}"), "a version such as 2.28"),
    },
    "run": {
        "memory_mib": range(64, 1 << 20),
        "threads": range(65),
        "ctx": range((1 << 20) + 1),
        "kv_mib": range(1, 1 << 20),
        "precision": _Words(("auto", "base", "full")),
        "features": _List(("asimd", "asimddp", "i8mm", "avx2")),
    },
    "service": {
        "cpus": (re.compile(rf"{_CPUS}( {_CPUS})*"), "a list such as 0-3 or 0 2"),
        "parallel": range(1, 33),
        "parked": range(33),
    },
}


def load_target(name: str, folder: Path = REPOSITORY / "targets") -> Target:
    """Read ``targets/<name>.toml``; refuses unknown names, keys and values with what is allowed."""
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise UsageError(
            f"unknown target '{printable(name)}' (known: {', '.join(known) or 'none: not a checkout'})"
        )
    path = folder / f"{name}.toml"
    values = read_toml(path, "target")
    tables = {table: values.pop(table, {}) for table in _RULES if table}
    run = RunSettings(**_checked(path, "run", tables["run"]))
    service = Service(**_checked(path, "service", tables["service"]))
    if run.threads > service.cores or not service.cores:
        raise RefusedError(
            f"{path}: [run] threads = {run.threads}, but [service] cpus = '{service.cpus}' has "
            f"{service.cores} cores: more threads would make every answer slow"
        )
    return Target(name=name, run=run, service=service, **_checked(path, "", values))


def _checked(path: Path, table: str, values: object) -> dict[str, Any]:
    rules = _RULES[table]
    where = f"{path}: " + (f"[{table}] " if table else "")
    if not isinstance(values, Mapping):
        raise RefusedError(f"{where}is not a table")
    for key in sorted(values.keys() ^ rules.keys()):
        problem = "missing" if key in rules else "unknown"
        raise RefusedError(f"{where}{problem} key '{printable(key)}' (allowed: {', '.join(rules)})")
    for key, value in values.items():
        allowed = _problem(rules[key], value)
        if allowed:
            raise RefusedError(f"{where}{key} = {reprlib.repr(value)} (allowed: {allowed})")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _problem(rule: _Rule, value: object) -> str:
    """Return what would be allowed, or nothing if ``value`` is."""
    match rule:
        case _Words():
            return "" if value in rule else ", ".join(rule)
        case _List():
            good = isinstance(value, list) and all(word in rule for word in value)
            return "" if good else f"a list of {', '.join(rule)}"
        case range():
            good = type(value) is int and value in rule
            return "" if good else f"a whole number from {rule.start} to {rule.stop - 1}"
        case (pattern, description):
            return "" if isinstance(value, str) and pattern.fullmatch(value) else description
