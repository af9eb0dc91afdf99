# SPDX-License-Identifier: Apache-2.0
"""Print runtime/src/unicode_classes.h, measured on the installed Hugging Face ``tokenizers``.

    python runtime/tools/make_unicode_classes.py > runtime/src/unicode_classes.h

Character classes come from Unicode, whose tables grow, and ``tokenizers`` carries two of different age: that
of its regular expressions and that of Rust's ``char::is_numeric``. Ids must agree with the library, so the
library is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tokenizers
from tokenizers import pre_tokenizers

# OTHER_NUMERIC: split off by Digits, yet no \p{N} to the regular expression.
CLASSES = ["OTHER", "LETTER", "NUMBER", "SPACE", "OTHER_NUMERIC"]
OTHER, LETTER, NUMBER, SPACE, OTHER_NUMERIC = range(len(CLASSES))
CLASS_BITS = 3
CHUNK = 1 << 15
SURROGATES = range(0xD800, 0xE000)


def classify(code_points: Sequence[int]) -> list[int]:
    """The class of each code point (none a surrogate)."""
    regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    letter = _joins(regex, "a", code_points)
    number = _joins(regex, "1", code_points)
    other = _joins(regex, "!", code_points)
    numeric = _joins(pre_tokenizers.Digits(individual_digits=False), "1", code_points)
    classes = []
    for i, code_point in enumerate(code_points):
        if letter[i] + number[i] + other[i] > 1 or (numeric[i] and not number[i] and not other[i]):
            raise SystemExit(f"U+{code_point:04X}: the classes overlap; the runtime's model of them is wrong")
        if number[i] and not numeric[i]:
            raise SystemExit(f"U+{code_point:04X} is \\p{{N}} but not numeric: add a class for that")
        if numeric[i]:
            classes.append(NUMBER if number[i] else OTHER_NUMERIC)
        else:
            classes.append(LETTER if letter[i] else OTHER if other[i] else SPACE)
    return classes


def _joins(pre_tokenizer: pre_tokenizers.PreTokenizer, leader: str, code_points: Sequence[int]) -> list[bool]:
    """Whether each code point stays in one pre-token with a ``leader`` in front of it."""
    joins: list[bool] = []
    for start in range(0, len(code_points), CHUNK):
        chunk = code_points[start : start + CHUNK]
        probe = "".join(f"\n{leader}{chr(c)}" for c in chunk)
        end_of = dict(offsets for _, offsets in pre_tokenizer.pre_tokenize_str(probe))
        joins += [end_of[3 * i + 1] == 3 * i + 3 for i in range(len(chunk))]
    return joins


def ranges(code_points: Sequence[int]) -> list[tuple[int, int]]:
    """(first code point, class) of each run of equal classes."""
    found: list[tuple[int, int]] = []
    for code_point, value in zip(code_points, classify(code_points), strict=True):
        if not found or found[-1][1] != value:
            found.append((code_point, value))
    return found


def header() -> str:
    entries = [
        f"0x{c << CLASS_BITS | value:06X},"
        for c, value in ranges([c for c in range(0x110000) if c not in SURROGATES])
    ]
    rows = [" ".join(entries[i : i + 12]) for i in range(0, len(entries), 12)]
    return (
        "/* SPDX-License-Identifier: Apache-2.0 */\n"
        "/* Made by runtime/tools/make_unicode_classes.py from Hugging Face tokenizers"
        f" {tokenizers.__version__}; do not edit.\n"
        " * Each entry: first code point of a run of one class, and the class in the low bits. */\n"
        "#ifndef MXD_UNICODE_CLASSES_H\n#define MXD_UNICODE_CLASSES_H\n\n#include <stdint.h>\n\n"
        f"enum {{ {', '.join('CLASS_' + name for name in CLASSES)}, UNICODE_CLASS_BITS = {CLASS_BITS} }};\n\n"
        "static const uint32_t UNICODE_CLASSES[] = {\n    " + "\n    ".join(rows) + "\n};\n\n#endif\n"
    )


if __name__ == "__main__":
    sys.stdout.write(header())
