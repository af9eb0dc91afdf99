/* SPDX-License-Identifier: Apache-2.0 */
/* Start here: the engine's step. Under mixed precision it has two passes: at base precision, then at full precision for
 * prompts, for rows that turned core, and where catch-up is due. Each pass
 *   1. divides its rows: the newest token of each sequence that generates, parts of prompts for the others;
 *   2. asks drafters what may follow the newest tokens, and adds as many rows of drafts as pay (speculate.c);
 *   3. runs all rows through the model (forward.c);
 *   4. commits what each sequence chooses after its newest token, and after each drafted token that was its choice, up
 *      to the first choice that was not drafted or the first row that turns core (precision.c);
 *   5. shows the trained drafter what was committed (draft_model.c), and reports to the policy (tuner.c).
 * A draft is never an answer: the target chooses every token itself, so drafts change only the time. */
#include "step.h"

#include "annotate.h"
#include "clock.h"
#include "engine.h"
#include "sequence.h"
#include "speculate.h"

/* ---- rows ---- */

/* Divide the pass among the sequences whose next row is of its precision: one row for each, so that nobody starves.
 * What is left goes in order to those with more: prompts, and rows that a pass at full precision catches up. */
static void divide(mxd_pass *pass, mxd_seq *const *seqs, size_t n) {
    const mxd_engine *g = pass->engine;
    size_t left = g->max_rows;
    for (size_t i = 0; i < n; i++) left -= mxd_seq_has_work(seqs[i]) && mxd_runs_full(seqs[i]) == pass->full;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!mxd_seq_has_work(s) || mxd_runs_full(s) != pass->full) continue;
        size_t from, rows = mxd_seq_rows_to_run(s, pass->full, s->token_count, 1 + left, &from);
        left -= rows - 1;
        pass->rows += rows;
        pass->parts[pass->count++] = (mxd_part){.seq = s,
                                                .from = from,
                                                .rows = rows,
                                                .reaches_end = from + rows == s->token_count,
                                                .decoding = s->n_past >= s->prompt_end};
    }
}

static void fill_rows(mxd_pass *pass) {
    mxd_engine *g = pass->engine;
    size_t outcome = 0;
    mxd_clear_rows(g);
    for (size_t i = 0; i < pass->count; i++) {
        mxd_part *p = &pass->parts[i];
        const mxd_seq *s = p->seq;
        mxd_output output = mxd_seq_needs_logits(s) ? MXD_OUTPUT_LOGITS : MXD_OUTPUT_WINNER;
        p->first = g->row_count;
        p->outcome = outcome;
        for (size_t k = 0; k < p->rows; k++) {
            bool newest = p->reaches_end && k + 1 == p->rows;
            mxd_add_row(g, s, p->from + k, s->tokens[p->from + k], newest ? output : MXD_OUTPUT_NONE);
        }
        mxd_speculate_add_rows(g, s, g->row_count - 1, output);
        if (p->reaches_end) outcome += 1 + s->drafts.proposal.count;
    }
}

/* ---- what came of them ---- */

/* Move a sequence past the rows of its part that count. */
static void advance(const mxd_pass *pass, mxd_part *p) {
    mxd_seq *s = p->seq;
    size_t before = s->n_past, processed = p->from + p->rows;
    mxd_precision_processed(s, processed);
    if (p->reaches_end) {
        bool first = s->stats.generated_tokens == 0;
        s->n_past = processed - 1;
        mxd_speculate_choose(pass, p);
        if (first && s->stats.generated_tokens > 0) s->stats.first_token_s = mxd_now() - s->prompted_at;
    } else if (s->n_past < processed) {
        s->n_past = processed;
    }
    for (size_t k = 0; k < p->rows; k++) /* rows that were processed before, or turned core, do not count now */
        if (p->from + k >= before && p->from + k < s->n_past) mxd_monitor_commit(s, p->first + k);
    for (uint32_t k = 0; k < p->accepted; k++) mxd_monitor_commit(s, p->first + p->rows + p->accepted_node[k]);
#ifdef MXD_DEBUG
    mxd_kv_poison(s, s->drafts.proposal.count);
#endif
}

/* Return how many drafted tokens of a proposal should be right, by the estimates of each. */
static float promised(const mxd_proposal *d) {
    float sum = 0;
    for (uint32_t i = 0; i < d->count; i++) sum += d->node[i].path;
    return sum;
}

/* Count what a pass of `rows` rows, drafts among them, did for one sequence. A decode step is one whose tokens were all
 * chosen here; the others are prefill. */
static void account(const mxd_pass *pass, size_t rows, const mxd_part *p) {
    mxd_seq *s = p->seq;
    mxd_stats *stats = &s->stats;
    const mxd_engine *g = s->engine;
    if (!p->decoding) return;
    stats->draft_s += pass->draft_s;
    stats->schedule_s += pass->schedule_s;
    stats->verify_s += pass->verify_s;
    stats->sample_s += pass->sample_s;
    stats->bytes_read += mxd_weight_bytes(g, pass->full) + mxd_kv_bytes(s) + pass->use.bytes;
    if (pass->full != mxd_first_pass(g)) return; /* a second look */
    const mxd_proposal *d = &s->drafts.proposal;
    s->expected_tokens += 1;
    s->expected_tokens += (double)(mxd_policy_credit(g->policy, pass->count > 1) * promised(d));
    s->expected_s += (mxd_policy_step_cost(g->policy, rows) + pass->use.expected_s) / (double)pass->count;
}

