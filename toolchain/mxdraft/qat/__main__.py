"""``python -m mxdraft.qat``: train a target (docs: models/smollm2-135m/README.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mxdraft.checkpoint import load_checkpoint
from mxdraft.errors import MxdraftError
from mxdraft.qat.train import train_target

_path = click.Path(path_type=Path)


@click.command()
@click.argument("weights", type=_path)
@click.option("--recipe", type=_path, required=True, help="TOML file with the training's settings.")
@click.option(
    "--run", "directory", type=_path, required=True, help="Directory of the run; continued if there."
)
@click.option("-o", "delta", type=_path, required=True, help="File to write the trained base plane to.")
def main(weights: Path, recipe: Path, directory: Path, delta: Path) -> None:
    """Train the base plane of WEIGHTS (a .gguf file or a Hugging Face directory) to live in MXFP4."""
    try:
        train_target(recipe, load_checkpoint(weights), directory, delta)
    except MxdraftError as error:
        click.echo(f"mxdraft.qat: error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
