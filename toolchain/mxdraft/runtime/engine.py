"""Model, Engine and Sequence: the three objects of ``mxdraft.h`` as context managers.

Closing is safe in any order: a parent closes its open children first, everything is closed at the latest
when the interpreter exits, and an object that is used after its close raises ValueError. Errors of the
library come as the exceptions of ``mxdraft.errors``. An engine and its sequences belong to one thread at a
time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from mxdraft.errors import UsageError
from mxdraft.runtime._ffi import load

if TYPE_CHECKING:  # a command that asks for no logits starts sooner without numpy
    import numpy as np
    from numpy.typing import NDArray

Precision = Literal["auto", "base", "full"]
Draft = Literal["auto", "off", "ngram", "model"]
KV = Literal["auto", "f16", "int8", "mxfp4", "tiered"]
# Tokens so far and the most to propose, to ids or (id, index of the proposal before it).
Drafter = Callable[[list[int], int], "list[int] | list[tuple[int, int]]"]
Stop = Literal["none", "eos", "limit", "context", "string"]
BenchFormat = Literal["table", "csv", "json"]
Source = Literal["caller", "copy", "table", "model", "base"]

# Whether a row that base precision computed shall get full precision.
CoreRule = Callable[["TokenRecord"], bool]
Look = Literal["none", "core", "due", "all"]

_PRECISIONS: tuple[Precision, ...] = ("auto", "base", "full")
_DRAFTS: tuple[Draft, ...] = ("auto", "off", "ngram", "model")
_KVS: tuple[KV, ...] = ("auto", "f16", "int8", "mxfp4", "tiered")
_TIERS: tuple[Literal["recent", "core", "far"], ...] = ("recent", "core", "far")
_STOPS: tuple[Stop, ...] = ("none", "eos", "limit", "context", "string")
_BENCH_FORMATS: tuple[BenchFormat, ...] = ("table", "csv", "json")
_LOOKS: tuple[Look, ...] = ("none", "core", "due", "all")
_SOURCES: tuple[Source, ...] = ("caller", "copy", "table", "model", "base")
_WIDE_ROWS = (24, 32, 48, 64)
_NO_BOS = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Dimensions and origin of a bundle. ``bos`` is None if the model starts without one."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    has_residual: bool
    has_drafter: bool
    has_ngrams: bool
    bos: int | None
    file_bytes: int
    provenance: str
    path: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """An engine's memory in bytes, and its options as resolved. ``largest_ctx`` is 0 if no context fits."""

    weights: int
    kv_cache: int
    activations: int
    sequences: int
    total: int
    available: int
    ctx: int
    threads: int
    precision: Precision
    kv: KV
    largest_ctx: int


class CacheUse(NamedTuple):
    """What a sequence's KV cache holds: tokens by tier, mean bits of a value, bytes that a step reads."""

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
    """What was known of the row that chose a token (mxdraft.h, ``mxd_token_record``). ``base_token`` is None
    if base precision was not asked."""

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
    """A token that was drafted for a step, and what the step made of it (``mxd_draft_record``): ``parent`` is
    the index of the record that it follows, ``chance`` the estimate for it and all above it."""

    token: int
    parent: int
    depth: int
    source: Source
    confidence: float
    history: float
    chance: float
    verified: bool
    accepted: bool


class Verification(NamedTuple):
    """Result of a replay of the golden vectors: the SHA-256 in hex, and whether it is the bundle's own."""

    digest: str
    matches: bool
    message: str


class _Resource:
    """One C object and those opened from it. Apart from the Python objects, so that it can be closed in the
    right order whatever order they are collected in."""

    def __init__(self, box: Any, close: Any, parent: _Resource | None) -> None:
        self.box = box  # the ``mxd_… **`` that the library's close function takes and sets to NULL
        self._close = close
        self._parent = parent
        self._children: set[_Resource] = set()
        if parent is not None:
            parent._children.add(self)

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        self._close(self.box)
        if self._parent is not None:
            self._parent._children.discard(self)


