/* SPDX-License-Identifier: Apache-2.0 */
/* The draft log: what is proposed for a sequence, what was known of each drafted token, and what the step made of
 * it. */
#ifndef MXD_DRAFT_LOG_H
#define MXD_DRAFT_LOG_H

#include "draft.h"
#include "status.h"

/* What is and was drafted for a sequence. */
typedef struct mxd_draft_log {
    mxd_proposal proposal; /* for the pass under way; drafters and the policy are given a pointer to it */
    mxd_draft_record records[MXD_MAX_DRAFT]; /* of all that was proposed for the last step */
    uint8_t kind[MXD_MAX_DRAFT];             /* of the same */
    uint32_t count;                          /* of the same */
    uint8_t drafted[MXD_MAX_STEP_TOKENS];    /* for each token of the last step's output: 1 if it was drafted */
} mxd_draft_log;

/* Forget the records of the last step. */
void mxd_draft_log_begin(mxd_seq *s);
/* Empty the proposal and return it. */
mxd_proposal *mxd_draft_log_clear(mxd_seq *s);
/* Record all that is proposed, before the policy makes its choice. */
void mxd_draft_log_proposed(mxd_seq *s);
/* Note that what is left of the proposal is verified. */
void mxd_draft_log_verified(mxd_seq *s);
/* Note that the target chose `token` after the newest one. Unverified root proposals can now be scored too, at no
 * cost. */
void mxd_draft_log_chosen(const mxd_seq *s, uint32_t token);
/* Note that token `at` of the step's output was an accepted node of the proposal, or was not drafted (-1). */
void mxd_draft_log_committed(mxd_seq *s, size_t at, int32_t node);

#endif
