/* SPDX-License-Identifier: Apache-2.0 */
/* NEON for armv8.0-a (Cortex-A53, A72): no dotprod, no LSE. The baseline of every aarch64 build. */
#include "neon.h"

#if defined(__aarch64__)

#define TARGET
#define KERNEL(op) mxd_##op##_neon

/* ---- matrix products ---- */

enum { FEW_ROWS = 2, PASS_ROWS = 2, VECTORS = 4 };

/* Multiply 4 rows x 4 columns by broadcast activations, into 8 lanes of int16 for two rows each. Assembler, because the
 * compiler sees that both halves of a broadcast are equal and then spends an instruction on moving the weights' upper
 * half down; volatile, so that it does not move these so far that it spills accumulators. */
INLINE void multiply(int8x16_t w, int8x16_t q, int16x8_t *d01, int16x8_t *d23) {
    __asm__ volatile("smull %0.8h, %1.8b, %2.8b" : "=w"(*d01) : "w"(w), "w"(q));
    __asm__ volatile("smull2 %0.8h, %1.16b, %2.16b" : "=w"(*d23) : "w"(w), "w"(q));
}

INLINE void multiply_add(int8x16_t w, int8x16_t q, int16x8_t *d01, int16x8_t *d23) {
    __asm__ volatile("smlal %0.8h, %1.8b, %2.8b" : "+w"(*d01) : "w"(w), "w"(q));
    __asm__ volatile("smlal2 %0.8h, %1.16b, %2.16b" : "+w"(*d23) : "w"(w), "w"(q));
}

/* Widen 8 sums of two products and add neighbours: to `sum`, or to 0 if they are the first. Assembler for the same
 * reason as above. */
INLINE void widen(int16x8_t products, bool first, int32x4_t *sum) {
    if (first) __asm__ volatile("saddlp %0.4s, %1.8h" : "=w"(*sum) : "w"(products));
    else __asm__ volatile("sadalp %0.4s, %1.8h" : "+w"(*sum) : "w"(products));
}

/* Load columns 8*pair .. 8*pair+3 of an activation row into every lane of q0, the next four into those of q1. */
INLINE void broadcast_pair(const int8_t *q, int pair, int8x16_t *q0, int8x16_t *q1) {
    int32x2_t eight = vreinterpret_s32_s8(vld1_s8(q + 8 * pair));
    *q0 = vreinterpretq_s8_s32(vdupq_lane_s32(eight, 0));
    *q1 = vreinterpretq_s8_s32(vdupq_lane_s32(eight, 1));
}

/* Multiply vector v of 8 columns: R rows. Each sum holds 2 rows x 4 columns. Products accumulate in int16 (8 groups of
 * columns of at most 12*127 fit); the four columns of a row are added at the end of the block. */
INLINE void multiply_small(int8x16x2_t columns, bool first, const int8x16_t *q0, const int8x16_t *q1, int R, int v,
                           int16x8_t (*d01)[4], int16x8_t (*d23)[4]) {
    UNROLL for (int r = 0; r < R; r++) {
        if (first) multiply(columns.val[0], q0[r], &d01[r][v], &d23[r][v]);
        else multiply_add(columns.val[0], q0[r], &d01[r][v], &d23[r][v]);
    }
    UNROLL for (int r = 0; r < R; r++) multiply_add(columns.val[1], q1[r], &d01[r][v], &d23[r][v]);
}

/* The same where products of bytes reach 128*127, so that two groups fit int16 before they are widened. */
INLINE void multiply_large(int8x16x2_t columns, bool first, const int8x16_t *q0, const int8x16_t *q1, int R, int v,
                           int32x4_t (*d01)[4], int32x4_t (*d23)[4]) {
    UNROLL for (int r = 0; r < R; r++) {
        int16x8_t p01, p23;
        multiply(columns.val[0], q0[r], &p01, &p23);
        multiply_add(columns.val[1], q1[r], &p01, &p23);
        widen(p01, first, &d01[r][v]);
        widen(p23, first, &d23[r][v]);
    }
}

