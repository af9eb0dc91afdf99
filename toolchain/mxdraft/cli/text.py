# SPDX-License-Identifier: Apache-2.0
"""generate, chat, tokenize and trace."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
from click.core import ParameterSource

from mxdraft.cli._options import (
    PATH,
    cache_options,
    draft_options,
    engine_options,
    know_costs,
    limit_option,
    model_option,
    open_engine,
    open_model,
    options,
    sampling_options,
    stats_option,
    text_options,
)
from mxdraft.cli._terminal import (
    Interrupt,
    LineLostError,
    LineReader,
    emit,
    note,
    print_line,
    read_text,
    tell,
)
from mxdraft.errors import CapacityError, TransferError, UsageError
from mxdraft.files import replacing
from mxdraft.runtime import Engine, EngineOptions, Grammar, Model, Timeline

if TYPE_CHECKING:
    from mxdraft.trace.record import FullPrecision


class _SamplingOptions(TypedDict):
    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    json_schema: str | None


class _RunOptions(EngineOptions, _SamplingOptions):
    """The options that generate and chat share."""


_run_options = options(engine_options, cache_options, sampling_options, draft_options)


class _PromptOptions(_RunOptions):
    """What generate and trace are asked: a prompt, how to read it, and how to run."""

    text: str | None
    file: str | None
    stdin: str | None
    limit: int
    raw: bool
    system: str | None


_prompt_options = options(
    text_options,
    limit_option("128"),
    click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template."),
    click.option("--system", metavar="TEXT", help="System message before the prompt."),
    _run_options,
)


@click.command(epilog='Example: mxdraft generate -m build/smollm2-135m.mxb -p "Why is the sky blue?"')
@model_option
@_prompt_options
@click.option("--dump-tokens", is_flag=True, help="Print prompt and generated ids on stderr.")
@click.option("--explain", is_flag=True, help="Colour the text that was drafted and accepted.")
@stats_option("text")
def generate(
    bundle: str, dump_tokens: bool, explain: bool, stats: str, **asked: Unpack[_PromptOptions]
) -> None:
    """Continue a prompt: one user message through the chat template, or with --raw the plain text."""
    interrupt = Interrupt()
    with _opened(bundle, asked) as (sequence, ids):
        if dump_tokens:
            note("prompt_tokens: " + " ".join(map(str, ids)))
        sequence.prompt(ids)
        _stream(sequence, interrupt, explain)
        if os.isatty(1):
            emit(b"\n")
        if dump_tokens:
            note("generated_tokens: " + " ".join(map(str, sequence.tokens[len(ids) :])))
        _print_stats(sequence, stats)
    if interrupt.requested:
        sys.exit(130)


@click.command(epilog="Example: mxdraft chat -m build/smollm2-135m.mxb")
@model_option
@limit_option("512")
@click.option("--system", metavar="TEXT", help="System message at the start.")
@_run_options
@stats_option("none")
def chat(bundle: str, limit: int, system: str | None, stats: str, **run: Unpack[_RunOptions]) -> None:
    """Talk in turns: one line of stdin a message; /reset starts anew, /quit or end of input ends."""
    interrupt = Interrupt()
    code = 0
    with (
        open_model(bundle) as model,
        _open_engine(model, run) as engine,
        _open_sequence(engine, run, limit) as sequence,
    ):
        stdin = LineReader()
        messages = _opening(system)
        while True:
            try:
                line = _prompt_line(stdin)
            except LineLostError as error:
                note(f"mxdraft: error: {error}")
                code = error.exit_code
                continue
            if line in (None, b"/quit"):
                break
            if line == b"/reset":
                messages = _opening(system)
                code = 0
            elif line:
                code = _turn(sequence, messages, line, interrupt, stats)
    sys.exit(code)


@click.command(epilog="Example: mxdraft tokenize -m build/smollm2-135m.mxb -p 'Hello there'")
@model_option
@text_options
@click.option("--chat", is_flag=True, help="Through the chat template, as generate does without --raw.")
@click.option("--decode", is_flag=True, help="Decode instead: ids, separated by white space, to text.")
def tokenize(
    bundle: str, text: str | None, file: str | None, stdin: str | None, chat: bool, decode: bool
) -> None:
    """Print the token ids of a text on one line; nothing is added to the text."""
    if chat and decode:
        raise UsageError("--chat and --decode exclude each other")
    data = read_text(text, file, stdin)
    with open_model(bundle) as model:
        if decode:
            emit(model.decode(_parse_id(word) for word in data.split()))
        else:
            ids = _chat_ids(model, [], data) if chat else model.encode(data)
            print_line(" ".join(map(str, ids)))


@click.command(
    epilog="Example: mxdraft trace -m build/smollm2-135m.mxb -p 'Why is the sky blue?' --core-fraction 0.2 "
    "--full -o trace.jsonl --html trace.html"
)
@click.option("-m", "bundle", metavar="BUNDLE", help="Bundle file (.mxb).")
@_prompt_options
@click.option("--full", is_flag=True, help="Also what full precision would choose; greedy only.")
@click.option("-o", "output", metavar="FILE", type=PATH, help="JSON lines to write while it runs.")
@click.option("--from", "source", metavar="FILE", type=PATH, help="No run: the page of a recorded one.")
@click.option("--html", metavar="FILE", type=PATH, help="A page that shows the run and tries other settings.")
@click.pass_context
def trace(
    context: click.Context,
    bundle: str | None,
    full: bool,
    output: Path | None,
    source: Path | None,
    html: Path | None,
    **asked: Unpack[_PromptOptions],
) -> None:
    """Record a run as generate makes it: signals, decisions and costs of each token (docs/trace.md)."""
    if source is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source != ParameterSource.DEFAULT}
        if html is None or given != {"source", "html"}:
            raise UsageError("--from goes with --html and nothing else")
        _write_page(source, html)
        return
    if bundle is None or output is None:
        raise UsageError(f"{'-m' if bundle is None else '-o'} is required")
    if full and (asked["temp"] > 0 or asked["repeat_penalty"] != 1):
        raise UsageError("--full compares greedy choices: leave out --temp and --repeat-penalty")
    if output.exists() and Path(bundle).exists() and output.samefile(bundle):
        raise UsageError(f"-o {output} is the bundle")
    if html is not None:
        import mxdraft.trace.page  # noqa: F401  (what it needs is missed before the run, not after)
    interrupt = Interrupt()
    with _opened(bundle, asked) as (sequence, ids):
        recorded = {name: value for name, value in asked.items() if name not in ("text", "file", "stdin")}
        choices = _full_precision(sequence.engine, ids) if full else None
        sequence.prompt(ids)
        _record(sequence, choices, output, recorded | {"full": full}, interrupt)
    if html is not None:
        _write_page(output, html)
    if interrupt.requested:
        sys.exit(130)


def _full_precision(engine: Engine, ids: list[int]) -> FullPrecision:
    """Open an engine like ``engine`` at full precision, to ask what it chooses after a prompt."""
    from mxdraft.trace.record import FullPrecision

    plan = engine.plan
    full = Engine(engine.model, ctx=plan.ctx, threads=plan.threads, precision="full", draft="off")
    return FullPrecision(full, ids)


def _record(
    sequence: Timeline,
    full: FullPrecision | None,
    output: Path,
    options: dict[str, Any],
    interrupt: Interrupt,
) -> None:
    """Step until the sequence stops or Ctrl-C, writing text and trace as they are made."""
    from mxdraft.trace.record import Recorder

    try:
        file = output.open("wb")
    except OSError as error:
        raise TransferError(f"cannot write {output}: {error.strerror}") from error
    with file, interrupt.deferred():
        recorder = Recorder(file, sequence, full)
        recorder.start(options)
        while sequence.stop == "none" and not interrupt.requested:
            recorder.step()
            emit(sequence.text)
        recorder.end()
    if os.isatty(1):
        emit(b"\n")


def _write_page(trace: Path, html: Path) -> None:
    from mxdraft.trace.page import page
    from mxdraft.trace.read import read_trace

    text = page(read_trace(trace))
    with replacing(html) as file:
        file.write(text.encode("utf-8"))


def _open_engine(model: Model, run: _RunOptions) -> Engine:
    engine = open_engine(
        model,
        threads=run["threads"],
        ctx=run["ctx"],
        precision=run["precision"],
        core_fraction=run["core_fraction"],
        catch_up=run["catch_up"],
        draft=run["draft"],
        draft_max=run["draft_max"],
        kv=run["kv"],
        kv_budget=run["kv_budget"],
    )
    if run["draft"] != "off":
        know_costs(engine)
    return engine


def _open_sequence(engine: Engine, run: _RunOptions, limit: int) -> Timeline:
    seed = run["seed"] or 0
    if run["seed"] is None and run["temp"] > 0:
        seed = secrets.randbits(32)  # short enough to type
        note(f"mxdraft: note: seed {seed}")
    run["seed"] = seed
    timeline = Timeline(
        engine,
        temperature=run["temp"],
        top_k=run["top_k"],
        top_p=run["top_p"],
        min_p=run["min_p"],
        repeat_penalty=run["repeat_penalty"],
        seed=seed,
        max_tokens=limit,
        ignore_eos=run["ignore_eos"],
        stop=[os.fsencode(text) for text in run["stop"]],
    )
    if run["json_schema"] is not None:
        timeline.fit(Grammar(engine, read_text(None, run["json_schema"], None)))
    return timeline


def _opening(system: str | None) -> list[tuple[str, bytes]]:
    return [] if system is None else [("system", os.fsencode(system))]


@contextmanager
def _opened(bundle: str, asked: _PromptOptions) -> Iterator[tuple[Timeline, list[int]]]:
    """Open a sequence; gives it with the ids of the prompt that it is to get."""
    if asked["raw"] and asked["system"] is not None:
        raise UsageError("--system needs the chat template: leave out --raw")
    prompt = read_text(asked["text"], asked["file"], asked["stdin"])
    with open_model(bundle) as model:
        raw = asked["raw"]
        ids = _raw_ids(model, prompt) if raw else _chat_ids(model, _opening(asked["system"]), prompt)
        with (
            _open_engine(model, asked) as engine,
            _open_sequence(engine, asked, asked["limit"]) as sequence,
        ):
            yield sequence, ids


def _raw_ids(model: Model, prompt: bytes) -> list[int]:
    """Return the text's tokens and nothing else; of an empty text, the BOS token."""
    ids = model.encode(prompt)
    if ids:
        return ids
    bos = model.info.bos
    if bos is None:
        raise UsageError("the prompt is empty, and this model has no BOS token to start from: give some text")
    return [bos]


