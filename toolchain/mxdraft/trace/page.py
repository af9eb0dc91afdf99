# SPDX-License-Identifier: Apache-2.0
"""A trace as one page that needs no other file; page.js recomputes its numbers as the sliders move."""

from __future__ import annotations

import codecs
from collections import Counter
from importlib import resources
from typing import Any

import jinja2

from mxdraft.trace.read import Line, Trace

# What page.js decides by: the fields of a token that it gets.
_SIGNALS = ("confidence", "attention", "history", "score", "margin", "look", "position", "token", "drafted")
_CHOICES = ("text", "bytes", "base_token", "base_text", "full_token", "full_text", "tier")


def page(trace: Trace) -> str:
    """Render the page's HTML."""
    run = trace.run
    data = {
        "tokens": [
            {name: token[name] for name in _SIGNALS}
            | {name: token[name] for name in _CHOICES if token.get(name) is not None}
            for token in trace.tokens
        ],
        "schedule": run["schedule"],
        "threshold": run["threshold"],
        "weight_bytes": run["weight_bytes"],
    }
    folder = resources.files("mxdraft.trace")
    template, script = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "js")
    )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        run=run,
        prompt=_shown(run["prompt"]["text"]),
        tokens=[
            {"text": text, "classes": " ".join(_classes(token)), "position": token["position"]}
            for text, token in zip(_texts(trace.tokens), trace.tokens, strict=True)
        ],
        recorded=summary(trace),
        statistics=trace.statistics,
        steps=_steps(trace.steps),
        data=data,
        script=script,
    )


def summary(trace: Trace) -> dict[str, Any]:
    """Sum up what the run did, by the names that page.js gives to what it would do with other settings.

    ``bytes``: weights read for a token after the first, without drafts. Differences are those between the
    choices of base and full precision, of rows where both are known; None if the trace has none.
    """
    tokens = trace.tokens
    looks = Counter(token["look"] for token in tokens)
    decoded = [token["look"] for token in tokens[1:]]
    planes = trace.run["weight_bytes"]
    read = sum(
        planes["base"] * (look in ("none", "core")) + planes["full"] * (look != "none") for look in decoded
    )
    known = [t for t in tokens if t.get("full_token") is not None and t["base_token"] is not None]
    differences = [t for t in known if t["base_token"] != t["full_token"]]
    caught = sum(t["look"] == "core" for t in differences)
    return {
        "tokens": len(tokens),
        **{look: looks[look] for look in ("core", "due", "all", "none")},
        "bytes": read / len(decoded) if decoded else None,
        "drafted": sum(token["drafted"] for token in tokens),
        "tiers": dict(Counter(str(t["tier"]) for t in tokens if t.get("tier") is not None)),
        "differences": len(differences) if known else None,
        "caught": caught,
        "missed": len(differences) - caught,
        "wasted": sum(t["look"] == "core" for t in known) - caught,
    }


def _steps(steps: list[Line]) -> dict[str, float]:
    """Sum up the steps that made tokens after a prompt."""
    decode = [step for step in steps if step["verified"]]
    seconds = sorted(step["seconds"] for step in decode)
    return {
        "count": len(decode),
        "rows": sum(step["verified"] for step in decode) / len(decode) if decode else 0,
        "median_ms": 1000 * seconds[len(seconds) // 2] if seconds else 0,
        "longest_ms": 1000 * seconds[-1] if seconds else 0,
    }


def _classes(token: Line) -> list[str]:
    """Return the marks of a token in the text, as page.js sets them."""
    differs = token.get("full_token") not in (None, token["base_token"]) and token["base_token"] is not None
    difference = ("caught" if token["look"] == "core" else "missed") if differs else ""
    marks = [token["look"], "drafted" * token["drafted"], "special" * token["special"], difference]
    return [mark for mark in marks if mark]


def _texts(tokens: list[Line]) -> list[str]:
    """Return what to show of each token. A character of several tokens is shown in the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = []
    for token in tokens:
        data = bytes.fromhex(token["bytes"]) if token.get("bytes") else token["text"].encode("utf-8")
        texts.append(_shown(token["text"] if token["special"] else decoder.decode(data)) or "◌")
    return texts


def _shown(text: str) -> str:
    """Replace control characters by their pictures; a line's end stays, after its picture."""
    return "".join(
        f"␤{c}" if c == "\n" else chr(0x2400 + ord(c)) if c < " " else "␡" if "\x7f" <= c < "\xa0" else c
        for c in text
    )
