# SPDX-License-Identifier: Apache-2.0
"""The chain from weights to text, link by link: where it breaks first, by layer, tensor and position.

weights → ONNX      every number of the ONNX files is computed again from the weights: equal
ONNX → bundle       every tensor and the tokenizer of the bundle is read back: equal
weights → graph     residual streams of the unquantized model and of full precision on onnxruntime: bounded
graph → runtime     residual streams of onnxruntime and of the runtime, for each precision: bounded
level L             streams and logits with a CPU level's kernels and with the scalar ones: equal
truncation          logits after a truncation and without one: equal
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mxdraft.bundle import Bundle
from mxdraft.bundle.tokenizer import read_tokenizer
from mxdraft.checkpoint import Checkpoint
from mxdraft.checkpoint.huggingface import named_token, tokenizer_spec
from mxdraft.checkpoint.reference import Teacher, rope_tables
from mxdraft.checkpoint.smooth import Smoothing, smooth
from mxdraft.errors import RefusedError
from mxdraft.export.graph import (
    GENERATION_FILE,
    MODEL_FILES,
    TOKENIZER_FILE,
    Metadata,
    Precision,
    initializer_names,
    parse_graph,
)
from mxdraft.export.runner import OnnxRunner
from mxdraft.files import parse_json_object, parsing
from mxdraft.mx import MXTensor, dequantize, quantize, quantize_residual
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.verify.compare import TEXT

F32 = NDArray[np.float32]

# Of a residual stream, as ``stream_error`` measures it.
GRAPH_BOUND = 0.25  # the rounding of weights and activations, which adds up from layer to layer
RUNTIME_BOUND = 0.10  # that of activations alone

CPU_MASK = "MXDRAFT_CPU_MASK"
_SCALAR = "avx512,avx2,neon,dotprod,i8mm"
_LEVELS = ("", "avx512", "i8mm", "dotprod,i8mm")  # what is masked, for each level to be the best one left


@dataclass(frozen=True)
class Link:
    """One link. ``compared``: what was found equal or within ``bound``; ``value``: the largest difference, 0
    where bits are compared; ``fault``: the first difference in words, empty if there is none."""

    name: str
    compared: str
    value: float = 0.0
    bound: float = 0.0
    fault: str = ""

    def summary(self) -> str:
        if self.fault:
            return f"{self.name}: BROKEN: {self.fault}"
        how = f"{self.value:.2%}, bound {self.bound:.0%}" if self.bound else "equal"
        return f"{self.name}: {self.compared}: {how}"


def verify_chain(
    checkpoint: Checkpoint,
    directory: Path,
    bundle: Path,
    threads: int,
    quick: bool,
    note: Callable[[str], None],
) -> list[Link]:
    """Check all links, on 32 tokens of text, with ``quick`` on 16; ``threads``: 0 for the best number;
    ``note`` gets lines of progress.

    Raises RefusedError if the weights are not those that the ONNX files were made of.
    """
    note("chain: weights → ONNX")
    export = Export(directory)
    weights = export.smoothed(checkpoint)
    opened = Bundle.open(bundle)
    precisions: list[Precision] = ["base", "full"] if "target.residual" in opened.sections else ["base"]
    links = [check_export(weights, export)]
    note("chain: ONNX → bundle")
    links.append(check_bundle(opened, export))
    with Model(bundle) as model:
        ids = model.encode(TEXT)[: 16 if quick else 32]
        graphs = {}
        for precision in precisions:
            note(f"chain: {precision} on onnxruntime")
            runner = OnnxRunner(directory / MODEL_FILES[precision], threads, streams=True)
            graphs[precision] = runner.streams(ids)
        if "full" in graphs:
            note("chain: weights → graph")
            links.append(check_graph(weights, ids, graphs["full"]))
        for precision, streams in graphs.items():
            note(f"chain: {precision} in the runtime")
            runtime = Runtime(model, precision, ids, threads)
            links.append(_bounded(f"graph → runtime ({precision})", runtime.streams, streams, RUNTIME_BOUND))
            links += check_levels(runtime)
            links.append(check_truncation(runtime))
    return links


# ---- weights → ONNX → bundle: numbers ----


class Export:
    """The ONNX files of a directory: all their tensors in memory, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[Precision, dict[str, NDArray[Any]]] = {}
        for precision, name in MODEL_FILES.items():
            with parsing(directory / name, "exported graph"):
                model = onnx.load(directory / name)
                _, self.metadata = parse_graph(_without_data(model), Metadata)
            self.tensors[precision] = {
                tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
            }

    def smoothed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the weights as they were quantized. Raises RefusedError if the files are of others."""
        if checkpoint.source_sha256 != self.metadata.source_sha256:
            raise RefusedError(
                f"{self.directory} was exported from weights with SHA-256 {self.metadata.source_sha256}, "
                f"these have {checkpoint.source_sha256}"
            )
        recorded = self.metadata.smoothing
        return smooth(checkpoint, None if recorded is None else Smoothing.from_json(recorded))

    def quantized(self, name: str, plane: str | None) -> MXTensor:
        """Return a quantized tensor; ``plane`` None: MXINT8."""
        data, scale = (self.tensors["full"][key] for key in initializer_names(name, plane))  # type: ignore[arg-type]
        if plane is None:
            return MXTensor("mxint8", data, scale, "floor")
        return MXTensor("mxfp4", data, scale, self.metadata.rule)


def _without_data(model: onnx.ModelProto) -> bytes:
    """Return the graph with the weights taken out again, as its file has it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.initializer[:]
    return bytes(bare.SerializeToString())


