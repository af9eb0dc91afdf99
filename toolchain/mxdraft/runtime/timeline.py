# SPDX-License-Identifier: Apache-2.0
"""Timelines: the tokens of one sequence, their text, statistics and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import NO_TOKEN, load, text_of, words
from mxdraft.runtime._handle import Handle, guarded
from mxdraft.runtime.engine import Engine
from mxdraft.runtime.grammar import Grammar
from mxdraft.runtime.options import SamplingOptions, sampling_struct

if TYPE_CHECKING:  # a command that asks for no logits starts sooner without numpy
    import numpy as np
    from numpy.typing import NDArray

Stop = Literal["none", "eos", "limit", "context", "string", "grammar"]
Tier = Literal["recent", "core", "far"]
Look = Literal["none", "core", "due", "all"]
Source = Literal["caller", "copy", "table", "model", "base", "grammar"]

# Propose tokens: takes all tokens so far and the most to propose; returns ids (a chain), or pairs of an id
# and the index of the proposal that it follows (a tree; -1: the newest token).
Drafter = Callable[[list[int], int], "list[int] | list[tuple[int, int]]"]
# Decide whether a row that base precision computed gets full precision.
CoreRule = Callable[["TokenRecord"], bool]


class CacheUse(NamedTuple):
    """What a timeline's KV cache holds: tokens by tier, mean bits a value, bytes that a decode step reads."""

    recent: int
    core: int
    far: int
    bits_per_value: float
    bytes: int


class Piece(NamedTuple):
    """What one step added: whole UTF-8 characters (or what a stop left incomplete) and token ids."""

    text: bytes
    ids: list[int]


class TokenRecord(NamedTuple):
    """A generated token and what was known of the row that chose it (mxdraft.h, ``mxd_token_record``).
    ``base_token`` is None if base precision was not asked."""

    position: int
    token: int
    base_token: int | None
    margin: float
    confidence: float
    attention: float
    history: float
    score: float
    threshold: float
    look: Look


class DraftRecord(NamedTuple):
    """A token drafted for a step, and what became of it (``mxd_draft_record``): ``parent`` is the index of
    the record that it follows, ``chance`` the estimate that it and all above it are right."""

    token: int
    parent: int
    depth: int
    source: Source
    confidence: float
    history: float
    chance: float
    verified: bool
    accepted: bool


