# SPDX-License-Identifier: Apache-2.0
"""Training text that a bundle writes itself: user turns and answers sampled from the bare chat template.

No prompt set is needed, and the text is distributed as the model's own, which is what a drafter has to
foresee. Document i of a seed is always the same, whatever else is in its batch (the runtime is exact),
so writing can be interrupted, and prolonged, at any point.

A corpus is an .npz with ``tokens`` uint16 (documents one after another), ``offsets`` int64 (document i is
tokens[offsets[i]:offsets[i+1]]), ``answer_start`` int64 (where its answer begins), ``temp`` float16 (of its
answer), ``document`` int64 (its number) and ``dropped`` int64 (numbers of documents that only repeat
themselves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxdraft.errors import UsageError
from mxdraft.files import replacing
from mxdraft.files.npz import check_tokens, documents, reading_npz
from mxdraft.runtime import Engine, Model, Timeline

LANES = 48  # sequences of a batch
TEMPERATURES = (0.0, 0.7, 0.8, 1.0)  # of answers; user turns are sampled at 1
TURN_LIMIT = 128  # tokens of a user turn
ANSWER_LIMIT = 320
MAX_REPETITION = 0.25  # share of repeated 4-grams from which on a document is dropped
_LOOP_WINDOW = 64  # an answer ends once this many last tokens hold only old 4-grams; half of them are kept
_CHECKPOINT = 96  # documents between two writes of the file
VOCAB_LIMIT = 1 << 16  # tokens are kept as uint16


@dataclass(frozen=True)
class Document:
    tokens: NDArray[np.uint16]
    answer_start: int
    temperature: float


@dataclass
class Corpus:
    """Documents by number, and the numbers of those that were dropped."""

    documents: dict[int, Document] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return sum(len(document.tokens) for document in self.documents.values())

    def missing(self, count: int) -> Iterator[int]:
        """Yield the numbers below ``count`` that are yet to be written."""
        return (i for i in range(count) if i not in self.documents and i not in self.dropped)

    def add(self, number: int, document: Document) -> None:
        if repetition(document.tokens) > MAX_REPETITION:
            self.dropped.add(number)
        else:
            self.documents[number] = document

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        numbers = sorted(self.documents)
        kept = [self.documents[number] for number in numbers]
        with replacing(path) as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([d.tokens for d in kept]) if kept else np.empty(0, np.uint16),
                offsets=np.cumsum([0, *(len(d.tokens) for d in kept)], dtype=np.int64),
                answer_start=np.array([d.answer_start for d in kept], np.int64),
                temp=np.array([d.temperature for d in kept], np.float16),
                document=np.array(numbers, np.int64),
                dropped=np.array(sorted(self.dropped), np.int64),
            )

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read a file that ``save`` wrote; one without numbers counts from 0. Raises RefusedError."""
        with reading_npz(path, "corpus") as arrays:
            texts = documents(arrays)
            check_tokens(arrays["tokens"], VOCAB_LIMIT)
            numbers = arrays.get("document", np.arange(len(texts)))
            starts, temperatures = arrays["answer_start"], arrays["temp"]
            dropped = arrays.get("dropped", np.empty(0, np.int64))
            if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (numbers, starts, dropped)):
                raise ValueError("its numbers of documents and tokens are not lists of whole numbers")
            if temperatures.ndim != 1 or temperatures.dtype.kind != "f":
                raise ValueError("its temperatures are no list of numbers")
            fields = zip(texts, numbers.tolist(), starts.tolist(), temperatures.tolist(), strict=True)
            kept: dict[int, Document] = {}
            for text, number, start, temperature in fields:
                if number in kept or not 0 <= start <= len(text):
                    raise ValueError(f"document {number} is there twice, or its answer begins at {start}")
                kept[number] = Document(text.astype(np.uint16), start, temperature)
            return cls(kept, set(dropped.tolist()))


def repetition(tokens: NDArray[np.integer]) -> float:
    """Return the share of 4-grams in ``tokens`` that occurred before: small models loop, and loops teach
    little."""
    if len(tokens) < 4:
        return 0.0
    return 1 - _distinct(tokens) / (len(tokens) - 3)


def check_vocabulary(model: Model) -> None:
    """Raise UsageError if the tokens of a model do not fit a file of texts."""
    if model.info.vocab > VOCAB_LIMIT:
        raise UsageError(f"a vocabulary of {model.info.vocab}: such a file holds tokens below {VOCAB_LIMIT}")


