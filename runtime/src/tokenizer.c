/* SPDX-License-Identifier: Apache-2.0 */
#include "tokenizer.h"

#include <stdlib.h>

#include "nfc.h"
#include "utf8.h"

enum { MAX_INPUT = 1 << 30, STACK_SYMBOLS = 256, SCRATCH_WORDS = 5 };
#define NONE MXD_NO_TOKEN /* no merge, no symbol */

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

static uint32_t winner_at(const word *w, uint32_t node) {
    return node >= w->n ? node - w->n : w->winner[node];
}

static void replay(word *w, uint32_t node) {
    uint32_t a = winner_at(w, 2 * node), b = winner_at(w, 2 * node + 1);
    bool a_wins = w->rank[a] < w->rank[b] || (w->rank[a] == w->rank[b] && a < b);
    w->winner[node] = a_wins ? a : b;
}

static void rank_symbol(const mxd_tokenizer *t, word *w, uint32_t i) {
    w->rank[i] = w->next[i] < w->n ? mxd_tokenizer_find_merge(t, w->id[i], w->id[w->next[i]]) : NONE;
}

static void update_rank(const mxd_tokenizer *t, word *w, uint32_t i) {
    rank_symbol(t, w, i);
    for (uint32_t node = (w->n + i) / 2; node >= 1; node /= 2) replay(w, node);
}

static void add_byte(const mxd_tokenizer *t, word *w, uint8_t byte) {
    if (t->byte_token[byte] != MXD_NO_TOKEN) w->id[w->n++] = t->byte_token[byte];
}

/* Add the symbols of a text whose spaces are marked: its characters, or their bytes where a character has no token.
 * The mark itself counts as a space. `prefix`: begin with a space. */
static void add_characters(const mxd_tokenizer *t, word *w, const uint8_t *text, size_t len, bool prefix) {
    uint32_t space = mxd_tokenizer_find_text(t, (const uint8_t *)" ", 1), c = 0;
    if (prefix) w->id[w->n++] = space;
    for (size_t pos = 0, width; pos < len; pos += width) {
        width = mxd_utf8_decode(text + pos, len - pos, &c);
        uint32_t id = !width                ? MXD_NO_TOKEN
                      : c == MXD_SPACE_MARK ? space
                                            : mxd_tokenizer_find_text(t, text + pos, width);
        if (!width) width = 1;
        if (id != MXD_NO_TOKEN) w->id[w->n++] = id;
        else
            for (size_t i = 0; i < width; i++) add_byte(t, w, text[pos + i]);
    }
}

/* Append the ids of a pre-token, which begins with a space more if `prefix`; scratch: SCRATCH_WORDS x (len + prefix)
 * words. */
