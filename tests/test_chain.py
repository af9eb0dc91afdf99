# SPDX-License-Identifier: Apache-2.0
"""verify --full --weights names the link that is broken, with layer, tensor and position: one planted fault
for each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import malformed
import numpy as np
import onnx
import pytest
import tiny
from clib import RUNTIME, compile_c
from mxdraft.bundle import Bundle
from mxdraft.bundle.tokenizer import read_tokenizer, tokenizer_section
from mxdraft.checkpoint import Checkpoint
from mxdraft.checkpoint.huggingface import load_huggingface
from mxdraft.errors import RefusedError
from mxdraft.export import export_model
from mxdraft.export.graph import initializer_names
from mxdraft.pack import pack
from mxdraft.ship.build import sources
from mxdraft.verify.chain import Export, Link, check_bundle, check_export, verify_chain

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    tiny.save_huggingface(tiny.checkpoint(), folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(weights: Path) -> Checkpoint:
    return load_huggingface(weights)


@pytest.fixture(scope="module")
def good(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX files; next to their directory is the bundle."""
    folder = tmp_path_factory.mktemp("chain") / "t"
    export_model(checkpoint, folder)
    command = [sys.executable, "-m", "mxdraft.cli", "pack", folder, "-o", folder.with_suffix(".mxb")]
    subprocess.run(command, check=True)
    return folder


def numbers(checkpoint: Checkpoint, directory: Path, bundle: Path) -> list[Link]:
    """Those of the two links that are about numbers, not functions, that are broken."""
    export = Export(directory)
    links = [check_export(export.smoothed(checkpoint), export), check_bundle(Bundle.open(bundle), export)]
    return [link for link in links if link.fault]


def chain(checkpoint: Checkpoint, directory: Path, bundle: Path) -> list[Link]:
    return verify_chain(checkpoint, directory, bundle, threads=1, quick=True, note=lambda _: None)


def exported(checkpoint: Checkpoint, folder: Path) -> tuple[Path, Path]:
    """ONNX files and bundle of other weights that claim to be the right ones."""
    export_model(checkpoint, folder / "t")
    pack(folder / "t", folder / "t.mxb")
    return folder / "t", folder / "t.mxb"


def test_every_link_holds(checkpoint: Checkpoint, good: Path) -> None:
    links = chain(checkpoint, good, good.with_suffix(".mxb"))
    assert [link.fault for link in links] == [""] * len(links)
    names = [link.name for link in links]
    assert names[:3] == ["weights → ONNX", "ONNX → bundle", "weights → graph (full)"]
    assert {"graph → runtime (base)", "graph → runtime (full)", "truncation (base)"} < set(names)
    assert all(0 < link.value < link.bound for link in links if "graph" in link.name)


def test_flipped_nibble(checkpoint: Checkpoint, good: Path, tmp_path: Path) -> None:
    """One element of one matrix in the bundle."""
    data = good.with_suffix(".mxb").read_bytes()
    entry = Bundle(data).tensors["target.base", "model.layers.2.self_attn.o_proj.weight"]
    sections = malformed.sections_of(data)
    section = bytearray(sections["target.base"])
    section[entry.offset + 16] ^= 1  # after the scales of the first block of a tile
    path = tmp_path / "t.mxb"
    path.write_bytes(malformed.build(sections | {"target.base": bytes(section)}))
    (link,) = numbers(checkpoint, good, path)
    assert link.name == "ONNX → bundle"
    where = "section target.base: layer 2, tensor model.layers.2.self_attn.o_proj.weight.base.data at [0, 0]"
    assert link.fault.startswith(where)
    assert link.fault.endswith(f"1 of {np.prod(entry.shape) // 2} differ")


