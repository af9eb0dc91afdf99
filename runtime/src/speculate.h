/* Speculation within a pass (draft.h has the overview), in the order in which step.c calls it. */
#ifndef MXD_SPECULATE_H
#define MXD_SPECULATE_H

#include "step.h"

/* Let drafters propose for the pass's sequences, and cut the proposals down to what is verified. */
mxd_status mxd_speculate_propose(mxd_pass *pass, mxd_error *err);
/* The rows of a sequence's drafted tokens. From each one in the cache, its first successor is in the cache too. */
void mxd_speculate_add_rows(mxd_engine *g, const mxd_seq *s, size_t newest, mxd_wants wants);
/* Commit what the sequence chooses behind its newest token, and behind each drafted token that was the choice, up to a
 * row that turns out to be core. */
void mxd_speculate_choose(mxd_pass *pass, mxd_part *p);
/* The trained drafter reads what the pass made of the positions that are now processed and that it has not read. */
void mxd_speculate_follow(mxd_pass *pass);

#endif
