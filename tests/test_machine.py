# SPDX-License-Identifier: Apache-2.0
"""Memory plan, default threads, thread pool: how the runtime adapts to the machine."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from clib import REPOSITORY, RUNTIME, compile_c, native
from mxdraft.errors import CapacityError, UsageError
from mxdraft.runtime import Engine, Model, Timeline, cpu_describe
from mxdraft.runtime._ffi import load
from mxdraft.ship.build import sources

GCC = shutil.which("gcc")
DRIVERS = REPOSITORY / "tests" / "c"
MIB = 1 << 20


@pytest.fixture
def sysroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, object]], None]:
    """Present the given /proc and /sys files, and no others, to the runtime."""
    monkeypatch.setenv("MXDRAFT_SYSROOT", str(tmp_path / "machine"))

    def present(files: dict[str, object]) -> None:
        shutil.rmtree(tmp_path / "machine", ignore_errors=True)
        for name, content in files.items():
            path = tmp_path / "machine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n", encoding="utf-8")

    return present


def meminfo(kib: int) -> dict[str, object]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {kib} kB\nBuffers: 7 kB"}


# ---- memory plan ----


def test_plan_grows_with_the_context_and_the_sequences(bundle: Path) -> None:
    with Model(bundle) as model:
        info = model.info
        position = info.layers * 2 * info.kv_heads * info.head_dim * 2
        small, large = (model.plan(ctx=ctx, threads=3, max_seqs=2, draft="off") for ctx in (64, 192))
        assert large.kv_cache == 2 * 192 * position
        group = info.heads // info.kv_heads
        assert large.activations - small.activations == 3 * group * 128 * 4  # attention scores of each thread
        assert large.sequences - small.sequences == 2 * 128 * 4  # token ids
        assert large.weights == small.weights
        one = model.plan(ctx=64, threads=3, max_seqs=1, draft="off")
        of_each = small.sequences - one.sequences
        assert one.sequences - of_each > 50_000  # the engine and what it learns of drafts, once
        parts = (small.weights, small.kv_cache, small.activations, small.sequences)
        assert small.total == sum(parts)
        assert model.plan(ctx=64, max_rows=512, draft="off").activations > small.activations
        assert model.plan(precision="full").weights > model.plan(precision="base").weights
        assert model.plan().ctx == 256  # the model's maximum is less than 2048


def test_plan_is_refused_with_the_largest_context_that_fits(bundle: Path, sysroot: Any) -> None:
    with Model(bundle) as model:
        options: dict[str, Any] = {"threads": 1, "max_rows": 8}
        wanted = model.plan(ctx=200, **options)
        sysroot(meminfo(model.plan(ctx=101, **options).total // 1024))
        largest = model.plan(ctx=200, **options).largest_ctx
        available = model.plan(ctx=200, **options).available
        assert available == model.plan(ctx=101, **options).total // 1024 * 1024
        assert model.plan(ctx=largest, **options).total <= available
        assert model.plan(ctx=largest + 1, **options).total > available
        with pytest.raises(CapacityError) as refusal:
            Engine(model, ctx=200, **options)
        assert str(refusal.value) == (
            f"context 200 needs {wanted.total / MIB:.1f} MiB, {available / MIB:.1f} MiB are available: "
            f"the largest that fits is {largest}"
        )
        with Engine(model, ctx=largest, **options) as engine, Timeline(engine, max_tokens=1) as sequence:
            assert len(list(sequence.generate([1, 2, 3]))) == 1

        sysroot(meminfo(1000))
        assert model.plan(**options).largest_ctx == 0
        with pytest.raises(CapacityError, match="the model does not fit"):
            Engine(model, **options)


V2, V1 = "sys/fs/cgroup/memory.", "sys/fs/cgroup/memory/memory."
GROUPS = "proc/self/cgroup"
UNIT, SLICE = "sys/fs/cgroup/system.slice/x.service/memory.", "sys/fs/cgroup/system.slice/memory."
OF_UNIT: dict[str, object] = {GROUPS: "0::/system.slice/x.service"}
V1_UNIT = "sys/fs/cgroup/memory/system.slice/x.service/memory."
V1_OF_UNIT: dict[str, object] = {
    GROUPS: "12:pids:/\n7:cpu,cpuacct:/y\n4:memory:/system.slice/x.service\n1:name=systemd:/z\n0::/z"
}
CACHED = f"anon 7\nfile {20 * MIB}\ninactive_file {12 * MIB}\nactive_file {8 * MIB}\nworkingset 9"
V1_CACHED = f"inactive_file 5\nactive_file 5\ntotal_inactive_file {12 * MIB}\ntotal_active_file {8 * MIB}"


def limit(prefix: str, most: object, used: int) -> dict[str, object]:
    """The files of a group by version 2; ``used`` in MiB."""
    return {prefix + "max": most, prefix + "current": used * MIB}


def v1_limit(prefix: str, most: int, used: int) -> dict[str, object]:
    return {prefix + "limit_in_bytes": most, prefix + "usage_in_bytes": used * MIB}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 64 * MIB),
        ({V2 + "max": 40 * MIB, V2 + "current": 10 * MIB}, 30 * MIB),
        ({V2 + "max": 400 * MIB, V2 + "current": 10 * MIB}, 64 * MIB),
        ({V2 + "max": "max", V2 + "current": 10 * MIB}, 64 * MIB),
        ({V2 + "max": 10 * MIB, V2 + "current": 11 * MIB}, 0),
        ({V1 + "limit_in_bytes": 20 * MIB, V1 + "usage_in_bytes": 5 * MIB}, 15 * MIB),
        ({V1 + "limit_in_bytes": 0x7FFFFFFFFFFFF000, V1 + "usage_in_bytes": 5 * MIB}, 64 * MIB),
        (OF_UNIT | limit(UNIT, 40 * MIB, 10), 30 * MIB),
        (OF_UNIT | limit(UNIT, "max", 10) | limit(SLICE, 30 * MIB, 10), 20 * MIB),
        (OF_UNIT | limit(UNIT, 40 * MIB, 30) | limit(SLICE, 60 * MIB, 40), 10 * MIB),
        (OF_UNIT | limit(UNIT, 40 * MIB, 10) | limit(V2, 60 * MIB, 45), 15 * MIB),
        (limit(UNIT, 40 * MIB, 10), 64 * MIB),
        (
            {GROUPS: "0::/../other"} | limit("sys/fs/other/memory.", 1 * MIB, 0) | limit(V2, 40 * MIB, 5),
            35 * MIB,
        ),
        (V1_OF_UNIT | v1_limit(V1_UNIT, 40 * MIB, 10), 30 * MIB),
        (V1_OF_UNIT | v1_limit(V1_UNIT, 40 * MIB, 10) | v1_limit(V1, 50 * MIB, 30), 20 * MIB),
        (V1_OF_UNIT | v1_limit(V1, 50 * MIB, 30), 20 * MIB),
        (OF_UNIT | limit(UNIT, 40 * MIB, 30) | {UNIT + "stat": CACHED}, 30 * MIB),
        (limit(V2, 40 * MIB, 15) | {V2 + "stat": CACHED}, 40 * MIB),
        (V1_OF_UNIT | v1_limit(V1_UNIT, 40 * MIB, 30) | {V1_UNIT + "stat": V1_CACHED}, 30 * MIB),
        ({GROUPS: "0::/" + "d/" * 2100} | limit(V2, 40 * MIB, 5), 35 * MIB),
    ],
    ids=[
        *("none", "v2", "v2_above", "v2_unlimited", "v2_exceeded", "v1", "v1_unlimited"),
        *("unit", "slice", "unit_in_slice", "root_around", "not_ours", "outside_of_a_container"),
        *("v1_unit", "v1_root_around", "v1_container", "file_pages", "mostly_file_pages", "v1_file_pages"),
        "long_path",
    ],
)
def test_available_is_the_least_of_machine_and_cgroup(
    bundle: Path, sysroot: Any, files: dict[str, object], available: int
) -> None:
    sysroot(meminfo(64 * 1024) | files)
    with Model(bundle) as model:
        assert model.plan().available == available


def test_available_respects_the_address_space_limit(bundle: Path) -> None:
    code = (
        "import resource, sys\n"
        "from mxdraft.runtime import Model\n"
        "with Model(sys.argv[1]) as model:\n"
        "    pages = int(open('/proc/self/statm', encoding='ascii').read().split()[0])\n"
        "    used = pages * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), -1))\n"
        "    print(model.plan().available - model.info.file_bytes)\n"
    )
    # Between the two readings Python may map memory of its own.
    assert 4 * MIB < int(python(code, str(bundle))) <= 8 * MIB


# ---- threads ----

CPU = "sys/devices/system/cpu/cpu{}/"
CAPACITY, FREQUENCY = CPU + "cpu_capacity", CPU + "cpufreq/cpuinfo_max_freq"
QUOTA = "sys/fs/cgroup/cpu.max"
V1_QUOTA = "sys/fs/cgroup/cpu/cpu.cfs_quota_us"
V1_PERIOD = "sys/fs/cgroup/cpu/cpu.cfs_period_us"
V1_Y_QUOTA, V1_Y_PERIOD = "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/y/cpu.cfs_period_us"
SLICE_QUOTA = "sys/fs/cgroup/system.slice/cpu.max"
UNIT_QUOTA = "sys/fs/cgroup/system.slice/x.service/cpu.max"


def cores(path: str, *values: int) -> dict[str, object]:
    return {path.format(cpu): value for cpu, value in enumerate(values)}


@pytest.mark.parametrize(
    ("mask", "files", "threads"),
    [
        (0xFF, {}, 8),
        (0x5A, {}, 4),
        ((1 << 100) - 1, {}, 64),  # the most that an engine takes
        (0xFF, {QUOTA: "max 100000"}, 8),
        (0xFF, {QUOTA: "50000 100000"}, 1),
        (0xFF, {QUOTA: "250000 100000"}, 2),
        (0x03, {QUOTA: "400000 100000"}, 2),
        (0xFF, {V1_QUOTA: 300000, V1_PERIOD: 100000}, 3),
        (0xFF, {V1_QUOTA: -1, V1_PERIOD: 100000}, 8),
        (0xFF, OF_UNIT | {UNIT_QUOTA: "300000 100000"}, 3),
        (0xFF, OF_UNIT | {UNIT_QUOTA: "max 100000", SLICE_QUOTA: "200000 100000"}, 2),
        (0xFF, OF_UNIT | {UNIT_QUOTA: "300000 100000", QUOTA: "150000 100000"}, 1),
        (0xFF, V1_OF_UNIT | {V1_Y_QUOTA: 500000, V1_Y_PERIOD: 100000}, 5),
        (0xFF, cores(CAPACITY, 446, 446, 446, 446, 1024, 1024), 2),
        (0x0F, cores(CAPACITY, 446, 446, 446, 446, 1024, 1024), 4),  # no fast core is allowed
        (0x1F, cores(CAPACITY, 446, 446, 446, 446, 1024, 1024), 1),
        (0x3F, cores(FREQUENCY, 1800000, 1800000, 1800000, 2400000, 2400000, 2400000), 3),
        (0x0F, cores(FREQUENCY, 9, 9, 9, 9) | cores(CAPACITY, 512, 512, 512, 1024), 1),
        (0x3F, cores(CAPACITY, 446, 446, 446, 1024, 1024, 1024) | {QUOTA: "200000 100000"}, 2),
    ],
)
def test_default_threads(
    internals: tuple[Any, Any], sysroot: Any, mask: int, files: dict[str, object], threads: int
) -> None:
    _, lib = internals
    sysroot(files)
    lib.allow_cpus(mask % 2**64, mask >> 64)
    assert lib.mxd_default_threads() == threads


def test_default_threads_follow_the_real_affinity() -> None:
    code = (
        "import os\n"
        "from mxdraft.runtime import default_threads\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "print(default_threads())\n"
    )
    assert python(code) == "1"


def test_unknown_level_in_the_cpu_mask_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXDRAFT_CPU_MASK", "avx2,neno")
    expected = "MXDRAFT_CPU_MASK: unknown level 'neno' (known: avx2, avx512, neon, dotprod, i8mm)"
    with Model(bundle) as model, pytest.raises(UsageError, match=re.escape(expected)):
        Engine(model)
    assert cpu_describe() == f"error {expected}\n"
    monkeypatch.setenv("MXDRAFT_CPU_MASK", "avx2,avx512,,neon,dotprod,i8mm,")
    assert set(re.findall(r"_([a-z0-9]+)$", cpu_describe(), re.MULTILINE)) == {"ref"}


# ---- the token path ----


@pytest.fixture(scope="module")
def token_path(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, int]]:
    """What the driver counts with so many threads that spin so often at a barrier before they sleep, and so
    many sequences that verify so many drafted tokens each (0: as many as pay)."""

    @cache
    def program(spins: int) -> Path:
        return compile_c(
            native("gnu.2.28"),
            tmp_path_factory.mktemp("token_path") / "token_path",
            *("-O1", f"-DMXD_POOL_SPINS={spins}", "-rdynamic", "-fvisibility=default"),
            *(DRIVERS / "token_path.c", *sources("library"), "-lm", "-ldl"),
        )

    def count(threads: int, spins: int, sequences: int = 3, drafts: int = 0) -> dict[str, int]:
        command = [program(spins), bundle, *map(str, (threads, sequences, drafts))]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
        assert (done.returncode, done.stderr) == (0, "")
        counts = {name: int(number) for name, number in (line.split() for line in done.stdout.splitlines())}
        assert counts["opening"] > 5  # the counter works
        assert counts["tokens"] == 5 + 20 + 20 + counts["accepted"]  # prompt, steps alone and with others
        return counts

    return count


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_neither_allocate_nor_lock(token_path: Callable[..., Any], threads: int) -> None:
    counts = token_path(threads, 2**31 - 1)
    assert [counts[name] for name in ("allocations", "locks", "waits", "wakes")] == [0, 0, 0, 0]


def test_the_widest_steps_neither_allocate_nor_lock(token_path: Callable[..., Any]) -> None:
    """48 sequences with 8 drafts each rank 384 nodes. glibc's qsort allocates from 128 of them on."""
    counts = token_path(1, 2**31 - 1, sequences=48, drafts=8)
    assert counts["drafted"] > 18 * 384
    assert [counts[name] for name in ("allocations", "locks", "waits", "wakes")] == [0, 0, 0, 0]