def test_swapped_permutation(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The rows of a query matrix in the order that GGUF files have and the runtime has not."""
    heads, weight = checkpoint.config.heads, checkpoint.tensors[Q_PROJ]
    swapped = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    wrong = replace(checkpoint, tensors=checkpoint.tensors | {Q_PROJ: np.ascontiguousarray(swapped)})
    first, second, *_ = (link for link in chain(checkpoint, *exported(wrong, tmp_path)) if link.fault)
    assert first.name == "weights → ONNX"
    assert first.fault.startswith(f"layer 1, tensor {Q_PROJ}.base.")
    assert second.name == "weights → graph (full)"
    assert second.fault.startswith("layer 1: error ")


def test_wrong_rope_base(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wrong = replace(checkpoint, config=replace(checkpoint.config, rope_theta=500.0))
    (link,) = numbers(checkpoint, *exported(wrong, tmp_path))
    assert link.name == "weights → ONNX"
    assert link.fault.startswith("tensor rope.cos at [1, 1]: ")


@pytest.mark.parametrize("plane", ["base", "residual"])
def test_scale_that_is_off_by_one(checkpoint: Checkpoint, good: Path, tmp_path: Path, plane: str) -> None:
    directory = shutil.copytree(good, tmp_path / "t")
    _, name = initializer_names(Q_PROJ, plane)  # type: ignore[arg-type]
    model = onnx.load(directory / "model.full.onnx", load_external_data=False)
    (tensor,) = (each for each in model.graph.initializer if each.name == name)
    place = {entry.key: entry.value for entry in tensor.external_data}
    with (directory / place["location"]).open("r+b") as file:
        file.seek(int(place["offset"]) + 3)
        byte = file.read(1)[0]
        file.seek(int(place["offset"]) + 3)
        file.write(bytes([byte + 1]))
    link, *_ = numbers(checkpoint, directory, good.with_suffix(".mxb"))
    assert link.name == "weights → ONNX"
    column = 3 % (tiny.checkpoint().config.hidden // 32)
    row = 3 // (tiny.checkpoint().config.hidden // 32)
    assert link.fault == (
        f"layer 1, tensor {Q_PROJ}.{plane}.scale at [{row}, {column}]: {byte + 1} instead of {byte}; "
        f"1 of {np.prod(tensor.dims)} differ"
    )


def test_damaged_merge(checkpoint: Checkpoint, good: Path, tmp_path: Path) -> None:
    data = good.with_suffix(".mxb").read_bytes()
    sections = malformed.sections_of(data)
    spec = read_tokenizer(sections["tokenizer"], checkpoint.config.vocab)
    merges = list(spec.merges)
    merges[20], merges[21] = merges[21], merges[20]
    path = tmp_path / "t.mxb"
    path.write_bytes(
        malformed.build(sections | {"tokenizer": tokenizer_section(replace(spec, merges=merges))})
    )
    (link,) = numbers(checkpoint, good, path)
    assert link.name == "ONNX → bundle"
    assert link.fault == f"section tokenizer: merge 20 is {merges[20]} instead of {merges[21]}"


def test_graph_that_computes_something_else(checkpoint: Checkpoint, good: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(good, tmp_path / "t")
    for name in ("model.base.onnx", "model.full.onnx"):
        model = onnx.load(directory / name, load_external_data=False)
        (node,) = (node for node in model.graph.node if node.name == "model.layers.2")
        node.op_type = "Sub"
        (directory / name).write_bytes(model.SerializeToString())
    links = chain(checkpoint, directory, good.with_suffix(".mxb"))
    found = {link.name: link.fault for link in links if link.fault}
    assert list(found) == ["weights → graph (full)", "graph → runtime (base)", "graph → runtime (full)"]
    assert all(fault.startswith("layer 2: error ") for fault in found.values())


# ---- faults of the runtime: a library of changed sources, in a process of its own ----

Report = Callable[[str, str, str], dict[str, str]]


@pytest.fixture
def report(weights: Path, good: Path, tmp_path: Path) -> Report:
    """Runs the command with a library one of whose sources is changed; returns its faults by link."""

    def run(source: str, before: str, after: str) -> dict[str, str]:
        runtime = shutil.copytree(RUNTIME, tmp_path / "runtime")
        path = runtime / source
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, after), encoding="utf-8")
        files = [str(file).replace("runtime/", f"{runtime}/", 1) for file in sources("library")]
        flags = [f"-I{runtime / 'include'}", "-shared", "-fPIC"]
        library = compile_c(["gcc"], tmp_path / "libmxdraft.so", *flags, *files, "-lm")
        command = [
            "verify",
            "-m",
            good.with_suffix(".mxb"),
            "--full",
            "--quick",
            "-t",
            "1",
            "--weights",
            weights,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "mxdraft.cli", *map(str, command), "--json", str(tmp_path / "r.json")],
            env=os.environ | {"MXDRAFT_LIBRARY": str(library)},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 5, done.stderr
        links = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["links"]
        for link in links:
            if link["fault"]:
                assert f"{link['name']}: BROKEN: {link['fault']}\n" in done.stdout
        return {link["name"]: link["fault"] for link in links if link["fault"]}

    return run


def test_rows_that_stay_after_a_truncation(report: Report) -> None:
    found = report(
        "src/layer.c",
        "        mxd_kv_store(g, layer, k, mxd_row_kv(g, row, layer, 0, h));\n",
        "        uint8_t *place = mxd_row_kv(g, row, layer, 0, h);\n"
        "        if (layer == 1 && row->position == 8 && *(uint16_t *)place) continue;\n"
        "        mxd_kv_store(g, layer, k, place);\n",
    )
    assert {name for name in found if name.startswith("truncation")} == {
        "truncation (base)",
        "truncation (full)",
    }
    wanted = "stale rows: logits at position 8 differ after a truncation to 8 tokens"
    assert found["truncation (base)"] == found["truncation (full)"] == wanted


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"), reason="needs AVX2")
def test_kernel_level_that_is_wrong(report: Report) -> None:
    source = (RUNTIME / "kernels" / "x86" / "avx2.c").read_text(encoding="utf-8")
    start = source.index("TARGET static void KERNEL(silu_mul)")
    body = source[start : source.index("\n}\n", start) + 3]
    found = report("kernels/x86/avx2.c", body, body.replace("\n}\n", "\n    out[0] += 1;\n}\n"))
    levels = {name: fault for name, fault in found.items() if name.startswith("level")}
    assert levels
    assert all(fault == "layer 0: other bits, first at position 0" for fault in levels.values())


def test_other_weights_are_refused(checkpoint: Checkpoint, good: Path) -> None:
    other = replace(checkpoint, source_sha256="0" * 64)
    with pytest.raises(RefusedError, match="these have 0000"):
        numbers(other, good, good.with_suffix(".mxb"))
