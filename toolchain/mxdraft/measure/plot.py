# SPDX-License-Identifier: Apache-2.0
"""Plots of what ``mxdraft evaluate`` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from mxdraft.bundle.schedule import FRACTIONS, Schedule
from mxdraft.files import replacing
from mxdraft.measure.origin.precision import FlipTrace

rcParams["text.parse_math"] = False  # a $ in the name of a task is a $
_FEWEST = 10  # proposals that make a point of the reliability diagram
Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
Reliability = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]


def plot_acceptance(results: Results, calibrations: Reliability, path: Path) -> None:
    """Draw tokens a round by draft length, acceptance by task, and the reliability diagram, from what
    ``acceptance_report`` and ``reliability`` of acceptance.py found for each drafter; the suffix of ``path``
    says in which format."""
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    by_length, by_task, diagram = figure.subplots(1, 3)
    for drafter, by_group in results.items():
        for group, style in (("all", "-"), ("low repetition", "--")):
            for method, marker in (("drafter", "o"), ("lookup", "x"), ("union", "s")):
                if group in by_group and (method != "lookup" or drafter == next(iter(results))):
                    tau = by_group[group][method]["tau"]
                    name = method if method == "lookup" else f"{drafter}, {method}"
                    by_length.plot(
                        list(map(int, tau)),
                        list(tau.values()),
                        style,
                        marker=marker,
                        label=f"{name}, {group}",
                    )
        tasks = list(by_group)
        shares = [by_group[task]["drafter"]["alpha_everywhere"] for task in tasks]
        by_task.plot(shares, range(len(tasks)), "o", label=drafter)
        by_task.set_yticks(range(len(tasks)), tasks)
    by_length.set(xlabel="draft tokens a round", ylabel="tokens a round")
    by_length.legend(fontsize="x-small")
    by_task.set(xlabel="first draft token accepted, everywhere in the text")
    by_task.invert_yaxis()
    by_task.legend()
    diagram.plot([0, 1], [0, 1], "k:", linewidth=1)
    for drafter, steps in calibrations.items():
        for step, bins in enumerate(steps[:3], start=1):
            points = [(b["confidence"], b["accepted"]) for b in bins if b["count"] >= _FEWEST]
            if points:
                diagram.plot(*zip(*points, strict=True), "o-", label=f"{drafter}, draft token {step}")
    diagram.set(xlabel="confidence", ylabel="share accepted")
    diagram.legend(fontsize="x-small")
    _save(figure, path)


def plot_sensitivity(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the divergence of each group of weights, and what 8 bits for it would spare by their cost;
    ``found``: rows of ``mxdraft evaluate sensitivity``."""
    figure = Figure(figsize=(12, 1.5 + 0.22 * len(found)), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("kl", "kl_per_mib"),
        ("KL from the teacher, only this group in MXFP4 (nat)", "KL that 8 bits spare, a MiB"),
        strict=True,
    ):
        axes.barh(range(len(found)), [row[key] for row in found])
        axes.set(xlabel=label)
        axes.set_yticks(range(len(found)), [row["group"] for row in found])
    axes.invert_yaxis()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the suffix of ``path`` names."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=120)


def plot_calibration(schedule: Schedule, found: Mapping[str, Any], trace: FlipTrace, path: Path) -> None:
    """Draw the reliability of the fit on held-out rows, and where the scores of rows that flip and of rows
    that don't lie between the thresholds."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    diagram, histogram = figure.subplots(1, 2)
    diagram.plot([0, 1], [0, 1], "k:", linewidth=1)
    points = [(p, y) for p, y, count in found["reliability"] if count >= _FEWEST]
    if points:
        diagram.plot(*zip(*points, strict=True), "o-")
    diagram.set(xlabel="predicted probability of a flip", ylabel="share that flips, held out")
    weights = schedule.precision
    scores = trace.signals @ [weights.alpha, weights.beta, weights.gamma] + weights.bias
    for flip, label in ((False, "same choice"), (True, "full precision differs")):
        histogram.hist(scores[trace.flip == flip], bins=40, density=True, alpha=0.5, label=label)
    for fraction, threshold in zip(FRACTIONS, schedule.thresholds, strict=True):
        histogram.axvline(threshold, color="k", linewidth=0.5)
        histogram.text(threshold, 0, f"{fraction:.0%}", rotation=90, fontsize="x-small", va="bottom")
    histogram.set(xlabel="score; lines: above them lie so many rows", ylabel="density")
    histogram.legend()
    _save(figure, path)


def plot_origin(results: Mapping[str, Any], path: Path) -> None:
    """Draw agreement with full precision by the bytes that it costs, for each rule and its controls."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    precision = results["precision"]
    base = precision["base"]
    axes.plot(base["bytes_of_full"], base["agreement"], "k*", label="base")
    axes.plot(1, 1, "k^", label="full")
    curves: dict[str, list[tuple[float, float]]] = {}
    for rule in precision["rules"]:
        name = f"{rule['control']}, catch-up {rule['catch_up']}"
        curves.setdefault(name, []).append((rule["bytes_of_full"], rule["agreement"]))
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    axes.set(xlabel="bytes of weights a token, of full precision's", ylabel="same choice as full precision")
    axes.legend(fontsize="small")
    _save(figure, path)
