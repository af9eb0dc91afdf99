/* Start here: the engine's step. Prompts are read in chunks; a sequence that generates runs its newest token and what
 * was drafted behind it, and keeps what its own choices confirm. Under mixed precision a step has two passes: one at base
 * precision, and one at full precision for rows that turned out to be core, for those that are due, and for prompts. */
#include <math.h>
#include <string.h>

#include "annotate.h"
#include "draft_base.h"
#include "draft_model.h"
#include "monitor.h"
#include "precision.h"

/* One sequence's part of a pass: rows first..first+rows of its own tokens, its drafted ones behind them. */
typedef struct part {
    mxd_seq *seq;
    size_t from;    /* position of its first row */
    size_t rows, first;
    size_t outcome; /* of its newest token, if the pass reaches it; then those of the drafted ones */
    int reaches_end, decoding;
    uint32_t accepted, accepted_node[MXD_MAX_DRAFT]; /* drafted tokens that were processed and are now committed */
} part;

/* One pass of a step through the model. */
typedef struct pass {
    mxd_engine *g;
    int full; /* at full precision */
    part parts[MXD_MAX_SEQS];
    size_t count, rows; /* rows: of the sequences' own tokens */
    double draft_s, schedule_s, verify_s, sample_s;
    mxd_observation seen; /* by the policy */
} pass;

static int runs(const mxd_seq *s) {
    return s->stop == MXD_STOP_NONE && s->token_count > mxd_seq_known(s);
}

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
static void account(const pass *t, const part *p) {
    mxd_seq *s = p->seq;
    mxd_stats *stats = &s->stats;
    const mxd_engine *g = s->engine;
    if (!p->decoding) return;
    stats->draft_s += t->draft_s;
    stats->schedule_s += t->schedule_s;
    stats->verify_s += t->verify_s;
    stats->sample_s += t->sample_s;
    stats->bytes_read += mxd_weight_bytes(g, t->full) + mxd_kv_bytes(s) + g->draft_bytes;
    if (t->full != mxd_first_pass(g)) return; /* a second look */
    s->expected_tokens += 1;
    for (uint32_t i = 0; i < s->proposal.count; i++) s->expected_tokens += (double)s->proposal.path[i];
    s->expected_s += mxd_policy_step_cost(g->policy, g->row_count) / (double)t->count;
}

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
    if (mxd_first_pass(g) && n == 1 && g->draft == MXD_DRAFT_AUTO) mxd_draft_base(g, seqs[0], most[0]);
    return asked_model;
}

static mxd_status propose(pass *t, mxd_error *err) {
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
        s->proposal.count = 0;
        wanted += (size_t)p->reaches_end;
        sampled |= !mxd_is_greedy(&s->sampling);
        int drafts = p->decoding && g->draft != MXD_DRAFT_OFF && t->full == mxd_first_pass(g);
        size_t limit = drafts ? draft_limit(g, s) : 0;
        if (limit == 0) continue;
        if (s->drafter) status = ask_caller(s, limit, err);
        else drafting[asked] = s, most[asked++] = limit;
        proposals[n++] = &s->proposal;
    }
    if (!status) t->seen.asked_model = ask_drafters(g, drafting, most, asked, wanted) & 1;
    size_t room = g->max_rows - t->rows;
    if (sampled && room > g->logit_rows - wanted) room = g->logit_rows - wanted;
    double proposed = mxd_now();
    for (size_t i = 0; i < t->count; i++)
        if (t->parts[i].seq->proposal.count > 0) mxd_monitor_proposed(t->parts[i].seq);
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

/* Divide the pass among the sequences whose next row is of its precision: one row for each, so that nobody starves;
 * what is left goes to those with more in order: prompts, and rows that a pass at full precision catches up. */
static void divide(pass *t, mxd_seq *const *seqs, size_t n) {
    const mxd_engine *g = t->g;
    size_t left = g->max_rows;
    for (size_t i = 0; i < n; i++) left -= (size_t)(runs(seqs[i]) && mxd_runs_full(seqs[i]) == t->full);
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!runs(s) || mxd_runs_full(s) != t->full) continue;
        mxd_kv_settle(s);
        size_t from = g->mixes && t->full ? s->full_done : s->done;
        size_t pending = s->token_count - from, more = pending - 1 < left ? pending - 1 : left;
        size_t again = s->done - from; /* the tiers stay as they are */
        if (more > again && more - again > mxd_kv_room(s) - 1) more = again + mxd_kv_room(s) - 1;
        left -= more;
        t->rows += 1 + more;
        t->parts[t->count++] = (part){.seq = s,
                                      .from = from,
                                      .rows = 1 + more,
                                      .reaches_end = 1 + more == pending,
                                      .decoding = s->done >= s->prompt_end};
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
    for (uint32_t l = 0; l < c->layers; l++)
        for (int which = 0; which < 2; which++)
            for (uint32_t h = 0; h < c->kv_heads; h++)
                memcpy(mxd_kv_place(g, row, l, which, h), mxd_row_kv(g, row, l, which, h), g->kv.row_bytes);
}

