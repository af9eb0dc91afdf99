# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from Hugging Face directories and GGUF files, whole and damaged; every file is made here."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny
from gguf import GGMLQuantizationType as Quantization
from hypothesis import given
from hypothesis import strategies as st
from mxdraft.bundle import Bundle
from mxdraft.bundle.chat import read_chat
from mxdraft.bundle.tokenizer import read_tokenizer
from mxdraft.checkpoint import (
    BYTE_ALPHABET,
    Checkpoint,
    TokenizerSpec,
    check_checkpoint,
    check_config,
    expected_tensors,
    gguf_file,
    load_checkpoint,
    tokenizer_json,
)
from mxdraft.checkpoint.model import fit_vocabulary
from mxdraft.checkpoint.tokenizer import BYTE_TOKENS
from mxdraft.errors import RefusedError, TransferError
from mxdraft.export import export_model
from mxdraft.pack import pack
from numpy.typing import NDArray
from tokenizers import Tokenizer

Q0 = "model.layers.0.self_attn.q_proj.weight"
LAST_DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def small() -> Checkpoint:
    return tiny.checkpoint(layers=2, hidden=96, ffn=64)


def assert_same(loaded: Checkpoint, original: Checkpoint) -> None:
    """Everything but the source is equal, tensors bit for bit."""
    assert loaded.config == original.config
    assert replace(loaded.tokenizer, eos_token_id=None) == original.tokenizer
    assert loaded.chat_template == original.chat_template
    assert loaded.tensors.keys() == original.tensors.keys()
    for name, tensor in original.tensors.items():
        assert loaded.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(loaded.tensors[name], tensor, err_msg=name)


# ---- the canonical form ----


def test_expected_tensors_cover_the_parameter_count() -> None:
    config = replace(
        tiny.checkpoint().config,
        hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152,
    )  # fmt: skip
    assert sum(np.prod(shape) for shape in expected_tensors(config).values()) == 134_515_008
    assert len(expected_tensors(config)) == 272
    assert expected_tensors(replace(config, tied=False)).keys() - expected_tensors(config).keys() == {
        "lm_head.weight"
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden", 161, "hidden is 161, not a multiple of 32"),
        ("ffn", 300, "ffn is 300, not a multiple of 32"),
        ("head_dim", 24, "heads x head_dim is 72, not a multiple of 32"),
        ("head_dim", 512, "head_dim is 512"),
        ("head_dim", 0, "head_dim is 0"),
        ("kv_heads", 4, "6 heads cannot share 4"),
        ("layers", 1025, "layers is 1025"),
        ("layers", 0, "layers is 0"),
        ("vocab", (1 << 20) + 1, "vocab is"),
        ("max_positions", -1, "max_positions is -1"),
        ("rms_eps", 0.0, "rms_eps"),
        ("rms_eps", float("nan"), "rms_eps"),
        ("rope_theta", float("inf"), "rope_theta"),
        ("rope_theta", 0.0, "rope_theta"),
    ],
)
def test_impossible_dimensions_are_refused(field: str, value: Any, message: str) -> None:
    config = tiny.checkpoint().config
    check_config(config)
    if value == 24:
        config = replace(config, heads=3, kv_heads=1)
    with pytest.raises(RefusedError, match=message):
        check_config(replace(config, **{field: value}))


