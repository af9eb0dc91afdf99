# SPDX-License-Identifier: Apache-2.0
"""Ids in C equal Hugging Face ``tokenizers``; damaged sections are refused; UTF-8 is held back whole."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import random
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import textlib
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mxdraft.bundle.chat import chat_pieces, chat_section
from mxdraft.bundle.tokenizer import read_tokenizer, tokenizer_section
from mxdraft.checkpoint import BYTE_ALPHABET, PreTokenizer, TokenizerSpec, tokenizer_json
from mxdraft.checkpoint.huggingface import tokenizer_spec
from mxdraft.checkpoint.tokenizer import BYTE_TOKENS, SPACE_MARK
from mxdraft.errors import BundleError, RefusedError
from tokenizers import Tokenizer as HuggingFace

PRE_TOKENIZERS: list[PreTokenizer] = ["gpt2", "smollm", "llama3", "qwen2"]
MARKED: list[PreTokenizer] = ["spaces", "spaces-prefix", "spaces-first"]
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
FRAGMENTS = [
    *(
        " ",
        "  ",
        "   ",
        " " * 9,
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        " \n",
        "\n ",
        " \t ",
        *WHITE_SPACE,
    ),
    *(
        "'",
        "''",
        "'s",
        "'t",
        "'re",
        "'ve",
        "'m",
        "'ll",
        "'d",
        "'S",
        "'r",
        "’s",
        " 's",
        "don't",
        "they'll",
        "o'd",
    ),
    *(
        "0",
        "7",
        "42",
        "2024",
        "3.14",
        "1,000",
        " 12",
        "½",
        "Ⅷ",
        "٣",
        "٣٤",
        "²",
        "一",
        "\U00011de1",
        "\U00016ff4",
    ),
    *(
        "the",
        " the",
        "The",
        " boat",
        "clock",
        "ing",
        "é",
        "e\u0301",
        "ñandú",
        "Straße",
        "Ωμέγα",
        "привет",
        "שלום",
    ),
    *(
        "漢字",
        "かな",
        "한국어",
        "𠜎",
        "ไทย",
        "हिन्दी",
        "a\u0308\u0323",
        "\u0301",
        "\u200d",
        "\ufeff",
        "\ufe0f",
    ),
    *(
        "🙂",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "👍🏽",
        "🇩🇪",
        ".",
        ",",
        "...",
        "!?",
        "—",
        "“",
        "(",
        "){",
        "://",
        "==",
        "_",
        "__init__",
    ),
    *(
        "<|im_end|>",
        "<|im_start|>",
        "<|endoftext|>",
        "<|",
        "|>",
        "\x00",
        "\x01",
        "\x04",
        "\x1d",
        "\x7f",
        "\u00ad",
    ),
    *("\U00040000", "\U000e0041", "\U0010ffff", "\ufffd", "\ue000"),
    *(
        "'S",
        "'LL",
        "'Re",
        "'\u017f",
        "1234567",
        "  \r\n\n x",
        "\n\n\n\n",
        "<tool>",
        "</tool>",
        "<tool",
        "[x]",
        "\t\t\t",
    ),
    *(
        "▁",
        "▁▁",
        "▁▁▁ ",
        "<0x0A>",
        "\u0958",
        "q\u0323\u0307",
        "q\u0307\u0323",
        "\u1100\u1161\u11a8",
        "각\u11a8",
    ),
    *("\u212b", "\u0344", "\uf900", "\u0301\u0327\u0301", "\u0b47\u0300\u0b3e", "\u1112\u1175"),
]


def huggingface(spec: TokenizerSpec) -> HuggingFace:
    reference = HuggingFace.from_str(tokenizer_json(spec))
    reference.encode_special_tokens = True  # control-token text stays text
    return reference


def runtime(spec: TokenizerSpec) -> textlib.Tokenizer:
    return textlib.Tokenizer(tokenizer_section(spec), len(spec.tokens))


def bytes_spec(
    *merges: tuple[str, str], missing: str = "", pre_tokenizer: PreTokenizer = "gpt2"
) -> TokenizerSpec:
    """All bytes but those ``missing``, and ``merges``, which are written in the byte alphabet."""
    singles = [c for c in BYTE_ALPHABET if c not in missing]
    tokens = [*singles, *dict.fromkeys(a + b for a, b in merges)]
    return TokenizerSpec(tokens, list(merges), [], None, [], pre_tokenizer)


def generated_strings(count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 12))) for _ in range(count)]


def assert_same_ids(spec: TokenizerSpec, texts: list[str]) -> None:
    ours, reference = runtime(spec), huggingface(spec)
    covered = {token[0] for token in spec.token_bytes() if len(token) == 1}
    for text in texts:
        raw = text.encode("utf-8")
        ids = ours.encode(raw)
        assert ids == reference.encode(text).ids, repr(text)
        assert ours.decode(ids) == bytes(b for b in raw if b in covered), repr(text)


def with_everything(pre_tokenizer: PreTokenizer) -> TokenizerSpec:
    """A byte-level tokenizer with form C, whole words, added tokens and BOS."""
    spec = tiny.tokenizer(pre_tokenizer=pre_tokenizer)
    # No merge makes these.
    words = [w for w in ("Ġboats", "clockwork", "12345") if w not in spec.tokens]
    added = ["<tool>", "</tool>", "<tool", "\n\n\n"]
    count = len(spec.tokens) + len(words)
    return dataclasses.replace(
        spec,
        tokens=[*spec.tokens, *words, *added],
        added_ids=[*range(count, count + len(added))],
        whole_words=True,
        nfc=True,
        adds_bos=True,
    )


def marked_spec(pre_tokenizer: PreTokenizer) -> TokenizerSpec:
    """SentencePiece's kind: characters, byte tokens, merges learned over them, added tokens."""
    special, added = ["<unk>", "<s>", "</s>"], ["<tool>", "\n\n", "\n", "▁▁▁", "[x]"]
    text = tiny.CORPUS.replace(" ", SPACE_MARK) + SPACE_MARK * 4
    characters = sorted({*text, "é", "漢", "'"} - {"\n"})
    words = re.findall("▁*[^▁]*", text)
    pairs = [(w[:k], w[k:]) for w in words for k in range(1, min(len(w), 5))]
    merges: list[tuple[str, str]] = [(SPACE_MARK, SPACE_MARK), (SPACE_MARK * 2, SPACE_MARK)]
    known = {*characters, *(a + b for a, b in merges)}
    for _ in range(3):
        for a, b in pairs:
            if a in known and b[:1] in known and (a, b[:1]) not in merges:
                merges.append((a, b[:1]))
                known.add(a + b[:1])
    tokens = list(dict.fromkeys([*special, *added, *BYTE_TOKENS, *characters, *(a + b for a, b in merges)]))
    ids = {token: i for i, token in enumerate(tokens)}
    return TokenizerSpec(
        tokens, merges, [0, 1, 2], 1, [2], pre_tokenizer, None, [ids[t] for t in added], adds_bos=True
    )


