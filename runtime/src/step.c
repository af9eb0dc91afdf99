/* Start here: the engine's step. Prompts are read in chunks; a sequence that generates runs its newest token and what
 * was drafted behind it, and keeps what its own choices confirm. Under mixed precision a step has two passes: one at base
 * precision, and one at full precision for rows that turned out to be core, for those that are due, and for prompts. */
#include <math.h>
#include <string.h>

#include "annotate.h"
#include "clock.h"
#include "draft_log.h"
#include "monitor.h"
#include "precision.h"
#include "sequence.h"
#include "speculate.h"

#ifdef MXD_DEBUG
/* Make every use of what a rejected row left in the cache show: NaN in keys and values behind the committed ones. */
static void poison(const mxd_engine *g, const mxd_seq *s, size_t rows) {
    const mxd_config *c = &g->model->config;
    if (rows > mxd_kv_room(s)) rows = mxd_kv_room(s);
    for (size_t position = s->done; position < s->done + rows && position < g->plan.ctx; position++)
        for (uint32_t l = 0; l < c->layers; l++)
            for (int which = 0; which < 2; which++)
                for (uint32_t h = 0; h < c->kv_heads; h++) {
                    float nan[256]; /* head_dim <= 256 */
                    const mxd_row row = {.slot = s->slot, .position = (uint32_t)position};
                    for (uint32_t i = 0; i < c->head_dim; i++) nan[i] = NAN;
                    mxd_kv_store(g, l, nan, mxd_row_kv(g, &row, l, which, h));
                }
}
#endif

/* ---- statistics ---- */

/* What a pass did for one sequence. A decode step is one whose tokens were all chosen here; the others are prefill. */
static void account(const mxd_pass *pass, const mxd_part *p) {
    mxd_seq *s = p->seq;
    mxd_stats *stats = &s->stats;
    const mxd_engine *g = s->engine;
    if (!p->decoding) return;
    stats->draft_s += pass->draft_s;
    stats->schedule_s += pass->schedule_s;
    stats->verify_s += pass->verify_s;
    stats->sample_s += pass->sample_s;
    stats->bytes_read += mxd_weight_bytes(g, pass->full) + mxd_kv_bytes(s) + g->draft_bytes;
    if (pass->full != mxd_first_pass(g)) return; /* a second look */
    s->expected_tokens += 1;
    for (uint32_t i = 0; i < s->proposal.count; i++) s->expected_tokens += (double)s->proposal.path[i];
    s->expected_s += mxd_policy_step_cost(g->policy, g->row_count) / (double)pass->count;
}

/* ---- rows ---- */

/* Divide the pass among the sequences whose next row is of its precision: one row for each, so that nobody starves;
 * what is left goes to those with more in order: prompts, and rows that a pass at full precision catches up. */
static void divide(mxd_pass *pass, mxd_seq *const *seqs, size_t n) {
    const mxd_engine *g = pass->g;
    size_t left = g->max_rows;
    for (size_t i = 0; i < n; i++) left -= (size_t)(mxd_seq_has_work(seqs[i]) && mxd_runs_full(seqs[i]) == pass->full);
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!mxd_seq_has_work(s) || mxd_runs_full(s) != pass->full) continue;
        mxd_kv_settle(s);
        size_t from = g->mixes && pass->full ? s->full_done : s->done;
        size_t pending = s->token_count - from, more = pending - 1 < left ? pending - 1 : left;
        size_t again = s->done - from; /* the tiers stay as they are */
        if (more > again && more - again > mxd_kv_room(s) - 1) more = again + mxd_kv_room(s) - 1;
        left -= more;
        pass->rows += 1 + more;
        pass->parts[pass->count++] = (mxd_part){.seq = s,
                                      .from = from,
                                      .rows = 1 + more,
                                      .reaches_end = 1 + more == pending,
                                      .decoding = s->done >= s->prompt_end};
    }
}

static void fill_rows(mxd_pass *pass) {
    mxd_engine *g = pass->g;
    size_t outcome = 0;
    g->row_count = g->side_used = 0;
    for (size_t i = 0; i < pass->count; i++) {
        mxd_part *p = &pass->parts[i];
        const mxd_seq *s = p->seq;
        mxd_wants wants = mxd_is_greedy(&s->sampling) ? MXD_WANTS_WINNER : MXD_WANTS_LOGITS;
        p->first = g->row_count;
        p->outcome = outcome;
        for (size_t k = 0; k < p->rows; k++) {
            int newest = p->reaches_end && k + 1 == p->rows;
            mxd_add_row(g, s, p->from + k, s->tokens[p->from + k], newest ? wants : MXD_WANTS_NOTHING);
        }
        mxd_speculate_add_rows(g, s, g->row_count - 1, wants);
        if (p->reaches_end) outcome += 1 + s->proposal.count;
    }
}

static void choose_all(mxd_pass *pass) {
    const mxd_engine *g = pass->g;
    double start = mxd_now();
    for (size_t i = 0; i < pass->count; i++) {
        mxd_part *p = &pass->parts[i];
        mxd_seq *s = p->seq;
        size_t before = s->done, processed = p->from + p->rows;
        if (g->mixes && pass->full) mxd_caught_up(s, processed);
        if (p->reaches_end) {
            int first = s->stats.generated_tokens == 0;
            s->done = processed - 1;
            mxd_speculate_choose(pass, p);
            if (first && s->stats.generated_tokens > 0) s->stats.first_token_s = mxd_now() - s->prompted_at;
        } else if (s->done < processed) {
            s->done = processed;
        }
        for (size_t k = 0; k < p->rows; k++) /* rows that were processed before, or turned core, do not count now */
            if (p->from + k >= before && p->from + k < s->done) mxd_monitor_commit(s, p->first + k);
        for (uint32_t k = 0; k < p->accepted; k++) mxd_monitor_commit(s, p->first + p->rows + p->accepted_node[k]);
#ifdef MXD_DEBUG
        poison(g, s, s->proposal.count);
#endif
    }
    pass->sample_s = mxd_now() - start;
}