def check_export(weights: Checkpoint, export: Export) -> Link:
    """Compute every number of the ONNX files again from ``weights``. A trained base plane is taken as it is:
    its residual plane, which makes up for it, gives away every change to it."""
    config, rule = weights.config, export.metadata.rule
    trained = export.metadata.recipe is not None
    count = 0

    def compared() -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
        names = ("rope.cos", "rope.sin")
        for name, table in zip(names, rope_tables(config, config.max_positions), strict=True):
            yield name, table, export.tensors["full"][name]
        for name, weight in weights.tensors.items():
            if weight.ndim == 1:
                yield name, weight, export.tensors["full"][name]
            elif name.startswith("model.layers."):
                base = export.quantized(name, "base")
                if not trained:
                    yield from _parts(f"{name}.base", quantize(weight, "mxfp4", rule), base)
                wanted = quantize_residual(weight - dequantize(base), base, rule)
                yield from _parts(f"{name}.residual", wanted, export.quantized(name, "residual"))
            else:
                yield from _parts(name, quantize(weight, "mxint8"), export.quantized(name, None))

    for name, wanted, found in compared():
        count += 1
        if fault := _first_difference(name, wanted, found):
            return Link("weights → ONNX", "", fault=fault)
    return Link("weights → ONNX", f"{count} arrays of {len(weights.tensors)} tensors")


def _parts(name: str, wanted: MXTensor, found: MXTensor) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    yield f"{name}.scale", wanted.scale, found.scale
    yield f"{name}.data", wanted.data, found.data


def _first_difference(name: str, wanted: NDArray[Any], found: NDArray[Any]) -> str:
    """Tell in words where ``found`` first differs from ``wanted``, and how often; "" if nowhere."""
    if wanted.shape != found.shape:
        return f"{_of_layer(name)} is {found.shape}, not {wanted.shape}"
    differs = wanted != found
    if not differs.any():
        return ""
    place = np.unravel_index(int(differs.argmax()), differs.shape)
    at = ", ".join(str(int(i)) for i in place)
    share = f"{int(differs.sum())} of {differs.size} differ"
    return f"{_of_layer(name)} at [{at}]: {found[place]} instead of {wanted[place]}; {share}"


def _of_layer(name: str) -> str:
    parts = name.split(".")
    return f"layer {parts[2]}, tensor {name}" if parts[:2] == ["model", "layers"] else f"tensor {name}"


