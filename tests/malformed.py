# SPDX-License-Identifier: Apache-2.0
"""Bundles that lie: each case is named after its lie and comes with the verdict that every reader must give.

Checksums are corrected after each change, so that the check meant is the one that refuses.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.format import (
    ALIGNMENT,
    CONFIG,
    F32,
    HEADER,
    MXFP4T,
    MXINT8T,
    SECTION_ENTRY,
    TENSOR_ENTRY,
    TensorEntry,
    config_section,
)
from mxdraft.bundle.schedule import Schedule, Weights
from mxdraft.checkpoint import Dimensions
from mxdraft.errors import BundleError

Case: TypeAlias = tuple[str, bytes, str]
T = TypeVar("T")

REQUIRED = ("target.config", "target.tensors", "target.shared", "target.base", "tokenizer", "provenance")


def cases(good: bytes) -> Iterator[Case]:
    """Name, bytes and verdict of every lie told about ``good``, a bundle of fixture T with all sections."""
    yield from _header_lies(good)
    yield from _truncations(good)
    yield from _section_table_lies(good)
    yield from _section_lies(good)
    yield from _config_lies(good)
    yield from _tensor_lies(good)
    yield from _scale_lies(good)
    yield from _text_lies(good)
    yield from _golden_lies(good)
    yield from _ngram_lies(good)
    yield from _schedule_lies(good)


def drafter_cases(good: bytes) -> Iterator[Case]:
    """The same for lies about the drafter of ``good``, a bundle of fixture T that has one."""
    sections = sections_of(good)
    parsed = Bundle(good)
    config, directory = sections["draft.config"], sections["draft.tensors"]
    names = [name for section, name in parsed.tensors if section == "draft.weights"]
    weights_section = list(sections).index("draft.weights")

    def lie(section: str, position: int, new: bytes) -> bytes:
        return build(sections | {section: patch(sections[section], position, new)})

    def entry_lie(name: str, position: int, new: bytes) -> bytes:
        return lie("draft.tensors", names.index(name) * TENSOR_ENTRY.size + position, new)

    for missing in ("draft.config", "draft.tensors", "draft.weights"):
        renamed = {f"other.{i}" if n == missing else n: data for i, (n, data) in enumerate(sections.items())}
        yield f"section_missing_{missing}", build(renamed), "SECTION"
    yield "draft_config_short", build(sections | {"draft.config": config[:-1]}), "DRAFT"
    yield "draft_config_long", build(sections | {"draft.config": config + b"\0"}), "DRAFT"
    for field, position in {"first": 132, "last": 159}.items():
        yield f"draft_config_reserved_{field}", lie("draft.config", position, b"\1"), "DRAFT"
    fields = {
        "architecture": (0, (0, 2)),
        "hidden": (4, (0, 192)),
        "heads": (8, (3,)),
        "kv_heads": (12, (6,)),
        "head_dim": (16, (64,)),
        "ffn": (20, (320,)),
        "vocab": (24, (499, 501)),
        "features": (28, (0, 2, 4, 5, 2**32 - 1)),
        "first_layer": (32, (0, 2)),
        "last_layer": (40, (2, 5, 2**32 - 1)),
        "unused_layer": (44, (5,)),
        "draft_vocabulary": (48, (0, 8, 49, 512, 2**32 - 16)),
        "depths": (52, (0, 1, 3, 9, 2**32 - 1)),
    }
    for field, (position, values) in fields.items():
        for value in values:
            yield f"draft_{field}_{value}", lie("draft.config", position, _u32(value)), "DRAFT"
    for i, target in enumerate(("shared", "base", "tokenizer")):
        flipped = bytes([config[56 + 4 * i] ^ 1])
        yield f"draft_of_another_{target}", lie("draft.config", 56 + 4 * i, flipped), "DRAFT"
    for field, position in {"temperature": 68, "odds": 100}.items():
        for value in (0.0, -1.0, float("inf"), float("nan")):
            lied = lie("draft.config", position, struct.pack("<f", value))
            yield f"draft_{field}_{value}", lied, "DRAFT"
        yield f"draft_unused_{field}", lie("draft.config", position + 8, struct.pack("<f", 1)), "DRAFT"
    yield "draft_of_fewer_tokens", lie("draft.config", 48, _u32(32)), "SHAPE"

    yield "draft_directory_remainder", build(sections | {"draft.tensors": directory + b"\0"}), "TENSOR"
    matrix, norm = "feature_proj.weight", "model.norm.weight"
    yield "draft_tensor_name", entry_lie(matrix, 5, b" "), "NAME"
    yield "draft_tensor_dtype_5", entry_lie(matrix, 80, _u32(5)), "DTYPE"
    yield "draft_norm_of_integers", entry_lie(norm, 80, _u32(4)), "DTYPE"
    yield "draft_ids_of_floats", entry_lie("draft_ids", 80, _u32(1)), "DTYPE"
    yield "draft_tensor_missing", entry_lie("state_norm.weight", 0, b"unknown".ljust(80, b"\0")), "TENSOR"
    yield "draft_tensor_in_base", entry_lie(norm, 84, _u32(list(sections).index("target.base"))), "TENSOR"
    yield "draft_tensor_nowhere", entry_lie(norm, 84, _u32(weights_section + 1)), "TENSOR"
    yield "draft_tensor_rows", entry_lie(matrix, 88, _u64(159)), "SHAPE"
    entry = parsed.tensors["draft.weights", matrix]
    yield "draft_scale_255", lie("draft.weights", entry.offset, b"\xff"), "SCALE"
    ids = parsed.tensors["draft.weights", "draft_ids"]
    for name, position, value in (("equal", 4, 3), ("descending", 4, 2), ("beyond", ids.length - 4, 500)):
        yield f"draft_ids_{name}", lie("draft.weights", ids.offset + position, _u32(value)), "DRAFT"


def wrong_verdicts(
    lies: Iterable[tuple[str, T, str]], readers: Sequence[Callable[[T], object]]
) -> tuple[list[str], int]:
    """Lies for which some reader gives another verdict, and how many lies there were."""
    wrong, count = [], 0
    for name, bundle, expected in lies:
        count += 1
        found = []
        for read in readers:
            try:
                read(bundle)
                found.append("accepted")
            except BundleError as error:
                found.append(error.verdict)
        if found != [expected] * len(readers):
            wrong.append(f"{name}: {', '.join(found)}, not {expected}")
    return wrong, count


def sections_of(bundle: bytes) -> dict[str, bytes]:
    """The sections of a good bundle, in order."""
    parsed = Bundle(bundle)
    return {name: parsed.section(name).tobytes() for name in parsed.sections}


def build(sections: dict[str, bytes]) -> bytes:
    """A bundle of these sections, with right checksums."""
    file = io.BytesIO()
    writer = BundleWriter(file)
    for name, data in sections.items():
        writer.add(name, [data])
    writer.seal()
    return file.getvalue()


def patch(data: bytes, position: int, new: bytes) -> bytes:
    return data[:position] + new + data[position + len(new) :]


def reseal_table(bundle: bytes) -> bytes:
    """Correct the section table's checksum."""
    count = int.from_bytes(bundle[12:16], "little")
    table = bundle[HEADER.size : HEADER.size + count * SECTION_ENTRY.size]
    return patch(bundle, 24, _u32(zlib.crc32(table)))


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _header_lies(good: bytes) -> Iterator[Case]:
    yield "empty_file", b"", "MAGIC"
    yield "magic_of_another_format", patch(good, 0, b"GGUF"), "MAGIC"
    yield "magic_after_newline_conversion", good.replace(b"\r\n", b"\n", 1), "MAGIC"
    yield "half_a_magic", good[:4], "LENGTH"
    yield "half_a_wrong_magic", b"\x89PNG", "MAGIC"
    yield "header_cut", good[:63], "LENGTH"
    yield "version_0", patch(good, 8, _u32(0)), "VERSION"
    yield "version_1", patch(good, 8, _u32(1)), "VERSION"
    yield "version_3", patch(good, 8, _u32(3)), "VERSION"
    yield "no_sections", patch(good, 12, _u32(0)), "HEADER"
    yield "65_sections", patch(good, 12, _u32(65)), "HEADER"
    yield "section_count_beyond_table", patch(good, 12, _u32(63)), "HEADER"
    yield "length_too_small", patch(good, 16, _u64(len(good) - 1)), "LENGTH"
    yield "length_too_large", patch(good, 16, _u64(len(good) + 1)), "LENGTH"
    yield "length_near_2_to_64", patch(good, 16, _u64(2**64 - 1)), "LENGTH"
    yield "file_extended", good + b"\0", "LENGTH"
    yield "table_checksum", patch(good, 24, bytes(4)), "HEADER"
    yield "header_reserved_first", patch(good, 28, b"\1"), "HEADER"
    yield "header_reserved_last", patch(good, 63, b"\1"), "HEADER"
    cut = HEADER.size + SECTION_ENTRY.size
    yield "table_past_end_of_file", patch(good[:cut], 16, _u64(cut)), "RANGE"


