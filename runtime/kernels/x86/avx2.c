/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 with FMA and F16C. Bound only where CPUID reports all three (src/cpu.c). */
#include "../level.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define KERNEL(op) mxd_##op##_avx2
#define VECTOR __m256
#define INTEGERS __m256i
enum { LANES = 8 };

/* Reduce 16 lanes, held as two vectors, in the canonical order: lane i += i+8, then +4, +2, +1. */
INLINE float reduce16(__m256 lo, __m256 hi) {
    __m256 s8 = _mm256_add_ps(lo, hi);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* Return the scales that eight E8M0 codes mean times a unit (a power of two): exact, also where the maximum turns code
 * 0 into the subnormal 2^-127. */
INLINE __m256 e8m0(__m128i codes, float unit) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(codes), 23);
    bits = _mm256_max_epi32(bits, _mm256_set1_epi32(E8M0_LEAST));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(unit));
}

INLINE __m256i broadcast4(const void *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

/* ---- matrix products ---- A block is decoded to vectors of 4 columns x 8 rows (half a tile's): w[4-column
 * group][half]. Up to PASS_ROWS activation rows are multiplied in one pass over them, so that every four broadcast
 * activations meet both halves. */

enum { PASS_ROWS = 4, GROUP_ROWS = 32 };

typedef __m256 sums[2];

INLINE void clear_sums(sums *acc) {
    (*acc)[0] = (*acc)[1] = _mm256_setzero_ps();
}

INLINE void store_sums(const sums *acc, float *y) {
    for (int half = 0; half < 2; half++) _mm256_storeu_ps(y + 8 * half, (*acc)[half]);
}

typedef __m256i decoded[8][2];

/* Two planes are multiplied one by one: their sum does not fit the 16 bits in which a plane's products add up. */
typedef struct block_weights {
    decoded w, residual;
    __m256i power[2]; /* 2^rho, in both halves of a row's 32 bits */
    __m256 scale[2];
} block_weights;

INLINE __m256i load_weights(const uint8_t *block, int group, int half) {
    return _mm256_loadu_si256((const __m256i *)(const void *)(block + TILE + 64 * group + 32 * half));
}

/* Decode elements as w + 12 (0..24), because pmaddubsw needs one unsigned operand. */
INLINE void decode_mxfp4(const uint8_t *block, decoded w) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(MXD_E2M1X2(MXD_E2M1_BIAS)));
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int g = 0; g < 4; g++)
        for (int half = 0; half < 2; half++) {
            __m256i packed = load_weights(block, g, half);
            w[2 * g][half] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
            w[2 * g + 1][half] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
        }
}

/* Write the dot products of R rows times `power`. Sums wrap around in int16 on the way. Starting from the bias brings
 * them back within 16*12*127. */
INLINE void dots_mxfp4(decoded w, const __m256i power[2], const mxd_act *x, size_t nblocks, size_t at, int R,
                       __m256i d[PASS_ROWS][2]) {
    for (int r = 0; r < R; r++) d[r][0] = d[r][1] = broadcast4(x->bias + 2 * (at + (size_t)r * nblocks));
    for (int g = 0; g < 8; g++)
        for (int r = 0; r < R; r++) {
            __m256i q = broadcast4(x->q + (at + (size_t)r * nblocks) * BLOCK + 4 * g);
            for (int half = 0; half < 2; half++)
                d[r][half] = _mm256_add_epi16(d[r][half], _mm256_maddubs_epi16(w[g][half], q));
        }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) d[r][half] = _mm256_madd_epi16(d[r][half], power[half]);
}

