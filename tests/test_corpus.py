# SPDX-License-Identifier: Apache-2.0
"""Text that a bundle writes: a function of seed and number alone, resumable, without loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mxdraft.errors import RefusedError
from mxdraft.runtime import Model
from mxdraft.train.corpus import MAX_REPETITION, Corpus, Document, repetition, write_corpus


@pytest.fixture(scope="module", autouse=True)
def small_limits() -> Iterator[None]:
    """Fixture T has 256 positions."""
    patch = pytest.MonkeyPatch()
    patch.setattr("mxdraft.train.corpus.TURN_LIMIT", 12)
    patch.setattr("mxdraft.train.corpus.ANSWER_LIMIT", 24)
    yield
    patch.undo()


def contents(path: Path) -> dict[str, list[int]]:
    with np.load(path) as file:
        return {name: file[name].tolist() for name in file.files}


@pytest.fixture(scope="module")
def whole(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "whole.npz"
    with Model(bundle) as model:
        write_corpus(model, path, 10, seed=3, lanes=4)
    return path


def test_documents_are_chats_of_the_model(bundle: Path, whole: Path) -> None:
    corpus = Corpus.load(whole)
    assert sorted([*corpus.documents, *corpus.dropped]) == list(range(10))
    assert len(corpus.documents) >= 5
    assert len({d.temperature for d in corpus.documents.values()}) > 1
    with Model(bundle) as model:
        empty = model.chat([("user", "")])
        for document in corpus.documents.values():
            tokens, start = document.tokens.tolist(), document.answer_start
            common = [a == b for a, b in zip(tokens, empty, strict=False)].index(False)
            ending = start - (len(empty) - common)  # the template's tail precedes the answer
            assert tokens[ending:start] == empty[common:]
            assert 0 < len(tokens) - start <= 24


def test_interrupted_and_prolonged_writing_gives_the_same_file(
    bundle: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "parts.npz"

    def stop(corpus: Corpus) -> None:
        if len(corpus.documents) >= 2:
            raise KeyboardInterrupt

    with Model(bundle) as model:
        with pytest.raises(KeyboardInterrupt):
            write_corpus(model, path, 6, seed=3, lanes=2, progress=stop)
        assert len(Corpus.load(path).documents) == 2
        write_corpus(model, path, 6, seed=3, lanes=7)
        write_corpus(model, path, 10, seed=3, lanes=3)
    assert contents(path) == contents(whole)


def test_another_seed_writes_another_text(bundle: Path, whole: Path, tmp_path: Path) -> None:
    with Model(bundle) as model:
        other = write_corpus(model, tmp_path / "other.npz", 10, seed=4)
    same = Corpus.load(whole).documents
    assert not any(np.array_equal(same[i].tokens, d.tokens) for i, d in other.documents.items() if i in same)


def test_loops_are_dropped() -> None:
    corpus = Corpus()
    corpus.add(0, Document(np.tile(np.arange(5, dtype=np.uint16), 9), 3, 0.0))
    corpus.add(1, Document(np.arange(45, dtype=np.uint16), 3, 0.0))
    assert (list(corpus.documents), corpus.dropped) == ([1], {0})
    assert list(corpus.missing(4)) == [2, 3]
    assert repetition(np.tile(np.arange(4), 4)) == 1 - 4 / 13 > MAX_REPETITION
    assert repetition(np.arange(3)) == 0


def test_damaged_files_are_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.npz"
    path.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(RefusedError, match=r"cut\.npz is not a corpus"):
        Corpus.load(path)
    with pytest.raises(RefusedError, match=r"missing\.npz: no such file"):
        Corpus.load(tmp_path / "missing.npz")
