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

/* 16 elements as f32, exactly. Of 4-bit elements that is a table of the upper halves, whose lower bytes are in
 * table[0], upper ones in table[1]: magnitudes are at most 127, so that the lower halves are 0. */
INLINE void int8_to_f32(int8x16_t v, float32x4_t f[4]) {
    int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
    f[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    f[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    f[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    f[3] = vcvtq_f32_s32(vmovl_high_s16(high));
}

INLINE uint8x16x2_t f32_table(mxd_row_format format) {
    float32x4_t f[4];
    int8_to_f32(element_table(format), f);
    uint8x16_t halves[2];
    UNROLL for (int i = 0; i < 2; i++)
        halves[i] = vreinterpretq_u8_u16(vuzp2q_u16(vreinterpretq_u16_f32(f[2 * i]), vreinterpretq_u16_f32(f[2 * i + 1])));
    return (uint8x16x2_t){{vuzp1q_u8(halves[0], halves[1]), vuzp2q_u8(halves[0], halves[1])}};
}

INLINE void codes_to_f32(uint8x16x2_t table, uint8x16_t codes, float32x4_t f[4]) {
    uint8x16_t lower = vqtbl1q_u8(table.val[0], codes), upper = vqtbl1q_u8(table.val[1], codes);
    uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), high = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
    f[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16));
    f[1] = vreinterpretq_f32_u32(vshll_high_n_u16(low, 16));
    f[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16));
    f[3] = vreinterpretq_f32_u32(vshll_high_n_u16(high, 16));
}

/* Weights of n rows (at most LANES) of every head times the rows' scales, those of a row in a vector. */
INLINE void scale_weights(mxd_row_format format, const float *weights, size_t ldw, int heads, const uint8_t *codes,
                          size_t stride, size_t n, float32x4_t out[LANES]) {
    uint32_t code[LANES] = {0};
    float32x4x4_t w;
    for (size_t r = 0; r < n; r++) code[r] = codes[r * stride];
    float32x4_t scale = row_scales(format, vld1q_u32(code));
    UNROLL for (int h = 0; h < heads; h++) {
        float few[LANES] = {0};
        memcpy(few, weights + (size_t)h * ldw, n * sizeof *few);
        w.val[h] = vmulq_f32(vld1q_f32(few), scale);
    }
    UNROLL for (int h = heads; h < 4; h++) w.val[h] = scale;
    vst4q_f32((float *)out, w);
}

#define FMLA(acc, v, w, lane) __asm__ volatile("fmla %0.4s, %1.4s, %2.s[" #lane "]" : "+w"(acc) : "w"(v), "w"(w))

enum { ROWS = 64 };

/* acc += weights times block b of a span's values. */
INLINE TARGET void mix_mx(mxd_row_format format, const float *weights, size_t ldw, int heads, const mxd_span *span,
                          size_t d, size_t b, float32x4_t acc[HEADS][8]) {
    const size_t stride = mxd_row_bytes(format, d), codes_at = d / BLOCK * MXD_BLOCK_BYTES(format);
    const uint8_t *row = span->v;
    const uint8x16x2_t table = f32_table(format);
    static const uint8_t to_top[4][16] = {{255,255,255,0,255,255,255,1,255,255,255,2,255,255,255,3},
    {255,255,255,4,255,255,255,5,255,255,255,6,255,255,255,7},
    {255,255,255,8,255,255,255,9,255,255,255,10,255,255,255,11},
    {255,255,255,12,255,255,255,13,255,255,255,14,255,255,255,15}};
    uint8x16_t spread[4];
    UNROLL for (int i = 0; i < 2; i++) { spread[i] = vld1q_u8(to_top[i]); __asm__("" : "+w"(spread[i])); }
    float32x4_t w[ROWS];
    for (size_t j = 0, n; j < span->n; j += n) {
        n = span->n - j < ROWS ? span->n - j : ROWS;
        const uint8_t *codes = row + codes_at + b;
        size_t i = 0;
        for (; i + LANES <= n; i += LANES)
            scale_weights(format, weights + j + i, ldw, heads, codes + i * stride, stride, LANES, w + i);
        if (i < n) scale_weights(format, weights + j + i, ldw, heads, codes + i * stride, stride, n - i, w + i);
        _Pragma("GCC unroll 1") for (size_t r = 0; r < n; r++, row += stride) {
            const uint8_t *block = row + b * MXD_BLOCK_BYTES(format);
            UNROLL for (int half = 0; half < 2; half++) {
                float32x4_t value[4];
                if (format == MXD_ROW_MXINT8) {
                    UNROLL for (int i = 0; i < 4; i += 2) {
                        int8x16_t bytes = vcombine_s8(vld1_s8((const int8_t *)block + 16 * half + 4 * i), vdup_n_s8(0));
                        value[i] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(bytes, spread[0])), 24);
                        value[i + 1] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(bytes, spread[1])), 24);
                    }
                } else {
                    uint8x16_t pairs = vld1q_u8(block);
                    codes_to_f32(table, half ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(15)), value);
                }
                UNROLL for (int i = 0; i < 4; i++) {
                    FMLA(acc[0][4 * half + i], value[i], w[r], 0);
                    if (heads > 1) FMLA(acc[1][4 * half + i], value[i], w[r], 1);
                    if (heads > 2) FMLA(acc[2][4 * half + i], value[i], w[r], 2);
                }
            }
        }
    }
}

#define VECTOR float32x4_t
#define ZERO vdupq_n_f32(0)
#define SCALED(v, s) vmulq_n_f32(v, s)
#define STORE(p, v) vst1q_f32(p, v)
#include "attention_mx.h"
