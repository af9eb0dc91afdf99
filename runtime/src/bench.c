/* mxdraft bench: how fast this machine runs a model, beside how fast it reads memory. Uses the public functions, as any
 * caller would; a repetition takes every measure once, so that a disturbance meets all of them. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bandwidth.h"
#include "clock.h"
#include "cpu.h"
#include "costs.h"
#include "internal.h"

/* Rows of one sequence in a step, which is what verifying drafts costs; behind them the step of many sequences. */
static const uint32_t WIDTHS[] = {1, 2, 3, 4, 6, 8, 12, 16};
enum { WIDTH_COUNT = sizeof WIDTHS / sizeof *WIDTHS, WIDEST = 16, SEQUENCES = 48, SEQUENCE_PROMPT = 16 };
enum { MAX_REPEAT = 1000, STEPS = 5 }; /* steps of each width in one repetition */

enum {
    PREFILL,
    DECODE,
    DRIFT,
    FIRST_TOKEN,
    DECODE_READ,
    BANDWIDTH,
    SHARE,
    ONE_ROW,
    ROWS, /* one for each width */
    BATCH_COST = ROWS + WIDTH_COUNT,
    BATCH,
    TEMPERATURE,
    DRAFT_SPEED, /* one for each drafter but AUTO, OFF first; AUTO behind them */
    DRAFT_GAIN = DRAFT_SPEED + 4,
    DRAFT_TAU = DRAFT_GAIN + 4,
    MEASURES = DRAFT_TAU + 4
};

/* The drafters in the order of their measures. */
static const mxd_draft DRAFTS[4] = {MXD_DRAFT_OFF, MXD_DRAFT_NGRAM, MXD_DRAFT_MODEL, MXD_DRAFT_AUTO};

/* What they are compared on: an answer each. */
static const char *const QUESTIONS[] = {
    "Tell me about the life of bees in a garden.",
    "Write a Python function that counts how often each word occurs in a text, and explain it.",
    "List five ways to save water at home, with one sentence about each.",
    "Correct the spelling and repeat: The ferst ship came in the morning. The secand ship came in the evning.",
};
enum { QUESTION_COUNT = sizeof QUESTIONS / sizeof *QUESTIONS, MAX_QUESTION = 256 };

/* What a measure is called, and the unit in which the table shows it. */
static const struct {
    const char *key, *label, *unit;
    double scale;
} NAMES[MEASURES] = {
    [PREFILL] = {"prefill_tok_per_s", "prefill", "tok/s", 1},
    [DECODE] = {"decode_tok_per_s", "decode", "tok/s", 1},
    [DRIFT] = {"decode_drift", "decode, end / begin", "%", 100},
    [FIRST_TOKEN] = {"first_token_s", "first token", "ms", 1e3},
    [DECODE_READ] = {"decode_gb_per_s", "decode reads", "GB/s", 1},
    [BANDWIDTH] = {"bandwidth_gb_per_s", "read bandwidth", "GB/s", 1},
    [SHARE] = {"bandwidth_share", "decode reads / bandwidth", "%", 100},
    [ONE_ROW] = {"row_step_s", "step of 1 row", "ms", 1e3},
    [ROWS + 0] = {"row_cost_1", "1 row", "x 1 row", 1},
    [ROWS + 1] = {"row_cost_2", "2 rows", "x 1 row", 1},
    [ROWS + 2] = {"row_cost_3", "3 rows", "x 1 row", 1},
    [ROWS + 3] = {"row_cost_4", "4 rows", "x 1 row", 1},
    [ROWS + 4] = {"row_cost_6", "6 rows", "x 1 row", 1},
    [ROWS + 5] = {"row_cost_8", "8 rows", "x 1 row", 1},
    [ROWS + 6] = {"row_cost_12", "12 rows", "x 1 row", 1},
    [ROWS + 7] = {"row_cost_16", "16 rows", "x 1 row", 1},
    [BATCH_COST] = {"sequence_cost_48", "48 sequences", "x 1 sequence", 1},
    [BATCH] = {"batch48_tok_per_s", "48 sequences", "tok/s", 1},
    [TEMPERATURE] = {"temperature_c", "temperature", "C", 1},
    [DRAFT_SPEED + 0] = {"draft_off_tok_per_s", "answers, draft off", "tok/s", 1},
    [DRAFT_SPEED + 1] = {"draft_ngram_tok_per_s", "answers, draft ngram", "tok/s", 1},
    [DRAFT_SPEED + 2] = {"draft_model_tok_per_s", "answers, draft model", "tok/s", 1},
    [DRAFT_SPEED + 3] = {"draft_auto_tok_per_s", "answers, draft auto", "tok/s", 1},
    [DRAFT_GAIN + 0] = {"draft_off_gain", "draft off", "x off", 1},
    [DRAFT_GAIN + 1] = {"draft_ngram_gain", "draft ngram", "x off", 1},
    [DRAFT_GAIN + 2] = {"draft_model_gain", "draft model", "x off", 1},
    [DRAFT_GAIN + 3] = {"draft_auto_gain", "draft auto", "x off", 1},
    [DRAFT_TAU + 0] = {"draft_off_tokens_per_step", "draft off", "tokens/step", 1},
    [DRAFT_TAU + 1] = {"draft_ngram_tokens_per_step", "draft ngram", "tokens/step", 1},
    [DRAFT_TAU + 2] = {"draft_model_tokens_per_step", "draft model", "tokens/step", 1},
    [DRAFT_TAU + 3] = {"draft_auto_tokens_per_step", "draft auto", "tokens/step", 1},
};

