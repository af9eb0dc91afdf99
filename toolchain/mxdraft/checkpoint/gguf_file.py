# SPDX-License-Identifier: Apache-2.0
"""GGUF files of architecture ``llama`` (format: ggml's docs/gguf.md, versions 2 and 3, little-endian).

The header is read here, not by the gguf package, whose reader loops for ever on some damaged files; block
formats are decoded by the gguf package.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from numpy.typing import NDArray

from mxdraft.checkpoint.model import Checkpoint, ModelConfig, check_checkpoint, check_config, fit_vocabulary
from mxdraft.checkpoint.tokenizer import PreTokenizer, TokenizerSpec
from mxdraft.errors import RefusedError
from mxdraft.files import as_text, open_regular, parsing

_T = TypeVar("_T")

_SCALARS = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_MAX_HEADER = 64 << 20  # bytes; as Python objects they take up to nine times as many

_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "qwen2": "qwen2",
}
_TOKEN_NORMAL, _TOKEN_UNKNOWN, _TOKEN_CONTROL, _TOKEN_USER, _TOKEN_UNUSED, _TOKEN_BYTE = range(1, 7)

# Every llama.* setting that is understood; those with a value must have it, for another one would change the
# arithmetic. Unknown settings are refused for the same reason.
_SETTINGS: dict[str, Any] = {
    "vocab_size": None,
    "context_length": None,
    "embedding_length": None,
    "block_count": None,
    "feed_forward_length": None,
    "attention.head_count": None,
    "attention.head_count_kv": None,
    "attention.layer_norm_rms_epsilon": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
    "rope.freq_base": None,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
}


def load_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file, dequantized to f32. Raises RefusedError; TransferError if it cannot be read."""
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if file.seek(0, 2) == 0:
            raise RefusedError(f"{path}: the file is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with parsing(path, "GGUF file that can be read"):
        metadata, infos, base = _read_header(data)
        config = _config(metadata, infos)
        checkpoint = Checkpoint(
            config=config,
            tensors={_name(info.name): _tensor(data, base, info, config) for info in infos},
            tokenizer=_tokenizer(metadata),
            chat_template=_optional(metadata, "tokenizer.chat_template", str),
            source=f"{_optional(metadata, 'general.name', str) or 'unnamed model'} ({as_text(path.name)})",
            source_sha256=sha256,
        )
        checkpoint = fit_vocabulary(checkpoint)
        check_checkpoint(checkpoint)
        return checkpoint


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # outermost first, as numpy has it
    type: gguf.GGMLQuantizationType
    offset: int  # from where the tensors' data begins
    nbytes: int


class _Reader:
    """Reads values in order; refuses to read past the end, and headers that would fill the memory."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def bytes(self, count: int) -> bytes:
        end = self.offset + count
        if end > len(self._data):
            raise RefusedError(f"the header at byte {self.offset} runs past the end of the file: truncated")
        if end > _MAX_HEADER:
            raise RefusedError(f"the header is larger than {_MAX_HEADER >> 20} MiB")
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def u32(self) -> int:
        return int(struct.unpack("<I", self.bytes(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.bytes(8))[0])

    def string(self) -> str:
        start = self.offset
        try:
            return self.bytes(self.u64()).decode("utf-8")
        except UnicodeDecodeError:
            raise RefusedError(f"the header's string at byte {start} is not UTF-8") from None

    def value(self) -> Any:
        kind = self.u32()
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind != gguf.GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.u32(), self.u64()
        if kind == gguf.GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise RefusedError(f"the header has a value of unknown type {kind} before byte {self.offset}")
        dtype = np.dtype(_SCALARS[gguf.GGUFValueType(kind)])
        values: list[Any] = np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()
        return values


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], list[_TensorInfo], int]:
    """Metadata, tensors, and where the tensors' data begins."""
    reader = _Reader(data)
    if reader.bytes(4) != b"GGUF":
        raise RefusedError("not a GGUF file (its first four bytes are not 'GGUF')")
    version = reader.u32()
    if version not in (2, 3):
        raise RefusedError(f"GGUF version {version} is not supported; only 2 and 3 (little-endian) are")
    tensor_count, metadata_count = reader.u64(), reader.u64()
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.string()
        if key in metadata:
            raise RefusedError(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value()
    infos = [_read_tensor_info(reader) for _ in range(tensor_count)]

    alignment = _optional(metadata, "general.alignment", int)
    if alignment is None:
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    if alignment < 1:
        raise RefusedError(f"general.alignment is {alignment}")
    base = -(-reader.offset // alignment) * alignment
    names: set[str] = set()
    end = 0
    for info in sorted(infos, key=lambda info: info.offset):
        if info.name in names:
            raise RefusedError(f"tensor {info.name} appears twice")
        names.add(info.name)
        if info.offset < end or info.offset % alignment:
            raise RefusedError(
                f"tensor {info.name} at offset {info.offset} overlaps another or is not aligned"
            )
        end = info.offset + info.nbytes
        if base + end > len(data):
            raise RefusedError(f"tensor {info.name} ends at byte {base + end} of {len(data)}: truncated")
    return metadata, infos, base


def _read_tensor_info(reader: _Reader) -> _TensorInfo:
    name = reader.string()
    rank = reader.u32()
    if not 1 <= rank <= 4:
        raise RefusedError(f"tensor {name} has {rank} dimensions; 1 to 4 are possible")
    shape = tuple(reader.u64() for _ in range(rank))[::-1]
    kind = reader.u32()
    try:
        type_ = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise RefusedError(f"tensor {name} has unknown type {kind}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    if min(shape) < 1 or shape[-1] % block:
        raise RefusedError(f"tensor {name} has shape {shape}, but {type_.name} comes in blocks of {block}")
    return _TensorInfo(name, shape, type_, reader.u64(), math.prod(shape) // block * block_bytes)


def _config(metadata: dict[str, Any], infos: list[_TensorInfo]) -> ModelConfig:
    architecture = _required(metadata, "general.architecture", str)
    if architecture != "llama":
        raise RefusedError(f"architecture {architecture!r} is not supported; only 'llama' is")
    for key, value in metadata.items():
        setting = key.removeprefix("llama.")
        if setting == key:
            continue
        if setting not in _SETTINGS:
            raise RefusedError(f"setting {key} = {value!r} is unknown and may change the arithmetic")
        if _SETTINGS[setting] not in (None, value):
            raise RefusedError(f"setting {key} = {value!r} is not supported; only {_SETTINGS[setting]!r} is")

    hidden = _required(metadata, "llama.embedding_length", int)
    heads = _required(metadata, "llama.attention.head_count", int)
    kv_heads = _optional(metadata, "llama.attention.head_count_kv", int)
    head_dim = _optional(metadata, "llama.attention.key_length", int) or hidden // max(heads, 1)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        value = _optional(metadata, key, int)
        if value not in (None, head_dim):
            raise RefusedError(f"setting {key} = {value} differs from the head dimension {head_dim}")
    tokens = len(_required(metadata, "tokenizer.ggml.tokens", list))
    rope_theta = _optional(metadata, "llama.rope.freq_base", float)
    config = ModelConfig(
        hidden=hidden,
        layers=_required(metadata, "llama.block_count", int),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        ffn=_required(metadata, "llama.feed_forward_length", int),
        vocab=_optional(metadata, "llama.vocab_size", int) or tokens,
        max_positions=_required(metadata, "llama.context_length", int),
        rms_eps=_required(metadata, "llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=10000.0 if rope_theta is None else rope_theta,
        tied=all(info.name != "output.weight" for info in infos),
    )
    check_config(config)
    return config


def _name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise RefusedError(f"tensor {name} is none of a Llama model's")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _tensor(data: mmap.mmap, base: int, info: _TensorInfo, config: ModelConfig) -> NDArray[np.float32]:
    rows = np.frombuffer(data, np.uint8, info.nbytes, base + info.offset).reshape(*info.shape[:-1], -1)
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by name later
            values = gguf.dequantize(rows, info.type)
    except NotImplementedError:
        raise RefusedError(f"tensor {info.name} has type {info.type.name}, which cannot be decoded") from None
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(info.name.split(".")[-2])
    if heads is not None and values.shape == (heads * config.head_dim, config.hidden):
        # In each head GGUF puts row i + D/2 right after row i; rotate-half RoPE wants the halves apart.
        pairs = values.reshape(heads, config.head_dim // 2, 2, config.hidden)
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return np.array(values, np.float32)


def _tokenizer(metadata: dict[str, Any]) -> TokenizerSpec:
    model = _required(metadata, "tokenizer.ggml.model", str)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _required(metadata, "tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise RefusedError(f"tokenizer: {len(types)} token types for {len(tokens)} tokens")
    if model == "llama":
        pre_tokenizer: PreTokenizer = "spaces-prefix"
        if _optional(metadata, "tokenizer.ggml.add_space_prefix", bool) is False:
            pre_tokenizer = "spaces"
        merges = _merges_of_scores(metadata, tokens)
        known: tuple[int, ...] = (
            _TOKEN_NORMAL,
            _TOKEN_UNKNOWN,
            _TOKEN_CONTROL,
            _TOKEN_USER,
            _TOKEN_UNUSED,
            _TOKEN_BYTE,
        )
    else:
        pre_tokenizer = _byte_level(metadata, model)
        merges = _merges(metadata)
        known = (_TOKEN_NORMAL, _TOKEN_CONTROL, _TOKEN_USER)
    for i, kind in enumerate(types):
        if kind not in known:
            raise RefusedError(
                f"tokenizer: token {i} {tokens[i]!r} is of type {kind}, which is not supported"
            )
    if _optional(metadata, "tokenizer.ggml.add_eos_token", bool):
        raise RefusedError("tokenizer.ggml.add_eos_token is set; mxdraft adds nothing after a text")

    control = (_TOKEN_CONTROL, _TOKEN_UNKNOWN)
    eos_id, *others = (
        _optional(metadata, f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")
    )
    spec = TokenizerSpec(
        tokens=tokens,
        merges=merges,
        special_ids=[i for i, kind in enumerate(types) if kind in control],
        bos_id=_optional(metadata, "tokenizer.ggml.bos_token_id", int),
        eos_ids=sorted({i for i in others if i is not None}),
        pre_tokenizer=pre_tokenizer,
        added_ids=[i for i, kind in enumerate(types) if kind == _TOKEN_USER],
        whole_words=pre_tokenizer == "llama3",
        nfc=pre_tokenizer == "qwen2",
        adds_bos=_adds_bos(metadata, model, pre_tokenizer),
    )
    return spec if eos_id is None else spec.with_end(eos_id, eos_token=eos_id)


def _adds_bos(metadata: dict[str, Any], model: str, pre_tokenizer: PreTokenizer) -> bool:
    """Whether BOS comes before every text: as the file says, else as llama.cpp does."""
    said = _optional(metadata, "tokenizer.ggml.add_bos_token", bool)
    return said if said is not None else model == "llama" or pre_tokenizer == "llama3"


def _byte_level(metadata: dict[str, Any], model: str) -> PreTokenizer:
    pre = _required(metadata, "tokenizer.ggml.pre", str)
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise RefusedError(
            f"tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; only 'llama' and 'gpt2' "
            f"(byte-level BPE) with one of {', '.join(_PRE_TOKENIZERS)} are"
        )
    if _optional(metadata, "tokenizer.ggml.add_space_prefix", bool):
        raise RefusedError("tokenizer.ggml.add_space_prefix is set, which is not supported here")
    return _PRE_TOKENIZERS[pre]


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for rank, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise RefusedError(f"tokenizer: merge {rank} {merge!r} is not two tokens")
        merges.append((left, right))
    return merges


def _merges_of_scores(metadata: dict[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE, which knows scores: each split of a token in two, best token first.

    Splits of one token are in order of their parts' ids, as in the tokenizer.json of Llama 2.
    """
    scores = _required(metadata, "tokenizer.ggml.scores", list)
    types = metadata["tokenizer.ggml.token_type"]
    if len(scores) != len(tokens) or not all(type(s) is float and math.isfinite(s) for s in scores):
        raise RefusedError(f"tokenizer: {len(scores)} finite scores are needed for {len(tokens)} tokens")
    mergeable = (_TOKEN_NORMAL, _TOKEN_USER, _TOKEN_UNUSED)
    id_of = {token: i for i, token in enumerate(tokens) if types[i] in mergeable}
    merges: list[tuple[str, str]] = []
    for token in sorted(id_of, key=lambda token: -scores[id_of[token]]):
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        found = [(a, b) for a, b in splits if a in id_of and b in id_of]
        merges += sorted(found, key=lambda pair: (id_of[pair[0]], id_of[pair[1]]))
    return merges


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    values = _required(metadata, key, list)
    if not all(isinstance(value, str) for value in values):
        raise RefusedError(f"metadata {key} is no array of strings")
    return values


def _required(metadata: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = _optional(metadata, key, kind)
    if value is None:
        raise RefusedError(f"metadata {key} is missing")
    return value


def _optional(metadata: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
    value = metadata.get(key)
    if value is not None and type(value) is not kind:
        raise RefusedError(f"metadata {key} is {value!r:.60}, not of type {kind.__name__}")
    return value
