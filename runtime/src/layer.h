/* Private: what a thread does within a step (layer.c), shared by the target (model.c) and the drafter
 * (draft_model.c). Every thread runs the same functions and takes its static part of each phase: rows for vector
 * operations, tiles of 16 outputs for matrix products, heads for attention. A row's arithmetic never depends on the
 * other rows or on the number of threads (docs/arithmetic.md, "Layer"). */
#ifndef MXD_LAYER_H
#define MXD_LAYER_H

#include "internal.h"

/* One thread's view of a step. */
typedef struct mxd_worker {
    mxd_engine *g;
    uint32_t thread, threads;
} mxd_worker;

/* A matrix that an input is multiplied with, and where the products go. */
typedef struct mxd_product {
    const mxd_matrix *w;
    float *y;
    size_t ldy;
} mxd_product;

void mxd_barrier(const mxd_worker *w);
/* This thread's part of `total` things. */
void mxd_my_part(const mxd_worker *w, size_t total, size_t *from, size_t *to);

/* The input of the next product of `rows` rows: each thread's own if they are few, else all threads'. Its rows
 * from..to are this thread's to prepare. */
const mxd_input *mxd_input_of(const mxd_worker *w, size_t rows, size_t *from, size_t *to);
/* The input's quantized rows. */
mxd_act mxd_act_of(const mxd_worker *w, size_t rows);
/* Quantize rows from..to of x (k wide) as the input's, and wait until all rows are there. */
void mxd_finish_input(const mxd_worker *w, size_t rows, const float *x, size_t k, size_t from, size_t to);
/* Products of the input with several matrices: their tiles are split as one range. */
void mxd_multiply(const mxd_worker *w, size_t rows, const mxd_product *products, size_t count);

/* Dequantized embedding of a token: out(hidden). */
void mxd_embed(const mxd_model *m, uint32_t token, float *out);
/* RMSNorm of `rows` rows of the residual stream (of the outcomes, or all if NULL) as the next product's input. */
void mxd_normalize(const mxd_worker *w, size_t rows, const mxd_outcome *outcomes, const float *weight, uint32_t layer);
/* The step's rows through a layer; its keys and values are number `index` of the cache. Ends with a barrier. */
void mxd_run_layer(const mxd_worker *w, const mxd_layer *layer, uint32_t index);

#endif
