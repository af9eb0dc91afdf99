/* The kernel table: every operation that has variants. ref.c is the specification (docs/arithmetic.md); each variant
 * equals it bit for bit. Kernels never allocate, never thread, never detect: the caller owns all three.
 *
 * Names: mxd_<operation>_<isa>. Pointers: activations and outputs are 64-byte aligned rows; weights are tiles of 16
 * rows (runtime/BUNDLE.md). "K" is the inner dimension, a multiple of 32.
 */
#ifndef MXD_KERNELS_H
#define MXD_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Tile order of weights (runtime/BUNDLE.md): rows of a tile, columns of a block, bytes of 16 rows x 32 columns. */
enum { MXD_TILE_ROWS = 16, MXD_BLOCK = 32, MXD_MXFP4_BLOCK_BYTES = 272, MXD_MXINT8_BLOCK_BYTES = 528 };

/* Activation rows quantized in blocks of 32 to integers v = q, or v = 254*q + lo where lo is not NULL (16 bits: full
 * precision). Block b of row m: q and lo at [m*k + 32b ...], s at [m*(k/32) + b]. */
typedef struct mxd_act {
    int8_t *q;     /* (rows, k) -127..127 */
    int8_t *lo;    /* (rows, k) -127..127, or NULL */
    float *s;      /* (rows, k/32): max|x| / steps; 0 for a block of (nearly) nothing, NaN for one with NaN or Inf */
    int16_t *bias; /* (rows, k/32, digits: q or q and lo, 2): minus MXD_E2M1_BIAS times the sum of a block's digits in
                      columns 0 and 1 modulo 4, and in columns 2 and 3 */
} mxd_act;

/* Largest v: 127, or 254*127 with two digits. */
enum { MXD_ACT_DIGIT = 254, MXD_ACT_STEPS = 127, MXD_ACT_STEPS2 = 254 * 127 };

/* E2M1 by code, doubled, so that elements are integers. */
#define MXD_E2M1X2_ELEMENTS 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

/* Kernels that need unsigned weights decode a doubled E2M1 element w as w + 12, and add the bias to their sums. */
enum { MXD_E2M1_BIAS = 12 };

/* Blocks whose largest magnitude is below this become zeros with scale 0: steps / max|x| stays finite. */
#define MXD_ACT_TINY 0x1p-100f

/* How a row of keys or values (d elements of one KV head) is kept in the cache. All but the first are quantized in blocks
 * of 32, the elements first, then a scale code for each block (docs/arithmetic.md, "Quantized KV cache"). Byte i of a
 * block of 4-bit elements has element i low and element 16 + i high. */
typedef enum mxd_row_format {
    MXD_ROW_F16,    /* 2d bytes */
    MXD_ROW_MXINT8, /* d bytes, then d/32 */
    MXD_ROW_MXFP4,  /* d/2 bytes, then d/32 */
    MXD_ROW_NORMAL4 /* the same; levels of a normal distribution, and a scale with three bits of mantissa */
} mxd_row_format;

/* Scale code of a block with NaN or Inf, whose elements have code 0: what is computed with it is NaN. */
enum { MXD_CODE_FAULT = 255 };

/* NORMAL4: the magnitudes, and between which of them one rounds up; scale code c is the number with the bits
 * (c + MXD_NORMAL4_CODES) << 20, from 2^-24 to 240. Candidates for the scale: codes from that of max / 127 on. */
#define MXD_NORMAL4_LEVELS 6, 18, 31, 44, 58, 75, 96, 127
#define MXD_NORMAL4_ELEMENTS MXD_NORMAL4_LEVELS, -6, -18, -31, -44, -58, -75, -96, -127 /* by code */
#define MXD_NORMAL4_BOUNDS 12, 24.5f, 37.5f, 51, 66.5f, 85.5f, 111.5f
enum { MXD_NORMAL4_CODES = 824, MXD_NORMAL4_FIRST = -3, MXD_NORMAL4_LAST = 6 };

/* Rows of one quantized format that lie behind each other. */
typedef struct mxd_span {
    mxd_row_format format;
    const uint8_t *k, *v;
    size_t n;
} mxd_span;

