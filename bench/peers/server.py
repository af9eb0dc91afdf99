# SPDX-License-Identifier: Apache-2.0
"""llama.cpp at the end of pipes: JSON lines, ``[function, arguments]`` on stdin and the result on stdout.

Runs in the environment that has llama-cpp-python, and so imports nothing of mxdraft. Uses the low-level
bindings: what is timed is llama_decode, as llama-bench does it, and for ``generate`` also choosing tokens.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as lc
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

WARNING, ERROR = 3, 4  # ggml_log_level


@lc.llama_log_callback  # type: ignore[untyped-decorator]
def log(level: int, message: bytes, _data: object) -> None:
    """Pass on only what is wrong: llama.cpp tells much while it runs."""
    if level in (WARNING, ERROR):
        sys.stderr.write(message.decode(errors="replace"))


class Context:
    """A KV cache of ``positions`` for each of ``sequences``, and a batch to fill."""

    def __init__(self, model: Any, threads: int, positions: int, sequences: int = 1) -> None:
        params = lc.llama_context_default_params()
        params.n_ctx = positions * sequences
        params.n_seq_max = sequences
        params.n_batch = positions * sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(model, params)
        if not self.context:
            raise MemoryError("llama_init_from_model")
        self.memory = lc.llama_get_memory(self.context)
        self.rows = lc.llama_batch_init(positions * sequences, 0, 1)

    def step(self, rows: list[tuple[int, int, int]], logits: int) -> float:
        """Decode rows of (token, position, sequence), with logits of the last few; returns seconds."""
        self.rows.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            self.rows.token[i] = token
            self.rows.pos[i] = position
            self.rows.n_seq_id[i] = 1
            self.rows.seq_id[i][0] = sequence
            self.rows.logits[i] = i >= len(rows) - logits
        start = time.perf_counter()
        status = lc.llama_decode(self.context, self.rows)
        lc.llama_synchronize(self.context)
        seconds = time.perf_counter() - start
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return seconds

    def keep(self, positions: int, sequence: int = 0) -> None:
        """Forget what follows the first positions."""
        lc.llama_memory_seq_rm(self.memory, sequence, positions, -1)

    def argmax(self, row: int, vocab: int) -> int:
        logits = lc.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (vocab,)).argmax())


class Server:
    """The functions that a line may call."""

    def open(self, weights: str, quantized: str, format: str, threads: int, ctx: int) -> dict[str, Any]:
        """Quantize ``weights`` to ``format`` (Q4_0, Q8_0) in the file ``quantized``, and open that."""
        params = lc.llama_model_quantize_default_params()
        params.ftype = getattr(lc, f"LLAMA_FTYPE_MOSTLY_{format}")
        params.allow_requantize = True
        if lc.llama_model_quantize(weights.encode(), quantized.encode(), ctypes.byref(params)):
            raise RuntimeError(f"cannot quantize {weights}")
        self.model = lc.llama_model_load_from_file(quantized.encode(), lc.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"cannot load {quantized}")
        self.vocabulary = lc.llama_model_get_vocab(self.model)
        self.vocab = lc.llama_vocab_n_tokens(self.vocabulary)
        self.threads = threads
        self.one = Context(self.model, threads, ctx)
        self.many: Context | None = None
        return {
            "llama-cpp-python": lc.__version__,
            "system": lc.llama_print_system_info().decode(),
            "format": format,
            "quantized_bytes": os.stat(quantized).st_size,  # noqa: PTH116
        }

    def prefill(self, ids: list[int]) -> float:
        self.one.keep(0)
        return self._prompt(ids)

    def decode(self, ids: list[int], tokens: int) -> float:
        """Any tokens will do: what they are does not change the work."""
        self.one.keep(0)
        self._prompt(ids)
        return sum(self.one.step([(ids[i % len(ids)], len(ids) + i, 0)], logits=1) for i in range(tokens))

    def batch(self, ids: list[int], sequences: int, steps: int) -> float:
        if self.many is None:
            self.many = Context(self.model, self.threads, len(ids) + steps, sequences)
            for s in range(sequences):
                self.many.step([(token, i, s) for i, token in enumerate(ids)], logits=1)
        for s in range(sequences):
            self.many.keep(len(ids), s)
        return sum(
            self.many.step([(ids[i], len(ids) + i, s) for s in range(sequences)], logits=sequences)
            for i in range(steps)
        )

    def generate(self, ids: list[int], tokens: int, ngram: bool) -> tuple[list[int], int, float]:
        """Greedy tokens, the first excepted, which the prefill gives; steps; seconds, drafting included."""
        self.one.keep(0)
        self._prompt(ids)
        draft = LlamaPromptLookupDecoding() if ngram else None
        made = [*ids, self.one.argmax(-1, self.vocab)]
        steps, start = 0, time.perf_counter()
        while len(made) - len(ids) < tokens and not self._ends(made[-1]):
            known = len(made)
            room = tokens - (known - len(ids)) - 1
            guess = [] if draft is None else draft(np.array(made, np.intc)).tolist()[:room]
            rows = [made[-1], *guess]
            self.one.step([(t, known - 1 + i, 0) for i, t in enumerate(rows)], logits=len(rows))
            steps += 1
            for i in range(len(rows)):
                made.append(self.one.argmax(i, self.vocab))
                if self._ends(made[-1]) or i == len(guess) or made[-1] != guess[i]:
                    break
            self.one.keep(len(made) - 1)
        return made[len(ids) + 1 :], steps, time.perf_counter() - start

    def _prompt(self, ids: list[int]) -> float:
        return self.one.step([(token, i, 0) for i, token in enumerate(ids)], logits=1)

    def _ends(self, token: int) -> bool:
        return bool(lc.llama_vocab_is_eog(self.vocabulary, token))


def main() -> None:
    # llama.cpp may print to stdout: answers go to a copy of it that nothing else knows.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    lc.llama_log_set(log, None)
    lc.llama_backend_init()
    server = Server()
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(json.dumps(getattr(server, function)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