INLINE void dots(elements form, const weights *w, const int8_t *const q[PASS_ROWS], int R, int v0, int V,
                 int32x4_t d[PASS_ROWS][4]) {
    const bool small = form == PACKED || form == DECODED;
    int16x8_t small01[PASS_ROWS][4], small23[PASS_ROWS][4];
    int32x4_t d01[PASS_ROWS][4], d23[PASS_ROWS][4];
    UNROLL for (int pair = 0; pair < 4; pair++) {
        int8x16_t q0[PASS_ROWS], q1[PASS_ROWS];
        UNROLL for (int r = 0; r < R; r++) broadcast_pair(q[r], pair, &q0[r], &q1[r]);
#define MULTIPLY(columns, v)                                                              \
    (small ? multiply_small(columns, pair == 0, q0, q1, R, v, small01, small23)           \
           : multiply_large(columns, pair == 0, q0, q1, R, v, d01, d23))
        UNROLL for (int v = 0; v < V; v += 2) { /* one instruction loads two vectors, if nothing comes in between */
            int8x16x2_t even = load_pair(form, w, pair, v0 + v), odd = load_pair(form, w, pair, v0 + v + 1);
            MULTIPLY(even, v);
            MULTIPLY(odd, v + 1);
        }
#undef MULTIPLY
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++)
            d[r][v] = small ? vpaddlq_s16(vpaddq_s16(small01[r][v], small23[r][v])) : vpaddq_s32(d01[r][v], d23[r][v]);
}

#include "matmul_template.h"

static float KERNEL(rmsnorm)(const float *x, const float *w, size_t n, float eps, float *y) {
    float32x4_t lane[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (size_t i = 0; i < n; i += 16) /* n is a multiple of 32 */
        for (int j = 0; j < 4; j++) {
            float32x4_t a = vld1q_f32(x + i + 4 * j);
            lane[j] = vfmaq_f32(lane[j], a, a);
        }
    float ss = reduce16(lane);
    float r = 1.0f / sqrtf(ss / (float)n + eps);
    for (size_t i = 0; i < n; i += 4) vst1q_f32(y + i, vmulq_f32(vmulq_n_f32(vld1q_f32(x + i), r), vld1q_f32(w + i)));
    return ss;
}

INLINE float32x4_t load_f16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

/* Write the scores of `heads` query heads, a constant, so that a key is converted once for all of them. */
INLINE void score(const float *q, int heads, const uint16_t *k, size_t n, size_t d, float scale, float *scores) {
    for (size_t j = 0; j < n; j++) {
        float32x4_t lane[HEADS][4];
        UNROLL for (int h = 0; h < heads; h++)
            UNROLL for (int c = 0; c < 4; c++) lane[h][c] = vdupq_n_f32(0);
        for (size_t i = 0; i < d; i += 16)
            UNROLL for (size_t c = 0; c < 4; c++) {
                float32x4_t key = load_f16(k + j * d + i + 4 * c);
                UNROLL for (int h = 0; h < heads; h++)
                    lane[h][c] = vfmaq_f32(lane[h][c], vld1q_f32(q + (size_t)h * d + i + 4 * c), key);
            }
        UNROLL for (int h = 0; h < heads; h++) scores[(size_t)h * n + j] = reduce16(lane[h]) * scale;
    }
}

/* Write 4 * V values of every head's output, from v and out on. */
INLINE void mix(const float *scores, const float *inverse, int heads, int V, const uint16_t *v, size_t n, size_t d,
                float *out) {
    float32x4_t acc[HEADS][8];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < V; i++) acc[h][i] = vdupq_n_f32(0);
    for (size_t j = 0; j < n; j++)
        UNROLL for (int i = 0; i < V; i++) {
            float32x4_t value = load_f16(v + j * d + 4 * (size_t)i);
            UNROLL for (int h = 0; h < heads; h++)
                acc[h][i] = vfmaq_n_f32(acc[h][i], value, scores[(size_t)h * n + j]);
        }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < V; i++)
            vst1q_f32(out + (size_t)h * d + 4 * (size_t)i, vmulq_n_f32(acc[h][i], inverse[h]));
}

#include "../attention_template.h"

/* Two products of at most 127 x 127 fit 16 bits. */
INLINE int32x4_t dot32(const int8x16_t a[2], const int8x16_t b[2]) {
    int32x4_t sum = vdupq_n_s32(0);
    UNROLL for (int i = 0; i < 2; i++) {
        int16x8_t p = vmull_s8(vget_low_s8(a[i]), vget_low_s8(b[i]));
        sum = vpadalq_s16(sum, vmlal_high_s8(p, a[i], b[i]));
    }
    return sum;
}

#include "mx_blocks_template.h"

/* ---- quantizing, and rows of the KV cache ---- */

