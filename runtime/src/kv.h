/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: where the keys and values of each position lie, and in which format.
 *
 * Every KV head of a layer has its rows in up to three areas, each contiguous: core tokens, the recent window (a ring),
 * and far tokens, which have aged and are not core. Without tiers the ring is all there is. With them core tokens keep
 * the ring's format and far ones are in NORMAL4. The places are the same in all layers and heads.
 *
 * Tiers change what is generated, so they are a function of the committed tokens alone. They change only when the
 * number of processed positions is a multiple of MXD_KV_BLOCK, before the next row runs. Then the oldest block of the
 * window ages: its tokens with the highest scores become core, and displace those with lower ones when the core is
 * full. */
#ifndef MXD_KV_H
#define MXD_KV_H

#include "../kernels/kernels.h"
#include "arena.h"
#include "forward.h"

enum { MXD_KV_MAX_SPANS = 4 };

/* The KV cache of an engine. */
typedef struct mxd_kv_layout {
    mxd_kv mode;              /* never AUTO */
    mxd_row_format format;    /* of the window and of core tokens */
    uint32_t sinks, recent;   /* first tokens, which are core whatever their score; newest ones, at least */
    float budget, share;      /* as asked for; of the aged tokens, those that are core besides the sinks */
    uint32_t core, ring, far; /* rows that a head has room for */
    size_t row_bytes, far_row_bytes, head_bytes;
    uint8_t *rows;         /* (max_seqs, layers, 2, kv_heads, head_bytes) */
    uint8_t *side;         /* (logit_rows, layers, 2, kv_heads, row_bytes) of side rows (forward.h) */
    uint8_t *drafter_rows; /* (max_seqs, 2, kv_heads, ctx, head_dim) f16 of the trained drafter's layer */
} mxd_kv_layout;

/* Where the cached positions of a sequence lie. */
typedef struct mxd_kv_state {
    size_t aged;          /* positions below have left the window; a multiple of MXD_KV_BLOCK */
    uint32_t *core, *far; /* (layout.core, layout.far) positions in the order of their rows; with tiers only */
    uint32_t core_count, far_count;
} mxd_kv_state;

/* Resolve the options for an engine whose model and plan.ctx are known. */
mxd_status mxd_kv_resolve(mxd_engine *g, const mxd_options *o, mxd_error *err);
/* Size the core, ring and far areas for plan.ctx, and take the room for all rows. */
void mxd_kv_take(mxd_engine *g, mxd_arena *a);
/* Take the memory of a sequence. */
mxd_kv_state mxd_kv_take_seq(const mxd_engine *g, mxd_arena *a);

/* Return where a row keeps its keys (which = 0) or values (1) of a head: in the cache or, for a side row, in
 * kv.side. */
uint8_t *mxd_row_kv(const mxd_engine *g, const mxd_row *row, uint32_t layer, int which, uint32_t head);
/* Return its place in the cache, also for a side row. */
uint8_t *mxd_kv_place(const mxd_engine *g, const mxd_row *row, uint32_t layer, int which, uint32_t head);
/* Return the format of a layer's newest rows: the trained drafter's stay f16. */
mxd_row_format mxd_kv_format(const mxd_engine *g, uint32_t layer);
/* Store a head's keys or values x (head_dim), which are overwritten, at such a place. */
void mxd_kv_store(const mxd_engine *g, uint32_t layer, float *x, uint8_t *place);
/* Copy an accepted side row to its place in the cache. */
void mxd_kv_accept(const mxd_engine *g, const mxd_row *row);
/* List what a row of a sequence at a position attends to, itself included. Returns the number of spans. */
size_t mxd_kv_spans(const mxd_engine *g, uint32_t slot, uint32_t layer, uint32_t head, size_t position,
                    mxd_span spans[MXD_KV_MAX_SPANS]);

/* Copy all cached keys, values and tiers of `from` to the empty sequence `to`. */
void mxd_kv_copy(mxd_seq *to, const mxd_seq *from);
/* Forget all positions from n on. Returns how many stay cached: with tiers all or none. */
size_t mxd_kv_truncate(mxd_seq *s, size_t n);
/* Bring the tiers up to date, before rows run from n_past on. */
void mxd_kv_settle(mxd_seq *s);
/* Return how many rows may run from n_past on until the tiers change; at least 1 when they are up to date. */
size_t mxd_kv_room(const mxd_seq *s);
/* Return the bytes that the row at n_past reads. */
uint64_t mxd_kv_bytes(const mxd_seq *s);
/* Return the nearest position from which so many rows of sequence slot 0 can run, whatever it holds; for measuring. */
uint32_t mxd_kv_any_position(const mxd_engine *g, uint32_t position, uint32_t rows);
#ifdef MXD_DEBUG
/* Fill the first `rows` rows from n_past on with NaN, so that any read of what a rejected row left shows. */
void mxd_kv_poison(const mxd_seq *s, size_t rows);
#endif

#endif
