/* SPDX-License-Identifier: Apache-2.0 */
#include "draft_ngram.h"

#include "bytes.h"

enum { LONGEST_MATCH = 16, ORDERS = 2 };

static int compare(const uint32_t *a, const uint32_t *b, uint32_t order) {
    for (uint32_t i = 0; i < order; i++)
        if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
    return 0;
}

mxd_status mxd_ngram_table_init(mxd_ngram_table *t, const uint8_t *section, size_t len, uint32_t vocab,
                                mxd_error *err) {
    if (len < 8) return mxd_fail(err, MXD_BAD_DRAFT, "draft.ngrams has %zu bytes, not even its counts", len);
    size_t at = 8;
    for (uint32_t order = 1; order <= ORDERS; order++) {
        uint32_t n = t->count[order - 1] = mxd_load_u32(section + 4 * (order - 1));
        if (n > 1u << 24 || len - at < (size_t)n * (4 * order + 4))
            return mxd_fail(err, MXD_BAD_DRAFT, "draft.ngrams is too short for %u entries of order %u", n, order);
        const uint32_t *context = t->context[order - 1] = (const uint32_t *)(const void *)(section + at);
        const uint32_t *next = t->next[order - 1] = context + (size_t)n * order;
        at += (size_t)n * (4 * order + 4);
        for (uint32_t i = 0; i < n; i++) {
            bool ok = next[i] < vocab && (i == 0 || compare(context + (i - 1) * order, context + i * order, order) < 0);
            for (uint32_t j = 0; j < order; j++) ok = ok && context[i * order + j] < vocab;
            if (!ok)
                return mxd_fail(err, MXD_BAD_DRAFT, "draft.ngrams: entry %u of order %u is out of order or vocabulary",
                                i, order);
        }
    }
    for (uint32_t order = 1; order <= ORDERS; order++) {
        t->chance[order - 1] = section + at;
        if (len - at < t->count[order - 1]) return mxd_fail(err, MXD_BAD_DRAFT, "draft.ngrams ends too early");
        at += t->count[order - 1];
    }
    if (at != len) return mxd_fail(err, MXD_BAD_DRAFT, "draft.ngrams has trailing bytes");
    return MXD_OK;
}

/* A sequence, followed by the tokens drafted so far. */
typedef struct text {
    const uint32_t *ids; /* (n) */
    size_t n;
    const mxd_proposal *drafted;
} text;

static uint32_t token_at(const text *t, size_t i) {
    return i < t->n ? t->ids[i] : t->drafted->node[i - t->n].token;
}

/* Look up the last `order` tokens of a text; returns the index of the entry, or -1. */
static int64_t find(const mxd_ngram_table *table, uint32_t order, const text *t) {
    size_t length = t->n + t->drafted->count;
    if (!table || length < order) return -1;
    uint32_t key[ORDERS];
    for (uint32_t i = 0; i < order; i++) key[i] = token_at(t, length - order + i);
    int64_t low = 0, high = (int64_t)table->count[order - 1] - 1;
    while (low <= high) {
        int64_t middle = low + (high - low) / 2;
        int c = compare(table->context[order - 1] + (size_t)middle * order, key, order);
        if (c == 0) return middle;
        if (c < 0) low = middle + 1;
        else high = middle - 1;
    }
    return -1;
}

/* Find the longest earlier occurrence of the end of ids[n], the latest among equals. Returns its length and where its
 * continuation begins; matches of more than LONGEST_MATCH tokens count as that long. */
static size_t find_copy(const uint32_t *ids, size_t n, size_t *continuation) {
    size_t longest = 0;
    if (n < 2) return 0;
    uint32_t last = ids[n - 1];
    for (size_t end = n - 1; end-- > 0;) {
        if (ids[end] != last) continue;
        size_t length = 1;
        while (length < LONGEST_MATCH && length <= end && ids[end - length] == ids[n - 1 - length]) length++;
        if (length > longest) *continuation = end + 1;
        if (length > longest) longest = length;
        if (longest == LONGEST_MATCH) break;
    }
    return longest;
}

static uint8_t copy_kind(size_t length) {
    return (uint8_t)(MXD_KIND_COPY + (length < LONGEST_MATCH ? length : LONGEST_MATCH) - 1);
}

void mxd_ngram_propose(const mxd_ngram_table *table, const mxd_policy *p, const uint32_t *ids, size_t n, size_t most,
                       mxd_proposal *out) {
    out->count = 0;
    size_t from = 0, length = find_copy(ids, n, &from);
    while (out->count < most) {
        const text t = {ids, n, out};
        uint32_t token = 0;
        uint8_t kind = MXD_KINDS;
        if (length > 0) { /* each drafted token makes the match longer */
            token = token_at(&t, from + out->count);
            kind = copy_kind(length + out->count);
        }
        for (uint32_t order = ORDERS; order > 0; order--) {
            int64_t entry = find(table, order, &t);
            if (entry < 0) continue;
            uint8_t other = (uint8_t)(MXD_KIND_TABLE + 8 * (order - 1) + table->chance[order - 1][entry] / 32);
            if (kind == MXD_KINDS || p->chance[other] > p->chance[kind]) {
                if (length > 0 && token != table->next[order - 1][entry]) length = 0; /* the copy ends here */
                token = table->next[order - 1][entry];
                kind = other;
            }
            break;
        }
        if (kind == MXD_KINDS) return;
        mxd_propose(p, out, token, (int32_t)out->count - 1, kind, mxd_policy_prior(kind));
    }
}
