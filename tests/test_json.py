# SPDX-License-Identifier: Apache-2.0
"""The runtime's JSON parser and writer agree with Python's json, but for what json.h refuses."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import cffi
import pytest
from clib import RUNTIME, compile_c, declarations, native
from hypothesis import given, settings
from hypothesis import strategies as st

DEPTH = 64

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    ffi = cffi.FFI()
    ffi.cdef(declarations("src/json.h"))
    files = [RUNTIME / "src" / name for name in ("json.c", "json_write.c", "utf8.c", "status.c")]
    library = tmp_path_factory.mktemp("json") / "libjson.so"
    compile_c(native("gnu.2.28"), library, "-fvisibility=default", "-shared", "-fPIC", *files, "-lm")
    return ffi, ffi.dlopen(str(library))


def parse(c: tuple[Any, Any], text: bytes) -> Any:
    """What the runtime reads; ValueError if it refuses."""
    ffi, lib = c
    doc, error = ffi.new("mxd_json *"), ffi.new("mxd_error *")
    if lib.mxd_json_parse(ffi.from_buffer(text), len(text), doc, error):
        assert doc.nodes == ffi.NULL
        message = ffi.string(error.message).decode("utf-8")
        assert "at byte" in message or "bytes" in message
        raise ValueError(message)
    try:
        return value_of(c, doc, 0)
    finally:
        lib.mxd_json_free(doc)


def value_of(c: tuple[Any, Any], doc: Any, node: int) -> Any:
    ffi, lib = c
    kind = doc.nodes[node].type
    if kind == lib.MXD_JSON_NUMBER:
        return number_of(c, doc, node)
    if kind == lib.MXD_JSON_STRING:
        length = ffi.new("size_t *")
        data = lib.mxd_json_text(doc, node, length)
        return bytes(ffi.buffer(data, length[0])).decode("utf-8")
    if kind in (lib.MXD_JSON_ARRAY, lib.MXD_JSON_OBJECT):
        items, at = [], lib.mxd_json_first(doc, node)
        while at:
            items.append(at)
            at = lib.mxd_json_next(doc, node, at)
        assert len(items) == doc.nodes[node].len
        if kind == lib.MXD_JSON_ARRAY:
            return [value_of(c, doc, item) for item in items]
        return {value_of(c, doc, item): value_of(c, doc, item + 1) for item in items}
    return {lib.MXD_JSON_NULL: None, lib.MXD_JSON_FALSE: False, lib.MXD_JSON_TRUE: True}[kind]


def number_of(c: tuple[Any, Any], doc: Any, node: int) -> int | float:
    """The number by both accessors, which must agree with its text."""
    ffi, lib = c
    text = ffi.string(lib.mxd_json_text(doc, node, ffi.NULL)).decode("ascii")
    real, whole = ffi.new("double *"), ffi.new("int64_t *")
    value = json.loads(text)
    finite = abs(value) < 10**308 if isinstance(value, int) else math.isfinite(value)
    assert lib.mxd_json_double(doc, node, real) == finite, text
    if finite:
        assert real[0] == float(value), text
    if isinstance(value, int):
        assert lib.mxd_json_integer(doc, node, whole) == (-(2**63) <= value < 2**63), text
    else:
        assert lib.mxd_json_integer(doc, node, whole) == (value.is_integer() and abs(value) <= 2**53), text
    if lib.mxd_json_integer(doc, node, whole):
        assert whole[0] == value, text
    return value


def expected(text: bytes) -> Any:
    """What Python reads, with what json.h refuses beyond that; ValueError if it is refused."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    value = json.loads(text.decode("utf-8"), parse_constant=refuse)
    check(value, 0)
    return value


def check(value: Any, depth: int) -> None:
    if isinstance(value, str):
        value.encode("utf-8")  # raises for half a surrogate pair
    if isinstance(value, list | dict):
        if depth == DEPTH:
            raise ValueError("too deep")
        for item in value:
            check(item, depth + 1)
            if isinstance(value, dict):
                check(value[item], depth + 1)