class _Handle:
    """A Python object that owns a resource until it is closed, collected, or the interpreter exits."""

    def __init__(self, box: Any, close: Any, parent: _Handle | None = None) -> None:
        self._resource: _Resource = _Resource(box, close, None if parent is None else parent._resource)
        self._finalize = weakref.finalize(self, self._resource.close)

    @property
    def _pointer(self) -> Any:
        if self.closed:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._resource.box[0]

    def close(self) -> None:
        """Close this object and everything opened from it. Closing again does nothing."""
        self._finalize()

    @property
    def closed(self) -> bool:
        return bool(self._resource.box[0] == load().ffi.NULL)

    def __enter__(self) -> Self:
        self._pointer  # noqa: B018  (raises if closed)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Model(_Handle):
    """A bundle file, mapped read-only and fully validated.

    Raises BundleError (with the verdict of runtime/BUNDLE.md) if it is missing or refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        library = load()
        box = library.ffi.new("mxd_model **")
        library.call(library.lib.mxd_model_open, os.fsencode(path), box)
        super().__init__(box, library.lib.mxd_model_close)

    @property
    def info(self) -> ModelInfo:
        ffi, lib = load().ffi, load().lib
        raw = ffi.new("mxd_model_info *")
        lib.mxd_model_get_info(self._pointer, raw)
        values = {field.name: getattr(raw, field.name) for field in dataclasses.fields(ModelInfo)}
        return ModelInfo(
            **values
            | {
                "has_residual": bool(raw.has_residual),
                "has_drafter": bool(raw.has_drafter),
                "has_ngrams": bool(raw.has_ngrams),
                "bos": None if raw.bos == _NO_BOS else raw.bos,
                "provenance": ffi.string(raw.provenance).decode("utf-8", "surrogateescape"),
                "path": os.fsdecode(ffi.string(raw.path)),
            }
        )

    def encode(self, text: str | bytes) -> list[int]:
        """Plain text to ids; never produces special tokens, and adds none."""
        data = _utf8(text)
        return self._ids(load().lib.mxd_encode, data, len(data))

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of all tokens, special ones included; may end in an incomplete character.

        Raises UsageError on an id outside the vocabulary.
        """
        ffi, lib = load().ffi, load().lib
        length = ffi.new("size_t *")
        parts = []
        for token in ids:
            data = lib.mxd_token_bytes(self._pointer, token, length) if 0 <= token <= _NO_BOS else ffi.NULL
            if data == ffi.NULL:
                raise UsageError(f"token {token} is not in the vocabulary of {self.info.vocab}")
            parts.append(bytes(ffi.buffer(data, length[0])))
        return b"".join(parts)

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token, which produces no text while generating."""
        return bool(load().lib.mxd_token_is_special(self._pointer, token))

    def chat(self, messages: Iterable[tuple[str, str | bytes]], add_generation: bool = True) -> list[int]:
        """Encode (role, content) pairs through the bundle's chat template; content is plain text throughout.

        Raises UsageError if the bundle has no template, or not this role, or if a text holds a NUL byte.
        """
        ffi = load().ffi
        keep = [
            (ffi.new("char[]", _c_text(role)), ffi.new("char[]", _c_text(text))) for role, text in messages
        ]
        array = ffi.new("mxd_message[]", keep)
        return self._ids(load().lib.mxd_chat_encode, array, len(keep), int(add_generation))

    def plan(
        self,
        ctx: int = 0,
        threads: int = 0,
        precision: Precision = "auto",
        max_seqs: int | None = None,
        max_rows: int | None = None,
        draft: Draft = "auto",
        draft_max: int = 0,
        core_fraction: float | None = None,
        catch_up: int | None = None,
        kv: KV = "auto",
        kv_budget: float = 0.0,
    ) -> Plan:
        """What an engine with these options would allocate; it may exceed ``available``."""
        library = load()
        options = _options(
            ctx, threads, precision, max_seqs, max_rows, draft, core_fraction, catch_up, kv, kv_budget
        )
        options.draft_max = draft_max
        raw = library.ffi.new("mxd_plan *")
        library.call(library.lib.mxd_plan_memory, self._pointer, options, raw)
        return _plan(raw)

    def _ids(self, function: Any, *args: Any) -> list[int]:
        """Call an encoder twice: for the count, then for the ids."""
        library = load()
        count = library.ffi.new("size_t *")
        error = library.ffi.new("mxd_error *")
        status = function(self._pointer, *args, library.ffi.NULL, 0, count, error)
        if status not in (library.lib.MXD_OK, library.lib.MXD_ERR_BUFFER):
            raise library.error(status, error)
        ids = library.ffi.new("uint32_t[]", count[0])
        library.call(function, self._pointer, *args, ids, count[0], count)
        return list(ids)


class Engine(_Handle):
    """One arena (KV cache, activations) and a thread pool. 0 means the library's default (mxdraft.h).

    ``draft`` says who drafts for speculation, ``draft_max`` how many tokens a step at most, ``draft_min`` how
    many whether it pays or not; what is generated does not depend on them. Under precision ``auto``,
    ``core_fraction`` of the rows get full precision and ``catch_up`` is the most rows from one pass at full
    precision to the next; None: as the bundle says. ``kv`` is the format of the KV cache, ``kv_budget`` the
    bits a value that a tiered one may take.

    Raises CapacityError if the plan does not fit memory, UsageError on an option out of range or a precision
    or drafter that the bundle lacks.
    """

    def __init__(
        self,
        model: Model,
        ctx: int = 0,
        threads: int = 0,
        precision: Precision = "auto",
        max_seqs: int | None = None,
        max_rows: int | None = None,
        draft: Draft = "auto",
        draft_max: int = 0,
        draft_min: int = 0,
        core_fraction: float | None = None,
        catch_up: int | None = None,
        kv: KV = "auto",
        kv_budget: float = 0.0,
    ) -> None:
        library = load()
        options = _options(
            ctx, threads, precision, max_seqs, max_rows, draft, core_fraction, catch_up, kv, kv_budget
        )
        options.draft_max = draft_max
        options.draft_min = draft_min
        box = library.ffi.new("mxd_engine **")
        library.call(library.lib.mxd_engine_open, model._pointer, options, box)
        super().__init__(box, library.lib.mxd_engine_close, model)
        self.model = model  # keeps it open

    @property
    def plan(self) -> Plan:
        return _plan(load().lib.mxd_engine_plan(self._pointer))

    def load_costs(self, directory: str | os.PathLike[str]) -> bool:
        """Take what steps cost, for choosing draft lengths, from an earlier measurement; False: none."""
        return bool(load().lib.mxd_engine_load_costs(self._pointer, os.fsencode(directory)))

    def measure_costs(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Measure what steps cost, before the first sequence, and keep it in ``directory``."""
        library = load()
        path = library.ffi.NULL if directory is None else os.fsencode(directory)
        library.call(library.lib.mxd_engine_measure_costs, self._pointer, path)

    @property
    def step_costs(self) -> list[float]:
        """Seconds of a step of 1 to 16 rows; before ``measure``, a guess in units of the first."""
        costs = load().ffi.new("mxd_costs *")
        load().lib.mxd_engine_get_costs(self._pointer, costs)
        return list(costs.step)[1:]

    @property
    def wide_costs(self) -> dict[int, float]:
        """Seconds of steps of several sequences by their rows, as far as they were measured."""
        costs = load().ffi.new("mxd_costs *")
        load().lib.mxd_engine_get_costs(self._pointer, costs)
        return {rows: cost for rows, cost in zip(_WIDE_ROWS, costs.wide, strict=True) if cost > 0}

    def share_tuner(self, other: Engine) -> None:
        """Learn together with an engine of the same kind, which may run in another thread; before the first
        sequence. Costs are those of ``other``. Raises UsageError if the engines differ."""
        library = load()
        library.call(library.lib.mxd_engine_share_tuner, self._pointer, other._pointer)

    def step(self, sequences: Iterable[Sequence]) -> None:
        """One engine step for any of this engine's sequences; then read ``output`` and ``text`` of each."""
        library = load()
        pointers = [sequence._pointer for sequence in sequences]
        library.call(
            library.lib.mxd_step, self._pointer, library.ffi.new("mxd_seq *[]", pointers), len(pointers)
        )

    def verify(self) -> Verification:
        """Replay the bundle's golden vectors. A digest that differs is a result, not an exception."""
        library = load()
        digest = library.ffi.new("char[65]")
        error = library.ffi.new("mxd_error *")
        status = library.lib.mxd_verify(self._pointer, digest, error)
        if status not in (library.lib.MXD_OK, library.lib.MXD_ERR_MISMATCH):
            raise library.error(status, error)
        message = library.ffi.string(error.message).decode("utf-8") if status != library.lib.MXD_OK else ""
        return Verification(library.ffi.string(digest).decode("ascii"), status == library.lib.MXD_OK, message)

    def bench(
        self, prompt_tokens: int, tokens: int, repeat: int, drafts: Iterable[Draft] = ()
    ) -> dict[BenchFormat, str]:
        """Measure this engine on this machine (mxdraft.h, ``mxd_bench_run``); the results in every format.

        ``drafts``: drafters to compare with plain decoding. Raises UsageError on a number out of range,
        CapacityError if context or memory are too small.
        """
        library = load()
        options = library.ffi.new("mxd_bench_options *", (prompt_tokens, tokens, repeat))
        options.drafts = sum(1 << _DRAFTS.index(draft) for draft in drafts)
        box = library.ffi.new("mxd_bench **")
        library.call(library.lib.mxd_bench_run, self._pointer, options, box)
        try:
            return {
                name: _text(functools.partial(library.lib.mxd_bench_text, box[0], number))
                for number, name in enumerate(_BENCH_FORMATS)
            }
        finally:
            library.lib.mxd_bench_close(box)


