# SPDX-License-Identifier: Apache-2.0
"""What both compute: golden vectors, logits on a text, greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxdraft.bundle import parse_provenance
from mxdraft.errors import RefusedError
from mxdraft.export.graph import DATA_FILE, MODEL_FILES, TEMPLATE_FILE, Precision
from mxdraft.export.runner import OnnxRunner
from mxdraft.files import file_sha256
from mxdraft.runtime import Engine, Model, Timeline

# In standard deviations of the logits of one position. The margin between two tokens may be three times the
# RMS of the difference of two independent errors.
RMS_BOUND = 0.08
MARGIN_BOUND = 3 * 2**0.5 * RMS_BOUND

STEPS = 32  # tokens that onnxruntime also reads one by one: each of these passes dequantizes all weights

PROMPTS = (
    "Why is the sky blue?",
    "Write one sentence about a lighthouse.",
    "What is 17 + 25?",
    "Translate to French: the cat sleeps on the chair.",
    "List three things to pack for a walk in the rain.",
    "Write a Python function that reverses a list.",
    "Who was the first person to walk on the Moon?",
    "Explain to a child what a river is.",
)

TEXT = """\
A tide table is a promise made by astronomy. Twice a day the sea comes up, twice it goes down again, and each
time it is some fifty minutes late, because the Moon has moved on while the Earth was turning. Whoever owns a
boat learns the rest: that a strong wind from the west adds half a metre, that the water in a narrow bay
arrives after the water at the cape, and that the printed height is an average of many years.

To predict the tide at one harbour, add a handful of waves of known period:

def height(hours, waves, mean=2.4):
    total = mean
    for amplitude, period, phase in waves:
        total += amplitude * math.cos(2 * math.pi * (hours - phase) / period)
    return total

