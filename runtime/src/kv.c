/* SPDX-License-Identifier: Apache-2.0 */
#include "kv.h"

#include <math.h>
#include <string.h>

#include "internal.h"

/* Bits of a value in MXINT8 and in four-bit formats, its share of the scale included. */
static const float FAST_BITS = 8.25f, FAR_BITS = 4.25f;

/* ---- layout ---- */

/* Return how many of the first `aged` tokens are core. */
static uint32_t core_quota(const mxd_kv_layout *k, uint32_t aged) {
    uint32_t quota = k->sinks + (uint32_t)(k->share * (float)aged);
    return quota < aged ? quota : aged;
}

/* Return the most positions that ever age: the last block does so before the last position runs. */
static uint32_t most_aged(const mxd_kv_layout *k, uint32_t ctx) {
    return ctx > k->recent + MXD_KV_BLOCK ? (ctx - 1 - k->recent) / MXD_KV_BLOCK * MXD_KV_BLOCK : 0;
}

/* Size the areas for plan.ctx. */
static void fit(mxd_engine *g) {
    mxd_kv_layout *k = &g->kv;
    uint32_t ctx = g->plan.ctx, d = g->model->config.head_dim;
    k->core = k->far = 0;
    k->ring = ctx;
    if (k->mode == MXD_KV_TIERED) {
        uint32_t aged = most_aged(k, ctx);
        k->core = core_quota(k, aged);
        k->far = aged - k->core;
        if (k->recent + MXD_KV_BLOCK < ctx) k->ring = k->recent + MXD_KV_BLOCK;
    }
    k->row_bytes = mxd_row_bytes(k->format, d);
    k->far_row_bytes = mxd_row_bytes(MXD_ROW_NORMAL4, d);
    k->head_bytes = (k->core + k->ring) * k->row_bytes + k->far * k->far_row_bytes;
}

/* Set the share of core tokens that a budget, in bits a value when the context is full, allows. */
static mxd_status share_of_budget(mxd_kv_layout *k, float budget, uint32_t ctx, mxd_error *err) {
    uint32_t window = k->recent + MXD_KV_BLOCK, least = window + k->sinks < ctx ? window + k->sinks : ctx;
    float fast = (budget - FAR_BITS) / (FAST_BITS - FAR_BITS) * (float)ctx;
    if (!(fast >= (float)least))
        return mxd_fail(err, MXD_ERR_ARGUMENT,
                        "kv_budget %.2f: %u recent and first tokens of context %u alone take %.2f bits a value", budget,
                        least, ctx, FAR_BITS + (FAST_BITS - FAR_BITS) * (float)least / (float)ctx);
    uint32_t aged = most_aged(k, ctx), spare = fast < (float)ctx ? (uint32_t)fast - least : ctx;
    k->share = spare < aged ? (float)spare / (float)aged : 1;
    return MXD_OK;
}

mxd_status mxd_kv_resolve(mxd_engine *g, const mxd_options *o, mxd_error *err) {
    static const mxd_row_format formats[] = {MXD_ROW_F16, MXD_ROW_F16, MXD_ROW_MXINT8, MXD_ROW_MXFP4, MXD_ROW_MXINT8};
    const mxd_schedule *schedule = &g->model->schedule;
    if (o->kv > MXD_KV_TIERED) return mxd_fail(err, MXD_ERR_ARGUMENT, "kv %u is unknown", o->kv);
    if (o->kv_budget != 0 && o->kv != MXD_KV_TIERED)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "kv_budget is for the tiered KV cache only");
    mxd_kv_layout *k = &g->kv;
    *k = (mxd_kv_layout){.mode = o->kv == MXD_KV_AUTO ? MXD_KV_F16 : (mxd_kv)o->kv,
                         .format = formats[o->kv],
                         .sinks = schedule->sinks,
                         .recent = schedule->recent,
                         .budget = o->kv_budget,
                         .share = schedule->core_tokens};
    if (k->format != MXD_ROW_F16 && g->model->config.head_dim % MXD_BLOCK)
        return mxd_fail(err, MXD_ERR_UNSUPPORTED, "heads of %u: a quantized KV cache needs a multiple of %d",
                        g->model->config.head_dim, MXD_BLOCK);
    return o->kv_budget != 0 ? share_of_budget(k, o->kv_budget, g->plan.ctx, err) : MXD_OK;
}

/* Return the heads of all layers of the target, for keys and for values. */
static size_t head_count(const mxd_engine *g) {
    return (size_t)g->model->config.layers * 2 * g->model->config.kv_heads;
}

