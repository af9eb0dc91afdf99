"""evaluate: how good a bundle is, measured against the weights it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import click

from mxdraft.cli._options import model_option, whole
from mxdraft.cli._terminal import Interrupt, emit, note
from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import replacing
from mxdraft.runtime import Engine, Model, Sequence
from mxdraft.runtime.engine import Precision

_path = click.Path(path_type=Path)


@click.group()
def evaluate() -> None:
    """Measure a bundle against the weights it was made of."""


@evaluate.command(
    epilog="Example: mxdraft evaluate quality -m build/smollm2-135m.mxb --text wikitext2_test.txt "
    "--tokens 4096 --precision base --precision full --json quality.json"
)
@model_option
@click.option("--text", type=_path, required=True, help="UTF-8 text to score.")
@click.option("--tokens", type=whole(2, 1 << 24), default="4096", help="Tokens of it to score.")
@click.option("--ctx", type=whole(2, 1 << 16), default="512", help="Window; each starts from an empty cache.")
@click.option(
    "--precision", "precisions", multiple=True, default=("base", "full"), help="base or full; repeatable."
)
@click.option(
    "--source", type=click.Path(path_type=Path), help="The unquantized weights; fetched by default."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results to this file.")
def quality(
    bundle: str,
    text: Path,
    tokens: int,
    ctx: int,
    precisions: tuple[Precision, ...],
    source: Path | None,
    json_path: Path | None,
) -> None:
    """KL divergence (nat), top-1 agreement and perplexity against the f32 teacher."""
    import numpy as np

    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.evaluate import Forward, compare
    from mxdraft.fetch import fetch
    from mxdraft.reference import Teacher

    for precision in precisions:
        if precision not in get_args(Precision) or precision == "auto":
            raise UsageError(f"--precision: '{precision}': expected base or full")
    try:
        content = text.read_bytes()
    except OSError as error:
        raise RefusedError(f"{text}: {error.strerror}") from error
    Interrupt()
    checkpoint = load_checkpoint(source or fetch("smollm2-135m"))
    with Model(bundle) as model:
        recorded = json.loads(model.info.provenance)["source_sha256"]
        if recorded != checkpoint.source_sha256:
            raise RefusedError(
                f"{bundle} was made of other weights (sha256 {recorded}): give them with --source"
            )
        # A token needs at most 8 bytes on average in any text worth scoring; the tail is cut off anyway.
        ids = np.array(model.encode(content[: 32 * tokens])[:tokens])

        def student(precision: Precision) -> Forward:
            engine = Engine(model, ctx=ctx, precision=precision)  # closed with the model

            def forward(window: np.ndarray) -> np.ndarray:
                with Sequence(engine) as sequence:
                    return sequence.logits(window.tolist())

            return forward

        students: dict[str, Forward] = {precision: student(precision) for precision in precisions}
        for sums in compare(Teacher(checkpoint).logits, students, ids, ctx):
            progress = ", ".join(f"{name} KL {q.report()['kl']:.4f}" for name, q in sums.items())
            note(f"{sums['teacher'].positions}/{len(ids)} tokens: {progress}")
    results = {name: q.report() for name, q in sums.items()}
    emit(f"{'':<10}{'KL':>9}{'agreement':>12}{'perplexity':>12}\n".encode())
    for name, r in results.items():
        emit(f"{name:<10}{r['kl']:>9.4f}{r['agreement']:>12.2%}{r['perplexity']:>12.3f}\n".encode())
    if json_path:
        with replacing(json_path) as file:
            file.write(json.dumps({"results": results, "ctx": ctx, "bundle": bundle}, indent=1).encode())
