/* SPDX-License-Identifier: Apache-2.0 */
#include "precision.h"

#include <string.h>

#include "annotate.h"
#include "sequence.h"

/* Weight of the newest look in the share of looks that changed the choice. */
static const float FLIP_SHARE = 0.125f;

/* How far a row moves the threshold, in log-odds: up if it is core, down if it isn't. So the fraction asked for is kept
 * on texts that are easier or harder than those of the schedule (quantile tracking: Robbins, Monro 1951). */
static const float THRESHOLD_STEP = 0.1f;

mxd_precision_state mxd_precision_take_seq(const mxd_engine *g, mxd_arena *a) {
    mxd_precision_state p = {0};
    if (g->mixes) p.before = mxd_take(a, g->plan.ctx, sizeof *p.before);
    return p;
}

void mxd_precision_open(mxd_seq *s, bool mixes) {
    const mxd_engine *g = s->engine;
    mxd_core_state first = {.threshold = mxd_schedule_threshold(&g->model->schedule, g->core_fraction)};
    s->precision = (mxd_precision_state){.mixes = mixes, .core = first, .before = s->precision.before};
}

void mxd_precision_copy(mxd_seq *to, const mxd_seq *from) {
    mxd_core_state *before = to->precision.before;
    to->precision = from->precision;
    to->precision.core_rule = NULL;
    to->precision.before = before;
    if (before) memcpy(before, from->precision.before, from->precision.known * sizeof *before);
}

/* Keep the state as the one before the row at n_past, and before all rows that nothing was decided about. */
static void remember(mxd_seq *s) {
    mxd_precision_state *p = &s->precision;
    for (; p->known <= s->n_past; p->known++) p->before[p->known] = p->core;
}

/* Go back to the state before the row at `position` was decided, if it was. */
static void undecide(mxd_seq *s, size_t position) {
    mxd_precision_state *p = &s->precision;
    if (position < p->known) {
        p->core = p->before[position];
        p->known = position;
    }
    p->awaits_full = p->catching_up = false;
    p->waited = 0;
}

void mxd_precision_prompt(mxd_seq *s) {
    if (s->precision.awaits_full) undecide(s, s->n_past);
    s->precision.catching_up = false;
}

size_t mxd_precision_truncate(mxd_seq *s, size_t n, size_t processed) {
    mxd_precision_state *p = &s->precision;
    if (p->full_done > processed) p->full_done = processed;
    undecide(s, n > 0 ? n - 1 : 0);
    return p->mixes ? p->full_done : processed;
}

/* Return the number of processed positions that are not at full precision yet. */
static size_t pending(const mxd_seq *s) {
    return s->n_past - s->precision.full_done;
}

int mxd_first_pass(const mxd_engine *g) {
    return g->mixes ? 0 : g->precision;
}

bool mxd_runs_full(const mxd_seq *s) {
    const mxd_precision_state *p = &s->precision;
    if (!p->mixes) return s->engine->precision;
    return p->awaits_full || p->catching_up || s->n_past < s->prompt_end || pending(s) + 1 >= s->engine->catch_up;
}

size_t mxd_base_room(const mxd_seq *s) {
    return s->precision.mixes ? s->engine->catch_up - 1 - pending(s) : SIZE_MAX;
}

bool mxd_catches_up(mxd_seq *const *seqs, size_t n) {
    enum { BATCH = 8, PATIENCE = 4 }; /* sequences that share a pass; steps that one waits for others */
    size_t waiting = 0, others = 0;
    uint32_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!mxd_seq_has_work(s)) continue;
        if (!mxd_runs_full(s)) {
            others++;
            continue;
        }
        if (s->n_past < s->prompt_end) return true; /* prompts never wait */
        waiting++;
        if (++s->precision.waited > longest) longest = s->precision.waited;
    }
    return waiting > 0 && (others == 0 || waiting >= BATCH || longest >= PATIENCE);
}

