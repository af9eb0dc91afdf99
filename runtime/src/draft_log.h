/* The draft log: what was known of each drafted token, and what the step made of it (mxd_seq_drafts). */
#ifndef MXD_DRAFT_LOG_H
#define MXD_DRAFT_LOG_H

#include "status.h"

/* Begin the records of a step with all that is proposed for a sequence. */
void mxd_draft_log_proposed(mxd_seq *s);
/* What is left of the proposal was verified. */
void mxd_draft_log_verified(mxd_seq *s);
/* The target chose this token behind the newest one: so what was proposed there and had no place was right or not, and
 * its kind is learned about for nothing. */
void mxd_draft_log_chosen(const mxd_seq *s, uint32_t token);

#endif
