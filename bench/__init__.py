# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, run from the repository's root: ``python -m bench.NAME``.

peers/                 the runtime and llama.cpp in turns (`make bench-peers`)
count_instructions.py  executed aarch64 instructions a token, under qemu
count_attention.py     the same of attention over a quantized KV cache
second_turn.py         what the server's prompt cache saves in a long conversation
predict_pi.py          what a Raspberry Pi should reach, on paper
compare_trees.py       what two checkouts print, byte for byte
"""
