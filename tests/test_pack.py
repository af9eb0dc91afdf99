# SPDX-License-Identifier: Apache-2.0
"""ONNX files to bundle: the weights arrive bit for bit, packing is reproducible, and altered exports are
refused."""

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import onnx
import pytest
import tiny
from mxdraft.bundle import Bundle
from mxdraft.checkpoint.reference import rope_tables
from mxdraft.errors import BundleError, RefusedError, TransferError
from mxdraft.export import export_drafter, export_model
from mxdraft.files import write_json
from mxdraft.mx import quantize, quantize_planes
from mxdraft.pack import default_prompts, pack

CHECKPOINT = tiny.checkpoint()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported")
    export_model(CHECKPOINT, directory)
    return directory


@pytest.fixture
def altered(exported, tmp_path):
    """A copy of the export to spoil."""
    return shutil.copytree(exported, tmp_path / "altered")


def same(a, b):
    return a.format == b.format and np.array_equal(a.data, b.data) and np.array_equal(a.scale, b.scale)


def test_weights_arrive_bit_for_bit(exported, tmp_path):
    pack(exported, tmp_path / "a.mxb")
    bundle = Bundle.open(tmp_path / "a.mxb")
    for name, weight in CHECKPOINT.tensors.items():
        if weight.ndim == 1:
            for section in ("target.base", "target.residual"):
                np.testing.assert_array_equal(bundle.get(section, name)[0], weight)
        elif "embed" in name:
            assert same(bundle.get("target.shared", name), quantize(weight, "mxint8"))
        else:
            base, residual = quantize_planes(weight, "search")
            assert same(bundle.get("target.base", name), base)
            assert same(bundle.get("target.residual", name), residual)
    cosine, sine = rope_tables(CHECKPOINT.config, CHECKPOINT.config.max_positions)
    np.testing.assert_array_equal(bundle.get("target.shared", "rope.cos"), cosine)
    np.testing.assert_array_equal(bundle.get("target.shared", "rope.sin"), sine)
    for field in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
        assert getattr(bundle.config, field) == getattr(CHECKPOINT.config, field)
    assert list(bundle.sections)[:5] == [
        "target.config",
        "target.tensors",
        "target.shared",
        "target.base",
        "target.residual",
    ]
    assert list(bundle.sections)[5:] == ["tokenizer", "chat", "golden", "provenance"]


def test_separate_head(tmp_path):
    checkpoint = tiny.checkpoint(tied=False)
    export_model(checkpoint, tmp_path)
    pack(tmp_path, tmp_path / "a.mxb")
    head = Bundle.open(tmp_path / "a.mxb").get("target.shared", "lm_head.weight")
    assert same(head, quantize(checkpoint.tensors["lm_head.weight"], "mxint8"))


def test_two_exports_and_packs_give_the_same_bytes(exported, tmp_path):
    export_model(CHECKPOINT, tmp_path / "again")
    pack(exported, tmp_path / "a.mxb")
    pack(tmp_path / "again", tmp_path / "b.mxb")
    assert (tmp_path / "a.mxb").read_bytes() == (tmp_path / "b.mxb").read_bytes()


def test_provenance_tells_source_recipe_and_files(exported, tmp_path):
    pack(exported, tmp_path / "a.mxb")
    provenance = Bundle.open(tmp_path / "a.mxb").provenance
    assert provenance["source"] == CHECKPOINT.source
    assert provenance["source_sha256"] == CHECKPOINT.source_sha256
    assert provenance["rule"] == "search"
    assert provenance["recipe"] is None
    assert set(provenance["versions"]) == {"mxdraft", "numpy", "onnx", "onnxruntime"}
    assert len(provenance["sha256"]) == 6
    for name, digest in provenance["sha256"].items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest
    assert str(exported) not in json.dumps(provenance)


def test_the_residual_can_be_left_out(exported, tmp_path):
    pack(exported, tmp_path / "a.mxb", digest=lambda _: ("ab" * 32, None), residual=False)
    bundle = Bundle.open(tmp_path / "a.mxb")
    assert "target.residual" not in bundle
    assert bundle.golden.base_digest == b"\xab" * 32
    assert bundle.golden.full_digest == bytes(32)


