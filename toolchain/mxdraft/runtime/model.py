# SPDX-License-Identifier: Apache-2.0
"""Bundles: their facts, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any, Unpack

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import NO_TOKEN, c_text, load, utf8
from mxdraft.runtime._handle import Handle
from mxdraft.runtime.options import EngineOptions, Plan, engine_struct, to_plan


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Dimensions and origin of a bundle. ``bos`` is None if the model starts without one."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    has_residual: bool
    has_drafter: bool
    has_ngrams: bool
    bos: int | None
    file_bytes: int
    provenance: str
    path: str


class Model(Handle):
    """A bundle file, mapped read-only and validated as a whole.

    Raises BundleError (with the verdict of runtime/BUNDLE.md) if it is missing or refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        library = load()
        box = library.ffi.new("mxd_model **")
        library.call(library.lib.mxd_model_open, os.fsencode(path), box)
        super().__init__(box, library.lib.mxd_model_close)

    @property
    def info(self) -> ModelInfo:
        ffi, lib = load().ffi, load().lib
        raw = ffi.new("mxd_model_info *")
        lib.mxd_model_get_info(self._pointer, raw)
        values = {field.name: getattr(raw, field.name) for field in dataclasses.fields(ModelInfo)}
        return ModelInfo(
            **values
            | {
                "has_residual": bool(raw.has_residual),
                "has_drafter": bool(raw.has_drafter),
                "has_ngrams": bool(raw.has_ngrams),
                "bos": None if raw.bos == NO_TOKEN else raw.bos,
                "provenance": ffi.string(raw.provenance).decode("utf-8", "surrogateescape"),
                "path": os.fsdecode(ffi.string(raw.path)),
            }
        )

    def encode(self, text: str | bytes) -> list[int]:
        """Encode plain text to ids; never makes special tokens; the tokenizer may put one first."""
        data = utf8(text)
        return self._ids(load().lib.mxd_encode, data, len(data))

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of all tokens, special ones included; may end in an incomplete character.

        Raises UsageError on an id outside the vocabulary.
        """
        ffi, lib = load().ffi, load().lib
        length = ffi.new("size_t *")
        parts = []
        for token in ids:
            data = lib.mxd_token_bytes(self._pointer, token, length) if 0 <= token <= NO_TOKEN else ffi.NULL
            if data == ffi.NULL:
                raise UsageError(f"token {token} is not in the vocabulary of {self.info.vocab}")
            parts.append(bytes(ffi.buffer(data, length[0])))
        return b"".join(parts)

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token, which produces no text while generating."""
        return bool(load().lib.mxd_token_is_special(self._pointer, token))

    def chat(self, messages: Iterable[tuple[str, str | bytes]], add_generation: bool = True) -> list[int]:
        """Encode (role, content) pairs through the bundle's chat template; contents are plain text.

        Raises UsageError if the bundle has no template, the template not this role, or a text a NUL byte.
        """
        ffi = load().ffi
        keep = [(ffi.new("char[]", c_text(role)), ffi.new("char[]", c_text(text))) for role, text in messages]
        array = ffi.new("mxd_message[]", keep)
        return self._ids(load().lib.mxd_chat_encode, array, len(keep), int(add_generation))

    def plan(self, **options: Unpack[EngineOptions]) -> Plan:
        """What an engine with these options would allocate; it may exceed ``available``."""
        library = load()
        raw = library.ffi.new("mxd_plan *")
        library.call(library.lib.mxd_plan_memory, self._pointer, engine_struct(options), raw)
        return to_plan(raw)

    def _ids(self, function: Any, *args: Any) -> list[int]:
        """Call an encoder twice: for the count, then for the ids."""
        library = load()
        count = library.ffi.new("size_t *")
        error = library.ffi.new("mxd_error *")
        status = function(self._pointer, *args, library.ffi.NULL, 0, count, error)
        if status not in (library.lib.MXD_OK, library.lib.MXD_ERR_BUFFER):
            raise library.error(status, error)
        ids = library.ffi.new("uint32_t[]", count[0])
        library.call(function, self._pointer, *args, ids, count[0], count)
        return list(ids)
