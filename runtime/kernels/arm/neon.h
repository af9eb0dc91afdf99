/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces that the NEON levels share. */
#ifndef MXD_NEON_H
#define MXD_NEON_H

#include "../level.h"

#if defined(__aarch64__)

#include <arm_neon.h>

/* Forced, so that numbers of rows are constants and accumulators stay in registers. */
#define INLINE static inline __attribute__((always_inline))

#define VECTOR float32x4_t
#define INTEGERS int32x4_t
enum { LANES = 4 };

/* Load 16 scales, E8M0 bytes, as four vectors of f32. The maximum turns code 0 into the subnormal 2^-127. */
INLINE void load_scales(const uint8_t *p, float32x4_t scale[4]) {
    uint8x16_t codes = vld1q_u8(p);
    const uint16x8_t least = vdupq_n_u16(E8M0_LEAST >> 16); /* upper halves of the f32, as lo and hi are */
    uint16x8_t lo = vmaxq_u16(vshll_n_u8(vget_low_u8(codes), 7), least);
    uint16x8_t hi = vmaxq_u16(vshll_high_n_u8(codes, 7), least);
    scale[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(lo), 16));
    scale[1] = vreinterpretq_f32_u32(vshll_high_n_u16(lo, 16));
    scale[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(hi), 16));
    scale[3] = vreinterpretq_f32_u32(vshll_high_n_u16(hi, 16));
}

/* Return what nibbles decode to: E2M1 doubled. */
INLINE int8x16_t e2m1_table(void) {
    static const int8_t values[16] = {MXD_E2M1X2(0)};
    return vld1q_s8(values);
}

/* The form of a block's elements: nibbles; nibbles of two planes, to be added; bytes that were decoded from the nibbles
 * of one plane, within +-12; any bytes. */
typedef enum elements { PACKED, SUM, DECODED, INT8 } elements;

INLINE float unit_of(elements form) {
    return form == INT8 ? MXINT8_UNIT : MXFP4_UNIT;
}

INLINE size_t bytes_of(elements form) {
    return form == INT8 ? INT8_BYTES : FP4_BYTES;
}

/* A block's elements, without its scale codes. */
typedef struct weights {
    const uint8_t *w;
    const uint8_t *residual; /* SUM only, and so is what follows */
    int8x16_t power[4];      /* 2^rho of rows 4v .. 4v+3, each in four bytes */
} weights;

INLINE weights weights_at(elements form, const uint8_t *base, const uint8_t *residual) {
    weights out = {.w = base + TILE};
    if (form == SUM) {
        int8x16_t rho = vreinterpretq_s8_u8(vsubq_u8(vld1q_u8(base), vld1q_u8(residual)));
        int8x16_t power = vshlq_s8(vdupq_n_s8(1), rho);
        int16x8_t lo = vreinterpretq_s16_s8(vzip1q_s8(power, power));
        int16x8_t hi = vreinterpretq_s16_s8(vzip2q_s8(power, power));
        out.residual = residual + TILE;
        out.power[0] = vreinterpretq_s8_s16(vzip1q_s16(lo, lo));
        out.power[1] = vreinterpretq_s8_s16(vzip2q_s16(lo, lo));
        out.power[2] = vreinterpretq_s8_s16(vzip1q_s16(hi, hi));
        out.power[3] = vreinterpretq_s8_s16(vzip2q_s16(hi, hi));
    }
    return out;
}

/* Load columns 8*pair .. 8*pair+3 and the next four, of rows 4v .. 4v+3. */
INLINE int8x16x2_t load_pair(elements form, const weights *from, int pair, int v) {
    if (form == DECODED || form == INT8) {
        const int8_t *bytes = (const int8_t *)from->w + 128 * pair + 16 * v;
        return (int8x16x2_t){{vld1q_s8(bytes), vld1q_s8(bytes + 64)}};
    }
    const int8x16_t table = e2m1_table();
    uint8x16_t packed = vld1q_u8(from->w + 64 * pair + 16 * v);
    int8x16x2_t out = {{vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15))), vqtbl1q_s8(table, vshrq_n_u8(packed, 4))}};
    if (form == SUM) {
        packed = vld1q_u8(from->residual + 64 * pair + 16 * v);
        int8x16_t low = vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15)));
        int8x16_t high = vqtbl1q_s8(table, vshrq_n_u8(packed, 4));
        out.val[0] = vmlaq_s8(low, out.val[0], from->power[v]);
        out.val[1] = vmlaq_s8(high, out.val[1], from->power[v]);
    }
    return out;
}

/* Activation rows at one block: R of them, `stride` blocks apart. */
typedef struct some_rows {
    const int8_t *q;
    const float *s;
    size_t stride;
} some_rows;

INLINE some_rows rows_at(const mxd_act *x, size_t nblocks, size_t m, size_t b) {
    size_t at = m * nblocks + b;
    return (some_rows){x->q + at * BLOCK, x->s + at, nblocks};
}

INLINE void next_block(some_rows *x) {
    x->q += BLOCK;
    x->s++;
}

/* Reduce 16 lanes, held as four vectors, in the canonical order: lane i += i+8, then +4, +2, +1. */
INLINE float reduce16(const float32x4_t v[4]) {
    float32x4_t s4 = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
    float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

/* vminq and vmaxq return NaN for NaN, as the reference's comparisons do. */
INLINE float32x4_t exp4(float32x4_t x) {
    x = vminq_f32(x, vdupq_n_f32(EXP_MOST));
    x = vmaxq_f32(x, vdupq_n_f32(EXP_LEAST));
    float32x4_t n = vrndnq_f32(vmulq_n_f32(x, EXP_LOG2E));
    float32x4_t r = vfmsq_f32(x, n, vdupq_n_f32(EXP_LN2_HIGH)), p = vdupq_n_f32(EXP_TERM[0]);
    r = vfmsq_f32(r, n, vdupq_n_f32(EXP_LN2_LOW));
    UNROLL for (int i = 1; i < EXP_TERMS; i++) p = vfmaq_f32(vdupq_n_f32(EXP_TERM[i]), p, r);
    int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(p, vreinterpretq_f32_s32(power)); /* NaN: p is NaN already */
}

/* Query heads that share the conversion of keys and values: as many as registers hold. */
enum { HEADS = 3 };

/* Turn scores into weights; return the inverse of their sum. */
INLINE float softmax(float *scores, size_t n) {
    size_t j = 0;
    float32x4_t most = vdupq_n_f32(-INFINITY); /* vmaxnm ignores NaN, as the reference's comparison does */
    for (; j + 4 <= n; j += 4) most = vmaxnmq_f32(most, vld1q_f32(scores + j));
    float max = vmaxnmvq_f32(most);
    for (; j < n; j++) max = scores[j] > max ? scores[j] : max;
    j = 0;
    float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (; j + 16 <= n; j += 16)
        UNROLL for (size_t c = 0; c < 4; c++) {
            float32x4_t w = exp4(vsubq_f32(vld1q_f32(scores + j + 4 * c), vdupq_n_f32(max)));
            vst1q_f32(scores + j + 4 * c, w);
            sums[c] = vaddq_f32(sums[c], w);
        }
    float lane[16];
    UNROLL for (int c = 0; c < 4; c++) vst1q_f32(lane + 4 * c, sums[c]);
    for (; j < n; j++) {
        scores[j] = mxd_exp_ref(scores[j] - max);
        lane[j % 16] += scores[j];
    }
    UNROLL for (int c = 0; c < 4; c++) sums[c] = vld1q_f32(lane + 4 * c);
    return 1.0f / reduce16(sums);
}

#endif
#endif
