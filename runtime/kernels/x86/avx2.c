/* AVX2 + FMA + F16C variants. Bound only where CPUID reports all three (src/cpu.c). */
#include "../kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 8")
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))

enum { BLOCK = MXD_BLOCK, TILE = MXD_TILE_ROWS };
enum { FP4_BYTES = MXD_MXFP4_BLOCK_BYTES, INT8_BYTES = MXD_MXINT8_BLOCK_BYTES };

/* lane i += i+8, then +4, +2, +1: the canonical tree of 16 lanes held as two vectors. */
INLINE float reduce16(__m256 lo, __m256 hi) {
    __m256 s8 = _mm256_add_ps(lo, hi);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* 32 integers of -127..127 to bytes, and their bias. Packs interleave the 128-bit halves, the permutation puts them
 * back in order. */
INLINE void store_digits(int8_t *out, int16_t *bias, const __m256i v[4]) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(void *)out, bytes);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(MXD_E2M1_BIAS), bytes);
    __m128i sums = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
    int32_t both = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sums));
    memcpy(bias, &both, 4);
}

/* 254 * d */
INLINE __m256i times_digit(__m256i d) {
    return _mm256_sub_epi32(_mm256_slli_epi32(d, 8), _mm256_slli_epi32(d, 1));
}

AVX2 static void mxd_quantize_avx2(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const float steps = out->lo ? MXD_ACT_STEPS2 : MXD_ACT_STEPS;
    for (size_t m = 0; m < rows; m++) {
        for (size_t b = 0; b < k / BLOCK; b++) {
            const float *v = x + m * ldx + b * BLOCK;
            size_t at = m * (k / BLOCK) + b;
            int16_t *bias = out->bias + at * (out->lo ? 4 : 2);
            __m256 in[4];
            __m256i amax8 = _mm256_setzero_si256();
            for (int i = 0; i < 4; i++) {
                in[i] = _mm256_loadu_ps(v + 8 * i);
                amax8 = _mm256_max_epu32(amax8, _mm256_castps_si256(_mm256_and_ps(in[i], magnitude)));
            }
            __m128i amax4 = _mm_max_epu32(_mm256_castsi256_si128(amax8), _mm256_extracti128_si256(amax8, 1));
            amax4 = _mm_max_epu32(amax4, _mm_shuffle_epi32(amax4, 0x4e));
            amax4 = _mm_max_epu32(amax4, _mm_shuffle_epi32(amax4, 0xb1));
            int fault = (uint32_t)_mm_cvtsi128_si32(amax4) >= 0x7f800000u;
            float largest = _mm_cvtss_f32(_mm_castsi128_ps(amax4));
            if (fault || largest < MXD_ACT_TINY) {
                memset(out->q + at * BLOCK, 0, BLOCK);
                if (out->lo) memset(out->lo + at * BLOCK, 0, BLOCK);
                out->s[at] = fault ? NAN : 0;
                memset(bias, 0, out->lo ? 8 : 4);
                continue;
            }
            __m256 upscale = _mm256_set1_ps(steps / largest);
            __m256i value[4], high[4];
            for (int i = 0; i < 4; i++) value[i] = _mm256_cvtps_epi32(_mm256_mul_ps(in[i], upscale));
            if (out->lo) {
                for (int i = 0; i < 4; i++) {
                    __m256 quotient = _mm256_mul_ps(_mm256_cvtepi32_ps(value[i]), _mm256_set1_ps(1.0f / MXD_ACT_DIGIT));
                    high[i] = _mm256_cvtps_epi32(quotient);
                    value[i] = _mm256_sub_epi32(value[i], times_digit(high[i]));
                }
                store_digits(out->q + at * BLOCK, bias, high);
                store_digits(out->lo + at * BLOCK, bias + 2, value);
            } else {
                store_digits(out->q + at * BLOCK, bias, value);
            }
            out->s[at] = largest / steps;
        }
    }
}

/* Scales of 8 rows times a unit (a power of two): exact, also where code 0 becomes the subnormal 2^-127. */
INLINE __m256 load_scales(const uint8_t *p, float unit) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)), 23);
    bits = _mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(unit));
}

