# SPDX-License-Identifier: Apache-2.0
"""The teacher: a plain numpy forward pass of an unquantized checkpoint, against which quality is measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mxdraft.checkpoint import Checkpoint, ModelConfig

F32 = NDArray[np.float32]


def rope_tables(config: ModelConfig, positions: int) -> tuple[F32, F32]:
    """Compute cosine and sine [positions, head_dim/2] of position x rope_theta**(-2i/head_dim), in binary64
    and rounded once."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angle = np.arange(positions)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class Teacher:
    """Logits of a Llama-family checkpoint in f32, all positions of one sequence at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._head = checkpoint.tensors["model.embed_tokens.weight" if self.config.tied else "lm_head.weight"]

    def hidden(self, ids: NDArray[np.integer], observe: Callable[[str, F32], None] | None = None) -> F32:
        """Return final normed hidden states [n, hidden] of token ids [n], positions from 0.

        ``observe`` is given what the layers' products read, [n, width]: the inputs of q, k, v under the name
        of q_proj, those of gate and up under that of gate_proj, and those of o_proj and down_proj; also the
        residual streams, under the names of what writes them: the embedding and each layer.
        """
        observe = observe or _ignore
        config = self.config
        cos, sin = rope_tables(config, len(ids))
        x = self._tensors["model.embed_tokens.weight"][ids]
        observe("model.embed_tokens", x)
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}."
            weight = {
                name.removeprefix(prefix).removesuffix(".weight"): tensor
                for name, tensor in self._tensors.items()
                if name.startswith(prefix)
            }
            h = self._norm(x, weight["input_layernorm"])
            observe(prefix + "self_attn.q_proj", h)
            q = _rotate(_heads(h @ weight["self_attn.q_proj"].T, config.heads), cos, sin)
            k = _rotate(_heads(h @ weight["self_attn.k_proj"].T, config.kv_heads), cos, sin)
            v = _heads(h @ weight["self_attn.v_proj"].T, config.kv_heads)
            mixed = _attention(q, k, v)
            observe(prefix + "self_attn.o_proj", mixed)
            x = x + mixed @ weight["self_attn.o_proj"].T
            h = self._norm(x, weight["post_attention_layernorm"])
            observe(prefix + "mlp.gate_proj", h)
            gate = h @ weight["mlp.gate_proj"].T
            inner = gate / (1 + np.exp(-gate)) * (h @ weight["mlp.up_proj"].T)
            observe(prefix + "mlp.down_proj", inner)
            x = x + inner @ weight["mlp.down_proj"].T
            observe(prefix.removesuffix("."), x)
        return self._norm(x, self._tensors["model.norm.weight"])

    def logits(self, ids: NDArray[np.integer]) -> F32:
        """Return logits [n, vocab] of token ids [n]."""
        return self.hidden(ids) @ self._head.T

    def _norm(self, x: F32, weight: F32) -> F32:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(self.config.rms_eps)) * weight
        return normed


def _ignore(name: str, inputs: F32) -> None:
    """Observe nothing."""


def _heads(x: F32, heads: int) -> F32:
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)  # [heads, n, head_dim]


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(q: F32, k: F32, v: F32) -> F32:
    group = len(q) // len(k)
    n, head_dim = q.shape[1:]
    scores = q @ np.repeat(k, group, axis=0).transpose(0, 2, 1) / np.float32(np.sqrt(head_dim))
    scores = np.where(np.tri(n, dtype=bool), scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(v, group, axis=0)
    joined: F32 = mixed.transpose(1, 0, 2).reshape(n, -1)
    return joined
