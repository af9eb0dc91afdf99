# SPDX-License-Identifier: Apache-2.0
"""Sequences: prompts, stops, text, truncation, batches, numeric faults."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from malformed import build, patch, sections_of
from mxdraft.bundle import Bundle
from mxdraft.checkpoint import BYTE_ALPHABET
from mxdraft.errors import CapacityError, NumericError, UsageError
from mxdraft.export import export_model
from mxdraft.pack import pack
from mxdraft.runtime import Engine, Model, Timeline
from mxdraft.runtime._ffi import load

PROMPT = [1, 40, 300, 7, 260, 499, 100, 3]


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with Model(bundle) as opened:
        yield opened


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, ctx=128, threads=1, max_seqs=4) as opened:
        yield opened


def run(sequence: Timeline, ids: Sequence[int]) -> list[int]:
    """The ids that a prompt makes."""
    return [token for piece in sequence.generate(ids) for token in piece.ids]


def fresh(model: Model, ids: Sequence[int], **changes: Any) -> list[int]:
    """The ids that a prompt makes in an engine that has seen nothing else."""
    with Engine(model, ctx=128, threads=1) as engine, Timeline(engine, ignore_eos=True, **changes) as only:
        return run(only, ids)


# ---- a model that says what it is told ----


def _spelling() -> list[bytes]:
    spec = tiny.tokenizer()
    byte = {character: value for value, character in enumerate(BYTE_ALPHABET)}
    control = len(tiny.SPECIAL_TOKENS)
    plain = [bytes(byte[c] for c in token) for token in spec.tokens[control:]]
    return [token.encode("utf-8") for token in spec.tokens[:control]] + plain


SPELLING = _spelling()  # the bytes of each token of fixture T
START, END = b"<|im_start|>", b"<|im_end|>"  # control tokens; the second ends a sequence


def tokens(*texts: bytes) -> list[int]:
    """The ids of tokens by their bytes."""
    return [SPELLING.index(text) for text in texts]


# Each token is followed by the next one; the last one, and every token in no script, by itself.
SPEECH = tokens(
    *(b"A", b" the", b"B", b"all", b"ll", b"lo", b"o", b"ood", b"od", b"d"),
    *(b"\xe6", b"\xbc", b"\xa2", b"C", b"h", b"hi", b"hing", b"ing", b"in"),  # the first three are U+6F22
    *(b"\xff", b"\xf0", b"\x9f", b"D", b"ere", b"re", b"e", b"."),  # F0 9F begin what does not come
)
ENDING = tokens(b"X", START, b"Y", END, b"Z")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose model follows the scripts.

    Its layers add nothing. Embeddings are random signs; a token's head row is the sum of the embeddings of
    its predecessors.
    """
    silent = tiny.checkpoint(tied=False, layers=1)
    vocab, hidden = silent.tensors["model.embed_tokens.weight"].shape
    signs = np.random.default_rng(0).choice(np.array([-1, 1], np.float32), (vocab, hidden))
    follower = {one: other for script in (SPEECH, ENDING) for one, other in pairwise(script)}
    head = np.zeros_like(signs)
    for one in range(vocab):
        head[follower.get(one, one)] += signs[one]
    tensors = {name: np.zeros_like(tensor) for name, tensor in silent.tensors.items()}
    tensors |= {
        name: np.ones_like(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")
    }
    tensors |= {"model.embed_tokens.weight": signs, "lm_head.weight": head}
    folder = tmp_path_factory.mktemp("speaker")
    export_model(dataclasses.replace(silent, tensors=tensors), folder)
    pack(folder, folder / "speaker.mxb")
    with Model(folder / "speaker.mxb") as model, Engine(model, ctx=64, threads=1, max_seqs=2) as engine:
        yield engine


def said(engine: Engine, first: bytes, **changes: Any) -> tuple[list[bytes], str]:
    """The text of each step after a token of a script, and the stop."""
    with Timeline(engine, **changes) as sequence:
        sequence.prompt(tokens(first))
        texts = []
        while sequence.stop == "none":
            engine.step([sequence])
            texts.append(sequence.text)
        return texts, sequence.stop


def test_speaker_follows_its_scripts(speaker: Engine) -> None:
    with Timeline(speaker, ignore_eos=True, max_tokens=len(SPEECH)) as sequence:
        assert run(sequence, SPEECH[:1]) == [*SPEECH[1:], SPEECH[-1]]
    with Timeline(speaker, ignore_eos=True, max_tokens=len(ENDING)) as sequence:
        assert run(sequence, ENDING[:1]) == [*ENDING[1:], ENDING[-1]]


# ---- stops ----


def test_max_tokens_counts_from_each_prompt(engine: Engine) -> None:
    with Timeline(engine, ignore_eos=True, max_tokens=5) as sequence:
        assert len(run(sequence, PROMPT)) == 5
        assert sequence.stop == "limit"
        assert len(run(sequence, [9])) == 5
        engine.step([sequence])  # stopped: nothing happens
        assert (sequence.output, sequence.text, sequence.stop) == ([], b"", "limit")
        assert len(sequence.tokens) == len(PROMPT) + 1 + 10


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_full_context_stops(speaker: Engine, ignore_eos: bool) -> None:
    for length in (1, 62, 63):
        with Timeline(speaker, ignore_eos=ignore_eos) as sequence:
            assert run(sequence, tokens(b"Q") * length) == tokens(b"Q") * (64 - length)
            assert (sequence.stop, len(sequence.tokens)) == ("context", 64)
            with pytest.raises(CapacityError, match="64"):
                sequence.prompt([])


def test_prompt_must_leave_room_for_one_token(engine: Engine) -> None:
    with Timeline(engine, ignore_eos=True) as sequence:
        for length in (128, 129, 5000):
            with pytest.raises(CapacityError, match=rf"prompt {length} tokens, context 128"):
                sequence.prompt([5] * length)
        assert sequence.tokens == []
        sequence.prompt([5] * 100)
        with pytest.raises(CapacityError, match="prompt 128 tokens, context 128"):
            sequence.prompt([5] * 28)
        assert len(run(sequence, [5] * 27)) == 1
        assert sequence.stop == "context"


def test_end_of_sequence(speaker: Engine) -> None:
    assert said(speaker, b"X") == ([b"", b"Y", b""], "eos")
    assert said(speaker, b"X", ignore_eos=True, max_tokens=5) == ([b"", b"Y", b"", b"Z", b"Z"], "limit")
    # The end comes before the limit that is reached with it.
    assert said(speaker, b"X", max_tokens=3)[1] == "eos"


def test_stop_string_in_one_token_and_over_several(speaker: Engine) -> None:
    assert said(speaker, b"A", stop=["th"]) == ([b" "], "string")
    assert said(speaker, b"A", stop=["B"]) == ([b" the", b""], "string")
    assert said(speaker, b"A", stop=["heBa"]) == ([b" t", b"", b""], "string")
    # "lll" of "all" + "ll" is held, one l is released when "lo" comes and completes a later beginning.
    assert said(speaker, b"A", stop=["lllo"]) == ([b" the", b"B", b"a", b"l", b"l"], "string")
    # A beginning that comes to nothing is released.
    assert said(speaker, b"A", stop=["Bax"], max_tokens=3) == ([b" the", b"", b"Ball"], "limit")
    # What is held when another stop comes is released as well.
    assert said(speaker, b"A", stop=["Bax"], max_tokens=2) == ([b" the", b"B"], "limit")


def test_of_several_stop_strings_the_first_in_the_text_counts(speaker: Engine) -> None:
    assert said(speaker, b"A", stop=["zzz", "ll", "B"]) == ([b" the", b""], "string")
    assert said(speaker, b"A", stop=["l", "all"]) == ([b" the", b"B", b""], "string")
    assert said(speaker, b"A", stop=["a", "l", "ll"]) == ([b" the", b"B", b""], "string")
    sixteen = [*(f"no{i}" for i in range(15)), "Ball"]
    assert said(speaker, b"A", stop=sixteen) == ([b" the", b"", b""], "string")


def test_incomplete_characters_are_held_back(speaker: Engine) -> None:
    assert said(speaker, b"d", max_tokens=4) == ([b"", b"", "漢".encode(), b"C"], "limit")
    assert said(speaker, b"d", max_tokens=2) == ([b"", "漢".encode()[:2]], "limit")
    assert said(speaker, b"d", max_tokens=3, stop=["漢"]) == ([b"", b"", b""], "string")
    # What no byte can complete passes at once.
    assert said(speaker, b"in", max_tokens=4) == ([b"\xff", b"", b"", b"\xf0\x9fD"], "limit")


def streamed(ids: Sequence[int], stops: Sequence[bytes]) -> Iterator[bytes]:
    """All text released after each token, as mxdraft.h says."""
    text = b""
    for token in ids:
        text += SPELLING[token]
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            yield text[: min(places)]
            return
        held = {n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])}
        held |= {n for n in range(1, 4) if begins_character(text[-n:])}
        yield text[: len(text) - max(held, default=0)]


