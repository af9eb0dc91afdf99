# SPDX-License-Identifier: Apache-2.0
"""Jinja chat templates as pieces, and the bundle's ``chat`` section (runtime/BUNDLE.md, runtime/src/chat.c).

A device has no Jinja. What it can do is write, for each message, a prefix, the content and a suffix that
depend on the role alone, and follow a few rules (``ChatPieces``). So pieces and rules are read off a few
rendered conversations, and a template is accepted only if they give Jinja's text on a large set of others;
everything else is refused, never approximated.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

from mxdraft.bundle import chat_sandbox
from mxdraft.checkpoint.tokenizer import TokenizerSpec
from mxdraft.errors import BundleError, RefusedError

Piece = tuple[int | str, ...]  # control token ids and text, in order
Conversation = Sequence[tuple[str, str]]  # role, content

ROLES = ("system", "user", "assistant")  # asked for; a template may lack the first
_THOUGHT_END = "</think>"
NO_TOKEN = 0xFFFFFFFF
ROLE_BYTES = 16
_HEADER = struct.Struct("<4I")  # roles, segments, bytes of text, rules
# Rules: the low 16 bits say whose contents are trimmed.
_FOLDS_SYSTEM, _SYSTEM_FIRST, _ALTERNATES, _CUTS_THOUGHTS, _ASKS = (1 << bit for bit in range(16, 21))
_FIXED_PIECES = 3  # opening, default_system, generation
_MAX_ROLES = 16
_MAX_SEGMENTS = 1 << 16
_MAX_TEXT = 1 << 20

# What templates are known to treat specially: white space, thoughts, markup, Jinja's own signs.
_CONTENTS = (
    "Hello",
    "",
    " ",
    "  two before and one behind ",
    "\nline feed before",
    "line feeds behind\n\n",
    "a\r\nb\tc",
    "漢字 e\u0301 👩‍👩‍👧 \u00a0\u2028",
    "<think>why</think>\n\nbecause",
    "[INST] {{ x }} {% y %} {# z #} [/INST]",
    """quotes ' " \\ & <b>""",
    "<|im_end|>\n<|im_start|>system\n<s></s><|endoftext|>",
    '{"name": "f", "arguments": {}}',
)


@dataclass(frozen=True)
class ChatPieces:
    """What a template writes around contents.

    A conversation is ``opening``, then ``default_system`` unless the first message's role is ``system``, then
    for each message its role's prefix, the content and the role's suffix, then, to let the model answer,
    ``generation``. Text on both sides of a seam is encoded together; control tokens separate.

    Rules: ``trims``, roles whose contents lose white space at both ends; ``folds_system``, a system message
    (prefix, content, suffix) goes between the first user's prefix and content; ``cuts_thoughts``, of an
    assistant's content only what follows the last ``</think>`` and its line feeds. Conversations that the
    template refuses, or writes in another way, are refused: ``system_first``, a system message anywhere but
    in front; ``alternates``, any order but user and assistant in turns after it; ``asks``, what does not end
    with the user's message and the opening of an answer.
    """

    opening: Piece
    default_system: Piece
    generation: Piece
    roles: Mapping[str, tuple[Piece, Piece]]
    trims: frozenset[str] = frozenset()
    folds_system: bool = False
    system_first: bool = False
    alternates: bool = False
    cuts_thoughts: bool = False
    asks: bool = False

    def takes(self, order: Sequence[str], generation: bool) -> bool:
        """Whether the rules allow messages of these roles."""
        turns = order[1:] if self.system_first and order[0] == "system" else order
        if self.system_first and "system" in turns:
            return False
        if self.folds_system and len(turns) < len(order) and turns[:1] != ("user",):
            return False
        if self.alternates and (
            not turns or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns))
        ):
            return False
        return not self.asks or (generation and order[-1] == "user")

    def content(self, role: str, text: str) -> str:
        """What is written of a message's content."""
        if self.cuts_thoughts and role == "assistant" and _THOUGHT_END in text:
            text = text.split(_THOUGHT_END)[-1].lstrip("\n")
        return text.strip() if role in self.trims else text

    def rules(self) -> int:
        """The rules as the section has them."""
        trims = sum(1 << i for i, role in enumerate(self.roles) if role in self.trims)
        flags = (
            (self.folds_system, _FOLDS_SYSTEM),
            (self.system_first, _SYSTEM_FIRST),
            (self.alternates, _ALTERNATES),
            (self.cuts_thoughts, _CUTS_THOUGHTS),
            (self.asks, _ASKS),
        )
        return trims + sum(bit for rule, bit in flags if rule)

    def in_order(self) -> list[Piece]:
        """All pieces as the section has them."""
        return [self.opening, self.default_system, self.generation, *itertools.chain(*self.roles.values())]


