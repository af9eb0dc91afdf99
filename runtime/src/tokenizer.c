/* SPDX-License-Identifier: Apache-2.0 */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "unicode_classes.h"
#include "utf8.h"

enum { HEADER_BYTES = 64, PRE_TOKENIZER_GPT2 = 1, PRE_TOKENIZER_SMOLLM = 2 };
enum { MAX_VOCAB = 1 << 20, MAX_MERGES = 1 << 20, MAX_TEXT = 1 << 28 };
enum { MAX_INPUT = 1 << 30, STACK_SYMBOLS = 256, SCRATCH_WORDS = 5 };
#define NONE UINT32_MAX /* no merge, no symbol */

/* ---- the section ---- */

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
                         .splits_digits = header[2] == PRE_TOKENIZER_SMOLLM};
    if (t->vocab != vocab || vocab < 1 || vocab > MAX_VOCAB) return refuse(err, "vocabulary size is not the model's");
    if (header[2] != PRE_TOKENIZER_GPT2 && header[2] != PRE_TOKENIZER_SMOLLM)
        return refuse(err, "unknown pre-tokenizer");
    if (t->merge_count > MAX_MERGES || t->eos_count > vocab || t->special_count > vocab || t->text_bytes > MAX_TEXT)
        return refuse(err, "impossible count");
    for (int i = 7; i < HEADER_BYTES / 4; i++)
        if (header[i]) return refuse(err, "reserved bytes are not zero");

    size_t words = HEADER_BYTES / 4 + 256 + (size_t)t->eos_count + t->special_count + vocab + 1 +
                   4 * (size_t)t->merge_count;
    if (len != 4 * words + t->text_bytes) return refuse(err, "length differs from what its counts ask for");
    t->byte_token = header + HEADER_BYTES / 4;
    t->eos = t->byte_token + 256;
    t->special = t->eos + t->eos_count;
    t->text_start = t->special + t->special_count;
    t->merge = t->text_start + vocab + 1;
    t->by_pair = t->merge + 3 * (size_t)t->merge_count;
    t->text = section + 4 * words;
    return MXD_OK;
}

static mxd_status check_tokens(const mxd_tokenizer *t, mxd_error *err) {
    if (!mxd_ids_ascend(t->special, t->special_count, t->vocab)) return refuse(err, "bad list of control tokens");
    if (!mxd_ids_ascend(t->eos, t->eos_count, t->vocab)) return refuse(err, "bad list of end tokens");
    for (uint32_t i = 0; i < t->eos_count; i++)
        if (!mxd_tokenizer_is_special(t, t->eos[i])) return refuse(err, "an end token is not a control token");
    if (t->bos != MXD_NO_TOKEN && t->bos >= t->vocab) return refuse(err, "bos is outside the vocabulary");

    if (t->text_start[0] != 0 || t->text_start[t->vocab] != t->text_bytes) return refuse(err, "bad token offsets");
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->text_start[id + 1] <= t->text_start[id] || token_length(t, id) > MXD_MAX_TOKEN_BYTES)
            return refuse(err, "bad token offsets");

    /* Both ways, so that no byte loses its token and no token of one byte is out of reach. */
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t id = t->byte_token[byte];
        if (id == MXD_NO_TOKEN) continue;
        if (id >= t->vocab || mxd_tokenizer_is_special(t, id) || token_length(t, id) != 1 ||
            t->text[t->text_start[id]] != byte)
            return refuse(err, "bad byte token");
    }
    for (uint32_t id = 0; id < t->vocab; id++)
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

