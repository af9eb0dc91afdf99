/* Matrix products of an x86 level, around its `tile_rows`. Included once by each level's file, with these defined:
 *
 *   TARGET             attribute of every function
 *   MATMUL(format)     name of a product
 *   UNITS, GROUP_ROWS  most digit rows in one pass over a decoded block; most activation rows that share one
 *   tile_rows(is_fp4, base, residual, nblocks, t, x, m, R, digits, y, ldy)   R activation rows from m through tile t;
 *                      residual may be NULL */

/* Tile by tile: a tile's weights stay in the first-level cache for all rows. Few rows are constants, so that their
 * accumulators stay in registers. */
INLINE void matmul(int is_fp4, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                   const mxd_act *x, size_t rows, int digits, float *y, size_t ldy) {
    for (size_t t = 0; t < ntiles; t++)
        for (size_t m = 0, R; m < rows; m += R) {
            R = rows - m < GROUP_ROWS ? rows - m : GROUP_ROWS;
#define ROWS(n) tile_rows(is_fp4, base, residual, nblocks, t, x, m, n, digits, y, ldy)
            if (R == 1) ROWS(1);
            else if (R == 2) ROWS(2);
            else if (R == 3 && 3 * digits <= UNITS) ROWS(3);
            else if (R == 4 && 4 * digits <= UNITS) ROWS(4);
            else ROWS(R);
#undef ROWS
        }
}

TARGET static void MATMUL(mxfp4)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                 const mxd_act *x, size_t rows, float *y, size_t ldy) {
    if (x->lo) matmul(1, base, residual, nblocks, ntiles, x, rows, 2, y, ldy);
    else matmul(1, base, residual, nblocks, ntiles, x, rows, 1, y, ldy);
}

TARGET static void MATMUL(mxint8)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                  const mxd_act *x, size_t rows, float *y, size_t ldy) {
    (void)residual;
    if (x->lo) matmul(0, base, NULL, nblocks, ntiles, x, rows, 2, y, ldy);
    else matmul(0, base, NULL, nblocks, ntiles, x, rows, 1, y, ldy);
}
