# SPDX-License-Identifier: Apache-2.0
"""Executed instructions of attention over a quantized KV cache, and its cycles on paper (see predict_pi.py).

Of a row (a key and a value) for all query heads that share it: scores, softmax and mixing.

Example: python -m bench.count_attention
"""

from __future__ import annotations

from bench.predict_pi import BOARDS, measure

FORMATS = ("mxint8", "mxfp4", "normal4")
HEADS, ROWS, D = 3, 2048, 64  # of SmolLM2-135M
GROUP = 64  # rows for which the rarest of the loops runs once


def main() -> None:
    print(f"{'cpu':<12}{'format':<10}{'instructions a row':>20}{'cycles a row':>14}")
    for board in BOARDS:
        for kind in FORMATS:
            group = measure(board, ROWS // GROUP, "one_attention.c", kind, HEADS, ROWS, D)
            cells = f"{group.instructions / GROUP:>20.1f}{group.cycles / GROUP:>14.1f}"
            print(f"{board.qemu:<12}{kind:<10}{cells}", flush=True)


if __name__ == "__main__":
    main()
