# SPDX-License-Identifier: Apache-2.0
"""Recording a run of one sequence as JSON lines while it goes on (docs/trace.md)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mxdraft import __version__
from mxdraft.bundle import Bundle
from mxdraft.errors import TransferError
from mxdraft.files import as_text
from mxdraft.measure.origin.precision import weight_bytes
from mxdraft.runtime import Engine, Model, Timeline

FORMAT = "mxdraft trace 1"

_PROMPT_CHUNK = 64  # rows of logits at a time: a row is as long as the vocabulary


class FullPrecision:
    """What full precision would choose greedily after the tokens that another sequence commits."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        """``engine``: at full precision; nothing else may use it."""
        self._sequence = Timeline(engine)
        for start in range(0, len(prompt), _PROMPT_CHUNK):
            self._next = self._choices(prompt[start : start + _PROMPT_CHUNK])[-1]

    def choices_at(self, tokens: list[int]) -> list[int]:
        """Return its choice in place of each of ``tokens``, which come next."""
        if not tokens:
            return []
        choices = [self._next, *self._choices(tokens)]
        self._next = choices.pop()
        return choices

    def _choices(self, tokens: list[int]) -> list[int]:
        choices: list[int] = self._sequence.logits(tokens).argmax(axis=1).tolist()
        return choices


class Recorder:
    """Steps a sequence and writes a line for the run, each step, each token and the end.

    A line is written whole and at once: whatever ends the run, the lines before stay.
    """

    def __init__(self, file: BinaryIO, sequence: Timeline, full: FullPrecision | None = None) -> None:
        """``sequence``: prompted, not yet stepped."""
        self._file = file
        self._sequence = sequence
        self._full = full
        self._before = sequence.stats

    def start(self, options: Mapping[str, Any]) -> None:
        """Write the first line; ``options``: as the user gave them."""
        engine = self._sequence.engine
        model, plan = engine.model, engine.plan
        bundle = Bundle.open(Path(model.info.path))
        fraction, catch_up = options.get("core_fraction"), options.get("catch_up")
        used = dataclasses.replace(
            bundle.schedule,
            core_fraction=bundle.schedule.core_fraction if fraction is None else fraction,
            catch_up=catch_up or bundle.schedule.catch_up,
        )
        threshold = used.threshold(used.core_fraction)
        base, full = weight_bytes(bundle)
        self._write(
            "run",
            format=FORMAT,
            version=__version__,
            bundle=as_text(model.info.path),
            provenance_sha256=hashlib.sha256(bundle.section("provenance").data).hexdigest(),
            options=dict(options),
            precision=plan.precision,
            threads=plan.threads,
            ctx=plan.ctx,
            kernels=self._before["kernels"],
            schedule=used.table(),
            threshold=threshold if plan.precision == "auto" else None,
            weight_bytes={"base": base, "full": full},
            prompt={"tokens": len(self._sequence.tokens)} | _text(model, self._sequence.tokens),
        )

    def step(self) -> None:
        """Take one engine step: a line for each token that it made, then its own."""
        sequence = self._sequence
        sequence.engine.step([sequence])
        after = sequence.stats
        delta = {key: after[key] - self._before[key] for key in _COUNTERS}
        full = self._full.choices_at(sequence.output) if self._full else [None] * len(sequence.output)
        for values in zip(sequence.records, sequence.drafted, full, strict=True):
            self._write_token(*values)
        self._write(
            "step",
            seconds=round(delta["prefill_s"] + delta["decode_s"], 6),
            tokens=len(sequence.output),
            verified=delta["steps"] + delta["drafted"],  # rows of the first decode pass
            drafted=delta["drafted"],
            accepted=delta["accepted"],
            bytes=delta["bytes_read"],
        )
        self._before = after

    def end(self) -> None:
        """Write the last line, also of a run that was interrupted."""
        self._write("end", statistics=self._sequence.stats)

    def _write_token(self, record: Any, drafted: bool, full: int | None) -> None:
        model = self._sequence.engine.model
        fields = record._asdict() | {"drafted": drafted, "special": model.is_special(record.token)}
        fields |= _text(model, [record.token])
        if record.base_token is not None:
            fields |= _text(model, [record.base_token], "base_")
        if full is not None:
            fields |= {"full_token": full} | _text(model, [full], "full_")
        self._write("token", **fields)

    def _write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind} | fields, ensure_ascii=False, allow_nan=False)
        try:
            self._file.write(line.encode("utf-8", "replace") + b"\n")  # paths may hold what is not UTF-8
            self._file.flush()
        except OSError as error:
            raise TransferError(f"cannot write {self._file.name}: {error.strerror}") from error


_COUNTERS = ("steps", "drafted", "accepted", "prefill_s", "decode_s", "bytes_read")


def _text(model: Model, ids: Iterable[int], prefix: str = "") -> dict[str, str]:
    """Return the tokens' text, and their bytes in hex if those are not UTF-8."""
    data = model.decode(ids)
    text = data.decode("utf-8", "replace")
    fields = {f"{prefix}text": text}
    if text.encode("utf-8") != data:
        fields[f"{prefix}bytes"] = data.hex()
    return fields
