# SPDX-License-Identifier: Apache-2.0
"""serve: runs the C program, so that host and device serve with the same code."""

from __future__ import annotations

import os

import click

from mxdraft.errors import RefusedError
from mxdraft.ship.targets import OUTPUTS, REPOSITORY


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Answer over HTTP as OpenAI's API does (docs/serve.md)."""
    program = REPOSITORY / "build" / "host" / OUTPUTS["cli"]
    if not program.is_file():
        raise RefusedError(f"{program}: no such file: make it with mxdraft build --target host")
    os.execv(program, [str(program), "serve", *arguments])
