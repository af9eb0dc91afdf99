"""Stock onnxruntime on the exported graphs against the runtime on the bundle packed from them.

docs/verification.md says what is compared, why bits may differ here, and where the bounds come from.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from mxdraft import __version__
from mxdraft.bundle import parse_provenance
from mxdraft.errors import RefusedError
from mxdraft.export import DATA_FILE, MODEL_FILES, TEMPLATE_FILE, OnnxRunner, Precision
from mxdraft.files import as_text, open_regular
from mxdraft.runtime import Engine, Model
from mxdraft.runtime import Sequence as Timeline

# In standard deviations of the logits of one position. The margin between two tokens may be three times the
# RMS of the difference of two independent errors.
RMS_BOUND = {"base": 0.08, "full": 0.003}
MARGIN_BOUND = {precision: 3 * 2**0.5 * bound for precision, bound in RMS_BOUND.items()}

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
class Difference:
    """Where two greedy continuations part. ``position`` counts generated tokens from 0; ``margin``: the
    runtime's logit of its own token less that of the other's, ``bound``: the most that rounding explains."""

    position: int
    runtime_token: int
    onnx_token: int
    margin: float
    bound: float


@dataclass(frozen=True)
class Continuation:
    """A prompt continued greedily by both. Texts come as what both have, the first other token, the rest."""

    prompt: str
    runtime: list[int]
    onnx: list[int]
    runtime_text: list[str]
    onnx_text: list[str]
    difference: Difference | None


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
    steps against onnxruntime in one pass."""

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
        """What must not be, in words; empty if all holds. A NaN is a fault."""
        faults = [self.digest_fault] if self.digest_fault else []
        for continuation in self.continuations:
            d = continuation.difference
            if d is not None and not 0 <= d.margin <= d.bound:
                faults.append(
                    f"prompt {continuation.prompt!r}: token {d.position} is {d.runtime_token}, onnxruntime's "
                    f"{d.onnx_token}; margin {d.margin:.4f}, bound {d.bound:.4f}"
                )
        for name, value, bounds in (
            ("RMS difference", self.text.rms, RMS_BOUND),
            ("margin of a token", self.text.largest_margin, MARGIN_BOUND),
        ):
            bound = bounds[self.precision]
            if not value <= bound:
                faults.append(f"text: {name} {value:.4f} of a deviation, bound {bound:.4f}")
        return [f"{self.precision}: {fault}" for fault in faults]

    def summary(self) -> str:
        same = sum(continuation.difference is None for continuation in self.continuations)
        text = self.text
        return (
            f"{self.precision}: digest {self.digest} {'differs' if self.digest_fault else 'is golden'}\n"
            f"{self.precision}: greedy: {same} of {len(self.continuations)} prompts identical, "
            f"{len(self.faults())} faults\n"
            f"{self.precision}: logits on {len(text.tokens)} tokens: max |difference| {text.max_abs:.3f}, "
            f"RMS {text.rms:.3%} of a deviation (onnxruntime against itself {text.onnx_rms:.3%}), "
            f"top-1 agreement {text.agreement:.1%}"
        )


def packed_precisions(provenance: str, directory: Path) -> list[Precision]:
    """The precisions of a bundle, after proof that the ONNX files in ``directory`` are those it was packed
    from. Raises RefusedError if they are not."""
    recorded = parse_provenance(provenance).get("sha256")
    if not isinstance(recorded, dict) or DATA_FILE not in recorded:
        raise RefusedError("the bundle's provenance does not tell its ONNX files; pack it again")
    precisions = [precision for precision, name in MODEL_FILES.items() if name in recorded]
    expected = {name: recorded[name] for name in [DATA_FILE, *(MODEL_FILES[p] for p in precisions)]}
    for name, digest in expected.items():
        try:
            with open_regular(directory / name) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except RefusedError as error:
            raise RefusedError(f"{error}; give its directory with --onnx") from error
        if found != digest:
            raise RefusedError(f"{directory / name} is not the file that the bundle was packed from")
    return precisions