def test_odd_head_dimension_is_refused() -> None:
    with pytest.raises(RefusedError, match="head_dim is 1;"):
        check_config(replace(tiny.checkpoint().config, heads=32, kv_heads=32, head_dim=1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_by_name_and_index(small: Checkpoint, value: float) -> None:
    tensor = small.tensors[LAST_DOWN].copy()
    tensor[3, 41] = value
    with pytest.raises(RefusedError, match=rf"{LAST_DOWN} holds {value} at index \(3, 41\)"):
        check_checkpoint(replace(small, tensors=small.tensors | {LAST_DOWN: tensor}))


def test_missing_extra_and_misshapen_tensors_are_refused(small: Checkpoint) -> None:
    check_checkpoint(small)
    tensors = small.tensors
    with pytest.raises(RefusedError, match=rf"{Q0} is missing"):
        check_checkpoint(replace(small, tensors={n: t for n, t in tensors.items() if n != Q0}))
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(192, np.float32)}
    with pytest.raises(RefusedError, match=r"self_attn\.q_proj\.bias is none of"):
        check_checkpoint(replace(small, tensors=tensors | extra))
    with pytest.raises(RefusedError, match=rf"{Q0} has shape \(96, 192\); the config asks for \(192, 96\)"):
        check_checkpoint(replace(small, tensors=tensors | {Q0: tensors[Q0].T}))


def test_head_must_agree_with_the_config(small: Checkpoint) -> None:
    head = {"lm_head.weight": small.tensors["model.embed_tokens.weight"]}
    with pytest.raises(RefusedError, match=r"ties the head .* lm_head"):
        check_checkpoint(replace(small, tensors=small.tensors | head))
    with pytest.raises(RefusedError, match=r"lm_head\.weight is missing"):
        check_checkpoint(replace(small, config=replace(small.config, tied=False)))


@pytest.mark.parametrize("vocab", [499, 501])
def test_vocabulary_sizes_must_agree(small: Checkpoint, vocab: int) -> None:
    with pytest.raises(RefusedError, match=f"tokenizer has {vocab} tokens, the model 500"):
        check_checkpoint(replace(small, tokenizer=tiny.tokenizer(vocab)))


def test_all_reasons_are_told_before_the_weights_are_read(directory: Path) -> None:
    edit(directory / "config.json", lambda c: c.update(attention_bias=True, mlp_bias=True))
    edit(directory / "tokenizer.json", lambda t: t["model"].update(dropout=0.5, unk_token="<|endoftext|>"))
    (directory / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RefusedError) as error:
        load_checkpoint(directory)
    for word in ("attention_bias", "mlp_bias", "dropout", "unk_token"):
        assert word in str(error.value)
    assert "damaged" not in str(error.value)


def test_vocabularies_are_fitted(small: Checkpoint) -> None:
    fewer = tiny.tokenizer(490)
    fitted = fit_vocabulary(replace(small, tokenizer=fewer))
    check_checkpoint(fitted)
    embedding = small.tensors["model.embed_tokens.weight"]
    assert np.array_equal(fitted.tensors["model.embed_tokens.weight"], embedding[:490])
    spec = small.tokenizer
    more = replace(spec, tokens=[*spec.tokens, "<image>"], special_ids=[*spec.special_ids, 500])
    assert fit_vocabulary(replace(small, tokenizer=more)).tokenizer == spec
    needed = replace(more, eos_ids=[500])
    with pytest.raises(RefusedError, match="501 tokens, the model 500"):
        check_checkpoint(fit_vocabulary(replace(small, tokenizer=needed)))


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_gguf_pre_tokenizers(tmp_path: Path, small: Checkpoint, name: str) -> None:
    types = [3, 3, 3, *[1] * 496, 4]
    # What is cut out of texts is no part of a merge.
    merges = [" ".join(m) for m in small.tokenizer.merges if "".join(m) != small.tokenizer.tokens[-1]]
    metadata = {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.tokens": [*small.tokenizer.tokens[:-1], "<think>"],
        "tokenizer.ggml.merges": merges,
    }
    spec = load_checkpoint(save_gguf(small, tmp_path / "t.gguf", metadata=metadata)).tokenizer
    expected = {"llama-bpe": ("llama3", True, False), "qwen2": ("qwen2", False, True)}
    assert (spec.pre_tokenizer, spec.whole_words, spec.nfc) == expected[name]
    assert (spec.added_ids, spec.adds_bos) == ([499], False)


def test_gguf_scores_give_the_merges_of_hugging_face(tmp_path: Path, small: Checkpoint) -> None:
    """Ranks follow scores; equal to llama2's own tokenizer.json is checked in test_tokenizer.py."""
    words = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *words]
    tokens += [f"x{i}" for i in range(500 - len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (500 - 259)],
        "tokenizer.ggml.scores": [0.0] * 262 + [-1.0, -3.0, -2.0, -4.0] + [-9.0] * (500 - 266),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.add_bos_token": True,
    }
    spec = load_checkpoint(save_gguf(small, tmp_path / "t.gguf", metadata=metadata)).tokenizer
    assert spec.merges == [("a", "b"), ("▁", "ab"), ("▁a", "b"), ("▁", "a"), ("b", "a")]
    assert (spec.pre_tokenizer, spec.special_ids, spec.adds_bos) == ("spaces-prefix", [0, 1, 2], True)


# ---- tokenizers ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"special_ids": [0, 1, 2, 500]}, "id 500 is outside"),
        ({"eos_ids": [-1]}, "id -1 is outside"),
        ({"bos_id": 1000}, "id 1000 is outside"),
        ({"eos_ids": [7]}, "token 7 .* is no control token"),
        (
            {"special_ids": [0, 1], "eos_ids": [0], "merges": [("<|im_end|", ">")]},
            "merge 0 .* is no plain token",
        ),
        ({"merges": [("t", "qqq")]}, "merge 0 .*'qqq' is no plain token"),
        ({"merges": [("Ġ", "t"), ("Ġ", "t")]}, "listed twice"),
    ],
)
def test_unsound_tokenizers_are_refused(change: dict[str, Any], message: str, small: Checkpoint) -> None:
    with pytest.raises(RefusedError, match=message):
        check_checkpoint(replace(small, tokenizer=replace(small.tokenizer, **change)))


@pytest.mark.parametrize(("token", "message"), [("Ġt", "two ids"), ("a b", "alphabet"), ("", "alphabet")])
def test_unsound_tokens_are_refused(token: str, message: str, small: Checkpoint) -> None:
    tokens = [*small.tokenizer.tokens[:-1], token]
    with pytest.raises(RefusedError, match=message):
        check_checkpoint(replace(small, tokenizer=replace(small.tokenizer, tokens=tokens, merges=[])))


def test_merges_never_make_a_control_token(small: Checkpoint) -> None:
    spec = small.tokenizer
    made = spec.tokens.index("".join(spec.merges[0]))
    with pytest.raises(RefusedError, match="merge 0"):
        check_checkpoint(replace(small, tokenizer=replace(spec, special_ids=[0, 1, 2, made])))


def reference(spec: TokenizerSpec) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_json(spec))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("pre_tokenizer", ["gpt2", "smollm"])
@given(text=st.text() | st.text(alphabet="the boat's 12\n\t<|im_end|>é²"))
def test_token_bytes_spell_the_text(pre_tokenizer: Any, text: str) -> None:
    spec = tiny.tokenizer(pre_tokenizer=pre_tokenizer)
    table = spec.token_bytes()
    ids = reference(spec).encode(text).ids
    assert b"".join(table[i] for i in ids) == text.encode("utf-8")
    assert not set(ids) & set(spec.special_ids)


