# SPDX-License-Identifier: Apache-2.0
"""Checkpoint to ONNX: what each operator means, that onnxruntime runs the graphs, and what they compute."""

import dataclasses
import json

import numpy as np
import onnx
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mxdraft.errors import RefusedError, TransferError
from mxdraft.export import OnnxRunner, export_model
from mxdraft.export.functions import DOMAIN, DOMAIN_VERSION, OPSET, functions
from mxdraft.mx import (
    MXTensor,
    dequantize,
    dequantize_activations,
    quantize,
    quantize_activations,
    quantize_planes,
)
from mxdraft.train.delta import TrainedBase
from onnx import TensorProto
from onnxruntime import InferenceSession
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

CHECKPOINT = tiny.checkpoint()
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 500, 40)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_model(CHECKPOINT, tmp_path_factory.mktemp("export"))


# ---- operators ----


def operator(kind):
    """A callable that runs one operator of the domain on stock onnxruntime."""
    function = next(f for f in functions() if f.name == kind)
    types = {"X": TensorProto.FLOAT, "ids": TensorProto.INT64}
    types["W"] = TensorProto.INT8 if "INT8" in kind else TensorProto.UINT8

    def value(name):
        return onnx.helper.make_tensor_value_info(name, types.get(name, TensorProto.UINT8), None)

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, function.input, ["Y"], domain=DOMAIN)],
        kind,
        [value(name) for name in function.input],
        [onnx.helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, functions=functions(), ir_version=12)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda *inputs: session.run(None, dict(zip(function.input, inputs, strict=True)))[0]


quantize_dequantize = operator("ActivationQuantizeDequantize")


def activations(x):
    return dequantize_activations(*quantize_activations(x))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=64, max_size=64))
def test_activation_quantizer_is_the_one_of_mx(values):
    x = np.array(values, np.float32).reshape(1, 2, 32)
    np.testing.assert_array_equal(quantize_dequantize(x), activations(x))


def test_activation_quantizer_is_exact_at_powers_of_two():
    power = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    edges = np.concatenate([power, np.nextafter(power, 0), np.nextafter(power, np.float32(np.inf))])
    x = np.zeros((len(edges), 32), np.float32)
    x[:, 3], x[:, 7] = edges, -edges / 3
    np.testing.assert_array_equal(quantize_dequantize(x), activations(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activation_quantizer_makes_a_bad_block_nan_and_no_other(bad):
    x = np.ones((1, 96), np.float32)
    x[0, 40] = bad
    y = quantize_dequantize(x)
    assert np.isnan(y[0, 32:64]).all()
    np.testing.assert_array_equal(np.delete(y, np.s_[32:64], axis=1), np.ones((1, 64)))


def test_dequantizers_are_exact_for_every_code_and_scale():
    scale = np.arange(255, dtype=np.uint8).reshape(255, 1).repeat(16, axis=1)
    data = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    with np.errstate(over="ignore"):
        expected = dequantize(MXTensor("mxfp4", data, scale, "floor"))
    y = operator("MXFP4Dequantize")(data, scale)
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))
    data, scale = data.view(np.int8), scale[:, :8]
    with np.errstate(over="ignore"):
        expected = dequantize(MXTensor("mxint8", data, scale, "floor"))
    np.testing.assert_array_equal(operator("MXINT8Dequantize")(data, scale), expected)


def test_products_and_embedding():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    base, residual = quantize_planes(weight)
    eight = quantize(weight, "mxint8")

    def check(y, w):
        a = activations(x).astype(np.float64)
        np.testing.assert_allclose(y, a @ w.T.astype(np.float64), rtol=0, atol=2e-5)

    check(operator("MXFP4MatMul")(x, base.data, base.scale), dequantize(base))
    planes = (base.data, base.scale, residual.data, residual.scale)
    check(operator("MXFP4ResidualMatMul")(x, *planes), dequantize(base) + dequantize(residual))
    check(operator("MXINT8MatMul")(x, eight.data, eight.scale), dequantize(eight))
    rows = operator("MXINT8Embedding")(np.array([[5, 0, 47]]), eight.data, eight.scale)
    np.testing.assert_array_equal(rows, dequantize(eight)[[[5, 0, 47]]])


