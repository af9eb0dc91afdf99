/* SPDX-License-Identifier: Apache-2.0 */
#include "nfc.h"

#include <stdlib.h>

#include "unicode_nfc.h"
#include "utf8.h"

enum { FIRST_CHANGED = 0x300, BAD_BYTE = 0x110000 }; /* BAD_BYTE + byte: a byte that is no UTF-8 */
/* Hangul syllables are made of L, V and perhaps T by arithmetic. */
enum { S_BASE = 0xAC00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11A7, L_COUNT = 19, V_COUNT = 21, T_COUNT = 28 };
enum { S_COUNT = L_COUNT * V_COUNT * T_COUNT };
enum { DECOMPOSED = sizeof DECOMPOSE / sizeof *DECOMPOSE, COMPOSED = sizeof COMPOSE / sizeof *COMPOSE };

bool mxd_nfc_may_change(const uint8_t *text, size_t len) {
    for (size_t i = 0; i < len; i++)
        if (text[i] >= 0xCC) return true; /* lead byte of U+0300 and above */
    return false;
}

/* Return the combining class: marks of different classes after a letter are put in order of class. */
static uint32_t combining_class(uint32_t c) {
    uint32_t low = 0, high = sizeof CLASSES / sizeof *CLASSES;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (CLASSES[middle] >> 8 <= c) low = middle;
        else high = middle;
    }
    return c >= BAD_BYTE ? 0 : CLASSES[low] & 0xFF;
}

static size_t decompose(uint32_t c, uint32_t *out) {
    if (c >= S_BASE && c < S_BASE + S_COUNT) {
        uint32_t s = c - S_BASE;
        out[0] = L_BASE + s / (V_COUNT * T_COUNT);
        out[1] = V_BASE + s % (V_COUNT * T_COUNT) / T_COUNT;
        out[2] = T_BASE + s % T_COUNT;
        return s % T_COUNT ? 3 : 2;
    }
    uint32_t low = 0, high = DECOMPOSED;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (DECOMPOSE[middle][0] < c) low = middle + 1;
        else high = middle;
    }
    if (low == DECOMPOSED || DECOMPOSE[low][0] != c) {
        out[0] = c;
        return 1;
    }
    size_t n = decompose(DECOMPOSE[low][1], out);
    if (DECOMPOSE[low][2]) out[n++] = DECOMPOSE[low][2];
    return n;
}

/* Return the character that two make; 0 if none. */
static uint32_t compose(uint32_t first, uint32_t second) {
    if (first >= L_BASE && first < L_BASE + L_COUNT && second >= V_BASE && second < V_BASE + V_COUNT)
        return S_BASE + ((first - L_BASE) * V_COUNT + second - V_BASE) * T_COUNT;
    if (first >= S_BASE && first < S_BASE + S_COUNT && (first - S_BASE) % T_COUNT == 0 && second > T_BASE &&
        second < T_BASE + T_COUNT)
        return first + second - T_BASE;
    uint32_t low = 0, high = COMPOSED;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const uint32_t *entry = DECOMPOSE[COMPOSE[middle]];
        if (entry[1] < first || (entry[1] == first && entry[2] < second)) low = middle + 1;
        else high = middle;
    }
    if (low == COMPOSED) return 0;
    const uint32_t *entry = DECOMPOSE[COMPOSE[low]];
    return entry[1] == first && entry[2] == second ? entry[0] : 0;
}

/* Sort marks c[n] by class, stably: a pass for each class, so that a text of nothing but marks costs no n^2. */
static void sort_marks(uint32_t *c, size_t n, uint32_t *scratch) {
    size_t sorted = 0;
    for (uint32_t class = 1; class < 256 && sorted < n; class++)
        for (size_t i = 0; i < n; i++)
            if (combining_class(c[i]) == class) scratch[sorted++] = c[i];
    for (size_t i = 0; i < n; i++) c[i] = scratch[i];
}

static void order(uint32_t *c, size_t n, uint32_t *scratch) {
    for (size_t i = 0, end; i < n; i = end) {
        end = i + 1;
        if (!combining_class(c[i])) continue;
        while (end < n && combining_class(c[end])) end++;
        if (end - i > 1) sort_marks(c + i, end - i, scratch);
    }
}

/* Compose c[n] in place; return how many characters are left. */
static size_t recompose(uint32_t *c, size_t n) {
    size_t kept = 0, starter = SIZE_MAX;
    uint32_t before = 0; /* class of the last character that stays after the starter */
    for (size_t i = 0; i < n; i++) {
        uint32_t class = combining_class(c[i]);
        bool adjacent = starter != SIZE_MAX && starter + 1 == kept;
        if (starter != SIZE_MAX && (adjacent || (before < class && before != 0))) {
            uint32_t made = compose(c[starter], c[i]);
            if (made) {
                c[starter] = made;
                continue;
            }
        }
        if (class == 0) starter = kept;
        before = class;
        c[kept++] = c[i];
    }
    return kept;
}

static size_t write_character(uint32_t c, uint8_t *out) {
    if (c >= BAD_BYTE) {
        out[0] = (uint8_t)(c - BAD_BYTE);
        return 1;
    }
    static const uint8_t LEAD[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t width = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = width; i-- > 1; c >>= 6) out[i] = (uint8_t)(0x80 | (c & 0x3F));
    out[0] = (uint8_t)(LEAD[width] | c);
    return width;
}

/* Count the characters of text[len] when all are decomposed; write them to out unless it is NULL. */
static size_t read_decomposed(const uint8_t *text, size_t len, uint32_t *out) {
    uint32_t parts[MAX_PARTS];
    size_t count = 0;
    for (size_t pos = 0, width; pos < len; pos += width) {
        uint32_t c;
        width = mxd_utf8_decode(text + pos, len - pos, &c);
        if (!width) {
            c = BAD_BYTE + text[pos];
            width = 1;
        }
        size_t n = c < BAD_BYTE ? decompose(c, parts) : (parts[0] = c, 1);
        for (size_t i = 0; out && i < n; i++) out[count + i] = parts[i];
        count += n;
    }
    return count;
}

mxd_status mxd_nfc(const uint8_t *text, size_t len, uint8_t **out, size_t *out_len, mxd_error *err) {
    size_t n = read_decomposed(text, len, NULL);
    uint32_t *c = malloc((2 * n + 1) * sizeof *c);
    *out = malloc(4 * n + 1);
    if (!c || !*out) {
        free(c);
        free(*out);
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory normalizing a text of %zu bytes", len);
    }
    read_decomposed(text, len, c);
    order(c, n, c + n);
    n = recompose(c, n);
    *out_len = 0;
    for (size_t i = 0; i < n; i++) *out_len += write_character(c[i], *out + *out_len);
    free(c);
    return MXD_OK;
}
