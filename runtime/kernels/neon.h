/* Pieces shared by the NEON levels. */
#ifndef MXD_NEON_H
#define MXD_NEON_H

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#include "kernels.h"

/* Forced, so that numbers of rows and digits are constants and accumulators stay in registers. */
#define INLINE static inline __attribute__((always_inline))

/* Loops over registers: the compiler must not keep arrays of them in memory. */
#define UNROLL _Pragma("GCC unroll 8")

enum { BLOCK = MXD_BLOCK, TILE = MXD_TILE_ROWS };
enum { FP4_BYTES = MXD_MXFP4_BLOCK_BYTES, INT8_BYTES = MXD_MXINT8_BLOCK_BYTES };

/* E8M0 bytes of 16 rows to four vectors of f32; the maximum turns code 0 into the subnormal 2^-127. */
INLINE void load_scales(const uint8_t *p, float32x4_t scale[4]) {
    uint8x16_t codes = vld1q_u8(p);
    const uint16x8_t least = vdupq_n_u16(0x0040);
    uint16x8_t lo = vmaxq_u16(vshll_n_u8(vget_low_u8(codes), 7), least); /* upper halves of the f32 */
    uint16x8_t hi = vmaxq_u16(vshll_high_n_u8(codes, 7), least);
    scale[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(lo), 16));
    scale[1] = vreinterpretq_f32_u32(vshll_high_n_u16(lo, 16));
    scale[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(hi), 16));
    scale[3] = vreinterpretq_f32_u32(vshll_high_n_u16(hi, 16));
}

/* E2M1 doubled: what a nibble decodes to. */
INLINE int8x16_t e2m1_table(void) {
    static const int8_t values[16] = {MXD_E2M1X2_ELEMENTS};
    return vld1q_s8(values);
}

/* Forms of a block's elements: nibbles; bytes that were decoded from them, within +-12; any bytes. */
typedef enum elements { PACKED, DECODED, INT8 } elements;

/* Columns 8*pair .. 8*pair+3 and the next four, of rows 4v .. 4v+3. */
INLINE int8x16x2_t load_pair(elements form, const uint8_t *w, int pair, int v) {
    if (form == PACKED) {
        const int8x16_t table = e2m1_table();
        uint8x16_t packed = vld1q_u8(w + 64 * pair + 16 * v);
        return (int8x16x2_t){{vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15))),
                              vqtbl1q_s8(table, vshrq_n_u8(packed, 4))}};
    }
    const int8_t *bytes = (const int8_t *)w + 128 * pair + 16 * v;
    return (int8x16x2_t){{vld1q_s8(bytes), vld1q_s8(bytes + 64)}};
}

/* Activation rows at one block: R of them, `stride` blocks apart. */
typedef struct some_rows {
    const int8_t *q, *lo;
    const float *s;
    size_t stride;
} some_rows;

INLINE some_rows rows_at(const mxd_act *x, size_t nblocks, size_t m, size_t b) {
    size_t at = m * nblocks + b;
    return (some_rows){x->q + at * BLOCK, x->lo ? x->lo + at * BLOCK : NULL, x->s + at, nblocks};
}

INLINE void next_block(some_rows *x) {
    x->q += BLOCK;
    if (x->lo) x->lo += BLOCK;
    x->s++;
}

#endif
#endif
