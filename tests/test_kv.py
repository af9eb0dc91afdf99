# SPDX-License-Identifier: Apache-2.0
"""Quantized and tiered KV caches: still one answer everywhere, and tiers that change where they should."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import cffi
import numpy as np
import pytest
import tiny
from clib import RUNTIME, compile_c, native, pass_in_debug_build
from drafters import PROPOSERS, Knowing
from mxdraft.bundle import Bundle
from mxdraft.bundle.schedule import Schedule, Weights
from mxdraft.errors import UsageError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import KV, Engine, Model, Timeline
from mxdraft.ship.build import sources
from numpy.typing import NDArray
from test_speculation import set_costs

REFERENCE = "avx2,avx512,neon,dotprod,i8mm"  # the mask that leaves the scalar reference
QUANTIZED: tuple[KV, ...] = ("int8", "mxfp4", "tiered")
BLOCK = 32
SINKS = 4
IDS = random.Random(11).choices(range(3, 500), k=250)


def scheduled(bundle: Path, folder: Path, **changes: Any) -> Path:
    """A bundle whose tiers change early: a window of 32 tokens, a tenth of the others core."""
    data = bundle.read_bytes()
    default = Schedule.default(Bundle(data).config.layers)
    schedule = dataclasses.replace(default, **{"sinks": SINKS, "recent": 32, "core_tokens": 0.1} | changes)
    path = folder / "scheduled.mxb"
    path.write_bytes(tiny.with_schedule(data, schedule))
    return path


@pytest.fixture(scope="module")
def model(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Fixture T with a drafter and early tiers."""
    folder = tmp_path_factory.mktemp("kv")
    data = bundle.read_bytes()
    drafting = folder / "drafting.mxb"
    drafting.write_bytes(tiny.with_drafter(data, tiny.drafter(Bundle(data).config)))
    with Model(scheduled(drafting, folder)) as opened:
        yield opened


def logits(
    model: Model, kv: KV, ids: list[int], piece: int = 64, rows: int = 64, threads: int = 1, **options: Any
) -> NDArray[np.float32]:
    with (
        Engine(model, max_rows=rows, threads=threads, kv=kv, draft="off", **options) as engine,
        Timeline(engine) as sequence,
    ):
        return np.concatenate([sequence.logits(ids[i : i + piece]) for i in range(0, len(ids), piece)])


def divergence(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """Mean KL of rows of logits."""
    a, b = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p.astype(np.float64), q.astype(np.float64)))
    return float((np.exp(a) * (a - b)).sum(1).mean())


