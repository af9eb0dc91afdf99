# SPDX-License-Identifier: Apache-2.0
"""Directories as Hugging Face's libraries write them: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from mxdraft.checkpoint.model import Checkpoint, ModelConfig, check_checkpoint, check_config
from mxdraft.checkpoint.tokenizer import PRE_TOKENIZERS, PreTokenizer, TokenizerSpec
from mxdraft.errors import RefusedError
from mxdraft.files import as_text, parse_json_object, parsing, read_file

_INDEX = "model.safetensors.index.json"
_JSON_LIMIT, _TOKENIZER_LIMIT, _WEIGHTS_LIMIT = 16 << 20, 64 << 20, 1 << 40  # bytes of a file
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# What tokenizers can be told about an added token that changes where the text around it is cut.
_CUTTING_FLAGS = ("lstrip", "rstrip", "single_word")


def load_huggingface(directory: Path) -> Checkpoint:
    """Read a model directory; f16 and bf16 weights become f32 exactly.

    ``source_sha256`` is that of the lines ``sha256  name`` (as sha256sum prints them), sorted by name, of
    all files read.

    End tokens are all that any file names, for what a fine-tune forgot to change in one of them is the base
    model's. Raises RefusedError; TransferError if a file cannot be read.
    """
    files = _Files(directory)
    with parsing(directory, "Hugging Face model that can be read"):
        raw_config = files.json("config.json")
        config = _config(raw_config)
        tensors = _tensors(files)
        settings = files.json("tokenizer_config.json") if files.has("tokenizer_config.json") else {}
        if files.has("chat_template.jinja"):
            template: str | None = files.text("chat_template.jinja")
        else:
            template = settings.get("chat_template")
            if not isinstance(template, str | None):
                raise RefusedError(
                    "tokenizer_config.json: chat_template must be one text; keep only the default one"
                )
        generation = files.json("generation_config.json") if files.has("generation_config.json") else {}
        spec = tokenizer_spec(files.json("tokenizer.json", _TOKENIZER_LIMIT), raw_config, generation)
        checkpoint = Checkpoint(
            config=config,
            tensors=tensors,
            tokenizer=_with_settings(spec, settings),
            chat_template=template,
            source=f"Hugging Face directory {as_text(directory.name)}",
            source_sha256=files.sha256(),
        )
        check_checkpoint(checkpoint)
        return checkpoint


class _Files:
    """Reads files of one directory, remembering the digest of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return (self._directory / name).exists()

    def bytes(self, name: str, limit: int = _JSON_LIMIT) -> bytes:
        if not self.has(name):
            raise RefusedError(f"{name} is missing")
        data = read_file(self._directory / name, limit)
        self._digests[name] = hashlib.sha256(data).hexdigest()
        return data

    def text(self, name: str) -> str:
        with parsing(name, "UTF-8 text"):
            return self.bytes(name).decode("utf-8")

    def json(self, name: str, limit: int = _JSON_LIMIT) -> dict[str, Any]:
        data = self.bytes(name, limit)
        with parsing(name, "JSON object"):
            return parse_json_object(data)

    def sha256(self) -> str:
        lines = "".join(f"{self._digests[name]}  {name}\n" for name in sorted(self._digests))
        return hashlib.sha256(lines.encode("utf-8")).hexdigest()