def test_pre_tokenizers_differ_at_digits() -> None:
    lines = [
        [
            token
            for token, _ in reference(tiny.tokenizer(pre_tokenizer=p)).pre_tokenizer.pre_tokenize_str("a 12")
        ]
        for p in ("gpt2", "smollm")
    ]
    assert lines == [["a", "Ġ12"], ["a", "Ġ", "1", "2"]]


def test_byte_alphabet_is_that_of_tokenizers() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(BYTE_ALPHABET) == sorted(ByteLevel.alphabet())
    assert BYTE_ALPHABET[ord("a")] == "a"
    assert BYTE_ALPHABET[ord(" ")] == "Ġ"
    assert BYTE_ALPHABET[ord("\n")] == "Ċ"


# ---- Hugging Face directories ----


@pytest.fixture
def directory(tmp_path: Path, small: Checkpoint) -> Path:
    tiny.save_huggingface(small, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the JSON object in a file."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_directory_gives_back_what_was_saved(tmp_path: Path, shards: int, tied: bool) -> None:
    original = tiny.checkpoint(1, "gpt2", layers=2, tied=tied, rope_theta=5e5, kv_heads=3)
    tiny.save_huggingface(original, tmp_path / "m", shards)
    loaded = load_checkpoint(tmp_path / "m")
    assert_same(loaded, original)
    assert "Hugging Face directory m" in loaded.source
    assert len(loaded.source_sha256) == 64


def test_source_digest_depends_on_every_file(directory: Path) -> None:
    before = load_checkpoint(directory).source_sha256
    assert load_checkpoint(directory).source_sha256 == before
    edit(directory / "tokenizer_config.json", lambda c: c.update(unknown=1))
    assert load_checkpoint(directory).source_sha256 != before


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_every_half_precision_pattern_is_read_exactly(tmp_path: Path, dtype: Any, numpy_dtype: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(numpy_dtype).astype(np.float32)
    finite = patterns[np.isfinite(patterns)]
    original = tiny.checkpoint(layers=1)
    values = np.resize(finite, original.tensors["model.embed_tokens.weight"].shape)
    assert values.size > finite.size
    tensors = {name: t.astype(numpy_dtype).astype(np.float32) for name, t in original.tensors.items()}
    original = replace(original, tensors=tensors | {"model.embed_tokens.weight": values})
    tiny.save_huggingface(original, tmp_path / "m", dtype=dtype)
    assert_same(load_checkpoint(tmp_path / "m"), original)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_non_finite_weights_in_a_directory_are_refused(tmp_path: Path, dtype: Any) -> None:
    broken = tiny.checkpoint(layers=1)
    broken.tensors["model.norm.weight"][7] = np.nan
    tiny.save_huggingface(broken, tmp_path / "m", dtype=dtype)
    with pytest.raises(RefusedError, match=r"model\.norm\.weight holds nan at index \(7,\)"):
        load_checkpoint(tmp_path / "m")


def test_settings_left_out_have_their_defaults(directory: Path, small: Checkpoint) -> None:
    def leave_out(config: dict[str, Any]) -> None:
        for key in ("hidden_act", "attention_bias", "mlp_bias", "rope_scaling", "rope_theta", "rms_norm_eps"):
            del config[key]

    edit(directory / "config.json", leave_out)
    config = load_checkpoint(directory).config
    assert config == replace(small.config, rope_theta=10000.0, rms_eps=float(np.float32(1e-6)))


def test_rope_parameters_of_newer_configs(directory: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    edit(directory / "config.json", lambda c: (c.pop("rope_theta"), c.update(rope_parameters=rope)))
    assert load_checkpoint(directory).config.rope_theta == 20000.0
    edit(directory / "config.json", lambda c: c["rope_parameters"].update(rope_type="yarn"))
    with pytest.raises(RefusedError, match="yarn"):
        load_checkpoint(directory)


def test_chat_template_file_comes_first(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ 1 }}", encoding="utf-8")
    assert load_checkpoint(directory).chat_template == "{{ 1 }}"
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").unlink()
    assert load_checkpoint(directory).chat_template is None


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "generation", "settings", "ends", "eos_token"),
    [
        (0, None, {}, [0], 0),
        (0, 2, {}, [0, 2], None),
        (None, [2, 0], {}, [0, 2], None),
        (0, None, {"eos_token": "<|im_end|>"}, [0, 2], 2),
        ([0, 2], 2, {"eos_token": {"content": "<|im_end|>", "lstrip": False}}, [0, 2], 2),
        (None, None, {"eos_token": "<|im_end|>"}, [2], 2),
        (2, None, {"eos_token": None}, [2], 2),
        (None, None, {}, [], None),
    ],
)
def test_end_tokens_are_all_that_any_file_names(
    directory: Path, config: Any, generation: Any, settings: dict[str, Any], ends: list[int], eos_token: Any
) -> None:
    edit(directory / "config.json", lambda c: c.update(eos_token_id=config))
    if generation is not None:
        write_json(directory / "generation_config.json", {"eos_token_id": generation})
    edit(directory / "tokenizer_config.json", lambda c: c.update(settings))
    spec = load_checkpoint(directory).tokenizer
    assert (spec.eos_ids, spec.eos_token) == (ends, eos_token)


