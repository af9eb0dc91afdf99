/* The precision consumer: under `auto`, rows run at base precision, and a row that looks doubtful gets a pass at full
 * precision over all rows that are still at base precision and itself (catch-up). What it decides changes what is
 * generated, so it depends on the committed tokens alone: not on drafts, threads or what else is in the step. */
#ifndef MXD_PRECISION_H
#define MXD_PRECISION_H

#include "internal.h"

/* Whether the sequence's next row runs at full precision. */
int mxd_runs_full(const mxd_seq *s);
/* Rows that may still run at base precision before catch-up is due. */
size_t mxd_base_room(const mxd_seq *s);
/* What is known of the row at position s->done, from its outcome at the precision of the pass. */
mxd_token_record mxd_inspect(const mxd_engine *g, const mxd_seq *s, const mxd_outcome *outcome);
/* Whether that row waits for full precision; it then does, and its outcome counts for nothing. */
int mxd_turns_core(mxd_seq *s, const mxd_token_record *row);
/* A pass at full precision has processed the positions below n. */
void mxd_caught_up(mxd_seq *s, size_t n);
/* The row that waited, or was due, came out of a pass at full precision with this token. */
mxd_token_record mxd_resolve(mxd_seq *s, const mxd_token_record *full);
/* What is known of a sequence's precision, into another one of the engine. */
void mxd_copy_looks(mxd_seq *to, const mxd_seq *from);
/* Back to what a sequence is that holds nothing but a prompt of n tokens; what was at base precision is to be read again. */
void mxd_forget_looks(mxd_seq *s, size_t n);
/* Bytes that a token reads on average if this fraction of rows is core. */
double mxd_mixed_bytes(const mxd_engine *g, double core_fraction);

#endif
