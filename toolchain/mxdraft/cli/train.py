# SPDX-License-Identifier: Apache-2.0
"""train: text, base plane and drafter. Imports are local, for two of the three need the extra ``train``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mxdraft.cli._options import PATH, model_option, threads_option, whole
from mxdraft.cli._terminal import note
from mxdraft.errors import UsageError
from mxdraft.runtime import Model

_recipe_option = click.option(
    "--recipe", metavar="FILE", type=PATH, required=True, help="TOML file with the training's settings."
)
_run_option = click.option(
    "--run", "directory", metavar="DIR", type=PATH, required=True, help="Checkpoints and log; continued."
)
_output_option = click.option("-o", "output", metavar="FILE", type=PATH, required=True, help="The result.")


@click.group()
def train() -> None:
    """Make a model live in MXFP4, and a drafter for it. Whatever was begun is continued."""


@train.command(
    epilog="Example: mxdraft train text -m build/smollm2-135m.mxb --documents 4000 -o base_text.npz"
)
@model_option
@_output_option
@click.option("--documents", type=whole(1, 1 << 24), required=True, help="How many, loops included.")
@click.option("--seed", type=whole(0, (1 << 63) - 1), default="0", help="Of the whole file.")
@threads_option
def text(bundle: str, output: Path, documents: int, seed: int, threads: int) -> None:
    """Let base precision write training text: user turns and answers, from nothing but the chat template.

    Document i of a seed is always the same. Ctrl-C keeps what is finished; the same command goes on, and more
    --documents prolong a file.
    """
    from mxdraft.train.corpus import Corpus, write_corpus

    def tell(corpus: Corpus) -> None:
        written = len(corpus.documents) + len(corpus.dropped)
        if written % 48 == 0 or written == documents:
            loops = len(corpus.dropped)
            note(f"{written}/{documents} documents, {corpus.tokens} tokens, {loops} loops left out")

    with Model(bundle) as model:
        write_corpus(model, output, documents, seed, threads, progress=tell)


@train.command(
    epilog='Example: mxdraft train target "$(mxdraft fetch smollm2-135m)" '
    "--recipe models/smollm2-135m/target.toml --run build/qat -o models/smollm2-135m/qat.delta"
)
@click.argument("weights", type=PATH)
@_recipe_option
@_run_option
@_output_option
def target(weights: Path, recipe: Path, directory: Path, output: Path) -> None:
    """Train the base plane of WEIGHTS (a .gguf file or a Hugging Face directory) to live in MXFP4."""
    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.train.target import train_target

    train_target(recipe, load_checkpoint(weights), directory, output)


@train.command(
    epilog="Example: mxdraft train drafter -m build/smollm2-135m.mxb "
    "--recipe models/smollm2-135m/drafter.toml --run build/drafter -o models/smollm2-135m/drafter.npz"
)
@model_option
@_recipe_option
@_run_option
@_output_option
@click.option("--weights", type=PATH, help="Of which BUNDLE was made: its base plane trains along ...")
@click.option("--delta", type=PATH, help="... and goes to this file.")
def drafter(
    bundle: str, recipe: Path, directory: Path, output: Path, weights: Path | None, delta: Path | None
) -> None:
    """Train a drafter for a precision of BUNDLE, or by a recipe with target_lr both of them together."""
    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.train.cotrain import train_together
    from mxdraft.train.draft_train import train_drafter

    if (weights is None) != (delta is None):
        raise UsageError("--weights and --delta go together")
    if weights is not None and delta is not None:
        train_together(recipe, Path(bundle), load_checkpoint(weights), directory, output, delta)
        return

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\x1b[1A\x1b[2Kfeatures of {done}/{total} tokens new", file=sys.stderr)

    train_drafter(recipe, Path(bundle), directory, output, tell)
