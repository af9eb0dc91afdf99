# SPDX-License-Identifier: Apache-2.0
"""Write the plain prose that the base plane is trained on beside its teacher's own text.

    python models/smollm2-135m/prose.py -m build/smollm2-135m.mxb -o build/prose.npz

The prose is 93 articles of the English Wikipedia (CC BY-SA), from "Anarchism" to "Algorithm", which the PyPI
package gensim 4.3.3 carries as test data, in MediaWiki's XML. Every third article is written as WikiText-2 is
(spaces round punctuation, "@-@" for a hyphen), so that such text is not foreign to the plane; none of that
corpus' own articles is among them. ``--evaluation FILE`` counts the sequences of 13 tokens that the prose
shares with a text that training must not see.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import html
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mxdraft.errors import RefusedError
from mxdraft.files import replacing
from mxdraft.runtime import Model
from numpy.typing import NDArray

_PACKAGE = "gensim==4.3.3"
_MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_MEMBER_SHA256 = "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
_SHORTEST_ARTICLE = 1500  # characters
_SHORTEST_PARAGRAPH = 80
_AFTERWORDS = {
    *("references", "external links", "see also", "further reading", "notes", "bibliography", "sources"),
    "footnotes",
}
_SHARED = 13  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--bundle", required=True, help="whose tokenizer is used")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write (.npz)")
    parser.add_argument("--evaluation", type=Path, help="text (UTF-8) that training must not see")
    options = parser.parse_args()
    with Model(options.bundle) as model:
        documents = [np.array(model.encode(text.encode()), np.uint16) for text in texts(articles(download()))]
        if options.evaluation is not None:
            other = np.array(model.encode(options.evaluation.read_bytes()), np.uint16)
            count = shared(np.concatenate(documents), other)
            print(f"{count} sequences of {_SHARED} tokens are also in {options.evaluation}")
    with replacing(options.output) as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate(documents),
            offsets=np.cumsum([0, *map(len, documents)], dtype=np.int64),
        )


def download() -> bytes:
    """The dump, bzip2-compressed, out of the wheel that pip gets. Raises RefusedError if it is another."""
    with TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", directory, _PACKAGE], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            dump = archive.read(_MEMBER)
    digest = hashlib.sha256(dump).hexdigest()
    if digest != _MEMBER_SHA256:
        raise RefusedError(f"{_MEMBER} of {_PACKAGE} has SHA-256 {digest} instead of {_MEMBER_SHA256}")
    return dump


def articles(dump: bytes) -> Iterator[tuple[str, str]]:
    """Title and plain text of every article of a MediaWiki dump that is long enough."""
    title = ""
    for _, element in ElementTree.iterparse(BytesIO(bz2.decompress(dump))):
        tag = element.tag.split("}")[-1]
        if tag == "title":
            title = element.text or ""
        elif tag == "text":
            markup = element.text or ""
            if not markup[:40].lower().startswith("#redirect") and ":" not in title:
                text = plain(markup)
                if len(text) > _SHORTEST_ARTICLE:
                    yield title, text
            element.clear()


def plain(markup: str) -> str:
    """Paragraphs and headings of a page, without templates, tables, lists, notes and links."""
    text = re.sub(r"<!--.*?-->", "", markup, flags=re.DOTALL)
    text = re.sub(r"<ref[^>]*/>", "", text)
    text = re.sub(r"<ref.*?</ref>", "", text, flags=re.DOTALL | re.IGNORECASE)
    unread = "math|gallery|timeline|pre|source|nowiki|code|table"
    text = re.sub(rf"<({unread})[^>]*>.*?</\1>", "", text, flags=re.DOTALL | re.IGNORECASE)
    text = _peel(text, r"\{\{[^{}]*\}\}", 6)
    text = _peel(text, r"\{\|(?:(?!\{\|).)*?\|\}", 4)
    text = re.sub(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}", "", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"\{\{[^}]*\}\}", "", text)
    kept, skipping = [], False
    for line in map(str.strip, text.split("\n")):
        if heading := re.match(r"^(=+)\s*(.*?)\s*=+$", line):
            skipping = heading.group(2).lower() in _AFTERWORDS
            if not skipping:
                kept.append(f"\n{heading.group(2)}\n")
        elif len(line) > _SHORTEST_PARAGRAPH and line[0] not in "*#:;|!{}" and not skipping:
            kept.append(re.sub(r"\(\s*[;,]?\s*\)", "", line))
    followed = [line for line, after in pairwise([*kept, "\n"]) if line[0] != "\n" or after[0] != "\n"]
    return "\n".join(followed).strip()


def spaced(title: str, text: str) -> str:
    """An article written as WikiText-2 is."""
    lines = [f" = {title} = ", " "]
    for line in filter(str.strip, text.split("\n")):
        if len(line) <= _SHORTEST_PARAGRAPH and not line.rstrip().endswith("."):
            lines += [f" = = {line.strip()} = = ", " "]
            continue
        words = re.sub(r"(?<=\d),(?=\d)", " @,@ ", line)
        words = re.sub(r"(?<=\d)\.(?=\d)", " @.@ ", words)
        words = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", words)
        words = re.sub(r'(?<![@\s])([,;:!?()\[\]"“”])', r" \1", words)
        words = re.sub(r'([,;:!?()\[\]"“”])(?![@\s])', r"\1 ", words)
        words = re.sub(r"(?<=\w)('s|'re|'ll|'ve|n't|')(?=\s)", r" \1", words)
        words = re.sub(r'(?<!\b[A-Z])\.(?=\s+[A-Z"]|$)', " .", words)
        lines.append(" " + re.sub(r" +", " ", words).strip() + " ")
    return "\n".join(lines) + "\n"


def texts(found: Iterator[tuple[str, str]]) -> Iterator[str]:
    """The articles as they are trained on."""
    for number, (title, text) in enumerate(found):
        yield f"{title}\n\n{text}\n" if number % 3 else spaced(title, text)


def shared(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> int:
    """How many different sequences of 13 tokens occur in both."""
    one, other = (set(map(bytes, np.lib.stride_tricks.sliding_window_view(x, _SHARED))) for x in (a, b))
    return len(one & other)


def _peel(text: str, pattern: str, times: int) -> str:
    """``text`` without what matches, from the innermost on."""
    for _ in range(times):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    main()
