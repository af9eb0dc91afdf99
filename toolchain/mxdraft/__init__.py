# SPDX-License-Identifier: Apache-2.0
"""mxdraft: the build toolchain and host binding (README.md).

errors.py    every refusal, and its exit code
files/       files written whole, hashed, cached
mx.py        MX block formats
checkpoint/  weights, tokenizer and chat template as they are found
runtime/     bundles through the C library
train/       QAT of a target, training of a drafter
export/      weights to ONNX, and ONNX on a stock onnxruntime
pack.py      ONNX to a bundle
bundle/      the bundle file, both ways
store/       ready bundles: pulled, kept, indexed
verify/      ONNX against the bundle
measure/     quality, acceptance, speed, the dynamic origin
trace/       a run recorded token by token
ship/        the C runtime for a target, and deployment
cli/         the command line
"""

import re
from pathlib import Path

# The public header declares the library and holds the version: in an installed wheel, or in a checkout.
HEADER = Path(__file__).parent / "_runtime" / "mxdraft.h"
if not HEADER.exists():
    HEADER = Path(__file__).parents[2] / "runtime" / "include" / "mxdraft.h"

__version__ = re.findall(r'#define MXD_VERSION "(.*)"', HEADER.read_text(encoding="utf-8"))[0]
