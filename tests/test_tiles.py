# SPDX-License-Identifier: Apache-2.0
"""Tile order (runtime/BUNDLE.md): the page's own example, each element's place, and the way back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxdraft.bundle.tiles import from_tiles, tiled_nbytes, to_tiles
from mxdraft.mx import MXTensor, quantize


def random_tensor(format, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    scale = rng.integers(0, 255, (rows, columns // 32), np.uint8)
    if format == "mxfp4":
        return MXTensor(format, rng.integers(0, 256, (rows, columns // 2), np.uint8), scale, "floor")
    return MXTensor(format, rng.integers(-127, 128, (rows, columns), np.int8), scale, "floor")


def assert_same(a, b):
    assert a.format == b.format
    np.testing.assert_array_equal(a.data, b.data)
    np.testing.assert_array_equal(a.scale, b.scale)


def test_worked_example_of_the_format_page():
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = bytes([0x7F, *[0] * 15, 0x40, 0x51, 0x62, 0x73]) + bytes(272 - 20)
    assert to_tiles(quantize(x)).tobytes() == expected


def test_every_mxfp4_element_is_where_the_page_says():
    tensor = random_tensor("mxfp4", 35, 96)
    codes = np.stack([tensor.data & 15, tensor.data >> 4], axis=-1).reshape(35, 96)
    tiles = to_tiles(tensor)
    assert tiles.shape == (3, 3, 272)
    for row, column in np.ndindex(35, 96):
        block = tiles[row // 16, column // 32]
        r, k = row % 16, column % 32
        byte = block[16 + 64 * (k // 8) + 4 * r + k % 4]
        assert (byte >> 4 if k % 8 >= 4 else byte & 15) == codes[row, column]
        assert block[r] == tensor.scale[row, column // 32]


def test_every_mxint8_element_is_where_the_page_says():
    tensor = random_tensor("mxint8", 17, 64)
    tiles = to_tiles(tensor)
    assert tiles.shape == (2, 2, 528)
    for row, column in np.ndindex(17, 64):
        block = tiles[row // 16, column // 32]
        r, k = row % 16, column % 32
        assert block[16 + 64 * (k // 4) + 4 * r + k % 4].view(np.int8) == tensor.data[row, column]
        assert block[r] == tensor.scale[row, column // 32]


@pytest.mark.parametrize(("format", "block"), [("mxfp4", 272), ("mxint8", 528)])
def test_rows_are_padded_with_zero_blocks(format, block):
    tiles = to_tiles(random_tensor(format, 3, 32)).reshape(block)
    assert not tiles[3:16].any()
    assert not tiles[16:].reshape(-1, 16, 4)[:, 3:].any()


@given(
    format=st.sampled_from(["mxfp4", "mxint8"]),
    shape=hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=50),
    seed=st.integers(0, 99),
)
def test_there_and_back(format, shape, seed):
    rows, columns = shape[0], 32 * shape[1]
    tensor = random_tensor(format, rows, columns, seed)
    tiles = to_tiles(tensor)
    assert tiles.nbytes == tiled_nbytes(format, rows, columns)
    assert_same(from_tiles(tiles.reshape(-1), format, rows, columns), tensor)


def test_wrong_size_is_refused():
    with pytest.raises(ValueError, match="271 bytes"):
        from_tiles(np.zeros(271, np.uint8), "mxfp4", 16, 32)