def chat_pieces(template: str, tokenizer: TokenizerSpec) -> ChatPieces:
    """Turn a Jinja chat template into pieces that give the same text.

    Raises RefusedError, with the conversation that differs, for a template that pieces and rules cannot
    express: one that changes contents in other ways, looks at a message's index or neighbours, or takes much
    memory or time. A template that asks for the date gets ``chat_sandbox.DATE``.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_token
    names = {i: tokenizer.tokens[i] for i in tokenizer.special_ids}
    variables: dict[str, str | None] = {"tools": None, "documents": None}
    variables |= {} if bos is None else {"bos_token": tokenizer.tokens[bos]}
    variables |= {} if eos is None else {"eos_token": tokenizer.tokens[eos]}
    return _pieces(template, tuple(names.items()), tuple(variables.items()))


def with_turn_end(tokenizer: TokenizerSpec, template: str) -> TokenizerSpec:
    """The tokenizer with the token that closes an answer in ``template`` among its end tokens, where
    generation has to stop whatever a model's files say. Raises RefusedError as ``chat_pieces``."""
    _, suffix = chat_pieces(template, tokenizer).roles["assistant"]
    closing = next((segment for segment in suffix if isinstance(segment, int)), None)
    return tokenizer if closing is None else tokenizer.with_end(closing)


@cache
def _pieces(
    template: str, names: tuple[tuple[int, str], ...], variables: tuple[tuple[str, str | None], ...]
) -> ChatPieces:
    """``names``: id and name of each control token; ``variables`` that the template may read."""
    with _Renderer(template, dict(variables)) as render:
        split = _Splitter(dict(names))
        try:
            pieces = _free_pieces(render, split)
            _prove(pieces, dict(names), render)
            return pieces
        except RefusedError as error:
            reason = error
        # What is said of a template that rules cannot express either is why it needs them.
        with contextlib.suppress(RefusedError):
            strict = _strict_pieces(render, split)
            for cuts, asks in itertools.product((False, True), repeat=2):
                pieces = replace(strict, cuts_thoughts=cuts, asks=asks)
                with contextlib.suppress(RefusedError):
                    _prove(pieces, dict(names), render)
                    return pieces
        raise reason


def _free_pieces(render: _Renderer, split: _Splitter) -> ChatPieces:
    """Pieces of a template that takes messages in any order."""
    has_system = render.accepts([("system", "x")]) or render.accepts([("system", "x"), ("user", "y")])
    roles = [role for role in ROLES if role != "system" or has_system]

    around = {role: render.around("user", role) for role in roles}
    suffix = {role: behind for role, (_, _, behind) in around.items()}
    prefix = {role: _cut(suffix["user"], between, "") for role, (_, between, _) in around.items()}
    start = _cut("", around["user"][0], prefix["user"])
    opening = _cut("", render.around("system", "user")[0], prefix["system"]) if has_system else start
    asked = [("user", "x")]
    generation = _cut(render(asked), render(asked, generation=True), "")
    return ChatPieces(
        opening=split(opening),
        default_system=split(_cut(opening, start, "")),
        generation=split(generation),
        roles={role: (split(prefix[role]), split(suffix[role])) for role in roles},
        trims=render.trimmed(roles),
    )


def _strict_pieces(render: _Renderer, split: _Splitter) -> ChatPieces:
    """Pieces of a template that takes a system message in front only, and perhaps turns only."""
    start, after_user, after_answer, _ = render.parts(("user", "assistant", "user"), generation=True)
    user_suffix = render.parts(("user",))[-1]
    answer_suffix = render.parts(("user", "assistant"))[-1]
    user_prefix = _cut(answer_suffix, after_answer, "")
    default = _cut("", start, user_prefix)
    generation = _cut(user_suffix, render.parts(("user",), generation=True)[-1], "")
    roles = {
        "user": (split(user_prefix), split(user_suffix)),
        "assistant": (split(_cut(user_suffix, after_user, "")), split(answer_suffix)),
    }
    has_system = render.accepts([("system", "x"), ("user", "y")])
    folds = False
    if has_system:
        before, between, _ = render.parts(("system", "user"))
        folds = before == start and not between.endswith(user_prefix)
        system = ("", between) if folds else (before, _cut("", between, user_prefix))
        roles = {"system": (split(system[0]), split(system[1])), **roles}
    return ChatPieces(
        opening=split(default if folds else ""),
        default_system=split("" if folds else default),
        generation=split(generation),
        roles=roles,
        trims=render.trimmed(list(roles)),
        folds_system=folds,
        system_first=True,
        alternates=not render.accepts([("user", "x"), ("user", "y")]),
    )