def compare(engine: Engine, directory: Path, quick: bool, note: Callable[[str], None]) -> Result:
    """Verify the engine's precision against its graph in ``directory``; ``note`` gets lines of progress.

    ``quick`` leaves the graph's weights packed, which is small but slow, and runs fewer prompts and tokens.
    """
    plan, model = engine.plan, engine.model
    precision = plan.precision
    assert precision != "auto"
    note(f"{precision}: golden vectors")
    digest, _, digest_fault = engine.verify()
    note(f"{precision}: loading {MODEL_FILES[precision]}")
    runner = OnnxRunner(directory / MODEL_FILES[precision], plan.threads, fold=not quick)
    continuations = []
    prompts = PROMPTS[:2] if quick else PROMPTS
    for number, prompt in enumerate(prompts, start=1):
        note(f"{precision}: prompt {number}/{len(prompts)}")
        continuations.append(_continue(engine, runner, prompt, 8 if quick else 64))
    ids = model.encode(TEXT)[: min(64 if quick else 256, plan.ctx)]
    note(f"{precision}: {len(ids)} tokens of text")
    with Timeline(engine) as timeline:
        runtime = timeline.logits(ids)
    text = compare_logits(runtime, runner.logits(ids), runner.logits(ids, rows=1), model, ids)
    return Result(precision, digest, digest_fault, continuations, text)


def _continue(engine: Engine, runner: OnnxRunner, prompt: str, count: int) -> Continuation:
    model = engine.model
    has_template = TEMPLATE_FILE in parse_provenance(model.info.provenance)["sha256"]
    ids = model.chat([("user", prompt)]) if has_template else model.encode(prompt)
    count = min(count, engine.plan.ctx - len(ids))
    with Timeline(engine, max_tokens=count, ignore_eos=True) as timeline:
        runtime = [token for piece in timeline.generate(ids) for token in piece.ids]
    onnx = runner.generate_greedy(ids, count)
    parted = next((i for i in range(count) if runtime[i] != onnx[i]), count)
    difference = None
    if parted < count:
        with Timeline(engine) as timeline:
            logits = timeline.logits(ids + runtime[:parted])[-1]
        margin = float(logits[runtime[parted]] - logits[onnx[parted]])
        bound = MARGIN_BOUND[engine.plan.precision] * float(logits.std())
        difference = Difference(parted, runtime[parted], onnx[parted], margin, bound)
    return Continuation(
        prompt, runtime, onnx, _split(model, runtime, parted), _split(model, onnx, parted), difference
    )


def _split(model: Model, ids: list[int], at: int) -> list[str]:
    return [_text(model, part) for part in (ids[:at], ids[at : at + 1], ids[at + 1 :])]


def compare_logits(
    runtime: NDArray[np.float32],
    onnx: NDArray[np.float32],
    onnx_steps: NDArray[np.float32],
    model: Model,
    ids: Sequence[int],
) -> TextComparison:
    """Compare logits [n, vocab] of a text, position by position."""
    tokens = [_text(model, [token]) for token in ids]
    deviation = onnx.std(axis=1)
    rms_by_position = _centred_rms(runtime, onnx) / deviation
    error = np.abs(runtime - onnx)
    rows = np.arange(len(tokens))
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
        onnx_rms=float(np.sqrt(((_centred_rms(onnx_steps, onnx) / deviation) ** 2).mean())),
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


# ---- report ----


def report(results: Sequence[Result], bundle: str, directory: Path) -> dict[str, Any]:
    """Everything found, as what ``json`` can write."""
    return {
        "bundle": as_text(bundle),
        "onnx": as_text(directory),
        "versions": {"mxdraft": __version__, "onnxruntime": version("onnxruntime")},
        "bounds": {"margin": MARGIN_BOUND, "rms": RMS_BOUND},
        "faults": [fault for result in results for fault in result.faults()],
        "results": [dataclasses.asdict(result) for result in results],
    }


