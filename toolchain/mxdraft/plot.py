"""Plots of what ``mxdraft evaluate`` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mxdraft.files import replacing

_FEWEST = 10  # proposals that make a point of the reliability diagram
Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
Reliability = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]


def plot_acceptance(results: Results, calibrations: Reliability, path: Path) -> None:
    """Tokens a round by draft length, acceptance by task, and the reliability diagram, of what ``report`` and
    ``reliability`` of mxdraft.acceptance found for each drafter; the suffix of ``path`` says in which format.
    """
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
    """Divergence of each group of weights, and what 8 bits for it would spare by their cost; ``found``: rows
    of ``mxdraft evaluate sensitivity``."""
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
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=120)
