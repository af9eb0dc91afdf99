/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: their tokens, text and stops. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "sequence.h"

#include <assert.h>
#include <string.h>

#include "clock.h"
#include "engine.h"
#include "utf8.h"

/* ---- opening ---- */

mxd_status mxd_seq_open_mixing(mxd_engine *g, bool mixes, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err) {
    *out = NULL;
    mxd_status status = mxd_engine_idle(g, err);
    if (!status) status = mxd_sampling_check(sampling, err);
    if (status) return status;
    if (sampling->stop_count > MXD_MAX_STOP_STRINGS)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%u stop strings: at most %d", sampling->stop_count,
                        MXD_MAX_STOP_STRINGS);
    uint32_t slot = 0;
    while (slot < g->max_seqs && g->seqs[slot].in_use) slot++;
    if (slot == g->max_seqs)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "all %u sequences of the engine are open", g->max_seqs);

    mxd_seq *s = &g->seqs[slot];
    for (uint32_t i = 0; i < sampling->stop_count; i++) {
        size_t len = strlen(sampling->stop[i]);
        if (len < 1 || len > MXD_MAX_STOP_BYTES)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "stop string %u has %zu bytes: 1..%d are allowed", i + 1, len,
                            MXD_MAX_STOP_BYTES);
        memcpy(s->stop_text[i], sampling->stop[i], len);
        s->stop_len[i] = (uint32_t)len;
    }
    s->in_use = true;
    s->sampling = *sampling;
    s->sampling.stop = NULL;
    s->token_count = s->n_past = s->replay_end = s->prompt_end = s->output_from = s->held_len = s->text_len = 0;
    s->stop = MXD_STOP_NONE;
    s->stats = (mxd_stats){0};
    s->caller_drafter = NULL;
    s->grammar.grammar = NULL;
    mxd_grammar_begin(s, 0);
    mxd_kv_truncate(s, 0);
    mxd_monitor_truncate(s, 0);
    mxd_precision_open(s, mixes);
    mxd_draft_model_open(s);
    mxd_draft_log_begin(s);
    *out = s;
    return MXD_OK;
}

mxd_status mxd_seq_open(mxd_engine *g, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err) {
    return mxd_seq_open_mixing(g, g->mixes, sampling, out, err);
}

mxd_status mxd_seq_copy(const mxd_seq *from, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err) {
    mxd_status status = mxd_seq_open(from->engine, sampling, out, err);
    if (status) return status;
    mxd_seq *s = *out;
    memcpy(s->tokens, from->tokens, from->token_count * sizeof *s->tokens);
    s->token_count = s->output_from = from->token_count;
    s->n_past = from->n_past;
    s->replay_end = from->replay_end;
    s->prompt_end = from->prompt_end;
    if (s->token_count == s->engine->plan.ctx) s->stop = MXD_STOP_CONTEXT;
    memcpy(s->held, from->held, from->held_len);
    s->held_len = from->held_len;
    mxd_kv_copy(s, from);
    mxd_monitor_copy(s, from);
    mxd_precision_copy(s, from);
    mxd_draft_model_copy(s, from);
    s->stats.prompt_tokens = s->token_count - s->n_past;
    s->prompted_at = mxd_now();
    mxd_seq_check(s);
    return MXD_OK;
}

void mxd_seq_close(mxd_seq **seq) {
    if (*seq) (*seq)->in_use = false;
    *seq = NULL;
}

/* ---- tokens ---- */

mxd_status mxd_seq_check_ids(const mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err) {
    uint32_t vocab = s->engine->model->config.vocab;
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= vocab)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "token %zu is %u: the vocabulary has %u", i, ids[i], vocab);
    return MXD_OK;
}

mxd_status mxd_seq_prompt(mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err) {
    mxd_status status = mxd_engine_idle(s->engine, err);
    if (!status) status = mxd_seq_check_ids(s, ids, n, err);
    if (status) return status;
    uint32_t ctx = s->engine->plan.ctx;
    if (n >= ctx || s->token_count + n >= ctx)
        return mxd_fail(err, MXD_ERR_CONTEXT, "prompt %zu tokens, context %u: no room to answer", s->token_count + n,
                        ctx);
    if (s->token_count + n == mxd_seq_known(s))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "nothing to continue: the prompt is empty, all %zu tokens are processed",
                        s->token_count);
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    s->token_count += n;
    s->prompt_end = s->output_from = s->token_count;
    mxd_grammar_begin(s, s->token_count);
    s->stop = MXD_STOP_NONE;
    s->held_len = s->text_len = 0;
    mxd_draft_model_truncate(s, s->n_past);
    mxd_precision_prompt(s);
    s->stats = (mxd_stats){.prompt_tokens = s->token_count - s->n_past};
    s->expected_tokens = s->expected_s = 0;
    s->prompted_at = mxd_now();
    mxd_seq_check(s);
    return MXD_OK;
}

mxd_status mxd_seq_truncate(mxd_seq *s, size_t n, mxd_error *err) {
    if (n > s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "cannot truncate %zu tokens to %zu", s->token_count, n);
    mxd_status status = mxd_engine_idle(s->engine, err);
    if (status) return status;
    s->stop = n == s->engine->plan.ctx ? MXD_STOP_CONTEXT : MXD_STOP_NONE;
    if (n == s->token_count) return MXD_OK; /* nothing is forgotten */
    mxd_monitor_truncate(s, n);
    mxd_grammar_truncate(s, n);
    s->token_count = n;
    s->replay_end = n < mxd_seq_known(s) ? n : mxd_seq_known(s);
    s->n_past = mxd_precision_truncate(s, n, mxd_kv_truncate(s, n));
    mxd_draft_model_truncate(s, s->n_past);
    s->prompt_end = s->output_from = n;
    s->held_len = s->text_len = 0;
    mxd_seq_check(s);
    return MXD_OK;
}