/* Return the bytes of a head of the drafter's layer: all positions in f16. */
static size_t drafter_head_bytes(const mxd_engine *g) {
    return g->plan.ctx * mxd_row_bytes(MXD_ROW_F16, g->model->config.head_dim);
}

void mxd_kv_take(mxd_engine *g, mxd_arena *a) {
    fit(g);
    g->kv.rows = mxd_take(a, g->max_seqs * head_count(g), g->kv.head_bytes);
    if (g->drafter.in_use)
        g->kv.drafter_rows = mxd_take(a, (size_t)g->max_seqs * 2 * g->model->config.kv_heads, drafter_head_bytes(g));
    g->kv.side = mxd_take(a, g->draft == MXD_DRAFT_OFF ? 0 : g->logit_rows * head_count(g), g->kv.row_bytes);
}

mxd_kv_state mxd_kv_take_seq(const mxd_engine *g, mxd_arena *a) {
    mxd_kv_state kv = {0};
    if (g->kv.mode != MXD_KV_TIERED) return kv;
    kv.core = mxd_take(a, g->kv.core, sizeof *kv.core);
    kv.far = mxd_take(a, g->kv.far, sizeof *kv.far);
    return kv;
}

/* ---- places ---- */

mxd_row_format mxd_kv_format(const mxd_engine *g, uint32_t layer) {
    return layer < g->model->config.layers ? g->kv.format : MXD_ROW_F16;
}

/* Return head `index` of a sequence, by layer, keys or values, and head: its rows of core, ring and far area. */
static uint8_t *rows_of(const mxd_engine *g, uint32_t slot, size_t index) {
    return g->kv.rows + (slot * head_count(g) + index) * g->kv.head_bytes;
}

/* Return the rows of a head by its names; also of the drafter's layer. */
static uint8_t *head_rows(const mxd_engine *g, uint32_t slot, uint32_t layer, int which, uint32_t head) {
    const mxd_config *c = &g->model->config;
    size_t index = (size_t)which * c->kv_heads + head;
    if (layer < c->layers) return rows_of(g, slot, (size_t)layer * 2 * c->kv_heads + index);
    return g->kv.drafter_rows + ((size_t)slot * 2 * c->kv_heads + index) * drafter_head_bytes(g);
}

/* Return the offset of a position's row in the ring, in the rows of a head. */
static size_t in_ring(const mxd_kv_layout *k, size_t position) {
    return (k->core + position % k->ring) * k->row_bytes;
}

/* Return the same for a row of the far area, by index. */
static size_t in_far(const mxd_kv_layout *k, size_t index) {
    return (k->core + k->ring) * k->row_bytes + index * k->far_row_bytes;
}

uint8_t *mxd_kv_place(const mxd_engine *g, const mxd_row *row, uint32_t layer, int which, uint32_t head) {
    const mxd_config *c = &g->model->config;
    uint8_t *rows = head_rows(g, row->slot, layer, which, head);
    if (layer == c->layers) return rows + row->position * mxd_row_bytes(MXD_ROW_F16, c->head_dim);
    return rows + in_ring(&g->kv, row->position);
}

/* Return where a side row keeps head `index`. */
static uint8_t *side_place(const mxd_engine *g, const mxd_row *row, size_t index) {
    return g->kv.side + ((row->side - 1) * head_count(g) + index) * g->kv.row_bytes;
}

uint8_t *mxd_row_kv(const mxd_engine *g, const mxd_row *row, uint32_t layer, int which, uint32_t head) {
    if (!row->side) return mxd_kv_place(g, row, layer, which, head);
    return side_place(g, row, ((size_t)layer * 2 + (size_t)which) * g->model->config.kv_heads + head);
}

void mxd_kv_store(const mxd_engine *g, uint32_t layer, float *x, uint8_t *place) {
    size_t d = g->model->config.head_dim;
    mxd_row_format format = mxd_kv_format(g, layer);
    if (format == MXD_ROW_F16) {
        g->kernels.to_f16(x, d, (uint16_t *)(void *)place);
        return;
    }
    g->kernels.hadamard(x, d);
    if (format == MXD_ROW_MXINT8) g->kernels.store_mxint8(x, d, place);
    else g->kernels.store_mxfp4(x, d, place);
}

void mxd_kv_accept(const mxd_engine *g, const mxd_row *row) {
    for (size_t i = 0; i < head_count(g); i++)
        memcpy(rows_of(g, row->slot, i) + in_ring(&g->kv, row->position), side_place(g, row, i), g->kv.row_bytes);
}

