/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: the matrix products of a NEON level, around its `dots`. The level's file includes it once,
 * with these defined:
 *
 *   TARGET              attribute of every function
 *   KERNEL(op)          name of a kernel
 *   FEW_ROWS, PASS_ROWS most activation rows in one pass over packed and over decoded weights: powers of two
 *   VECTORS             how many vectors (4 rows of the tile) one pass over decoded weights takes: 2 or 4
 *   dots(form, w, q, R, v0, V, d)
 *                       d[r][v] = dot products of activation row q[r] with rows 4*(v0+v) .. 4*(v0+v)+3 of the block
 *                       whose elements are w, for r < R and v < V; inlined with form, R, v0 and V as constants
 *   OWN_STRIPS          only if the level has a decoded_block, decode_block and walk_strip of its own */

/* Add a block's products: acc[r][v] = fma(dot, scale[v] * (s * unit), acc[r][v]) for R activation rows and V vectors of
 * the tile from v0 on. */
INLINE TARGET void multiply_block(elements form, const weights *w, const float32x4_t *scale, float unit,
                                  const some_rows *x, int R, int v0, int V, float32x4_t (*acc)[4]) {
    const int8_t *q[PASS_ROWS];
    int32x4_t d[PASS_ROWS][4];
    UNROLL for (int r = 0; r < R; r++) q[r] = x->q + (size_t)r * x->stride * BLOCK;
    dots(form, w, q, R, v0, V, d);
    UNROLL for (int r = 0; r < R; r++) {
        float s = x->s[(size_t)r * x->stride] * unit;
        UNROLL for (int v = 0; v < V; v++)
            acc[r][v] = vfmaq_f32(acc[r][v], vcvtq_f32_s32(d[r][v]), vmulq_n_f32(scale[v], s));
    }
}

/* ---- few rows: weights are decoded as they are used ---- */

