/* SPDX-License-Identifier: Apache-2.0 */
/* For each kernel: sizes to check and to time, buffers, and the call. */
#include "harness.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const size_t ROWS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 35, 64};
static const size_t WIDTHS[] = {32, 64, 96, 160, 576, 1536};

/* ---- quantized products ---- */

/* Combine every number of rows with every width, but many rows only with narrow ones: the reference is slow. */
static bool row_sizes(size_t index, size_t *size) {
    size[0] = ROWS[index % COUNT(ROWS)];
    size[1] = WIDTHS[index / COUNT(ROWS) % COUNT(WIDTHS)];
    if (size[0] > 9 && size[1] > 160) size[1] = 160;
    return index < COUNT(ROWS) * COUNT(WIDTHS);
}

static bool quantize_sizes(size_t index, size_t *size) { /* rows, k, ldx */
    bool more = row_sizes(index, size);
    size[2] = size[1] + TILE * (index % 3);
    return more;
}

static void run_quantize(trial *t) {
    size_t rows = t->size[0], k = t->size[1], ldx = t->size[2];
    const float *x = take_f32(t, "x", (rows - 1) * ldx + k);
    mxd_act out;
    out.q = take(t, "q", I8, rows * k);
    out.s = take(t, "s", F32, rows * (k / BLOCK));
    out.bias = take(t, "bias", I16, rows * (k / BLOCK) * 2);
    while (running(t)) t->kernels->quantize(x, ldx, rows, k, &out);
}

/* Take tiles of weights. Elements are random bits in most styles: every nibble, and int8 down to -128, which the bundle
 * reader does not refuse. In TIES a block repeats one extreme, for the largest dot products. */
static uint8_t *take_tiles(trial *t, const char *name, size_t blocks, size_t block_bytes) {
    static const uint8_t CODES[] = {0, 1, 2, 126, 127, 128, 253, 254};      /* the bundle reader refuses 255 */
    static const uint8_t EXTREMES[] = {0x77, 0xff, 0xf7, 0x7f, 0x80, 0x81}; /* +-6 in nibbles, +-127 and -128 */
    uint8_t *w = take(t, name, U8, blocks * block_bytes), extreme = 0;
    for (size_t i = 0; i < blocks * block_bytes; i++) {
        if (i % block_bytes == 0) extreme = EXTREMES[pick(t, COUNT(EXTREMES))];
        if (i % block_bytes >= TILE) w[i] = t->style == TIES ? extreme : (uint8_t)next_random(t);
        else if (t->style == WIDE || t->style == NONFINITE) w[i] = (uint8_t)pick(t, 255);
        else w[i] = t->style == EDGE ? CODES[pick(t, COUNT(CODES))] : (uint8_t)(118 + pick(t, 12));
    }
    return w;
}

/* Take the residual plane of `base`: tiles whose scale codes are 0 .. MXD_RESIDUAL_REACH below those of the base. */
static uint8_t *take_residual(trial *t, const uint8_t *base, size_t blocks) {
    uint8_t *w = take_tiles(t, "residual", blocks, FP4_BYTES);
    for (size_t b = 0; b < blocks; b++)
        for (size_t at = b * FP4_BYTES; at < b * FP4_BYTES + TILE; at++) {
            uint8_t rho = (uint8_t)pick(t, MXD_RESIDUAL_REACH + 1);
            w[at] = base[at] < rho ? 0 : base[at] - rho;
        }
    return w;
}

/* Take activations as quantize makes them: q within +-127; s from 2^-115 up, or 0 or NaN if all q are 0. */
static mxd_act take_act(trial *t, size_t rows, size_t k) {
    size_t blocks = rows * (k / BLOCK);
    mxd_act x;
    x.q = take(t, "q", I8, rows * k);
    x.s = take(t, "s", F32, blocks);
    x.bias = take(t, "bias", I16, blocks * 2);
    bool modest = t->style == PLAIN || t->style == TIES;
    for (size_t b = 0; b < blocks; b++) {
        bool empty = pick(t, 16) == 0;
        int exponent = modest ? (int)pick(t, 8) - 10 : (int)pick(t, 236) - 115;
        float mantissa = 1 + (float)pick(t, 1 << 23) * 0x1p-23f;
        x.s[b] = !empty ? ldexpf(mantissa, exponent) : t->style == NONFINITE ? NAN : 0;
        int16_t *bias = x.bias + b * 2;
        bias[0] = bias[1] = 0;
        int8_t extreme = pick(t, 2) ? 127 : -127;
        for (size_t i = 0; i < BLOCK; i++) {
            int8_t any = (int8_t)((int)pick(t, 255) - 127), q = t->style == TIES ? extreme : any;
            q = empty ? 0 : q;
            x.q[b * BLOCK + i] = q;
            bias[i / 2 % 2] -= (int16_t)(MXD_E2M1_BIAS * q);
        }
    }
    return x;
}

