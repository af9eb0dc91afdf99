"""The memory consumer of the dynamic origin, measured: what tiers of the KV cache cost in quality and give in
speed, against uniform formats and against other choices of the core tokens at equal bytes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.errors import UsageError
from mxdraft.evaluate import log_softmax
from mxdraft.files import replacing
from mxdraft.runtime import Engine, Model
from mxdraft.runtime import Sequence as Timeline
from mxdraft.runtime.engine import KV, Precision
from mxdraft.schedule import KV_BLOCK, Schedule, Weights

TAIL = 256  # positions at the end of a window that are compared
DECODED = 32  # tokens whose speed is measured
_CHUNK = 64
_FAST_BITS, _FAR_BITS = 8.25, 4.25


class Setting(NamedTuple):
    """One way to keep the cache; ``schedule`` replaces the bundle's where it is not None."""

    name: str
    kv: KV
    budget: float = 0.0
    schedule: Schedule | None = None


def settings(schedule: Schedule, ctx: int, bits: float) -> list[Setting]:
    """Uniform formats, the bundle's own tiers, and at about ``bits`` a value core tokens by attention, by
    chance (all scores equal), and none beside as long a window as fits."""
    fast = int((bits - _FAR_BITS) / (_FAST_BITS - _FAR_BITS) * ctx)
    window = max(KV_BLOCK, (fast - schedule.sinks - KV_BLOCK) // KV_BLOCK * KV_BLOCK)
    return [
        Setting("int8", "int8"),
        Setting("mxfp4", "mxfp4"),
        Setting("tiered", "tiered"),
        Setting("attention", "tiered", bits, dataclasses.replace(schedule, memory=Weights(0, 1, 0, 0))),
        Setting("random", "tiered", bits, dataclasses.replace(schedule, memory=Weights(0, 0, 0, 0))),
        Setting("recency", "tiered", 0.0, dataclasses.replace(schedule, recent=window, core_tokens=0)),
    ]


def measure(
    bundle: Path,
    text: str,
    contexts: Sequence[int] = (1024, 2048),
    windows: int = 2,
    bits: float = 5.2,
    precision: Precision = "auto",
    threads: int = 0,
    only: Sequence[str] = (),
    report: Callable[[str, str, dict[str, float]], None] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """By context and setting: bits_per_value, kl and agreement with f16 KV, perplexity, tok_per_s.

    Each of ``windows`` windows of the text is read whole; the last ``TAIL`` positions are compared, and the
    speed is that of ``DECODED`` tokens behind the last window. ``only``: names of settings; empty: all.
    ``report`` gets every row once it is known.
    Raises UsageError if the text is too short.
    """
    results: dict[str, dict[str, dict[str, float]]] = {}
    parsed = Bundle.open(bundle)
    for ctx in contexts:
        with Model(bundle) as model:
            ids = model.encode(text)
        if len(ids) < windows * ctx:
            raise UsageError(f"the text has {len(ids)} tokens: {windows} windows of {ctx} are more")
        pieces = [ids[i * ctx : (i + 1) * ctx] for i in range(windows)]
        rows: dict[str, dict[str, float]] = {}
        exact: list[NDArray[np.float64]] = []
        for setting in [Setting("f16", "f16"), *settings(parsed.schedule, ctx, bits)]:
            if only and setting.name not in (*only, "f16"):
                continue
            with _opened(bundle, parsed, setting.schedule) as model:
                rows[setting.name] = _row(model, setting, pieces, exact, precision, threads)
            if report is not None:
                report(str(ctx), setting.name, rows[setting.name])
        results[str(ctx)] = rows
    return results


def _row(
    model: Model,
    setting: Setting,
    pieces: list[list[int]],
    exact: list[NDArray[np.float64]],
    precision: Precision,
    threads: int,
) -> dict[str, float]:
    """One setting over all windows; the first one, f16, leaves its log-probabilities in ``exact``."""
    divergence, agreement, surprise = [], [], []
    with Engine(
        model,
        ctx=len(pieces[0]),
        threads=threads,
        precision=precision,
        draft="off",
        kv=setting.kv,
        kv_budget=setting.budget,
    ) as engine:
        for i, ids in enumerate(pieces):
            with Timeline(engine) as sequence:
                for start in range(0, len(ids) - TAIL, _CHUNK):
                    sequence.logits(ids[start : min(start + _CHUNK, len(ids) - TAIL)])
                found = log_softmax(sequence.logits(ids[-TAIL:]))
                bits = sequence.cache.bits_per_value
            if len(exact) == i:
                exact.append(found)
            divergence.append((np.exp(exact[i]) * (exact[i] - found)).sum(1).mean())
            agreement.append((exact[i].argmax(1) == found.argmax(1)).mean())
            surprise.append(-found[np.arange(TAIL - 1), ids[1 - TAIL :]].mean())
        with Timeline(engine, max_tokens=DECODED, ignore_eos=True) as sequence:
            for _ in sequence.generate(pieces[-1][: -DECODED - 1]):
                pass
            speed = sequence.stats["decode_tok_per_s"]
    return {
        "bits_per_value": bits,
        "kl": float(np.mean(divergence)),
        "agreement": float(np.mean(agreement)),
        "perplexity": float(np.exp(np.mean(surprise))),
        "tok_per_s": float(speed),
    }


@contextmanager
def _opened(bundle: Path, parsed: Bundle, schedule: Schedule | None) -> Iterator[Model]:
    """The bundle, or a copy of it with another schedule. ``parsed`` is what is in the file."""
    if schedule is None:
        with Model(bundle) as model:
            yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scheduled.mxb"
        with replacing(path) as file:
            writer = BundleWriter(file)
            for name in dict.fromkeys(
                [*parsed.sections, "schedule"]
            ):  # in their places: the drafter counts them
                data = schedule.pack() if name == "schedule" else parsed.section(name).tobytes()
                writer.add(name, [data])
            writer.seal()
        with Model(path) as model:
            yield model