size_t mxd_seq_rows_to_run(mxd_seq *s, bool full, size_t end, size_t most, size_t *from) {
    mxd_kv_settle(s);
    *from = s->precision.mixes && full ? s->precision.full_done : s->n_past;
    size_t rows = end - *from, again = s->n_past - *from; /* these leave the tiers as they are */
    if (rows > most) rows = most;
    if (rows > again && rows - again > mxd_kv_room(s)) rows = again + mxd_kv_room(s);
    if (!full && rows > mxd_base_room(s)) rows = mxd_base_room(s);
    return rows;
}

#ifdef MXD_DEBUG
void mxd_seq_check(const mxd_seq *s) {
    assert(s->n_past <= s->token_count && s->replay_end <= s->token_count);
    assert(s->prompt_end <= s->token_count && s->output_from <= s->token_count);
    assert(s->kv.aged <= s->n_past && s->drafter.n_past <= s->n_past);
    if (!s->precision.mixes) return;
    assert(s->kv.aged <= s->precision.full_done && s->precision.full_done <= s->n_past);
}
#endif

/* ---- what it made ---- */

const uint32_t *mxd_seq_output(const mxd_seq *s, size_t *n) {
    *n = s->token_count - s->output_from;
    return s->tokens + s->output_from;
}

const char *mxd_seq_text(const mxd_seq *s, size_t *len) {
    *len = s->text_len;
    return s->text;
}

mxd_stop mxd_seq_stop(const mxd_seq *s) {
    return s->stop;
}

void mxd_seq_set_drafter(mxd_seq *s, mxd_draft_function *function, void *arg) {
    s->caller_drafter = function;
    s->caller_drafter_arg = arg;
}

const mxd_token_record *mxd_seq_records(const mxd_seq *s) {
    return s->records;
}

const mxd_alternative *mxd_seq_logprobs(const mxd_seq *s) {
    return s->sampling.logprobs ? s->logprobs : NULL;
}

const uint32_t *mxd_seq_tokens(const mxd_seq *s, size_t *n) {
    *n = s->token_count;
    return s->tokens;
}

/* ---- text ---- */

/* Return the length of the longest end of held text that begins a stop string. */
static size_t stop_prefix(const mxd_seq *s) {
    size_t longest = 0;
    for (uint32_t i = 0; i < s->sampling.stop_count; i++) {
        size_t n = s->stop_len[i] - 1u;
        if (n > s->held_len) n = s->held_len;
        while (n > longest && memcmp(s->held + s->held_len - n, s->stop_text[i], n)) n--;
        if (n > longest) longest = n;
    }
    return longest;
}

/* Return the position of the first stop string in held text, or held_len. */
static size_t find_stop(const mxd_seq *s) {
    size_t first = s->held_len;
    for (uint32_t i = 0; i < s->sampling.stop_count; i++) {
        const char *p = memmem(s->held, s->held_len, s->stop_text[i], s->stop_len[i]);
        if (p && (size_t)(p - s->held) < first) first = (size_t)(p - s->held);
    }
    return first;
}

/* Move the first n held bytes to the step's text. */
static void release(mxd_seq *s, size_t n) {
    memcpy(s->text + s->text_len, s->held, n);
    s->text_len += n;
    s->held_len -= n;
    memmove(s->held, s->held + n, s->held_len);
}

void mxd_seq_commit(mxd_seq *s, const mxd_token_record *record, int32_t node) {
    const mxd_engine *g = s->engine;
    const mxd_tokenizer *t = &g->model->tokenizer;
    uint32_t id = record->token;
    size_t at = s->token_count - s->output_from;
    assert(at < MXD_MAX_STEP_TOKENS && s->token_count < g->plan.ctx);
    s->records[at] = *record;
    mxd_draft_log_committed(s, at, node);
    mxd_monitor_chosen(s, s->token_count, record->confidence);
    s->tokens[s->token_count++] = id;
    s->stats.generated_tokens++;
    s->stats.core += record->look == MXD_LOOK_CORE;
    s->stats.due += record->look == MXD_LOOK_DUE;
    if (!mxd_tokenizer_is_special(t, id)) {
        size_t len;
        const char *bytes = mxd_tokenizer_bytes(t, id, &len);
        memcpy(s->held + s->held_len, bytes, len);
        s->held_len += len;
    }
    size_t stop_at = find_stop(s);
    if (stop_at < s->held_len) {
        release(s, stop_at);
        s->held_len = 0;
        s->stop = MXD_STOP_STRING;
    } else if (mxd_tokenizer_is_eos(t, id) && !s->sampling.ignore_eos) {
        s->stop = MXD_STOP_EOS;
    } else if (mxd_grammar_read(s)) {
        s->stop = MXD_STOP_GRAMMAR;
    } else if (s->sampling.max_tokens && s->stats.generated_tokens >= s->sampling.max_tokens) {
        s->stop = MXD_STOP_LIMIT;
    } else if (s->token_count == g->plan.ctx) {
        s->stop = MXD_STOP_CONTEXT;
    }
    size_t keep = 0;
    if (s->stop == MXD_STOP_NONE) {
        size_t character = mxd_utf8_incomplete((const uint8_t *)s->held, s->held_len);
        keep = stop_prefix(s);
        if (character > keep) keep = character;
    }
    release(s, s->held_len - keep);
}
