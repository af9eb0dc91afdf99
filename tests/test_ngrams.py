# SPDX-License-Identifier: Apache-2.0
"""The n-gram table: counted right, reproducible, packed without touching anything else, and drafted from."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mxdraft.bundle import Bundle, ngrams
from mxdraft.bundle.ngrams import check_ngrams, ngram_section, read_documents
from mxdraft.errors import RefusedError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline

Entry = tuple[tuple[int, ...], int, int]  # context, what follows, its probability in 1/256


def arrays(documents: list[list[int]]) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
    return [np.array(ids, np.uint32) for ids in documents]


def entries(section: bytes) -> list[list[Entry]]:
    """The entries of order 1 and of order 2 as runtime/BUNDLE.md lays them out."""
    counts = struct.unpack_from("<2I", section)
    place, chances, tables = 8, len(section) - sum(counts), []
    for order, count in enumerate(counts, 1):
        contexts = list(struct.iter_unpack(f"<{order}I", section[place : place + 4 * order * count]))
        place += 4 * order * count
        following = struct.unpack_from(f"<{count}I", section, place)
        place += 4 * count
        tables.append(list(zip(contexts, following, section[chances : chances + count], strict=True)))
        chances += count
    assert place == len(section) - sum(counts)
    return tables


def counted(documents: list[list[int]], order: int, limit: int) -> list[Entry]:
    """The same by plain counting: contexts seen at least twice, right one time in four, the most useful
    first."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids in documents:
        for i in range(len(ids) - order):
            followers[tuple(ids[i : i + order])][ids[i + order]] += 1
    found = []
    for context in sorted(followers):
        counter = followers[context]
        token = min(counter, key=lambda t: (-counter[t], t))
        chance = counter[token] / (counter.total() + 1)
        if counter[token] >= 2 and chance >= 0.25:
            found.append((-counter[token] * chance, context, token, min(int(chance * 256), 255)))
    best = sorted(found, key=lambda entry: entry[0])[:limit]
    return sorted((context, token, chance) for _, context, token, chance in best)


documents_strategy = st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=5)


@settings(max_examples=150, deadline=None)
@given(documents=documents_strategy, limits=st.tuples(st.integers(1, 6), st.integers(1, 12)))
def test_table_is_what_counting_finds(documents: list[list[int]], limits: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "ENTRIES", limits)
        section = ngram_section(arrays(documents))
    assert entries(section) == [
        counted(documents, order, limit) for order, limit in enumerate(limits, start=1)
    ]
    check_ngrams(section, 6)
    assert section == ngram_section(arrays(documents)) or max(limits) < 36  # the limits change nothing else


def test_worked_example_of_the_format() -> None:
    """Token 5 is mostly followed by 9, half of the time."""
    section = ngram_section(arrays([[5, 9], [5, 9], [5, 7]]))
    assert section == bytes.fromhex("01000000 00000000 05000000 09000000 80")


def test_no_ngram_crosses_a_border_between_documents() -> None:
    assert entries(ngram_section(arrays([[1, 2], [3, 1], [2, 3], [1], []] * 3))) == [
        [((1,), 2, 192), ((2,), 3, 192), ((3,), 1, 192)],
        [],
    ]
    assert entries(ngram_section([])) == [[], []]


def test_order_of_documents_does_not_matter_nor_does_the_run() -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 3, 200).tolist() for _ in range(6)]
    section = ngram_section(arrays(documents))
    assert ngram_section(arrays(documents)) == section
    assert ngram_section(arrays(documents[::-1])) == section
    assert all(entries(section))


# ---- text files ----


def save(path: Path, **parts: Any) -> Path:
    np.savez_compressed(path, **parts)
    return path


def test_documents_are_read_back(tmp_path: Path) -> None:
    for dtype in (np.uint16, np.int64):
        path = save(tmp_path / "t.npz", tokens=np.array([4, 5, 6, 499, 9], dtype), offsets=[0, 3, 3, 4])
        assert [ids.tolist() for ids in read_documents(path, 500)] == [[4, 5, 6], [], [499]]


