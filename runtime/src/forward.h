/* The target's pass: rows through all layers, and what the head makes of them. */
#ifndef MXD_FORWARD_H
#define MXD_FORWARD_H

#include "status.h"

/* What the head computes for a row: its likeliest token, or that and all logits. */
typedef enum mxd_wants { MXD_WANTS_NOTHING, MXD_WANTS_WINNER, MXD_WANTS_LOGITS } mxd_wants;

/* One row of an engine step: a token at a position of a sequence. In a tree of drafted tokens several rows have the
 * same position: one of them has its keys and values in the cache, the others, and all below them, beside it. */
typedef struct mxd_row {
    uint32_t slot, position, token;
    mxd_wants wants;
    uint32_t beside; /* 0: in the cache; else 1 + its number in side_kv */
    uint32_t parent; /* of a row beside the cache: the row of the token before */
} mxd_row;

/* What the head makes of a row that wants something. */
typedef struct mxd_outcome {
    uint32_t row;    /* of the step */
    uint32_t winner; /* the likeliest token, the lowest id among equals */
    float margin;    /* its logit less the second largest */
    float *logits;   /* (vocab padded), or NULL: only the winner was wanted */
} mxd_outcome;

/* Run the step's rows through the model at a precision (0 base, 1 full; at most the engine's) and fill
 * g->outcomes; at most logit_rows rows may want logits. MXD_ERR_NUMERIC names layer and position. */
mxd_status mxd_forward(mxd_engine *g, int precision, mxd_error *err);

/* Append a row to those of the pass. */
mxd_row *mxd_add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, mxd_wants wants);
/* Rows whose logits one pass can hand out. */
size_t mxd_logit_chunk(const mxd_engine *g);

#endif