typedef struct series {
    double *values; /* in the order measured */
    size_t count;   /* 0: not measured */
} series;

struct mxd_bench {
    mxd_bench_options options;
    uint32_t threads, precision;
    const char *kernel;
    series measures[MEASURES];
    double bytes_per_token;
    uint64_t peak_rss_bytes;
    int64_t flags_before, flags_seen; /* throttling, at the start and at any time since; -1: unknown */
};

static void add(mxd_bench *b, int measure, double value) {
    series *s = &b->measures[measure];
    s->values[s->count++] = value;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, size_t n) {
    double sorted[MAX_REPEAT * STEPS];
    memcpy(sorted, values, n * sizeof *values);
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

/* ---- measuring ---- */

/* Prefill and decode from an empty sequence. */
static mxd_status run_once(mxd_engine *g, mxd_seq *s, const uint32_t *prompt, uint32_t n, mxd_stats *stats,
                           mxd_error *err) {
    mxd_status status = mxd_seq_truncate(s, 0, err);
    if (!status) status = mxd_seq_prompt(s, prompt, n, err);
    while (!status && mxd_seq_stop(s) == MXD_STOP_NONE) status = mxd_step(g, &s, 1, err);
    if (!status) mxd_seq_get_stats(s, stats);
    return status;
}

static void add_run(mxd_bench *b, const mxd_stats *t) {
    add(b, PREFILL, (double)t->prompt_tokens / t->prefill_s);
    add(b, DECODE, (double)(t->generated_tokens - 1) / t->decode_s); /* the first comes out of the prefill */
    add(b, FIRST_TOKEN, t->first_token_s);
    add(b, DECODE_READ, 1e-9 * (double)t->bytes_read / t->decode_s);
}

/* Steps of 1 to 16 rows behind the prompt, as verifying drafts takes them, in turns. */
static mxd_status time_rows(mxd_bench *b, mxd_engine *g, mxd_error *err) {
    uint32_t ctx = g->plan.ctx, position = b->options.prompt_tokens;
    if (position + WIDEST > ctx) position = ctx > WIDEST ? ctx - WIDEST : 0;
    for (int step = 0; step < STEPS; step++)
        for (int w = 0; w < WIDTH_COUNT; w++) {
            double seconds;
            if (position + WIDTHS[w] > ctx || WIDTHS[w] > g->max_rows) continue;
            mxd_status status = mxd_time_rows(g, position, WIDTHS[w], mxd_first_pass(g), &seconds, err);
            if (status) return status;
            add(b, ROWS + w, seconds);
        }
    return MXD_OK;
}

/* Another engine's options for the precision of this one. */
static void same_precision(const mxd_engine *g, mxd_options *o) {
    o->precision = g->plan.precision;
    if (!g->mixes) return;
    o->core_fraction = g->core_fraction;
    o->catch_up = g->catch_up;
}

/* Short sequences in an engine of their own. */
typedef struct batch {
    mxd_engine *engine;
    mxd_seq *seqs[SEQUENCES];
} batch;

static void close_batch(batch *many) {
    for (int i = 0; i < SEQUENCES; i++) mxd_seq_close(&many->seqs[i]);
    mxd_engine_close(&many->engine);
}

/* Process the prompts of all sequences. */
static mxd_status open_batch(const mxd_engine *g, const uint32_t *ids, batch *many, mxd_error *err) {
    mxd_options options;
    mxd_options_default(&options);
    options.ctx = SEQUENCE_PROMPT + 1;
    options.max_seqs = SEQUENCES;
    options.threads = g->plan.threads;
    same_precision(g, &options);
    options.kv = g->kv.mode;
    mxd_sampling one;
    mxd_sampling_default(&one);
    one.max_tokens = 1;
    mxd_status status = mxd_engine_open(g->model, &options, &many->engine, err);
    for (int i = 0; i < SEQUENCES && !status; i++) {
        status = mxd_seq_open(many->engine, &one, &many->seqs[i], err);
        if (!status) status = mxd_seq_prompt(many->seqs[i], ids, SEQUENCE_PROMPT, err);
    }
    /* Each stops behind its first token; when the last one has, there is nothing left to run. */
    while (!status && mxd_seq_stop(many->seqs[SEQUENCES - 1]) == MXD_STOP_NONE)
        status = mxd_step(many->engine, many->seqs, SEQUENCES, err);
    return status;
}

/* One step in which each of n sequences decodes a token. */
static mxd_status time_sequences(batch *many, size_t n, const uint32_t *id, double *seconds, mxd_error *err) {
    mxd_status status = MXD_OK;
    for (size_t i = 0; i < n && !status; i++) {
        status = mxd_seq_truncate(many->seqs[i], SEQUENCE_PROMPT - 1, err);
        if (!status) status = mxd_seq_prompt(many->seqs[i], id, 1, err);
    }
    double start = mxd_now();
    if (!status) status = mxd_step(many->engine, many->seqs, n, err);
    *seconds = mxd_now() - start;
    return status;
}

static mxd_status time_batch(mxd_bench *b, batch *many, const uint32_t *id, mxd_error *err) {
    double one[STEPS], all[STEPS];
    for (int step = 0; step < STEPS; step++) {
        mxd_status status = time_sequences(many, 1, id, &one[step], err);
        if (!status) status = time_sequences(many, SEQUENCES, id, &all[step], err);
        if (status) return status;
    }
    add(b, BATCH_COST, median(all, STEPS) / median(one, STEPS));
    add(b, BATCH, SEQUENCES / median(all, STEPS));
    return MXD_OK;
}

static void watch_heat(mxd_bench *b) {
    double temperature = mxd_temperature();
    if (!isnan(temperature)) add(b, TEMPERATURE, temperature);
    if (b->flags_before >= 0) b->flags_seen |= mxd_throttle_flags();
}

/* ---- drafters ---- */

static mxd_status encode_question(const mxd_model *m, const char *text, uint32_t *ids, size_t *n, mxd_error *err) {
    const mxd_message message = {"user", text};
    if (m->has_chat) return mxd_chat_encode(m, &message, 1, 1, ids, MAX_QUESTION, n, err);
    return mxd_encode(m, text, strlen(text), ids, MAX_QUESTION, n, err);
}

/* One answer with one drafter. */
static mxd_status time_answer(mxd_bench *b, mxd_engine *g, int drafter, const uint32_t *ids, size_t n, double *off,
                              mxd_error *err) {
    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    greedy.max_tokens = b->options.tokens;
    mxd_seq *s;
    mxd_stats stats = {0};
    mxd_status status = mxd_seq_open(g, &greedy, &s, err);
    if (status) return status;
    status = run_once(g, s, ids, (uint32_t)n, &stats, err);
    mxd_seq_close(&s);
    if (status || stats.generated_tokens < 2) return status;
    double decoded = (double)(stats.generated_tokens - 1), speed = decoded / stats.decode_s;
    if (drafter == 0) *off = speed;
    add(b, DRAFT_SPEED + drafter, speed);
    add(b, DRAFT_GAIN + drafter, speed / *off);
    add(b, DRAFT_TAU + drafter, decoded / (double)stats.steps);
    return MXD_OK;
}

/* Every drafter asked for answers the questions in turn with plain decoding. */
static mxd_status compare_drafts(mxd_bench *b, const mxd_engine *g, mxd_error *err) {
    mxd_engine *engines[4] = {NULL};
    mxd_status status = MXD_OK;
    for (int d = 0; d < 4 && !status; d++) {
        if (d > 0 && !(b->options.drafts & 1u << DRAFTS[d])) continue;
        mxd_options options;
        mxd_options_default(&options);
        options.ctx = g->plan.ctx;
        options.threads = g->plan.threads;
        same_precision(g, &options);
        options.draft = DRAFTS[d];
        options.kv = g->kv.mode;
        options.kv_budget = g->kv.budget;
        status = mxd_engine_open(g->model, &options, &engines[d], err);
        if (!status && d > 0) status = mxd_engine_measure_costs(engines[d], NULL, err);
    }
    for (uint32_t i = 0; i < b->options.repeat && !status; i++)
        for (int q = 0; q < QUESTION_COUNT && !status; q++) {
            uint32_t ids[MAX_QUESTION];
            size_t n;
            double off = 0;
            status = encode_question(g->model, QUESTIONS[q], ids, &n, err);
            for (int d = 0; d < 4 && !status; d++)
                if (engines[d]) status = time_answer(b, engines[d], d, ids, n, &off, err);
        }
    for (int d = 0; d < 4; d++) mxd_engine_close(&engines[d]);
    return status;
}

/* What follows from other measures. */
static void derive(mxd_bench *b) {
    uint32_t quarter = (b->options.repeat + 3) / 4;
    const double *decode = b->measures[DECODE].values;
    add(b, DRIFT, median(decode + b->options.repeat - quarter, quarter) / median(decode, quarter));
    for (uint32_t i = 0; i < b->options.repeat; i++)
        add(b, SHARE, b->measures[DECODE_READ].values[i] / b->measures[BANDWIDTH].values[i]);
    const series *one_row = &b->measures[ROWS];
    if (!one_row->count) return;
    for (size_t i = 0; i < one_row->count; i++) add(b, ONE_ROW, one_row->values[i]);
    double one = median(one_row->values, one_row->count);
    for (int w = 0; w < WIDTH_COUNT; w++)
        for (size_t i = 0; i < b->measures[ROWS + w].count; i++) b->measures[ROWS + w].values[i] /= one;
}

/* What the measuring works on. */
typedef struct bench_state {
    mxd_engine *engine;
    mxd_seq *seq;
    uint32_t *prompt;
    mxd_bandwidth *bandwidth;
    batch many; /* engine NULL: does not fit memory */
} bench_state;

static mxd_status repeat(mxd_bench *b, bench_state *state, mxd_error *err) {
    mxd_stats stats;
    mxd_status status = run_once(state->engine, state->seq, state->prompt, b->options.prompt_tokens, &stats, err);
    if (status) return status;
    b->peak_rss_bytes = stats.peak_rss_bytes; /* before what only the benchmark needs */
    if ((status = mxd_bandwidth_open(b->threads, &state->bandwidth, err))) return status;
    if ((status = open_batch(state->engine, state->prompt, &state->many, err))) {
        close_batch(&state->many);
        if (status != MXD_ERR_MEMORY) return status;
    }
    b->flags_before = b->flags_seen = mxd_throttle_flags();
    for (uint32_t i = 0; i < b->options.repeat; i++) {
        status = run_once(state->engine, state->seq, state->prompt, b->options.prompt_tokens, &stats, err);
        if (status) return status;
        add_run(b, &stats);
        add(b, BANDWIDTH, 1e-9 * mxd_bandwidth_measure(state->bandwidth));
        if ((status = time_rows(b, state->engine, err))) return status;
        if (state->many.engine && (status = time_batch(b, &state->many, state->prompt, err))) return status;
        watch_heat(b);
    }
    b->options.tokens = (uint32_t)stats.generated_tokens; /* less if the context was full */
    b->bytes_per_token = (double)stats.bytes_read / (double)(stats.generated_tokens - 1);
    derive(b);
    return MXD_OK;
}

static mxd_status open_state(mxd_engine *g, const mxd_bench_options *o, bench_state *state, mxd_error *err) {
    size_t vocab = g->model->config.vocab, ids = o->prompt_tokens > SEQUENCE_PROMPT ? o->prompt_tokens : SEQUENCE_PROMPT;
    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    greedy.max_tokens = o->tokens;
    greedy.ignore_eos = 1;
    state->engine = g;
    state->prompt = malloc(ids * sizeof *state->prompt);
    if (!state->prompt) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for the benchmark");
    for (size_t i = 0; i < ids; i++) state->prompt[i] = (uint32_t)(i * 7919 % vocab);
    return mxd_seq_open(g, &greedy, &state->seq, err);
}

static void close_state(bench_state *state) {
    close_batch(&state->many);
    mxd_bandwidth_close(&state->bandwidth);
    mxd_seq_close(&state->seq);
    free(state->prompt);
}

static mxd_status allocate(const mxd_engine *g, const mxd_bench_options *o, mxd_bench **out, mxd_error *err) {
    size_t most = (size_t)o->repeat * STEPS;
    mxd_bench *b = calloc(1, sizeof *b);
    double *values = malloc(MEASURES * most * sizeof *values);
    if (!b || !values) {
        free(b);
        free(values);
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for %u repetitions", o->repeat);
    }
    b->options = *o;
    b->threads = g->plan.threads;
    b->precision = g->plan.precision;
    b->kernel = g->kernel_names.matmul_mxfp4;
    for (int i = 0; i < MEASURES; i++) b->measures[i].values = values + i * most;
    *out = b;
    return MXD_OK;
}

mxd_status mxd_bench_run(mxd_engine *g, const mxd_bench_options *o, mxd_bench **out, mxd_error *err) {
    *out = NULL;
    if (o->prompt_tokens < 1 || o->tokens < 2 || o->repeat < 1 || o->repeat > MAX_REPEAT)
        return mxd_fail(err, MXD_ERR_ARGUMENT,
                        "a prompt of %u tokens, %u generated, %u repetitions: at least 1, 2 and 1..%d are needed",
                        o->prompt_tokens, o->tokens, o->repeat, MAX_REPEAT);
    bench_state state = {0};
    mxd_bench *b = NULL;
    mxd_status status = allocate(g, o, &b, err);
    if (!status) status = open_state(g, o, &state, err);
    if (!status) status = repeat(b, &state, err);
    close_state(&state);
    if (!status && o->drafts) status = compare_drafts(b, g, err);
    if (status) mxd_bench_close(&b);
    *out = b;
    return status;
}

void mxd_bench_close(mxd_bench **bench) {
    if (*bench) free((*bench)->measures[0].values);
    free(*bench);
    *bench = NULL;
}

/* ---- the results as text ---- */

typedef struct text {
    char *buf;
    size_t cap, len;
} text;

/* As snprintf, behind what is there; counts on when the buffer is full. */
static void __attribute__((format(printf, 2, 3))) put(text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    size_t room = t->len < t->cap ? t->cap - t->len : 0;
    t->len += (size_t)vsnprintf(room ? t->buf + t->len : NULL, room, format, args);
    va_end(args);
}

typedef struct spread {
    double median, min, max;
} spread;

static spread spread_of(const series *s) {
    spread out = {median(s->values, s->count), s->values[0], s->values[0]};
    for (size_t i = 1; i < s->count; i++) {
        out.min = fmin(out.min, s->values[i]);
        out.max = fmax(out.max, s->values[i]);
    }
    return out;
}

/* Throttled while it ran: at some moment looked at, or between two of them. */
static int throttled(const mxd_bench *b) {
    int64_t new_flags = b->flags_seen & ~b->flags_before;
    return (b->flags_seen & 0xF) != 0 || (new_flags & 0xF0000) != 0;
}

static void put_table(text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    put(t, "prompt %u, generated %u, repetitions %u, threads %u, precision %s, %s\n", o->prompt_tokens, o->tokens,
        o->repeat, b->threads, mxd_precision_name(b->precision), b->kernel);
    put(t, "%-26s%10s%10s%10s\n", "", "median", "min", "max");
    for (int i = 0; i < MEASURES; i++) {
        const series *s = &b->measures[i];
        if (i >= DRAFT_SPEED && !s->count) continue; /* not asked for */
        put(t, "%-26s", NAMES[i].label);
        if (s->count) {
            spread v = spread_of(s);
            double scale = NAMES[i].scale;
            put(t, "%10.2f%10.2f%10.2f  %s\n", v.median * scale, v.min * scale, v.max * scale, NAMES[i].unit);
        } else {
            put(t, "%10s\n", "-");
        }
    }
    put(t, "%-26s%10.2f%20s  MB\n", "bytes a token", 1e-6 * b->bytes_per_token, "");
    put(t, "%-26s%10.2f%20s  MB\n", "peak memory", 1e-6 * (double)b->peak_rss_bytes, "");
    put(t, "%-26s%10s", "throttled", b->flags_before < 0 ? "-" : throttled(b) ? "yes" : "no");
    if (b->flags_before >= 0) put(t, "%20s  0x%x", "", (unsigned)b->flags_seen);
    put(t, "\n");
}

static void put_csv(text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    put(t, "measure,median,min,max\n");
    put(t, "version,%s,,\nprecision,%s,,\nkernel,%s,,\nthreads,%u,,\n", mxd_version(),
        mxd_precision_name(b->precision), b->kernel, b->threads);
    put(t, "prompt_tokens,%u,,\ngenerated_tokens,%u,,\nrepeat,%u,,\n", o->prompt_tokens, o->tokens, o->repeat);
    for (int i = 0; i < MEASURES; i++) {
        put(t, "%s,", NAMES[i].key);
        if (b->measures[i].count) {
            spread v = spread_of(&b->measures[i]);
            put(t, "%.6g,%.6g,%.6g\n", v.median, v.min, v.max);
        } else {
            put(t, ",,\n");
        }
    }
    put(t, "bytes_per_token,%.0f,,\npeak_rss_bytes,%llu,,\n", b->bytes_per_token,
        (unsigned long long)b->peak_rss_bytes);
    if (b->flags_before < 0) put(t, "throttled,,,\nthrottle_flags,,,\n");
    else put(t, "throttled,%d,,\nthrottle_flags,%u,,\n", throttled(b), (unsigned)b->flags_seen);
}

static void put_json(text *t, const mxd_bench *b) {
    const mxd_bench_options *o = &b->options;
    put(t, "{\"version\": \"%s\", \"precision\": \"%s\", \"kernel\": \"%s\", \"threads\": %u, ", mxd_version(),
        mxd_precision_name(b->precision), b->kernel, b->threads);
    put(t, "\"prompt_tokens\": %u, \"generated_tokens\": %u, \"repeat\": %u, ", o->prompt_tokens, o->tokens,
        o->repeat);
    for (int i = 0; i < MEASURES; i++) {
        put(t, "\"%s\": ", NAMES[i].key);
        if (b->measures[i].count) {
            spread v = spread_of(&b->measures[i]);
            put(t, "{\"median\": %.6g, \"min\": %.6g, \"max\": %.6g}, ", v.median, v.min, v.max);
        } else {
            put(t, "null, ");
        }
    }
    put(t, "\"bytes_per_token\": %.0f, \"peak_rss_bytes\": %llu, ", b->bytes_per_token,
        (unsigned long long)b->peak_rss_bytes);
    if (b->flags_before < 0) put(t, "\"throttled\": null, \"throttle_flags\": null}\n");
    else put(t, "\"throttled\": %s, \"throttle_flags\": %u}\n", throttled(b) ? "true" : "false",
             (unsigned)b->flags_seen);
}

size_t mxd_bench_text(const mxd_bench *b, mxd_bench_format format, char *buf, size_t cap) {
    text t = {buf, cap, 0};
    if (cap) buf[0] = '\0';
    switch (format) {
    case MXD_BENCH_TABLE: put_table(&t, b); break;
    case MXD_BENCH_CSV: put_csv(&t, b); break;
    case MXD_BENCH_JSON: put_json(&t, b); break;
    }
    return t.len;
}