# ---- ids ----


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_ten_thousand_strings_on_the_fixture(pre_tokenizer: PreTokenizer) -> None:
    assert_same_ids(tiny.tokenizer(pre_tokenizer=pre_tokenizer), [tiny.CORPUS, *generated_strings(10_000)])


def test_ten_thousand_strings_on_smollm2() -> None:
    spec, _ = textlib.smollm2()
    assert_same_ids(spec, [tiny.CORPUS, *generated_strings(10_000)])
    assert read_tokenizer(tokenizer_section(spec), len(spec.tokens)) == spec


@pytest.mark.parametrize("pre_tokenizer", [*PRE_TOKENIZERS, *MARKED])
def test_ten_thousand_strings_with_everything(pre_tokenizer: PreTokenizer) -> None:
    marked = pre_tokenizer in MARKED
    spec = marked_spec(pre_tokenizer) if marked else with_everything(pre_tokenizer)
    section = tokenizer_section(spec)
    assert read_tokenizer(section, len(spec.tokens)) == spec
    ours, reference = textlib.Tokenizer(section, len(spec.tokens)), huggingface(spec)
    used: set[int] = set()
    for text in ["", " ", "Ġboats", "clockwork 12345 boats", tiny.CORPUS, *generated_strings(10_000)]:
        raw = text.encode("utf-8")
        ids = ours.encode(raw, cap=3 * len(raw) + 2)
        assert ids == reference.encode(text).ids, repr(text)
        used |= {*ids}
    assert used >= {*spec.added_ids}
    textlib.assert_readers_agree(section, len(spec.tokens), textlib.Tokenizer, read_tokenizer, 1500, 64)


