"""Quantization-aware training (needs the extra ``mxdraft[train]``)."""