# ---- graphs ----


def test_onnxruntime_has_a_kernel_for_every_operator(exported):
    """In exactly these versions; a decomposed Attention would still run, but slowly."""
    model = onnx.load(exported["full"], load_external_data=False)
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    kernels = [k for k in get_all_opkernel_def() if k.provider == "CPUExecutionProvider" and k.domain == ""]
    without = set()
    for kind in {node.op_type for node in nodes if node.domain == ""}:
        since = onnx.defs.get_schema(kind, OPSET).since_version
        if not any(k.op_name == kind and k.version_range[0] <= since <= k.version_range[1] for k in kernels):
            without.add(kind)
    assert without == {"Constant", "Swish"}  # an initializer; a function of Sigmoid and Mul
    assert any(k.op_name == "Attention" and k.version_range[0] == 24 for k in kernels)


def test_models_are_valid_and_share_their_weights(exported):
    for path in exported.values():
        onnx.checker.check_model(str(path), full_check=True)
    base, full = (onnx.load(exported[p], load_external_data=False) for p in ("base", "full"))
    assert {entry.domain: entry.version for entry in base.opset_import} == {"": 24, "mxdraft": 2}
    assert base.ir_version == 12
    place = {t.name: {e.key: e.value for e in t.external_data} for t in full.graph.initializer}
    for tensor in base.graph.initializer:
        if not tensor.name.endswith("norm.weight"):
            assert {e.key: e.value for e in tensor.external_data} == place[tensor.name]
    assert {where["location"] for where in place.values()} == {"model.onnx.data"}
    assert all(int(where["offset"]) % 64 == 0 for where in place.values())


def test_names_and_shapes_are_stated(exported):
    model = onnx.load(exported["full"], load_external_data=False)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    q_proj = "model.layers.3.self_attn.q_proj.weight"
    for plane in ("base", "residual"):
        assert shapes[f"{q_proj}.{plane}.data"] == (192, 80)
        assert shapes[f"{q_proj}.{plane}.scale"] == (192, 5)
    assert shapes["model.embed_tokens.weight.data"] == (500, 160)
    assert shapes["model.norm.weight"] == (160,)
    assert shapes["rope.cos"] == (256, 16)
    inputs = {value.name: len(value.type.tensor_type.shape.dim) for value in model.graph.input}
    assert inputs["input_ids"] == inputs["position_ids"] == 2
    assert inputs["past_key_values.3.value"] == 4
    assert [value.name for value in model.graph.output][:3] == ["logits", "present.0.key", "present.0.value"]
    metadata = json.loads({entry.key: entry.value for entry in model.metadata_props}["mxdraft"])
    assert metadata["config"] == dataclasses.asdict(CHECKPOINT.config)
    assert metadata["precision"] == "full"


