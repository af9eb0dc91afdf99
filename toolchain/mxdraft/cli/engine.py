# SPDX-License-Identifier: Apache-2.0
"""verify, bench and info."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Unpack, get_args

import click

from mxdraft.cli._options import (
    PATH,
    cache_options,
    engine_options,
    find_bundle,
    model_option,
    open_engine,
    open_model,
    plan_line,
    whole,
    word_option,
)
from mxdraft.cli._terminal import Interrupt, emit, note, print_line, printable, terminal_bytes
from mxdraft.errors import NumericError, UsageError
from mxdraft.files import replacing
from mxdraft.runtime import Draft, EngineOptions, cpu_describe, default_threads, version

_FACTS = ("file_bytes", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions")


@click.command(epilog="Example: mxdraft verify -m build/smollm2-135m.mxb --precision base")
@model_option
@engine_options
@click.option("--chunk", type=whole(1, 512), default="64", help="Rows of one step; never changes the digest.")
@click.option("--full", is_flag=True, help="Also compare with onnxruntime on the ONNX files.")
@click.option("--quick", is_flag=True, help="With --full: fewer prompts and tokens.")
@click.option("--onnx", metavar="DIR", type=PATH, help="With --full: the ONNX files; default: beside BUNDLE.")
@click.option(
    "--weights", metavar="WEIGHTS", type=PATH, help="With --full: check the whole chain from these."
)
@click.option("--html", metavar="FILE", type=PATH, help="With --full: write a report page.")
@click.option("--json", "json_path", metavar="FILE", type=PATH, help="With --full: write all values.")
def verify(
    bundle: str,
    chunk: int,
    full: bool,
    quick: bool,
    onnx: Path | None,
    weights: Path | None,
    html: Path | None,
    json_path: Path | None,
    **engine: Unpack[EngineOptions],
) -> None:
    """Replay the golden vectors and print the digest of all logits; ends with 0 only if every bit agrees."""
    Interrupt()
    if full:
        directory = onnx or Path(bundle).with_suffix("")
        _verify_full(bundle, chunk, quick, directory, weights, html, json_path, engine)
        return
    if quick or onnx or weights or html or json_path:
        raise UsageError("--quick, --onnx, --weights, --html and --json need --full")
    with open_model(bundle) as model, open_engine(model, **engine | {"max_rows": chunk}) as opened:
        result = opened.verify()
    print_line(result.digest)
    if not result.matches:
        raise NumericError(result.message)


def _verify_full(
    bundle: str,
    chunk: int,
    quick: bool,
    onnx: Path,
    weights: Path | None,
    html: Path | None,
    json_path: Path | None,
    options: EngineOptions,
) -> None:
    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.verify.chain import verify_chain
    from mxdraft.verify.compare import packed_precisions, verify_precision
    from mxdraft.verify.report import verification_page, verification_report

    results, links = [], []
    with open_model(bundle) as model:
        packed = packed_precisions(model.info.provenance, onnx)
        if weights is not None:
            links = verify_chain(
                load_checkpoint(weights), onnx, Path(bundle), options["threads"], quick, note
            )
            for link in links:
                print_line(link.summary())
        for precision in packed if options["precision"] == "auto" else [options["precision"]]:
            with open_engine(model, **options | {"precision": precision, "max_rows": chunk}) as engine:
                results.append(verify_precision(engine, onnx, quick, note))
            print_line(results[-1].summary())
    content = verification_report(results, links, bundle, onnx)
    for path, text in ((html, verification_page(content)), (json_path, json.dumps(content, indent=1))):
        if path is not None:
            with replacing(path) as file:
                file.write(text.encode("utf-8"))
    if content["faults"]:
        raise NumericError("; ".join(content["faults"]))


@click.command(epilog="Example: mxdraft bench -m build/smollm2-135m.mxb --prompt-tokens 512 -n 128")
@model_option
@engine_options
@cache_options
@click.option("--prompt-tokens", type=whole(1, 1 << 20), default="128", help="Prompt length.")
@click.option("-n", "limit", type=whole(2, 1 << 20), default="64", help="Tokens to generate.")
@word_option(
    "--draft", (*get_args(Draft), "all"), "off", "Also compare drafting with plain decoding.", "compared"
)
@click.option("--repeat", type=whole(1, 1000), default="3", help="Measured runs, after one to warm up.")
@click.option("--csv", metavar="FILE", help="Write the results as CSV; - = instead of the table.")
@click.option(
    "--json", "json_path", metavar="FILE", help="Write the results as JSON; - = instead of the table."
)
def bench(
    bundle: str,
    prompt_tokens: int,
    limit: int,
    compared: Draft | Literal["all"],
    repeat: int,
    csv: str | None,
    json_path: str | None,
    **engine: Unpack[EngineOptions],
) -> None:
    """Measure prefill, decode, steps of several rows and of 48 sequences, and the read bandwidth."""
    if csv == json_path == "-":
        raise UsageError("--csv and --json cannot both go to standard output")
    Interrupt()
    with open_model(bundle) as model, open_engine(model, **engine | {"draft": "off"}) as opened:
        drafts: list[Draft] = (
            [] if compared == "off" else [compared] if compared != "all" else ["ngram", "auto"]
        )
        if compared == "all" and model.info.has_drafter:
            drafts.append("model")
        results = opened.bench(prompt_tokens, limit, repeat, drafts)
    if "-" not in (csv, json_path):
        emit(results["table"].encode("ascii"))
    for path, text in ((csv, results["csv"]), (json_path, results["json"])):
        if path == "-":
            emit(text.encode("ascii"))
        elif path is not None:
            with replacing(Path(path)) as file:
                file.write(text.encode("ascii"))


@click.command(epilog="Example: mxdraft info -m build/smollm2-135m.mxb --cpu")
@click.option("-m", "bundle", metavar="BUNDLE", callback=find_bundle, help="Also describe this bundle.")
@click.option("--cpu", is_flag=True, help="Also print the function bound to each operation.")
def info(bundle: str | None, cpu: bool) -> None:
    """Describe this machine and, with -m, a bundle and its memory plan."""
    lines = [f"version {version()}", f"threads {default_threads()}"]
    if cpu:
        lines += cpu_describe().splitlines()
    if bundle is not None:
        with open_model(bundle) as model:
            i = model.info
            lines += [
                f"bundle {printable(i.path)}",
                *(f"{name} {getattr(i, name)}" for name in _FACTS),
                f"precisions {'base full' if i.has_residual else 'base'}",
                f"drafters {'lookup table' if i.has_ngrams else 'lookup'}{' model' if i.has_drafter else ''}",
                f"bos {'none' if i.bos is None else i.bos}",
                f"provenance {printable(i.provenance)}",
                plan_line(model.plan()),
            ]
    emit(terminal_bytes("\n".join(lines)) + b"\n")