static void encode_pre_token(const mxd_tokenizer *t, const uint8_t *bytes, size_t len, bool prefix, uint32_t *scratch,
                             mxd_id_buffer *out) {
    uint32_t whole = t->whole_words ? mxd_tokenizer_find_text(t, bytes, len) : MXD_NO_TOKEN;
    if (whole != MXD_NO_TOKEN) {
        mxd_id_buffer_push(out, whole);
        return;
    }
    size_t room = len + prefix;
    word w = {.n = 0,
              .id = scratch,
              .previous = scratch + room,
              .next = scratch + 2 * room,
              .rank = scratch + 3 * room,
              .winner = scratch + 4 * room};
    if (mxd_marks_spaces(t->pre_tokenizer)) add_characters(t, &w, bytes, len, prefix);
    else
        for (size_t i = 0; i < len; i++) add_byte(t, &w, bytes[i]);
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

static mxd_status append_pre_token(const mxd_tokenizer *t, const uint8_t *text, size_t len, bool prefix,
                                   mxd_id_buffer *out, mxd_error *err) {
    size_t room = len + prefix;
    if (room <= STACK_SYMBOLS) {
        uint32_t scratch[SCRATCH_WORDS * STACK_SYMBOLS];
        encode_pre_token(t, text, len, prefix, scratch, out);
        return MXD_OK;
    }
    uint32_t *scratch = malloc(room * SCRATCH_WORDS * sizeof *scratch);
    if (!scratch) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory encoding a word of %zu bytes", len);
    encode_pre_token(t, text, len, prefix, scratch, out);
    free(scratch);
    return MXD_OK;
}

static mxd_status append_pre_tokens(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                                    mxd_error *err) {
    mxd_status status = MXD_OK;
    for (size_t pos = 0, end; !status && pos < len; pos = end) {
        end = mxd_pre_token_end(t->pre_tokenizer, text, len, pos);
        status = append_pre_token(t, text + pos, end - pos, false, out, err);
    }
    return status;
}

static mxd_status append_normalized(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                                    mxd_error *err) {
    uint8_t *normal;
    size_t normal_len;
    mxd_status status = mxd_nfc(text, len, &normal, &normal_len, err);
    if (status) return status;
    status = append_pre_tokens(t, normal, normal_len, out, err);
    free(normal);
    return status;
}

/* Append the ids of text[len] without added tokens. */
static mxd_status append_text(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                              mxd_error *err) {
    if (len == 0) return MXD_OK;
    if (mxd_marks_spaces(t->pre_tokenizer)) {
        uint32_t c = 0;
        bool marked = text[0] == ' ' || (mxd_utf8_decode(text, len, &c) && c == MXD_SPACE_MARK);
        bool prefix = t->pre_tokenizer == MXD_PRE_SPACES_PREFIX ||
                      (t->pre_tokenizer == MXD_PRE_SPACES_FIRST && out->n == 0 && !marked);
        return append_pre_token(t, text, len, prefix, out, err);
    }
    if (t->nfc && mxd_nfc_may_change(text, len)) return append_normalized(t, text, len, out, err);
    return append_pre_tokens(t, text, len, out, err);
}

/* Return the byte that text[0..len) begins with in tokens' texts, and how many bytes it takes there: where spaces are
 * marked, the mark is a space and a space is no byte of any added token (-1). */
static int added_byte(const mxd_tokenizer *t, const uint8_t *text, size_t len, size_t *width) {
    *width = 1;
    if (!mxd_marks_spaces(t->pre_tokenizer)) return text[0];
    uint32_t c;
    if (text[0] == 0xE2 && mxd_utf8_decode(text, len, &c) && c == MXD_SPACE_MARK) {
        *width = 3;
        return ' ';
    }
    return text[0] == ' ' ? -1 : text[0];
}

/* Narrow the added tokens *low..*high, which agree in `depth` bytes, to those whose next byte is `byte`. */
static void narrow(const mxd_tokenizer *t, size_t depth, int byte, uint32_t *low, uint32_t *high) {
    uint32_t bounds[2] = {0};
    for (int side = 0; side < 2; side++) {
        uint32_t a = *low, b = *high;
        while (a < b) {
            uint32_t middle = a + (b - a) / 2, id = t->added[middle];
            uint32_t start = t->text_start[id];
            int own = t->text_start[id + 1] - start > depth ? t->text[start + depth] : -1;
            if (own < byte + side) a = middle + 1;
            else b = middle;
        }
        bounds[side] = a;
    }
    *low = bounds[0];
    *high = bounds[1];
}

/* Find the longest added token that text[len] begins with: its id, and its length there in *n; MXD_NO_TOKEN if none. */
static uint32_t find_added(const mxd_tokenizer *t, const uint8_t *text, size_t len, size_t *n) {
    uint32_t found = MXD_NO_TOKEN, low = 0, high = t->added_count;
    size_t pos = 0;
    for (size_t depth = 0, width; pos < len; depth++, pos += width) {
        int byte = added_byte(t, text + pos, len - pos, &width);
        if (byte < 0) break;
        narrow(t, depth, byte, &low, &high);
        if (low == high) break;
        uint32_t first = t->added[low];
        if (t->text_start[first + 1] - t->text_start[first] == depth + 1) {
            found = first;
            *n = pos + width;
        }
    }
    return found;
}

mxd_status mxd_tokenizer_append(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                                mxd_error *err) {
    if (len > MAX_INPUT) return mxd_fail(err, MXD_ERR_ARGUMENT, "text of %zu bytes: at most 2^30 are encoded", len);
    mxd_status status = MXD_OK;
    size_t start = 0; /* of the text before the next added token; a control token's name is text like any other */
    for (size_t pos = 0, n; !status && t->added_count && pos < len; pos += n) {
        uint32_t id = find_added(t, text + pos, len - pos, &n);
        if (id == MXD_NO_TOKEN) n = 1;
        else if (!mxd_tokenizer_is_special(t, id)) {
            status = append_text(t, text + start, pos - start, out, err);
            mxd_id_buffer_push(out, id);
            start = pos + n;
        }
    }
    return status ? status : append_text(t, text + start, len - start, out, err);
}

mxd_status mxd_tokenizer_encode(const mxd_tokenizer *t, const char *text, size_t len, uint32_t *ids, size_t cap,
                                size_t *n, mxd_error *err) {
    /* The text has a buffer of its own, for what comes first in it may differ. */
    size_t before = t->adds_bos;
    if (before && cap) ids[0] = t->bos;
    mxd_id_buffer out = {cap > before ? ids + before : NULL, cap > before ? cap - before : 0, 0};
    *n = 0;
    mxd_status status = mxd_tokenizer_append(t, (const uint8_t *)text, len, &out, err);
    out.cap = cap;
    out.n += before;
    return status ? status : mxd_id_buffer_finish(&out, n, err);
}
