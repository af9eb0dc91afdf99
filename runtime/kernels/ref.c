/* SPDX-License-Identifier: Apache-2.0 */
/* The scalar reference of every kernel: the specification (docs/arithmetic.md). Written for reading, not for speed.
 * Built with -DMXD_DEBUG, it checks what README.md demands of its callers. */
#undef NDEBUG /* which some compilers define with -O3 */
#ifndef MXD_DEBUG
#define NDEBUG
#endif
#include <assert.h>

#include "level.h"

#ifdef __FAST_MATH__
#error "mxdraft promises the same bits everywhere: build without -ffast-math"
#endif
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "mxdraft detects NaN and Inf: build without -ffinite-math-only"
#endif

enum { LANES = 16 }; /* accumulators of sum16 */

static const int8_t E2M1X2[16] = {MXD_E2M1X2(0)};
static const int8_t NORMAL4[16] = {MXD_NORMAL4_ELEMENTS};

/* Whether a head of d elements can be quantized. */
#define IS_BLOCKED(d) ((d) % BLOCK == 0 && (d) <= MXD_MAX_HEAD_DIM)

/* Return 2^(code-127), for code 0..254. */
static float e8m0(uint8_t code) {
    return from_bits(code ? (uint32_t)code << 23 : E8M0_LEAST);
}

float mxd_reduce16_ref(const float lane_in[LANES]) {
    float lane[LANES];
    memcpy(lane, lane_in, sizeof lane);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* Return the bits of a block's largest magnitude. */
static uint32_t largest_bits(const float *x) {
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = to_bits(x[i]) & F32_MAGNITUDE;
        if (bits > largest) largest = bits;
    }
    return largest;
}

static void mxd_quantize_ref(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out) {
    assert(k % BLOCK == 0 && ldx >= k);
    const float steps = MXD_ACT_STEPS;
    for (size_t m = 0; m < rows; m++) {
        for (size_t b = 0; b < k / BLOCK; b++) {
            const float *v = x + m * ldx + b * BLOCK;
            size_t at = m * (k / BLOCK) + b;
            float largest = from_bits(largest_bits(v));
            bool fault = !isfinite(largest); /* NaN or Inf must reach the output */
            bool present = !fault && largest >= MXD_ACT_TINY;
            float upscale = present ? steps / largest : 0;
            int16_t sums[2] = {0};
            for (int i = 0; i < BLOCK; i++) {
                /* At most steps * (1 + 2^-23), which rounds to steps. */
                int8_t q = present ? (int8_t)rintf(v[i] * upscale) : 0;
                out->q[at * BLOCK + (size_t)i] = q;
                sums[i / 2 % 2] += q;
            }
            for (size_t i = 0; i < 2; i++) out->bias[at * 2 + i] = (int16_t)(-MXD_E2M1_BIAS * sums[i]);
            out->s[at] = fault ? NAN : present ? largest / steps : 0;
        }
    }
}

static int32_t dot_mxfp4(const uint8_t *block, int row, const int8_t *q) {
    int32_t d = 0;
    for (int g = 0; g < 4; g++) {
        const uint8_t *w = block + TILE + 64 * g + 4 * row;
        for (int j = 0; j < 4; j++) {
            d += E2M1X2[w[j] & 15] * q[8 * g + j];
            d += E2M1X2[w[j] >> 4] * q[8 * g + 4 + j];
        }
    }
    return d;
}

static int32_t dot_mxint8(const uint8_t *block, int row, const int8_t *q) {
    int32_t d = 0;
    for (int g = 0; g < 8; g++)
        for (int j = 0; j < 4; j++) d += (int8_t)block[TILE + 64 * g + 4 * row + j] * q[4 * g + j];
    return d;
}

