/* SPDX-License-Identifier: Apache-2.0 */
/* NEON with 8-bit matrix products and dot products (armv8.6-a i8mm: Cortex-A510, A710, Neoverse V1). Only this file may
 * use i8mm. A few rows are multiplied as at the dotprod level; many rows in pairs, since smmla multiplies 2 x 8 by 8 x
 * 2 numbers. */
#include "neon.h"

#if defined(__aarch64__)

#define TARGET __attribute__((target("dotprod,i8mm")))
#define KERNEL(op) mxd_##op##_i8mm
enum { FEW_ROWS = 4, PASS_ROWS = 4 };

#include "dotprod_template.h"

/* Element j of every array: rows 2j and 2j+1 of the tile. */
typedef struct decoded_block {
    float32x4_t scale[8]; /* of 2j, 2j+1, 2j, 2j+1, times the format's unit: exact */
    int8x16_t w[8][4];    /* 8 columns of row 2j, then of 2j+1; 4 times */
} decoded_block;

enum { STRIP = 16, VECTORS = 4 };

INLINE TARGET void decode_block(elements form, const uint8_t *base, const uint8_t *residual, decoded_block *out) {
    float32x4_t scale[4];
    const weights w = weights_at(form, base, residual);
    load_scales(form == SUM ? residual : base, scale);
    UNROLL for (int v = 0; v < 4; v++) {
        float64x2_t s = vreinterpretq_f64_f32(vmulq_n_f32(scale[v], unit_of(form)));
        out->scale[2 * v] = vreinterpretq_f32_f64(vdupq_laneq_f64(s, 0));
        out->scale[2 * v + 1] = vreinterpretq_f32_f64(vdupq_laneq_f64(s, 1));
        UNROLL for (int pair = 0; pair < 4; pair++) {
            int8x16x2_t columns = load_pair(form, &w, pair, v);
            int32x4_t left = vreinterpretq_s32_s8(columns.val[0]), right = vreinterpretq_s32_s8(columns.val[1]);
            out->w[2 * v][pair] = vreinterpretq_s8_s32(vzip1q_s32(left, right));
            out->w[2 * v + 1][pair] = vreinterpretq_s8_s32(vzip2q_s32(left, right));
        }
    }
}

/* Interleave two activation rows: 8 columns of one, then of the other. */
INLINE TARGET void interleave(const int8_t *a, const int8_t *b, int8x16_t out[4]) {
    UNROLL for (int half = 0; half < 2; half++) {
        int64x2_t left = vreinterpretq_s64_s8(vld1q_s8(a + 16 * half));
        int64x2_t right = vreinterpretq_s64_s8(vld1q_s8(b + 16 * half));
        out[2 * half] = vreinterpretq_s8_s64(vzip1q_s64(left, right));
        out[2 * half + 1] = vreinterpretq_s8_s64(vzip2q_s64(left, right));
    }
}

/* vmmlaq_s32 that stays where it is, as DOT does. */
#define PAIR_DOT(d, q, w) __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(d) : "w"(q), "w"(w))

/* Add a block's products to acc[p][j], for P pairs of activation rows `step` rows apart (0: a row with itself) and tile
 * rows 2*(j0+j), 2*(j0+j)+1. */
INLINE TARGET void multiply_pairs(const decoded_block *w, const some_rows *x, int P, size_t step, int j0,
                                  float32x4_t acc[2][VECTORS]) {
    int32x4_t d[2][VECTORS];
    int8x16_t q[2][4];
    UNROLL for (int p = 0; p < P; p++) {
        const int8_t *first = x->q + 2 * (size_t)p * x->stride * BLOCK;
        interleave(first, first + step * x->stride * BLOCK, q[p]);
        UNROLL for (int j = 0; j < VECTORS; j++) d[p][j] = vdupq_n_s32(0);
    }
    UNROLL for (int j = 0; j < VECTORS; j++) {
        int8x16_t row_pair[4];
        UNROLL for (int i = 0; i < 4; i++) row_pair[i] = w->w[j0 + j][i];
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int p = 0; p < P; p++) PAIR_DOT(d[p][j], q[p][i], row_pair[i]);
    }
    UNROLL for (int p = 0; p < P; p++) {
        const float *first = x->s + 2 * (size_t)p * x->stride;
        float32x4_t s = vcombine_f32(vld1_dup_f32(first), vld1_dup_f32(first + step * x->stride));
        UNROLL for (int j = 0; j < VECTORS; j++)
            acc[p][j] = vfmaq_f32(acc[p][j], vcvtq_f32_s32(d[p][j]), vmulq_f32(w->scale[j0 + j], s));
    }
}

/* Add the products of P pairs of rows with a strip to their y, half a tile at a time. */
INLINE TARGET void strip_pairs(const decoded_block *strip, size_t blocks, some_rows first, int P, size_t step, float *y,
                               size_t ldy) {
    for (int j0 = 0; j0 < 8; j0 += VECTORS) {
        float32x4_t acc[2][VECTORS];
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int j = 0; j < VECTORS; j++) {
                const float *at = y + 2 * (size_t)p * ldy + 2 * (j0 + j);
                acc[p][j] = vcombine_f32(vld1_f32(at), vld1_f32(at + step * ldy));
            }
        some_rows rows = first;
        for (size_t b = 0; b < blocks; b++, next_block(&rows)) multiply_pairs(&strip[b], &rows, P, step, j0, acc);
        UNROLL for (int p = 0; p < P; p++)
            UNROLL for (int j = 0; j < VECTORS; j++) {
                float *at = y + 2 * (size_t)p * ldy + 2 * (j0 + j);
                vst1_f32(at, vget_low_f32(acc[p][j]));
                if (step) vst1_f32(at + ldy, vget_high_f32(acc[p][j]));
            }
    }
}

INLINE TARGET void walk_strip(elements form, const decoded_block *strip, size_t blocks, const mxd_act *x,
                              size_t nblocks, size_t b, size_t rows, float *y, size_t ldy) {
    (void)form; /* decoded blocks are all alike */
    size_t m = 0;
#define PAIRS(P, step) strip_pairs(strip, blocks, rows_at(x, nblocks, m, b), P, step, y + m * ldy, ldy)
    for (; m + 4 <= rows; m += 4) PAIRS(2, 1);
    for (; m + 2 <= rows; m += 2) PAIRS(1, 1);
    if (m < rows) PAIRS(1, 0);
#undef PAIRS
}

#define OWN_STRIPS
#include "matmul_template.h"

void mxd_kernels_init_i8mm(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, i8mm);
    MXD_BIND(k, n, matmul_mxint8, i8mm);
}

#endif
