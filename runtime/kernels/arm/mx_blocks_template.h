/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: `score_block` and `mix_mx` of a NEON level, around its `dot32`, and with them `attention_mx`
 * (attention_mx_template.h): four keys at a time, one per lane of the scores. The level's file includes it once, with
 * these defined:
 *
 *   TARGET         attribute of every function
 *   KERNEL(op)     name of a kernel
 *   dot32(a, b)    four partial sums of the products of 32 integers, a[2] times b[2], of -127 .. 127 */

/* Return the elements by code. */
INLINE int8x16_t element_table(mxd_row_format format) {
    static const int8_t normal4[16] = {MXD_NORMAL4_ELEMENTS};
    return format == MXD_ROW_MXFP4 ? e2m1_table() : vld1q_s8(normal4);
}

/* Load 32 elements of a row, integers in units of its format. */
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

/* Return the scales of four blocks times the format's unit. */
INLINE float32x4_t row_scales(mxd_row_format format, uint32x4_t codes) {
    if (format == MXD_ROW_NORMAL4) {
        uint32x4_t bits = vshlq_n_u32(vaddq_u32(codes, vdupq_n_u32(MXD_NORMAL4_CODES)), 20);
        return vreinterpretq_f32_u32(vorrq_u32(bits, vceqq_u32(codes, vdupq_n_u32(MXD_CODE_FAULT)))); /* ones: NaN */
    }
    uint32x4_t bits = vmaxq_u32(vshlq_n_u32(codes, 23), vdupq_n_u32(E8M0_LEAST));
    return vmulq_n_f32(vreinterpretq_f32_u32(bits), format == MXD_ROW_MXFP4 ? MXFP4_UNIT : MXINT8_UNIT);
}

/* acc[h] += scores of block b for `heads` query heads (a constant) and four keys. */
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
        const int8x16_t query[2] = {vld1q_s8(q->q + at * BLOCK), vld1q_s8(q->q + at * BLOCK + 16)};
        int32x4_t dots[LANES];
        UNROLL for (int r = 0; r < LANES; r++) dots[r] = dot32(key[r], query);
        int32x4_t sum = vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
        acc[h] = vfmaq_f32(acc[h], vcvtq_f32_s32(sum), vmulq_n_f32(scale, q->s[at]));
    }
}

/* Return look-ups that move four of eight bytes to the tops of lanes and clear the rest. */
INLINE uint8x16x2_t top_bytes(void) {
    static const uint32_t first[4] = {0x00ffffff, 0x01ffffff, 0x02ffffff, 0x03ffffff};
    uint8x16x2_t t = {{vreinterpretq_u8_u32(vld1q_u32(first))}};
    t.val[1] = vaddq_u8(t.val[0], vreinterpretq_u8_u32(vdupq_n_u32(0x04000000)));
    __asm__("" : "+w"(t.val[0]), "+w"(t.val[1])); /* else the compiler reloads them for each row */
    return t;
}

/* Convert eight bytes to f32: at the top of a lane, with 24 bits of fraction, they need no widening. */
INLINE void bytes_to_f32(uint8x16x2_t top, const int8_t *p, float32x4_t f[2]) {
    int8x16_t bytes = vcombine_s8(vld1_s8(p), vdup_n_s8(0));
    UNROLL for (int i = 0; i < 2; i++)
        f[i] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(bytes, top.val[i])), 24);
}

/* The elements of a 4-bit format by code: the bytes of the upper halves of their f32. Lower halves are 0, since no
 * element is above 127. */
typedef struct f32_table {
    uint8x16_t low, high;
} f32_table;

INLINE f32_table make_f32_table(mxd_row_format format, uint8x16x2_t top) {
    int8_t elements[16];
    float32x4_t f[4];
    vst1q_s8(elements, element_table(format));
    bytes_to_f32(top, elements, f);
    bytes_to_f32(top, elements + 8, f + 2);
    uint8x16_t first = vreinterpretq_u8_u16(vuzp2q_u16(vreinterpretq_u16_f32(f[0]), vreinterpretq_u16_f32(f[1])));
    uint8x16_t last = vreinterpretq_u8_u16(vuzp2q_u16(vreinterpretq_u16_f32(f[2]), vreinterpretq_u16_f32(f[3])));
    return (f32_table){vuzp1q_u8(first, last), vuzp2q_u8(first, last)};
}