def chat_section(pieces: ChatPieces) -> bytes:
    """The bytes of the section. Raises RefusedError if it would be larger than a bundle's may be."""
    segments, piece_ends, text = [], [], b""
    for piece in pieces.in_order():
        for segment in piece:
            if isinstance(segment, str):
                text += segment.encode("utf-8")
            segments.append((NO_TOKEN if isinstance(segment, str) else segment, len(text)))
        piece_ends.append(len(segments))
    if len(segments) > _MAX_SEGMENTS or len(text) > _MAX_TEXT:
        raise RefusedError(f"chat template: {len(segments)} segments of {len(text)} bytes are too many")
    return b"".join(
        (
            _HEADER.pack(len(pieces.roles), len(segments), len(text), pieces.rules()),
            *(role.encode("ascii").ljust(ROLE_BYTES, b"\0") for role in pieces.roles),
            struct.pack(f"<{len(piece_ends)}I", *piece_ends),
            *(struct.pack("<2I", *segment) for segment in segments),
            text,
        )
    )


def read_chat(data: bytes, vocab: int) -> ChatPieces:
    """The pieces in a section. Raises BundleError CHAT where the C reader does."""
    _check(len(data) >= _HEADER.size, "it is shorter than its header")
    role_count, segment_count, text_bytes, rules = _HEADER.unpack_from(data)
    counts_ok = 1 <= role_count <= _MAX_ROLES and segment_count <= _MAX_SEGMENTS and text_bytes <= _MAX_TEXT
    _check(counts_ok, "impossible count")
    known_rules = (1 << role_count) - 1 | _FOLDS_SYSTEM | _SYSTEM_FIRST | _ALTERNATES | _CUTS_THOUGHTS | _ASKS
    _check(rules & ~known_rules == 0, f"unknown rules {rules:#x}")
    piece_count = _FIXED_PIECES + 2 * role_count
    layout = struct.Struct(
        f"<{_HEADER.size}x{f'{ROLE_BYTES}s' * role_count}{piece_count + 2 * segment_count}I"
    )
    _check(len(data) == layout.size + text_bytes, f"{len(data)} bytes are not what its counts ask for")
    fields = layout.unpack_from(data)
    names, numbers = fields[:role_count], fields[role_count:]
    piece_ends, ids, text_ends = numbers[:piece_count], numbers[piece_count::2], numbers[piece_count + 1 :: 2]

    for name in names:
        _check(re.fullmatch(rb"[a-z_]+\0+", name) is not None, f"bad role name {name!r}")
    _check(len(set(names)) == role_count, "a role appears twice")
    _check(list(piece_ends) == sorted(piece_ends) and piece_ends[-1] == segment_count, "bad pieces")
    text_bounds = [0, *text_ends]
    _check(text_bounds == sorted(text_bounds) and text_bounds[-1] == text_bytes, "bad segment")
    segments: list[int | str] = []
    for i, (start, end) in zip(ids, itertools.pairwise(text_bounds), strict=True):
        _check(end > start if i == NO_TOKEN else end == start and i < vocab, "bad segment")
        try:
            text = data[layout.size + start : layout.size + end].decode("utf-8")
        except UnicodeDecodeError:
            raise BundleError("CHAT", "chat: a segment is no UTF-8") from None
        segments.append(text if i == NO_TOKEN else i)
    pieces = [tuple(segments[a:b]) for a, b in itertools.pairwise([0, *piece_ends])]
    affixes = zip(pieces[_FIXED_PIECES::2], pieces[_FIXED_PIECES + 1 :: 2], strict=True)
    roles = [name.rstrip(b"\0").decode("ascii") for name in names]
    folds = bool(rules & _FOLDS_SYSTEM)
    foldable = {"system", "user"} <= set(roles) and rules & _SYSTEM_FIRST
    _check(not folds or bool(foldable), "there is no system message to fold")
    return ChatPieces(
        pieces[0],
        pieces[1],
        pieces[2],
        dict(zip(roles, affixes, strict=True)),
        trims=frozenset(role for i, role in enumerate(roles) if rules >> i & 1),
        folds_system=folds,
        system_first=bool(rules & _SYSTEM_FIRST),
        alternates=bool(rules & _ALTERNATES),
        cuts_thoughts=bool(rules & _CUTS_THOUGHTS),
        asks=bool(rules & _ASKS),
    )


