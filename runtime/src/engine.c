/* The engine: memory plan, one arena, thread pool, kernels. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "annotate.h"
#include "costs.h"
#include "cpu.h"
#include "draft_model.h"
#include "precision.h"

enum { ALIGN = 64, DEFAULT_CTX = 2048, MAX_ROWS = 512, MAX_THREADS = 64 };

void mxd_options_default(mxd_options *out) {
    *out = (mxd_options){.max_seqs = 1, .max_rows = 64, .precision = MXD_PRECISION_AUTO,
                         .core_fraction = -1};
}

/* What is held back (less than a stop string and a character) and one token; the longest text a step can release. */
enum {
    HELD_BYTES = MXD_MAX_STOP_BYTES + 4 + MXD_MAX_TOKEN_BYTES,
    TEXT_BYTES = MXD_MAX_STOP_BYTES + 4 + (MXD_MAX_DRAFT + 1) * MXD_MAX_TOKEN_BYTES
};

/* Hands out aligned pieces of the arena; with base NULL it only counts. */
typedef struct bump {
    char *base;
    size_t used;
} bump;

static void *take(bump *b, size_t count, size_t size) {
    void *p = b->base ? b->base + b->used : NULL;
    b->used += (count * size + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

static mxd_input take_input(bump *b, size_t rows, size_t widest, int precision) {
    mxd_input in = {.rows = take(b, rows * widest, sizeof(float))};
    in.act.q = take(b, rows * widest, sizeof(int8_t));
    in.act.lo = precision ? take(b, rows * widest, sizeof(int8_t)) : NULL; /* full: 16-bit activations */
    in.act.s = take(b, rows * widest / MXD_BLOCK, sizeof(float));
    in.act.bias = take(b, rows * widest / MXD_BLOCK * (precision ? 2 : 1), 2 * sizeof(int16_t));
    return in;
}

/* Lay out everything the engine allocates; the one place where sizes are decided. Fills the plan's byte counts. */
static size_t layout(mxd_engine *g, char *base) {
    const mxd_config *c = &g->model->config;
    bump b = {.base = base};
    size_t rows = g->max_rows, ctx = g->plan.ctx, q_dim = (size_t)c->heads * c->head_dim;
    size_t qkv_width = mxd_pad_tile(q_dim) + 2 * mxd_pad_tile((size_t)c->kv_heads * c->head_dim);
    size_t widest = c->ffn > c->hidden ? c->ffn : c->hidden;
    if (q_dim > widest) widest = q_dim;
    size_t head_tile = c->hidden / MXD_BLOCK * MXD_MXINT8_BLOCK_BYTES;
    if (g->with_drafter && widest < 2 * (size_t)c->hidden) widest = 2 * (size_t)c->hidden;
    if (g->with_drafter && widest < g->model->drafter.features * (size_t)c->hidden)
        widest = g->model->drafter.features * (size_t)c->hidden;

    mxd_kv_fit(g);
    g->kv_rows = take(&b, mxd_kv_arena(g), 1);
    if (g->with_drafter)
        g->draft_kv = take(&b, (size_t)g->max_seqs * 2 * c->kv_heads * ctx * c->head_dim, sizeof *g->draft_kv);
    g->side_kv = take(&b, (size_t)g->side_rows * c->layers * 2 * c->kv_heads, g->kv.row_bytes);
    g->plan.kv_cache = b.used;

    g->rows = take(&b, rows, sizeof *g->rows);
    g->outcomes = take(&b, rows, sizeof *g->outcomes);
    g->x = take(&b, rows * c->hidden, sizeof(float));
    g->qkv = take(&b, rows * qkv_width, sizeof(float));
    g->mixed = take(&b, rows * q_dim, sizeof(float));
    g->projected = take(&b, rows * c->hidden, sizeof(float));
    g->gate_up = take(&b, rows * 2 * c->ffn, sizeof(float));
    g->scores = take(&b, g->plan.threads * (c->heads / c->kv_heads) * ctx, sizeof(float));
    if (g->kv.format != MXD_ROW_F16) {
        g->queries = take(&b, g->plan.threads, sizeof *g->queries);
        for (uint32_t i = 0; i < g->plan.threads; i++) {
            mxd_act act = take_input(&b, c->heads / c->kv_heads, c->head_dim, 0).act;
            if (base) g->queries[i] = act;
        }
    }
    if (g->monitors) g->monitored = take(&b, rows * c->kv_heads * ctx, sizeof(float));
    g->logits = take(&b, g->logit_rows * mxd_pad_tile(c->vocab), sizeof(float));
    g->shared = take_input(&b, rows, widest, g->precision);
    g->own = take(&b, g->plan.threads, sizeof *g->own);
    g->head_parts = take(&b, g->plan.threads, sizeof *g->head_parts);
    for (uint32_t i = 0; i < g->plan.threads; i++) {
        mxd_input input = take_input(&b, MXD_FEW_ROWS, widest, g->precision);
        mxd_head_part part = {.logits = take(&b, rows * MXD_HEAD_COLUMNS, sizeof(float))};
        part.best = take(&b, rows, sizeof *part.best);
        part.second = take(&b, rows, sizeof *part.second);
        part.winner = take(&b, rows, sizeof *part.winner);
        if (base) g->own[i] = input, g->head_parts[i] = part;
    }
    g->scratch.weights = take(&b, c->vocab, sizeof(float));
    g->scratch.heap = take(&b, c->vocab, sizeof(uint32_t));
    g->scratch.seen = take(&b, c->vocab / 8 + 1, 1);
    if (g->with_drafter) {
        const mxd_draft_model *d = &g->model->drafter;
        g->features = take(&b, rows * d->features * c->hidden, sizeof(float));
        g->step_rows = take(&b, rows, sizeof *g->step_rows);
        g->feature_row = take(&b, rows, sizeof *g->feature_row);
        g->states = take(&b, rows * c->hidden, sizeof(float));
        g->draft_head = take(&b, d->vocab / MXD_TILE_ROWS * head_tile, 1);
        g->draft_logits = take(&b, g->max_seqs * mxd_draft_logits(g), sizeof(float));
    }
    g->plan.activations = b.used - g->plan.kv_cache;

    g->seqs = take(&b, g->max_seqs, sizeof *g->seqs);
    for (uint32_t i = 0; i < g->max_seqs; i++) {
        uint32_t *tokens = take(&b, ctx, sizeof *tokens);
        char *held = take(&b, HELD_BYTES, 1), *text = take(&b, TEXT_BYTES, 1);
        mxd_seq s = {.tokens = tokens, .held = held, .text = text};
        if (g->kv.mode == MXD_KV_TIERED) {
            s.kv.core = take(&b, g->kv.core, sizeof *s.kv.core);
            s.kv.far = take(&b, g->kv.far, sizeof *s.kv.far);
            s.kv.attended = take(&b, ctx, sizeof(float));
            s.kv.doubt = take(&b, ctx, sizeof(float));
        }
        if (g->with_drafter) {
            s.draft_state = take(&b, c->hidden, sizeof(float));
            s.draft_ids = take(&b, mxd_draft_logits(g), sizeof *s.draft_ids);
            s.context_head = take(&b, MXD_CONTEXT_ROWS / MXD_TILE_ROWS * head_tile, 1);
        }
        if (base) g->seqs[i] = s;
    }
    g->plan.sequences = b.used - g->plan.kv_cache - g->plan.activations + sizeof *g + mxd_tuner_bytes();
    g->plan.total = g->plan.weights + g->plan.kv_cache + g->plan.activations + g->plan.sequences;
    return b.used;
}

/* Largest context whose plan fits what is available, 0 if none: the plan grows with the context. */
static uint32_t largest_context(mxd_engine g) {
    uint32_t fits = 0, too_big = g.model->config.max_positions + 1;
    while (too_big - fits > 1) {
        g.plan.ctx = fits + (too_big - fits) / 2;
        layout(&g, NULL);
        if (g.plan.total <= g.plan.available) fits = g.plan.ctx;
        else too_big = g.plan.ctx;
    }
    return fits;
}

/* Precision, and which rows get it. What is generated depends on this, so no measured speed may. */
static mxd_status resolve_precision(mxd_engine *g, const mxd_options *o, mxd_error *err) {
    const mxd_model *m = g->model;
    if (o->precision > MXD_PRECISION_FULL)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "precision %u is unknown", o->precision);
    if (!(o->core_fraction <= 1))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "core_fraction %g is not in 0..1", (double)o->core_fraction);
    if (o->catch_up > MXD_MAX_CATCH_UP)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "catch_up %u is not in 1..%d", o->catch_up, MXD_MAX_CATCH_UP);
    if (o->precision != MXD_PRECISION_AUTO && (o->core_fraction >= 0 || o->catch_up))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "core_fraction and catch_up are for precision auto");
    if ((o->precision == MXD_PRECISION_FULL || o->core_fraction > 0) && !m->has_residual)
        return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no residual plane: full precision is not available", m->path);
    g->core_fraction = o->core_fraction >= 0 ? o->core_fraction : m->schedule.core_fraction;
    g->catch_up = o->catch_up ? o->catch_up : m->schedule.catch_up;
    g->precision = o->precision == MXD_PRECISION_AUTO ? (int)m->has_residual : o->precision == MXD_PRECISION_FULL;
    g->mixes = o->precision == MXD_PRECISION_AUTO && m->has_residual && g->core_fraction < 1 &&
               mxd_mixed_bytes(g, (double)g->core_fraction) < (double)mxd_weight_bytes(g, 1);
    return MXD_OK;
}

