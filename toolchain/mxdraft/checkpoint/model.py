# SPDX-License-Identifier: Apache-2.0
"""The one form in which weights are held in memory, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mxdraft.checkpoint.tokenizer import TokenizerSpec, check_tokenizer
from mxdraft.errors import RefusedError
from mxdraft.mx import BLOCK


@dataclass(frozen=True)
class Dimensions:
    """What every file that holds a decoder says of it, in the order of a bundle's ``target.config``."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rms_eps: float


@dataclass(frozen=True)
class ModelConfig(Dimensions):
    """A Llama-family decoder: no biases, SiLU-gated feed-forward, unscaled RoPE."""

    rope_theta: float
    tied: bool  # the head is the embedding matrix


@dataclass(frozen=True)
class ModelWeights:
    """What a decoder computes with. ``tensors``: f32, shapes [out, in], under Hugging Face's names and for
    its rotate-half RoPE; exactly those of ``expected_tensors(config)``."""

    config: ModelConfig
    tensors: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Checkpoint(ModelWeights):
    """Weights with everything needed to run them.

    ``chat_template``: Jinja source. ``source``: where it came from, for people; ``source_sha256``:
    hexadecimal, of the file, or of the list of files (see ``load_huggingface``).
    """

    tokenizer: TokenizerSpec
    chat_template: str | None
    source: str
    source_sha256: str


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that ``config`` asks for, in order of execution."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        shapes |= layer_tensors(config, layer)
    shapes["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    return shapes


def layer_tensors(config: Dimensions, layer: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a layer, in order of execution."""
    hidden, ffn = config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def check_dimensions(config: Dimensions) -> None:
    """Raise RefusedError for dimensions that a bundle cannot hold (runtime/BUNDLE.md, ``target.config``)."""
    limits = {
        "hidden": 1 << 16,
        "layers": 1024,
        "heads": 1024,
        "kv_heads": 1024,
        "head_dim": 256,
        "ffn": 1 << 16,
        "vocab": 1 << 20,
        "max_positions": 1 << 20,
    }
    for name, limit in limits.items():
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise RefusedError(f"config: {name} is {value}; supported are 1 to {limit}")
    for name, value in {
        "hidden": config.hidden,
        "ffn": config.ffn,
        "heads x head_dim": config.heads * config.head_dim,
    }.items():
        if value % BLOCK:
            raise RefusedError(f"config: {name} is {value}, not a multiple of {BLOCK}, the MX block")
    if config.heads % config.kv_heads:
        raise RefusedError(
            f"config: {config.heads} heads cannot share {config.kv_heads} key/value heads evenly"
        )
    if config.head_dim % 2:
        raise RefusedError(f"config: head_dim is {config.head_dim}; RoPE needs an even number")
    if not 0 < config.rms_eps < 1:
        raise RefusedError(f"config: rms_eps is {config.rms_eps}, not between 0 and 1")


def check_config(config: ModelConfig) -> None:
    """Raise RefusedError for a decoder that neither the exported graphs nor a bundle can hold."""
    check_dimensions(config)
    if not 1 <= config.rope_theta < float("inf"):
        raise RefusedError(f"config: rope_theta is {config.rope_theta}, not a finite number of at least 1")


def fit_vocabulary(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with as many rows in embedding and head as its tokenizer has tokens.

    Rows after the last token are padding, which a model could still choose: they are cut. Control tokens at
    the end that have no row are dropped, for no text makes them; other tokens are left, to be refused.
    """
    spec, vocab = checkpoint.tokenizer, checkpoint.config.vocab
    count = len(spec.tokens)
    if count > vocab:
        needed = {*spec.eos_ids, *(i for i in (spec.bos_id, spec.eos_token_id) if i is not None)}
        surplus = set(range(vocab, count))
        if vocab < 1 or not surplus <= set(spec.special_ids) - needed:
            return checkpoint
        special = [i for i in spec.special_ids if i < vocab]
        return replace(checkpoint, tokenizer=replace(spec, tokens=spec.tokens[:vocab], special_ids=special))
    tables = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in checkpoint.tensors]
    if not 1 <= count < vocab or any(checkpoint.tensors[name].shape[:1] != (vocab,) for name in tables):
        return checkpoint
    cut = {name: checkpoint.tensors[name][:count] for name in tables}
    config = replace(checkpoint.config, vocab=count)
    return replace(checkpoint, tensors=checkpoint.tensors | cut, config=config)


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Raise RefusedError unless config, tensors and tokenizer are sound and agree with each other.

    The vocabulary has one size: config, embedding and tokenizer must agree (``fit_vocabulary``).
    """
    check_config(checkpoint.config)
    check_tokenizer(checkpoint.tokenizer)
    vocab = checkpoint.config.vocab
    if len(checkpoint.tokenizer.tokens) != vocab:
        raise RefusedError(
            f"the tokenizer has {len(checkpoint.tokenizer.tokens)} tokens, the model {vocab}: "
            "they do not belong together"
        )
    expected = expected_tensors(checkpoint.config)
    if "lm_head.weight" in checkpoint.tensors and checkpoint.config.tied:
        raise RefusedError("the config ties the head to the embedding, yet lm_head.weight is there")
    if missing := expected.keys() - checkpoint.tensors.keys():
        raise RefusedError(f"tensor {min(missing)} is missing ({len(missing)} in all)")
    if extra := checkpoint.tensors.keys() - expected.keys():
        raise RefusedError(f"tensor {min(extra)} is none of a Llama model's ({len(extra)} such in all)")
    for name, shape in expected.items():
        tensor = checkpoint.tensors[name]
        if tensor.shape != shape:
            raise RefusedError(f"tensor {name} has shape {tensor.shape}; the config asks for {shape}")
        finite = np.isfinite(tensor)
        if not finite.all():
            index = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise RefusedError(f"tensor {name} holds {tensor[index]} at index {index}; the file is damaged")
