/* SPDX-License-Identifier: Apache-2.0 */
/* Speculation within a pass (draft.h is the overview): what step.c calls, in this order. */
#ifndef MXD_SPECULATE_H
#define MXD_SPECULATE_H

#include "forward.h"
#include "step.h"

/* Let drafters propose for the sequences of the pass, and cut the proposals down to what is verified. */
mxd_status mxd_speculate_propose(mxd_pass *pass, mxd_error *err);
/* Append the rows of a sequence's proposal; `newest` is the row of its newest token. */
void mxd_speculate_add_rows(mxd_engine *g, const mxd_seq *s, size_t newest, mxd_output output);
/* Commit what the sequence chooses after its newest token, and after each drafted token that was its choice, up to a
 * row that turns core. Lists the accepted nodes in *p. */
void mxd_speculate_choose(const mxd_pass *pass, mxd_part *p);

#endif
