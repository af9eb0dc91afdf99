# SPDX-License-Identifier: Apache-2.0
"""What drafting buys: the same prompts through each drafter in turns, and the outputs compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np

from mxdraft.errors import NumericError
from mxdraft.measure.acceptance import LOW_REPETITION, Prompt
from mxdraft.runtime import Draft, Engine, Model, Timeline
from mxdraft.train.corpus import repetition

Name = TypeVar("Name", bound=str)


@dataclass
class PromptRun:
    """One prompt through every drafter: statistics by drafter, and how much of the text repeats itself."""

    prompt: Prompt
    tokens: int
    repetition: float
    stats: dict[Draft, dict[str, Any]]

    def speed(self, draft: Draft) -> float:
        return float(self.stats[draft]["decode_tok_per_s"])


def in_turns(
    model: Model, engines: Mapping[Name, Engine], prompts: Iterable[str], tokens: int, **sampling: Any
) -> Iterator[dict[Name, tuple[list[int], dict[str, Any]]]]:
    """Generate up to ``tokens`` tokens for each prompt with each engine, each time beginning with another.

    Yields, for each prompt, tokens and statistics by engine.
    """
    order = list(engines)
    for index, prompt in enumerate(prompts):
        ids = model.chat([("user", prompt)])
        made = {}
        for name in order[index % len(order) :] + order[: index % len(order)]:
            with Timeline(engines[name], max_tokens=tokens, **sampling) as sequence:
                for _ in sequence.generate(ids):
                    pass
                made[name] = sequence.tokens[len(ids) :], sequence.stats
        yield made


def compare_drafters(
    model: Model, engines: dict[Draft, Engine], prompts: Sequence[Prompt], tokens: int, **sampling: Any
) -> Iterator[PromptRun]:
    """Run each prompt through each engine in turns.

    Raises NumericError if a drafter changes the output: that must not happen.
    """
    texts = [prompt.text for prompt in prompts]
    for prompt, made in zip(prompts, in_turns(model, engines, texts, tokens, **sampling), strict=True):
        expected, _ = next(iter(made.values()))
        for draft, (generated, _) in made.items():
            if generated != expected:
                raise NumericError(f"--draft {draft} changed the output of {prompt.text!r}")
        if len(expected) > 1:  # else there was no decode step
            stats = {draft: stats for draft, (_, stats) in made.items()}
            yield PromptRun(prompt, len(expected), repetition(np.array(expected)), stats)


def summary(runs: Sequence[PromptRun], drafts: Sequence[Draft]) -> dict[str, Any]:
    """Summarize by drafter: median tok/s, its ratio to the first drafter's (median over prompts, and of total
    times), tokens a step, share of drafted tokens accepted, share of the time spent drafting."""
    result: dict[str, Any] = {"prompts": len(runs)}
    for draft in drafts:
        stats = [run.stats[draft] for run in runs]
        drafted = sum(s["drafted"] for s in stats)
        steps, decoded = sum(s["steps"] for s in stats), sum(s["generated_tokens"] - 1 for s in stats)
        seconds = {d: sum(run.stats[d]["decode_s"] for run in runs) for d in (draft, drafts[0])}
        result[draft] = {
            "decode_tok_per_s": median(run.speed(draft) for run in runs),
            "speedup": median(run.speed(draft) / run.speed(drafts[0]) for run in runs),
            "total_speedup": seconds[drafts[0]] / seconds[draft],
            "tokens_per_step": decoded / steps,
            "accepted": sum(s["accepted"] for s in stats) / drafted if drafted else 0.0,
            "draft_s": sum(s["draft_s"] for s in stats) / sum(s["decode_s"] for s in stats),
        }
    return result


def speed_report(runs: Sequence[PromptRun], drafts: Sequence[Draft]) -> dict[str, Any]:
    """Summarize all runs, those that hardly repeat themselves, and each task."""
    groups = {"all": list(runs), "low repetition": [r for r in runs if r.repetition < LOW_REPETITION]}
    for task in dict.fromkeys(run.prompt.task for run in runs):
        groups[task] = [run for run in runs if run.prompt.task == task]
    return {name: summary(group, drafts) for name, group in groups.items() if group}
