# SPDX-License-Identifier: Apache-2.0
"""The tokenizers mxdraft runs: byte-level BPE, and SentencePiece's BPE with byte fallback."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mxdraft.errors import RefusedError

PreTokenizer = Literal["gpt2", "smollm", "llama3", "qwen2", "spaces", "spaces-prefix", "spaces-first"]
SPACE_MARK = "▁"  # U+2581: how SentencePiece writes a space

_BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _split(digits: str) -> dict[str, Any]:
    """Llama 3's regular expression; ``digits`` says how many of them stay together."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            _BYTE_LEVEL | {"use_regex": False},
        ],
    }


# How tokenizer.json writes each pre-tokenizer of byte-level BPE: this table is both written and recognised.
PRE_TOKENIZERS: dict[PreTokenizer, dict[str, Any]] = {
    "gpt2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
    "llama3": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
_MARK_SPACES: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
_METASPACE: dict[str, Any] = {
    "type": "Metaspace",
    "replacement": SPACE_MARK,
    "prepend_scheme": "first",
    "split": False,
}
# Of SentencePiece's BPE: normalizer and pre-tokenizer. Text is one word; what differs is the space before it.
SPACE_MARKERS: dict[PreTokenizer, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "spaces": (_MARK_SPACES, None),
    "spaces-prefix": (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE_MARK}, _MARK_SPACES]},
        None,
    ),
    "spaces-first": (None, _METASPACE),
}
SPACE_DECODER: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def _byte_alphabet() -> str:
    # GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 onward in ascending order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b if b in printable else next(others)) for b in range(256))


# Character b is how byte b is written in a token of GPT-2's byte-level alphabet.
BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's, of a character without a token


