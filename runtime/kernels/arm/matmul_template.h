/* This file is a template: the matrix products of a NEON level, around its `dots`. The level's file includes it once,
 * with these defined:
 *
 *   TARGET              attribute of every function
 *   KERNEL(op)          name of a kernel
 *   FEW_UNITS, UNITS    most digit rows in one pass over packed and over decoded weights: powers of two
 *   VECTORS             how many vectors (4 rows of the tile) one pass over decoded weights takes: 2 or 4
 *   dots(form, w, q, units, v0, V, d)
 *                       d[u][v] = dot products of digit row q[u] with rows 4*(v0+v) .. 4*(v0+v)+3 of the block whose
 *                       elements are at w, for v < V; inlined with form, units, v0 and V as constants
 *   OWN_STRIPS          only if the level has a decoded_block, decode_block and walk_strip of its own */

/* Add a block's products: acc[r][v] = fma(dot, scale[v] * (s * unit), acc[r][v]) for R activation rows and V vectors of
 * the tile from v0 on. */
INLINE TARGET void multiply_block(elements form, const uint8_t *w, const float32x4_t *scale, float unit,
                                  const some_rows *x, int R, int digits, int v0, int V, float32x4_t (*acc)[4]) {
    const int8_t *q[UNITS];
    int32x4_t d[UNITS][4];
    UNROLL for (int r = 0; r < R; r++) {
        q[r] = x->q + (size_t)r * x->stride * BLOCK;
        if (digits == 2) q[R + r] = x->lo + (size_t)r * x->stride * BLOCK;
    }
    dots(form, w, q, R * digits, v0, V, d);
    UNROLL for (int r = 0; r < R; r++) {
        float s = x->s[(size_t)r * x->stride] * unit;
        UNROLL for (int v = 0; v < V; v++) {
            int32x4_t dot = digits == 2 ? vmlaq_n_s32(d[R + r][v], d[r][v], MXD_ACT_DIGIT) : d[r][v];
            acc[r][v] = vfmaq_f32(acc[r][v], vcvtq_f32_s32(dot), vmulq_n_f32(scale[v], s));
        }
    }
}

/* ---- few rows: weights are decoded as they are used ---- */

