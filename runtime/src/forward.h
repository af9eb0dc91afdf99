/* SPDX-License-Identifier: Apache-2.0 */
/* The target's pass: rows through all layers, then the head for those that have an output. */
#ifndef MXD_FORWARD_H
#define MXD_FORWARD_H

#include "status.h"

/* What the head computes for a row. */
typedef enum mxd_output {
    MXD_OUTPUT_NONE,
    MXD_OUTPUT_WINNER, /* the likeliest token */
    MXD_OUTPUT_LOGITS  /* that, and all logits */
} mxd_output;

/* One row of a pass: a token at a position of a sequence. In a tree of drafted tokens several rows have the same
 * position. One of them has its keys and values in the cache; the others, and all their descendants, are *side rows*,
 * which have them in kv.side until they are accepted. */
typedef struct mxd_row {
    uint32_t slot, position, token;
    mxd_output output;
    uint32_t side;   /* 0: in the cache; else 1 + its index in kv.side */
    uint32_t parent; /* of a side row: the row of the token before */
} mxd_row;

/* What the head makes of a row that has an output. */
typedef struct mxd_outcome {
    uint32_t row;    /* of the pass */
    uint32_t winner; /* the likeliest token, the lowest id among equals */
    float margin;    /* its logit less the second largest */
    float *logits;   /* (vocab padded), or NULL: only the winner was asked for */
} mxd_outcome;

/* Remove all rows of the pass. */
void mxd_clear_rows(mxd_engine *g);
/* Append a row in the cache. */
mxd_row *mxd_add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, mxd_output output);
/* Run the rows through the model at a precision (0 base, 1 full; at most the engine's) and fill g->outcomes.
 * MXD_ERR_NUMERIC names layer and position of the first value that is not finite. */
mxd_status mxd_forward(mxd_engine *g, int precision, mxd_error *err);

#endif
