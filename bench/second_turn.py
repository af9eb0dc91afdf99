# SPDX-License-Identifier: Apache-2.0
"""How much sooner the second turn of a long conversation begins with the prompt cache of `mxdraft serve`.

    python -m bench.second_turn build/host/mxdraft build/smollm2-135m.mxb [TOKENS] [REPEATS]

Two servers take turns at the same second turns: one that has answered the first turn, and one that keeps
nothing. Each conversation is another one, some TOKENS (1000) long before its second question. Prints times
to the first token and their ratio; ends with 1 if an answer differs.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

ANSWER = 24
SENTENCES = (
    "The small boat went down the river before the rain came.",
    "Nobody on the bank had seen who was rowing, or what lay under the cloth.",
    "In the evening a clock was found in it, still going, and some letters that were never read.",
)


@contextmanager
def serving(program: str, bundle: str, *options: str) -> Iterator[int]:
    """A running server's port."""
    command = [program, "serve", "-m", bundle, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        while not (found := re.search(r"http://\S+:(\d+)$", line := process.stderr.readline().strip())):
            assert line, "the server ended"
        yield int(found[1])
    finally:
        process.terminate()
        process.wait()


def answer(port: int, messages: list[dict[str, str]]) -> tuple[float, str, int]:
    """Seconds to the first text of a streamed greedy answer, the answer, and the tokens of its prompt."""
    body = {
        "messages": messages,
        "max_tokens": ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first, text, prompt = 0.0, "", 0
    while (line := response.readline()) and line != b"data: [DONE]\n":
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        piece = "".join(choice["delta"].get("content", "") for choice in event["choices"])
        first = first or (time.monotonic() - start if piece else 0.0)
        text += piece
        prompt = event.get("usage", {}).get("prompt_tokens", prompt)
    connection.close()
    return first, text, prompt


def conversation(number: int, tokens: int) -> list[dict[str, str]]:
    """A first question of about so many tokens; its beginning is that of no other number."""
    sentences = [SENTENCES[i % len(SENTENCES)] for i in range(tokens // 15)]
    return [{"role": "user", "content": f"Story {number}. {' '.join(sentences)} Who was rowing?"}]


def main() -> None:
    program, bundle, *numbers = sys.argv[1:]
    tokens, repeats = (*map(int, numbers), *(1000, 5)[len(numbers) :])
    warm: list[float] = []
    cold: list[float] = []
    with (
        serving(program, bundle) as kept,
        serving(program, bundle, "--parallel", "1", "--parked", "0") as forgetful,
    ):
        for i in range(repeats):
            talk = conversation(i, tokens)
            _, said, prompt = answer(kept, talk)
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
            times, texts = [], []
            for port in (kept, forgetful):
                first, text, prompt = answer(port, talk)
                times.append(first)
                texts.append(text)
            if texts[0] != texts[1]:
                sys.exit(f"conversation {i}: {texts[0]!r} with the cache, {texts[1]!r} without")
            warm.append(times[0])
            cold.append(times[1])
            print(f"{prompt} tokens: {times[1]:.3f} s cold, {times[0]:.3f} s with the cache", flush=True)
    ratios = [c / w for c, w in zip(cold, warm, strict=True)]
    print(
        f"median: {statistics.median(cold):.3f} s cold, {statistics.median(warm):.3f} s with the cache: "
        f"{statistics.median(ratios):.1f} times sooner ({min(ratios):.1f} to {max(ratios):.1f})"
    )


if __name__ == "__main__":
    main()
