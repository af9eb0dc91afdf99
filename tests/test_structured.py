# SPDX-License-Identifier: Apache-2.0
"""Structured output: what is generated fits its schema, whoever drafts, and never fails open."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import tiny
from mxdraft.bundle import Bundle
from mxdraft.errors import UsageError
from mxdraft.runtime import Draft, Engine, Grammar, Model, Timeline

CTX = 250
MIXED: dict[str, Any] = {"precision": "auto", "core_fraction": 0.3, "catch_up": 5}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["boat", "box", None, 3, {"a": [1, "é"]}]},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
    },
    "required": ["name", "tags", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.2},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "seed": 5, "min_p": 0.1, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def model(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Fixture T with every drafter."""
    data = bundle.read_bytes()
    config = Bundle(data).config
    documents = [np.random.default_rng(1).integers(0, config.vocab, 200).tolist()]
    path = tmp_path_factory.mktemp("structured") / "full.mxb"
    path.write_bytes(tiny.with_drafter(tiny.with_ngrams(data, documents), tiny.drafter(config)))
    with Model(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[Engine]:
    with Engine(model, ctx=CTX, threads=1, precision="base", draft="auto", max_seqs=4) as opened:
        yield opened


class Answer(NamedTuple):
    text: bytes
    ids: list[int]
    stop: str


def prompt_of(model: Model, number: int = 0) -> list[int]:
    return list(model.encode(f"Give me box {number}: "))


def answer(timeline: Timeline, grammar: Grammar, ids: list[int]) -> Answer:
    """Generate one document after a prompt."""
    timeline.fit(grammar)
    pieces = list(timeline.generate(ids))
    return Answer(b"".join(piece.text for piece in pieces), [i for p in pieces for i in p.ids], timeline.stop)


def write(engine: Engine, schema: Any, number: int = 0, **sampling: Any) -> Answer:
    grammar = Grammar(engine, schema)
    with grammar, Timeline(engine, **sampling) as timeline:
        return answer(timeline, grammar, prompt_of(engine.model, number))


# ---- documents fit their schemas ----


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    kind = rng.randrange(12 if depth else 7)
    if kind == 0:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
    if kind == 1:
        return {"type": rng.choice(["integer", "number", "boolean", "null"])}
    if kind == 2:
        return {"enum": rng.sample(["a", "ab", 'q"\\\n', 1, -2.5, None, True, [], {"k": [1, {}]}, "é€"], 3)}
    if kind == 3:
        return {"const": rng.choice(["only", 7, {"x": None}, [True, "y"]])}
    if kind == 4:
        return {"type": rng.sample(["integer", "null", "boolean", "string"], 2), "maxLength": 3}
    if kind == 5:
        return {"type": "integer", "enum": [1, 22, "no", 333]}
    if kind == 6:
        return {"type": ["null", "number"], "title": "t", "description": "d"}
    if kind == 7:
        low = rng.randrange(3)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == 8:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == 9:
        branches = [
            {
                "type": "object",
                "properties": {"t": {"const": tag}, "v": random_schema(rng, 1)},
                "required": ["t"],
            }
            for tag in ("u", "w")
        ]
        return {"oneOf": [*branches, {"type": "string", "maxLength": 4}]}
    names = rng.sample(["a", "b", "ab", "é", 'x"y', "long name", ""], rng.randrange(1, 5))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def is_valid_prefix(engine: Engine, schema: Any, ids: list[int]) -> bool:
    """Whether a text that was cut can be completed: the same tokens are taken as a document's beginning."""
    with Grammar(engine, schema) as grammar, Timeline(engine) as timeline:
        timeline.prompt([5, *ids])
        timeline.fit(grammar, 1)
    return True


def test_random_documents_fit_random_schemas(engine: Engine) -> None:
    complete = 0
    for number in range(300):
        rng = random.Random(number)
        schema = random_schema(rng)
        sampling = dict(rng.choice(SAMPLINGS), seed=number, max_tokens=rng.choice([0, 200, 20]))
        made = write(engine, schema, number, **sampling)
        if made.stop in ("grammar", "eos"):
            complete += 1
            value = json.loads(made.text)
            jsonschema.validate(value, schema)
            assert json.loads(json.dumps(value)) == value
        else:
            assert made.stop in ("limit", "context"), (schema, made)
            assert is_valid_prefix(engine, schema, made.ids)
    assert complete > 200


def test_written_as_documented(engine: Engine) -> None:
    """Properties in the schema's order, ", " and ": " between, nothing around."""
    for number in range(20):
        made = write(engine, PERSON, number, temperature=1.0, seed=number)
        value = json.loads(made.text)
        jsonschema.validate(value, PERSON)
        assert made.stop == "grammar"
        order = [name for name in PERSON["properties"] if name in value]
        assert list(value) == order
        assert made.text.startswith(b'{"name": "')
        assert b', "tags": [' in made.text


def test_top_level_number_may_end_by_itself(engine: Engine) -> None:
    stops = set()
    for seed in range(30):
        made = write(engine, {"type": "number"}, temperature=2.0, seed=seed)
        assert isinstance(json.loads(made.text), int | float)
        stops.add(made.stop)
    assert "grammar" in stops or "eos" in stops


@pytest.mark.parametrize(
    "schema", [{}, True, {"type": "object"}, {"type": "array"}, {"additionalProperties": {}}]
)
def test_open_schemas_give_json(engine: Engine, schema: Any) -> None:
    for seed in range(5):
        made = write(engine, schema, temperature=1.0, seed=seed)
        if made.stop in ("grammar", "eos"):
            jsonschema.validate(json.loads(made.text), schema)


# ---- exact ----


def test_nothing_but_sampling_and_precision_changes_a_document(model: Model) -> None:
    expected: dict[tuple[int, str], Answer] = {}
    drafted = 0
    modes: list[dict[str, Any]] = [{"precision": "base"}, {"precision": "full"}, MIXED]
    ways: list[tuple[int, Draft, int, int]] = [
        *((1, "off", 8, 64), (1, "ngram", 8, 64), (1, "model", 3, 64), (1, "auto", 15, 64)),
        *((3, "auto", 8, 4), (2, "off", 8, 1)),
    ]
    for (threads, draft, longest, rows), mode in product(ways, modes):
        options: dict[str, Any] = {"draft_max": longest, "max_rows": rows, **mode}
        options |= {"threads": threads, "draft": draft}
        least = {} if draft == "off" else {"draft_min": min(longest, 3)}
        with (
            Engine(model, ctx=CTX, max_seqs=4, **options, **least) as engine,
            Grammar(engine, PERSON) as grammar,
        ):
            for number, sampling in enumerate(SAMPLINGS):
                with Timeline(engine, **sampling) as timeline:
                    made = answer(timeline, grammar, prompt_of(model, number))
                    drafted += timeline.stats["accepted"]
                assert expected.setdefault((number, mode["precision"]), made) == made, options
    assert drafted > 100
    assert len({made.text for made in expected.values()}) > 4


def test_neighbours_change_nothing(model: Model) -> None:
    with (
        Engine(model, ctx=CTX, threads=1, max_seqs=4, draft="auto", draft_min=2, **MIXED) as engine,
        Grammar(engine, PERSON) as grammar,
    ):
        alone = []
        for number, sampling in enumerate(SAMPLINGS):
            with Timeline(engine, **sampling) as timeline:
                alone.append(answer(timeline, grammar, prompt_of(model, number)))
        together = [Timeline(engine, **sampling) for sampling in SAMPLINGS]
        for number, timeline in enumerate(together):
            if number % 2 == 0:
                timeline.fit(grammar)
            timeline.prompt(prompt_of(model, number))
            if number % 2:
                timeline.fit(grammar)
        while any(timeline.stop == "none" for timeline in together):
            engine.step(together)
        for number, timeline in enumerate(together):
            start = len(prompt_of(model, number))
            assert timeline.tokens[start:] == alone[number].ids
            assert timeline.stop == alone[number].stop


def test_copies_and_truncation_change_nothing(model: Model) -> None:
    """A document goes on from any of its tokens as if it had never been cut."""
    with (
        Engine(model, ctx=CTX, threads=1, max_seqs=2, precision="base", draft="auto", draft_min=2) as engine,
        Grammar(engine, PERSON) as grammar,
    ):
        for number, sampling in enumerate(SAMPLINGS):
            ids = prompt_of(model, number)
            with Timeline(engine, **sampling) as timeline:
                made = answer(timeline, grammar, ids)
                for kept in range(len(made.ids), -1, -3):
                    with Timeline(engine, copy_of=timeline, **sampling) as copy:
                        for one in (copy, timeline):
                            newest = one.tokens[len(ids) + kept - 1]
                            one.truncate(len(ids) + kept - 1)
                            one.prompt([newest])  # a document of its own, until
                            one.fit(grammar, len(ids))
                            while one.stop == "none":
                                engine.step([one])
                            assert one.tokens[len(ids) :] == made.ids, kept
                            assert one.stop == "grammar"


def test_forced_text_is_drafted(model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"the teacher looked out of the window": {"const": "nothing but the clock"}},
        "required": ["the teacher looked out of the window"],
    }
    with Engine(model, ctx=CTX, threads=1, precision="base", draft="ngram", draft_min=8) as engine:
        sources = set()
        with Grammar(engine, schema) as grammar, Timeline(engine) as timeline:
            timeline.fit(grammar)
            for _ in timeline.generate(prompt_of(model)):
                sources |= {record.source for record in timeline.drafts}
        assert sources == {"grammar"}


