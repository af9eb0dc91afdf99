/* SPDX-License-Identifier: Apache-2.0 */
/* What the runtime does with a sequence beyond the public functions. */
#ifndef MXD_SEQUENCE_H
#define MXD_SEQUENCE_H

#include "internal.h"

/* Open a sequence as mxd_seq_open() does; it mixes precisions if the engine does. If this one doesn't mix, all its rows
 * run at the engine's precision. */
mxd_status mxd_seq_open_mixing(mxd_engine *g, bool mixes, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err);
/* MXD_ERR_ARGUMENT if one of ids[n] is not in the vocabulary. */
mxd_status mxd_seq_check_ids(const mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err);
/* Commit the token of a record, an accepted node of the proposal or not drafted (-1): its text, the stop it may cause,
 * the counts. */
void mxd_seq_commit(mxd_seq *s, const mxd_token_record *record, int32_t node);
/* Return how many of the rows up to position `end` the next pass at this precision can run, at most `most`; *from gets
 * the position of the first. Brings the KV tiers up to date before. */
size_t mxd_seq_rows_to_run(mxd_seq *s, bool full, size_t end, size_t most, size_t *from);

/* Return how many positions are processed, or were before a truncation. */
static inline size_t mxd_seq_known(const mxd_seq *s) {
    return s->n_past > s->replay_end ? s->n_past : s->replay_end;
}

/* Whether more than the likeliest token is asked of its rows. */
static inline bool mxd_seq_needs_logits(const mxd_seq *s) {
    return !mxd_is_greedy(&s->sampling) || s->grammar.grammar || s->sampling.logprobs;
}

/* Whether a step has a row of the sequence to run. */
static inline bool mxd_seq_has_work(const mxd_seq *s) {
    return s->stop == MXD_STOP_NONE && s->token_count > mxd_seq_known(s);
}

#ifdef MXD_DEBUG
/* Abort if the cursors are not in their order (internal.h). */
void mxd_seq_check(const mxd_seq *s);
#else
static inline void mxd_seq_check(const mxd_seq *s) {
    (void)s;
}
#endif

#endif
