# SPDX-License-Identifier: Apache-2.0
"""The runtime as a peer: times are those of its own statistics, which include choosing the token."""

from __future__ import annotations

from mxdraft.runtime import Engine, Model, Precision, Timeline

from bench.peers.compare import Generation


class Ours:
    """An engine for one sequence of ``ctx`` positions; from the first batch on also one for many."""

    def __init__(self, model: Model, precision: Precision, threads: int, ctx: int) -> None:
        self._model = model
        self._precision = precision
        self._threads = threads
        self._engine = Engine(model, ctx=ctx, threads=threads, precision=precision, draft="off")
        self._drafting: Engine | None = None
        self._batch: list[Timeline] = []

    def prefill(self, ids: list[int]) -> float:
        stats = self._run(ids, 1)
        return float(stats["prefill_tok_per_s"])

    def decode(self, ids: list[int], tokens: int) -> float:
        stats = self._run(ids, tokens + 1)  # the first comes out of the prefill
        return float(stats["decode_tok_per_s"])

    def batch(self, ids: list[int], sequences: int, steps: int) -> float:
        if not self._batch:
            engine = Engine(
                self._model,
                ctx=len(ids) + steps + 2,
                threads=self._threads,
                precision=self._precision,
                max_seqs=sequences,
                draft="off",
            )
            self._batch = [Timeline(engine, max_tokens=steps + 1, ignore_eos=True) for _ in range(sequences)]
            for sequence in self._batch:
                sequence.prompt(ids[:-1])
            while len(self._batch[-1].tokens) < len(ids):
                engine.step(self._batch)
        for sequence in self._batch:
            sequence.truncate(len(ids) - 1)
            sequence.prompt(ids[-1:])  # its step is the prefill that the statistics set apart
        while self._batch[0].stop == "none":
            self._batch[0].engine.step(self._batch)
        return sequences * float(self._batch[0].stats["decode_tok_per_s"])

    def generate(self, ids: list[int], tokens: int, drafts: bool) -> Generation:
        with Timeline(self._drafter() if drafts else self._engine, max_tokens=tokens) as sequence:
            made = [token for piece in sequence.generate(ids) for token in piece.ids]
            stats = sequence.stats
        return Generation(made[1:], int(stats["steps"]), float(stats["decode_s"]))

    def _drafter(self) -> Engine:
        if self._drafting is None:
            plan = self._engine.plan
            self._drafting = Engine(self._model, ctx=plan.ctx, threads=plan.threads, precision=plan.precision)
            self._drafting.measure_costs()
        return self._drafting

    def _run(self, ids: list[int], tokens: int) -> dict[str, float]:
        with Timeline(self._engine, max_tokens=tokens, ignore_eos=True) as sequence:
            for _ in sequence.generate(ids):
                pass
            return sequence.stats
