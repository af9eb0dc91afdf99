# SPDX-License-Identifier: Apache-2.0
"""The host command line; docs/cli.md is the grammar that it shares with the device's (runtime/cli).

_terminal.py  standard streams and Ctrl-C
_options.py   options that several commands share
text.py       generate, chat, tokenize, trace
engine.py     verify, bench, info
serve.py      serve
bundle.py     fetch, export, pack, inspect
store.py      pull, list, rm, index
train.py      train
evaluate.py   evaluate
origin.py     calibrate
deploy.py     build, deploy, rollback, status

COMMANDS names their commands. A module is imported only when one of its commands runs, so the base install
(numpy, cffi, click) needs none of the toolchain's extras.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from mxdraft import __version__
from mxdraft.cli._terminal import Output, note, printable, reserve_standard_streams
from mxdraft.errors import MxdraftError

# command: (module, what --help of the group says)
COMMANDS = {
    "generate": ("mxdraft.cli.text", "continue a prompt"),
    "chat": ("mxdraft.cli.text", "talk in turns"),
    "serve": ("mxdraft.cli.serve", "answer programs over HTTP"),
    "tokenize": ("mxdraft.cli.text", "text to token ids and back"),
    "trace": ("mxdraft.cli.text", "record a run token by token, with a page that shows it"),
    "verify": ("mxdraft.cli.engine", "replay the bundle's golden vectors"),
    "bench": ("mxdraft.cli.engine", "measure speed and this machine's read bandwidth"),
    "info": ("mxdraft.cli.engine", "describe this machine and a bundle"),
    "fetch": ("mxdraft.cli.bundle", "get a model's weights"),
    "export": ("mxdraft.cli.bundle", "weights to ONNX"),
    "pack": ("mxdraft.cli.bundle", "ONNX to a bundle"),
    "inspect": ("mxdraft.cli.bundle", "list what a bundle holds"),
    "pull": ("mxdraft.cli.store", "get a ready bundle"),
    "list": ("mxdraft.cli.store", "list the bundles that were pulled"),
    "rm": ("mxdraft.cli.store", "remove a pulled bundle"),
    "index": ("mxdraft.cli.store", "make bundles ready to pull"),
    "train": ("mxdraft.cli.train", "train a base plane or a drafter, write text to train on"),
    "evaluate": ("mxdraft.cli.evaluate", "measure a bundle's quality, or a drafter's acceptance"),
    "calibrate": ("mxdraft.cli.origin", "fit what core tokens are to a bundle"),
    "build": ("mxdraft.cli.deploy", "the C runtime for a target"),
    "package": ("mxdraft.cli.deploy", "make all files of a release"),
    "deploy": ("mxdraft.cli.deploy", "ship a bundle to devices, prove it there, switch"),
    "rollback": ("mxdraft.cli.deploy", "switch a device back"),
    "status": ("mxdraft.cli.deploy", "what is deployed on a device"),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            raise click.UsageError(f"unknown command '{args[0]}'", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit codes: 0 done, 2 usage, 3 file missing or refused, 4 does not fit memory or context, "
    "5 numeric fault, 6 input/output, 130 interrupted, 141 output closed.",
)
@click.version_option(__version__, message="mxdraft %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Exact, fast text generation with small language models."""
    if ctx.invoked_subcommand is None:
        raise click.UsageError("no command", ctx)


def main() -> None:
    """Entry point: run a command and end the process with its exit code (mxdraft.errors)."""
    reserve_standard_streams()
    sys.stdout = io.TextIOWrapper(Output(), "utf-8", "surrogateescape", write_through=True)
    try:
        cli.main(prog_name="mxdraft", standalone_mode=False)
    except MxdraftError as error:
        _fail(error.exit_code, str(error), getattr(error, "__notes__", []))
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(2, _usage_message(error) + hint)
    except click.Abort:  # what click makes of KeyboardInterrupt
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mxdraft"):
            raise
        extra = "train" if error.name in ("torch", "tensorboard") else "toolchain"
        _fail(2, f"this command needs {error.name}: pip install 'mxdraft[{extra}]'")
    except OSError as error:
        _fail(6, f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _usage_message(error: click.UsageError) -> str:
    """Return click's message, except where the device's CLI has a plainer one."""
    if isinstance(error, click.NoSuchOption):
        return f"unknown option '{error.option_name}'"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{error.param.opts[0]} is required"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{error.param.opts[0]} {error.message}"
    message = error.format_message()
    return message[0].lower() + message[1:].rstrip(".")


def _fail(code: int, message: str, details: Sequence[str] = ()) -> NoReturn:
    note(f"mxdraft: error: {printable(message)}")  # who named a file does not write lines of ours
    for detail in details:  # what another program printed, in its lines
        note(detail)
    sys.exit(code)
