# SPDX-License-Identifier: Apache-2.0
"""Lifetimes: Python objects that own objects of the C library, closed in the right order in any case."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import load

H = TypeVar("H", bound="Handle")
P = ParamSpec("P")
T = TypeVar("T")


class Calls:
    """Guards an engine: it is in one call at a time, and nothing of it is closed while anybody uses it.

    ``raised`` is what a callback raised within the call, to be raised after it.
    """

    def __init__(self) -> None:
        self.held = threading.RLock()  # by whoever reads or changes anything, for as long as that takes
        self._caller: int | None = None  # the thread whose call runs rows
        self.raised: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the engine for a call. Raises UsageError if it is in one, also of this thread's own."""
        if self._caller is not None:
            raise UsageError("the engine is in a call already: one thread at a time, none from its callbacks")
        with self.held:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None
                raised, self.raised = self.raised, None
                if raised is not None:
                    raise raised

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Wait for the end of another thread's call. Raises UsageError within a call's own callback."""
        if self._caller == threading.get_ident():
            raise UsageError("the engine is in a call: a callback cannot close it, nor its timelines")
        with self.held:
            yield


def guarded(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Let a method of a handle wait for the end of another thread's call: nothing is closed under it."""

    @functools.wraps(method)
    def wait(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._resource.calls.held:
            return method(self, *args, **kwargs)

    return wait


class _Resource:
    """One C object and those opened from it, each under ``held`` of its parent. It is kept apart from the
    Python object, so that it is closed in the right order whatever order Python objects are collected in."""

    def __init__(self, box: Any, close: Any, parent: _Resource | None, calls: Calls) -> None:
        self.calls = calls
        self.box = box  # the ``mxd_… **`` that the library's close function takes and sets to NULL
        self._close = close
        self._parent = parent
        self._children: set[_Resource] = set()
        if parent is not None:
            parent._children.add(self)

    def close(self) -> None:
        closed = False
        while not closed:
            for child in list(self._children):
                child.close()
            with self.calls.closing():
                closed = not self._children  # else another thread has opened one meanwhile
                if closed:
                    self._close(self.box)
        if self._parent is not None:
            self._parent._children.discard(self)


class Handle:
    """A Python object that owns a C object until it is closed, collected, or the interpreter exits."""

    def __init__(
        self, box: Any, close: Any, parent: Handle | None = None, calls: Calls | None = None
    ) -> None:
        owner = None if parent is None else parent._resource
        self._resource: _Resource = _Resource(box, close, owner, calls or Calls())
        self._finalize = weakref.finalize(self, self._resource.close)

    @property
    def _pointer(self) -> Any:
        if self.closed:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._resource.box[0]

    def close(self) -> None:
        """Close this object and everything opened from it. Closing again does nothing."""
        self._finalize()

    @property
    def closed(self) -> bool:
        return bool(self._resource.box[0] == load().ffi.NULL)

    def __enter__(self) -> Self:
        self._pointer  # noqa: B018  (raises if closed)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
