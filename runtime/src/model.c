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

static void barrier(const mxd_engine *g) {
    if (mxd_pool_size(g->pool) > 1) mxd_pool_barrier(g->pool);
}

/* This thread's part of the rows. */
static void my_rows(const mxd_engine *g, uint32_t thread, size_t *from, size_t *to) {
    mxd_split(g->row_count, mxd_pool_size(g->pool), thread, from, to);
}

/* The activation buffer from row m on, for rows of width k. */
static mxd_act act_row(const mxd_engine *g, size_t m, size_t k) {
    size_t block = m * (k / MXD_BLOCK);
    return (mxd_act){.q = g->act.q + m * k,
                     .lo = g->act.lo ? g->act.lo + m * k : NULL,
                     .s = g->act.s + block,
                     .sum = g->act.sum + block};
}

static void quantize_rows(const mxd_engine *g, const float *x, size_t k, size_t from, size_t to) {
    mxd_act out = act_row(g, from, k);
    g->kernels.quantize(x + from * k, k, to - from, k, &out);
}

/* Products of the quantized rows with several matrices of the same input: their tiles are split as one range. Returns
 * in (*from, *to) this thread's columns of the last product. */
static void multiply(const mxd_engine *g, uint32_t thread, size_t rows, const product *products, size_t count) {
    size_t total = 0, from, to, first = 0;
    for (size_t i = 0; i < count; i++) total += mxd_pad_tile(products[i].w->rows) / MXD_TILE_ROWS;
    mxd_split(total, mxd_pool_size(g->pool), thread, &from, &to);
    for (size_t i = 0; i < count; i++) {
        const product *p = &products[i];
        size_t tiles = mxd_pad_tile(p->w->rows) / MXD_TILE_ROWS, nblocks = p->w->cols / MXD_BLOCK;
        size_t t0 = from > first ? from - first : 0, t1 = to > first ? to - first : 0;
        if (t1 > tiles) t1 = tiles;
        first += tiles;
        if (t0 >= t1) continue;
        size_t offset = t0 * nblocks * MXD_MXFP4_BLOCK_BYTES;
        const uint8_t *residual = g->precision ? p->w->residual + offset : NULL;
        g->kernels.matmul_mxfp4(p->w->base + offset, residual, nblocks, t1 - t0, &g->act, rows,
                                p->y + t0 * MXD_TILE_ROWS, p->ldy);
    }
}