static void KERNEL(hadamard)(float *x, size_t d) {
    const size_t block = d & -d;
    const float scale = 1.0f / sqrtf((float)block);
    const uint32x4_t odd = {0, 0x80000000u, 0, 0x80000000u}, upper = {0, 0, 0x80000000u, 0x80000000u};
    for (size_t i = 0; i < d; i += 4) { /* the upper of a pair becomes a + -b */
        float32x4_t v = vld1q_f32(x + i);
        v = vaddq_f32(vrev64q_f32(v), vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), odd)));
        v = vaddq_f32(vextq_f32(v, v, 2), vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), upper)));
        vst1q_f32(x + i, v);
    }
    for (size_t half = 4; half < block; half *= 2)
        for (size_t pair = 0; pair < d; pair += 2 * half)
            for (size_t i = pair; i < pair + half; i += 4) {
                float32x4_t a = vld1q_f32(x + i), b = vld1q_f32(x + i + half);
                vst1q_f32(x + i, vaddq_f32(a, b));
                vst1q_f32(x + i + half, vsubq_f32(a, b));
            }
    for (size_t i = 0; i < d; i += 4) vst1q_f32(x + i, vmulq_n_f32(vld1q_f32(x + i), scale));
}

INLINE uint32_t load_block(const float *x, float32x4_t in[8]) {
    uint32x4_t most = vdupq_n_u32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        in[i] = vld1q_f32(x + 4 * i);
        most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(in[i])));
    }
    return vmaxvq_u32(most);
}

INLINE void round_block(const float32x4_t in[8], float up, int32x4_t out[8]) {
    UNROLL for (int i = 0; i < 8; i++) out[i] = vcvtnq_s32_f32(vmulq_n_f32(in[i], up));
}

INLINE void store_bytes(int8_t *out, const int32x4_t v[8]) {
    UNROLL for (int i = 0; i < 8; i += 4) {
        int16x8_t a = vcombine_s16(vmovn_s32(v[i]), vmovn_s32(v[i + 1]));
        int16x8_t b = vcombine_s16(vmovn_s32(v[i + 2]), vmovn_s32(v[i + 3]));
        vst1q_s8(out + 4 * i, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
    }
}

INLINE void store_activations(int8_t *q, int16_t *bias, const int32x4_t v[8]) {
    store_bytes(q, v);
    int16x8_t pairs = vpadalq_s8(vpaddlq_s8(vld1q_s8(q)), vld1q_s8(q + 16));
    int16x4_t sums = vadd_s16(vget_low_s16(pairs), vget_high_s16(pairs));
    sums = vmul_n_s16(vadd_s16(sums, vext_s16(sums, sums, 2)), -MXD_E2M1_BIAS);
    int32_t both = vget_lane_s32(vreinterpret_s32_s16(sums), 0);
    memcpy(bias, &both, 4);
}

INLINE void store_clamped(int8_t *out, const int32x4_t v[8]) {
    int32x4_t q[8];
    UNROLL for (int i = 0; i < 8; i++) q[i] = vmaxq_s32(vminq_s32(v[i], vdupq_n_s32(127)), vdupq_n_s32(-127));
    store_bytes(out, q);
}

INLINE void store_codes(uint8_t *out, const int32x4_t codes[8]) {
    uint8_t bytes[BLOCK];
    store_bytes((int8_t *)bytes, codes);
    vst1q_u8(out, vorrq_u8(vld1q_u8(bytes), vshlq_n_u8(vld1q_u8(bytes + 16), 4)));
}

/* Return |x| * up. */
INLINE float32x4_t magnitudes(float32x4_t x, float up) {
    return vmulq_n_f32(vabsq_f32(x), up);
}

/* Return sign bits as 8. */
INLINE uint32x4_t signs(float32x4_t x) {
    return vshlq_n_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 31), 3);
}

/* Return how many of the bounds each value exceeds. */
INLINE uint32x4_t count_exceeded(float32x4_t a, const float bounds[7]) {
    uint32x4_t count = vdupq_n_u32(0);
    UNROLL for (int i = 0; i < 7; i++) count = vsubq_u32(count, vcgtq_f32(a, vdupq_n_f32(bounds[i])));
    return count;
}

/* Return the nearest E2M1 magnitudes. */
INLINE float32x4_t round_e2m1(float32x4_t a) {
    uint32x4_t small = vcltq_f32(a, vdupq_n_f32(2)), middle = vcltq_f32(a, vdupq_n_f32(4));
    const float32x4_t half = vdupq_n_f32(0.5f), one = vdupq_n_f32(1), two = vdupq_n_f32(2);
    float32x4_t up = vbslq_f32(small, two, vbslq_f32(middle, one, half));
    float32x4_t step = vbslq_f32(small, half, vbslq_f32(middle, one, two));
    return vminq_f32(vmulq_f32(vrndnq_f32(vmulq_f32(a, up)), step), vdupq_n_f32(6));
}