def test_digest_is_asked_of_a_whole_bundle_with_zero_digests(exported, tmp_path):
    seen = []

    def digest(path):
        bundle = Bundle.open(path)
        seen.append((bundle.golden.base_digest, bundle.golden.prompts))
        assert not (tmp_path / "a.mxb").exists()
        return "01" * 32, "02" * 32

    pack(exported, tmp_path / "a.mxb", golden=[[5, 6], [7]], digest=digest)
    assert seen == [(bytes(32), ((5, 6), (7,)))]
    golden = Bundle.open(tmp_path / "a.mxb").golden
    assert golden.prompts == ((5, 6), (7,))
    assert (golden.base_digest, golden.full_digest) == (b"\1" * 32, b"\2" * 32)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mxb"]


def test_default_prompts_are_few_tokens_inside_the_vocabulary():
    prompts = default_prompts(49152)
    assert [len(prompt) for prompt in prompts] == [1, 7, 16]
    assert len({token for prompt in prompts for token in prompt}) == 24
    assert all(0 <= token < 500 for prompt in default_prompts(500) for token in prompt)


def test_golden_prompts_that_do_not_fit_are_refused(exported, tmp_path):
    with pytest.raises(BundleError) as error:
        pack(exported, tmp_path / "a.mxb", golden=[[500]])
    assert error.value.verdict == "GOLDEN"
    assert list(tmp_path.iterdir()) == []


def _edit(directory, change, files=("model.base.onnx", "model.full.onnx")):
    for name in files:
        model = onnx.load(directory / name, load_external_data=False)
        change(model)
        (directory / name).write_bytes(model.SerializeToString(deterministic=True))
    seal(directory)


def seal(directory):
    """Write a manifest of the files as they are, so that what is checked behind it is reached."""
    names = json.loads((directory / "export.json").read_text(encoding="utf-8"))
    digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    write_json(directory / "export.json", digests)


def _add_scaling(model):
    model.graph.node[-1].attribute[0].i = 64


def _change_epsilon(model):
    next(node for node in model.graph.node if node.op_type == "RMSNormalization").attribute[1].f = 1e-3


def _change_function(model):
    function = next(f for f in model.functions if f.name == "MXFP4Dequantize")
    next(node for node in function.node if node.op_type == "Unsqueeze").op_type = "Squeeze"


@pytest.mark.parametrize("change", [_add_scaling, _change_epsilon, _change_function])
def test_a_graph_that_is_not_the_runtimes_is_refused(altered, tmp_path, change):
    _edit(altered, change)
    with pytest.raises(RefusedError, match=r"model\.base\.onnx(: its graph| is not a model)"):
        pack(altered, tmp_path / "a.mxb")


FILES = ["model.base.onnx", "model.full.onnx", "model.onnx.data", "tokenizer.json", "generation_config.json"]


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja"])
def test_altered_files_are_refused(altered, tmp_path, name):
    data = bytearray((altered / name).read_bytes())
    data[len(data) // 2] ^= 1
    (altered / name).write_bytes(data)
    with pytest.raises(RefusedError, match=f"{name} is not the file that was exported"):
        pack(altered, tmp_path / "a.mxb")


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "export.json"])
def test_missing_files_are_refused(altered, tmp_path, name):
    (altered / name).unlink()
    with pytest.raises(RefusedError, match=name):
        pack(altered, tmp_path / "a.mxb")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '"x"', "[" * 100_000, '{"model.base.onnx": 1}', '{"model.base.onnx": "ab"}'),
        *(
            '{"../a": "%s"}' % ("0" * 64),
            '{"\\ud800": "%s"}' % ("0" * 64),
            '{"a\\u0000b": "%s"}' % ("0" * 64),
        ),
        *("{}", '{"none": "%s"}' % ("0" * 64), '{"pipe": "%s"}' % ("0" * 64)),
    ],
)
def test_a_manifest_that_is_none_is_refused(altered, tmp_path, text):
    os.mkfifo(altered / "pipe")
    (altered / "export.json").write_text(text, encoding="utf-8")
    with pytest.raises((RefusedError, TransferError)):
        pack(altered, tmp_path / "a.mxb")


