/* Start here: the engine's step. Prompts are read in chunks; a sequence that generates runs its newest token and what
 * was drafted behind it, and keeps what its own choices confirm. */
#include <string.h>

#include "draft_base.h"
#include "draft_model.h"
#include "monitor.h"

/* One sequence's part of a step: rows first..first+rows of its own tokens, its drafted ones behind them. */
typedef struct part {
    mxd_seq *seq;
    size_t rows, first;
    size_t outcome; /* of its newest token, if the step reaches it; then those of the drafted ones */
    int reaches_end, decoding;
    uint32_t accepted, accepted_node[MXD_MAX_DRAFT]; /* drafted tokens that were processed and are now committed */
} part;

typedef struct step {
    mxd_engine *g;
    part parts[MXD_MAX_SEQS];
    size_t count, rows; /* rows: of the sequences' own tokens */
    double draft_s, schedule_s, verify_s, sample_s;
    mxd_observation seen; /* by the policy */
} step;

static int runs(const mxd_seq *s) {
    return s->stop == MXD_STOP_NONE && s->token_count > s->done;
}

#ifdef MXD_DEBUG
/* Make every use of what a rejected row left in the cache show: NaN in keys and values behind the committed ones. */
static void poison(const mxd_engine *g, const mxd_seq *s, size_t rows) {
    const mxd_config *c = &g->model->config;
    for (size_t position = s->done; position < s->done + rows && position < g->plan.ctx; position++)
        for (uint32_t l = 0; l < c->layers; l++)
            for (int which = 0; which < 2; which++)
                for (uint32_t h = 0; h < c->kv_heads; h++)
                    for (uint32_t i = 0; i < c->head_dim; i++)
                        mxd_kv(g, s->slot, l, which, h)[position * c->head_dim + i] = 0x7e00;
}
#endif

/* ---- statistics ---- */

/* Bytes that a step streams for one sequence's rows: its cache so far. */
static uint64_t kv_bytes(const mxd_engine *g, size_t positions) {
    const mxd_config *c = &g->model->config;
    return (uint64_t)positions * c->layers * 2 * c->kv_heads * c->head_dim * sizeof *g->kv;
}

/* A decode step is one whose tokens were all chosen here; the others are prefill. */
static void account(const step *t, const part *p, double seconds) {
    mxd_seq *s = p->seq;
    mxd_stats *stats = &s->stats;
    if (!p->decoding) {
        stats->prefill_s += seconds;
        return;
    }
    stats->steps++;
    stats->decode_s += seconds;
    stats->draft_s += t->draft_s;
    stats->schedule_s += t->schedule_s;
    stats->verify_s += t->verify_s;
    stats->sample_s += t->sample_s;
    const mxd_engine *g = s->engine;
    stats->bytes_read += mxd_weight_bytes(g, g->precision) + kv_bytes(g, s->done) + g->draft_bytes;
    s->expected_tokens += 1;
    for (uint32_t i = 0; i < s->proposal.count; i++) s->expected_tokens += (double)s->proposal.path[i];
    s->expected_s += mxd_policy_step_cost(s->engine->policy, s->engine->row_count) / (double)t->count;
}

/* ---- drafting ---- */

/* A looked-up token this likely is not worth the trained drafter's time. */
static const float SURE = 0.8f;

/* Most tokens that may be drafted: the one chosen behind them must still fit. */
static size_t draft_limit(const mxd_engine *g, const mxd_seq *s) {
    size_t most = g->draft_max, room = g->plan.ctx - s->token_count - 1;
    if (most > room) most = room;
    if (s->sampling.max_tokens) {
        size_t left = s->sampling.max_tokens - (size_t)s->stats.generated_tokens - 1;
        if (most > left) most = left;
    }
    return most;
}

