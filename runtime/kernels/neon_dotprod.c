/* NEON with the dot product extension (armv8.2-a, Cortex-A76: Pi 5). Only this file may use it. */
#include "neon.h"

#if defined(__aarch64__)

#define TARGET __attribute__((target("dotprod")))

INLINE TARGET void load_digits(const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R, int digits,
                                int8x16_t q[4][2], int32x4_t d[4][4]) {
    const int8_t *rows[4];
    digit_rows(x, nblocks, b, m0, R, digits, rows);
    for (int u = 0; u < R * digits; u++) {
        q[u][0] = vld1q_s8(rows[u]);
        q[u][1] = vld1q_s8(rows[u] + 16);
        for (int v = 0; v < 4; v++) d[u][v] = vdupq_n_s32(0);
    }
}

INLINE TARGET void block_mxfp4(const uint8_t *block, const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R,
                                int digits, float32x4_t acc[4][4]) {
    const int8x16_t table = e2m1_table();
    float32x4_t scale[4];
    load_scales(block, scale);
    int8x16_t q[4][2];
    int32x4_t d[4][4];
    load_digits(x, nblocks, b, m0, R, digits, q, d);
/* The lane of vdotq_laneq_s32 must be a literal, hence a macro and not a loop over g. */
#define GROUP(g)                                                                                              \
    for (int v = 0; v < 4; v++) {                                                                             \
        uint8x16_t packed = vld1q_u8(block + TILE + 64 * (g) + 16 * v);                                       \
        int8x16_t lo = vqtbl1q_s8(table, vandq_u8(packed, vdupq_n_u8(15)));                                   \
        int8x16_t hi = vqtbl1q_s8(table, vshrq_n_u8(packed, 4));                                              \
        for (int u = 0; u < R * digits; u++) {                                                                \
            d[u][v] = vdotq_laneq_s32(d[u][v], lo, q[u][(g) / 2], 2 * ((g) % 2));                             \
            d[u][v] = vdotq_laneq_s32(d[u][v], hi, q[u][(g) / 2], 2 * ((g) % 2) + 1);                         \
        }                                                                                                     \
    }
    GROUP(0)
    GROUP(1)
    GROUP(2)
    GROUP(3)
#undef GROUP
    accumulate(scale, d, 0.5f, x, nblocks, b, m0, R, digits, acc);
}

INLINE TARGET void block_mxint8(const uint8_t *block, const mxd_act *x, size_t nblocks, size_t b, size_t m0, int R,
                                 int digits, float32x4_t acc[4][4]) {
    float32x4_t scale[4];
    load_scales(block, scale);
    int8x16_t q[4][2];
    int32x4_t d[4][4];
    load_digits(x, nblocks, b, m0, R, digits, q, d);
#define GROUP(g)                                                                                              \
    for (int v = 0; v < 4; v++) {                                                                             \
        int8x16_t w = vld1q_s8((const int8_t *)block + TILE + 64 * (g) + 16 * v);                             \
        for (int u = 0; u < R * digits; u++) d[u][v] = vdotq_laneq_s32(d[u][v], w, q[u][(g) / 4], (g) % 4);   \
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
    accumulate(scale, d, 0.015625f, x, nblocks, b, m0, R, digits, acc);
}

#define MATMUL(format) mxd_matmul_##format##_dotprod
#include "neon_matmul.h"

void mxd_kernels_init_dotprod(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, dotprod);
    MXD_BIND(k, n, matmul_mxint8, dotprod);
}

#else
typedef int mxd_dotprod_not_on_this_architecture;
#endif
