# SPDX-License-Identifier: Apache-2.0
"""The bundle's n-gram table: what mostly follows one or two tokens (runtime/BUNDLE.md, draft.ngrams)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxdraft.errors import BundleError
from mxdraft.files.npz import check_tokens, documents, reading_npz

ENTRIES = (4096, 49152)  # most entries with one and with two tokens of context
_LEAST_COUNT = 2
_LEAST_CHANCE = 0.25
Ids = NDArray[np.uint32]


def read_documents(path: Path, vocab: int) -> list[Ids]:
    """Read the documents of a teacher-text file: an .npz with ``tokens`` and ``offsets`` (document i is
    tokens[offsets[i]:offsets[i + 1]]).

    Raises RefusedError if it is none, or has a token outside the vocabulary.
    """
    with reading_npz(path, "text (.npz with 'tokens' and 'offsets')") as arrays:
        found = documents(arrays)
        if not found:
            raise ValueError("it has no documents")
        check_tokens(arrays["tokens"], vocab)
        return [document.astype(np.uint32) for document in found]


def ngram_section(documents: list[Ids]) -> bytes:
    """Return the bytes of ``draft.ngrams``: those contexts that will be met most often with the right
    answer."""
    tables = [_likeliest_next(documents, order, limit) for order, limit in enumerate(ENTRIES, 1)]
    counts = struct.pack("<2I", *(len(following) for _, following, _ in tables))
    ids = [part.astype("<u4").tobytes() for table in tables for part in table[:2]]
    return b"".join((counts, *ids, *(chance.tobytes() for _, _, chance in tables)))


def check_ngrams(section: bytes, vocab: int) -> None:
    """Raise BundleError DRAFT unless the section is a table for this vocabulary."""

    def check(ok: bool, message: str) -> None:
        if not ok:
            raise BundleError("DRAFT", f"draft.ngrams: {message}")

    check(len(section) >= 8, f"{len(section)} bytes, not even its counts")
    counts = struct.unpack_from("<2I", section)
    end = 8
    for order, count in enumerate(counts, 1):
        check(
            count <= 1 << 24 and len(section) - end >= count * (4 * order + 4), f"too short for order {order}"
        )
        context = np.frombuffer(section, "<u4", count * order, end).reshape(count, order)
        following = np.frombuffer(section, "<u4", count, end + context.nbytes)
        end += context.nbytes + following.nbytes
        known = max(context.max(initial=0), following.max(initial=0)) < vocab
        check(known, f"an entry of order {order} has a token outside the vocabulary of {vocab}")
        key = context[:, -1].astype(np.uint64) | (context[:, 0].astype(np.uint64) << 32 if order == 2 else 0)
        check(bool((key[1:] > key[:-1]).all()), f"entries of order {order} are not in ascending order")
    check(len(section) == end + sum(counts), f"{len(section)} bytes, not {end + sum(counts)}")


def _likeliest_next(documents: list[Ids], order: int, limit: int) -> tuple[Ids, Ids, NDArray[np.uint8]]:
    """Count contexts [n, order] in ascending order, the token that mostly follows, its probability in
    1/256."""
    width = order + 1
    long_enough = [document for document in documents if len(document) >= width]
    if not long_enough:
        return np.empty((0, order), np.uint32), np.empty(0, np.uint32), np.empty(0, np.uint8)
    windows = [np.lib.stride_tricks.sliding_window_view(document, width) for document in long_enough]
    grams, count = np.unique(np.concatenate(windows), axis=0, return_counts=True)
    # Grams are sorted, so those of a context are neighbours.
    starts = np.flatnonzero(np.r_[True, (grams[1:, :order] != grams[:-1, :order]).any(axis=1)])
    total = np.add.reduceat(count, starts)
    # The first of the most frequent ones of each context.
    by_count = np.lexsort((-count, np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(grams)]))))
    best = by_count[starts]
    chance = count[best] / (total + 1)  # one more than was seen: rare contexts promise less
    kept = np.flatnonzero((count[best] >= _LEAST_COUNT) & (chance >= _LEAST_CHANCE))
    kept = np.sort(kept[np.argsort(-count[best][kept] * chance[kept], kind="stable")][:limit])
    scaled = np.minimum(chance[kept] * 256, 255).astype(np.uint8)
    return grams[best[kept], :order], grams[best[kept], order], scaled