/* ---- the step ---- */

/* What the tuner learns from a pass over decoding sequences. */
static void report(mxd_pass *pass, size_t verified, double seconds) {
    mxd_observation *o = &pass->seen;
    size_t decoding = 0;
    for (size_t i = 0; i < pass->count; i++) {
        const mxd_part *p = &pass->parts[i];
        decoding += (size_t)p->decoding;
        size_t made = p->seq->token_count - p->seq->output_from + (size_t)p->seq->awaits_full; /* that one comes yet */
        o->tokens = (uint16_t)(o->tokens + made);
    }
    if (decoding == 0) return;
    o->seen = MXD_SEEN_STEP;
    o->seconds = seconds;
    o->drafter_s = (float)pass->g->drafter_s;
    o->rows = (uint16_t)verified;
    o->together = pass->count > 1;
    mxd_tuner_report(&pass->g->tuner, o);
}

/* Run the sequences' rows that are of the pass's precision, if there are any. */
static mxd_status run_pass(mxd_pass *pass, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_engine *g = pass->g;
    double start = mxd_now();
    g->draft_bytes = 0;
    g->drafter_s = 0;
    divide(pass, seqs, n);
    if (pass->count == 0) return MXD_OK;
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
    mxd_status status = mxd_speculate_propose(pass, err);
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (status) return status;
    double before = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, pass->full ? "full" : "base");
    fill_rows(pass);
    status = mxd_forward(g, pass->full, err);
    if (status == MXD_ERR_NUMERIC && g->row_count > pass->rows) {
        /* The fault may be that of a wrong draft, which plain decoding would never meet. */
        for (size_t i = 0; i < pass->count; i++) pass->parts[i].seq->proposal.count = 0;
        fill_rows(pass);
        status = mxd_forward(g, pass->full, err);
    }
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (status) return status;
    pass->verify_s = mxd_now() - before;
    size_t verified = g->row_count;
    choose_all(pass);
    if (g->features) {
        before = mxd_now();
        MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
        mxd_speculate_follow(pass);
        MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
        pass->draft_s += mxd_now() - before;
    }
    for (size_t i = 0; i < pass->count; i++) account(pass, &pass->parts[i]);
    if (pass->full == mxd_first_pass(g)) report(pass, verified, mxd_now() - start);
    return MXD_OK;
}

/* Under mixed precision, after the pass at base precision: whether those that wait for full precision get it now. */
static int catches_up(mxd_seq *const *seqs, size_t n) {
    size_t waiting = 0, others = 0;
    uint32_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!mxd_seq_has_work(s)) continue;
        if (!mxd_runs_full(s)) {
            others++;
            continue;
        }
        if (s->done < s->prompt_end) return 1; /* prompts never wait */
        waiting++;
        if (++s->waited > longest) longest = s->waited;
    }
    return mxd_schedule_catches_up(waiting, others, longest);
}

static mxd_status run_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    if (n > g->max_seqs) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu sequences, the engine has %u", n, g->max_seqs);
    uint64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (seqs[i]->engine != g || !seqs[i]->in_use || used & 1ull << seqs[i]->slot)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu is closed, repeated or of another engine", i);
        used |= 1ull << seqs[i]->slot;
    }
    int decoding[MXD_MAX_SEQS] = {0}, prefilling[MXD_MAX_SEQS] = {0}, any = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        s->output_from = s->token_count;
        s->text_len = 0;
        s->record_count = 0;
        if (!mxd_seq_has_work(s)) continue;
        decoding[i] = s->done >= s->prompt_end;
        prefilling[i] = !decoding[i];
        any = 1;
    }
    for (size_t i = 0; i < n && !any; i++) /* else a loop until the stop would never end */
        if (seqs[i]->stop == MXD_STOP_NONE)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu has no token to process: prompt it first", i);
    double start = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_STEP, "step");
    mxd_pass first = {.g = g, .full = mxd_first_pass(g)};
    mxd_status status = run_pass(&first, seqs, n, err);
    if (!status && g->mixes && catches_up(seqs, n)) {
        mxd_pass second = {.g = g, .full = 1};
        status = run_pass(&second, seqs, n, err);
        if (status && first.count > 0) status = MXD_OK; /* what the first pass made stands; the next step will tell */
    }
    MXD_ANNOTATE_END(MXD_CHANNEL_STEP);
    if (status) return status;
    double seconds = mxd_now() - start;
    for (size_t i = 0; i < n; i++) {
        seqs[i]->stats.steps += (uint64_t)decoding[i];
        if (decoding[i]) seqs[i]->stats.decode_s += seconds;
        if (prefilling[i]) seqs[i]->stats.prefill_s += seconds;
    }
    return MXD_OK;
}

mxd_status mxd_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    g->policy = mxd_tuner_begin(&g->tuner);
    mxd_status status = run_step(g, seqs, n, err);
    g->policy = NULL;
    mxd_tuner_end(&g->tuner);
    return status;
}
