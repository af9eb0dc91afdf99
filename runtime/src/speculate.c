/* Speculation within a pass: ask the drafters, choose what is verified, keep what the target chooses itself. */
#include "speculate.h"

#include <string.h>

#include "clock.h"
#include "draft_base.h"
#include "draft_model.h"
#include "draft_log.h"
#include "monitor.h"
#include "precision.h"
#include "sequence.h"

/* ---- drafting ---- */

/* A looked-up token this likely is not worth the trained drafter's time. */
static const float SURE = 0.8f;

/* Most tokens that may be drafted: the one chosen behind them must still fit, and the tiers of the KV cache stay as they
 * are. */
static size_t draft_limit(const mxd_engine *g, const mxd_seq *s) {
    size_t most = g->draft_max, room = g->plan.ctx - s->token_count - 1, base_room = mxd_base_room(s) - 1;
    if (most > room) most = room;
    if (most > base_room) most = base_room;
    if (most > mxd_kv_room(s) - 1) most = mxd_kv_room(s) - 1;
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
    size_t left[MXD_MAX_SEQS] = {0};
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
    if (mxd_first_pass(g) && n == 1 && g->draft == MXD_DRAFT_AUTO) mxd_draft_base(g, seqs[0], most[0]);
    return asked_model;
}

mxd_status mxd_speculate_propose(mxd_pass *pass, mxd_error *err) {
    mxd_engine *g = pass->g;
    mxd_proposal *proposals[MXD_MAX_SEQS];
    mxd_seq *drafting[MXD_MAX_SEQS];
    size_t most[MXD_MAX_SEQS], n = 0, asked = 0, wanted = 0;
    int sampled = 0;
    mxd_status status = MXD_OK;
    double start = mxd_now();
    for (size_t i = 0; i < pass->count && !status; i++) {
        mxd_part *p = &pass->parts[i];
        mxd_seq *s = p->seq;
        s->proposal.count = 0;
        wanted += (size_t)p->reaches_end;
        sampled |= !mxd_is_greedy(&s->sampling);
        int drafts = p->decoding && g->draft != MXD_DRAFT_OFF && pass->full == mxd_first_pass(g);
        size_t limit = drafts ? draft_limit(g, s) : 0;
        if (limit == 0) continue;
        if (s->drafter) status = ask_caller(s, limit, err);
        else drafting[asked] = s, most[asked++] = limit;
        proposals[n++] = &s->proposal;
    }
    if (!status) pass->seen.asked_model = ask_drafters(g, drafting, most, asked, wanted) & 1;
    size_t room = g->max_rows - pass->rows;
    if (sampled && room > g->logit_rows - wanted) room = g->logit_rows - wanted;
    double proposed = mxd_now();
    for (size_t i = 0; i < pass->count; i++)
        if (pass->parts[i].seq->proposal.count > 0) mxd_draft_log_proposed(pass->parts[i].seq);
    if (n > 0 && !status) {
        mxd_policy_choose(g->policy, proposals, n, wanted, room, g->draft_min, &pass->seen);
        pass->seen.seen = MXD_SEEN_CHOICE;
        mxd_tuner_report(&g->tuner, &pass->seen);
    }
    pass->schedule_s = mxd_now() - proposed;
    pass->draft_s = mxd_now() - start;
    return status;
}

/* ---- verifying ---- */