/* What the caller's drafter proposes. */
static mxd_status ask_caller(mxd_seq *s, size_t most, mxd_error *err) {
    mxd_proposal *d = &s->proposal;
    uint32_t ids[MXD_MAX_DRAFT], depth[MXD_MAX_DRAFT];
    int32_t parent[MXD_MAX_DRAFT];
    for (int32_t i = 0; i < MXD_MAX_DRAFT; i++) parent[i] = i - 1;
    size_t n = s->drafter(s->drafter_arg, s->tokens, s->token_count, ids, parent, most);
    if (n > most) return mxd_fail(err, MXD_ERR_ARGUMENT, "the drafter wrote %zu tokens, %zu were asked for", n, most);
    mxd_status status = mxd_seq_check_ids(s, ids, n, err);
    for (size_t i = 0; i < n && !status; i++) {
        if (parent[i] < -1 || parent[i] >= (int32_t)i)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "drafted token %zu has parent %d", i, (int)parent[i]);
        depth[i] = parent[i] < 0 ? 0 : depth[parent[i]] + 1;
        uint8_t kind = (uint8_t)(MXD_KIND_CALLER + (depth[i] < 7 ? depth[i] : 7));
        mxd_propose(s->engine->policy, d, ids[i], parent[i], kind, mxd_policy_prior(kind));
    }
    return status;
}

static int32_t find_child(const mxd_proposal *d, int32_t parent, uint32_t token) {
    for (uint32_t i = 0; i < d->count; i++)
        if (d->parent[i] == parent && d->token[i] == token) return (int32_t)i;
    return -1;
}

/* Add a chain to a tree, sharing what both begin with. */
static void graft(mxd_proposal *tree, const mxd_proposal *chain) {
    int32_t parent = -1;
    for (uint32_t i = 0; i < chain->count; i++) {
        int32_t node = find_child(tree, parent, chain->token[i]);
        if (node < 0) {
            if (tree->count == MXD_MAX_DRAFT) return;
            node = (int32_t)tree->count++;
            tree->token[node] = chain->token[i];
            tree->parent[node] = parent;
            tree->kind[node] = chain->kind[i];
            tree->confidence[node] = chain->confidence[i];
            tree->path[node] = 0;
        }
        if (tree->path[node] < chain->path[i]) tree->path[node] = chain->path[i];
        parent = node;
    }
}

/* The engine's own drafters, for sequences that may draft up to most[i] tokens: look-up, which costs nothing, and the
 * trained drafter, unless look-up is sure of itself. Returns whether the latter had a guess. */
static int ask_drafters(mxd_engine *g, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows) {
    const mxd_ngram_table *table = g->model->has_ngrams ? &g->model->ngrams : NULL;
    mxd_proposal found[MXD_MAX_SEQS];
    size_t left[MXD_MAX_SEQS];
    int asked_model = 0;
    for (size_t i = 0; i < n; i++) {
        found[i].count = 0;
        if (g->draft != MXD_DRAFT_MODEL)
            mxd_ngram_propose(table, g->policy, seqs[i]->tokens, seqs[i]->token_count, most[i], &found[i]);
        left[i] = found[i].count > 0 && found[i].path[0] > SURE ? 0 : most[i];
        asked_model |= left[i] > 0 && g->features && seqs[i]->guess_count > 0;
    }
    if (g->features) mxd_draft_model_propose(g, seqs, left, n, rows);
    for (size_t i = 0; i < n; i++) graft(&seqs[i]->proposal, &found[i]);
    if (g->precision && n == 1 && g->draft == MXD_DRAFT_AUTO) mxd_draft_base(g, seqs[0], most[0]);
    return asked_model;
}