# ---- never open ----


def test_teacher_forcing_is_free_and_what_does_not_fit_is_refused(engine: Engine) -> None:
    model = engine.model
    ids = prompt_of(model)
    with (
        Grammar(engine, {"type": "boolean"}) as grammar,
        Timeline(engine) as timeline,
        Timeline(engine) as free,
    ):
        timeline.fit(grammar)
        assert (timeline.logits(ids) == free.logits(ids)).all()
        with pytest.raises(UsageError, match="does not fit its grammar"):
            engine.step([timeline])
        with pytest.raises(UsageError, match="does not fit its grammar"):
            timeline.fit(grammar, 1)
        with pytest.raises(UsageError, match="from token 99 on"):
            timeline.fit(grammar, 99)
        timeline.fit(None)
        timeline.truncate(0)
        assert answer(timeline, grammar, ids).text in (b"true", b"false")


def test_closed_and_foreign_grammars_are_refused(model: Model, engine: Engine) -> None:
    with Engine(model, ctx=CTX, threads=1) as other, Timeline(engine) as timeline:
        with pytest.raises(UsageError, match="of its engine only"):
            timeline.fit(Grammar(other, {}))
        grammar = Grammar(engine, {})
        timeline.fit(grammar)
        timeline.prompt(prompt_of(model))
        grammar.close()
        with pytest.raises(ValueError, match="this Grammar is closed"):
            engine.step([timeline])
        timeline.fit(None)
        engine.step([timeline])


