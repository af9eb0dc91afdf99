/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"

#include <math.h>
#include <string.h>

void mxd_barrier(const mxd_worker *w) {
    if (w->threads > 1) mxd_pool_barrier(w->g->pool);
}

void mxd_my_part(const mxd_worker *w, size_t total, size_t *from, size_t *to) {
    mxd_split(total, w->threads, w->thread, from, to);
}

/* ---- inputs of matrix products ---- */

static bool is_few(const mxd_worker *w, size_t rows) {
    return w->threads > 1 && rows <= MXD_FEW_ROWS;
}

const mxd_input *mxd_input_of(const mxd_worker *w, size_t rows, size_t *from, size_t *to) {
    if (is_few(w, rows)) {
        *from = 0;
        *to = rows;
        return &w->g->own[w->thread];
    }
    mxd_my_part(w, rows, from, to);
    return &w->g->shared;
}

mxd_act mxd_act_of(const mxd_worker *w, size_t rows) {
    return is_few(w, rows) ? w->g->own[w->thread].act : w->g->shared.act;
}

void mxd_finish_input(const mxd_worker *w, size_t rows, const float *x, size_t k, size_t from, size_t to) {
    mxd_act act = mxd_act_of(w, rows);
    size_t block = from * (k / MXD_BLOCK);
    mxd_act out = {.q = act.q + from * k, .s = act.s + block, .bias = act.bias + block * 2};
    w->g->kernels.quantize(x + from * k, k, to - from, k, &out);
    if (!is_few(w, rows)) mxd_barrier(w);
}

void mxd_multiply(const mxd_worker *w, size_t rows, const mxd_product *products, size_t count) {
    const mxd_engine *g = w->g;
    mxd_act act = mxd_act_of(w, rows);
    size_t total = 0, from, to, first = 0;
    for (size_t i = 0; i < count; i++) total += mxd_pad_tile(products[i].w->rows) / MXD_TILE_ROWS;
    mxd_my_part(w, total, &from, &to);
    for (size_t i = 0; i < count; i++) {
        const mxd_product *p = &products[i];
        size_t tiles = mxd_pad_tile(p->w->rows) / MXD_TILE_ROWS, nblocks = p->w->cols / MXD_BLOCK;
        size_t t0 = from > first ? from - first : 0, t1 = to > first ? to - first : 0;
        if (t1 > tiles) t1 = tiles;
        first += tiles;
        if (t0 >= t1) continue;
        size_t offset = t0 * nblocks * MXD_MXFP4_BLOCK_BYTES;
        const uint8_t *residual = g->pass_precision ? p->w->residual + offset : NULL;
        g->kernels.matmul_mxfp4(p->w->base + offset, residual, nblocks, t1 - t0, &act, rows, p->y + t0 * MXD_TILE_ROWS,
                                p->ldy);
    }
}

