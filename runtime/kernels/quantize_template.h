/* SPDX-License-Identifier: Apache-2.0 */
/* This file is a template: a level's `quantize` and its stores to rows of the KV cache. The level's file includes it
 * once, with these defined:
 *
 *   TARGET                       attribute of every function
 *   KERNEL(op)                   name of a kernel
 *   VECTOR, INTEGERS, LANES      LANES f32 or int32 values, and their number
 *   load_block(x, in)            loads 32 values as VECTORs; returns the bits of the largest magnitude
 *   round_block(in, up, out)     a block times `up`, rounded to INTEGERS
 *   store_activations(q, bias, v)
 *                                writes the INTEGERS of a block, within -127 .. 127, as bytes, and their bias
 *   store_clamped(out, v)        writes the INTEGERS of a block, within -128 .. 128, as bytes within -127 .. 127
 *   store_codes(out, codes)      writes the INTEGERS of 32 codes of four bits as 16 bytes
 *   error_e2m1(in, up), codes_e2m1(x, up)
 *                                squared error (sum16) of a block times `up` in E2M1; codes of a VECTOR times `up`
 *   error_normal4(in, up), codes_normal4(x, up)
 *                                the same in levels of NORMAL4 */

TARGET static void KERNEL(quantize)(const float *x, size_t ldx, size_t rows, size_t k, const mxd_act *out) {
    const float steps = MXD_ACT_STEPS;
    for (size_t m = 0; m < rows; m++)
        for (size_t b = 0; b < k / BLOCK; b++) {
            VECTOR in[BLOCK / LANES];
            INTEGERS v[BLOCK / LANES];
            size_t at = m * (k / BLOCK) + b;
            int16_t *bias = out->bias + at * 2;
            uint32_t bits = load_block(x + m * ldx + b * BLOCK, in);
            float largest = from_bits(bits);
            if (bits >= F32_INFINITY || largest < MXD_ACT_TINY) {
                memset(out->q + at * BLOCK, 0, BLOCK);
                out->s[at] = bits >= F32_INFINITY ? NAN : 0;
                memset(bias, 0, 2 * sizeof *bias);
                continue;
            }
            round_block(in, steps / largest, v);
            store_activations(out->q + at * BLOCK, bias, v);
            out->s[at] = largest / steps;
        }
}

/* Return whether a block with this largest magnitude needs a scale of its own; if not, write zeros and its code. */
INLINE bool needs_scale(uint32_t largest, uint8_t *elements, size_t bytes, uint8_t *code) {
    if (largest < F32_INFINITY && from_bits(largest) >= MXD_ACT_TINY) return true;
    memset(elements, 0, bytes);
    *code = largest >= F32_INFINITY ? MXD_CODE_FAULT : 0;
    return false;
}

/* Return 2^(code - 127), for the codes of normal numbers. */
INLINE float power_of_two(uint32_t code) {
    return from_bits(code << 23);
}

TARGET static void KERNEL(store_mxint8)(const float *x, size_t d, uint8_t *row) {
    for (size_t b = 0; b < d / BLOCK; b++) {
        VECTOR in[BLOCK / LANES];
        INTEGERS v[BLOCK / LANES];
        uint32_t largest = load_block(x + b * BLOCK, in);
        if (!needs_scale(largest, row + b * BLOCK, BLOCK, row + d + b)) continue;
        round_block(in, power_of_two(127 + 6 + 127 - (largest >> 23)), v);
        store_clamped((int8_t *)row + b * BLOCK, v);
        row[d + b] = (uint8_t)(largest >> 23);
    }
}

TARGET static void KERNEL(store_mxfp4)(const float *x, size_t d, uint8_t *row) {
    for (size_t b = 0; b < d / BLOCK; b++) {
        VECTOR in[BLOCK / LANES];
        INTEGERS codes[BLOCK / LANES];
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b;
        uint32_t largest = load_block(x + b * BLOCK, in);
        if (!needs_scale(largest, out, BLOCK / 2, code)) continue;
        uint32_t e = (largest >> 23) - 2; /* biased; the inverse of 2^e has the code 254 - e */
        e += 4 * error_e2m1(in, power_of_two(253 - e)) < error_e2m1(in, power_of_two(254 - e));
    UNROLL for (int i = 0; i < BLOCK / LANES; i++) codes[i] = codes_e2m1(in[i], power_of_two(254 - e));
        store_codes(out, codes);
        *code = (uint8_t)e;
    }
}

/* Return the code of the scale with the least error, the smaller one among equals. */
INLINE TARGET uint8_t best_scale(const VECTOR in[BLOCK / LANES], float largest) {
    int32_t first = (int32_t)(to_bits(largest / 127) >> 20) - MXD_NORMAL4_CODES, best = 254;
    float least = INFINITY;
    for (int32_t c = first + MXD_NORMAL4_FIRST; c <= first + MXD_NORMAL4_LAST; c++) {
        int32_t code = c < 0 ? 0 : c > 254 ? 254 : c;
        float scale = normal4_scale(code), error = error_normal4(in, 1.0f / scale) * scale * scale;
        if (error < least) {
            least = error;
            best = code;
        }
    }
    return (uint8_t)best;
}

TARGET static void KERNEL(store_normal4)(const float *x, size_t d, uint8_t *row) {
    for (size_t b = 0; b < d / BLOCK; b++) {
        VECTOR in[BLOCK / LANES];
        INTEGERS codes[BLOCK / LANES];
        uint8_t *out = row + b * (BLOCK / 2), *code = row + d / 2 + b;
        uint32_t largest = load_block(x + b * BLOCK, in);
        if (largest >= F32_INFINITY) {
            memset(out, 0, BLOCK / 2);
            *code = MXD_CODE_FAULT;
            continue;
        }
        *code = best_scale(in, from_bits(largest));
        UNROLL for (int i = 0; i < BLOCK / LANES; i++) codes[i] = codes_normal4(in[i], 1.0f / normal4_scale(*code));
        store_codes(out, codes);
    }
}