def check_bundle(bundle: Bundle, export: Export) -> Link:
    """Read the bundle's tensors and tokenizer back, and compare them with the ONNX files' own."""
    count = 0
    for section, name in bundle.tensors:
        if not section.startswith("target."):
            continue
        count += 1
        stored = bundle.get(section, name)
        plane = {"target.base": "base", "target.residual": "residual"}.get(section)
        if isinstance(stored, MXTensor):
            pairs = list(_parts(f"{name}.{plane}" if plane else name, export.quantized(name, plane), stored))
        else:
            precision: Precision = "full" if section == "target.residual" else "base"
            wanted = export.tensors[precision][name]
            pairs = [(name, wanted, stored.reshape(wanted.shape))]
        for where, wanted, found in pairs:
            if fault := _first_difference(where, wanted, found):
                return Link("ONNX → bundle", "", fault=f"section {section}: {fault}")
    if fault := _tokenizer_fault(bundle, export):
        return Link("ONNX → bundle", "", fault=f"section tokenizer: {fault}")
    return Link("ONNX → bundle", f"{count} tensors and the tokenizer")


def _tokenizer_fault(bundle: Bundle, export: Export) -> str:
    files = {}
    for name in (TOKENIZER_FILE, GENERATION_FILE):
        path = export.directory / name
        with parsing(path, "JSON object"):
            files[name] = parse_json_object(path.read_bytes())
    special = files[GENERATION_FILE]
    wanted = tokenizer_spec(files[TOKENIZER_FILE], special)
    if (eos := named_token(wanted, special.get("eos_token"), "eos_token")) is not None:
        wanted = wanted.with_end(eos, eos_token=eos)
    found = read_tokenizer(bundle.section("tokenizer").tobytes(), bundle.config.vocab)
    if len(found.merges) != len(wanted.merges):
        return f"{len(found.merges)} merges instead of {len(wanted.merges)}"
    for number, (mine, other) in enumerate(zip(found.merges, wanted.merges, strict=True)):
        if mine != other:
            return f"merge {number} is {mine} instead of {other}"
    for token, (stored, meant) in enumerate(zip(found.token_bytes(), wanted.token_bytes(), strict=True)):
        if stored != meant:
            return f"token {token} is {stored!r} instead of {meant!r}"
    for name in (
        "special_ids",
        "bos_id",
        "eos_ids",
        "pre_tokenizer",
        "added_ids",
        "whole_words",
        "nfc",
        "adds_bos",
    ):
        if getattr(found, name) != getattr(wanted, name):
            return f"{name} is {getattr(found, name)} instead of {getattr(wanted, name)}"
    return ""


# ---- graph and runtime: functions ----


def stream_error(streams: F32, wanted: F32) -> F32:
    """Compute the relative error [layers + 1, n] of residual streams [n, layers + 1, hidden]: the RMS over
    channels of each difference, in units of what the channel usually holds. A few channels and the first
    position hold a hundred times as much as others; so they do not decide."""
    usual = np.median(np.abs(wanted), axis=0, keepdims=True)
    usual = np.maximum(usual, 1e-3 * usual.mean(axis=2, keepdims=True))
    error: F32 = np.sqrt((((streams - wanted) / usual) ** 2).clip(max=1e6).mean(axis=2)).T
    return error


def _bounded(name: str, streams: F32, wanted: F32, bound: float) -> Link:
    """Compare streams, layer by layer; a layer's error is the median of those of its positions."""
    errors = stream_error(streams, wanted)
    middle = np.median(errors, axis=1)
    largest = float(middle.max())
    fault = ""
    if not (middle <= bound).all():
        layer = int(np.argmax(np.logical_not(middle <= bound)))
        position = int(np.argmax(np.logical_not(errors[layer] <= bound)))
        where = f"layer {layer - 1}" if layer else "the embedding"
        fault = f"{where}: error {middle[layer]:.1%}, bound {bound:.0%}; first at position {position}"
    return Link(name, f"{streams.shape[1]} streams of {len(streams)} tokens", largest, bound, fault)