def report_html(content: dict[str, Any]) -> str:
    """``report``'s content as one page that needs no other file."""
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE).render(content)
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mxdraft verify: {{ bundle }}</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .3em .6em; border-bottom: 1px solid #ccc }
td, code { overflow-wrap: anywhere; white-space: pre-wrap }
mark { background: #fd9 }
.bad { color: #b00 }
svg { width: 100%; height: auto; background: #f7f7f7 }
rect { fill: #37b }
rect:hover { fill: #f80 }
</style>
<h1>{{ "Verified" if not faults else "Not verified" }}</h1>
<p>Bundle <code>{{ bundle }}</code> against onnxruntime {{ versions.onnxruntime }} on the graphs in
<code>{{ onnx }}</code>; mxdraft {{ versions.mxdraft }}.</p>
{% for fault in faults %}
<p class="bad">{{ fault }}</p>
{% endfor %}
{% for result in results %}
{% set text = result.text %}
<h2>{{ result.precision }}</h2>
<p>Digest of the golden vectors: <code>{{ result.digest }}</code>
{{ result.digest_fault or "as recorded in the bundle" }}</p>
<h3>Logits on a given text</h3>
<table>
<tr><th>largest difference<td>{{ "%.4f"|format(text.max_abs) }}
<tr><th>RMS difference, of a standard deviation<td>{{ "%.3f %%"|format(100 * text.rms) }}
<tr><th>onnxruntime token by token against itself in one pass<td>{{ "%.3f %%"|format(100 * text.onnx_rms) }}
<tr><th>same likeliest token<td>{{ "%.1f %%"|format(100 * text.agreement) }}
<tr><th>largest margin where not, of a standard deviation<td>{{ "%.3f"|format(text.largest_margin) }}
</table>
{% set bound = bounds.rms[result.precision] %}
{% set top = [2 * bound, text.rms_by_position|max]|max %}
<p>RMS difference by position (0 to {{ "%.2f"|format(100 * top) }} %); dashed: the bound of all positions'
RMS.</p>
<svg viewBox="0 0 {{ 4 * text.tokens|length }} 160" role="img">
{% for value in text.rms_by_position %}
<rect x="{{ 4 * loop.index0 }}" y="{{ "%.2f"|format(160 - 160 * value / top) }}" width="3"
 height="{{ "%.2f"|format(160 * value / top) }}"><title>{{ loop.index0 }} {{ text.tokens[loop.index0] }}:
{{ "%.3f %%"|format(100 * value) }}</title></rect>
{% endfor %}
{% set y = 160 - 160 * bound / top %}
<path d="M0 {{ y }}H{{ 4 * text.tokens|length }}" stroke="#b00" stroke-dasharray="4"/>
</svg>
<table>
<tr><th>position<th>after token<th>logit of<th>runtime<th>onnxruntime
{% for error in text.largest %}
<tr><td>{{ error.position }}<td>{{ error.token }}<td>{{ error.logit_of }}
<td>{{ "%.4f"|format(error.runtime) }}<td>{{ "%.4f"|format(error.onnx) }}
{% endfor %}
</table>
<h3>Greedy continuations</h3>
<table>
<tr><th>prompt<th>runtime, then onnxruntime from the first difference<th>first difference
{% for c in result.continuations %}
<tr><td>{{ c.prompt }}<td>{{ c.runtime_text[0] }}<mark>{{ c.runtime_text[1] }}</mark>{{ c.runtime_text[2] }}
{%- if c.difference %}


<mark>{{ c.onnx_text[1] }}</mark>{{ c.onnx_text[2] }}
{%- endif %}

<td>{% if c.difference %}token {{ c.difference.position }}: {{ c.difference.runtime_token }}, onnxruntime
{{ c.difference.onnx_token }}; margin {{ "%.4f"|format(c.difference.margin) }}, bound
{{ "%.4f"|format(c.difference.bound) }}{% else %}none in {{ c.runtime|length }} tokens{% endif %}
{% endfor %}
</table>
{% endfor %}
</html>
"""
