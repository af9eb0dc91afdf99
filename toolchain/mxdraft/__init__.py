"""mxdraft: from a model's weights to text on a Raspberry Pi (README.md)."""

import re
from pathlib import Path

# The public header declares the library and holds the version: in an installed wheel, or in a checkout.
HEADER = Path(__file__).parent / "_runtime" / "mxdraft.h"
if not HEADER.exists():
    HEADER = Path(__file__).parents[2] / "runtime" / "include" / "mxdraft.h"

__version__ = re.findall(r'#define MXD_VERSION "(.*)"', HEADER.read_text(encoding="utf-8"))[0]
