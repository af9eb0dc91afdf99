/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 with VNNI (F, BW, VL, VNNI: Ice Lake, Zen 4 and later). A vector holds one value for each of a tile's 16
 * rows. tests/kernels/avx512_emulated.c compiles this file on any machine, with functions instead of intrinsics. */
#include "../level.h"

#if defined(__x86_64__) || defined(MXD_EMULATED_AVX512)

#ifndef MXD_EMULATED_AVX512
#include <immintrin.h>
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE TARGET static inline __attribute__((always_inline))
#endif
#define KERNEL(op) mxd_##op##_avx512

enum { PASS_ROWS = 8, GROUP_ROWS = 32 };

typedef __m512 sums;

INLINE void clear_sums(sums *acc) {
    *acc = _mm512_setzero_ps();
}

INLINE void store_sums(const sums *acc, float *y) {
    _mm512_storeu_ps(y, *acc);
}

/* A block as unsigned bytes: w[i] holds columns 4i .. 4i+3 of 16 rows. They are w + 12 or, int8, w + 128; of two
 * planes, 2^rho * (b + 12) + (r + 12). */
typedef struct block_weights {
    __m512i w[8], rho;
    __m512 scale; /* times the format's unit, a power of two: exact */
} block_weights;

INLINE __m512i load_codes(const uint8_t *block) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)block));
}

/* Return columns 4i .. 4i+3 of a block, as unsigned bytes. */
INLINE __m512i load_columns(bool is_fp4, const uint8_t *block, int i) {
    static const uint8_t E2M1[16] = {MXD_E2M1X2(MXD_E2M1_BIAS)};
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)E2M1));
    __m512i bytes = _mm512_loadu_si512(block + TILE + 64 * (is_fp4 ? i / 2 : i));
    if (!is_fp4) return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
    if (i % 2) bytes = _mm512_srli_epi16(bytes, 4);
    return _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
}

INLINE block_weights decode(bool is_fp4, const uint8_t *base, const uint8_t *residual) {
    block_weights out = {.rho = _mm512_set1_epi32(0)};
    __m512i codes = load_codes(base);
    if (residual) {
        __m512i base_codes = codes;
        codes = load_codes(residual);
        out.rho = _mm512_sub_epi32(base_codes, codes);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        out.w[i] = load_columns(is_fp4, base, i);
        /* Bytes reach 24, so that no bit of a byte is shifted into the next: 8 * 24 is less than 256. */
        if (residual)
            out.w[i] = _mm512_add_epi32(_mm512_sllv_epi32(out.w[i], out.rho), load_columns(true, residual, i));
    }
    /* The maximum turns code 0 into the subnormal 2^-127. */
    codes = _mm512_max_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(E8M0_LEAST));
    out.scale = _mm512_mul_ps(_mm512_castsi512_ps(codes), _mm512_set1_ps(is_fp4 ? MXFP4_UNIT : MXINT8_UNIT));
    return out;
}

INLINE __m512i broadcast4(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

/* Return what sums start from: the bias takes off what the weights' offset adds. It is made for an offset of 12; two
 * planes have 2^rho * 12 + 12. */
INLINE __m512i start(bool is_fp4, bool is_sum, __m512i rho, const int16_t *bias) {
    int32_t offset = bias[0] + bias[1];
    __m512i all = _mm512_set1_epi32(is_fp4 ? offset : offset / MXD_E2M1_BIAS * 128);
    return is_sum ? _mm512_add_epi32(_mm512_sllv_epi32(all, rho), all) : all;
}

/* Do what block_rows does for R rows, a constant. */
INLINE void some_rows(bool is_fp4, bool is_sum, const block_weights *w, const mxd_act *x, size_t nblocks, size_t at,
                      int R, sums *acc) {
    const int8_t *q[PASS_ROWS];
    __m512i d[PASS_ROWS];
    UNROLL for (int r = 0; r < R; r++) {
        size_t block = at + (size_t)r * nblocks;
        q[r] = x->q + block * BLOCK;
        d[r] = start(is_fp4, is_sum, w->rho, x->bias + block * 2);
    }
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int r = 0; r < R; r++) d[r] = _mm512_dpbusd_epi32(d[r], w->w[i], broadcast4(q[r] + 4 * i));
    UNROLL for (int r = 0; r < R; r++) {
        __m512 p = _mm512_mul_ps(w->scale, _mm512_set1_ps(x->s[at + (size_t)r * nblocks]));
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r]), p, acc[r]);
    }
}

INLINE void block_rows(bool is_fp4, const uint8_t *base, const uint8_t *residual, const mxd_act *x, size_t nblocks,
                       size_t at, size_t R, sums *acc) {
    const block_weights w = decode(is_fp4, base, residual);
    size_t r = 0;
#define ROWS(n) some_rows(is_fp4, residual != NULL, &w, x, nblocks, at + r * nblocks, n, acc + r)
    for (; r + PASS_ROWS <= R; r += PASS_ROWS) ROWS(PASS_ROWS);
    if (R - r >= 4) {
        ROWS(4);
        r += 4;
    }
    if (R - r >= 2) {
        ROWS(2);
        r += 2;
    }
    if (R - r) ROWS(1);
#undef ROWS
}

#include "matmul_template.h"

