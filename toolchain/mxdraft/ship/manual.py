# SPDX-License-Identifier: Apache-2.0
"""Man page and shell completions of the static command line, from what its --help says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mxdraft import __version__
from mxdraft.errors import RefusedError

_DATE = "2026-12-01"  # of the manual's form, not of the build: equal sources give equal pages


@dataclass(frozen=True)
class Command:
    """One command. ``help``: all that its --help says; ``options``: (names, takes a value, what for)."""

    name: str
    summary: str
    help: str
    options: tuple[tuple[tuple[str, ...], bool, str], ...]


def read_commands(program: Path) -> tuple[str, list[Command]]:
    """Ask a command line that runs on this machine: what --help says, and its commands.

    Raises RefusedError if it has none.
    """
    overview = _help(program)
    listed = overview.partition("Commands")[2].partition("\n\n")[0]
    commands = []
    for name, summary in re.findall(r"^  (\w+) +(\S.*)$", listed, re.MULTILINE):
        text = _help(program, name)
        options = []
        for line in re.findall(r"^  (-.*)$", text, re.MULTILINE):
            # A long option has but one space before what it is for: its value is the second word.
            spec, _, about = line.partition("  ") if "  " in line.partition("  [default")[0] else _long(line)
            names = tuple(re.findall(r"(?:^|\s)(--?[a-z][a-z-]*)", spec))
            options.append((names, bool(re.search(r" [^-\s]", spec)), about.strip()))
        commands.append(Command(name, summary, text, tuple(options)))
    if not commands:
        raise RefusedError(f"{program} lists no commands")
    return overview, commands


def _long(line: str) -> tuple[str, str, str]:
    name, value, about = line.split(" ", 2)
    return f"{name} {value}", "", about


def _help(program: Path, *command: str) -> str:
    done = subprocess.run([program, *command, "--help"], capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise RefusedError(f"{program} {' '.join(command)} --help ends with {done.returncode}: {done.stderr}")
    return done.stdout


def man_page(overview: str, commands: list[Command]) -> str:
    """Write mxdraft(1) in roff."""
    lines = [
        f'.TH MXDRAFT 1 "{_DATE}" "mxdraft {__version__}" "User Commands"',
        ".SH NAME",
        r"mxdraft \- exact, fast text generation with small language models",
        ".SH SYNOPSIS",
        ".B mxdraft",
        r"\fICOMMAND\fR [\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        "Runs a language model from one file, a bundle, with the same bits on every machine.",
        ".SH COMMANDS",
    ]
    for command in commands:
        lines += [f".SS {command.name}", ".nf", *map(_roff, command.help.strip().split("\n")), ".fi"]
    codes = overview.partition("Exit codes:")[2].split(",")
    lines += [".SH EXIT STATUS"]
    for code in codes:
        number, _, meaning = code.strip().partition(" ")
        lines += [".TP", f".B {number}", _roff(" ".join(meaning.split()))]
    return "\n".join(lines) + "\n"


def _roff(line: str) -> str:
    escaped = line.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped


def completions(commands: list[Command]) -> dict[str, str]:
    """Write completions of commands and options for bash, zsh and fish."""
    return {"bash": _bash(commands), "zsh": _zsh(commands), "fish": _fish(commands)}


def _bash(commands: list[Command]) -> str:
    cases = "\n".join(
        f"        {c.name}) words='{' '.join(n for names, _, _ in c.options for n in names)}' ;;"
        for c in commands
    )
    return f"""# bash completion for mxdraft
_mxdraft() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    case $COMP_CWORD,${{COMP_WORDS[1]}} in
        1,*) words='{" ".join(c.name for c in commands)}' ;;
        *) case ${{COMP_WORDS[1]}} in
{cases}
        esac ;;
    esac
    if [[ $COMP_CWORD -eq 1 || $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -o filenames -F _mxdraft mxdraft
"""


def _zsh(commands: list[Command]) -> str:
    names = " ".join(_quoted(f"{c.name}:{c.summary}") for c in commands)
    cases = []
    for command in commands:
        options = []
        for spellings, takes_value, about in command.options:
            text = re.sub(r"[\[\]:]", " ", about)
            options += [
                _quoted(f"{name}[{text}]{':value:_files' if takes_value else ''}") for name in spellings
            ]
        cases.append(f"    {command.name}) _arguments {' '.join(options)} ;;")
    body = "\n".join(cases)
    return f"""#compdef mxdraft
local -a commands=({names})
if (( CURRENT == 2 )); then
    _describe command commands
    return
fi
case $words[2] in
{body}
esac
"""


def _fish(commands: list[Command]) -> str:
    lines = ["# fish completion for mxdraft"]
    for command in commands:
        lines.append(
            f"complete -c mxdraft -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.summary)}"
        )
        for names, takes_value, about in command.options:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in names)
            value = " -r" if takes_value else ""
            seen = f"__fish_seen_subcommand_from {command.name}"
            lines.append(f"complete -c mxdraft -n {_quoted(seen)} {spelled}{value} -d {_quoted(about)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