def test_links_to_the_files_and_from_them_are_no_fault(exported, tmp_path):
    """A backup of hard links, and a folder of symbolic ones as Hugging Face's cache is."""
    pack(exported, tmp_path / "a.mxb")
    (tmp_path / "symbolic").mkdir()
    shutil.copytree(exported, tmp_path / "hard", copy_function=os.link)
    for path in exported.iterdir():
        (tmp_path / "symbolic" / path.name).symlink_to(path)
    for name in ("symbolic", "hard"):
        pack(tmp_path / name, tmp_path / "b.mxb")
        assert (tmp_path / "b.mxb").read_bytes() == (tmp_path / "a.mxb").read_bytes()


def test_writing_over_links_leaves_what_they_lead_to(drafting, tmp_path):
    """An export into a backup, or into a folder of links, changes no file of another folder."""
    original = shutil.copytree(drafting, tmp_path / "original")
    before = {path.name: path.read_bytes() for path in original.iterdir()}
    shutil.copytree(original, tmp_path / "hard", copy_function=os.link)
    (tmp_path / "symbolic").mkdir()
    for path in original.iterdir():
        (tmp_path / "symbolic" / path.name).symlink_to(path)
    for name in ("hard", "symbolic"):
        export_drafter(tiny.drafter(CHECKPOINT.config, seed=2), tmp_path / name)
        export_model(tiny.checkpoint(seed=3), tmp_path / name)
        pack(tmp_path / name, tmp_path / "a.mxb")
        assert {path.name: path.read_bytes() for path in original.iterdir()} == before
    with pytest.raises(BundleError):
        Bundle.open(tmp_path / "none.mxb")


def test_an_export_without_its_drafter_is_none(drafting, tmp_path):
    """What is left of an export that was killed before it wrote the drafter: no bundle without one."""
    for left_out in ("export.json", "draft.step.onnx"):
        rest = shutil.copytree(drafting, tmp_path / left_out)
        (rest / left_out).unlink()
        with pytest.raises(RefusedError, match=rf"{left_out}: no such file"):
            pack(rest, tmp_path / "a.mxb")
    assert not (tmp_path / "a.mxb").exists()


def test_a_drafter_of_other_weights_leaves_the_export_as_it_was(drafting, tmp_path):
    copy = shutil.copytree(drafting, tmp_path / "copy")
    other = dataclasses.replace(tiny.drafter(CHECKPOINT.config), source_sha256="1" * 64)
    with pytest.raises(RefusedError, match="trained for weights with SHA-256 1111"):
        export_model(CHECKPOINT, copy, drafter=other)
    with pytest.raises(RefusedError, match="trained for weights with SHA-256 1111"):
        export_drafter(other, copy)
    pack(copy, tmp_path / "a.mxb")
    assert Bundle.open(tmp_path / "a.mxb").draft is not None


def test_a_drafter_can_be_exported_with_its_target(drafting, tmp_path):
    export_model(CHECKPOINT, tmp_path / "o", drafter=tiny.drafter(CHECKPOINT.config))
    assert {p.name: p.read_bytes() for p in (tmp_path / "o").iterdir()} == {
        p.name: p.read_bytes() for p in drafting.iterdir()
    }


def test_exporting_a_drafter_needs_a_whole_export(tmp_path):
    export_model(CHECKPOINT, tmp_path / "o")
    (tmp_path / "o" / "export.json").unlink()
    with pytest.raises(RefusedError, match="not a whole export"):
        export_drafter(tiny.drafter(CHECKPOINT.config), tmp_path / "o")


