/* Matrix products of a NEON level: the loops over tiles and rows around its block_mxfp4 and block_mxint8. Included
 * once by each level's file, behind those two, with TARGET (attribute of every function) and MATMUL(format) (name)
 * defined. */

/* R activation rows through one tile; residual may be NULL. */
INLINE TARGET void rows_mxfp4(const uint8_t *base, const uint8_t *residual, size_t nblocks, const mxd_act *x, size_t m0,
                              int R, int digits, float *y, size_t ldy) {
    float32x4_t acc[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    for (size_t b = 0; b < nblocks; b++) {
        block_mxfp4(base + b * FP4_BYTES, x, nblocks, b, m0, R, digits, acc);
        if (residual) block_mxfp4(residual + b * FP4_BYTES, x, nblocks, b, m0, R, digits, acc);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) vst1q_f32(y + (m0 + (size_t)r) * ldy + 4 * v, acc[r][v]);
}

INLINE TARGET void rows_mxint8(const uint8_t *tile, size_t nblocks, const mxd_act *x, size_t m0, int R, int digits,
                               float *y, size_t ldy) {
    float32x4_t acc[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    for (size_t b = 0; b < nblocks; b++) block_mxint8(tile + b * INT8_BYTES, x, nblocks, b, m0, R, digits, acc);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) vst1q_f32(y + (m0 + (size_t)r) * ldy + 4 * v, acc[r][v]);
}

/* Tile by tile: a tile's weights stay in the first-level cache for all rows. */
TARGET static void MATMUL(mxfp4)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                 const mxd_act *x, size_t rows, float *y, size_t ldy) {
    for (size_t t = 0; t < ntiles; t++) {
        const uint8_t *p0 = base + t * nblocks * FP4_BYTES;
        const uint8_t *p1 = residual ? residual + t * nblocks * FP4_BYTES : NULL;
#define GROUP(m, R, digits) rows_mxfp4(p0, p1, nblocks, x, m, R, digits, y + t * TILE, ldy)
        MXD_ROW_GROUPS(rows, x->lo, GROUP);
#undef GROUP
    }
}

TARGET static void MATMUL(mxint8)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                  const mxd_act *x, size_t rows, float *y, size_t ldy) {
    (void)residual;
    for (size_t t = 0; t < ntiles; t++) {
        const uint8_t *tile = base + t * nblocks * INT8_BYTES;
#define GROUP(m, R, digits) rows_mxint8(tile, nblocks, x, m, R, digits, y + t * TILE, ldy)
        MXD_ROW_GROUPS(rows, x->lo, GROUP);
#undef GROUP
    }
}