/* Check and resolve the options into g (model set) and its plan. */
static mxd_status resolve(mxd_engine *g, const mxd_options *o, mxd_error *err) {
    const mxd_model *m = g->model;
    const mxd_config *c = &m->config;
    if (o->ctx > c->max_positions || o->ctx == 1)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "context %u is not in 2..%u, the model's maximum", o->ctx,
                        c->max_positions);
    if (o->max_seqs < 1 || o->max_seqs > MXD_MAX_SEQS)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "max_seqs %u is not in 1..%d", o->max_seqs, MXD_MAX_SEQS);
    if (o->max_rows < 1 || o->max_rows > MAX_ROWS)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "max_rows %u is not in 1..%d", o->max_rows, MAX_ROWS);
    if (o->threads > MAX_THREADS)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "threads %u is not in 1..%d", o->threads, MAX_THREADS);
    if (o->draft > MXD_DRAFT_MODEL) return mxd_fail(err, MXD_ERR_ARGUMENT, "draft %u is unknown", o->draft);
    if (o->draft_max > MXD_MAX_DRAFT)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "draft_max %u is not in 1..%d", o->draft_max, MXD_MAX_DRAFT);
    if (o->draft_min > (o->draft_max ? o->draft_max : MXD_DEFAULT_DRAFT))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "draft_min %u is more than draft_max", o->draft_min);
    if (o->draft == MXD_DRAFT_MODEL && !m->drafter.features)
        return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no trained drafter", m->path);

    mxd_status status = resolve_precision(g, o, err);
    if (status) return status;
    g->max_seqs = o->max_seqs;
    g->max_rows = o->max_rows > o->max_seqs ? o->max_rows : o->max_seqs;
    uint32_t most_rows = o->max_seqs * (1 + MXD_MAX_DRAFT);
    g->logit_rows = most_rows < g->max_rows ? most_rows : g->max_rows;
    g->draft = (mxd_draft)o->draft;
    g->with_drafter = m->drafter.features && (g->draft == MXD_DRAFT_AUTO || g->draft == MXD_DRAFT_MODEL);
    g->side_rows = g->draft == MXD_DRAFT_OFF ? 0 : g->logit_rows;
    g->draft_max = o->draft_max ? o->draft_max : MXD_DEFAULT_DRAFT;
    g->draft_min = o->draft_min;
    uint32_t default_ctx = c->max_positions < DEFAULT_CTX ? c->max_positions : DEFAULT_CTX;
    g->plan = (mxd_plan){
        .weights = m->shared_bytes + m->plane_bytes[0] + (g->precision ? m->plane_bytes[1] : 0) +
                   (g->with_drafter ? m->drafter.bytes : 0),
        .available = mxd_memory_available(m->map_len),
        .ctx = o->ctx ? o->ctx : default_ctx,
        .threads = o->threads ? o->threads : mxd_default_threads(),
        .precision = g->mixes ? MXD_PRECISION_AUTO : g->precision ? MXD_PRECISION_FULL : MXD_PRECISION_BASE,
    };
    if ((status = mxd_kv_resolve(g, o, err))) return status;
    g->monitors = g->mixes || g->kv.mode == MXD_KV_TIERED;
    g->plan.kv = g->kv.mode;
    g->plan.largest_ctx = largest_context(*g);
    layout(g, NULL);
    return MXD_OK;
}

