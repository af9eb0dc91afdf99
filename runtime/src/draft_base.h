/* Private: at full precision, the target's base plane as a drafter between the others and the full model. */
#ifndef MXD_DRAFT_BASE_H
#define MXD_DRAFT_BASE_H

#include "internal.h"

/* Replace the sequence's proposal by what base precision would generate, up to `most` tokens, if that yields more
 * tokens a second. Its passes check the proposal's likeliest chain along the way. */
void mxd_draft_base(mxd_engine *g, mxd_seq *s, size_t most);

#endif
