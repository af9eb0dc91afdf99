# SPDX-License-Identifier: Apache-2.0
"""A plain Llama in torch whose linear layers can read their weights through MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from mxdraft import mx
from mxdraft.checkpoint import ModelConfig, ModelWeights
from mxdraft.checkpoint.reference import rope_tables
from mxdraft.mx import MXTensor
from mxdraft.train.fakequant import MXLinear, fake_quant_activations

Quantizer = Callable[[Tensor], Tensor]
Rope = tuple[Tensor, Tensor]
Chain = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention over whole sequences [B, T, hidden].

    With ``chain``, a list of the keys and values of earlier draft steps, to which this step's are added, row
    t is the last of a chain that starts at t: it sees rows 0 … t of the first step, and of each later step,
    this one included, row t alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = MXLinear(config.heads * config.head_dim, config.hidden)
        self.k_proj = MXLinear(config.kv_heads * config.head_dim, config.hidden)
        self.v_proj = MXLinear(config.kv_heads * config.head_dim, config.hidden)
        self.o_proj = MXLinear(config.hidden, config.heads * config.head_dim)

    def forward(self, x: Tensor, rope: Rope, quantize: Quantizer, chain: Chain | None = None) -> Tensor:
        x = quantize(x)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = [*(chain or []), (_rotate(k, rope), v)]
        keys, values = (torch.cat(parts, 2) for parts in zip(*steps, strict=True))
        mask = None if len(steps) == 1 else _chain_mask(x.shape[1], len(steps), x.device)
        attend = _attention_by_products if mask is None and _bf16_on_cpu(x) else _attention
        y = attend(_rotate(q, rope), keys, values, mask)
        if chain is not None:
            chain.append(steps[-1])
        return cast(Tensor, self.o_proj(quantize(y.transpose(1, 2).flatten(2))))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = MXLinear(config.ffn, config.hidden)
        self.up_proj = MXLinear(config.ffn, config.hidden)
        self.down_proj = MXLinear(config.hidden, config.ffn)

    def forward(self, x: Tensor, quantize: Quantizer) -> Tensor:
        x = quantize(x)
        return cast(Tensor, self.down_proj(quantize(F.silu(self.gate_proj(x)) * self.up_proj(x))))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: Rope, quantize: Quantizer, chain: Chain | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, quantize, chain)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x), quantize))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)


class MXModule(nn.Module):
    """A module whose linear layers can read their weights through MXFP4."""

    def linears(self) -> dict[str, MXLinear]:
        """List the quantizable layers by their weight's name, in order of execution."""
        return {f"{name}.weight": m for name, m in self.named_modules() if isinstance(m, MXLinear)}

    def norms(self) -> dict[str, nn.Parameter]:
        """List the norms by their weight's name."""
        return {f"{name}.weight": m.weight for name, m in self.named_modules() if isinstance(m, RMSNorm)}

    def planes(self) -> dict[str, MXTensor]:
        """Return the MXFP4 planes that ship."""
        return {name: linear.mx() for name, linear in self.linears().items()}

    def norm_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the norms that ship."""
        return {name: norm.detach().float().cpu().numpy() for name, norm in self.norms().items()}

    def load_weights(self, state: dict[str, Tensor], quantized: bool) -> None:
        """Take over a checkpoint's weights; ``quantized``: they are latents that come with scales."""
        for name, linear in self.linears().items():
            linear.scale = state[name.removesuffix("weight") + "scale"] if quantized else None
        self.load_state_dict(state)


class Llama(MXModule):
    """Everything of a causal language model but the last product: tokens to normed hidden states.

    Parameters are named as Hugging Face names them. ``embedding`` and ``head`` [vocab, hidden] are frozen,
    already rounded to MXINT8 as in the bundle, and shared with the teacher. With ``int8_activations`` every
    matrix product reads int8 rows, as the runtime's base precision does.
    """

    embedding: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, weights: ModelWeights, int8_activations: bool = False) -> None:
        super().__init__()
        self.config = config = weights.config
        self.quantize: Quantizer = fake_quant_activations if int8_activations else _identity
        self.model = Decoder(config)
        tables = rope_tables(config, config.max_positions)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)
        embedding = _through_mxint8(weights, "model.embed_tokens.weight")
        head = embedding if config.tied else _through_mxint8(weights, "lm_head.weight")
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(weights.tensors[name]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states [B, T, hidden], as the head reads them, of int64 tokens [B, T]."""
        (residual,) = self.residuals(tokens, (len(self.model.layers),))
        return self.read_by_head(residual)

    def residuals(self, tokens: Tensor, after: Collection[int]) -> list[Tensor]:
        """Return residual streams [B, T, hidden] after each layer count in ``after``, in ascending order."""
        x = F.embedding(tokens, self.embedding)
        rope = self.rope(0, tokens.shape[1])
        kept = []
        for count, layer in enumerate(self.model.layers, start=1):
            x = layer(x, rope, self.quantize)
            if count in after:
                kept.append(x)
        return kept

    def read_by_head(self, residual: Tensor) -> Tensor:
        """Return what the head reads of the last layer's residual stream."""
        return self.quantize(self.model.norm(residual))

    def rope(self, first: int, count: int) -> Rope:
        """Return cosine and sine [count, head_dim/2] of positions from ``first`` on."""
        return self.cos[first : first + count], self.sin[first : first + count]


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Mix values [B, heads, T, head_dim]; causal where there is no ``mask``."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def _attention_by_products(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:  # noqa: ARG001
    """Mix causally by products written out: torch's fused attention takes twice as long in bf16 on a CPU."""
    batch, kv_heads, length, width = k.shape
    q = q.reshape(batch, kv_heads, -1, width)  # the heads of a group one after another
    scores = (q @ k.transpose(2, 3)).float().view(batch, -1, length, length) * width**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
    return (weights.view(batch, kv_heads, -1, length) @ v).view(batch, -1, length, width)


def _bf16_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _chain_mask(length: int, steps: int, device: torch.device) -> Tensor:
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([torch.ones_like(own).tril(), *[own] * (steps - 1)], 1)


def _identity(x: Tensor) -> Tensor:
    return x


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _through_mxint8(weights: ModelWeights, name: str) -> Tensor:
    return torch.from_numpy(mx.dequantize(mx.quantize(weights.tensors[name], "mxint8")))
