/* What the runtime does with a sequence beyond the public functions. */
#ifndef MXD_SEQUENCE_H
#define MXD_SEQUENCE_H

#include "internal.h"

/* Positions that are processed, or were before a truncation. */
static inline size_t mxd_seq_known(const mxd_seq *s) {
    return s->done > s->kept ? s->done : s->kept;
}

/* Whether the sequence has a row to run in a step. */
static inline int mxd_seq_has_work(const mxd_seq *s) {
    return s->stop == MXD_STOP_NONE && s->token_count > mxd_seq_known(s);
}

/* Commit a chosen token: its text, the stop it may cause, the count. */
void mxd_seq_commit(mxd_seq *s, uint32_t id);
mxd_status mxd_seq_check_ids(const mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err);

#endif
