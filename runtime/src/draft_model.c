/* SPDX-License-Identifier: Apache-2.0 */
#include "draft_model.h"

#include <string.h>

#include "clock.h"
#include "layer.h"

static size_t tile_bytes(const mxd_engine *g) {
    return g->model->head.cols / MXD_BLOCK * MXD_MXINT8_BLOCK_BYTES;
}

/* Return the number of logits of one row. */
static size_t logits_of_row(const mxd_engine *g) {
    return g->model->drafter.vocab + MXD_CONTEXT_ROWS;
}

void mxd_draft_model_resolve(mxd_engine *g) {
    bool asked = g->draft == MXD_DRAFT_AUTO || g->draft == MXD_DRAFT_MODEL;
    g->drafter.in_use = asked && g->model->drafter.features > 0;
}

void mxd_draft_model_take(mxd_engine *g, mxd_arena *a) {
    const mxd_draft_model *d = &g->model->drafter;
    size_t rows = g->max_rows, hidden = g->model->config.hidden;
    if (!g->drafter.in_use) return;
    g->drafter.features = mxd_take(a, rows * d->features * hidden, sizeof(float));
    g->drafter.feature_row = mxd_take(a, rows, sizeof *g->drafter.feature_row);
    g->drafter.states = mxd_take(a, rows * hidden, sizeof(float));
    g->drafter.head = mxd_take(a, d->vocab / MXD_TILE_ROWS, tile_bytes(g));
    g->drafter.logits = mxd_take(a, g->max_seqs * logits_of_row(g), sizeof(float));
}

mxd_drafter_state mxd_draft_model_take_seq(const mxd_engine *g, mxd_arena *a) {
    mxd_drafter_state drafter = {0};
    if (!g->drafter.in_use) return drafter;
    drafter.state = mxd_take(a, g->model->config.hidden, sizeof(float));
    drafter.ids = mxd_take(a, logits_of_row(g), sizeof *drafter.ids);
    drafter.context_head = mxd_take(a, MXD_CONTEXT_ROWS / MXD_TILE_ROWS, tile_bytes(g));
    return drafter;
}

/* ---- the head: rows of the target's ---- */

/* Copy a token's row of the target's head to row `at` of tiles. */
static void copy_head_row(const mxd_engine *g, uint32_t token, uint8_t *tiles, size_t at) {
    const uint8_t *from = g->model->head.base + token / MXD_TILE_ROWS * tile_bytes(g);
    uint8_t *to = tiles + at / MXD_TILE_ROWS * tile_bytes(g);
    size_t nblocks = g->model->head.cols / MXD_BLOCK, source = token % MXD_TILE_ROWS, target = at % MXD_TILE_ROWS;
    for (size_t b = 0; b < nblocks; b++, from += MXD_MXINT8_BLOCK_BYTES, to += MXD_MXINT8_BLOCK_BYTES) {
        to[target] = from[source];
        for (size_t group = 0; group < 8; group++)
            memcpy(to + MXD_TILE_ROWS + 64 * group + 4 * target, from + MXD_TILE_ROWS + 64 * group + 4 * source, 4);
    }
}

void mxd_draft_model_init(mxd_engine *g) {
    const mxd_draft_model *d = &g->model->drafter;
    for (uint32_t i = 0; i < d->vocab; i++) copy_head_row(g, d->ids[i], g->drafter.head, i);
    for (uint32_t i = 0; i < g->max_seqs; i++) memcpy(g->seqs[i].drafter.ids, d->ids, d->vocab * sizeof *d->ids);
}

/* Let the drafter choose the tokens of the context too. When all rows are taken, the newest token replaces the
 * oldest. */
static void learn_context(const mxd_engine *g, mxd_seq *s) {
    mxd_drafter_state *d = &s->drafter;
    uint32_t vocab = g->model->drafter.vocab;
    if (d->context_read > s->token_count) d->context_read = d->context_rows = d->context_next = 0; /* truncated */
    for (; d->context_read < s->token_count; d->context_read++) {
        uint32_t token = s->tokens[d->context_read], *ids = d->ids + vocab, i = 0;
        if (mxd_ids_contain(g->model->drafter.ids, vocab, token)) continue;
        while (i < d->context_rows && ids[i] != token) i++;
        if (i < d->context_rows) continue;
        uint32_t at = d->context_next++ % MXD_CONTEXT_ROWS;
        ids[at] = token;
        copy_head_row(g, token, d->context_head, at);
        if (d->context_rows < MXD_CONTEXT_ROWS) d->context_rows++;
    }
}

/* ---- sequences ---- */

