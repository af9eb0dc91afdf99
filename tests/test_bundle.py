# SPDX-License-Identifier: Apache-2.0
"""The bundle reader and writer: what is written comes back, every lie gets its verdict, noise never gets
through."""

import contextlib
import struct
import zlib

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import build, cases, drafter_cases, patch, reseal_table, sections_of, wrong_verdicts
from mxdraft.bundle import Bundle, BundleWriter
from mxdraft.bundle.format import (
    ALIGNMENT,
    HEADER,
    MAGIC,
    SECTION_ENTRY,
    DraftConfig,
    golden_section,
    required_tensors,
)
from mxdraft.errors import BundleError, RefusedError, TransferError
from mxdraft.export import export_model
from mxdraft.files import replacing
from mxdraft.mx import MXTensor
from mxdraft.pack import pack


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of a bundle of fixture T with all sections."""
    directory = tmp_path_factory.mktemp("bundle")
    export_model(tiny.checkpoint(), directory)
    pack(directory, directory / "tiny.mxb")
    return (directory / "tiny.mxb").read_bytes()


def test_header_bytes(good):
    assert good[:8] == bytes([0x89, 0x4D, 0x58, 0x42, 0x0D, 0x0A, 0x1A, 0x0A])
    version, count, length, crc = struct.unpack_from("<IIQI", good, 8)
    assert (version, count, length) == (2, 9, len(good))
    assert crc == zlib.crc32(good[64 : 64 + 64 * count])
    assert good[64:96] == b"target.config".ljust(32, b"\0")
    assert struct.unpack_from("<QQ", good, 96) == (65536, 64)
    assert struct.unpack_from("<8If", good, 65536) == pytest.approx((160, 4, 6, 2, 32, 288, 500, 256, 1e-5))


def test_sections_follow_each_other_at_multiples_of_64_kib(good):
    end = ALIGNMENT
    for section in Bundle(good).sections.values():
        assert section.offset % 65536 == 0
        assert 0 <= section.offset - end < 65536
        assert not any(good[end : section.offset])
        end = section.offset + section.length
    assert end == len(good)


def test_every_lie_gets_its_verdict(good):
    wrong, count = wrong_verdicts(cases(good), [Bundle])
    assert wrong == []
    assert count > 250


def test_every_lie_about_a_drafter_gets_its_verdict(good):
    drafting = tiny.with_drafter(good, tiny.drafter(Bundle(good).config))
    wrong, count = wrong_verdicts(drafter_cases(drafting), [Bundle])
    assert wrong == []
    assert count > 60


def test_drafter_round_trip(good):
    config = Bundle(good).config
    drafter = tiny.drafter(config)
    bundle = Bundle(tiny.with_drafter(good, drafter))
    crcs = tuple(bundle.sections[name].crc for name in ("target.shared", "target.base", "tokenizer"))
    assert Bundle(good).draft is None
    assert bundle.draft == DraftConfig((1, 2, 4), 48, drafter.calibration, crcs)
    raw = bundle.section("draft.config").tobytes()
    assert struct.unpack_from("<14I", raw) == (1, 160, 6, 2, 32, 288, 500, 3, 1, 2, 4, 0, 48, 2)
    assert struct.unpack_from("<8f", raw, 68) == (0.75, 0.5, *[0.0] * 6)
    assert struct.unpack_from("<8f", raw, 100) == (1.25, 2.0, *[0.0] * 6)
    for name, plane in drafter.planes.items():
        stored = bundle.get("draft.weights", name)
        np.testing.assert_array_equal(stored.data, plane.data)
        np.testing.assert_array_equal(stored.scale, plane.scale)
    for name, norm in drafter.norms.items():
        np.testing.assert_array_equal(bundle.get("draft.weights", name)[0], norm)
    np.testing.assert_array_equal(bundle.get("draft.weights", "draft_ids")[0], drafter.draft_ids)


def test_lies_have_names_of_their_own(good):
    names = [name for name, _, _ in cases(good)]
    drafting = tiny.with_drafter(good, tiny.drafter(Bundle(good).config))
    names += [name for name, _, _ in drafter_cases(drafting)]
    assert len(set(names)) == len(names)


def test_base_alone_is_a_bundle_and_unknown_sections_are_ignored(good):
    sections = sections_of(good)
    directory = sections["target.tensors"]
    kept = [directory[i : i + 128] for i in range(0, len(directory), 128) if directory[i + 84] != 4]
    del sections["target.residual"], sections["chat"], sections["golden"]
    bundle = Bundle(build(sections | {"target.tensors": b"".join(kept), "drafter.x": b"later"}))
    assert "target.residual" not in bundle
    assert bundle.golden is None
    assert len(bundle.tensors) == len(list(required_tensors(bundle.config, "target.base"))) + 3


def test_padding_is_not_checked(good):
    config = Bundle(good).sections["target.config"]
    Bundle(patch(good, config.offset + config.length, b"anything"))


def test_tensor_views(good):
    bundle = Bundle(good)
    matrix = bundle.get("target.base", "model.layers.0.self_attn.q_proj.weight")
    embedding = bundle.get("target.shared", "model.embed_tokens.weight")
    assert isinstance(matrix, MXTensor)
    assert isinstance(embedding, MXTensor)
    assert (matrix.format, matrix.shape, matrix.rule) == ("mxfp4", (192, 160), "search")
    assert (embedding.format, embedding.shape, embedding.rule) == ("mxint8", (500, 160), "floor")
    norm = bundle.get("target.base", "model.norm.weight")
    np.testing.assert_array_equal(norm[0], tiny.checkpoint().tensors["model.norm.weight"])


def test_golden_round_trip(good):
    section = golden_section([[1], [2, 3, 499]], 64, b"b" * 32, b"f" * 32)
    golden = Bundle(build(sections_of(good) | {"golden": section})).golden
    assert golden.prompts == ((1,), (2, 3, 499))
    assert (golden.greedy, golden.base_digest, golden.full_digest) == (64, b"b" * 32, b"f" * 32)
    assert section[:8] == struct.pack("<II", 2, 64)
    assert section[72:] == struct.pack("<6I", 1, 1, 3, 2, 3, 499)


def test_provenance_that_is_no_json_object_is_refused_when_read(good):
    for text in (b"no json", b"[1]", b"\xff", b"[" * 100_000):
        bundle = Bundle(build(sections_of(good) | {"provenance": text}))
        with pytest.raises(RefusedError, match="provenance"):
            _ = bundle.provenance


def test_opening_files(good, tmp_path):
    path = tmp_path / "a.mxb"
    path.write_bytes(good)
    assert Bundle.open(path).config.vocab == 500
    with pytest.raises(BundleError, match="no such bundle") as missing:
        Bundle.open(tmp_path / "b.mxb")
    assert missing.value.verdict == "MISSING"
    with pytest.raises(TransferError, match="cannot read"):
        Bundle.open(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(BundleError, match=r"a\.mxb: .*bundle again") as empty:
        Bundle.open(path)
    assert empty.value.verdict == "MAGIC"


def test_writer_replaces_sections_only_by_equals(tmp_path):
    with replacing(tmp_path / "a") as file:
        writer = BundleWriter(file)
        writer.add("one", [b"abc", b"d"])
        writer.add("two", [b"x"])
        writer.replace("one", b"ABCD")
        with pytest.raises(ValueError, match="section two has 1 bytes, not 2"):
            writer.replace("two", b"xy")
        writer.seal()
    data = (tmp_path / "a").read_bytes()
    assert data[:8] == MAGIC
    assert data[65536:65540] == b"ABCD"
    assert data[131072:] == b"x"
    entry = SECTION_ENTRY.unpack_from(data, HEADER.size)
    assert entry == (b"one".ljust(32, b"\0"), 65536, 4, zlib.crc32(b"ABCD"), bytes(12))


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        BundleWriter(file).add("section", [b"half of it", None])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_noise_is_accepted_or_refused_but_nothing_else(good, data):
    """Random bytes in the parts that are parsed, with corrected checksums."""
    sections = sections_of(good)
    weights = {"target.shared", "target.base", "target.residual"}
    name = data.draw(st.sampled_from(["table", *sorted(sections.keys() - weights)]))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    if name == "table":
        position = data.draw(st.integers(8, HEADER.size + len(sections) * SECTION_ENTRY.size - 8))
        bundle = reseal_table(patch(good, position, noise))
    else:
        position = data.draw(st.integers(0, len(sections[name]) - 1))
        bundle = build(sections | {name: patch(sections[name], position, noise)})
    with contextlib.suppress(BundleError):
        Bundle(bundle)
