/* The KV cache: where the keys and values of each position lie, and in which format.
 *
 * Every KV head of a layer has its rows in up to three areas, each contiguous: core tokens, tokens that aged, and the
 * recent window, a ring. Without tiers the ring is all there is. With them the first two differ in format: core tokens
 * keep the ring's, the others are in NORMAL4. The places are the same in all layers and heads.
 *
 * Tiers change what is generated, so they are a function of the committed tokens alone: they change only when the number
 * of processed positions is a multiple of MXD_KV_BLOCK, before the next row runs. Then the oldest block of the window
 * ages: its tokens of the highest scores become core, in place of those with lower ones where there is no more room. */
#ifndef MXD_KV_H
#define MXD_KV_H

#include "../kernels/kernels.h"
#include "status.h"

enum { MXD_KV_MAX_SPANS = 4 };

struct mxd_row;

/* The same for all sequences of an engine. */
typedef struct mxd_kv_layout {
    mxd_kv mode;            /* never AUTO */
    mxd_row_format format;  /* of the window and of core tokens */
    uint32_t sinks, recent; /* first tokens, which are core whatever their score; newest ones, at least */
    float budget, share;    /* as asked for; of the aged tokens, those that are core besides the sinks */
    uint32_t core, ring, far; /* rows that a head has room for */
    size_t row_bytes, far_row_bytes, head_bytes;
} mxd_kv_layout;

/* A sequence's own. */
typedef struct mxd_kv_state {
    size_t aged;              /* positions below have left the window; a multiple of MXD_KV_BLOCK */
    uint32_t *core, *far;     /* positions in the order of their rows */
    uint32_t core_count, far_count;
    float *attended;          /* (ctx) attention received lately, see monitor.h; with tiers only, like doubt */
    float *doubt;             /* (ctx) of whoever chose the token, 0 for those of prompts and behind the last token */
} mxd_kv_state;

/* Resolve the options for an engine whose model and plan.ctx are known. */
mxd_status mxd_kv_resolve(mxd_engine *g, const mxd_options *o, mxd_error *err);
/* Room for the plan's context. */
void mxd_kv_fit(mxd_engine *g);
/* Bytes of all rows of the target's layers. */
size_t mxd_kv_arena(const mxd_engine *g);

/* Where a row of a step keeps its keys (which = 0) or values (1) of a head, in the cache or beside it. */
uint8_t *mxd_row_kv(const mxd_engine *g, const struct mxd_row *row, uint32_t layer, int which, uint32_t head);
/* The place in the cache of a row that may be beside it. */
uint8_t *mxd_kv_place(const mxd_engine *g, const struct mxd_row *row, uint32_t layer, int which, uint32_t head);
/* Format of a layer's newest rows: the trained drafter's stays f16. */
mxd_row_format mxd_kv_format(const mxd_engine *g, uint32_t layer);
/* Put a head's keys or values (head_dim), which are overwritten, into such a place. */
void mxd_kv_store(const mxd_engine *g, uint32_t layer, float *x, uint8_t *place);
/* What a row of a sequence at a position attends to, itself included: at most MXD_KV_MAX_SPANS spans. */
size_t mxd_kv_spans(const mxd_engine *g, uint32_t slot, uint32_t layer, uint32_t head, size_t position,
                    mxd_span spans[MXD_KV_MAX_SPANS]);

/* Keys and values of all that a sequence has processed, and their tiers, into another one that holds nothing. */
void mxd_kv_copy(mxd_seq *to, const mxd_seq *from);
/* Forget all positions. */
void mxd_kv_reset(mxd_seq *s);
/* Whether positions can be forgotten without those before them. */
int mxd_kv_can_shorten(const mxd_engine *g);
/* Bring the tiers up to date: before rows run at s->done and behind it. */
void mxd_kv_settle(mxd_seq *s);
/* Rows that may run from s->done on until the tiers change; at least 1 when they are up to date. */
size_t mxd_kv_room(const mxd_seq *s);
/* Bytes that a row at a position reads. */
uint64_t mxd_kv_bytes(const mxd_seq *s);
/* The nearest position from which so many rows of sequence slot 0 can run, whatever it holds; for measuring. */
uint32_t mxd_kv_any_position(const mxd_engine *g, uint32_t position, uint32_t rows);

#endif
