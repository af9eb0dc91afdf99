/* SPDX-License-Identifier: Apache-2.0 */
/* A pass of a step, and each sequence's part in it: what step.c, speculate.c and draft_model.c share. */
#ifndef MXD_STEP_H
#define MXD_STEP_H

#include <stdbool.h>

#include "draft_policy.h"

/* One sequence's part of a pass: rows first .. first+rows of its own tokens, then its drafted ones. */
typedef struct mxd_part {
    mxd_seq *seq;
    size_t from; /* position of its first row */
    size_t rows, first;
    size_t outcome; /* of its newest token, if the pass reaches it; those of the drafted ones follow */
    bool reaches_end, decoding;
    uint32_t accepted, accepted_node[MXD_MAX_DRAFT]; /* drafted tokens that were processed and are now committed */
} mxd_part;

/* One pass of a step through the model. */
typedef struct mxd_pass {
    mxd_engine *engine;
    bool full; /* at full precision */
    mxd_part parts[MXD_MAX_SEQS];
    size_t count, rows; /* of parts; of the sequences' own tokens */
    double draft_s, schedule_s, verify_s, sample_s;
    mxd_draft_use use;
    mxd_observation observation; /* for the policy */
} mxd_pass;

#endif