def _chat_ids(model: Model, messages: list[tuple[str, bytes]], prompt: bytes) -> list[int]:
    return model.chat([*messages, ("user", prompt)])


def _stream(sequence: Timeline, interrupt: Interrupt, explain: bool = False) -> bytes:
    """Step until the sequence stops or Ctrl-C, writing text as it is made; return all of it."""
    reply, origin = b"", bytearray()
    with interrupt.deferred():
        while sequence.stop == "none" and not interrupt.requested:
            sequence.engine.step([sequence])
            emit(_explained(sequence, origin) if explain else sequence.text)
            reply += sequence.text
    return reply


def _drafted_marks() -> tuple[bytes, bytes]:
    """Return what goes around drafted text: green, or brackets for who asked for no colours ($NO_COLOR) and
    terminals without ($TERM)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return (b"[", b"]") if plain else (b"\033[32m", b"\033[0m")


def _explained(sequence: Timeline, origin: bytearray) -> bytes:
    """Return the step's text, drafted and accepted parts marked.

    ``origin`` holds a byte for each byte of text that the sequence holds back: 1 if it was drafted.
    """
    before, after = _drafted_marks()
    model, text = sequence.engine.model, sequence.text
    for token, drafted in zip(sequence.output, sequence.drafted, strict=True):
        if not model.is_special(token):
            origin += bytes([drafted]) * len(model.decode([token]))
    parts, place = [], 0
    for was_drafted, run in itertools.groupby(origin[: len(text)]):
        part = text[place : place + len(list(run))]
        parts.append(before + part + after if was_drafted else part)
        place += len(part)
    del origin[: len(text)]
    return b"".join(parts)


def _turn(
    sequence: Timeline, messages: list[tuple[str, bytes]], line: bytes, interrupt: Interrupt, stats: str
) -> int:
    """Hold one exchange and add it to ``messages``; one that does not fit is dropped. Returns the exit code
    so far."""
    ids = _chat_ids(sequence.engine.model, messages, line)
    held = sequence.tokens
    # What the conversation shares with the tokens already processed is kept; the last token must run again.
    shared = 0
    while shared < min(len(held), len(ids) - 1) and held[shared] == ids[shared]:
        shared += 1
    sequence.truncate(shared)
    try:
        sequence.prompt(ids[shared:])
    except CapacityError as error:
        note(f"mxdraft: error: {error}; /reset starts a new conversation")
        return error.exit_code
    reply = _stream(sequence, interrupt)
    emit(b"\n")
    messages += [("user", line), ("assistant", reply.partition(b"\0")[0])]
    _print_stats(sequence, stats)
    if interrupt.requested:
        sys.exit(130)
    return 0


def _prompt_line(stdin: LineReader) -> bytes | None:
    if os.isatty(0):
        tell(b"> ")
    return stdin.read()


def _parse_id(word: bytes) -> int:
    if not (word.isdigit() and len(word) <= 10):
        raise UsageError(f"'{word.decode('utf-8', 'surrogateescape')}' is not a token id")
    return int(word)


def _print_stats(sequence: Timeline, form: str) -> None:
    if form == "json":
        note(sequence.stats_json)
    elif form == "text":
        s = sequence.stats
        note(
            f"prompt: {s['prompt_tokens']} tokens, {s['prefill_tok_per_s']:.1f} tok/s; "
            f"first token after {s['first_token_s']:.3f} s\n"
            f"generated: {s['generated_tokens']} tokens, {s['decode_tok_per_s']:.1f} tok/s; "
            f"{s['steps']} steps; stop: {s['stop']}\n"
            f"drafted: {s['drafted']}, accepted: {s['accepted']}, {s['tokens_per_step']:.2f} tokens a step; "
            f"gain {s['gain']:.2f} (expected {s['expected_gain']:.2f})\n"
            f"memory: peak {s['peak_rss_bytes'] / 2**20:.1f} MiB; threads {s['threads']}; seed {s['seed']}"
        )
