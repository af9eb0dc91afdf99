# SPDX-License-Identifier: Apache-2.0
"""Handles used from two threads, after a fork, closed during a step, and callbacks that raise.

What could crash or hang runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline

HEAD = """
import os, sys, threading, time
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model, Timeline
model = Model(sys.argv[1])
engine = Engine(model, threads=2, max_seqs=2, ctx=200)
def work(n):
    with Timeline(engine, max_tokens=n, ignore_eos=True) as timeline:
        for _ in timeline.generate([5, 6, 7]): pass
def refused(count):
    while True:
        try: work(190)
        except UsageError: count.append(1)
        except ValueError: return
"""


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as model:
        yield model


def run(bundle: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, str(bundle)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_threads_are_refused_or_served(bundle: Path) -> None:
    script = """
threads = [threading.Thread(target=refused, args=([],)) for _ in range(2)]
[t.start() for t in threads]; time.sleep(1.5); engine.close(); [t.join() for t in threads]
print("survived")
"""
    assert run(bundle, script) == "survived"


def test_a_close_waits_for_the_step(bundle: Path) -> None:
    script = """
thread = threading.Thread(target=refused, args=([],))
thread.start(); time.sleep(.5); engine.close(); thread.join(); print("survived")
"""
    assert run(bundle, script) == "survived"


def test_what_opens_during_a_close_is_closed_too(bundle: Path) -> None:
    """A timeline opened after the close had begun outlived its engine, and ended the process."""
    script = """
def churn():
    while True:
        try: work(3)
        except UsageError: pass
        except ValueError: return
for _ in range(60):
    engine = Engine(model, threads=1, max_seqs=2, ctx=64)
    threads = [threading.Thread(target=churn) for _ in range(2)]
    [t.start() for t in threads]; time.sleep(.01); engine.close(); [t.join() for t in threads]
print("survived")
"""
    assert run(bundle, script) == "survived"


def test_a_daemon_thread_at_the_end(bundle: Path) -> None:
    script = """
threading.Thread(target=refused, args=([],), daemon=True).start(); time.sleep(.5); print("survived")
"""
    assert run(bundle, script) == "survived"


@pytest.mark.parametrize("what", ["step", "close", "exit"])
def test_after_a_fork(bundle: Path, what: str) -> None:
    script = f"""
if (pid := os.fork()) == 0:
    if {what!r} == "step":
        try: work(3)
        except UsageError as error: os._exit(7 if "fork" in str(error) else 1)
    if {what!r} == "close":
        engine.close(); os._exit(7)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(bundle, script) == "7"


class _OwnError(BaseException):
    pass


def test_a_core_rule_that_raises_is_heard_and_decides_nothing(model: Model) -> None:
    options = {"precision": "auto", "core_fraction": 0.1, "catch_up": 32, "ctx": 128, "threads": 1}

    def broken(_: object) -> bool:
        raise _OwnError

    with Engine(model, max_seqs=2, **options) as engine:  # type: ignore[arg-type]
        with Timeline(engine, max_tokens=12, ignore_eos=True) as plain:
            list(plain.generate([5, 60, 70]))
            text = plain.tokens
        with Timeline(engine, max_tokens=12, ignore_eos=True) as timeline:
            timeline.decide_core_with(broken)
            timeline.prompt([5, 60, 70])
            raised = 0
            while timeline.stop == "none":
                try:
                    engine.step([timeline])
                except _OwnError:
                    raised += 1
            assert raised > 0
            assert timeline.tokens == text


def test_a_drafter_that_closes_the_engine(model: Model) -> None:
    def closing(_: list[int], most: int) -> list[int]:
        engine.close()
        return [5] * most

    with (
        Engine(model, ctx=100, precision="base", draft_min=2) as engine,
        Timeline(engine, max_tokens=8, ignore_eos=True) as timeline,
    ):
        timeline.draft_with(closing)
        timeline.prompt([5, 6, 7])
        engine.step([timeline])  # the prompt: nobody drafts
        with pytest.raises(UsageError, match="a callback cannot close it"):
            engine.step([timeline])
        assert not engine.closed
        timeline.draft_with(None)
        while timeline.stop == "none":
            engine.step([timeline])
        assert len(timeline.tokens) == 11
