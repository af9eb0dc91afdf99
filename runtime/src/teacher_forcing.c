/* SPDX-License-Identifier: Apache-2.0 */
/* Teacher forcing: logits and residual streams of tokens that the caller gives. */
#include <string.h>

#include "engine.h"
#include "sequence.h"

/* Process as many of the tokens up to position `end` as one pass can, as those of prompts are. */
static mxd_status read_on(mxd_seq *s, size_t end, mxd_error *err) {
    mxd_engine *g = s->engine;
    size_t from, rows = mxd_seq_rows_to_run(s, g->precision, end, g->max_rows, &from);
    mxd_clear_rows(g);
    for (size_t i = from; i < from + rows; i++) mxd_add_row(g, s, i, s->tokens[i], MXD_OUTPUT_NONE);
    mxd_status status = mxd_forward(g, g->precision, err);
    if (status) return status;
    for (size_t m = 0; m < rows; m++) mxd_monitor_commit(s, m);
    mxd_precision_processed(s, from + rows);
    s->n_past = from + rows;
    return MXD_OK;
}

/* Process again what a truncation left to replay. */
static mxd_status replay(mxd_seq *s, mxd_error *err) {
    while (s->n_past < s->token_count) {
        mxd_status status = read_on(s, s->token_count, err);
        if (status) return status;
    }
    return MXD_OK;
}

/* Run as many of the tokens up to position `end` as one pass can, and write the logits of those that it processes.
 * Under mixed precision that may be none: the row turned core, or catch-up had no room for it yet. */
static mxd_status force(mxd_seq *s, size_t end, float *logits, mxd_error *err) {
    mxd_engine *g = s->engine;
    size_t vocab = g->model->config.vocab, from;
    bool full = mxd_runs_full(s);
    if (s->precision.mixes && full) end = s->n_past + 1; /* catch-up reaches one new row */
    size_t rows = mxd_seq_rows_to_run(s, full, end, g->logit_rows, &from);
    mxd_clear_rows(g);
    for (size_t i = from; i < from + rows; i++)
        mxd_add_row(g, s, i, s->tokens[i], i < s->n_past ? MXD_OUTPUT_NONE : MXD_OUTPUT_LOGITS);
    mxd_status status = mxd_forward(g, full, err);
    if (status) return status;
    mxd_precision_processed(s, from + rows);
    for (size_t i = 0; i < g->outcome_count; i++, s->n_past++) {
        mxd_token_record record;
        if (!mxd_inspect(s, &g->outcomes[i], &record)) break;
        mxd_monitor_commit(s, g->outcomes[i].row);
        memcpy(logits + i * vocab, g->outcomes[i].logits, vocab * sizeof *logits);
    }
    return MXD_OK;
}

/* Take ids[n] after the tokens that are processed, replayed ones included. */
static mxd_status take(mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err) {
    const mxd_engine *g = s->engine;
    mxd_status status = mxd_seq_check_ids(s, ids, n, err);
    if (status) return status;
    if (mxd_seq_known(s) != s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu queued tokens must be processed first",
                        s->token_count - mxd_seq_known(s));
    if (n > g->plan.ctx - s->token_count)
        return mxd_fail(err, MXD_ERR_CONTEXT, "%zu tokens, context %u", s->token_count + n, g->plan.ctx);
    if ((status = replay(s, err))) return status;
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    return MXD_OK;
}

static mxd_status force_all(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, mxd_error *err) {
    size_t vocab = s->engine->model->config.vocab;
    mxd_status status = take(s, ids, n, err);
    if (status) return status;
    size_t start = s->token_count;
    for (; s->token_count < start + n; s->token_count = s->n_past)
        if ((status = force(s, start + n, logits + (s->n_past - start) * vocab, err))) return status;
    s->prompt_end = s->output_from = s->token_count;
    mxd_seq_check(s);
    return MXD_OK;
}

static mxd_status stream_all(mxd_seq *s, const uint32_t *ids, size_t n, mxd_streams *streams, mxd_error *err) {
    mxd_engine *g = s->engine;
    const mxd_config *c = &g->model->config;
    if (g->mixes) return mxd_fail(err, MXD_ERR_ARGUMENT, "mixed precision has no streams of its own");
    for (size_t i = 0; i < streams->count; i++)
        if (streams->layers[i] > c->layers)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "stream %zu is after layer %u of %u", i, streams->layers[i],
                            c->layers);
    mxd_status status = take(s, ids, n, err);
    if (status) return status;
    g->streams = streams;
    for (size_t end = s->token_count + n; s->token_count < end && !status; s->token_count = s->n_past) {
        status = read_on(s, end, err);
        streams->out += (s->n_past - s->token_count) * streams->count * c->hidden;
    }
    g->streams = NULL;
    s->prompt_end = s->output_from = s->token_count;
    mxd_seq_check(s);
    return status;
}

mxd_status mxd_seq_logits(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, mxd_error *err) {
    mxd_status status = mxd_engine_enter(s->engine, err);
    if (status) return status;
    status = force_all(s, ids, n, logits, err);
    mxd_engine_leave(s->engine);
    return status;
}

mxd_status mxd_seq_streams(mxd_seq *s, const uint32_t *ids, size_t n, const uint32_t *layers, size_t count, float *out,
                           mxd_error *err) {
    mxd_streams streams = {layers, count, out};
    mxd_status status = mxd_engine_enter(s->engine, err);
    if (status) return status;
    status = stream_all(s, ids, n, &streams, err);
    mxd_engine_leave(s->engine);
    return status;
}
