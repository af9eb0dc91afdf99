/* SPDX-License-Identifier: Apache-2.0 */
/* Drafting by look-up: what followed the same tokens before, here or in the text that the bundle's table counts. */
#ifndef MXD_DRAFT_NGRAM_H
#define MXD_DRAFT_NGRAM_H

#include "draft_policy.h"

/* The bundle's table of what follows one or two tokens (runtime/BUNDLE.md, draft.ngrams), read in place. */
typedef struct mxd_ngram_table {
    uint32_t count[2];          /* entries by order - 1 */
    const uint32_t *context[2]; /* (count, order) tokens, ascending */
    const uint32_t *next[2];    /* (count) the likeliest token after them */
    const uint8_t *chance[2];   /* (count) its probability in 1/256 */
} mxd_ngram_table;

/* Validate section[len] for a vocabulary: MXD_BAD_DRAFT. */
mxd_status mxd_ngram_table_init(mxd_ngram_table *t, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err);
/* Propose a chain of up to `most` tokens after ids[n]: what followed the longest earlier occurrence of its end, or what
 * the table (NULL: none) knows, whichever is likelier right. */
void mxd_ngram_propose(const mxd_ngram_table *t, const mxd_policy *p, const uint32_t *ids, size_t n, size_t most,
                       mxd_proposal *out);

#endif