/* y[m*ldy + 16*t + i] = row 16*t + i of W times activation row m, for all tiles t < ntiles and rows m < rows.
 * base, residual: first tile, nblocks = K/32 blocks a tile; residual may be NULL (one plane). Writes whole tiles. */
typedef void mxd_matmul_fn(const uint8_t *base, const uint8_t *residual, size_t nblocks, size_t ntiles,
                           const mxd_act *x, size_t rows, float *y, size_t ldy);

typedef struct mxd_kernels {
    /* out rows `row`.. get `rows` rows of x (ldx floats apart), each of length k. */
    void (*quantize)(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out);
    mxd_matmul_fn *matmul_mxfp4;  /* one or two MXFP4T planes */
    mxd_matmul_fn *matmul_mxint8; /* MXINT8T; residual must be NULL */
    /* y = x / rms(x) * w over n; returns the sum of squares (non-finite = fault). */
    float (*rmsnorm)(const float *x, const float *w, size_t n, float eps, float *y);
    /* Rotate one head of d values in place by the tables c, s (d/2) of its position. */
    void (*rope)(float *x, const float *c, const float *s, size_t d);
    /* Query heads, d apart, over n cached keys and values (f16, d apart) that they share: out(heads, d). scores(heads, n)
     * gets the weights of the values, before they are divided by their sum. */
    void (*attention)(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d,
                      float scale, float *scores, float *out);
    /* The same with quantized queries (q: `heads` rows of one digit) over the rows of all spans, in their order. d is a
     * multiple of 32. */
    void (*attention_mx)(const mxd_act *q, size_t heads, const mxd_span *spans, size_t count, size_t d, float scale,
                         float *scores, float *out);
    /* Walsh-Hadamard transform of d values in place, orthonormal, in blocks of the largest power of two that divides
     * d; its own inverse. d is a multiple of 32. */
    void (*hadamard)(float *x, size_t d);
    /* Quantize d values, a multiple of 32, to a row. */
    void (*store_mxint8)(const float *x, size_t d, uint8_t *row);
    void (*store_mxfp4)(const float *x, size_t d, uint8_t *row);
    void (*store_normal4)(const float *x, size_t d, uint8_t *row);
    void (*silu_mul)(const float *gate, const float *up, size_t n, float *out);
    void (*add)(float *x, const float *y, size_t n); /* x += y */
    void (*to_f16)(const float *x, size_t n, uint16_t *out);
    /* w[i] = exp((x[i] - max) * scale), the sampler's weights. */
    void (*exp_weights)(const float *x, size_t n, float scale, float max, float *w);
} mxd_kernels;

/* Names of the functions in a table, in the same order, for `info --cpu`. */
typedef struct mxd_kernel_names {
    const char *quantize, *matmul_mxfp4, *matmul_mxint8, *rmsnorm, *rope, *attention, *attention_mx, *hadamard,
        *store_mxint8, *store_mxfp4, *store_normal4, *silu_mul, *add, *to_f16, *exp_weights;
} mxd_kernel_names;

/* Each level overwrites the entries it has a variant for. */
void mxd_kernels_init_ref(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_avx2(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_avx512(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_neon(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_dotprod(mxd_kernels *k, mxd_kernel_names *n);
void mxd_kernels_init_i8mm(mxd_kernels *k, mxd_kernel_names *n);

#define MXD_BIND(k, n, op, isa) ((k)->op = mxd_##op##_##isa, (n)->op = "mxd_" #op "_" #isa)

/* Canonical scalar pieces, shared by ref.c, the tails of variants and the sizes they leave to the reference. */
void mxd_attention_ref(const float *q, size_t heads, const uint16_t *k, const uint16_t *v, size_t n, size_t d,
                       float scale, float *scores, float *out);
size_t mxd_row_bytes(mxd_row_format format, size_t d);
/* Of the elements, without the scale; not of f16. */
#define MXD_BLOCK_BYTES(format) ((size_t)((format) == MXD_ROW_MXINT8 ? MXD_BLOCK : MXD_BLOCK / 2))
void mxd_load_mx_ref(mxd_row_format format, const uint8_t *row, size_t d, float *x); /* what a row's elements mean */
float mxd_exp_ref(float x);
float mxd_reduce16_ref(const float lane[16]);
float mxd_f16_to_f32(uint16_t h);
uint16_t mxd_f32_to_f16(float x);

#endif
