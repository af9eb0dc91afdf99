/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: the matrix products of an x86 level, around its `block_rows`. The level's file includes it
 * once, with these defined:
 *
 *   TARGET                 attribute of every function
 *   KERNEL(op)             name of a kernel
 *   PASS_ROWS, GROUP_ROWS  most activation rows in one pass over a decoded block; most that share one
 *   sums                   type of a row's 16 accumulators, one per row of the tile
 *   clear_sums(acc), store_sums(acc, y)
 *                          set them to 0; write them
 *   block_rows(is_fp4, base, residual, x, nblocks, at, R, acc)
 *                          acc[r] = fma(dot, scale * s, acc[r]) for R activation rows, the first of which has its block
 *                          at index `at`; `residual` is NULL, a constant, where there is one plane */

/* Weights come as one stream per plane: fetch what follows PREFETCH bytes later. */
enum { PREFETCH = 2048 };

INLINE void prefetch(const uint8_t *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)block + PREFETCH + i, _MM_HINT_T0);
}

/* Multiply R activation rows, from row m on, by tile t. `residual` may be NULL. */
INLINE void tile_rows(bool is_fp4, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t t,
                      const mxd_act *x, size_t m, size_t R, float *y, size_t ldy) {
    const size_t bytes = is_fp4 ? FP4_BYTES : INT8_BYTES;
    sums acc[GROUP_ROWS];
    for (size_t r = 0; r < R; r++) clear_sums(&acc[r]);
    for (size_t b = 0; b < nblocks; b++) {
        size_t offset = (t * nblocks + b) * bytes;
        prefetch(base + offset, bytes);
        if (residual) prefetch(residual + offset, bytes);
        block_rows(is_fp4, base + offset, residual ? residual + offset : NULL, x, nblocks, m * nblocks + b, R, acc);
    }
    for (size_t r = 0; r < R; r++) store_sums(&acc[r], y + (m + r) * ldy + t * TILE);
}

/* Multiply tile by tile: a tile's weights stay in the first-level cache for all rows. Small numbers of rows are
 * constants, so that their accumulators stay in registers. */
INLINE void matmul(bool is_fp4, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                   const mxd_act *x, size_t rows, float *y, size_t ldy) {
    for (size_t t = 0; t < ntiles; t++)
        for (size_t m = 0, R; m < rows; m += R) {
            R = rows - m < GROUP_ROWS ? rows - m : GROUP_ROWS;
#define ROWS(n) tile_rows(is_fp4, base, residual, nblocks, t, x, m, n, y, ldy)
            if (R == 1) ROWS(1);
            else if (R == 2) ROWS(2);
            else if (R == 3) ROWS(3);
            else if (R == 4) ROWS(4);
            else ROWS(R);
#undef ROWS
        }
}

TARGET static void KERNEL(matmul_mxfp4)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                        const mxd_act *x, size_t rows, float *y, size_t ldy) {
    if (residual) matmul(true, base, residual, nblocks, ntiles, x, rows, y, ldy);
    else matmul(true, base, NULL, nblocks, ntiles, x, rows, y, ldy);
}

TARGET static void KERNEL(matmul_mxint8)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                         const mxd_act *x, size_t rows, float *y, size_t ldy) {
    (void)residual;
    matmul(false, base, NULL, nblocks, ntiles, x, rows, y, ldy);
}
