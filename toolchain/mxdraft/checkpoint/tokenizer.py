# SPDX-License-Identifier: Apache-2.0
"""The tokenizers mxdraft runs: byte-level BPE after one of two pre-tokenizers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from mxdraft.errors import RefusedError

PreTokenizer = Literal["gpt2", "smollm"]

_BYTE_LEVEL: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
# How tokenizer.json writes each pre-tokenizer: this table is both written and recognised.
PRE_TOKENIZERS: dict[PreTokenizer, dict[str, Any]] = {
    "gpt2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


def _byte_alphabet() -> str:
    # GPT-2: printable Latin-1 bytes stand for themselves, the others for U+0100 onward in ascending order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b if b in printable else next(others)) for b in range(256))


# Character b is how byte b is written in a token of GPT-2's byte-level alphabet.
BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE tokenizer.

    ``tokens``: text of each id, in GPT-2's byte-level alphabet, except that control tokens are plain text;
    ``merges``: pairs in order of rank; ``special_ids``: control tokens, ascending; ``bos_id``: only
    declared, never added to plain text; ``eos_ids``: tokens that end generation, ascending, among
    ``special_ids``; ``eos_token_id``: which of several a chat template calls ``eos_token``, None if that is
    not known; ``pre_tokenizer``: ``gpt2`` (GPT-2's regular expression) or ``smollm`` (the same, after
    every digit has been split off). There is no unknown token: a byte that has no token is dropped, as
    Hugging Face and llama.cpp do.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    special_ids: list[int]
    bos_id: int | None
    eos_ids: list[int]
    pre_tokenizer: PreTokenizer
    eos_token_id: int | None = None

    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; of control tokens, the bytes of their names."""
        special = set(self.special_ids)
        return [
            token.encode("utf-8") if i in special else bytes(_BYTE_OF[c] for c in token)
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
    for i, token in enumerate(spec.tokens):
        if i not in special and not (token and all(c in _BYTE_OF for c in token)):
            raise RefusedError(f"tokenizer: token {i} {token!r} is not written in the byte-level alphabet")
    plain = {token for i, token in enumerate(spec.tokens) if i not in special}
    for rank, (left, right) in enumerate(spec.merges):
        for token in (left, right, left + right):
            if token not in plain:
                raise RefusedError(
                    f"tokenizer: merge {rank} {left!r} + {right!r}: {token!r} is no plain token"
                )
    if len(set(spec.merges)) != len(spec.merges):
        raise RefusedError("tokenizer: a merge is listed twice")


def tokenizer_json(spec: TokenizerSpec) -> str:
    """The same tokenizer as the text of a Hugging Face ``tokenizer.json``.

    It is the reference of the tests: ``t = tokenizers.Tokenizer.from_str(...)``. With
    ``t.encode_special_tokens = True`` it does what mxdraft does with user text, which never becomes a
    control token.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": spec.tokens[i], **flags} for i in spec.special_ids],
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[spec.pre_tokenizer],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(spec.tokens)},
            "merges": [list(pair) for pair in spec.merges],
        },
    }
    return json.dumps(document, ensure_ascii=False)
