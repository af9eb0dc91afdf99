/* SPDX-License-Identifier: Apache-2.0 */
/* Structured output (docs/structured-output.md): which tokens may come next in a sequence whose text has to fit a grammar.
 * That is a function of the grammar and of the document's tokens, nothing else. */
#ifndef MXD_GRAMMAR_H
#define MXD_GRAMMAR_H

#include "draft_policy.h"
#include "status.h"

/* A sequence's place in its document. */
typedef struct mxd_grammar_state {
    mxd_grammar *grammar; /* NULL: its text is free */
    size_t from, read;    /* the document begins at token `from`; `state` is the one before token `read` */
    uint32_t state;
} mxd_grammar_state;

/* Start a new document after the first n tokens. */
void mxd_grammar_begin(mxd_seq *s, size_t n);
/* Go back to where the sequence had n tokens. */
void mxd_grammar_truncate(mxd_seq *s, size_t n);
/* Read the tokens that were added. Returns true if the document is complete and nothing can follow. */
bool mxd_grammar_read(mxd_seq *s);
/* Read the tokens that were added, and stop the sequence if its document is complete. MXD_ERR_ARGUMENT if one of them does
 * not fit, which the caller must have added. */
mxd_status mxd_grammar_check(mxd_seq *s, mxd_error *err);
/* List the tokens that may come next, ascending; at least one if the document is not complete. Returns their number. */
uint32_t mxd_grammar_allowed(mxd_seq *s, const uint32_t **ids);

/* Propose what has to come next, if there is only one way to go on. */
void mxd_grammar_propose(const mxd_policy *policy, const mxd_seq *s, size_t most, mxd_proposal *out);
/* Remove what cannot come next from a proposal. */
void mxd_grammar_prune(const mxd_seq *s, mxd_proposal *d);

#endif