# ---- exactness ----


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("precision", ["base", "full"])
def test_logits_depend_on_neither_threads_nor_pieces_nor_instructions(
    model: Model, kv: KV, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(model, kv, IDS[:170], precision=precision).tobytes()
    for piece, rows, threads in ((1, 64, 2), (7, 64, 3), (45, 5, 1), (170, 512, 4)):
        found = logits(model, kv, IDS[:170], piece, rows, threads, precision=precision)
        assert found.tobytes() == expected
    monkeypatch.setenv("MXDRAFT_CPU_MASK", REFERENCE)
    assert logits(model, kv, IDS[:170], precision=precision).tobytes() == expected


@pytest.mark.parametrize("kv", QUANTIZED)
def test_the_context_changes_nothing(model: Model, kv: KV) -> None:
    found = {logits(model, kv, IDS[:130], ctx=ctx).tobytes() for ctx in (130, 161, 256)}
    assert len(found) == 1


def answer(
    model: Model, kv: KV, prompt: list[int], drafter: str = "off", seed: int = 0, **sampling: Any
) -> tuple[list[int], int]:
    """100 tokens after a prompt, and how many drafted ones were accepted."""
    known = drafter in PROPOSERS
    with (
        Engine(
            model,
            threads=2 if known else 1,
            precision="base",
            kv=kv,
            draft="ngram" if known else drafter,  # type: ignore[arg-type]
            draft_max=15,
        ) as engine,
        Timeline(engine, max_tokens=100, ignore_eos=True, seed=seed, **sampling) as sequence,
    ):
        set_costs(engine, row=0.001)
        sequence.prompt(prompt)
        if known:
            plain, _ = answer(model, kv, prompt, seed=seed, **sampling)
            sequence.draft_with(Knowing(PROPOSERS[drafter], len(prompt), plain[len(prompt) :]))
        while sequence.stop == "none":
            engine.step([sequence])
        return sequence.tokens, sequence.stats["accepted"]


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("drafter", [*PROPOSERS, "ngram", "model", "auto"])
def test_drafts_change_nothing(model: Model, kv: KV, drafter: str) -> None:
    for sampling in ({}, {"temperature": 0.8, "seed": 3}):
        expected, _ = answer(model, kv, IDS[:61], **sampling)
        found, accepted = answer(model, kv, IDS[:61], drafter, **sampling)
        assert found == expected
        assert accepted > 60 or drafter != "oracle"


@pytest.mark.parametrize("kv", QUANTIZED)
def test_sequences_do_not_touch_each_other(model: Model, kv: KV) -> None:
    prompts = [IDS[:90], IDS[90:100], IDS[5:140], IDS[50:82]]
    alone = [answer(model, kv, prompt)[0] for prompt in prompts]
    with Engine(model, threads=3, precision="base", kv=kv, max_seqs=4, max_rows=33, draft="auto") as engine:
        running: list[Timeline] = []
        for prompt in prompts:
            running.append(Timeline(engine, max_tokens=100, ignore_eos=True))
            running[-1].prompt(prompt)
            engine.step(running)
        while any(sequence.stop == "none" for sequence in running):
            engine.step(running)
        assert [sequence.tokens for sequence in running] == alone


@pytest.mark.parametrize("kv", ["f16", *QUANTIZED])
@pytest.mark.parametrize("steps", [1, 4, 30])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_copy_goes_on_as_the_original(model: Model, kv: KV, steps: int, mixed: bool) -> None:
    """A copy made within a prompt or an answer has the same output, drafts and records, whatever other
    copies do."""
    options: dict[str, Any] = {"core_fraction": 0.3, "catch_up": 8} if mixed else {"precision": "base"}
    sampling: dict[str, Any] = {"max_tokens": 90, "ignore_eos": True, "temperature": 0.8, "seed": 2}
    with (
        Engine(
            model, ctx=256, threads=1, max_seqs=3, max_rows=80, kv=kv, draft="model", draft_min=2, **options
        ) as engine,
        Timeline(engine, **sampling) as original,
    ):
        original.prompt(IDS[:100])
        for _ in range(steps):
            engine.step([original])
        with Timeline(engine, max_tokens=40, copy_of=original) as other:
            other.prompt(IDS[200:240])
            while other.stop == "none":
                engine.step([other])
        sampling["max_tokens"] -= original.stats["generated_tokens"]
        with Timeline(engine, copy_of=original, **sampling) as copy:
            if steps == 30:
                assert copy.cache == original.cache
                assert copy.tiers == original.tiers
            drafted = 0
            while original.stop == "none":
                engine.step([original, copy])
                assert (copy.output, copy.records) == (original.output, original.records)
                assert (copy.drafts, copy.stop) == (original.drafts, original.stop)
                drafted += len(copy.drafts)
            assert drafted > 30
            assert copy.cache == original.cache
        tokens = original.tokens
    with (
        Engine(model, ctx=256, threads=1, kv=kv, draft="off", **options) as engine,
        Timeline(engine, **sampling | {"max_tokens": 90}) as alone,
    ):
        for _ in alone.generate(IDS[:100]):
            pass
        assert alone.tokens == tokens


def test_a_copy_of_what_was_truncated_is_known_as_well(model: Model) -> None:
    with (
        Engine(model, ctx=256, threads=1, precision="base", max_seqs=2, kv="tiered", draft="off") as engine,
        Timeline(engine, max_tokens=20, ignore_eos=True) as original,
    ):
        for _ in original.generate(IDS[:160]):
            pass
        original.truncate(65)
        with Timeline(engine, max_tokens=20, ignore_eos=True, copy_of=original) as copy:
            with pytest.raises(UsageError, match="nothing to continue"):
                copy.prompt([])
            for sequence in (copy, original):
                for _ in sequence.generate(IDS[200:203]):
                    pass
            assert copy.tokens == original.tokens


def test_a_copy_in_a_prompt_counts_what_is_left_of_it(model: Model) -> None:
    with (
        Engine(model, ctx=256, threads=1, precision="base", max_seqs=2, max_rows=16, draft="off") as engine,
        Timeline(engine) as original,
    ):
        original.prompt(IDS[:40])
        engine.step([original])
        with Timeline(engine, copy_of=original) as copy:
            assert copy.stats["prompt_tokens"] == 24


@pytest.mark.parametrize("weights", [Weights(1, 0, 0, 0), Weights(0, 1, 0, 0)])
def test_tiers_of_a_copy_change_as_the_originals(bundle: Path, tmp_path: Path, weights: Weights) -> None:
    path = scheduled(bundle, tmp_path, sinks=0, core_tokens=0.3, memory=weights)
    with (
        Model(path) as opened,
        Engine(opened, ctx=256, threads=1, precision="base", max_seqs=2, kv="tiered", draft="off") as engine,
        Timeline(engine, max_tokens=195, ignore_eos=True) as original,
    ):
        original.prompt(IDS[:60])
        for _ in range(70):
            engine.step([original])
        tiers = original.tiers
        with Timeline(engine, max_tokens=40, ignore_eos=True) as before:  # whose place the copy takes
            for _ in before.generate(IDS[100:200]):
                pass
        with Timeline(engine, max_tokens=125, ignore_eos=True, copy_of=original) as copy:
            while original.stop == "none":
                engine.step([original, copy])
                assert copy.tiers == original.tiers
        assert original.tiers[: len(tiers)] != tiers


@pytest.mark.parametrize("kv", QUANTIZED)
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 120, 159])
def test_what_was_truncated_leaves_no_trace(model: Model, kv: KV, length: int) -> None:
    kept, more = IDS[:length], IDS[200:240]
    fresh = logits(model, kv, kept + more, precision="base")[length:]
    with (
        Engine(model, precision="base", kv=kv, draft="model") as engine,
        Timeline(engine, max_tokens=20, ignore_eos=True) as sequence,
    ):
        for _ in sequence.generate(IDS[:160]):
            pass
        sequence.truncate(length)
        assert sequence.tokens == kept
        if kept:
            with pytest.raises(UsageError, match="nothing to continue"):
                sequence.prompt([])
            with pytest.raises(UsageError, match="prompt it first"):
                engine.step([sequence])
        assert sequence.logits(more).tobytes() == fresh.tobytes()
        sequence.truncate(length)
        for _ in sequence.generate(more):
            pass
        expected, _ = answer(model, kv, kept + more)
        assert sequence.tokens == expected[: length + 60]


