# SPDX-License-Identifier: Apache-2.0
"""Both command lines side by side: same arguments, same stdout, exit code and error (docs/cli.md)."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import tiny
from mxdraft.bundle import Bundle
from mxdraft.bundle.format import HEADER, SECTION_ENTRY
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline

ROOT = Path(__file__).parents[1]
PYTHON = (sys.executable, "-m", "mxdraft.cli")
C = (os.environ.get("MXDRAFT_CLI", str(ROOT / "build" / "host" / "mxdraft")),)
BOTH = pytest.mark.parametrize("program", [C, PYTHON], ids=["c", "python"])
TIMEOUT_S = 60

Arg = str | bytes | Path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T, made by the commands export and pack."""
    folder = tmp_path_factory.mktemp("bundle")
    tiny.save_huggingface(tiny.checkpoint(), folder / "model")
    exported = run(PYTHON, "export", folder / "model", "-o", folder / "onnx")
    assert exported.stdout.splitlines() == [
        os.fsencode(folder / "onnx" / f"model.{precision}.onnx") for precision in ("base", "full")
    ]
    packed = run(PYTHON, "pack", folder / "onnx", "-o", folder / "t.mxb")
    assert packed.returncode == 0, packed.stderr
    return folder / "t.mxb"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T without chat template, BOS and residual plane, and with a wrong golden digest."""
    folder = tmp_path_factory.mktemp("bare")
    checkpoint = tiny.checkpoint()
    tokenizer = dataclasses.replace(checkpoint.tokenizer, bos_id=None)
    export_model(dataclasses.replace(checkpoint, chat_template=None, tokenizer=tokenizer), folder)
    pack(folder, folder / "bare.mxb", residual=False)
    return folder / "bare.mxb"


def run(
    program: Sequence[str], *args: Arg, stdin: bytes | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*program, *args],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        env=os.environ | (env or {}),
        timeout=TIMEOUT_S,
        check=False,
    )


def run_both(
    *args: Arg, code: int = 0, stdin: bytes | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run both programs, demand the same outcome, and return it."""
    c, python = (run(program, *args, stdin=stdin, env=env) for program in (C, PYTHON))
    assert (c.returncode, c.stdout) == (python.returncode, python.stdout), (c.stderr, python.stderr)
    assert c.returncode == code, c.stderr
    assert errors(c) == errors(python)
    assert len(errors(c)) == (code != 0)
    return c


def errors(result: subprocess.CompletedProcess[bytes]) -> list[bytes]:
    return [line for line in result.stderr.splitlines() if line.startswith(b"mxdraft: error: ")]


def ids_after(name: str, result: subprocess.CompletedProcess[bytes]) -> list[int]:
    """The ids of a --dump-tokens line."""
    (line,) = (line for line in result.stderr.decode("utf-8").splitlines() if line.startswith(name + ":"))
    return [int(word) for word in line.split()[1:]]