static mxd_status propose(step *t, mxd_error *err) {
    mxd_engine *g = t->g;
    mxd_proposal *proposals[MXD_MAX_SEQS];
    mxd_seq *drafting[MXD_MAX_SEQS];
    size_t most[MXD_MAX_SEQS], n = 0, asked = 0, wanted = 0;
    int sampled = 0;
    mxd_status status = MXD_OK;
    double start = mxd_now();
    for (size_t i = 0; i < t->count && !status; i++) {
        part *p = &t->parts[i];
        mxd_seq *s = p->seq;
        s->proposal.count = s->record_count = 0;
        wanted += (size_t)p->reaches_end;
        sampled |= !mxd_is_greedy(&s->sampling);
        size_t limit = p->decoding && g->draft != MXD_DRAFT_OFF ? draft_limit(g, s) : 0;
        if (limit == 0) continue;
        if (s->drafter) status = ask_caller(s, limit, err);
        else drafting[asked] = s, most[asked++] = limit;
        proposals[n++] = &s->proposal;
    }
    if (!status) t->seen.asked_model = ask_drafters(g, drafting, most, asked, wanted) & 1;
    size_t room = g->max_rows - t->rows;
    if (sampled && room > g->logit_rows - wanted) room = g->logit_rows - wanted;
    double proposed = mxd_now();
    for (size_t i = 0; i < t->count; i++) mxd_monitor_proposed(t->parts[i].seq);
    if (n > 0 && !status) {
        mxd_policy_choose(g->policy, proposals, n, wanted, room, g->draft_min, &t->seen);
        t->seen.seen = MXD_SEEN_CHOICE;
        mxd_tuner_report(&g->tuner, &t->seen);
    }
    t->schedule_s = mxd_now() - proposed;
    t->draft_s = mxd_now() - start;
    return status;
}

/* ---- rows ---- */

/* Divide the step among the sequences: one row for each that runs, so that nobody starves; what is left goes to
 * prompts in order. */
static void divide(step *t, mxd_seq *const *seqs, size_t n) {
    size_t left = t->g->max_rows;
    for (size_t i = 0; i < n; i++) left -= (size_t)runs(seqs[i]);
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        s->output_from = s->token_count;
        s->text_len = 0;
        if (!runs(s)) continue;
        size_t pending = s->token_count - s->done, more = pending - 1 < left ? pending - 1 : left;
        left -= more;
        t->rows += 1 + more;
        t->parts[t->count++] = (part){
            .seq = s, .rows = 1 + more, .reaches_end = 1 + more == pending, .decoding = s->done >= s->prompt_end};
    }
}

static mxd_row *add_row(mxd_engine *g, const mxd_seq *s, size_t position, uint32_t token, mxd_wants wants) {
    mxd_row *row = &g->rows[g->row_count++];
    *row = (mxd_row){.slot = s->slot, .position = (uint32_t)position, .token = token, .wants = wants};
    return row;
}

/* The rows of a sequence's drafted tokens. From each one in the cache, its first successor is in the cache too. */
static void add_drafted(mxd_engine *g, const mxd_seq *s, size_t newest, mxd_wants wants) {
    const mxd_proposal *d = &s->proposal;
    uint32_t continued = 0; /* bit 1 + i: node i has a successor in the cache; bit 0: the newest token has */
    for (uint32_t k = 0; k < d->count; k++) {
        size_t parent = newest + (size_t)(d->parent[k] + 1); /* drafted rows follow the newest one */
        mxd_row *row = add_row(g, s, g->rows[parent].position + 1, d->token[k], wants);
        if (g->rows[parent].beside || continued >> (d->parent[k] + 1) & 1) {
            row->beside = ++g->side_used;
            row->parent = (uint32_t)parent;
        }
        continued |= 1u << (d->parent[k] + 1);
    }
}

/* Keys and values of accepted tokens beside the cache go to their place. */
static void move_into_cache(mxd_engine *g, const mxd_row *row) {
    const mxd_config *c = &g->model->config;
    mxd_row place = *row;
    place.beside = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        for (int which = 0; which < 2; which++)
            for (uint32_t h = 0; h < c->kv_heads; h++)
                memcpy(mxd_row_kv(g, &place, l, which, h), mxd_row_kv(g, row, l, which, h),
                       c->head_dim * sizeof *g->kv);
}

