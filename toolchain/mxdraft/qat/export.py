"""From a training run to the artefact that ships."""

from __future__ import annotations

from typing import Any

from mxdraft.qat.model import Llama
from mxdraft.qat_delta import TrainedBase
from mxdraft.smooth import Smoothing


def trained_base(student: Llama, meta: dict[str, Any], smoothing: Smoothing | None = None) -> TrainedBase:
    """The student's MXFP4 planes and norms, as ``mxdraft.qat_delta.write_delta`` takes them; ``smoothing``:
    of the weights that it began with."""
    planes = {name: linear.mx() for name, linear in student.linears().items()}
    norms = {name: norm.detach().float().cpu().numpy() for name, norm in student.norms().items()}
    return TrainedBase(planes, norms, meta, smoothing)