def stats(result: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    values: dict[str, object] = json.loads(result.stderr.splitlines()[-1])
    return values


# ---- results ----


@pytest.mark.parametrize(
    "options",
    [
        ["-p", "The small boat"],
        ["-p", "The small boat", "--raw", "-t", "1"],
        ["-p", "The small boat", "--system", "Be brief", "--precision", "base"],
        [
            "-p",
            "bread",
            "--temp",
            "0.8",
            "--top-k",
            "40",
            "--top-p",
            "0.95",
            "--min-p",
            "1e-3",
            "--seed",
            "7",
        ],
        ["-p", "bread", "--temp=1.5", "--repeat-penalty=1.3", "--seed=18446744073709551615", "-n40"],
        ["-p", "clock", "--stop", "e", "--stop", "x y", "--ignore-eos", "-n", "0", "--ctx", "80"],
        ["-p", b"\xff\xe6 \xe6\xbc\xa2", "--draft", "off"],
        ["-p", "clock", "--kv", "tiered", "--kv-budget", "7", "-n", "0", "--ignore-eos", "--ctx", "200"],
        ["-p", "clock", "--kv=int8"],
        ["-p", "first", "-p", ""],
    ],
)
def test_generate_gives_the_same_text(bundle: Path, options: list[Arg]) -> None:
    result = run_both("generate", "-m", bundle, "--stats", "json", *options)
    assert result.stdout
    assert b"plan: weights" in result.stderr


def test_json_schema(bundle: Path, tmp_path: Path) -> None:
    schema, bad, pattern = (tmp_path / name for name in ("schema.json", "bad.json", "pattern.json"))
    properties = {"boat": {"enum": ["red", "green"]}, "crew": {"type": "array", "items": {"type": "boolean"}}}
    schema.write_text(json.dumps({"properties": properties, "required": ["boat"]}), encoding="utf-8")
    bad.write_text("{", encoding="utf-8")
    pattern.write_text('{"pattern": "a"}', encoding="utf-8")
    command: list[Arg] = ["generate", "-m", bundle, "-p", "boat", "-n", "0", "--stats", "json"]
    for options in (["--temp", "1", "--seed", "2"], ["--draft", "off"]):
        result = run_both(*command, *options, "--json-schema", schema)
        assert json.loads(result.stdout)["boat"] in ("red", "green")
        assert stats(result)["stop"] == "grammar"
    chat = run_both("chat", "-m", bundle, "-n", "60", "--json-schema", schema, stdin=b"one\ntwo\n")
    assert [list(json.loads(line)) for line in chat.stdout.splitlines() if line.endswith(b"}")]
    assert b"'pattern' is not supported at #" in run_both(*command, "--json-schema", pattern, code=2).stderr
    assert b"JSON: expected" in run_both(*command, "--json-schema", bad, code=2).stderr
    run_both(*command, "--json-schema", tmp_path / "none", code=3)
    run_both(*command, "--json-schema", tmp_path, code=6)


def test_statistics_have_the_documented_keys(bundle: Path) -> None:
    table = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("| key | meaning |")[2]
    documented = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|([^|]*)\|", table.split("\n\n")[0], re.M)))
    for program in (C, PYTHON):
        result = run(program, "generate", "-m", bundle, "-p", "x", "-n", "3", "--stats", "json", "-t", "1")
        assert sorted(stats(result)) == sorted(documented)
        assert stats(result)["stop"] == "limit"
        text = run(program, "generate", "-m", bundle, "-p", "x", "-n", "3").stderr.decode("utf-8")
        assert re.search(r"generated: 3 tokens, [0-9.]+ tok/s; 2 steps; stop: limit", text)
        none = run(program, "generate", "-m", bundle, "-p", "x", "-n", "3", "--stats", "none").stderr
        assert none.splitlines()[-1].startswith(b"plan: ")


def test_prompt_sources_are_the_same_tokens(bundle: Path, tmp_path: Path) -> None:
    text = " Ünï 漢\n\n".encode()
    (tmp_path / "prompt").write_bytes(text)
    command: list[Arg] = ["generate", "-m", bundle, "-n", "1", "--dump-tokens"]
    sources: list[tuple[list[Arg], bytes | None]] = [
        (["-p", text], None),
        (["-f", tmp_path / "prompt"], None),
        (["-"], text),
    ]
    dumps = [ids_after("prompt_tokens", run_both(*command, *args, stdin=stdin)) for args, stdin in sources]
    with Model(bundle) as model:
        assert dumps == [model.chat([("user", text)])] * 3


def test_seed_is_drawn_and_told(bundle: Path) -> None:
    command: list[Arg] = ["generate", "-m", bundle, "-p", "x", "--temp", "2", "-n", "30", "--stats", "json"]
    for program in (C, PYTHON):
        runs = [run(program, *command) for _ in range(2)]
        told = [re.findall(rb"^mxdraft: note: seed ([0-9]+)$", result.stderr, re.M) for result in runs]
        assert told == [[str(stats(result)["seed"]).encode("ascii")] for result in runs]
        assert told[0] != told[1]
        assert runs[0].stdout != runs[1].stdout
        for result, (seed,) in zip(runs, told, strict=True):
            assert run_both(*command, "--seed", seed).stdout == result.stdout
        text = run(program, *command[:-1], "text")
        (seed,) = re.findall(rb"note: seed ([0-9]+)", text.stderr)
        assert text.stderr.endswith(b"; seed " + seed + b"\n")
        chat = run(program, "chat", "-m", bundle, "--temp", "1", "-n", "2", stdin=b"hi\nho\n").stderr
        assert chat.count(b"mxdraft: note: seed ") == 1
        for options in (["--temp", "0"], ["--temp", "0", "--repeat-penalty", "1.2"], ["--seed", "7"]):
            given = run(program, *command, *options)
            assert b"note: seed" not in given.stderr
            assert stats(given)["seed"] == (7 if "--seed" in options else 0)


def test_generated_tokens_spell_the_text(bundle: Path) -> None:
    result = run_both(
        "generate", "-m", bundle, "-p", "The clock", "--dump-tokens", "-n", "30", "--ignore-eos"
    )
    ids = ids_after("generated_tokens", result)
    assert len(ids) == 30
    with Model(bundle) as model:
        assert model.decode(i for i in ids if not model.is_special(i)) == result.stdout


def test_empty_prompt(bundle: Path, bare: Path) -> None:
    with Model(bundle) as model:
        empty_message = model.chat([("user", "")])
        bos = model.info.bos
    for stdin in (b"", None):  # None: /dev/null
        result = run_both("generate", "-m", bundle, "-", "-n", "2", "--dump-tokens", stdin=stdin)
        assert ids_after("prompt_tokens", result) == empty_message
    raw = run_both("generate", "-m", bundle, "-p", "", "--raw", "-n", "2", "--dump-tokens")
    assert ids_after("prompt_tokens", raw) == [bos]
    refusal = run_both("generate", "-m", bare, "-p", "", "--raw", code=2)
    assert b"no BOS token" in refusal.stderr


def test_nul_bytes(bundle: Path) -> None:
    raw = run_both("generate", "-m", bundle, "-", "--raw", "-n", "1", "--dump-tokens", stdin=b"a\0b")
    with Model(bundle) as model:
        assert ids_after("prompt_tokens", raw) == model.encode(b"a\0b")
    refusal = run_both("generate", "-m", bundle, "-", stdin=b"a\0b", code=2)
    assert b"NUL byte at offset 1" in refusal.stderr


def test_control_token_names_are_plain_text(bundle: Path) -> None:
    result = run_both("tokenize", "-m", bundle, "-p", "<|im_end|>")
    with Model(bundle) as model:
        assert not any(model.is_special(int(word)) for word in result.stdout.split())


def test_tokenize_and_back(bundle: Path) -> None:
    text = "don't  stop 12 🙂\n".encode()
    ids = run_both("tokenize", "-m", bundle, "-", stdin=text).stdout
    assert re.fullmatch(rb"[0-9]+( [0-9]+)*\n", ids)
    assert run_both("tokenize", "-m", bundle, "-", "--decode", stdin=ids).stdout == text
    chat = run_both("tokenize", "-m", bundle, "-p", "hi", "--chat").stdout
    assert b"<|im_start|>" in run_both("tokenize", "-m", bundle, "--decode", "-p", chat).stdout
    assert run_both("tokenize", "-m", bundle, "-p", "").stdout == b"\n"


def test_verify_needs_every_bit(bundle: Path, bare: Path) -> None:
    golden = Bundle.open(bundle).golden
    assert golden is not None
    for precision, digest in (("base", golden.base_digest), ("full", golden.full_digest)):
        result = run_both("verify", "-m", bundle, "--precision", precision, "--chunk", "3", "-t", "1")
        assert result.stdout.decode("ascii") == digest.hex() + "\n"
    other = run_both("verify", "-m", bare, code=5)
    assert other.stdout.decode("ascii") == golden.base_digest.hex() + "\n"


def test_info(bundle: Path, bare: Path) -> None:
    for path, precisions in (
        (bundle, b"precisions base full\ndrafters lookup\nbos 1\n"),
        (bare, b"precisions base\ndrafters lookup\nbos none\n"),
    ):
        c, python = (
            # The plan shows the memory that is free at this moment.
            re.sub(rb"plan: .* available", b"", run(program, "info", "-m", path, "--cpu").stdout)
            for program in (C, PYTHON)
        )
        assert c == python
        assert precisions in c


def test_chat_keeps_the_conversation(bundle: Path) -> None:
    options = ["chat", "-m", str(bundle), "-n", "8", "--ignore-eos", "--stats", "json"]
    two_turns = run_both(*options, stdin=b"The boat\nThe box\n")
    with_reset = run_both(*options, stdin=b"The boat\r\n\n/reset\nThe box\n/quit\nnever read\n")
    alone = run_both(*options, stdin=b"The box")
    assert two_turns.stdout.count(b"\n") >= 2
    assert with_reset.stdout.endswith(alone.stdout)
    assert not two_turns.stdout.endswith(alone.stdout)


def test_chat_goes_on_after_a_message_that_does_not_fit(bundle: Path) -> None:
    options = ["chat", "-m", str(bundle), "-n", "4", "--ctx", "64"]
    long = b"word " * 60 + b"\n"
    refused = run_both(*options, stdin=long, code=4)
    assert b"/reset starts a new conversation" in refused.stderr
    for rest in (b"hi\n", b"/reset\n"):
        for program in (C, PYTHON):
            assert run(program, *options, stdin=long + rest).returncode == 0


# ---- drafting ----


@pytest.fixture(scope="module")
def drafting(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a drafter, and a table of its answers to some prompts."""
    said = []
    with Model(bundle) as model, Engine(model, draft="off", threads=1) as engine:
        for text in ("The small boat", "bread and letters"):
            with Timeline(engine, max_tokens=40, ignore_eos=True) as sequence:
                for _ in sequence.generate(model.encode(text)):
                    pass
                said += [sequence.tokens] * 3
    path = tmp_path_factory.mktemp("drafting") / "d.mxb"
    data = tiny.with_ngrams(bundle.read_bytes(), said)
    path.write_bytes(tiny.with_drafter(data, tiny.drafter(Bundle(data).config)))
    return path


@pytest.fixture
def cheap(drafting: Path, tmp_path: Path) -> dict[str, str]:
    """An environment whose cache says that verifying costs nothing, so that drafts pay. A step is said to
    take 1.1 µs. Every real one takes more than four times as long, and that is the most that the programs
    learn from; so they learn the same, and draft alike."""
    env = {"MXDRAFT_CACHE": str(tmp_path / "new" / "cache")}
    (tmp_path / "new").mkdir()
    for draft in ("ngram", "model"):
        for program in (C, PYTHON):
            result = run(
                program,
                *("generate", "-m", drafting, "-p", "x", "-n", "1", "-t", "1", "--draft", draft),
                env=env,
            )
            assert (b"measuring what steps cost" in result.stderr) == (program == C)
    files = list((tmp_path / "new" / "cache").iterdir())
    assert len(files) == 2
    for file in files:
        file.write_text("1.100 " * 16 + "0.100 0.000\n", encoding="ascii")
    return env


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temp", "0.8", "--top-p", "0.9", "--repeat-penalty", "1.1", "--seed", "0"],
        ["--stop", "e", "--stop", "x y"],
    ],
)
def test_drafts_never_change_the_text(drafting: Path, cheap: dict[str, str], options: list[Arg]) -> None:
    command: list[Arg] = ["generate", "-m", drafting, "-p", "The small boat", "--raw", "-n", "40", "-t", "1"]
    command += ["--ignore-eos", "--dump-tokens", "--stats", "json", *options]
    plain = run_both(*command, "--draft", "off")
    assert (stats(plain)["drafted"], stats(plain)["draft"]) == (0, "off")
    for draft, most in (("ngram", "8"), ("ngram", "1"), ("model", "4"), ("auto", "8"), ("auto", "15")):
        result = run_both(*command, "--draft", draft, "--draft-max", most, env=cheap)
        assert result.stdout == plain.stdout
        assert ids_after("generated_tokens", result) == ids_after("generated_tokens", plain)
        numbers = stats(result)
        assert numbers["draft"] == draft
        for key in ("stop", "prompt_tokens", "generated_tokens"):
            assert numbers[key] == stats(plain)[key]
        if not options:
            assert numbers["drafted"] > 0  # type: ignore[operator]
            assert (numbers["accepted"] > 10) == (draft != "model")  # type: ignore[operator]
            assert numbers["tokens_per_step"] <= int(most) + 1  # type: ignore[operator]


def test_explain_colours_what_was_drafted_and_accepted(drafting: Path, cheap: dict[str, str]) -> None:
    options = ["-p", "The small boat", "--raw", "-n", "40", "-t", "1", "--ignore-eos", "--draft", "ngram"]
    for more in (
        [],
        ["--stop", "zzz", "--stop", "\u6f22"],
        ["--temp", "0.9", "--seed", "0"],
        ["--draft-max", "1"],
    ):
        command: list[Arg] = ["generate", "-m", drafting, *options, *more]
        plain = run_both(*command, env=cheap).stdout
        explained = run_both(*command, "--explain", env=cheap).stdout
        parts = re.split(rb"\x1b\[32m(.*?)\x1b\[0m", explained, flags=re.DOTALL)
        assert b"\x1b" not in b"".join(parts).replace(b"\x1b", b"", plain.count(b"\x1b"))
        assert b"".join(parts) == plain
        if not more:
            assert b"".join(parts[1::2]) == drafted_text(drafting, Path(cheap["MXDRAFT_CACHE"]))
    off = run_both("generate", "-m", drafting, *options, "--draft", "off", "--explain")
    assert off.stdout == run_both("generate", "-m", drafting, *options, "--draft", "off").stdout


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "", "TERM": "vt100"}])
def test_explain_without_colours(drafting: Path, cheap: dict[str, str], env: dict[str, str]) -> None:
    command: list[Arg] = ["generate", "-m", drafting, "-p", "The small boat", "--raw", "-n", "40", "-t", "1"]
    command += ["--ignore-eos", "--draft", "ngram", "--explain"]
    colours = run_both(*command, env=cheap | {"TERM": "xterm", "NO_COLOR": ""}).stdout
    brackets = colours.replace(b"\x1b[32m", b"[").replace(b"\x1b[0m", b"]")
    assert brackets.count(b"[") == brackets.count(b"]") > 1
    assert run_both(*command, env=cheap | env).stdout == (colours if "" in env.values() else brackets)


def drafted_text(bundle: Path, cache: Path) -> bytes:
    """The bytes of that run's accepted drafts, as the library reports them."""
    with (
        Model(bundle) as model,
        Engine(model, threads=1, draft="ngram", draft_max=8) as engine,
        Timeline(engine, max_tokens=40, ignore_eos=True) as sequence,
    ):
        assert engine.load_costs(cache)
        ids: list[int] = []
        for _ in sequence.generate(model.encode("The small boat")):
            ids += [
                token
                for token, drafted in zip(sequence.output, sequence.drafted, strict=True)
                if drafted and not model.is_special(token)
            ]
        assert len(ids) > 10
        return model.decode(ids)


def test_cache_that_cannot_be_is_no_error(drafting: Path) -> None:
    command: list[Arg] = ["generate", "-m", drafting, "-p", "x", "-n", "4", "-t", "1"]
    nowhere: list[dict[str, str]] = [
        {"MXDRAFT_CACHE": "/dev/null/cache"},
        {"MXDRAFT_CACHE": "", "XDG_CACHE_HOME": "/dev/null"},
        {"MXDRAFT_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/dev/null/home"},
    ]
    texts = {run_both(*command, env=env).stdout for env in nowhere}
    for shared in (["-u", "XDG_CACHE_HOME"], ["XDG_CACHE_HOME="]):
        without = run(["env", "-u", "HOME", "-u", "MXDRAFT_CACHE", *shared, *C], *command)
        assert b"measuring what steps cost" in without.stderr
        assert {without.stdout} == texts
        assert not Path("(null)").exists()


# ---- refusals ----


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no command"),
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["generate", "-p", "x"], "-m is required"),
        (["generate", "-m", "x", "--lora", "y"], "unknown option '--lora'"),
        (["generate", "-m", "x", "-z"], "unknown option '-z'"),
        (["generate", "-m", "x", "-n"], "option '-n' requires an argument"),
        (["generate", "-m", "x", "--raw=1"], "option '--raw' does not take a value"),
        (
            ["generate", "-m", "x", "-p", "x", "-n", "5x"],
            "-n '5x': expected a whole number from 0 to 1048576",
        ),
        (["generate", "-m", "x", "-p", "x", "--ctx", "-1"], "--ctx '-1': expected a whole number"),
        (
            ["generate", "-m", "x", "-p", "x", "--seed", "18446744073709551616"],
            "--seed '18446744073709551616'",
        ),
        (
            ["generate", "-m", "x", "-p", "x", "--temp", "nan"],
            "--temp 'nan': expected a number from 0 to 100",
        ),
        (
            ["generate", "-m", "x", "-p", "x", "--top-p", "1.5"],
            "--top-p '1.5': expected a number from 0 to 1",
        ),
        (
            ["generate", "-m", "x", "-p", "x", "--draft", "lookup"],
            "--draft 'lookup': expected one of auto, off, ngram, model",
        ),
        (
            ["generate", "-m", "x", "-p", "x", "--draft-max", "0"],
            "--draft-max '0': expected a whole number from 1 to 15",
        ),
        (
            ["generate", "-m", "x", "-p", "x", "--kv", "int4"],
            "--kv 'int4': expected one of auto, f16, int8, mxfp4, tiered",
        ),
        (["chat", "-m", "x", "--kv-budget", "9"], "--kv-budget '9': expected a number from 0 to 8.25"),
        (["bench", "-m", "x", "--kv-budget", "-1"], "--kv-budget '-1': expected a number from 0 to 8.25"),
        (["chat", "-m", "x", "--draft-max", "16"], "--draft-max '16': expected a whole number from 1 to 15"),
        (["verify", "-m", "x", "--draft", "off"], "unknown option '--draft'"),
        (["generate", "-m", "x"], "exactly one of -p TEXT, -f FILE and -"),
        (["generate", "-m", "x", "-p", "x", "-"], "exactly one of -p TEXT, -f FILE and -"),
        (["generate", "-m", "x", "word"], "unexpected argument 'word'"),
        (["generate", "-m", "x", "-p", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["tokenize", "-m", "x", "-p", "x", "--chat", "--decode"], "exclude each other"),
    ],
)
def test_usage_errors(args: list[str], message: str) -> None:
    result = run_both(*args, code=2)
    assert message in result.stderr.decode("utf-8")
    assert result.stdout == b""


