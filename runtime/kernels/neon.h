/* Pieces shared by the NEON levels. */
#ifndef MXD_NEON_H
#define MXD_NEON_H

#if defined(__aarch64__)

#include <arm_neon.h>
#include <string.h>

#include "kernels.h"

/* Forced, so that numbers of rows and digits are constants and accumulators stay in registers. */
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = MXD_BLOCK, TILE = MXD_TILE_ROWS };
enum { FP4_BYTES = MXD_MXFP4_BLOCK_BYTES, INT8_BYTES = MXD_MXINT8_BLOCK_BYTES };

/* E8M0 bytes of 16 rows to four vectors of f32; the maximum turns code 0 into the subnormal 2^-127. */
INLINE void load_scales(const uint8_t *p, float32x4_t scale[4]) {
    uint8x16_t codes = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(codes)), hi = vmovl_high_u8(codes);
    const uint32x4_t least = vdupq_n_u32(0x00400000);
    scale[0] = vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(lo)), 23), least));
    scale[1] = vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_high_u16(lo), 23), least));
    scale[2] = vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(hi)), 23), least));
    scale[3] = vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_high_u16(hi), 23), least));
}

/* E2M1 doubled: what a nibble decodes to. */
INLINE int8x16_t e2m1_table(void) {
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return vld1q_s8(values);
}

/* Four bytes in every lane: one instruction (ld1r). */
INLINE int8x16_t broadcast4(const int8_t *q) {
    return vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)q));
}

/* Digit rows of R activation rows at block b: R high digits, then R low ones if there are two. */
INLINE void digit_rows(const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R, int digits, const int8_t *q[4]) {
    for (int r = 0; r < R; r++) {
        size_t at = ((m0 + (size_t)r) * nblocks + b) * BLOCK;
        q[r] = x->q + at;
        if (digits == 2) q[R + r] = x->lo + at;
    }
}

/* acc[r][v] = fma(dot, 2^sw * (s * unit), acc[r][v]) for the R rows whose digits' dot products with rows 4v..4v+3 of
 * the tile are d[..][v]. */
INLINE void accumulate(const float32x4_t scale[4], int32x4_t d[4][4], float unit, const mxd_act *x, size_t nblocks,
                       size_t b, size_t m0, int R, int digits, float32x4_t acc[4][4]) {
    for (int r = 0; r < R; r++) {
        float s = x->s[(m0 + (size_t)r) * nblocks + b] * unit;
        for (int v = 0; v < 4; v++) {
            int32x4_t dot = digits == 2 ? vmlaq_n_s32(d[R + r][v], d[r][v], MXD_ACT_DIGIT) : d[r][v];
            acc[r][v] = vfmaq_f32(acc[r][v], vcvtq_f32_s32(dot), vmulq_n_f32(scale[v], s));
        }
    }
}

#endif
#endif