def _truncations(good: bytes) -> Iterator[Case]:
    for percent in range(1, 100):
        yield f"truncated_to_{percent}_percent", good[: len(good) * percent // 100], "LENGTH"


def _section_table_lies(good: bytes) -> Iterator[Case]:
    count = int.from_bytes(good[12:16], "little")
    first, second, last = (HEADER.size + i * SECTION_ENTRY.size for i in (0, 1, count - 1))

    def lie(position: int, new: bytes) -> bytes:
        return reseal_table(patch(good, position, new))

    yield "section_name_without_nul", lie(first, b"a" * 32), "NAME"
    yield "section_name_dirty_padding", lie(first + 31, b"x"), "NAME"
    yield "section_name_empty", lie(first, bytes(32)), "NAME"
    yield "section_name_upper_case", lie(first, b"T"), "NAME"
    yield "section_name_slash", lie(first + 6, b"/"), "NAME"
    yield "section_name_not_ascii", lie(first, b"\xff"), "NAME"
    yield "section_name_duplicated", lie(second, good[first : first + 32]), "NAME"
    yield "section_offset_unaligned", lie(second + 32, _u64(2 * ALIGNMENT + 64)), "RANGE"
    yield "section_offset_gap", lie(second + 32, _u64(3 * ALIGNMENT)), "RANGE"
    yield "section_offset_in_table", lie(first + 32, _u64(0)), "RANGE"
    yield "section_offset_overlapping", lie(second + 32, _u64(ALIGNMENT)), "RANGE"
    yield "section_offset_past_end", lie(last + 32, _u64((len(good) // ALIGNMENT + 1) * ALIGNMENT)), "RANGE"
    yield "section_offset_near_2_to_64", lie(second + 32, _u64(2**64 - ALIGNMENT)), "RANGE"
    entries = good[first : first + 2 * SECTION_ENTRY.size]
    swapped = entries[SECTION_ENTRY.size :] + entries[: SECTION_ENTRY.size]
    yield "section_offsets_reversed", lie(first, swapped), "RANGE"
    yield "section_length_zero", lie(first + 40, _u64(0)), "RANGE"
    yield "section_length_past_end", lie(last + 40, _u64(len(good))), "RANGE"
    yield "section_length_wrapping", lie(first + 40, _u64(2**64 - ALIGNMENT + 64)), "RANGE"
    wrapped = patch(patch(good, 12, _u32(2)), first + 40, _u64(2**64 - ALIGNMENT))
    yield (
        "sections_around_2_to_64",
        reseal_table(patch(wrapped, second + 32, _u64(0) + _u64(len(good)))),
        "RANGE",
    )
    yield "section_length_overlapping_next", lie(first + 40, _u64(ALIGNMENT + 1)), "RANGE"
    length = int.from_bytes(good[last + 40 : last + 48], "little")
    yield "bytes_after_last_section", lie(last + 40, _u64(length - 1)), "RANGE"
    yield "section_reserved_first", lie(first + 52, b"\1"), "HEADER"
    yield "section_reserved_last", lie(last + 63, b"\1"), "HEADER"
    yield "section_checksum_field", lie(first + 48, bytes(4)), "CHECKSUM"


def _section_lies(good: bytes) -> Iterator[Case]:
    for section in Bundle(good).sections.values():
        for place, position in (("first", section.offset), ("last", section.offset + section.length - 1)):
            flipped = bytes([good[position] ^ 0x10])
            yield f"bit_flipped_in_{place}_byte_of_{section.name}", patch(good, position, flipped), "CHECKSUM"
    sections = sections_of(good)
    for missing in REQUIRED:
        renamed = {f"other.{i}" if n == missing else n: data for i, (n, data) in enumerate(sections.items())}
        yield f"section_missing_{missing}", build(renamed), "SECTION"
    for place, text in (("in", b'{"source": "a\0b"}'), ("after", b"{}\0")):
        yield f"provenance_with_nul_{place}_it", build(sections | {"provenance": text}), "SECTION"


def _config_lies(good: bytes) -> Iterator[Case]:
    sections = sections_of(good)
    config = sections["target.config"]

    def lie(position: int, new: bytes) -> bytes:
        return build(sections | {"target.config": patch(config, position, new)})

    limits = {
        "hidden": 65536 + 32,
        "layers": 1025,
        "heads": 1026,
        "kv_heads": 1025,
        "head_dim": 288,
        "ffn": 65536 + 32,
        "vocab": 2**20 + 1,
        "max_positions": 2**20 + 1,
    }
    for index, (field, too_large) in enumerate(limits.items()):
        yield f"config_{field}_0", lie(4 * index, _u32(0)), "CONFIG"
        yield f"config_{field}_too_large", lie(4 * index, _u32(too_large)), "CONFIG"
        yield f"config_{field}_2_to_32_less_1", lie(4 * index, _u32(2**32 - 1)), "CONFIG"
    yield "config_hidden_not_in_blocks", lie(0, _u32(161)), "CONFIG"
    yield "config_heads_not_in_groups", lie(8, _u32(5)), "CONFIG"
    yield "config_head_dim_odd", lie(8, struct.pack("<3I", 32, 2, 31)), "CONFIG"
    yield "config_query_width_not_in_blocks", lie(16, _u32(30)), "CONFIG"
    yield "config_ffn_not_in_blocks", lie(20, _u32(289)), "CONFIG"
    for name, epsilon in (("0", 0.0), ("1", 1.0), ("negative", -1e-5), ("nan", float("nan"))):
        yield f"config_rms_eps_{name}", lie(32, struct.pack("<f", epsilon)), "CONFIG"
    yield "config_reserved", lie(63, b"\1"), "CONFIG"
    yield "config_short", build(sections | {"target.config": config[:-1]}), "CONFIG"
    yield "config_long", build(sections | {"target.config": config + b"\0"}), "CONFIG"
    fields = CONFIG.unpack(config)[:-1]
    for name, change in {
        "more_layers": {"layers": fields[1] + 1},
        "fewer_positions": {"max_positions": 64},
    }.items():
        claimed = config_section(Dimensions(**(vars(Dimensions(*fields)) | change)))
        verdict = "TENSOR" if name == "more_layers" else "SHAPE"
        yield f"config_claims_{name}", build(sections | {"target.config": claimed}), verdict


def _tensor_lies(good: bytes) -> Iterator[Case]:
    sections = sections_of(good)
    directory = sections["target.tensors"]
    entries = [
        TensorEntry(raw.rstrip(b"\0").decode("ascii"), *fields)
        for raw, *fields, _ in TENSOR_ENTRY.iter_unpack(directory)
    ]
    size = TENSOR_ENTRY.size

    def lie(index: int, position: int, new: bytes) -> bytes:
        return build(sections | {"target.tensors": patch(directory, index * size + position, new)})

    def index_of(matches: Callable[[TensorEntry], bool]) -> int:
        return next(i for i, entry in enumerate(entries) if matches(entry))

    matrix = index_of(lambda entry: entry.dtype == MXFP4T)
    embedding = index_of(lambda entry: entry.dtype == MXINT8T)
    norm = index_of(lambda entry: entry.name.endswith("norm.weight"))
    last_of_base = index_of(lambda entry: entry.name == "model.norm.weight")
    entry, following = entries[matrix], entries[matrix + 1]

    yield "directory_with_remainder", build(sections | {"target.tensors": directory + b"\0"}), "TENSOR"
    yield "directory_of_zeros", build(sections | {"target.tensors": bytes(size)}), "NAME"
    yield "tensor_name_without_nul", lie(0, 0, b"a" * 80), "NAME"
    yield "tensor_name_dirty_padding", lie(0, 79, b"x"), "NAME"
    yield "tensor_name_space", lie(0, 5, b" "), "NAME"
    yield "tensor_name_duplicated", lie(matrix + 1, 0, directory[matrix * size : matrix * size + 80]), "NAME"
    for dtype in (0, 4, 2**32 - 1):
        yield f"tensor_dtype_{dtype}", lie(matrix, 80, _u32(dtype)), "DTYPE"
    as_f32 = struct.pack("<IIQQ", F32, entry.section, 1, entry.length // 4)
    yield "tensor_of_another_dtype", lie(matrix, 80, as_f32), "DTYPE"
    for section in (len(sections), 2**32 - 1):
        yield f"tensor_in_section_{section}", lie(matrix, 84, _u32(section)), "TENSOR"
    for rows in (0, entry.rows + 16, 2**24 + 1, 2**63, 2**64 - 1):
        yield f"tensor_rows_{rows}", lie(matrix, 88, _u64(rows)), "TENSOR"
    for columns in (0, 33, entry.columns + 32, 2**24 + 32, 2**63):
        yield f"tensor_columns_{columns}", lie(matrix, 96, _u64(columns)), "TENSOR"
    yield "tensor_rows_of_another_shape", lie(matrix, 88, _u64(entry.rows - 1)), "SHAPE"
    swapped = struct.pack("<QQ", entries[norm].columns, 1)
    yield "tensor_transposed", lie(norm, 88, swapped), "SHAPE"
    yield "tensor_offset_unaligned", lie(last_of_base, 104, _u64(entries[last_of_base].offset - 4)), "TENSOR"
    later = patch(directory, last_of_base * size + 104, _u64(entries[last_of_base].offset + 4))
    longer = sections["target.base"] + bytes(4)
    moved = build(sections | {"target.tensors": later, "target.base": longer})
    yield "tensor_offset_unaligned_alone", moved, "TENSOR"
    yield (
        "tensor_offset_past_section",
        lie(matrix, 104, _u64(len(sections["target.base"]) // 64 * 64)),
        "TENSOR",
    )
    yield "tensor_offset_near_2_to_64", lie(matrix, 104, _u64(2**64 - 64)), "TENSOR"
    for length in (0, entry.length - 1, entry.length + 1, 2**64 - 64):
        yield f"tensor_length_{length}", lie(matrix, 112, _u64(length)), "TENSOR"
    yield "tensor_overlapping", lie(matrix + 1, 104, _u64(following.offset - 64)), "TENSOR"
    yield "tensor_on_top_of_another", lie(matrix + 1, 104, _u64(entry.offset)), "TENSOR"
    yield "tensor_reserved", lie(matrix, 127, b"\1"), "HEADER"
    missing = {
        "embedding": embedding,
        "rope": index_of(lambda entry: entry.name == "rope.sin"),
        "matrix": matrix,
        "last_norm": last_of_base,
        "residual": len(entries) - 1,
    }
    for name, index in missing.items():
        yield f"tensor_missing_{name}", lie(index, 0, b"unknown".ljust(80, b"\0")), "TENSOR"


def _scale_lies(good: bytes) -> Iterator[Case]:
    bundle = Bundle(good)
    sections = sections_of(good)

    def lie(section: str, position: int, code: int = 255) -> bytes:
        return build(sections | {section: patch(sections[section], position, bytes([code]))})

    for (section, name), entry in bundle.tensors.items():
        if entry.dtype == F32:
            continue
        block = {MXFP4T: 272, MXINT8T: 528}[entry.dtype]
        if name.endswith(("embed_tokens.weight", "layers.1.mlp.down_proj.weight")):
            yield f"scale_255_first_in_{section}", lie(section, entry.offset), "SCALE"
            last = (
                entry.offset + entry.length - block + 15
            )  # of the last tile's last row, which may be padding
            yield f"scale_255_last_in_{section}", lie(section, last), "SCALE"
        if section != "target.residual":
            continue
        base = sections["target.base"][bundle.tensors["target.base", name].offset :]
        yield f"residual_4_below_{name}", lie(section, entry.offset, base[0] - 4), "SCALE"
        yield f"residual_above_{name}", lie(section, entry.offset, base[0] + 1), "SCALE"
        last = entry.length - block + 15
        yield f"residual_above_last_of_{name}", lie(section, entry.offset + last, base[last] + 1), "SCALE"


def _text_lies(good: bytes) -> Iterator[Case]:
    sections = sections_of(good)
    for section, verdict in (("tokenizer", "TOKENIZER"), ("chat", "CHAT")):
        data = sections[section]
        yield f"{section}_cut", build(sections | {section: data[:-1]}), verdict
        yield f"{section}_extended", build(sections | {section: data + b"\0"}), verdict
        yield f"{section}_of_one_byte", build(sections | {section: b"\0"}), verdict
        yield (
            f"{section}_counts_near_2_to_32",
            build(sections | {section: patch(data, 0, b"\xff" * 12)}),
            verdict,
        )


def _golden_lies(good: bytes) -> Iterator[Case]:
    sections = sections_of(good)
    golden = sections["golden"]
    config = Bundle(good).config

    def lie(position: int, new: bytes) -> bytes:
        return build(sections | {"golden": patch(golden, position, new)})

    for prompts in (0, 65, 2**32 - 1):
        yield f"golden_prompts_{prompts}", lie(0, _u32(prompts)), "GOLDEN"
    yield "golden_prompt_more_than_there", lie(0, _u32(int.from_bytes(golden[:4], "little") + 1)), "GOLDEN"
    yield "golden_prompt_less_than_there", lie(0, _u32(1)), "GOLDEN"
    for greedy in (0, 65):
        yield f"golden_greedy_{greedy}", lie(4, _u32(greedy)), "GOLDEN"
    for tokens in (0, 4097, 2**30, 2**32 - 1):
        yield f"golden_tokens_{tokens}", lie(72, _u32(tokens)), "GOLDEN"
    yield "golden_token_beyond_vocabulary", lie(76, _u32(config.vocab)), "GOLDEN"
    too_long = golden[:72] + _u32(config.max_positions) + bytes(4 * config.max_positions)
    exceeding = build(sections | {"golden": patch(too_long, 0, _u32(1))})
    yield "golden_prompt_beyond_positions", exceeding, "GOLDEN"
    yield "golden_cut", build(sections | {"golden": golden[:-1]}), "GOLDEN"
    yield "golden_extended", build(sections | {"golden": golden + bytes(4)}), "GOLDEN"
    yield "golden_header_cut", build(sections | {"golden": golden[:71]}), "GOLDEN"


def _ngram_lies(good: bytes) -> Iterator[Case]:
    """Fixture T has 512 tokens at most and no table: one of two and one entries."""
    sections = sections_of(good)
    words = [2, 1, 5, 6, 9, 9, 5, 7, 8]  # counts; contexts and next of order 1; the same of order 2
    chances = bytes([200, 100, 255])

    def table(changes: dict[int, int] | None = None, tail: bytes = chances) -> bytes:
        changed = [(changes or {}).get(i, word) for i, word in enumerate(words)]
        return build(sections | {"draft.ngrams": struct.pack(f"<{len(changed)}I", *changed) + tail})

    Bundle(table())  # the truth
    yield "ngrams_without_counts", build(sections | {"draft.ngrams": bytes(7)}), "DRAFT"
    yield "ngrams_count_too_large", table({0: (1 << 24) + 1}), "DRAFT"
    yield "ngrams_count_near_2_to_32", table({1: 2**32 - 1}), "DRAFT"
    yield "ngrams_one_entry_missing", table({0: 3}), "DRAFT"
    yield "ngrams_one_entry_more", table({0: 1}), "DRAFT"
    yield "ngrams_contexts_equal", table({3: 5}), "DRAFT"
    yield "ngrams_contexts_descending", table({2: 7}), "DRAFT"
    yield "ngrams_context_outside_vocabulary", table({3: 1 << 20}), "DRAFT"
    yield "ngrams_next_outside_vocabulary", table({5: 1 << 20}), "DRAFT"
    yield "ngrams_second_context_outside_vocabulary", table({7: 1 << 20}), "DRAFT"
    yield "ngrams_second_next_outside_vocabulary", table({8: 1 << 20}), "DRAFT"
    yield "ngrams_chance_missing", table(tail=chances[:-1]), "DRAFT"
    yield "ngrams_trailing_bytes", table(tail=chances + b"\0"), "DRAFT"


def _schedule_lies(good: bytes) -> Iterator[Case]:
    sections = sections_of(good)
    truth = Schedule.default(Bundle(good).config.layers)

    def lie(**changes: Any) -> bytes:
        return build(sections | {"schedule": dataclasses.replace(truth, **changes).pack()})

    Bundle(lie())  # the truth
    nan, infinity = float("nan"), float("inf")
    yield "schedule_cut", build(sections | {"schedule": truth.pack()[:-4]}), "SCHEDULE"
    yield "schedule_extended", build(sections | {"schedule": truth.pack() + bytes(4)}), "SCHEDULE"
    for consumer in ("compute", "precision", "memory"):
        for i, value in enumerate((nan, infinity, -infinity, nan)):
            weights = [*truth.compute]
            weights[i] = value
            yield f"schedule_{consumer}_weight_{i}", lie(**{consumer: Weights(*weights)}), "SCHEDULE"
    for share in (-0.01, 1.01, nan):
        yield f"schedule_core_fraction_{share}", lie(core_fraction=share), "SCHEDULE"
        yield f"schedule_core_tokens_{share}", lie(core_tokens=share), "SCHEDULE"
    for catch_up in (0, 33, 2**32 - 1):
        yield f"schedule_catch_up_{catch_up}", lie(catch_up=catch_up), "SCHEDULE"
    yield "schedule_sinks", lie(sinks=33), "SCHEDULE"
    for recent in (0, 33, 4128, 2**32 - 32):
        yield f"schedule_recent_{recent}", lie(recent=recent), "SCHEDULE"
    yield "schedule_layer", lie(monitored_layer=Bundle(good).config.layers), "SCHEDULE"
    ascending = (*truth.thresholds[:-1], truth.thresholds[-2] + 0.01)
    yield "schedule_thresholds_ascend", lie(thresholds=ascending), "SCHEDULE"
    yield "schedule_threshold_nan", lie(thresholds=(nan, *truth.thresholds[1:])), "SCHEDULE"
