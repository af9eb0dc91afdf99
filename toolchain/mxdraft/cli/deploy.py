# SPDX-License-Identifier: Apache-2.0
"""build, package, deploy, rollback and status. Imports are local, for they need the extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mxdraft.cli._options import PATH, whole
from mxdraft.cli._terminal import emit, note, print_line
from mxdraft.errors import TransferError, UsageError
from mxdraft.files import write_json

_host = click.option(
    "--host", "hosts", metavar="HOST", multiple=True, help="[user@]name as ssh takes it; may be repeated."
)
_some_hosts = click.option(
    "--host", "hosts", metavar="HOST", multiple=True, required=True, help="[user@]name; may be repeated."
)
_dest = click.option(
    "--dest", metavar="DIR", help="Folder on the device.  [default: mxdraft, below the home folder]"
)
_json = click.option("--json", "json_path", metavar="FILE", type=PATH, help="Also write the results there.")


@click.command(epilog="Example: mxdraft build --target rpi --wheel")
@click.option("--target", metavar="NAME", default="host", help="A file of targets/.")
@click.option("--wheel", is_flag=True, help="Also a Python wheel of this package with the target's library.")
@click.option("--deb", is_flag=True, help="Also a Debian package of the target's command line.")
@click.option(
    "--streamline", metavar="DIR", type=PATH, help="With annotations, by ARM's streamline_annotate.c there."
)
def build(target: str, wheel: bool, deb: bool, streamline: Path | None) -> None:
    """Build the C runtime for a target and print the paths."""
    from mxdraft.ship.build import build as build_target
    from mxdraft.ship.deb import build_deb
    from mxdraft.ship.wheel import build_wheel

    if (wheel or deb) and streamline:
        raise UsageError("--streamline excludes --wheel and --deb")
    paths = build_target(target, streamline=streamline)
    if wheel:
        paths.append(build_wheel(target))
    if deb:
        paths.append(build_deb(target))
    for path in paths:
        print_line(path)


@click.command(epilog="Example: mxdraft package -o dist")
@click.option("-o", "folder", metavar="DIR", type=PATH, required=True, help="Directory to put them into.")
def package(folder: Path) -> None:
    """Make all files of a release and print their paths, SHA256SUMS last."""
    from mxdraft.ship.release import build_release

    for path in build_release(folder):
        print_line(path)


@click.command(
    epilog="Example: mxdraft deploy --target rpi --host pi@raspberrypi.local -m build/smollm2-135m.mxb"
)
@click.option("--target", metavar="NAME", required=True, help="A file of targets/.")
@click.option("-m", "bundle", metavar="BUNDLE", type=PATH, required=True, help="Bundle file (.mxb).")
@_host
@click.option(
    "--hosts", "hosts_file", metavar="FILE", type=PATH, help="A fleet: [[host]] tables (docs/deploy.md)."
)
@_dest
@click.option(
    "--service", is_flag=True, help="Also install the systemd units; in /opt/mxdraft unless --dest."
)
@click.option("--parallel", type=whole(1, 256), default="5", help="Of a fleet, devices at a time.")
@click.option("-o", "archive", metavar="FILE", type=PATH, help="Without hosts: the archive to write.")
@_json
def deploy(
    target: str,
    bundle: Path,
    hosts: tuple[str, ...],
    hosts_file: Path | None,
    dest: str | None,
    service: bool,
    parallel: int,
    archive: Path | None,
    json_path: Path | None,
) -> None:
    """Ship runtime and bundle to devices, prove there that they compute this machine's bits, and switch over.

    Without --host and --hosts: write an archive with an install.sh that does the same on the device.
    """
    from mxdraft.ship.deploy.fleet import Host, check_hosts, deploy_fleet, read_hosts
    from mxdraft.ship.deploy.release import prepare

    dest = dest or ("/opt/mxdraft" if service else "mxdraft")
    if hosts and hosts_file:
        raise UsageError("give the hosts as either --host or --hosts")
    if archive and (hosts or hosts_file):
        raise UsageError("-o is for an archive, which has no hosts")
    if not hosts and hosts_file is None:
        from mxdraft.ship.deploy.archive import write_archive
        from mxdraft.ship.targets import REPOSITORY

        path = archive or REPOSITORY / "build" / f"mxdraft-{target}.tar.gz"
        write_archive(prepare(target, bundle), f"mxdraft-{target}", path)
        note(f"copy it to the device; there: tar xf {path.name} && mxdraft-{target}/install.sh")
        print_line(path)
        return
    if hosts_file:
        fleet = read_hosts(hosts_file, target, dest)
    else:
        fleet = check_hosts([Host(host, target, dest) for host in hosts])
    if len(fleet) == 1:
        reports = [_deploy_one(fleet[0].host, fleet[0].target, fleet[0].dest, bundle, service, json_path)]
    else:
        reports = deploy_fleet(fleet, bundle, service, parallel)
        if json_path is not None:
            write_json(json_path, reports)
    _print_table(reports)
    codes = [report["code"] for report in reports]
    if any(code != 0 for code in codes):
        sys.exit(next(filter(None, codes), TransferError.exit_code))


@click.command(epilog="Example: mxdraft rollback --host pi@raspberrypi.local")
@_some_hosts
@_dest
def rollback(hosts: tuple[str, ...], dest: str | None) -> None:
    """Prove the release before the current one again, and switch back to it; stops at the first failure."""
    for host in hosts:
        _print_results(_run(host, dest, "rollback"))


@click.command(epilog="Example: mxdraft status --host pi@raspberrypi.local")
@_some_hosts
@_dest
@_json
def status(hosts: tuple[str, ...], dest: str | None, json_path: Path | None) -> None:
    """Print what is deployed on devices."""
    reports = []
    for host in hosts:
        reports.append(_run(host, dest, "status"))
        _print_results(reports[-1])
    if json_path is not None:
        write_json(json_path, reports)


def _run(host: str, dest: str | None, action: str) -> dict[str, str]:
    from mxdraft.ship.deploy.remote import Device

    with Device(host, dest or "mxdraft", note) as device:
        return {"host": host} | device.run(action)


def _deploy_one(
    host: str, target: str, dest: str, bundle: Path, service: bool, json_path: Path | None
) -> dict[str, Any]:
    from mxdraft.files import printable
    from mxdraft.ship.deploy import deploy as deploy_device
    from mxdraft.ship.deploy.release import prepare
    from mxdraft.ship.deploy.remote import Device

    note(f"building for {printable(target)}, verifying here")
    release = prepare(target, bundle)
    report = deploy_device(Device(host, dest, note), release, service, note, _progress_bar)
    report |= {"target": target, "code": 0, "error": None}
    if json_path is not None:
        write_json(json_path, [report])
    return report


def _print_table(reports: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    host, release = Column("HOST", no_wrap=True), Column("RELEASE", no_wrap=True)
    table = Table(host, "TARGET", "RESULT", release, "DIGEST", "SENT", "TOK/S", box=None)
    for report in reports:
        result = "deployed" if report["code"] == 0 else str(report["error"])
        sent = f"{report['uploaded_bytes'] / (1 << 20):.1f} MiB" if report["code"] == 0 else ""
        table.add_row(
            report["host"],
            report["target"],
            result,
            report.get("release", ""),
            report.get("digest", "")[:8],
            sent,
            report.get("decode_tok_per_s", ""),
        )
    console = Console(markup=False, highlight=False)
    with console.capture() as text:
        console.print(table)
    emit(text.get().encode("utf-8", "surrogateescape"))


def _print_results(results: dict[str, str]) -> None:
    for key, value in results.items():
        print_line(f"{key} {value}")


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.advance(task, step)