def _config(raw: dict[str, Any]) -> ModelConfig:
    if raw.get("model_type") != "llama":
        raise RefusedError(
            f"config.json: model_type {raw.get('model_type')!r} is not supported; only 'llama' is"
        )
    raw = raw | _rope(raw)
    # The value that gives the arithmetic mxdraft does; a key left out means the same.
    for key, supported in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }.items():
        if raw.get(key) not in (None, supported):
            raise RefusedError(f"config.json: {key} {raw[key]!r} is not supported; only {supported!r} is")
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise RefusedError(f"config.json: tie_word_embeddings must be true or false, not {tied!r}")
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    config = ModelConfig(
        hidden=hidden,
        layers=_integer(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer(raw, "head_dim", hidden // max(heads, 1)),
        ffn=_integer(raw, "intermediate_size"),
        vocab=_integer(raw, "vocab_size"),
        max_positions=_integer(raw, "max_position_embeddings"),
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=_number(raw, "rope_theta", 10000.0),
        tied=tied,
    )
    check_config(config)
    return config


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The settings of unscaled RoPE, wherever they are: since transformers 5, ``rope_parameters`` holds what
    ``rope_scaling`` and keys of their own held. Raises RefusedError if two places differ."""
    found: dict[str, Any] = {}
    for place in ("rope_scaling", "rope_parameters"):
        rope = raw.get(place) or {}
        if (
            not isinstance(rope, dict)
            or any(rope.get(key) not in (None, "default") for key in ("type", "rope_type"))
            or any(rope[key] is not None and key not in (*_ROPE_KEYS, "type", "rope_type") for key in rope)
        ):
            raise RefusedError(
                f"config.json: RoPE scaling {rope!r} in {place} is not supported; only unscaled RoPE is"
            )
        for key in _ROPE_KEYS:
            here, elsewhere = rope.get(key), found.get(key, raw.get(key))
            if None not in (here, elsewhere) and here != elsewhere:
                raise RefusedError(
                    f"config.json: {key} is {here!r} in {place}, elsewhere {elsewhere!r}; keep the right one"
                )
            found[key] = elsewhere if here is None else here
    return {key: value for key, value in found.items() if value is not None}


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int:
        raise RefusedError(f"config.json: {key} must be an integer, not {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if type(value) not in (int, float) or abs(value) > 1e30:
        raise RefusedError(f"config.json: {key} must be a number below 1e30, not {value!r}")
    return float(np.float32(value))  # what a bundle and a GGUF file hold


def _tensors(files: _Files) -> dict[str, NDArray[np.float32]]:
    if not files.has(_INDEX):
        return _read_safetensors(files, "model.safetensors")
    weight_map = files.json(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise RefusedError(f"{_INDEX}: weight_map must map tensor names to file names")
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard in ("", "..") or shard != Path(shard).name:
            raise RefusedError(f"{_INDEX}: {shard!r} is no file name; shards must lie in the same directory")
    tensors: dict[str, NDArray[np.float32]] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in _read_safetensors(files, shard).items():
            if weight_map.get(name) != shard:
                raise RefusedError(
                    f"{shard}: tensor {name} is there, but the index has it in {weight_map.get(name)}"
                )
            tensors[name] = tensor
    if missing := weight_map.keys() - tensors.keys():
        name = min(missing)
        raise RefusedError(f"{_INDEX}: tensor {name} is not in {weight_map[name]}")
    return tensors


def _read_safetensors(files: _Files, name: str) -> dict[str, NDArray[np.float32]]:
    try:
        # Checks lengths, dtypes and that the tensors cover the data without gap or overlap.
        entries = safetensors.deserialize(files.bytes(name, _WEIGHTS_LIMIT))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise RefusedError(f"{name} is damaged, download it again: {error}") from None
    return {tensor: _to_f32(f"{name}: tensor {tensor}", entry) for tensor, entry in entries}


def _to_f32(where: str, entry: dict[str, Any]) -> NDArray[np.float32]:
    data, dtype, shape = entry["data"], entry["dtype"], entry["shape"]
    if math.prod(shape) == 0:
        raise RefusedError(f"{where} is empty: shape {tuple(shape)}")
    if dtype == "F32":
        return np.frombuffer(data, "<f4").reshape(shape)
    if dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(shape)
    if dtype == "BF16":  # the upper half of an f32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
    raise RefusedError(f"{where} has dtype {dtype}; supported are F32, F16 and BF16")


def tokenizer_spec(raw: dict[str, Any], *configs: dict[str, Any]) -> TokenizerSpec:
    """The tokenizer of a ``tokenizer.json``, with the ids that config.json and generation_config.json give:
    the last one's bos, and all their end tokens.

    Raises RefusedError if it is none that mxdraft runs.
    """
    model = raw.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise RefusedError("tokenizer.json: only models of type BPE are supported")
    # Settings under which encoding is not what mxdraft does; the value of each that is, other than null.
    for key, supported in {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "byte_fallback": False,
        "ignore_merges": False,
    }.items():
        if model.get(key) not in (None, supported):
            raise RefusedError(f"tokenizer.json: model.{key} {model[key]!r} is not supported")
    if raw.get("normalizer") is not None:
        raise RefusedError("tokenizer.json: a normalizer is not supported")
    post_processor = raw.get("post_processor")
    if post_processor is not None and not _is_byte_level(post_processor):
        raise RefusedError(
            "tokenizer.json: the post-processor is not supported; mxdraft adds nothing to plain text"
        )
    if not _is_byte_level(raw.get("decoder")):
        raise RefusedError("tokenizer.json: only the decoder ByteLevel is supported")

    tokens, special_ids = _tokens(model.get("vocab"), raw.get("added_tokens", []))
    bos = [_ids(config, "bos_token_id") for config in configs]
    return TokenizerSpec(
        tokens=tokens,
        merges=_merges(model.get("merges")),
        special_ids=special_ids,
        bos_id=next((ids[0] for ids in reversed(bos) if ids), None),
        eos_ids=sorted({i for config in configs for i in _ids(config, "eos_token_id")}),
        pre_tokenizer=_pre_tokenizer(raw.get("pre_tokenizer")),
    )


def _with_settings(spec: TokenizerSpec, settings: dict[str, Any]) -> TokenizerSpec:
    """``spec`` with what tokenizer_config.json says about its control tokens. Raises RefusedError."""
    decoder = settings.get("added_tokens_decoder") or {}
    for token in decoder.values():
        _check_added(token, "tokenizer_config.json")
    bos, eos = (named_token(spec, settings.get(key), key) for key in ("bos_token", "eos_token"))
    if bos is not None:
        spec = replace(spec, bos_id=bos)
    return spec if eos is None else spec.with_end(eos, eos_token=eos)


def named_token(spec: TokenizerSpec, value: Any, key: str) -> int | None:
    """The id of the control token that a setting ``key`` names. Raises RefusedError if there is none."""
    name = value.get("content") if isinstance(value, dict) else value
    if name is None or name == "":
        return None
    ids = [i for i in spec.special_ids if spec.tokens[i] == name]
    if not ids:
        raise RefusedError(f"{key} {name!r} is no control token of tokenizer.json")
    return ids[0]


def _check_added(token: Any, where: str) -> None:
    """Refuse an added token around which Hugging Face's tokenizers cut the text in another way."""
    for flag in _CUTTING_FLAGS:
        if isinstance(token, dict) and token.get(flag):
            raise RefusedError(
                f"{where}: added token {token.get('content')!r} has {flag}, which is not supported: "
                "the text around it would get other ids"
            )


def _tokens(vocab: Any, added: Any) -> tuple[list[str], list[int]]:
    """All tokens in order of id, and the ids of the added ones."""
    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise RefusedError("tokenizer.json: model.vocab must be an object and added_tokens an array")
    ids: dict[str, Any] = dict(vocab)
    special_ids: list[int] = []
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise RefusedError(f"tokenizer.json: added token {token!r} has no content")
        content: str = token["content"]
        i: Any = token.get("id")
        if ids.setdefault(content, i) != i:
            raise RefusedError(
                f"tokenizer.json: added token {content!r} has id {i!r}, but {ids[content]!r} in vocab"
            )
        if token.get("special") is not True:
            raise RefusedError(
                f"tokenizer.json: added token {content!r} is not special, which is not supported"
            )
        _check_added(token, "tokenizer.json")
        special_ids.append(i)
    by_id = {i: token for token, i in ids.items() if type(i) is int}
    if len(by_id) != len(ids) or set(by_id) != set(range(len(ids))):
        raise RefusedError(
            f"tokenizer.json: the ids of the {len(ids)} tokens are not 0 to {len(ids) - 1}, each once"
        )
    return [by_id[i] for i in range(len(ids))], sorted(special_ids)


def _merges(raw: Any) -> list[tuple[str, str]]:
    if not isinstance(raw, list):
        raise RefusedError("tokenizer.json: model.merges must be an array")
    merges: list[tuple[str, str]] = []
    for rank, merge in enumerate(raw):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(token, str) for token in pair):
            raise RefusedError(f"tokenizer.json: merge {rank} {merge!r} is not two tokens")
        merges.append((pair[0], pair[1]))
    return merges


def _ids(raw: dict[str, Any], key: str) -> list[int]:
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise RefusedError(f"config.json or generation_config.json: {key} {value!r} is no token id")
    return sorted(set(ids))


def _pre_tokenizer(raw: Any) -> PreTokenizer:
    steps = raw.get("pretokenizers") if isinstance(raw, dict) else None
    if isinstance(steps, list):
        canonical = raw | {"pretokenizers": [_canonical(step) for step in steps]}
    else:
        canonical = _canonical(raw)
    for name, written in PRE_TOKENIZERS.items():
        if canonical == written:
            return name
    raise RefusedError(
        f"tokenizer.json: pre_tokenizer {json.dumps(raw)[:200]} is not supported; only prefix-less ByteLevel "
        "is, alone or after individual Digits"
    )


def _canonical(step: Any) -> Any:
    # As PRE_TOKENIZERS writes it: the default filled in, and levelled what moves offsets only.
    return {"use_regex": True} | step | {"trim_offsets": True} if _is_byte_level(step) else step


def _is_byte_level(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "ByteLevel"
