/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32 (zlib polynomial) for section checksums, SHA-256 (FIPS 180-4) for the logits digest. */
#ifndef MXD_HASH_H
#define MXD_HASH_H

#include <stddef.h>
#include <stdint.h>

/* Return the checksum of data[len]. */
uint32_t mxd_crc32(const uint8_t *data, size_t len);

typedef struct mxd_sha256 {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[64];
} mxd_sha256;

void mxd_sha256_init(mxd_sha256 *s);
void mxd_sha256_update(mxd_sha256 *s, const void *data, size_t len);
void mxd_sha256_final(mxd_sha256 *s, uint8_t digest[32]);

#endif
