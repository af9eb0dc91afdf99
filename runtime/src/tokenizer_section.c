/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tokenizer.h"

enum { HEADER_BYTES = 64, WHOLE_WORDS = 1, NFC = 2, ADDS_BOS = 4 };
enum { MAX_VOCAB = 1 << 20, MAX_MERGES = 1 << 20, MAX_TEXT = 1 << 28 };

static mxd_status refuse(mxd_error *err, const char *what) {
    return mxd_fail(err, MXD_BAD_TOKENIZER, "tokenizer: %s: pack the bundle again", what);
}

bool mxd_ids_contain(const uint32_t *ids, uint32_t count, uint32_t id) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (ids[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low < count && ids[low] == id;
}

bool mxd_ids_ascend(const uint32_t *ids, uint32_t count, uint32_t vocab) {
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= vocab || (i > 0 && ids[i] <= ids[i - 1])) return false;
    return true;
}

static uint32_t token_length(const mxd_tokenizer *t, uint32_t id) {
    return t->text_start[id + 1] - t->text_start[id];
}

static uint64_t pair_key(uint32_t left, uint32_t right) {
    return (uint64_t)left << 32 | right;
}

static bool merge_spells_result(const mxd_tokenizer *t, const uint32_t *merge) {
    uint32_t left = token_length(t, merge[0]), right = token_length(t, merge[1]);
    const uint8_t *result = t->text + t->text_start[merge[2]];
    return token_length(t, merge[2]) == left + right && !memcmp(result, t->text + t->text_start[merge[0]], left) &&
           !memcmp(result + left, t->text + t->text_start[merge[1]], right);
}

/* Set the pointers: the places of all arrays follow from the counts in the header. */
static mxd_status lay_out(mxd_tokenizer *t, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err) {
    if (len < HEADER_BYTES) return refuse(err, "shorter than its header");
    const uint32_t *header = (const uint32_t *)(const void *)section;
    *t = (mxd_tokenizer){.vocab = header[0],
                         .merge_count = header[1],
                         .bos = header[3],
                         .eos_count = header[4],
                         .special_count = header[5],
                         .text_bytes = header[6],
                         .pre_tokenizer = header[2],
                         .whole_words = header[7] & WHOLE_WORDS,
                         .nfc = header[7] & NFC,
                         .adds_bos = header[7] & ADDS_BOS,
                         .added_count = header[8],
                         .by_text_count = header[9]};
    if (t->vocab != vocab || vocab < 1 || vocab > MAX_VOCAB) return refuse(err, "vocabulary size is not the model's");
    if (header[2] < MXD_PRE_GPT2 || header[2] > MXD_PRE_SPACES_FIRST) return refuse(err, "unknown pre-tokenizer");
    if (t->merge_count > MAX_MERGES || t->eos_count > vocab || t->special_count > vocab || t->text_bytes > MAX_TEXT ||
        t->added_count > vocab || t->by_text_count > vocab)
        return refuse(err, "impossible count");
    if (header[7] > (WHOLE_WORDS | NFC | ADDS_BOS)) return refuse(err, "unknown flags");
    for (int i = 10; i < HEADER_BYTES / 4; i++)
        if (header[i]) return refuse(err, "reserved bytes are not zero");

    size_t words = HEADER_BYTES / 4 + 256 + (size_t)t->eos_count + t->special_count + vocab + 1 +
                   4 * (size_t)t->merge_count + t->added_count + t->by_text_count;
    if (len != 4 * words + t->text_bytes) return refuse(err, "length differs from what its counts ask for");
    t->byte_token = header + HEADER_BYTES / 4;
    t->eos = t->byte_token + 256;
    t->special = t->eos + t->eos_count;
    t->text_start = t->special + t->special_count;
    t->merge = t->text_start + vocab + 1;
    t->by_pair = t->merge + 3 * (size_t)t->merge_count;
    t->added = t->by_pair + t->merge_count;
    t->by_text = t->added + t->added_count;
    t->text = section + 4 * words;
    return MXD_OK;
}

static const uint8_t *text_of(const mxd_tokenizer *t, uint32_t id) {
    return t->text + t->text_start[id];
}

/* Order token `id` against bytes[len], as strings of bytes: below, at or above 0. */
static int compare_text(const mxd_tokenizer *t, uint32_t id, const uint8_t *bytes, size_t len) {
    size_t own = token_length(t, id);
    int order = memcmp(text_of(t, id), bytes, own < len ? own : len);
    return order ? order : (own > len) - (own < len);
}

static bool texts_ascend(const mxd_tokenizer *t, const uint32_t *ids, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] >= t->vocab) return false;
        if (i > 0 && compare_text(t, ids[i - 1], text_of(t, ids[i]), token_length(t, ids[i])) >= 0) return false;
    }
    return true;
}

