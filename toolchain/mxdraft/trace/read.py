# SPDX-License-Identifier: Apache-2.0
"""Reading what record.py wrote, or what claims to be that: every value is checked before it is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from mxdraft.bundle.schedule import MAX_CATCH_UP, Weights
from mxdraft.errors import CapacityError, RefusedError, TransferError
from mxdraft.runtime import Look, Precision
from mxdraft.trace.record import FORMAT

_LIMIT = 64 << 20  # bytes, more than a page can show

Line = dict[str, Any]
_Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Trace:
    """A whole run: its first line, those of its steps and tokens, and the statistics of its last."""

    run: Line
    steps: list[Line]
    tokens: list[Line]
    statistics: Line


def read_trace(path: Path) -> Trace:
    """Read and check a trace. Raises RefusedError if the file is missing, cut, or no trace; CapacityError if
    it is too large."""
    lines: dict[str, list[Line]] = {"run": [], "step": [], "token": [], "end": []}
    for number, text in enumerate(_lines(path), 1):
        try:
            line = json.loads(text.decode("utf-8"), parse_constant=_not_json)
            kind = line.pop("kind")
            _require(line, _FIELDS[kind])
            expected = "run" if number == 1 else "step, token or end"
            if (kind == "run") != (number == 1) or lines["end"]:
                raise ValueError(f"a {kind} line where {'nothing' if lines['end'] else expected} may be")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RefusedError(f"{path}: line {number} is not of a trace: {error}") from error
        lines[kind].append(line)
    if not lines["end"]:
        raise RefusedError(f"{path}: ends without statistics: it is cut, or the run has not ended")
    made = lines["end"][0]["statistics"]["generated_tokens"]
    if made != len(lines["token"]):
        raise RefusedError(f"{path}: {len(lines['token'])} tokens of {made}: lines are missing")
    return Trace(lines["run"][0], lines["step"], lines["token"], lines["end"][0]["statistics"])


def _lines(path: Path) -> list[bytes]:
    try:
        if not path.is_file():  # a device or pipe might never end
            raise RefusedError(f"{path}: no such file")
        with path.open("rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _LIMIT:
        raise CapacityError(f"{path}: more than {_LIMIT >> 20} MiB: record fewer tokens (-n)")
    if not data.endswith(b"\n"):
        raise RefusedError(f"{path}: the last line is cut")
    return data[:-1].split(b"\n")


def _not_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# ---- what each line must hold; more is allowed ----


def _require(line: Mapping[str, Any], fields: Mapping[str, _Check]) -> None:
    for name, check in fields.items():
        if not check(line.get(name)):
            raise ValueError(f"{name} = {line.get(name)!r:.80}")


def _count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 1 << 53


def _number(x: Any) -> bool:
    return _count(x) or (type(x) is float and math.isfinite(x))


def _text(x: Any) -> bool:
    return isinstance(x, str) and not any("\ud800" <= character <= "\udfff" for character in x)


def _hex(x: Any) -> bool:
    return isinstance(x, str) and re.fullmatch(r"([0-9a-f]{2})+", x) is not None


def _flag(x: Any) -> bool:
    return isinstance(x, bool)


def _optional(check: _Check) -> _Check:
    return lambda x: x is None or check(x)


def _word(words: tuple[str, ...]) -> _Check:
    return lambda x: isinstance(x, str) and x in words


def _table(fields: Mapping[str, _Check]) -> _Check:
    def check(x: Any) -> bool:
        return isinstance(x, dict) and all(test(x.get(name)) for name, test in fields.items())

    return check


def _values(check: _Check) -> _Check:
    return lambda x: isinstance(x, dict) and all(_text(name) and check(value) for name, value in x.items())


def _option(x: Any) -> bool:
    return _text(x) or _number(x) or _flag(x) or x is None or (isinstance(x, list) and all(map(_text, x)))


def _catch_up(x: Any) -> bool:
    return _count(x) and 1 <= x <= MAX_CATCH_UP


def _setting(x: Any) -> bool:
    return _number(x) or _values(_number)(x) or (isinstance(x, list) and all(map(_number, x)))


def _schedule(x: Any) -> bool:
    """Check what the page computes with, and what it only passes on to a file."""
    weights = _table(dict.fromkeys(Weights._fields, _number))
    return _values(_setting)(x) and _table({"precision": weights, "catch_up": _catch_up})(x)


_FIELDS: dict[str, dict[str, _Check]] = {
    "run": {
        "format": lambda x: bool(x == FORMAT),
        "version": _text,
        "bundle": _text,
        "provenance_sha256": _text,
        "options": _values(_option),
        "precision": _word(get_args(Precision)),
        "threads": _count,
        "ctx": _count,
        "kernels": _values(_text),
        "schedule": _schedule,
        "threshold": _optional(_number),
        "weight_bytes": _table({"base": _count, "full": _count}),
        "prompt": _table({"tokens": _count, "text": _text, "bytes": _optional(_hex)}),
    },
    "step": {
        "seconds": _number,
        **dict.fromkeys(("tokens", "verified", "drafted", "accepted", "bytes"), _count),
    },
    "token": {
        "position": _count,
        "token": _count,
        "base_token": _optional(_count),
        **dict.fromkeys(("margin", "confidence", "attention", "history", "score"), _number),
        "look": _word(get_args(Look)),
        "drafted": _flag,
        "special": _flag,
        "text": _text,
        "bytes": _optional(_hex),
        "base_text": _optional(_text),
        "full_token": _optional(_count),
        "full_text": _optional(_text),
        "tier": _optional(lambda x: _text(x) or _count(x)),
    },
    "end": {"statistics": _table({"generated_tokens": _count, "stop": _text, "decode_tok_per_s": _number})},
}
