# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights and int8 activations in torch with straight-through gradients.

Speed asks for torch here; ``mxdraft.mx`` stays the definition, and tests/test_qat.py holds every value made
here equal to it. A trainable weight is held in *grid units*: ``latent = weight / 2**exponent`` of its
block, with frozen exponents, so that one learning rate moves every block by the same share of its grid.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxdraft.mx import ACTIVATION_STEPS, ACTIVATION_TINY, BLOCK, MXTensor, dequantize

_POWER_OF_TWO = 0x7F800000  # mask that leaves a positive float its exponent: the power of two not above it
_SNAP = 1.5 * 2.0**23  # x + s * _SNAP - s * _SNAP rounds x to a multiple of s, ties to even, and gives no -0


def round_e2m1(x: Tensor) -> Tensor:
    """Round a float32 tensor to the nearest E2M1 values (ties to even mantissa, saturating at 6)."""
    x = x.clamp(-6, 6)
    if torch.compiler.is_compiling():  # three times as fast there, three times as slow elsewhere
        a = x.abs()
        snap = torch.where(a < 2, _SNAP / 2, torch.where(a < 4, _SNAP, 2 * _SNAP))
        return (x + snap) - snap
    # E2M1 steps by .5 below 2, then by 1 up to 4 and by 2 up to 6: half the power of
    # two not above max(|x|, 1).
    snap = x.abs().clamp_(min=1)
    snap.view(torch.int32).bitwise_and_(_POWER_OF_TWO)
    snap *= _SNAP / 2
    return x.add_(snap).sub_(snap)


class _FakeQuantMXFP4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return _times_scale(round_e2m1(latent), scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return _times_scale(grads[0].contiguous(), scale), None


class _FakeQuantActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
        amax = blocks.abs().amax(-1, keepdim=True)
        steps = torch.where(amax >= ACTIVATION_TINY, float(ACTIVATION_STEPS), 0.0)
        amax = amax.clamp(min=ACTIVATION_TINY)
        q = (blocks * (steps / amax)).round()
        return (q * (amax / ACTIVATION_STEPS)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return grads[0]


def fake_quant_activations(x: Tensor) -> Tensor:
    """Return what a base-precision product sees of f32 rows (``mx.quantize_activations``); the gradient is
    the identity."""
    return cast(Tensor, _FakeQuantActivations.apply(x))


class MXLinear(nn.Module):
    """y = x Wᵀ with W [out, in] read through MXFP4.

    Until ``start`` has been called, W is the plain f32 weight. After it ``weight`` holds the latents in grid
    units and ``scale`` the frozen 2**exponent [out, in/32].
    """

    scale: Tensor | None

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.register_buffer("scale", None)

    def start(self, latent: Tensor, scale: Tensor) -> None:
        """Begin to read the weight through MXFP4 with these latents [out, in] and scales [out, in/32]."""
        self.weight.data.copy_(latent)
        self.scale = scale

    def restore(self, plane: MXTensor) -> None:
        """Begin to read the weight through MXFP4 where ``plane`` is: the inverse of ``mx``."""
        scale = np.ldexp(np.float32(1), plane.scale.astype(np.int32) - 127)
        latent = dequantize(plane) / np.repeat(scale, BLOCK, 1)
        self.start(torch.from_numpy(latent), torch.from_numpy(scale))

    def read(self) -> Tensor:
        """Return the weight [out, in] as products see it."""
        if self.scale is None:
            return self.weight
        return cast(Tensor, _FakeQuantMXFP4.apply(self.weight, self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read())

    def mx(self) -> MXTensor:
        """Return the plane that ships: codes of the latents with the frozen exponents."""
        if self.scale is None:
            raise ValueError("this layer does not read its weight through MXFP4")
        value = round_e2m1(self.weight.detach()).cpu().numpy()
        doubled = (np.abs(value) * 2).astype(np.int64)
        code = np.searchsorted([0, 1, 2, 3, 4, 6, 8, 12], doubled).astype(np.uint8) | (value < 0) * np.uint8(
            8
        )
        exponent = np.frexp(self.scale.cpu().numpy())[1] - 1
        packed = (code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8)
        return MXTensor("mxfp4", packed, (exponent + 127).astype(np.uint8), "search")


def _times_scale(x: Tensor, scale: Tensor) -> Tensor:
    return (x.view(*scale.shape, BLOCK) * scale.unsqueeze(-1)).view(x.shape)
