"""Plots of what ``mxdraft evaluate`` measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mxdraft.files import replacing

Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]


def plot_acceptance(results: Results, path: Path) -> None:
    """Tokens a round by draft length, and acceptance by task, of what ``mxdraft.acceptance.report`` found for
    each drafter; the suffix of ``path`` says in which format."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_length, by_task = figure.subplots(1, 2)
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
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=120)
