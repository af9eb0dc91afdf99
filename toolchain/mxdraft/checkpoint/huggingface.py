# SPDX-License-Identifier: Apache-2.0
"""Directories as Hugging Face's libraries write them: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from mxdraft.checkpoint.model import Checkpoint, ModelConfig, check_checkpoint, check_config, fit_vocabulary
from mxdraft.checkpoint.tokenizer import (
    PRE_TOKENIZERS,
    SPACE_DECODER,
    SPACE_MARKERS,
    PreTokenizer,
    TokenizerSpec,
)
from mxdraft.errors import RefusedError
from mxdraft.files import as_text, parse_json_object, parsing, read_file

_INDEX = "model.safetensors.index.json"
_JSON_LIMIT, _TOKENIZER_LIMIT, _WEIGHTS_LIMIT = 16 << 20, 64 << 20, 1 << 40  # bytes of a file
_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
# What tokenizers can be told about an added token that changes where the text around it is cut.
_CUTTING_FLAGS = ("lstrip", "rstrip", "single_word")
_SPLIT_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


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
        settings = files.json("tokenizer_config.json") if files.has("tokenizer_config.json") else {}
        generation = files.json("generation_config.json") if files.has("generation_config.json") else {}
        raw_tokenizer = files.json("tokenizer.json", _TOKENIZER_LIMIT)
        # What is cheap to read is refused before the weights are read, and all of it at once.
        config, spec, template = _all_of(
            lambda: _config(raw_config),
            lambda: with_settings(tokenizer_spec(raw_tokenizer, raw_config, generation), settings),
            lambda: _template(files, settings),
        )
        tensors = _tensors(files)
        checkpoint = Checkpoint(
            config=config,
            tensors=tensors,
            tokenizer=spec,
            chat_template=template,
            source=f"Hugging Face directory {as_text(directory.name)}",
            source_sha256=files.sha256(),
        )
        checkpoint = fit_vocabulary(checkpoint)
        check_checkpoint(checkpoint)
        return checkpoint


def _all_of(
    config: Callable[[], ModelConfig],
    tokenizer: Callable[[], TokenizerSpec],
    template: Callable[[], str | None],
) -> tuple[ModelConfig, TokenizerSpec, str | None]:
    """What the three return. Raises RefusedError with all that is wrong with any of them."""
    results: list[Any] = []
    reasons: list[str] = []
    for read in (config, tokenizer, template):
        try:
            results.append(read())
        except RefusedError as error:
            reasons.append(str(error))
    if reasons:
        raise RefusedError("; ".join(reasons))
    return results[0], results[1], results[2]


def _template(files: _Files, settings: dict[str, Any]) -> str | None:
    if files.has("chat_template.jinja"):
        return files.text("chat_template.jinja")
    template = settings.get("chat_template")
    if not isinstance(template, str | None):
        raise RefusedError("tokenizer_config.json: chat_template must be one text; keep only the default one")
    return template


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
    supported = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "auto_map": None,
        "architectures": ["LlamaForCausalLM"],
    }
    reasons = [
        f"config.json: {key} {raw[key]!r} is not supported; only {value!r} is"
        for key, value in supported.items()
        if raw.get(key) not in (None, value)
    ]
    if reasons:
        raise RefusedError("; ".join(reasons))
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
    kind, reasons = _kind(raw, model)
    # Settings under which encoding is not what mxdraft does; the value of each that is, other than null.
    for key, supported in {
        "dropout": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    }.items():
        if model.get(key) not in (None, supported):
            reasons.append(f"model.{key} {model[key]!r} is not supported")
    marked = kind in SPACE_MARKERS
    if not marked and model.get("unk_token") is not None:
        reasons.append(f"model.unk_token {model['unk_token']!r} is not supported")
    if bool(model.get("byte_fallback")) != marked:
        reasons.append(f"model.byte_fallback {model.get('byte_fallback')!r} is not supported here")
    first, post_reason = _post_processor(raw.get("post_processor"))
    normalizer = raw.get("normalizer")
    tokens, special_ids, added_ids, token_reasons = _tokens(
        model.get("vocab"), raw.get("added_tokens", []), normalizer is not None
    )
    reasons += post_reason + token_reasons
    if reasons:
        raise RefusedError("tokenizer.json: " + "; ".join(reasons))

    bos_ids = [_ids(config, "bos_token_id") for config in configs]
    bos = next((ids[0] for ids in reversed(bos_ids) if ids), None)
    if first is not None and bos not in (None, first):
        raise RefusedError(f"tokenizer.json puts token {first} before a text, but bos_token_id is {bos}")
    return TokenizerSpec(
        tokens=tokens,
        merges=_merges(model.get("merges")),
        special_ids=special_ids,
        bos_id=bos if first is None else first,
        eos_ids=sorted({i for config in configs for i in _ids(config, "eos_token_id")}),
        pre_tokenizer=kind or "gpt2",
        added_ids=added_ids,
        whole_words=bool(model.get("ignore_merges")),
        nfc=not marked and normalizer is not None,
        adds_bos=first is not None,
    )


def _kind(raw: dict[str, Any], model: dict[str, Any]) -> tuple[PreTokenizer | None, list[str]]:
    """Which pre-tokenizer it is, or why it is none that mxdraft runs."""
    normalizer, pre_tokenizer, decoder = (raw.get(k) for k in ("normalizer", "pre_tokenizer", "decoder"))
    if model.get("byte_fallback"):
        if pre_tokenizer == _SPLIT_AT_SPACES:  # after the normalizer there are none
            pre_tokenizer = None
        for marked, (normal, pre) in SPACE_MARKERS.items():
            if normalizer == normal and pre_tokenizer == pre:
                return marked, [] if _is_space_decoder(decoder) else ["the decoder is not supported"]
        written = json.dumps([normalizer, pre_tokenizer])[:300]
        return None, [f"normalizer and pre_tokenizer {written} are not supported next to byte_fallback"]
    reasons: list[str] = []
    if normalizer not in (None, {"type": "NFC"}):
        reasons.append(f"a normalizer is not supported but NFC: {json.dumps(normalizer)[:200]}")
    if not _is_byte_level(decoder):
        reasons.append("only the decoder ByteLevel is supported")
    name, pre_reasons = _pre_tokenizer(pre_tokenizer)
    return name, reasons + pre_reasons


def _is_space_decoder(decoder: Any) -> bool:
    """Whether tokens become text as in SPACE_DECODER; that a text's first space is cut off is not done."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) else None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return steps in (SPACE_DECODER["decoders"], [*SPACE_DECODER["decoders"], strip]) or (
        isinstance(decoder, dict) and decoder.get("type") == "Metaspace"
    )