def damaged_texts(folder: Path) -> dict[str, Path]:
    tokens = np.arange(2000, dtype=np.uint16) % 500
    good = save(folder / "good.npz", tokens=tokens, offsets=[0, 2000]).read_bytes()
    files = {
        "empty": b"",
        "text": b"once upon a time",
        "half": good[: len(good) // 2],
        "magic_only": good[:4],
        "damaged": good[:200] + bytes(b ^ 255 for b in good[200:260]) + good[260:],
    }
    for name, data in files.items():
        (folder / f"{name}.npz").write_bytes(data)
    np.save(folder / "array.npy", tokens)
    parts: dict[str, dict[str, Any]] = {
        "without_offsets": {"tokens": tokens},
        "without_tokens": {"offsets": [0, 1]},
        "objects": {"tokens": np.array([{}, None]), "offsets": [0, 1]},
        "floats": {"tokens": np.array([1.0, 2.0]), "offsets": [0, 2]},
        "words": {"tokens": np.array(["a", "b"]), "offsets": [0, 2]},
        "float_offsets": {"tokens": tokens, "offsets": [0.0, 2.0]},
        "negative": {"tokens": np.array([1, -1]), "offsets": [0, 2]},
        "outside": {"tokens": np.array([1, 500]), "offsets": [0, 2]},
        "table": {"tokens": tokens.reshape(2, -1), "offsets": [0, 2]},
        "no_document": {"tokens": tokens, "offsets": [0]},
        "one_offset": {"tokens": tokens, "offsets": np.array(5)},
        "offsets_descend": {"tokens": tokens, "offsets": [0, 9, 8]},
        "offset_before": {"tokens": tokens, "offsets": [-1, 8]},
        "offset_past_end": {"tokens": tokens, "offsets": [0, 2001]},
        "offset_near_2_to_64": {"tokens": tokens, "offsets": np.array([0, 2**64 - 1], np.uint64)},
    }
    paths = {name: folder / f"{name}.npz" for name in [*files, "missing"]} | {"array": folder / "array.npy"}
    return paths | {name: save(folder / f"{name}.npz", **part) for name, part in parts.items()}


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    assert len(read_documents(save(tmp_path / "t.npz", tokens=[1, 2], offsets=[0, 2]), 500)) == 1
    for name, path in damaged_texts(tmp_path).items():
        with pytest.raises(RefusedError, match=path.name):
            pytest.fail(f"{name}: {read_documents(path, 500)}")


# ---- in the bundle ----


def test_packing_a_table_changes_nothing_else(tmp_path: Path) -> None:
    export_model(tiny.checkpoint(), tmp_path)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 20, 3000).astype(np.uint16)
    text = save(tmp_path / "said.npz", tokens=tokens, offsets=[0, 1000, 3000])

    def digests(path: Path) -> tuple[str, str]:
        with Model(path) as model:
            found = []
            for precision in ("base", "full"):
                with Engine(model, precision=precision, threads=1) as engine:
                    found.append(engine.verify().digest)
        return found[0], found[1]

    pack(tmp_path, tmp_path / "without.mxb", digest=digests)
    pack(tmp_path, tmp_path / "with.mxb", digest=digests, text=text)
    pack(tmp_path, tmp_path / "again.mxb", digest=digests, text=text)
    assert (tmp_path / "with.mxb").read_bytes() == (tmp_path / "again.mxb").read_bytes()
    without, bundle = Bundle.open(tmp_path / "without.mxb"), Bundle.open(tmp_path / "with.mxb")
    assert set(bundle.sections) - set(without.sections) == {"draft.ngrams"}
    for name in set(without.sections) - {"provenance"}:
        assert bundle.section(name).tobytes() == without.section(name).tobytes()
    assert bundle.section("draft.ngrams").tobytes() == ngram_section(read_documents(text, 500))
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    assert bundle.provenance["ngrams_of"] == {"name": "said.npz", "sha256": digest}
    assert {k: v for k, v in bundle.provenance.items() if k != "ngrams_of"} == without.provenance
    with pytest.raises(RefusedError, match=r"none\.npz"):
        pack(tmp_path, tmp_path / "no.mxb", text=tmp_path / "none.npz")
    assert not (tmp_path / "no.mxb").exists()


def test_runtime_drafts_what_the_table_spells(bundle: Path, tmp_path: Path) -> None:
    prompt = [5, 300, 41]

    def generate(path: Path, draft: Any) -> tuple[list[int], dict[str, Any]]:
        with (
            Model(path) as model,
            Engine(model, ctx=64, threads=1, draft=draft, draft_max=4, draft_min=4) as engine,
            Timeline(engine, ignore_eos=True, max_tokens=26) as sequence,
        ):
            for _ in sequence.generate(prompt):
                pass
            return sequence.tokens, sequence.stats

    expected, _ = generate(bundle, "off")
    known = tmp_path / "known.mxb"
    known.write_bytes(tiny.with_ngrams(bundle.read_bytes(), [expected] * 9))
    tokens, stats = generate(known, "ngram")
    assert tokens == expected
    by_table = stats["accepted"]
    tokens, stats = generate(bundle, "ngram")
    assert tokens == expected
    assert by_table >= 15 > stats["accepted"]

    # The longer context counts: after (5, 300) comes 41, after 300 mostly something else.
    misled = tmp_path / "misled.mxb"
    misled.write_bytes(
        tiny.with_ngrams(bundle.read_bytes(), [expected] * 9 + [[token, 3] for token in expected] * 40)
    )
    tokens, stats = generate(misled, "ngram")
    assert tokens == expected
    assert stats["accepted"] >= 15
