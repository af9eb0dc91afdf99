# SPDX-License-Identifier: Apache-2.0
"""fetch, export, pack and inspect: from weights to a bundle. Imports are local, for they need the extras."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxdraft.cli._options import PATH, word_option
from mxdraft.cli._terminal import emit, note, print_line, terminal_bytes
from mxdraft.errors import UsageError
from mxdraft.runtime import Engine, Model

if TYPE_CHECKING:
    from mxdraft.mx import Rule


@click.command(epilog="Example: mxdraft fetch smollm2-135m")
@click.argument("name")
@click.option("--cache", metavar="DIR", type=PATH, help="Where to keep it, instead of the user's cache.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def fetch(name: str, cache: Path | None, no_progress: bool) -> None:
    """Get a model's weights, checked against their hash, and print the path of the file."""
    from mxdraft.checkpoint.fetch import fetch as fetch_model

    print_line(fetch_model(name, cache, progress=not no_progress))


@click.command(epilog="Example: mxdraft export model.gguf -o build/smollm2-135m")
@click.argument("source", type=PATH)
@click.option("-o", "directory", metavar="DIR", type=PATH, required=True, help="Directory to write to.")
@click.option("--delta", metavar="FILE", type=PATH, help="What training made of these weights.")
@click.option(
    "--calibrate", metavar="FILE", type=PATH, help="Text (.npz) to smooth the weights by; not with --delta."
)
@click.option("--drafter", metavar="FILE", type=PATH, help="A drafter that was trained for these weights.")
@word_option("--rule", ("search", "floor"), "search", "How block exponents are chosen.")
def export(
    source: Path,
    directory: Path,
    delta: Path | None,
    calibrate: Path | None,
    drafter: Path | None,
    rule: Rule,
) -> None:
    """Write a model's ONNX files, base and full precision, and print their paths.

    SOURCE is a .gguf file or a directory with a Hugging Face model. --calibrate makes both precisions better:
    by what 8192 tokens of text show, factors move between the weights so that rounding loses less. A --delta
    brings the factors with which it was trained.
    """
    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.checkpoint.smooth import measure
    from mxdraft.export.directory import complete_tokenizer, export_model
    from mxdraft.export.graph import FEATURES_FILE, STEP_FILE
    from mxdraft.files.npz import read_windows
    from mxdraft.train.delta import apply_delta
    from mxdraft.train.drafter import load_drafter

    if delta is not None and calibrate is not None:
        raise UsageError("--calibrate: the file of --delta has its own factors; give one of the two")
    checkpoint = load_checkpoint(source)
    smoothing = None
    if calibrate is not None:
        windows = read_windows(calibrate, min(256, checkpoint.config.max_positions), checkpoint.config.vocab)
        smoothing = measure(checkpoint, windows[:32])
    trained = None if delta is None else apply_delta(delta, checkpoint)
    drafting = None if drafter is None else load_drafter(drafter, checkpoint.config)
    tokenizer = complete_tokenizer(checkpoint)
    ends = ", ".join(f"{i} {tokenizer.tokens[i]}" for i in tokenizer.eos_ids)
    note(f"generation ends at: {ends or 'no token; it goes on until the context is full'}")
    paths = list(export_model(checkpoint, directory, rule, trained, drafting, smoothing).values())
    if drafting is not None:
        paths += [directory / name for name in (FEATURES_FILE, STEP_FILE)]
    for path in paths:
        print_line(path)


@click.command(epilog="Example: mxdraft pack build/smollm2-135m -o build/smollm2-135m.mxb")
@click.argument("directory", type=PATH)
@click.option("-o", "bundle", metavar="BUNDLE", type=PATH, required=True, help="File to write.")
@click.option("--text", metavar="FILE", type=PATH, help="Text (.npz) to count n-grams in, for drafting.")
@click.option("--schedule", metavar="FILE", type=PATH, help="Settings (.toml) from mxdraft calibrate.")
@click.option("--base-only", is_flag=True, help="Leave the residual plane, and full precision, out.")
def pack(directory: Path, bundle: Path, text: Path | None, schedule: Path | None, base_only: bool) -> None:
    """Make a bundle of the ONNX files in DIRECTORY, with golden digests computed by the runtime."""
    from mxdraft.pack import pack as pack_bundle

    pack_bundle(directory, bundle, None, _golden_digests, text, schedule, residual=not base_only)
    print_line(bundle)


@click.command(epilog="Example: mxdraft inspect build/smollm2-135m.mxb --json")
@click.argument("bundle", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def inspect(bundle: Path, as_json: bool) -> None:
    """List the sections, tensors and provenance of a bundle."""
    from mxdraft.bundle import Bundle
    from mxdraft.bundle.format import DType

    opened = Bundle.open(bundle)
    report: dict[str, Any] = {
        "config": vars(opened.config),
        "sections": [vars(section) for section in opened.sections.values()],
        "tensors": [
            {
                "section": section,
                "name": name,
                "dtype": DType(entry.dtype).name,
                "shape": entry.shape,
            }
            | {"offset": entry.offset, "length": entry.length}
            for (section, name), entry in opened.tensors.items()
        ],
        "provenance": opened.provenance,
    }
    if as_json:
        print_line(json.dumps(report))
        return
    lines = [" ".join(f"{key}={value}" for key, value in report["config"].items()), "", "SECTION"]
    lines += [
        f"{s['name']:<20}{s['length']:>12} bytes at {s['offset']:>12}  crc {s['crc']:08x}"
        for s in report["sections"]
    ]
    lines += ["", "TENSOR"]
    lines += [
        f"{t['section']:<16} {t['dtype']:<8}{t['shape'][0]:>7} x {t['shape'][1]:<7} {t['name']}"
        for t in report["tensors"]
    ]
    lines += ["", "PROVENANCE", json.dumps(_shortened(report["provenance"]), indent=1)]
    emit(terminal_bytes("\n".join(lines)) + b"\n")


def _shortened(value: Any) -> Any:
    """Return a JSON value without most of its long texts, for people to read."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return (
        f"{value[:64]}... ({len(value)} characters)" if isinstance(value, str) and len(value) > 200 else value
    )


def _golden_digests(bundle: Path) -> tuple[str, str | None]:
    with Model(bundle) as model:
        with Engine(model, precision="base") as engine:
            base = engine.verify().digest
        if not model.info.has_residual:
            return base, None
        with Engine(model, precision="full") as engine:
            return base, engine.verify().digest