/* The rows of a sequence's drafted tokens. From each one in the cache, its first successor is in the cache too. */
void mxd_speculate_add_rows(mxd_engine *g, const mxd_seq *s, size_t newest, mxd_wants wants) {
    const mxd_proposal *d = &s->proposal;
    uint32_t continued = 0; /* bit 1 + i: node i has a successor in the cache; bit 0: the newest token has */
    for (uint32_t k = 0; k < d->count; k++) {
        size_t parent = newest + (size_t)(d->parent[k] + 1); /* drafted rows follow the newest one */
        mxd_row *row = mxd_add_row(g, s, g->rows[parent].position + 1, d->token[k], wants);
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
    for (uint32_t l = 0; l < c->layers; l++)
        for (int which = 0; which < 2; which++)
            for (uint32_t h = 0; h < c->kv_heads; h++)
                memcpy(mxd_kv_place(g, row, l, which, h), mxd_row_kv(g, row, l, which, h), g->kv.row_bytes);
}

/* What the sequence chooses behind the row at s->done. */
static uint32_t choose_token(mxd_engine *g, mxd_seq *s, const mxd_outcome *outcome) {
    if (!outcome->logits) return outcome->winner;
    return mxd_sample(&g->kernels, &s->sampling, outcome->logits, g->model->config.vocab, s->tokens, s->token_count,
                      &g->scratch);
}

static void commit(mxd_seq *s, uint32_t token, int drafted, mxd_token_record record) {
    size_t at = s->token_count - s->output_from;
    record.token = token;
    s->drafted[at] = (uint8_t)drafted;
    if (s->kv.doubt) s->kv.doubt[s->token_count] = record.confidence;
    s->records[at] = record;
    s->stats.core += record.look == MXD_LOOK_CORE;
    s->stats.due += record.look == MXD_LOOK_DUE;
    mxd_seq_commit(s, token);
}

/* Commit what the sequence chooses behind its newest token, and behind each drafted token that was the choice, up to a
 * row that turns out to be core. */
void mxd_speculate_choose(mxd_pass *pass, mxd_part *p) {
    mxd_engine *g = pass->g;
    mxd_seq *s = p->seq;
    const mxd_proposal *d = &s->proposal;
    int32_t node = -1;
    size_t depth = 0;
    s->stats.drafted += d->count;
    mxd_draft_log_verified(s);
    for (;;) {
        const mxd_outcome *outcome = &g->outcomes[p->outcome + (size_t)(node + 1)];
        mxd_token_record record = mxd_inspect(g, s, outcome);
        if (g->mixes && !pass->full && mxd_turns_core(s, &record)) return;
        if (g->mixes && pass->full) record = mxd_resolve(s, &record);
        if (node >= 0) p->accepted_node[p->accepted++] = (uint32_t)node;
        uint32_t token = choose_token(g, s, outcome);
        s->done++;
        int32_t next = find_child(d, node, token);
        if (depth == 0) mxd_draft_log_chosen(s, token);
        size_t bin = depth < 7 ? depth : 7;
        for (uint32_t i = 0; i < d->count; i++) {
            if (d->parent[i] != node) continue;
            mxd_observation seen = {
                .seen = MXD_SEEN_DRAFT, .kind = d->kind[i], .accepted = (int32_t)i == next, .verified = 1};
            mxd_tuner_report(&g->tuner, &seen);
            s->stats.drafted_at[bin]++;
        }
        commit(s, token, next >= 0, record);
        if (next < 0) return;
        s->draft_records[d->record[next]].accepted = 1;
        s->stats.accepted++;
        s->stats.accepted_at[bin]++;
        if (s->stop != MXD_STOP_NONE) return; /* the last token stays to be processed, as in plain decoding */
        const mxd_row *row = &g->rows[p->first + p->rows + (size_t)next];
        if (row->beside) move_into_cache(g, row);
        node = next;
        depth++;
    }
}

/* The trained drafter reads what the pass made of the positions that are now processed and that it has not read. */
void mxd_speculate_follow(mxd_pass *pass) {
    mxd_seq *seqs[MXD_MAX_SEQS];
    size_t counts[MXD_MAX_SEQS], used = 0;
    const uint32_t *rows[MXD_MAX_SEQS];
    for (size_t i = 0; i < pass->count; i++) {
        const mxd_part *p = &pass->parts[i];
        const mxd_seq *s = p->seq;
        uint32_t *mine = pass->g->step_rows + used;
        size_t own = p->from + p->rows < s->done ? p->rows : s->done - p->from, n = 0; /* less one that turned core */
        for (size_t k = p->from < s->draft_done ? s->draft_done - p->from : 0; k < own; k++)
            mine[n++] = (uint32_t)(p->first + k);
        for (uint32_t k = 0; k < p->accepted; k++) mine[n++] = (uint32_t)(p->first + p->rows) + p->accepted_node[k];
        seqs[i] = p->seq, rows[i] = mine, counts[i] = n;
        used += n;
    }
    mxd_draft_model_follow(pass->g, seqs, rows, counts, pass->count);
}
