# SPDX-License-Identifier: Apache-2.0
"""The text half of the runtime (tokenizer, chat, UTF-8), built alone and called through cffi."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import pytest
from mxdraft.checkpoint import TokenizerSpec
from mxdraft.checkpoint.fetch import known_models
from mxdraft.checkpoint.gguf_file import load_gguf
from mxdraft.errors import BundleError
from mxdraft.files import default_cache

RUNTIME = Path(__file__).resolve().parent.parent / "runtime"
TEXT_FILES = ["tokenizer", "tokenizer_section", "pretoken", "nfc", "chat", "utf8", "status"]
SOURCES = [RUNTIME / "src" / f"{name}.c" for name in TEXT_FILES]
HEADERS = [RUNTIME / "src" / name for name in ("pretoken.h", "tokenizer.h", "chat.h", "utf8.h")]
CC = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]

# Where the user's are: the tests have a cache of their own later (conftest.py).
WEIGHTS = default_cache() / Path(known_models()["smollm2-135m"].member).name

BAD_TOKENIZER, BAD_CHAT = 34, 35
ERR_ARGUMENT, ERR_BUFFER = 1, 7
NO_TOKEN = 0xFFFFFFFF


def compile_c(output: Path, *arguments: str | Path) -> None:
    subprocess.run([*CC, *FLAGS, *arguments, "-o", output], check=True)


@cache
def library() -> tuple[Any, Any]:
    """(ffi, lib), with what the headers declare."""
    public = (RUNTIME / "include" / "mxdraft.h").read_text(encoding="utf-8")
    declarations = public[public.index("<cdef> */") + len("<cdef> */") : public.index("/* </cdef>")]
    for header in HEADERS:
        text = header.read_text(encoding="utf-8")
        declarations += re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("MXD_ROLE_BYTES", "16")
    ffi = cffi.FFI()
    ffi.cdef(declarations)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "libtext.so"
        compile_c(path, "-shared", "-fPIC", *SOURCES)
        return ffi, ffi.dlopen(str(path))  # stays mapped after the file is gone


@cache
def smollm2() -> tuple[TokenizerSpec, str]:
    """SmolLM2's tokenizer and chat template; skips the test if its weights are not in the cache."""
    if not WEIGHTS.exists():
        pytest.skip("SmolLM2 is not in the cache: run `mxdraft fetch smollm2-135m`")
    checkpoint = load_gguf(WEIGHTS)
    assert checkpoint.chat_template is not None
    return checkpoint.tokenizer, checkpoint.chat_template


class StatusError(Exception):
    """A status other than MXD_OK, with the runtime's message."""

    def __init__(self, status: int, error: Any) -> None:
        super().__init__(library()[0].string(error.message).decode("utf-8"))
        self.status = status
        assert error.status == status


def check(status: int, error: Any) -> None:
    if status:
        raise StatusError(status, error)


class Tokenizer:
    """A section as C sees it. Raises StatusError."""

    def __init__(self, section: bytes, vocab: int) -> None:
        ffi, lib = library()
        self.vocab = vocab
        self.struct, self._error = ffi.new("mxd_tokenizer *"), ffi.new("mxd_error *")
        self._section = ffi.new("uint32_t[]", len(section) // 4 + 1)  # aligned
        ffi.memmove(self._section, section, len(section))
        data = ffi.cast("uint8_t *", self._section)
        check(lib.mxd_tokenizer_init(self.struct, data, len(section), vocab, self._error), self._error)

    def encode(self, text: bytes, cap: int | None = None) -> list[int]:
        ffi, lib = library()
        cap = len(text) if cap is None else cap
        ids, n = ffi.new("uint32_t[]", cap), ffi.new("size_t *")
        check(lib.mxd_tokenizer_encode(self.struct, text, len(text), ids, cap, n, self._error), self._error)
        return list(ffi.unpack(ids, n[0]))

    def token_bytes(self, i: int) -> bytes:
        ffi, lib = library()
        n = ffi.new("size_t *")
        return bytes(ffi.buffer(lib.mxd_tokenizer_bytes(self.struct, i, n), n[0]))

    def decode(self, ids: list[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))


class Chat:
    """A section as C sees it. Raises StatusError."""

    def __init__(self, section: bytes, vocab: int) -> None:
        ffi, lib = library()
        self.struct, self._error = ffi.new("mxd_chat *"), ffi.new("mxd_error *")
        self._section = ffi.new("uint32_t[]", len(section) // 4 + 1)
        ffi.memmove(self._section, section, len(section))
        data = ffi.cast("uint8_t *", self._section)
        check(lib.mxd_chat_init(self.struct, data, len(section), vocab, self._error), self._error)

    def encode(
        self,
        tokenizer: Tokenizer,
        conversation: list[tuple[str, str]],
        generation: bool = False,
        cap: int = 4096,
    ) -> list[int]:
        ffi, lib = library()
        strings = [ffi.new("char[]", text.encode("utf-8")) for message in conversation for text in message]
        messages = ffi.new("mxd_message[]", list(zip(strings[::2], strings[1::2], strict=True)))
        ids, n = ffi.new("uint32_t[]", cap), ffi.new("size_t *")
        status = lib.mxd_chat_encode_messages(
            self.struct, tokenizer.struct, messages, len(conversation), generation, ids, cap, n, self._error
        )
        check(status, self._error)
        return list(ffi.unpack(ids, n[0]))


def assert_readers_agree(
    section: bytes,
    vocab: int,
    ours: Callable[[bytes, int], object],
    theirs: Callable[[bytes, int], object],
    rounds: int,
    head: int = 0,
) -> None:
    """Both readers take or refuse the same copies of ``section`` with one or two bits flipped; some are taken
    and some refused. With ``head``, three flips in ten fall into the first bytes."""
    rng = random.Random(4)
    verdicts = set()
    for _ in range(rounds):
        data = bytearray(section)
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(head if head and rng.random() > 0.7 else len(data))] ^= 1 << rng.randrange(8)
        verdict = _accepts(ours, StatusError, bytes(data), vocab)
        assert verdict == _accepts(theirs, BundleError, bytes(data), vocab)
        verdicts.add(verdict)
    assert verdicts == {True, False}


def _accepts(
    reader: Callable[[bytes, int], object], refusal: type[Exception], section: bytes, vocab: int
) -> bool:
    try:
        reader(section, vocab)
    except refusal:
        return False
    return True
