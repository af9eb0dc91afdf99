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

enum { UNITS = 8, GROUP_ROWS = 32 };

typedef __m512 sums;

INLINE void clear_sums(sums *acc) {
    *acc = _mm512_setzero_ps();
}

INLINE void store_sums(const sums *acc, float *y) {
    _mm512_storeu_ps(y, *acc);
}

/* A block as unsigned bytes, w + 12 or w + 128: w[i] holds columns 4i .. 4i+3 of 16 rows. */
typedef struct block_weights {
    __m512i w[8];
    __m512 scale; /* times the format's unit, a power of two: exact */
} block_weights;

INLINE block_weights decode(bool is_fp4, const uint8_t *block) {
    static const uint8_t E2M1[16] = {MXD_E2M1X2(MXD_E2M1_BIAS)};
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)E2M1));
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    block_weights out;
    UNROLL for (int i = 0; i < 8; i++) {
        __m512i bytes = _mm512_loadu_si512(block + TILE + 64 * (is_fp4 ? i / 2 : i));
        if (i % 2 && is_fp4) bytes = _mm512_srli_epi16(bytes, 4);
        out.w[i] = is_fp4 ? _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, nibble)) : _mm512_xor_si512(bytes, sign);
    }
    /* The maximum turns code 0 into the subnormal 2^-127. */
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)block));
    codes = _mm512_max_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(E8M0_LEAST));
    out.scale = _mm512_mul_ps(_mm512_castsi512_ps(codes), _mm512_set1_ps(is_fp4 ? MXFP4_UNIT : MXINT8_UNIT));
    return out;
}

INLINE __m512i broadcast4(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

/* Return what sums start from: the bias takes off what the weights' offset adds. It is made for an offset of 12. */
INLINE __m512i start(bool is_fp4, const int16_t *bias) {
    int32_t offset = bias[0] + bias[1];
    return _mm512_set1_epi32(is_fp4 ? offset : offset / MXD_E2M1_BIAS * 128);
}

/* Do what block_rows does for R rows, a constant. */
INLINE void some_rows(bool is_fp4, const block_weights *w, const mxd_act *x, size_t nblocks, size_t at, int R,
                      int digits, sums *acc) {
    const int8_t *q[UNITS]; /* R high digits, then R low ones if there are two */
    __m512i d[UNITS];
    UNROLL for (int r = 0; r < R; r++) {
        size_t block = at + (size_t)r * nblocks;
        q[r] = x->q + block * BLOCK;
        d[r] = start(is_fp4, x->bias + block * 2 * (size_t)digits);
        if (digits == 1) continue;
        q[R + r] = x->lo + block * BLOCK;
        d[R + r] = start(is_fp4, x->bias + block * 4 + 2);
    }
    UNROLL for (int i = 0; i < 8; i++)
        UNROLL for (int u = 0; u < R * digits; u++) d[u] = _mm512_dpbusd_epi32(d[u], w->w[i], broadcast4(q[u] + 4 * i));
    UNROLL for (int r = 0; r < R; r++) {
        __m512i dot = d[r];
        if (digits == 2) { /* 254 * high + low */
            dot = _mm512_sub_epi32(_mm512_slli_epi32(dot, 8), _mm512_slli_epi32(dot, 1));
            dot = _mm512_add_epi32(dot, d[R + r]);
        }
        __m512 p = _mm512_mul_ps(w->scale, _mm512_set1_ps(x->s[at + (size_t)r * nblocks]));
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), p, acc[r]);
    }
}

INLINE void block_rows(bool is_fp4, const uint8_t *block, const mxd_act *x, size_t nblocks, size_t at, size_t R,
                       int digits, sums *acc) {
    const block_weights w = decode(is_fp4, block);
    size_t r = 0;
#define ROWS(n) some_rows(is_fp4, &w, x, nblocks, at + r * nblocks, n, digits, acc + r)
    for (; r + UNITS / digits <= R; r += UNITS / digits) ROWS(UNITS / digits);
    if (digits == 1 && R - r >= 4) {
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

void mxd_kernels_init_avx512(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, avx512);
    MXD_BIND(k, n, matmul_mxint8, avx512);
}

#endif
