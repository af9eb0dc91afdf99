# SPDX-License-Identifier: Apache-2.0
"""The promise of mxdraft.h: one bundle and one prompt give the same bits on every instruction set, thread
count, batch and prefill chunk. Also what a bundle may cost in memory, and that a damaged one never opens."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import malformed
import numpy as np
import pytest
import tiny
from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.schedule import Schedule
from mxdraft.bundle.tiles import TILE_ROWS
from mxdraft.errors import BundleError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.ship.build import build
from mxdraft.ship.targets import REPOSITORY

TIMEOUT_S = 300
REAL = REPOSITORY / "build" / "smollm2-135m.mxb"
# Longer than the longest chunk, shorter than any, and neither.
GOLDEN = [[7 * i % 500 for i in range(1, 67)], [499], list(range(40, 46))]
REFERENCE = "avx2,avx512,neon,dotprod,i8mm"  # the mask that leaves the scalar reference

needs_real = pytest.mark.skipif(not REAL.exists(), reason="needs the bundle that make demo builds")


@pytest.fixture(scope="module")
def host() -> list[str]:
    """The C command line of this machine."""
    return [os.environ.get("MXDRAFT_CLI") or str(build("host")[0])]


@pytest.fixture(scope="module")
def aarch64() -> list[str]:
    """The C command line of a Pi under qemu, without the argument of -cpu."""
    qemu = shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("qemu-aarch64 is missing (Debian package qemu-user)")
    return [qemu, str(build("rpi")[0]), "-cpu"]


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T with golden prompts of its own and the digests that the Python binding computes."""

    def digests(path: Path) -> tuple[str, str]:
        with (
            Model(path) as model,
            Engine(model, precision="base") as base,
            Engine(model, precision="full") as full,
        ):
            return base.verify().digest, full.verify().digest

    folder = tmp_path_factory.mktemp("exact")
    export_model(tiny.checkpoint(), folder)
    pack(folder, folder / "t.mxb", GOLDEN, digests)
    return folder / "t.mxb"


def run(command: list[str], *args: str | Path, mask: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, args)],
        env=os.environ | {"MXDRAFT_CPU_MASK": mask},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )


def emulate(aarch64: list[str], cpu: str) -> list[str]:
    qemu, program, option = aarch64
    return [qemu, option, cpu, program]


def kernels(command: list[str], mask: str) -> str:
    """The suffix of the matrix product that is bound: ref, avx2, …"""
    described = run(command, "info", "--cpu", mask=mask).stdout
    return re.search(r"^matmul_mxfp4 mxd_matmul_mxfp4_(\w+)$", described, re.M)[1]  # type: ignore[index]


def verify(
    command: list[str], bundle: Path, precision: str, mask: str = "", threads: int = 1, chunk: int = 64
) -> str:
    """The digest, which must be the golden one of the bundle."""
    options = ["--precision", precision, "-t", str(threads), "--chunk", str(chunk)]
    done = run(command, "verify", "-m", bundle, *options, mask=mask)
    assert done.returncode == 0, (command, options, mask, done.stderr)
    return done.stdout.strip()


def golden(bundle: Path) -> dict[str, str]:
    vectors = Bundle.open(bundle).golden
    assert vectors is not None
    return {"base": vectors.base_digest.hex(), "full": vectors.full_digest.hex()}


# ---- one digest ----


@pytest.mark.parametrize("precision", ["base", "full"])
def test_host(host: list[str], tiny_bundle: Path, precision: str) -> None:
    assert kernels(host, REFERENCE) == "ref"
    found = {
        verify(host, tiny_bundle, precision, mask, threads, chunk)
        for mask in ("", REFERENCE)
        for threads, chunk in ((1, 1), (1, 7), (1, 64), (2, 64), (4, 7))
    }
    assert found == {golden(tiny_bundle)[precision]}


@pytest.mark.parametrize("precision", ["base", "full"])
def test_python_binding(tiny_bundle: Path, precision: str) -> None:
    with Model(tiny_bundle) as model:
        for threads, rows in ((1, 1), (2, 7), (4, 64)):
            with Engine(model, threads=threads, max_rows=rows, precision=precision) as engine:  # type: ignore[arg-type]
                assert engine.verify() == (golden(tiny_bundle)[precision], True, "")


