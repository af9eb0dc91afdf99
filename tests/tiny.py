# SPDX-License-Identifier: Apache-2.0
"""Fixture T: a seeded Llama-family model of about a million parameters, with a tokenizer of its own.

Its dimensions differ from each other and from the real model's: odd numbers of MX blocks, heads of 32, a
query width other than the hidden width, a vocabulary that does not fill its last tile. Equal seeds give equal
bits on every machine and numpy: only raw integers are drawn.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.format import F32, MXFP4T, required_draft_tensors
from mxdraft.bundle.ngrams import ngram_section
from mxdraft.bundle.schedule import Schedule
from mxdraft.checkpoint import (
    BYTE_ALPHABET,
    Checkpoint,
    Dimensions,
    ModelConfig,
    PreTokenizer,
    TokenizerSpec,
    expected_tensors,
    tokenizer_json,
)
from mxdraft.mx import quantize
from mxdraft.train.drafter import TrainedDrafter, add_drafter
from numpy.typing import NDArray

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny model made for tests<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What the tokenizer's merges are learned from.
CORPUS = """
The small boat left the harbour before the sun was up. Nobody on the quay had seen who was rowing, but
everybody agreed that the rowing was good: long, even strokes, with hardly a sound. When the light came, the
boat was a dark point between two bands of grey, and then it was not there any more. It came back in the
evening. There were three people in it now, and a box, and the people who had stood on the quay in the
morning stood there again and asked what was in the box. "Bread," said the first. "Letters," said the
second. The third said nothing, because the third was asleep. They carried the box up the hill to the house
with the green door, where the old teacher lived. She opened it on the kitchen table. There was bread in it,
and there were letters; and under the letters there was a clock that was still going. It said ten minutes
past four, which was wrong, but it said it with such confidence that the teacher looked out of the window to
see whether the sun would not agree. "Whose is this?" she asked. "We thought it was yours," they answered.
"It has your name on the back." So it had. She turned the clock over, and read the name again, and another
word after it that none of the others could read; then she put the clock on the shelf over the stove, where
it has been ever since. It is still wrong.
def count(words):
    total = {}
    for word in words:
        total[word] = total.get(word, 0) + 1
    return total
