/* SPDX-License-Identifier: Apache-2.0 */
/* Which token comes next: a function of (logits, seed, position, committed prefix) only (docs/arithmetic.md). */
#ifndef MXD_SAMPLER_H
#define MXD_SAMPLER_H

#include <stdbool.h>

#include "../kernels/kernels.h"
#include "status.h"

/* Workspaces in the engine's arena. */
typedef struct mxd_sampler_scratch {
    float *weights; /* (vocab) */
    uint32_t *heap; /* (vocab) */
    uint8_t *seen;  /* (vocab/8 + 1), all zero between calls */
    float *raw;     /* (vocab) a copy of logits, for mxd_log_probabilities() */
} mxd_sampler_scratch;

/* Tokens that the repetition penalty leaves alone: the control tokens, which a template or the end of a text calls for
 * however often they came. */
typedef struct mxd_exempt {
    const uint32_t *ids; /* (count) */
    uint32_t count;
} mxd_exempt;

/* Whether the choice is always the likeliest token, so that no other logit is needed. */
bool mxd_is_greedy(const mxd_sampling *sampling);

/* Choose among the `count` tokens `allowed`, ascending (NULL: all, 0..count-1), the one after prefix[n], which has been
 * generated from `answer` on. Changes logits in place when a penalty is set and when not all are allowed; the repetition
 * penalty spares `exempt` tokens. All logits are finite. */
uint32_t mxd_sample(const mxd_kernels *kernels, const mxd_sampling *sampling, float *logits, uint32_t count,
                    const uint32_t *allowed, mxd_exempt exempt, const uint32_t *prefix, size_t n, size_t answer,
                    const mxd_sampler_scratch *scratch);

/* Choose among `count` candidates, the tokens ids[count] (NULL: all tokens), without the penalty; returns the index of
 * the candidate. */
uint32_t mxd_sample_among(const mxd_kernels *kernels, const mxd_sampling *sampling, const float *logits, uint32_t count,
                          const uint32_t *ids, size_t position, const mxd_sampler_scratch *scratch);

/* Write to out[count] the log-probabilities of `token` and of the count - 1 likeliest tokens by logits[vocab]. */
void mxd_log_probabilities(const mxd_kernels *kernels, const float *logits, uint32_t vocab, uint32_t token,
                           mxd_alternative *out, uint32_t count, const mxd_sampler_scratch *scratch);

/* MXD_ERR_ARGUMENT names the parameter that is out of range. */
mxd_status mxd_sampling_check(const mxd_sampling *sampling, mxd_error *err);

#endif
