/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: options, memory plan, one arena, thread pool, kernels. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "annotate.h"
#include "costs.h"
#include "cpu.h"
#include "machine.h"

enum { DEFAULT_CTX = 2048 };

void mxd_options_default(mxd_options *out) {
    *out = (mxd_options){.max_seqs = 1, .max_rows = 64, .precision = MXD_PRECISION_AUTO, .core_fraction = -1};
}

/* What is held back (less than a stop string and a character) and one token; the longest text a step can release. */
enum {
    HELD_BYTES = MXD_MAX_STOP_BYTES + 4 + MXD_MAX_TOKEN_BYTES,
    TEXT_BYTES = MXD_MAX_STOP_BYTES + 4 + MXD_MAX_STEP_TOKENS * MXD_MAX_TOKEN_BYTES
};

/* ---- memory ---- */

static mxd_input take_input(mxd_arena *a, size_t rows, size_t widest) {
    mxd_input in = {.rows = mxd_take(a, rows * widest, sizeof(float))};
    in.act.q = mxd_take(a, rows * widest, sizeof(int8_t));
    in.act.s = mxd_take(a, rows * widest / MXD_BLOCK, sizeof(float));
    in.act.bias = mxd_take(a, rows * widest / MXD_BLOCK, 2 * sizeof(int16_t));
    return in;
}

/* Return the width of the widest input of a matrix product. */
static size_t widest_input(const mxd_engine *g) {
    const mxd_config *c = &g->model->config;
    size_t hidden = c->hidden, features = g->model->drafter.features;
    const size_t widths[] = {c->ffn, hidden, (size_t)c->heads * c->head_dim, g->drafter.in_use ? 2 * hidden : 0,
                             g->drafter.in_use ? features * hidden : 0};
    size_t widest = 0;
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (widths[i] > widest) widest = widths[i];
    return widest;
}

/* Take what only one thread uses. */
static void take_of_thread(mxd_engine *g, mxd_arena *a, uint32_t thread, size_t widest) {
    size_t rows = g->max_rows;
    mxd_input input = take_input(a, MXD_FEW_ROWS, widest);
    mxd_head_part part = {.logits = mxd_take(a, rows * MXD_HEAD_COLUMNS, sizeof(float))};
    part.best = mxd_take(a, rows, sizeof *part.best);
    part.second = mxd_take(a, rows, sizeof *part.second);
    part.winner = mxd_take(a, rows, sizeof *part.winner);
    if (!a->base) return;
    g->own[thread] = input;
    g->head_parts[thread] = part;
}

/* Take the rows of a pass and the workspaces for them. */
static void take_pass(mxd_engine *g, mxd_arena *a) {
    const mxd_config *c = &g->model->config;
    size_t rows = g->max_rows, q_dim = (size_t)c->heads * c->head_dim, group = c->heads / c->kv_heads;
    size_t qkv_width = mxd_pad_tile(q_dim) + 2 * mxd_pad_tile((size_t)c->kv_heads * c->head_dim);
    size_t widest = widest_input(g);
    g->rows = mxd_take(a, rows, sizeof *g->rows);
    g->outcomes = mxd_take(a, rows, sizeof *g->outcomes);
    g->x = mxd_take(a, rows * c->hidden, sizeof(float));
    g->qkv = mxd_take(a, rows * qkv_width, sizeof(float));
    g->mixed = mxd_take(a, rows * q_dim, sizeof(float));
    g->projected = mxd_take(a, rows * c->hidden, sizeof(float));
    g->gate_up = mxd_take(a, rows * 2 * c->ffn, sizeof(float));
    g->scores = mxd_take(a, g->plan.threads * group * g->plan.ctx, sizeof(float));
    g->queries = g->kv.format == MXD_ROW_F16 ? NULL : mxd_take(a, g->plan.threads, sizeof *g->queries);
    for (uint32_t i = 0; i < g->plan.threads && g->kv.format != MXD_ROW_F16; i++) {
        mxd_act act = take_input(a, group, c->head_dim).act;
        if (a->base) g->queries[i] = act;
    }
    g->logits = mxd_take(a, g->logit_rows * mxd_pad_tile(c->vocab), sizeof(float));
    g->shared = take_input(a, rows, widest);
    g->own = mxd_take(a, g->plan.threads, sizeof *g->own);
    g->head_parts = mxd_take(a, g->plan.threads, sizeof *g->head_parts);
    for (uint32_t i = 0; i < g->plan.threads; i++) take_of_thread(g, a, i, widest);
    g->scratch.weights = mxd_take(a, c->vocab, sizeof(float));
    g->scratch.heap = mxd_take(a, c->vocab, sizeof(uint32_t));
    g->scratch.seen = mxd_take(a, c->vocab / 8 + 1, 1);
    g->scratch.raw = mxd_take(a, c->vocab, sizeof(float));
}