"""


def checkpoint(seed: int = 0, pre_tokenizer: PreTokenizer = "smollm", **overrides: Any) -> Checkpoint:
    """Fixture T; ``overrides`` replace fields of its ModelConfig (``tied=False`` adds a head)."""
    dimensions: dict[str, Any] = {
        "hidden": 160,
        "layers": 4,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "ffn": 288,
        "vocab": 500,
        "max_positions": 256,
        "rms_eps": float(np.float32(1e-5)),
        "rope_theta": 10000.0,
        "tied": True,
    }
    config = ModelConfig(**(dimensions | overrides))
    raw = np.random.PCG64(seed)
    return Checkpoint(
        config=config,
        tensors={name: _tensor(raw, name, shape) for name, shape in expected_tensors(config).items()},
        tokenizer=tokenizer(config.vocab, pre_tokenizer),
        chat_template=CHAT_TEMPLATE,
        source=f"fixture T, seed {seed}",
        source_sha256="0" * 64,
    )


def drafter(config: Dimensions, seed: int = 1, feature_layers: tuple[int, ...] = (1, 2, 4)) -> TrainedDrafter:
    """A drafter of fixture T with seeded weights, whose guesses are worth nothing."""
    raw = np.random.PCG64(seed)
    ids = np.arange(48, dtype=np.uint32) * np.uint32(10) + np.uint32(3)
    planes, norms = {}, {}
    for name, dtype, shape in required_draft_tensors(config, len(feature_layers), len(ids)):
        if dtype == MXFP4T:
            planes[name] = quantize(_tensor(raw, name, shape), "mxfp4", "search")
        elif dtype == F32:
            norms[name] = _tensor(raw, name, shape[1:])
    calibration = ((0.75, 1.25), (0.5, 2.0))
    return TrainedDrafter(feature_layers, planes, norms, ids, calibration, "0" * 64, {})


def with_ngrams(bundle: bytes, documents: list[list[int]]) -> bytes:
    """A bundle with the n-gram table of some documents after its own sections."""
    file, writer = _copy(bundle)
    writer.add("draft.ngrams", [ngram_section([np.array(ids, np.uint32) for ids in documents])])
    writer.seal()
    return file.getvalue()


def with_schedule(bundle: bytes, schedule: Schedule) -> bytes:
    """A bundle with the settings of the dynamic origin after its own sections."""
    file, writer = _copy(bundle)
    writer.add("schedule", [schedule.pack()])
    writer.seal()
    return file.getvalue()


def with_drafter(bundle: bytes, drafter: TrainedDrafter) -> bytes:
    """A bundle with the sections of a drafter after its own."""
    parsed = Bundle(bundle)
    file, writer = _copy(bundle)
    add_drafter(writer, drafter, parsed.config)
    writer.seal()
    return file.getvalue()


def _copy(bundle: bytes) -> tuple[io.BytesIO, BundleWriter]:
    """A bundle under work with the sections of a finished one."""
    file = io.BytesIO()
    writer = BundleWriter(file)
    parsed = Bundle(bundle)
    for name in parsed.sections:
        writer.add(name, [parsed.section(name).tobytes()])
    return file, writer


def tokenizer(vocab: int = 500, pre_tokenizer: PreTokenizer = "smollm") -> TokenizerSpec:
    """Three control tokens, the 256 bytes, and merges learned from CORPUS up to ``vocab`` tokens."""
    merges = _learn_merges(vocab - 256 - len(SPECIAL_TOKENS))
    return TokenizerSpec(
        tokens=[*SPECIAL_TOKENS, *BYTE_ALPHABET, *(left + right for left, right in merges)],
        merges=list(merges),
        special_ids=[0, 1, 2],
        bos_id=1,
        eos_ids=[0, 2],
        pre_tokenizer=pre_tokenizer,
    )


def save_huggingface(
    checkpoint: Checkpoint, directory: Path, shards: int = 1, dtype: Literal["f32", "f16", "bf16"] = "f32"
) -> None:
    """Write ``checkpoint`` into ``directory`` the way Hugging Face's libraries save a Llama model."""
    config = checkpoint.config
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "bos_token_id": checkpoint.tokenizer.bos_id,
            "eos_token_id": checkpoint.tokenizer.eos_ids,
            "hidden_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.ffn,
            "vocab_size": config.vocab,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.rms_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tied,
        },
    )
    (directory / "tokenizer.json").write_text(tokenizer_json(checkpoint.tokenizer), encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", {"chat_template": checkpoint.chat_template})
    names = list(checkpoint.tensors)
    if shards == 1:
        save_safetensors(directory / "model.safetensors", checkpoint.tensors, dtype)
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_safetensors(directory / file, {n: checkpoint.tensors[n] for n in names[i::shards]}, dtype)
        weight_map |= dict.fromkeys(names[i::shards], file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def save_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]], dtype: str = "f32") -> None:
    """Write one safetensors file: u64 header length, JSON header, tensor bytes."""
    numpy_dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        pieces.append(tensor.astype(numpy_dtype).tobytes())
        start, end = end, end + len(pieces[-1])
        header[name] = {"dtype": dtype.upper(), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode("utf-8")
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))


def _tensor(raw: np.random.PCG64, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    # 24 random bits make a float32 in [-1, 1) exactly.
    bits = (raw.random_raw(math.prod(shape)) >> np.uint64(40)).astype(np.float32)
    uniform = (bits * np.float32(2.0**-23) - np.float32(1)).reshape(shape)
    if name.endswith("norm.weight"):
        return np.float32(1) + uniform * np.float32(0.25)
    # The embedding is small compared with what the layers add, else a tied head would repeat the last token.
    deviation = 1.5 / math.sqrt(shape[1]) if "_proj." in name else 0.25
    return uniform * np.float32(deviation * math.sqrt(3))


@cache
def _learn_merges(count: int) -> tuple[tuple[str, str], ...]:
    words = Counter(
        tuple(BYTE_ALPHABET[b] for b in word.encode("utf-8"))
        for word in re.findall(r" ?\w+| ?[^\w\s]+|\s+", CORPUS)
    )
    merges: list[tuple[str, str]] = []
    known = set(BYTE_ALPHABET)
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, frequency in words.items():
            for pair in pairwise(word):
                pairs[pair] += frequency
        # A token is made by one merge only; ties go to the pair that sorts first.
        left, right = min((p for p in pairs if p[0] + p[1] not in known), key=lambda p: (-pairs[p], p))
        merges.append((left, right))
        known.add(left + right)
        words = Counter({_merge(word, left, right): frequency for word, frequency in words.items()})
    return tuple(merges)


def _merge(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    merged: list[str] = []
    for token in word:
        if token == right and merged and merged[-1] == left:
            merged[-1] = left + right
        else:
            merged.append(token)
    return tuple(merged)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
