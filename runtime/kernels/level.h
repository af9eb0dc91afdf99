/* SPDX-License-Identifier: Apache-2.0 */
/* What the source of every level begins with: short names, the bits of f32, constants of docs/arithmetic.md. */
#ifndef MXD_LEVEL_H
#define MXD_LEVEL_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels.h"

enum { BLOCK = MXD_BLOCK, TILE = MXD_TILE_ROWS };
enum { FP4_BYTES = MXD_MXFP4_BLOCK_BYTES, INT8_BYTES = MXD_MXINT8_BLOCK_BYTES };

/* Before a loop over registers: the compiler must not keep arrays of them in memory. */
#ifndef UNROLL
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* Bits of f32: the magnitude of a number; infinity, above whose bits are those of NaN; 2^-127, a subnormal, which is
 * what the E8M0 code 0 means. */
enum { F32_MAGNITUDE = 0x7fffffff, F32_INFINITY = 0x7f800000, E8M0_LEAST = 0x00400000 };

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* What one step of a format's integers is worth before scaling: E2M1 is doubled, int8 means q/64. */
#define MXFP4_UNIT 0.5f
#define MXINT8_UNIT 0x1p-6f

/* The scale that a code of NORMAL4 other than MXD_CODE_FAULT means. */
static inline float normal4_scale(int32_t code) {
    return from_bits((uint32_t)(code + MXD_NORMAL4_CODES) << 20);
}

/* exp: log2(e); ln 2 in two parts, the first so short that n times it is exact; the clamps; 1/7! .. 1/0!. */
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_LN2_HIGH 0x1.62e4p-1f
#define EXP_LN2_LOW 0x1.7f7d1cp-20f
#define EXP_MOST 88.0f
#define EXP_LEAST (-87.0f)
enum { EXP_TERMS = 8 };
static const float EXP_TERM[EXP_TERMS] = {
    0x1.a01a02p-13f, 0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0.5f, 1, 1};

#endif