static void take_seqs(mxd_engine *g, mxd_arena *a) {
    g->seqs = mxd_take(a, g->max_seqs, sizeof *g->seqs);
    for (uint32_t i = 0; i < g->max_seqs; i++) {
        mxd_seq s = {.engine = g, .slot = i, .tokens = mxd_take(a, g->plan.ctx, sizeof *s.tokens)};
        s.held = mxd_take(a, HELD_BYTES, 1);
        s.text = mxd_take(a, TEXT_BYTES, 1);
        s.kv = mxd_kv_take_seq(g, a);
        s.monitor = mxd_monitor_take_seq(g, a);
        s.precision = mxd_precision_take_seq(g, a);
        s.drafter = mxd_draft_model_take_seq(g, a);
        if (a->base) g->seqs[i] = s;
    }
}

/* Lay out everything that the engine allocates, from `base` on or only in numbers (NULL), and fill the byte counts of
 * the plan. Returns the bytes of the arena. */
static size_t layout(mxd_engine *g, char *base) {
    mxd_arena a = {.base = base};
    mxd_kv_take(g, &a);
    g->plan.kv_cache = a.used;
    take_pass(g, &a);
    mxd_monitor_take(g, &a);
    mxd_draft_model_take(g, &a);
    g->plan.activations = a.used - g->plan.kv_cache;
    take_seqs(g, &a);
    g->plan.sequences = a.used - g->plan.kv_cache - g->plan.activations + sizeof *g + mxd_tuner_bytes();
    g->plan.total = g->plan.weights + g->plan.kv_cache + g->plan.activations + g->plan.sequences;
    return a.used;
}

/* Return the largest context whose plan fits what is available, 0 if none: the plan grows with the context. */
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

/* ---- options ---- */

/* Resolve precision, and which rows get it. What is generated depends on it, so it depends on no measured speed. */
static mxd_status resolve_precision(mxd_engine *g, const mxd_options *o, mxd_error *err) {
    const mxd_model *m = g->model;
    if (o->precision > MXD_PRECISION_FULL)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "precision %u is unknown", o->precision);
    if (!(o->core_fraction <= 1))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "core_fraction %g is not in 0..1", (double)o->core_fraction);
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

static mxd_status check_options(const mxd_model *m, const mxd_options *o, mxd_error *err) {
    const struct {
        const char *name;
        uint32_t value, least, most;
    } ranges[] = {
        {"max_seqs", o->max_seqs, 1, MXD_MAX_SEQS},    {"max_rows", o->max_rows, 1, MXD_MAX_ROWS},
        {"threads", o->threads, 0, MXD_MAX_THREADS}, /* 0: the default, here and below */
        {"draft_max", o->draft_max, 0, MXD_MAX_DRAFT}, {"catch_up", o->catch_up, 0, MXD_MAX_CATCH_UP},
    };
    if (o->ctx > m->config.max_positions || o->ctx == 1)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "context %u is not in 2..%u, the model's maximum", o->ctx,
                        m->config.max_positions);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "%s %u is not in 1..%u", ranges[i].name, ranges[i].value,
                            ranges[i].most);
    if (o->draft > MXD_DRAFT_MODEL) return mxd_fail(err, MXD_ERR_ARGUMENT, "draft %u is unknown", o->draft);
    if (o->draft_min > (o->draft_max ? o->draft_max : MXD_DEFAULT_DRAFT))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "draft_min %u is more than draft_max", o->draft_min);
    if (o->draft == MXD_DRAFT_MODEL && !m->drafter.features)
        return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no trained drafter", m->path);
    return MXD_OK;
}