static void mxd_matmul_mxfp4_ref(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                 const mxd_act *x, size_t rows, float *y, size_t ldy) {
    assert(ldy >= ntiles * TILE);
    for (size_t t = 0; t < ntiles; t++)
        for (size_t m = 0; m < rows; m++)
            for (int i = 0; i < TILE; i++) {
                float acc = 0;
                for (size_t b = 0; b < nblocks; b++) {
                    const uint8_t *block = base + (t * nblocks + b) * FP4_BYTES;
                    const int8_t *q = x->q + (m * nblocks + b) * BLOCK;
                    uint8_t code = block[i];
                    int32_t d = dot_mxfp4(block, i, q);
                    if (residual) {
                        block = residual + (t * nblocks + b) * FP4_BYTES;
                        int rho = code - block[i];
                        assert(rho >= 0 && rho <= MXD_RESIDUAL_REACH);
                        code = block[i];
                        d = d * (1 << rho) + dot_mxfp4(block, i, q); /* the sum of 2^rho * b + r times q */
                    }
                    acc = fmaf((float)d, e8m0(code) * (x->s[m * nblocks + b] * MXFP4_UNIT), acc);
                }
                y[m * ldy + t * TILE + (size_t)i] = acc;
            }
}

static void mxd_matmul_mxint8_ref(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                                  const mxd_act *x, size_t rows, float *y, size_t ldy) {
    assert(!residual && ldy >= ntiles * TILE);
    (void)residual;
    for (size_t t = 0; t < ntiles; t++)
        for (size_t m = 0; m < rows; m++)
            for (int i = 0; i < TILE; i++) {
                float acc = 0;
                for (size_t b = 0; b < nblocks; b++) {
                    const uint8_t *block = base + (t * nblocks + b) * INT8_BYTES;
                    int32_t d = dot_mxint8(block, i, x->q + (m * nblocks + b) * BLOCK);
                    acc = fmaf((float)d, e8m0(block[i]) * (x->s[m * nblocks + b] * MXINT8_UNIT), acc);
                }
                y[m * ldy + t * TILE + (size_t)i] = acc;
            }
}

static float mxd_rmsnorm_ref(const float *x, const float *w, size_t n, float eps, float *y) {
    assert(n % BLOCK == 0);
    float lane[LANES] = {0};
    for (size_t i = 0; i < n; i++) lane[i % LANES] = fmaf(x[i], x[i], lane[i % LANES]);
    float ss = mxd_reduce16_ref(lane);
    float r = 1.0f / sqrtf(ss / (float)n + eps);
    for (size_t i = 0; i < n; i++) y[i] = (x[i] * r) * w[i];
    return ss;
}

static void mxd_rope_ref(float *x, const float *c, const float *s, size_t d) {
    assert(d % 2 == 0 && d <= MXD_MAX_HEAD_DIM);
    size_t half = d / 2;
    for (size_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = fmaf(a, c[i], -(b * s[i]));
        x[i + half] = fmaf(b, c[i], a * s[i]);
    }
}

float mxd_exp_ref(float x) {
    x = x > EXP_MOST ? EXP_MOST : x; /* comparisons written so that NaN stays NaN */
    x = x < EXP_LEAST ? EXP_LEAST : x;
    float n = rintf(x * EXP_LOG2E), r = fmaf(-n, EXP_LN2_HIGH, x);
    r = fmaf(-n, EXP_LN2_LOW, r);
    float p = EXP_TERM[0];
    for (int i = 1; i < EXP_TERMS; i++) p = fmaf(p, r, EXP_TERM[i]);
    if (n != n) return n;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

float mxd_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 31) return from_bits(sign | F32_INFINITY | m << 13);
    if (e) return from_bits(sign | (e + 112) << 23 | m << 13);
    return from_bits(sign | to_bits((float)m * 0x1p-24f));
}

