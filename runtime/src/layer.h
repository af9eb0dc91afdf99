/* SPDX-License-Identifier: Apache-2.0 */
/* What a thread does within a pass, shared by the target (forward.c) and the trained drafter (draft_model.c). Every
 * thread runs the same functions and takes its static part of each phase: rows for vector operations, tiles of 16
 * outputs for matrix products, heads for attention. A row's arithmetic never depends on the other rows or on the number
 * of threads (docs/arithmetic.md, "Layer"). */
#ifndef MXD_LAYER_H
#define MXD_LAYER_H

#include "internal.h"

/* One thread in a pass. */
typedef struct mxd_worker {
    mxd_engine *g;
    uint32_t thread, threads;
} mxd_worker;

/* A matrix to multiply the input with, and where the products go. */
typedef struct mxd_product {
    const mxd_matrix *w;
    float *y; /* (rows, w->rows), rows ldy apart */
    size_t ldy;
} mxd_product;

void mxd_barrier(const mxd_worker *w);
/* Set from..to to this thread's part of `total` things. */
void mxd_my_part(const mxd_worker *w, size_t total, size_t *from, size_t *to);

/* Return the input of the next product of `rows` rows: each thread's own if they are few, else all threads'. This
 * thread must prepare its rows from..to. */
const mxd_input *mxd_input_of(const mxd_worker *w, size_t rows, size_t *from, size_t *to);
/* Return the input's quantized rows. */
mxd_act mxd_act_of(const mxd_worker *w, size_t rows);
/* Quantize rows from..to of x (k wide) into the input, and wait until all rows are there. */
void mxd_finish_input(const mxd_worker *w, size_t rows, const float *x, size_t k, size_t from, size_t to);
/* Multiply the input with several matrices, whose tiles are split among the threads as one range. */
void mxd_multiply(const mxd_worker *w, size_t rows, const mxd_product *products, size_t count);

/* Dequantize the embedding of a token: out(hidden). */
void mxd_embed(const mxd_model *m, uint32_t token, float *out);
/* Normalize (RMSNorm) `rows` rows of the residual stream, those of the outcomes or all (NULL), as the input of the next
 * product. Values that are not finite are noted in g->fault as those of `layer`. */
void mxd_normalize(const mxd_worker *w, size_t rows, const mxd_outcome *outcomes, const float *weight, uint32_t layer);
/* Run the rows through a layer, whose keys and values are number `index` of the cache. Ends with a barrier. */
void mxd_run_layer(const mxd_worker *w, const mxd_layer *layer, uint32_t index);

#endif
