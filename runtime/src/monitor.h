/* Monitor: what is cheaply known of tokens.
 *
 * Attention that they receive, in one layer of the target (schedule.h, monitored_layer). Each row of a step and each KV
 * head has a slot of its own, by position, so neither threads nor tiers change a bit. What a sequence has received counts
 * only rows that are committed: rejected drafts leave no trace. */
#ifndef MXD_MONITOR_H
#define MXD_MONITOR_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* Every MXD_KV_BLOCK positions, what was received before counts half as much: a row in the steady state has the weight
 * MXD_ATTENDED_UNIT, so that sums of what rows paid are a mean of their shares. */
#define MXD_ATTENDED_DECAY 0.5f
#define MXD_ATTENDED_UNIT (1.0f / 64)

/* The heads of one KV head have attended for row m of the step: weights (heads of a KV head, n) in the order of the cache,
 * which are overwritten. */
void mxd_monitor_row(const mxd_engine *g, size_t m, uint32_t kv_head, float *weights, size_t n);
/* Row m of the step is committed. Each position once, in ascending order. */
void mxd_monitor_commit(mxd_seq *s, size_t m);
/* Share of the attention of row m of the step that fell on positions from .. to-1; mean over all heads. */
float mxd_attended(const mxd_engine *g, size_t m, size_t from, size_t to);

#endif