/* |w| is the unsigned operand; the sign of w moves to q. 2*128*127 fits int16. */
INLINE void dots_mxint8(decoded w, const mxd_act *x, size_t nblocks, size_t at, int R, __m256i d[PASS_ROWS][2]) {
    for (int r = 0; r < R; r++) d[r][0] = d[r][1] = _mm256_setzero_si256();
    for (int g = 0; g < 8; g++)
        for (int half = 0; half < 2; half++) {
            __m256i magnitude = _mm256_abs_epi8(w[g][half]);
            for (int r = 0; r < R; r++) {
                __m256i q = broadcast4(x->q + (at + (size_t)r * nblocks) * BLOCK + 4 * g);
                __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(q, w[g][half]));
                d[r][half] = _mm256_add_epi32(d[r][half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
}

/* Do what block_rows does for R rows, a constant. */
INLINE void some_rows(bool is_fp4, bool is_sum, block_weights *w, const mxd_act *x, size_t nblocks, size_t at, int R,
                      sums *acc) {
    const __m256i one[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
    __m256i d[PASS_ROWS][2], more[PASS_ROWS][2];
    if (is_fp4) dots_mxfp4(w->w, is_sum ? w->power : one, x, nblocks, at, R, d);
    else dots_mxint8(w->w, x, nblocks, at, R, d);
    if (is_sum) dots_mxfp4(w->residual, one, x, nblocks, at, R, more);
    for (int r = 0; r < R; r++) {
        __m256 s = _mm256_set1_ps(x->s[at + (size_t)r * nblocks]);
        for (int half = 0; half < 2; half++) {
            __m256i dot = is_sum ? _mm256_add_epi32(d[r][half], more[r][half]) : d[r][half];
            acc[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(w->scale[half], s), acc[r][half]);
        }
    }
}

INLINE __m128i load_codes(const uint8_t *block, int half) {
    return _mm_loadl_epi64((const __m128i *)(const void *)(block + 8 * half));
}

INLINE void block_rows(bool is_fp4, const uint8_t *base, const uint8_t *residual, const mxd_act *x, size_t nblocks,
                       size_t at, size_t R, sums *acc) {
    block_weights w;
    if (is_fp4) {
        decode_mxfp4(base, w.w);
        if (residual) decode_mxfp4(residual, w.residual);
    } else {
        for (int g = 0; g < 8; g++)
            for (int half = 0; half < 2; half++) w.w[g][half] = load_weights(base, g, half);
    }
    for (int half = 0; half < 2; half++) {
        __m128i codes = load_codes(base, half);
        if (residual) {
            __m128i rho = _mm_sub_epi8(codes, load_codes(residual, half));
            w.power[half] = _mm256_sllv_epi32(_mm256_set1_epi32(0x10001), _mm256_cvtepu8_epi32(rho));
            codes = load_codes(residual, half);
        }
        w.scale[half] = e8m0(codes, is_fp4 ? MXFP4_UNIT : MXINT8_UNIT);
    }
    size_t r = 0;
#define ROWS(n) some_rows(is_fp4, residual != NULL, &w, x, nblocks, at + r * nblocks, n, acc + r)
    for (; r + PASS_ROWS <= R; r += PASS_ROWS) ROWS(PASS_ROWS);
    if (R - r == 3) ROWS(3);
    else if (R - r == 2) ROWS(2);
    else if (R - r == 1) ROWS(1);
#undef ROWS
}

#include "matmul_template.h"

TARGET static float KERNEL(rmsnorm)(const float *x, const float *w, size_t n, float eps, float *y) {
    __m256 lo = _mm256_setzero_ps(), hi = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 16) { /* n is a multiple of 32 */
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        lo = _mm256_fmadd_ps(a, a, lo);
        hi = _mm256_fmadd_ps(b, b, hi);
    }
    float ss = reduce16(lo, hi);
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(ss / (float)n + eps));
    for (size_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), r), _mm256_loadu_ps(w + i)));
    return ss;
}

/* min and max return their second operand if either is NaN, so that NaN passes through as in the reference. */
INLINE __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(EXP_MOST), x);
    x = _mm256_max_ps(_mm256_set1_ps(EXP_LEAST), x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(EXP_LOG2E)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(EXP_LN2_HIGH), x), p = _mm256_set1_ps(EXP_TERM[0]);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(EXP_LN2_LOW), r);
    UNROLL for (int i = 1; i < EXP_TERMS; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_TERM[i]));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power)); /* NaN: p is NaN already */
}

/* Query heads that share the conversion of keys and values: as many as registers hold. */
enum { HEADS = 3 };