def test_requests_the_bundle_cannot_serve(bundle: Path, bare: Path) -> None:
    cases: list[tuple[list[Arg], str]] = [
        (["generate", "-m", bare, "-p", "x"], "chat template"),
        (["generate", "-m", bare, "-p", "x", "--raw", "--precision", "full"], "residual plane"),
        (["generate", "-m", bare, "-p", "x", "--raw", "--kv-budget", "6"], "the tiered KV cache only"),
        (["chat", "-m", bare, "--kv", "tiered", "--kv-budget", "4.5"], "kv_budget 4.50: "),
        (["generate", "-m", bundle, "-p", "x", "--ctx", "257"], "257"),
        (["generate", "-m", bundle, "-p", "x", "--stop", ""], "stop string"),
        (["generate", "-m", bundle, "-p", "x", "--draft", "model"], "no trained drafter"),
        (["tokenize", "-m", bundle, "-p", "1 500", "--decode"], "token 500"),
        (["tokenize", "-m", bundle, "-p", "1 x", "--decode"], "'x' is not a token id"),
    ]
    for args, message in cases:
        result = run_both(*args, code=2)
        assert message in result.stderr.decode("utf-8")
        assert result.stdout == b""


def test_files_missing_or_unreadable(bundle: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[Arg], int]] = [
        (["-m", tmp_path / "none", "-p", "x"], 3),
        (["-m", bundle, "-f", tmp_path / "none"], 3),
        (["-m", tmp_path, "-p", "x"], 6),
        (["-m", bundle, "-f", tmp_path], 6),
    ]
    for args, code in cases:
        assert run_both("generate", *args, code=code).stdout == b""


