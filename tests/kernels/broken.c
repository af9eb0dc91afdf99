/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that are wrong on purpose, with one mistake each. */
#include <signal.h>
#include <stdlib.h>

#include "harness.h"

static mxd_kernels ref;

/* One bias of the last block is off by one. */
static void mxd_quantize_broken(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out) {
    ref.quantize(x, ldx, rows, k, out);
    out->bias[rows * (k / BLOCK) * 2 - 1]++;
}

/* One bit of one output is wrong, and only for 17 rows and two planes. */
static void mxd_matmul_mxfp4_broken(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                    const mxd_act *x, size_t rows, float *y, size_t ldy) {
    ref.matmul_mxfp4(base, residual, nblocks, ntiles, x, rows, y, ldy);
    if (residual && rows == 17) {
        uint32_t bits;
        memcpy(&bits, y + 16 * ldy, 4);
        bits ^= 1;
        memcpy(y + 16 * ldy, &bits, 4);
    }
}

/* It writes between the rows. */
static void mxd_matmul_mxint8_broken(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                     const mxd_act *x, size_t rows, float *y, size_t ldy) {
    ref.matmul_mxint8(base, residual, nblocks, ntiles, x, rows, y, ldy);
    if (rows > 1 && ldy > 16 * ntiles) y[16 * ntiles] = 0;
}

/* It reads x again after writing y, which may be x: the output is right, the returned sum is not. */
static float mxd_rmsnorm_broken(const float *x, const float *w, size_t n, float eps, float *y) {
    float scratch[1536];
    ref.rmsnorm(x, w, n, eps, y);
    return ref.rmsnorm(x, w, n, eps, scratch);
}

/* It writes to an input. */
static void mxd_rope_broken(float *x, const float *c, const float *s, size_t d) {
    ref.rope(x, c, s, d);
    *(float *)c = 0;
}

/* It leaves the last output as it was. */
static void mxd_attention_broken(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d,
                                 float scale, float *scores, float *out) {
    float last = out[heads * d - 1];
    ref.attention(q, heads, k, v, n, d, scale, scores, out);
    if (n == 33) out[heads * d - 1] = last;
}

/* The weights are right, but the last head's are in place of the first one's. */
static void mxd_attention_mx_broken(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d,
                                    float scale, float *scores, float *out) {
    size_t n = 0;
    for (size_t s = 0; s < count; s++) n += spans[s].n;
    ref.attention_mx(q, heads, spans, count, d, scale, scores, out);
    if (heads > 1) memmove(scores, scores + (heads - 1) * n, n * sizeof *scores);
}

/* It is not orthonormal. */
static void mxd_hadamard_broken(float *x, size_t d) {
    ref.hadamard(x, d);
    for (size_t i = 0; i < d; i++) x[i] *= 2;
}

/* It writes -128, which the variants' dot products do not take. */
static void mxd_store_mxint8_broken(const float *x, size_t d, uint8_t *row) {
    ref.store_mxint8(x, d, row);
    for (size_t i = 0; i < d; i++)
        if (row[i] == 129) row[i] = 128;
}

/* The scale of the first block is one too large. */
static void mxd_store_mxfp4_broken(const float *x, size_t d, uint8_t *row) {
    ref.store_mxfp4(x, d, row);
    row[d / 2]++;
}

/* A sign is lost. */
static void mxd_store_normal4_broken(const float *x, size_t d, uint8_t *row) {
    ref.store_normal4(x, d, row);
    row[0] &= 0xf7;
}

/* It reads before the first element. */
static void mxd_silu_mul_broken(const float *gate, const float *up, size_t n, float *out) {
    (void)*(const volatile float *)(gate - 1);
    ref.silu_mul(gate, up, n, out);
}

/* It reads after the last element. */
static void mxd_add_broken(float *x, const float *y, size_t n) {
    (void)*(const volatile float *)(y + n);
    ref.add(x, y, n);
}

/* It writes after the last element. */
static void mxd_to_f16_broken(const float *x, size_t n, uint16_t *out) {
    ref.to_f16(x, n, out);
    out[n] = 0;
}

/* It uses an instruction that the CPU lacks. */
static void mxd_exp_weights_broken(const float *x, size_t n, float scale, float max, float *w) {
    ref.exp_weights(x, n, scale, max, w);
    if (n == 5) raise(SIGILL);
}

void init_broken(mxd_kernels *k, mxd_kernel_names *n) {
    mxd_kernel_names names;
    mxd_kernels_init_ref(&ref, &names);
#define BIND(type, op) MXD_BIND(k, n, op, broken);
    MXD_KERNELS(BIND)
}

/* ---- the sum of two planes: more mistakes, a level each ---- */

/* Multiply with wrong scale codes where rho is 3, in the last row of each tile only. `shift` is how far the codes of
 * the two planes are off. */
static void multiply_shifted(const int shift[2], const uint8_t *base, const uint8_t *residual, size_t nblocks,
                             size_t ntiles, const mxd_act *x, size_t rows, float *y, size_t ldy) {
    size_t bytes = residual ? ntiles * nblocks * FP4_BYTES : 0;
    uint8_t *wrong_base = malloc(bytes + 1), *wrong_residual = malloc(bytes + 1);
    if (!wrong_base || !wrong_residual) abort();
    if (residual) {
        memcpy(wrong_base, base, bytes);
        memcpy(wrong_residual, residual, bytes);
    }
    for (size_t at = TILE - 1; at < bytes; at += FP4_BYTES) {
        int b = base[at] + shift[0], r = residual[at] + shift[1];
        if (base[at] - residual[at] != MXD_RESIDUAL_REACH || b > 254 || r > 254) continue;
        wrong_base[at] = (uint8_t)b;
        wrong_residual[at] = (uint8_t)r;
    }
    ref.matmul_mxfp4(residual ? wrong_base : base, residual ? wrong_residual : NULL, nblocks, ntiles, x, rows, y, ldy);
    free(wrong_base);
    free(wrong_residual);
}

#define SHIFTED(level, shift_base, shift_residual)                                                                    \
    static void mxd_matmul_mxfp4_##level(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles, \
                                         const mxd_act *x, size_t rows, float *y, size_t ldy) {                       \
        multiply_shifted((const int[2]){shift_base, shift_residual}, base, residual, nblocks, ntiles, x, rows, y,     \
                         ldy);                                                                                        \
    }                                                                                                                 \
    void init_##level(mxd_kernels *k, mxd_kernel_names *n) {                                                          \
        mxd_kernel_names names;                                                                                       \
        mxd_kernels_init_ref(&ref, &names);                                                                           \
        MXD_BIND(k, n, matmul_mxfp4, level);                                                                          \
    }

SHIFTED(rho_ignored, -3, 0)
SHIFTED(rho_off, -1, 0)
SHIFTED(scale_of_base, 3, 3)