class Timeline(Handle):
    """The tokens of one sequence, with its own sampling settings (``sampling``: see SamplingOptions).

    ``copy_of`` is another timeline of the engine: the new one begins with all that it holds, exactly as if it
    had been given the same tokens, but without a grammar. Raises UsageError on a setting out of range, if
    ``max_seqs`` sequences are open, or if ``copy_of`` is another engine's.
    """

    def __init__(
        self, engine: Engine, *, copy_of: Timeline | None = None, **sampling: Unpack[SamplingOptions]
    ) -> None:
        library = load()
        if copy_of is not None and copy_of.engine is not engine:
            raise UsageError("a sequence can be copied within its engine only")
        settings, _keep = sampling_struct(sampling)
        box = library.ffi.new("mxd_seq **")
        with engine._resource.calls.held:
            if copy_of is None:
                library.call(library.lib.mxd_seq_open, engine._pointer, settings, box)
            else:
                library.call(library.lib.mxd_seq_copy, copy_of._pointer, settings, box)
            super().__init__(box, library.lib.mxd_seq_close, engine, engine._resource.calls)
        self.engine: Engine = engine  # keeps it open
        self._told: int = settings.logprobs
        self._grammar: Grammar | None = None
        self._drafter: Any = None
        self._core_rule: Any = None

    @guarded
    def prompt(self, ids: Iterable[int]) -> None:
        """Queue tokens; clear a stop, restart ``max_tokens`` and the statistics.

        Raises CapacityError if they do not fit the context together with one generated token.
        """
        library = load()
        array = library.ffi.new("uint32_t[]", list(ids))
        library.call(library.lib.mxd_seq_prompt, self._pointer, array, len(array))

    def generate(self, ids: Iterable[int]) -> Iterator[Piece]:
        """Queue the prompt now, then yield what each step adds until a stop.

        The iterator may be abandoned at any point: what was generated so far stays.
        """
        self.prompt(ids)
        return self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        while self.stop == "none":
            self.engine.step([self])
            piece = Piece(self.text, self.output)
            if piece.ids or piece.text:
                yield piece

    @guarded
    def draft_with(self, drafter: Drafter | None) -> None:
        """Let ``drafter`` propose in place of the engine's own drafters; None gives them back.

        If it raises, nothing is drafted; the step is completed, and then raises the same.
        """
        library, calls = load(), self._resource.calls

        def call(_: Any, ids: Any, n: int, out: Any, parent: Any, most: int) -> int:
            assert drafter is not None
            try:
                proposal = drafter(library.ffi.unpack(ids, n), most)[:most]
                for i, node in enumerate(proposal):
                    if isinstance(node, tuple):
                        out[i], parent[i] = node
                    else:
                        out[i] = node
                return len(proposal)
            except BaseException as error:
                calls.raised = calls.raised or error
                return 0

        # The library keeps the pointer, this object what it points to.
        self._drafter = drafter and library.ffi.callback("mxd_draft_function", call)
        pointer = self._drafter or library.ffi.NULL
        library.lib.mxd_seq_set_drafter(self._pointer, pointer, library.ffi.NULL)

    @guarded
    def decide_core_with(self, rule: CoreRule | None) -> None:
        """Under precision ``auto``, let ``rule`` decide which rows get full precision; None: the engine.

        If it raises, the engine decides; the step is completed, and then raises the same.
        """
        library, calls = load(), self._resource.calls

        def call(_: Any, row: Any) -> int:
            assert rule is not None
            record = _record(row)
            try:
                return int(rule(record))
            except BaseException as error:
                calls.raised = calls.raised or error
                return int(record.look == "core")

        self._core_rule = rule and library.ffi.callback("mxd_core_function", call)
        pointer = self._core_rule or library.ffi.NULL
        library.lib.mxd_seq_set_core_rule(self._pointer, pointer, library.ffi.NULL)

    @property
    def _runnable(self) -> Any:
        """The pointer for a step. Raises ValueError if this or its grammar is closed."""
        if self._grammar is not None:
            self._grammar._pointer  # noqa: B018  (raises if closed)
        return self._pointer

    @guarded
    def fit(self, grammar: Grammar | None, start: int | None = None) -> None:
        """Let what is generated fit ``grammar``; None: any text. The document begins at token ``start``
        (default: after all that are there), and at the end of each later prompt a new one does.

        Raises UsageError if tokens from ``start`` on do not fit, or if the grammar is another engine's.
        """
        if grammar is not None and grammar.engine is not self.engine:
            raise UsageError("a grammar serves the sequences of its engine only")
        library = load()
        place = len(self.tokens) if start is None else start
        pointer = library.ffi.NULL if grammar is None else grammar._pointer
        library.call(library.lib.mxd_seq_set_grammar, self._pointer, pointer, place)
        self._grammar = grammar  # keeps it open

    def logits(self, ids: Iterable[int]) -> NDArray[np.float32]:
        """Append ``ids`` by teacher forcing; return the logits after each, float32 [len(ids), vocab]."""
        import numpy as np

        library = load()
        array = library.ffi.new("uint32_t[]", list(ids))
        out = np.empty((len(array), self.engine.model.info.vocab), np.float32)
        pointer = library.ffi.cast("float *", library.ffi.from_buffer(out))
        with self._resource.calls.running():
            library.call(library.lib.mxd_seq_logits, self._pointer, array, len(array), pointer)
        return out

    @guarded
    def streams(self, ids: Iterable[int], layers: Sequence[int]) -> NDArray[np.float32]:
        """Append ``ids`` by teacher forcing; return the residual stream after each of ``layers``, float32
        [len(ids), len(layers), hidden]. After layer 0 it is the embedding."""
        import numpy as np

        library = load()
        array = library.ffi.new("uint32_t[]", list(ids))
        wanted = library.ffi.new("uint32_t[]", list(layers))
        out = np.empty((len(array), len(wanted), self.engine.model.info.hidden), np.float32)
        pointer = library.ffi.cast("float *", library.ffi.from_buffer(out))
        with self._resource.calls.running():
            library.call(
                library.lib.mxd_seq_streams, self._pointer, array, len(array), wanted, len(wanted), pointer
            )
        return out

    @guarded
    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, exactly."""
        library = load()
        library.call(library.lib.mxd_seq_truncate, self._pointer, length)

    @property
    @guarded
    def output(self) -> list[int]:
        """Token ids that the last step added."""
        return self._uint32(load().lib.mxd_seq_output)

    @property
    @guarded
    def logprobs(self) -> list[list[tuple[int, float]]]:
        """For each of ``output``, if the setting ``logprobs`` is 1 + n: (token, log-probability) of the
        token itself, then of the n likeliest ones, by the logits before all settings."""
        told = load().lib.mxd_seq_logprobs(self._pointer)
        if not told:
            return []
        each = self._told
        entries = [(told[i].token, told[i].logprob) for i in range(each * len(self.output))]
        return [entries[i : i + each] for i in range(0, len(entries), each)]

    @property
    @guarded
    def drafted(self) -> list[bool]:
        """Which of ``output`` were drafted and accepted."""
        flags = load().lib.mxd_seq_drafted(self._pointer)
        return [bool(flags[i]) for i in range(len(self.output))]

    @property
    @guarded
    def records(self) -> list[TokenRecord]:
        """What was known of each token of ``output``."""
        records = load().lib.mxd_seq_records(self._pointer)
        return [_record(records + i) for i in range(len(self.output))]

    @property
    @guarded
    def drafts(self) -> list[DraftRecord]:
        """What was drafted for the last step, verified or not."""
        ffi, lib = load().ffi, load().lib
        count = ffi.new("size_t *")
        records = lib.mxd_seq_drafts(self._pointer, count)
        return [_draft_record(records[i]) for i in range(count[0])]

    @property
    @guarded
    def tokens(self) -> list[int]:
        """All token ids committed or queued so far."""
        return self._uint32(load().lib.mxd_seq_tokens)

    @property
    @guarded
    def text(self) -> bytes:
        """Text that the last step completed."""
        ffi, lib = load().ffi, load().lib
        length = ffi.new("size_t *")
        data = lib.mxd_seq_text(self._pointer, length)
        return bytes(ffi.buffer(data, length[0])) if length[0] else b""

    @property
    @guarded
    def stop(self) -> Stop:
        """Why the sequence stopped, ``"none"`` if it has not."""
        stop: Stop = words("mxd_stop")[int(load().lib.mxd_seq_stop(self._pointer))]
        return stop

    @property
    @guarded
    def cache(self) -> CacheUse:
        """What the KV cache holds now."""
        raw = load().ffi.new("mxd_kv_use *")
        load().lib.mxd_seq_get_kv(self._pointer, raw)
        return CacheUse(*(getattr(raw, name) for name in CacheUse._fields))

    @property
    @guarded
    def tiers(self) -> list[Tier]:
        """The tier of each processed position."""
        tiers = load().ffi.new("uint8_t[]", len(self.tokens))
        count = load().lib.mxd_seq_tiers(self._pointer, tiers, len(tiers))
        return [words("mxd_tier")[tier] for tier in tiers[0:count]]

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics since the last prompt (keys: docs/cli.md)."""
        stats: dict[str, Any] = json.loads(self.stats_json)
        return stats

    @property
    @guarded
    def stats_json(self) -> str:
        """``stats`` as the library's own line of JSON."""
        return text_of(lambda buffer, size: load().lib.mxd_seq_stats_json(self._pointer, buffer, size))

    def _uint32(self, function: Any) -> list[int]:
        ffi = load().ffi
        count = ffi.new("size_t *")
        data = function(self._pointer, count)
        return list(ffi.unpack(data, count[0])) if count[0] else []


def _record(raw: Any) -> TokenRecord:
    values = {name: getattr(raw, name) for name in TokenRecord._fields}
    values["base_token"] = None if raw.base_token == NO_TOKEN else raw.base_token
    return TokenRecord(**values | {"look": words("mxd_look")[raw.look]})


def _draft_record(raw: Any) -> DraftRecord:
    values = {name: getattr(raw, name) for name in DraftRecord._fields}
    values |= {"verified": bool(raw.verified), "accepted": bool(raw.accepted)}
    return DraftRecord(**values | {"source": words("mxd_source")[raw.source]})
