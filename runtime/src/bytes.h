/* SPDX-License-Identifier: Apache-2.0 */
/* Little-endian numbers at any address. */
#ifndef MXD_BYTES_H
#define MXD_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint32_t mxd_load_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t mxd_load_u64(const uint8_t *p) {
    return mxd_load_u32(p) | (uint64_t)mxd_load_u32(p + 4) << 32;
}

static inline float mxd_load_f32(const uint8_t *p) {
    uint32_t bits = mxd_load_u32(p);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