def write_corpus(
    model: Model,
    path: Path,
    documents: int,
    seed: int = 0,
    threads: int = 1,
    lanes: int = LANES,
    progress: Callable[[Corpus], None] | None = None,
) -> Corpus:
    """Write documents 0 … ``documents`` − 1 of ``seed`` in base precision, going on from ``path``.

    ``progress`` is called after every document. An exception (KeyboardInterrupt too) leaves in the file what
    is finished. Raises UsageError if the bundle cannot chat, or has more than 65,536 tokens.
    """
    check_vocabulary(model)
    corpus = Corpus.load(path) if path.exists() else Corpus()
    template = _Template.of(model)
    context = len(template.opening) + TURN_LIMIT + len(template.answering) + ANSWER_LIMIT
    with Engine(model, ctx=context, threads=threads, precision="base", max_seqs=lanes) as engine:
        waiting = iter(list(corpus.missing(documents)))
        running = [_Writer(engine, template, seed, number) for number in islice(waiting, lanes)]
        finished = 0
        try:
            while running:
                engine.step(writer.sequence for writer in running)
                for writer in list(running):
                    if (document := writer.advance()) is None:
                        continue
                    corpus.add(writer.number, document)
                    running.remove(writer)
                    running += [_Writer(engine, template, seed, number) for number in islice(waiting, 1)]
                    finished += 1
                    if finished % _CHECKPOINT == 0:
                        corpus.save(path)
                    if progress is not None:
                        progress(corpus)
        finally:
            corpus.save(path)
    return corpus


@dataclass(frozen=True)
class _Template:
    """What the chat template puts before a user turn and between it and the answer."""

    opening: list[int]
    answering: list[int]

    @classmethod
    def of(cls, model: Model) -> _Template:
        with_a, with_b = (model.chat([("user", text)]) for text in "ab")
        alike = [a == b for a, b in zip(with_a, with_b, strict=True)]
        if alike.count(False) != 1:
            raise UsageError("this bundle's tokenizer has no tokens for single letters")
        place = alike.index(False)
        return cls(with_a[:place], with_a[place + 1 :])


class _Writer:
    """One document in the making: first the user turn, then the answer."""

    def __init__(self, engine: Engine, template: _Template, seed: int, number: int) -> None:
        self.number = number
        self._engine = engine
        self._template = template
        rng = np.random.default_rng((seed, number))
        self._temperature = float(rng.choice(TEMPERATURES))
        turn_seed, self._answer_seed = map(int, rng.integers(0, 1 << 63, 2))
        self._answer_start = 0  # of a document whose answer has not begun
        self.sequence = Timeline(engine, temperature=1.0, seed=turn_seed, max_tokens=TURN_LIMIT)
        self.sequence.prompt(template.opening)

    def advance(self) -> Document | None:
        """Look at what the last step did; returns the document once it is finished."""
        if self._answer_start == 0:
            if self.sequence.stop != "none":
                self._begin_answer()
            return None
        tokens = np.array(self.sequence.tokens, np.uint16)
        if self.sequence.stop == "none":
            if not _loops(tokens, self._answer_start):
                return None
            tokens = tokens[: -_LOOP_WINDOW // 2]
        self.sequence.close()
        return Document(tokens, self._answer_start, self._temperature)

    def _begin_answer(self) -> None:
        turn = self.sequence.tokens
        if self.sequence.stop == "eos":
            turn = turn[:-1]  # the template has it
        self.sequence.close()
        self._answer_start = len(turn) + len(self._template.answering)
        self.sequence = Timeline(
            self._engine, temperature=self._temperature, seed=self._answer_seed, max_tokens=ANSWER_LIMIT
        )
        self.sequence.prompt(turn + self._template.answering)


def _loops(tokens: NDArray[np.uint16], answer_start: int) -> bool:
    """Tell whether the last tokens of an answer, looked at now and then, say nothing new."""
    written = len(tokens) - answer_start
    if written < 2 * _LOOP_WINDOW or written % 16:
        return False
    return _distinct(tokens) == _distinct(tokens[: 3 - _LOOP_WINDOW])


def _distinct(tokens: NDArray[np.integer]) -> int:
    return len(np.unique(np.lib.stride_tricks.sliding_window_view(tokens, 4), axis=0))