size_t mxd_kv_spans(const mxd_engine *g, uint32_t slot, uint32_t layer, uint32_t head, size_t position,
                    mxd_span spans[MXD_KV_MAX_SPANS]) {
    const mxd_kv_layout *k = &g->kv;
    const uint8_t *keys = head_rows(g, slot, layer, 0, head), *values = head_rows(g, slot, layer, 1, head);
    if (layer == g->model->config.layers) {
        spans[0] = (mxd_span){MXD_ROW_F16, keys, values, position + 1};
        return 1;
    }
    const mxd_kv_state *s = &g->seqs[slot].kv;
    size_t count = 0, recent = position + 1 - s->aged, until_end = k->ring - s->aged % k->ring;
    size_t older = recent < until_end ? recent : until_end;
#define SPAN(format, offset, rows) \
    if (rows) spans[count++] = (mxd_span){format, keys + (offset), values + (offset), rows}
    SPAN(k->format, 0, s->core_count);
    SPAN(MXD_ROW_NORMAL4, in_far(k, 0), s->far_count);
    SPAN(k->format, in_ring(k, s->aged), older);
    SPAN(k->format, in_ring(k, 0), recent - older);
#undef SPAN
    return count;
}

void mxd_kv_copy(mxd_seq *to, const mxd_seq *from) {
    const mxd_engine *g = from->engine;
    const mxd_kv_layout *k = &g->kv;
    const mxd_kv_state *s = &from->kv;
    size_t in_use = from->n_past < k->ring ? from->n_past : k->ring; /* of the ring */
    for (size_t i = 0; i < head_count(g); i++) {
        uint8_t *copy = rows_of(g, to->slot, i);
        const uint8_t *rows = rows_of(g, from->slot, i);
        memcpy(copy, rows, s->core_count * k->row_bytes);
        memcpy(copy + in_ring(k, 0), rows + in_ring(k, 0), in_use * k->row_bytes);
        memcpy(copy + in_far(k, 0), rows + in_far(k, 0), s->far_count * k->far_row_bytes);
    }
    for (uint32_t i = 0; g->drafter.in_use && i < 2 * g->model->config.kv_heads; i++)
        memcpy(head_rows(g, to->slot, g->model->config.layers, 0, i),
               head_rows(g, from->slot, g->model->config.layers, 0, i),
               (from->drafter.n_past - from->drafter.skipped) * mxd_row_bytes(MXD_ROW_F16, g->model->config.head_dim));
    to->kv.aged = s->aged;
    to->kv.core_count = s->core_count;
    to->kv.far_count = s->far_count;
    if (k->mode != MXD_KV_TIERED) return;
    memcpy(to->kv.core, s->core, s->core_count * sizeof *s->core);
    memcpy(to->kv.far, s->far, s->far_count * sizeof *s->far);
}

/* ---- tiers ---- */

size_t mxd_kv_truncate(mxd_seq *s, size_t n) {
    size_t kept = n < s->n_past ? n : s->n_past;
    if (kept < s->n_past && s->engine->kv.mode == MXD_KV_TIERED) kept = 0; /* what aged cannot come back */
    if (kept == 0) s->kv.aged = s->kv.core_count = s->kv.far_count = 0;
    return kept;
}

static float score(const mxd_seq *s, uint32_t position) {
    const mxd_model *m = s->engine->model;
    if (position < s->engine->kv.sinks) return INFINITY;
    return mxd_score(&m->schedule.memory,
                     (mxd_signals){.confidence = s->monitor.doubt[position],
                                   .attention = s->monitor.attended[position] * MXD_ATTENDED_UNIT,
                                   .history = mxd_tokenizer_is_special(&m->tokenizer, s->tokens[position]) ? 1 : 0});
}

/* Whether position a deserves the fast tier more than b. A fixed order without meaning decides equal scores. */
static bool outranks(const mxd_seq *s, uint32_t a, uint32_t b) {
    float ours = score(s, a), theirs = score(s, b);
    return ours != theirs ? ours > theirs : a * 2654435761u > b * 2654435761u;
}

/* Copy a row in all heads from one offset to another; demoted rows are quantized again for the far area. */
static void move_row(const mxd_seq *s, size_t from, size_t to, bool demote) {
    const mxd_engine *g = s->engine;
    size_t d = g->model->config.head_dim;
    float x[MXD_MAX_HEAD_DIM];
    for (size_t i = 0; i < head_count(g); i++) {
        uint8_t *rows = rows_of(g, s->slot, i);
        if (!demote) {
            memcpy(rows + to, rows + from, g->kv.row_bytes);
            continue;
        }
        mxd_load_mx_ref(g->kv.format, rows + from, d, x);
        g->kernels.store_normal4(x, d, rows + to);
    }
}