/* ---- attention ---- A vector holds the 16 accumulators of a sum. Sixteen keys are scored at a time, so that their sums
 * are reduced together; each step adds lanes in the canonical order. */

/* Query heads that share the conversion of keys and values: as many as registers hold. */
enum { HEADS = 3, LANES = 16 };

INLINE __m512 load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

/* Return lane i + lane i+8 of a, then of b. */
INLINE __m512 add_eighths(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

/* Do the same to each half: lane i + lane i+4 of four sums. */
INLINE __m512 add_fourths(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Reduce 16 sums: lane 4i+g of the result is that in lanes 4i .. 4i+3 of v[g]. */
INLINE __m512 add_last(const __m512 v[4]) {
    __m512 a = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x44), _mm512_shuffle_ps(v[0], v[1], 0xee));
    __m512 b = _mm512_add_ps(_mm512_shuffle_ps(v[2], v[3], 0x44), _mm512_shuffle_ps(v[2], v[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* Write the scores of `heads` query heads, a constant. Where fewer than 16 keys are left, the last one is repeated. */
INLINE void score(const float *q, int heads, const uint16_t *k, size_t n, size_t d, float scale, float *scores) {
    for (size_t j = 0; j < n; j += LANES) {
        const size_t left = n - j < LANES ? n - j : LANES;
        __m512 group[HEADS][4];
        UNROLL for (size_t g = 0; g < 4; g++) {
            const uint16_t *key[4];
            __m512 acc[HEADS][4];
            UNROLL for (size_t i = 0; i < 4; i++) {
                size_t r = 4 * i + g;
                key[i] = k + (j + (r < left ? r : left - 1)) * d;
                UNROLL for (int h = 0; h < heads; h++) acc[h][i] = _mm512_setzero_ps();
            }
            for (size_t c = 0; c < d; c += LANES)
                UNROLL for (size_t i = 0; i < 4; i++) {
                    __m512 values = load_f16(key[i] + c);
                    UNROLL for (int h = 0; h < heads; h++)
                        acc[h][i] = _mm512_fmadd_ps(_mm512_loadu_ps(q + (size_t)h * d + c), values, acc[h][i]);
                }
            UNROLL for (int h = 0; h < heads; h++)
                group[h][g] = add_fourths(add_eighths(acc[h][0], acc[h][1]), add_eighths(acc[h][2], acc[h][3]));
        }
        UNROLL for (int h = 0; h < heads; h++) {
            float all[LANES];
            _mm512_storeu_ps(all, _mm512_mul_ps(add_last(group[h]), _mm512_set1_ps(scale)));
            memcpy(scores + (size_t)h * n + j, all, left * sizeof *all);
        }
    }
}

/* min and max return their second operand if either is NaN, so that NaN passes through as in the reference. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(EXP_MOST), x);
    x = _mm512_max_ps(_mm512_set1_ps(EXP_LEAST), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(EXP_LOG2E)), 8); /* to nearest, no exception */
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(EXP_LN2_HIGH), x), p = _mm512_set1_ps(EXP_TERM[0]);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(EXP_LN2_LOW), r);
    UNROLL for (int i = 1; i < EXP_TERMS; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_TERM[i]));
    __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(power)); /* NaN: p is NaN already */
}

/* Turn scores into weights; return the inverse of their sum. */
INLINE float softmax(float *scores, size_t n) {
    float lane[LANES], max = -INFINITY;
    size_t j = 0;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (; j + LANES <= n; j += LANES) most = _mm512_max_ps(_mm512_loadu_ps(scores + j), most); /* ignores NaN */
    _mm512_storeu_ps(lane, most);
    for (int i = 0; i < LANES; i++) max = lane[i] > max ? lane[i] : max;
    for (; j < n; j++) max = scores[j] > max ? scores[j] : max;
    for (j = 0; j + LANES <= n; j += LANES) {
        __m512 w = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(max)));
        _mm512_storeu_ps(scores + j, w);
        sum = _mm512_add_ps(sum, w);
    }
    _mm512_storeu_ps(lane, sum);
    for (; j < n; j++) {
        scores[j] = mxd_exp_ref(scores[j] - max);
        lane[j % LANES] += scores[j];
    }
    return 1.0f / mxd_reduce16_ref(lane);
}

/* Write 16 * V values of every head's output, from v and out on. */
INLINE void mix(const float *scores, const float *inverse, int heads, int V, const uint16_t *v, size_t n, size_t d,
                float *out) {
    __m512 acc[HEADS][2];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < V; i++) acc[h][i] = _mm512_setzero_ps();
    for (size_t j = 0; j < n; j++)
        UNROLL for (int i = 0; i < V; i++) {
            __m512 value = load_f16(v + j * d + LANES * (size_t)i);
            UNROLL for (int h = 0; h < heads; h++)
                acc[h][i] = _mm512_fmadd_ps(_mm512_set1_ps(scores[(size_t)h * n + j]), value, acc[h][i]);
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < V; i++)
            _mm512_storeu_ps(out + (size_t)h * d + LANES * i, _mm512_mul_ps(acc[h][i], _mm512_set1_ps(inverse[h])));
}

#include "../attention_template.h"

void mxd_kernels_init_avx512(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, avx512);
    MXD_BIND(k, n, matmul_mxint8, avx512);
    MXD_BIND(k, n, attention, avx512);
}

#endif