def same(c: tuple[Any, Any], text: bytes) -> bool:
    """Compare the two; return whether they take the text."""
    try:
        value = expected(text)
    except (ValueError, RecursionError):
        with pytest.raises(ValueError, match="JSON"):
            parse(c, text)
        return False
    assert repr(parse(c, text)) == repr(value)
    return True


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 3]))
@settings(max_examples=150, deadline=None)
def test_values_are_read_as_python_reads_them(
    c: tuple[Any, Any], value: Any, ascii_only: bool, indent: int | None
) -> None:
    assert same(c, json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b" ",
            b"nul",
            b"nullx",
            b"NaN",
            b"-",
            b"-x",
            b"01",
            b"-01",
            b"1.",
            b".5",
            b"1e",
            b"1e+",
            b"+1",
            b"0x1",
        ),
        *(
            b"[",
            b"[1",
            b"[1,",
            b"[1,]",
            b"[,1]",
            b"[1 2]",
            b"{",
            b"{1:2}",
            b'{"a"}',
            b'{"a":}',
            b'{"a":1,}',
            b"{,}",
        ),
        *(
            b'"',
            b'"\\"',
            b'"\\x"',
            b'"\\u12"',
            b'"\\u12g4"',
            b'"\\u12G4"',
            b'"\\u12@4"',
            b'"\n"',
            b'"\x00"',
            b'"\x1f"',
            b'"\xff"',
            b'"\xc0\x80"',
            b"[1]]",
        ),
        *(
            b'"\\ud800"',
            b'"\\udc00"',
            b'"\\udc00\\udc00"',
            b'"\\ud800\\u0041"',
            b'"\\ud800\\ud800"',
            b'"\xed\xa0\x80"',
            b'"\xf5\x80\x80\x80"',
        ),
        *(
            b"\xef\xbb\xbf1",
            b"1 1",
            b"'a'",
            b"[1]//",
            b"\x0b1",
            b"1\x00",
            b'{"a":1 "b":2}',
            b"[" * 65 + b"]" * 65,
        ),
    ],
)
def test_is_refused(c: tuple[Any, Any], text: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        parse(c, text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"0",
            b"-0",
            b"-0.0",
            b"1e999",
            b"-1E+5",
            b"9223372036854775807",
            b"9223372036854775808",
            b"2.0",
            b"1e3",
        ),
        *(
            b"-9223372036854775808",
            b"-9223372036854775809",
            b"9007199254740993",
            b"1e-400",
            b"0.1e1",
            b"9" * 400,
        ),
        *(b"\t\n\r [ ]\n", b"{}", b' {"a" : [1 , 2 ] } ', b'{"a":1,"a":2}', b'"\\ud83d\\ude00\\u0000\\/"'),
        *(b"[" * 64 + b"]" * 64, b'{"":{"":{}}}', b'",:[{"', b'["\\"",",",":",{"[":"{"}]'),
    ],
)
def test_is_taken(c: tuple[Any, Any], text: bytes) -> None:
    assert same(c, text)


def test_the_last_of_two_members_with_one_name_counts(c: tuple[Any, Any]) -> None:
    ffi, lib = c
    text = b'{"a": 1, "b": 2, "a": 3}'
    doc = ffi.new("mxd_json *")
    assert not lib.mxd_json_parse(ffi.from_buffer(text), len(text), doc, ffi.NULL)
    assert number_of(c, doc, lib.mxd_json_get(doc, 0, b"a")) == 3
    assert number_of(c, doc, lib.mxd_json_get(doc, 0, b"b")) == 2
    assert lib.mxd_json_get(doc, 0, b"c") == 0
    lib.mxd_json_free(doc)


def test_mutated_texts_get_the_same_verdict(c: tuple[Any, Any]) -> None:
    pieces = [
        *(
            b"[",
            b"]",
            b"{",
            b"}",
            b",",
            b":",
            b'"',
            b"\\",
            b"\\u",
            b"d800",
            b"dc00",
            b"0",
            b"-",
            b".",
            b"e",
            b"12",
        ),
        *(b"true", b"null", b" ", b"\n", b"\xc3\xa9", b"\xff", b'"a"', b'"a":', b"\x00"),
    ]
    seeds = [b'{"a":[1,-2.5e3,null,true],"b":"x\\n\\ud83d\\ude00"}', b"[[],{},0]", b'"\xe2\x82\xac"', b""]
    verdicts = [0, 0]
    for seed in range(5000):
        rng = random.Random(seed)
        text = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.choice((0, 0, 1, 2))] = rng.choice(pieces)
        verdicts[same(c, bytes(text))] += 1
    assert min(verdicts) > 0


def write(c: tuple[Any, Any], value: Any, limit: int = 1 << 20) -> bytes | None:
    """The text that the runtime writes; None if it fails."""
    ffi, lib = c
    w = ffi.new("mxd_json_writer *")
    lib.mxd_json_writer_init(w, limit)

    def put(item: Any) -> None:
        if item is None:
            lib.mxd_json_put_null(w)
        elif isinstance(item, bool):
            lib.mxd_json_put_bool(w, item)
        elif isinstance(item, int):
            lib.mxd_json_put_integer(w, item)
        elif isinstance(item, float):
            lib.mxd_json_put_double(w, item)
        elif isinstance(item, str | bytes):
            data = item.encode("utf-8") if isinstance(item, str) else item
            lib.mxd_json_put_string(w, data, len(data))
        else:
            brackets = b"{}" if isinstance(item, dict) else b"[]"
            lib.mxd_json_open(w, brackets[:1])
            for inner in item:
                if isinstance(item, dict):
                    lib.mxd_json_name(w, inner.encode("utf-8"))
                put(item[inner] if isinstance(item, dict) else inner)
            lib.mxd_json_close(w, brackets[1:])

    put(value)
    text = bytes(ffi.buffer(w.data, w.len)) if w.len else b""
    assert w.len <= limit
    failed = bool(w.failed)
    lib.mxd_json_writer_free(w)
    return None if failed else text


small = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), inner)
    ),
    max_leaves=30,
)


@given(value=small, limit=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_what_is_written_reads_back_the_same(c: tuple[Any, Any], value: Any, limit: int) -> None:
    text = write(c, value)
    assert text is not None
    assert json.loads(text) == value
    short = write(c, value, limit)
    assert short == (text if len(text) <= limit else None)


def test_writer_escapes_and_mends(c: tuple[Any, Any]) -> None:
    assert write(c, '"\\\b\f\n\r\t\x00\x1f/\x7f€') == '"\\"\\\\\\b\\f\\n\\r\\t\\u0000\\u001f/\x7f€"'.encode()
    assert write(c, [b"a\xffb\xe2\x82", float("nan"), float("inf"), 0.1, 5e-324]) == (
        '["a\ufffdb\ufffd\ufffd",null,null,0.1,4.94065645841247e-324]'.encode()
    )