INLINE void codes_to_f32(f32_table table, uint8x16_t codes, float32x4_t f[4]) {
    uint8x16_t low = vqtbl1q_u8(table.low, codes), high = vqtbl1q_u8(table.high, codes);
    uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high)), last = vreinterpretq_u16_u8(vzip2q_u8(low, high));
    f[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(first), 16));
    f[1] = vreinterpretq_f32_u32(vshll_high_n_u16(first, 16));
    f[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(last), 16));
    f[3] = vreinterpretq_f32_u32(vshll_high_n_u16(last, 16));
}

/* out[r] = the heads' weights for row r times the scale of the row's block, for n rows, at most LANES. */
INLINE void scale_weights(mxd_row_format format, const float *weights, size_t ldw, int heads, const uint8_t *code,
                          size_t stride, size_t n, float32x4_t out[LANES]) {
    uint32_t codes[LANES] = {0};
    for (size_t r = 0; r < n; r++) codes[r] = code[r * stride];
    float32x4_t scale = row_scales(format, vld1q_u32(codes));
    float32x4x4_t w = {{scale, scale, scale, scale}}; /* lanes without a head are not used */
    UNROLL for (int h = 0; h < heads; h++) {
        float some[LANES] = {0};
        memcpy(some, weights + (size_t)h * ldw, n * sizeof *some);
        w.val[h] = vmulq_f32(vld1q_f32(some), scale);
    }
    vst4q_f32((float *)out, w);
}

/* vfmaq_laneq_f32 that stays where it is: on its own, the compiler converts too far ahead and spills accumulators. */
#define FMLA(acc, v, w, lane) __asm__ volatile("fmla %0.4s, %1.4s, %2.s[" #lane "]" : "+w"(acc) : "w"(v), "w"(w))

enum { GROUP = 64 }; /* rows whose weights are scaled at a time: a multiple of LANES */

/* acc[h] += weights times block b of a span's values. */
INLINE TARGET void mix_mx(mxd_row_format format, const float *weights, size_t ldw, int heads, const mxd_span *span,
                          size_t d, size_t b, float32x4_t acc[HEADS][8]) {
    const size_t stride = mxd_row_bytes(format, d), codes_at = d / BLOCK * MXD_BLOCK_BYTES(format);
    const uint8x16x2_t top = top_bytes();
    const f32_table table = make_f32_table(format, top);
    const uint8_t *row = span->v;
    for (size_t j = 0, n; j < span->n; j += n) {
        float32x4_t w[GROUP];
        size_t i = 0;
        n = span->n - j < GROUP ? span->n - j : GROUP;
#define SCALE(rows)                                                                                        \
    scale_weights(format, weights + j + i, ldw, heads, row + i * stride + codes_at + b, stride, rows, w + i)
        for (; i + LANES <= n; i += LANES) SCALE(LANES);
        if (i < n) SCALE(n - i);
#undef SCALE
        for (i = 0; i < n; i++, row += stride) {
            const uint8_t *block = row + b * MXD_BLOCK_BYTES(format);
            UNROLL for (int half = 0; half < 2; half++) {
                float32x4_t v[4];
                if (format == MXD_ROW_MXINT8) {
                    bytes_to_f32(top, (const int8_t *)block + 16 * half, v);
                    bytes_to_f32(top, (const int8_t *)block + 16 * half + 8, v + 2);
                } else {
                    uint8x16_t pairs = vld1q_u8(block);
                    codes_to_f32(table, half ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(15)), v);
                }
                UNROLL for (int c = 0; c < 4; c++) {
                    FMLA(acc[0][4 * half + c], v[c], w[i], 0);
                    if (heads > 1) FMLA(acc[1][4 * half + c], v[c], w[i], 1);
                    if (heads > 2) FMLA(acc[2][4 * half + c], v[c], w[i], 2);
                }
            }
        }
    }
}

#define ZERO vdupq_n_f32(0)
#define SCALED(v, s) vmulq_n_f32(v, s)
#define STORE(p, v) vst1q_f32(p, v)
#include "../attention_mx_template.h"
