/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef MXD_UTF8_H
#define MXD_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Return the length (1..4) of the character at the start of p[n], and its code point in *c. Returns 0, and leaves *c
 * alone, if no complete valid character is there. */
size_t mxd_utf8_decode(const uint8_t *p, size_t n, uint32_t *c);

/* Return how many bytes (0..3) at the end of p[n] begin a character which further bytes may complete. A stream that
 * holds exactly these back shows whole characters only, and passes invalid bytes on at once. */
size_t mxd_utf8_incomplete(const uint8_t *p, size_t n);

#endif
