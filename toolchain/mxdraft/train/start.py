# SPDX-License-Identifier: Apache-2.0
"""Where quantization-aware training starts: the teacher's weights as they are, or error-compensated (GPTQ).

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds a weight matrix column by column and lets the columns
still to come make up for each error, as the layer's own inputs see it. The compensated values *before*
rounding are latents whose rounding is GPTQ's, which is what straight-through training wants to begin with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from mxdraft import mx
from mxdraft.mx import BLOCK, MXTensor
from mxdraft.train.fakequant import MXLinear, round_e2m1
from mxdraft.train.model import Llama

Start = Literal["round", "compensate"]
_E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
_DAMPING = 0.01  # of the mean diagonal, added to it: GPTQ's usual value
_GROUP = 64  # columns whose corrections are applied to the rest in one product


def start_quantized(
    model: Llama, start: Start, tokens: Tensor, names: Collection[str] | None = None, reach: float = 0.0
) -> None:
    """Make the linear layers of ``model`` read MXFP4, in order of execution; only weights ``names`` if given.

    With ``compensate`` each layer is rounded against its inputs for ``tokens`` [B, T] as the layers before
    it, already quantized, produce them; its latents then lie within ``reach`` (``within_reach``), with 0
    anywhere.
    """
    linears = [linear for name, linear in model.linears().items() if names is None or name in names]
    if start == "round":
        for linear in linears:
            start_rounded(linear)
        return

    def before_forward(linear: MXLinear, inputs: tuple[Tensor]) -> None:
        _start_compensated(linear, inputs[0].flatten(0, -2), reach)

    hooks = [linear.register_forward_pre_hook(before_forward) for linear in linears]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()


def search_scale(weight: Tensor) -> Tensor:
    """Return 2**exponent [out, in/32] by the rule ``search`` of mxdraft.mx."""
    code = mx.quantize(weight.detach().cpu().numpy(), "mxfp4", "search").scale
    return torch.from_numpy(np.ldexp(np.float32(1), code.astype(np.int32) - 127)).to(weight.device)


@torch.no_grad()
def latent_bounds(
    weights: Llama, student: Llama, reach: float, latent_clip: float
) -> list[tuple[float, float] | tuple[Tensor, Tensor]]:
    """Return least and largest latents of each linear layer of ``student``, which rounds ``weights``: within
    ``reach``, or with 0 anywhere up to ``latent_clip``."""
    if not reach:
        return [(-latent_clip, latent_clip)] * len(weights.linears())
    pairs = zip(weights.linears().values(), student.linears().values(), strict=True)
    return [within_reach(w.weight, cast(Tensor, s.scale), reach) for w, s in pairs]


def within_reach(weight: Tensor, scale: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Return least and largest elements [out, in] (of E2M1, as float16) that leave the residual plane its
    precision.

    That plane has one exponent a block too, so the element farthest from its weight decides how coarsely all
    32 are corrected. Elements thus stay within ``reach`` times the residual's power of two that rounding
    would leave. With 7 that exponent still serves: 7 rounds to 6, E2M1's largest, with no more error than 5
    does. The rounded element is always allowed.
    """
    grid = scale.repeat_interleave(BLOCK, 1)
    rounded = round_e2m1(weight / grid)
    distance = reach * _residual_scale(weight - rounded * grid, scale).repeat_interleave(BLOCK, 1)
    low, high = ((weight + d) / grid for d in (-distance, distance))
    elements = _E2M1.to(weight.device)
    first = torch.bucketize(low, elements).clamp_(max=len(elements) - 1)
    last = torch.bucketize(high, elements, right=True).sub_(1).clamp_(min=0)
    return torch.minimum(elements[first], rounded).half(), torch.maximum(elements[last], rounded).half()


def _residual_scale(left: Tensor, scale: Tensor) -> Tensor:
    """Compute 2**exponent [out, in/32] of the residual plane's blocks, where the base plane, with blocks of
    ``scale``, leaves ``left``."""
    exponent = np.frexp(scale.cpu().numpy())[1] - 1
    base = MXTensor("mxfp4", np.empty(0, np.uint8), (exponent + 127).astype(np.uint8), "search")
    code = mx.quantize_residual(left.cpu().numpy(), base).scale
    return torch.from_numpy(np.ldexp(np.float32(1), code.astype(np.int32) - 127)).to(left.device)


def compensate(
    weight: Tensor, inputs: Tensor, scale: Tensor, bounds: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute latents [out, in] whose rounding nearly minimizes ‖inputs (weight − rounded)ᵀ‖; inputs [n, in].
    With ``bounds`` each lies between its least and its largest, and later columns make up for that too.

    Columns go from the strongest input to the weakest, so that the errors that matter most find the most
    columns left to correct them. Raises torch.linalg.LinAlgError if the inputs hold NaN or Inf.
    """
    rows, columns = weight.shape
    hessian = inputs.T @ inputs
    diagonal = hessian.diagonal()
    diagonal += _DAMPING * diagonal.mean()
    order = diagonal.argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    spread = torch.linalg.cholesky(inverse, upper=True)
    grid = scale.repeat_interleave(BLOCK, 1)[:, order].T.contiguous()
    left = weight[:, order].T.contiguous()  # [in, out]: a column of the weight is a contiguous row here
    latent = torch.empty_like(left)
    limits = bounds and [bound[:, order].T.float() for bound in bounds]
    for first in range(0, columns, _GROUP):
        last = min(first + _GROUP, columns)
        errors = left.new_empty(last - first, rows)
        for i in range(first, last):
            latent[i] = left[i] / grid[i]
            if limits is not None:
                latent[i].clamp_(limits[0][i], limits[1][i])
            errors[i - first] = (left[i] - round_e2m1(latent[i]) * grid[i]) / spread[i, i]
            left[i + 1 : last].addr_(spread[i, i + 1 : last], errors[i - first], alpha=-1)
        left[last:] -= spread[first:last, last:].T @ errors
    return latent[order.argsort()].T.contiguous()


def start_rounded(linear: MXLinear) -> None:
    """Make a layer read its weight through MXFP4, rounded by rule ``search``."""
    scale = search_scale(linear.weight)
    linear.start(linear.weight.detach() / scale.repeat_interleave(BLOCK, 1), scale)


def _start_compensated(linear: MXLinear, inputs: Tensor, reach: float) -> None:
    weight = linear.weight.detach()
    scale = search_scale(weight)
    bounds = within_reach(weight, scale, reach) if reach else None
    linear.start(compensate(weight, inputs, scale, bounds), scale)
