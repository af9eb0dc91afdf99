# SPDX-License-Identifier: Apache-2.0
"""Grammars: what the text of a timeline has to fit (docs/structured-output.md)."""

from __future__ import annotations

import json
from typing import Any, Self

from mxdraft.runtime._ffi import c_text, load, utf8
from mxdraft.runtime._handle import Handle
from mxdraft.runtime.engine import Engine


class Grammar(Handle):
    """The documents of a JSON schema (its text or value), for the timelines of one engine.

    Raises UsageError, with keyword and place, if the schema asks for what is not supported or is too large.
    A timeline that has to fit it keeps it from being collected, and cannot run once it is closed.
    """

    def __init__(self, engine: Engine, schema: str | bytes | dict[str, Any] | bool) -> None:
        self._compile(engine, load().lib.mxd_grammar_compile, schema)

    @classmethod
    def of_tools(cls, engine: Engine, tools: str | bytes | list[Any], name: str | None = None) -> Self:
        """Calls of the tool ``name``, or of any, in a list of tools as OpenAI's API has it:
        ``{"name": ..., "arguments": ...}``."""
        grammar = cls.__new__(cls)
        pointer = load().ffi.NULL if name is None else load().ffi.new("char[]", c_text(name))
        grammar._compile(engine, load().lib.mxd_grammar_compile_tools, tools, pointer)
        return grammar

    def _compile(self, engine: Engine, function: Any, document: Any, *more: Any) -> None:
        library = load()
        text = utf8(document if isinstance(document, str | bytes) else json.dumps(document))
        box = library.ffi.new("mxd_grammar **")
        with engine._resource.calls.held:
            library.call(function, engine.model._pointer, text, len(text), *more, box)
            super().__init__(box, library.lib.mxd_grammar_free, engine, engine._resource.calls)
        self.engine = engine  # keeps it open