INLINE __m256 load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* Write the scores of `heads` query heads, a constant, so that a key is converted once for all of them. */
INLINE void score(const float *q, int heads, const uint16_t *k, size_t n, size_t d, float scale, float *scores) {
    for (size_t j = 0; j < n; j++) {
        __m256 lo[HEADS], hi[HEADS];
        for (int h = 0; h < heads; h++) lo[h] = hi[h] = _mm256_setzero_ps();
        for (size_t i = 0; i < d; i += 16) {
            __m256 key_lo = load_f16(k + j * d + i), key_hi = load_f16(k + j * d + i + 8);
            for (int h = 0; h < heads; h++) {
                const float *at = q + (size_t)h * d + i;
                lo[h] = _mm256_fmadd_ps(_mm256_loadu_ps(at), key_lo, lo[h]);
                hi[h] = _mm256_fmadd_ps(_mm256_loadu_ps(at + 8), key_hi, hi[h]);
            }
        }
        for (int h = 0; h < heads; h++) scores[(size_t)h * n + j] = reduce16(lo[h], hi[h]) * scale;
    }
}

/* Turn scores into weights; return the inverse of their sum. */
INLINE float softmax(float *scores, size_t n) {
    float lane[16], max = -INFINITY;
    size_t j = 0;
    __m256 most = _mm256_set1_ps(-INFINITY), lo = _mm256_setzero_ps(), hi = _mm256_setzero_ps();
    for (; j + 8 <= n; j += 8) most = _mm256_max_ps(_mm256_loadu_ps(scores + j), most); /* ignores NaN */
    _mm256_storeu_ps(lane, most);
    for (int i = 0; i < 8; i++) max = lane[i] > max ? lane[i] : max;
    for (; j < n; j++) max = scores[j] > max ? scores[j] : max;
    const __m256 m8 = _mm256_set1_ps(max);
    for (j = 0; j + 16 <= n; j += 16) {
        __m256 a = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j), m8));
        __m256 b = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j + 8), m8));
        _mm256_storeu_ps(scores + j, a);
        _mm256_storeu_ps(scores + j + 8, b);
        lo = _mm256_add_ps(lo, a);
        hi = _mm256_add_ps(hi, b);
    }
    _mm256_storeu_ps(lane, lo);
    _mm256_storeu_ps(lane + 8, hi);
    for (; j < n; j++) {
        scores[j] = mxd_exp_ref(scores[j] - max);
        lane[j % 16] += scores[j];
    }
    return 1.0f / reduce16(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8));
}

/* Write 8 * V values of every head's output, from v and out on. */
INLINE void mix(const float *scores, const float *inverse, int heads, int V, const uint16_t *v, size_t n, size_t d,
                float *out) {
    __m256 acc[HEADS][4];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < V; i++) acc[h][i] = _mm256_setzero_ps();
    for (size_t j = 0; j < n; j++)
        for (int i = 0; i < V; i++) {
            __m256 value = load_f16(v + j * d + 8 * (size_t)i);
            for (int h = 0; h < heads; h++)
                acc[h][i] = _mm256_fmadd_ps(_mm256_set1_ps(scores[(size_t)h * n + j]), value, acc[h][i]);
        }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < V; i++)
            _mm256_storeu_ps(out + (size_t)h * d + 8 * i, _mm256_mul_ps(acc[h][i], _mm256_set1_ps(inverse[h])));
}

#include "../attention_template.h"

/* ---- attention over quantized rows ---- Eight keys at a time, one per lane of the scores, so that the integer dot
 * products of a block are reduced together. */

/* Load 32 elements of a row, integers in units of its format. */
INLINE __m256i load_elements(mxd_row_format format, const uint8_t *p) {
    if (format == MXD_ROW_MXINT8) return _mm256_loadu_si256((const __m256i *)(const void *)p);
    static const int8_t tables[2][16] = {{MXD_E2M1X2(0)}, {MXD_NORMAL4_ELEMENTS}};
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_loadu_si128((const __m128i *)(const void *)tables[format == MXD_ROW_NORMAL4]));
    __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m256i nibbles = _mm256_set_m128i(_mm_srli_epi16(pairs, 4), pairs);
    return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

