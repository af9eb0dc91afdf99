# SPDX-License-Identifier: Apache-2.0
"""The dynamic origin, measured: what core tokens get, each resource alone and all together.

precision.py  which rows base precision gets wrong, and what looking again repairs
compute.py    places in the verify batch, and what they buy
memory.py     tiers of the KV cache: quality and speed
together.py   each resource alone and all at once, by context and number of sequences
evaluate.py   everything above in one report; calibration of a bundle
"""
