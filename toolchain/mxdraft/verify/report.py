# SPDX-License-Identifier: Apache-2.0
"""What the comparison found, as JSON and as a page (page.html)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from mxdraft import __version__
from mxdraft.files import as_text
from mxdraft.verify.chain import Link
from mxdraft.verify.compare import MARGIN_BOUND, RMS_BOUND, STEPS, Result


def verification_report(
    results: Sequence[Result], links: Sequence[Link], bundle: str, directory: Path
) -> dict[str, Any]:
    """Collect everything found, as what ``json`` can write."""
    return {
        "bundle": as_text(bundle),
        "onnx": as_text(directory),
        "versions": {"mxdraft": __version__, "onnxruntime": version("onnxruntime")},
        "bounds": {"margin": MARGIN_BOUND, "rms": RMS_BOUND},
        "steps": STEPS,
        "faults": [
            *(f"{link.name}: {link.fault}" for link in links if link.fault),
            *(fault for result in results for fault in result.faults()),
        ],
        "links": [dataclasses.asdict(link) for link in links],
        "results": [dataclasses.asdict(result) for result in results],
    }


def verification_page(report: dict[str, Any]) -> str:
    """Render ``verification_report``'s content as one page that needs no other file."""
    template = resources.files("mxdraft.verify").joinpath("page.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(template).render(report)
    return page.encode("utf-8", "backslashreplace").decode("utf-8")
