# SPDX-License-Identifier: Apache-2.0
"""mxdraft trace: what is recorded is what the engine says, what is read is checked, and the page computes
what the engine would. A build with Streamline's header marks every step."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mxdraft.bundle.schedule import FRACTIONS, Schedule
from mxdraft.errors import RefusedError
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.ship.build import build
from mxdraft.ship.targets import REPOSITORY
from mxdraft.trace.page import page, summary
from mxdraft.trace.read import Trace, read_trace
from mxdraft.trace.record import FullPrecision, Recorder

MIXED: dict[str, Any] = {"core_fraction": 0.1, "catch_up": 4}
PROMPT = "The small boat The small boat"
COMMAND = [sys.executable, "-m", "mxdraft.cli", "trace"]


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as opened:
        yield opened


def record(
    model: Model, path: Path, options: dict[str, Any], drafts: list[int] | None = None, **sampling: Any
) -> Trace:
    """Record a run. With ``drafts`` (tokens to propose, by position), full precision is asked too."""
    ids = model.encode(PROMPT)
    with (
        Engine(model, **options) as engine,
        Engine(model, precision="full") as full,
        Timeline(engine, **{"max_tokens": 40, "ignore_eos": True} | sampling) as sequence,
    ):
        if drafts:
            sequence.draft_with(lambda ids, most: drafts[len(ids) : len(ids) + most])
        sequence.prompt(ids)
        with path.open("wb") as file:
            recorder = Recorder(file, sequence, FullPrecision(full, ids) if drafts else None)
            recorder.start(options)
            while sequence.stop == "none":
                recorder.step()
            recorder.end()
    return read_trace(path)


@pytest.fixture(scope="module")
def plain(model: Model) -> tuple[list[int], list[Any]]:
    """The tokens of a run at base and at full precision without drafts, and the records of those made."""
    with (
        Engine(model, **MIXED, draft="off") as engine,
        Timeline(engine, max_tokens=40, ignore_eos=True) as sequence,
    ):
        records: list[Any] = []
        for _ in sequence.generate(model.encode(PROMPT)):
            records += sequence.records
        return sequence.tokens, records


@pytest.fixture(scope="module")
def mixed(
    model: Model, plain: tuple[list[int], list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    """The same run with mostly right drafts, and what full precision alone would choose."""
    drafts = [token if i % 5 else token + 1 for i, token in enumerate(plain[0])]
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    return record(model, path, MIXED | {"draft_min": 2}, drafts)


def run(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *args], capture_output=True, timeout=60, check=False, **options)


# ---- what is recorded ----


def test_lines_hold_what_the_engine_says(mixed: Trace, plain: tuple[list[int], list[Any]]) -> None:
    tokens, records = plain
    prompt = mixed.run["prompt"]["tokens"]
    assert [line["token"] for line in mixed.tokens] == tokens[prompt:]
    for line, known in zip(mixed.tokens, records, strict=True):
        assert {name: line[name] for name in known._fields} == known._asdict()
    assert [line["position"] for line in mixed.tokens] == list(range(prompt, prompt + 40))
    assert {line["look"] for line in mixed.tokens} == {"all", "core", "due", "none"}
    assert not any(line["drafted"] for line in mixed.tokens if line["position"] % 5 == 0)  # a wrong draft
    assert any(line["drafted"] for line in mixed.tokens)


def test_steps_add_up_to_the_statistics(mixed: Trace) -> None:
    def total(name: str) -> float:
        return float(sum(step[name] for step in mixed.steps))

    statistics = mixed.statistics
    assert total("tokens") == statistics["generated_tokens"]
    assert total("accepted") == statistics["accepted"] == sum(line["drafted"] for line in mixed.tokens)
    assert total("verified") == statistics["steps"] + statistics["drafted"] > statistics["steps"]
    assert total("bytes") == statistics["bytes_read"]
    assert total("seconds") == pytest.approx(statistics["prefill_s"] + statistics["decode_s"], abs=1e-4)


def test_full_precision_chooses_after_the_same_tokens(model: Model, mixed: Trace) -> None:
    ids, made = model.encode(PROMPT), [line["token"] for line in mixed.tokens]
    with Engine(model, precision="full") as engine, Timeline(engine) as sequence:
        expected = sequence.logits(ids + made).argmax(axis=1)[len(ids) - 1 : -1]
    assert [line["full_token"] for line in mixed.tokens] == expected.tolist()
    for line in mixed.tokens:  # a full-precision pass gives the full model's choice
        assert line["look"] == "none" or line["token"] == line["full_token"]
    assert any(line["base_token"] not in (None, line["full_token"]) for line in mixed.tokens)


def test_header_names_the_settings_in_force(model: Model, mixed: Trace, tmp_path: Path) -> None:
    header = mixed.run
    assert header["precision"] == "auto"
    assert (header["schedule"]["core_fraction"], header["schedule"]["catch_up"]) == (pytest.approx(0.1), 4)
    assert header["threshold"] == pytest.approx(Schedule.default(2).threshold(0.1))
    assert header["kernels"] == mixed.statistics["kernels"]
    assert header["bundle"] == model.info.path
    assert 0 < header["weight_bytes"]["base"] < header["weight_bytes"]["full"]
    assert record(model, tmp_path / "full", {"precision": "full"}).run["threshold"] is None


def test_bytes_that_are_no_text_survive(model: Model, tmp_path: Path) -> None:
    trace = record(model, tmp_path / "t", {"draft": "off"}, temperature=3.0, seed=5, max_tokens=100)
    for line in trace.tokens:
        data = bytes.fromhex(line["bytes"]) if "bytes" in line else line["text"].encode("utf-8")
        assert data == model.decode([line["token"]])
    assert any("bytes" in line for line in trace.tokens)
    assert any("bytes" not in line for line in trace.tokens)


def test_command_writes_the_text_of_generate_and_its_trace(bundle: Path, tmp_path: Path) -> None:
    options = [
        "-m",
        bundle,
        "-p",
        "The clock",
        "--raw",
        "-n",
        "20",
        "--core-fraction",
        "0.1",
        "--catch-up",
        "4",
    ]
    done = run(*options, "--full", "-o", tmp_path / "t.jsonl", "--html", tmp_path / "t.html")
    assert done.returncode == 0, done.stderr
    generate = subprocess.run([*COMMAND[:-1], "generate", *options], capture_output=True, check=True)
    assert done.stdout == generate.stdout
    trace = read_trace(tmp_path / "t.jsonl")
    assert len(trace.tokens) == trace.statistics["generated_tokens"] <= 20
    assert trace.run["options"]["catch_up"] == 4
    again = run("--from", tmp_path / "t.jsonl", "--html", tmp_path / "again.html")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "t.html").read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "x", "-o", "t"], "-m is required"),
        (["-m", "b", "-p", "x"], "-o is required"),
        (["-m", "b", "-p", "x", "-o", "t", "--full", "--temp", "1"], "--full compares greedy choices"),
        (["-m", "b", "-p", "x", "-o", "t", "--full", "--repeat-penalty", "1.1"], "--full compares greedy"),
        (["--from", "t"], "--from goes with --html and nothing else"),
        (["--from", "t", "--html", "h", "-n", "3"], "--from goes with --html and nothing else"),
        (["--from", "t", "--html", "h", "-"], "--from goes with --html and nothing else"),
    ],
)
def test_usage(args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr.decode("utf-8")


def test_the_bundle_is_not_overwritten(bundle: Path) -> None:
    size = bundle.stat().st_size
    done = run("-m", bundle, "-p", "x", "-o", bundle)
    assert done.returncode == 2
    assert b"is the bundle" in done.stderr
    assert bundle.stat().st_size == size


def test_without_a_page_the_base_install_is_enough(bundle: Path, tmp_path: Path) -> None:
    """Extras that are not installed: a module that is None cannot be imported."""
    extras = (
        "jinja2",
        "matplotlib",
        "onnx",
        "onnxruntime",
        "gguf",
        "safetensors",
        "tokenizers",
        "rich",
        "elftools",
    )
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({extras})); import mxdraft.cli; mxdraft.cli.main()"
    )
    command = [sys.executable, "-c", program, "trace", "-m", bundle, "-p", "x", "--raw", "-n", "2"]
    without, with_page = (
        subprocess.run([*command, "-o", tmp_path / name, *more], capture_output=True, check=False)
        for name, more in (("a", []), ("b", ["--html", tmp_path / "h"]))
    )
    assert without.returncode == 0, without.stderr
    assert with_page.returncode == 2
    assert b"this command needs jinja2" in with_page.stderr
    assert not (tmp_path / "b").exists()


def test_interrupt_leaves_a_whole_trace(bundle: Path, tmp_path: Path) -> None:
    args = [
        "-m",
        bundle,
        "-p",
        "x",
        "--raw",
        "-n",
        "0",
        "--ignore-eos",
        "-o",
        tmp_path / "t",
        "--html",
        tmp_path / "h",
    ]
    reader, writer = os.pipe()
    with subprocess.Popen([*COMMAND, *args], stdout=writer, stderr=subprocess.DEVNULL) as process:
        os.close(writer)
        os.read(reader, 1)  # the first step is done
        process.send_signal(signal.SIGINT)
        while os.read(reader, 4096):
            pass
        assert process.wait(60) == 130
    os.close(reader)
    trace = read_trace(tmp_path / "t")
    assert trace.statistics["stop"] == "none"
    assert trace.tokens
    assert (tmp_path / "h").exists()


# ---- what is read ----


def lines_of(trace: Trace) -> list[dict[str, Any]]:
    return [
        {"kind": "run", **trace.run},
        *({"kind": "token", **token} for token in trace.tokens),
        *({"kind": "step", **step} for step in trace.steps),
        {"kind": "end", "statistics": trace.statistics},
    ]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_any_cut_is_refused(mixed: Trace, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", lines_of(mixed))
    data = path.read_bytes()
    assert read_trace(path) == mixed
    last = data.rindex(b"\n", 0, -1) + 1
    for length in [0, 1, data.index(b"\n") + 1, len(data) // 2, last - 1, last, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(RefusedError, match=r"cut|not of a trace"):
            read_trace(path)
    lines = lines_of(mixed)
    del lines[3]
    with pytest.raises(RefusedError, match="39 tokens of 40: lines are missing"):
        read_trace(write_lines(path, lines))
    for order in (lines_of(mixed)[::-1], lines_of(mixed) * 2):
        with pytest.raises(RefusedError, match=r"line .* may be"):
            read_trace(write_lines(path, order))


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (0, "format", "mxdraft trace 2"),
        (0, "kind", "token"),
        (0, "kind", ["run"]),
        (0, "kind", None),
        (0, "threads", True),
        (0, "options", {"x": {"y": 1}}),
        (0, "schedule", {}),
        (0, "weight_bytes", {"base": 1}),
        (0, "threshold", "0.5"),
        (1, "text", "\ud800"),
        (1, "text", 5),
        (1, "bytes", "abc"),
        (1, "score", float("nan")),
        (1, "score", float("inf")),
        (1, "position", -1),
        (1, "position", 10**400),
        (1, "look", "<b>"),
        (1, "tier", [1]),
        (1, "drafted", 1),
        (-1, "statistics", {"generated_tokens": 40}),
    ],
)
def test_lies_are_refused(mixed: Trace, tmp_path: Path, line: int, name: str, value: object) -> None:
    lines = lines_of(mixed)
    lines[line][name] = value
    with pytest.raises(RefusedError, match=r"t\.jsonl: line \d+ is not of a trace"):
        read_trace(write_lines(tmp_path / "t.jsonl", lines))


@pytest.mark.parametrize(
    "data",
    [b"\n", b"null\n", b"[]\n", b'"run"\n', b"[" * 100_000 + b"\n", b"\xff\xfe{\x00}\x00\n", b"1e999\n"],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    with pytest.raises(RefusedError, match=r"t\.jsonl: line 1 is not of a trace"):
        read_trace(tmp_path / "t.jsonl")


def test_only_a_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(RefusedError, match="no such file"):
            read_trace(path)


# ---- the page ----

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    '"><img src=x onerror=alert(1)>',
    "\u202e\0\x85\n",
    "&lt;",
]


class Page(html.parser.HTMLParser):
    """Elements, their attributes, and the texts of scripts and tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.tokens: list[str] = []
        self._inside: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        is_token = dict(attrs).get("role") == "option"
        self._inside = self.scripts if tag == "script" else self.tokens if is_token else None
        if self._inside is not None:
            self._inside.append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self._inside[-1] += data


