# SPDX-License-Identifier: Apache-2.0
"""Soak `mxdraft serve`: many streaming clients, half of which hang up at random. `make soak-serve` runs it.

    python serve_soak.py PROGRAM BUNDLE [SECONDS] [CLIENTS]

Every full answer has to be what `generate` writes. Prints times to the first token and between pieces, and
the server's memory and descriptors.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

TOKENS = 24
PROMPTS = ["Why is the sky blue?", "Name three fruits.", "Write a line about rain.", "What is a boat?"]
CASES = [(prompt, heat, seed) for prompt in PROMPTS for heat, seed in ((0.0, 1), (0.9, 5), (0.9, 6))]


class Soak:
    """What the clients share."""

    def __init__(self, port: int, expected: list[str], end: float) -> None:
        self.port, self.expected, self.end = port, expected, end
        self.lock = threading.Lock()
        self.first: list[float] = []
        self.between: list[float] = []
        self.whole = self.hung_up = self.refused = 0
        self.wrong: list[str] = []

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < self.end:
            self.ask(draw.randrange(len(CASES)), draw.randrange(1, 12) if draw.random() < 0.5 else None)

    def ask(self, case: int, hang_up_after: int | None) -> None:
        prompt, heat, seed = CASES[case]
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": TOKENS,
            "temperature": heat,
            "seed": seed,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        last = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        text, pieces, first, between = "", 0, 0.0, []
        if answer.status != 200:
            with self.lock:
                self.refused += 1
            connection.close()
            return
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            content = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if not content:
                continue
            now = time.monotonic()
            if pieces:
                between.append(now - last)
            else:
                first = now - last
            text, pieces, last = text + content, pieces + 1, now
            if pieces == hang_up_after:
                break
        connection.close()
        with self.lock:
            self.first.append(first)
            self.between += between
            if pieces == hang_up_after:
                self.hung_up += 1
            else:
                self.whole += 1
                if text != self.expected[case]:
                    self.wrong.append(text)


def metrics(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}


def resources(pid: int) -> tuple[int, int]:
    """Resident KiB without the mapped bundle, and open descriptors."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    rss = re.search(r"RssAnon:\s+(\d+)", status)
    assert rss
    return int(rss[1]), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def percentiles(name: str, values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=20)
    print(f"{name}: p50 {cuts[9]:.3f} s, p95 {cuts[18]:.3f} s over {len(values)}")


def main() -> None:
    program, bundle = sys.argv[1:3]
    seconds, clients = int((sys.argv[3:] or ["600"])[0]), int((sys.argv[4:] or ["48"])[0])
    expected = []
    for prompt, heat, seed in CASES:
        options = ["-n", str(TOKENS), "--temp", str(heat), "--seed", str(seed), "--stats", "none"]
        command = [program, "generate", "-m", bundle, "-p", prompt, *options]
        expected.append(subprocess.run(command, capture_output=True, check=True).stdout.decode())
    server = subprocess.Popen(
        [program, "serve", "-m", bundle, "--port", "0", "--parallel", "8"], stderr=subprocess.PIPE
    )
    assert server.stderr
    port = None
    while not port:
        line = server.stderr.readline()
        assert line, "the server ended"
        port = re.search(rb"listening on \S+:(\d+)$", line.strip())
    soak = Soak(int(port[1]), expected, time.monotonic() + seconds)
    samples = []
    threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(5, seconds / 10))
        samples.append(resources(server.pid)[0])
    while metrics(soak.port)["mxdraft_running"] or metrics(soak.port)["mxdraft_queued"]:
        time.sleep(0.1)
    end = metrics(soak.port)
    print(
        f"{soak.whole} whole answers, {soak.hung_up} hung up, {soak.refused} refused, {len(soak.wrong)} wrong"
    )
    percentiles("first token", soak.first)
    percentiles("between pieces", soak.between)
    third = len(samples) // 3
    second, last = max(samples[third : 2 * third]), max(samples[2 * third :])
    print(f"resident KiB: most in the second third {second}, in the last {last}")
    print(f"descriptors {resources(server.pid)[1]}, cancelled {end['mxdraft_cancelled_total']:.0f}")
    server.terminate()
    server.wait()
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