/* Return the scales of eight blocks times the format's unit. */
INLINE __m256 row_scales(mxd_row_format format, __m128i codes) {
    if (format != MXD_ROW_NORMAL4) return e8m0(codes, format == MXD_ROW_MXFP4 ? MXFP4_UNIT : MXINT8_UNIT);
    __m256i c = _mm256_cvtepu8_epi32(codes), fault = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(MXD_CODE_FAULT));
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(c, _mm256_set1_epi32(MXD_NORMAL4_CODES)), 20);
    return _mm256_castsi256_ps(_mm256_or_si256(bits, fault)); /* all bits set: NaN */
}

/* Return the sum of each of eight vectors. */
INLINE __m256i sum_each(const __m256i d[LANES]) {
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(d[0], d[1]), _mm256_hadd_epi32(d[2], d[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(d[4], d[5]), _mm256_hadd_epi32(d[6], d[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* acc[h] += scores of block b for `heads` query heads (a constant) and eight keys. */
INLINE void score_block(mxd_row_format format, const mxd_act *q, int heads, const uint8_t *const row[LANES], size_t d,
                        size_t b, __m256 acc[HEADS]) {
    const size_t nblocks = d / BLOCK, codes_at = nblocks * MXD_BLOCK_BYTES(format);
    uint64_t codes = 0;
    __m256i key[LANES], dots[LANES];
    for (int r = 0; r < LANES; r++) {
        codes |= (uint64_t)row[r][codes_at + b] << 8 * r;
        key[r] = load_elements(format, row[r] + b * MXD_BLOCK_BYTES(format));
    }
    __m256 scale = row_scales(format, _mm_cvtsi64_si128((int64_t)codes));
    for (int h = 0; h < heads; h++) {
        size_t at = (size_t)h * nblocks + b;
        __m256i query = _mm256_loadu_si256((const __m256i *)(const void *)(q->q + at * BLOCK));
        __m256i magnitude = _mm256_abs_epi8(query); /* two products of at most 127 x 127 fit 16 bits */
        for (int r = 0; r < LANES; r++) {
            __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(key[r], query));
            dots[r] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
        __m256 sum = _mm256_cvtepi32_ps(sum_each(dots));
        acc[h] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, _mm256_set1_ps(q->s[at])), acc[h]);
    }
}

/* acc[h] += weights times block b of a span's values. */
INLINE void mix_mx(mxd_row_format format, const float *weights, size_t ldw, int heads, const mxd_span *span, size_t d,
                   size_t b, __m256 acc[HEADS][4]) {
    const size_t stride = mxd_row_bytes(format, d), codes_at = d / BLOCK * MXD_BLOCK_BYTES(format);
    const uint8_t *row = span->v;
    for (size_t j = 0; j < span->n; j++, row += stride) {
        __m256i v = load_elements(format, row + b * MXD_BLOCK_BYTES(format));
        __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
        __m256 value[4] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8))),
                           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
                           _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(high, 8)))};
        __m256 scale = row_scales(format, _mm_set1_epi8((char)row[codes_at + b]));
        for (int h = 0; h < heads; h++) {
            __m256 w = _mm256_mul_ps(_mm256_broadcast_ss(weights + (size_t)h * ldw + j), scale);
            for (int i = 0; i < 4; i++) acc[h][i] = _mm256_fmadd_ps(w, value[i], acc[h][i]);
        }
    }
}

#define ZERO _mm256_setzero_ps()
#define SCALED(v, s) _mm256_mul_ps(v, _mm256_set1_ps(s))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#include "../attention_mx_template.h"

/* ---- quantizing, and rows of the KV cache ---- */

/* Replace the pairs at distance 1, 2 or 4 in a vector by a + b and a - b. */
INLINE __m256 butterfly(__m256 x, int half) {
    const __m256 sign = half == 1   ? _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f)
                        : half == 2 ? _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f)
                                    : _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    __m256 other = half == 1   ? _mm256_permute_ps(x, 0xb1)
                   : half == 2 ? _mm256_permute_ps(x, 0x4e)
                               : _mm256_permute2f128_ps(x, x, 1);
    return _mm256_add_ps(other, _mm256_xor_ps(x, sign)); /* the upper of a pair: a - b */
}

