# SPDX-License-Identifier: Apache-2.0
"""Print runtime/serve/page_html.h, the page of ``mxdraft serve`` as C: its text, and the policy that lets the
browser run nothing else.

    python runtime/tools/make_page.py > runtime/serve/page_html.h
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "serve" / "page.html"


def policy(page: str) -> str:
    """A Content-Security-Policy for this script, this style and requests to the same server."""
    allowed = []
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        allowed.append(f"{tag}-src 'sha256-{digest}'")
    rest = ("connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'")
    return "; ".join(("default-src 'none'", *allowed, *rest, "frame-ancestors 'none'"))


def quoted(line: str) -> str:
    """A line as a C string; what is not ASCII as octal escapes."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "?": "\\?"}
    characters = (
        escapes.get(c, c) if c.isascii() else "".join(map("\\{:03o}".format, c.encode("utf-8"))) for c in line
    )
    return f'"{"".join(characters)}"'


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    lines = "\n".join(f"    {quoted(line)}" for line in page.splitlines(keepends=True))
    sys.stdout.write(
        "/* SPDX-License-Identifier: Apache-2.0 */\n"
        "/* Made from page.html by runtime/tools/make_page.py. */\n"
        f"static const char page_policy[] = {quoted(policy(page))};\n"
        f"static const char page_html[] =\n{lines};\n"
    )


if __name__ == "__main__":
    main()
