/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel table: every operation that has variants. ref.c is the specification (docs/arithmetic.md); each variant
 * equals it bit for bit. README.md has the contracts: sizes, alignment, overlap.
 *
 * Weights are tiles of 16 rows (runtime/BUNDLE.md). K, the inner dimension, is a multiple of 32.
 */
#ifndef MXD_KERNELS_H
#define MXD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Weights: rows of a tile, columns of a block, bytes of a tile's block of 16 rows x 32 columns. */
enum { MXD_TILE_ROWS = 16, MXD_BLOCK = 32, MXD_MXFP4_BLOCK_BYTES = 272, MXD_MXINT8_BLOCK_BYTES = 528 };

/* The widest head that kernels take. */
enum { MXD_MAX_HEAD_DIM = 256 };

/* Activation rows quantized to integers, in blocks of 32. Block b of row m: q at [m*k + 32b ...], s at [m*(k/32)+b]. */
typedef struct mxd_act {
    int8_t *q;     /* (rows, k) -127..127 */
    float *s;      /* (rows, k/32): max|x| / MXD_ACT_STEPS; 0 if max|x| < MXD_ACT_TINY, NaN if x has NaN or Inf */
    int16_t *bias; /* (rows, k/32, 2): -MXD_E2M1_BIAS times two sums over a block's q: those of columns 0 and 1 modulo
                      4, and those of columns 2 and 3 */
} mxd_act;

/* The largest q. */
enum { MXD_ACT_STEPS = 127 };

/* A block whose largest magnitude is below this becomes zeros with scale 0: steps / max|x| stays finite. */
#define MXD_ACT_TINY 0x1p-100f

/* E2M1 by code, doubled to make integers, plus an offset. Kernels that need unsigned weights decode with the offset 12
 * and add the bias of mxd_act to their sums. */
#define MXD_E2M1X2(o)                                                                                             \
    (o), (o) + 1, (o) + 2, (o) + 3, (o) + 4, (o) + 6, (o) + 8, (o) + 12, (o), (o) - 1, (o) - 2, (o) - 3, (o) - 4, \
        (o) - 6, (o) - 8, (o) - 12
enum { MXD_E2M1_BIAS = 12 };

/* With two planes, rho = the scale code of a base block minus that of its residual block is 0 .. this. Hence an element
 * of their sum, 2^rho * b + r in units of the residual's scale, fits int8: it is at most 8 * 12 + 12. */
enum { MXD_RESIDUAL_REACH = 3 };

/* How the cache stores a row: the d keys or values of one KV head. All formats but F16 are quantized in blocks of 32:
 * the elements of all blocks, then one scale code per block (docs/arithmetic.md, "Quantized KV cache"). Byte i of a
 * block of 4-bit elements has element i in its low half and element 16 + i in its high half. */
typedef enum mxd_row_format {
    MXD_ROW_F16,    /* 2d bytes */
    MXD_ROW_MXINT8, /* d bytes, then d/32 */
    MXD_ROW_MXFP4,  /* d/2 bytes, then d/32 */
    MXD_ROW_NORMAL4 /* the same; levels of a normal distribution, and a scale with three bits of mantissa */
} mxd_row_format;

/* Bytes of a block's elements in a quantized format. */
#define MXD_BLOCK_BYTES(format) ((size_t)((format) == MXD_ROW_MXINT8 ? MXD_BLOCK : MXD_BLOCK / 2))

/* Scale code of a block with NaN or Inf. Its elements have code 0; results computed from it are NaN. */
enum { MXD_CODE_FAULT = 255 };

/* NORMAL4: the magnitudes, and the bounds above which one rounds up to the next. Scale code c is the number with the
 * bits (c + MXD_NORMAL4_CODES) << 20, from 2^-24 to 240. Candidates for the scale: FIRST .. LAST from the code of max /
 * 127. */
#define MXD_NORMAL4_LEVELS 6, 18, 31, 44, 58, 75, 96, 127
#define MXD_NORMAL4_ELEMENTS MXD_NORMAL4_LEVELS, -6, -18, -31, -44, -58, -75, -96, -127 /* by code */
#define MXD_NORMAL4_BOUNDS 12, 24.5f, 37.5f, 51, 66.5f, 85.5f, 111.5f
enum { MXD_NORMAL4_CODES = 824, MXD_NORMAL4_FIRST = -3, MXD_NORMAL4_LAST = 6 };

/* A run of n consecutive rows in one quantized format. */
typedef struct mxd_span {
    mxd_row_format format;
    const uint8_t *k, *v;
    size_t n;
} mxd_span;

/* Quantize `rows` rows of x, each k long and ldx floats apart, into the same rows of `out`. */
typedef void mxd_quantize_fn(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out);

