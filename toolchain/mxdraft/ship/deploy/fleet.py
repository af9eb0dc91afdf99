# SPDX-License-Identifier: Apache-2.0
"""Many devices: Ansible (fleet.yml) runs this module once a device, in its order and with its limits."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mxdraft.errors import MxdraftError, RefusedError, TransferError, UsageError
from mxdraft.files import printable, read_toml
from mxdraft.ship.deploy import deploy
from mxdraft.ship.deploy.release import Release, prepare
from mxdraft.ship.deploy.remote import Device, check_dest, check_host
from mxdraft.ship.targets import load_target

_MOST_HOSTS = 1024


@dataclass(frozen=True)
class Host:
    """One device of a fleet."""

    host: str
    target: str
    dest: str


def read_hosts(path: Path, target: str, dest: str) -> list[Host]:
    """Read ``[[host]]`` tables: host and, optionally, target and dest, which default to the parameters.

    The first is the canary. Raises RefusedError, which names file and table.
    """
    values = read_toml(path, "list of hosts")
    unknown = sorted(values.keys() - {"host"})
    tables = values.get("host")
    if unknown or not isinstance(tables, list):
        raise RefusedError(f"{path}: expected [[host]] tables and nothing else{_named(unknown)}")
    hosts = []
    for number, table in enumerate(tables, 1):
        where = f"{path}: [[host]] number {number}: "
        if not isinstance(table, dict):
            raise RefusedError(f"{where}is not a table")
        unknown = sorted(table.keys() - {"host", "target", "dest"})
        if unknown or not all(isinstance(value, str) for value in table.values()) or "host" not in table:
            raise RefusedError(f"{where}needs host, may have target and dest, all text{_named(unknown)}")
        hosts.append(Host(**{"target": target, "dest": dest} | table))
        try:
            _check_host(hosts[-1])
            load_target(hosts[-1].target)
        except UsageError as error:
            raise RefusedError(f"{where}{error}") from error
    try:
        return check_hosts(hosts)
    except UsageError as error:
        raise RefusedError(f"{path}: {error}") from error


def _named(unknown: list[str]) -> str:
    return f"; unknown: {printable(', '.join(unknown))}" if unknown else ""


def check_hosts(hosts: list[Host]) -> list[Host]:
    """Return ``hosts`` if each can be deployed to and none is there twice; raises UsageError."""
    for host in hosts:
        _check_host(host)
    names = [host.host for host in hosts]
    if not 0 < len(names) <= _MOST_HOSTS or len(set(names)) < len(names):
        raise UsageError(f"the hosts: at least one, at most {_MOST_HOSTS}, and each once")
    return hosts


def _check_host(host: Host) -> None:
    check_host(host.host)
    check_dest(host.dest)


def deploy_fleet(hosts: list[Host], bundle: Path, service: bool, parallel: int) -> list[dict[str, Any]]:
    """Deploy to the first host; if that went well to the others, ``parallel`` at a time; no new batch starts
    after a failure. Returns a report for each host: that of ``deploy`` with ``code`` 0, or ``code`` and
    ``error``; ``code`` None was not started. Raises what ``prepare`` raises, before any device is asked.
    """
    releases = {target: prepare(target, bundle) for target in dict.fromkeys(host.target for host in hosts)}
    with tempfile.TemporaryDirectory(prefix="mxdraft-fleet") as name:
        folder = Path(name)
        plan = folder / "plan.json"
        jobs = [
            asdict(host) | {"release": _packed(releases[host.target]), "service": service} for host in hosts
        ]
        plan.write_text(json.dumps(jobs), encoding="utf-8")
        _run_ansible(folder, plan, len(hosts), parallel)
        return [_report(folder, number, host) for number, host in enumerate(hosts)]


def _run_ansible(folder: Path, plan: Path, count: int, parallel: int) -> None:
    # JSON is YAML. In the keywords of a play only extra variables count.
    variables, inventory = folder / "variables.json", folder / "inventory.yml"
    variables.write_text(
        json.dumps({"python": sys.executable, "plan": str(plan), "parallel": parallel}),
        encoding="utf-8",
    )
    hosts = {f"host{number}": {"number": str(number)} for number in range(count)}
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}), encoding="utf-8")
    settings = folder / "ansible.cfg"  # instead of the user's own, which could change the order
    settings.write_text("[defaults]\n", encoding="utf-8")
    search = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "ANSIBLE_CONFIG": str(settings),
        "ANSIBLE_HOME": str(folder / "ansible"),
        "ANSIBLE_FORKS": str(parallel),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(search),
    }
    with resources.as_file(resources.files("mxdraft.ship.deploy").joinpath("fleet.yml")) as playbook:
        command = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), "-e", f"@{variables}"]
        done = subprocess.run(
            [*command, str(playbook)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    if done.returncode and not any(folder.glob("report*.json")):
        if "No module named ansible" in done.stderr:
            raise UsageError("several hosts need Ansible: pip install 'mxdraft[fleet]'")
        raise TransferError(f"ansible failed: {(done.stderr or done.stdout).strip()}")


def _report(folder: Path, number: int, host: Host) -> dict[str, Any]:
    path = folder / f"report{number}.json"
    if not path.exists():
        return {"host": host.host, "target": host.target, "code": None, "error": "not started"}
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {"target": host.target} | report


def _packed(release: Release) -> dict[str, Any]:
    """A release as JSON: names, and paths or contents in base64."""
    files = {
        digest: [name, None, base64.b64encode(content).decode("ascii")]
        if isinstance(content, bytes)
        else [name, str(content.resolve()), None]
        for digest, (name, content) in release.files.items()
    }
    return {"manifest": release.manifest, "files": files}


def _unpacked(values: dict[str, Any]) -> Release:
    files: dict[str, tuple[str, Path | bytes]] = {
        digest: (name, base64.b64decode(data) if path is None else Path(path))
        for digest, (name, path, data) in values["files"].items()
    }
    return Release(values["manifest"], files)


@contextmanager
def _no_progress(_title: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _bytes: None


def main() -> None:
    """``python -m mxdraft.ship.deploy.fleet PLAN NUMBER``: deploy to one host of a plan, leave its report."""
    plan = Path(sys.argv[1])
    job = json.loads(plan.read_text(encoding="utf-8"))[int(sys.argv[2])]
    notes: list[str] = []
    report: dict[str, Any] = {"host": job["host"], "code": 0, "error": None}
    try:
        device = Device(job["host"], job["dest"], notes.append, ask=False)
        report |= deploy(device, _unpacked(job["release"]), job["service"], notes.append, _no_progress)
    except MxdraftError as error:
        report |= {"code": error.exit_code, "error": str(error)}
    except OSError as error:
        report |= {"code": TransferError.exit_code, "error": str(error)}
    report["notes"] = notes
    plan.with_name(f"report{sys.argv[2]}.json").write_text(json.dumps(report), encoding="utf-8")
    sys.exit(report["code"])


if __name__ == "__main__":
    main()