The largest of them has a period of 12.42 hours. The second, 12.00 hours, belongs to the Sun; when both agree,
at new and at full moon, the tides are highest. "Spring tides," said the harbour master, "have nothing to do
with the season." He wrote three numbers on the board: 06:10, 4.9 m; 12:25, 0.7 m; 18:34, 5.1 m. Then he put
down the chalk and looked out at the mud, where a red boat lay on its side and waited.
"""


@dataclass(frozen=True)
class Parting:
    """Where onnxruntime prefers another token than the runtime chose. ``position`` counts generated tokens
    from 0; ``margin``: the runtime's logit of its own token less that of the other's, ``bound``: the most
    that rounding explains."""

    position: int
    runtime_token: int
    onnx_token: int
    margin: float
    bound: float


@dataclass(frozen=True)
class Continuation:
    """A prompt continued greedily by the runtime, and where onnxruntime would have gone another way. The text
    comes as what is before the first such token, that token, and the rest."""

    prompt: str
    runtime: list[int]
    text: list[str]
    onnx_token: str
    differences: list[Parting]


@dataclass(frozen=True)
class LogitError:
    """One logit on which the two are far apart."""

    position: int
    token: str
    logit_of: str
    runtime: float
    onnx: float


@dataclass(frozen=True)
class TextComparison:
    """Logits on a given text. RMS values are in standard deviations of a position's logits, after its mean
    difference, which changes no probability, is taken out; ``onnx_rms``: the same of onnxruntime in single
    steps, over the first STEPS tokens, against onnxruntime in one pass."""

    tokens: list[str]
    rms: float
    rms_by_position: list[float]
    onnx_rms: float
    max_abs: float
    agreement: float
    largest_margin: float
    largest: list[LogitError]


@dataclass(frozen=True)
class Result:
    """Everything about one precision. ``digest_fault`` is empty if the digest is the golden one."""

    precision: str
    digest: str
    digest_fault: str
    continuations: list[Continuation]
    text: TextComparison

    def faults(self) -> list[str]:
        """List what must not be, in words; empty if all holds. A NaN is a fault."""
        faults = [self.digest_fault] if self.digest_fault else []
        for continuation in self.continuations:
            faults += [
                f"prompt {continuation.prompt!r}: token {d.position} is {d.runtime_token}, onnxruntime's "
                f"{d.onnx_token}; margin {d.margin:.4f}, bound {d.bound:.4f}"
                for d in continuation.differences
                if not 0 <= d.margin <= d.bound
            ]
        for name, value, bound in (
            ("RMS difference", self.text.rms, RMS_BOUND),
            ("margin of a token", self.text.largest_margin, MARGIN_BOUND),
        ):
            if not value <= bound:
                faults.append(f"text: {name} {value:.4f} of a deviation, bound {bound:.4f}")
        return [f"{self.precision}: {fault}" for fault in faults]

    def summary(self) -> str:
        tokens = sum(len(continuation.runtime) for continuation in self.continuations)
        other = sum(len(continuation.differences) for continuation in self.continuations)
        text = self.text
        return (
            f"{self.precision}: digest {self.digest} {'differs' if self.digest_fault else 'is golden'}\n"
            f"{self.precision}: greedy: {tokens - other} of {tokens} tokens are onnxruntime's choice, too, "
            f"{len(self.faults())} faults\n"
            f"{self.precision}: logits on {len(text.tokens)} tokens: max |difference| {text.max_abs:.3f}, "
            f"RMS {text.rms:.3%} of a deviation (onnxruntime against itself {text.onnx_rms:.3%}), "
            f"top-1 agreement {text.agreement:.1%}"
        )


def packed_precisions(provenance: str, directory: Path) -> list[Precision]:
    """List the precisions of a bundle, after proof that the ONNX files in ``directory`` are those it was
    packed from. Raises RefusedError if they are not."""
    recorded = parse_provenance(provenance).get("sha256")
    if not isinstance(recorded, dict) or DATA_FILE not in recorded:
        raise RefusedError("the bundle's provenance does not tell its ONNX files; pack it again")
    precisions = [precision for precision, name in MODEL_FILES.items() if name in recorded]
    expected = {name: recorded[name] for name in [DATA_FILE, *(MODEL_FILES[p] for p in precisions)]}
    for name, digest in expected.items():
        try:
            found = file_sha256(directory / name)
        except RefusedError as error:
            raise RefusedError(f"{error}; give its directory with --onnx") from error
        if found != digest:
            raise RefusedError(f"{directory / name} is not the file that the bundle was packed from")
    return precisions


def verify_precision(engine: Engine, directory: Path, quick: bool, note: Callable[[str], None]) -> Result:
    """Compare the engine's precision with its graph in ``directory``; ``note`` gets lines of progress.

    ``quick`` runs fewer prompts and tokens.
    """
    plan, model = engine.plan, engine.model
    precision = plan.precision
    assert precision != "auto"
    note(f"{precision}: golden vectors")
    digest, _, digest_fault = engine.verify()
    note(f"{precision}: loading {MODEL_FILES[precision]}")
    runner = OnnxRunner(directory / MODEL_FILES[precision], plan.threads)
    continuations = []
    prompts = PROMPTS[:2] if quick else PROMPTS
    for number, prompt in enumerate(prompts, start=1):
        note(f"{precision}: prompt {number}/{len(prompts)}")
        continuations.append(_continue(engine, runner, prompt, 8 if quick else 64))
    ids = model.encode(TEXT)[: min(64 if quick else 256, plan.ctx)]
    note(f"{precision}: {len(ids)} tokens of text")
    with Timeline(engine) as timeline:
        runtime = timeline.logits(ids)
    text = compare_logits(runtime, runner.logits(ids), runner.logits(ids[:STEPS], rows=1), model, ids)
    return Result(precision, digest, digest_fault, continuations, text)


def _continue(engine: Engine, runner: OnnxRunner, prompt: str, count: int) -> Continuation:
    model = engine.model
    has_template = TEMPLATE_FILE in parse_provenance(model.info.provenance)["sha256"]
    ids = model.chat([("user", prompt)]) if has_template else model.encode(prompt)
    count = min(count, engine.plan.ctx - len(ids))
    with Timeline(engine, max_tokens=count, ignore_eos=True) as timeline:
        runtime = [token for piece in timeline.generate(ids) for token in piece.ids]
    # Both read the runtime's tokens, so that every position is compared, also after a difference.
    read = ids + runtime[:-1]
    chosen_at = slice(len(ids) - 1, None)
    with Timeline(engine) as timeline:
        logits = timeline.logits(read)[chosen_at]
    choices = runner.logits(read)[chosen_at].argmax(axis=1).tolist()
    differences = [
        Parting(
            i, own, other, float(logits[i, own] - logits[i, other]), MARGIN_BOUND * float(logits[i].std())
        )
        for i, (own, other) in enumerate(zip(runtime, choices, strict=True))
        if own != other
    ]
    first = differences[0].position if differences else count
    parts = (runtime[:first], runtime[first : first + 1], runtime[first + 1 :])
    other = choices[first : first + 1]
    return Continuation(prompt, runtime, [_text(model, p) for p in parts], _text(model, other), differences)


def compare_logits(
    runtime: NDArray[np.float32],
    onnx: NDArray[np.float32],
    onnx_steps: NDArray[np.float32],
    model: Model,
    ids: Sequence[int],
) -> TextComparison:
    """Compare logits [n, vocab] of a text, position by position; ``onnx_steps`` may have fewer."""
    tokens = [_text(model, [token]) for token in ids]
    deviation = onnx.std(axis=1)
    rms_by_position = _centred_rms(runtime, onnx) / deviation
    error = np.abs(runtime - onnx)
    rows, steps = np.arange(len(tokens)), len(onnx_steps)
    choice, onnx_choice = runtime.argmax(axis=1), onnx.argmax(axis=1)
    margins = (runtime[rows, choice] - runtime[rows, onnx_choice]) / runtime.std(axis=1)
    largest = []
    for position in np.argsort(-error.max(axis=1))[:5]:
        token = int(error[position].argmax())
        values = float(runtime[position, token]), float(onnx[position, token])
        largest.append(LogitError(int(position), tokens[position], _text(model, [token]), *values))
    return TextComparison(
        tokens=tokens,
        rms=float(np.sqrt((rms_by_position**2).mean())),
        rms_by_position=rms_by_position.tolist(),
        onnx_rms=float(np.sqrt(((_centred_rms(onnx_steps, onnx[:steps]) / deviation[:steps]) ** 2).mean())),
        max_abs=float(error.max()),
        agreement=float((choice == onnx_choice).mean()),
        largest_margin=float(margins.max()),
        largest=largest,
    )


def _centred_rms(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    rms: NDArray[np.float64] = np.std(a.astype(np.float64) - b, axis=1)
    return rms


def _text(model: Model, ids: Sequence[int]) -> str:
    return model.decode(ids).decode("utf-8", "replace")