void mxd_draft_model_open(mxd_seq *s) {
    mxd_drafter_state *d = &s->drafter;
    d->n_past = d->skipped = d->context_read = 0;
    d->guess_count = d->context_rows = d->context_next = 0;
}

void mxd_draft_model_copy(mxd_seq *to, const mxd_seq *from) {
    const mxd_engine *g = from->engine;
    const mxd_drafter_state *d = &from->drafter;
    if (!g->drafter.in_use) return;
    size_t vocab = g->model->drafter.vocab, tiles = mxd_pad_tile(d->context_rows) / MXD_TILE_ROWS;
    memcpy(to->drafter.state, d->state, g->model->config.hidden * sizeof *d->state);
    memcpy(to->drafter.ids + vocab, d->ids + vocab, d->context_rows * sizeof *d->ids);
    memcpy(to->drafter.context_head, d->context_head, tiles * tile_bytes(g));
    memcpy(to->drafter.guesses, d->guesses, sizeof d->guesses);
    to->drafter.guess_count = d->guess_count;
    to->drafter.n_past = d->n_past;
    to->drafter.skipped = d->skipped;
    to->drafter.context_read = d->context_read;
    to->drafter.context_rows = d->context_rows;
    to->drafter.context_next = d->context_next;
}

void mxd_draft_model_truncate(mxd_seq *s, size_t n) {
    mxd_drafter_state *d = &s->drafter;
    d->guess_count = 0;
    if (d->n_past <= n) return;
    d->n_past = n;
    if (d->skipped > 0) d->skipped = n; /* it does not know which: forget all */
}

/* ---- a pass: rows through the drafter, logits for its outcomes ---- */

static void fuse_features(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t hidden = g->model->config.hidden, width = d->features * hidden, from, to;
    float *rows = mxd_input_of(w, g->row_count, &from, &to)->rows;
    for (size_t m = from; m < to; m++)
        for (uint32_t f = 0; f < d->features; f++)
            g->kernels.rmsnorm(g->drafter.features + (g->drafter.feature_row[m] * d->features + f) * hidden,
                               d->feature_norm[f], hidden, g->model->config.rms_eps, rows + m * width + f * hidden);
    mxd_finish_input(w, g->row_count, rows, width, from, to);
    mxd_multiply(w, g->row_count, &(mxd_product){&d->feature_proj, g->drafter.states, hidden}, 1);
    mxd_barrier(w);
}

static void enter_layer(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t hidden = g->model->config.hidden, from, to;
    float eps = g->model->config.rms_eps, *rows = mxd_input_of(w, g->row_count, &from, &to)->rows;
    for (size_t m = from; m < to; m++) {
        float *embedding = rows + m * 2 * hidden, *state = embedding + hidden;
        mxd_embed(g->model, g->rows[m].token, state); /* which is free until the state comes */
        g->kernels.rmsnorm(state, d->embed_norm, hidden, eps, embedding);
        g->kernels.rmsnorm(g->drafter.states + m * hidden, d->state_norm, hidden, eps, state);
    }
    mxd_finish_input(w, g->row_count, rows, 2 * hidden, from, to);
    mxd_multiply(w, g->row_count, &(mxd_product){&d->input_proj, g->x, hidden}, 1);
    mxd_barrier(w);
}

static void multiply_head(const mxd_worker *w, const uint8_t *tiles, size_t count, const mxd_act *act, size_t rows,
                          float *y) {
    const mxd_engine *g = w->g;
    size_t from, to;
    mxd_my_part(w, count, &from, &to);
    g->kernels.matmul_mxint8(tiles + from * tile_bytes(g), NULL, g->model->head.cols / MXD_BLOCK, to - from, act, rows,
                             y + from * MXD_TILE_ROWS, logits_of_row(g));
}

static void draft_head(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t rows = g->outcome_count, hidden = g->model->config.hidden, nblocks = hidden / MXD_BLOCK;
    mxd_normalize(w, rows, g->outcomes, d->final_norm, g->model->config.layers);
    mxd_act act = mxd_act_of(w, rows);
    multiply_head(w, g->drafter.head, d->vocab / MXD_TILE_ROWS, &act, rows, g->drafter.logits);
    for (size_t i = 0; i < rows; i++) {
        const mxd_seq *s = &g->seqs[g->rows[g->outcomes[i].row].slot];
        mxd_act one = act;
        one.q += i * hidden;
        one.s += i * nblocks;
        one.bias += i * nblocks * 2;
        multiply_head(w, s->drafter.context_head, mxd_pad_tile(s->drafter.context_rows) / MXD_TILE_ROWS, &one, 1,
                      g->drafter.logits + i * logits_of_row(g) + d->vocab);
    }
}

