/* SPDX-License-Identifier: Apache-2.0 */
#include "speculate.h"

#include <string.h>

#include "clock.h"
#include "draft_base.h"
#include "sequence.h"

/* A looked-up token this likely is not worth the trained drafter's time. */
static const float SURE = 0.8f;

/* ---- proposing ---- */

/* Return the most tokens that may be drafted: the one chosen after them must still fit, and the tiers of the KV cache
 * stay as they are. */
static size_t draft_limit(const mxd_engine *g, const mxd_seq *s) {
    size_t most = g->draft_max, room = g->plan.ctx - s->token_count - 1, base_room = mxd_base_room(s) - 1;
    if (most > room) most = room;
    if (most > base_room) most = base_room;
    if (most > mxd_kv_room(s) - 1) most = mxd_kv_room(s) - 1;
    if (s->sampling.max_tokens) {
        /* None where the limit is reached already: a truncation clears the stop, not the count. */
        uint64_t used = s->stats.generated_tokens + 1;
        size_t left = used < s->sampling.max_tokens ? s->sampling.max_tokens - (size_t)used : 0;
        if (most > left) most = left;
    }
    return most;
}

/* Fill the proposal from the caller's drafter. */
static mxd_status ask_caller(mxd_seq *s, size_t most, mxd_error *err) {
    mxd_proposal *d = &s->drafts.proposal;
    uint32_t ids[MXD_MAX_DRAFT], depth[MXD_MAX_DRAFT];
    int32_t parent[MXD_MAX_DRAFT];
    for (int32_t i = 0; i < MXD_MAX_DRAFT; i++) parent[i] = i - 1;
    size_t n = s->caller_drafter(s->caller_drafter_arg, s->tokens, s->token_count, ids, parent, most);
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
        if (d->node[i].parent == parent && d->node[i].token == token) return (int32_t)i;
    return -1;
}

/* Add a chain to a tree, sharing what both begin with. */
static void graft(mxd_proposal *tree, const mxd_proposal *chain) {
    int32_t parent = -1;
    for (uint32_t i = 0; i < chain->count; i++) {
        int32_t node = find_child(tree, parent, chain->node[i].token);
        if (node < 0) {
            if (tree->count == MXD_MAX_DRAFT) return;
            node = (int32_t)tree->count++;
            tree->node[node] = chain->node[i];
            tree->node[node].parent = parent;
        }
        if (tree->node[node].path < chain->node[i].path) tree->node[node].path = chain->node[i].path;
        parent = node;
    }
}

/* Scale paths down where the drafters that disagree about a token promise more than certainty together. */
static void share_certainty(mxd_proposal *tree) {
    float factor[MXD_MAX_DRAFT], children[MXD_MAX_DRAFT + 1] = {0}; /* sums of paths; [0]: of the first tokens */
    for (uint32_t i = 0; i < tree->count; i++) children[tree->node[i].parent + 1] += tree->node[i].path;
    for (uint32_t i = 0; i < tree->count; i++) { /* a parent comes before its children */
        mxd_node *node = &tree->node[i];
        int32_t parent = node->parent;
        float most = parent < 0 ? 1 : tree->node[parent].path / factor[parent], sum = children[parent + 1];
        factor[i] = (parent < 0 ? 1 : factor[parent]) * (sum > most ? most / sum : 1);
        node->path *= factor[i];
    }
}

/* Fill the proposals of n sequences, up to most[i] tokens each, from the engine's own drafters: look-up, which costs
 * nothing, and the trained drafter, unless look-up is sure of itself. A step has `rows` rows that make a token each. */
static void ask_drafters(mxd_pass *pass, mxd_seq *const *seqs, const size_t *most, size_t n, size_t rows) {
    mxd_engine *g = pass->engine;
    const mxd_ngram_table *table = g->model->has_ngrams ? &g->model->ngrams : NULL;
    mxd_proposal found[MXD_MAX_SEQS];
    size_t left[MXD_MAX_SEQS] = {0};
    for (size_t i = 0; i < n; i++) {
        found[i].count = 0;
        if (seqs[i]->grammar.grammar) mxd_grammar_propose(g->policy, seqs[i], most[i], &found[i]);
        if (g->draft != MXD_DRAFT_MODEL && found[i].count == 0)
            mxd_ngram_propose(table, g->policy, seqs[i]->tokens, seqs[i]->token_count, most[i], &found[i]);
        left[i] = found[i].count > 0 && found[i].node[0].path > SURE ? 0 : most[i];
        if (left[i] > 0 && seqs[i]->drafter.guess_count > 0) pass->observation.asked_model = 1;
    }
    if (g->drafter.in_use) mxd_draft_model_propose(g, seqs, left, n, rows, &pass->use);
    for (size_t i = 0; i < n; i++) {
        graft(&seqs[i]->drafts.proposal, &found[i]);
        share_certainty(&seqs[i]->drafts.proposal);
    }
    if (mxd_first_pass(g) && n == 1 && g->draft == MXD_DRAFT_AUTO) mxd_draft_base(g, seqs[0], most[0], &pass->use);
}