uint16_t mxd_f32_to_f16(float x) {
    uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000, a = bits & F32_MAGNITUDE;
    if (a > F32_INFINITY) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
    if (a < 0x38800000u) {                                  /* below 2^-14: subnormal, in units of 2^-24 */
        float scaled = rintf(from_bits(a) * 0x1p24f);
        return (uint16_t)(sign | (uint32_t)scaled);
    }
    uint32_t rounded = a + 0xfffu + ((a >> 13) & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

/* Turn scores into weights in place; return the inverse of their sum. */
static float softmax(float *scores, size_t n) {
    float max = -INFINITY, lane[LANES] = {0};
    for (size_t j = 0; j < n; j++) max = scores[j] > max ? scores[j] : max;
    for (size_t j = 0; j < n; j++) {
        scores[j] = mxd_exp_ref(scores[j] - max);
        lane[j % LANES] += scores[j];
    }
    return 1.0f / mxd_reduce16_ref(lane);
}

static void attend(const float *q, const uint16_t *k, const uint16_t *v, size_t n, size_t d, float scale, float *scores,
                   float *out) {
    for (size_t j = 0; j < n; j++) {
        float lane[LANES] = {0};
        for (size_t i = 0; i < d; i++) lane[i % LANES] = fmaf(q[i], mxd_f16_to_f32(k[j * d + i]), lane[i % LANES]);
        scores[j] = mxd_reduce16_ref(lane) * scale;
    }
    float inverse = softmax(scores, n);
    for (size_t i = 0; i < d; i++) {
        float acc = 0;
        for (size_t j = 0; j < n; j++) acc = fmaf(scores[j], mxd_f16_to_f32(v[j * d + i]), acc);
        out[i] = acc * inverse;
    }
}

void mxd_attention_ref(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d,
                       float scale, float *scores, float *out) {
    assert(heads && n && d % 2 == 0 && d <= MXD_MAX_HEAD_DIM);
    for (size_t h = 0; h < heads; h++) attend(q + h * d, k, v, n, d, scale, scores + h * n, out + h * d);
}

/* ---- quantized rows of the KV cache ---- */

size_t mxd_row_bytes(mxd_row_format format, size_t d) {
    return format == MXD_ROW_F16 ? 2 * d : d / BLOCK * (MXD_BLOCK_BYTES(format) + 1);
}

/* Return element i of a row, an integer in units of the format. */
static int32_t element(mxd_row_format format, const uint8_t *row, size_t i) {
    if (format == MXD_ROW_MXINT8) return (int8_t)row[i];
    uint8_t pair = row[i / BLOCK * (BLOCK / 2) + i % (BLOCK / 2)];
    uint8_t code = i % BLOCK < BLOCK / 2 ? pair & 15 : pair >> 4;
    return format == MXD_ROW_MXFP4 ? E2M1X2[code] : NORMAL4[code];
}

/* Return the scale of block b times the unit: exact. E8M0's code 255 becomes infinity, which times an element, 0, is
 * NaN. */
static float row_scale(mxd_row_format format, const uint8_t *row, size_t d, size_t b) {
    uint8_t code = row[mxd_row_bytes(format, d) - d / BLOCK + b];
    if (format == MXD_ROW_NORMAL4) return code == MXD_CODE_FAULT ? NAN : normal4_scale(code);
    return e8m0(code) * (format == MXD_ROW_MXINT8 ? MXINT8_UNIT : MXFP4_UNIT);
}

static float score_mx(const mxd_act *q, size_t head, mxd_row_format format, const uint8_t *k, size_t d) {
    float acc = 0;
    for (size_t b = 0; b < d / BLOCK; b++) {
        size_t at = head * (d / BLOCK) + b;
        int32_t dot = 0;
        for (size_t i = 0; i < BLOCK; i++) dot += q->q[at * BLOCK + i] * element(format, k, b * BLOCK + i);
        acc = fmaf((float)dot, row_scale(format, k, d, b) * q->s[at], acc);
    }
    return acc;
}

static void mxd_attention_mx_ref(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d,
                                 float scale, float *scores, float *out) {
    size_t n = 0;
    for (size_t s = 0; s < count; s++) n += spans[s].n;
    assert(heads && n && IS_BLOCKED(d));
    for (size_t h = 0; h < heads; h++) {
        float *w = scores + h * n;
        size_t at = 0;
        for (const mxd_span *s = spans; s < spans + count; s++)
            for (size_t j = 0; j < s->n; j++)
                w[at++] = score_mx(q, h, s->format, s->k + j * mxd_row_bytes(s->format, d), d) * scale;
        float inverse = softmax(w, n);
        for (size_t i = 0; i < d; i++) {
            float acc = 0;
            at = 0;
            for (const mxd_span *s = spans; s < spans + count; s++)
                for (size_t j = 0; j < s->n; j++) {
                    const uint8_t *v = s->v + j * mxd_row_bytes(s->format, d);
                    acc = fmaf(w[at++] * row_scale(s->format, v, d, i / BLOCK), (float)element(s->format, v, i), acc);
                }
            out[h * d + i] = acc * inverse;
        }
    }
}

static void mxd_hadamard_ref(float *x, size_t d) {
    assert(IS_BLOCKED(d));
    size_t block = d & -d;
    float scale = 1.0f / sqrtf((float)block);
    for (size_t start = 0; start < d; start += block) {
        for (size_t half = 1; half < block; half *= 2)
            for (size_t i = start; i < start + block; i++) {
                if ((i - start) & half) continue;
                float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
        for (size_t i = start; i < start + block; i++) x[i] *= scale;
    }
}

/* Return floor(log2) of a block's largest magnitude, NOTHING if it is below MXD_ACT_TINY, FAULT for NaN or Inf. */
enum { NOTHING = -1000, FAULT = 1000 };

static int block_exponent(const float *x) {
    uint32_t largest = largest_bits(x);
    if (largest >= F32_INFINITY) return FAULT;
    return from_bits(largest) < MXD_ACT_TINY ? NOTHING : (int)(largest >> 23) - 127;
}

static float power_of_two(int e) { /* normal */
    return from_bits((uint32_t)(e + 127) << 23);
}

static void mxd_store_mxint8_ref(const float *x, size_t d, uint8_t *row) {
    assert(IS_BLOCKED(d));
    for (size_t b = 0; b < d / BLOCK; b++) {
        int e = block_exponent(x + b * BLOCK);
        bool known = e != NOTHING && e != FAULT;
        float up = known ? power_of_two(6 - e) : 0;
        for (size_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
            int32_t q = known ? (int32_t)rintf(x[i] * up) : 0;
            row[i] = (uint8_t)(int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
        }
        row[d + b] = e == FAULT ? MXD_CODE_FAULT : e == NOTHING ? 0 : (uint8_t)(e + 127);
    }
}

/* Return the nearest E2M1 magnitude, ties to the even code, in units of 2^e. */
static float round_e2m1(float a) {
    float step = a < 2 ? 0.5f : a < 4 ? 1.0f : 2.0f;
    float r = rintf(a * (1 / step)) * step;
    return r > 6 ? 6 : r;
}

/* Return the squared error of a block in units of 2^e, by sum16. */
static float error_e2m1(const float *x, float up) {
    float lane[LANES] = {0};
    for (int i = 0; i < BLOCK; i++) {
        float a = fabsf(x[i]) * up, u = a - round_e2m1(a);
        lane[i % LANES] = fmaf(u, u, lane[i % LANES]);
    }
    return mxd_reduce16_ref(lane);
}

static uint8_t code_e2m1(float x, float up) {
    float r = round_e2m1(fabsf(x) * up) * 2;
    uint8_t code = 0;
    while ((float)E2M1X2[code] < r) code++;
    return code && x < 0 ? code | 8 : code;
}

static void mxd_store_mxfp4_ref(const float *x, size_t d, uint8_t *row) {
    assert(IS_BLOCKED(d));
    for (size_t b = 0; b < d / BLOCK; b++) {
        const float *v = x + b * BLOCK;
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b;
        int e = block_exponent(v);
        if (e == NOTHING || e == FAULT) {
            memset(out, 0, BLOCK / 2);
            *code = e == FAULT ? MXD_CODE_FAULT : 0;
            continue;
        }
        e -= 2; /* the largest is 4 .. 8 units of 2^e, or half as many of the next power: whichever errs less */
        e += 4 * error_e2m1(v, power_of_two(-e - 1)) < error_e2m1(v, power_of_two(-e));
        for (int i = 0; i < BLOCK / 2; i++)
            out[i] = (uint8_t)(code_e2m1(v[i], power_of_two(-e)) | code_e2m1(v[i + BLOCK / 2], power_of_two(-e)) << 4);
        *code = (uint8_t)(e + 127);
    }
}

/* Return the code of the level nearest to a magnitude in units of the scale. */
static uint8_t code_normal4(float a) {
    static const float bounds[7] = {MXD_NORMAL4_BOUNDS};
    uint8_t code = 0;
    for (int i = 0; i < 7; i++) code += a > bounds[i];
    return code;
}

/* Return the squared error of a block, by sum16. */
static float error_normal4(const float *x, float scale) {
    float lane[LANES] = {0}, up = 1.0f / scale;
    for (int i = 0; i < BLOCK; i++) {
        float a = fabsf(x[i]) * up, u = a - (float)NORMAL4[code_normal4(a)];
        lane[i % LANES] = fmaf(u, u, lane[i % LANES]);
    }
    return mxd_reduce16_ref(lane) * scale * scale;
}

/* Return the code of the scale with the least error, the smaller one among equals. */
static uint8_t best_scale(const float *x, float largest) {
    int32_t first = (int32_t)(to_bits(largest / 127) >> 20) - MXD_NORMAL4_CODES, best = 254;
    float least = INFINITY;
    for (int32_t c = first + MXD_NORMAL4_FIRST; c <= first + MXD_NORMAL4_LAST; c++) {
        int32_t code = c < 0 ? 0 : c > 254 ? 254 : c;
        float error = error_normal4(x, normal4_scale(code));
        if (error < least) {
            least = error;
            best = code;
        }
    }
    return (uint8_t)best;
}

static void mxd_store_normal4_ref(const float *x, size_t d, uint8_t *row) {
    assert(IS_BLOCKED(d));
    for (size_t b = 0; b < d / BLOCK; b++) {
        const float *v = x + b * BLOCK;
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b, codes[BLOCK];
        float largest = from_bits(largest_bits(v));
        if (!isfinite(largest)) {
            memset(out, 0, BLOCK / 2);
            *code = MXD_CODE_FAULT;
            continue;
        }
        *code = best_scale(v, largest);
        float up = 1.0f / normal4_scale(*code);
        for (int i = 0; i < BLOCK; i++)
            codes[i] = (uint8_t)(code_normal4(fabsf(v[i]) * up) | (to_bits(v[i]) >> 31) << 3);
        for (int i = 0; i < BLOCK / 2; i++) out[i] = (uint8_t)(codes[i] | codes[i + BLOCK / 2] << 4);
    }
}

void mxd_load_mx_ref(mxd_row_format format, const uint8_t *row, size_t d, float *x) {
    for (size_t i = 0; i < d; i++) x[i] = row_scale(format, row, d, i / BLOCK) * (float)element(format, row, i);
}

static void mxd_silu_mul_ref(const float *gate, const float *up, size_t n, float *out) {
    assert(n % BLOCK == 0);
    for (size_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + mxd_exp_ref(-gate[i])) * up[i];
}

static void mxd_add_ref(float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] += y[i];
}

static void mxd_to_f16_ref(const float *x, size_t n, uint16_t *out) {
    for (size_t i = 0; i < n; i++) out[i] = mxd_f32_to_f16(x[i]);
}

static void mxd_exp_weights_ref(const float *x, size_t n, float scale, float max, float *w) {
    for (size_t i = 0; i < n; i++) w[i] = mxd_exp_ref((x[i] - max) * scale);
}

void mxd_kernels_init_ref(mxd_kernels *k, mxd_kernel_names *n) {
#define BIND(type, op) MXD_BIND(k, n, op, ref);
    MXD_KERNELS(BIND)
}
