/* Start here: sequences, from the prompt to the step that yields tokens and text. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cpu.h"
#include "engine.h"
#include "utf8.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

mxd_status mxd_seq_open(mxd_engine *g, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err) {
    *out = NULL;
    mxd_status status = mxd_sampling_check(sampling, err);
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
    s->engine = g;
    s->slot = slot;
    s->in_use = 1;
    s->sampling = *sampling;
    s->sampling.stop = NULL;
    s->token_count = s->done = s->prompt_end = s->output_from = s->held_len = s->text_len = 0;
    s->stop = MXD_STOP_NONE;
    s->stats = (mxd_stats){0};
    *out = s;
    return MXD_OK;
}

void mxd_seq_close(mxd_seq **seq) {
    if (*seq) (*seq)->in_use = 0;
    *seq = NULL;
}

static mxd_status check_ids(const mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err) {
    uint32_t vocab = s->engine->model->config.vocab;
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= vocab)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "token %zu is %u: the vocabulary has %u", i, ids[i], vocab);
    return MXD_OK;
}

mxd_status mxd_seq_prompt(mxd_seq *s, const uint32_t *ids, size_t n, mxd_error *err) {
    mxd_status status = check_ids(s, ids, n, err);
    if (status) return status;
    uint32_t ctx = s->engine->plan.ctx;
    if (n >= ctx || s->token_count + n >= ctx)
        return mxd_fail(err, MXD_ERR_CONTEXT, "prompt %zu tokens, context %u: no room to answer", s->token_count + n,
                        ctx);
    if (s->token_count + n == s->done)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "nothing to continue: the prompt is empty, all %zu tokens are processed",
                        s->done);
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    s->token_count += n;
    s->prompt_end = s->output_from = s->token_count;
    s->stop = MXD_STOP_NONE;
    s->held_len = s->text_len = 0;
    s->stats = (mxd_stats){.prompt_tokens = s->token_count - s->done};
    s->prompted_at = now();
    return MXD_OK;
}

mxd_status mxd_seq_truncate(mxd_seq *s, size_t n, mxd_error *err) {
    if (n > s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "cannot truncate %zu tokens to %zu", s->token_count, n);
    s->token_count = n;
    if (s->done > n) s->done = n;
    s->prompt_end = s->output_from = n;
    s->held_len = s->text_len = 0;
    s->stop = MXD_STOP_NONE;
    return MXD_OK;
}

const uint32_t *mxd_seq_output(const mxd_seq *s, size_t *n) {
    *n = s->token_count - s->output_from;
    return s->tokens + s->output_from;
}

const char *mxd_seq_text(const mxd_seq *s, size_t *len) {
    *len = s->text_len;
    return s->text;
}

mxd_stop_reason mxd_seq_stop(const mxd_seq *s) {
    return s->stop;
}

const uint32_t *mxd_seq_tokens(const mxd_seq *s, size_t *n) {
    *n = s->token_count;
    return s->tokens;
}

/* ---- text ---- */

/* Length of the longest end of held text that begins a stop string. */
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

/* Position of the first stop string in held text, or held_len. */
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

/* Commit a chosen token: its text, the stop it may cause, the statistics. */
static void commit(mxd_seq *s, uint32_t id) {
    const mxd_engine *g = s->engine;
    const mxd_tokenizer *t = &g->model->tokenizer;
    s->tokens[s->token_count++] = id;
    s->stats.generated_tokens++;
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

/* ---- the step ---- */

/* Rows of one sequence into the step: its next `count` unprocessed tokens; logits behind the last one if it is
 * the newest token. */
static void add_rows(mxd_engine *g, const mxd_seq *s, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t position = s->done + i;
        g->rows[g->row_count++] = (mxd_row){.slot = s->slot,
                                            .position = (uint32_t)position,
                                            .token = s->tokens[position],
                                            .wants_logits = position + 1 == s->token_count};
    }
}

static int runs(const mxd_seq *s) {
    return s->stop == MXD_STOP_NONE && s->token_count > s->done;
}

/* Bytes that a step streams for one sequence's rows: its cache so far. */
static uint64_t kv_bytes(const mxd_engine *g, size_t positions) {
    const mxd_config *c = &g->model->config;
    return (uint64_t)positions * c->layers * 2 * c->kv_heads * c->head_dim * sizeof *g->kv;
}

/* Bytes of weights that one step reads, whatever its rows. */
static uint64_t weight_bytes(const mxd_engine *g) {
    const mxd_matrix *head = &g->model->head;
    return g->model->plane_bytes[0] + (g->precision ? g->model->plane_bytes[1] : 0) +
           mxd_pad_tile(head->rows) / MXD_TILE_ROWS * (head->cols / MXD_BLOCK) * MXD_MXINT8_BLOCK_BYTES;
}

/* A decode step is one whose tokens were all chosen here; the others are prefill. */
static void account(mxd_seq *s, int decoding, double seconds) {
    mxd_stats *t = &s->stats;
    if (decoding) {
        t->steps++;
        t->decode_s += seconds;
        t->bytes_read += weight_bytes(s->engine) + kv_bytes(s->engine, s->done);
    } else {
        t->prefill_s += seconds;
    }
}

