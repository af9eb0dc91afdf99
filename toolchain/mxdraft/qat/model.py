"""A plain Llama in torch whose linear layers can read their weights through MXFP4."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxdraft import mx
from mxdraft.checkpoint import Checkpoint, ModelConfig
from mxdraft.qat.fakequant import MXLinear, fake_quant_activations

Quantizer = Callable[[Tensor], Tensor]
Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention over whole sequences [B, T, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = MXLinear(config.heads * config.head_dim, config.hidden)
        self.k_proj = MXLinear(config.kv_heads * config.head_dim, config.hidden)
        self.v_proj = MXLinear(config.kv_heads * config.head_dim, config.hidden)
        self.o_proj = MXLinear(config.hidden, config.heads * config.head_dim)

    def forward(self, x: Tensor, rope: Rope, quantize: Quantizer) -> Tensor:
        x = quantize(x)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(
            _rotate(q, rope), _rotate(k, rope), v, is_causal=True, enable_gqa=True
        )
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

    def forward(self, x: Tensor, rope: Rope, quantize: Quantizer) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, quantize)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x), quantize))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps)


class Llama(nn.Module):
    """Everything of a causal language model but the last product: tokens to normed hidden states.

    Parameters are named as Hugging Face names them. ``embedding`` and ``head`` [vocab, hidden] are frozen,
    already rounded to MXINT8 as in the bundle, and shared with the teacher. With ``int8_activations`` every
    matrix product reads int8 rows, as the runtime's base precision does.
    """

    embedding: Tensor
    head: Tensor
    frequency: Tensor

    def __init__(self, checkpoint: Checkpoint, int8_activations: bool = False) -> None:
        super().__init__()
        config = checkpoint.config
        self.quantize: Quantizer = fake_quant_activations if int8_activations else _identity
        self.model = Decoder(config)
        frequency = config.rope_theta ** (
            -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        self.register_buffer("frequency", frequency, persistent=False)
        embedding = _through_mxint8(checkpoint, "model.embed_tokens.weight")
        head = embedding if config.tied else _through_mxint8(checkpoint, "lm_head.weight")
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(checkpoint.tensors[name]))

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, T, hidden], as the head reads them, of int64 tokens [B, T]."""
        x = F.embedding(tokens, self.embedding)
        position = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float64)
        angle = torch.outer(position, self.frequency)
        rope = angle.cos().float(), angle.sin().float()
        for layer in self.model.layers:
            x = layer(x, rope, self.quantize)
        return self.quantize(self.model.norm(x))

    def linears(self) -> dict[str, MXLinear]:
        """The quantizable layers by their weight's name, in order of execution."""
        return {f"{name}.weight": m for name, m in self.named_modules() if isinstance(m, MXLinear)}

    def norms(self) -> dict[str, nn.Parameter]:
        return {f"{name}.weight": m.weight for name, m in self.named_modules() if isinstance(m, RMSNorm)}


def _identity(x: Tensor) -> Tensor:
    return x


def _rotate(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _through_mxint8(checkpoint: Checkpoint, name: str) -> Tensor:
    return torch.from_numpy(mx.dequantize(mx.quantize(checkpoint.tensors[name], "mxint8")))
