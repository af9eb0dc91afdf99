# SPDX-License-Identifier: Apache-2.0
"""The drafter in torch: a small model that foresees a target from its residual streams.

It is what the runtime computes (docs/arithmetic.md, "Drafter"): one layer, run once a draft step, fed with
what it said the step before. The idea is EAGLE's (Li et al. 2024, arXiv 2401.15077), the three streams are
EAGLE-3's (2503.01840).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mxdraft.checkpoint import ModelConfig
from mxdraft.train.drafter import TrainedDrafter
from mxdraft.train.fakequant import MXLinear, fake_quant_activations
from mxdraft.train.model import Chain, Decoder, Llama, MXModule, RMSNorm
from mxdraft.train.start import start_rounded

_RIDGE = 1e-3  # share of the mean diagonal that is added to it
_TEMPER = 0.7  # of the first logits, which a linear guess makes too sure of themselves


class DraftModel(MXModule):
    """Reads residual streams [B, T, features, hidden] of a target and the tokens that follow them.

    Parameters are named as in runtime/BUNDLE.md.
    """

    def __init__(self, config: ModelConfig, features: int) -> None:
        super().__init__()
        self.feature_norm = nn.ModuleList(RMSNorm(config.hidden, config.rms_eps) for _ in range(features))
        self.feature_proj = MXLinear(config.hidden, features * config.hidden)
        self.embed_norm = RMSNorm(config.hidden, config.rms_eps)
        self.state_norm = RMSNorm(config.hidden, config.rms_eps)
        self.input_proj = MXLinear(config.hidden, 2 * config.hidden)
        self.model = Decoder(replace(config, layers=1))

    def forward(self, target: Llama, residuals: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
        """Return what the head reads [B, T, hidden] in each of ``depth`` draft steps.

        Row t of step j = 1 … is for the token at t + j + 1, given the streams at t and tokens up to t + j.
        Rows that would need tokens beyond the end hold nothing of use.
        """
        state = self.first_state(residuals)
        chain: Chain = []
        read = []
        for step in range(depth):
            embedded = target.embedding[tokens.roll(-1 - step, 1)]
            rope = target.rope(step, tokens.shape[1])
            (layer,) = self.model.layers
            state = layer(self.input(embedded, state), rope, fake_quant_activations, chain)
            read.append(fake_quant_activations(self.model.norm(state)))
        return read

    def first_state(self, residuals: Tensor) -> Tensor:
        normed = [norm(r) for norm, r in zip(self.feature_norm, residuals.unbind(2), strict=True)]
        return self.feature_proj(fake_quant_activations(torch.cat(normed, -1)))

    def input(self, embedded: Tensor, state: Tensor) -> Tensor:
        pair = torch.cat([self.embed_norm(embedded), self.state_norm(state)], -1)
        return self.input_proj(fake_quant_activations(pair))

    def start_quantized(self) -> None:
        """Read all weights through MXFP4 from now on."""
        for linear in self.linears().values():
            start_rounded(linear)

    @torch.no_grad()
    def start(self, target: Llama, documents: list[tuple[Tensor, Tensor]]) -> None:
        """Put a silent layer after ridge maps. It looks where the target's last layer looks; the rest is
        random, for that layer's own activations are so large that the first steps would ruin the ridge's
        guess."""
        size = self.start_from_ridge(target, documents)
        (layer,), last = self.model.layers, target.model.layers[-1]
        layer.input_layernorm.weight.copy_(size * last.input_layernorm.weight)
        layer.self_attn.q_proj.weight.copy_(last.self_attn.q_proj.read())
        layer.self_attn.k_proj.weight.copy_(last.self_attn.k_proj.read())
        _randomize(layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj)
        self.model.norm.weight.copy_(_TEMPER * size * target.model.norm.weight)

    @torch.no_grad()
    def start_from_ridge(self, target: Llama, documents: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Make the input maps the least-squares guess at the target's next final state, in closed form.

        ``documents``: residual streams [T, features, hidden], the last stream being the last layer's, and
        tokens [T]. States are streams with every channel scaled to unit size, for a few are huge; returned is
        that size [hidden]. First comes the guess from embedding and last stream, which is also what a deeper
        step has, then what the other streams can add to it.
        """
        hidden = target.head.shape[1]
        embedded = torch.cat([_unit(target.embedding[tokens[1:]]) for _, tokens in documents])
        streams = torch.cat([_unit(residuals) for residuals, _ in documents])
        sizes = streams.square().mean(0).sqrt()  # [features, hidden]
        for norm, size in zip(self.feature_norm, sizes, strict=True):
            norm.weight.copy_(1 / size)
        self.embed_norm.weight.copy_(1 / embedded.square().mean(0).sqrt())
        embedded *= self.embed_norm.weight
        scaled = [_unit(residuals) / sizes for residuals, _ in documents]
        before = torch.cat([x[:-1] for x in scaled]).flatten(1)
        wanted = torch.cat([x[1:, -1] for x in scaled])
        inputs = torch.cat([embedded, before[:, -hidden:]], 1)
        self.input_proj.weight.copy_(_ridge(inputs, wanted))
        lacking = wanted - inputs @ self.input_proj.weight.T
        read = self.input_proj.weight[:, hidden:]
        self.feature_proj.weight.copy_(_ridge(read, _ridge(before, lacking), 0.1).T)
        self.feature_proj.weight[:, -hidden:] += torch.eye(hidden, device=read.device)
        return sizes[-1]


def restored(trained: TrainedDrafter, config: ModelConfig) -> DraftModel:
    """Rebuild the model that training left as ``trained``."""
    model = DraftModel(config, len(trained.feature_layers))
    for name, linear in model.linears().items():
        linear.restore(trained.planes[name])
    with torch.no_grad():
        for name, norm in model.norms().items():
            norm.copy_(torch.from_numpy(trained.norms[name]))
    return model.requires_grad_(False)


def draft_vocabulary(documents: list[Tensor], vocab: int, size: int) -> Tensor:
    """Return the ``size`` most frequent tokens of ``documents``, ascending; among equals those of lower id,
    which byte-pair encoding learned earlier."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for tokens in documents:
        counts += torch.bincount(tokens, minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def _randomize(*linears: MXLinear) -> None:
    generator = torch.Generator().manual_seed(0)
    for linear in linears:
        weight = linear.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _ridge(inputs: Tensor, wanted: Tensor, damping: float = _RIDGE) -> Tensor:
    """Return W [out, in] that minimizes ‖inputs Wᵀ − wanted‖² for matrices [n, in] and [n, out], damped."""
    gram = inputs.T @ inputs
    gram.diagonal().add_(damping * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs.T @ wanted).T
