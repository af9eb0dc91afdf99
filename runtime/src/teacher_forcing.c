/* Teacher forcing: the logits of tokens that the caller gives. */
#include <string.h>

#include "forward.h"
#include "monitor.h"
#include "precision.h"
#include "sequence.h"

/* Process again what a truncation left to be processed, as prompts are. */
static mxd_status reprocess(mxd_seq *s, mxd_error *err) {
    mxd_engine *g = s->engine;
    while (s->done < s->token_count) {
        mxd_kv_settle(s);
        size_t rows = s->token_count - s->done;
        if (rows > g->max_rows) rows = g->max_rows;
        if (rows > mxd_kv_room(s)) rows = mxd_kv_room(s);
        g->row_count = g->side_used = 0;
        for (size_t k = 0; k < rows; k++) mxd_add_row(g, s, s->done + k, s->tokens[s->done + k], MXD_WANTS_NOTHING);
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
        mxd_add_row(g, s, from + k, from + k < s->done ? s->tokens[from + k] : ids[from + k - s->done], wants);
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
