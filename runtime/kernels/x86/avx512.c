/* AVX-512 with VNNI (F, BW, VL, VNNI: Ice Lake, Zen 4 and later). A vector holds one value for each of a tile's 16
 * rows. tests/kernels/avx512_emulated.c compiles this file on any machine, with functions instead of intrinsics. */
#include "../kernels.h"

#if defined(__x86_64__) || defined(MXD_EMULATED_AVX512)

#ifndef MXD_EMULATED_AVX512
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define INLINE AVX512 static inline __attribute__((always_inline))
/* Loops over registers: the compiler must not keep arrays of them in memory. */
#define UNROLL _Pragma("GCC unroll 8")
#endif
#include <string.h>

enum { BLOCK = MXD_BLOCK, TILE = MXD_TILE_ROWS };
enum { FP4_BYTES = MXD_MXFP4_BLOCK_BYTES, INT8_BYTES = MXD_MXINT8_BLOCK_BYTES };
enum { UNITS = 8, GROUP_ROWS = 32, PREFETCH = 2048 };

/* A block as unsigned bytes: w + 12 or w + 128. w[i]: columns 4i .. 4i+3 of 16 rows. */
typedef struct block_weights {
    __m512i w[8];
    __m512 scale; /* times the format's unit, a power of two: exact */
} block_weights;

INLINE block_weights decode(int is_fp4, const uint8_t *block) {
    static const uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
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
    codes = _mm512_max_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(0x00400000));
    out.scale = _mm512_mul_ps(_mm512_castsi512_ps(codes), _mm512_set1_ps(is_fp4 ? 0.5f : 0.015625f));
    return out;
}

INLINE __m512i broadcast4(const int8_t *q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

/* The bias takes off what the weights' offset adds; it is made for an offset of 12. */
INLINE __m512i start(int is_fp4, const int16_t *bias) {
    int32_t offset = bias[0] + bias[1];
    return _mm512_set1_epi32(is_fp4 ? offset : offset / MXD_E2M1_BIAS * 128);
}

/* acc[r] = fma(dot, scale * s, acc[r]) for R activation rows, the first of which has its block at index `at`. */
INLINE void some_rows(int is_fp4, const block_weights *w, const mxd_act *x, size_t nblocks, size_t at, int R,
                      int digits, __m512 *acc) {
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

INLINE void block_rows(int is_fp4, const uint8_t *block, const mxd_act *x, size_t nblocks, size_t at, size_t R,
                       int digits, __m512 *acc) {
    const block_weights w = decode(is_fp4, block);
    size_t r = 0;
#define ROWS(n) some_rows(is_fp4, &w, x, nblocks, at + r * nblocks, n, digits, acc + r)
    for (; r + UNITS / digits <= R; r += UNITS / digits) ROWS(UNITS / digits);
    if (digits == 1 && R - r >= 4) ROWS(4), r += 4;
    if (R - r >= 2) ROWS(2), r += 2;
    if (R - r) ROWS(1);
#undef ROWS
}

/* Weights come as one stream: fetch what follows PREFETCH bytes later. */
INLINE void prefetch(const uint8_t *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)block + PREFETCH + i, _MM_HINT_T0);
}

/* R activation rows from m through tile t; residual may be NULL. */
INLINE void tile_rows(int is_fp4, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t t,
                      const mxd_act *x, size_t m, size_t R, int digits, float *y, size_t ldy) {
    const size_t bytes = is_fp4 ? FP4_BYTES : INT8_BYTES;
    __m512 acc[GROUP_ROWS];
    for (size_t r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (size_t b = 0; b < nblocks; b++) {
        size_t offset = (t * nblocks + b) * bytes, at = m * nblocks + b;
        prefetch(base + offset, bytes);
        block_rows(is_fp4, base + offset, x, nblocks, at, R, digits, acc);
        if (!residual) continue;
        prefetch(residual + offset, bytes);
        block_rows(is_fp4, residual + offset, x, nblocks, at, R, digits, acc);
    }
    for (size_t r = 0; r < R; r++) _mm512_storeu_ps(y + (m + r) * ldy + t * TILE, acc[r]);
}

#define TARGET AVX512
#define MATMUL(format) mxd_matmul_##format##_avx512
#include "matmul_template.h"

void mxd_kernels_init_avx512(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, matmul_mxfp4, avx512);
    MXD_BIND(k, n, matmul_mxint8, avx512);
}

#else
typedef int mxd_avx512_not_on_this_architecture;
#endif
