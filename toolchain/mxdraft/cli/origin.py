# SPDX-License-Identifier: Apache-2.0
"""calibrate: what core tokens are, fitted to a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from mxdraft.cli._options import PATH, model_option, threads_option, whole
from mxdraft.cli._terminal import Interrupt, note, print_line
from mxdraft.files import replacing
from mxdraft.runtime import Model


@click.command(
    epilog="Example: mxdraft calibrate -m build/smollm2-135m.mxb --text models/smollm2-135m/teacher_text.npz "
    "-o models/smollm2-135m/schedule.toml --plot calibration.png"
)
@model_option
@click.option("--text", type=PATH, required=True, help="Text (UTF-8 or .npz) to record on.")
@click.option("--tokens", type=whole(256, 1 << 20), default="8192", help="Tokens of it at most.")
@threads_option
@click.option("-o", "output", metavar="FILE", type=PATH, required=True, help="The schedule (.toml).")
@click.option("--plot", "plot_path", metavar="FILE", type=PATH, help="Draw the fit (.png or .svg).")
def calibrate(
    bundle: str, text: Path, tokens: int, threads: int, output: Path, plot_path: Path | None
) -> None:
    """Record which rows base precision gets wrong, and fit how doubt, attention and history foretell it.

    A third of the documents only checks the fit. `mxdraft pack --schedule FILE` puts it into a bundle.
    """
    from mxdraft.bundle import Bundle
    from mxdraft.measure.origin.evaluate import calibrate as fit
    from mxdraft.measure.origin.evaluate import read_text
    from mxdraft.measure.plot import plot_calibration

    Interrupt()
    schedule = Bundle.open(Path(bundle)).schedule
    with Model(bundle) as model:
        fitted, found, trace = fit(model, read_text(model, text, tokens), schedule, threads, note)
    with replacing(output) as file:
        file.write(fitted.toml().encode())
    if plot_path:
        plot_calibration(fitted, found, trace, plot_path)
    weights = fitted.precision
    print_line(
        f"score = {weights.alpha:.3f} doubt + {weights.beta:.3f} attention + {weights.gamma:.3f} history "
        f"+ {weights.bias:.3f}\nheld out: {found['rows']} rows, {found['flips']:.1%} flip, "
        f"AUC {found['auc']:.3f} (margin alone {found['auc_margin']:.3f}), "
        f"balanced accuracy {found['accuracy']:.1%}"
    )