def with_texts(trace: Trace, texts: list[str]) -> Trace:
    tokens = [dict(token) for token in trace.tokens]
    for token, text in zip(tokens, texts, strict=False):
        token.pop("bytes", None)
        token |= {"special": False, "text": text, "base_text": text, "full_text": text, "tier": text}
    header = trace.run | {
        "bundle": texts[0],
        "options": {texts[0]: texts},
        "prompt": {"tokens": 1, "text": texts[2]},
    }
    return Trace(header, trace.steps, tokens, trace.statistics | {"stop": texts[1]})


def test_page_is_self_contained_and_escapes_what_it_shows(mixed: Trace) -> None:
    text = page(with_texts(mixed, HOSTILE))
    assert "://" not in text
    parsed, harmless = Page(text), Page(page(with_texts(mixed, ["a", "b", "c", "d", "e"])))
    assert parsed.elements == harmless.elements
    for tag, attributes in parsed.elements:
        assert tag not in ("img", "link", "iframe", "object", "embed", "a", "base")
        assert not [name for name in attributes if name in ("src", "href", "style") or name.startswith("on")]
    policy = [
        a["content"] or "" for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy[0].split(";")[0] == "default-src 'none'"
    data, code = parsed.scripts
    assert [token["text"] for token in json.loads(data)["tokens"][:5]] == HOSTILE
    assert code == harmless.scripts[1]
    assert parsed.tokens[:5] == [*HOSTILE[:3], "\u202e␀␡␤\n", "&lt;"]


def test_page_shows_a_character_in_the_last_of_its_tokens(mixed: Trace) -> None:
    tokens = [dict(token, special=False) for token in mixed.tokens]
    for token, data in zip(tokens, [b"\xe6", b"\xbc", b"\xa2", b"\xff", b"a\n"], strict=False):
        token["text"] = data.decode("utf-8", "replace")
        token["bytes"] = data.hex()
    trace = Trace(mixed.run, mixed.steps, tokens, mixed.statistics)
    assert Page(page(trace)).tokens[:5] == ["◌", "◌", "漢", "\ufffd", "a␤\n"]


def test_page_of_a_run_without_a_token(mixed: Trace) -> None:
    empty = Trace(mixed.run, mixed.steps[:1], [], mixed.statistics)
    assert Page(page(empty)).tokens == []


def hand_made(looks: str, base: str, full: str) -> list[dict[str, Any]]:
    """Tokens whose looks and choices are given as letters; "-": not known."""
    names = {"n": "none", "c": "core", "d": "due", "a": "all"}
    return [
        {"look": names[look], "base_token": None if b == "-" else ord(b), "drafted": False}
        | ({} if f == "-" else {"full_token": ord(f)})
        for look, b, f in zip(looks, base, full, strict=True)
    ]


def test_the_numbers_that_the_page_starts_with() -> None:
    run = {"weight_bytes": {"base": 100, "full": 160}}
    counts = summary(Trace(run, [], hand_made("anccndc", "-xxxx-x", "yxxyyyy"), {}))
    assert (counts["tokens"], counts["all"], counts["none"], counts["core"], counts["due"]) == (7, 1, 2, 3, 1)
    assert counts["bytes"] == (5 * 100 + 4 * 160) / 6  # base for all but the due one, full for four
    names = ("differences", "caught", "missed", "wasted")
    assert [counts[name] for name in names] == [3, 2, 1, 1]
    assert summary(Trace(run, [], hand_made("an", "-x", "--"), {}))["differences"] is None
    assert summary(Trace(run, [], [], {}))["bytes"] is None


def test_the_page_holds_the_numbers_of_its_trace(mixed: Trace) -> None:
    shown = dict(re.findall(r"<tr><th>([^<]*)<td>([^<]*?)\s*<td data-count", page(mixed)))
    counts = summary(mixed)
    labels = {"core": "core", "due": "due", "base precision": "none", "caught": "caught", "missed": "missed"}
    assert {label: int(shown[label]) for label in labels} == {label: counts[n] for label, n in labels.items()}
    classes = re.findall(r'class="token ([a-z ]*)" role="option"', page(mixed))
    assert sum("core" in marks.split() for marks in classes) == counts["core"]
    assert sum("missed" in marks.split() for marks in classes) == counts["missed"]
    assert sum("drafted" in marks.split() for marks in classes) == counts["drafted"] > 0


# ---- what the page computes (needs node) ----

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


DECIDE = """(settings => {
  const decided = decide(run.tokens, settings);
  return [decided, summarize(run.tokens, decided.looks, run.weight_bytes)];
})(%s)"""


def in_page(trace: Trace, expression: str) -> Any:
    """The value of an expression over the page's data, as ``run``, by the page's own script."""
    data, code = Page(page(trace)).scripts
    program = (
        f"{code}\nconst run = JSON.parse({json.dumps(data)});\nconsole.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        ["node", "-"],
        input=program,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_with_the_runs_settings_the_page_decides_as_the_engine_did(mixed: Trace) -> None:
    settings = in_page(mixed, "recordedSettings(run)")
    decided, counts = in_page(mixed, DECIDE % json.dumps(settings))
    assert settings["threshold"] == pytest.approx(mixed.run["threshold"])
    assert decided["scores"] == [token["score"] for token in mixed.tokens]
    assert decided["looks"] == [token["look"] for token in mixed.tokens]
    assert counts == {
        name: value for name, value in summary(mixed).items() if name not in ("drafted", "tiers")
    }


@needs_node
def test_other_settings(mixed: Trace) -> None:
    settings = {"alpha": 2.5, "beta": -1.0, "gamma": 3.0, "bias": -1.25, "threshold": -0.5, "catch_up": 3}
    decided, counts = in_page(mixed, DECIDE % json.dumps(settings))
    looks, pending = [], 0
    for i, t in enumerate(mixed.tokens):
        score = 2.5 * t["confidence"] - t["attention"] + 3 * t["history"] - 1.25
        assert decided["scores"][i] == pytest.approx(score, abs=1e-6)
        look = "all" if i == 0 else "due" if pending == 2 else "core" if score > -0.5 else "none"
        pending = pending + 1 if look == "none" else 0
        looks.append(look)
    assert decided["looks"] == looks
    assert {"core", "due", "none"} <= set(looks)
    known = [i for i, t in enumerate(mixed.tokens) if t["base_token"] is not None]
    wrong = [i for i in known if mixed.tokens[i]["base_token"] != mixed.tokens[i]["full_token"]]
    assert counts["differences"] == len(wrong)
    assert counts["caught"] == sum(looks[i] != "none" for i in wrong)
    assert counts["missed"] == sum(looks[i] == "none" for i in wrong)
    assert counts["wasted"] == sum(looks[i] == "core" for i in known if i not in wrong)
    planes = mixed.run["weight_bytes"]
    read = sum(planes["base"] * (x != "due") + planes["full"] * (x != "none") for x in looks[1:])
    assert counts["bytes"] == pytest.approx(read / (len(looks) - 1))


@needs_node
@pytest.mark.parametrize("threshold", [-9.0, 0.2, 0.77, 9.0])
def test_the_schedule_to_copy_gives_the_chosen_threshold(
    mixed: Trace, tmp_path: Path, threshold: float
) -> None:
    chosen = {"alpha": 1.5, "beta": 0.25, "gamma": -0.5, "bias": 0.125, "threshold": threshold, "catch_up": 7}
    scores = "askedScores(run.tokens, decide(run.tokens, settings).scores)"
    expression = f"(settings => toml(run.schedule, settings, {scores}))({json.dumps(chosen)})"
    (tmp_path / "s.toml").write_text(in_page(mixed, expression), encoding="utf-8")
    schedule = Schedule.read(tmp_path / "s.toml", 64)
    assert schedule.precision == (1.5, 0.25, -0.5, 0.125)
    assert schedule.catch_up == 7
    assert schedule.threshold(schedule.core_fraction) == pytest.approx(threshold, abs=1e-5)
    asked = [
        1.5 * t["confidence"] + 0.25 * t["attention"] - 0.5 * t["history"] + 0.125
        for t in mixed.tokens
        if t["base_token"] is not None
    ]
    quantiles = [float(np.quantile(asked, 1 - fraction)) for fraction in FRACTIONS]
    assert list(schedule.thresholds[1:-1]) == pytest.approx(quantiles[1:-1], abs=1e-6)


# ---- Streamline ----

# Replaces ARM's header and source: notes each mark on a line. Compiler warnings in it are not shown.
_HEADER = """
void note(const char *what, unsigned channel, const char *text);
#define ANNOTATE_SETUP note("setup", 0, "")
#define ANNOTATE_CHANNEL(channel, text) note("begin", channel, text)
#define ANNOTATE_CHANNEL_END(channel) note("end", channel, "")
#define ANNOTATE_MARKER_STR(text) note("mark", 0, text)
"""
_SOURCE = """
#include "streamline_annotate.h"
#include <stdio.h>
#include <stdlib.h>
void note(const char *what, unsigned channel, const char *text) {
    int unused;
    FILE *file = fopen(getenv("ANNOTATIONS"), "a");
    fprintf(file, "%s %u %s\\n", what, channel, text);
    fclose(file);
}
"""


def test_streamline_sees_steps_passes_and_core_tokens(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "arm").mkdir()
    (tmp_path / "arm" / "streamline_annotate.h").write_text(_HEADER, encoding="utf-8")
    (tmp_path / "arm" / "streamline_annotate.c").write_text(_SOURCE, encoding="utf-8")
    (tmp_path / "targets").mkdir()
    (tmp_path / "runtime").symlink_to(REPOSITORY / "runtime")
    host = (REPOSITORY / "targets" / "host.toml").read_text(encoding="utf-8")
    only_library = host.replace('["cli", "library"]', '["library"]')  # which is all that this needs
    (tmp_path / "targets" / "host.toml").write_text(only_library, encoding="utf-8")
    (library,) = build("host", repository=tmp_path, streamline=tmp_path / "arm")
    assert library == tmp_path / "build" / "host-streamline" / "libmxdraft.so"
    options = ["-p", "The clock", "--raw", "--core-fraction", "0.1", "--catch-up", "4", "--draft", "off"]
    environment = {"MXDRAFT_LIBRARY": str(library), "ANNOTATIONS": str(tmp_path / "annotations")}
    done = run("-m", bundle, *options, "-n", "30", "-o", tmp_path / "t", env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    expected = ["setup 0 "]
    trace = read_trace(tmp_path / "t")
    looks = iter([token["look"] for token in trace.tokens])
    for step in trace.steps:
        mine = [next(looks) for _ in range(step["tokens"])]
        expected.append("begin 1 step")
        if mine[0] in ("none", "core"):
            expected += ["begin 2 draft", "end 2 ", "begin 2 base", "end 2 "] + ["mark 0 core"] * (
                "core" in mine
            )
        if mine[-1] != "none":
            expected += ["begin 2 draft", "end 2 ", "begin 2 full", "end 2 "]
        expected.append("end 1 ")
    assert {"mark 0 core", "begin 2 base", "begin 2 full"} <= set(expected)
    assert (tmp_path / "annotations").read_text(encoding="utf-8").splitlines() == expected


def test_streamline_needs_arms_source(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"streamline_annotate\.c: no such file"):
        build("host", tmp_path / "out", streamline=tmp_path)