INLINE __m256i broadcast4(const void *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

/* ---- matrix products ----
 * A block is decoded to vectors of 4 columns x 8 rows (half a tile's), w[4-column group][half]. Its product with up to
 * UNITS digit rows goes through them once, so that every four broadcast activations meet both halves. */

enum { UNITS = 4, GROUP_ROWS = 32, PREFETCH = 2048 };

typedef struct block_weights {
    __m256i w[8][2];
    __m256 scale[2];
} block_weights;

/* Digit rows of R activation rows at one block: R high digits, then R low ones if there are two. */
typedef struct digit_rows {
    const int8_t *q[UNITS];
    const int16_t *bias[UNITS];
} digit_rows;

/* Weights come as one stream: fetch what follows PREFETCH bytes later. */
INLINE void prefetch(const uint8_t *block, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)block + PREFETCH + i, _MM_HINT_T0);
}

INLINE __m256i load_weights(const uint8_t *block, int group, int half) {
    return _mm256_loadu_si256((const __m256i *)(const void *)(block + TILE + 64 * group + 32 * half));
}

/* Elements as w + 12 (0..24), because pmaddubsw wants one unsigned operand. */
INLINE void decode_mxfp4(const uint8_t *block, __m256i w[8][2]) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int g = 0; g < 4; g++)
        for (int half = 0; half < 2; half++) {
            __m256i packed = load_weights(block, g, half);
            w[2 * g][half] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, nibble));
            w[2 * g + 1][half] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
        }
}

/* Sums wrap around in int16 on the way; the bias, counted in from the start, brings them back within 16*12*127. */
INLINE void dots_mxfp4(__m256i w[8][2], const digit_rows *x, int units, __m256i d[UNITS][2]) {
    for (int u = 0; u < units; u++) d[u][0] = d[u][1] = broadcast4(x->bias[u]);
    for (int g = 0; g < 8; g++)
        for (int u = 0; u < units; u++) {
            __m256i q = broadcast4(x->q[u] + 4 * g);
            for (int half = 0; half < 2; half++)
                d[u][half] = _mm256_add_epi16(d[u][half], _mm256_maddubs_epi16(w[g][half], q));
        }
    for (int u = 0; u < units; u++)
        for (int half = 0; half < 2; half++) d[u][half] = _mm256_madd_epi16(d[u][half], _mm256_set1_epi16(1));
}

