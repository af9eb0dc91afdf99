"""evaluate: how good a bundle is, and what drafting buys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Unpack, get_args

import click

from mxdraft.cli._options import (
    EngineOptions,
    engine_options,
    limit_option,
    model_option,
    real,
    whole,
)
from mxdraft.cli._terminal import Interrupt, emit, note
from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import replacing
from mxdraft.runtime import Engine, Model, Sequence
from mxdraft.runtime.engine import Draft, Precision

_path = click.Path(path_type=Path)


@click.group()
def evaluate() -> None:
    """Measure a bundle: against the weights it was made of, and drafting against plain decoding."""


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


@evaluate.command(
    epilog="Example: mxdraft evaluate speculation -m build/smollm2-135m.mxb --prompts prompts.jsonl "
    "--task chat --draft off --draft ngram --draft auto -n 128"
)
@model_option
@click.option("--prompts", type=_path, required=True, help="JSON lines with 'turns' and 'task'.")
@click.option("--task", "tasks", multiple=True, help="Only prompts of this task; repeatable.")
@click.option("--count", type=whole(1, 1 << 16), default="20", help="Prompts of each task.")
@click.option(
    "--draft", "drafts", multiple=True, default=("off", "auto"), help="Drafters to compare; repeatable."
)
@limit_option("128", 2)
@engine_options
@click.option("--temp", type=real(0, 100), default="0", help="Temperature; 0 = greedy.")
@click.option("--json", "json_path", type=_path, help="Write the results to this file.")
def speculation(
    bundle: str,
    prompts: Path,
    tasks: tuple[str, ...],
    count: int,
    drafts: tuple[Draft, ...],
    limit: int,
    temp: float,
    json_path: Path | None,
    **options: Unpack[EngineOptions],
) -> None:
    """Speed of each drafter beside the first one, prompt by prompt in turns; all must write the same text."""
    from mxdraft.speculation import compare, read_prompts, report

    for draft in drafts:
        if draft not in get_args(Draft):
            raise UsageError(f"--draft: '{draft}': expected one of {', '.join(get_args(Draft))}")
    chosen = read_prompts(prompts, tasks, count)
    Interrupt()
    runs = []
    with Model(bundle) as model:
        engines = {draft: Engine(model, **options, draft=draft) for draft in dict.fromkeys(drafts)}
        plan = engines[drafts[0]].plan
        for draft, engine in engines.items():
            if draft != "off":
                engine.measure_costs()
        for run in compare(model, engines, chosen, limit, temperature=temp):
            runs.append(run)
            speeds = ", ".join(f"{draft} {run.speed(draft):.1f}" for draft in engines)
            note(f"{len(runs)}/{len(chosen)} {run.prompt.task}: {run.tokens} tokens, tok/s: {speeds}")
    if not runs:
        raise RefusedError(f"{prompts}: no prompt made more than one token")
    results = report(runs, list(engines))
    emit(
        f"{'':<18}{'draft':<8}{'tok/s':>8}{'speedup':>9}{'total':>7}{'tok/step':>10}{'accepted':>10}\n".encode()
    )
    for group, values in results.items():
        for draft in engines:
            r = values[draft]
            emit(
                f"{group:<18}{draft:<8}{r['decode_tok_per_s']:>8.1f}{r['speedup']:>9.2f}{r['total_speedup']:>7.2f}"
                f"{r['tokens_per_step']:>10.2f}{r['accepted']:>10.1%}\n".encode()
            )
    if json_path:
        facts = {"bundle": bundle, "threads": plan.threads, "precision": plan.precision, "tokens": limit}
        each = [
            {"task": r.prompt.task, "tokens": r.tokens, "repetition": r.repetition, "stats": r.stats}
            for r in runs
        ]
        with replacing(json_path) as file:
            file.write(json.dumps(facts | {"results": results, "runs": each}, indent=1).encode())