mxd_status mxd_plan_memory(const mxd_model *model, const mxd_options *options, mxd_plan *out, mxd_error *err) {
    mxd_engine g = {.model = model};
    mxd_status status = resolve(&g, options, err);
    if (!status) *out = g.plan;
    return status;
}

static mxd_status check_fits(const mxd_plan *p, mxd_error *err) {
    if (p->total <= p->available) return MXD_OK;
    double mib = 1024.0 * 1024.0;
    if (p->largest_ctx < 2)
        return mxd_fail(err, MXD_ERR_MEMORY, "needs %.1f MiB, %.1f MiB are available: the model does not fit",
                        (double)p->total / mib, (double)p->available / mib);
    return mxd_fail(err, MXD_ERR_MEMORY,
                    "context %u needs %.1f MiB, %.1f MiB are available: the largest that fits is %u", p->ctx,
                    (double)p->total / mib, (double)p->available / mib, p->largest_ctx);
}

static mxd_status open_tuner(mxd_engine *g, mxd_error *err) {
    mxd_policy first;
    mxd_policy_init(&first, &g->model->schedule.compute);
    mxd_tuner *tuner = mxd_tuner_open(&first);
    if (!tuner) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for a tuner");
    mxd_tuner_join(tuner, &g->tuner);
    return MXD_OK;
}

