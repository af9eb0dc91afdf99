/* SPDX-License-Identifier: Apache-2.0 */
#include "utf8.h"

/* Return the length of the character that begins with `lead`, and the range of its second byte; 0 if none begins so. */
static size_t character_length(uint8_t lead, uint8_t *low, uint8_t *high) {
    *low = 0x80;
    *high = 0xBF;
    if (lead < 0x80) return 1;
    if (lead < 0xC2) return 0; /* continuation bytes, and overlong forms of ASCII */
    if (lead < 0xE0) return 2;
    if (lead < 0xF0) {
        if (lead == 0xE0) *low = 0xA0;  /* below: overlong */
        if (lead == 0xED) *high = 0x9F; /* above: surrogates */
        return 3;
    }
    if (lead > 0xF4) return 0;
    if (lead == 0xF0) *low = 0x90;  /* below: overlong */
    if (lead == 0xF4) *high = 0x8F; /* above: past U+10FFFF */
    return 4;
}

/* Return how many of p[0..want) are right for a character of length want whose second byte is in low..high. */
static size_t valid_bytes(const uint8_t *p, size_t n, size_t want, uint8_t low, uint8_t high) {
    size_t i = 1;
    if (i < n && i < want && p[1] >= low && p[1] <= high)
        for (i = 2; i < n && i < want && (p[i] & 0xC0) == 0x80;) i++;
    return i;
}

size_t mxd_utf8_decode(const uint8_t *p, size_t n, uint32_t *c) {
    static const uint8_t LEAD_BITS[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    uint8_t low, high;
    size_t want = n ? character_length(p[0], &low, &high) : 0;
    if (want == 0 || valid_bytes(p, n, want, low, high) < want) return 0;
    uint32_t value = p[0] & LEAD_BITS[want];
    for (size_t i = 1; i < want; i++) value = value << 6 | (p[i] & 0x3F);
    *c = value;
    return want;
}

size_t mxd_utf8_incomplete(const uint8_t *p, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const uint8_t *start = p + n - back;
        if ((*start & 0xC0) == 0x80) continue;
        uint8_t low, high;
        size_t want = character_length(*start, &low, &high);
        return want > back && valid_bytes(start, back, want, low, high) == back ? back : 0;
    }
    return 0;
}
