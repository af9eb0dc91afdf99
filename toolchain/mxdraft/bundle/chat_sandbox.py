# SPDX-License-Identifier: Apache-2.0
"""Renders a chat template in a process of its own, with little memory and time.

A template is a program: ``{{ 'x' * 10**9 }}``, or a loop in a loop, takes whatever there is. chat.py
runs this file as a script with both limits as arguments and sends a line of JSON for each question; each
answer is one too. First ``{"template", "variables"}``, answered by ``{"wanted"}``, the variables that the
template reads; then ``{"messages", "generation"}``, answered by ``{"text"}``. Instead of either the answer
may be ``{"error"}``.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any, Never

MEMORY_LIMIT = 512 << 20  # bytes of address space
TIME_LIMIT = 20  # seconds of a CPU, for all questions together
# A device has no date to trust, and a text must not change by itself: it is always Llama 3.2's own default.
DATE = datetime.date(2024, 7, 26)
_TEXT_LIMIT = 1 << 20  # characters of one conversation


def main() -> None:
    import jinja2.ext  # before the limits, which are the template's
    import jinja2.meta
    import jinja2.sandbox

    memory, time = map(int, sys.argv[1:])
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, time), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    # The settings that Hugging Face transformers renders with.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = DATE.strftime
    template: jinja2.Template | None = None
    variables: dict[str, Any] = {}
    answer: dict[str, Any]
    for line in sys.stdin:
        try:
            question = json.loads(line)
            if template is None:
                wanted = jinja2.meta.find_undeclared_variables(environment.parse(question["template"]))
                template = environment.from_string(question["template"])
                variables = question["variables"]
                answer = {"wanted": sorted(wanted)}
            else:
                answer = {"text": _render(template, question, variables)}
        except Exception as error:  # a program may fail in any way
            syntax = "not valid Jinja: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            answer = {"error": syntax + (str(error) or type(error).__name__)[:1000]}
        print(json.dumps(answer), flush=True)


def _render(template: Any, question: dict[str, Any], variables: dict[str, Any]) -> str:
    conversation = {"messages": question["messages"], "add_generation_prompt": question["generation"]}
    text: str = template.render(**conversation, **variables)
    if len(text) > _TEXT_LIMIT:
        raise ValueError(f"it writes {len(text)} characters; at most {_TEXT_LIMIT} are supported")
    text.encode("utf-8")  # it may hold half a surrogate pair
    return text


def _raise(message: str) -> Never:
    raise ValueError(message)


if __name__ == "__main__":
    main()