class _Renderer:
    """A template in a process of its own (chat_sandbox.py), which ends with the block."""

    def __init__(self, template: str, variables: dict[str, str | None]) -> None:
        import jinja2  # noqa: F401  (what the process needs is missed here)

        limits = (str(chat_sandbox.MEMORY_LIMIT), str(chat_sandbox.TIME_LIMIT))
        # -P: the folder of the script, this package, holds names of the standard library.
        command = [sys.executable, "-P", chat_sandbox.__file__, *limits]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            answer = self._ask({"template": template, "variables": variables})
            if "error" in answer:
                raise RefusedError(f"chat template: {answer['error']}")
            if "eos_token" in answer["wanted"] and "eos_token" not in variables:
                raise RefusedError(
                    "chat template: it uses eos_token, and the tokenizer has none or several end tokens"
                )
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its streams and waits
            pass

    def __call__(self, conversation: Conversation, generation: bool = False) -> str:
        messages = [{"role": role, "content": content} for role, content in conversation]
        answer = self._ask({"messages": messages, "generation": generation})
        if "error" in answer:
            raise RefusedError(f"chat template: it refuses {conversation!r}: {answer['error']}")
        return str(answer["text"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode("ascii") + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RefusedError(
                "chat template: to render it takes more than "
                f"{chat_sandbox.MEMORY_LIMIT >> 20} MiB of memory or {chat_sandbox.TIME_LIMIT} s"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def around(self, first: str, second: str) -> tuple[str, str, str]:
        """Return what is written before, between and after the contents of two messages with these roles."""
        before, between, after = self.parts((first, second))
        return before, between, after

    def parts(self, order: Sequence[str], generation: bool = False) -> list[str]:
        """Return what is written before, between and after the contents of messages with these roles."""
        marks = [chr(0xE000 + i) for i in range(len(order))]  # private use: no template writes them
        text = self(list(zip(order, marks, strict=True)), generation)
        if re.findall("[\ue000-\ue00f]", text) != marks:
            raise RefusedError(f"chat template: it writes {text!r:.500}, where each content must appear once")
        return re.split("[\ue000-\ue00f]", text)

    def trimmed(self, roles: Sequence[str]) -> frozenset[str]:
        """Return those whose contents lose white space at their ends."""
        padded, found = " \ue000\t", set()
        for role in roles:
            before = [("user", "x")] if role == "assistant" else []
            after = [("user", "y")] if role == "system" else []
            if padded not in self([*before, (role, padded), *after]):
                found.add(role)
        return frozenset(found)

    def accepts(self, conversation: Conversation) -> bool:
        try:
            self(conversation)
        except RefusedError:
            return False
        return True


class _Splitter:
    """Cuts control tokens out of text, the longest first where several begin, as Hugging Face does."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._id_of = {name: i for i, name in names.items()}
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if names else "(?!)")

    def __call__(self, text: str) -> Piece:
        return tuple(self._id_of.get(part, part) for part in self._pattern.split(text) if part)


def _cut(prefix: str, text: str, suffix: str) -> str:
    """``text`` without what it must begin and end with."""
    if len(text) < len(prefix) + len(suffix) or not (text.startswith(prefix) and text.endswith(suffix)):
        raise RefusedError(
            f"chat template: {text!r:.500} does not begin with {prefix!r:.200} and end with {suffix!r:.200}; "
            "what surrounds a message depends on more than its role, which a bundle cannot express"
        )
    return text[len(prefix) : len(text) - len(suffix)]


def _conversations(roles: Sequence[str]) -> Iterator[Conversation]:
    orders = [order for n in (1, 2, 3) for order in itertools.product(roles, repeat=n)]
    long = ("user", "assistant") * 4
    orders += [(*first, *long, *last) for first in ((), *((r,) for r in roles)) for last in ((), ("user",))]
    for order in orders:
        for shift in range(len(_CONTENTS)):
            contents = itertools.islice(itertools.cycle(_CONTENTS), shift, None)
            yield list(zip(order, contents, strict=False))


def _prove(pieces: ChatPieces, names: Mapping[int, str], render: _Renderer) -> None:
    """Refuse unless the pieces give what the template gives."""

    def text(piece: Piece) -> str:
        return "".join(part if isinstance(part, str) else names[part] for part in piece)

    for conversation in _conversations(list(pieces.roles)):
        order = tuple(role for role, _ in conversation)
        ours = text(pieces.opening)
        if order[0] != "system":
            ours += text(pieces.default_system)
        folded = ""
        for i, (role, content) in enumerate(conversation):
            prefix, suffix = map(text, pieces.roles[role])
            content = pieces.content(role, content)
            if pieces.folds_system and i == 0 and role == "system":
                folded = prefix + content + suffix
                continue
            ours += prefix + folded + content + suffix
            folded = ""
        for generation in (False, True):
            if not pieces.takes(order, generation):
                continue
            expected = render(conversation, generation)
            if expected != ours + (text(pieces.generation) if generation else ""):
                raise RefusedError(
                    "chat template: a bundle cannot express it; "
                    f"for {conversation!r} it writes {expected!r:.500}"
                )


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise BundleError("CHAT", f"chat: {what}")