static void fill_rows(step *t) {
    mxd_engine *g = t->g;
    size_t outcome = 0;
    g->row_count = g->side_used = 0;
    for (size_t i = 0; i < t->count; i++) {
        part *p = &t->parts[i];
        const mxd_seq *s = p->seq;
        mxd_wants wants = mxd_is_greedy(&s->sampling) ? MXD_WANTS_WINNER : MXD_WANTS_LOGITS;
        p->first = g->row_count;
        p->outcome = outcome;
        for (size_t k = 0; k < p->rows; k++) {
            int newest = p->reaches_end && k + 1 == p->rows;
            add_row(g, s, s->done + k, s->tokens[s->done + k], newest ? wants : MXD_WANTS_NOTHING);
        }
        add_drafted(g, s, g->row_count - 1, wants);
        if (p->reaches_end) outcome += 1 + s->proposal.count;
    }
}

/* ---- choosing ---- */

/* Commit what the sequence chooses behind its newest token, and behind each drafted token that was the choice. */
static void choose(step *t, part *p) {
    mxd_engine *g = t->g;
    mxd_seq *s = p->seq;
    const mxd_proposal *d = &s->proposal;
    int32_t node = -1;
    size_t depth = 0;
    s->stats.drafted += d->count;
    mxd_monitor_verified(s);
    for (;;) {
        const mxd_outcome *outcome = &g->outcomes[p->outcome + (size_t)(node + 1)];
        uint32_t token = outcome->winner;
        if (outcome->logits)
            token = mxd_sample(&g->kernels, &s->sampling, outcome->logits, g->model->config.vocab, s->tokens,
                               s->token_count, &g->scratch);
        int32_t next = find_child(d, node, token);
        if (depth == 0) mxd_monitor_chosen(s, token);
        s->drafted[s->token_count - s->output_from] = next >= 0;
        size_t bin = depth < 7 ? depth : 7;
        for (uint32_t i = 0; i < d->count; i++) {
            if (d->parent[i] != node) continue;
            mxd_observation seen = {
                .seen = MXD_SEEN_DRAFT, .kind = d->kind[i], .accepted = (int32_t)i == next, .verified = 1};
            mxd_tuner_report(&g->tuner, &seen);
            s->stats.drafted_at[bin]++;
        }
        mxd_seq_commit(s, token);
        if (next < 0) return;
        s->records[d->record[next]].accepted = 1;
        s->stats.accepted++;
        s->stats.accepted_at[bin]++;
        if (s->stop != MXD_STOP_NONE) return; /* the last token stays to be processed, as in plain decoding */
        p->accepted_node[p->accepted++] = (uint32_t)next;
        const mxd_row *row = &g->rows[p->first + p->rows + (size_t)next];
        if (row->beside) move_into_cache(g, row);
        s->done++;
        node = next;
        depth++;
    }
}

static void choose_all(step *t) {
    double start = mxd_now();
    for (size_t i = 0; i < t->count; i++) {
        part *p = &t->parts[i];
        mxd_seq *s = p->seq;
        s->done += p->rows;
        if (!p->reaches_end) continue;
        int first = s->stats.generated_tokens == 0;
        choose(t, p);
        if (first) s->stats.first_token_s = mxd_now() - s->prompted_at;
#ifdef MXD_DEBUG
        poison(t->g, s, s->proposal.count);
#endif
    }
    t->sample_s = mxd_now() - start;
}

/* The trained drafter reads what the step made of the positions that are now processed. */
static void follow(step *t) {
    mxd_seq *seqs[MXD_MAX_SEQS];
    size_t counts[MXD_MAX_SEQS], used = 0;
    const uint32_t *rows[MXD_MAX_SEQS];
    for (size_t i = 0; i < t->count; i++) {
        const part *p = &t->parts[i];
        uint32_t *mine = t->g->step_rows + used;
        for (size_t k = 0; k < p->rows; k++) mine[k] = (uint32_t)(p->first + k);
        for (uint32_t k = 0; k < p->accepted; k++)
            mine[p->rows + k] = (uint32_t)(p->first + p->rows) + p->accepted_node[k];
        seqs[i] = p->seq, rows[i] = mine, counts[i] = p->rows + p->accepted;
        used += counts[i];
    }
    mxd_draft_model_follow(t->g, seqs, rows, counts, t->count);
}