/* |w| is the unsigned operand, the sign of w moves to q: 2*128*127 fits int16. */
INLINE void dots_mxint8(__m256i w[8][2], const digit_rows *x, int units, __m256i d[UNITS][2]) {
    for (int u = 0; u < units; u++) d[u][0] = d[u][1] = _mm256_setzero_si256();
    for (int g = 0; g < 8; g++)
        for (int half = 0; half < 2; half++) {
            __m256i magnitude = _mm256_abs_epi8(w[g][half]);
            for (int u = 0; u < units; u++) {
                __m256i q = _mm256_sign_epi8(broadcast4(x->q[u] + 4 * g), w[g][half]);
                __m256i pairs = _mm256_maddubs_epi16(magnitude, q);
                d[u][half] = _mm256_add_epi32(d[u][half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
}

/* acc[r] = fma(dot, scale * s, acc[r]) for R activation rows, the first of which has its block at index `at`. */
INLINE void some_rows(int is_fp4, block_weights *w, const mxd_act *x, size_t nblocks, size_t at, int R, int digits,
                      __m256 (*acc)[2]) {
    digit_rows rows;
    __m256i d[UNITS][2];
    for (int r = 0; r < R; r++) {
        size_t block = at + (size_t)r * nblocks;
        rows.q[r] = x->q + block * BLOCK;
        rows.bias[r] = x->bias + block * 2 * (size_t)digits;
        if (digits == 2) rows.q[R + r] = x->lo + block * BLOCK, rows.bias[R + r] = rows.bias[r] + 2;
    }
    if (is_fp4) dots_mxfp4(w->w, &rows, R * digits, d);
    else dots_mxint8(w->w, &rows, R * digits, d);
    for (int r = 0; r < R; r++) {
        __m256 s = _mm256_set1_ps(x->s[at + (size_t)r * nblocks]);
        for (int half = 0; half < 2; half++) {
            __m256i dot = digits == 2 ? _mm256_add_epi32(times_digit(d[r][half]), d[R + r][half]) : d[r][half];
            acc[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(w->scale[half], s), acc[r][half]);
        }
    }
}

INLINE void block_rows(int is_fp4, const uint8_t *block, const mxd_act *x, size_t nblocks, size_t at, size_t R,
                       int digits, __m256 (*acc)[2]) {
    block_weights w;
    if (is_fp4) {
        decode_mxfp4(block, w.w);
    } else {
        for (int g = 0; g < 8; g++)
            for (int half = 0; half < 2; half++) w.w[g][half] = load_weights(block, g, half);
    }
    for (int half = 0; half < 2; half++) w.scale[half] = load_scales(block + 8 * half, is_fp4 ? 0.5f : 0.015625f);
    size_t r = 0;
#define ROWS(n) some_rows(is_fp4, &w, x, nblocks, at + r * nblocks, n, digits, acc + r)
    for (; r + UNITS / digits <= R; r += UNITS / digits) ROWS(UNITS / digits);
    if (digits == 1 && R - r == 3) ROWS(3);
    else if (R - r == 2) ROWS(2);
    else if (R - r == 1) ROWS(1);
#undef ROWS
}

/* R activation rows from m through tile t; residual may be NULL. */
INLINE void tile_rows(int is_fp4, const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t t,
                      const mxd_act *x, size_t m, size_t R, int digits, float *y, size_t ldy) {
    const size_t bytes = is_fp4 ? FP4_BYTES : INT8_BYTES;
    __m256 acc[GROUP_ROWS][2];
    for (size_t r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (size_t b = 0; b < nblocks; b++) {
        size_t offset = (t * nblocks + b) * bytes, at = m * nblocks + b;
        prefetch(base + offset, bytes);
        block_rows(is_fp4, base + offset, x, nblocks, at, R, digits, acc);
        if (!residual) continue;
        prefetch(residual + offset, bytes);
        block_rows(is_fp4, residual + offset, x, nblocks, at, R, digits, acc);
    }
    for (size_t r = 0; r < R; r++)
        for (size_t half = 0; half < 2; half++)
            _mm256_storeu_ps(y + (m + r) * ldy + t * TILE + 8 * half, acc[r][half]);
}

#define TARGET AVX2
#define MATMUL(format) mxd_matmul_##format##_avx2
#include "matmul_template.h"

AVX2 static float mxd_rmsnorm_avx2(const float *x, const float *w, size_t n, float eps, float *y) {
    __m256 lo = _mm256_setzero_ps(), hi = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 16) { /* n is a multiple of 32 */
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        lo = _mm256_fmadd_ps(a, a, lo);
        hi = _mm256_fmadd_ps(b, b, hi);
    }
    float ss = reduce16(lo, hi);
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(ss / (float)n + eps));
    for (size_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(y + i,
                         _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), r), _mm256_loadu_ps(w + i)));
    return ss;
}

/* min and max return their second operand when either is NaN, so NaN passes through as in the reference. */
INLINE __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), x);
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
    __m256 p = _mm256_set1_ps(0x1.a01a02p-13f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.6c16c2p-10f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.111112p-7f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555556p-5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.555556p-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power)); /* NaN: p is NaN already */
}

/* Query heads that share the conversion of keys and values, as far as registers go. */
enum { HEADS = 3, LANES = 8 };

INLINE __m256 load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* Scores of `heads` query heads, a constant, so that a key is converted once for all of them. */
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

/* Scores to weights; returns 1 / their sum. */
INLINE float softmax(float *scores, size_t n) {
    float max = -INFINITY;
    for (size_t j = 0; j < n; j++) max = scores[j] > max ? scores[j] : max;
    size_t j = 0;
    __m256 lo = _mm256_setzero_ps(), hi = _mm256_setzero_ps(), m8 = _mm256_set1_ps(max);
    for (; j + 16 <= n; j += 16) {
        __m256 a = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j), m8));
        __m256 b = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j + 8), m8));
        _mm256_storeu_ps(scores + j, a);
        _mm256_storeu_ps(scores + j + 8, b);
        lo = _mm256_add_ps(lo, a);
        hi = _mm256_add_ps(hi, b);
    }
    float lane[16];
    _mm256_storeu_ps(lane, lo);
    _mm256_storeu_ps(lane + 8, hi);
    for (; j < n; j++) {
        scores[j] = mxd_exp_ref(scores[j] - max);
        lane[j % 16] += scores[j];
    }
    return 1.0f / reduce16(_mm256_loadu_ps(lane), _mm256_loadu_ps(lane + 8));
}

/* 8 * V values of every head's output, from v and out on. */
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

#define ATTENTION mxd_attention_avx2
#include "../attention_template.h"