def test_truncated_bundle_is_refused_wherever_it_ends(bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    for size in (0, 1, 8, 63, 64, 700, 65536, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.mxb").write_bytes(data[:size])
        for program in (C, PYTHON) if size in (0, 700) else (C,):
            result = run(program, "generate", "-m", tmp_path / "cut.mxb", "-p", "x")
            assert (result.returncode, result.stdout, len(errors(result))) == (3, b"", 1)


def test_prompt_and_context(bundle: Path) -> None:
    def generate(tokens: int, code: int) -> subprocess.CompletedProcess[bytes]:
        text = b"\x01" * tokens  # no merge: one token a byte
        options = ["--raw", "--ctx", "32", "-n", "0", "--ignore-eos", "--stats", "json"]
        return run_both("generate", "-m", bundle, "-", *options, stdin=text, code=code)

    fitting = stats(generate(31, 0))
    assert (fitting["prompt_tokens"], fitting["generated_tokens"], fitting["stop"]) == (31, 1, "context")
    for tokens in (32, 33, 320):
        result = generate(tokens, 4)
        assert result.stdout == b""
        assert f"prompt {tokens} tokens, context 32" in errors(result)[0].decode("utf-8")


def test_too_little_memory_is_refused_until_there_is_enough(bundle: Path) -> None:
    least = Path(C[0]).stat().st_size + bundle.stat().st_size
    results = []
    for limit in range(least, least + (16 << 20), 256 << 10):
        shell = ["sh", "-c", f'ulimit -v {limit >> 10} && exec "$@"', "sh", *C]
        results.append(run(shell, "generate", "-m", bundle, "-p", "x", "-n", "1", "-t", "1"))
        if results[-1].returncode == 0:
            break
    assert [result.returncode for result in results] == [4] * (len(results) - 1) + [0]
    assert len(results) > 1
    assert not any(result.stdout for result in results[:-1])


def test_non_finite_values_are_an_error(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    entry = opened.tensors["target.base", "model.layers.2.input_layernorm.weight"]
    data = bytearray(bundle.read_bytes())
    section = opened.sections["target.base"]
    data[section.offset + entry.offset + 3] = 0x7F  # the high byte of an f32: huge, overflows in the square
    data[section.offset + entry.offset + 2] = 0xFF
    _seal(data, list(opened.sections).index("target.base"))
    (tmp_path / "nan.mxb").write_bytes(data)
    options = ["--precision", "base", "--draft", "off"]  # with drafts it would first measure what steps cost
    result = run_both("generate", "-m", tmp_path / "nan.mxb", "-p", "x", *options, code=5)
    assert result.stdout == b""
    assert re.search(rb"layer 2.* position 0", errors(result)[0])


def _seal(data: bytearray, index: int) -> None:
    """Make the checksums of a section and of the section table right again."""
    at = HEADER.size + index * SECTION_ENTRY.size
    name, offset, length, _, reserved = SECTION_ENTRY.unpack_from(data, at)
    SECTION_ENTRY.pack_into(
        data, at, name, offset, length, zlib.crc32(data[offset : offset + length]), reserved
    )
    magic, version, count, size, _, zero = HEADER.unpack_from(data)
    table = data[HEADER.size : HEADER.size + count * SECTION_ENTRY.size]
    HEADER.pack_into(data, 0, magic, version, count, size, zlib.crc32(table), zero)


def test_bytes_survive_any_locale(bundle: Path) -> None:
    text = "漢🙂".encode() + b"\xff"
    with Model(bundle) as model:
        expected = " ".join(map(str, model.encode(text))).encode("ascii") + b"\n"
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert run_both("tokenize", "-m", bundle, "-p", text, env=env).stdout == expected
    run_both("generate", "-m", b"\xff.mxb", "-p", "x", env=env, code=3)


@BOTH
def test_failing_output_is_an_error(program: Sequence[str], bundle: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*program, "generate", "-m", str(bundle), "-p", "x"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 6
    assert b"cannot write to standard output" in result.stderr


@BOTH
@pytest.mark.parametrize("command", ["generate", "chat", "tokenize", "verify", "bench", "info"])
def test_help_has_an_example(program: Sequence[str], command: str) -> None:
    result = run(program, command, "--help")
    assert result.returncode == 0
    assert f"Example: mxdraft {command} -m" in " ".join(result.stdout.decode("utf-8").split())


def test_both_have_the_same_options() -> None:
    host_only = {"verify": {"--full", "--quick", "--onnx", "--weights", "--html", "--json"}}
    for command in ("generate", "chat", "tokenize", "verify", "bench", "info"):
        c, python = (
            set(re.findall(r"^  (--?[a-z-]+)", run(program, command, "--help").stdout.decode("utf-8"), re.M))
            for program in (C, PYTHON)
        )
        assert python - c == {"-h"} | host_only.get(command, set())
        assert c <= python


# ---- streams and signals ----


class Streaming:
    """A running generate. Its stdout is a pipe in packet mode that holds one page: one read gets what one
    write wrote, and the program waits in a write until the previous one has been read."""

    def __init__(self, program: Sequence[str], bundle: Path) -> None:
        self.stdout, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, resource.getpagesize())
        options = ["-p", "x", "-n", "0", "--ignore-eos", "-t", "1", "--stats", "json"]
        command = [*program, "generate", "-m", str(bundle), *options]
        self.process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)

    def packets(self, most: int = sys.maxsize) -> list[bytes]:
        """The next writes, up to ``most`` or the end."""
        packets: list[bytes] = []
        while len(packets) < most and (packet := os.read(self.stdout, 4096)):
            packets.append(packet)
        return packets

    def wait_until_writing(self) -> None:
        """Return when the program sleeps in a write, because nobody reads the packet before it."""
        deadline = time.monotonic() + TIMEOUT_S
        stat = Path(f"/proc/{self.process.pid}/stat")
        while time.monotonic() < deadline:
            waiting = int.from_bytes(fcntl.ioctl(self.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
            if waiting and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S":
                return
            time.sleep(0.01)
        pytest.fail("the program does not write")

    def finish(self) -> subprocess.CompletedProcess[bytes]:
        _, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess([], self.process.returncode, b"", stderr)


@contextmanager
def streaming(program: Sequence[str], bundle: Path) -> Iterator[Streaming]:
    running = Streaming(program, bundle)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()
        with suppress(OSError):
            os.close(running.stdout)


def test_every_step_is_written_at_once(bundle: Path) -> None:
    writes = []
    for program in (C, PYTHON):
        with streaming(program, bundle) as running:
            first = running.packets(3)
            assert running.process.poll() is None
            writes.append(first + running.packets())
            assert stats(running.finish())["stop"] == "context"
    assert writes[0] == writes[1]
    assert len(writes[0]) > 50
    assert max(map(len, writes[0])) < 32


@BOTH
def test_interrupt_ends_with_statistics(program: Sequence[str], bundle: Path) -> None:
    with streaming(program, bundle) as running:
        seen = len(running.packets(3))
        running.process.send_signal(signal.SIGINT)
        seen += len(running.packets())
        result = running.finish()
    assert result.returncode == 130
    assert stats(result)["stop"] == "none"
    assert seen < 8  # of some 200 that fit the context


@BOTH
def test_second_interrupt_ends_at_once(program: Sequence[str], bundle: Path) -> None:
    with streaming(program, bundle) as running:
        running.wait_until_writing()
        for _ in range(TIMEOUT_S * 20):  # signals that are not taken yet count as one
            running.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(0.05)
                break
        result = running.finish()
    assert result.returncode == 130
    assert b"prompt_tokens" not in result.stderr


@BOTH
def test_closed_pipe_is_quiet(program: Sequence[str], bundle: Path) -> None:
    with streaming(program, bundle) as running:
        running.packets(1)
        os.close(running.stdout)
        result = running.finish()
    assert result.returncode == 141
    assert [line.split(b":")[0] for line in result.stderr.splitlines()] == [b"plan"]


@BOTH
def test_interrupt_while_waiting_for_input(program: Sequence[str], bundle: Path) -> None:
    command = [*program, "chat", "-m", str(bundle)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"plan: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


@BOTH
def test_closed_standard_streams(program: Sequence[str], bundle: Path) -> None:
    for closing, args in (("<&-", ["-"]), (">&-", ["-p", "x"])):
        shell = ["sh", "-c", f'exec "$@" {closing}', "sh", *program, "generate", "-m", str(bundle), *args]
        result = subprocess.run(shell, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
        assert result.returncode == 6
        assert b"Bad file descriptor" in result.stderr
