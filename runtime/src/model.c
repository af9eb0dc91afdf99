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

/* The input's quantized rows, with as many digits as the pass has. */
static mxd_act act_of(const worker *w, size_t rows) {
    mxd_act act = input_of(w, rows)->act;
    if (!w->g->pass) act.lo = NULL;
    return act;
}

/* The rows of an input that this thread prepares. */
static void my_rows(const worker *w, size_t rows, size_t *from, size_t *to) {
    if (is_few(w, rows)) *from = 0, *to = rows;
    else my_part(w, rows, from, to);
}

/* Quantize rows from..to of x (k wide) as the input's, and wait until all rows are there. */
static void finish_input(const worker *w, size_t rows, const float *x, size_t k, size_t from, size_t to) {
    mxd_act act = act_of(w, rows);
    size_t block = from * (k / MXD_BLOCK);
    mxd_act out = {.q = act.q + from * k,
                   .lo = act.lo ? act.lo + from * k : NULL,
                   .s = act.s + block,
                   .sum = act.sum + block};
    w->g->kernels.quantize(x + from * k, k, to - from, k, &out);
    if (!is_few(w, rows)) barrier(w);
}

/* Products of the input with several matrices: their tiles are split as one range. */
static void multiply(const worker *w, size_t rows, const product *products, size_t count) {
    const mxd_engine *g = w->g;
    mxd_act act = act_of(w, rows);
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
        const uint8_t *residual = g->pass ? p->w->residual + offset : NULL;
        g->kernels.matmul_mxfp4(p->w->base + offset, residual, nblocks, t1 - t0, &act, rows, p->y + t0 * MXD_TILE_ROWS,
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

/* RMSNorm of `rows` rows of the residual stream (of the outcomes, or all if NULL) as the next product's input. */
static void normalize(const worker *w, size_t rows, const mxd_outcome *outcomes, const float *weight,
                      uint32_t layer) {
    mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    float *normed = input_of(w, rows)->rows;
    size_t from, to;
    my_rows(w, rows, &from, &to);
    for (size_t i = from; i < to; i++) {
        size_t m = outcomes ? outcomes[i].row : i;
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

/* Rotate the queries and attend, one query head of one row at a time. */
static void attend(const worker *w, uint32_t layer) {
    const mxd_engine *g = w->g;
    const mxd_config *c = &g->model->config;
    qkv_layout at = layout_qkv(c);
    size_t d = c->head_dim, from, to;
    float scale = 1.0f / sqrtf((float)d);
    float *scores = g->scores + (size_t)w->thread * g->plan.ctx;
    my_part(w, g->row_count * c->heads, &from, &to);
    for (size_t unit = from; unit < to; unit++) {
        const mxd_row *row = &g->rows[unit / c->heads];
        uint32_t h = (uint32_t)(unit % c->heads), kv_head = h / (c->heads / c->kv_heads);
        float *q = g->qkv + unit / c->heads * at.width + h * d;
        rotate(g, q, row->position);
        g->kernels.attention(q, mxd_kv(g, row->slot, layer, 0, kv_head), mxd_kv(g, row->slot, layer, 1, kv_head),
                             row->position + 1, d, scale, scores, g->mixed + unit * d);
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

    normalize(w, rows, NULL, layer->attention_norm[g->pass], l);
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

    normalize(w, rows, NULL, layer->ffn_norm[g->pass], l);
    const product gate_up[] = {{&layer->gate, g->gate_up, 2 * f}, {&layer->up, g->gate_up + f, 2 * f}};
    multiply(w, rows, gate_up, 2);
    barrier(w);
    feed_forward_input(w);
    multiply_add(w, &layer->down);
    barrier(w);
}

/* ---- the head ---- */

/* A logit as an integer of the same order (with -0 as +0), so that a maximum is one of integers, which compilers
 * vectorize. */
static int32_t ordered(float logit) {
    float f = logit + 0.0f;
    int32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits ^ (bits >> 31 & INT32_MAX);
}

/* Look at `columns` logits of an outcome, those of the tokens from `token` on. */
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
        if (part->fault_token == UINT32_MAX || outcome < part->fault_outcome)
            part->fault_outcome = outcome, part->fault_token = token + i;
        return;
    }
    if (best <= ordered(part->best[outcome])) return; /* equal ones lie behind the winner */
    uint32_t i = 0;
    while (ordered(y[i]) != best) i++;
    part->best[outcome] = y[i];
    part->winner[outcome] = token + i;
}

/* This thread's columns of the head for all outcomes: the winner of each, and the logits where they are wanted. */
static void run_head(const worker *w) {
    mxd_engine *g = w->g;
    const mxd_model *m = g->model;
    mxd_head_part *part = &g->head_parts[w->thread];
    size_t nblocks = m->head.cols / MXD_BLOCK, padded = mxd_pad_tile(m->head.rows), rows = g->outcome_count, from, to;
    normalize(w, rows, g->outcomes, m->final_norm[g->pass], m->config.layers);
    mxd_act act = act_of(w, rows);
    part->fault_token = UINT32_MAX;
    for (size_t i = 0; i < rows; i++) part->best[i] = -INFINITY;
    my_part(w, padded / MXD_TILE_ROWS, &from, &to);
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

/* Join what the threads found: their parts ascend, so among equals the first one's winner stays. */
static mxd_status join_head(mxd_engine *g, mxd_error *err) {
    uint32_t threads = mxd_pool_size(g->pool), fault_outcome = UINT32_MAX, fault_token = 0;
    for (uint32_t t = 0; t < threads; t++) {
        const mxd_head_part *part = &g->head_parts[t];
        if (part->fault_token != UINT32_MAX && part->fault_outcome < fault_outcome)
            fault_outcome = part->fault_outcome, fault_token = part->fault_token;
    }
    if (fault_outcome != UINT32_MAX)
        return mxd_fail(err, MXD_ERR_NUMERIC, "non-finite logit of token %u at position %u", fault_token,
                        g->rows[g->outcomes[fault_outcome].row].position);
    for (size_t i = 0; i < g->outcome_count; i++) {
        float best = -INFINITY;
        for (uint32_t t = 0; t < threads; t++)
            if (g->head_parts[t].best[i] > best)
                best = g->head_parts[t].best[i], g->outcomes[i].winner = g->head_parts[t].winner[i];
    }
    return MXD_OK;
}

/* ---- the step ---- */

static void forward_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    const worker w = {g, thread, mxd_pool_size(g->pool)};
    embed(&w);
    barrier(&w);
    for (uint32_t l = 0; l < g->model->config.layers; l++) run_layer(&w, l);
    if (g->outcome_count) run_head(&w);
}

mxd_status mxd_forward(mxd_engine *g, int precision, mxd_error *err) {
    const mxd_config *c = &g->model->config;
    float *logits = g->logits;
    g->pass = precision;
    g->outcome_count = 0;
    for (size_t m = 0; m < g->row_count; m++) {
        if (g->rows[m].wants == MXD_WANTS_NOTHING) continue;
        int all = g->rows[m].wants == MXD_WANTS_LOGITS;
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
