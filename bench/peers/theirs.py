# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer: one process in its own Python environment, a line of JSON a call and an answer."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any, Self

from mxdraft.errors import RefusedError
from mxdraft.runtime import Precision

from bench.peers.compare import Generation

SERVER = Path(__file__).with_name("server.py")
# What each precision is compared with: llama.cpp's format of about as many bits a weight.
FORMATS: dict[Precision, str] = {"base": "Q4_0", "full": "Q8_0"}


class Theirs:
    """Quantizes ``weights`` (GGUF) to ``format`` in ``directory``, opens that; ``about``: versions, build.

    Raises RefusedError if the environment is missing or the process fails, with the end of its stderr.
    """

    def __init__(
        self,
        python: Path,
        weights: Path,
        directory: Path,
        format: str,
        threads: int,
        ctx: int,
        server: Path = SERVER,
    ) -> None:
        if not python.exists():
            raise RefusedError(f"{python} is not there: `make bench-peers` makes llama.cpp's environment")
        self._log = directory / "llama.cpp.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self.about: dict[str, Any] = self._call(
            "open",
            weights=str(weights),
            quantized=str(directory / f"{format.lower()}.gguf"),
            format=format,
            threads=threads,
            ctx=ctx,
        )

    def prefill(self, ids: list[int]) -> float:
        return len(ids) / float(self._call("prefill", ids=ids))

    def decode(self, ids: list[int], tokens: int) -> float:
        return tokens / float(self._call("decode", ids=ids, tokens=tokens))

    def batch(self, ids: list[int], sequences: int, steps: int) -> float:
        return sequences * steps / float(self._call("batch", ids=ids, sequences=sequences, steps=steps))

    def generate(self, ids: list[int], tokens: int, drafts: bool) -> Generation:
        return Generation(*self._call("generate", ids=ids, tokens=tokens, ngram=drafts))

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: str, **arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([function, arguments]).encode("ascii") + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            raise RefusedError("\n".join([f"llama.cpp ended in {function} (log: {self._log})", *tail]))
        return json.loads(answer)
