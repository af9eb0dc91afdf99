/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule: what core tokens get, by settings that come with the bundle (runtime/BUNDLE.md, "schedule"). Decisions
 * on precision and memory change what is generated, so they depend on the committed tokens alone; those on compute do
 * not. */
#ifndef MXD_SCHEDULE_H
#define MXD_SCHEDULE_H

#include <stdbool.h>

#include "identify.h"
#include "status.h"

enum { MXD_THRESHOLDS = 8, MXD_MAX_CATCH_UP = 32, MXD_KV_BLOCK = 32 };

typedef struct mxd_schedule {
    mxd_weights compute, precision, memory;
    float core_fraction; /* of rows at full precision under `auto`; 1: full precision throughout */
    uint32_t catch_up;   /* rows that may be at base precision before a pass at full precision, that one included */
    uint32_t sinks;      /* first tokens, which stay in the fast KV tier */
    uint32_t recent;     /* newest tokens in the fast tier, a multiple of MXD_KV_BLOCK */
    float core_tokens;   /* share of the older ones that stay in the fast tier */
    uint32_t monitored_layer;        /* whose attention is the signal */
    float threshold[MXD_THRESHOLDS]; /* precision's score that MXD_FRACTION[i] of the rows exceed; descending */
} mxd_schedule;

/* The fraction of rows that each threshold is for. */
extern const float MXD_FRACTION[MXD_THRESHOLDS];

/* Fill in the settings of a bundle that has none. */
void mxd_schedule_default(mxd_schedule *out, uint32_t layers);
/* Read section[len] of a model with so many layers: MXD_BAD_SCHEDULE. */
mxd_status mxd_schedule_init(mxd_schedule *out, const uint8_t *section, size_t len, uint32_t layers, mxd_error *err);
/* Return the score above which a row is core, so that about this fraction is: interpolated between thresholds. */
float mxd_schedule_threshold(const mxd_schedule *s, float core_fraction);

#endif