static void fill_rows(pass *t) {
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
            add_row(g, s, p->from + k, s->tokens[p->from + k], newest ? wants : MXD_WANTS_NOTHING);
        }
        add_drafted(g, s, g->row_count - 1, wants);
        if (p->reaches_end) outcome += 1 + s->proposal.count;
    }
}

/* ---- choosing ---- */

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
static void choose(pass *t, part *p) {
    mxd_engine *g = t->g;
    mxd_seq *s = p->seq;
    const mxd_proposal *d = &s->proposal;
    int32_t node = -1;
    size_t depth = 0;
    s->stats.drafted += d->count;
    mxd_monitor_verified(s);
    for (;;) {
        const mxd_outcome *outcome = &g->outcomes[p->outcome + (size_t)(node + 1)];
        mxd_token_record record = mxd_inspect(g, s, outcome);
        if (g->mixes && !t->full && mxd_turns_core(s, &record)) return;
        if (g->mixes && t->full) record = mxd_resolve(s, &record);
        if (node >= 0) p->accepted_node[p->accepted++] = (uint32_t)node;
        uint32_t token = choose_token(g, s, outcome);
        s->done++;
        int32_t next = find_child(d, node, token);
        if (depth == 0) mxd_monitor_chosen(s, token);
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

static void choose_all(pass *t) {
    const mxd_engine *g = t->g;
    double start = mxd_now();
    for (size_t i = 0; i < t->count; i++) {
        part *p = &t->parts[i];
        mxd_seq *s = p->seq;
        size_t before = s->done, processed = p->from + p->rows;
        if (g->mixes && t->full) mxd_caught_up(s, processed);
        if (p->reaches_end) {
            int first = s->stats.generated_tokens == 0;
            s->done = processed - 1;
            choose(t, p);
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
    t->sample_s = mxd_now() - start;
}

/* The trained drafter reads what the pass made of the positions that are now processed and that it has not read. */
static void follow(pass *t) {
    mxd_seq *seqs[MXD_MAX_SEQS];
    size_t counts[MXD_MAX_SEQS], used = 0;
    const uint32_t *rows[MXD_MAX_SEQS];
    for (size_t i = 0; i < t->count; i++) {
        const part *p = &t->parts[i];
        const mxd_seq *s = p->seq;
        uint32_t *mine = t->g->step_rows + used;
        size_t own = p->from + p->rows < s->done ? p->rows : s->done - p->from, n = 0; /* less one that turned core */
        for (size_t k = p->from < s->draft_done ? s->draft_done - p->from : 0; k < own; k++)
            mine[n++] = (uint32_t)(p->first + k);
        for (uint32_t k = 0; k < p->accepted; k++) mine[n++] = (uint32_t)(p->first + p->rows) + p->accepted_node[k];
        seqs[i] = p->seq, rows[i] = mine, counts[i] = n;
        used += n;
    }
    mxd_draft_model_follow(t->g, seqs, rows, counts, t->count);
}

/* ---- the step ---- */

/* What the tuner learns from a pass over decoding sequences. */
static void report(pass *t, size_t verified, double seconds) {
    mxd_observation *o = &t->seen;
    size_t decoding = 0;
    for (size_t i = 0; i < t->count; i++) {
        const part *p = &t->parts[i];
        decoding += (size_t)p->decoding;
        size_t made = p->seq->token_count - p->seq->output_from + (size_t)p->seq->awaits_full; /* that one comes yet */
        o->tokens = (uint16_t)(o->tokens + made);
    }
    if (decoding == 0) return;
    o->seen = MXD_SEEN_STEP;
    o->seconds = seconds;
    o->drafter_s = (float)t->g->drafter_s;
    o->rows = (uint16_t)verified;
    o->together = t->count > 1;
    mxd_tuner_report(&t->g->tuner, o);
}

/* Run the sequences' rows that are of the pass's precision, if there are any. */
static mxd_status run_pass(pass *t, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    mxd_engine *g = t->g;
    double start = mxd_now();
    g->draft_bytes = 0;
    g->drafter_s = 0;
    divide(t, seqs, n);
    if (t->count == 0) return MXD_OK;
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
    mxd_status status = propose(t, err);
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (status) return status;
    double before = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, t->full ? "full" : "base");
    fill_rows(t);
    status = mxd_forward(g, t->full, err);
    if (status == MXD_ERR_NUMERIC && g->row_count > t->rows) {
        /* The fault may be that of a wrong draft, which plain decoding would never meet. */
        for (size_t i = 0; i < t->count; i++) t->parts[i].seq->proposal.count = 0;
        fill_rows(t);
        status = mxd_forward(g, t->full, err);
    }
    MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
    if (status) return status;
    t->verify_s = mxd_now() - before;
    size_t verified = g->row_count;
    choose_all(t);
    if (g->features) {
        before = mxd_now();
        MXD_ANNOTATE_BEGIN(MXD_CHANNEL_PASS, "draft");
        follow(t);
        MXD_ANNOTATE_END(MXD_CHANNEL_PASS);
        t->draft_s += mxd_now() - before;
    }
    for (size_t i = 0; i < t->count; i++) account(t, &t->parts[i]);
    if (t->full == mxd_first_pass(g)) report(t, verified, mxd_now() - start);
    return MXD_OK;
}

/* Under mixed precision, after the pass at base precision: whether those that wait for full precision get it now. */
static int catches_up(mxd_seq *const *seqs, size_t n) {
    size_t waiting = 0, others = 0;
    uint32_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!runs(s)) continue;
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
        if (!runs(s)) continue;
        decoding[i] = s->done >= s->prompt_end;
        prefilling[i] = !decoding[i];
        any = 1;
    }
    for (size_t i = 0; i < n && !any; i++) /* else a loop until the stop would never end */
        if (seqs[i]->stop == MXD_STOP_NONE)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu has no token to process: prompt it first", i);
    double start = mxd_now();
    MXD_ANNOTATE_BEGIN(MXD_CHANNEL_STEP, "step");
    pass first = {.g = g, .full = mxd_first_pass(g)};
    mxd_status status = run_pass(&first, seqs, n, err);
    if (!status && g->mixes && catches_up(seqs, n)) {
        pass second = {.g = g, .full = 1};
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

/* Process again what a truncation left to be processed, as prompts are. */
static mxd_status reprocess(mxd_seq *s, mxd_error *err) {
    mxd_engine *g = s->engine;
    while (s->done < s->token_count) {
        mxd_kv_settle(s);
        size_t rows = s->token_count - s->done;
        if (rows > g->max_rows) rows = g->max_rows;
        if (rows > mxd_kv_room(s)) rows = mxd_kv_room(s);
        g->row_count = g->side_used = 0;
        for (size_t k = 0; k < rows; k++) add_row(g, s, s->done + k, s->tokens[s->done + k], MXD_WANTS_NOTHING);
        mxd_status status = mxd_forward(g, g->precision, err);
        if (status) return status;
        for (size_t m = 0; m < rows; m++) mxd_monitor_commit(s, m);
        s->done += rows;
        if (g->mixes) mxd_caught_up(s, s->done), s->catching_up = 0;
    }
    return MXD_OK;
}

/* Logits of the next of ids[n] tokens behind the sequence; returns how many through `count`. */
static mxd_status force(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, size_t *count, mxd_error *err) {
    mxd_engine *g = s->engine;
    size_t vocab = g->model->config.vocab, chunk = mxd_logit_chunk(g);
    int full = mxd_runs_full(s);
    mxd_kv_settle(s);
    size_t from = g->mixes && full ? s->full_done : s->done; /* one new row then, the last */
    size_t rows = g->mixes && full ? s->done + 1 - from : n;
    if (rows > chunk) rows = chunk;
    size_t again = s->done - from;
    if (rows > again && rows - again > mxd_kv_room(s)) rows = again + mxd_kv_room(s);
    if (!full && rows > mxd_base_room(s)) rows = mxd_base_room(s);
    g->row_count = g->side_used = 0;
    for (size_t k = 0; k < rows; k++) {
        mxd_wants wants = from + k < s->done ? MXD_WANTS_NOTHING : MXD_WANTS_LOGITS;
        add_row(g, s, from + k, from + k < s->done ? s->tokens[from + k] : ids[from + k - s->done], wants);
    }
    mxd_status status = mxd_forward(g, full, err);
    if (status) return status;
    if (g->mixes && full) mxd_caught_up(s, from + rows);
    *count = 0;
    for (size_t i = 0; i < g->outcome_count; i++, s->done++, ++*count) {
        mxd_token_record record = mxd_inspect(g, s, &g->outcomes[i]);
        if (g->mixes && !full && mxd_turns_core(s, &record)) break;
        if (g->mixes && full) mxd_resolve(s, &record);
        mxd_monitor_commit(s, g->outcomes[i].row);
        memcpy(logits + i * vocab, g->outcomes[i].logits, vocab * sizeof *logits);
    }
    return MXD_OK;
}

mxd_status mxd_seq_logits(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, mxd_error *err) {
    mxd_engine *g = s->engine;
    mxd_status status = mxd_seq_check_ids(s, ids, n, err);
    if (status) return status;
    if (mxd_seq_known(s) != s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu queued tokens must be processed first",
                        s->token_count - mxd_seq_known(s));
    if (n > g->plan.ctx - s->token_count)
        return mxd_fail(err, MXD_ERR_CONTEXT, "%zu tokens, context %u", s->token_count + n, g->plan.ctx);
    if ((status = reprocess(s, err))) return status;
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    for (size_t i = 0, count; i < n; i += count) {
        if ((status = force(s, ids + i, n - i, logits + i * g->model->config.vocab, &count, err))) return status;
        s->token_count = s->done;
    }
    s->prompt_end = s->output_from = s->token_count;
    return MXD_OK;
}
