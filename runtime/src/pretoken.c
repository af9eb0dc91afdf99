/* SPDX-License-Identifier: Apache-2.0 */
#include "pretoken.h"

#include <limits.h>
#include <string.h>

#include "unicode_classes.h"
#include "utf8.h"

static uint32_t class_of(uint32_t c) {
    uint32_t low = 0, high = sizeof UNICODE_CLASSES / sizeof *UNICODE_CLASSES;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (UNICODE_CLASSES[middle] >> UNICODE_CLASS_BITS <= c) low = middle;
        else high = middle;
    }
    return UNICODE_CLASSES[low] & ((1u << UNICODE_CLASS_BITS) - 1);
}

/* What ends every run: the end of the text, or a digit that is a pre-token of its own. */
#define BOUNDARY UINT32_MAX

/* Return the class of the character at pos, its length in *width. A byte that is not UTF-8 is one character of class
 * OTHER. */
static uint32_t class_at(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos, size_t *width) {
    *width = 0;
    if (pos == len) return BOUNDARY;
    uint32_t c, class;
    *width = mxd_utf8_decode(text + pos, len - pos, &c);
    if (*width == 0) {
        *width = 1;
        return CLASS_OTHER;
    }
    class = class_of(c);
    if (kind == MXD_PRE_SMOLLM && (class == CLASS_NUMBER || class == CLASS_OTHER_NUMERIC)) return BOUNDARY;
    return class == CLASS_OTHER_NUMERIC ? CLASS_OTHER : class;
}

static size_t contraction_length(const uint8_t *text, size_t len) {
    static const char *const CONTRACTIONS[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (size_t i = 0; i < sizeof CONTRACTIONS / sizeof *CONTRACTIONS; i++) {
        size_t n = strlen(CONTRACTIONS[i]);
        if (n <= len && !memcmp(text, CONTRACTIONS[i], n)) return n;
    }
    return 0;
}

/* Return the end of the pre-token that begins at pos < len. By hand, what GPT-2's regular expression matches:
 * 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static size_t gpt2_end(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos) {
    size_t contraction = contraction_length(text + pos, len - pos);
    if (contraction) return pos + contraction;

    size_t width;
    uint32_t class = class_at(kind, text, len, pos, &width);
    size_t end = pos + width;
    if (class == BOUNDARY) return end;
    if (text[pos] == ' ') {
        uint32_t next = class_at(kind, text, len, end, &width);
        if (next != CLASS_SPACE && next != BOUNDARY) {
            class = next;
            end += width;
        }
    }
    if (class != CLASS_SPACE) {
        while (class_at(kind, text, len, end, &width) == class) end += width;
        return end;
    }
    /* A run of white space leaves its last character to what follows, if something follows. */
    size_t last = pos;
    uint32_t next;
    while ((next = class_at(kind, text, len, end, &width)) == CLASS_SPACE) {
        last = end;
        end += width;
    }
    return next == BOUNDARY || last == pos ? end : last;
}

/* ---- Llama 3 and Qwen2 ---- */

static bool is_line_end(const uint8_t *text, size_t len, size_t pos) {
    return pos < len && (text[pos] == '\n' || text[pos] == '\r');
}

/* As contraction_length(), in either case; U+017F is a small s that a regular expression takes for one, too. */
static size_t blind_contraction_length(const uint8_t *text, size_t len) {
    if (len < 2 || text[0] != '\'') return 0;
    if (len >= 3 && text[1] == 0xC5 && text[2] == 0xBF) return 3;
    char lower[3] = {0};
    for (size_t i = 0; i < 3 && i < len; i++)
        lower[i] = (char)(text[i] >= 'A' && text[i] <= 'Z' ? text[i] + 32 : text[i]);
    return contraction_length((const uint8_t *)lower, len < 3 ? len : 3);
}

static size_t run_end(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos, uint32_t class, int most) {
    size_t width;
    for (int n = 0; n < most && class_at(kind, text, len, pos, &width) == class; n++) pos += width;
    return pos;
}

/* Return the end of white space from pos: after its last line end if it has one, else without its last character if
 * something follows, unless that is all. */
static size_t space_end(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos) {
    size_t end = pos, last = pos, after_line = pos, width;
    while (class_at(kind, text, len, end, &width) == CLASS_SPACE) {
        last = end;
        if (is_line_end(text, len, end)) after_line = end + width;
        end += width;
    }
    if (after_line > pos) return after_line;
    return end == len || last == pos ? end : last;
}

/* Return the end of the pre-token that begins at pos < len. By hand, what this regular expression matches, with up to
 * `digits` numbers together:
 * (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+ */
static size_t llama3_end(mxd_pre_tokenizer kind, int digits, const uint8_t *text, size_t len, size_t pos) {
    size_t contraction = blind_contraction_length(text + pos, len - pos), width, next_width;
    if (contraction) return pos + contraction;
    uint32_t class = class_at(kind, text, len, pos, &width);
    if (class == CLASS_NUMBER) return run_end(kind, text, len, pos, CLASS_NUMBER, digits);
    if (class == CLASS_LETTER) return run_end(kind, text, len, pos, CLASS_LETTER, INT_MAX);

    uint32_t next = class_at(kind, text, len, pos + width, &next_width);
    if (next == CLASS_LETTER && !is_line_end(text, len, pos))
        return run_end(kind, text, len, pos + width, CLASS_LETTER, INT_MAX);
    size_t end = text[pos] == ' ' && next == CLASS_OTHER ? pos + width : pos;
    if (class == CLASS_OTHER || end > pos) {
        end = run_end(kind, text, len, end, CLASS_OTHER, INT_MAX);
        while (is_line_end(text, len, end)) end++;
        return end;
    }
    return space_end(kind, text, len, pos);
}

size_t mxd_pre_token_end(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos) {
    if (kind == MXD_PRE_LLAMA3) return llama3_end(kind, 3, text, len, pos);
    if (kind == MXD_PRE_QWEN2) return llama3_end(kind, 1, text, len, pos);
    return gpt2_end(kind, text, len, pos);
}

bool mxd_marks_spaces(mxd_pre_tokenizer kind) {
    return kind >= MXD_PRE_SPACES;
}
