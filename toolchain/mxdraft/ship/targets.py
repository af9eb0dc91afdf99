"""Reads ``targets/*.toml``: what a machine is, and how the runtime is built for it and runs on it.

The keys are documented in targets/README.md; this module is what checks them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdraft.errors import RefusedError, UsageError

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
    """Limits of the systemd unit besides ``RunSettings.memory_mib``. ``cpus``: a CPUAffinity list."""

    cpus: str
    connections: int


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

_RULES: dict[str, dict[str, _Rule]] = {
    "": {
        "description": (re.compile(r".+"), "text"),
        "arch": _Words(("host", *ARCHITECTURES)),
        "cpu": _Words(("baseline", "cortex_a53")),  # never "native": a build must not depend on its builder
        "outputs": _List(OUTPUTS),
        "glibc": (re.compile(r"2\.\d{1,2}"), "a version such as 2.28"),
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
        "cpus": (re.compile(r"\d+(-\d+)?( \d+(-\d+)?)*"), "a list such as 0-3 or 0 2"),
        "connections": range(1, 65),
    },
}


def load_target(name: str, folder: Path = REPOSITORY / "targets") -> Target:
    """Read ``targets/<name>.toml``; refuses unknown names, keys and values with what is allowed."""
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise UsageError(f"unknown target '{name}' (known: {', '.join(known) or 'none: not a checkout'})")
    path = folder / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"{path}: {error}") from error
    tables = {table: values.pop(table, {}) for table in _RULES if table}
    run = RunSettings(**_checked(path, "run", tables["run"]))
    service = Service(**_checked(path, "service", tables["service"]))
    return Target(name=name, run=run, service=service, **_checked(path, "", values))


def _checked(path: Path, table: str, values: object) -> dict[str, Any]:
    rules = _RULES[table]
    where = f"{path}: " + (f"[{table}] " if table else "")
    if not isinstance(values, Mapping):
        raise RefusedError(f"{where}is not a table")
    for key in sorted(values.keys() ^ rules.keys()):
        problem = "missing" if key in rules else "unknown"
        raise RefusedError(f"{where}{problem} key '{key}' (allowed: {', '.join(rules)})")
    for key, value in values.items():
        allowed = _problem(rules[key], value)
        if allowed:
            raise RefusedError(f"{where}{key} = {value!r} (allowed: {allowed})")
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
