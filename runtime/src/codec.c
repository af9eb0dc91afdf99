/* SPDX-License-Identifier: Apache-2.0 */
/* MX encoders and decoders (docs/arithmetic.md): byte for byte what toolchain/mxdraft/mx.py makes. */
#include <math.h>
#include <string.h>

#include "status.h"

enum { BLOCK = 32 };

static const float E2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

/* Return the nearest E2M1 code: ties to the even mantissa; magnitudes above 6 saturate; negative zero becomes zero. */
static uint8_t e2m1_code(float v) {
    float a = fabsf(v);
    uint8_t code = (uint8_t)((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) +
                             (a > 5.0f));
    return v < 0 && code ? code | 8 : code;
}

static int clamp(int x, int lo, int hi) {
    return x < lo ? lo : x > hi ? hi : x;
}

/* Return floor(log2(max |x|)) of a block, INT32_MIN for zeros; *bad gets the index of a non-finite value, or -1. */
static int block_exponent(const float *x, int *bad) {
    float amax = 0;
    *bad = -1;
    for (int i = 0; i < BLOCK; i++) {
        if (!isfinite(x[i])) {
            *bad = i;
            return 0;
        }
        amax = fmaxf(amax, fabsf(x[i]));
    }
    return amax > 0 ? ilogbf(amax) : INT32_MIN;
}

static double squared_error(const float *x, int e) {
    double error = 0;
    for (int i = 0; i < BLOCK; i++) {
        double d = (double)x[i] - (double)ldexpf(E2M1[e2m1_code(ldexpf(x[i], -e))], e);
        error += d * d;
    }
    return error;
}

static int search_exponent(const float *x, int e) {
    int best = e;
    double least = HUGE_VAL;
    for (int delta = -1; delta <= 1; delta++) {
        int candidate = clamp(e + delta, -127, 127);
        double error = squared_error(x, candidate);
        if (error < least) best = candidate;
        if (error < least) least = error;
    }
    return best;
}

mxd_status mxd_mxfp4_encode(const float *x, size_t rows, size_t k, mxd_rule rule, uint8_t *data, uint8_t *scale,
                            mxd_error *err) {
    if (k == 0 || k % BLOCK) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu columns are not a multiple of 32", k);
    for (size_t b = 0; b < rows * (k / BLOCK); b++, x += BLOCK, data += BLOCK / 2) {
        int bad, e = block_exponent(x, &bad);
        if (bad >= 0)
            return mxd_fail(err, MXD_ERR_NUMERIC, "value %g at row %zu, column %zu cannot be quantized", (double)x[bad],
                            b / (k / BLOCK), b % (k / BLOCK) * BLOCK + (size_t)bad);
        if (e == INT32_MIN) {
            memset(data, 0, BLOCK / 2);
            scale[b] = 0;
            continue;
        }
        e = clamp(e - 2, -127, 127);
        if (rule == MXD_RULE_SEARCH) e = search_exponent(x, e);
        for (int i = 0; i < BLOCK; i += 2)
            data[i / 2] = (uint8_t)(e2m1_code(ldexpf(x[i], -e)) | e2m1_code(ldexpf(x[i + 1], -e)) << 4);
        scale[b] = (uint8_t)(e + 127);
    }
    return MXD_OK;
}

void mxd_mxfp4_decode(const uint8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x) {
    for (size_t i = 0; i < rows * k; i++) {
        uint8_t code = i % 2 ? data[i / 2] >> 4 : data[i / 2] & 15;
        x[i] = ldexpf(E2M1[code], scale[i / BLOCK] - 127);
    }
}

mxd_status mxd_mxint8_encode(const float *x, size_t rows, size_t k, int8_t *data, uint8_t *scale, mxd_error *err) {
    if (k == 0 || k % BLOCK) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu columns are not a multiple of 32", k);
    for (size_t b = 0; b < rows * (k / BLOCK); b++, x += BLOCK, data += BLOCK) {
        int bad, e = block_exponent(x, &bad);
        if (bad >= 0)
            return mxd_fail(err, MXD_ERR_NUMERIC, "value %g at row %zu, column %zu cannot be quantized", (double)x[bad],
                            b / (k / BLOCK), b % (k / BLOCK) * BLOCK + (size_t)bad);
        e = clamp(e, -120, 127);
        for (int i = 0; i < BLOCK; i++) data[i] = (int8_t)clamp((int)rintf(ldexpf(x[i], 6 - e)), -127, 127);
        scale[b] = (uint8_t)(e + 127);
    }
    return MXD_OK;
}

void mxd_mxint8_decode(const int8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x) {
    for (size_t i = 0; i < rows * k; i++) x[i] = ldexpf((float)data[i], scale[i / BLOCK] - 127 - 6);
}
