# SPDX-License-Identifier: Apache-2.0
"""serve: runs the C program, so that host and device serve with the same code."""

from __future__ import annotations

import os

import click

from mxdraft import HEADER
from mxdraft.cli._options import (
    cache_options,
    draft_options,
    engine_options,
    model_option,
    sampling_options,
    whole,
)
from mxdraft.errors import RefusedError
from mxdraft.ship.targets import OUTPUTS, REPOSITORY

_ARGUMENTS = "mxdraft.serve.arguments"


class _KeepsArguments(click.Command):
    """Checks the arguments as the C program will, and keeps them for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_KeepsArguments, epilog="Example: mxdraft serve -m model.mxb --port 8080")
@model_option
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=whole(0, 65535), default="8080", help="Port to listen on; 0 = a free one.")
@click.option("--api-key-file", metavar="FILE", help="Ask for the key that is this file's first line.")
@click.option("--allow-anyone", is_flag=True, help="Listen on the network without a key.")
@click.option(
    "--wyoming", metavar="HOST:PORT", help="Also answer voice assistants there, by Wyoming's events."
)
@click.option("--cors", metavar="ORIGIN", help="Let pages of this origin ask; * = any.")
@click.option("--alias", metavar="NAME", help="Name of the model; unset: its file's.")
@click.option(
    "--parallel", type=whole(1, 32), default="4", help="Most answers at once; fewer if memory is short."
)
@click.option("--parked", type=whole(0, 32), default="4", help="Sequences kept for prompts that begin alike.")
@engine_options
@cache_options
@sampling_options
@draft_options
def serve(**_: object) -> None:
    """Answer over HTTP as OpenAI's API does (docs/serve.md); sampling options are defaults for requests."""
    places = [HEADER.parent / OUTPUTS["cli"], REPOSITORY / "build" / "host" / OUTPUTS["cli"]]
    program = next((place for place in places if place.is_file()), None)
    if program is None:
        raise RefusedError(f"{places[-1]}: no such file: make it with mxdraft build --target host")
    os.execv(program, [str(program), "serve", *click.get_current_context().meta[_ARGUMENTS]])
