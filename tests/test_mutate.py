# SPDX-License-Identifier: Apache-2.0
"""The table of ``make mutate``: each entry can be applied to this tree, exactly once."""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest


def test_every_mutation_applies_exactly_once() -> None:
    table = mutate.read_table()
    for mutation in table:
        text = (mutate.REPOSITORY / mutation.path).read_text(encoding="utf-8")
        assert mutation.apply(text) != text, mutation
        for test in mutation.tests:
            assert (Path(__file__).parent / test.split("::")[0]).exists(), test
    assert len(table) >= 100
    assert len({mutation.key for mutation in table}) == len(table)
    assert len({mutation.file for mutation in table}) >= 20
    assert sum(bool(mutation.equivalent) for mutation in table) <= len(table) // 20


def test_an_entry_that_does_not_apply_is_noticed() -> None:
    mutation = mutate.Mutation("src/kv.c", (), "x + 1", "x")
    with pytest.raises(ValueError, match="0 times"):
        mutation.apply("y + 1")
    with pytest.raises(ValueError, match="2 times"):
        mutation.apply("x + 1 < x + 1")
    assert mutation.apply("(x + 1)") == "(x)"