static bool matmul_sizes(size_t index, size_t *size) { /* rows, K, tiles, planes */
    bool more = row_sizes(index / 2, size);
    size[2] = size[0] * size[1] > 5000 ? 1 : 1 + index / 2 % 5;
    size[3] = 1 + index % 2;
    return more;
}

static bool one_plane_sizes(size_t index, size_t *size) {
    return matmul_sizes(2 * index, size);
}

static void run_matmul(trial *t, mxd_matmul_fn *matmul, size_t block_bytes) {
    size_t rows = t->size[0], k = t->size[1], ntiles = t->size[2], nblocks = k / BLOCK;
    size_t width = ntiles * TILE, ldy = width + TILE * (rows % 3);
    const uint8_t *base = take_tiles(t, "base", ntiles * nblocks, block_bytes);
    const uint8_t *residual = t->size[3] == 2 ? take_residual(t, base, ntiles * nblocks) : NULL;
    mxd_act x = take_act(t, rows, k);
    float *y = take(t, "y", F32, (rows - 1) * ldy + width);
    while (running(t)) matmul(base, residual, nblocks, ntiles, &x, rows, y, ldy);
}

static void run_matmul_mxfp4(trial *t) {
    run_matmul(t, t->kernels->matmul_mxfp4, FP4_BYTES);
}

static void run_matmul_mxint8(trial *t) {
    run_matmul(t, t->kernels->matmul_mxint8, INT8_BYTES);
}

/* ---- vectors ---- */

static bool width_sizes(size_t index, size_t *size) { /* multiples of 32 */
    size[0] = index < COUNT(WIDTHS) ? WIDTHS[index] : 32 * (index + 1);
    return index < 20;
}

static bool any_sizes(size_t index, size_t *size) {
    size[0] = index < 70 ? index + 1 : 577;
    return index <= 70;
}

static bool rmsnorm_sizes(size_t index, size_t *size) { /* n, whether y is x */
    size[1] = index % 2;
    return width_sizes(index / 2, size);
}

static void run_rmsnorm(trial *t) {
    size_t n = t->size[0];
    float *x = take_f32(t, "x", n), *y = t->size[1] ? x : take(t, "y", F32, n);
    float *w = take_f32(t, "w", n), *sum = take(t, "returned sum", F32, 1);
    while (running(t)) *sum = t->kernels->rmsnorm(x, w, n, 1e-5f, y);
}

static void run_silu_mul(trial *t) {
    size_t n = t->size[0];
    const float *gate = take_f32(t, "gate", n), *up = take_f32(t, "up", n);
    float *out = take(t, "out", F32, n);
    while (running(t)) t->kernels->silu_mul(gate, up, n, out);
}

static void run_add(trial *t) {
    size_t n = t->size[0];
    float *x = take_f32(t, "x", n);
    const float *y = take_f32(t, "y", n);
    while (running(t)) t->kernels->add(x, y, n);
}

static void run_to_f16(trial *t) {
    size_t n = t->size[0];
    const float *x = take_f32(t, "x", n);
    uint16_t *out = take(t, "out", F16, n);
    while (running(t)) t->kernels->to_f16(x, n, out);
}

static void run_exp_weights(trial *t) {
    size_t n = t->size[0];
    const float *x = take_f32(t, "x", n);
    float *w = take(t, "w", F32, n), scale = fabsf(random_f32(t)), max = x[pick(t, n)] * scale;
    while (running(t)) t->kernels->exp_weights(x, n, scale, max, w);
}