def test_normalizing_marks_takes_no_quadratic_time() -> None:
    spec = dataclasses.replace(tiny.tokenizer(), nfc=True)
    assert_same_nfc(spec, "a" + "\u0301\u0327" * 100_000)
    for c in range(0x300, 0x3400):
        assert_same_nfc(spec, f"a{chr(c)}\u0345\u0334{chr(c)}\u0301{chr(c)}e\u0301")


def assert_same_nfc(spec: TokenizerSpec, text: str) -> None:
    ours, reference = nfc_pair(spec.pre_tokenizer)
    raw = text.encode("utf-8")
    assert ours.decode(ours.encode(raw, cap=3 * len(raw))) == bytes(
        b for b in reference.normalizer.normalize_str(text).encode("utf-8")
    ), repr(text)


@cache
def nfc_pair(pre_tokenizer: PreTokenizer) -> tuple[textlib.Tokenizer, HuggingFace]:
    spec = dataclasses.replace(tiny.tokenizer(pre_tokenizer=pre_tokenizer), nfc=True)
    return runtime(spec), huggingface(spec)


REAL = ["qwen3", "qwen2_5", "llama3_2", "llama2", "gemma3"]


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str) -> None:
    """Files that tests/fetch_tokenizers.sh fetched; their licences keep them out of the repository."""
    path = textlib.WEIGHTS.parent / "tokenizers" / f"{name}.json"
    if not path.exists():
        pytest.skip("run tests/fetch_tokenizers.sh")
    document = path.read_text(encoding="utf-8")
    spec = tokenizer_spec(json.loads(document))
    ours, reference = runtime(spec), HuggingFace.from_str(document)
    reference.encode_special_tokens = True
    for text in generated_strings(10_000):
        raw = text.encode("utf-8")
        assert ours.encode(raw, cap=3 * len(raw) + 2) == reference.encode(text).ids, repr(text)


@cache
def fixture_pair(pre_tokenizer: PreTokenizer) -> tuple[textlib.Tokenizer, HuggingFace]:
    spec = tiny.tokenizer(pre_tokenizer=pre_tokenizer)
    return runtime(spec), huggingface(spec)


@settings(deadline=None)
@given(text=st.text(), pre_tokenizer=st.sampled_from(PRE_TOKENIZERS))
def test_any_text(text: str, pre_tokenizer: PreTokenizer) -> None:
    ours, reference = fixture_pair(pre_tokenizer)
    assert ours.encode(text.encode("utf-8")) == reference.encode(text).ids


def test_merges_go_by_rank_then_from_the_left() -> None:
    spec = bytes_spec(("b", "c"), ("a", "b"), ("a", "a"), ("aa", "aa"), ("ab", "ab"), ("d", "bc"))
    rng = random.Random(1)
    assert_same_ids(spec, ["".join(rng.choices("abcd", k=rng.randint(1, 40))) for _ in range(2000)])


