# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs for readers, each either taken or refused.

Input i of a name is the same on every machine, so a finding can be repeated: it is told with its name, number
and bytes. How long a target runs: ``MXDRAFT_FUZZ_SECONDS``, 2 by default.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mxdraft.errors import CapacityError, MxdraftError

SECONDS = float(os.environ.get("MXDRAFT_FUZZ_SECONDS", "2"))
MEMORY = 1 << 30  # bytes that a reader may take of a small input
_LEAST = 25  # inputs, however long they take

T = TypeVar("T")

NUMBERS = (
    *(0, 1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 33, 63, 64, 255, 256, 499, 500, 501, 4096, 4097),
    *(1 << 16, 1 << 20, (1 << 20) + 1, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(0x3F800000, 0x7F800000, 0x7FC00000, 0x80000000),  # as f32: 1, infinity, NaN, -0
    *(1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 64, (1 << 64) - 1),
)
WORDS = (
    *(b"", b"\0", b"\xff\xfe", b"\xc3", b"\x1b[2J", b"\r\n", b"\xe2\x80\xa8", b'"', b"\\", b"\\ud800"),
    *(b"[" * 100, b"{" * 5000, b"[" * 70 + b"]" * 70, b"1e300", b"-1e999", b"nan", b"NaN", b"-", b"9" * 5000),
    *(b"null", b"true", b"[]", b"{}", b"{{", b"}}", b"{%", b"%}", b"=", b",", b"\n", b"../", b"a" * 3000),
)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 31, 33, 500, 1 << 31, 1 << 63, -(1 << 63), 10**400, 0.5, -0.0, 1e300),
    *(float("nan"), float("inf"), "", "x", "0", "\ud800", "\x1b[2J", "a\0b", "/etc/passwd", "n" * 5000),
    *([], {}, [[]], [0], ["x"], {"x": 1}, nested(70), nested(200)),
)


def fuzz(
    name: str, make: Callable[[random.Random], T], read: Callable[[T], object], one_kind: bool = False
) -> None:
    """Make inputs and read them until the time is over.

    Whatever ``read`` raises but a refusal is a finding, as is a lack of memory. Unless ``one_kind``, some
    inputs must be taken and some refused.
    """
    verdicts = [0, 0]
    for number, rng in enumerate(randoms(name)):
        data = make(rng)
        with finding(f"{name} {number}", data), little_memory():
            verdicts[taken(partial(read, data))] += 1
    print(f"{name}: {verdicts[0]} refused, {verdicts[1]} taken")
    assert one_kind or min(verdicts) > 0, verdicts


def randoms(name: str) -> Iterator[random.Random]:
    """A source of randomness for each input, until the time is over."""
    start, number = time.monotonic(), 0
    while number < _LEAST or time.monotonic() - start < SECONDS:
        yield random.Random(f"{name} {number}")
        number += 1


def taken(read: Callable[[], object]) -> bool:
    """Whether an input is taken, not refused."""
    try:
        read()
    except CapacityError as error:
        raise AssertionError(f"takes more than {MEMORY >> 20} MiB") from error
    except MxdraftError:
        return False
    return True


@contextmanager
def finding(where: str, data: object) -> Iterator[None]:
    """Tell the input with whatever the block raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"input {where}: {data!r:.2000}")
        raise


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the process have no more than ``MEMORY`` more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---- mutations ----


def mutated(rng: random.Random, data: bytes, same_length: bool = False) -> bytes:
    """``data`` with one to three changes, more often at its beginning, where the headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        size = len(changed)
        if not size:
            break
        place = rng.randrange(size) if rng.random() < 0.6 else min(size - 1, int(rng.expovariate(1 / 60)))
        kind = rng.randrange(4 if same_length else 8)
        if kind == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[place] = rng.randrange(256)
        elif kind == 2:
            _put(changed, place - place % 4, struct.pack("<Q", rng.choice(NUMBERS))[: rng.choice((4, 8))])
        elif kind == 3:
            source = rng.randrange(size)
            _put(changed, place, bytes(changed[source : source + rng.choice((1, 4, 8, 64, 128))]))
        elif kind == 4:
            del changed[place : place + rng.choice((1, 4, 8, 100, size))]
        elif kind == 5:
            changed[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 16)))
        elif kind == 6:
            changed[place:place] = rng.choice(WORDS)
        else:
            _put(changed, place, rng.choice(WORDS))
    return bytes(changed)


def _put(data: bytearray, place: int, new: bytes) -> None:
    """Overwrite without making it longer."""
    new = new[: len(data) - place]
    data[place : place + len(new)] = new


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """The text of a JSON value in which something is another value, left out or there twice, or text of it is
    mutated."""
    changed = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2))):
        _change(rng, changed)
    text = json.dumps(changed, ensure_ascii=True).encode("ascii")
    return mutated(rng, text) if rng.random() < 0.3 else text


def _change(rng: random.Random, value: Any) -> None:
    """Change one place of a value."""
    holder = value
    while isinstance(holder, dict | list) and holder:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        inner = holder[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            holder = inner
            continue
        if rng.random() < 0.15:
            del holder[key]
        elif isinstance(inner, int | float) and rng.random() < 0.3:
            holder[key] = rng.choice((inner + 1, -inner, inner * 2, rng.choice(NUMBERS)))
        else:
            holder[key] = copy.deepcopy(rng.choice((*VALUES, holder[rng.choice(keys)])))
        return