mxd_status mxd_engine_open(const mxd_model *model, const mxd_options *options, mxd_engine **out, mxd_error *err) {
    *out = NULL;
    MXD_ANNOTATE_SETUP();
    mxd_engine *g = calloc(1, sizeof *g);
    if (!g) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for an engine");
    g->model = model;
    mxd_status status = resolve(g, options, err);
    if (!status) status = check_fits(&g->plan, err);
    if (!status) status = mxd_cpu_bind(&g->kernels, &g->kernel_names, err);
    if (!status) {
        size_t bytes = layout(g, NULL);
        char *arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (arena == MAP_FAILED) status = mxd_fail(err, MXD_ERR_MEMORY, "cannot reserve %zu bytes", bytes);
        else g->arena = arena, layout(g, arena);
    }
    if (!status && g->features) mxd_draft_model_init(g);
    if (!status) status = open_tuner(g, err);
    if (!status) status = mxd_pool_open(g->plan.threads, &g->pool, err);
    if (status) {
        mxd_engine_close(&g);
        return status;
    }
    *out = g;
    return MXD_OK;
}

void mxd_engine_close(mxd_engine **engine) {
    mxd_engine *g = *engine;
    if (!g) return;
    mxd_pool_close(&g->pool);
    mxd_tuner_leave(&g->tuner);
    if (g->arena) munmap(g->arena, layout(g, NULL));
    free(g);
    *engine = NULL;
}

const mxd_plan *mxd_engine_plan(const mxd_engine *engine) {
    return &engine->plan;
}

mxd_policy mxd_engine_policy(const mxd_engine *g) {
    if (g->policy) return *g->policy;
    mxd_policy policy = *mxd_tuner_begin(&g->tuner);
    mxd_tuner_end(&g->tuner);
    return policy;
}

mxd_status mxd_engine_share_tuner(mxd_engine *g, const mxd_engine *other, mxd_error *err) {
    char mine[1024], theirs[1024];
    for (uint32_t i = 0; i < g->max_seqs; i++)
        if (g->seqs[i].in_use) return mxd_fail(err, MXD_ERR_ARGUMENT, "a tuner is shared before a sequence opens");
    mxd_costs_describe(g, mine, sizeof mine);
    mxd_costs_describe(other, theirs, sizeof theirs);
    if (strcmp(mine, theirs) || memcmp(&g->model->schedule, &other->model->schedule, sizeof g->model->schedule))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "engines of different kinds cannot share a tuner: %s; %s", mine, theirs);
    mxd_reader joined;
    if (!mxd_tuner_join(other->tuner.tuner, &joined))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%d engines share this tuner already", MXD_TUNER_READERS);
    mxd_tuner_leave(&g->tuner);
    g->tuner = joined;
    return MXD_OK;
}
