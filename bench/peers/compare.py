# SPDX-License-Identifier: Apache-2.0
"""What is measured, of both runtimes in turns; ratios and plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mxdraft.files import replacing

OURS, THEIRS = "mxdraft", "llama.cpp"


class Workload(NamedTuple):
    """Tokens of each measure: one prompt that is processed, and sequences that decode after a short one."""

    prefill: int = 512
    prompt: int = 64
    decode: int = 96
    sequences: int = 48
    steps: int = 12  # of all sequences together


class Generation(NamedTuple):
    """Greedy tokens after a prompt and its first one, the steps that made them, and their seconds."""

    tokens: list[int]
    steps: int
    seconds: float


class Peer(Protocol):
    """A runtime that is measured. Tokens a second; a context or sequences are made before the first call."""

    def prefill(self, ids: list[int]) -> float: ...

    def decode(self, ids: list[int], tokens: int) -> float: ...

    def batch(self, ids: list[int], sequences: int, steps: int) -> float: ...

    def generate(self, ids: list[int], tokens: int, drafts: bool) -> Generation: ...


Samples = dict[str, dict[str, list[float]]]


def measure(peers: dict[str, Peer], work: Workload, vocab: int, repeat: int) -> Samples:
    """Take tokens a second of each measure and peer, once a repetition, after one that only warms up.

    Who goes first changes with every repetition, so that heat and neighbours meet both alike.
    """
    ids = [position * 7919 % vocab for position in range(max(work.prefill, work.prompt))]
    long, short = ids[: work.prefill], ids[: work.prompt]
    samples: Samples = {
        name: {peer: [] for peer in peers} for name in ("prefill", "decode", f"batch{work.sequences}")
    }
    for repetition in range(repeat + 1):
        order = list(peers.items())
        for name, of_peer in samples.items():
            for peer, runtime in order if repetition % 2 else reversed(order):
                if name == "prefill":
                    speed = runtime.prefill(long)
                elif name == "decode":
                    speed = runtime.decode(short, work.decode)
                else:
                    speed = runtime.batch(short, work.sequences, work.steps)
                if repetition:
                    of_peer[peer].append(speed)
    return samples


def ratios(samples: Samples) -> dict[str, float]:
    """Divide the median of ours by the median of theirs, for each measure."""
    return {
        name: statistics.median(of_peer[OURS]) / statistics.median(of_peer[THEIRS])
        for name, of_peer in samples.items()
    }


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "samples": values,
    }


def measure_prompts(peers: dict[str, Peer], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Generate greedy text after real prompts: both peers without and with their drafts, in turns.

    Tokens a second are those of all prompts, and their median; ``tokens_per_step``: what a step of the target
    gives.
    """
    modes: dict[str, tuple[Peer, bool]] = {
        OURS: (peers[OURS], False),
        f"{OURS} drafting": (peers[OURS], True),
        THEIRS: (peers[THEIRS], False),
        f"{THEIRS} n-gram": (peers[THEIRS], True),
    }
    done: dict[str, list[Generation]] = {mode: [] for mode in modes}
    for i, prompt in enumerate(prompts):
        order = list(modes)[i % len(modes) :] + list(modes)[: i % len(modes)]
        for mode in order:
            peer, drafts = modes[mode]
            done[mode].append(peer.generate(prompt, tokens, drafts))
    return {
        mode: {
            "median_tok_per_s": statistics.median(len(one.tokens) / one.seconds for one in made),
            "tok_per_s": sum(len(one.tokens) for one in made) / sum(one.seconds for one in made),
            "tokens_per_step": sum(len(one.tokens) for one in made) / sum(one.steps for one in made),
            "tokens": sum(len(one.tokens) for one in made),
        }
        for mode, made in done.items()
    }


def table(samples: Samples) -> str:
    """Show medians, least and greatest values, and the ratios, for people."""
    lines = [f"{'tok/s':<12}{OURS:>28}{THEIRS:>28}{'ratio':>8}"]
    for name, of_peer in samples.items():
        cells = [
            f"{statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})"
            for values in (of_peer[OURS], of_peer[THEIRS])
        ]
        lines.append(f"{name:<12}{cells[0]:>28}{cells[1]:>28}{ratios(samples)[name]:>8.2f}")
    return "\n".join(lines)


def plot(samples: Samples, title: str, path: Path) -> None:
    """Draw one panel a measure: repetitions as dots, medians as bars. The suffix of ``path`` is the
    format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, of_peer) in zip(figure.subplots(1, len(samples)), samples.items(), strict=True):
        for x, (peer, values) in enumerate(of_peer.items()):
            axes.bar(x, statistics.median(values), width=0.6, color="0.8")
            axes.plot([x] * len(values), values, "o", color="tab:blue" if peer == OURS else "tab:orange")
        axes.set_xticks(range(len(of_peer)), list(of_peer))
        axes.set_title(f"{name}, {ratios(samples)[name]:.2f} x", fontsize=10)
        axes.set_ylabel("tok/s")
        axes.set_ylim(bottom=0)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:])
