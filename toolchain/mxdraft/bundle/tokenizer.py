# SPDX-License-Identifier: Apache-2.0
"""The bundle's ``tokenizer`` section, both ways (format: runtime/BUNDLE.md, C: runtime/src/tokenizer.c)."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from mxdraft.checkpoint.tokenizer import (
    BYTE_ALPHABET,
    BYTE_TOKENS,
    SPACE_MARK,
    PreTokenizer,
    TokenizerSpec,
    check_tokenizer,
)
from mxdraft.errors import BundleError, RefusedError

NO_TOKEN = 0xFFFFFFFF
MAX_TOKEN_BYTES = 1024
# vocab, merges, pre-tokenizer, bos, end tokens, control tokens, text bytes, flags, added tokens,
# tokens by text, 6 reserved
_HEADER_WORDS = 16
_WHOLE_WORDS, _NFC, _ADDS_BOS = 1, 2, 4
_MARKED = (5, 6, 7)  # pre-tokenizers of SentencePiece's BPE
_MAX_VOCAB = _MAX_MERGES = 1 << 20
_MAX_TEXT = 1 << 28
_PRE_TOKENIZERS: dict[int, PreTokenizer] = {
    1: "gpt2",
    2: "smollm",
    3: "llama3",
    4: "qwen2",
    5: "spaces",
    6: "spaces-prefix",
    7: "spaces-first",
}

Words = NDArray[np.uint32]


def tokenizer_section(spec: TokenizerSpec) -> bytes:
    """Return the bytes of the section. Raises RefusedError for a tokenizer that a bundle cannot hold."""
    check_tokenizer(spec)
    token_bytes = spec.token_bytes()
    for i, token in enumerate(token_bytes):
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:
            raise RefusedError(
                f"tokenizer: token {i} has {len(token)} bytes; 1 to {MAX_TOKEN_BYTES} are allowed"
            )
    text = b"".join(token_bytes)
    for what, count, limit in (
        ("tokens", len(token_bytes), _MAX_VOCAB),
        ("merges", len(spec.merges), _MAX_MERGES),
        ("bytes of text", len(text), _MAX_TEXT),
    ):
        if count > limit:
            raise RefusedError(f"tokenizer: {count} {what}; at most {limit} are supported")

    apart = set(spec.special_ids) if spec.marks_spaces else {*spec.special_ids, *spec.added_ids}
    plain = {token: i for i, token in enumerate(spec.tokens) if i not in apart}
    merges = np.array([(plain[a], plain[b], plain[a + b]) for a, b in spec.merges], "<u4").reshape(-1, 3)
    pre_tokenizer = next(code for code, name in _PRE_TOKENIZERS.items() if name == spec.pre_tokenizer)
    bos = NO_TOKEN if spec.bos_id is None else spec.bos_id
    added = [*spec.special_ids, *spec.added_ids] if spec.added_ids else []
    bytes_of = BYTE_TOKENS if spec.marks_spaces else BYTE_ALPHABET
    looked_up = (
        set(plain) - set(BYTE_TOKENS) if spec.marks_spaces else set(plain) if spec.whole_words else set()
    )
    flags = _WHOLE_WORDS * spec.whole_words + _NFC * spec.nfc + _ADDS_BOS * spec.adds_bos
    counts = [len(spec.eos_ids), len(spec.special_ids), len(text), flags, len(added), len(looked_up)]
    header = [len(spec.tokens), len(spec.merges), pre_tokenizer, bos, *counts]
    words = [
        header + [0] * (_HEADER_WORDS - len(header)),
        [plain.get(name, NO_TOKEN) for name in bytes_of],
        sorted(spec.eos_ids),
        sorted(spec.special_ids),
        np.cumsum([0, *map(len, token_bytes)]),
        merges.reshape(-1),
        np.lexsort((merges[:, 1], merges[:, 0])),
        sorted(added, key=token_bytes.__getitem__),
        sorted((plain[token] for token in looked_up), key=token_bytes.__getitem__),
    ]
    return b"".join(np.asarray(part, "<u4").tobytes() for part in words) + text


def read_tokenizer(section: bytes, vocab: int) -> TokenizerSpec:
    """Read the tokenizer of a model with ``vocab`` tokens. Raises BundleError TOKENIZER where the C reader
    does."""
    data = np.frombuffer(section, np.uint8)
    _check(data.size >= 4 * _HEADER_WORDS, "it is shorter than its header")
    header = data[: 4 * _HEADER_WORDS].view("<u4").tolist()
    tokens, merge_count, pre_tokenizer, bos, eos_count, special_count, text_bytes, *more = header
    flags, added_count, looked_up_count, *reserved = more
    _check(tokens == vocab, f"it has {tokens} tokens, the model {vocab}")
    _check(pre_tokenizer in _PRE_TOKENIZERS, f"unknown pre-tokenizer {pre_tokenizer}")
    counts_ok = (
        merge_count <= _MAX_MERGES
        and max(eos_count, special_count, added_count, looked_up_count) <= vocab
        and text_bytes <= _MAX_TEXT
    )
    _check(counts_ok, "impossible count")
    _check(flags <= (_WHOLE_WORDS | _NFC | _ADDS_BOS), f"unknown flags {flags:#x}")
    _check(not any(reserved), "reserved bytes are not zero")
    sizes = [
        256,
        eos_count,
        special_count,
        vocab + 1,
        3 * merge_count,
        merge_count,
        added_count,
        looked_up_count,
    ]
    text_at = 4 * (_HEADER_WORDS + sum(sizes))
    _check(data.size == text_at + text_bytes, f"{data.size} bytes are not what its counts ask for")
    parts = np.split(data[4 * _HEADER_WORDS : text_at].view("<u4"), np.cumsum(sizes[:-1]))
    byte_token, eos, special, text_start, merges, by_pair, added, by_text = parts
    merges = merges.reshape(-1, 3)
    text = data[text_at:].tobytes()

    _check_ids(special, vocab, "control tokens")
    _check_ids(eos, vocab, "end tokens")
    _check(np.isin(eos, special).all(), "an end token is not a control token")
    _check(bos == NO_TOKEN or bos < vocab, f"bos is {bos} of {vocab}")
    _check(bos != NO_TOKEN or not flags & _ADDS_BOS, "there is no bos to add")
    lengths = np.diff(text_start.astype(np.int64))
    _check(text_start[0] == 0 and text_start[-1] == text_bytes, "bad token offsets")
    _check(((lengths >= 1) & (lengths <= MAX_TOKEN_BYTES)).all(), "bad token offsets")
    token_bytes = [text[a:b] for a, b in zip(text_start[:-1].tolist(), text_start[1:].tolist(), strict=True)]

    is_special = np.zeros(vocab, bool)
    is_special[special] = True
    for ids, what in ((added, "added tokens"), (by_text, "tokens by text")):
        _check((ids < vocab).all(), f"the list of {what} leaves the vocabulary")
        texts = [token_bytes[i] for i in ids.tolist()]
        ascending = all(a < b for a, b in itertools.pairwise(texts))
        _check(ascending, f"the list of {what} is not in order of their bytes")
    _check(not is_special[by_text].any(), "a control token is among the tokens by text")
    marked = pre_tokenizer in _MARKED
    if marked:
        _check(b" " in {token_bytes[i] for i in by_text.tolist()}, "no token is a space")
    for byte, i in enumerate(byte_token.tolist()):
        _check(i != NO_TOKEN or not marked, f"byte {byte} has no token")
        if i != NO_TOKEN:
            spells_byte = i < vocab and not is_special[i] and token_bytes[i] == bytes([byte])
            _check(spells_byte, f"bad token for byte {byte}")
    for i in np.flatnonzero((lengths == 1) & ~is_special & (not marked)).tolist():
        _check(byte_token[token_bytes[i][0]] == i, f"token {i} is missing from the byte tokens")
    _check((merges < vocab).all() and not is_special[merges].any(), "bad token in a merge")
    for rank, (left, right, result) in enumerate(merges.tolist()):
        spelled = token_bytes[left] + token_bytes[right] == token_bytes[result]
        _check(spelled, f"the result of merge {rank} is not its two parts")
    _check((by_pair < merge_count).all(), "bad order of merges")
    keys = merges[by_pair, 0].astype(np.uint64) << np.uint64(32) | merges[by_pair, 1]
    _check((keys[1:] > keys[:-1]).all(), "bad order of merges")

    plain_added = sorted(i for i in added.tolist() if not is_special[i])
    as_text = {*special.tolist(), *plain_added}
    name_of_byte: dict[int, str] = dict(zip(byte_token.tolist(), BYTE_TOKENS, strict=True)) if marked else {}

    def name(i: int, token: bytes) -> str:
        if i in name_of_byte:
            return name_of_byte[i]
        if marked and not is_special[i]:
            return token.decode("utf-8", "replace").replace(" ", SPACE_MARK)
        if i in as_text:
            return token.decode("utf-8", "replace")
        return "".join(BYTE_ALPHABET[b] for b in token)

    names = [name(i, token) for i, token in enumerate(token_bytes)]
    return TokenizerSpec(
        tokens=names,
        merges=[(names[left], names[right]) for left, right, _ in merges.tolist()],
        special_ids=special.tolist(),
        bos_id=None if bos == NO_TOKEN else bos,
        eos_ids=eos.tolist(),
        pre_tokenizer=_PRE_TOKENIZERS[pre_tokenizer],
        added_ids=plain_added,
        whole_words=bool(flags & _WHOLE_WORDS),
        nfc=bool(flags & _NFC),
        adds_bos=bool(flags & _ADDS_BOS),
    )


def _check_ids(ids: Words, vocab: int, what: str) -> None:
    ascending = (ids[1:] > ids[:-1]).all() and (ids < vocab).all()
    _check(ascending, f"the list of {what} is not ascending, or leaves the vocabulary")


def _check(ok: bool | np.bool, what: str) -> None:
    if not ok:
        raise BundleError("TOKENIZER", f"tokenizer: {what}")
