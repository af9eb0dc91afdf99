"""From a training run to the artefact that ships."""

from __future__ import annotations

from typing import Any

from mxdraft.train.delta import TrainedBase
from mxdraft.train.model import Llama


def trained_base(student: Llama, meta: dict[str, Any]) -> TrainedBase:
    """The student's MXFP4 planes and norms, as ``mxdraft.train.delta.write_delta`` takes them."""
    planes = {name: linear.mx() for name, linear in student.linears().items()}
    norms = {name: norm.detach().float().cpu().numpy() for name, norm in student.norms().items()}
    return TrainedBase(planes, norms, meta)
