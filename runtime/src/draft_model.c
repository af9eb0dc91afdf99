/* The trained drafter: one layer that reads residual streams of the target (docs/arithmetic.md, "Drafter"). Its
 * arithmetic decides which tokens are proposed, never which are generated. */
#include "draft_model.h"

#include <math.h>
#include <string.h>

#include "clock.h"
#include "layer.h"

/* ---- the head: rows of the target's ---- */

static size_t tile_bytes(const mxd_engine *g) {
    return g->model->head.cols / MXD_BLOCK * MXD_MXINT8_BLOCK_BYTES;
}

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
    for (uint32_t i = 0; i < d->vocab; i++) copy_head_row(g, d->ids[i], g->draft_head, i);
    for (uint32_t i = 0; i < g->max_seqs; i++) memcpy(g->seqs[i].draft_ids, d->ids, d->vocab * sizeof *d->ids);
}

static int is_static(const mxd_draft_model *d, uint32_t token) {
    uint32_t low = 0, high = d->vocab;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (d->ids[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low < d->vocab && d->ids[low] == token;
}

/* Tokens of the context become head rows of the sequence, the newest in place of the oldest when all are taken. */
static void learn_context(const mxd_engine *g, mxd_seq *s) {
    if (s->context_read > s->token_count) s->context_read = s->context_rows = s->context_next = 0; /* truncated */
    for (; s->context_read < s->token_count; s->context_read++) {
        uint32_t token = s->tokens[s->context_read], *ids = s->draft_ids + g->model->drafter.vocab, i = 0;
        if (is_static(&g->model->drafter, token)) continue;
        while (i < s->context_rows && ids[i] != token) i++;
        if (i < s->context_rows) continue;
        uint32_t at = s->context_next++ % MXD_CONTEXT_ROWS;
        ids[at] = token;
        copy_head_row(g, token, s->context_head, at);
        if (s->context_rows < MXD_CONTEXT_ROWS) s->context_rows++;
    }
}

void mxd_draft_model_copy(mxd_seq *to, const mxd_seq *from) {
    const mxd_engine *g = from->engine;
    uint32_t vocab = g->model->drafter.vocab, tiles = (from->context_rows + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS;
    to->draft_done = from->draft_done;
    memcpy(to->draft_state, from->draft_state, g->model->config.hidden * sizeof *to->draft_state);
    memcpy(to->guesses, from->guesses, sizeof to->guesses);
    to->guess_count = from->guess_count;
    memcpy(to->draft_ids + vocab, from->draft_ids + vocab, from->context_rows * sizeof *to->draft_ids);
    memcpy(to->context_head, from->context_head, tiles * tile_bytes(g));
    to->context_read = from->context_read;
    to->context_rows = from->context_rows;
    to->context_next = from->context_next;
}

/* ---- a pass: the engine's rows through the drafter, logits of its outcomes ---- */

static void fuse_features(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t hidden = g->model->config.hidden, width = d->features * hidden, from, to;
    float *rows = mxd_input_of(w, g->row_count, &from, &to)->rows;
    for (size_t m = from; m < to; m++)
        for (uint32_t f = 0; f < d->features; f++)
            g->kernels.rmsnorm(g->features + (g->feature_row[m] * d->features + f) * hidden, d->feature_norm[f], hidden,
                               g->model->config.rms_eps, rows + m * width + f * hidden);
    mxd_finish_input(w, g->row_count, rows, width, from, to);
    mxd_multiply(w, g->row_count, &(mxd_product){&d->feature_proj, g->states, hidden}, 1);
    mxd_barrier(w);
}

static void enter_layer(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t hidden = g->model->config.hidden, from, to;
    float eps = g->model->config.rms_eps, *rows = mxd_input_of(w, g->row_count, &from, &to)->rows;
    for (size_t m = from; m < to; m++) {
        float *embedding = rows + m * 2 * hidden;
        mxd_embed(g->model, g->rows[m].token, embedding);
        g->kernels.rmsnorm(embedding, d->embed_norm, hidden, eps, embedding);
        g->kernels.rmsnorm(g->states + m * hidden, d->state_norm, hidden, eps, embedding + hidden);
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
                             y + from * MXD_TILE_ROWS, mxd_draft_logits(g));
}

static void draft_head(const mxd_worker *w) {
    mxd_engine *g = w->g;
    const mxd_draft_model *d = &g->model->drafter;
    size_t rows = g->outcome_count, hidden = g->model->config.hidden, nblocks = hidden / MXD_BLOCK;
    mxd_normalize(w, rows, g->outcomes, d->final_norm, g->model->config.layers);
    mxd_act act = mxd_act_of(w, rows);
    multiply_head(w, g->draft_head, d->vocab / MXD_TILE_ROWS, &act, rows, g->draft_logits);
    for (size_t i = 0; i < rows; i++) {
        const mxd_seq *s = &g->seqs[g->rows[g->outcomes[i].row].slot];
        mxd_act one = act;
        one.q += i * hidden, one.s += i * nblocks, one.bias += i * nblocks * 2;
        multiply_head(w, s->context_head, mxd_pad_tile(s->context_rows) / MXD_TILE_ROWS, &one, 1,
                      g->draft_logits + i * mxd_draft_logits(g) + d->vocab);
    }
}

static void run_drafter(const mxd_worker *w) {
    enter_layer(w);
    mxd_run_layer(w, &w->g->model->drafter.layer, w->g->model->config.layers);
    if (w->g->outcome_count) draft_head(w);
}

static void features_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    const mxd_worker w = {g, thread, mxd_pool_size(g->pool)};
    fuse_features(&w);
    run_drafter(&w);
}

static void states_job(void *arg, uint32_t thread) {
    mxd_engine *g = arg;
    const mxd_worker w = {g, thread, mxd_pool_size(g->pool)};
    run_drafter(&w);
}

static void run_pass(mxd_engine *g, void (*job)(void *, uint32_t)) {
    const mxd_draft_model *d = &g->model->drafter;
    double start = mxd_now();
    g->pass = 0;
    mxd_pool_run(g->pool, job, g);
    g->drafter_s += mxd_now() - start;
    g->draft_bytes += d->bytes + (g->outcome_count ? d->vocab / MXD_TILE_ROWS * tile_bytes(g) : 0);
}

/* ---- guesses ---- */

/* The two likeliest tokens by the logits of outcome i, or under sampling the one that the target's own noise would
 * draw, with the calibrated probability that the target chooses them. */
static void guess(mxd_engine *g, mxd_seq *s, size_t i, uint32_t depth) {
    const mxd_draft_model *d = &g->model->drafter;
    float *logits = g->draft_logits + i * mxd_draft_logits(g), *w = g->scratch.weights;
    uint32_t count = d->vocab + s->context_rows, first = 0, second = 1;
    uint32_t c = depth < d->depths ? depth : d->depths - 1;
    if (logits[second] > logits[first]) first = 1, second = 0;
    for (uint32_t j = 2; j < count; j++) {
        if (!(logits[j] > logits[second])) continue;
        if (logits[j] > logits[first]) second = first, first = j;
        else second = j;
    }
    g->kernels.exp_weights(logits, count, d->inverse_temperature[c], logits[first], w);
    float sum = 0;
    for (uint32_t j = 0; j < count; j++) sum += w[j];
    float best = 1 / (1 + d->odds[c] * (sum - 1)), next = best * w[second];
    if (!(sum >= 1)) { /* not finite: no guess */
        s->guess_count = 0;
        return;
    }
    if (s->sampling.temperature > 0) {
        uint32_t drawn = mxd_sample_among(&g->kernels, &s->sampling, logits, count, s->draft_ids,
                                          s->token_count + depth, &g->scratch);
        g->kernels.exp_weights(logits, count, d->inverse_temperature[c], logits[first], w);
        s->guesses[0] = (mxd_guess){s->draft_ids[drawn], w[drawn] / sum};
        s->guess_count = 1;
        return;
    }
    s->guesses[0] = (mxd_guess){s->draft_ids[first], best};
    s->guesses[1] = (mxd_guess){s->draft_ids[second], next < 1 - best ? next : 1 - best};
    s->guess_count = 2;
}

/* Behind a pass: the guesses and states of the sequences whose rows were outcomes. */
static void take_guesses(mxd_engine *g, uint32_t depth) {
    size_t hidden = g->model->config.hidden;
    for (size_t i = 0; i < g->outcome_count; i++) {
        size_t m = g->outcomes[i].row;
        mxd_seq *s = &g->seqs[g->rows[m].slot];
        memcpy(s->draft_state, g->x + m * hidden, hidden * sizeof(float));
        guess(g, s, i, depth);
    }
}

static void add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, int guesses) {
    if (guesses) g->outcomes[g->outcome_count++] = (mxd_outcome){.row = (uint32_t)g->row_count};
    g->rows[g->row_count++] = (mxd_row){.slot = s->slot, .position = (uint32_t)position, .token = token};
}

void mxd_draft_model_follow(mxd_engine *g, mxd_seq *const *seqs, const uint32_t *const *step_rows, const size_t *counts,
                            size_t n) {
    int pauses = g->draft_min == 0 && !mxd_policy_asks_model(g->policy, n);
    g->row_count = g->outcome_count = g->side_used = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        s->guess_count = 0;
        if (pauses) continue; /* for good: the positions of this step will be missing */
        if (s->draft_done + counts[i] != s->done) continue; /* it missed some positions: it drafts no more */
        for (size_t k = 0; k < counts[i] && s->draft_done + 1 < s->token_count; k++, s->draft_done++) {
            g->feature_row[g->row_count] = step_rows[i][k];
            int newest = s->draft_done + 2 == s->token_count;
            add_row(g, s, s->draft_done, s->tokens[s->draft_done + 1], newest);
        }
        learn_context(g, s);
    }
    if (g->row_count == 0) return;
    run_pass(g, features_job);
    take_guesses(g, 0);
}