def test_one_long_pre_token_costs_no_quadratic_time() -> None:
    letters = bytes_spec(("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("b", "a"))
    rng = random.Random(2)
    assert_same_ids(letters, ["a" * 1_000_003, "".join(rng.choices("aab", k=100_000))])


def test_bytes_without_a_token_are_dropped_before_the_merges() -> None:
    spec = bytes_spec(("!", "?"), missing=BYTE_ALPHABET[4] + BYTE_ALPHABET[0xF1])
    assert_same_ids(spec, ["!\x04?", "\x04", "!\U00040000?\x04\x04!?"])
    ours = runtime(spec)
    assert ours.decode(ours.encode(b"!\x04?")) == b"!?"
    assert len(ours.encode(b"!\x04?")) == 1


def test_control_token_text_is_plain_text() -> None:
    ours, _ = fixture_pair("smollm")
    ids = ours.encode(b"<|im_start|>system\n<|im_end|>")
    assert min(ids) >= len(tiny.SPECIAL_TOKENS)
    assert ours.decode(ids) == b"<|im_start|>system\n<|im_end|>"


def test_invalid_utf8_is_bytes_of_class_other() -> None:
    high = BYTE_ALPHABET[0xFF]
    spec = bytes_spec(("!", high), ("a", high), (BYTE_ALPHABET[0xE6], BYTE_ALPHABET[0xBC]))
    ours = runtime(spec)
    id_of = {token: i for i, token in enumerate(spec.tokens)}
    assert ours.encode(b"!\xff") == [id_of["!" + high]]  # one run of class OTHER
    assert ours.encode(b"a\xff") == [id_of["a"], id_of[high]]  # a letter ends before it
    assert ours.encode(b"\xe6\xbc") == [id_of[BYTE_ALPHABET[0xE6] + BYTE_ALPHABET[0xBC]]]
    for raw in (b"caf\xe9 1", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80"):
        assert ours.encode(raw) == [id_of[BYTE_ALPHABET[b]] for b in raw]


@settings(deadline=None)
@given(raw=st.binary(), pre_tokenizer=st.sampled_from(PRE_TOKENIZERS))
def test_any_bytes_come_back(raw: bytes, pre_tokenizer: PreTokenizer) -> None:
    ours, _ = fixture_pair(pre_tokenizer)
    assert ours.decode(ours.encode(raw)) == raw


def test_a_small_buffer_gets_the_size_needed() -> None:
    ffi, lib = textlib.library()
    ours, _ = fixture_pair("smollm")
    text = b"Nobody on the quay"
    ids = ours.encode(text)
    out, n = ffi.new("uint32_t[]", [77] * len(ids)), ffi.new("size_t *")
    for cap in range(len(ids)):
        status = lib.mxd_tokenizer_encode(ours.struct, text, len(text), out, cap, n, ffi.NULL)
        assert (status, n[0]) == (textlib.ERR_BUFFER, len(ids))
        assert list(out) == ids[:cap] + [77] * (len(ids) - cap)
    assert lib.mxd_tokenizer_encode(ours.struct, b"", 0, ffi.NULL, 0, n, ffi.NULL) == 0
    assert n[0] == 0


def test_questions_about_tokens() -> None:
    ffi, lib = textlib.library()
    spec = dataclasses.replace(tiny.tokenizer(), eos_ids=[2], bos_id=1)
    ours, n = runtime(spec), ffi.new("size_t *")
    count = len(spec.tokens)
    assert [ours.token_bytes(i) for i in range(count)] == spec.token_bytes()
    assert lib.mxd_tokenizer_bytes(ours.struct, count, n) == ffi.NULL
    ids = range(count + 1)
    assert [i for i in ids if lib.mxd_tokenizer_is_special(ours.struct, i)] == [0, 1, 2]
    assert [i for i in ids if lib.mxd_tokenizer_is_eos(ours.struct, i)] == [2]
    assert ours.struct.bos == 1
    without = runtime(dataclasses.replace(spec, bos_id=None))
    assert without.struct.bos == textlib.NO_TOKEN


# ---- Unicode classes ----


def class_runs() -> list[tuple[int, int]]:
    """(first code point, class) of each run in the committed header."""
    header = (textlib.RUNTIME / "src" / "unicode_classes.h").read_text(encoding="utf-8")
    bits = int(re.findall(r"UNICODE_CLASS_BITS = (\d+)", header)[0])
    entries = [int(entry, 16) for entry in re.findall(r"0x([0-9A-F]{6}),", header)]
    return [(entry >> bits, entry & ((1 << bits) - 1)) for entry in entries]


def generator() -> ModuleType:
    path = textlib.RUNTIME / "tools" / "make_unicode_classes.py"
    spec = importlib.util.spec_from_file_location("make_unicode_classes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def edges() -> list[int]:
    """First, last and an inner code point of every run."""
    starts = [first for first, _ in class_runs()]
    ends = [*(first - 1 for first in starts[1:]), 0x10FFFF]
    points = {*starts, *ends, *((a + b) // 2 for a, b in zip(starts, ends, strict=True))}
    return sorted(c for c in points if not 0xD800 <= c < 0xE000)


def test_header_has_the_classes_of_the_installed_library() -> None:
    points = edges() + sorted(random.Random(3).sample(range(0xE000, 0x110000), 20_000))
    runs = class_runs()
    values: list[int] = []
    run = 0
    for point in sorted(points):
        while run + 1 < len(runs) and runs[run + 1][0] <= point:
            run += 1
        values.append(runs[run][1])
    assert values == generator().classify(sorted(points)), "run runtime/tools/make_unicode_classes.py again"


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_every_run_of_classes_splits_text_alike(pre_tokenizer: PreTokenizer) -> None:
    alphabet_merges = [("a", c) for c in BYTE_ALPHABET] + [("1", c) for c in BYTE_ALPHABET]
    alphabet_merges += [("!", c) for c in BYTE_ALPHABET] + [(BYTE_ALPHABET[32], c) for c in BYTE_ALPHABET]
    spec = bytes_spec(*alphabet_merges, pre_tokenizer=pre_tokenizer)
    assert_same_ids(spec, [f"a{chr(c)}1{chr(c)}!{chr(c)}\n{chr(c)} {chr(c)}" for c in edges()])


# ---- UTF-8 ----


@example(raw=b"\xc1\xbf")
@example(raw=b"\xe0\x9f\xbf")
@example(raw=b"\xed\xa0\x80")
@example(raw=b"\xf0\x8f\xbf\xbf")
@example(raw=b"\xf4\x90\x80\x80")
@example(raw=b"\xf5\x80\x80\x80")
@given(raw=st.binary(max_size=8) | st.text().map(lambda text: text.encode("utf-8")))
def test_utf8_decode_takes_what_python_takes(raw: bytes) -> None:
    ffi, lib = textlib.library()
    code_point = ffi.new("uint32_t *", 77)
    expected = (0, 77)
    for length in range(1, min(4, len(raw)) + 1):
        try:
            expected = (length, ord(raw[:length].decode("utf-8")))
            break
        except UnicodeDecodeError:
            continue
    assert (lib.mxd_utf8_decode(raw, len(raw), code_point), code_point[0]) == expected


STREAMS = (
    st.binary()
    | st.text().map(lambda text: text.encode("utf-8"))
    | st.lists(
        st.sampled_from(
            [b"a", "🙂".encode(), "漢".encode(), b"\xe6", b"\xff", b"\xf0\x9f", b"\xed\xa0", b"\xc0"]
        )
    ).map(b"".join)
)


def begins_a_character(raw: bytes) -> bool:
    """Whether ``raw`` is an incomplete character that further bytes can complete."""
    for count in (1, 2, 3):
        for tail in itertools.product((0x80, 0x90, 0xA0), repeat=count):
            with contextlib.suppress(UnicodeDecodeError):
                if len((raw + bytes(tail)).decode("utf-8")) == 1:
                    return True
    return False


@example(raw=b"\xe0\x9f")
@example(raw=b"\xed\xa0")
@example(raw=b"\xf0\x8f")
@example(raw=b"\xf4\x90")
@example(raw=b"\xf5")
@given(raw=STREAMS)
def test_utf8_incomplete_is_what_may_still_become_a_character(raw: bytes) -> None:
    expected = next((n for n in (3, 2, 1) if n <= len(raw) and begins_a_character(raw[-n:])), 0)
    assert textlib.library()[1].mxd_utf8_incomplete(raw, len(raw)) == expected


@given(text=st.text(), data=st.data())
def test_a_stream_that_holds_back_writes_whole_characters(text: str, data: st.DataObject) -> None:
    raw, held, written = text.encode("utf-8"), b"", b""
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        held, raw = held + raw[:cut], raw[cut:]
        ready = len(held) - textlib.library()[1].mxd_utf8_incomplete(held, len(held))
        held[:ready].decode("utf-8")
        written, held = written + held[:ready], held[ready:]
    assert (written, held) == (text.encode("utf-8"), b"")


# ---- sections ----

SPEC = tiny.tokenizer()
SECTION = tokenizer_section(SPEC)
VOCAB, MERGES = len(SPEC.tokens), len(SPEC.merges)
# Where each array begins, in words.
BYTE_TOKEN = 16
EOS = BYTE_TOKEN + 256
SPECIAL = EOS + 2
TEXT_START = SPECIAL + 3
MERGE = TEXT_START + VOCAB + 1
BY_PAIR = MERGE + 3 * MERGES


def word(index: int) -> int:
    return int(struct.unpack_from("<I", SECTION, 4 * index)[0])


def with_words(changes: dict[int, int]) -> bytes:
    data = bytearray(SECTION)
    for index, value in changes.items():
        struct.pack_into("<I", data, 4 * index, value)
    return bytes(data)


def lies() -> dict[str, bytes]:
    last = BY_PAIR + MERGES  # after the last word
    text = 4 * last
    return {
        "empty": b"",
        "header cut short": SECTION[:63],
        "cut short": SECTION[:-1],
        "a byte too many": SECTION + b"\0",
        "other vocabulary": with_words({0: VOCAB - 1}),
        "no vocabulary": with_words({0: 0}),
        "one merge fewer": with_words({1: MERGES - 1}),
        "huge merge count": with_words({1: 0xFFFFFFFF}),
        "unknown pre-tokenizer 0": with_words({2: 0}),
        "unknown pre-tokenizer 8": with_words({2: 8}),
        "byte of marked spaces without a token": with_words({2: 5}),
        "bos outside": with_words({3: VOCAB}),
        "end token count": with_words({4: 0xFFFFFFFF}),
        "control token count": with_words({5: 0x40000000}),
        "text length": with_words({6: word(6) + 1}),
        **{f"reserved {i}": with_words({i: 1}) for i in range(10, 16)},
        "unknown flag": with_words({7: 8}),
        "added tokens that are not there": with_words({8: 1}),
        "tokens by text that are not there": with_words({9: 1}),
        "byte token outside": with_words({BYTE_TOKEN + 65: VOCAB}),
        "byte token of another byte": with_words({BYTE_TOKEN + 65: word(BYTE_TOKEN + 66)}),
        "byte token of two bytes": with_words({BYTE_TOKEN + 65: word(MERGE + 2)}),
        "byte token that is control": with_words({BYTE_TOKEN + 65: 0}),
        "byte token denied": with_words({BYTE_TOKEN + 65: textlib.NO_TOKEN}),
        "end token outside": with_words({EOS + 1: VOCAB}),
        "end tokens not ascending": with_words({EOS: 2, EOS + 1: 0}),
        "end token twice": with_words({EOS: 2}),
        "end token not control": with_words({EOS + 1: 3}),
        "control token outside": with_words({SPECIAL + 2: VOCAB}),
        "control tokens not ascending": with_words({SPECIAL: 1, SPECIAL + 1: 0}),
        "control token that a merge makes": with_words({SPECIAL + 1: 2, SPECIAL + 2: VOCAB - 1}),
        "control token that is a byte": with_words({SPECIAL + 1: 2, SPECIAL + 2: 3}),
        "first token not at 0": with_words({TEXT_START: 1}),
        "tokens out of order": with_words({TEXT_START + 1: word(TEXT_START + 3)}),
        "empty token": with_words({TEXT_START + 1: 0}),
        "token outside the text": with_words({TEXT_START + 5: 0xFFFFFFFF}),
        "last token cut short": with_words({TEXT_START + VOCAB: word(6) - 1}),
        "merge of an unknown token": with_words({MERGE: VOCAB}),
        "merge with an unknown token": with_words({MERGE + 1: VOCAB}),
        "merge to an unknown token": with_words({MERGE + 2: VOCAB}),
        "merge of a control token": with_words({MERGE: 1}),
        "merge to another token": with_words({MERGE + 2: word(MERGE + 5)}),
        "merge to one of its parts": with_words({MERGE + 2: word(MERGE)}),
        "order outside": with_words({BY_PAIR: MERGES}),
        "order swapped": with_words({BY_PAIR: word(BY_PAIR + 1), BY_PAIR + 1: word(BY_PAIR)}),
        "order repeats": with_words({BY_PAIR + 1: word(BY_PAIR)}),
        "merge twice": with_words({MERGE + i: word(MERGE + 3 + i) for i in range(3)}),
        "token text altered": SECTION[:-1] + bytes([SECTION[-1] ^ 1]),
        "byte text altered": SECTION[: text + word(TEXT_START + 3)]
        + b"\x7f"
        + SECTION[text + word(TEXT_START + 3) + 1 :],
    }


@pytest.mark.parametrize("name", lies())
def test_both_readers_refuse_a_lie(name: str) -> None:
    section = lies()[name]
    assert section != SECTION
    with pytest.raises(textlib.StatusError, match="tokenizer: ") as refused:
        textlib.Tokenizer(section, VOCAB)
    assert refused.value.status == textlib.BAD_TOKENIZER
    with pytest.raises(BundleError, match="tokenizer: ") as error:
        read_tokenizer(section, VOCAB)
    assert error.value.verdict == "TOKENIZER"


def test_a_token_of_1025_bytes_is_refused() -> None:
    spec = dataclasses.replace(SPEC, tokens=["x" * 1025, *SPEC.tokens[1:]])
    with pytest.raises(RefusedError, match="1025 bytes"):
        tokenizer_section(spec)
    # The writer's limit is the readers': one more byte in the first token, everything else moved along.
    longest = tokenizer_section(dataclasses.replace(SPEC, tokens=["x" * 1024, *SPEC.tokens[1:]]))
    textlib.Tokenizer(longest, VOCAB)
    data = bytearray(longest)
    for index in [6, *range(TEXT_START + 1, TEXT_START + VOCAB + 1)]:
        struct.pack_into("<I", data, 4 * index, struct.unpack_from("<I", data, 4 * index)[0] + 1)
    text = 4 * (BY_PAIR + MERGES)
    section = bytes(data[:text]) + b"x" + bytes(data[text:])
    with pytest.raises(textlib.StatusError, match="offsets"):
        textlib.Tokenizer(section, VOCAB)
    with pytest.raises(BundleError, match="offsets"):
        read_tokenizer(section, VOCAB)


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
def test_a_section_reads_back(pre_tokenizer: PreTokenizer) -> None:
    for spec in (tiny.tokenizer(pre_tokenizer=pre_tokenizer), bytes_spec(), bytes_spec(missing="abc")):
        assert read_tokenizer(tokenizer_section(spec), len(spec.tokens)) == spec


def test_worked_example_of_the_format_page() -> None:
    spec = TokenizerSpec(["<s>", "a", "b", "ab", "abb"], [("a", "b"), ("ab", "b")], [0], None, [0], "gpt2")
    none = textlib.NO_TOKEN
    words = [5, 2, 1, none, 1, 1, 10, *[0] * 9]
    words += [{0x61: 1, 0x62: 2}.get(byte, none) for byte in range(256)]
    words += [0, 0, 0, 3, 4, 5, 7, 10, 1, 2, 3, 3, 2, 4, 0, 1]
    section = struct.pack(f"<{len(words)}I", *words) + b"<s>abababb"
    assert len(section) == 1162
    assert tokenizer_section(spec) == section
    assert textlib.Tokenizer(section, 5).encode(b"abb ba") == [4, 2, 1]


def test_readers_agree_on_random_damage() -> None:
    textlib.assert_readers_agree(SECTION, VOCAB, textlib.Tokenizer, read_tokenizer, rounds=400, head=64)


def test_damaged_sections_under_sanitizers(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    try:
        textlib.compile_c(
            driver, *sanitizers, Path(__file__).parent / "c" / "text_sections.c", *textlib.SOURCES
        )
    except subprocess.CalledProcessError:
        pytest.skip(f"{textlib.CC} has no sanitizers")
    (tmp_path / "tokenizer").write_bytes(SECTION)
    (tmp_path / "chat").write_bytes(chat_section(chat_pieces(tiny.CHAT_TEMPLATE, SPEC)))
    command = [str(driver), str(tmp_path / "tokenizer"), str(tmp_path / "chat"), str(VOCAB), "20000"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    tokenizers, chats = map(int, done.stdout.split())
    assert 20000 > tokenizers > chats > 0