def test_bos_is_what_the_tokenizer_says(directory: Path) -> None:
    edit(directory / "config.json", lambda c: c.update(bos_token_id=0))
    write_json(directory / "generation_config.json", {"bos_token_id": None})
    assert load_checkpoint(directory).tokenizer.bos_id == 0
    write_json(directory / "generation_config.json", {"bos_token_id": 2})
    assert load_checkpoint(directory).tokenizer.bos_id == 2
    edit(directory / "tokenizer_config.json", lambda c: c.update(bos_token="<|im_start|>"))
    assert load_checkpoint(directory).tokenizer.bos_id == 1


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
@pytest.mark.parametrize("value", ["</s>", "\u0120the", 2, ["<|im_end|>"], {"content": 2}])
def test_names_of_no_control_token_are_refused(directory: Path, key: str, value: Any) -> None:
    edit(directory / "tokenizer_config.json", lambda c: c.update({key: value}))
    with pytest.raises(RefusedError, match=f"{key} .* is no control token"):
        load_checkpoint(directory)


def test_export_stops_where_the_template_ends_an_answer(
    tmp_path: Path, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fine-tune whose config.json still has the end token of its base model."""
    edit(directory / "config.json", lambda c: c.update(eos_token_id=0))
    run_command("export", directory, "-o", tmp_path / "o")
    assert "generation ends at: 0 <|endoftext|>, 2 <|im_end|>" in capfd.readouterr().err
    written = json.loads((tmp_path / "o" / "generation_config.json").read_text(encoding="utf-8"))
    assert written == {"bos_token_id": 1, "eos_token_id": [0, 2], "eos_token": "<|endoftext|>"}
    pack(tmp_path / "o", tmp_path / "b.mxb")
    section = Bundle.open(tmp_path / "b.mxb").section("tokenizer").tobytes()
    assert read_tokenizer(section, 500).eos_ids == [0, 2]


def test_a_template_gets_the_eos_token_that_the_tokenizer_names(tmp_path: Path, directory: Path) -> None:
    """The template's answers end with <|im_end|>, by its name, although config.json has another end."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    edit(directory / "config.json", lambda c: c.update(eos_token_id=0))
    edit(directory / "tokenizer_config.json", lambda c: c.update(eos_token="<|im_end|>"))
    export_model(load_checkpoint(directory), tmp_path / "o")
    pack(tmp_path / "o", tmp_path / "b.mxb")
    pieces = read_chat(Bundle.open(tmp_path / "b.mxb").section("chat").tobytes(), 500)
    assert pieces.roles["assistant"] == ((1, "assistant\n"), (2,))


ROPE = {"rope_type": "default", "rope_theta": 20000.0}


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        ({"rope_parameters": ROPE, "rope_theta": None}, 20000.0),
        ({"rope_parameters": ROPE, "rope_theta": 20000}, 20000.0),
        ({"rope_parameters": ROPE, "rope_scaling": {"type": "default"}, "rope_theta": None}, 20000.0),
        ({"rope_parameters": {}, "rope_scaling": None, "rope_theta": 5.0}, 5.0),
        ({"rope_scaling": {"type": None, "factor": None, "rope_theta": 7.0}, "rope_theta": None}, 7.0),
        ({"rope_parameters": ROPE}, "rope_theta is 20000.0 in rope_parameters, elsewhere 10000.0"),
        (
            {"rope_parameters": ROPE, "rope_scaling": {"type": "linear", "factor": 2}},
            "in rope_scaling is not",
        ),
        ({"rope_parameters": ROPE, "rope_scaling": {"rope_type": "yarn"}}, "yarn.* in rope_scaling is not"),
        (
            {"rope_parameters": ROPE, "rope_scaling": {"rope_theta": 3.0}, "rope_theta": None},
            "rope_theta is 20000.0 in rope_parameters, elsewhere 3.0",
        ),
        ({"rope_scaling": {"type": "default", "rope_type": "llama3"}}, "llama3.* in rope_scaling is not"),
        ({"rope_scaling": {"type": "default", "factor": 8.0}}, "factor.* in rope_scaling is not"),
        ({"rope_parameters": {"full_attention": ROPE}}, "full_attention.* in rope_parameters is not"),
        ({"rope_parameters": {"hidden_size": 32}}, "hidden_size.* in rope_parameters is not"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_rope_settings_in_two_places_agree_or_are_refused(
    directory: Path, change: dict[str, Any], theta: Any
) -> None:
    edit(directory / "config.json", lambda c: c.update(change))
    if isinstance(theta, float):
        assert load_checkpoint(directory).config.rope_theta == theta
    else:
        with pytest.raises(RefusedError, match=theta):
            load_checkpoint(directory)


CHAT = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n \n"


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("token", [0, 1, 2])
def test_added_tokens_that_cut_the_text_in_another_way_are_refused(
    directory: Path, small: Checkpoint, flag: str, token: int
) -> None:
    edit(directory / "tokenizer.json", lambda t: t["added_tokens"][token].update({flag: True}))
    with pytest.raises(RefusedError, match=f"tokenizer.json: added token .* has {flag}"):
        load_checkpoint(directory)
    tiny.save_huggingface(small, directory)
    decoder = {str(token): {"content": small.tokenizer.tokens[token], flag: True}}
    edit(directory / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=decoder))
    with pytest.raises(RefusedError, match=f"tokenizer_config.json: added token .* has {flag}"):
        load_checkpoint(directory)


def test_the_flags_refused_are_those_that_change_ids(directory: Path, small: Checkpoint) -> None:
    plain = Tokenizer.from_str(tokenizer_json(small.tokenizer)).encode(CHAT).ids
    for flag, changes in {"lstrip": True, "rstrip": True, "single_word": True, "normalized": False}.items():
        raw = json.loads(tokenizer_json(small.tokenizer))
        for token in raw["added_tokens"]:
            token[flag] = True
        assert (Tokenizer.from_str(json.dumps(raw)).encode(CHAT).ids != plain) == changes, flag
    edit(directory / "tokenizer.json", lambda t: [a.update(normalized=True) for a in t["added_tokens"]])
    assert load_checkpoint(directory).tokenizer == small.tokenizer


@pytest.mark.parametrize("as_text", [True, False])
def test_both_spellings_of_merges(directory: Path, small: Checkpoint, as_text: bool) -> None:
    merges = [" ".join(m) if as_text else list(m) for m in small.tokenizer.merges]
    edit(directory / "tokenizer.json", lambda t: t["model"].update(merges=merges))
    assert load_checkpoint(directory).tokenizer == small.tokenizer


def test_added_tokens_outside_the_vocabulary(directory: Path, small: Checkpoint) -> None:
    def move(tokenizer: dict[str, Any]) -> None:
        for token in small.tokenizer.special_ids:
            del tokenizer["model"]["vocab"][small.tokenizer.tokens[token]]

    edit(directory / "tokenizer.json", move)
    assert load_checkpoint(directory).tokenizer == small.tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling.Other"}}, "auto_map"),
        ({"architectures": ["OtherForCausalLM"]}, "architectures .*OtherForCausalLM"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling .*linear"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "RoPE scaling .*llama3"),
        ({"rope_scaling": "linear"}, "RoPE scaling"),
        ({"hidden_size": "160"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be an integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..* is none of"),
        ({"intermediate_size": 300}, "not a multiple of 32"),
        ({"vocab_size": 499}, "tokenizer has 500 tokens, the model 499"),
        ({"vocab_size": 512}, "tokenizer has 500 tokens, the model 512"),
        ({"eos_token_id": "2"}, "eos_token_id '2' is no token id"),
    ],
)
def test_refused_configs(directory: Path, change: dict[str, Any], message: str) -> None:
    edit(directory / "config.json", lambda c: c.update(change))
    with pytest.raises(RefusedError, match=message) as error:
        load_checkpoint(directory)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalizer"),
        (lambda t: t.update(post_processor={"type": "TemplateProcessing"}), "post-processor"),
        (lambda t: t.update(decoder={"type": "Metaspace"}), "decoder"),
        (lambda t: t.update(pre_tokenizer=None), "pre_tokenizer null"),
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer .*Whitespace"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(individual_digits=False), "pre_tokenizer"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "pre_tokenizer"),
        (lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(use_regex=False), "pre_tokenizer"),
        (lambda t: t["model"].update(type="Unigram"), "BPE"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t["model"].update(unk_token="<|endoftext|>"), "unk_token"),
        (lambda t: t["model"].update(dropout=0.1), "dropout"),
        (lambda t: t["model"].update(merges=["a b c"]), "merge 0 'a b c'"),
        (lambda t: t["model"].update(merges=[["a", 1]]), "merge 0"),
        (lambda t: t["model"].update(merges=None), "merges"),
        (lambda t: t["model"].update(vocab=["a"]), "vocab"),
        (lambda t: t["model"]["vocab"].update({"Ġt": 999}), "not 0 to 499, each once"),
        (lambda t: t["model"]["vocab"].update({"Ġt": [1]}), "not 0 to 499, each once"),
        (
            lambda t: (
                t.update(normalizer={"type": "NFC"}),
                t["added_tokens"][0].update(special=False, normalized=True),
            ),
            "'<|endoftext|>' is looked for in normalized text".replace("|", r"\|"),
        ),
        (lambda t: t["added_tokens"][0].update(id=5), "has id 5, but 0"),
        (lambda t: t["added_tokens"].append("x"), "no content"),
        (lambda t: t.update(added_tokens=[]), "token 0 .* is no control token"),
    ],
)
def test_refused_tokenizers(
    directory: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(directory / "tokenizer.json", change)
    with pytest.raises(RefusedError, match=message):
        load_checkpoint(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(RefusedError, match=f"{name} is missing"):
        load_checkpoint(directory)


NOT_JSON = [
    *(b"{", b"\xff", b"[1]", b"[" * 100_000, b"", b'{"a": "\\ud800"}', b'{"a": 1, "a": 2}'),
    b'{"a": ' + b"[" * 80 + b"]" * 80 + b"}",
]


@pytest.mark.parametrize("text", NOT_JSON)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_files_that_are_not_json_objects(directory: Path, name: str, text: bytes) -> None:
    (directory / name).write_bytes(text)
    with pytest.raises(RefusedError, match=rf"model: {name} is not a JSON object"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_pipes_in_the_place_of_files_do_not_block(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(TransferError, match="not a regular file"):
        load_checkpoint(directory)


def test_a_folder_of_links_is_read(directory: Path, tmp_path: Path, small: Checkpoint) -> None:
    """As Hugging Face's cache is."""
    (tmp_path / "links").mkdir()
    for path in directory.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    assert_same(load_checkpoint(tmp_path / "links"), small)


def test_a_template_that_is_not_utf8_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(RefusedError, match=r"chat_template\.jinja is not a UTF-8 text"):
        load_checkpoint(directory)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode("utf-8")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h[Q0].update(dtype="F33"),
        lambda h: h[Q0].update(dtype="I32"),
        lambda h: h[Q0].update(shape=[192, 97]),
        lambda h: h[Q0].update(shape=[2**40, 2**40]),
        lambda h: h[Q0].update(data_offsets=[0, h[Q0]["data_offsets"][1]]),
        lambda h: h[Q0].update(data_offsets=h[LAST_DOWN]["data_offsets"]),
        lambda h: h[Q0].update(data_offsets=[x + 2**40 for x in h[Q0]["data_offsets"]]),
        lambda h: h[Q0].update(data_offsets=[-1, 1]),
        lambda h: h.pop(Q0),
    ],
)
def test_safetensors_headers_that_lie(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors"
    header, data = header_of(path)
    change(header)
    write_safetensors(path, header, data)
    with pytest.raises(RefusedError, match=r"model\.safetensors"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d[:-1],
        lambda d: d + b"\0",
        lambda d: d[:4],
        lambda _: b"",
        lambda d: (2**63).to_bytes(8, "little") + d[8:],
        lambda d: (int.from_bytes(d[:8], "little") + 1).to_bytes(8, "little") + d[8:],
        lambda d: d[:8] + b"[" + d[9:],
    ],
)
def test_damaged_safetensors(directory: Path, change: Callable[[bytes], bytes]) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RefusedError, match=r"model\.safetensors is damaged"):
        load_checkpoint(directory)


def test_empty_tensors_are_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    header, data = header_of(path)
    header["extra"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    write_safetensors(path, header, data)
    with pytest.raises(RefusedError, match="extra is empty"):
        load_checkpoint(directory)


@pytest.fixture
def sharded(tmp_path: Path, small: Checkpoint) -> Path:
    tiny.save_huggingface(small, tmp_path / "sharded", shards=2)
    return tmp_path / "sharded"


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_index_that_leaves_the_directory(sharded: Path, shard: str) -> None:
    tiny.save_huggingface(load_checkpoint(sharded), sharded.parent)  # what the path would lead to
    edit(sharded / "model.safetensors.index.json", lambda i: i["weight_map"].update({Q0: shard}))
    with pytest.raises(RefusedError, match="is no file name"):
        load_checkpoint(sharded)


def test_index_that_names_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RefusedError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_checkpoint(sharded)


def test_tensor_in_two_shards(sharded: Path, small: Checkpoint) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    for shard in set(index.values()):
        names = [name for name in index if index[name] == shard or name == Q0]
        tiny.save_safetensors(sharded / shard, {name: small.tensors[name] for name in names})
    with pytest.raises(RefusedError, match=f"tensor {Q0} is there, but the index has it in {index[Q0]}"):
        load_checkpoint(sharded)


def test_tensor_that_is_not_in_its_shard(sharded: Path) -> None:
    edit(
        sharded / "model.safetensors.index.json", lambda i: i["weight_map"].update(ghost=i["weight_map"][Q0])
    )
    with pytest.raises(RefusedError, match="tensor ghost is not in"):
        load_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    edit(sharded / "model.safetensors.index.json", lambda i: i.update(weight_map=weight_map))
    with pytest.raises(RefusedError, match=r"weight_map|no file name"):
        load_checkpoint(sharded)


# ---- GGUF files ----


def to_gguf_name(name: str) -> str:
    layer_names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{layer_names[rest.removesuffix('.weight')]}.weight"


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head in GGUF's order: 0, D/2, 1, D/2 + 1, …"""
    half = len(rows) // heads // 2
    order = [head * 2 * half + i + j * half for head in range(heads) for i in range(half) for j in (0, 1)]
    return rows[order]


def save_gguf(
    checkpoint: Checkpoint,
    path: Path,
    quantization: Quantization = Quantization.F32,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write ``checkpoint`` as llama.cpp's converter does; ``metadata`` overrides keys (None removes one)."""
    config, spec = checkpoint.config, checkpoint.tokenizer
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": config.layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.ffn,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.vocab_size": config.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {"gpt2": "gpt-2", "smollm": "smollm"}[spec.pre_tokenizer],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": spec.tokens,
        "tokenizer.ggml.token_type": [3 if i in spec.special_ids else 1 for i in range(len(spec.tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec.merges],
        "tokenizer.ggml.bos_token_id": spec.bos_id,
        "tokenizer.ggml.eos_token_id": spec.eos_ids[-1],
        "tokenizer.ggml.eot_token_id": spec.eos_ids[0],
        "tokenizer.chat_template": checkpoint.chat_template,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (keys | (metadata or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("q_proj.weight"):
            tensor = interleave(tensor, config.heads)
        elif name.endswith("k_proj.weight"):
            tensor = interleave(tensor, config.kv_heads)
        type_ = quantization if tensor.ndim == 2 else Quantization.F32
        writer.add_tensor(to_gguf_name(name), gguf.quantize(tensor, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pre_tokenizer", ["gpt2", "smollm"])
def test_gguf_gives_back_what_was_saved(tmp_path: Path, tied: bool, pre_tokenizer: Any) -> None:
    original = tiny.checkpoint(2, pre_tokenizer, layers=2, tied=tied, rope_theta=1e5)
    loaded = load_checkpoint(save_gguf(original, tmp_path / "t.gguf"))
    assert_same(loaded, original)
    assert loaded.source == "tiny (t.gguf)"
    assert len(loaded.source_sha256) == 64


def test_gguf_defaults(tmp_path: Path) -> None:
    original = tiny.checkpoint(layers=1, hidden=192, kv_heads=6)
    removed = [
        "llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length",
        "llama.rope.dimension_count", "llama.rope.freq_base", "llama.vocab_size", "general.name",
    ]  # fmt: skip
    loaded = load_checkpoint(save_gguf(original, tmp_path / "t.gguf", metadata=dict.fromkeys(removed)))
    assert_same(loaded, original)
    assert loaded.source == "unnamed model (t.gguf)"


@pytest.mark.parametrize("type_", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_gguf_types_are_decoded(tmp_path: Path, small: Checkpoint, type_: str) -> None:
    quantization = Quantization[type_]
    loaded = load_checkpoint(save_gguf(small, tmp_path / "t.gguf", quantization))
    for name, tensor in small.tensors.items():
        expected = gguf.dequantize(gguf.quantize(tensor, quantization), quantization)
        if tensor.ndim == 1:
            expected = tensor
        np.testing.assert_array_equal(loaded.tensors[name], expected, err_msg=name)


def test_gguf_q4_1_by_its_definition(tmp_path: Path, small: Checkpoint) -> None:
    # A block: d and m in f16, then 16 bytes whose low nibbles are weights 0 to 15 and high nibbles 16 to 31.
    path = save_gguf(small, tmp_path / "t.gguf", Quantization.Q4_1)
    data = bytearray(path.read_bytes())
    start = data.index(
        gguf.quantize(small.tensors["model.embed_tokens.weight"][:1], Quantization.Q4_1).tobytes()
    )
    data[start : start + 20] = struct.pack("<ee", 0.5, -3.0) + bytes(i | (15 - i) << 4 for i in range(16))
    path.write_bytes(data)
    row = load_checkpoint(path).tensors["model.embed_tokens.weight"][0, :32]
    assert row.tolist() == [0.5 * i - 3 for i in [*range(16), *reversed(range(16))]]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.scaling.factor": 2.0}, "scaling.factor = 2.0"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.logit_scale": 2.0}, "logit_scale = 2.0 is unknown"),
        ({"llama.rope.dimension_count": 16}, "dimension_count = 16 differs"),
        ({"llama.attention.value_length": 64}, "value_length = 64 differs"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.block_count": "2"}, "block_count is '2', not of type int"),
        ({"llama.block_count": 3}, r"model\.layers\.2\..* is missing"),
        ({"llama.block_count": 1}, r"model\.layers\.1\..* is none of"),
        ({"llama.attention.head_count": 4}, r"q_proj\.weight has shape \(192, 96\); .* \(128, 96\)"),
        ({"llama.attention.head_count": 0}, "heads is 0"),
        ({"llama.feed_forward_length": 300}, "not a multiple of 32"),
        ({"llama.vocab_size": 501}, "tokenizer has 500 tokens, the model 501"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token is set"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types for 500 tokens"),
        ({"tokenizer.ggml.token_type": [5] * 500}, "token 0 .* is of type 5"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 0 'ab'"),
        ({"tokenizer.ggml.merges": [1]}, "no array of strings"),
        ({"tokenizer.ggml.eos_token_id": 500}, "id 500 is outside"),
        ({"general.alignment": 0}, "alignment is 0"),
    ],
)
def test_refused_gguf_metadata(
    tmp_path: Path, small: Checkpoint, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        load_checkpoint(save_gguf(small, tmp_path / "t.gguf", metadata=metadata))


@pytest.mark.parametrize("value", [{"llama.expert_count": 0}, {"llama.rope.scaling.type": "none"}])
def test_gguf_settings_that_change_nothing(tmp_path: Path, small: Checkpoint, value: dict[str, Any]) -> None:
    assert_same(load_checkpoint(save_gguf(small, tmp_path / "t.gguf", metadata=value)), small)


def test_gguf_with_a_bias(tmp_path: Path, small: Checkpoint) -> None:
    path = save_gguf(small, tmp_path / "t.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.0.attn_qq.biass"))
    with pytest.raises(RefusedError, match=r"blk\.0\.attn_qq\.biass is none of"):
        load_checkpoint(path)


def test_gguf_with_nan(tmp_path: Path) -> None:
    broken = tiny.checkpoint(layers=1)
    broken.tensors["model.norm.weight"][3] = np.nan
    with pytest.raises(RefusedError, match=r"model\.norm\.weight holds nan at index \(3,\)"):
        load_checkpoint(save_gguf(broken, tmp_path / "t.gguf"))


def patched(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """Replace the bytes of ``data`` at ``offset`` after the first ``name``."""
    at = data.index(name) + len(name) + offset
    return data[:at] + value + data[at + len(value) :]


U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
NAME = b"blk.0.attn_q.weight"  # followed by u32 rank 2, two u64 dimensions, u32 type, u64 offset


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "empty"),
        (lambda d: b"GGML" + d[4:], "not a GGUF file"),
        (lambda d: d[:4] + U32(1) + d[8:], "version 1"),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "version 50331648"),
        (lambda d: d[:8] + U64(2**63) + d[16:], "GGUF|header|tensor"),
        (lambda d: d[:16] + U64(2**63) + d[24:], "GGUF|header|metadata"),
        (lambda d: d[:24] + U64(2**63) + d[32:], "header at byte 32 runs past the end"),
        (lambda d: patched(d, b"tokenizer.ggml.tokens", 8, U64(2**62)), "header"),
        (lambda d: patched(d, b"tokenizer.ggml.token_type", 8, U64(2**62)), "runs past the end"),
        (lambda d: patched(d, b"tokenizer.ggml.token_type", 4, U32(9)), "unknown type 9"),
        (lambda d: patched(d, b"llama.block_count", 0, U32(99)), "unknown type 99"),
        (lambda d: d.replace(b"llama.block_count", b"llama.vocab_sizes"), "vocab_sizes"),
        (lambda d: d.replace(b"general.name", b"general.\xff\xff\xff\xff"), "not UTF-8"),
        (
            lambda d: d.replace(b"llama.context_length", b"llama.embedding_leng"),
            "embedding_leng = 256 is unknown",
        ),
        (
            lambda d: d.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"),
            "appears twice",
        ),
        (lambda d: patched(d, NAME, 0, U32(0)), "has 0 dimensions"),
        (lambda d: patched(d, NAME, 0, U32(2**31)), "has 2147483648 dimensions"),
        (lambda d: patched(d, NAME, 4, U64(0)), "has shape"),
        (lambda d: patched(d, NAME, 4, U64(2**63)), "ends at byte|overlaps"),
        (lambda d: patched(d, NAME, 4, U64(192) + U64(96)), r"has shape \(96, 192\)"),
        (lambda d: patched(d, NAME, 20, U32(77)), "unknown type 77"),
        (lambda d: patched(d, NAME, 20, U32(12)), "Q4_K comes in blocks of 256"),
        (lambda d: patched(d, NAME, 20, U32(24)), "type I8, which cannot be decoded"),
        (lambda d: patched(d, NAME, 24, U64(0)), "overlaps"),
        (lambda d: patched(d, NAME, 24, U64(1)), "overlaps another or is not aligned"),
        (lambda d: patched(d, NAME, 24, U64(2**40)), "truncated"),
        (lambda d: patched(d, NAME, 24, U64(2**64 - 32)), "truncated"),
        (lambda d: d[:-64], "truncated"),
        (lambda d: d.replace(b"blk.1.attn_v.weight", b"blk.1.attn_k.weight"), "attn_k.weight appears twice"),
    ],
)
def test_damaged_gguf(
    tmp_path: Path, small: Checkpoint, change: Callable[[bytes], bytes], message: str
) -> None:
    path = save_gguf(small, tmp_path / "t.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RefusedError, match=message):
        load_checkpoint(path)


def test_gguf_cut_anywhere_in_its_header_is_refused(tmp_path: Path, small: Checkpoint) -> None:
    path = save_gguf(small, tmp_path / "t.gguf")
    data = path.read_bytes()
    end = data.index(NAME)
    for length in [*range(1, 200), *range(200, end, 97)]:
        path.write_bytes(data[:length])
        with pytest.raises(RefusedError):
            load_checkpoint(path)


def test_gguf_end_tokens(tmp_path: Path, small: Checkpoint) -> None:
    path = save_gguf(small, tmp_path / "t.gguf", metadata={"tokenizer.ggml.eom_token_id": 1})
    spec = load_checkpoint(path).tokenizer
    assert (spec.eos_ids, spec.eos_token) == ([0, 1, 2], 2)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(b"GGUF" + U32(3) + U64(0) + U64(1) + U64(1) + b"a" + U32(9) + U32(7) + U64(1 << 32))
    os.truncate(path, (1 << 32) + 100)
    with pytest.raises(RefusedError, match="header is larger than 64 MiB"):
        gguf_file._read_header(mapped(path))


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_names_in_a_file_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, small: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b31m"
    for metadata in ({f"llama.{evil}": 1}, {"general.architecture": evil}, {"tokenizer.ggml.pre": evil}):
        path = save_gguf(small, tmp_path / "t.gguf", metadata=metadata)
        run_command("export", path, "-o", tmp_path / "o", code=3)
        err = capfd.readouterr().err
        assert "\\x1b" in err
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", err)


# ---- dispatch ----


def test_special_files_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    for name in ("pipe.gguf", "zero.gguf"):
        with pytest.raises(TransferError, match="not a regular file"):
            load_checkpoint(tmp_path / name)


def run_command(*args: str | Path, code: int = 0) -> None:
    done = subprocess.run([sys.executable, "-m", "mxdraft.cli", *args], check=False)
    assert done.returncode == code


def test_other_paths_are_refused(tmp_path: Path) -> None:
    for name, message in [("none.gguf", "no such file"), ("none", "neither a"), ("a.bin", "neither a")]:
        with pytest.raises(RefusedError, match=message):
            load_checkpoint(tmp_path / name)
