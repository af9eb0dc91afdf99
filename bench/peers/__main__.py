# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.peers``: compare with llama.cpp (`make bench-peers` makes its environment first)."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import click
from mxdraft import __version__
from mxdraft.bundle import parse_provenance
from mxdraft.checkpoint.fetch import fetch
from mxdraft.errors import MxdraftError, RefusedError
from mxdraft.files import file_sha256, replacing
from mxdraft.measure.acceptance import read_prompts
from mxdraft.runtime import Model, cpu_describe, default_threads

from bench.peers.compare import (
    OURS,
    THEIRS,
    Peer,
    Workload,
    measure,
    measure_prompts,
    plot,
    ratios,
    spread,
    table,
)
from bench.peers.ours import Ours
from bench.peers.theirs import FORMATS, Theirs

CTX = 2048
WORK = Workload()
_path = click.Path(path_type=Path)


@click.command()
@click.option("-m", "bundle", type=_path, required=True, help="Bundle file (.mxb).")
@click.option("--weights", type=_path, help="The GGUF it was made of; by default fetched (smollm2-135m).")
@click.option("--peer", type=_path, required=True, help="The Python that has llama-cpp-python.")
@click.option("--directory", type=_path, required=True, help="For llama.cpp's quantized weights and log.")
@click.option(
    "--precision",
    type=click.Choice(list(FORMATS)),
    default="base",
    show_default=True,
    help="base is compared with Q4_0, full with Q8_0.",
)
@click.option(
    "-t", "threads", type=click.IntRange(1, 64), help="Threads of both; default: what `info` tells."
)
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option("--prompts", type=_path, help="JSON lines with turns: also generate after the first of each.")
@click.option("--task", default="chat", show_default=True, help="Of the prompts, those of this task.")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="After each prompt.")
@click.option("--json", "json_path", type=_path, help="Write the results to this file.")
@click.option("--plot", "plot_path", type=_path, help="Draw them: .svg or .png.")
def main(bundle: Path, json_path: Path | None, plot_path: Path | None, **options: Any) -> None:
    """Prefill, decode and 48 sequences: mxdraft, and llama.cpp with the same weights, in turns."""
    try:
        report, samples = run(bundle, **options)
        click.echo(table(samples))
        if "prompts" in report:
            click.echo(json.dumps(report["prompts"], indent=1))
        if json_path:
            with replacing(json_path) as file:
                file.write(json.dumps(report, indent=1).encode("utf-8"))
        if plot_path:
            machine = f"{report['machine']['cpu']}, {report['threads']} threads, {report['date'][:10]}"
            formats = f"{report['precision']} and {report['versions'][THEIRS]['format']}"
            plot(samples, f"{formats}; {machine}", plot_path)
    except MxdraftError as error:
        click.echo(f"bench.peers: error: {error}", err=True)
        sys.exit(error.exit_code)


def run(
    bundle: Path,
    weights: Path | None,
    peer: Path,
    directory: Path,
    precision: Any,
    threads: int | None,
    repeat: int,
    prompts: Path | None,
    task: str,
    tokens: int,
    work: Workload = WORK,
) -> tuple[dict[str, Any], dict[str, dict[str, list[float]]]]:
    """Measure; returns the report as written by --json, and the samples in it.

    Raises RefusedError if bundle and weights are not of the same source.
    """
    weights = weights or fetch("smollm2-135m")
    threads = threads or default_threads()
    directory.mkdir(parents=True, exist_ok=True)
    digest = file_sha256(weights)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model(bundle))
        if parse_provenance(model.info.provenance).get("source_sha256") != digest:
            raise RefusedError(f"{bundle} was not made of {weights}: give its GGUF with --weights")
        ctx = min(CTX, model.info.max_positions)
        theirs = stack.enter_context(Theirs(peer, weights, directory, FORMATS[precision], threads, ctx))
        peers: dict[str, Peer] = {OURS: Ours(model, precision, threads, ctx), THEIRS: theirs}
        samples = measure(peers, work, model.info.vocab, repeat)
        report: dict[str, Any] = {
            "ratios": ratios(samples),
            "tok_per_s": {
                name: {who: spread(values) for who, values in of_peer.items()}
                for name, of_peer in samples.items()
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "threads": threads,
            "precision": precision,
            "workload": work._asdict(),
            "repeat": repeat,
            "weights_sha256": digest,
            "versions": {OURS: __version__, THEIRS: theirs.about},
            "kernels": dict(line.split() for line in cpu_describe().splitlines()),
        }
        if prompts:
            ids = [model.chat([("user", text)]) for text in first_turns(prompts, task)]
            report["prompts"] = measure_prompts(peers, ids, tokens)
    return report, samples


def first_turns(path: Path, task: str) -> list[str]:
    """Read the prompts of a task from a Spec-Bench file. Raises RefusedError, also where there is none."""
    turns = [prompt.text for prompt in read_prompts(path, 0) if prompt.task == task]
    if not turns:
        raise RefusedError(f"{path} has no prompt of task '{task}'")
    return turns


def machine() -> dict[str, Any]:
    """Tell what a speed depends on, as far as the system says."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": name.group(1) if name else platform.machine(),
        "arch": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