@dataclass(frozen=True)
class TokenizerSpec:
    """A BPE tokenizer.

    ``tokens``: text of each id: in GPT-2's byte-level alphabet, or with ``▁`` for spaces where the
    pre-tokenizer marks them; control and added tokens are plain text;
    ``merges``: pairs in order of rank; ``special_ids``: control tokens, ascending; ``bos_id``: what
    ``adds_bos`` puts before a text; ``eos_ids``: tokens that end generation, ascending, among
    ``special_ids``; ``eos_token_id``: which of several a chat template calls ``eos_token``, None if that is
    not known; ``pre_tokenizer``: ``gpt2`` (GPT-2's regular expression), ``smollm`` (the same, after
    every digit has been split off), ``llama3`` or ``qwen2`` (Llama 3's, with up to three digits or one);
    ``spaces`` (SentencePiece's BPE: the text is one word), ``spaces-prefix`` (with a space before every
    stretch of text), ``spaces-first`` (before the first, unless it begins with one). ``added_ids``: tokens
    cut out of any text before everything else, ascending; ``whole_words``: a pre-token that is a token is
    not merged; ``nfc``: text is brought to Unicode's form C first. There is no unknown token: a byte that
    has no token is dropped, as Hugging Face and llama.cpp do.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    special_ids: list[int]
    bos_id: int | None
    eos_ids: list[int]
    pre_tokenizer: PreTokenizer
    eos_token_id: int | None = None
    added_ids: list[int] = field(default_factory=list)
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    @property
    def marks_spaces(self) -> bool:
        """Whether this is SentencePiece's BPE."""
        return self.pre_tokenizer in SPACE_MARKERS

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; of control tokens, the bytes of their names."""
        special, added = set(self.special_ids), set(self.added_ids)
        if self.marks_spaces:
            byte_of = {name: bytes([byte]) for byte, name in enumerate(BYTE_TOKENS)}
            return [
                token.encode("utf-8")
                if i in special
                else byte_of.get(token) or token.replace(SPACE_MARK, " ").encode("utf-8")
                for i, token in enumerate(self.tokens)
            ]
        return [
            token.encode("utf-8") if i in special or i in added else bytes(_BYTE_OF[c] for c in token)
            for i, token in enumerate(self.tokens)
        ]

    @property
    def eos_token(self) -> int | None:
        """The token that a chat template calls ``eos_token``; None if that is not known."""
        return self.eos_ids[0] if len(self.eos_ids) == 1 else self.eos_token_id

    def with_end(self, i: int, eos_token: int | None = None) -> TokenizerSpec:
        """The same with ``i`` among the end tokens; ``eos_token`` tells which of them is called that."""
        eos_ids = sorted({*self.eos_ids, i})
        known = self.eos_token if eos_token is None else eos_token
        return replace(self, eos_ids=eos_ids, eos_token_id=known if len(eos_ids) > 1 else None)


def check_tokenizer(spec: TokenizerSpec) -> None:
    """Raise RefusedError unless BPE over ``spec`` is well defined and can never make a control token."""
    count = len(spec.tokens)
    if len(set(spec.tokens)) != count:
        twice = Counter(spec.tokens).most_common(1)[0][0]
        raise RefusedError(f"tokenizer: token {twice!r} has two ids; every token must have one")
    ids = [*spec.special_ids, *spec.eos_ids, *(i for i in (spec.bos_id, spec.eos_token_id) if i is not None)]
    for i in ids:
        if not 0 <= i < count:
            raise RefusedError(f"tokenizer: special token id {i} is outside the vocabulary of {count} tokens")
    special = set(spec.special_ids)
    for i in spec.eos_ids:
        if i not in special:
            raise RefusedError(f"tokenizer: end-of-sequence token {i} {spec.tokens[i]!r} is no control token")
    if spec.adds_bos and spec.bos_id is None:
        raise RefusedError("tokenizer: a token is put before every text, but bos_token_id is missing")
    if both := special & set(spec.added_ids):
        raise RefusedError(f"tokenizer: token {min(both)} is both a control token and an added one")
    if spec.marks_spaces:
        _check_marked(spec, special)
    else:
        plain_text = special | set(spec.added_ids)
        for i, token in enumerate(spec.tokens):
            if i not in plain_text and not (token and all(c in _BYTE_OF for c in token)):
                raise RefusedError(
                    f"tokenizer: token {i} {token!r} is not written in the byte-level alphabet"
                )
        for i in spec.added_ids:
            if len(spec.tokens[i].encode("utf-8")) < 2:
                raise RefusedError(f"tokenizer: added token {i} {spec.tokens[i]!r} is a single byte")
        special = plain_text
    plain = {token for i, token in enumerate(spec.tokens) if i not in special}
    for rank, (left, right) in enumerate(spec.merges):
        for token in (left, right, left + right):
            if token not in plain:
                raise RefusedError(
                    f"tokenizer: merge {rank} {left!r} + {right!r}: {token!r} is no plain token"
                )
    if len(set(spec.merges)) != len(spec.merges):
        raise RefusedError("tokenizer: a merge is listed twice")


def _check_marked(spec: TokenizerSpec, special: set[int]) -> None:
    """Refuse unless every text has ids: a token for a space, and one for each byte."""
    plain = {token for i, token in enumerate(spec.tokens) if i not in special}
    for needed in (SPACE_MARK, *BYTE_TOKENS):
        if needed not in plain:
            raise RefusedError(f"tokenizer: the token {needed!r} is missing, so some texts have no ids")
    for token in spec.tokens:
        if " " in token:
            raise RefusedError(
                f"tokenizer: token {token!r} has a space, which should be written {SPACE_MARK}"
            )
    if spec.whole_words or spec.nfc:
        raise RefusedError("tokenizer: ignore_merges or NFC next to marked spaces is not supported")


def tokenizer_json(spec: TokenizerSpec) -> str:
    """The same tokenizer as the text of a Hugging Face ``tokenizer.json``.

    It is the reference of the tests: ``t = tokenizers.Tokenizer.from_str(...)``. With
    ``t.encode_special_tokens = True`` it does what mxdraft does with user text, which never becomes a
    control token.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = set(spec.special_ids)
    normalizer: dict[str, Any] | None = {"type": "NFC"} if spec.nfc else None
    if spec.marks_spaces:
        normalizer, pre_tokenizer = SPACE_MARKERS[spec.pre_tokenizer]
        decoder = SPACE_DECODER
    else:
        pre_tokenizer, decoder = PRE_TOKENIZERS[spec.pre_tokenizer], _BYTE_LEVEL
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": spec.tokens[i], **flags, "special": i in special}
            for i in sorted([*spec.special_ids, *spec.added_ids])
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _bos_first(spec) if spec.adds_bos else None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": spec.marks_spaces,
            "ignore_merges": spec.whole_words,
            "vocab": {token: i for i, token in enumerate(spec.tokens)},
            "merges": [list(pair) for pair in spec.merges],
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _bos_first(spec: TokenizerSpec) -> dict[str, Any]:
    """The post-processor that puts BOS before a text."""
    assert spec.bos_id is not None
    name = spec.tokens[spec.bos_id]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, *text],
        "pair": [
            {"SpecialToken": {"id": name, "type_id": 0}},
            *text,
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {name: {"id": name, "ids": [spec.bos_id], "tokens": [name]}},
    }