def test_nothing_reads_what_rejected_rows_left(tmp_path: Path) -> None:
    pass_in_debug_build(__file__, "change_nothing and (tree or auto)", tmp_path)


# ---- what is kept ----


def test_finer_formats_err_less(model: Model) -> None:
    exact = logits(model, "f16", IDS, precision="full")
    errors = [divergence(exact, logits(model, kv, IDS, precision="full")) for kv in QUANTIZED]
    int8, mxfp4, tiered = errors
    assert 0 < int8 < tiered < mxfp4
    assert int8 < 0.02 * mxfp4  # most of it is the noise of activations that round otherwise


def test_nothing_is_quantized_unasked(model: Model) -> None:
    assert logits(model, "auto", IDS).tobytes() == logits(model, "f16", IDS).tobytes()


def quota(aged: int, share: float = 0.1) -> int:
    return min(aged, SINKS + int(np.float32(share) * np.float32(aged)))


def test_tiers_change_at_multiples_of_the_block(model: Model) -> None:
    """The window holds 32 to 64 tokens; a block that leaves it becomes core while there is room."""
    with Engine(model, kv="tiered") as engine, Timeline(engine) as sequence:
        before: list[str] = []
        for done, token in enumerate(IDS, start=1):
            sequence.logits([token])
            # The change comes before the next row: after 64 processed tokens, the 65th sees 32 aged ones.
            aged = max(0, (done - 1 - 32) // BLOCK * BLOCK)
            use = sequence.cache
            assert (use.recent, use.core, use.far) == (done - aged, quota(aged), aged - quota(aged))
            tiers: list[str] = list(sequence.tiers)
            assert tiers[aged:] == ["recent"] * (done - aged)
            assert tiers[: min(SINKS, aged)] == ["core"] * min(SINKS, aged)
            assert [tiers.count(tier) for tier in ("core", "far")] == [use.core, use.far]
            if aged == max(0, (done - 2 - 32) // BLOCK * BLOCK):
                assert tiers[:-1] == before
            before = tiers
            bits = (8.25 * (use.recent + use.core) + 4.25 * use.far) / done
            assert use.bits_per_value == pytest.approx(bits)
            assert use.bytes == pytest.approx(done * bits / 8 * 4 * 2 * 2 * 32)


@pytest.mark.parametrize(("kv", "bits"), [("f16", 16), ("int8", 8.25), ("mxfp4", 4.25)])
def test_without_tiers_all_is_recent(model: Model, kv: KV, bits: float) -> None:
    with Engine(model, kv=kv) as engine, Timeline(engine) as sequence:
        sequence.logits(IDS)
        assert sequence.cache == (250, 0, 0, bits, 250 * 4 * 2 * 2 * 32 * bits / 8)
        assert set(sequence.tiers) == {"recent"}


def test_attention_decides_what_is_core(model: Model, bundle: Path, tmp_path: Path) -> None:
    """The schedule's weights decide which tokens are core, not how many."""

    def core(opened: Model) -> set[int]:
        with Engine(opened, kv="tiered") as engine, Timeline(engine) as sequence:
            sequence.logits(IDS)
            return {i for i, tier in enumerate(sequence.tiers) if tier == "core"}

    most = core(model)
    with Model(scheduled(bundle, tmp_path, memory=Weights(0, -1, 0, 0))) as opened:
        least = core(opened)
    assert len(most) == len(least) == quota(192)
    assert len(most & least) < len(most) / 2


def test_the_lowest_scores_are_demoted_first(bundle: Path, tmp_path: Path) -> None:
    """Here only control tokens score: they stay, instead of others that came first."""
    ids = list(IDS)
    special = [40, 70, 100, 131, 165]
    for position in special:
        ids[position] = 1
    with (
        Model(scheduled(bundle, tmp_path, memory=Weights(0, 0, 1, 0), core_tokens=0.03)) as opened,
        Engine(opened, kv="tiered") as engine,
        Timeline(engine) as sequence,
    ):
        sequence.logits(ids)
        tiers = sequence.tiers
        assert [i for i, tier in enumerate(tiers) if tier == "core"] == [*range(SINKS), *special]
        assert quota(192, 0.03) == SINKS + len(special)


@pytest.mark.parametrize("alpha", [1, -1])
def test_doubt_decides_what_is_core(bundle: Path, tmp_path: Path, alpha: int) -> None:
    """A token's doubt is that of the row that chose it; prompt tokens have none."""
    with (
        Model(scheduled(bundle, tmp_path, memory=Weights(alpha, 0, 0, 0))) as opened,
        Engine(opened, kv="tiered") as engine,
        Timeline(engine, temperature=1.0, seed=3, ignore_eos=True) as sequence,
    ):
        doubt = dict.fromkeys(range(4), 0.0)
        sequence.prompt(IDS[:4])
        while sequence.stop == "none":
            engine.step([sequence])
            doubt |= {record.position: record.confidence for record in sequence.records}
        tiers = sequence.tiers
        core = [alpha * doubt[i] for i, tier in enumerate(tiers) if tier == "core" and i >= SINKS]
        far = [alpha * doubt[i] for i, tier in enumerate(tiers) if tier == "far"]
    assert len(core) > 10
    assert min(core) > np.median(far)


def test_a_budget_sets_the_share_of_core_tokens(model: Model) -> None:
    for budget in (5.5, 6.0, 7.0, 8.25):
        with Engine(model, ctx=250, kv="tiered", kv_budget=budget) as engine, Timeline(engine) as sequence:
            sequence.logits(IDS)
            assert budget - 0.15 < sequence.cache.bits_per_value <= budget


def test_the_plan_shrinks_with_the_format(model: Model) -> None:
    plans = {kv: model.plan(ctx=256, kv=kv, draft="off") for kv in get_args(KV)}
    sizes = {kv: plan.kv_cache for kv, plan in plans.items()}
    rows = 4 * 2 * 2 * 256
    assert sizes["auto"] == sizes["f16"] == rows * 64
    assert sizes["int8"] == rows * 33
    assert sizes["mxfp4"] == rows * 17
    aged = 192
    assert sizes["tiered"] == 4 * 2 * 2 * ((64 + quota(aged)) * 33 + (aged - quota(aged)) * 17)
    assert {kv: plan.kv for kv, plan in plans.items() if kv != "auto"} == {
        kv: kv for kv in plans if kv != "auto"
    }
    assert model.plan(ctx=256, kv="tiered", kv_budget=8.25, draft="off").kv_cache == sizes["int8"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "int4"}, "kv 'int4': expected one of auto, f16, int8, mxfp4, tiered"),
        ({"kv_budget": 5.0}, "kv_budget is for the tiered KV cache only"),
        ({"kv": "int8", "kv_budget": 5.0}, "kv_budget is for the tiered KV cache only"),
        (
            {"kv": "tiered", "kv_budget": 5.0},
            "kv_budget 5.00: 68 recent and first tokens of context 256 alone",
        ),
        ({"kv": "tiered", "kv_budget": -1.0}, "kv_budget -1.00"),
        ({"kv": "tiered", "kv_budget": float("nan")}, "kv_budget nan"),
    ],
)
def test_options_are_checked(model: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Engine(model, **options)
    assert message in str(caught.value)


def test_heads_must_be_whole_blocks(tmp_path: Path) -> None:
    export_model(tiny.checkpoint(head_dim=48, heads=4, kv_heads=2), tmp_path)
    pack(tmp_path, tmp_path / "t.mxb")
    with Model(tmp_path / "t.mxb") as opened:
        Engine(opened).close()
        for kv in QUANTIZED:
            with pytest.raises(UsageError, match="heads of 48"):
                Engine(opened, kv=kv)


# ---- the monitor ----


def test_attention_adds_up(model: Model, tmp_path: Path) -> None:
    """A row's attention to all positions sums to its whole attention, wherever their keys are stored."""
    ffi = cffi.FFI()
    header = (RUNTIME / "include" / "mxdraft.h").read_text(encoding="utf-8")
    ffi.cdef(header.split("/* <cdef> */")[1].split("/* </cdef> */")[0])
    ffi.cdef("float mxd_attended(const mxd_engine *g, size_t m, size_t from, size_t to);")
    path = tmp_path / "libopen.so"
    options = ("-fvisibility=default", "-shared", "-fPIC")
    lib = ffi.dlopen(str(compile_c(native("gnu.2.28"), path, *options, *sources("library"), "-lm")))
    boxes = [ffi.new(f"mxd_{name} **") for name in ("model", "engine", "seq")]
    settings, sampling = ffi.new("mxd_options *"), ffi.new("mxd_sampling *")
    lib.mxd_options_default(settings)
    lib.mxd_sampling_default(sampling)
    settings.kv = lib.MXD_KV_TIERED
    error = ffi.new("mxd_error *")
    assert lib.mxd_model_open(os.fsencode(model.info.path), boxes[0], error) == 0
    assert lib.mxd_engine_open(boxes[0][0], settings, boxes[1], error) == 0
    assert lib.mxd_seq_open(boxes[1][0], sampling, boxes[2], error) == 0
    out = ffi.new("float[]", 500)
    for position, token in enumerate(IDS):
        assert lib.mxd_seq_logits(boxes[2][0], [token], 1, out, error) == 0
        shares = [lib.mxd_attended(boxes[1][0], 0, i, i + 1) for i in range(position + 1)]
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert lib.mxd_attended(boxes[1][0], 0, 0, 10_000) == pytest.approx(1, abs=1e-5)
        assert lib.mxd_attended(boxes[1][0], 0, position + 1, position + 9) == 0
    for box, name in zip(reversed(boxes), ("seq", "engine", "model"), strict=True):
        getattr(lib, f"mxd_{name}_close")(box)
