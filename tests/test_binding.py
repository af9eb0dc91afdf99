# SPDX-License-Identifier: Apache-2.0
"""The public header and its cffi binding: lifetimes, errors, words, and that batches change no bit."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import mxdraft
import numpy as np
import pytest
import tiny
from clib import RUNTIME, native
from mxdraft import runtime
from mxdraft.bundle import Bundle
from mxdraft.errors import BundleError, CapacityError, RefusedError, UsageError
from mxdraft.runtime import Engine, Model, Timeline, _ffi, cpu_describe, default_threads, version

PROMPTS = ([1, 2, 3, 4, 5], [300, 7, 40], [499])


# ---- lifetimes ----


class Opened(NamedTuple):
    model: Model
    engine: Engine
    sequence: Timeline


@pytest.mark.parametrize(
    "use",
    [
        lambda o: o.model.info,
        lambda o: o.model.encode("x"),
        lambda o: o.model.decode([1]),
        lambda o: o.model.chat([("user", "x")]),
        lambda o: o.model.plan(),
        lambda o: Engine(o.model),
        lambda o: o.engine.plan,
        lambda o: o.engine.verify(),
        lambda o: o.engine.step([]),
        lambda o: Timeline(o.engine),
        lambda o: o.sequence.prompt([1]),
        lambda o: o.sequence.generate([1]),
        lambda o: o.sequence.logits([1]),
        lambda o: o.sequence.truncate(0),
        lambda o: o.sequence.text,
        lambda o: o.sequence.tokens,
        lambda o: o.sequence.stop,
        lambda o: o.sequence.stats,
        lambda o: o.sequence.__enter__(),
    ],
)
def test_use_after_close_is_a_value_error(bundle: Path, use: Callable[[Opened], object]) -> None:
    model = Model(bundle)
    engine = Engine(model, threads=1)
    sequence = Timeline(engine)
    model.close()
    model.close()
    assert model.closed
    assert engine.closed
    assert sequence.closed
    with pytest.raises(ValueError, match=r"this (Model|Engine|Timeline) is closed"):
        use(Opened(model, engine, sequence))


def test_with_closes(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1) as engine, Timeline(engine) as sequence:
        assert not any(opened.closed for opened in (model, engine, sequence))
    assert model.closed
    assert engine.closed
    assert sequence.closed


def test_closed_sequence_leaves_its_place(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1) as engine:
        first = Timeline(engine)
        with pytest.raises(UsageError, match="all 1 sequences"):
            Timeline(engine)
        first.close()
        second = Timeline(engine)
        del second
        gc.collect()
        Timeline(engine).close()


def test_abandoned_generator(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1) as engine:
        sequence = Timeline(engine, ignore_eos=True)
        pieces = sequence.generate(PROMPTS[0])
        ids = next(pieces).ids
        assert sequence.tokens == [*PROMPTS[0], *ids]
        sequence.close()
        with pytest.raises(ValueError, match="is closed"):
            next(pieces)
        del pieces
        with Timeline(engine) as other:
            assert next(other.generate(PROMPTS[0])).ids == ids


@pytest.mark.parametrize(
    "program",
    [
        "",  # exit with everything open
        "del model, engine\nnext(pieces)",  # a child keeps its parents
        "del sequence, engine\nnext(pieces)\ndel pieces\nmodel.close()",
        "model.close()\ndel sequence, engine, model, pieces",
        "next(pieces)\nsys.exit(0)",
        "del pieces\nengine.close()\nmodel.info\nengine = mxdraft.runtime.Engine(model)",
        "sequence.cycle = sequence\ndel sequence, pieces, engine, model\nimport gc\ngc.collect()",
        "import threading\nthreading.Thread(target=lambda: next(pieces)).start()",
    ],
)
def test_any_end_of_the_process_is_clean(bundle: Path, program: str) -> None:
    setup = (
        "import sys, mxdraft.runtime\n"
        "model = mxdraft.runtime.Model(sys.argv[1])\n"
        "engine = mxdraft.runtime.Engine(model, threads=2)\n"
        "sequence = mxdraft.runtime.Timeline(engine, ignore_eos=True)\n"
        "pieces = sequence.generate([1, 2, 3])\n"
    )
    command = [sys.executable, "-W", "error", "-c", setup + program, str(bundle)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_interrupted_step_leaves_a_usable_engine(bundle: Path) -> None:
    code = (
        "import _thread, signal, sys\n"
        "from mxdraft.runtime import Engine, Model, Timeline\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without\n"
        "with Model(sys.argv[1]) as m, Engine(m, threads=1) as e, Timeline(e, ignore_eos=True) as s:\n"
        "    try:\n"
        "        for piece in s.generate([1, 2, 3]):\n"
        "            _thread.interrupt_main()\n"
        "    except KeyboardInterrupt:\n"
        "        held = s.tokens[3:]\n"
        "    s.truncate(2)\n"
        "    again = [i for piece in s.generate([3]) for i in piece.ids]\n"
        "    assert held\n"
        "    assert again[: len(held)] == held\n"
    )
    command = [sys.executable, "-c", code, str(bundle)]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


# ---- results ----


def test_logits_are_those_of_generation(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1, max_seqs=2) as engine:
        vocab = model.info.vocab
        ids = PROMPTS[0]
        generated = [
            token
            for piece in Timeline(engine, max_tokens=4, ignore_eos=True).generate(ids)
            for token in piece.ids
        ]
        with Timeline(engine) as sequence:
            logits = sequence.logits([*ids, *generated])
            assert logits.dtype == np.float32
            assert logits.shape == (len(ids) + 4, vocab)
            assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == generated
            assert sequence.tokens == [*ids, *generated]
            # Positions come one by one or together, and again after a truncation.
            sequence.truncate(2)
            assert np.array_equal(sequence.logits(ids[2:]), logits[2 : len(ids)])


@pytest.mark.parametrize("precision", ["base", "full"])
def test_batch_equals_each_alone(bundle: Path, precision: str) -> None:
    settings = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.3, "top_k": 20}]

    def outcome(sequence: Timeline) -> tuple[list[int], np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        return sequence.tokens, sequence.logits([5])

    with Model(bundle) as model:
        alone = []
        with Engine(model, threads=1, precision=precision) as engine:  # type: ignore[arg-type]
            for prompt, setting in zip(PROMPTS, settings, strict=True):
                with Timeline(engine, max_tokens=12, ignore_eos=True, **setting) as sequence:  # type: ignore[arg-type]
                    text = b"".join(piece.text for piece in sequence.generate(prompt))
                    # The last token is chosen but not processed; truncation leaves what is.
                    sequence.truncate(len(sequence.tokens) - 1)
                    alone.append((text, *outcome(sequence)))
        with Engine(model, threads=2, precision=precision, max_seqs=3, max_rows=4) as engine:  # type: ignore[arg-type]
            sequences = [
                Timeline(engine, max_tokens=12, ignore_eos=True, **setting)  # type: ignore[arg-type]
                for setting in settings
            ]
            texts = [b""] * len(sequences)
            for sequence, prompt in zip(sequences, PROMPTS, strict=True):
                sequence.prompt(prompt)
            while any(sequence.stop == "none" for sequence in sequences):
                engine.step(sequences)
                texts = [text + sequence.text for text, sequence in zip(texts, sequences, strict=True)]
            for sequence, text, expected in zip(sequences, texts, alone, strict=True):
                sequence.truncate(len(sequence.tokens) - 1)
                tokens, logits = outcome(sequence)
                assert (text, tokens) == expected[:2]
                assert logits.tobytes() == expected[2].tobytes()


def test_pieces_are_the_whole_output(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1) as engine:
        with Timeline(engine, max_tokens=40, ignore_eos=True) as sequence:
            pieces = list(sequence.generate(model.chat([("user", "The boat")])))
            ids = [token for piece in pieces for token in piece.ids]
            assert len(ids) == 40
            assert sequence.stop == "limit"
            assert sequence.stats["generated_tokens"] == 40
            spelled = model.decode(token for token in ids if not model.is_special(token))
            assert b"".join(piece.text for piece in pieces) == spelled
        with Timeline(engine, ignore_eos=True, stop=[spelled[5:7]], seed=1) as sequence:
            text = b"".join(piece.text for piece in sequence.generate(model.chat([("user", "The boat")])))
            assert text == spelled[: spelled.index(spelled[5:7])]
            assert sequence.stop == "string"


def test_model_facts(bundle: Path) -> None:
    config = tiny.checkpoint().config
    with Model(bundle) as model:
        info = model.info
        assert (info.hidden, info.layers, info.vocab) == (config.hidden, config.layers, config.vocab)
        assert (info.has_residual, info.bos, info.path) == (True, 1, str(bundle))
        assert (info.has_drafter, info.has_ngrams) == (False, False)
        assert info.file_bytes == bundle.stat().st_size
        assert '"source": "fixture T, seed 0"' in info.provenance
        assert model.is_special(1)
        assert not model.is_special(3)
        assert model.decode(model.encode("漢 don't")) == "漢 don't".encode()
        small = model.plan(ctx=16, draft="off")
        large = model.plan(ctx=256, max_seqs=4, max_rows=8, precision="base", draft="off")
        assert large.kv_cache == 64 * small.kv_cache
        assert large.total == large.weights + large.kv_cache + large.activations + large.sequences
        assert (large.ctx, large.precision, small.precision) == (256, "base", "full")
        with Engine(model, ctx=16, draft="off") as engine:
            assert engine.plan.kv_cache == small.kv_cache
            assert engine.plan.threads == default_threads()
    assert version() == mxdraft.__version__
    assert "matmul_mxfp4 " in cpu_describe()


def test_verify_tells_another_digest(bundle: Path) -> None:
    golden = Bundle.open(bundle).golden
    assert golden is not None
    assert golden.base_digest == bytes(32)  # packed without one
    digests = set()
    with Model(bundle) as model:
        for threads, rows in ((1, 1), (2, 64), (1, 5)):
            with Engine(model, threads=threads, max_rows=rows) as engine:
                result = engine.verify()
                assert not result.matches
                assert result.digest in result.message
                digests.add(result.digest)
    assert len(digests) == 1


# ---- errors ----


def test_errors_have_their_types(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError) as missing:
        Model(tmp_path / "none.mxb")
    assert missing.value.verdict == "MISSING"
    (tmp_path / "bad.mxb").write_bytes(b"x" * 100)
    with pytest.raises(BundleError) as bad:
        Model(tmp_path / "bad.mxb")
    assert bad.value.verdict == "MAGIC"
    with Model(bundle) as model:
        with pytest.raises(UsageError, match="threads"):
            Engine(model, threads=10_000)
        with pytest.raises(UsageError, match="precision 'half'"):
            Engine(model, precision="half")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="NUL byte at offset 1"):
            model.chat([("user", "a\0")])
        with pytest.raises(UsageError, match="token 500"):
            model.decode([500])
        with Engine(model, ctx=16, threads=1) as engine:
            with pytest.raises(UsageError, match="temperature"):
                Timeline(engine, temperature=-1)
            with Timeline(engine) as sequence:
                with pytest.raises(CapacityError, match="16"):
                    sequence.prompt([1] * 16)
                with pytest.raises(UsageError, match="500"):
                    sequence.logits([500])
                assert sequence.tokens == []


def test_foreign_sequence_is_refused(bundle: Path) -> None:
    with Model(bundle) as model, Engine(model, threads=1) as one, Engine(model, threads=1) as other:
        sequence = Timeline(other)
        with pytest.raises(UsageError, match="another engine"):
            one.step([sequence])


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot load"), (b"no library", "cannot load")],
    ids=["missing", "garbage"],
)
def test_library_that_cannot_be_loaded(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "lib.so").write_bytes(content)
    code = (
        "import mxdraft.runtime as r\ntry:\n    r.version()\nexcept r._ffi.RefusedError as e:\n    print(e)"
    )
    env = os.environ | {"MXDRAFT_LIBRARY": str(tmp_path / "lib.so")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=env, timeout=60, check=False
    )
    assert result.stdout.decode("utf-8").startswith(f"{message} {tmp_path / 'lib.so'}: ")


def test_absent_library_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXDRAFT_LIBRARY", raising=False)
    monkeypatch.setattr(_ffi, "_LIBRARIES", (tmp_path / "libmxdraft.so",))
    with pytest.raises(RefusedError, match="make build TARGET=host"):
        _ffi.load.__wrapped__()


# ---- the public header ----

HEADER = RUNTIME / "include" / "mxdraft.h"


@pytest.mark.parametrize(("suffix", "standard"), [("c", "c11"), ("cpp", "c++11")])
def test_header_stands_alone(tmp_path: Path, suffix: str, standard: str) -> None:
    source = tmp_path / f"alone.{suffix}"
    source.write_text("#include <mxdraft.h>\n", encoding="utf-8")
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", f"-std={standard}", f"-I{HEADER.parent}"]
    command = [*native("gnu.2.28"), *flags, "-c", source, "-o", tmp_path / "alone.o"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_program_in_the_header_runs(bundle: Path, tmp_path: Path) -> None:
    comment = HEADER.read_text(encoding="utf-8").partition("A complete program:")[2].partition("*/")[0]
    program = re.sub(r"^ \*", "", comment, flags=re.MULTILINE).replace("model.mxb", str(bundle))
    (tmp_path / "program.c").write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <mxdraft.h>\n"
        "static void die(const char *message) { fputs(message, stderr); exit(1); }\n"
        f"int main(void) {{\n{program}\nreturn 0;\n}}\n".replace("o.ctx = 512", "o.ctx = 200"),
        encoding="utf-8",
    )
    library = Path(os.environ.get("MXDRAFT_LIBRARY", RUNTIME.parent / "build" / "host" / "libmxdraft.so"))
    command = [
        *native("gnu.2.28"),
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{HEADER.parent}",
        tmp_path / "program.c",
    ]
    subprocess.run(
        [*command, library, f"-Wl,-rpath,{library.parent}", "-o", tmp_path / "program"], check=True
    )
    done = subprocess.run([tmp_path / "program"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    with (
        Model(bundle) as model,
        Engine(model, ctx=200) as engine,
        Timeline(engine, max_tokens=64) as timeline,
    ):
        pieces = list(timeline.generate(model.chat([("user", "Why is the sky blue?")])))
    assert done.stdout == b"".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("enum", "literal"),
    [
        ("mxd_precision", runtime.Precision),
        ("mxd_draft", runtime.Draft),
        ("mxd_kv", runtime.KV),
        ("mxd_stop", runtime.Stop),
        ("mxd_tier", runtime.Tier),
        ("mxd_look", runtime.Look),
        ("mxd_source", runtime.Source),
        ("mxd_bench_format", runtime.BenchFormat),
    ],
)
def test_words_are_those_of_the_library(enum: str, literal: Any) -> None:
    library = _ffi.load()
    assert _ffi.words(enum) == get_args(literal)
    values = library.ffi.typeof(enum).elements
    assert sorted(values) == list(range(len(values)))
    for beyond in (len(values), 2**32 - 1):
        assert getattr(library.lib, f"{enum}_name")(beyond) == library.ffi.NULL


def test_every_status_has_a_name() -> None:
    library = _ffi.load()
    for value, constant in library.ffi.typeof("mxd_status").elements.items():
        name = library.ffi.string(library.lib.mxd_status_name(value)).decode("ascii")
        assert name == re.sub(r"^MXD_((ERR|BAD)_)?", "", constant)
    assert library.ffi.string(library.lib.mxd_status_name(9)) == b"UNKNOWN"


def test_reserved_fields_must_be_zero(bundle: Path) -> None:
    library = _ffi.load()
    ffi, lib = library.ffi, library.lib
    with Model(bundle) as model, Engine(model, threads=1) as engine, Timeline(engine) as timeline:
        options, sampling = ffi.new("mxd_options *"), ffi.new("mxd_sampling *")
        lib.mxd_options_default(options)
        lib.mxd_sampling_default(sampling)
        calls: list[tuple[Any, list[tuple[Any, ...]]]] = [
            (
                options,
                [
                    (lib.mxd_plan_memory, model._pointer, options, ffi.new("mxd_plan *")),
                    (lib.mxd_engine_open, model._pointer, options, ffi.new("mxd_engine **")),
                ],
            ),
            (
                sampling,
                [
                    (lib.mxd_seq_open, engine._pointer, sampling, ffi.new("mxd_seq **")),
                    (lib.mxd_seq_copy, timeline._pointer, sampling, ffi.new("mxd_seq **")),
                ],
            ),
        ]
        bench = ffi.new("mxd_bench_options *", (5, 5, 1))
        calls.append((bench, [(lib.mxd_bench_run, engine._pointer, bench, ffi.new("mxd_bench **"))]))
        for struct, functions in calls:
            name = ffi.typeof(struct).item.cname
            for i in range(len(struct.reserved)):
                struct.reserved[i] = 7
                for call in functions:
                    with pytest.raises(UsageError, match=rf"^{name}\.reserved\[{i}\] is 7: only 0 is known"):
                        library.call(*call)
                struct.reserved[i] = 0


# ---- the Python package ----


def test_exported_names() -> None:
    public = {name for name in vars(runtime) if not name.startswith("_")}
    modules = {"engine", "grammar", "model", "options", "timeline"}
    assert public - modules == set(runtime.__all__)
    assert runtime.__all__ == [
        "KV",
        "BenchFormat",
        "CacheUse",
        "CoreRule",
        "Draft",
        "DraftRecord",
        "Drafter",
        "Engine",
        "EngineOptions",
        "Grammar",
        "Look",
        "Model",
        "ModelInfo",
        "Piece",
        "Plan",
        "Precision",
        "SamplingOptions",
        "Sequence",
        "Source",
        "Stop",
        "Tier",
        "Timeline",
        "TokenRecord",
        "Verification",
        "cpu_describe",
        "default_threads",
        "exit_on_bus_error",
        "version",
    ]
    assert runtime.Sequence is Timeline  # its name before
    assert Path(mxdraft.__file__).with_name("py.typed").exists()


def test_options_are_those_of_the_header(bundle: Path) -> None:
    for options, struct in (
        (runtime.EngineOptions, "mxd_options"),
        (runtime.SamplingOptions, "mxd_sampling"),
    ):
        fields = {name for name, _ in _ffi.load().ffi.typeof(struct).fields}
        assert set(options.__annotations__) == fields - {"reserved", "stop_count"}
    with Model(bundle) as model:
        with Engine(model) as engine, pytest.raises(TypeError, match="unexpected keyword argument 'topk'"):
            Timeline(engine, topk=5)  # type: ignore[call-arg]
        for opening in (model.plan, lambda **options: Engine(model, **options)):
            with pytest.raises(TypeError, match="unexpected keyword argument 'context'"):
                opening(context=5)
            with pytest.raises(UsageError, match="kv 'int4': expected one of auto, f16"):
                opening(kv="int4")
            with pytest.raises(UsageError, match=r"core_fraction -1 is not in 0\.\.1"):
                opening(core_fraction=-1)
        assert model.plan(max_seqs=None, core_fraction=None, catch_up=None).total == model.plan().total