/* ---- pre-tokens ---- */

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
static uint32_t class_at(const mxd_tokenizer *t, const uint8_t *text, size_t len, size_t pos, size_t *width) {
    *width = 0;
    if (pos == len) return BOUNDARY;
    uint32_t c, class;
    *width = mxd_utf8_decode(text + pos, len - pos, &c);
    if (*width == 0) {
        *width = 1;
        return CLASS_OTHER;
    }
    class = class_of(c);
    if (t->splits_digits && (class == CLASS_NUMBER || class == CLASS_OTHER_NUMERIC)) return BOUNDARY;
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
static size_t pre_token_end(const mxd_tokenizer *t, const uint8_t *text, size_t len, size_t pos) {
    size_t contraction = contraction_length(text + pos, len - pos);
    if (contraction) return pos + contraction;

    size_t width;
    uint32_t class = class_at(t, text, len, pos, &width);
    size_t end = pos + width;
    if (class == BOUNDARY) return end;
    if (text[pos] == ' ') {
        uint32_t next = class_at(t, text, len, end, &width);
        if (next != CLASS_SPACE && next != BOUNDARY) {
            class = next;
            end += width;
        }
    }
    if (class != CLASS_SPACE) {
        while (class_at(t, text, len, end, &width) == class) end += width;
        return end;
    }
    /* A run of white space leaves its last character to what follows, if something follows. */
    size_t last = pos;
    uint32_t next;
    while ((next = class_at(t, text, len, end, &width)) == CLASS_SPACE) {
        last = end;
        end += width;
    }
    return next == BOUNDARY || last == pos ? end : last;
}

/* ---- merges ---- */

/* A pre-token under work: its symbols, each at the index of its first byte, in a doubly linked list, with a tournament
 * tree over the ranks of their merges. Its root is the lowest rank, leftmost among equals. So the next merge is found
 * in O(1) and carried out in O(log n): a megabyte of one letter costs n log n. */
typedef struct word {
    uint32_t n;
    uint32_t *id, *previous, *next; /* (n) previous of the first is NONE, next of the last is n */
    uint32_t *rank;                 /* (n) of merging the symbol with the next one; NONE */
    uint32_t *winner;               /* (n) inner nodes 1..n-1 of the tree; node n+i is symbol i */
} word;

static uint32_t find_merge(const mxd_tokenizer *t, uint32_t left, uint32_t right) {
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
    return NONE;
}

static uint32_t winner_at(const word *w, uint32_t node) {
    return node >= w->n ? node - w->n : w->winner[node];
}

static void replay(word *w, uint32_t node) {
    uint32_t a = winner_at(w, 2 * node), b = winner_at(w, 2 * node + 1);
    bool a_wins = w->rank[a] < w->rank[b] || (w->rank[a] == w->rank[b] && a < b);
    w->winner[node] = a_wins ? a : b;
}

static void rank_symbol(const mxd_tokenizer *t, word *w, uint32_t i) {
    w->rank[i] = w->next[i] < w->n ? find_merge(t, w->id[i], w->id[w->next[i]]) : NONE;
}

static void update_rank(const mxd_tokenizer *t, word *w, uint32_t i) {
    rank_symbol(t, w, i);
    for (uint32_t node = (w->n + i) / 2; node >= 1; node /= 2) replay(w, node);
}

/* Append the ids of a pre-token; scratch: SCRATCH_WORDS x len words. */
static void encode_pre_token(const mxd_tokenizer *t, const uint8_t *bytes, size_t len, uint32_t *scratch,
                             mxd_id_buffer *out) {
    word w = {.n = 0,
              .id = scratch,
              .previous = scratch + len,
              .next = scratch + 2 * len,
              .rank = scratch + 3 * len,
              .winner = scratch + 4 * len};
    for (size_t i = 0; i < len; i++) {
        uint32_t id = t->byte_token[bytes[i]];
        if (id != MXD_NO_TOKEN) w.id[w.n++] = id;
    }
    if (w.n == 0) return;
    for (uint32_t i = 0; i < w.n; i++) {
        w.previous[i] = i > 0 ? i - 1 : NONE;
        w.next[i] = i + 1;
    }
    for (uint32_t i = 0; i < w.n; i++) rank_symbol(t, &w, i);
    for (uint32_t node = w.n - 1; node >= 1; node--) replay(&w, node);

    for (uint32_t i; w.rank[i = winner_at(&w, 1)] != NONE;) {
        uint32_t gone = w.next[i];
        w.id[i] = t->merge[3 * (size_t)w.rank[i] + 2];
        w.next[i] = w.next[gone];
        if (w.next[i] < w.n) w.previous[w.next[i]] = i;
        w.next[gone] = w.n; /* so that it has no rank any more */
        update_rank(t, &w, gone);
        update_rank(t, &w, i);
        if (w.previous[i] != NONE) update_rank(t, &w, w.previous[i]);
    }
    for (uint32_t i = 0; i < w.n; i = w.next[i]) mxd_id_buffer_push(out, w.id[i]);
}

/* ---- text to ids ---- */

void mxd_id_buffer_push(mxd_id_buffer *out, uint32_t id) {
    if (out->n < out->cap) out->ids[out->n] = id;
    out->n++;
}

mxd_status mxd_id_buffer_finish(const mxd_id_buffer *out, size_t *n, mxd_error *err) {
    *n = out->n;
    if (out->n <= out->cap) return MXD_OK;
    return mxd_fail(err, MXD_ERR_BUFFER, "the text has %zu tokens, the buffer holds %zu", out->n, out->cap);
}

mxd_status mxd_tokenizer_append(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                                mxd_error *err) {
    if (len > MAX_INPUT) return mxd_fail(err, MXD_ERR_ARGUMENT, "text of %zu bytes: at most 2^30 are encoded", len);
    for (size_t pos = 0, end; pos < len; pos = end) {
        end = pre_token_end(t, text, len, pos);
        if (end - pos <= STACK_SYMBOLS) {
            uint32_t scratch[SCRATCH_WORDS * STACK_SYMBOLS];
            encode_pre_token(t, text + pos, end - pos, scratch, out);
            continue;
        }
        uint32_t *scratch = malloc((end - pos) * SCRATCH_WORDS * sizeof *scratch);
        if (!scratch) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory encoding a word of %zu bytes", end - pos);
        encode_pre_token(t, text + pos, end - pos, scratch, out);
        free(scratch);
    }
    return MXD_OK;
}

mxd_status mxd_tokenizer_encode(const mxd_tokenizer *t, const char *text, size_t len, uint32_t *ids, size_t cap,
                                size_t *n, mxd_error *err) {
    mxd_id_buffer out = {ids, cap, 0};
    *n = 0;
    mxd_status status = mxd_tokenizer_append(t, (const uint8_t *)text, len, &out, err);
    return status ? status : mxd_id_buffer_finish(&out, n, err);
}