/* Report to the policy what a first pass of `rows` rows over decoding sequences took and made. */
static void report(mxd_pass *pass, size_t rows, double seconds) {
    mxd_observation *o = &pass->observation;
    bool decoding = false;
    for (size_t i = 0; i < pass->count; i++) {
        const mxd_part *p = &pass->parts[i];
        const mxd_seq *s = p->seq;
        decoding |= p->decoding;
        size_t made = s->token_count - s->output_from + s->precision.awaits_full; /* that one is still to come */
        o->tokens = (uint16_t)(o->tokens + made);
        o->kept = (uint16_t)(o->kept + p->accepted);
        if (p->decoding) o->promised += promised(&s->drafts.proposal);
    }
    if (!decoding) return;
    o->type = MXD_OBSERVED_STEP;
    o->seconds = seconds;
    o->drafter_s = (float)pass->use.drafter_s;
    o->drafting_s = (float)pass->draft_s;
    o->rows = (uint16_t)rows;
    o->together = pass->count > 1;
    mxd_tuner_report(&pass->engine->tuner, o);
}

/* ---- passes ---- */

/* Fill the rows and run them. */
static mxd_status verify(mxd_pass *pass, mxd_error *err) {
    mxd_engine *g = pass->engine;
    double start = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, pass->full ? "full" : "base");
    fill_rows(pass);
    mxd_status status = mxd_forward(g, pass->full, err);
    if (status == MXD_ERR_NUMERIC && g->row_count > pass->rows) {
        /* The fault may be that of a wrong draft, which plain decoding would never meet. */
        for (size_t i = 0; i < pass->count; i++) mxd_draft_log_clear(pass->parts[i].seq);
        fill_rows(pass);
        status = mxd_forward(g, pass->full, err);
    }
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (!status) pass->verify_s = mxd_now() - start;
    return status;
}

/* Run a pass over the sequences that have rows of its precision, if there are any. */
static mxd_status run_pass(mxd_pass *pass, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_engine *g = pass->engine;
    double start = mxd_now();
    divide(pass, seqs, n);
    if (pass->count == 0) return MXD_OK;
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
    mxd_status status = mxd_speculate_propose(pass, err);
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (!status) status = verify(pass, err);
    if (status) return status;
    size_t rows = g->row_count;
    double before = mxd_now();
    for (size_t i = 0; i < pass->count; i++) advance(pass, &pass->parts[i]);
    pass->sample_s = mxd_now() - before;
    if (g->drafter.in_use) {
        before = mxd_now();
        MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
        mxd_draft_model_follow(pass);
        MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
        pass->draft_s += mxd_now() - before;
    }
    for (size_t i = 0; i < pass->count; i++) account(pass, rows, &pass->parts[i]);
    if (pass->full == mxd_first_pass(g)) report(pass, rows, mxd_now() - start);
    return MXD_OK;
}

static mxd_status run_passes(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_pass first = {.engine = g, .full = mxd_first_pass(g)};
    mxd_status status = run_pass(&first, seqs, n, err);
    if (status || !g->mixes || !mxd_catches_up(seqs, n)) return status;
    mxd_pass second = {.engine = g, .full = true};
    status = run_pass(&second, seqs, n, err);
    return first.count > 0 ? MXD_OK : status; /* what the first pass made stands; the next step will tell */
}

/* ---- the step ---- */

static mxd_status check_sequences(const mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    if (n > g->max_seqs) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu sequences, the engine has %u", n, g->max_seqs);
    uint64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (seqs[i]->engine != g || !seqs[i]->in_use || used & 1ull << seqs[i]->slot)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu is closed, repeated or of another engine", i);
        used |= 1ull << seqs[i]->slot;
    }
    return MXD_OK;
}

static mxd_status run_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_status status = check_sequences(g, seqs, n, err);
    for (size_t i = 0; i < n && !status; i++) status = mxd_grammar_check(seqs[i], err);
    if (status) return status;
    bool decoding[MXD_MAX_SEQS] = {false}, prefilling[MXD_MAX_SEQS] = {false}, any = false;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        s->output_from = s->token_count;
        s->text_len = 0;
        mxd_draft_log_begin(s);
        if (!mxd_seq_has_work(s)) continue;
        decoding[i] = s->n_past >= s->prompt_end;
        prefilling[i] = !decoding[i];
        any = true;
    }
    for (size_t i = 0; i < n && !any; i++) /* else a loop until the stop would never end */
        if (seqs[i]->stop == MXD_STOP_NONE)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu has no token to process: prompt it first", i);
    double start = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_STEP, "step");
    status = run_passes(g, seqs, n, err);
    MXD_ANNOTATE_END(MXD_CHANNEL_STEP);
    if (status) return status;
    double seconds = mxd_now() - start;
    for (size_t i = 0; i < n; i++) {
        seqs[i]->stats.steps += decoding[i];
        if (decoding[i]) seqs[i]->stats.decode_s += seconds;
        if (prefilling[i]) seqs[i]->stats.prefill_s += seconds;
        mxd_seq_check(seqs[i]);
    }
    return MXD_OK;
}

mxd_status mxd_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_status status = mxd_engine_enter(g, err);
    if (status) return status;
    g->policy = mxd_tuner_begin(&g->tuner);
    status = run_step(g, seqs, n, err);
    g->policy = NULL;
    mxd_tuner_end(&g->tuner);
    mxd_engine_leave(g);
    return status;
}