/* ---- heads ---- */

static bool rope_sizes(size_t index, size_t *size) { /* head sizes are even, at most 256 */
    size[0] = 2 * (index + 1);
    return size[0] <= 256;
}

static void run_rope(trial *t) {
    size_t d = t->size[0];
    float *x = take_f32(t, "x", d);
    const float *c = take_f32(t, "c", d / 2), *s = take_f32(t, "s", d / 2);
    while (running(t)) t->kernels->rope(x, c, s, d);
}

static bool attention_sizes(size_t index, size_t *size) {
    static const size_t HEADS[] = {2, 32, 40, 48, 64, 80, 96, 128, 256};
    size[0] = index < 120 ? 1 + index / 3 : 300; /* 1 .. 40 with three heads each, 300 with all */
    size[1] = HEADS[index % COUNT(HEADS)];
    size[2] = 1 + index / 2 % 7;
    return index < 120 + COUNT(HEADS);
}

static void run_attention(trial *t) {
    size_t n = t->size[0], d = t->size[1], heads = t->size[2];
    const float *q = take_f32(t, "q", heads * d);
    const uint16_t *k = take_f16(t, "k", n * d), *v = take_f16(t, "v", n * d);
    float *scores = take(t, "scores", F32, heads * n), *out = take(t, "out", F32, heads * d);
    float scale = 1.0f / sqrtf((float)d);
    while (running(t)) t->kernels->attention(q, heads, k, v, n, d, scale, scores, out);
}

/* ---- quantized rows ---- */

static bool block_heads(size_t index, size_t *size) { /* multiples of 32, several inputs each */
    size[0] = BLOCK * (index % 8 + 1);
    return index < 64;
}

static void run_hadamard(trial *t) {
    size_t d = t->size[0];
    float *x = take_f32(t, "x", d);
    while (running(t)) t->kernels->hadamard(x, d);
}

static void run_store(trial *t, mxd_store_fn *store, mxd_row_format format) {
    size_t d = t->size[0];
    const float *x = take_f32(t, "x", d);
    uint8_t *row = take(t, "row", U8, mxd_row_bytes(format, d));
    while (running(t)) store(x, d, row);
}

static void run_store_mxint8(trial *t) {
    run_store(t, t->kernels->store_mxint8, MXD_ROW_MXINT8);
}

static void run_store_mxfp4(trial *t) {
    run_store(t, t->kernels->store_mxfp4, MXD_ROW_MXFP4);
}

static void run_store_normal4(trial *t) {
    run_store(t, t->kernels->store_normal4, MXD_ROW_NORMAL4);
}

/* Take rows as the stores make them: no -128, and zeros in a faulty block. In TIES a block repeats one extreme. */
static uint8_t *take_rows(trial *t, const char *name, mxd_row_format format, size_t n, size_t d) {
    size_t bytes = mxd_row_bytes(format, d), blocks = d / BLOCK, block = (bytes - blocks) / blocks;
    uint8_t *rows = take(t, name, U8, n * bytes);
    bool modest = t->style == PLAIN || t->style == TIES;
    for (size_t j = 0; j < n * blocks; j++) {
        uint8_t *row = rows + j / blocks * bytes, *elements = row + j % blocks * block;
        uint8_t extreme = (uint8_t)(format != MXD_ROW_MXINT8 ? (pick(t, 2) ? 0x77 : 0xff) : pick(t, 2) ? 127 : 129);
        bool fault = t->style == NONFINITE && pick(t, 64) == 0;
        for (size_t i = 0; i < block; i++) {
            uint8_t any = (uint8_t)next_random(t);
            if (format == MXD_ROW_MXINT8 && any == 128) any = 0;
            elements[i] = fault ? 0 : t->style == TIES ? extreme : any;
        }
        row[bytes - blocks + j % blocks] = fault ? MXD_CODE_FAULT
                                                 : (uint8_t)(modest ? 120 + pick(t, 10) : pick(t, 255));
    }
    return rows;
}

