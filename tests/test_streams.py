# SPDX-License-Identifier: Apache-2.0
"""Streams that end, fail, do not block or are terminals: nothing is lost without a word (docs/cli.md)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from programs import BOTH, PYTHON, TIMEOUT_S, Arg, C, errors, limited, run

OPTIONS: list[Arg] = ["--draft", "off", "-t", "1"]


class Terminal:
    """A program whose stdin is a terminal in line mode."""

    def __init__(self, program: Sequence[str], *args: Arg) -> None:
        self.keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [*program, *args], stdin=screen, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stderr is not None
        self.stderr = self.process.stderr
        os.close(screen)

    def type(self, text: bytes) -> None:
        """Paste a text, in pieces that the terminal takes."""
        for start in range(0, len(text), 256):
            os.write(self.keyboard, text[start : start + 256])

    def finish(self) -> subprocess.CompletedProcess[bytes]:
        stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        os.close(self.keyboard)
        return subprocess.CompletedProcess([], self.process.returncode, stdout, stderr)


# ---- terminals ----


@BOTH
def test_line_that_a_terminal_cuts_is_refused(program: Sequence[str], bundle: Path) -> None:
    for length in (4094, 4095, 6000):
        terminal = Terminal(program, "tokenize", "-m", bundle, "-")
        terminal.type(b"a b " * 30 + b"\n" + b"x" * length + b"\n\x04")
        result = terminal.finish()
        if length < 4095:
            expected = run(
                program, "tokenize", "-m", bundle, "-", input=b"a b " * 30 + b"\n" + b"x" * 4094 + b"\n"
            )
            assert (result.returncode, result.stdout) == (0, expected.stdout)
        else:
            assert (result.returncode, result.stdout) == (4, b"")
            assert b"the terminal cuts a line after 4095 bytes" in errors(result)[0]
            assert b"-f FILE or through a pipe" in errors(result)[0]


@BOTH
def test_chat_drops_a_line_that_the_terminal_cuts(program: Sequence[str], bundle: Path) -> None:
    command: list[Arg] = ["chat", "-m", bundle, "-n", "3", *OPTIONS]
    replies = []
    for rest in (b"", b"hi\n"):
        terminal = Terminal(program, *command)
        terminal.type(b"word " * 1000 + b"\n")
        said = b""
        while b"the terminal cuts a line" not in said:  # before that, it has no room for more
            said = terminal.stderr.readline()
        terminal.type(rest + b"\x04")
        result = terminal.finish()
        assert result.returncode == (0 if rest else 4)
        replies.append(result.stdout)
    assert replies == [b"", run(program, *command, input=b"hi\n").stdout]


# ---- standard input ----


@BOTH
@pytest.mark.parametrize("command", ["generate", "chat", "tokenize"])
def test_input_that_fails_is_an_error(program: Sequence[str], bundle: Path, command: str) -> None:
    args: list[Arg] = [command, "-m", bundle, *([] if command == "chat" else ["-"])]
    args += [] if command == "tokenize" else OPTIONS
    hung_up, screen = pty.openpty()
    os.close(screen)
    folder = os.open("/", os.O_RDONLY)
    cases = [
        (limited("<&-", program), folder, b"Bad file descriptor"),
        (program, hung_up, b" error"),
    ]
    if program == C:  # the interpreter of the other one refuses a directory itself, with 1
        cases.append((program, folder, b"Is a directory"))
    for redirected, stdin, reason in cases:
        result = run(redirected, *args, stdin=stdin)
        assert (result.returncode, result.stdout) == (6, b""), result.stderr
        *_, said = result.stderr.splitlines()
        assert said.removeprefix(b"> ").startswith(b"mxdraft: error: cannot read standard input: ")
        assert said.endswith(reason)
    os.close(hung_up)
    os.close(folder)


@BOTH
def test_streams_that_do_not_block(program: Sequence[str], bundle: Path) -> None:
    """All three, as a parent written for an event loop leaves them."""
    command: list[Arg] = ["chat", "-m", bundle, "-n", "40", "--stats", "json", *OPTIONS]
    expected = run(program, *command, input=b"hi\n" * 2)
    (stdin, keyboard), (screen, stdout), (log, stderr) = os.pipe(), os.pipe(), os.pipe()
    for fd in (stdin, stdout, stderr):
        os.set_blocking(fd, False)
    for fd in (stdout, stderr):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)
        os.write(fd, bytes(4096))  # full: the first write has to wait
    process = subprocess.Popen([*program, *command], stdin=stdin, stdout=stdout, stderr=stderr)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    time.sleep(0.2)  # whoever does not wait for the log has lost the plan by now
    seen: dict[int, bytes] = {screen: b"", log: b""}
    to_send = [b"h", b"i\nhi", b"\n"]
    while seen:
        for fd in select.select([*seen], [], [], 0.2)[0] or [0]:
            if fd and (data := os.read(fd, 65536)):
                seen[fd] += data
            elif fd:
                os.close(fd)
                results = seen.pop(fd)
                if fd == screen:
                    assert results[4096:] == expected.stdout
                else:
                    assert b"plan: " in results
                    assert json.loads(results.splitlines()[-1])["prompt_tokens"] > 0
            elif to_send:
                os.write(keyboard, to_send.pop(0))
            elif keyboard:
                os.close(keyboard)
                keyboard = 0
    assert process.wait(TIMEOUT_S) == expected.returncode


@BOTH
def test_input_without_end_is_refused(program: Sequence[str], bundle: Path) -> None:
    for command in (["chat"], ["generate", "-"], ["tokenize", "-"]):
        with subprocess.Popen(["sh", "-c", "yes | tr -d '\\n'"], stdout=subprocess.PIPE) as endless:
            options = [] if command[0] == "tokenize" else OPTIONS
            result = run(program, *command, "-m", bundle, *options, stdin=endless.stdout)
            assert endless.stdout is not None
            endless.stdout.close()
        assert result.returncode == 4
        assert errors(result) == [b"mxdraft: error: standard input: more than 16 MiB of text"]


def test_line_for_which_there_is_no_memory_is_refused(bundle: Path) -> None:
    least = (Path(C[0]).stat().st_size + bundle.stat().st_size >> 10) + 8192
    text = b"x" * (12 << 20)
    result = run(limited(f"-v {least}", C), "chat", "-m", bundle, "--ctx", "32", *OPTIONS, input=text)
    assert (result.returncode, errors(result)) == (4, [b"mxdraft: error: out of memory"])


@BOTH
def test_lines_however_they_arrive(program: Sequence[str], bundle: Path) -> None:
    command: list[Arg] = ["chat", "-m", bundle, "-n", "2", *OPTIONS]
    lines = b"one\r\n\n\r\ntwo\n/reset\nthree"
    expected = run(program, *command, input=lines)
    assert expected.returncode == 0
    with subprocess.Popen([*program, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        for byte in lines:
            process.stdin.write(bytes([byte]))
            process.stdin.flush()
        process.stdin.close()
        process.stdin = None
        assert process.communicate(timeout=TIMEOUT_S)[0] == expected.stdout


# ---- standard output, standard error ----


@BOTH
@pytest.mark.parametrize(
    "args",
    [
        ["generate", "-p", "x", "-n", "3", *OPTIONS],
        ["tokenize", "-p", "x"],
        ["tokenize", "-p", "5", "--decode"],
        ["verify", "-t", "1"],
        ["info"],
        ["generate", "--help"],
        ["--help"],
        ["--version"],
    ],
    ids=lambda args: " ".join(args[:3]),
)
def test_output_that_fails_is_an_error(program: Sequence[str], bundle: Path, args: list[str]) -> None:
    command: list[Arg] = [*args, *([] if args[-1] in ("--help", "--version") else ["-m", bundle])]
    for redirection, code in ((">/dev/full", 6), (">&-", 6), ("1</dev/null", 6)):
        result = run(limited(redirection, program), *command)
        assert (result.returncode, len(errors(result))) == (code, 1), (redirection, result.stderr)
        assert errors(result)[0].startswith(b"mxdraft: error: cannot write to standard output: ")
    reader, writer = os.pipe()
    os.close(reader)
    result = run(program, *command, stdout=writer)
    os.close(writer)
    assert (result.returncode, errors(result)) == (141, [])


@BOTH
def test_lost_messages_change_neither_text_nor_code(
    program: Sequence[str], bundle: Path, tmp_path: Path
) -> None:
    command: list[Arg] = ["generate", "-m", bundle, "-p", "x", "-n", "3", "--dump-tokens", *OPTIONS]
    expected = run(program, *command)
    assert expected.returncode == 0
    missing: list[Arg] = ["info", "-m", tmp_path / "none"]
    for redirection in ("2>/dev/full", "2>&-", "2</dev/null"):
        lost = run(limited(redirection, program), *command)
        assert (lost.returncode, lost.stdout, lost.stderr) == (0, expected.stdout, b"")
        assert run(limited(redirection, program), *missing).returncode == 3
    reader, writer = os.pipe()
    os.close(reader)
    lost = run(program, *command, stderr=writer)
    os.close(writer)
    assert (lost.returncode, lost.stdout) == (0, expected.stdout)


@BOTH
def test_file_size_limit(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    """Also SIGXFSZ, which would end the process."""
    with (tmp_path / "text").open("wb") as file:
        file.write(bytes(1024))
        file.flush()
        result = run(
            limited("-f 1", program), "generate", "-m", bundle, "-p", "x", "-n", "3", *OPTIONS, stdout=file
        )
    assert result.returncode == 6
    assert os.strerror(errno.EFBIG).encode("ascii") in errors(result)[0]


@BOTH
def test_results_under_a_file_size_limit(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_bytes(b"old")
    bench: list[Arg] = ["bench", "-m", bundle, "--prompt-tokens", "2", "-n", "2", "--repeat", "1", "-t", "1"]
    result = run(limited("-f 0", program), *bench, "--json", tmp_path / "old.json")
    assert result.returncode == 6
    assert errors(result)[0].endswith(b"old.json: " + os.strerror(errno.EFBIG).encode("ascii"))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old.json", b"old")]


@pytest.mark.parametrize("args", [["inspect"], ["pack", "--help"], ["train", "--help"]], ids=" ".join)
def test_output_of_the_hosts_own_commands(bundle: Path, args: list[str]) -> None:
    command: list[Arg] = [*args, *([bundle] if args == ["inspect"] else [])]
    good = run(PYTHON, *command)
    assert (good.returncode, errors(good)) == (0, [])
    for redirection in (">/dev/full", ">&-"):
        result = run(limited(redirection, PYTHON), *command)
        assert (result.returncode, len(errors(result))) == (6, 1), (redirection, result.stderr)
    for redirection in ("2>/dev/full", "2>&-"):
        result = run(limited(redirection, PYTHON), *command)
        assert (result.returncode, result.stdout) == (0, good.stdout)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        assert run(PYTHON, *command, stdout=writer).returncode == 0
        assert os.read(reader, 1 << 20) == good.stdout
    finally:
        os.close(reader)
        os.close(writer)


@BOTH
def test_results_replace_files_and_links_but_no_devices(
    program: Sequence[str], bundle: Path, tmp_path: Path
) -> None:
    """What a link leads to stays as it is, the mode of what is replaced too, and nothing else is left."""
    bench: list[Arg] = ["bench", "-m", bundle, "--prompt-tokens", "2", "-n", "2", "--repeat", "1", "-t", "1"]
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    long = tmp_path / ("n" * 250)
    os.mkfifo(tmp_path / "pipe")
    result = run(program, *bench, "--json", tmp_path / "link", "--csv", long)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "real").read_bytes() == b"old"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o640
    assert json.loads((tmp_path / "link").read_bytes())["repeat"] == 1
    assert long.read_bytes().startswith(b"measure,median")
    with (tmp_path / "out").open("wb") as file:
        for path in ("pipe", "stdout", ".", "/dev/full", "/dev/stdout"):
            result = run(program, *bench, "--csv", tmp_path / path, stdout=file)
            assert result.returncode == 6
            (line,) = errors(result)
            assert line.endswith(b": it is not a regular file"), line
    assert Path("/dev/full").is_char_device()
    names = ["link", long.name, "out", "pipe", "real", "stdout"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


# ---- what came from files ----


@BOTH
def test_no_control_character_reaches_the_terminal(
    program: Sequence[str], bundle: Path, tmp_path: Path
) -> None:
    wild = tmp_path / "a\x1b]0;x\x07\nb\x9b2J\x7f.mxb"
    shutil.copy(bundle, wild)
    shown = str(tmp_path).encode() + rb"/a\x1b]0;x\x07\x0ab\x9b2J\x7f.mxb"
    info = run(program, "info", "-m", wild)
    assert b"\nbundle " + shown + b"\n" in info.stdout
    wild.write_bytes(bundle.read_bytes()[:100])
    for args in (["info", "-m", wild], ["tokenize", "-m", bundle, "-f", f"{wild}.none"]):
        result = run(program, *args)
        assert result.returncode == 3
        assert not set(result.stderr.replace(b"\n", b"")) & {*range(32), 127}
        assert rb"a\x1b]0;x\x07" in result.stderr
        assert rb"b\x9b2J\x7f" in result.stderr
    for args in (["gen\x1b[1m"], ["info", "--\x1b[1m"], ["generate", "-m", "x", "-n", "\x1b"]):
        result = run(program, *args)
        assert result.returncode == 2
        assert b"\x1b" not in result.stderr


@BOTH
def test_bundle_that_is_cut_while_it_runs(program: Sequence[str], bundle: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut\x1b.mxb"
    shutil.copy(bundle, cut)
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, bytes(4096))  # full: the program waits for us with its first token
    command = [*program, "generate", "-m", str(cut), "-p", "x", "-n", "0", "--ignore-eos", *map(str, OPTIONS)]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"plan: ")
    os.truncate(cut, 4096)
    while os.read(reader, 65536):
        pass
    os.close(reader)
    assert (process.wait(TIMEOUT_S), process.stderr.read().count(b"\n")) == (6, 1)
    process.stderr.close()
