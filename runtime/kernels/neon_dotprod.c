/* NEON with the dot product extension (armv8.2-a, Cortex-A76: Pi 5). Only this file may use it. */
#include "neon.h"

#if defined(__aarch64__)

#define DOTPROD __attribute__((target("dotprod")))
#define INLINE static inline __attribute__((always_inline, target("dotprod")))

/* acc[r][v] += rows 4v..4v+3 of one MXFP4 block times R activation rows. */
INLINE void block_mxfp4(const uint8_t *block, const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R,
                        float32x4_t acc[][4]) {
    const int8x16_t table = e2m1_table();
    float32x4_t scale[4];
    load_scales(block, scale);
    int8x16_t q[4][2];
    int32x4_t d[4][4];
    for (int r = 0; r < R; r++) {
        const int8_t *row = x->q + ((m0 + (size_t)r) * nblocks + b) * BLOCK;
        q[r][0] = vld1q_s8(row);
        q[r][1] = vld1q_s8(row + 16);
        for (int v = 0; v < 4; v++) d[r][v] = vdupq_n_s32(0);
    }
/* The lane of vdotq_laneq_s32 must be a literal, hence a macro and not a loop over g. */
#define GROUP(g)                                                                                              \
    for (int v = 0; v < 4; v++) {                                                                             \
        uint8x16_t packed = vld1q_u8(block + TILE + 64 * (g) + 16 * v);                                       \
        int8x16_t lo = vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15)));                                   \
        int8x16_t hi = vqtbl1q_s8(table, vshrq_n_u8(packed, 4));                                              \
        for (int r = 0; r < R; r++) {                                                                         \
            d[r][v] = vdotq_laneq_s32(d[r][v], lo, q[r][(g) / 2], 2 * ((g) % 2));                             \
            d[r][v] = vdotq_laneq_s32(d[r][v], hi, q[r][(g) / 2], 2 * ((g) % 2) + 1);                         \
        }                                                                                                     \
    }
    GROUP(0)
    GROUP(1)
    GROUP(2)
    GROUP(3)
#undef GROUP
    for (int r = 0; r < R; r++) {
        float s = x->s[(m0 + (size_t)r) * nblocks + b] * 0.5f;
        for (int v = 0; v < 4; v++)
            acc[r][v] = vfmaq_f32(acc[r][v], vcvtq_f32_s32(d[r][v]), vmulq_n_f32(scale[v], s));
    }
}

INLINE void block_mxint8(const uint8_t *block, const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R,
                         float32x4_t acc[][4]) {
    float32x4_t scale[4];
    load_scales(block, scale);
    int8x16_t q[4][2];
    int32x4_t d[4][4];
    for (int r = 0; r < R; r++) {
        const int8_t *row = x->q + ((m0 + (size_t)r) * nblocks + b) * BLOCK;
        q[r][0] = vld1q_s8(row);
        q[r][1] = vld1q_s8(row + 16);
        for (int v = 0; v < 4; v++) d[r][v] = vdupq_n_s32(0);
    }
#define GROUP(g)                                                                                              \
    for (int v = 0; v < 4; v++) {                                                                             \
        int8x16_t w = vld1q_s8((const int8_t *)block + TILE + 64 * (g) + 16 * v);                             \
        for (int r = 0; r < R; r++) d[r][v] = vdotq_laneq_s32(d[r][v], w, q[r][(g) / 4], (g) % 4);            \
    }
    GROUP(0)
    GROUP(1)
    GROUP(2)
    GROUP(3)
    GROUP(4)
    GROUP(5)
    GROUP(6)
    GROUP(7)
#undef GROUP
    for (int r = 0; r < R; r++) {
        float s = x->s[(m0 + (size_t)r) * nblocks + b] * 0.015625f;
        for (int v = 0; v < 4; v++)
            acc[r][v] = vfmaq_f32(acc[r][v], vcvtq_f32_s32(d[r][v]), vmulq_n_f32(scale[v], s));
    }
}

INLINE void rows_mxfp4(const uint8_t *base, const uint8_t *residual, size_t nblocks, const mxd_act *x, size_t m0,
                       int R, float *y, size_t ldy) {
    float32x4_t acc[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    for (size_t b = 0; b < nblocks; b++) {
        block_mxfp4(base + b * FP4_BYTES, x, nblocks, b, m0, R, acc);
        if (residual) block_mxfp4(residual + b * FP4_BYTES, x, nblocks, b, m0, R, acc);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) vst1q_f32(y + (m0 + (size_t)r) * ldy + 4 * v, acc[r][v]);
}

INLINE void rows_mxint8(const uint8_t *tile, size_t nblocks, const mxd_act *x, size_t m0, int R, float *y,
                        size_t ldy) {
    float32x4_t acc[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) acc[r][v] = vdupq_n_f32(0);
    for (size_t b = 0; b < nblocks; b++) block_mxint8(tile + b * INT8_BYTES, x, nblocks, b, m0, R, acc);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) vst1q_f32(y + (m0 + (size_t)r) * ldy + 4 * v, acc[r][v]);
}

DOTPROD static void mxd_matmul_mxfp4_dotprod(const uint8_t *base, const uint8_t *residual, size_t nblocks,
                                             size_t ntiles, const mxd_act *x, size_t rows, float *y, size_t ldy) {
    for (size_t t = 0; t < ntiles; t++) {
        const uint8_t *p0 = base + t * nblocks * FP4_BYTES;
        const uint8_t *p1 = residual ? residual + t * nblocks * FP4_BYTES : NULL;
        float *out = y + t * TILE;
        size_t m = 0;
        for (; m + 4 <= rows; m += 4) rows_mxfp4(p0, p1, nblocks, x, m, 4, out, ldy);
        for (; m + 2 <= rows; m += 2) rows_mxfp4(p0, p1, nblocks, x, m, 2, out, ldy);
        if (m < rows) rows_mxfp4(p0, p1, nblocks, x, m, 1, out, ldy);
    }
}

DOTPROD static void mxd_matmul_mxint8_dotprod(const uint8_t *base, const uint8_t *residual, size_t nblocks,
                                              size_t ntiles, const mxd_act *x, size_t rows, float *y, size_t ldy) {
    (void)residual;
    for (size_t t = 0; t < ntiles; t++) {
        const uint8_t *tile = base + t * nblocks * INT8_BYTES;
        float *out = y + t * TILE;
        size_t m = 0;
        for (; m + 4 <= rows; m += 4) rows_mxint8(tile, nblocks, x, m, 4, out, ldy);
        for (; m + 2 <= rows; m += 2) rows_mxint8(tile, nblocks, x, m, 2, out, ldy);
        if (m < rows) rows_mxint8(tile, nblocks, x, m, 1, out, ldy);
    }
}

void mxd_kernels_init_dotprod(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, dotprod);
    MXD_BIND(k, n, matmul_mxint8, dotprod);
}

#else
typedef int mxd_dotprod_not_on_this_architecture;
#endif
