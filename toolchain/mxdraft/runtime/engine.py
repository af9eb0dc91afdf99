# SPDX-License-Identifier: Apache-2.0
"""Engines: memory and threads for a model, the costs of steps, and what this machine offers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

from mxdraft.runtime._ffi import load, text_of, words
from mxdraft.runtime._handle import Handle, guarded
from mxdraft.runtime.model import Model
from mxdraft.runtime.options import Draft, EngineOptions, Plan, engine_struct, to_plan

if TYPE_CHECKING:
    from mxdraft.runtime.timeline import Timeline

BenchFormat = Literal["table", "csv", "json"]


class Verification(NamedTuple):
    """Result of replaying the golden vectors: the SHA-256 in hex, and whether it is the bundle's own."""

    digest: str
    matches: bool
    message: str


class Engine(Handle):
    """One arena (KV cache, activations) and one thread pool for a model; ``options``: see EngineOptions.

    Raises CapacityError if the plan does not fit memory, UsageError on an option out of range or a precision
    or drafter that the bundle lacks.
    """

    def __init__(self, model: Model, **options: Unpack[EngineOptions]) -> None:
        library = load()
        box = library.ffi.new("mxd_engine **")
        with model._resource.calls.held:
            library.call(library.lib.mxd_engine_open, model._pointer, engine_struct(options), box)
            super().__init__(box, library.lib.mxd_engine_close, model)
        self.model = model  # keeps it open

    @property
    @guarded
    def plan(self) -> Plan:
        return to_plan(load().lib.mxd_engine_plan(self._pointer))

    @guarded
    def load_costs(self, directory: str | os.PathLike[str]) -> bool:
        """Take what steps cost, for choosing draft lengths, from an earlier measurement; False: none."""
        return bool(load().lib.mxd_engine_load_costs(self._pointer, os.fsencode(directory)))

    def measure_costs(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Measure what steps cost, before the first sequence, and keep it in ``directory``."""
        library = load()
        path = library.ffi.NULL if directory is None else os.fsencode(directory)
        with self._resource.calls.running():
            library.call(library.lib.mxd_engine_measure_costs, self._pointer, path)

    @property
    def step_costs(self) -> list[float]:
        """Seconds of steps of 1 to 16 rows; before ``measure_costs``, a guess in units of the first."""
        return list(self._costs().step)[1:]

    @property
    def wide_costs(self) -> dict[int, float]:
        """Seconds of steps of several sequences by their rows, as far as they were measured."""
        rows = load().lib.mxd_wide_rows
        return {n: cost for n, cost in zip(rows, self._costs().wide, strict=True) if cost > 0}

    @guarded
    def _costs(self) -> Any:
        costs = load().ffi.new("mxd_costs *")
        load().lib.mxd_engine_get_costs(self._pointer, costs)
        return costs

    @guarded
    def share_tuner(self, other: Engine) -> None:
        """Learn together with an engine of the same kind, which may run in another thread; before the first
        sequence. Costs are those of ``other``. Raises UsageError if the engines differ."""
        library = load()
        library.call(library.lib.mxd_engine_share_tuner, self._pointer, other._pointer)

    def step(self, sequences: Iterable[Timeline]) -> None:
        """Run one step for any of this engine's sequences; then read ``output`` and ``text`` of each."""
        library = load()
        with self._resource.calls.running():
            pointers = [sequence._runnable for sequence in sequences]
            array = library.ffi.new("mxd_seq *[]", pointers)
            library.call(library.lib.mxd_step, self._pointer, array, len(pointers))

    def verify(self) -> Verification:
        """Replay the bundle's golden vectors. A digest that differs is a result, not an exception."""
        library = load()
        digest = library.ffi.new("char[65]")
        error = library.ffi.new("mxd_error *")
        with self._resource.calls.running():
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
        bits = sum(1 << words("mxd_draft").index(draft) for draft in drafts)
        options = library.ffi.new("mxd_bench_options *", (prompt_tokens, tokens, repeat, bits))
        box = library.ffi.new("mxd_bench **")
        with self._resource.calls.running():
            library.call(library.lib.mxd_bench_run, self._pointer, options, box)
        try:
            return {
                name: text_of(functools.partial(library.lib.mxd_bench_text, box[0], number))
                for number, name in enumerate(words("mxd_bench_format"))
            }
        finally:
            library.lib.mxd_bench_close(box)


def exit_on_bus_error(message: str, code: int) -> None:
    """From now on, where a mapped file cannot be read any more, end the process with ``code`` and ``message``
    (a line) on stderr (mxdraft.h); without this, SIGBUS ends it."""
    load().lib.mxd_exit_on_bus_error(message.encode("utf-8", "surrogateescape"), code)


def cpu_describe() -> str:
    """One line for each operation: its name and the function for this CPU under $MXDRAFT_CPU_MASK."""
    return text_of(load().lib.mxd_cpu_describe)


def default_threads() -> int:
    """Threads that an engine takes when none are asked for."""
    return int(load().lib.mxd_default_threads())


def version() -> str:
    """Version of the library, which is that of this package."""
    return str(load().ffi.string(load().lib.mxd_version()).decode("ascii"))
