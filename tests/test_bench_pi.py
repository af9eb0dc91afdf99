# SPDX-License-Identifier: Apache-2.0
"""The paper predictions: loops found under emulation, the model of a step, the page's tables."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from mxdraft.mx import Format

from bench import predict_pi
from bench.count_attention import GROUP, HEADS, ROWS, D
from bench.predict_pi import BEGIN, BOARDS, END, Kernel, Prediction, markdown, replace_between_marks

QEMU = shutil.which("qemu-aarch64")
LLVM = shutil.which("llvm-mca-19") and shutil.which("llvm-objdump-19")


@pytest.fixture
def predicted(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[Prediction]:
    """For kernels that take 10 cycles a row, MXINT8 twice that, at 2 instructions a cycle, and a million
    other instructions."""

    def product(board: predict_pi.Board, kind: Format, rows: int) -> Kernel:  # noqa: ARG001
        cycles = 10.0 * rows * (1 if kind == "mxfp4" else 2)
        return Kernel(2 * cycles, cycles)

    monkeypatch.setattr(predict_pi, "product", product)
    monkeypatch.setattr(predict_pi, "decode", lambda *_: 0.0)
    blocks = Prediction(BOARDS[0], "no binary", bundle).blocks
    monkeypatch.setattr(predict_pi, "decode", lambda *_: 1e6 + loop_instructions(blocks))
    return [Prediction(board, "no binary", bundle) for board in BOARDS]


def loop_instructions(blocks: dict[Format, int]) -> float:
    return 20.0 * blocks["mxfp4"] + 40.0 * blocks["mxint8"]


def test_step_is_the_larger_of_memory_and_compute(predicted: list[Prediction]) -> None:
    pi5 = predicted[0]
    loops = loop_instructions(pi5.blocks)
    assert pi5.bytes == pytest.approx(272 * pi5.blocks["mxfp4"] + 528 * pi5.blocks["mxint8"], rel=0.1)
    assert (pi5.rest, pi5.ipc) == (1e6, 2)
    assert pi5.compute(3) == pytest.approx(3 * (loops + 1e6) / 2 / 4 / 2.4e9)
    assert pi5.memory() == pi5.bytes / 11.59e9
    for rows in (1, 2, 16):
        assert pi5.step(rows) == max(pi5.memory(), pi5.compute(rows))
    hidden = pi5.hidden_rows()
    assert pi5.compute(hidden + 1) > pi5.memory()
    assert hidden == 0 or pi5.compute(hidden) <= pi5.memory()


def test_tables(predicted: list[Prediction], tmp_path: Path) -> None:
    text = markdown(predicted)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
        assert all(f"| {board.name} |" in table for board in BOARDS)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n", encoding="utf-8")
    for _ in range(2):
        replace_between_marks(page, text)
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}{text}{END}after\n"
    page.write_text(END + BEGIN, encoding="utf-8")
    with pytest.raises(SystemExit, match="has no lines"):
        replace_between_marks(page, text)


def test_the_page_has_the_marks() -> None:
    page = (predict_pi.REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    tables = page.partition(BEGIN)[2].partition(END)[0]
    assert all(f"| {board.name} |" in tables for board in BOARDS)


@pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is missing (Debian package qemu-user)")
@pytest.mark.skipif(LLVM is None, reason="llvm-mca-19 is missing (Debian package llvm-19)")
def test_loops_do_all_multiplications() -> None:
    def sdots(units: int, source: str, *arguments: str | int) -> float:
        products = 0.0
        for start, length, times in predict_pi.hot_loops("cortex-a76", units, source, *arguments):
            code = predict_pi.assembly(source, start, length)
            products += times * len(re.findall(r"^sdot", code, re.MULTILINE))
            assert length / 8 < predict_pi.cycles("neoverse-n1", code) <= length
        return products

    for kind, rows in (("mxfp4", 5), ("mxint8", 1)):
        blocks = predict_pi.TILES * predict_pi.BLOCKS
        arguments = (kind, rows, predict_pi.TILES, predict_pi.BLOCKS)
        assert 16 * sdots(blocks, "one_product.c", *arguments) == rows * 16 * 32
    assert 16 * sdots(ROWS // GROUP, "one_attention.c", "normal4", HEADS, ROWS, D) == GROUP * HEADS * D
