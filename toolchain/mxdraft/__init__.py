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
verify/      ONNX against the bundle
measure/     quality, acceptance, speed, the dynamic origin
trace/       a run recorded token by token
ship/        the C runtime for a target, and deployment
cli/         the command line
"""

__version__ = "0.1.0"