/* Multiply R activation rows by one tile. */
INLINE TARGET void few_rows(elements form, const uint8_t *base, const uint8_t *residual, size_t nblocks,
                            const mxd_act *x, int R, float *y, size_t ldy) {
    float32x4_t acc[PASS_ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    some_rows rows = rows_at(x, nblocks, 0, 0);
    for (size_t b = 0; b < nblocks; b++, next_block(&rows)) {
        float32x4_t scale[4];
        const weights w = weights_at(form, base, residual);
        load_scales(form == SUM ? residual : base, scale);
        multiply_block(form, &w, scale, unit_of(form), &rows, R, 0, 4, acc);
        base += bytes_of(form);
        if (form == SUM) residual += bytes_of(form);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 4; v++) vst1q_f32(y + (size_t)r * ldy + 4 * v, acc[r][v]);
}

#ifndef OWN_STRIPS

/* ---- many rows: they share a decoded strip of the tile ---- */

typedef struct decoded_block {
    float32x4_t scale[4]; /* times the format's unit, a power of two: exact */
    uint8_t w[TILE * BLOCK];
} decoded_block;

enum { STRIP = 16 }; /* blocks */

INLINE TARGET void decode_block(elements form, const uint8_t *base, const uint8_t *residual, decoded_block *out) {
    const weights w = weights_at(form, base, residual);
    load_scales(form == SUM ? residual : base, out->scale);
    UNROLL for (int v = 0; v < 4; v++) out->scale[v] = vmulq_n_f32(out->scale[v], unit_of(form));
    UNROLL for (int pair = 0; pair < 4; pair++)
        UNROLL for (int v = 0; v < 4; v++) {
            int8x16x2_t bytes = load_pair(form, &w, pair, v);
            vst1q_s8((int8_t *)out->w + 128 * pair + 16 * v, bytes.val[0]);
            vst1q_s8((int8_t *)out->w + 128 * pair + 64 + 16 * v, bytes.val[1]);
        }
}

/* Add the products of R rows with a strip to their y, VECTORS of the tile at a time, so that their accumulators stay in
 * registers. */
INLINE TARGET void strip_rows(elements form, const decoded_block *strip, size_t blocks, some_rows first, int R,
                              float *y, size_t ldy) {
    for (int v0 = 0; v0 < 4; v0 += VECTORS) {
        float32x4_t acc[PASS_ROWS][4];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = vld1q_f32(y + (size_t)r * ldy + 4 * (v0 + v));
        some_rows rows = first;
        for (size_t b = 0; b < blocks; b++, next_block(&rows)) {
            const weights w = {.w = strip[b].w};
            multiply_block(form, &w, strip[b].scale + v0, 1, &rows, R, v0, VECTORS, acc);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) vst1q_f32(y + (size_t)r * ldy + 4 * (v0 + v), acc[r][v]);
    }
}

/* Add the products of all rows with a strip, blocks b .. b + blocks - 1 of a tile, to their y. */
INLINE TARGET void walk_strip(elements form, const decoded_block *strip, size_t blocks, const mxd_act *x,
                              size_t nblocks, size_t b, size_t rows, float *y, size_t ldy) {
    size_t m = 0;
#define ROWS(n)                                                                                              \
    strip_rows(form == PACKED ? DECODED : INT8, strip, blocks, rows_at(x, nblocks, m, b), n, y + m * ldy, ldy)
    for (; m + PASS_ROWS <= rows; m += PASS_ROWS) ROWS(PASS_ROWS);
    if (PASS_ROWS > 2 && rows - m >= 2) {
        ROWS(2);
        m += 2;
    }
    if (rows - m) ROWS(1);
#undef ROWS
}

#endif

INLINE TARGET void many_rows(elements form, const uint8_t *base, const uint8_t *residual, size_t nblocks,
                             const mxd_act *x, size_t rows, float *y, size_t ldy) {
    decoded_block strip[STRIP];
    for (size_t m = 0; m < rows; m++)
        for (size_t i = 0; i < TILE; i++) y[m * ldy + i] = 0;
    for (size_t b = 0, blocks; b < nblocks; b += blocks) {
        blocks = nblocks - b < STRIP ? nblocks - b : STRIP;
        for (size_t i = 0; i < blocks; i++) {
            size_t offset = (b + i) * bytes_of(form);
            decode_block(form, base + offset, form == SUM ? residual + offset : NULL, &strip[i]);
        }
        walk_strip(form, strip, blocks, x, nblocks, b, rows, y, ldy);
    }
}

/* Multiply tile by tile: a tile's weights stay in the first-level cache for all rows. */
INLINE TARGET void matmul(elements form, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                          const mxd_act *x, size_t rows, float *y, size_t ldy) {
    const mxd_act act = *x; /* a copy that no store can alias */
    for (size_t t = 0; t < ntiles; t++, y += TILE) {
#define FEW(n) few_rows(form, base, residual, nblocks, &act, n, y, ldy)
        if (rows == 1) FEW(1);
        else if (rows == 2) FEW(2);
        else if (rows == 3 && FEW_ROWS >= 3) FEW(3);
        else if (rows == 4 && FEW_ROWS >= 4) FEW(4);
        else many_rows(form, base, residual, nblocks, &act, rows, y, ldy);
#undef FEW
        base += nblocks * bytes_of(form);
        if (form == SUM) residual += nblocks * bytes_of(form);
    }
}

TARGET static void KERNEL(matmul_mxfp4)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                        const mxd_act *x, size_t rows, float *y, size_t ldy) {
    if (residual) matmul(SUM, base, residual, nblocks, ntiles, x, rows, y, ldy);
    else matmul(PACKED, base, NULL, nblocks, ntiles, x, rows, y, ldy);
}

TARGET static void KERNEL(matmul_mxint8)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                         const mxd_act *x, size_t rows, float *y, size_t ldy) {
    (void)residual;
    matmul(INT8, base, NULL, nblocks, ntiles, x, rows, y, ldy);
}