/* ---- attention over quantized rows ----
 * Eight keys at a time, one in each lane of the scores, so that the integer dot products of a block are reduced
 * together; the last ones are repeated where there are fewer. */

/* 32 elements of a row, integers in units of its format. */
INLINE __m256i load_elements(mxd_row_format format, const uint8_t *p) {
    if (format == MXD_ROW_MXINT8) return _mm256_loadu_si256((const __m256i *)(const void *)p);
    static const int8_t tables[2][16] = {{MXD_E2M1X2_ELEMENTS}, {MXD_NORMAL4_ELEMENTS}};
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_loadu_si128((const __m128i *)(const void *)tables[format == MXD_ROW_NORMAL4]));
    __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m256i nibbles = _mm256_set_m128i(_mm_srli_epi16(pairs, 4), pairs);
    return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

/* Scales of eight blocks times the format's unit. */
INLINE __m256 row_scales(mxd_row_format format, __m128i codes) {
    __m256i c = _mm256_cvtepu8_epi32(codes), bits;
    if (format == MXD_ROW_NORMAL4) {
        bits = _mm256_slli_epi32(_mm256_add_epi32(c, _mm256_set1_epi32(MXD_NORMAL4_CODES)), 20);
        __m256i fault = _mm256_cmpeq_epi32(c, _mm256_set1_epi32(MXD_CODE_FAULT));
        return _mm256_castsi256_ps(_mm256_or_si256(bits, fault)); /* all bits set: NaN */
    }
    bits = _mm256_max_epi32(_mm256_slli_epi32(c, 23), _mm256_set1_epi32(0x00400000));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(format == MXD_ROW_MXFP4 ? 0.5f : 0.015625f));
}

/* The sums of eight vectors' lanes. */
INLINE __m256i sum_each(const __m256i d[LANES]) {
    __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(d[0], d[1]), _mm256_hadd_epi32(d[2], d[3]));
    __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(d[4], d[5]), _mm256_hadd_epi32(d[6], d[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

/* acc[h] += scores of block b, of `heads` query heads (a constant) and eight keys. */
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
        __m256i digits = _mm256_loadu_si256((const __m256i *)(const void *)(q->q + at * BLOCK));
        __m256i magnitude = _mm256_abs_epi8(digits); /* two products of at most 127 x 127 fit 16 bits */
        for (int r = 0; r < LANES; r++) {
            __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(key[r], digits));
            dots[r] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        }
        __m256 sum = _mm256_cvtepi32_ps(sum_each(dots));
        acc[h] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, _mm256_set1_ps(q->s[at])), acc[h]);
    }
}

/* acc += weights times block b of a span's values. */
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

#define VECTOR __m256
#define ZERO _mm256_setzero_ps()
#define SCALED(v, s) _mm256_mul_ps(v, _mm256_set1_ps(s))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define ATTENTION_MX mxd_attention_mx_avx2
#include "../attention_mx_template.h"

/* ---- rows of the KV cache ---- */

/* a + b and a - b of the pairs at distance 1, 2 or 4 in a vector. */
INLINE __m256 butterfly(__m256 x, int half) {
    const __m256 sign = half == 1   ? _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f)
                        : half == 2 ? _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f)
                                    : _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    __m256 other = half == 1   ? _mm256_permute_ps(x, 0xb1)
                   : half == 2 ? _mm256_permute_ps(x, 0x4e)
                               : _mm256_permute2f128_ps(x, x, 1);
    return _mm256_add_ps(other, _mm256_xor_ps(x, sign)); /* the upper of a pair: a - b */
}

AVX2 static void mxd_hadamard_avx2(float *x, size_t d) {
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

/* Bits of the largest magnitude of 32 values. */
INLINE uint32_t largest_bits(const __m256 in[4]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m8 = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) m8 = _mm256_max_epu32(m8, _mm256_and_si256(_mm256_castps_si256(in[i]), magnitude));
    __m128i m4 = _mm_max_epu32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0x4e));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m4);
}

/* 2^(code - 127), for the codes of normal numbers. */
INLINE __m256 power_of_two(uint32_t code) {
    return _mm256_castsi256_ps(_mm256_set1_epi32((int32_t)(code << 23)));
}

