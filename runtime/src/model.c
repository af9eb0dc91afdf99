/* One step of the transformer for a batch of rows (docs/arithmetic.md, "Layer"). Every thread runs the same function
 * and takes its static part of each phase: rows for vector operations, tiles of 16 outputs for matrix products, heads
 * for attention. A row's arithmetic never depends on the other rows or on the number of threads. */
#include <math.h>
#include <string.h>

#include "engine.h"

typedef struct product {
    const mxd_matrix *w;
    float *y;
    size_t ldy;
} product;

/* One thread's view of a step. */
typedef struct worker {
    mxd_engine *g;
    uint32_t thread, threads;
} worker;

static void barrier(const worker *w) {
    if (w->threads > 1) mxd_pool_barrier(w->g->pool);
}

/* This thread's part of `total` things. */
static void my_part(const worker *w, size_t total, size_t *from, size_t *to) {
    mxd_split(total, w->threads, w->thread, from, to);
}

/* ---- inputs of matrix products ---- */

static int is_few(const worker *w, size_t rows) {
    return w->threads > 1 && rows <= MXD_FEW_ROWS;
}

static const mxd_input *input_of(const worker *w, size_t rows) {
    return is_few(w, rows) ? &w->g->own[w->thread] : &w->g->shared;
}

/* The rows of an input that this thread prepares. */
static void my_rows(const worker *w, size_t rows, size_t *from, size_t *to) {
    if (is_few(w, rows)) *from = 0, *to = rows;
    else my_part(w, rows, from, to);
}

/* Quantize rows from..to of x (k wide) as the input's, and wait until all rows are there. */
static void finish_input(const worker *w, size_t rows, const float *x, size_t k, size_t from, size_t to) {
    const mxd_act *act = &input_of(w, rows)->act;
    size_t block = from * (k / MXD_BLOCK);
    mxd_act out = {.q = act->q + from * k,
                   .lo = act->lo ? act->lo + from * k : NULL,
                   .s = act->s + block,
                   .bias = act->bias + block * (act->lo ? 4 : 2)};
    w->g->kernels.quantize(x + from * k, k, to - from, k, &out);
    if (!is_few(w, rows)) barrier(w);
}

/* Products of the input with several matrices: their tiles are split as one range. */
static void multiply(const worker *w, size_t rows, const product *products, size_t count) {
    const mxd_engine *g = w->g;
    const mxd_act *act = &input_of(w, rows)->act;
    size_t total = 0, from, to, first = 0;
    for (size_t i = 0; i < count; i++) total += mxd_pad_tile(products[i].w->rows) / MXD_TILE_ROWS;
    my_part(w, total, &from, &to);
    for (size_t i = 0; i < count; i++) {
        const product *p = &products[i];
        size_t tiles = mxd_pad_tile(p->w->rows) / MXD_TILE_ROWS, nblocks = p->w->cols / MXD_BLOCK;
        size_t t0 = from > first ? from - first : 0, t1 = to > first ? to - first : 0;
        if (t1 > tiles) t1 = tiles;
        first += tiles;
        if (t0 >= t1) continue;
        size_t offset = t0 * nblocks * MXD_MXFP4_BLOCK_BYTES;
        const uint8_t *residual = g->precision ? p->w->residual + offset : NULL;
        g->kernels.matmul_mxfp4(p->w->base + offset, residual, nblocks, t1 - t0, act, rows, p->y + t0 * MXD_TILE_ROWS,
                                p->ldy);
    }
}

/* The product with one matrix whose output is added to the residual stream. */
static void multiply_add(const worker *w, const mxd_matrix *matrix) {
    mxd_engine *g = w->g;
    size_t hidden = matrix->rows, from, to;
    multiply(w, g->row_count, &(product){matrix, g->projected, hidden}, 1);
    my_part(w, hidden / MXD_TILE_ROWS, &from, &to);
    for (size_t m = 0; m < g->row_count; m++) {
        size_t at = m * hidden + from * MXD_TILE_ROWS;
        g->kernels.add(g->x + at, g->projected + at, (to - from) * MXD_TILE_ROWS);
    }
}