typedef struct job {
    mxd_engine *g;
    bool fuses; /* states come from the target's features; else they are there */
} job;

static void run_drafter(void *arg, uint32_t thread) {
    const job *j = arg;
    mxd_engine *g = j->g;
    const mxd_worker w = {g, thread, mxd_pool_size(g->pool)};
    if (j->fuses) fuse_features(&w);
    enter_layer(&w);
    mxd_run_layer(&w, &g->model->drafter.layer, g->model->config.layers);
    if (g->outcome_count) draft_head(&w);
}

static void run_pass(mxd_engine *g, bool fuses, mxd_draft_use *use) {
    const mxd_draft_model *d = &g->model->drafter;
    double start = mxd_now();
    g->pass_precision = 0;
    mxd_pool_run(g->pool, run_drafter, &(job){g, fuses});
    use->drafter_s += mxd_now() - start;
    use->bytes += d->bytes + (g->outcome_count ? d->vocab / MXD_TILE_ROWS * tile_bytes(g) : 0);
}

/* ---- guesses ---- */

/* Guess the next token of a sequence from the logits of outcome i: the two likeliest tokens, or under sampling the one
 * that the target's own noise would draw, with the calibrated probability that the target chooses them. */
static void guess(mxd_engine *g, mxd_seq *s, size_t i, uint32_t depth) {
    const mxd_draft_model *model = &g->model->drafter;
    mxd_drafter_state *d = &s->drafter;
    float *logits = g->drafter.logits + i * logits_of_row(g), *w = g->scratch.weights;
    uint32_t count = model->vocab + d->context_rows, first = logits[1] > logits[0], second = !first;
    uint32_t c = depth < model->depths ? depth : model->depths - 1;
    for (uint32_t j = 2; j < count; j++) {
        if (!(logits[j] > logits[second])) continue;
        bool best_yet = logits[j] > logits[first];
        second = best_yet ? first : j;
        if (best_yet) first = j;
    }
    g->kernels.exp_weights(logits, count, model->inverse_temperature[c], logits[first], w);
    float sum = 0;
    for (uint32_t j = 0; j < count; j++) sum += w[j];
    float best = 1 / (1 + model->odds[c] * (sum - 1)), next = best * w[second];
    if (!(sum >= 1)) { /* not finite: no guess */
        d->guess_count = 0;
        return;
    }
    if (s->sampling.temperature > 0) {
        uint32_t drawn = mxd_sample_among(&g->kernels, &s->sampling, logits, count, d->ids, s->token_count + depth,
                                          &g->scratch);
        g->kernels.exp_weights(logits, count, model->inverse_temperature[c], logits[first], w);
        d->guesses[0] = (mxd_guess){d->ids[drawn], w[drawn] / sum};
        d->guess_count = 1;
        return;
    }
    d->guesses[0] = (mxd_guess){d->ids[first], best};
    d->guesses[1] = (mxd_guess){d->ids[second], next < 1 - best ? next : 1 - best};
    d->guess_count = 2;
}

/* After a pass: take the states and guesses of the sequences whose rows were outcomes. */
static void take_guesses(mxd_engine *g, uint32_t depth) {
    size_t hidden = g->model->config.hidden;
    for (size_t i = 0; i < g->outcome_count; i++) {
        size_t m = g->outcomes[i].row;
        mxd_seq *s = &g->seqs[g->rows[m].slot];
        memcpy(s->drafter.state, g->x + m * hidden, hidden * sizeof(float));
        guess(g, s, i, depth);
    }
}

/* Append a row of the drafter, which makes guesses or only fills the cache. Positions that it skipped leave no hole in
 * its cache: it reads what comes after them as if it followed what came before. */
static void add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, bool guesses) {
    if (guesses) g->outcomes[g->outcome_count++] = (mxd_outcome){.row = (uint32_t)g->row_count};
    mxd_add_row(g, s, position - s->drafter.skipped, token, MXD_OUTPUT_NONE);
}

/* Append a row for each position that the target's pass has processed and the drafter has not read. Those of earlier
 * passes, during which it paused, it skips. */
static void add_unread(mxd_engine *g, const mxd_part *p) {
    mxd_seq *s = p->seq;
    mxd_drafter_state *d = &s->drafter;
    size_t own = p->from + p->rows < s->n_past ? p->rows : s->n_past - p->from; /* less one that turned core */
    size_t skipped = p->from < d->n_past ? d->n_past - p->from : 0, unread = own > skipped ? own - skipped : 0;
    size_t missed = s->n_past - unread - p->accepted - d->n_past;
    d->n_past += missed;
    d->skipped += missed;
    for (size_t k = 0; k < unread + p->accepted && d->n_past + 1 < s->token_count; k++, d->n_past++) {
        size_t row = k < unread ? p->first + skipped + k : p->first + p->rows + p->accepted_node[k - unread];
        g->drafter.feature_row[g->row_count] = (uint32_t)row;
        add_row(g, s, d->n_past, s->tokens[d->n_past + 1], d->n_past + 2 == s->token_count);
    }
    learn_context(g, s);
}

