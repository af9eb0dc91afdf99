/* SPDX-License-Identifier: Apache-2.0 */
#include "forward.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "layer.h"

/* ---- the head ---- */

/* Return a logit as an integer of the same order (with -0 as +0): compilers vectorize the maximum of integers. */
static int32_t ordered(float logit) {
    float f = logit + 0.0f;
    int32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits ^ (bits >> 31 & INT32_MAX);
}

/* Update the two largest logits of an outcome by `columns` more, those of the tokens from `token` on. */
static void scan_logits(mxd_head_part *part, uint32_t outcome, const float *y, uint32_t token, uint32_t columns) {
    const int32_t infinity = 0x7f800000;
    int32_t best = INT32_MIN, least = INT32_MAX;
    for (uint32_t i = 0; i < columns; i++) {
        int32_t key = ordered(y[i]);
        best = key > best ? key : best;
        least = key < least ? key : least;
    }
    if (best >= infinity || least <= ~infinity) {
        uint32_t i = 0;
        while (isfinite(y[i])) i++;
        if (part->fault_token != UINT32_MAX && part->fault_outcome <= outcome) return;
        part->fault_outcome = outcome;
        part->fault_token = token + i;
        return;
    }
    if (best <= ordered(part->second[outcome])) return;
    for (uint32_t i = 0; i < columns; i++) { /* rarely: the largest so far are soon found */
        if (y[i] > part->best[outcome]) {    /* among equals, the lowest id wins */
            part->second[outcome] = part->best[outcome];
            part->best[outcome] = y[i];
            part->winner[outcome] = token + i;
        } else if (y[i] > part->second[outcome]) {
            part->second[outcome] = y[i];
        }
    }
}

/* Compute this thread's columns of the head for all outcomes: their winners, and the logits where they are the
 * output. */
static void run_head(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_model *m = g->model;
    mxd_head_part *part = &g->head_parts[w->thread];
    size_t nblocks = m->head.cols / MXD_BLOCK, padded = mxd_pad_tile(m->head.rows), rows = g->outcome_count, from, to;
    mxd_normalize(w, rows, g->outcomes, m->final_norm[g->pass_precision], m->config.layers);
    mxd_act act = mxd_act_of(w, rows);
    part->fault_token = UINT32_MAX;
    for (size_t i = 0; i < rows; i++) part->best[i] = part->second[i] = -INFINITY;
    mxd_my_part(w, padded / MXD_TILE_ROWS, &from, &to);
    for (size_t tile = from, tiles; tile < to; tile += tiles) {
        tiles = to - tile < MXD_HEAD_COLUMNS / MXD_TILE_ROWS ? to - tile : MXD_HEAD_COLUMNS / MXD_TILE_ROWS;
        g->kernels.matmul_mxint8(m->head.base + tile * nblocks * MXD_MXINT8_BLOCK_BYTES, NULL, nblocks, tiles, &act,
                                 rows, part->logits, MXD_HEAD_COLUMNS);
        size_t token = tile * MXD_TILE_ROWS, columns = tiles * MXD_TILE_ROWS;
        if (token + columns > m->config.vocab) columns = m->config.vocab - token; /* the last tile is padded */
        for (size_t i = 0; i < rows; i++) {
            const float *y = part->logits + i * MXD_HEAD_COLUMNS;
            scan_logits(part, (uint32_t)i, y, (uint32_t)token, (uint32_t)columns);
            if (g->outcomes[i].logits) memcpy(g->outcomes[i].logits + token, y, columns * sizeof *y);
        }
    }
}