def check_graph(weights: Checkpoint, ids: Sequence[int], streams: F32) -> Link:
    """Compare full precision on onnxruntime with the unquantized model."""
    kept: dict[str, F32] = {}
    Teacher(weights).hidden(np.array(ids), kept.__setitem__)
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(weights.config.layers))]
    wanted = np.stack([kept[name] for name in names], axis=1)
    return _bounded("weights → graph (full)", streams, wanted, GRAPH_BOUND)


class Runtime:
    """What the runtime computes for tokens with the best kernels of this machine: ``streams``
    [n, layers + 1, hidden] and ``logits`` [n, vocab]."""

    def __init__(self, model: Model, precision: Precision, ids: Sequence[int], threads: int) -> None:
        self.model = model
        self.precision = precision
        self.ids = ids
        self.threads = threads
        self.streams, self.logits, self.kernels = self.run()

    def engine(self) -> Engine:
        return Engine(self.model, precision=self.precision, threads=self.threads, draft="off")

    def run(self) -> tuple[F32, F32, str]:
        """Return streams and logits as a new engine computes them, and its kernel of matrix products."""
        layers = range(self.model.info.layers + 1)
        with self.engine() as engine:
            with Timeline(engine) as timeline:
                streams = timeline.streams(self.ids, layers)
            with Timeline(engine) as timeline:
                return streams, timeline.logits(self.ids), str(timeline.stats["kernels"]["matmul_mxfp4"])


def check_levels(runtime: Runtime) -> list[Link]:
    """Compare the kernels of each level that this machine has with the scalar ones, bit by bit."""
    with _masked(_SCALAR):
        scalar = runtime.run()
    links, seen = [], {scalar[2]}
    for mask in _LEVELS:
        with _masked(mask):
            found = (runtime.streams, runtime.logits, runtime.kernels) if not mask else runtime.run()
        if found[2] in seen:
            continue
        seen.add(found[2])
        name = f"level {found[2].rpartition('_')[2]} ({runtime.precision})"
        links.append(
            Link(name, f"streams and logits of {len(runtime.ids)} tokens", fault=_differs(found, scalar))
        )
    return links


def check_truncation(runtime: Runtime) -> Link:
    """Read a text with another second half, forget that, and read the right one."""
    ids, half = runtime.ids, len(runtime.ids) // 2
    with runtime.engine() as engine, Timeline(engine) as timeline:
        timeline.logits([*ids[:half], *ids[: len(ids) - half]])
        timeline.truncate(half)
        found = timeline.logits(ids[half:])
    fault = ""
    if (differs := (found != runtime.logits[half:]).any(axis=1)).any():
        position = half + int(differs.argmax())
        fault = f"stale rows: logits at position {position} differ after a truncation to {half} tokens"
    return Link(f"truncation ({runtime.precision})", f"logits of {len(ids) - half} tokens", fault=fault)


def _differs(found: tuple[F32, F32, str], wanted: tuple[F32, F32, str]) -> str:
    """Tell where streams or, if those are equal, logits first differ."""
    streams = (found[0] != wanted[0]).any(axis=2)  # [n, layers + 1]
    if streams.any():
        layer = int(streams.any(axis=0).argmax())
        where = f"layer {layer - 1}" if layer else "the embedding"
        return f"{where}: other bits, first at position {int(streams[:, layer].argmax())}"
    if (logits := (found[1] != wanted[1]).any(axis=1)).any():
        return f"the head: other bits, first at position {int(logits.argmax())}"
    return ""


@contextmanager
def _masked(levels: str) -> Iterator[None]:
    """Let engines that open meanwhile do without these levels of the CPU."""
    before = os.environ.get(CPU_MASK)
    os.environ[CPU_MASK] = ",".join(filter(None, (before, levels)))
    try:
        yield
    finally:
        if before is None:
            del os.environ[CPU_MASK]
        else:
            os.environ[CPU_MASK] = before
