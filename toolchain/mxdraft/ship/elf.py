# SPDX-License-Identifier: Apache-2.0
"""The audit of what the linker made: will it run on every board that its target promises?

Encodings: Arm Architecture Reference Manual for A-profile (DDI 0487), chapter C4.
"""

from __future__ import annotations

import bisect
import re
from pathlib import Path
from typing import Any

import numpy as np
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from mxdraft.errors import RefusedError

LEAST_LOAD_ALIGNMENT = 0x4000  # the kernel of a Raspberry Pi 5 has pages of 16 KiB
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2")

# What armv8.0-a lacks, and the crypto extension that the Pi 3 and 4 lack: (extension, mask, value).
_BEYOND_BASELINE = (
    ("dotprod", 0x9FE0FC00, 0x0E809400),  # sdot, udot (vector)
    ("dotprod", 0x9FC0F400, 0x0F80E000),  # sdot, udot (by element)
    ("i8mm", 0xBFE0FC00, 0x0E809C00),  # usdot (vector)
    ("i8mm", 0xBF40F400, 0x0F00F000),  # usdot, sudot (by element)
    ("i8mm", 0xDFE0F400, 0x4E80A400),  # smmla, ummla, usmmla
    ("lse", 0x3F200C00, 0x38200000),  # ldadd and its kind, swp, ldapr
    ("lse", 0x3FA07C00, 0x08A07C00),  # cas
    ("lse", 0xBFA07C00, 0x08207C00),  # casp
    ("rcpc", 0x3F200C00, 0x19000000),  # ldapur, stlur
    ("fp16", 0x9F60C400, 0x0E400400),  # arithmetic on vectors of halves
    ("fp16", 0x9F7E0C00, 0x0E780800),
    ("fp16", 0xFFE00C00, 0x1EE00800),  # arithmetic on one half
    ("fp16", 0xFFC00000, 0x1FC00000),
    ("rdm", 0xBF20F400, 0x2E008400),  # sqrdmlah, sqrdmlsh
    ("fhm", 0xBF60FC00, 0x0E20EC00),  # fmlal, fmlsl
    ("fhm", 0xBF60FC00, 0x2E20CC00),  # fmlal2, fmlsl2
    ("fcma", 0xBF20E400, 0x2E00C400),  # fcmla
    ("fcma", 0xBF20EC00, 0x2E00E400),  # fcadd
    ("bf16", 0xBFE0FC00, 0x2E40FC00),  # bfdot
    ("bf16", 0xFFE0FC00, 0x6E40EC00),  # bfmmla
    ("jscvt", 0xFFFFFC00, 0x1E7E0000),
    ("crypto", 0xFF3E0C00, 0x4E280800),  # aes
    ("crypto", 0xFF208C00, 0x5E000000),  # sha
    ("crypto", 0xFF3E0C00, 0x5E280800),
    ("crypto", 0xBFE0FC00, 0x0EE0E000),  # pmull on 64 bits
    ("sve", 0x1E000000, 0x04000000),
    ("sme", 0x9E000000, 0x80000000),
)

# A symbol in lld's map: address, load address, size, alignment, and the name, two levels indented.
_SYMBOL = re.compile(r"^ *([0-9a-f]+) +[0-9a-f]+ +([0-9a-f]+) +\d+ {17}(\S+)$", re.MULTILINE)

# A kernel that runtime/src/cpu.c binds only where the CPU has its extension, named after it.
_DISPATCHED = re.compile(r"mxd_(?!kernels_init_)\w+_(dotprod|i8mm)")
_MAY_USE = {"dotprod": {"dotprod"}, "i8mm": {"dotprod", "i8mm"}}


def audit(path: Path, link_map: str, glibc: str) -> None:
    """Refuse an executable or library that would fail on a board of its architecture.

    ``link_map``: what lld printed for --print-map, since the file itself is stripped. ``glibc``: the newest
    version that may be needed, e.g. ``"2.28"``. Raises RefusedError naming the segment, library or symbol.
    """
    with path.open("rb") as file:
        elf = ELFFile(file)
        _check_segments(path, elf)
        _check_libraries(path, elf, glibc)
        if elf["e_machine"] == "EM_AARCH64":
            _check_instructions(path, elf, link_map)


def _check_segments(path: Path, elf: Any) -> None:
    for segment in elf.iter_segments():
        kind = segment["p_type"]
        if kind == "PT_GNU_STACK" and segment["p_flags"] & 1:
            raise RefusedError(f"{path}: the stack would be executable (an object lacks .note.GNU-stack)")
        if (
            kind == "PT_LOAD"
            and elf["e_machine"] == "EM_AARCH64"
            and segment["p_align"] < LEAST_LOAD_ALIGNMENT
        ):
            raise RefusedError(
                f"{path}: LOAD segment at {segment['p_vaddr']:#x} is aligned to {segment['p_align']:#x}; "
                f"pages of 16 KiB need {LEAST_LOAD_ALIGNMENT:#x} (-z max-page-size)"
            )


def _check_libraries(path: Path, elf: Any, glibc: str) -> None:
    """Refuse libraries beyond libc's own and newer versions than promised; a static executable has none."""
    dynamic = elf.get_section_by_name(".dynamic")
    if dynamic is None:
        return
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in LIBRARIES:
            raise RefusedError(f"{path}: needs {tag.needed} (allowed: {', '.join(LIBRARIES)})")
    ceiling = _version(glibc)
    for version, name in _needed_versions(elf):
        if _version(version) > ceiling:
            raise RefusedError(
                f"{path}: {name} needs GLIBC_{version}, newer than the target's glibc {glibc}; boards with "
                "an older system could not load it"
            )


def _needed_versions(elf: Any) -> list[tuple[str, str]]:
    """Yield (glibc version, symbol) for every versioned symbol that libc's parts have to provide."""
    names: dict[int, str] = {}
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, auxiliaries in section.iter_versions():
                names |= {aux["vna_other"]: aux.name for aux in auxiliaries}
    table, symbols = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
    if table is None:
        return []
    needed = []
    for index, symbol in enumerate(symbols.iter_symbols()):
        version = names.get(table.get_symbol(index)["ndx"], "")
        if version.startswith("GLIBC_"):
            needed.append((version.removeprefix("GLIBC_"), symbol.name))
    return needed


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_instructions(path: Path, elf: Any, link_map: str) -> None:
    symbols = sorted((int(start, 16), int(size, 16), name) for start, size, name in _SYMBOL.findall(link_map))

    def owner(address: int) -> str:
        """The symbol that covers an address; nothing else may hold instructions."""
        start, size, name = symbols[max(bisect.bisect_right(symbols, (address, 1 << 64)) - 1, 0)]
        return name if start <= address < start + size else "unnamed code"

    for segment in elf.iter_segments():
        if segment["p_type"] != "PT_LOAD" or not segment["p_flags"] & 1:
            continue
        words = np.frombuffer(segment.data()[: segment["p_filesz"] & ~3], "<u4")
        for extension, mask, value in _BEYOND_BASELINE:
            for index in np.flatnonzero((words & np.uint32(mask)) == np.uint32(value)):
                address = segment["p_vaddr"] + 4 * int(index)
                name = owner(address)
                kernel = _DISPATCHED.fullmatch(name)
                if kernel is None or extension not in _MAY_USE[kernel[1]]:
                    raise RefusedError(
                        f"{path}: {name} at {address:#x} has an instruction of the {extension} extension "
                        f"({int(words[index]):08x}), which is above armv8.0-a; only kernels named after an "
                        "extension may use it"
                    )