/* 32 integers of four vectors as bytes. */
INLINE __m256i pack_bytes(const __m256i v[4]) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* Load a block; 1 if it is neither (nearly) nothing nor faulty, else write its code and zeros. */
INLINE int load_block(const float *x, __m256 in[4], uint32_t *exponent, uint8_t *elements, size_t bytes,
                      uint8_t *code) {
    for (int i = 0; i < 4; i++) in[i] = _mm256_loadu_ps(x + 8 * i);
    uint32_t bits = largest_bits(in);
    float largest;
    memcpy(&largest, &bits, 4);
    *exponent = bits >> 23;
    if (bits < 0x7f800000u && largest >= MXD_ACT_TINY) return 1;
    memset(elements, 0, bytes);
    *code = bits >= 0x7f800000u ? MXD_CODE_FAULT : 0;
    return 0;
}

AVX2 static void mxd_store_mxint8_avx2(const float *x, size_t d, uint8_t *row) {
    for (size_t b = 0; b < d / BLOCK; b++) {
        __m256 in[4];
        uint32_t exponent;
        if (!load_block(x + b * BLOCK, in, &exponent, row + b * BLOCK, BLOCK, row + d + b)) continue;
        __m256i q[4];
        for (int i = 0; i < 4; i++)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(in[i], power_of_two(127 + 6 + 127 - exponent)));
        __m256i bytes = _mm256_max_epi8(pack_bytes(q), _mm256_set1_epi8(-127)); /* packing saturates at 127, -128 */
        _mm256_storeu_si256((__m256i *)(void *)(row + b * BLOCK), bytes);
        row[d + b] = (uint8_t)exponent;
    }
}

/* The nearest E2M1 magnitudes. */
INLINE __m256 round_e2m1(__m256 a) {
    const __m256 two = _mm256_set1_ps(2), four = _mm256_set1_ps(4), half = _mm256_set1_ps(0.5f);
    __m256 small = _mm256_cmp_ps(a, two, _CMP_LT_OQ), middle = _mm256_cmp_ps(a, four, _CMP_LT_OQ);
    __m256 up = _mm256_blendv_ps(_mm256_blendv_ps(half, _mm256_set1_ps(1), middle), two, small);
    __m256 step = _mm256_blendv_ps(_mm256_blendv_ps(two, _mm256_set1_ps(1), middle), half, small);
    __m256 r = _mm256_round_ps(_mm256_mul_ps(a, up), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_min_ps(_mm256_mul_ps(r, step), _mm256_set1_ps(6));
}

INLINE float error_e2m1(const __m256 in[4], __m256 up) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 lane[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < 4; i++) {
        __m256 a = _mm256_mul_ps(_mm256_andnot_ps(sign, in[i]), up), u = _mm256_sub_ps(a, round_e2m1(a));
        lane[i % 2] = _mm256_fmadd_ps(u, u, lane[i % 2]);
    }
    return reduce16(lane[0], lane[1]);
}

/* Codes of eight values: doubled, a magnitude is 0 1 2 3 4 6 8 12, so what lies above 4 is pulled down. */
INLINE __m256i codes_e2m1(__m256 x, __m256 up) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256i m = _mm256_cvtps_epi32(_mm256_mul_ps(round_e2m1(_mm256_mul_ps(_mm256_andnot_ps(sign, x), up)),
                                                 _mm256_set1_ps(2)));
    const __m256i table = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 5, 5); /* 6 is code 5 */
    __m256i code = _mm256_permutevar8x32_epi32(table, m);
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(6), _mm256_cmpgt_epi32(m, _mm256_set1_epi32(7)));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(7), _mm256_cmpgt_epi32(m, _mm256_set1_epi32(11)));
    __m256i negative = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, sign)), 28);
    return _mm256_or_si256(code, _mm256_and_si256(negative, _mm256_cmpgt_epi32(code, _mm256_setzero_si256())));
}

/* 32 codes of four bits as 16 bytes. */
INLINE void store_codes(const __m256i codes[4], uint8_t *out) {
    __m256i bytes = pack_bytes(codes);
    __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(bytes, 1), 4); /* codes are below 16 */
    _mm_storeu_si128((__m128i *)(void *)out, _mm_or_si128(_mm256_castsi256_si128(bytes), high));
}