void mxd_precision_processed(mxd_seq *s, size_t n) {
    if (!s->precision.mixes || !s->engine->pass_precision) return;
    s->precision.full_done = n;
    s->precision.catching_up = n <= s->n_past;
}

static mxd_token_record describe(const mxd_seq *s, const mxd_outcome *outcome) {
    const mxd_engine *g = s->engine;
    const mxd_precision_state *p = &s->precision;
    mxd_signals signals = {.confidence = mxd_exp_ref(-outcome->margin), .history = p->core.flip_rate};
    if (p->mixes && !g->pass_precision) signals.attention = mxd_attended(g, outcome->row, p->full_done, s->n_past);
    return (mxd_token_record){.position = (uint32_t)s->n_past + 1,
                              .token = outcome->winner,
                              .base_token = g->pass_precision ? UINT32_MAX : outcome->winner,
                              .margin = outcome->margin,
                              .confidence = signals.confidence,
                              .attention = signals.attention,
                              .history = signals.history,
                              .score = mxd_score(&g->model->schedule.precision, signals),
                              .threshold = p->mixes ? p->core.threshold : 0,
                              .look = g->pass_precision ? MXD_LOOK_ALL : MXD_LOOK_NONE};
}

/* Decide whether the row, computed at base precision, is core; it then waits for full precision. */
static bool turns_core(mxd_seq *s, const mxd_token_record *row) {
    mxd_precision_state *p = &s->precision;
    mxd_token_record seen = *row;
    seen.look = row->score > row->threshold ? MXD_LOOK_CORE : MXD_LOOK_NONE;
    bool core = p->core_rule ? p->core_rule(p->core_rule_arg, &seen) != 0 : seen.look == MXD_LOOK_CORE;
    remember(s);
    p->core.threshold = p->core.threshold + THRESHOLD_STEP * ((float)core - s->engine->core_fraction);
    if (!core) return false;
    MXD_ANNOTATE_MARK("core");
    p->awaits_full = true;
    p->awaiting = seen;
    p->awaiting.look = MXD_LOOK_CORE;
    return true;
}

/* Return the record of a row that waited, or was due, from what full precision makes of it. */
static mxd_token_record resolve(mxd_seq *s, const mxd_token_record *full) {
    mxd_precision_state *p = &s->precision;
    mxd_token_record row = *full;
    row.look = s->n_past < s->prompt_end ? MXD_LOOK_ALL : MXD_LOOK_DUE;
    if (p->awaits_full) {
        row = p->awaiting;
        row.token = full->token;
        float flipped = row.token != row.base_token;
        p->core.flip_rate = p->core.flip_rate + FLIP_SHARE * (flipped - p->core.flip_rate);
    }
    p->awaits_full = false;
    p->waited = 0;
    return row;
}

bool mxd_inspect(mxd_seq *s, const mxd_outcome *outcome, mxd_token_record *record) {
    *record = describe(s, outcome);
    if (!s->precision.mixes) return true;
    if (!s->engine->pass_precision) return !turns_core(s, record);
    *record = resolve(s, record);
    return true;
}

uint64_t mxd_weight_bytes(const mxd_engine *g, int precision) {
    const mxd_model *m = g->model;
    return m->plane_bytes[0] + (precision ? m->plane_bytes[1] : 0) +
           mxd_pad_tile(m->head.rows) / MXD_TILE_ROWS * (m->head.cols / MXD_BLOCK) * MXD_MXINT8_BLOCK_BYTES;
}

double mxd_mixed_bytes(const mxd_engine *g, double core_fraction) {
    double passes = core_fraction + (1 - core_fraction) / g->catch_up;
    return (double)mxd_weight_bytes(g, 0) + passes * (double)mxd_weight_bytes(g, 1);
}

void mxd_seq_set_core_rule(mxd_seq *s, mxd_core_function *function, void *arg) {
    s->precision.core_rule = function;
    s->precision.core_rule_arg = arg;
}
