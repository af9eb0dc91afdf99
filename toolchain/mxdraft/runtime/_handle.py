# SPDX-License-Identifier: Apache-2.0
"""Lifetimes: Python objects that own objects of the C library, closed in the right order in any case."""

from __future__ import annotations

import weakref
from typing import Any, Self

from mxdraft.runtime._ffi import load


class _Resource:
    """One C object and those opened from it. It is kept apart from the Python object, so that it is closed in
    the right order whatever order Python objects are collected in."""

    def __init__(self, box: Any, close: Any, parent: _Resource | None) -> None:
        self.box = box  # the ``mxd_… **`` that the library's close function takes and sets to NULL
        self._close = close
        self._parent = parent
        self._children: set[_Resource] = set()
        if parent is not None:
            parent._children.add(self)

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        self._close(self.box)
        if self._parent is not None:
            self._parent._children.discard(self)


class Handle:
    """A Python object that owns a C object until it is closed, collected, or the interpreter exits."""

    def __init__(self, box: Any, close: Any, parent: Handle | None = None) -> None:
        self._resource: _Resource = _Resource(box, close, None if parent is None else parent._resource)
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