def test_document_that_a_prompt_begins(engine: Engine) -> None:
    model = engine.model
    begun = list(model.encode('{"name": "box'))
    with Grammar(engine, PERSON) as grammar, Timeline(engine) as timeline:
        ids = prompt_of(model)
        timeline.prompt([*ids, *begun])
        timeline.fit(grammar, len(ids))
        while timeline.stop == "none":
            engine.step([timeline])
        made = model.decode(timeline.tokens[len(ids) :])
        jsonschema.validate(json.loads(made), PERSON)
        assert made.startswith(b'{"name": "box')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "JSON: expected a name"),
        ("[]", "not a schema at #"),
        ({"type": "string", "pattern": "a+"}, "'pattern' is not supported at #"),
        ({"properties": {"a": {"items": {"format": "date"}}}}, "'format' .* at #/properties/a/items"),
        ({"properties": {"a\nb": {"minimum": 1}}}, r"at #/properties/a\?b"),
        ({"type": "integer", "minimum": 0}, "'minimum'"),
        ({"allOf": [{}]}, "'allOf'"),
        ({"type": "text"}, "'type' is none of the types"),
        ({"type": []}, "'type' is none of the types"),
        ({"enum": []}, "'enum' allows no value"),
        ({"enum": [1], "type": "string"}, "'enum' allows no value"),
        ({"enum": 1}, "'enum' is not an array"),
        ({"enum": [1], "const": 1}, "stand alone"),
        ({"anyOf": [{}], "type": "object"}, "stand alone"),
        ({"anyOf": []}, "'anyOf' is not an array"),
        ({"anyOf": [{}, 5]}, "not a schema at #/anyOf/1"),
        (False, "not a schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' may have values in common"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "'oneOf' may have values in common"),
        ({"$ref": "#"}, "recursive"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, "recursive"),
        ({"$ref": "#/$defs/none"}, "leads to no part"),
        ({"$ref": "other.json"}, "leads to no part"),
        ({"properties": {}, "required": ["a"]}, "'a' is required, but not"),
        ({"properties": [], "type": "object"}, "'properties' is not an object"),
        ({"properties": {"a": {}}, "additionalProperties": {}}, "'additionalProperties' with a schema"),
        ({"minItems": 2, "maxItems": 1}, "'minItems' is more"),
        ({"minLength": -1}, "'minLength' is not a whole number"),
        ({"type": "array", "items": {"type": "string", "maxLength": 4096}}, "automaton"),
        ({"type": "array", "items": {"type": "string", "maxLength": 900}}, ""),
        ({"type": "array", "minItems": 4000, "items": {"type": "string", "minLength": 4000}}, "automaton"),
    ],
)
def test_schemas_are_refused(engine: Engine, schema: Any, message: str) -> None:
    if message:
        with pytest.raises(UsageError, match=message) as caught:
            Grammar(engine, schema)
        assert str(caught.value).isprintable()
    else:
        Grammar(engine, schema).close()