/* Check and resolve the options into g (model set) and its plan. */
static mxd_status resolve(mxd_engine *g, const mxd_options *o, mxd_error *err) {
    const mxd_model *m = g->model;
    mxd_status status = mxd_check_reserved("mxd_options", o->reserved, sizeof o->reserved / sizeof *o->reserved, err);
    if (!status) status = check_options(m, o, err);
    if (!status) status = resolve_precision(g, o, err);
    if (status) return status;
    g->max_seqs = o->max_seqs;
    g->max_rows = o->max_rows > o->max_seqs ? o->max_rows : o->max_seqs;
    uint32_t most_rows = o->max_seqs * (1 + MXD_MAX_DRAFT);
    g->logit_rows = most_rows < g->max_rows ? most_rows : g->max_rows;
    g->draft = (mxd_draft)o->draft;
    mxd_draft_model_resolve(g);
    g->draft_max = o->draft_max ? o->draft_max : MXD_DEFAULT_DRAFT;
    g->draft_min = o->draft_min;
    uint32_t longest = m->config.max_positions, default_ctx = longest < DEFAULT_CTX ? longest : DEFAULT_CTX;
    g->plan = (mxd_plan){
        .weights = m->shared_bytes + m->plane_bytes[0] + (g->precision ? m->plane_bytes[1] : 0) +
                   (g->drafter.in_use ? m->drafter.bytes : 0),
        .available = mxd_memory_available(m->map_len),
        .ctx = o->ctx ? o->ctx : default_ctx,
        .threads = o->threads ? o->threads : mxd_default_threads(),
        .precision = g->mixes       ? MXD_PRECISION_AUTO
                     : g->precision ? MXD_PRECISION_FULL
                                    : MXD_PRECISION_BASE,
    };
    if ((status = mxd_kv_resolve(g, o, err))) return status;
    mxd_monitor_resolve(g);
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

/* ---- opening ---- */

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
    g->process = getpid();
    mxd_status status = resolve(g, options, err);
    if (!status) status = check_fits(&g->plan, err);
    if (!status) status = mxd_cpu_bind(&g->kernels, &g->kernel_names, err);
    if (!status) {
        size_t bytes = layout(g, NULL);
        void *arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        g->arena = arena == MAP_FAILED ? NULL : arena;
        if (g->arena) layout(g, g->arena);
        else status = mxd_fail(err, MXD_ERR_MEMORY, "cannot reserve %zu bytes", bytes);
    }
    if (!status && g->drafter.in_use) mxd_draft_model_init(g);
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
    if (g->process == getpid()) mxd_pool_close(&g->pool); /* after a fork, its threads are the parent's */
    mxd_tuner_leave(&g->tuner);
    if (g->arena) mxd_arena_unmap(g->arena, layout(g, NULL));
    free(g);
    *engine = NULL;
}

const mxd_plan *mxd_engine_plan(const mxd_engine *engine) {
    return &engine->plan;
}

mxd_status mxd_engine_idle(const mxd_engine *g, mxd_error *err) {
    if (g->process != getpid())
        return mxd_fail(err, MXD_ERR_ARGUMENT, "the engine was opened before a fork(): open one in this process");
    if (atomic_load(&g->busy))
        return mxd_fail(err, MXD_ERR_ARGUMENT,
                        "the engine is in a call already: one thread at a time, and none from its callbacks");
    return MXD_OK;
}

mxd_status mxd_engine_enter(mxd_engine *g, mxd_error *err) {
    mxd_status status = mxd_engine_idle(g, err);
    if (!status && atomic_exchange(&g->busy, true)) status = mxd_engine_idle(g, err); /* another thread was faster */
    return status;
}

void mxd_engine_leave(mxd_engine *g) {
    atomic_store(&g->busy, false);
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