/* A node for each guess; returns the index of the likeliest. */
static int32_t propose_guesses(const mxd_policy *p, mxd_seq *s, int32_t parent) {
    static const uint8_t kinds[2] = {MXD_KIND_MODEL, MXD_KIND_SECOND};
    int32_t first = -1;
    for (uint32_t k = 0; k < s->guess_count && s->proposal.count < MXD_MAX_DRAFT; k++) {
        float chance = s->guesses[k].chance;
        uint8_t bin = (uint8_t)(chance * (k ? 8 : 16));
        if (bin > (k ? 7 : 15)) bin = k ? 7 : 15;
        uint32_t node = mxd_propose(p, &s->proposal, s->guesses[k].token, parent, (uint8_t)(kinds[k] + bin), chance);
        if (k == 0) first = (int32_t)node;
    }
    return first;
}

/* Which sequences a draft step at a depth should deepen, by what that saves together; returns how many. */
static size_t deepens(const mxd_engine *g, mxd_seq *const *seqs, const size_t *most, int32_t *newest, size_t n,
                      size_t rows, uint32_t depth) {
    int asked = depth < g->draft_min;
    size_t count = 0;
    double gain = 0;
    for (size_t i = 0; i < n; i++) {
        if (newest[i] < 0) continue;
        double more = mxd_policy_deeper_gain(g->policy, seqs[i]->proposal.path[newest[i]], rows);
        if (depth >= most[i] || !(asked || more > 0)) newest[i] = -1;
        else count++, gain += more;
    }
    return asked || gain > mxd_policy_draft_cost(g->policy) ? count : 0;
}

