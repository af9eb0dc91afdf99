# SPDX-License-Identifier: Apache-2.0
"""Checkpoint to ONNX: quantizes the weights and builds the graphs.

``write_model`` writes ``model.base.onnx`` (base plane) and ``model.full.onnx`` (base + residual), whose
weights lie in one ``model.onnx.data``, and next to them what Hugging Face's tools and ``mxdraft pack`` read:
``tokenizer.json``, ``generation_config.json`` (bos and eos) and ``chat_template.jinja``.

Initializers carry Hugging Face's names; a quantized tensor NAME is two of them, ``NAME.data`` and
``NAME.scale`` for MXINT8, ``NAME.base.data``, ``NAME.base.scale``, ``NAME.residual.data`` and
``NAME.residual.scale`` for MXFP4. The metadata entry ``mxdraft`` is a ``Metadata`` as JSON.

Inputs: ``input_ids`` and ``position_ids`` int64 [batch, sequence], ``past_key_values.L.key`` and ``.value``
f32 [batch, kv_heads, past, head_dim]. Outputs: ``logits`` f32 [batch, sequence, vocab], ``present.L.key`` and
``.value``. The cache is f32 here and f16 in the runtime.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, TypeVar

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import TensorProto

from mxdraft import __version__
from mxdraft.checkpoint import Checkpoint, ModelConfig, check_config, tokenizer_json
from mxdraft.checkpoint.reference import rope_tables
from mxdraft.checkpoint.smooth import Smoothing, smooth
from mxdraft.errors import RefusedError
from mxdraft.export.functions import DOMAIN, DOMAIN_VERSION, OPSET, functions
from mxdraft.files import parse_json_object, replacing
from mxdraft.mx import BLOCK, MXTensor, Rule, dequantize, quantize, quantize_residual
from mxdraft.train.delta import TrainedBase

Precision = Literal["base", "full"]
Plane = Literal["base", "residual"]

MODEL_FILES: dict[Precision, str] = {"base": "model.base.onnx", "full": "model.full.onnx"}
DATA_FILE = "model.onnx.data"
FEATURES_FILE, STEP_FILE, DRAFT_DATA_FILE = "draft.features.onnx", "draft.step.onnx", "draft.onnx.data"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_IR_VERSION = 12
_DATA_ALIGNMENT = 64
_GRAPH_LIMIT = 16 << 20  # bytes of a file: 1,024 layers take 10 MB
_DTYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int64): TensorProto.INT64,
}


@dataclass(frozen=True)
class GraphMetadata:
    """What every graph says about itself, as JSON."""

    config: ModelConfig

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """May raise anything if the text is none that ``to_json`` wrote."""
        fields = parse_json_object(text.encode("utf-8"))
        return cls(**(fields | {"config": ModelConfig(**fields["config"])}))


_Metadata = TypeVar("_Metadata", bound=GraphMetadata)


@dataclass(frozen=True)
class Metadata(GraphMetadata):
    """What a target's graph says. ``recipe``: of the training that made the base plane, None if there was
    none; ``smoothing``: a ``Smoothing`` as JSON, of the weights before they were quantized, or None;
    ``files``: SHA-256 of every other file of the export, by name."""

    precision: Precision
    rule: Rule
    recipe: dict[str, Any] | None
    smoothing: dict[str, Any] | None
    source: str
    source_sha256: str
    mxdraft_version: str
    files: dict[str, str]


def parse_graph(data: bytes, kind: type[_Metadata]) -> tuple[onnx.ModelProto, _Metadata]:
    """The graph in the bytes of a file, without its weights, and what it says about itself.

    May raise anything if the bytes are none that this package wrote.
    """
    if len(data) > _GRAPH_LIMIT:
        raise ValueError(f"it has more than {_GRAPH_LIMIT >> 20} MiB")
    model = onnx.load_model_from_string(data)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    metadata = kind.from_json(properties["mxdraft"])
    check_config(metadata.config)
    return model, metadata


def initializer_names(name: str, plane: Plane | None) -> tuple[str, str]:
    """Where the data and the scales of a quantized tensor are; ``plane`` None: MXINT8."""
    prefix = name if plane is None else f"{name}.{plane}"
    return f"{prefix}.data", f"{prefix}.scale"


def write_model(
    checkpoint: Checkpoint,
    directory: Path,
    rule: Rule,
    trained: TrainedBase | None,
    smoothing: Smoothing | None = None,
) -> dict[str, str]:
    """Write both graphs and what belongs to them into ``directory`` (see ``export_model``); returns the
    SHA-256 of each file.

    Raises RefusedError if a tensor cannot be quantized, TransferError if a file cannot be written.
    """
    if trained is not None:
        smoothing = trained.smoothing
    checkpoint = smooth(checkpoint, smoothing)
    with replacing(directory / DATA_FILE) as file:
        data = DataFile(file, DATA_FILE)
        initializers = _store_weights(checkpoint, trained, rule, data)
    digests = {DATA_FILE: data.sha256()}
    for name, text in _text_files(checkpoint).items():
        digests[name] = write_file(directory / name, text.encode("utf-8"))
    graphs: dict[str, str] = {}
    for precision, name in MODEL_FILES.items():
        metadata = Metadata(
            config=checkpoint.config,
            precision=precision,
            rule=rule,
            recipe=None if trained is None else trained.meta,
            smoothing=None if smoothing is None else smoothing.to_json(),
            source=checkpoint.source,
            source_sha256=checkpoint.source_sha256,
            mxdraft_version=__version__,
            files=digests,
        )
        model = build_model(checkpoint.config, precision, initializers[precision])
        onnx.helper.set_model_props(model, {"mxdraft": metadata.to_json()})
        graphs[name] = write_graph(directory / name, model)
    return digests | graphs


# ---- weights ----


class DataFile:
    """A file of external data, which will be called ``name``: appends arrays and says where they are."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._digest = hashlib.sha256()

    def add(self, name: str, array: NDArray[Any]) -> TensorProto:
        self._append(bytes(-self._file.tell() % _DATA_ALIGNMENT))
        offset = self._file.tell()
        self._append(np.ascontiguousarray(array).data)
        tensor = TensorProto(name=name, data_type=_DTYPES[array.dtype], dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": self._name, "offset": offset, "length": array.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def add_quantized(self, name: str, plane: Plane | None, tensor: MXTensor) -> list[TensorProto]:
        data_name, scale_name = initializer_names(name, plane)
        return [self.add(data_name, tensor.data), self.add(scale_name, tensor.scale)]

    def sha256(self) -> str:
        return self._digest.hexdigest()

    def _append(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)


def _store_weights(
    checkpoint: Checkpoint, trained: TrainedBase | None, rule: Rule, data: DataFile
) -> dict[Precision, list[TensorProto]]:
    """Quantize and write all weights; returns the initializers of each graph."""
    cosine, sine = rope_tables(checkpoint.config, checkpoint.config.max_positions)
    both = [data.add("rope.cos", cosine), data.add("rope.sin", sine)]
    only: dict[Precision, list[TensorProto]] = {"base": [], "full": []}
    for name, weight in checkpoint.tensors.items():
        try:
            if weight.ndim == 1:  # a norm
                only["base"].append(data.add(name, weight if trained is None else trained.norms[name]))
                only["full"].append(data.add(name, weight))
            elif name.startswith("model.layers."):
                base = quantize(weight, "mxfp4", rule) if trained is None else trained.planes[name]
                both += data.add_quantized(name, "base", base)
                residual = quantize_residual(weight - dequantize(base), base, rule)
                only["full"] += data.add_quantized(name, "residual", residual)
            else:  # embedding or head
                both += data.add_quantized(name, None, quantize(weight, "mxint8"))
        except ValueError as error:
            raise RefusedError(f"tensor {name}: {error}") from error
    return {precision: both + tensors for precision, tensors in only.items()}


# ---- graph ----


class Graph:
    """Nodes and values as they are added; an output is named after the module that computes it."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        self.config = config
        self.precision = precision
        self.nodes: list[onnx.NodeProto] = []
        self.values: list[onnx.ValueInfoProto] = []

    def op(self, kind: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        node = onnx.helper.make_node(kind, inputs, [output], output, domain=domain, **attributes)
        self.nodes.append(node)
        return output

    def constant(self, name: str, value: NDArray[Any]) -> str:
        node = onnx.helper.make_node("Constant", [], [name], name, value=onnx.numpy_helper.from_array(value))
        self.nodes.append(node)
        return name

    def mx_op(self, kind: str, inputs: list[str], output: str, width: int, **attributes: Any) -> str:
        """An operator of the domain ``mxdraft``, with f32 [batch, sequence, width] as output.

        Its shape is stated, for inference does not see into functions and gets Attention wrong after an
        unknown width.
        """
        self.values.append(value_info(output, TensorProto.FLOAT, ["batch", "sequence", width]))
        return self.op(kind, inputs, output, domain=DOMAIN, **attributes)

    def linear(self, x: str, module: str, width: int) -> str:
        weights = [*initializer_names(f"{module}.weight", "base")]
        if self.precision == "full":
            weights += initializer_names(f"{module}.weight", "residual")
        kind = "MXFP4MatMul" if self.precision == "base" else "MXFP4ResidualMatMul"
        return self.mx_op(kind, [x, *weights], module, width, block_size=BLOCK)

    def norm(self, x: str, module: str) -> str:
        inputs = [x, f"{module}.weight"]
        return self.op("RMSNormalization", inputs, module, axis=-1, epsilon=self.config.rms_eps)

    def rope(self, x: str, heads: int) -> str:
        inputs = [x, "rope.cos", "rope.sin", "position_ids"]
        return self.op("RotaryEmbedding", inputs, f"{x}.rope", num_heads=heads)

    def attention(self, x: str, module: str, layer: int) -> str:
        c = self.config
        q = self.rope(self.linear(x, f"{module}.q_proj", c.heads * c.head_dim), c.heads)
        k = self.rope(self.linear(x, f"{module}.k_proj", c.kv_heads * c.head_dim), c.kv_heads)
        v = self.linear(x, f"{module}.v_proj", c.kv_heads * c.head_dim)
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        present = [f"present.{layer}.key", f"present.{layer}.value"]
        node = onnx.helper.make_node(
            "Attention",
            [q, k, v, "", *past],
            [module, *present],
            module,
            q_num_heads=c.heads,
            kv_num_heads=c.kv_heads,
            is_causal=1,
        )
        self.nodes.append(node)
        return self.linear(module, f"{module}.o_proj", c.hidden)

    def layer(self, x: str, layer: int) -> str:
        """A whole layer; its output is named after it."""
        prefix = f"model.layers.{layer}"
        normed = self.norm(x, f"{prefix}.input_layernorm")
        attention = self.attention(normed, f"{prefix}.self_attn", layer)
        x = self.op("Add", [x, attention], f"{prefix}.attention_residual")
        normed = self.norm(x, f"{prefix}.post_attention_layernorm")
        return self.op("Add", [x, self.feed_forward(normed, f"{prefix}.mlp")], prefix)

    def feed_forward(self, x: str, module: str) -> str:
        c = self.config
        gate = self.op("Swish", [self.linear(x, f"{module}.gate_proj", c.ffn)], f"{module}.act_fn")
        up = self.linear(x, f"{module}.up_proj", c.ffn)
        return self.linear(self.op("Mul", [gate, up], f"{module}.mul"), f"{module}.down_proj", c.hidden)

    def model(
        self,
        name: str,
        inputs: Mapping[str, tuple[int, Sequence[int]]],
        outputs: Mapping[str, int],
        layers: int,
        initializers: list[TensorProto],
    ) -> onnx.ModelProto:
        """The model of these nodes. ``inputs``: type, and axes after [batch, sequence];
        ``outputs``: f32 [batch, sequence, width]; ``layers``: how many have a cache, an input and an output.
        """
        c = self.config
        caches = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
        past: list[str | int] = ["batch", c.kv_heads, "past", c.head_dim]
        present: list[str | int] = ["batch", c.kv_heads, "total", c.head_dim]
        rows = ["batch", "sequence"]
        proto = onnx.helper.make_graph(
            self.nodes,
            name,
            inputs=[
                *(value_info(key, dtype, [*rows, *axes]) for key, (dtype, axes) in inputs.items()),
                *(value_info(f"past_key_values.{cache}", TensorProto.FLOAT, past) for cache in caches),
            ],
            outputs=[
                *(value_info(key, TensorProto.FLOAT, [*rows, width]) for key, width in outputs.items()),
                *(value_info(f"present.{cache}", TensorProto.FLOAT, present) for cache in caches),
            ],
            initializer=initializers,
            value_info=self.values,
        )
        return onnx.helper.make_model(
            proto,
            opset_imports=[
                onnx.helper.make_opsetid("", OPSET),
                onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION),
            ],
            functions=functions(),
            ir_version=_IR_VERSION,
            producer_name="mxdraft",
            producer_version=__version__,
        )


def build_model(
    config: ModelConfig, precision: Precision, initializers: list[TensorProto]
) -> onnx.ModelProto:
    graph = Graph(config, precision)
    embedding = initializer_names("model.embed_tokens.weight", None)
    head = embedding if config.tied else initializer_names("lm_head.weight", None)
    x = graph.mx_op("MXINT8Embedding", ["input_ids", *embedding], "model.embed_tokens", config.hidden)
    for layer in range(config.layers):
        x = graph.layer(x, layer)
    normed = graph.norm(x, "model.norm")
    graph.op("MXINT8MatMul", [normed, *head], "logits", domain=DOMAIN, block_size=BLOCK)

    return graph.model(
        f"llama_{precision}",
        inputs={"input_ids": (TensorProto.INT64, []), "position_ids": (TensorProto.INT64, [])},
        outputs={"logits": config.vocab},
        layers=config.layers,
        initializers=initializers,
    )


def value_info(name: str, dtype: int, shape: Sequence[str | int]) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


# ---- files ----


def _text_files(checkpoint: Checkpoint) -> dict[str, str]:
    tokenizer = checkpoint.tokenizer
    special: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_ids}
    if tokenizer.eos_token_id is not None:  # what the template calls so; there are several end tokens
        special["eos_token"] = tokenizer.tokens[tokenizer.eos_token_id]
    files = {TOKENIZER_FILE: tokenizer_json(tokenizer), GENERATION_FILE: json.dumps(special)}
    if checkpoint.chat_template is not None:
        files[TEMPLATE_FILE] = checkpoint.chat_template
    return files


def write_graph(path: Path, model: onnx.ModelProto) -> str:
    """Write a graph that is valid ONNX; returns the file's SHA-256."""
    # The checker gets it without the data, for it refuses those of a folder that a backup links to. So
    # initializers are inputs to it.
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    for tensor in alone.graph.initializer:
        alone.graph.input.append(value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    del alone.graph.initializer[:]
    onnx.checker.check_model(alone, full_check=True)
    return write_file(path, model.SerializeToString(deterministic=True))


def write_file(path: Path, data: bytes) -> str:
    """Write a file; returns its SHA-256."""
    with replacing(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()