void mxd_draft_model_follow(mxd_pass *pass) {
    mxd_engine *g = pass->engine;
    bool pauses = g->draft_min == 0 && !mxd_policy_asks_model(g->policy, pass->count);
    mxd_clear_rows(g);
    for (size_t i = 0; i < pass->count; i++) {
        pass->parts[i].seq->drafter.guess_count = 0;
        if (!pauses) add_unread(g, &pass->parts[i]);
    }
    if (g->row_count == 0) return;
    pass->use.expected_s += mxd_policy_model_cost(g->policy, g->row_count);
    run_pass(g, true, &pass->use);
    take_guesses(g, 0);
}

/* Append a node to the proposal for each guess; returns the index of the likeliest, -1 if there is none. */
static int32_t propose_guesses(const mxd_policy *p, mxd_seq *s, int32_t parent) {
    static const uint8_t kinds[2] = {MXD_KIND_MODEL, MXD_KIND_SECOND};
    mxd_proposal *proposal = &s->drafts.proposal;
    int32_t first = -1;
    for (uint32_t k = 0; k < s->drafter.guess_count && proposal->count < MXD_MAX_DRAFT; k++) {
        const mxd_guess *guess = &s->drafter.guesses[k];
        uint8_t bins = k ? 8 : 16, bin = (uint8_t)(guess->chance * bins);
        if (bin >= bins) bin = bins - 1;
        uint32_t node = mxd_propose(p, proposal, guess->token, parent, (uint8_t)(kinds[k] + bin), guess->chance);
        if (k == 0) first = (int32_t)node;
    }
    return first;
}

/* Decide by what it saves together which sequences a draft step at a depth deepens; returns how many. newest[i] is the
 * node to deepen, and becomes -1 for a sequence that is done. */
static size_t deepens(const mxd_engine *g, mxd_seq *const *seqs, const size_t *most, int32_t *newest, size_t n,
                      size_t rows, uint32_t depth) {
    bool asked = depth < g->draft_min;
    size_t count = 0;
    double gain = 0;
    for (size_t i = 0; i < n; i++) {
        if (newest[i] < 0) continue;
        double more = mxd_policy_deeper_gain(g->policy, seqs[i]->drafts.proposal.node[newest[i]].path, rows);
        if (depth >= most[i] || !(asked || more > 0)) {
            newest[i] = -1;
            continue;
        }
        count++;
        gain += more;
    }
    return asked || gain > mxd_policy_draft_cost(g->policy) ? count : 0;
}

void mxd_draft_model_propose(mxd_engine *g, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows,
                             mxd_draft_use *use) {
    int32_t newest[MXD_MAX_SEQS];
    size_t hidden = g->model->config.hidden;
    for (size_t i = 0; i < n; i++) newest[i] = most[i] > 0 ? propose_guesses(g->policy, seqs[i], -1) : -1;
    for (uint32_t depth = 1; depth < MXD_MAX_DRAFT; depth++) {
        if (deepens(g, seqs, most, newest, n, rows, depth) == 0) return;
        mxd_clear_rows(g);
        for (size_t i = 0; i < n; i++) {
            mxd_seq *s = seqs[i];
            if (newest[i] < 0) continue;
            memcpy(g->drafter.states + g->row_count * hidden, s->drafter.state, hidden * sizeof(float));
            add_row(g, s, s->token_count - 2 + depth, s->drafts.proposal.node[newest[i]].token, true);
        }
        use->expected_s += mxd_policy_model_cost(g->policy, g->row_count);
        run_pass(g, false, use);
        take_guesses(g, depth);
        for (size_t i = 0; i < n; i++)
            if (newest[i] >= 0) newest[i] = propose_guesses(g->policy, seqs[i], newest[i]);
    }
}

double mxd_draft_model_time(mxd_engine *g, uint32_t rows) {
    mxd_draft_use use = {0};
    mxd_clear_rows(g);
    for (uint32_t i = 0; i < rows; i++) add_row(g, &g->seqs[i], 0, 0, true);
    double start = mxd_now();
    run_pass(g, false, &use);
    take_guesses(g, 0);
    return mxd_now() - start;
}