TARGET static void KERNEL(hadamard)(float *x, size_t d) {
    const size_t block = d & -d;
    const __m256 scale = _mm256_set1_ps(1.0f / sqrtf((float)block));
    for (size_t i = 0; i < d; i += 8) {
        __m256 v = butterfly(_mm256_loadu_ps(x + i), 1);
        _mm256_storeu_ps(x + i, butterfly(butterfly(v, 2), 4));
    }
    for (size_t half = 8; half < block; half *= 2)
        for (size_t pair = 0; pair < d; pair += 2 * half)
            for (size_t i = pair; i < pair + half; i += 8) {
                __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + half);
                _mm256_storeu_ps(x + i, _mm256_add_ps(a, b));
                _mm256_storeu_ps(x + i + half, _mm256_sub_ps(a, b));
            }
    for (size_t i = 0; i < d; i += 8) _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), scale));
}

INLINE uint32_t load_block(const float *x, __m256 in[4]) {
    const __m256i magnitude = _mm256_set1_epi32(F32_MAGNITUDE);
    __m256i m8 = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        in[i] = _mm256_loadu_ps(x + 8 * i);
        m8 = _mm256_max_epu32(m8, _mm256_and_si256(_mm256_castps_si256(in[i]), magnitude));
    }
    __m128i m4 = _mm_max_epu32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0x4e));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m4);
}

INLINE void round_block(const __m256 in[4], float up, __m256i out[4]) {
    for (int i = 0; i < 4; i++) out[i] = _mm256_cvtps_epi32(_mm256_mul_ps(in[i], _mm256_set1_ps(up)));
}

/* Return 32 integers of four vectors as bytes, saturated. Packs interleave the 128-bit halves; the permutation puts
 * them back in order. */
INLINE __m256i pack_bytes(const __m256i v[4]) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void store_activations(int8_t *q, int16_t *bias, const __m256i v[4]) {
    __m256i bytes = pack_bytes(v), pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(MXD_E2M1_BIAS), bytes);
    _mm256_storeu_si256((__m256i *)(void *)q, bytes);
    __m128i sums = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
    int32_t both = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sums));
    memcpy(bias, &both, 4);
}

INLINE void store_clamped(int8_t *out, const __m256i v[4]) {
    __m256i bytes = _mm256_max_epi8(pack_bytes(v), _mm256_set1_epi8(-127));
    _mm256_storeu_si256((__m256i *)(void *)out, bytes);
}

INLINE void store_codes(uint8_t *out, const __m256i codes[4]) {
    __m256i bytes = pack_bytes(codes);
    __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(bytes, 1), 4); /* codes are below 16 */
    _mm_storeu_si128((__m128i *)(void *)out, _mm_or_si128(_mm256_castsi256_si128(bytes), high));
}

/* Return |x| * up. */
INLINE __m256 magnitudes(__m256 x, float up) {
    return _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), _mm256_set1_ps(up));
}

/* Return sign bits as 8. */
INLINE __m256i signs(__m256 x) {
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, _mm256_set1_ps(-0.0f))), 28);
}

/* Return the nearest E2M1 magnitudes. */
INLINE __m256 round_e2m1(__m256 a) {
    const __m256 two = _mm256_set1_ps(2), four = _mm256_set1_ps(4), half = _mm256_set1_ps(0.5f);
    __m256 small = _mm256_cmp_ps(a, two, _CMP_LT_OQ), middle = _mm256_cmp_ps(a, four, _CMP_LT_OQ);
    __m256 up = _mm256_blendv_ps(_mm256_blendv_ps(half, _mm256_set1_ps(1), middle), two, small);
    __m256 step = _mm256_blendv_ps(_mm256_blendv_ps(two, _mm256_set1_ps(1), middle), half, small);
    __m256 r = _mm256_round_ps(_mm256_mul_ps(a, up), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_mul_ps(r, step), _mm256_set1_ps(6));
}