void mxd_draft_model_propose(mxd_engine *g, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows) {
    int32_t newest[MXD_MAX_SEQS];
    size_t hidden = g->model->config.hidden;
    for (size_t i = 0; i < n; i++) newest[i] = most[i] > 0 ? propose_guesses(g->policy, seqs[i], -1) : -1;
    for (uint32_t depth = 1; depth < MXD_MAX_DRAFT; depth++) {
        if (deepens(g, seqs, most, newest, n, rows, depth) == 0) return;
        g->row_count = g->outcome_count = g->side_used = 0;
        for (size_t i = 0; i < n; i++) {
            mxd_seq *s = seqs[i];
            if (newest[i] < 0) continue;
            memcpy(g->states + g->row_count * hidden, s->draft_state, hidden * sizeof(float));
            add_row(g, s, s->token_count - 2 + depth, s->proposal.token[newest[i]], 1);
        }
        run_pass(g, states_job);
        take_guesses(g, depth);
        for (size_t i = 0; i < n; i++)
            if (newest[i] >= 0) newest[i] = propose_guesses(g->policy, seqs[i], newest[i]);
    }
}

double mxd_draft_model_time(mxd_engine *g, uint32_t rows) {
    g->row_count = g->outcome_count = g->side_used = 0;
    for (uint32_t i = 0; i < rows; i++) add_row(g, &g->seqs[i], 0, 0, 1);
    double start = mxd_now();
    run_pass(g, states_job);
    take_guesses(g, 0);
    return mxd_now() - start;
}
