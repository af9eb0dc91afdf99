# SPDX-License-Identifier: Apache-2.0
"""Every kernel variant equals the reference (tests/kernels), on this machine and on emulated Arm cores."""

from __future__ import annotations

import re
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from clib import KERNELS, REPOSITORY, RUNTIME, compile_c, native, zig
from mxdraft.ship.build import sources

CHECK: list[str | Path] = [
    *sorted((REPOSITORY / "tests" / "kernels").glob("*.c")),
    *KERNELS,
    RUNTIME / "src" / "cpu.c",
    RUNTIME / "src" / "status.c",
    "-lm",
]
GCC = shutil.which("gcc")
QEMU = shutil.which("qemu-aarch64")


@pytest.fixture(scope="session")
def check(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the checks on this machine."""
    return [str(compile_c(native("musl"), tmp_path_factory.mktemp("native") / "check", "-static", *CHECK))]


@pytest.fixture(scope="session")
def check_aarch64(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the checks under qemu, without the argument of -cpu."""
    if QEMU is None:
        pytest.skip("qemu-aarch64 is missing (Debian package qemu-user)")
    program = compile_c(zig("aarch64"), tmp_path_factory.mktemp("aarch64") / "check", "-static", *CHECK)
    return [QEMU, str(program)]


def run(command: list[str], *arguments: str, cpu: str | None = None) -> tuple[int, list[str]]:
    """Exit status and lines of a check, without the line of the seed."""
    emulator = command[:-1] + ([] if cpu is None else ["-cpu", cpu])
    done = subprocess.run(
        [*emulator, command[-1], *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    seed, *lines = done.stdout.splitlines()
    assert seed.startswith("seed ")
    return done.returncode, lines


def assert_all_equal(command: list[str], *arguments: str, cpu: str | None = None) -> set[str]:
    """Check that everything the levels bind was compared and is equal; return the levels."""
    _, listed = run(command, "-l", cpu=cpu)
    bound = {tuple(line.split()[:2]) for line in listed if "not on this CPU" not in line}
    status, lines = run(command, *arguments, cpu=cpu)
    assert status == 0, "\n".join(lines)
    checked = {tuple(line.split()[:2]) for line in lines if re.search(r" ok [1-9]\d+ cases$", line)}
    assert checked == bound
    return {level for level, _ in bound}


def test_variants_of_this_machine_equal_the_reference(check: list[str]) -> None:
    assert_all_equal(check, "-n", "2")


def test_avx512_equals_the_reference_in_emulation(check: list[str]) -> None:
    """For machines without it: its source in plain C, intrinsic by intrinsic."""
    status, lines = run(check, "emulated-avx512")
    assert status == 0, "\n".join(lines)
    assert [line.split()[:3] for line in lines] == [
        ["avx512", "matmul_mxfp4", "ok"],
        ["avx512", "matmul_mxint8", "ok"],
        ["avx512", "attention", "ok"],
    ]


@pytest.mark.skipif(GCC is None, reason="gcc and its sanitizers are missing")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    assert GCC is not None
    sanitize = ["-O1", "-DMXD_DEBUG", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert_all_equal([str(compile_c([GCC], tmp_path / "check", *sanitize, *CHECK))])


BREACHES = {
    "quantize": "k.quantize(f, 33, 1, 33, &act)",
    "quantize's ldx": "k.quantize(f, 32, 2, 64, &act)",
    "matmul_mxfp4": "k.matmul_mxfp4(u, 0, 1, 2, &act, 1, f, 16)",
    "matmul_mxfp4's negative rho": "k.matmul_mxfp4(u, four, 1, 1, &act, 1, f, 16)",
    "matmul_mxfp4's large rho": "k.matmul_mxfp4(four, u, 1, 1, &act, 1, f, 16)",
    "matmul_mxint8": "k.matmul_mxint8(u, 0, 1, 2, &act, 1, f, 16)",
    "matmul_mxint8's residual": "k.matmul_mxint8(u, u, 1, 1, &act, 1, f, 16)",
    "rmsnorm": "k.rmsnorm(f, f, 33, 0, f)",
    "rope": "k.rope(f, f, f, 33)",
    "rope's limit": "k.rope(f, f, f, 258)",
    "attention": "k.attention(f, 0, h, h, 1, 64, 1, f, f)",
    "attention's rows": "k.attention(f, 1, h, h, 0, 64, 1, f, f)",
    "attention_mx": "k.attention_mx(&act, 1, &span, 1, 48, 1, f, f)",
    "hadamard": "k.hadamard(f, 33)",
    "store_mxint8": "k.store_mxint8(f, 288, u)",
    "store_mxfp4": "k.store_mxfp4(f, 33, u)",
    "store_normal4": "k.store_normal4(f, 33, u)",
    "silu_mul": "k.silu_mul(f, f, 33, f)",
}


@pytest.fixture(scope="module")
def breach(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A debug build that breaches the reference's contract as its argument says."""
    folder = tmp_path_factory.mktemp("breach")
    (folder / "breach.c").write_text(
        f"""#include <string.h>
        #include "{RUNTIME}/kernels/kernels.h"
        static float f[4096];
        static uint16_t h[4096];
        static uint8_t u[4096];
        int main(int argc, char **argv) {{
            mxd_kernels k;
            mxd_kernel_names names;
            static uint8_t four[MXD_MXFP4_BLOCK_BYTES] = {{4}}; /* the code of the first row */
            mxd_act act = {{(int8_t *)u, f, (int16_t *)h}};
            mxd_span span = {{MXD_ROW_MXINT8, u, u, 1}};
            mxd_kernels_init_ref(&k, &names);
            if (argc != 2) return 2;
            {"".join(f'if (!strcmp(argv[1], "{name}")) {call};' for name, call in BREACHES.items())}
            return 0;
        }}""",
        encoding="utf-8",
    )
    reference = [folder / "breach.c", RUNTIME / "kernels" / "ref.c", "-lm"]
    return compile_c(native("musl"), folder / "breach", "-DMXD_DEBUG", "-static", *reference)


@pytest.mark.parametrize("kernel", BREACHES)
def test_debug_builds_refuse_a_breach_of_contract(breach: Path, kernel: str) -> None:
    done = subprocess.run([breach, kernel], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGABRT
    assert f"mxd_{kernel.split(chr(39))[0]}_ref".encode() in done.stderr


@pytest.mark.parametrize(
    ("cpu", "levels"),
    [
        ("cortex-a53", {"neon"}),
        ("cortex-a72", {"neon"}),
        ("cortex-a76", {"neon", "dotprod"}),
        ("max", {"neon", "dotprod", "i8mm"}),
    ],
)
def test_variants_of_an_arm_core_equal_the_reference(
    check_aarch64: list[str], cpu: str, levels: set[str]
) -> None:
    assert assert_all_equal(check_aarch64, cpu=cpu) == levels


# ---- the harness itself ----

MISTAKES = {
    "quantize": r"bias\[1\] is \w+ \(-?\d+\), must be",
    "matmul_mxfp4": r"rows=17 .* planes=2 .* y\[\d+\] is ",
    "matmul_mxint8": r"y\[\d+\] is 0x00000000 \(0\), must be 0xffffffff",
    "rmsnorm": r"in_place=1 .* returned sum\[0\] is ",
    "rope": r"c\[0\] is 0x00000000 \(0\), must be ",
    "attention": r"n=33 .* out\[\d+\] is 0xffffffff ",
    "attention_mx": r"scores\[\d+\] is ",
    "hadamard": r"x\[\d+\] is ",
    "store_mxint8": r"row\[\d+\] is 0x80 \(128\), must be 0x81",
    "store_mxfp4": r"row\[\d+\] is ",
    "store_normal4": r"row\[0\] is ",
    "silu_mul": r"touched gate, 4 bytes before its first",
    "add": r"touched y, 1 bytes after its last",
    "to_f16": r"touched out, 1 bytes after its last",
    "exp_weights": r"an instruction that this CPU lacks",
}


def assert_all_caught(command: list[str], cpu: str | None = None) -> None:
    status, lines = run(command, "broken", cpu=cpu)
    assert status == 1
    assert len(lines) == len(MISTAKES)
    for line, (kernel, mistake) in zip(lines, MISTAKES.items(), strict=True):
        assert re.match(rf"broken +{kernel} +FAILED at .* input=\w+ guard=\w+ seed=1: ", line)
        assert re.search(mistake, line), line


def test_every_mistake_of_the_broken_level_is_caught(check: list[str]) -> None:
    assert_all_caught(check)


@pytest.mark.parametrize("level", ["rho_ignored", "rho_off", "scale_of_base"])
def test_mistakes_in_the_sum_of_two_planes_are_caught(check: list[str], level: str) -> None:
    """Each is in the last row of a tile only, where rho is 3."""
    status, lines = run(check, level)
    assert status == 1
    assert len(lines) == 1
    found = re.match(rf"{level} +matmul_mxfp4 +FAILED at .* planes=2 .* y\[(\d+)\] is ", lines[0])
    assert found is not None, lines
    assert int(found[1]) % 16 == 15


def test_every_mistake_is_caught_under_emulation(check_aarch64: list[str]) -> None:
    assert_all_caught(check_aarch64, "cortex-a53")


def test_a_failure_is_reproduced_by_its_seed(check: list[str]) -> None:
    arguments = ("-k", "matmul_mxfp4", "broken")
    first, again, other = (run(check, "-s", seed, *arguments)[1] for seed in ("7", "7", "8"))
    assert first == again
    assert first != other
    assert "seed=7" in first[0]


def test_times_relative_to_the_reference(check: list[str]) -> None:
    status, lines = run(check, "-b", "-k", "exp_weights", "broken")
    assert status == 0
    assert re.fullmatch(r"broken +exp_weights +[\d.]+ ns  ref +[\d.]+ ns +[\d.]+x  n=49152", lines[0])


@pytest.mark.parametrize("arguments", [["sse9"], ["-k", "gemv"], ["-s", "x"], ["-x"]])
def test_unknown_arguments_are_refused(check: list[str], arguments: list[str]) -> None:
    done = subprocess.run([*check, *arguments], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"usage: check" in done.stderr


# ---- instructions ----

# Encodings of what armv8.0-a lacks (Arm ARM, DDI 0487, C4.1), and of cryptography, which a Pi 4 lacks.
EXTENSIONS = [
    ("dotprod", 0x9FE0FC00, 0x0E809400),  # sdot, udot
    ("dotprod", 0x9FC0F400, 0x0F80E000),  # the same by element
    ("i8mm", 0x9FE0F400, 0x0E80A400),  # smmla, ummla, usmmla
    ("i8mm", 0xBFE0FC00, 0x0E809C00),  # usdot
    ("i8mm", 0xBF40F400, 0x0F00F000),  # usdot, sudot by element
    ("lse", 0x3F200C00, 0x38200000),  # ldadd and its like, swp
    ("lse", 0x3FA07C00, 0x08A07C00),  # cas
    ("lse", 0xBFA07C00, 0x08207C00),  # casp
    ("crypto", 0xFFFE0C00, 0x4E280800),  # aes
    ("crypto", 0xFFFE0C00, 0x5E280800),  # sha with two registers
    ("crypto", 0xFFE08C00, 0x5E000000),  # sha with three
]


def extensions_used(obj: Path) -> set[str]:
    """Extensions whose instructions are in the executable sections of an ELF64 object."""
    data = obj.read_bytes()
    table, (entry, count) = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<HH", data, 0x3A)
    words: list[np.ndarray] = []
    for header in range(table, table + entry * count, entry):
        kind, flags, _, offset, size = struct.unpack_from("<IQQQQ", data, header + 4)
        if kind == 1 and flags & 4:  # SHT_PROGBITS, SHF_EXECINSTR
            words.append(np.frombuffer(data, "<u4", size // 4, offset))
    code = np.concatenate(words)
    return {name for name, mask, value in EXTENSIONS if ((code & np.uint32(mask)) == value).any()}


@pytest.mark.parametrize(
    ("extension", "statement"),
    [
        ("dotprod", "sdot v0.4s, v1.16b, v2.16b"),
        ("dotprod", "udot v0.4s, v1.16b, v2.4b[3]"),
        ("i8mm", "smmla v0.4s, v1.16b, v2.16b"),
        ("i8mm", "usmmla v0.4s, v1.16b, v2.16b"),
        ("i8mm", "usdot v0.4s, v1.16b, v2.16b"),
        ("i8mm", "sudot v0.4s, v1.16b, v2.4b[1]"),
        ("lse", "ldaddal w0, w1, [x2]"),
        ("lse", "swp x0, x1, [x2]"),
        ("lse", "casa w0, w1, [x2]"),
        ("lse", "caspal x0, x1, x2, x3, [x4]"),
        ("crypto", "aese v0.16b, v1.16b"),
        ("crypto", "sha256h q0, q1, v2.4s"),
        ("crypto", "sha256su0 v0.4s, v1.4s"),
    ],
)
def test_encodings_are_recognised(tmp_path: Path, extension: str, statement: str) -> None:
    source = tmp_path / "one.s"
    source.write_text(f".arch armv8.6-a+crypto+i8mm\n.text\n{statement}\n", encoding="utf-8")
    obj = tmp_path / "one.o"
    command = [*zig("aarch64"), "-c", str(source), "-o", str(obj)]
    subprocess.run(command, check=True, capture_output=True)
    assert extensions_used(obj) == {extension}


def test_extensions_are_used_only_in_their_own_objects(tmp_path: Path) -> None:
    used = {
        source.stem: extensions_used(compile_c(zig("aarch64"), tmp_path / "o", "-c", source))
        for source in sources("cli")
    }
    assert {name: found for name, found in used.items() if found} == {
        "neon_dotprod": {"dotprod"},
        "neon_i8mm": {"dotprod", "i8mm"},
    }