def reference_logits(checkpoint, ids, precision):
    """docs/arithmetic.md in binary64, activations and weights quantized where it says so."""
    c, t, n = checkpoint.config, checkpoint.tensors, len(ids)

    def linear(x, name):
        base, residual = (
            dequantize(plane).astype(np.float64) for plane in quantize_planes(t[name + ".weight"])
        )
        weight = base + residual if precision == "full" else base
        return activations(x.astype(np.float32)) @ weight.T

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_eps) * t[name + ".weight"]

    def rope(x):
        half = c.head_dim // 2
        angle = np.outer(np.arange(n), c.rope_theta ** (-np.arange(half) / half))[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
        )

    def attention(x, name):
        q, k, v = (linear(x, f"{name}.{p}_proj").reshape(n, -1, c.head_dim) for p in "qkv")
        k, v = (np.repeat(heads, c.heads // c.kv_heads, axis=1) for heads in (rope(k), v))
        scores = np.einsum("ihd,jhd->hij", rope(q), k) / np.sqrt(c.head_dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return linear(np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1), f"{name}.o_proj")

    embedding = dequantize(quantize(t["model.embed_tokens.weight"], "mxint8")).astype(np.float64)
    head = embedding if c.tied else dequantize(quantize(t["lm_head.weight"], "mxint8"))
    x = embedding[ids]
    for layer in range(c.layers):
        name = f"model.layers.{layer}"
        x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up = linear(h, f"{name}.mlp.gate_proj"), linear(h, f"{name}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")
    return activations(norm(x, "model.norm").astype(np.float32)) @ head.T


@pytest.mark.parametrize("precision", ["base", "full"])
def test_logits_are_the_specifications(exported, precision):
    """Equal but for float noise, until noise tips an activation to the next rounding step; then close."""
    runner = OnnxRunner(exported[precision])

    def error(ids):
        expected = reference_logits(CHECKPOINT, ids, precision)
        found = runner.logits(ids)
        assert found.shape == (len(ids), 500)
        return np.sqrt(((found - expected) ** 2).mean(axis=1)) / expected.std()

    assert error(IDS).max() < 0.05
    single = [error([token])[0] for token in IDS[:16]]
    assert np.median(single) < 1e-5


def test_other_heads_and_a_head_of_its_own(tmp_path):
    checkpoint = tiny.checkpoint(seed=2, tied=False, heads=4, kv_heads=4, head_dim=40, layers=2)
    expected = reference_logits(checkpoint, IDS, "full")
    found = OnnxRunner(export_model(checkpoint, tmp_path)["full"]).logits(IDS)
    assert np.sqrt(((found - expected) ** 2).mean()) / expected.std() < 0.01


def test_cached_decoding_is_one_pass_in_pieces(exported):
    runner = OnnxRunner(exported["full"])
    generated = runner.generate_greedy(IDS[:7], 12)
    assert len(generated) == 12
    logits = runner.logits(IDS[:7] + generated)
    assert [int(i) for i in logits[6:-1].argmax(axis=1)] == generated


def test_trained_base_changes_base_and_leaves_full_near_the_checkpoint(exported, tmp_path):
    rng = np.random.default_rng(3)
    planes, norms = {}, {}
    for name, weight in CHECKPOINT.tensors.items():
        noise = rng.standard_normal(weight.shape).astype(np.float32) * weight.std() * 0.1
        if weight.ndim == 1:
            norms[name] = weight + noise
        elif "_proj." in name:
            planes[name] = quantize(weight + noise, "mxfp4", "floor")
    trained = TrainedBase(planes, norms, {"steps": 3})
    paths = export_model(CHECKPOINT, tmp_path, trained=trained)
    model = onnx.load(paths["base"])
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, plane in planes.items():
        np.testing.assert_array_equal(tensors[f"{name}.base.data"], plane.data)
        np.testing.assert_array_equal(tensors[f"{name}.base.scale"], plane.scale)
    for name, norm in norms.items():
        np.testing.assert_array_equal(tensors[name], norm)
    plain, full = (OnnxRunner(path).logits(IDS) for path in (exported["full"], paths["full"]))
    base = OnnxRunner(paths["base"]).logits(IDS)
    assert np.abs(full - plain).mean() < 0.25 * np.abs(base - plain).mean()


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    weight = CHECKPOINT.tensors[name].copy()
    weight[3, 4] = np.nan
    spoiled = dataclasses.replace(CHECKPOINT, tensors=CHECKPOINT.tensors | {name: weight})
    with pytest.raises(RefusedError, match=rf"tensor {name}: .*\(3, 4\)"):
        export_model(spoiled, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_is_a_transfer_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TransferError, match="cannot make"):
        export_model(CHECKPOINT, tmp_path / "file")
