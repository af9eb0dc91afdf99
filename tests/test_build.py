# SPDX-License-Identifier: Apache-2.0
"""Targets, the cross-build, its audit, wheel, packages, release."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from fake_device import make_bundle
from hatchling.builders.sdist import SdistBuilder
from mxdraft.errors import RefusedError, TransferError, UsageError
from mxdraft.ship.build import FLAGS, build, compiler, link
from mxdraft.ship.deb import build_deb
from mxdraft.ship.elf import audit
from mxdraft.ship.release import build_release
from mxdraft.ship.targets import REPOSITORY, load_target
from mxdraft.ship.wheel import build_wheel

TARGETS = sorted(path.stem for path in (REPOSITORY / "targets").glob("*.toml"))


@pytest.fixture(scope="module")
def rpi() -> list[Path]:
    return build("rpi")


# ---- targets ----


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_valid_and_documented(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert f"`{name}`" in (REPOSITORY / "targets/README.md").read_text(encoding="utf-8")
    # Nothing tuned to the machine that builds may reach one that runs (-march=native and its kind).
    assert "native" not in " ".join([*compiler(target, "cli"), *compiler(target, "library"), *FLAGS])


def test_boards_share_one_binary() -> None:
    rpi = load_target("rpi")
    for name in ("rpi4", "rpi5", "rpizero2w"):
        assert compiler(load_target(name), "cli") == compiler(rpi, "cli")


def test_unknown_target_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"unknown target 'pi3' \(known: host, rpi, rpi4, rpi5, rpizero2w\)"):
        load_target("pi3")


@pytest.mark.parametrize("name", ["../rpi", "/etc/x", "", "rpi.toml"])
def test_target_is_no_path(name: str) -> None:
    with pytest.raises(UsageError, match="unknown target"):
        load_target(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('arch = "aarch64"', 'arch = "armv7l"', "arch = 'armv7l' .allowed: host, x86_64, aarch64"),
        ('cpu = "cortex_a53"', 'cpu = "native"', "cpu = 'native' .allowed: baseline, cortex_a53"),
        (
            'arch = "aarch64"',
            'arch = "aarch64"\nboard = 1',
            "unknown key 'board' .allowed: description, arch",
        ),
        ('arch = "aarch64"', "", "missing key 'arch'"),
        ('outputs = ["cli", "library"]', 'outputs = ["gui"]', "allowed: a list of cli, library"),
        ('glibc = "2.28"', 'glibc = "latest"', "allowed: a version such as 2.28"),
        ("ctx = 2048", "ctx = -1", r"\[run\] ctx = -1 .allowed: a whole number from 0 to 1048576"),
        ("ctx = 2048", "ctx = true", r"\[run\] ctx = True"),
        ("ctx = 2048", "context = 1", r"\[run\] unknown key 'context' .allowed: memory_mib, threads, ctx"),
        ('cpus = "0-3"', 'cpus = "all"', r"\[service\] cpus = 'all' .allowed: a list such as 0-3"),
        ('cpus = "0-3"', 'cpus = "3-0"', r"'3-0' has 0 cores"),
        ('cpus = "0-3"', 'cpus = "0-\u0663"', r"\[service\] cpus = .* .allowed: a list such as 0-3"),
        ("threads = 0", "threads = 5", r"threads = 5, but .* '0-3' has 4 cores"),
        ("parallel = 2", "parallel = 0", r"\[service\] parallel = 0 .allowed: a whole number from 1 to 32"),
        ("parked = 2", 'parked = 2\n"a\\u001b[2J" = 1', r"unknown key 'a\\x1b\[2J' .allowed: cpus"),
        ("parked = 2", 'parked = "\\u001b[2J"', r"parked = '\\x1b\[2J' .allowed"),
        ("[service]", "[services]", r"\[service\] missing key|unknown key 'services'"),
        ("[run]", "[run", "rpi.toml is not a target: "),
    ],
)
def test_bad_target_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (REPOSITORY / "targets/rpi.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "rpi.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(RefusedError, match=message):
        load_target("rpi", tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = " + b"[" * 20 + b"]" * 20, "nested too deeply"),
        (b"a" + b".a" * 2_000 + b" = 1", "nested too deeply"),
        (b"threads = " + b"9" * 5_000, "limit"),
        (b"a = 1979-99-99", "rpi.toml is not a target: "),
        (b"\xff\xfe", "codec can't decode"),
        (b"#" * (1 << 20) + b"\n", "larger than 1 MiB"),
        (b"\x1b = 1", r"rpi.toml is not a target: [ -~]*$"),
        (b'"\\u001b[2J" = 1', r"unknown key '\\x1b\[2J'|missing key"),
        (b"run = 1", r"\[run\] is not a table"),
        (b"run = [1979-05-27, nan, {}]", r"\[run\] is not a table"),
        (b"", "missing key"),
    ],
)
def test_whatever_a_target_file_holds_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "rpi.toml").write_bytes(data)
    with pytest.raises(RefusedError, match=message) as caught:
        load_target("rpi", tmp_path)
    assert str(caught.value).isprintable()


def test_a_device_as_target_file(tmp_path: Path) -> None:
    (tmp_path / "rpi.toml").symlink_to("/dev/zero")
    with pytest.raises(TransferError, match="not a regular file"):
        load_target("rpi", tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_a_service_has_no_more_threads_than_cores(name: str) -> None:
    target = load_target(name)
    threads = target.run.threads or target.service.cores
    assert 1 <= threads <= target.service.cores


def test_what_a_compiler_prints_keeps_its_lines(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'a.c:1: error\\n  \\033[1mint x\\n' >&2\nexit 1\n")
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "mxdraft.cli", "build", "--target", "host"]
    done = subprocess.run(command, env=os.environ | {"CC": str(compiler)}, capture_output=True, check=False)
    first, *lines = done.stderr.decode("ascii").splitlines()
    assert (done.returncode, lines) == (3, ["a.c:1: error", r"  \x1b[1mint x"])
    assert first.startswith("mxdraft: error: the compiler failed: ")


# ---- cross-build ----


def test_two_builds_are_equal(rpi: list[Path], tmp_path: Path) -> None:
    for folder in ("runtime", "targets"):
        shutil.copytree(REPOSITORY / folder, tmp_path / "elsewhere" / folder)
    (again,) = build("rpi4", repository=tmp_path / "elsewhere")
    assert again.read_bytes() == rpi[0].read_bytes()
    assert str(tmp_path).encode() not in again.read_bytes()
    made = again.stat().st_mtime_ns
    build("rpi4", repository=tmp_path / "elsewhere")
    assert again.stat().st_mtime_ns == made  # up to date: nothing is built


def test_what_was_built(rpi: list[Path]) -> None:
    cli, library = rpi
    with cli.open("rb") as file:
        elf = ELFFile(file)
        assert elf["e_machine"] == "EM_AARCH64"
        assert elf.get_section_by_name(".dynamic") is None
        assert elf.get_section_by_name(".symtab") is None
    with library.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed == {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
    }  # no libgomp, nothing to run out of TLS for


def test_page_size_is_asked_for() -> None:
    """A Raspberry Pi 5 has pages of 16 KiB; 4096 must be nowhere but in buffers and format limits."""
    for path in (REPOSITORY / "runtime").glob("*/*.c"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"\b4096\b", line) or not re.search(
                r"page|mmap|align", line, re.IGNORECASE
            ), line


# ---- audit ----


def _link(folder: Path, source: str, *options: str, shared: str | None = None, glibc: str = "2.28") -> None:
    target = load_target("rpi")
    command = compiler(target, "cli")
    if shared:
        command[command.index("-target") + 1] = f"aarch64-linux-gnu.{shared}"
    (folder / "x.c").write_text(source, encoding="utf-8")
    made = folder / "x.o"
    subprocess.run([*command, "-fPIC", "-O1", "-c", folder / "x.c", "-o", made], check=True)
    kind = "-shared" if shared else "-static"
    (folder / "audited").mkdir(exist_ok=True)
    command += [kind, "-s", "-Wl,--gc-sections", "-Wl,--print-map", *options]
    link(command, [made], folder / "audited" / "out", glibc, True)


_SDOT = ".inst 0x4e829420"
_LDADD = ".inst 0xb8200041"


def _program(instruction: str, function: str) -> str:
    return (
        f"__attribute__((noinline)) int {function}(int x)\n"
        f'{{ __asm__ volatile("{instruction}"); return x; }}\n'
        f"int main(int n, char **v) {{ (void)v; return {function}(n); }}\n"
    )


@pytest.mark.parametrize(
    ("instruction", "function", "message"),
    [
        (_SDOT, "sum_of_products", "sum_of_products at 0x.* dotprod extension .4e829420."),
        (_LDADD, "count", "count at 0x.* lse extension"),
        (_LDADD, "mxd_x_dotprod", "mxd_x_dotprod at 0x.* lse extension"),  # not what it is named after
        (_SDOT, "has_dotprod", "has_dotprod at 0x"),  # runs on every board
        (_SDOT, "mxd_kernels_init_dotprod", "mxd_kernels_init_dotprod at 0x"),
        (".inst 0x4e83a441", "mxd_matmul_dotprod", "i8mm extension"),
        (".inst 0x4e284820", "hash", "crypto extension"),
        (".inst 0x04a30041", "vector", "sve extension"),
    ],
)
def test_audit_names_the_function(tmp_path: Path, instruction: str, function: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        _link(tmp_path, _program(instruction, function))
    assert not (tmp_path / "audited" / "out").exists()


@pytest.mark.parametrize(
    ("instruction", "function"),
    [(_SDOT, "mxd_matmul_dotprod"), (".inst 0x4e83a441", "mxd_matmul_i8mm"), ("nop", "count")],
)
def test_audit_allows_dispatched_kernels(tmp_path: Path, instruction: str, function: str) -> None:
    _link(tmp_path, _program(instruction, function))
    assert (tmp_path / "audited" / "out").exists()


# pthread_create moved from libpthread to libc with a new version in glibc 2.34.
_THREADS = (
    "#include <pthread.h>\nstatic void *f(void *x) { return x; }\n"
    "int start(void) { pthread_t t; return pthread_create(&t, 0, f, 0); }\n"
)


def test_audit_of_glibc(tmp_path: Path) -> None:
    with pytest.raises(
        RefusedError, match=r"pthread_create needs GLIBC_2.34, newer than the target's glibc 2.31"
    ):
        _link(tmp_path, _THREADS, "-pthread", shared="2.38", glibc="2.31")
    _link(tmp_path, _THREADS, "-pthread", shared="2.28", glibc="2.31")


def test_audit_of_alignment(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"LOAD segment at 0x.* is aligned to 0x1000; pages of 16 KiB"):
        _link(tmp_path, _program("nop", "f"), "-Wl,-z,max-page-size=4096")


def test_audit_of_the_stack(rpi: list[Path], tmp_path: Path) -> None:
    data = bytearray(rpi[0].read_bytes())
    with rpi[0].open("rb") as file:
        elf = ELFFile(file)
        kinds = [segment["p_type"] for segment in elf.iter_segments()]
        flags = elf["e_phoff"] + kinds.index("PT_GNU_STACK") * elf["e_phentsize"] + 4
    data[flags] |= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(RefusedError, match="stack would be executable"):
        audit(tmp_path / "x", "", "2.28")


# ---- the same bits on every board ----


@pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (qemu-user)")
def test_same_bits_on_every_board(rpi: list[Path], tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, 0)
    host = build("host")[0]

    def run(*command: str | Path) -> bytes:
        return subprocess.run(command, check=True, capture_output=True).stdout

    verify = ["verify", "-m", bundle, "-t", "1"]
    generate = ["generate", "-m", bundle, "-t", "1", "--raw", "-p", "The boat", "-n", "8", "--ignore-eos"]
    digest, text = run(host, *verify), run(host, *generate)
    assert digest
    assert text
    for cpu, dotprod in (("cortex-a53", False), ("cortex-a72", False), ("cortex-a76", True)):
        board = ("qemu-aarch64", "-cpu", cpu, rpi[0])
        assert run(*board, *verify) == digest
        assert run(*board, *generate) == text
        assert (b"dotprod" in run(*board, "info", "--cpu")) == dotprod


# ---- wheel ----


def test_wheel_runs_without_the_repository(tmp_path: Path) -> None:
    wheel = build_wheel("host")
    assert re.fullmatch(r"mxdraft-[\d.]+-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", tmp_path / "site", wheel], check=True)
    bundle = make_bundle(tmp_path, 0)
    environment = {key: value for key, value in os.environ.items() if key not in ("MXDRAFT_LIBRARY", "CC")}
    done = subprocess.run(
        [sys.executable, "-c", "import mxdraft.cli; mxdraft.cli.main()", "verify", "-m", bundle],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("[0-9a-f]{64}\n", done.stdout)


def test_source_distribution_installs_where_there_is_only_python(tmp_path: Path) -> None:
    """Its library and command line compute the same bits. Neither tests nor models come along."""
    (archive,) = SdistBuilder(str(REPOSITORY)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as file:
        folders = {name.split("/")[1] for name in file.getnames()}
    assert folders >= {"toolchain", "runtime", "targets", "hatch_build.py", "LICENSE", "README.md"}
    assert not folders & {"tests", "bench", "models", "build", "docs", ".ci"}
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-build-isolation",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("MXDRAFT_LIBRARY", "MXDRAFT_CLI", "CC")}
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "--no-deps", "--no-index", "--target", site, archive],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    bundle = make_bundle(tmp_path, 0)
    python = [sys.executable, "-c", "import mxdraft.cli; mxdraft.cli.main()"]
    found = [
        subprocess.run(
            [*program, "verify", "-m", bundle],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(site)},
            capture_output=True,
            check=True,
        ).stdout
        for program in (python, [site / "mxdraft" / "_runtime" / "mxdraft"])
    ]
    assert found[0] == found[1] != b""
    serve = subprocess.run(
        [*python, "serve", "-m", tmp_path / "none"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        check=False,
    )
    assert (serve.returncode, b"no such file" in serve.stderr) == (3, True)


def test_wheel_for_the_pi(rpi: list[Path]) -> None:
    wheel = build_wheel("rpi")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_aarch64.whl")
    first = wheel.read_bytes()
    assert build_wheel("rpi").read_bytes() == first
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert archive.read("mxdraft/_runtime/libmxdraft.so") == rpi[1].read_bytes()
        assert archive.read("mxdraft/_runtime/mxdraft") == rpi[0].read_bytes()
        assert archive.getinfo("mxdraft/_runtime/mxdraft").external_attr >> 16 & 0o111
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert {"mxdraft/ship/deploy/device.sh", "mxdraft/trace/page.html", "mxdraft/trace/page.js"} <= set(names)
    assert re.search(r"^Requires-Dist: numpy>=[\d.]+$", text, re.MULTILINE)
    assert re.search(r"^Requires-Dist: onnx<.*; extra == 'toolchain'$", text, re.MULTILINE)
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|bench/|peers/", name)]


def test_wheel_needs_a_library() -> None:
    with pytest.raises(RefusedError, match="rpi4 has no library among its outputs"):
        build_wheel("rpi4")


# ---- Debian package ----


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
def test_debian_package(rpi: list[Path], tmp_path: Path) -> None:
    package = build_deb("rpi")
    first = package.read_bytes()
    assert re.fullmatch(r"mxdraft_[\d.]+-1_arm64\.deb", package.name)
    assert build_deb("rpi").read_bytes() == first
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "root"], check=True)
    subprocess.run(["dpkg-deb", "--control", package, tmp_path / "control"], check=True)
    assert (tmp_path / "root/usr/bin/mxdraft").read_bytes() == rpi[0].read_bytes()
    assert (tmp_path / "root/usr/bin/mxdraft").stat().st_mode & 0o777 == 0o755
    subprocess.run(
        ["md5sum", "--check", "--quiet", tmp_path / "control/md5sums"], cwd=tmp_path / "root", check=True
    )
    fields = (tmp_path / "control/control").read_text(encoding="utf-8")
    assert "\nArchitecture: arm64\n" in fields
    assert "\nDepends:" not in fields
    commands = re.findall(
        r"^  (\w+)  ", subprocess.check_output([build("host")[0], "--help"], text=True), re.MULTILINE
    )
    assert "serve" in commands
    manual = gzip.decompress((tmp_path / "root/usr/share/man/man1/mxdraft.1.gz").read_bytes()).decode()
    assert re.findall(r"^\.SS (\w+)$", manual, re.MULTILINE) == commands
    assert r"\-\-draft\-max N" in manual
    share = tmp_path / "root/usr/share"
    for shell in ("fish/vendor_completions.d/mxdraft.fish", "zsh/vendor-completions/_mxdraft"):
        text = (share / shell).read_text(encoding="utf-8")
        assert all(command in text for command in commands)
        assert "draft-max" in text
    source = share / "bash-completion/completions/mxdraft"
    for words, expected in (("mxdraft ge", "generate"), ("mxdraft serve --po", "--port")):
        script = f"source {source}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _mxdraft; "
        assert (
            subprocess.check_output(["bash", "-c", script + 'echo "${COMPREPLY[@]}"'], text=True)
            == expected + "\n"
        )


@pytest.mark.skipif(shutil.which("lintian") is None, reason="needs lintian")
def test_debian_package_is_clean() -> None:
    found = subprocess.run(["lintian", build_deb("rpi")], capture_output=True, encoding="utf-8", check=False)
    assert found.stdout == ""


# ---- make ----

OUTPUTS = ("build/host/mxdraft", "build/smollm2-135m/export.json", "build/smollm2-135m.mxb")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout after `make demo`, for make's eyes: the sources are old, what was built is not."""
    root = tmp_path_factory.mktemp("made")
    for folder in ("runtime", "targets", "toolchain"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(REPOSITORY / name, root / name)
    artefacts = [
        f"models/smollm2-135m/{path.name}" for path in (REPOSITORY / "models/smollm2-135m").iterdir()
    ]
    for name in (*artefacts, ".venv/installed", *OUTPUTS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for path in root.rglob("*"):
        os.utime(path, (1000, 1000))
    for age, name in enumerate((".venv/installed", *OUTPUTS)):
        os.utime(root / name, (2000 + age, 2000 + age))
    return root


def would_run(root: Path) -> str:
    """What make would run for the bundle."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "--no-print-directory", "build/smollm2-135m.mxb"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize(
    ("edited", "commands"),
    [
        ("models/smollm2-135m/schedule.toml", ["pack"]),
        ("models/smollm2-135m/teacher_text.npz", ["pack"]),
        ("toolchain/mxdraft/pack.py", ["pack"]),
        ("toolchain/mxdraft/bundle/format.py", ["pack"]),
        ("models/smollm2-135m/qat.delta", ["export", "pack"]),
        ("models/smollm2-135m/drafter.npz", ["export", "pack"]),
        ("toolchain/mxdraft/export/graph.py", ["export", "pack"]),
        ("toolchain/mxdraft/checkpoint/gguf_file.py", ["export", "pack"]),
        ("toolchain/mxdraft/mx.py", ["export", "pack"]),
        ("toolchain/mxdraft/ship/build.py", ["build", "pack"]),
        ("runtime/include/mxdraft.h", ["build", "pack"]),
    ],
)
def test_make_rebuilds_what_an_edit_makes_stale(made: Path, edited: str, commands: list[str]) -> None:
    assert "mxdraft" not in would_run(made)
    os.utime(made / edited, (3000, 3000))
    try:
        assert re.findall(r"^\.venv/bin/mxdraft (\w+)", would_run(made), re.MULTILINE) == commands
    finally:
        os.utime(made / edited, (1000, 1000))


# ---- release ----


@pytest.mark.skipif(platform.machine() != "x86_64", reason="releases are made on x86-64")
def test_release_is_reproducible_and_lists_itself(tmp_path: Path) -> None:
    files = build_release(tmp_path / "a")
    again = build_release(tmp_path / "b")
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
    assert sorted(path.name for path in files) == sorted(path.name for path in (tmp_path / "a").iterdir())
    for ending in (".tar.gz", "_x86_64.whl", "_aarch64.whl", "_amd64.deb", "_arm64.deb"):
        assert len([path for path in files if path.name.endswith(ending)]) == 1
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=tmp_path / "a", check=True)
    bill = json.loads((tmp_path / "a/mxdraft.cdx.json").read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed = {each["name"]: each for each in bill["components"]}
    for path in files[:-2]:  # all but the two lists
        (digest,) = listed[path.name]["hashes"]
        assert digest["content"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert {"musl", "numpy", "cffi", "click"} <= listed.keys()
    files[0].write_bytes(b"damaged")
    assert subprocess.run(check, cwd=tmp_path / "a", capture_output=True, check=False).returncode == 1


def test_release_is_refused_where_host_is_no_x86_64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RefusedError, match="host is aarch64, a release needs x86_64: make it on x86-64"):
        build_release(tmp_path / "a")
    assert not (tmp_path / "a").exists()
