/* SPDX-License-Identifier: Apache-2.0 */
#include "hash.h"

#include <string.h>

/* Take eight bytes a step through eight tables ("slicing-by-8"), so that checking a bundle costs a fraction of reading
 * it. */
uint32_t mxd_crc32(const uint8_t *data, size_t len) {
    uint32_t table[8][256];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (0xEDB88320u & (0u - (c & 1)));
        table[0][i] = c;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++) table[t][i] = table[0][table[t - 1][i] & 255] ^ (table[t - 1][i] >> 8);

    uint32_t crc = 0xFFFFFFFFu;
    for (; len >= 8; data += 8, len -= 8) {
        uint32_t lo, hi;
        memcpy(&lo, data, 4);
        memcpy(&hi, data + 4, 4);
        lo ^= crc;
        crc = table[7][lo & 255] ^ table[6][(lo >> 8) & 255] ^ table[5][(lo >> 16) & 255] ^ table[4][lo >> 24] ^
              table[3][hi & 255] ^ table[2][(hi >> 8) & 255] ^ table[1][(hi >> 16) & 255] ^ table[0][hi >> 24];
    }
    for (; len; data++, len--) crc = table[0][(crc ^ *data) & 255] ^ (crc >> 8);
    return ~crc;
}

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotr(uint32_t x, int n) {
    return (x >> n) | (x << (32 - n));
}

static void sha256_block(uint32_t state[8], const uint8_t *p) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
        uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t v[8]; /* a to h: number x is at (x - i) modulo 8 in round i, so that nothing has to move */
    memcpy(v, state, sizeof v);
    for (unsigned i = 0; i < 64; i++) {
        uint32_t a = v[-i & 7], b = v[(1 - i) & 7], c = v[(2 - i) & 7], *d = &v[(3 - i) & 7];
        uint32_t e = v[(4 - i) & 7], f = v[(5 - i) & 7], g = v[(6 - i) & 7], *h = &v[(7 - i) & 7];
        uint32_t t1 = *h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
        *h = t1 + (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        *d += t1;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

void mxd_sha256_init(mxd_sha256 *s) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(s->state, start, sizeof start);
    s->bytes = 0;
}

void mxd_sha256_update(mxd_sha256 *s, const void *data, size_t len) {
    const uint8_t *p = data;
    size_t fill = s->bytes % 64;
    s->bytes += len;
    if (fill) {
        size_t take = 64 - fill < len ? 64 - fill : len;
        memcpy(s->block + fill, p, take);
        if (fill + take < 64) return;
        sha256_block(s->state, s->block);
        p += take;
        len -= take;
    }
    for (; len >= 64; p += 64, len -= 64) sha256_block(s->state, p);
    memcpy(s->block, p, len);
}

void mxd_sha256_final(mxd_sha256 *s, uint8_t digest[32]) {
    uint64_t bits = s->bytes * 8;
    uint8_t pad[72] = {0x80};
    size_t zeros = (s->bytes % 64 < 56 ? 56 : 120) - s->bytes % 64;
    for (int i = 0; i < 8; i++) pad[zeros + i] = (uint8_t)(bits >> (56 - 8 * i));
    mxd_sha256_update(s, pad, zeros + 8);
    for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(s->state[i / 4] >> (24 - 8 * (i % 4)));
}
