# SPDX-License-Identifier: Apache-2.0
"""A release: the files that go to a device, and the manifest: what they are and what they must compute."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from mxdraft import __version__
from mxdraft.errors import CapacityError, NumericError, RefusedError
from mxdraft.files import file_sha256
from mxdraft.runtime import Engine, Model, Plan, Precision, Timeline
from mxdraft.ship.build import architecture, build
from mxdraft.ship.targets import OUTPUTS, Target, load_target

PROMPT = "The sky is"
TOKENS = 8
UNITS = ("mxdraft.socket", "mxdraft.service")
_MIB = 1 << 20
# What a process takes besides its plan: program, stacks, page tables, buffers.
_BESIDES_PLAN = 16 * _MIB


@dataclass(frozen=True)
class Release:
    """``manifest``: lines ``key value`` that device.sh reads. ``files``: SHA-256 -> (name, contents).

    Manifest keys: version, target, arch, features (one a line), bundle, threads, ctx, precision, memory_kib,
    digest (of verify), prompt, tokens (that continue it), and ``file SHA256 SIZE NAME`` of each file.
    """

    manifest: str
    files: dict[str, tuple[str, Path | bytes]]


def script(name: str) -> str:
    """A text file of this package."""
    return resources.files("mxdraft.ship.deploy").joinpath(name).read_text(encoding="utf-8")


def prepare(target_name: str, bundle: Path) -> Release:
    """Build the runtime, check that the bundle fits the target, and compute what the device will have to.

    Raises CapacityError if the bundle is too large for the target, NumericError if this machine's digest is
    not the bundle's own, BundleError if it is refused.
    """
    target = load_target(target_name)
    runtime = next((path for path in build(target_name) if path.name == OUTPUTS["cli"]), None)
    if runtime is None:
        raise RefusedError(f"target {target.name} has no command line among its outputs, nothing to deploy")
    if not bundle.name.isprintable():  # it goes into the manifest, one line an entry
        raise RefusedError(f"{bundle.name!r} has characters that cannot be printed; rename the file")
    expected = _expected_results(target, bundle)
    facts = [
        ("version", __version__),
        ("target", target.name),
        ("arch", architecture(target)),
        *(("features", feature) for feature in target.run.features),
        ("bundle", bundle.name),
        *expected.items(),
    ]
    settings = vars(target.run) | vars(target.service) | expected
    units = {name: Template(script(name)).substitute(settings).encode("utf-8") for name in UNITS}
    # The runtime as bytes: another build must not change it under a deployment.
    contents: dict[str, Path | bytes] = {"mxdraft": runtime.read_bytes(), "model.mxb": bundle, **units}
    files: dict[str, tuple[str, Path | bytes]] = {}
    for name, content in contents.items():
        digest, size = _digest(content)
        files[digest] = (name, content)
        facts.append(("file", f"{digest} {size} {name}"))
    return Release("\n".join(f"{key} {value}" for key, value in facts), files)


def _expected_results(target: Target, bundle: Path) -> dict[str, object]:
    """Run the bundle here, with the target's settings."""
    precision: Precision = target.run.precision  # type: ignore[assignment]
    with Model(bundle) as model:
        ctx = min(target.run.ctx or 2048, model.info.max_positions)
        threads = target.run.threads or target.service.cores
        plan = model.plan(ctx=ctx, threads=threads, precision=precision)
        _check_fits(target, plan)
        with Engine(model, ctx=ctx, precision=precision) as engine:
            verification = engine.verify()
            if not verification.matches:
                raise NumericError(f"{verification.message}: pack the bundle again before it is deployed")
            with Timeline(engine, max_tokens=TOKENS, ignore_eos=True) as sequence:
                tokens = [i for piece in sequence.generate(model.encode(PROMPT)) for i in piece.ids]
    return {
        "threads": target.run.threads,
        "ctx": ctx,
        "precision": precision,
        "memory_kib": -(-plan.total // 1024),
        "digest": verification.digest,
        "prompt": PROMPT,
        "tokens": " ".join(map(str, tokens)),
    }


def _check_fits(target: Target, plan: Plan) -> None:
    limits = (
        ("the KV cache", plan.kv_cache, target.run.kv_mib, "kv_mib"),
        ("the process", plan.total + _BESIDES_PLAN, target.run.memory_mib, "memory_mib"),
    )
    for what, need, limit, key in limits:
        if need > limit * _MIB:
            raise CapacityError(
                f"{what} takes {need / _MIB:.0f} MiB at context {plan.ctx}, target {target.name} allows "
                f"{limit}: lower ctx or raise {key} in targets/{target.name}.toml, or choose another target"
            )


def _digest(content: Path | bytes) -> tuple[str, int]:
    """SHA-256 and size."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), len(content)
    return file_sha256(content), content.stat().st_size
