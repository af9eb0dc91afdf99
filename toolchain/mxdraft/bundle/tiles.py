# SPDX-License-Identifier: Apache-2.0
"""Kernel tile order (runtime/BUNDLE.md, "Tile order"): how a bundle stores MXFP4T and MXINT8T tensors.

Rows go in tiles of 16, columns in blocks of 32; each 16 x 32 block holds its 16 scales, then its elements in
groups of 64 bytes. The axes of the arrays below are: t tile, r row in the tile, b block, g group, h nibble
(0 low), j column in the group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mxdraft.mx import BLOCK, Format, MXTensor, Rule

TILE_ROWS = 16
BLOCK_BYTES: dict[Format, int] = {
    "mxfp4": TILE_ROWS + TILE_ROWS * BLOCK // 2,
    "mxint8": TILE_ROWS + TILE_ROWS * BLOCK,
}


def tiled_nbytes(format: Format, rows: int, columns: int) -> int:
    """Return the bytes of a [rows, columns] tensor in tile order; ``columns`` is a multiple of 32."""
    return -(-rows // TILE_ROWS) * (columns // BLOCK) * BLOCK_BYTES[format]


def to_tiles(tensor: MXTensor) -> NDArray[np.uint8]:
    """Put a [N, K] tensor in tile order, uint8 [ceil(N/16), K/32, bytes of a block]."""
    rows, columns = tensor.shape
    tiles, blocks = -(-rows // TILE_ROWS), columns // BLOCK
    scale = _pad_rows(tensor.scale, tiles).reshape(tiles, TILE_ROWS, blocks)
    data = _pad_rows(tensor.data.view(np.uint8), tiles)
    if tensor.format == "mxfp4":
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(tiles, TILE_ROWS, blocks, 4, 2, 4)
        groups = codes[..., 0, :] | codes[..., 1, :] << 4  # [t, r, b, g, j]
    else:
        groups = data.reshape(tiles, TILE_ROWS, blocks, 8, 4)
    out = np.empty((tiles, blocks, BLOCK_BYTES[tensor.format]), np.uint8)
    out[..., :TILE_ROWS] = scale.transpose(0, 2, 1)
    out[..., TILE_ROWS:] = groups.transpose(0, 2, 3, 1, 4).reshape(tiles, blocks, -1)
    return out


def from_tiles(
    buffer: NDArray[np.uint8], format: Format, rows: int, columns: int, rule: Rule = "floor"
) -> MXTensor:
    """Take a [rows, columns] tensor from ``buffer``, its bytes in tile order; the padding rows are dropped.

    ``rule``: how its scales were chosen, which the bytes do not tell. Raises ValueError if the buffer's size
    is not that of the shape.
    """
    if buffer.size != tiled_nbytes(format, rows, columns):
        raise ValueError(f"{buffer.size} bytes for a {format} tensor of {rows} x {columns}")
    blocks = columns // BLOCK
    tiled = buffer.reshape(-1, blocks, BLOCK_BYTES[format])
    scale = tiled[..., :TILE_ROWS].transpose(0, 2, 1).reshape(-1, blocks)
    groups = tiled[..., TILE_ROWS:].reshape(len(tiled), blocks, -1, TILE_ROWS, 4).transpose(0, 3, 1, 2, 4)
    if format == "mxfp4":
        codes = np.stack([groups & 15, groups >> 4], axis=-2).reshape(-1, columns)  # [t r, b g h j]
        data: NDArray[np.uint8] | NDArray[np.int8] = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        data = groups.reshape(-1, columns).view(np.int8)
    return MXTensor(format, data[:rows], scale[:rows], rule)


def _pad_rows(array: NDArray[np.uint8], tiles: int) -> NDArray[np.uint8]:
    missing = tiles * TILE_ROWS - len(array)
    return np.pad(array, ((0, missing), (0, 0))) if missing else array