class Sequence(_Handle):
    """One token timeline with its own sampling settings (mxdraft.h, ``mxd_sampling``).

    ``max_tokens`` 0 means until the context is full. ``copy_of`` is another sequence of the engine: the new
    one begins with all that it holds, as if it had been given the same tokens itself. Raises UsageError on a
    setting out of range, if ``max_seqs`` sequences are open already, or if ``copy_of`` is another engine's.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int = 0,
        max_tokens: int = 0,
        ignore_eos: bool = False,
        stop: Iterable[str | bytes] = (),
        copy_of: Sequence | None = None,
    ) -> None:
        library = load()
        ffi = library.ffi
        if copy_of is not None and copy_of.engine is not engine:
            raise UsageError("a sequence can be copied within its engine only")
        sampling = ffi.new("mxd_sampling *")
        library.lib.mxd_sampling_default(sampling)
        stops = [ffi.new("char[]", _c_text(text)) for text in stop]
        stop_array = ffi.new("char *[]", stops)
        sampling.temperature = temperature
        sampling.top_k = top_k
        sampling.top_p = top_p
        sampling.min_p = min_p
        sampling.repeat_penalty = repeat_penalty
        sampling.seed = seed
        sampling.max_tokens = max_tokens
        sampling.ignore_eos = ignore_eos
        sampling.stop = ffi.cast("const char *const *", stop_array)
        sampling.stop_count = len(stops)
        box = ffi.new("mxd_seq **")
        if copy_of is None:
            library.call(library.lib.mxd_seq_open, engine._pointer, sampling, box)
        else:
            library.call(library.lib.mxd_seq_copy, copy_of._pointer, sampling, box)
        super().__init__(box, library.lib.mxd_seq_close, engine)
        self.engine: Engine = engine  # keeps it open
        self._drafter: Any = None
        self._core_rule: Any = None

    def prompt(self, ids: Iterable[int]) -> None:
        """Queue tokens; clears a stop and restarts ``max_tokens`` and the statistics.

        Raises CapacityError if they do not fit the context together with one generated token.
        """
        library = load()
        array = library.ffi.new("uint32_t[]", list(ids))
        library.call(library.lib.mxd_seq_prompt, self._pointer, array, len(array))

    def generate(self, ids: Iterable[int]) -> Iterator[Piece]:
        """Queue the prompt now, then yield what each step makes until the sequence stops.

        The iterator may be abandoned at any point: the sequence keeps what was generated so far.
        """
        self.prompt(ids)
        return self._pieces()

    def _pieces(self) -> Iterator[Piece]:
        while self.stop == "none":
            self.engine.step([self])
            piece = Piece(self.text, self.output)
            if piece.ids or piece.text:
                yield piece

    def draft_with(self, drafter: Drafter | None) -> None:
        """Let ``drafter`` propose in place of the engine's own drafters; None gives them back.

        It is called with all tokens so far and the most it may propose; it returns ids (a chain), or pairs of
        an id and the index of the proposal that it follows (a tree; -1: the newest token).
        """
        library = load()

        def call(_: Any, ids: Any, n: int, out: Any, parent: Any, most: int) -> int:
            assert drafter is not None
            proposal = drafter(library.ffi.unpack(ids, n), most)[:most]
            for i, node in enumerate(proposal):
                if isinstance(node, tuple):
                    out[i], parent[i] = node
                else:
                    out[i] = node
            return len(proposal)

        # The library keeps the pointer, this object what it points to.
        self._drafter = drafter and library.ffi.callback("mxd_draft_function", call)
        pointer = self._drafter or library.ffi.NULL
        library.lib.mxd_seq_set_drafter(self._pointer, pointer, library.ffi.NULL)

    def decide_core_with(self, rule: CoreRule | None) -> None:
        """Under precision ``auto``, let ``rule`` decide which rows get full precision; None: the engine."""
        library = load()

        def call(_: Any, row: Any) -> int:
            assert rule is not None
            return int(rule(_record(row)))

        self._core_rule = rule and library.ffi.callback("mxd_core_function", call)
        pointer = self._core_rule or library.ffi.NULL
        library.lib.mxd_seq_set_core_rule(self._pointer, pointer, library.ffi.NULL)

    def logits(self, ids: Iterable[int]) -> NDArray[np.float32]:
        """Teacher forcing: append ``ids`` and return the logits of each, float32 [len(ids), vocab]."""
        import numpy as np

        library = load()
        array = library.ffi.new("uint32_t[]", list(ids))
        out = np.empty((len(array), self.engine.model.info.vocab), np.float32)
        pointer = library.ffi.cast("float *", library.ffi.from_buffer(out))
        library.call(library.lib.mxd_seq_logits, self._pointer, array, len(array), pointer)
        return out

    def truncate(self, length: int) -> None:
        """Forget all positions from ``length`` on, exactly."""
        library = load()
        library.call(library.lib.mxd_seq_truncate, self._pointer, length)

    @property
    def output(self) -> list[int]:
        """Token ids that the last step added."""
        return self._uint32(load().lib.mxd_seq_output)

    @property
    def drafted(self) -> list[bool]:
        """Which of ``output`` were drafted and accepted."""
        flags = load().lib.mxd_seq_drafted(self._pointer)
        return [bool(flags[i]) for i in range(len(self.output))]

    @property
    def records(self) -> list[TokenRecord]:
        """What was known of each token of ``output``."""
        records = load().lib.mxd_seq_records(self._pointer)
        return [_record(records + i) for i in range(len(self.output))]

    @property
    def drafts(self) -> list[DraftRecord]:
        """What was drafted for this sequence's last step, whether it was verified or not."""
        ffi, lib = load().ffi, load().lib
        count = ffi.new("size_t *")
        records = lib.mxd_seq_drafts(self._pointer, count)
        return [
            DraftRecord(
                r.token,
                r.parent,
                r.depth,
                _SOURCES[r.source],
                r.confidence,
                r.history,
                r.chance,
                bool(r.verified),
                bool(r.accepted),
            )
            for r in (records[i] for i in range(count[0]))
        ]

    @property
    def tokens(self) -> list[int]:
        """All token ids committed or queued so far."""
        return self._uint32(load().lib.mxd_seq_tokens)

    @property
    def text(self) -> bytes:
        """Text that the last step completed."""
        ffi, lib = load().ffi, load().lib
        length = ffi.new("size_t *")
        data = lib.mxd_seq_text(self._pointer, length)
        return bytes(ffi.buffer(data, length[0])) if length[0] else b""

    @property
    def stop(self) -> Stop:
        """Why the sequence stopped, ``"none"`` if it has not."""
        return _STOPS[int(load().lib.mxd_seq_stop(self._pointer))]

    @property
    def cache(self) -> CacheUse:
        """What the KV cache of this sequence holds now."""
        raw = load().ffi.new("mxd_kv_use *")
        load().lib.mxd_seq_kv(self._pointer, raw)
        return CacheUse(*(getattr(raw, name) for name in CacheUse._fields))

    @property
    def tiers(self) -> list[Literal["recent", "core", "far"]]:
        """The tier of each processed position."""
        tiers = load().ffi.new("uint8_t[]", len(self.tokens))
        count = load().lib.mxd_seq_tiers(self._pointer, tiers, len(tiers))
        return [_TIERS[tier] for tier in tiers[0:count]]

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics since the last prompt (keys: docs/cli.md)."""
        stats: dict[str, Any] = json.loads(self.stats_json)
        return stats

    @property
    def stats_json(self) -> str:
        """``stats`` as the library's own line of JSON."""
        return _text(lambda buffer, size: load().lib.mxd_seq_stats_json(self._pointer, buffer, size))

    def _uint32(self, function: Any) -> list[int]:
        ffi = load().ffi
        count = ffi.new("size_t *")
        data = function(self._pointer, count)
        return list(ffi.unpack(data, count[0])) if count[0] else []