/* Join what the threads found. Their parts ascend, so among equals the winner of the first one stays. */
static mxd_status join_head(mxd_engine *g, mxd_error *err) {
    uint32_t threads = mxd_pool_size(g->pool), fault_outcome = UINT32_MAX, fault_token = 0;
    for (uint32_t t = 0; t < threads; t++) {
        const mxd_head_part *part = &g->head_parts[t];
        if (part->fault_token == UINT32_MAX || part->fault_outcome >= fault_outcome) continue;
        fault_outcome = part->fault_outcome;
        fault_token = part->fault_token;
    }
    if (fault_outcome != UINT32_MAX)
        return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite logit of token %u at position %u", fault_token,
                        g->rows[g->outcomes[fault_outcome].row].position);
    for (size_t i = 0; i < g->outcome_count; i++) {
        float best = -INFINITY, second = -INFINITY;
        for (uint32_t t = 0; t < threads; t++) {
            const mxd_head_part *part = &g->head_parts[t];
            bool better = part->best[i] > best;
            float lesser = better ? best : part->best[i];
            if (better) best = part->best[i];
            if (better) g->outcomes[i].winner = part->winner[i];
            if (lesser > second) second = lesser;
            if (part->second[i] > second) second = part->second[i];
        }
        g->outcomes[i].margin = best - second;
    }
    return MXD_OK;
}

/* ---- the pass ---- */

/* Copy the residual stream after a layer to those of out[rows][count][hidden] whose layer it is, before the next layer
 * adds to it. */
static void keep_stream(const mxd_worker *w, uint32_t layers_done, const uint32_t *layers, size_t count, float *out) {
    const mxd_engine *g = w->g;
    size_t hidden = g->model->config.hidden, from, to;
    mxd_my_part(w, g->row_count, &from, &to);
    for (size_t i = 0; i < count; i++)
        for (size_t m = from; m < to && layers[i] == layers_done; m++)
            memcpy(out + (m * count + i) * hidden, g->x + m * hidden, hidden * sizeof(float));
}

static void keep_streams(const mxd_worker *w, uint32_t layers_done) {
    const mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    if (g->drafter.in_use) keep_stream(w, layers_done, d->feature_layer, d->features, g->drafter.features);
    if (g->streams) keep_stream(w, layers_done, g->streams->layers, g->streams->count, g->streams->out);
}

static void forward_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    const mxd_worker w = {g, thread, mxd_pool_size(g->pool)};
    const mxd_config *c = &g->model->config;
    size_t from, to;
    mxd_my_part(&w, g->row_count, &from, &to);
    for (size_t m = from; m < to; m++) mxd_embed(g->model, g->rows[m].token, g->x + m * c->hidden);
    keep_streams(&w, 0);
    mxd_barrier(&w);
    for (uint32_t l = 0; l < c->layers; l++) {
        mxd_run_layer(&w, &g->model->layers[l], l);
        keep_streams(&w, l + 1);
    }
    if (g->outcome_count) run_head(&w);
}

void mxd_clear_rows(mxd_engine *g) {
    g->row_count = g->outcome_count = g->side_count = 0;
}

mxd_row *mxd_add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, mxd_output output) {
    assert(g->row_count < g->max_rows && position < g->plan.ctx);
    mxd_row *row = &g->rows[g->row_count++];
    *row = (mxd_row){.slot = s->slot, .position = (uint32_t)position, .token = token, .output = output};
    return row;
}

mxd_status mxd_forward(mxd_engine *g, int precision, mxd_error *err) {
    const mxd_config *c = &g->model->config;
    float *logits = g->logits;
    g->pass_precision = precision;
    g->outcome_count = 0;
    for (size_t m = 0; m < g->row_count; m++) {
        if (g->rows[m].output == MXD_OUTPUT_NONE) continue;
        bool all = g->rows[m].output == MXD_OUTPUT_LOGITS;
        g->outcomes[g->outcome_count++] = (mxd_outcome){.row = (uint32_t)m, .logits = all ? logits : NULL};
        if (all) logits += mxd_pad_tile(c->vocab);
    }
    atomic_store(&g->fault, UINT64_MAX);
    mxd_pool_run(g->pool, forward_job, g);

    uint64_t fault = atomic_load(&g->fault);
    if (fault == UINT64_MAX) return g->outcome_count ? join_head(g, err) : MXD_OK;
    const mxd_row *row = &g->rows[fault & UINT32_MAX];
    if (fault >> 32 == c->layers)
        return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite value before the head at position %u", row->position);
    return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite value entering layer %u at position %u", (unsigned)(fault >> 32),
                    row->position);
}