# ---- tools ----

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "light", "parameters": PERSON["$defs"]["place"]}},
    {"type": "function", "function": {"name": "stop", "description": "no parameters"}},
]


@pytest.mark.parametrize("name", [None, "light", "stop"])
def test_tool_calls(engine: Engine, name: str | None) -> None:
    names = set()
    for seed in range(8):
        with (
            Grammar.of_tools(engine, TOOLS, name) as grammar,
            Timeline(engine, temperature=1.5, seed=seed) as timeline,
        ):
            made = answer(timeline, grammar, prompt_of(engine.model))
        call = json.loads(made.text)
        assert list(call) == ["name", "arguments"]
        names.add(call["name"])
        if call["name"] == "light":
            jsonschema.validate(call["arguments"], PERSON["$defs"]["place"])
        else:
            assert call["arguments"] == {}
    assert names <= ({"light", "stop"} if name is None else {name})


@pytest.mark.parametrize(
    ("tools", "name", "message"),
    [
        ({}, None, "not an array"),
        ([], None, "the list is empty"),
        ([{"type": "function"}], None, "number 1 is no function"),
        (TOOLS, "dark", "none is called 'dark'"),
        ([{"name": "a", "parameters": {"pattern": "x"}}], None, "'pattern'"),
    ],
)
def test_tools_are_refused(engine: Engine, tools: Any, name: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grammar.of_tools(engine, json.dumps(tools), name)