INLINE float error_e2m1(const float32x4_t in[8], float up) {
    float32x4_t lane[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    UNROLL for (int i = 0; i < 8; i++) {
        float32x4_t a = magnitudes(in[i], up), u = vsubq_f32(a, round_e2m1(a));
        lane[i % 4] = vfmaq_f32(lane[i % 4], u, u);
    }
    return reduce16(lane);
}

INLINE int32x4_t codes_e2m1(float32x4_t x, float up) {
    static const float below[7] = {0, 0.5f, 1, 1.5f, 2, 3, 4}; /* the magnitude before that of each code from 1 on */
    uint32x4_t code = count_exceeded(round_e2m1(magnitudes(x, up)), below);
    return vreinterpretq_s32_u32(vorrq_u32(code, vandq_u32(signs(x), vcgtq_u32(code, vdupq_n_u32(0)))));
}

/* Return the codes of the levels nearest to four magnitudes. */
INLINE uint32x4_t levels_normal4(float32x4_t a) {
    static const float bounds[7] = {MXD_NORMAL4_BOUNDS};
    return count_exceeded(a, bounds);
}

INLINE float error_normal4(const float32x4_t in[8], float up) {
    static const uint8_t levels[16] = {MXD_NORMAL4_LEVELS};
    float32x4_t lane[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    UNROLL for (int i = 0; i < 8; i++) {
        float32x4_t a = magnitudes(in[i], up);
        uint8x16_t found = vqtbl1q_u8(vld1q_u8(levels), vreinterpretq_u8_u32(levels_normal4(a)));
        uint32x4_t level = vandq_u32(vreinterpretq_u32_u8(found), vdupq_n_u32(255));
        float32x4_t u = vsubq_f32(a, vcvtq_f32_u32(level));
        lane[i % 4] = vfmaq_f32(lane[i % 4], u, u);
    }
    return reduce16(lane);
}

INLINE int32x4_t codes_normal4(float32x4_t x, float up) {
    return vreinterpretq_s32_u32(vorrq_u32(levels_normal4(magnitudes(x, up)), signs(x)));
}

#include "../quantize_template.h"

/* ---- vectors ---- */

static void KERNEL(silu_mul)(const float *gate, const float *up, size_t n, float *out) {
    for (size_t i = 0; i < n; i += 4) { /* n is a multiple of 32 */
        float32x4_t g = vld1q_f32(gate + i);
        float32x4_t sigmoid_inverse = vaddq_f32(vdupq_n_f32(1.0f), exp4(vnegq_f32(g)));
        vst1q_f32(out + i, vmulq_f32(vdivq_f32(g, sigmoid_inverse), vld1q_f32(up + i)));
    }
}

static void KERNEL(add)(float *x, const float *y, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(x + i, vaddq_f32(vld1q_f32(x + i), vld1q_f32(y + i)));
    for (; i < n; i++) x[i] += y[i];
}

static void KERNEL(to_f16)(const float *x, size_t n, uint16_t *out) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    for (; i < n; i++) out[i] = mxd_f32_to_f16(x[i]);
}

static void KERNEL(exp_weights)(const float *x, size_t n, float scale, float max, float *w) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(w + i, exp4(vmulq_n_f32(vsubq_f32(vld1q_f32(x + i), vdupq_n_f32(max)), scale)));
    for (; i < n; i++) w[i] = mxd_exp_ref((x[i] - max) * scale);
}

void mxd_kernels_init_neon(mxd_kernels *k, mxd_kernel_names *n) {
    MXD_BIND(k, n, quantize, neon);
    MXD_BIND(k, n, matmul_mxfp4, neon);
    MXD_BIND(k, n, matmul_mxint8, neon);
    MXD_BIND(k, n, rmsnorm, neon);
    MXD_BIND(k, n, attention, neon);
    MXD_BIND(k, n, attention_mx, neon);
    MXD_BIND(k, n, hadamard, neon);
    MXD_BIND(k, n, store_mxint8, neon);
    MXD_BIND(k, n, store_mxfp4, neon);
    MXD_BIND(k, n, store_normal4, neon);
    MXD_BIND(k, n, silu_mul, neon);
    MXD_BIND(k, n, add, neon);
    MXD_BIND(k, n, to_f16, neon);
    MXD_BIND(k, n, exp_weights, neon);
}

#endif
