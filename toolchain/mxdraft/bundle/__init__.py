# SPDX-License-Identifier: Apache-2.0
"""The bundle file (``.mxb``, runtime/BUNDLE.md), both ways.

format.py        what its bytes mean, and which tensors it must hold
tiles.py         the order of a quantized tensor's bytes
tokenizer.py     the section ``tokenizer``
chat.py          the section ``chat``: a Jinja template as pieces
chat_sandbox.py  a process that renders such a template within limits
ngrams.py        the section ``draft.ngrams``: what mostly follows one or two tokens
schedule.py      the section ``schedule``: settings of the dynamic origin
writer.py        sections and tensors into a file
reader.py        a file into checked sections and tensors
"""

from mxdraft.bundle.reader import Bundle, parse_provenance
from mxdraft.bundle.writer import BundleWriter

__all__ = ["Bundle", "BundleWriter", "parse_provenance"]