INLINE float error_e2m1(const __m256 in[4], float up) {
    __m256 lane[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < 4; i++) {
        __m256 a = magnitudes(in[i], up), u = _mm256_sub_ps(a, round_e2m1(a));
        lane[i % 2] = _mm256_fmadd_ps(u, u, lane[i % 2]);
    }
    return reduce16(lane[0], lane[1]);
}

/* Doubled, a magnitude is 0 1 2 3 4 6 8 12: the table has codes for those below 8. */
INLINE __m256i codes_e2m1(__m256 x, float up) {
    __m256i m = _mm256_cvtps_epi32(_mm256_mul_ps(round_e2m1(magnitudes(x, up)), _mm256_set1_ps(2)));
    const __m256i table = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 5, 5); /* 6 is code 5 */
    __m256i code = _mm256_permutevar8x32_epi32(table, m);
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(6), _mm256_cmpgt_epi32(m, _mm256_set1_epi32(7)));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(7), _mm256_cmpgt_epi32(m, _mm256_set1_epi32(11)));
    return _mm256_or_si256(code, _mm256_and_si256(signs(x), _mm256_cmpgt_epi32(code, _mm256_setzero_si256())));
}

/* Return the codes of the levels nearest to eight magnitudes. */
INLINE __m256i levels_normal4(__m256 a) {
    static const float bounds[7] = {MXD_NORMAL4_BOUNDS};
    __m256i code = _mm256_setzero_si256();
    for (int i = 0; i < 7; i++)
        code = _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_set1_ps(bounds[i]), _CMP_GT_OQ)));
    return code;
}

INLINE float error_normal4(const __m256 in[4], float up) {
    const __m256 levels = _mm256_cvtepi32_ps(_mm256_setr_epi32(MXD_NORMAL4_LEVELS));
    __m256 lane[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < 4; i++) {
        __m256 a = magnitudes(in[i], up), u = _mm256_sub_ps(a, _mm256_permutevar8x32_ps(levels, levels_normal4(a)));
        lane[i % 2] = _mm256_fmadd_ps(u, u, lane[i % 2]);
    }
    return reduce16(lane[0], lane[1]);
}

INLINE __m256i codes_normal4(__m256 x, float up) {
    return _mm256_or_si256(levels_normal4(magnitudes(x, up)), signs(x));
}

#include "../quantize_template.h"

/* ---- vectors ---- */

TARGET static void KERNEL(silu_mul)(const float *gate, const float *up, size_t n, float *out) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    for (size_t i = 0; i < n; i += 8) { /* n is a multiple of 32 */
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 sigmoid_inverse = _mm256_add_ps(one, exp8(_mm256_xor_ps(g, sign)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_div_ps(g, sigmoid_inverse), _mm256_loadu_ps(up + i)));
    }
}

TARGET static void KERNEL(add)(float *x, const float *y, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    for (; i < n; i++) x[i] += y[i];
}

TARGET static void KERNEL(to_f16)(const float *x, size_t n, uint16_t *out) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) out[i] = mxd_f32_to_f16(x[i]);
}

TARGET static void KERNEL(exp_weights)(const float *x, size_t n, float scale, float max, float *w) {
    size_t i = 0;
    const __m256 s = _mm256_set1_ps(scale), m = _mm256_set1_ps(max);
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(w + i, exp8(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), m), s)));
    for (; i < n; i++) w[i] = mxd_exp_ref((x[i] - max) * scale);
}

void mxd_kernels_init_avx2(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, quantize, avx2);
    MXD_BIND(k, n, matmul_mxfp4, avx2);
    MXD_BIND(k, n, matmul_mxint8, avx2);
    MXD_BIND(k, n, rmsnorm, avx2);
    MXD_BIND(k, n, attention, avx2);
    MXD_BIND(k, n, attention_mx, avx2);
    MXD_BIND(k, n, hadamard, avx2);
    MXD_BIND(k, n, store_mxint8, avx2);
    MXD_BIND(k, n, store_mxfp4, avx2);
    MXD_BIND(k, n, store_normal4, avx2);
    MXD_BIND(k, n, silu_mul, avx2);
    MXD_BIND(k, n, add, avx2);
    MXD_BIND(k, n, to_f16, avx2);
    MXD_BIND(k, n, exp_weights, avx2);
}

#endif