static void record_fault(mxd_engine *g, uint64_t layer, uint64_t row) {
    uint64_t key = layer << 32 | row, seen = atomic_load(&g->fault);
    while (key < seen && !atomic_compare_exchange_weak(&g->fault, &seen, key)) {
    }
}

/* RMSNorm of `rows` rows of the residual stream (row_of[i], or i if NULL) as the next product's input. */
static void normalize(const worker *w, size_t rows, const uint32_t *row_of, const float *weight, uint32_t layer) {
    mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    float *normed = input_of(w, rows)->rows;
    size_t from, to;
    my_rows(w, rows, &from, &to);
    for (size_t i = from; i < to; i++) {
        size_t m = row_of ? row_of[i] : i;
        float ss = g->kernels.rmsnorm(g->x + m * c->hidden, weight, c->hidden, c->rms_eps, normed + i * c->hidden);
        if (!isfinite(ss)) record_fault(g, layer, m);
    }
    finish_input(w, rows, normed, c->hidden, from, to);
}

/* ---- the layer ---- */

/* Embedding rows: dequantized MXINT8, gathered from the tile order. */
static void embed(const worker *worker) {
    const mxd_engine *g = worker->g;
    const mxd_matrix *w = &g->model->embedding;
    size_t nblocks = w->cols / MXD_BLOCK, from, to;
    my_part(worker, g->row_count, &from, &to);
    for (size_t m = from; m < to; m++) {
        uint32_t token = g->rows[m].token, lane = token % MXD_TILE_ROWS;
        const uint8_t *tile = w->base + token / MXD_TILE_ROWS * nblocks * MXD_MXINT8_BLOCK_BYTES;
        for (size_t k = 0; k < w->cols; k++) {
            const uint8_t *block = tile + k / MXD_BLOCK * MXD_MXINT8_BLOCK_BYTES;
            size_t column = k % MXD_BLOCK;
            int8_t q = (int8_t)block[MXD_TILE_ROWS + 64 * (column / 4) + 4 * lane + column % 4];
            g->x[m * w->cols + k] = ldexpf((float)q, block[lane] - 127 - 6);
        }
    }
}

typedef struct qkv_layout {
    size_t k_at, v_at, width; /* q starts at 0 */
} qkv_layout;

static qkv_layout layout_qkv(const mxd_config *c) {
    size_t q = mxd_pad_tile((size_t)c->heads * c->head_dim), kv = mxd_pad_tile((size_t)c->kv_heads * c->head_dim);
    return (qkv_layout){q, q + kv, q + 2 * kv};
}

static void rotate(const mxd_engine *g, float *head, size_t position) {
    size_t half = g->model->config.head_dim / 2;
    g->kernels.rope(head, g->model->rope_cos + position * half, g->model->rope_sin + position * half, 2 * half);
}

/* Rotate the keys, and put keys and values into the cache. */
static void store_keys_values(const worker *w, uint32_t layer) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, from, to;
    my_part(w, g->row_count * c->kv_heads, &from, &to);
    for (size_t unit = from; unit < to; unit++) {
        const mxd_row *row = &g->rows[unit / c->kv_heads];
        uint32_t h = (uint32_t)(unit % c->kv_heads);
        float *k = g->qkv + unit / c->kv_heads * at.width + at.k_at + h * d, *v = k - at.k_at + at.v_at;
        rotate(g, k, row->position);
        g->kernels.to_f16(k, d, mxd_kv(g, row->slot, layer, 0, h) + row->position * d);
        g->kernels.to_f16(v, d, mxd_kv(g, row->slot, layer, 1, h) + row->position * d);
    }
}

/* Rotate the queries and attend: the query heads of one KV head of one row at a time. */
static void attend(const worker *w, uint32_t layer) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, group = c->heads / c->kv_heads, from, to;
    float scale = 1.0f / sqrtf((float)d);
    float *scores = g->scores + (size_t)w->thread * group * g->plan.ctx;
    my_part(w, g->row_count * c->kv_heads, &from, &to);
    for (size_t unit = from; unit < to; unit++) {
        const mxd_row *row = &g->rows[unit / c->kv_heads];
        uint32_t kv_head = (uint32_t)(unit % c->kv_heads);
        float *q = g->qkv + unit / c->kv_heads * at.width + kv_head * group * d;
        for (size_t h = 0; h < group; h++) rotate(g, q + h * d, row->position);
        g->kernels.attention(q, group, mxd_kv(g, row->slot, layer, 0, kv_head), mxd_kv(g, row->slot, layer, 1, kv_head),
                             row->position + 1, d, scale, scores, g->mixed + unit * group * d);
    }
}