def test_threads_that_waited_long_sleep(token_path: Callable[..., Any]) -> None:
    counts = token_path(2, 0)
    assert counts["allocations"] == 0
    assert counts["locks"] > 40  # these are counted
    assert counts["waits"] > 0
    assert counts["wakes"] > 0


# ---- thread pool ----


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stress program, under ThreadSanitizer."""
    if GCC is None:
        pytest.skip("gcc and its sanitizers are missing")
    return compile_c(
        [GCC, "-g", "-fsanitize=thread", "-Wl,--wrap=pthread_create"],
        tmp_path_factory.mktemp("pool") / "pool_stress",
        *(DRIVERS / "pool_stress.c", RUNTIME / "src" / "threads.c", RUNTIME / "src" / "status.c"),
    )


def stress(pool: Path, *arguments: int) -> str:
    """Standard output of the stress program, which must report no race and end by itself."""
    command = [str(pool), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(("threads", "rounds"), [(1, 2000), (2, 2000), (4, 1000)])
def test_pool_rounds_neither_race_nor_lose_a_write(pool: Path, threads: int, rounds: int) -> None:
    expected = sum(r * threads * threads * (threads + 1) // 2 for r in range(rounds))
    assert stress(pool, threads, rounds) == f"{expected} {expected}"


@pytest.mark.parametrize("failing", [2, 3, 4])
def test_thread_that_cannot_be_started_is_an_error(pool: Path, failing: int) -> None:
    status = load().lib.MXD_ERR_MEMORY
    reason = os.strerror(errno.EAGAIN)
    assert stress(pool, 4, 1, failing) == f"{status} cannot start thread {failing} of 4: {reason} closed"


def test_engine_has_no_data_race(bundle: Path, tmp_path: Path) -> None:
    if GCC is None:
        pytest.skip("gcc and its sanitizers are missing")
    program = compile_c([GCC, "-fsanitize=thread"], tmp_path / "mxdraft", "-g", "-O1", *sources("cli"), "-lm")
    # The prompt is a step of many rows; the steps after it have one.
    command = [
        str(program),
        "generate",
        "-m",
        str(bundle),
        "-p",
        "The boat",
        "-n",
        "4",
        "-t",
        "3",
        "--ignore-eos",
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    report = done.stderr.decode("utf-8", "replace")
    assert (done.returncode, "ThreadSanitizer" in report) == (0, False), report


def python(code: str, *arguments: str) -> str:
    """What a Python program prints, without its line end."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
