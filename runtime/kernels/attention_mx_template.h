/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: `attention_mx` of a level, around its `score_block` and `mix_mx`. The level's file includes
 * it once, with these defined next to those of attention_template.h (TARGET, KERNEL, LANES, HEADS, softmax):
 *
 *   VECTOR, ZERO, SCALED(v, s), STORE(p, v)            LANES f32 values; all 0; each times s; to p
 *   score_block(format, q, heads, row, d, b, acc)      acc[h] += scores of block b for the LANES keys at row[]
 *   mix_mx(format, weights, ldw, heads, span, d, b, acc)
 *                                                      acc[h] += weights times block b of a span's values */

/* Call a function with a span's format as its first argument, a constant. */
#define WITH_FORMAT(function, span, ...)                               \
    switch ((span)->format) {                                          \
    case MXD_ROW_MXINT8: function(MXD_ROW_MXINT8, __VA_ARGS__); break; \
    case MXD_ROW_MXFP4: function(MXD_ROW_MXFP4, __VA_ARGS__); break;   \
    default: function(MXD_ROW_NORMAL4, __VA_ARGS__); break;            \
    }

enum { BLOCK_VECTORS = BLOCK / LANES }; /* of a block */

/* Write the scores of `heads` query heads over a span, lds apart. Where fewer than LANES keys are left, the last one is
 * repeated. */
INLINE TARGET void score_mx(mxd_row_format format, const mxd_act *q, int heads, const mxd_span *span, size_t d,
                            float scale, float *scores, size_t lds) {
    const size_t stride = mxd_row_bytes(format, d);
    for (size_t j = 0; j < span->n; j += LANES) {
        const uint8_t *row[LANES];
        VECTOR acc[HEADS];
        size_t left = span->n - j < LANES ? span->n - j : LANES;
        row[0] = span->k + j * stride;
        for (size_t r = 1; r < LANES; r++) row[r] = row[r - 1] + (r < left ? stride : 0);
    UNROLL for (int h = 0; h < heads; h++) acc[h] = ZERO;
        for (size_t b = 0; b < d / BLOCK; b++) score_block(format, q, heads, row, d, b, acc);
        UNROLL for (int h = 0; h < heads; h++) {
            VECTOR t = SCALED(acc[h], scale);
            float *at = scores + (size_t)h * lds + j, few[LANES];
            if (left == LANES) {
                STORE(at, t);
            } else {
                STORE(few, t);
                memcpy(at, few, left * sizeof *at);
            }
        }
    }
}

INLINE TARGET void attend_mx(const mxd_act *q, int heads, const mxd_span *spans, size_t count, size_t n, size_t d,
                             float scale, float *scores, float *out) {
    float *at = scores, inverse[HEADS];
    for (const mxd_span *s = spans; s < spans + count; at += s->n, s++) {
        WITH_FORMAT(score_mx, s, q, heads, s, d, scale, at, n)
    }
    for (int h = 0; h < heads; h++) inverse[h] = softmax(scores + (size_t)h * n, n);
    for (size_t b = 0; b < d / BLOCK; b++) {
        VECTOR acc[HEADS][BLOCK_VECTORS];
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int i = 0; i < BLOCK_VECTORS; i++) acc[h][i] = ZERO;
        at = scores;
        for (const mxd_span *s = spans; s < spans + count; at += s->n, s++) {
            WITH_FORMAT(mix_mx, s, at, n, heads, s, d, b, acc)
        }
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int i = 0; i < BLOCK_VECTORS; i++)
                STORE(out + (size_t)h * d + b * BLOCK + LANES * (size_t)i, SCALED(acc[h][i], inverse[h]));
    }
}

/* Take up to HEADS query heads at a time over all spans, n rows together. */
TARGET static void KERNEL(attention_mx)(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d,
                                        float scale, float *scores, float *out) {
    size_t n = 0, nblocks = d / BLOCK;
    mxd_act some = *q;
    for (size_t s = 0; s < count; s++) n += spans[s].n;
    for (; heads >= HEADS; heads -= HEADS, scores += HEADS * n, out += HEADS * d) {
        attend_mx(&some, HEADS, spans, count, n, d, scale, scores, out);
        some.q += HEADS * d;
        some.s += HEADS * nblocks;
        some.bias += HEADS * nblocks * 2;
    }
    if (heads == 2) attend_mx(&some, 2, spans, count, n, d, scale, scores, out);
    if (heads == 1) attend_mx(&some, 1, spans, count, n, d, scale, scores, out);
}