/* The product with one matrix whose output is added to the residual stream. */
static void multiply_add(const mxd_engine *g, uint32_t thread, const mxd_matrix *w) {
    size_t hidden = w->rows, from, to;
    multiply(g, thread, g->row_count, &(product){w, g->projected, hidden}, 1);
    mxd_split(hidden / MXD_TILE_ROWS, mxd_pool_size(g->pool), thread, &from, &to);
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

static void normalize(mxd_engine *g, const float *x, const float *weight, float *y, uint32_t layer, size_t row) {
    const mxd_config *c = &g->model->config;
    if (!isfinite(g->kernels.rmsnorm(x, weight, c->hidden, c->rms_eps, y))) record_fault(g, layer, row);
}

static void normalize_rows(mxd_engine *g, uint32_t thread, const float *weight, uint32_t layer) {
    size_t h = g->model->config.hidden, from, to;
    my_rows(g, thread, &from, &to);
    for (size_t m = from; m < to; m++) normalize(g, g->x + m * h, weight, g->normed + m * h, layer, m);
    quantize_rows(g, g->normed, h, from, to);
}

/* Embedding rows: dequantized MXINT8, gathered from the tile order. */
static void embed(const mxd_engine *g, uint32_t thread) {
    const mxd_matrix *w = &g->model->embedding;
    size_t nblocks = w->cols / MXD_BLOCK, from, to;
    my_rows(g, thread, &from, &to);
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

/* Rotate queries and keys, and put keys and values into the cache. */
static void rotate_and_store(const mxd_engine *g, uint32_t thread, uint32_t layer) {
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, from, to;
    my_rows(g, thread, &from, &to);
    for (size_t m = from; m < to; m++) {
        const mxd_row *row = &g->rows[m];
        const float *cosines = g->model->rope_cos + row->position * (d / 2);
        const float *sines = g->model->rope_sin + row->position * (d / 2);
        float *q = g->qkv + m * at.width, *k = q + at.k_at, *v = q + at.v_at;
        for (uint32_t h = 0; h < c->heads; h++) g->kernels.rope(q + h * d, cosines, sines, d);
        for (uint32_t h = 0; h < c->kv_heads; h++) {
            g->kernels.rope(k + h * d, cosines, sines, d);
            g->kernels.to_f16(k + h * d, d, mxd_kv(g, row->slot, layer, 0, h) + row->position * d);
            g->kernels.to_f16(v + h * d, d, mxd_kv(g, row->slot, layer, 1, h) + row->position * d);
        }
    }
}

static void attend(const mxd_engine *g, uint32_t thread, uint32_t layer) {
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, from, to;
    float scale = 1.0f / sqrtf((float)d);
    float *scores = g->scores + (size_t)thread * g->plan.ctx;
    mxd_split(g->row_count * c->heads, mxd_pool_size(g->pool), thread, &from, &to);
    for (size_t unit = from; unit < to; unit++) {
        size_t m = unit / c->heads;
        uint32_t h = (uint32_t)(unit % c->heads), kv_head = h / (c->heads / c->kv_heads);
        const mxd_row *row = &g->rows[m];
        g->kernels.attention(g->qkv + m * at.width + h * d, mxd_kv(g, row->slot, layer, 0, kv_head),
                             mxd_kv(g, row->slot, layer, 1, kv_head), row->position + 1, d, scale, scores,
                             g->mixed + unit * d);
    }
}

static void run_layer(mxd_engine *g, uint32_t thread, uint32_t l) {
    const mxd_layer *layer = &g->model->layers[l];
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t f = mxd_pad_tile(c->ffn), from, to;

    normalize_rows(g, thread, layer->attention_norm[g->precision], l);
    barrier(g);
    const product qkv[] = {
        {&layer->q, g->qkv, at.width}, {&layer->k, g->qkv + at.k_at, at.width}, {&layer->v, g->qkv + at.v_at, at.width}};
    multiply(g, thread, g->row_count, qkv, 3);
    barrier(g);
    rotate_and_store(g, thread, l);
    barrier(g);
    attend(g, thread, l);
    barrier(g);
    my_rows(g, thread, &from, &to);
    quantize_rows(g, g->mixed, (size_t)c->heads * c->head_dim, from, to);
    barrier(g);
    multiply_add(g, thread, &layer->o);
    barrier(g);

    normalize_rows(g, thread, layer->ffn_norm[g->precision], l);
    barrier(g);
    const product gate_up[] = {{&layer->gate, g->gate_up, 2 * f}, {&layer->up, g->gate_up + f, 2 * f}};
    multiply(g, thread, g->row_count, gate_up, 2);
    barrier(g);
    for (size_t m = from; m < to; m++)
        g->kernels.silu_mul(g->gate_up + m * 2 * f, g->gate_up + m * 2 * f + f, c->ffn, g->ffn + m * c->ffn);
    quantize_rows(g, g->ffn, c->ffn, from, to);
    barrier(g);
    multiply_add(g, thread, &layer->down);
    barrier(g);
}

/* Logits of the rows that want them. */
static void run_head(mxd_engine *g, uint32_t thread) {
    const mxd_model *m = g->model;
    const mxd_matrix *w = &m->head;
    size_t h = w->cols, nblocks = h / MXD_BLOCK, from, to;
    mxd_split(g->logit_count, mxd_pool_size(g->pool), thread, &from, &to);
    for (size_t i = from; i < to; i++)
        normalize(g, g->x + g->logit_row[i] * h, m->final_norm[g->precision], g->normed + i * h, m->config.layers,
                  g->logit_row[i]);
    quantize_rows(g, g->normed, h, from, to);
    barrier(g);
    mxd_split(mxd_pad_tile(w->rows) / MXD_TILE_ROWS, mxd_pool_size(g->pool), thread, &from, &to);
    g->kernels.matmul_mxint8(w->base + from * nblocks * MXD_MXINT8_BLOCK_BYTES, NULL, nblocks, to - from, &g->act,
                             g->logit_count, g->logits + from * MXD_TILE_ROWS, mxd_pad_tile(w->rows));
}

static void forward_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    embed(g, thread);
    for (uint32_t l = 0; l < g->model->config.layers; l++) run_layer(g, thread, l);
    if (g->logit_count) run_head(g, thread);
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
