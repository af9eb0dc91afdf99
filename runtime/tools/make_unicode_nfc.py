# SPDX-License-Identifier: Apache-2.0
"""Print runtime/src/unicode_nfc.h, measured on the installed Hugging Face ``tokenizers``.

    python runtime/tools/make_unicode_nfc.py > runtime/src/unicode_nfc.h && make format

Python's ``unicodedata`` proposes, the library decides: it may know fewer characters.
"""

from __future__ import annotations

import sys
import unicodedata

import tokenizers
from tokenizers import normalizers

HANGUL = range(0xAC00, 0xD7A4)
SURROGATES = range(0xD800, 0xE000)
CODE_POINTS = [c for c in range(0x110000) if c not in SURROGATES and c not in HANGUL]
PROBE, OTHER_PROBE = "\u0345", "\u0334"  # of the highest class and the lowest
NFC, NFD = normalizers.NFC(), normalizers.NFD()


def decompositions() -> list[tuple[int, int, int]]:
    """(character, first part, second part or 0), ascending; parts may have parts."""
    found: dict[int, tuple[int, int]] = {}
    for c in CODE_POINTS:
        text = unicodedata.decomposition(chr(c))
        if text and not text.startswith("<") and NFD.normalize_str(chr(c)) != chr(c):
            first, *second = (int(part, 16) for part in text.split())
            found[c] = (first, second[0] if second else 0)

    def whole(c: int) -> str:
        first, second = found.get(c, (c, 0))
        head = whole(first) if c in found else chr(first)
        return head + (chr(second) if second else "")

    for c in CODE_POINTS:
        if NFD.normalize_str(chr(c)) != whole(c):
            raise SystemExit(f"U+{c:04X}: the library decomposes it in another way")
    return [(c, *parts) for c, parts in sorted(found.items())]


def composites(entries: list[tuple[int, int, int]]) -> list[int]:
    """Indices of what two characters are composed to, in order of the two."""
    kept = [i for i, (c, _, second) in enumerate(entries) if second and NFC.normalize_str(chr(c)) == chr(c)]
    return sorted(kept, key=lambda i: entries[i][1:])


def classes() -> list[tuple[int, int]]:
    """(first code point, combining class) of each run."""
    runs = [(0, 0)]
    for c in CODE_POINTS:
        value = unicodedata.combining(chr(c))
        if value and not _moves(chr(c), value):
            value = 0
        if runs[-1][1] != value:
            runs.append((c, value))
    return runs


def _moves(mark: str, value: int) -> bool:
    """Whether the library puts a mark where its class belongs."""
    before, after = (PROBE, mark) if value < 240 else (mark, OTHER_PROBE)
    return bool(NFD.normalize_str(f"a{before}{after}") == NFD.normalize_str(f"a{after}{before}"))


def rows(values: list[str], count: int) -> str:
    return "\n".join("    " + " ".join(values[i : i + count]) for i in range(0, len(values), count))


def header() -> str:
    entries = decompositions()
    return (
        "/* SPDX-License-Identifier: Apache-2.0 */\n"
        "/* Made by runtime/tools/make_unicode_nfc.py from Hugging Face tokenizers"
        f" {tokenizers.__version__}; do not edit. */\n"
        "#ifndef MXD_UNICODE_NFC_H\n#define MXD_UNICODE_NFC_H\n\n#include <stdint.h>\n\n"
        "enum { MAX_PARTS = 8 }; /* of a character, with room to spare */\n\n"
        "/* A character and the two parts, or one and 0, that it is decomposed to; ascending. */\n"
        f"static const uint32_t DECOMPOSE[][3] = {{\n"
        f"{rows([f'{{0x{a:X}, 0x{b:X}, 0x{c:X}}},' for a, b, c in entries], 5)}\n}};\n\n"
        "/* Indices into DECOMPOSE of what is composed again, in order of the parts. */\n"
        f"static const uint16_t COMPOSE[] = {{\n{rows([f'{i},' for i in composites(entries)], 20)}\n}};\n\n"
        "/* First code point of a run of one combining class, and the class in the low 8 bits. */\n"
        f"static const uint32_t CLASSES[] = {{\n"
        f"{rows([f'0x{c << 8 | v:X},' for c, v in classes()], 12)}\n}};\n\n#endif\n"
    )


if __name__ == "__main__":
    sys.stdout.write(header())
