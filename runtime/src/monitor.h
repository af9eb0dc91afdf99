/* SPDX-License-Identifier: Apache-2.0 */
/* The monitor: what is cheaply known of committed tokens.
 *
 * *Attention* that they receive, in one layer of the target (schedule.h, monitored_layer). Each row of a pass and each
 * KV head has a slot of its own, by position, so neither threads nor tiers change a bit. Only committed rows count:
 * rejected drafts leave no trace. *Doubt* is how unsure whoever chose the token was (identify.h). */
#ifndef MXD_MONITOR_H
#define MXD_MONITOR_H

#include <stdbool.h>

#include "arena.h"
#include "status.h"

/* Every MXD_KV_BLOCK positions, what was received before counts half as much. A row in the steady state has the weight
 * MXD_ATTENDED_UNIT, so that sums of what rows paid are a mean of their shares. */
#define MXD_ATTENDED_DECAY 0.5f
#define MXD_ATTENDED_UNIT (1.0f / 64)

/* The monitor of an engine. */
typedef struct mxd_monitor {
    bool in_use; /* somebody needs attention: mixed precision or tiers */
    float *paid; /* (max_rows, kv_heads, ctx): share of a row's attention, all heads of the model being one, that the
                    heads of a KV head paid to each position */
} mxd_monitor;

/* What the monitor knows of a sequence; with tiers only. */
typedef struct mxd_monitor_state {
    float *attended; /* (ctx) attention received lately */
    float *doubt;    /* (ctx) of whoever chose the token; 0 for those of prompts and for all after the last token */
} mxd_monitor_state;

/* Decide whether an engine, whose mixing and KV cache are resolved, needs the monitor. */
void mxd_monitor_resolve(mxd_engine *g);
/* Take the memory of an engine, and of each of its sequences. */
void mxd_monitor_take(mxd_engine *g, mxd_arena *a);
mxd_monitor_state mxd_monitor_take_seq(const mxd_engine *g, mxd_arena *a);

/* Copy what is known of the tokens of `from` to the empty sequence `to`. */
void mxd_monitor_copy(mxd_seq *to, const mxd_seq *from);
/* Forget the doubt of all tokens from position n on. */
void mxd_monitor_truncate(mxd_seq *s, size_t n);
/* Note the doubt of whoever chose the token at a position. */
void mxd_monitor_chosen(mxd_seq *s, size_t position, float doubt);

/* Take the attention that the heads of a KV head paid for row m of the pass: weights (heads of a KV head, n) in the
 * order of the cache, which are overwritten. */
void mxd_monitor_row(const mxd_engine *g, size_t m, uint32_t kv_head, float *weights, size_t n);
/* Count row m of the pass as committed. Each position once, in ascending order. */
void mxd_monitor_commit(mxd_seq *s, size_t m);
/* Return what share of its attention row m of the pass paid to positions [from, to); mean over all heads. */
float mxd_attended(const mxd_engine *g, size_t m, size_t from, size_t to);

#endif
