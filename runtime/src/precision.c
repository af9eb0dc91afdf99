#include "precision.h"

#include "annotate.h"
#include "monitor.h"

/* How much the newest look counts in the share of looks that changed the choice. */
static const float FLIP_SHARE = 0.125f;

/* How far a row moves the threshold, in log-odds: up if it is core, down if it isn't, so that the fraction asked for is
 * kept on texts that are easier or harder than those the schedule comes from (quantile tracking: Robbins, Monro 1951). */
static const float THRESHOLD_STEP = 0.1f;

/* Positions that are not at full precision yet. */
static size_t pending(const mxd_seq *s) {
    return s->done - s->full_done;
}

int mxd_runs_full(const mxd_seq *s) {
    const mxd_engine *g = s->engine;
    if (!g->mixes) return g->precision;
    return s->awaits_full || s->catching_up || s->done < s->prompt_end || pending(s) + 1 >= g->catch_up;
}

size_t mxd_base_room(const mxd_seq *s) {
    const mxd_engine *g = s->engine;
    return g->mixes ? g->catch_up - 1 - pending(s) : SIZE_MAX;
}

mxd_token_record mxd_inspect(const mxd_engine *g, const mxd_seq *s, const mxd_outcome *outcome) {
    mxd_signals signals = {.confidence = mxd_exp_ref(-outcome->margin), .history = s->flip_rate};
    if (g->mixes && !g->pass) signals.attention = mxd_attended(g, outcome->row, s->full_done, s->done);
    return (mxd_token_record){.position = (uint32_t)s->done + 1,
                              .token = outcome->winner,
                              .base_token = g->pass ? UINT32_MAX : outcome->winner,
                              .margin = outcome->margin,
                              .confidence = signals.confidence,
                              .attention = signals.attention,
                              .history = signals.history,
                              .score = mxd_score(&g->model->schedule.precision, signals),
                              .threshold = g->mixes ? s->core_threshold : 0,
                              .look = g->pass ? MXD_LOOK_ALL : MXD_LOOK_NONE};
}

int mxd_turns_core(mxd_seq *s, const mxd_token_record *row) {
    mxd_token_record seen = *row;
    seen.look = row->score > row->threshold ? MXD_LOOK_CORE : MXD_LOOK_NONE;
    int core = s->core_rule ? s->core_rule(s->core_rule_arg, &seen) != 0 : seen.look == MXD_LOOK_CORE;
    s->core_threshold = s->core_threshold + THRESHOLD_STEP * ((float)core - s->engine->core_fraction);
    if (!core) return 0;
    MXD_ANNOTATE_MARK("core");
    s->awaits_full = 1;
    s->awaiting = seen;
    s->awaiting.look = MXD_LOOK_CORE;
    return 1;
}

void mxd_caught_up(mxd_seq *s, size_t n) {
    s->full_done = n;
    s->catching_up = n <= s->done;
}

mxd_token_record mxd_resolve(mxd_seq *s, const mxd_token_record *full) {
    mxd_token_record row = *full;
    row.look = s->done < s->prompt_end ? MXD_LOOK_ALL : MXD_LOOK_DUE;
    if (s->awaits_full) {
        row = s->awaiting;
        row.token = full->token;
        float flipped = row.token != row.base_token;
        s->flip_rate = s->flip_rate + FLIP_SHARE * (flipped - s->flip_rate);
    }
    s->awaits_full = 0;
    s->waited = 0;
    return row;
}

void mxd_copy_looks(mxd_seq *to, const mxd_seq *from) {
    to->full_done = from->full_done;
    to->awaits_full = from->awaits_full;
    to->catching_up = from->catching_up;
    to->waited = from->waited;
    to->awaiting = from->awaiting;
    to->core_threshold = from->core_threshold;
    to->flip_rate = from->flip_rate;
}

void mxd_forget_looks(mxd_seq *s, size_t n) {
    if (s->full_done > n) s->full_done = n;
    if (s->engine->mixes) s->done = s->full_done;
    s->awaits_full = s->catching_up = 0;
    s->waited = 0;
    s->flip_rate = 0;
    s->core_threshold = mxd_schedule_threshold(&s->engine->model->schedule, s->engine->core_fraction);
}

double mxd_mixed_bytes(const mxd_engine *g, double core_fraction) {
    double passes = core_fraction + (1 - core_fraction) / g->catch_up;
    return (double)mxd_weight_bytes(g, 0) + passes * (double)mxd_weight_bytes(g, 1);
}