@pytest.mark.parametrize("data", [b"", b"no protobuf", b"\x08\x0c\x12\x80"])
def test_a_file_that_is_no_onnx_is_refused(altered, tmp_path, data):
    (altered / "model.base.onnx").write_bytes(data)
    seal(altered)
    with pytest.raises(RefusedError, match=r"model\.base\.onnx is not a model of this exporter"):
        pack(altered, tmp_path / "a.mxb")


def test_graphs_of_different_exports_are_refused(altered, tmp_path):
    export_model(tiny.checkpoint(seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.full.onnx", altered)
    seal(altered)
    with pytest.raises(RefusedError, match=r"export"):
        pack(altered, tmp_path / "a.mxb")


def test_swapped_weights_are_refused(altered, tmp_path):
    """The graph of full precision reads another layer's base plane."""

    def swap(model):
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        name = "model.layers.{}.mlp.up_proj.weight.base.data"
        a, b = tensors[name.format(0)].external_data, tensors[name.format(1)].external_data
        a[1].value, b[1].value = b[1].value, a[1].value

    _edit(altered, swap, ["model.full.onnx"])
    with pytest.raises(RefusedError, match=r"up_proj\.weight\.base\.data differs between base and full"):
        pack(altered, tmp_path / "a.mxb")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """The export with a drafter."""
    directory = tmp_path_factory.mktemp("drafting")
    export_model(CHECKPOINT, directory)
    export_drafter(tiny.drafter(CHECKPOINT.config), directory)
    return directory


@pytest.fixture
def altered_drafting(drafting, tmp_path):
    return shutil.copytree(drafting, tmp_path / "altered")


def test_a_drafter_arrives_bit_for_bit_and_changes_nothing_else(exported, drafting, tmp_path):
    pack(exported, tmp_path / "a.mxb")
    pack(drafting, tmp_path / "b.mxb")
    plain, bundle = (Bundle.open(tmp_path / name) for name in ("a.mxb", "b.mxb"))
    wanted = Bundle(tiny.with_drafter((tmp_path / "a.mxb").read_bytes(), tiny.drafter(CHECKPOINT.config)))
    for name in wanted.sections:
        if name != "provenance":
            assert bundle.section(name).tobytes() == wanted.section(name).tobytes(), name
    assert plain.provenance["drafter"] is None
    digests = bundle.provenance["sha256"]
    for name in ("draft.features.onnx", "draft.step.onnx", "draft.onnx.data"):
        assert digests[name] == hashlib.sha256((drafting / name).read_bytes()).hexdigest()


def test_a_new_export_forgets_the_drafter(altered_drafting, tmp_path):
    export_model(CHECKPOINT, altered_drafting)
    pack(altered_drafting, tmp_path / "a.mxb")
    assert Bundle.open(tmp_path / "a.mxb").draft is None


@pytest.mark.parametrize("name", ["draft.features.onnx", "draft.step.onnx"])
def test_a_drafter_that_is_not_the_runtimes_is_refused(altered_drafting, tmp_path, name):
    _edit(altered_drafting, _change_epsilon, [name])
    with pytest.raises(RefusedError, match=rf"{name}(: its graph| is not a model)"):
        pack(altered_drafting, tmp_path / "a.mxb")


def test_a_drafter_of_another_export_is_refused(altered_drafting, tmp_path):
    export_model(tiny.checkpoint(seed=1), tmp_path / "other")
    for name in ("draft.features.onnx", "draft.step.onnx", "draft.onnx.data"):
        shutil.copy(altered_drafting / name, tmp_path / "other")
    shutil.copy(altered_drafting / "export.json", tmp_path / "other")
    seal(tmp_path / "other")
    with pytest.raises(RefusedError, match=r"draft\.\S+: model\.onnx\.data is not the file"):
        pack(tmp_path / "other", tmp_path / "a.mxb")


def test_a_drafter_of_which_a_part_is_missing_is_refused(altered_drafting, tmp_path):
    (altered_drafting / "draft.features.onnx").unlink()
    with pytest.raises(RefusedError, match=r"draft\.features\.onnx: no such file"):
        pack(altered_drafting, tmp_path / "a.mxb")


def test_initializer_of_another_shape_is_refused(altered, tmp_path):
    def transpose(model):
        name = "model.layers.0.mlp.up_proj.weight.base.scale"
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.dims[:] = reversed(tensor.dims)

    _edit(altered, transpose)
    with pytest.raises(RefusedError, match=r"model\.base\.onnx .*layers\.0\.mlp\.up_proj"):
        pack(altered, tmp_path / "a.mxb")


def test_unwritable_target_is_a_transfer_error(exported, tmp_path):
    with pytest.raises(TransferError, match="cannot write"):
        pack(exported, tmp_path / "no such directory" / "a.mxb")


# ---- graphs that lie ----


def _metadata(change):
    """Change what a graph says about itself."""

    def apply(model):
        (entry,) = model.metadata_props
        value = json.loads(entry.value)
        changed = change(value)
        entry.value = changed if isinstance(changed, str) else json.dumps(value)

    return apply


def _external(**fields):
    """Lie about where the first initializer's data is."""

    def apply(model):
        for entry in model.graph.initializer[0].external_data:
            entry.value = str(fields.get(entry.key, entry.value))

    return apply


def test_a_name_that_is_no_text_is_refused(altered, tmp_path):
    """Protobuf takes it and gives bytes."""
    name = b"model.layers.0.input_layernorm.weight"
    graph = (altered / "model.base.onnx").read_bytes()
    place = graph.rindex(name)
    (altered / "model.base.onnx").write_bytes(graph[:place] + b"\xff" + graph[place + 1 :])
    seal(altered)
    with pytest.raises(RefusedError, match="is not an export of one model"):
        pack(altered, tmp_path / "a.mxb")


def _inline(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("external_data")
    tensor.data_location = tensor.DEFAULT
    tensor.raw_data = bytes(8)


@pytest.mark.parametrize(
    "change",
    [
        _metadata(lambda _: "["),
        _metadata(lambda _: "[" * 100_000),
        _metadata(lambda _: '{"config": "\\ud800"}'),
        _metadata(lambda m: m.update(config=1)),
        _metadata(lambda m: m.update(more=1)),
        _metadata(lambda m: m.pop("files")),
        _metadata(lambda m: m["config"].update(hidden="160")),
        _metadata(lambda m: m["config"].update(hidden=1e300)),
        _metadata(lambda m: m["config"].update(layers=10**9)),
        _metadata(lambda m: m["config"].update(rms_eps=None)),
        _metadata(lambda m: m["files"].update({"/etc/passwd": "0" * 64})),
        _metadata(lambda m: m.update(files=["model.onnx.data"])),
        _metadata(lambda m: m["files"].update({"tokenizer.json": "0" * 64})),
        _external(location="/etc/passwd"),
        _external(location="../model.onnx.data"),
        _external(offset=-64),
        _external(offset=1 << 62),
        _external(offset="x"),
        _external(length=1 << 62),
        _external(length=0),
        _inline,
        lambda m: m.ClearField("metadata_props"),
        lambda m: m.graph.ClearField("initializer"),
        lambda m: m.opset_import[0].__setattr__("version", 23),
        lambda m: m.__setattr__("ir_version", 3),
    ],
)
def test_graphs_that_lie_are_refused(altered, tmp_path, change):
    _edit(altered, change)
    with pytest.raises(RefusedError, match=r"model\.base\.onnx"):
        pack(altered, tmp_path / "a.mxb")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(calibration=[[1e300, 1.0], [1.0, 1.0]]),
        lambda m: m.update(calibration=[]),
        lambda m: m.update(calibration=[[1.0, -1.0]]),
        lambda m: m.update(feature_layers=[3, 2, 1]),
        lambda m: m.update(vocab=47),
        lambda m: m.update(vocab=1 << 40),
    ],
)
def test_drafters_that_lie_are_refused(altered_drafting, tmp_path, change):
    _edit(altered_drafting, _metadata(change), ["draft.features.onnx", "draft.step.onnx"])
    with pytest.raises(RefusedError, match=r"draft\.(features|step)\.onnx"):
        pack(altered_drafting, tmp_path / "a.mxb")