/* What the tuner learns from a step of decoding sequences. */
static void report(step *t, size_t verified, double seconds) {
    mxd_observation *o = &t->seen;
    size_t decoding = 0;
    for (size_t i = 0; i < t->count; i++) {
        const part *p = &t->parts[i];
        decoding += (size_t)p->decoding;
        o->tokens = (uint16_t)(o->tokens + p->seq->token_count - p->seq->output_from);
    }
    if (decoding == 0) return;
    o->seen = MXD_SEEN_STEP;
    o->seconds = seconds;
    o->drafter_s = (float)t->g->drafter_s;
    o->rows = (uint16_t)verified;
    o->together = t->count > 1;
    mxd_tuner_report(&t->g->tuner, o);
}

static mxd_status run_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    if (n > g->max_seqs) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu sequences, the engine has %u", n, g->max_seqs);
    uint64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (seqs[i]->engine != g || !seqs[i]->in_use || used & 1ull << seqs[i]->slot)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu is closed, repeated or of another engine", i);
        used |= 1ull << seqs[i]->slot;
    }
    step t = {.g = g};
    double start = mxd_now();
    g->draft_bytes = 0;
    g->drafter_s = 0;
    divide(&t, seqs, n);
    if (t.count == 0) {
        for (size_t i = 0; i < n; i++) /* else a loop until the stop would never end */
            if (seqs[i]->stop == MXD_STOP_NONE)
                return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu has no token to process: prompt it first", i);
        return MXD_OK;
    }
    mxd_status status = propose(&t, err);
    if (status) return status;
    double before = mxd_now();
    fill_rows(&t);
    status = mxd_forward(g, g->precision, err);
    if (status == MXD_ERR_NUMERIC && g->row_count > t.rows) {
        /* The fault may be that of a wrong draft, which plain decoding would never meet. */
        for (size_t i = 0; i < t.count; i++) t.parts[i].seq->proposal.count = 0;
        fill_rows(&t);
        status = mxd_forward(g, g->precision, err);
    }
    if (status) return status;
    t.verify_s = mxd_now() - before;
    size_t verified = g->row_count;
    choose_all(&t);
    if (g->features) {
        before = mxd_now();
        follow(&t);
        t.draft_s += mxd_now() - before;
    }
    double seconds = mxd_now() - start;
    for (size_t i = 0; i < t.count; i++) account(&t, &t.parts[i], seconds);
    report(&t, verified, seconds);
    return MXD_OK;
}

mxd_status mxd_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    g->policy = mxd_tuner_begin(&g->tuner);
    mxd_status status = run_step(g, seqs, n, err);
    g->policy = NULL;
    mxd_tuner_end(&g->tuner);
    return status;
}

mxd_status mxd_seq_logits(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, mxd_error *err) {
    mxd_engine *g = s->engine;
    size_t vocab = g->model->config.vocab;
    mxd_status status = mxd_seq_check_ids(s, ids, n, err);
    if (status) return status;
    if (s->done != s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu queued tokens must be processed first", s->token_count - s->done);
    if (n > g->plan.ctx - s->token_count)
        return mxd_fail(err, MXD_ERR_CONTEXT, "%zu tokens, context %u", s->token_count + n, g->plan.ctx);
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    size_t chunk = mxd_logit_chunk(g);
    for (size_t i = 0; i < n; i += g->row_count) {
        g->row_count = g->side_used = 0;
        for (size_t k = i; k < n && k < i + chunk; k++) add_row(g, s, s->done + k - i, ids[k], MXD_WANTS_LOGITS);
        if ((status = mxd_forward(g, g->precision, err))) return status;
        for (size_t m = 0; m < g->row_count; m++)
            memcpy(logits + (i + m) * vocab, g->outcomes[m].logits, vocab * sizeof *logits);
        s->done += g->row_count;
        s->token_count = s->done;
    }
    s->prompt_end = s->output_from = s->token_count;
    return MXD_OK;
}