def begins_character(data: bytes) -> bool:
    """Whether bytes are the beginning of a character, and of nothing else."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


WHOLE = b"".join(SPELLING[token] for token in SPEECH[1:])
part = st.builds(lambda a, n: WHOLE[a : a + n], st.integers(0, len(WHOLE) - 1), st.integers(1, 8))
stop_string = part | st.builds(lambda p, last: p + last, part, st.sampled_from([b"l", b"o", b"\xbc", b"!"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(stop_string, max_size=4))
@example([b"ood", b"dod"])
@example(["漢C".encode()])
def test_text_is_released_as_soon_as_it_is_certain(speaker: Engine, stops: list[bytes]) -> None:
    texts, stop = said(speaker, b"A", stop=stops, max_tokens=len(SPEECH) - 1)
    expected = list(streamed(SPEECH[1:], stops))
    if stop == "limit":
        expected[-1] = WHOLE
    assert [b"".join(texts[: i + 1]) for i in range(len(texts))] == expected
    assert (stop == "string") == any(s in WHOLE for s in stops)


def test_stop_strings_out_of_range_are_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="17 stop strings: at most 16"):
        Timeline(engine, stop=["x"] * 17)
    for text in ("", "x" * 257):
        with pytest.raises(UsageError, match=rf"stop string 2 has {len(text)} bytes: 1..256"):
            Timeline(engine, stop=["y", text])
    for _ in range(4):  # no place was lost
        Timeline(engine, stop=["x" * 256])


# ---- prompts ----


def test_two_prompts_are_one(model: Model, engine: Engine) -> None:
    with Timeline(engine, ignore_eos=True, max_tokens=8) as sequence:
        sequence.prompt(PROMPT[:3])
        assert run(sequence, PROMPT[3:]) == fresh(model, PROMPT, max_tokens=8)
        assert sequence.stats["prompt_tokens"] == len(PROMPT)


def test_conversation_is_the_same_as_its_tokens_at_once(model: Model, engine: Engine) -> None:
    with Timeline(engine, ignore_eos=True, max_tokens=6, temperature=1.0, seed=4) as sequence:
        first = run(sequence, PROMPT)
        second = run(sequence, [77, 78])
        third = run(sequence, [])  # continues past the limit
        assert [*first, *second, *third] == sequence.tokens[8:14] + sequence.tokens[16:]
    whole = fresh(model, [*PROMPT, *first, 77, 78], temperature=1.0, seed=4, max_tokens=12)
    assert [*second, *third] == whole


@pytest.mark.parametrize("max_rows", [1, 3, 19, 20, 21])
def test_prompt_in_chunks(model: Model, max_rows: int) -> None:
    ids = [(7 * i) % 500 for i in range(20)]
    expected = fresh(model, ids, max_tokens=5)
    with Engine(model, ctx=64, threads=1, max_rows=max_rows) as engine:
        sequence = Timeline(engine, ignore_eos=True, max_tokens=5)
        sequence.prompt(ids)
        for _ in range(-(-20 // max_rows) - 1):
            engine.step([sequence])
            assert (sequence.output, sequence.text) == ([], b"")
        engine.step([sequence])
        assert sequence.output == expected[:1]
        assert run(sequence, [])[:4] == expected[1:]


def test_nothing_to_continue_is_refused(engine: Engine) -> None:
    with Timeline(engine, max_tokens=2, ignore_eos=True) as sequence:
        with pytest.raises(UsageError, match="nothing to continue"):
            sequence.prompt([])
        run(sequence, PROMPT)
        sequence.truncate(4)
        with pytest.raises(UsageError, match=r"nothing to continue.* all 4 tokens"):
            sequence.prompt([])
        sequence.logits([5])
        with pytest.raises(UsageError, match=r"nothing to continue.* all 5 tokens"):
            sequence.prompt([])
        assert len(run(sequence, [6])) == 2


def test_ids_out_of_the_vocabulary_are_refused(engine: Engine) -> None:
    with Timeline(engine, max_tokens=1) as sequence:
        for bad in (500, 2**32 - 1):
            with pytest.raises(UsageError, match=f"token 1 is {bad}: the vocabulary has 500"):
                sequence.prompt([499, bad])
            with pytest.raises(UsageError, match=f"token 0 is {bad}"):
                sequence.logits([bad, 1])
        assert sequence.tokens == []


def test_logits_of_what_is_queued_or_too_long_are_refused(engine: Engine) -> None:
    with Timeline(engine, max_tokens=1) as sequence:
        with pytest.raises(CapacityError, match="129 tokens, context 128"):
            sequence.logits([1] * 129)
        sequence.prompt([1, 2])
        with pytest.raises(UsageError, match="2 queued tokens"):
            sequence.logits([3])
        assert sequence.tokens == [1, 2]


# ---- truncation and places ----


@pytest.mark.parametrize("length", [0, 1, 5, 8, 11, 17])
def test_truncation_is_exact(model: Model, engine: Engine, length: int) -> None:
    with Timeline(engine, ignore_eos=True, max_tokens=10, temperature=1.0) as sequence:
        run(sequence, PROMPT)
        kept = sequence.tokens[:length]
        sequence.truncate(length)
        assert (sequence.tokens, sequence.stop) == (kept, "none")
        logits = sequence.logits([11, 12, 13])
        with pytest.raises(UsageError, match=f"cannot truncate {length + 3} tokens to {length + 4}"):
            sequence.truncate(length + 4)
    with Engine(model, ctx=128, threads=1) as other, Timeline(other) as sequence:
        expected = sequence.logits([*kept, 11, 12, 13])[length:]
    assert logits.tobytes() == expected.tobytes()


def test_truncation_in_the_middle_of_a_prompt(model: Model) -> None:
    with Engine(model, ctx=64, threads=1, max_rows=3) as engine:
        sequence = Timeline(engine, ignore_eos=True, max_tokens=4)
        sequence.prompt(PROMPT)
        engine.step([sequence])  # three of eight are processed
        sequence.truncate(5)
        assert run(sequence, [8]) == fresh(model, [*PROMPT[:5], 8], max_tokens=4)


def test_closed_sequence_leaves_nothing_behind(model: Model) -> None:
    with Engine(model, ctx=128, threads=1) as engine:
        with Timeline(engine, stop=["never"], temperature=1.0, repeat_penalty=2.0, seed=1) as first:
            first.prompt([9] * 60)
            engine.step([first])
        with Timeline(engine, ignore_eos=True, max_tokens=12) as second:
            assert (second.tokens, second.text, second.output, second.stop) == ([], b"", [], "none")
            assert second.stats["prompt_tokens"] == 0
            assert run(second, PROMPT) == fresh(model, PROMPT, max_tokens=12)


def test_a_copy_holds_the_text_that_is_held_back(speaker: Engine) -> None:
    with Timeline(speaker, max_tokens=3) as original:
        original.prompt(tokens(b"d"))
        speaker.step([original])
        with Timeline(speaker, max_tokens=2, copy_of=original) as copy:
            assert (copy.output, copy.text, copy.stats["generated_tokens"]) == ([], b"", 0)
            speaker.step([copy, original])
            speaker.step([copy, original])
            assert (copy.text, copy.stop, copy.stats["generated_tokens"]) == ("漢".encode(), "limit", 2)
            assert (original.text, original.stop) == ("漢".encode(), "limit")


def test_a_copy_has_settings_and_stops_of_its_own(model: Model, engine: Engine) -> None:
    sampled = {"temperature": 1.0, "seed": 5}
    with Timeline(engine, max_tokens=4, ignore_eos=True) as original:
        made = run(original, PROMPT)
        with Timeline(engine, max_tokens=6, ignore_eos=True, copy_of=original, **sampled) as copy:
            assert (copy.tokens, copy.stop) == ([*PROMPT, *made], "none")
            while copy.stop == "none":
                engine.step([copy])
            found = copy.tokens[len(PROMPT) + 4 :]
        assert found == fresh(model, [*PROMPT, *made], max_tokens=6, **sampled)
        assert original.tokens == [*PROMPT, *made]


def test_what_cannot_be_copied_is_refused(model: Model, engine: Engine) -> None:
    with Engine(model, ctx=16, threads=1, max_seqs=2) as small, Timeline(small) as full:
        run(full, PROMPT)
        with Timeline(small, copy_of=full) as copy:
            assert (copy.stop, len(copy.tokens)) == ("context", 16)
            with pytest.raises(UsageError, match="all 2 sequences of the engine are open"):
                Timeline(small, copy_of=full)
        with pytest.raises(UsageError, match="temperature"):
            Timeline(small, copy_of=full, temperature=-1.0)
        with pytest.raises(UsageError, match="within its engine"):
            Timeline(engine, copy_of=full)


def test_sequences_beyond_max_seqs_are_refused(engine: Engine) -> None:
    sequences = [Timeline(engine) for _ in range(4)]
    with pytest.raises(UsageError, match="all 4 sequences of the engine are open"):
        Timeline(engine)
    with pytest.raises(UsageError, match="5 sequences, the engine has 4"):
        engine.step([*sequences, sequences[0]])


def test_step_refuses_what_it_cannot_run(engine: Engine) -> None:
    library = load()
    sequence = Timeline(engine, ignore_eos=True)
    sequence.prompt(PROMPT)
    with pytest.raises(UsageError, match="sequence 1 is closed, repeated or of another engine"):
        engine.step([sequence, sequence])
    closed = Timeline(engine)
    pointers = library.ffi.new("mxd_seq *[]", [sequence._pointer, closed._pointer])
    closed.close()
    with pytest.raises(UsageError, match="sequence 1 is closed"):
        library.call(library.lib.mxd_step, engine._pointer, pointers, 2)
    assert sequence.tokens == PROMPT  # nothing ran
    engine.step([])
    engine.step([sequence])
    assert len(sequence.output) == 1


# ---- batches ----


def test_sequences_together_are_the_same_as_alone(model: Model) -> None:
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 500, length).tolist() for length in (1, 2, 31, 5, 64, 17, 3)]
    changes = [{"max_tokens": 3 + 4 * i, "temperature": 0.3 * i, "seed": i} for i in range(len(prompts))]
    alone = [fresh(model, ids, **change) for ids, change in zip(prompts, changes, strict=True)]
    with Engine(model, ctx=128, threads=2, max_seqs=7, max_rows=16) as engine:
        sequences = [Timeline(engine, ignore_eos=True, **change) for change in changes]  # type: ignore[arg-type]
        for sequence, ids in zip(sequences, prompts, strict=True):
            sequence.prompt(ids)
            engine.step(sequences)  # they join one by one
        while any(sequence.stop == "none" for sequence in sequences):
            engine.step(reversed(sequences))
        together = [sequence.tokens[len(ids) :] for sequence, ids in zip(sequences, prompts, strict=True)]
    assert together == alone


def test_long_prompt_does_not_starve_the_others(model: Model) -> None:
    with Engine(model, ctx=128, threads=1, max_seqs=3, max_rows=4) as engine:
        one, other, late = (Timeline(engine, ignore_eos=True) for _ in range(3))
        one.prompt([1])
        other.prompt([2])
        engine.step([one, other])
        late.prompt([3] * 41)
        for _ in range(20):  # two of four rows are left for the prompt
            engine.step([late, one, other])
            assert [len(sequence.output) for sequence in (one, other, late)] == [1, 1, 0]
        engine.step([late, one, other])
        assert [len(sequence.output) for sequence in (one, other, late)] == [1, 1, 1]


# ---- numeric faults ----


def faulty(path: Path, bundle: Path, section: str, name: str, value: float) -> Path:
    """Copy a bundle with a different third value in a tensor."""
    good = bundle.read_bytes()
    offset = Bundle(good).tensors[section, name].offset
    sections = sections_of(good)
    sections[section] = patch(sections[section], offset + 8, np.float32(value).tobytes())
    path.write_bytes(build(sections))
    return path


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.input_layernorm.weight", "entering layer 0 at position 0"),
        ("model.layers.2.input_layernorm.weight", "entering layer 2 at position 0"),
        ("model.layers.2.post_attention_layernorm.weight", "entering layer 3 at position 0"),
        ("model.layers.3.post_attention_layernorm.weight", "before the head at position 7"),
    ],
)
def test_fault_names_its_layer(bundle: Path, tmp_path: Path, name: str, message: str, value: float) -> None:
    for section, precision in (("target.base", "base"), ("target.residual", "full")):
        path = faulty(tmp_path / "faulty.mxb", bundle, section, name, value)
        with Model(path) as model:
            for threads in (1, 2):
                with Engine(model, threads=threads, precision=precision) as engine:  # type: ignore[arg-type]
                    sequence = Timeline(engine)
                    with pytest.raises(NumericError, match=f"^non-finite value {message}$"):
                        next(sequence.generate(PROMPT))
                    assert (sequence.text, sequence.output, sequence.tokens) == (b"", [], PROMPT)
            other = "full" if precision == "base" else "base"
            with Engine(model, threads=1, precision=other) as engine:  # type: ignore[arg-type]
                assert len(run(Timeline(engine, max_tokens=1), PROMPT)) == 1


def test_fault_in_the_last_norm_names_the_logit(bundle: Path, tmp_path: Path) -> None:
    path = faulty(tmp_path / "faulty.mxb", bundle, "target.residual", "model.norm.weight", np.nan)
    with Model(path) as model, Engine(model, threads=1) as engine, Timeline(engine) as sequence:
        with pytest.raises(NumericError, match=r"^non-finite logit of token 0 at position 7$"):
            next(sequence.generate(PROMPT))
        assert sequence.output == []


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Fixture T with an embedding of token 7 near the largest float32, so that its square is infinite."""
    folder = tmp_path_factory.mktemp("loud")
    export_model(tiny.checkpoint(tied=False), folder)
    pack(folder, folder / "quiet.mxb")
    good = (folder / "quiet.mxb").read_bytes()
    sections, entry = sections_of(good), Bundle(good).tensors["target.shared", "model.embed_tokens.weight"]
    for block in range(entry.columns // 32):
        scale = entry.offset + 528 * block + 7
        sections["target.shared"] = patch(sections["target.shared"], scale, bytes([254]))
    (folder / "loud.mxb").write_bytes(build(sections))
    with Model(folder / "loud.mxb") as model:
        yield model


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_fault_names_its_position(loud: Model, max_rows: int) -> None:
    with Engine(loud, threads=1, max_rows=max_rows) as engine, Timeline(engine) as sequence:
        with pytest.raises(NumericError, match=r"^non-finite value entering layer 0 at position 3$"):
            next(sequence.generate([1, 2, 3, 7, 4, 7]))
        sequence.truncate(0)
        with pytest.raises(NumericError, match=r"^non-finite value entering layer 0 at position 2$"):
            sequence.logits([1, 2, 7])


def test_engine_continues_after_a_fault(loud: Model) -> None:
    with Engine(loud, ctx=128, threads=1, max_seqs=2) as engine:
        good, bad = (Timeline(engine, ignore_eos=True, max_tokens=6) for _ in range(2))
        good.prompt([1, 2])
        bad.prompt([1, 7, 2])
        for _ in range(2):  # the same error every time, and no sequence gets a token
            with pytest.raises(NumericError, match="entering layer 0 at position 1"):
                engine.step([good, bad])
            assert (good.output, bad.output) == ([], [])
            assert (good.tokens, bad.tokens, bad.stop) == ([1, 2], [1, 7, 2], "none")
        assert run(good, [3]) == fresh(loud, [1, 2, 3], max_tokens=6)
        bad.truncate(1)
        assert run(bad, [4]) == fresh(loud, [1, 4], max_tokens=6)


# ---- statistics ----


def test_stats_are_json_with_all_keys(engine: Engine) -> None:
    with Timeline(engine, ignore_eos=True, max_tokens=9, seed=2**64 - 1) as sequence:
        run(sequence, PROMPT)
        text = sequence.stats_json
        assert "\n" not in text
        stats = json.loads(text)
        assert set(stats) >= {
            *("prompt_tokens", "generated_tokens", "prefill_tok_per_s", "decode_tok_per_s"),
            *("first_token_s", "drafted", "accepted", "steps", "tokens_per_step", "core_fraction"),
            *("peak_rss_bytes", "stop", "seed", "threads", "kernels"),
        }
        exact: dict[str, object] = {
            "prompt_tokens": 8,
            "generated_tokens": 9,
            "drafted": 0,
            "accepted": 0,
            "steps": 8,
        }
        exact |= {"tokens_per_step": 1.0, "stop": "limit", "seed": 2**64 - 1, "threads": 1, "ctx": 128}
        assert {key: stats[key] for key in exact} == exact
        info = engine.model.info
        positions = sum(range(len(PROMPT) + 1, len(PROMPT) + 9))
        cache = positions * info.layers * 2 * info.kv_heads * info.head_dim * 2
        assert (stats["bytes_read"] - cache) % 8 == 0
        assert stats["bytes_read"] > cache + 8 * 100_000
        assert all(stats[key] > 0 for key in ("prefill_s", "decode_s", "first_token_s", "peak_rss_bytes"))
        assert all(re.fullmatch(r"mxd_\w+", name) for name in stats["kernels"].values())

        library = load()
        short = library.ffi.new("char[11]", b"..........")
        length = library.lib.mxd_seq_stats_json(sequence._pointer, short, 10)
        assert length == len(text)
        assert library.ffi.string(short) == text[:9].encode("utf-8")


def test_a_loop_over_nothing_to_process_is_refused(engine: Any) -> None:
    with Timeline(engine, max_tokens=2) as sequence:
        sequence.prompt(PROMPT)
        while sequence.stop == "none":
            engine.step([sequence])
        sequence.truncate(len(PROMPT))
        with pytest.raises(UsageError, match="prompt it first"):
            engine.step([sequence])