uint32_t mxd_tokenizer_find_text(const mxd_tokenizer *t, const uint8_t *bytes, size_t len) {
    uint32_t low = 0, high = t->by_text_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = compare_text(t, t->by_text[middle], bytes, len);
        if (order == 0) return t->by_text[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return MXD_NO_TOKEN;
}

static mxd_status check_texts(const mxd_tokenizer *t, mxd_error *err) {
    if (!texts_ascend(t, t->added, t->added_count)) return refuse(err, "bad list of added tokens");
    if (!texts_ascend(t, t->by_text, t->by_text_count)) return refuse(err, "bad list of tokens by text");
    for (uint32_t i = 0; i < t->by_text_count; i++)
        if (mxd_tokenizer_is_special(t, t->by_text[i])) return refuse(err, "a control token is listed by text");
    if (mxd_marks_spaces(t->pre_tokenizer) && mxd_tokenizer_find_text(t, (const uint8_t *)" ", 1) == MXD_NO_TOKEN)
        return refuse(err, "no token is a space");
    return MXD_OK;
}

static mxd_status check_tokens(const mxd_tokenizer *t, mxd_error *err) {
    if (!mxd_ids_ascend(t->special, t->special_count, t->vocab)) return refuse(err, "bad list of control tokens");
    if (!mxd_ids_ascend(t->eos, t->eos_count, t->vocab)) return refuse(err, "bad list of end tokens");
    for (uint32_t i = 0; i < t->eos_count; i++)
        if (!mxd_tokenizer_is_special(t, t->eos[i])) return refuse(err, "an end token is not a control token");
    if (t->bos != MXD_NO_TOKEN && t->bos >= t->vocab) return refuse(err, "bos is outside the vocabulary");
    if (t->bos == MXD_NO_TOKEN && t->adds_bos) return refuse(err, "there is no bos to add");

    if (t->text_start[0] != 0 || t->text_start[t->vocab] != t->text_bytes) return refuse(err, "bad token offsets");
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->text_start[id + 1] <= t->text_start[id] || token_length(t, id) > MXD_MAX_TOKEN_BYTES)
            return refuse(err, "bad token offsets");

    bool marked = mxd_marks_spaces(t->pre_tokenizer);
    /* Both ways, so that no byte loses its token and no token of one byte is out of reach. */
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t id = t->byte_token[byte];
        if (id == MXD_NO_TOKEN && marked) return refuse(err, "a byte has no token");
        if (id == MXD_NO_TOKEN) continue;
        if (id >= t->vocab || mxd_tokenizer_is_special(t, id) || token_length(t, id) != 1 ||
            t->text[t->text_start[id]] != byte)
            return refuse(err, "bad byte token");
    }
    for (uint32_t id = 0; id < t->vocab && !marked; id++)
        if (token_length(t, id) == 1 && !mxd_tokenizer_is_special(t, id) &&
            t->byte_token[t->text[t->text_start[id]]] != id)
            return refuse(err, "a token of one byte is missing from the byte tokens");
    return MXD_OK;
}

static mxd_status check_merges(const mxd_tokenizer *t, mxd_error *err) {
    for (uint32_t rank = 0; rank < t->merge_count; rank++) {
        const uint32_t *merge = t->merge + 3 * (size_t)rank;
        for (int i = 0; i < 3; i++)
            if (merge[i] >= t->vocab || mxd_tokenizer_is_special(t, merge[i]))
                return refuse(err, "bad token in a merge");
        if (!merge_spells_result(t, merge)) return refuse(err, "a merge's result is not its two parts");
    }
    /* merge_count ranks below merge_count in strictly ascending order of pair: a permutation, and no pair twice. */
    uint64_t before = 0;
    for (uint32_t i = 0; i < t->merge_count; i++) {
        if (t->by_pair[i] >= t->merge_count) return refuse(err, "bad order of merges");
        const uint32_t *merge = t->merge + 3 * (size_t)t->by_pair[i];
        uint64_t key = pair_key(merge[0], merge[1]);
        if (i > 0 && key <= before) return refuse(err, "bad order of merges");
        before = key;
    }
    return MXD_OK;
}

mxd_status mxd_tokenizer_init(mxd_tokenizer *t, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err) {
    mxd_status status = lay_out(t, section, len, vocab, err);
    if (!status) status = check_tokens(t, err);
    if (!status) status = check_texts(t, err);
    if (!status) status = check_merges(t, err);
    return status;
}

const char *mxd_tokenizer_bytes(const mxd_tokenizer *t, uint32_t id, size_t *len) {
    *len = id < t->vocab ? token_length(t, id) : 0;
    return id < t->vocab ? (const char *)t->text + t->text_start[id] : NULL;
}

bool mxd_tokenizer_is_special(const mxd_tokenizer *t, uint32_t id) {
    return mxd_ids_contain(t->special, t->special_count, id);
}

bool mxd_tokenizer_is_eos(const mxd_tokenizer *t, uint32_t id) {
    return mxd_ids_contain(t->eos, t->eos_count, id);
}

uint32_t mxd_tokenizer_find_merge(const mxd_tokenizer *t, uint32_t left, uint32_t right) {
    uint64_t key = pair_key(left, right);
    uint32_t low = 0, high = t->merge_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2, rank = t->by_pair[middle];
        const uint32_t *merge = t->merge + 3 * (size_t)rank;
        uint64_t found = pair_key(merge[0], merge[1]);
        if (found == key) return rank;
        if (found < key) low = middle + 1;
        else high = middle;
    }
    return MXD_NO_TOKEN;
}
