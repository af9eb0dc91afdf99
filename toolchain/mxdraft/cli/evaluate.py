# SPDX-License-Identifier: Apache-2.0
"""evaluate: how good a bundle is, and what drafting buys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import click

from mxdraft.cli._options import (
    PATH,
    engine_options,
    limit_option,
    model_option,
    real,
    threads_option,
    whole,
    word_option,
)
from mxdraft.cli._terminal import Interrupt, note, print_line
from mxdraft.errors import RefusedError, UsageError
from mxdraft.files import read_file, write_json
from mxdraft.measure.acceptance import MeanInterval
from mxdraft.runtime import Draft, Engine, EngineOptions, Model, Precision, Timeline

_json_option = click.option(
    "--json", "json_path", metavar="FILE", type=PATH, help="Write the results to this file."
)
_plot_option = click.option(
    "--plot", "plot_path", metavar="FILE", type=PATH, help="Draw them (.png or .svg)."
)


@click.group()
def evaluate() -> None:
    """Measure: a bundle against its weights, weights against MXFP4, drafting against plain decoding."""


@evaluate.command(
    epilog="Example: mxdraft evaluate quality -m build/smollm2-135m.mxb --text wikitext2_test.txt "
    "--tokens 4096 --precision base --precision full --json quality.json"
)
@model_option
@click.option("--text", type=PATH, required=True, help="UTF-8 text to score.")
@click.option("--tokens", type=whole(2, 1 << 24), default="4096", help="Tokens of it to score.")
@click.option("--ctx", type=whole(2, 1 << 16), default="512", help="Window; each starts from an empty cache.")
@click.option(
    "--precision", "precisions", multiple=True, default=("base", "full"), help="base or full; repeatable."
)
@click.option("--source", type=PATH, help="The unquantized weights; fetched by default.")
@_json_option
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

    from mxdraft.bundle import parse_provenance
    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.checkpoint.fetch import fetch
    from mxdraft.checkpoint.reference import Teacher
    from mxdraft.measure.quality import Forward, score_windows

    for precision in precisions:
        if precision not in get_args(Precision) or precision == "auto":
            raise UsageError(f"--precision: '{precision}': expected base or full")
    content = read_file(text, 1 << 30)
    Interrupt()
    checkpoint = load_checkpoint(source or fetch("smollm2-135m"))
    with Model(bundle) as model:
        recorded = parse_provenance(model.info.provenance).get("source_sha256")
        if recorded != checkpoint.source_sha256:
            raise RefusedError(
                f"{bundle} was made of other weights (sha256 {recorded}): give them with --source"
            )
        # A token needs at most 8 bytes on average in any text worth scoring; the tail is cut off anyway.
        ids = np.array(model.encode(content[: 32 * tokens])[:tokens])

        def student(precision: Precision) -> Forward:
            engine = Engine(model, ctx=ctx, precision=precision)  # closed with the model

            def forward(window: np.ndarray) -> np.ndarray:
                with Timeline(engine) as sequence:
                    return sequence.logits(window.tolist())

            return forward

        students: dict[str, Forward] = {precision: student(precision) for precision in precisions}
        for sums in score_windows(Teacher(checkpoint).logits, students, ids, ctx):
            progress = ", ".join(f"{name} KL {q.kl:.4f}" for name, q in sums.items())
            note(f"{sums['teacher'].positions}/{len(ids)} tokens: {progress}")
    results = {name: q.report() for name, q in sums.items()}
    print_line(f"{'':<10}{'KL':>9}{'agreement':>12}{'perplexity':>12}")
    for name, r in results.items():
        print_line(f"{name:<10}{r['kl']:>9.4f}{r['agreement']:>12.2%}{r['perplexity']:>12.3f}")
    if json_path:
        write_json(json_path, {"results": results, "ctx": ctx, "bundle": bundle})


@evaluate.command(
    epilog='Example: mxdraft evaluate sensitivity "$(mxdraft fetch smollm2-135m)" '
    "--text models/smollm2-135m/teacher_text.npz --tokens 2048 --json sensitivity.json"
)
@click.argument("weights", type=PATH)
@click.option("--text", type=PATH, required=True, help="Teacher text (.npz) to measure on.")
@click.option("--tokens", type=whole(2, 1 << 24), default="2048", help="Tokens of it, in whole windows.")
@click.option("--ctx", type=whole(2, 1 << 16), default="512", help="Window; each starts from an empty cache.")
@word_option(
    "--start", ("round", "compensate"), "round", "Plain rounding, or GPTQ against these very tokens."
)
@_json_option
@_plot_option
def sensitivity(
    weights: Path,
    text: Path,
    tokens: int,
    ctx: int,
    start: Literal["round", "compensate"],
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Which weights of WEIGHTS suffer from MXFP4: divergence when only one group of them is read through it.

    Groups: each layer, each kind of weight, all layers, embedding, head. Needs mxdraft[train].
    """
    import torch

    from mxdraft.checkpoint import load_checkpoint
    from mxdraft.files.npz import read_windows
    from mxdraft.measure.sensitivity import by_kind, by_layer, groups, sensitivity

    checkpoint = load_checkpoint(weights)
    windows = read_windows(text, ctx, checkpoint.config.vocab)[: max(1, tokens // ctx)]
    asked = groups(checkpoint, [by_layer, by_kind])
    found = []
    for part in sensitivity(checkpoint, torch.from_numpy(windows), start, asked):
        row = vars(part) | vars(part.quality) | {"kl_per_mib": part.kl_per_mib}
        found.append({key: value for key, value in row.items() if key != "quality"})
        note(f"{len(found)}/{len(asked)} {part.group}: KL {part.quality.kl:.4f}")
    print_line(f"{'':<20}{'MXFP4 MiB':>11}{'MXINT8 MiB':>11}{'KL':>9}{'agreement':>11}{'KL a MiB':>11}")
    for row in found:
        sizes = "".join(f"{row[key] / 2**20:>11.2f}" for key in ("mxfp4_bytes", "mxint8_bytes"))
        numbers = f"{row['kl']:>9.4f}{row['agreement']:>11.2%}{row['kl_per_mib']:>11.4f}"
        print_line(f"{row['group']:<20}{sizes}{numbers}")
    if json_path:
        facts = {"start": start, "tokens": windows.size, "ctx": ctx, "weights": checkpoint.source_sha256}
        write_json(json_path, {"results": found, **facts})
    if plot_path:
        from mxdraft.measure.plot import plot_sensitivity

        plot_sensitivity(found, plot_path)


@evaluate.command(
    epilog="Example: mxdraft evaluate speculation -m build/smollm2-135m.mxb --prompts prompts.jsonl "
    "--task chat --draft off --draft ngram --draft auto -n 128"
)
@model_option
@click.option("--prompts", type=PATH, required=True, help="JSON lines with 'turns' and 'task'.")
@click.option("--task", "tasks", multiple=True, help="Only prompts of this task; repeatable.")
@click.option(
    "--per-task", "count", type=whole(0, 1 << 20), default="20", help="Prompts of each task; 0 = all."
)
@click.option(
    "--draft", "drafts", multiple=True, default=("off", "auto"), help="Drafters to compare; repeatable."
)
@limit_option("128", 2)
@engine_options
@click.option("--temp", type=real(0, 100), default="0", help="Temperature; 0 = greedy.")
@_json_option
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
    from mxdraft.measure.acceptance import read_prompts
    from mxdraft.measure.speculation import compare_drafters, speed_report

    for draft in drafts:
        if draft not in get_args(Draft):
            raise UsageError(f"--draft: '{draft}': expected one of {', '.join(get_args(Draft))}")
    chosen = [prompt for prompt in read_prompts(prompts, count) if not tasks or prompt.task in tasks]
    Interrupt()
    runs = []
    with Model(bundle) as model:
        engines = {draft: Engine(model, **options | {"draft": draft}) for draft in dict.fromkeys(drafts)}
        plan = engines[drafts[0]].plan
        for draft, engine in engines.items():
            if draft != "off":
                engine.measure_costs()
        for run in compare_drafters(model, engines, chosen, limit, temperature=temp):
            runs.append(run)
            speeds = ", ".join(f"{draft} {run.speed(draft):.1f}" for draft in engines)
            note(f"{len(runs)}/{len(chosen)} {run.prompt.task}: {run.tokens} tokens, tok/s: {speeds}")
    if not runs:
        raise RefusedError(f"{prompts}: no prompt of these tasks made more than one token")
    results = speed_report(runs, list(engines))
    print_line(f"{'':<18}{'draft':<8}{'tok/s':>8}{'speedup':>9}{'total':>7}{'tok/step':>10}{'accepted':>10}")
    for group, values in results.items():
        for draft in engines:
            r = values[draft]
            print_line(
                f"{group:<18}{draft:<8}{r['decode_tok_per_s']:>8.1f}{r['speedup']:>9.2f}{r['total_speedup']:>7.2f}"
                f"{r['tokens_per_step']:>10.2f}{r['accepted']:>10.1%}"
            )
    if json_path:
        facts = {"bundle": bundle, "threads": plan.threads, "precision": plan.precision, "tokens": limit}
        each = [
            {"task": r.prompt.task, "tokens": r.tokens, "repetition": r.repetition, "stats": r.stats}
            for r in runs
        ]
        write_json(json_path, facts | {"results": results, "runs": each})


@evaluate.command(
    epilog="Example: mxdraft evaluate acceptance -m build/smollm2-135m.mxb --drafter "
    "models/smollm2-135m/drafter.npz --prompts spec_bench_open.jsonl --run build/acceptance "
    "--json acceptance.json --plot acceptance.png"
)
@model_option
@click.option(
    "--drafter", "drafters", metavar="[NAME=]FILE", multiple=True, required=True, help="Repeatable."
)
@click.option("--prompts", type=PATH, required=True, help="JSON lines with task and turns (Spec-Bench).")
@click.option("--run", "directory", metavar="DIR", type=PATH, required=True, help="Where rollouts are kept.")
@click.option("--per-task", type=whole(0, 1 << 20), default="0", help="Prompts of each task; 0 = all.")
@click.option("--temp", "temperature", type=real(0, 100), default="0", help="Temperature; 0 = greedy.")
@click.option("-n", "tokens", type=whole(2, 1 << 16), default="128", help="Most tokens of an answer.")
@click.option("--depth", type=whole(1, 8), default="4", help="Longest draft.")
@_json_option
@_plot_option
def acceptance(
    bundle: str,
    drafters: tuple[str, ...],
    prompts: Path,
    directory: Path,
    per_task: int,
    temperature: float,
    tokens: int,
    depth: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Draft tokens that base precision accepts, of drafters, of lookup and of both, by task.

    Of several drafters each is also compared with the first, answer by answer (95 % intervals).
    The runtime writes the answers; drafting is then replayed in torch (needs mxdraft[train]).
    """
    import torch

    from mxdraft.bundle import Bundle
    from mxdraft.measure.acceptance import (
        acceptance_report,
        differences,
        read_prompts,
        reliability,
        write_rollouts,
    )
    from mxdraft.measure.draft_table import draft_tables, rollout_features
    from mxdraft.train.draft_model import restored
    from mxdraft.train.drafter import draft_cost, load_drafter
    from mxdraft.train.features import bundle_target

    named = dict(_named(drafter) for drafter in drafters)
    asked = read_prompts(prompts, per_task)
    directory.mkdir(parents=True, exist_ok=True)
    kept = directory / f"rollouts-{per_task}-{tokens}-{temperature:g}.npz"

    def tell(done: int, total: int) -> None:
        note(f"{done}/{total} answers")

    with Model(bundle) as model:
        rollouts = write_rollouts(model, asked, kept, temperature, tokens, progress=tell)
    opened = Bundle.open(Path(bundle))
    target = bundle_target(opened, "base")
    results, calibrations, gains, reference = {}, {}, {}, None
    for name, path in named.items():
        drafter = load_drafter(path, target.config)
        layers = "-".join(map(str, drafter.feature_layers))
        features = rollout_features(
            Path(bundle), drafter.feature_layers, rollouts, kept.with_name(f"{kept.stem}-{layers}.npy")
        )
        ids = torch.from_numpy(drafter.draft_ids.astype("int64"))
        network = restored(drafter, target.config)
        tables = draft_tables(network, ids, drafter.calibration, target, features, rollouts, depth)
        calibrations[name] = reliability(rollouts, tables)
        results[name] = acceptance_report(rollouts, tables, range(1, depth + 1), draft_cost(drafter, opened))
        _emit_acceptance(name, results[name])
        if reference is None:
            reference = tables
        else:
            gains[name] = differences(rollouts, tables, reference, range(1, depth + 1))
            _emit_gains(name, next(iter(named)), gains[name])
    if json_path:
        facts = {"temperature": temperature, "tokens": tokens, "bundle": bundle, "prompts": len(rollouts)}
        write_json(json_path, {"results": results, "gains": gains, "reliability": calibrations, **facts})
    if plot_path:
        from mxdraft.measure.plot import plot_acceptance

        plot_acceptance(results, calibrations, plot_path)


@evaluate.command(
    epilog="Example: mxdraft evaluate origin -m build/smollm2-135m.mxb --quick --json origin.json"
)
@model_option
@click.option("--quick", is_flag=True, help="A small sample of everything: minutes instead of an hour.")
@click.option("--text", type=PATH, help="Text (UTF-8 or .npz) to measure on; by default, its own answers.")
@click.option(
    "--tokens",
    type=whole(256, 1 << 20),
    default="6144",
    help="Tokens of it for precision; the KV cache reads up to 8192.",
)
@threads_option
@_json_option
@_plot_option
def origin(
    bundle: str,
    quick: bool,
    text: Path | None,
    tokens: int,
    threads: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """What core tokens buy, beside controls: precision, compute and memory, each alone and all together."""
    from mxdraft.bundle import Bundle
    from mxdraft.measure.origin.evaluate import evaluate_origin
    from mxdraft.measure.plot import plot_origin

    Interrupt()
    schedule = Bundle.open(Path(bundle)).schedule
    with Model(bundle) as model:
        results = evaluate_origin(model, schedule, text, tokens, quick, threads, note)
    for line in _origin_lines(results):
        print_line(line)
    if json_path:
        write_json(json_path, results | {"bundle": bundle, "quick": quick})
    if plot_path:
        plot_origin(results, plot_path)


def _origin_lines(results: dict[str, Any]) -> Iterator[str]:
    precision = results["precision"]
    base = precision["base"]
    yield "precision     core  catch-up  agreement      KL  repaired  bytes of full"
    yield f"base{base['agreement']:>35.2%}{base['kl']:>8.4f}{base['bytes_of_full']:>25.2f}"
    for r in precision["rules"]:
        yield (
            f"{r['control']:<12}{r['core']:>6.1%}{r['catch_up']:>10}{r['agreement']:>11.2%}{r['kl']:>8.4f}"
            f"{r['repaired']:>10.1%}{r['bytes_of_full']:>15.2f}"
        )
    yield f"{'speed':<20}{'tok/s':>8}{'of full':>9}{'tok/step':>10}{'core':>7}{'MB/token':>10}"
    for name, s in precision["speed"].items():
        yield (
            f"{name:<20}{s['tok_per_s']:>8.1f}{s['of_full']:>9.2f}{s['tokens_per_step']:>10.2f}{s['core']:>7.1%}"
            f"{s['bytes_per_token'] / 1e6:>10.1f}"
        )
    flips, drafts = results["identification"]["flips"], results["identification"]
    yield (
        f"flips foretold: balanced accuracy {flips['accuracy']:.1%}, AUC {flips['auc']:.3f} "
        f"(margin alone {flips['auc_margin']:.3f}); {flips['flips']:.1%} of {flips['rows']} rows flip"
    )
    yield (
        f"acceptance foretold: balanced accuracy {drafts['accuracy']:.1%}, AUC {drafts['auc']:.3f}, "
        f"{drafts['us_per_step']:.0f} us a step"
    )
    yield "sequences drafts     accepted tok/step   tok/s  p50 ms  p95 ms"
    for places, methods in results["compute"].items():
        for name, m in methods.items():
            accepted = "" if m["acceptance"] is None else f"{m['acceptance']:.1%}"
            yield (
                f"{places:<10}{name:<10}{accepted:>9}{m['tokens_per_step']:>9.2f}{m['busy_tok_per_s']:>8.1f}"
                f"{m['p50_ms']:>8.1f}{m['p95_ms']:>8.1f}"
            )
    yield f"{'context':<10}{'sequences':<11}{'core':<12}{'tok/s':>8}{'of full':>9}{'tok/step':>10}"
    for ctx, by_places in results["together"].items():
        for places, resources in by_places.items():
            for name, r in resources.items():
                yield (
                    f"{ctx:<10}{places:<11}{name:<12}{r['tok_per_s']:>8.1f}{r['of_full']:>9.2f}"
                    f"{r['tokens_per_step']:>10.2f}"
                )
    yield f"{'context':<10}{'KV':<12}{'bits':>6}{'KL':>9}{'agreement':>11}{'accepted':>10}{'less f16':>10}"
    for ctx, caches in results["memory"]["contexts"].items():
        for name, k in caches.items():
            accepted = "" if k["acceptance"] is None else f"{k['acceptance']:.1%}"
            yield (
                f"{ctx:<10}{name:<12}{k['bits_per_value']:>6.2f}{k['kl']:>9.4f}{k['agreement']:>11.1%}"
                f"{accepted:>10}{k['acceptance_less_f16']:>+10.1%} +-{k['acceptance_error']:.1%}"
            )
    yield f"{'context':<10}{'KV':<12}{'tok/s':>8}{'of int8':>9}"
    for ctx, formats in results["memory"]["speed"].items():
        for name, f in formats.items():
            yield f"{ctx:<10}{name:<12}{f['tok_per_s']:>8.1f}{f['of_int8']:>9.2f}"


def _named(drafter: str) -> tuple[str, Path]:
    """Split NAME=FILE into name and path; a file alone is called by its stem."""
    name, separator, path = drafter.rpartition("=")
    return (name, Path(path)) if separator else (Path(drafter).stem, Path(drafter))


def _emit_acceptance(drafter: str, by_group: dict[str, dict[str, dict[str, Any]]]) -> None:
    depth = len(next(iter(by_group.values()))["drafter"]["tau"])
    taus = "".join(f"  tau {k}" for k in range(1, depth + 1))
    alphas = "".join(f" alpha {k}" for k in range(1, depth + 1))
    print_line(f"{drafter:<18}{'method':<9}{'texts':>6}{taus}{alphas}  speed-up")
    for group, by_method in by_group.items():
        for method, m in by_method.items():
            numbers = "".join(f"{t:7.3f}" for t in m["tau"].values())
            numbers += "".join(f"{a:8.3f}" for a in m["alpha"])
            best = f"{m['speed_up']:8.3f} at {m['speed_up_depth']}"
            print_line(f"{group:<18}{method:<9}{m['rollouts']:>6}{numbers}{best}")


def _emit_gains(drafter: str, reference: str, by_group: dict[str, dict[str, MeanInterval]]) -> None:
    measures = list(next(iter(by_group.values())))
    heading = "".join(f"{measure.removesuffix('_everywhere'):>25}" for measure in measures)
    print_line(f"{f'{drafter} - {reference}':<18}{heading}")
    for group, by_measure in by_group.items():
        gains = "".join(f"{g.mean:+9.3f} ({g.low:+.3f} {g.high:+.3f})" for g in by_measure.values())
        print_line(f"{group:<18}{gains}")