static void feed_forward_input(const worker *w) {
    mxd_engine *g = w->g;
    size_t f = g->model->config.ffn, from, to;
    float *gated = input_of(w, g->row_count)->rows;
    my_rows(w, g->row_count, &from, &to);
    for (size_t m = from; m < to; m++)
        g->kernels.silu_mul(g->gate_up + m * 2 * f, g->gate_up + m * 2 * f + f, f, gated + m * f);
    finish_input(w, g->row_count, gated, f, from, to);
}

static void run_layer(const worker *w, uint32_t l) {
    mxd_engine *g = w->g;
    const mxd_layer *layer = &g->model->layers[l];
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t rows = g->row_count, f = c->ffn, from, to;

    normalize(w, rows, NULL, layer->attention_norm[g->precision], l);
    const product qkv[] = {{&layer->q, g->qkv, at.width},
                           {&layer->k, g->qkv + at.k_at, at.width},
                           {&layer->v, g->qkv + at.v_at, at.width}};
    multiply(w, rows, qkv, 3);
    barrier(w);
    store_keys_values(w, l);
    barrier(w);
    attend(w, l);
    barrier(w);
    my_rows(w, rows, &from, &to);
    finish_input(w, rows, g->mixed, (size_t)c->heads * c->head_dim, from, to);
    multiply_add(w, &layer->o);
    barrier(w);

    normalize(w, rows, NULL, layer->ffn_norm[g->precision], l);
    const product gate_up[] = {{&layer->gate, g->gate_up, 2 * f}, {&layer->up, g->gate_up + f, 2 * f}};
    multiply(w, rows, gate_up, 2);
    barrier(w);
    feed_forward_input(w);
    multiply_add(w, &layer->down);
    barrier(w);
}

/* Logits of the rows that want them. */
static void run_head(const worker *w) {
    mxd_engine *g = w->g;
    const mxd_model *m = g->model;
    size_t nblocks = m->head.cols / MXD_BLOCK, from, to;
    normalize(w, g->logit_count, g->logit_row, m->final_norm[g->precision], m->config.layers);
    my_part(w, mxd_pad_tile(m->head.rows) / MXD_TILE_ROWS, &from, &to);
    g->kernels.matmul_mxint8(m->head.base + from * nblocks * MXD_MXINT8_BLOCK_BYTES, NULL, nblocks, to - from,
                             &input_of(w, g->logit_count)->act, g->logit_count, g->logits + from * MXD_TILE_ROWS,
                             mxd_pad_tile(m->head.rows));
}

static void forward_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    const worker w = {g, thread, mxd_pool_size(g->pool)};
    embed(&w);
    barrier(&w);
    for (uint32_t l = 0; l < g->model->config.layers; l++) run_layer(&w, l);
    if (g->logit_count) run_head(&w);
}

mxd_status mxd_forward(mxd_engine *g, mxd_error *err) {
    const mxd_config *c = &g->model->config;
    g->logit_count = 0;
    for (size_t m = 0; m < g->row_count; m++)
        if (g->rows[m].wants_logits) g->logit_row[g->logit_count++] = (uint32_t)m;
    atomic_store(&g->fault, UINT64_MAX);
    mxd_pool_run(g->pool, forward_job, g);

    uint64_t fault = atomic_load(&g->fault);
    if (fault != UINT64_MAX) {
        const mxd_row *row = &g->rows[fault & UINT32_MAX];
        if (fault >> 32 == c->layers)
            return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite value before the head at position %u", row->position);
        return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite value entering layer %u at position %u",
                        (unsigned)(fault >> 32), row->position);
    }
    for (size_t i = 0; i < g->logit_count; i++) {
        const float *logits = g->logits + i * mxd_pad_tile(c->vocab);
        for (uint32_t id = 0; id < c->vocab; id++)
            if (!isfinite(logits[id]))
                return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite logit of token %u at position %u", id,
                                g->rows[g->logit_row[i]].position);
    }
    return MXD_OK;
}