/* Multiply R activation rows, from row m on, by one tile. */
INLINE TARGET void few_rows(elements form, const uint8_t *const tile[2], int planes, size_t nblocks, const mxd_act *x,
                            size_t m, int R, int digits, float *y, size_t ldy) {
    float32x4_t acc[UNITS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    some_rows rows = rows_at(x, nblocks, m, 0);
    for (size_t b = 0; b < nblocks; b++, next_block(&rows))
        UNROLL for (int p = 0; p < planes; p++) {
            const uint8_t *block = tile[p] + b * (form == PACKED ? FP4_BYTES : INT8_BYTES);
            float32x4_t scale[4];
            load_scales(block, scale);
            multiply_block(form, block + TILE, scale, unit_of(form), &rows, R, digits, 0, 4, acc);
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

INLINE TARGET void decode_block(elements form, const uint8_t *block, decoded_block *out) {
    load_scales(block, out->scale);
    UNROLL for (int v = 0; v < 4; v++) out->scale[v] = vmulq_n_f32(out->scale[v], unit_of(form));
    UNROLL for (int pair = 0; pair < 4; pair++)
        UNROLL for (int v = 0; v < 4; v++) {
            int8x16x2_t bytes = load_pair(form, block + TILE, pair, v);
            vst1q_s8((int8_t *)out->w + 128 * pair + 16 * v, bytes.val[0]);
            vst1q_s8((int8_t *)out->w + 128 * pair + 64 + 16 * v, bytes.val[1]);
        }
}

/* Add the products of R rows with a strip to their y, VECTORS of the tile at a time, so that their accumulators stay in
 * registers. */
INLINE TARGET void strip_rows(elements form, const decoded_block *strip, int planes, size_t blocks, some_rows first,
                              int R, int digits, float *y, size_t ldy) {
    for (int v0 = 0; v0 < 4; v0 += VECTORS) {
        float32x4_t acc[UNITS][4];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = vld1q_f32(y + (size_t)r * ldy + 4 * (v0 + v));
        some_rows rows = first;
        const decoded_block *block = strip;
        for (size_t b = 0; b < blocks; b++, next_block(&rows))
            UNROLL for (int p = 0; p < planes; p++, block++)
                multiply_block(form, block->w, block->scale + v0, 1, &rows, R, digits, v0, VECTORS, acc);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) vst1q_f32(y + (size_t)r * ldy + 4 * (v0 + v), acc[r][v]);
    }
}

/* Add the products of all rows with a strip, blocks b .. b + blocks - 1 of a tile, to their y. */
INLINE TARGET void walk_strip(elements form, const decoded_block *strip, int planes, size_t blocks, const mxd_act *x,
                              size_t nblocks, size_t b, size_t rows, int digits, float *y, size_t ldy) {
    size_t m = 0;
#define ROWS(n)                                                                                                  \
    strip_rows(form == PACKED ? DECODED : form, strip, planes, blocks, rows_at(x, nblocks, m, b), n, digits,     \
               y + m * ldy, ldy)
    for (; m + UNITS / digits <= rows; m += UNITS / digits) ROWS(UNITS / digits);
    if (UNITS / digits > 2 && rows - m >= 2) {
        ROWS(2);
        m += 2;
    }
    if (rows - m) ROWS(1);
#undef ROWS
}

#endif

INLINE TARGET void many_rows(elements form, const uint8_t *const tile[2], int planes, size_t nblocks, const mxd_act *x,
                             size_t rows, int digits, float *y, size_t ldy) {
    decoded_block strip[STRIP];
    for (size_t m = 0; m < rows; m++)
        for (size_t i = 0; i < TILE; i++) y[m * ldy + i] = 0;
    for (size_t b = 0, blocks; b < nblocks; b += blocks) {
        blocks = nblocks - b < (size_t)(STRIP / planes) ? nblocks - b : (size_t)(STRIP / planes);
        for (size_t i = 0; i < blocks; i++)
            for (int p = 0; p < planes; p++)
                decode_block(form, tile[p] + (b + i) * (form == PACKED ? FP4_BYTES : INT8_BYTES),
                             &strip[i * (size_t)planes + (size_t)p]);
        walk_strip(form, strip, planes, blocks, x, nblocks, b, rows, digits, y, ldy);
    }
}

/* Multiply tile by tile: a tile's weights stay in the first-level cache for all rows. */
INLINE TARGET void matmul(elements form, const uint8_t *const plane[2], int planes, size_t nblocks, size_t ntiles,
                          const mxd_act *x, size_t rows, int digits, float *y, size_t ldy) {
    const size_t tile_bytes = nblocks * (form == PACKED ? FP4_BYTES : INT8_BYTES);
    for (size_t t = 0; t < ntiles; t++, y += TILE) {
        const uint8_t *const tile[2] = {plane[0] + t * tile_bytes, planes == 2 ? plane[1] + t * tile_bytes : NULL};
#define FEW(n) few_rows(form, tile, planes, nblocks, x, 0, n, digits, y, ldy)
        if (rows == 1) FEW(1);
        else if (rows == 2 && 2 * digits <= FEW_UNITS) FEW(2);
        else if (rows == 3 && 3 * digits <= FEW_UNITS) FEW(3);
        else if (rows == 4 && 4 * digits <= FEW_UNITS) FEW(4);
        else many_rows(form, tile, planes, nblocks, x, rows, digits, y, ldy);
#undef FEW
    }
}

TARGET static void KERNEL(matmul_mxfp4)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                        const mxd_act *x, size_t rows, float *y, size_t ldy) {
    const uint8_t *const plane[2] = {base, residual};
    const mxd_act act = *x; /* a copy that no store can alias */
    if (x->lo && residual) matmul(PACKED, plane, 2, nblocks, ntiles, &act, rows, 2, y, ldy);
    else if (x->lo) matmul(PACKED, plane, 1, nblocks, ntiles, &act, rows, 2, y, ldy);
    else if (residual) matmul(PACKED, plane, 2, nblocks, ntiles, &act, rows, 1, y, ldy);
    else matmul(PACKED, plane, 1, nblocks, ntiles, &act, rows, 1, y, ldy);
}

TARGET static void KERNEL(matmul_mxint8)(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                         const mxd_act *x, size_t rows, float *y, size_t ldy) {
    const uint8_t *const plane[2] = {base, residual};
    const mxd_act act = *x; /* a copy that no store can alias */
    if (x->lo) matmul(INT8, plane, 1, nblocks, ntiles, &act, rows, 2, y, ldy);
    else matmul(INT8, plane, 1, nblocks, ntiles, &act, rows, 1, y, ldy);
}
