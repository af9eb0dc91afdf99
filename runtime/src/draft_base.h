/* SPDX-License-Identifier: Apache-2.0 */
/* The base plane as a drafter for full precision: it reads half of the bytes and mostly agrees. Its passes write keys
 * and values of base precision after the committed positions; the full pass that verifies the draft computes them
 * anew. */
#ifndef MXD_DRAFT_BASE_H
#define MXD_DRAFT_BASE_H

#include "draft.h"
#include "status.h"

/* Replace the sequence's proposal by what base precision would generate, up to `most` tokens, if that yields more
 * tokens a second. Its passes check the proposal's likeliest chain along the way. */
void mxd_draft_base(mxd_engine *g, mxd_seq *s, size_t most, mxd_draft_use *use);

#endif