/* Lengths of three spans, of which the first two may be empty; d; heads. The last cases are long, in every format. */
static bool attention_mx_sizes(size_t index, size_t *size) {
    size[0] = index >= 100 ? index - 100 : index % 3 ? index % 19 : 0;
    size[1] = index % 5 ? index % 23 : 0;
    size[2] = index < 100 ? 1 + index % 17 : 150;
    size[3] = BLOCK * (index % 8 + 1);
    size[4] = 1 + index / 2 % 7;
    return index < 106;
}

static void run_attention_mx(trial *t) {
    static const mxd_row_format FORMATS[3] = {MXD_ROW_MXINT8, MXD_ROW_NORMAL4, MXD_ROW_MXFP4};
    static const char *const NAMES[3][2] = {{"core keys", "core values"}, {"far keys", "far values"}, {"k", "v"}};
    size_t d = t->size[3], heads = t->size[4], count = 0, n = 0;
    size_t turn = t->size[0] % 3; /* every format in every place */
    mxd_span spans[3];
    mxd_act q = take_act(t, heads, d);
    for (size_t s = 0; s < 3; s++) {
        if (!t->size[s]) continue;
        mxd_row_format format = FORMATS[(s + turn) % 3];
        const uint8_t *k = take_rows(t, NAMES[s][0], format, t->size[s], d);
        const uint8_t *v = take_rows(t, NAMES[s][1], format, t->size[s], d);
        spans[count++] = (mxd_span){format, k, v, t->size[s]};
        n += t->size[s];
    }
    float *scores = take(t, "scores", F32, heads * n), *out = take(t, "out", F32, heads * d);
    float scale = 1.0f / sqrtf((float)d);
    while (running(t)) t->kernels->attention_mx(&q, heads, spans, count, d, scale, scores, out);
}

#define OP(op) #op, offsetof(mxd_kernels, op), offsetof(mxd_kernel_names, op)

/* Times are those of SmolLM2-135M's shapes. */
const op OPS[] = {
    {OP(quantize), {"rows", "k", "ldx"}, quantize_sizes, {{1, 576, 576}, {1, 1536, 1536}}, run_quantize},
    {OP(matmul_mxfp4),
     {"rows", "k", "ntiles", "planes"},
     matmul_sizes,
     {{1, 576, 96, 1}, {1, 576, 96, 2}, {4, 576, 96, 1}, {4, 576, 96, 2}, {8, 576, 96, 1}, {8, 576, 96, 2}},
     run_matmul_mxfp4},
    {OP(matmul_mxint8),
     {"rows", "k", "ntiles", "planes"},
     one_plane_sizes,
     {{1, 576, 96, 1}, {4, 576, 96, 1}, {8, 576, 96, 1}},
     run_matmul_mxint8},
    {OP(rmsnorm), {"n", "in_place"}, rmsnorm_sizes, {{576, 0}}, run_rmsnorm},
    {OP(rope), {"d"}, rope_sizes, {{64}}, run_rope},
    {OP(attention), {"n", "d", "heads"}, attention_sizes, {{64, 64, 3}, {512, 64, 3}}, run_attention},
    {OP(attention_mx),
     {"n0", "n1", "n2", "d", "heads"},
     attention_mx_sizes,
     {{1, 510, 1, 64, 3}, {2, 510, 1, 64, 3}, {3, 510, 1, 64, 3}},
     run_attention_mx},
    {OP(hadamard), {"d"}, block_heads, {{64}}, run_hadamard},
    {OP(store_mxint8), {"d"}, block_heads, {{64}}, run_store_mxint8},
    {OP(store_mxfp4), {"d"}, block_heads, {{64}}, run_store_mxfp4},
    {OP(store_normal4), {"d"}, block_heads, {{64}}, run_store_normal4},
    {OP(silu_mul), {"n"}, width_sizes, {{1536}}, run_silu_mul},
    {OP(add), {"n"}, any_sizes, {{576}}, run_add},
    {OP(to_f16), {"n"}, any_sizes, {{64}}, run_to_f16},
    {OP(exp_weights), {"n"}, any_sizes, {{49152}}, run_exp_weights},
};
const size_t OP_COUNT = COUNT(OPS);
_Static_assert(COUNT(OPS) * sizeof(void (*)(void)) == sizeof(mxd_kernels), "every operation has its checks");