/* Multiply the input with a matrix and add the product to the residual stream. */
static void multiply_add(const mxd_worker *w, const mxd_matrix *matrix) {
    mxd_engine *g = w->g;
    size_t hidden = matrix->rows, from, to;
    mxd_multiply(w, g->row_count, &(mxd_product){matrix, g->projected, hidden}, 1);
    mxd_my_part(w, hidden / MXD_TILE_ROWS, &from, &to);
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

void mxd_normalize(const mxd_worker *w, size_t rows, const mxd_outcome *outcomes, const float *weight, uint32_t layer) {
    mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    size_t from, to;
    float *normed = mxd_input_of(w, rows, &from, &to)->rows;
    for (size_t i = from; i < to; i++) {
        size_t m = outcomes ? outcomes[i].row : i;
        float ss = g->kernels.rmsnorm(g->x + m * c->hidden, weight, c->hidden, c->rms_eps, normed + i * c->hidden);
        if (!isfinite(ss)) record_fault(g, layer, m);
    }
    mxd_finish_input(w, rows, normed, c->hidden, from, to);
}

/* ---- the layer ---- */

void mxd_embed(const mxd_model *m, uint32_t token, float *out) {
    const mxd_matrix *w = &m->embedding;
    size_t nblocks = w->cols / MXD_BLOCK;
    uint32_t lane = token % MXD_TILE_ROWS;
    const uint8_t *tile = w->base + token / MXD_TILE_ROWS * nblocks * MXD_MXINT8_BLOCK_BYTES;
    for (size_t k = 0; k < w->cols; k++) { /* gathered from the tile order */
        const uint8_t *block = tile + k / MXD_BLOCK * MXD_MXINT8_BLOCK_BYTES;
        size_t column = k % MXD_BLOCK;
        int8_t q = (int8_t)block[MXD_TILE_ROWS + 64 * (column / 4) + 4 * lane + column % 4];
        out[k] = ldexpf((float)q, block[lane] - 127 - 6);
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

/* Rotate the keys, and store keys and values in the cache. */
static void store_keys_values(const mxd_worker *w, uint32_t layer) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, from, to;
    mxd_my_part(w, g->row_count * c->kv_heads, &from, &to);
    for (size_t unit = from; unit < to; unit++) {
        const mxd_row *row = &g->rows[unit / c->kv_heads];
        uint32_t h = (uint32_t)(unit % c->kv_heads);
        float *k = g->qkv + unit / c->kv_heads * at.width + at.k_at + h * d, *v = k - at.k_at + at.v_at;
        rotate(g, k, row->position);
        mxd_kv_store(g, layer, k, mxd_row_kv(g, row, layer, 0, h));
        mxd_kv_store(g, layer, v, mxd_row_kv(g, row, layer, 1, h));
    }
}

/* Attend with query heads over a quantized cache. Its rows are rotated by the Hadamard transform, and so are the
 * queries; the mean of the values is rotated back. */
static void attend_quantized(const mxd_worker *w, float *q, size_t group, const mxd_span *spans, size_t count,
                             float scale, float *scores, float *out) {
    const mxd_engine *g = w->g;
    size_t d = g->model->config.head_dim;
    const mxd_act *query = &g->queries[w->thread];
    for (size_t h = 0; h < group; h++) g->kernels.hadamard(q + h * d, d);
    g->kernels.quantize(q, d, group, d, query);
    g->kernels.attention_mx(query, group, spans, count, d, scale, scores, out);
    for (size_t h = 0; h < group; h++) g->kernels.hadamard(out + h * d, d);
}

/* Rotate the query heads of a row that share a KV head, and attend over the cache up to the row's position. */
static void attend_group(const mxd_worker *w, uint32_t layer, size_t m, uint32_t kv_head) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    const mxd_row *row = &g->rows[m];
    size_t d = c->head_dim, group = c->heads / c->kv_heads, first = kv_head * group;
    float *q = g->qkv + m * layout_qkv(c).width + first * d;
    for (size_t h = 0; h < group; h++) rotate(g, q + h * d, row->position);
    float scale = 1.0f / sqrtf((float)d);
    float *scores = g->scores + (size_t)w->thread * group * g->plan.ctx, *out = g->mixed + (m * c->heads + first) * d;
    mxd_span spans[MXD_KV_MAX_SPANS];
    size_t count = mxd_kv_spans(g, row->slot, layer, kv_head, row->position, spans);
    if (mxd_kv_format(g, layer) == MXD_ROW_F16)
        g->kernels.attention(q, group, (const uint16_t *)(const void *)spans->k,
                             (const uint16_t *)(const void *)spans->v, spans->n, d, scale, scores, out);
    else attend_quantized(w, q, group, spans, count, scale, scores, out);
    if (g->monitor.in_use && layer == g->model->schedule.monitored_layer)
        mxd_monitor_row(g, m, kv_head, scores, row->position + 1);
}

/* Do the same for a side row: it and the side rows before it take their places in the cache meanwhile. No other thread
 * reads this head then. */
static void attend_side(const mxd_worker *w, uint32_t layer, size_t m, uint32_t kv_head) {
    const mxd_engine *g = w->g;
    size_t bytes = g->kv.row_bytes, count = 0;
    uint8_t saved[MXD_MAX_DRAFT][2][2 * MXD_MAX_HEAD_DIM]; /* f16 has the widest rows */
    for (const mxd_row *row = &g->rows[m]; row->side; row = &g->rows[row->parent], count++)
        for (int which = 0; which < 2; which++) {
            uint8_t *place = mxd_kv_place(g, row, layer, which, kv_head);
            memcpy(saved[count][which], place, bytes);
            memcpy(place, mxd_row_kv(g, row, layer, which, kv_head), bytes);
        }
    attend_group(w, layer, m, kv_head);
    count = 0;
    for (const mxd_row *row = &g->rows[m]; row->side; row = &g->rows[row->parent], count++)
        for (int which = 0; which < 2; which++)
            memcpy(mxd_kv_place(g, row, layer, which, kv_head), saved[count][which], bytes);
}

/* Attend with the query heads of one KV head of one row at a time; side rows come after the others. */
static void attend(const mxd_worker *w, uint32_t layer) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    size_t from, to;
    mxd_my_part(w, g->row_count * c->kv_heads, &from, &to);
    for (size_t unit = from; unit < to; unit++)
        if (!g->rows[unit / c->kv_heads].side)
            attend_group(w, layer, unit / c->kv_heads, (uint32_t)(unit % c->kv_heads));
    if (!g->side_count) return;
    mxd_barrier(w);
    mxd_my_part(w, c->kv_heads, &from, &to);
    for (size_t kv_head = from; kv_head < to; kv_head++)
        for (size_t m = 0; m < g->row_count; m++)
            if (g->rows[m].side) attend_side(w, layer, m, (uint32_t)kv_head);
}

static void feed_forward_input(const mxd_worker *w) {
    mxd_engine *g = w->g;
    size_t f = g->model->config.ffn, from, to;
    float *gated = mxd_input_of(w, g->row_count, &from, &to)->rows;
    for (size_t m = from; m < to; m++)
        g->kernels.silu_mul(g->gate_up + m * 2 * f, g->gate_up + m * 2 * f + f, f, gated + m * f);
    mxd_finish_input(w, g->row_count, gated, f, from, to);
}

void mxd_run_layer(const mxd_worker *w, const mxd_layer *layer, uint32_t l) {
    mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t rows = g->row_count, f = c->ffn, from, to;

    mxd_normalize(w, rows, NULL, layer->attention_norm[g->pass_precision], l);
    const mxd_product qkv[] = {{&layer->q, g->qkv, at.width},
                               {&layer->k, g->qkv + at.k_at, at.width},
                               {&layer->v, g->qkv + at.v_at, at.width}};
    mxd_multiply(w, rows, qkv, 3);
    mxd_barrier(w);
    store_keys_values(w, l);
    mxd_barrier(w);
    attend(w, l);
    mxd_barrier(w);
    mxd_input_of(w, rows, &from, &to);
    mxd_finish_input(w, rows, g->mixed, (size_t)c->heads * c->head_dim, from, to);
    multiply_add(w, &layer->o);
    mxd_barrier(w);

    mxd_normalize(w, rows, NULL, layer->ffn_norm[g->pass_precision], l);
    const mxd_product gate_up[] = {{&layer->gate, g->gate_up, 2 * f}, {&layer->up, g->gate_up + f, 2 * f}};
    mxd_multiply(w, rows, gate_up, 2);
    mxd_barrier(w);
    feed_forward_input(w);
    multiply_add(w, &layer->down);
    mxd_barrier(w);
}