/* Append the row of a position, now at offset `from`, to the far area. */
static void demote(mxd_seq *s, uint32_t position, size_t from) {
    move_row(s, from, in_far(&s->engine->kv, s->kv.far_count), true);
    s->kv.far[s->kv.far_count++] = position;
}

static void place_in_core(mxd_seq *s, uint32_t position, uint32_t place) {
    move_row(s, in_ring(&s->engine->kv, position), place * s->engine->kv.row_bytes, false);
    s->kv.core[place] = position;
}

/* Take a token out of the window: into the core if there is room, or a token with a lower score to demote; else into
 * the far area. */
static void age(mxd_seq *s, uint32_t position, uint32_t quota) {
    mxd_kv_state *kv = &s->kv;
    if (kv->core_count < quota) {
        place_in_core(s, position, kv->core_count++);
        return;
    }
    uint32_t least = 0;
    for (uint32_t i = 1; i < kv->core_count; i++)
        if (outranks(s, kv->core[least], kv->core[i])) least = i;
    if (kv->core_count == 0 || !outranks(s, position, kv->core[least])) {
        demote(s, position, in_ring(&s->engine->kv, position));
        return;
    }
    demote(s, kv->core[least], least * s->engine->kv.row_bytes);
    place_in_core(s, position, least);
}

void mxd_kv_settle(mxd_seq *s) {
    while (mxd_kv_room(s) == 0) {
        uint32_t first = (uint32_t)s->kv.aged, quota = core_quota(&s->engine->kv, first + MXD_KV_BLOCK);
        for (uint32_t i = 0; i < MXD_KV_BLOCK; i++) age(s, first + i, quota);
        s->kv.aged += MXD_KV_BLOCK;
    }
}

size_t mxd_kv_room(const mxd_seq *s) {
    const mxd_kv_layout *k = &s->engine->kv;
    return k->mode == MXD_KV_TIERED ? s->kv.aged + k->recent + MXD_KV_BLOCK - s->n_past : SIZE_MAX;
}

/* ---- what it costs ---- */

/* Return the bytes of keys and values that a head of a sequence has cached. */
static uint64_t head_bytes(const mxd_seq *s) {
    const mxd_kv_layout *k = &s->engine->kv;
    return 2 * ((s->n_past - s->kv.far_count) * k->row_bytes + s->kv.far_count * k->far_row_bytes);
}

uint64_t mxd_kv_bytes(const mxd_seq *s) {
    const mxd_config *c = &s->engine->model->config;
    return head_bytes(s) * c->layers * c->kv_heads;
}

uint32_t mxd_kv_any_position(const mxd_engine *g, uint32_t position, uint32_t rows) {
    uint32_t first = (uint32_t)g->seqs[0].kv.aged, last = first + g->kv.ring - rows;
    return position < first ? first : position > last ? last : position;
}

void mxd_seq_get_kv(const mxd_seq *s, mxd_kv_use *out) {
    const mxd_kv_layout *k = &s->engine->kv;
    *out = (mxd_kv_use){.mode = k->mode,
                        .recent = (uint32_t)(s->n_past - s->kv.aged),
                        .core = s->kv.core_count,
                        .far = s->kv.far_count,
                        .bytes = mxd_kv_bytes(s)};
    double values = 2.0 * (double)s->engine->model->config.head_dim * (double)s->n_past;
    out->bits_per_value = values > 0 ? 8.0 * (double)head_bytes(s) / values : 0;
}

size_t mxd_seq_tiers(const mxd_seq *s, uint8_t *tiers, size_t cap) {
    for (size_t i = 0; i < s->n_past && i < cap; i++) tiers[i] = i < s->kv.aged ? MXD_TIER_FAR : MXD_TIER_RECENT;
    for (uint32_t i = 0; i < s->kv.core_count; i++)
        if (s->kv.core[i] < cap) tiers[s->kv.core[i]] = MXD_TIER_CORE;
    return s->n_past;
}

#ifdef MXD_DEBUG
void mxd_kv_poison(const mxd_seq *s, size_t rows) {
    const mxd_engine *g = s->engine;
    if (rows > mxd_kv_room(s)) rows = mxd_kv_room(s);
    for (size_t position = s->n_past; position < s->n_past + rows && position < g->plan.ctx; position++)
        for (size_t i = 0; i < head_count(g); i++) {
            float nan[MXD_MAX_HEAD_DIM];
            for (uint32_t k = 0; k < g->model->config.head_dim; k++) nan[k] = NAN;
            mxd_kv_store(g, 0, nan, rows_of(g, s->slot, i) + in_ring(&g->kv, position));
        }
}
#endif
