/* Attention over quantized rows of a NEON level, around its `dot32`: four keys at a time, one in each lane of the scores.
 * Included once by each level's file, with these defined:
 *
 *   TARGET         attribute of every function
 *   ATTENTION_MX   name of the function
 *   dot32(a, b)    four partial sums of the products of 32 integers each, a[2] and b[2], of -127 .. 127 */

/* 16 elements by code. */
INLINE int8x16_t element_table(mxd_row_format format) {
    static const int8_t normal4[16] = {MXD_NORMAL4_ELEMENTS};
    return format == MXD_ROW_MXFP4 ? e2m1_table() : vld1q_s8(normal4);
}

/* 32 elements of a row, integers in units of its format. */
INLINE void load_elements(mxd_row_format format, const uint8_t *p, int8x16_t half[2]) {
    if (format == MXD_ROW_MXINT8) {
        half[0] = vld1q_s8((const int8_t *)p);
        half[1] = vld1q_s8((const int8_t *)p + 16);
        return;
    }
    const int8x16_t table = element_table(format);
    uint8x16_t pairs = vld1q_u8(p);
    half[0] = vqtbl1q_s8(table, vandq_u8(pairs, vdupq_n_u8(15)));
    half[1] = vqtbl1q_s8(table, vshrq_n_u8(pairs, 4));
}

/* Scales of four blocks times the format's unit. */
INLINE float32x4_t row_scales(mxd_row_format format, uint32x4_t codes) {
    if (format == MXD_ROW_NORMAL4) {
        uint32x4_t bits = vshlq_n_u32(vaddq_u32(codes, vdupq_n_u32(MXD_NORMAL4_CODES)), 20);
        return vreinterpretq_f32_u32(vorrq_u32(bits, vceqq_u32(codes, vdupq_n_u32(MXD_CODE_FAULT)))); /* ones: NaN */
    }
    uint32x4_t bits = vmaxq_u32(vshlq_n_u32(codes, 23), vdupq_n_u32(0x00400000));
    return vmulq_n_f32(vreinterpretq_f32_u32(bits), format == MXD_ROW_MXFP4 ? 0.5f : 0.015625f);
}

/* acc[h] += scores of block b, of `heads` query heads (a constant) and four keys. */
INLINE TARGET void score_block(mxd_row_format format, const mxd_act *q, int heads, const uint8_t *const row[LANES],
                               size_t d, size_t b, float32x4_t acc[HEADS]) {
    const size_t nblocks = d / BLOCK, codes_at = nblocks * MXD_BLOCK_BYTES(format);
    uint32_t codes[LANES];
    int8x16_t key[LANES][2];
    UNROLL for (int r = 0; r < LANES; r++) {
        codes[r] = row[r][codes_at + b];
        load_elements(format, row[r] + b * MXD_BLOCK_BYTES(format), key[r]);
    }
    float32x4_t scale = row_scales(format, vld1q_u32(codes));
    UNROLL for (int h = 0; h < heads; h++) {
        size_t at = (size_t)h * nblocks + b;
        const int8x16_t digits[2] = {vld1q_s8(q->q + at * BLOCK), vld1q_s8(q->q + at * BLOCK + 16)};
        int32x4_t dots[LANES];
        UNROLL for (int r = 0; r < LANES; r++) dots[r] = dot32(key[r], digits);
        int32x4_t sum = vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
        acc[h] = vfmaq_f32(acc[h], vcvtq_f32_s32(sum), vmulq_n_f32(scale, q->s[at]));
    }
}

/* acc += weights times block b of a span's values. */
INLINE TARGET void mix_mx(mxd_row_format format, const float *weights, size_t ldw, int heads, const mxd_span *span,
                          size_t d, size_t b, float32x4_t acc[HEADS][8]) {
    const size_t stride = mxd_row_bytes(format, d), codes_at = d / BLOCK * MXD_BLOCK_BYTES(format);
    const uint8_t *row = span->v;
    for (size_t j = 0; j < span->n; j++, row += stride) {
        int8x16_t half[2];
        load_elements(format, row + b * MXD_BLOCK_BYTES(format), half);
        float scale = vgetq_lane_f32(row_scales(format, vdupq_n_u32(row[codes_at + b])), 0), w[HEADS];
        UNROLL for (int h = 0; h < heads; h++) w[h] = weights[(size_t)h * ldw + j] * scale;
        UNROLL for (int i = 0; i < 4; i++) {
            int16x8_t eight = i % 2 ? vmovl_high_s8(half[i / 2]) : vmovl_s8(vget_low_s8(half[i / 2]));
            float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight)));
            float32x4_t high = vcvtq_f32_s32(vmovl_high_s16(eight));
            UNROLL for (int h = 0; h < heads; h++) {
                acc[h][2 * i] = vfmaq_n_f32(acc[h][2 * i], low, w[h]);
                acc[h][2 * i + 1] = vfmaq_n_f32(acc[h][2 * i + 1], high, w[h]);
            }
        }
    }
}

#define VECTOR float32x4_t
#define ZERO vdupq_n_f32(0)
#define SCALED(v, s) vmulq_n_f32(v, s)
#define STORE(p, v) vst1q_f32(p, v)
#include "attention_mx.h"