mxd_status mxd_speculate_propose(mxd_pass *pass, mxd_error *err) {
    mxd_engine *g = pass->engine;
    mxd_proposal *proposals[MXD_MAX_SEQS];
    mxd_seq *drafting[MXD_MAX_SEQS];
    size_t most[MXD_MAX_SEQS], n = 0, asked = 0, wanted = 0;
    bool logits = false;
    mxd_status status = MXD_OK;
    double start = mxd_now();
    for (size_t i = 0; i < pass->count && !status; i++) {
        const mxd_part *p = &pass->parts[i];
        mxd_seq *s = p->seq;
        mxd_proposal *proposal = mxd_draft_log_clear(s);
        wanted += p->reaches_end;
        logits |= mxd_seq_needs_logits(s);
        bool drafts = p->decoding && g->draft != MXD_DRAFT_OFF && pass->full == mxd_first_pass(g);
        size_t limit = drafts ? draft_limit(g, s) : 0;
        if (limit == 0) continue;
        proposals[n++] = proposal;
        if (s->caller_drafter) {
            status = ask_caller(s, limit, err);
            continue;
        }
        drafting[asked] = s;
        most[asked++] = limit;
    }
    if (!status) ask_drafters(pass, drafting, most, asked, wanted);
    size_t room = g->max_rows - pass->rows;
    if (logits && room > g->logit_rows - wanted) room = g->logit_rows - wanted;
    double proposed = mxd_now();
    for (size_t i = 0; i < pass->count; i++) {
        mxd_seq *s = pass->parts[i].seq;
        if (s->grammar.grammar) mxd_grammar_prune(s, &s->drafts.proposal);
        if (s->drafts.proposal.count > 0) mxd_draft_log_proposed(s);
    }
    if (n > 0 && !status) {
        mxd_policy_choose(g->policy, proposals, n, wanted, room, g->draft_min, &pass->observation);
        pass->observation.type = MXD_OBSERVED_CHOICE;
        mxd_tuner_report(&g->tuner, &pass->observation);
    }
    pass->schedule_s = mxd_now() - proposed;
    pass->draft_s = mxd_now() - start;
    return status;
}

/* ---- verifying ---- */

void mxd_speculate_add_rows(mxd_engine *g, const mxd_seq *s, size_t newest, mxd_output output) {
    const mxd_proposal *d = &s->drafts.proposal;
    uint32_t continued = 0; /* bit 1 + i: node i has a successor in the cache; bit 0: the newest token has */
    for (uint32_t k = 0; k < d->count; k++) {
        int32_t above = d->node[k].parent + 1; /* bit of `continued`, and how many rows after the newest one */
        size_t parent = newest + (size_t)above;
        mxd_row *row = mxd_add_row(g, s, g->rows[parent].position + 1, d->node[k].token, output);
        if (g->rows[parent].side || continued >> above & 1) {
            row->side = ++g->side_count;
            row->parent = (uint32_t)parent;
        }
        continued |= 1u << above;
    }
}

/* Return what the sequence chooses after the row at n_past. */
static uint32_t choose_token(mxd_seq *s, const mxd_outcome *outcome) {
    const mxd_engine *g = s->engine;
    if (!outcome->logits) return outcome->winner;
    const uint32_t *allowed = NULL;
    uint32_t vocab = g->model->config.vocab, told = s->sampling.logprobs;
    uint32_t count = s->grammar.grammar ? mxd_grammar_allowed(s, &allowed) : vocab;
    if (told) memcpy(g->scratch.raw, outcome->logits, vocab * sizeof *outcome->logits);
    uint32_t token = mxd_sample(&g->kernels, &s->sampling, outcome->logits, count, allowed,
                                mxd_control_tokens(g->model), s->tokens, s->token_count, s->prompt_end, &g->scratch);
    if (told)
        mxd_log_probabilities(&g->kernels, g->scratch.raw, vocab, token,
                              &s->logprobs[(s->token_count - s->output_from) * told], told, &g->scratch);
    return token;
}

/* Report and count the verified children of a node, of which `chosen` was right (-1: none). */
static void score_children(mxd_seq *s, int32_t node, int32_t chosen, size_t depth) {
    const mxd_proposal *d = &s->drafts.proposal;
    size_t bin = depth < 7 ? depth : 7;
    for (uint32_t i = 0; i < d->count; i++) {
        if (d->node[i].parent != node) continue;
        mxd_observation observation = {
            .type = MXD_OBSERVED_DRAFT, .kind = d->node[i].kind, .accepted = (int32_t)i == chosen, .verified = 1};
        mxd_tuner_report(&s->engine->tuner, &observation);
        s->stats.drafted_at[bin]++;
    }
    if (chosen < 0) return;
    s->stats.accepted++;
    s->stats.accepted_at[bin]++;
}

void mxd_speculate_choose(const mxd_pass *pass, mxd_part *p) {
    const mxd_engine *g = pass->engine;
    mxd_seq *s = p->seq;
    int32_t node = -1; /* the newest token */
    s->stats.drafted += s->drafts.proposal.count;
    mxd_draft_log_verified(s);
    for (size_t depth = 0;; depth++) {
        const mxd_outcome *outcome = &g->outcomes[p->outcome + (size_t)(node + 1)];
        mxd_token_record record;
        if (!mxd_inspect(s, outcome, &record)) return;
        if (node >= 0) p->accepted_node[p->accepted++] = (uint32_t)node;
        record.token = choose_token(s, outcome);
        s->n_past++;
        if (depth == 0) mxd_draft_log_chosen(s, record.token);
        int32_t next = find_child(&s->drafts.proposal, node, record.token);
        score_children(s, node, next, depth);
        mxd_seq_commit(s, &record, next);
        if (next < 0 || s->stop != MXD_STOP_NONE) return; /* the last token is not processed, as in plain decoding */
        const mxd_row *row = &g->rows[p->first + p->rows + (size_t)next];
        if (row->side) mxd_kv_accept(g, row);
        node = next;
    }
}