AVX2 static void mxd_store_mxfp4_avx2(const float *x, size_t d, uint8_t *row) {
    for (size_t b = 0; b < d / BLOCK; b++) {
        __m256 in[4];
        uint32_t exponent;
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b;
        if (!load_block(x + b * BLOCK, in, &exponent, out, BLOCK / 2, code)) continue;
        uint32_t e = exponent - 2; /* biased; the inverse of 2^e has the code 254 - e */
        e += 4 * error_e2m1(in, power_of_two(253 - e)) < error_e2m1(in, power_of_two(254 - e));
        __m256i codes[4];
        for (int i = 0; i < 4; i++) codes[i] = codes_e2m1(in[i], power_of_two(254 - e));
        store_codes(codes, out);
        *code = (uint8_t)e;
    }
}

/* Codes of the levels nearest to eight magnitudes in units of the scale. */
INLINE __m256i codes_normal4(__m256 a) {
    static const float bounds[7] = {MXD_NORMAL4_BOUNDS};
    __m256i code = _mm256_setzero_si256();
    for (int i = 0; i < 7; i++)
        code = _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(a, _mm256_set1_ps(bounds[i]), _CMP_GT_OQ)));
    return code;
}

INLINE float error_normal4(const __m256 in[4], float scale) {
    const __m256 sign = _mm256_set1_ps(-0.0f), up = _mm256_set1_ps(1.0f / scale);
    const __m256 levels = _mm256_cvtepi32_ps(_mm256_setr_epi32(MXD_NORMAL4_LEVELS));
    __m256 lane[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < 4; i++) {
        __m256 a = _mm256_mul_ps(_mm256_andnot_ps(sign, in[i]), up);
        __m256 u = _mm256_sub_ps(a, _mm256_permutevar8x32_ps(levels, codes_normal4(a)));
        lane[i % 2] = _mm256_fmadd_ps(u, u, lane[i % 2]);
    }
    return reduce16(lane[0], lane[1]) * scale * scale;
}

INLINE float normal4_scale(int32_t code) {
    uint32_t bits = (uint32_t)(code + MXD_NORMAL4_CODES) << 20;
    float scale;
    memcpy(&scale, &bits, 4);
    return scale;
}

INLINE int32_t best_scale(const __m256 in[4], uint32_t largest) {
    float x, least = INFINITY;
    memcpy(&x, &largest, 4);
    x /= 127;
    memcpy(&largest, &x, 4);
    int32_t first = (int32_t)(largest >> 20) - MXD_NORMAL4_CODES, best = 254;
    for (int32_t c = first + MXD_NORMAL4_FIRST; c <= first + MXD_NORMAL4_LAST; c++) {
        int32_t code = c < 0 ? 0 : c > 254 ? 254 : c;
        float error = error_normal4(in, normal4_scale(code));
        if (error < least) least = error, best = code;
    }
    return best;
}

AVX2 static void mxd_store_normal4_avx2(const float *x, size_t d, uint8_t *row) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (size_t b = 0; b < d / BLOCK; b++) {
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b;
        __m256 in[4];
        __m256i codes[4];
        for (int i = 0; i < 4; i++) in[i] = _mm256_loadu_ps(x + b * BLOCK + 8 * i);
        uint32_t largest = largest_bits(in);
        if (largest >= 0x7f800000u) {
            memset(out, 0, BLOCK / 2);
            *code = MXD_CODE_FAULT;
            continue;
        }
        *code = (uint8_t)best_scale(in, largest);
        __m256 up = _mm256_set1_ps(1.0f / normal4_scale(*code));
        for (int i = 0; i < 4; i++) {
            __m256i negative = _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(in[i], sign)), 28);
            codes[i] = _mm256_or_si256(codes_normal4(_mm256_mul_ps(_mm256_andnot_ps(sign, in[i]), up)), negative);
        }
        store_codes(codes, out);
    }
}

AVX2 static void mxd_silu_mul_avx2(const float *gate, const float *up, size_t n, float *out) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    for (size_t i = 0; i < n; i += 8) { /* n is a multiple of 32 */
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 sigmoid_inverse = _mm256_add_ps(one, exp8(_mm256_xor_ps(g, sign)));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_div_ps(g, sigmoid_inverse), _mm256_loadu_ps(up + i)));
    }
}

AVX2 static void mxd_add_avx2(float *x, const float *y, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    for (; i < n; i++) x[i] += y[i];
}

AVX2 static void mxd_to_f16_avx2(const float *x, size_t n, uint16_t *out) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++) out[i] = mxd_f32_to_f16(x[i]);
}

AVX2 static void mxd_exp_weights_avx2(const float *x, size_t n, float scale, float max, float *w) {
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

#else
typedef int mxd_avx2_not_on_this_architecture;
#endif