mxd_status mxd_step(mxd_engine *g, mxd_seq *const *seqs, size_t n, mxd_error *err) {
    size_t share[MXD_MAX_SEQS] = {0};
    if (n > g->max_seqs) return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu sequences, the engine has %u", n, g->max_seqs);
    uint64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        if (seqs[i]->engine != g || !seqs[i]->in_use || used & 1ull << seqs[i]->slot)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu is closed, repeated or of another engine", i);
        used |= 1ull << seqs[i]->slot;
    }
    double start = now();
    g->row_count = 0;
    /* One row for each that runs, so that nobody starves; what is left goes to prompts in order. */
    size_t left = g->max_rows;
    for (size_t i = 0; i < n; i++) left -= share[i] = runs(seqs[i]);
    for (size_t i = 0; i < n; i++) {
        seqs[i]->output_from = seqs[i]->token_count;
        seqs[i]->text_len = 0;
        if (!share[i]) continue;
        size_t more = seqs[i]->token_count - seqs[i]->done - 1;
        if (more > left) more = left;
        share[i] += more;
        left -= more;
        add_rows(g, seqs[i], share[i]);
    }
    if (g->row_count == 0) {
        for (size_t i = 0; i < n; i++) /* else a loop until the stop would never end */
            if (seqs[i]->stop == MXD_STOP_NONE)
                return mxd_fail(err, MXD_ERR_ARGUMENT, "sequence %zu has no token to process: prompt it first", i);
        return MXD_OK;
    }
    mxd_status status = mxd_forward(g, err);
    if (status) return status;

    size_t logit = 0;
    for (size_t i = 0; i < n; i++) {
        mxd_seq *s = seqs[i];
        if (!share[i]) continue;
        int decoding = s->done >= s->prompt_end;
        s->done += share[i];
        if (s->done == s->token_count) {
            float *logits = g->logits + logit++ * mxd_pad_tile(g->model->config.vocab);
            commit(s, mxd_sample(&g->kernels, &s->sampling, logits, g->model->config.vocab, s->tokens, s->token_count,
                                 &g->scratch));
            if (s->stats.generated_tokens == 1) s->stats.first_token_s = now() - s->prompted_at;
        }
        account(s, decoding, now() - start);
    }
    return MXD_OK;
}

mxd_status mxd_seq_logits(mxd_seq *s, const uint32_t *ids, size_t n, float *logits, mxd_error *err) {
    mxd_engine *g = s->engine;
    size_t vocab = g->model->config.vocab;
    mxd_status status = check_ids(s, ids, n, err);
    if (status) return status;
    if (s->done != s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "%zu queued tokens must be processed first", s->token_count - s->done);
    if (n > g->plan.ctx - s->token_count)
        return mxd_fail(err, MXD_ERR_CONTEXT, "%zu tokens, context %u", s->token_count + n, g->plan.ctx);
    memcpy(s->tokens + s->token_count, ids, n * sizeof *ids);
    size_t chunk = mxd_logit_chunk(g);
    for (size_t i = 0; i < n; i += g->row_count) {
        g->row_count = 0;
        s->token_count = s->done + (n - i < chunk ? n - i : chunk);
        add_rows(g, s, s->token_count - s->done);
        for (size_t m = 0; m < g->row_count; m++) g->rows[m].wants_logits = 1;
        if ((status = mxd_forward(g, err))) {
            s->token_count = s->done;
            return status;
        }
        for (size_t m = 0; m < g->row_count; m++)
            memcpy(logits + (i + m) * vocab, g->logits + m * mxd_pad_tile(vocab), vocab * sizeof *logits);
        s->done = s->token_count;
    }
    s->prompt_end = s->output_from = s->token_count;
    return MXD_OK;
}

/* ---- statistics ---- */

void mxd_seq_get_stats(const mxd_seq *s, mxd_stats *out) {
    *out = s->stats;
    out->peak_rss_bytes = mxd_peak_rss();
}

static double per_second(uint64_t count, double seconds) {
    return seconds > 0 ? (double)count / seconds : 0;
}

size_t mxd_seq_stats_json(const mxd_seq *s, char *buf, size_t cap) {
    static const char *const stops[] = {"none", "eos", "limit", "context", "string"};
    const mxd_engine *g = s->engine;
    mxd_stats t;
    mxd_seq_get_stats(s, &t);
    uint64_t decoded = t.generated_tokens ? t.generated_tokens - 1 : 0; /* the first comes out of the prefill */
    int len = snprintf(
        buf, cap,
        "{\"prompt_tokens\": %llu, \"generated_tokens\": %llu, \"prefill_s\": %.6f, \"decode_s\": %.6f, "
        "\"first_token_s\": %.6f, \"prefill_tok_per_s\": %.3f, \"decode_tok_per_s\": %.3f, \"drafted\": %llu, "
        "\"accepted\": %llu, \"steps\": %llu, \"tokens_per_step\": %.4f, \"core_fraction\": {\"compute\": 0, "
        "\"precision\": 0, \"memory\": 0}, \"bytes_read\": %llu, \"peak_rss_bytes\": %llu, \"stop\": \"%s\", "
        "\"seed\": %llu, \"threads\": %u, \"ctx\": %u, \"precision\": \"%s\", \"kernels\": {\"matmul_mxfp4\": \"%s\", "
        "\"matmul_mxint8\": \"%s\", \"attention\": \"%s\", \"quantize\": \"%s\"}}",
        (unsigned long long)t.prompt_tokens, (unsigned long long)t.generated_tokens, t.prefill_s, t.decode_s,
        t.first_token_s, per_second(t.prompt_tokens, t.prefill_s), per_second(decoded, t.decode_s),
        (unsigned long long)t.drafted, (unsigned long long)t.accepted, (unsigned long long)t.steps,
        t.steps ? (double)decoded / (double)t.steps : 0.0, (unsigned long long)t.bytes_read,
        (unsigned long long)t.peak_rss_bytes, stops[s->stop], (unsigned long long)s->sampling.seed, g->plan.threads,
        g->plan.ctx, g->precision ? "full" : "base", g->kernel_names.matmul_mxfp4, g->kernel_names.matmul_mxint8,
        g->kernel_names.attention, g->kernel_names.quantize);
    return (size_t)len;
}
