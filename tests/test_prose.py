# SPDX-License-Identifier: Apache-2.0
"""The prose that the shipped base plane trains on: what is read of a dump, and how it is written."""

from __future__ import annotations

import bz2
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "models" / "smollm2-135m" / "prose.py"
SENTENCE = "A sentence that is long enough to be kept as a paragraph, for it has well over eighty characters."
PAGE = f"""{{{{Infobox|name={{{{nested}}}}}}}}
[[File:boat.jpg|thumb|A [[boat]]]]
'''Boats''' float.<ref name="a">Not kept.</ref> {SENTENCE} See [[ship|ships]] ( ) and [https://b.org a page].

== Kinds ==
=== Rafts ===
{{| class="wikitable"
| cell {SENTENCE}
|}}
* {SENTENCE}
Rafts &amp; more: {SENTENCE}
== References ==
{SENTENCE}
"""


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


def test_a_page_becomes_paragraphs_and_the_headings_above_them(prose: ModuleType) -> None:
    assert prose.plain(PAGE) == (
        f"Boats float. {SENTENCE} See ships  and a page.\n\nRafts\n\nRafts & more: {SENTENCE}"
    )


def test_an_article_is_written_as_wikitext_is(prose: ModuleType) -> None:
    text = f'Kinds\n\nIn 1,234.5 well-known (small) boats, "the sailor\'s" J. Doe sank.\n{SENTENCE}'
    assert prose.spaced("Boats", text).split("\n")[:6] == [
        " = Boats = ",
        " ",
        " = = Kinds = = ",
        " ",
        ' In 1 @,@ 234 @.@ 5 well @-@ known ( small ) boats , " the sailor \'s " J. Doe sank . ',
        f" {SENTENCE.replace(',', ' ,')[:-1]} . ",
    ]


def test_short_pages_and_redirects_are_no_articles(prose: ModuleType) -> None:
    pages = {"Boats": PAGE * 20, "Ship": "#REDIRECT [[Boats]]", "Talk:Boats": PAGE * 20, "Raft": PAGE}
    xml = "".join(f"<page><title>{t}</title><text>{p}</text></page>" for t, p in pages.items())
    dump = bz2.compress(
        f"<wiki>{xml.replace('&', '&amp;').replace('<ref', '&lt;ref')}</wiki>".replace(
            "</ref>", "&lt;/ref>"
        ).encode()
    )
    assert [title for title, _ in prose.articles(dump)] == ["Boats"]
    assert list(prose.texts(iter([("A", "x"), ("B", "y")]))) == [" = A = \n \n = = x = = \n \n", "B\n\ny\n"]


def test_what_two_texts_share_is_counted(prose: ModuleType) -> None:
    a = np.arange(100, dtype=np.uint16)
    b = np.concatenate([np.arange(500, 600), a[20:35], np.arange(700, 720)]).astype(np.uint16)
    assert prose.shared(a, b) == 3
    assert prose.shared(a, b[:100]) == 0