def cpu_describe() -> str:
    """One line an operation: its name and the function bound to it on this CPU under $MXDRAFT_CPU_MASK."""
    return _text(load().lib.mxd_cpu_describe)


def default_threads() -> int:
    """Threads an engine takes when none are asked for."""
    return int(load().lib.mxd_default_threads())


def version() -> str:
    return str(load().ffi.string(load().lib.mxd_version()).decode("ascii"))


def _options(
    ctx: int,
    threads: int,
    precision: Precision,
    max_seqs: int | None,
    max_rows: int | None,
    draft: Draft,
    core_fraction: float | None,
    catch_up: int | None,
    kv: KV,
    kv_budget: float,
) -> Any:
    if precision not in _PRECISIONS:
        raise UsageError(f"precision {precision!r}: expected one of {', '.join(_PRECISIONS)}")
    if draft not in _DRAFTS:
        raise UsageError(f"draft {draft!r}: expected one of {', '.join(_DRAFTS)}")
    if kv not in _KVS:
        raise UsageError(f"kv {kv!r}: expected one of {', '.join(_KVS)}")
    options = load().ffi.new("mxd_options *")
    load().lib.mxd_options_default(options)
    options.ctx = ctx
    options.threads = threads
    options.precision = _PRECISIONS.index(precision)
    options.draft = _DRAFTS.index(draft)
    if core_fraction is not None:
        if core_fraction < 0:
            raise UsageError(f"core_fraction {core_fraction:g} is not in 0..1")
        options.core_fraction = core_fraction
    options.catch_up = catch_up or 0
    options.kv = _KVS.index(kv)
    options.kv_budget = kv_budget
    if max_seqs is not None:
        options.max_seqs = max_seqs
    if max_rows is not None:
        options.max_rows = max_rows
    return options


def _record(raw: Any) -> TokenRecord:
    values = {name: getattr(raw, name) for name in TokenRecord._fields}
    values["base_token"] = None if raw.base_token == _NO_BOS else raw.base_token
    return TokenRecord(**values | {"look": _LOOKS[raw.look]})


def _plan(raw: Any) -> Plan:
    values = {field.name: getattr(raw, field.name) for field in dataclasses.fields(Plan)}
    return Plan(**values | {"precision": _PRECISIONS[raw.precision], "kv": _KVS[raw.kv]})


def _text(function: Any) -> str:
    """A text from a function (buffer, capacity) that returns the length needed without the NUL."""
    ffi = load().ffi
    size = function(ffi.NULL, 0) + 1
    buffer = ffi.new("char[]", size)
    function(buffer, size)
    return str(ffi.string(buffer).decode("utf-8"))


def _utf8(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def _c_text(text: str | bytes) -> bytes:
    data = _utf8(text)
    if b"\0" in data:
        raise UsageError(
            f"the text holds a NUL byte at offset {data.index(0)}: it cannot be in a message or stop string"
        )
    return data