/* Multiply: y[m*ldy + 16*t + i] = row 16*t + i of W times activation row m, for all tiles t < ntiles and rows m < rows.
 * `base` and `residual` are the planes of W from its first tile on, with nblocks = K/32 blocks per tile; W is their
 * sum. `residual` may be NULL and must be so for MXINT8; no rho may exceed MXD_RESIDUAL_REACH. Writes whole tiles. */
typedef void mxd_matmul_fn(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                           const mxd_act *x, size_t rows, float *y, size_t ldy);

/* Normalize: y = x / rms(x) * w over n elements; y may be x. Returns the sum of squares, which is not finite if x has a
 * NaN or Inf. */
typedef float mxd_rmsnorm_fn(const float *x, const float *w, size_t n, float eps, float *y);

/* Rotate one head of d values in place by the tables c and s (d/2 each) of its position. */
typedef void mxd_rope_fn(float *x, const float *c, const float *s, size_t d);

/* Attend with `heads` query heads, (heads, d), to n cached keys and values that they share, both f16 and (n, d), into
 * out(heads, d). scores(heads, n) receives the weights of the values, before they are divided by their sum. */
typedef void mxd_attention_fn(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d,
                              float scale, float *scores, float *out);

/* Do the same over the rows of all spans, in their order, with quantized queries: q has `heads` rows. */
typedef void mxd_attention_mx_fn(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d,
                                 float scale, float *scores, float *out);

/* Transform d values in place (Walsh-Hadamard, orthonormal, its own inverse), in blocks of the largest power of two
 * that divides d. */
typedef void mxd_hadamard_fn(float *x, size_t d);

/* Quantize d values to a row of the cache. */
typedef void mxd_store_fn(const float *x, size_t d, uint8_t *row);

/* Compute out = silu(gate) * up. */
typedef void mxd_silu_mul_fn(const float *gate, const float *up, size_t n, float *out);

/* Add y to x. */
typedef void mxd_add_fn(float *x, const float *y, size_t n);

/* Round to f16, ties to even. */
typedef void mxd_to_f16_fn(const float *x, size_t n, uint16_t *out);

/* Compute w[i] = exp((x[i] - max) * scale), the sampler's weights. */
typedef void mxd_exp_weights_fn(const float *x, size_t n, float scale, float max, float *w);

/* The operations: type and name. Tables, printed names and checks follow from this list. */
#define MXD_KERNELS(X)                   \
    X(mxd_quantize_fn, quantize)         \
    X(mxd_matmul_fn, matmul_mxfp4)       \
    X(mxd_matmul_fn, matmul_mxint8)      \
    X(mxd_rmsnorm_fn, rmsnorm)           \
    X(mxd_rope_fn, rope)                 \
    X(mxd_attention_fn, attention)       \
    X(mxd_attention_mx_fn, attention_mx) \
    X(mxd_hadamard_fn, hadamard)         \
    X(mxd_store_fn, store_mxint8)        \
    X(mxd_store_fn, store_mxfp4)         \
    X(mxd_store_fn, store_normal4)       \
    X(mxd_silu_mul_fn, silu_mul)         \
    X(mxd_add_fn, add)                   \
    X(mxd_to_f16_fn, to_f16)             \
    X(mxd_exp_weights_fn, exp_weights)

/* The function bound to each operation. */
typedef struct mxd_kernels {
#define MXD_MEMBER(type, op) type *op;
    MXD_KERNELS(MXD_MEMBER)
#undef MXD_MEMBER
} mxd_kernels;

/* The names of those functions, for `info --cpu`. */
typedef struct mxd_kernel_names {
#define MXD_MEMBER(type, op) const char *op;
    MXD_KERNELS(MXD_MEMBER)
#undef MXD_MEMBER
} mxd_kernel_names;

/* Bind a level's variants: overwrite the operations that it has one for. */
void mxd_kernels_init_ref(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_avx2(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_avx512(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_neon(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_dotprod(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_i8mm(mxd_kernels *k, mxd_kernel_names *n);

#define MXD_BIND(k, n, op, level) ((k)->op = mxd_##op##_##level, (n)->op = "mxd_" #op "_" #level)

/* Scalar pieces of the reference, also for variants (tails, sizes that they leave to it) and the engine. */
mxd_attention_fn mxd_attention_ref;
/* Return the bytes of a row of d elements. */
size_t mxd_row_bytes(mxd_row_format format, size_t d);
/* Decode a row of a quantized format to the d values that it stands for. */
void mxd_load_mx_ref(mxd_row_format format, const uint8_t *row, size_t d, float *x);
float mxd_exp_ref(float x);
/* Return the sum of 16 accumulators in the canonical order: i += i+8, then +4, +2, +1. */
float mxd_reduce16_ref(const float lane[16]);
float mxd_f16_to_f32(uint16_t h);
uint16_t mxd_f32_to_f16(float x);

#endif