def _post_processor(raw: Any) -> tuple[int | None, list[str]]:
    """The id put before every text, if any, or why the post-processor is not supported."""
    steps = [raw]
    if isinstance(raw, dict) and raw.get("type") == "Sequence":
        steps = raw.get("processors") or []
    first: list[int] = []
    for step in steps:
        if step is None or _is_byte_level(step):
            continue
        ids = _template_ids(step)
        if ids is None or len(ids) > 1:
            return None, ["the post-processor is not supported; mxdraft adds at most one token before a text"]
        first += ids
    if len(first) > 1:
        return None, ["the post-processor puts several tokens before a text, which is not supported"]
    return (first[0] if first else None), []


def _template_ids(step: Any) -> list[int] | None:
    """The ids that a TemplateProcessing puts before the text; None if it does anything else."""
    if not isinstance(step, dict) or step.get("type") != "TemplateProcessing":
        return None
    single, known = step.get("single"), step.get("special_tokens")
    if not isinstance(single, list) or not isinstance(known, dict):
        return None
    if not single or not isinstance(single[-1], dict) or single[-1].get("Sequence", {}).get("id") != "A":
        return None
    ids: list[int] = []
    for part in single[:-1]:
        token = known.get(part.get("SpecialToken", {}).get("id")) if isinstance(part, dict) else None
        if not isinstance(token, dict) or not all(type(i) is int for i in token.get("ids", [None])):
            return None
        ids += token["ids"]
    return ids


def with_settings(spec: TokenizerSpec, settings: dict[str, Any]) -> TokenizerSpec:
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
    if reasons := _cutting(token):
        raise RefusedError(f"{where}: {reasons[0]}")


def _cutting(token: Any) -> list[str]:
    return [
        f"added token {token.get('content')!r} has {flag}, which is not supported: "
        "the text around it would get other ids"
        for flag in _CUTTING_FLAGS
        if isinstance(token, dict) and token.get(flag)
    ]


def _tokens(vocab: Any, added: Any, normalizes: bool) -> tuple[list[str], list[int], list[int], list[str]]:
    """All tokens in order of id, the ids of control tokens and of other added ones, and what is wrong.

    ``normalizes``: whether there is a normalizer, which text must not pass before a token is cut out.
    """
    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise RefusedError("tokenizer.json: model.vocab must be an object and added_tokens an array")
    ids: dict[str, Any] = dict(vocab)
    special_ids: list[int] = []
    added_ids: list[int] = []
    reasons: list[str] = []
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise RefusedError(f"tokenizer.json: added token {token!r} has no content")
        content: str = token["content"]
        i: Any = token.get("id")
        if ids.setdefault(content, i) != i:
            raise RefusedError(
                f"tokenizer.json: added token {content!r} has id {i!r}, but {ids[content]!r} in vocab"
            )
        special = token.get("special") is True
        if not special and normalizes and token.get("normalized", True):
            reasons.append(
                f"added token {content!r} is looked for in normalized text, which is not supported"
            )
        reasons += _cutting(token)
        (special_ids if special else added_ids).append(i)
    by_id = {i: token for token, i in ids.items() if type(i) is int}
    if len(by_id) != len(ids) or set(by_id) != set(range(len(ids))):
        raise RefusedError(
            f"tokenizer.json: the ids of the {len(ids)} tokens are not 0 to {len(ids) - 1}, each once"
        )
    return [by_id[i] for i in range(len(ids))], sorted(special_ids), sorted(added_ids), reasons


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


def _pre_tokenizer(raw: Any) -> tuple[PreTokenizer | None, list[str]]:
    steps = raw.get("pretokenizers") if isinstance(raw, dict) else None
    if isinstance(steps, list):
        canonical = raw | {"pretokenizers": [_canonical(step) for step in steps]}
    else:
        canonical = _canonical(raw)
    for name, written in PRE_TOKENIZERS.items():
        if canonical == written:
            return name, []
    return None, [
        f"pre_tokenizer {json.dumps(raw)[:400]} is not supported; only those of GPT-2, SmolLM, Llama 3 and "
        "Qwen2 are"
    ]


def _canonical(step: Any) -> Any:
    # As PRE_TOKENIZERS writes it: the default filled in, and levelled what moves offsets only.
    return {"use_regex": True} | step | {"trim_offsets": True} if _is_byte_level(step) else step


def _is_byte_level(step: Any) -> bool:
    return isinstance(step, dict) and step.get("type") == "ByteLevel"