@pytest.mark.parametrize(
    ("cpu", "mask", "bound"),
    [
        ("cortex-a53", "", "neon"),
        ("cortex-a72", "", "neon"),
        ("cortex-a76", "", "dotprod"),
        ("cortex-a76", "dotprod", "neon"),
        ("cortex-a76", "neon,dotprod", "ref"),
        ("max", "", "i8mm"),
        ("max", "i8mm", "dotprod"),
    ],
)
def test_emulated(aarch64: list[str], tiny_bundle: Path, cpu: str, mask: str, bound: str) -> None:
    command = emulate(aarch64, cpu)
    assert kernels(command, mask) == bound
    shapes = {"base": (2, 7), "full": (1, 64)}
    for precision, digest in golden(tiny_bundle).items():
        assert verify(command, tiny_bundle, precision, mask, *shapes[precision]) == digest


@needs_real
@pytest.mark.slow
def test_real_model(host: list[str], aarch64: list[str]) -> None:
    found = {verify(host, REAL, "base", mask, threads=2) for mask in ("", REFERENCE)}
    for cpu in ("cortex-a53", "cortex-a76"):
        found.add(verify(emulate(aarch64, cpu), REAL, "base", threads=2, chunk=8))
    assert found == {golden(REAL)["base"]}


@pytest.mark.parametrize("plane", ["base", "residual"])
def test_one_flipped_nibble_is_found(host: list[str], tiny_bundle: Path, tmp_path: Path, plane: str) -> None:
    """One E2M1 code of one weight differs, with right checksums: verify ends with 5."""
    data = tiny_bundle.read_bytes()
    section = f"target.{plane}"
    entry = Bundle(data).tensors[section, "model.layers.2.mlp.up_proj.weight"]
    weights = bytearray(malformed.sections_of(data)[section])
    weights[entry.offset + entry.length // 2 + TILE_ROWS] ^= 0x10  # past the scale codes of a block
    bundle = tmp_path / "flipped.mxb"
    bundle.write_bytes(malformed.build(malformed.sections_of(data) | {section: bytes(weights)}))
    codes = {"base": 5 if plane == "base" else 0, "full": 5}
    for precision, digest in golden(tiny_bundle).items():
        done = run(host, "verify", "-m", bundle, "--precision", precision)
        assert done.returncode == codes[precision]
        assert (done.stdout.strip() == digest) == (codes[precision] == 0)


# ---- batches ----


@pytest.mark.parametrize("precision", ["base", "full"])
@pytest.mark.parametrize(("threads", "rows"), [(1, 64), (2, 7), (4, 5)])
def test_sequences_do_not_touch_each_other(
    tiny_bundle: Path, precision: str, threads: int, rows: int
) -> None:
    """Each sequence's tokens and later logits are those it has alone, even while the prompts of some are read
    and others generate."""
    prompts = [GOLDEN[2], GOLDEN[0][:40], GOLDEN[1], GOLDEN[0][5:30]]

    def outcome(sequence: Timeline) -> tuple[list[int], bytes]:
        tokens = sequence.tokens
        sequence.truncate(len(tokens) - 1)  # the last one is chosen, not processed
        return tokens, sequence.logits([*tokens[-1:], 3, 141, 59]).tobytes()

    with Model(tiny_bundle) as model:
        alone = []
        for seed, prompt in enumerate(prompts):
            with (
                Engine(model, threads=1, precision=precision) as engine,  # type: ignore[arg-type]
                Timeline(engine, temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True) as sequence,
            ):
                for _ in sequence.generate(prompt):
                    pass
                alone.append(outcome(sequence))
        with Engine(
            model,
            threads=threads,
            precision=precision,  # type: ignore[arg-type]
            max_seqs=4,
            max_rows=rows,
        ) as engine:
            running: list[Timeline] = []
            for seed, prompt in enumerate(prompts):
                sequence = Timeline(engine, temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True)
                sequence.prompt(prompt)
                running.append(sequence)
                for _ in range(3):
                    engine.step(running)
            while any(sequence.stop == "none" for sequence in running):
                engine.step(running)
            assert [outcome(sequence) for sequence in running] == alone


def test_logits_are_the_same_in_any_pieces(tiny_bundle: Path) -> None:
    ids = GOLDEN[0]
    with Model(tiny_bundle) as model, Engine(model, threads=2) as engine:
        with Timeline(engine) as sequence:
            whole = sequence.logits(ids)
        for size in (1, 3, 40):
            with Timeline(engine) as sequence:
                parts = [sequence.logits(ids[i : i + size]) for i in range(0, len(ids), size)]
            assert np.concatenate(parts).tobytes() == whole.tobytes()


# ---- drafts ----


@pytest.fixture(scope="module")
def drafting_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T with a drafter, and a table of its answer to one of the prompts below."""
    said = []
    with Model(tiny_bundle) as model:
        for precision in ("base", "full"):
            with (
                Engine(model, draft="off", threads=1, precision=precision) as engine,
                Timeline(engine, max_tokens=16, ignore_eos=True) as sequence,
            ):
                for _ in sequence.generate(model.encode("The small boat")):
                    pass
                said += [sequence.tokens] * 3
    data = tiny.with_ngrams(tiny_bundle.read_bytes(), said)
    path = tmp_path_factory.mktemp("drafting") / "d.mxb"
    path.write_bytes(tiny.with_drafter(data, tiny.drafter(Bundle(data).config)))
    return path


def generate(command: list[str], bundle: Path, *options: str) -> tuple[str, int]:
    """The line of generated tokens, and how many drafts were accepted."""
    fixed = ["--raw", "-n", "16", "--ignore-eos", "--dump-tokens", "--stats", "json"]
    done = run(command, "generate", "-m", bundle, *fixed, *options)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^generated_tokens:.*$", done.stderr, re.M)
    return line, json.loads(done.stderr.splitlines()[-1])["accepted"]


@pytest.mark.parametrize(("cpu", "precision"), [("cortex-a53", "base"), ("cortex-a76", "full")])
def test_drafts_change_nothing_when_emulated(
    host: list[str], aarch64: list[str], drafting_bundle: Path, cpu: str, precision: str
) -> None:
    command = emulate(aarch64, cpu)
    sampled = ["--temp", "0.7", "--top-p", "0.9", "--seed", "3"]
    accepted = 0
    for prompt in (["-p", "The small boat"], ["-p", "the box the box the", *sampled]):
        options = [*prompt, "--precision", precision, "-t", "1"]
        expected, _ = generate(host, drafting_bundle, "--draft", "off", *options)
        for draft in ("ngram", "model", "auto"):
            line, count = generate(command, drafting_bundle, "--draft", draft, *options)
            assert line == expected
            accepted += count
    assert accepted > 0  # even where none seems to pay, one is tried after eight tokens


# ---- quantized KV caches ----


@pytest.mark.parametrize(("cpu", "kv"), [("cortex-a53", "tiered"), ("cortex-a76", "int8"), ("max", "mxfp4")])
def test_quantized_caches_when_emulated(
    host: list[str], aarch64: list[str], drafting_bundle: Path, tmp_path: Path, cpu: str, kv: str
) -> None:
    """Also beyond the first changes of tiers, at 64 and 96 tokens, with drafts."""
    data = drafting_bundle.read_bytes()
    schedule = dataclasses.replace(Schedule.default(Bundle(data).config.layers), recent=32)
    bundle = tmp_path / "scheduled.mxb"
    bundle.write_bytes(tiny.with_schedule(data, schedule))
    options = ["-p", "The small boat", "-n", "96", "--precision", "base", "-t", "1"]
    expected, _ = generate(host, bundle, "--kv", kv, "--draft", "off", *options)
    assert expected != generate(host, bundle, "--draft", "off", *options)[0]
    assert generate(emulate(aarch64, cpu), bundle, "--kv", kv, "--draft", "auto", *options)[0] == expected


@pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a76", "max"])
def test_mixed_precision_over_tiers_when_emulated(
    host: list[str], aarch64: list[str], drafting_bundle: Path, tmp_path: Path, cpu: str
) -> None:
    """Everything that depends on the tokens before: core rows, catch-up, tiers; and drafts, which don't."""
    data = drafting_bundle.read_bytes()
    schedule = dataclasses.replace(Schedule.default(Bundle(data).config.layers), recent=32)
    bundle = tmp_path / "scheduled.mxb"
    bundle.write_bytes(tiny.with_schedule(data, schedule))
    options = ["-p", "The small boat", "-n", "96", "-t", "1", "--core-fraction", "0.1", "--catch-up", "4"]
    expected, _ = generate(host, bundle, "--kv", "tiered", "--draft", "off", *options)
    assert expected != generate(host, bundle, "--draft", "off", *options)[0]
    command = emulate(aarch64, cpu)
    assert generate(command, bundle, "--kv", "tiered", "--draft", "auto", *options)[0] == expected


# ---- memory ----


@pytest.mark.parametrize("which", ["tiny", pytest.param("real", marks=needs_real)])
def test_resident_memory_is_the_file_and_the_plan(host: list[str], tiny_bundle: Path, which: str) -> None:
    """With a full context, the resident set is the file once and everything planned. 2 MiB are for the
    program itself: 1.1 MiB of static code and data, the stacks, libc's buffers."""
    bundle = tiny_bundle if which == "tiny" else REAL
    command = [*host, "chat", "-m", str(bundle), "--ctx", "128", "-n", "0", "--ignore-eos", "--stats", "json"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        lines = _lines_until(b'"stop"', process.stderr)
        # The process waits for the next message. Not its ru_maxrss: that counts the parent's before exec.
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0
    assert b'"stop": "context"' in lines[-1]
    (plan,) = (line.decode("utf-8") for line in lines if line.startswith(b"plan: "))
    words = re.search(r"weights ([\d.]+) .*= ([\d.]+) MiB of", plan)
    assert words is not None
    allocated = float(words[2]) - float(words[1])
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]
    assert peak <= (bundle.stat().st_size / 2**20 + allocated) * 1.05 + 2


def _lines_until(mark: bytes, stream: Iterator[bytes]) -> list[bytes]:
    lines: list[bytes] = []
    for line in stream:
        lines.append(line)
        if mark in line:
            return lines
    pytest.fail(f"the program ended without {mark!r}: {lines}")


# ---- damaged bundles ----


def test_truncated_anywhere_is_refused(host: list[str], tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "cut.mxb"
    shutil.copy(tiny_bundle, bundle)
    size = bundle.stat().st_size
    for percent in range(99, -1, -1):
        os.truncate(bundle, size * percent // 100)
        done = run(host, "info", "-m", bundle)
        assert done.returncode == 3, (
            percent,
            signal.Signals(-done.returncode) if done.returncode < 0 else "",
        )
        assert done.stderr.startswith("mxdraft: error: ")
        assert done.stderr.count("\n") == 1
        with pytest.raises(BundleError):
            Bundle.open(bundle)


def test_both_readers_give_every_lie_its_verdict(tiny_bundle: Path, tmp_path: Path) -> None:
    good = tiny_bundle.read_bytes()
    drafting = tiny.with_drafter(good, tiny.drafter(Bundle(good).config))

    def on_disk(lies: Iterator[malformed.Case]) -> Iterator[tuple[str, Path, str]]:
        path = tmp_path / "lie.mxb"
        for name, data, expected in lies:
            path.write_bytes(data)
            yield name, path, expected

    for lies, least in ((malformed.cases(good), 250), (malformed.drafter_cases(drafting), 60)):
        wrong, count = malformed.wrong_verdicts(on_disk(lies), [Model, Bundle.open])  # C, Python
        assert wrong == []
        assert count > least


class _SparseFile(io.FileIO):
    """Leaves holes where zeros are written."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        if view.nbytes and not np.frombuffer(view, np.uint8).any():
            self.seek(view.nbytes, os.SEEK_CUR)
            return view.nbytes
        return super().write(view)


@pytest.mark.slow
def test_tensors_beyond_4_gib(tiny_bundle: Path, tmp_path: Path) -> None:
    """All weights come after an unknown section of more than 4 GiB: no offset may be cut to 32 bits."""
    sections = malformed.sections_of(tiny_bundle.read_bytes())
    directory = bytearray(sections["target.tensors"])
    for entry in range(0, len(directory), 128):
        directory[entry + 84] += 1  # every tensor's section index grows by one
    sections["target.tensors"] = bytes(directory)
    large = tmp_path / "large.mxb"
    with _SparseFile(large, "w+") as file:
        writer = BundleWriter(file)  # type: ignore[arg-type]
        for name, data in sections.items():
            if name == "target.shared":
                writer.add("filler", [bytes(1 << 26)] * 65)
            writer.add(name, [data])
        writer.seal()
    assert large.stat().st_size > 4 << 30
    with Model(large) as model, Engine(model, threads=1) as engine:
        assert engine.verify().matches
    assert Bundle.open(large).sections["target.base"].offset > 4 << 30
