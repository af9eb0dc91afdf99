# SPDX-License-Identifier: Apache-2.0
"""Compares the runtime with llama.cpp on the same weights, in one run, taking turns (docs/performance.md).

compare.py   what is measured, of both in turns; ratios and plot
ours.py      the runtime, in this process
theirs.py    llama.cpp, in a process of its own Python environment, driven through pipes
server.py    that process: the only file that imports llama_cpp, and it imports nothing of mxdraft
"""
