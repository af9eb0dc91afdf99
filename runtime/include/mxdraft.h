/* SPDX-License-Identifier: Apache-2.0 */
/* mxdraft: exact low-bit text generation on small CPUs. The only public header.
 *
 * Three objects, opened in this order and closed in reverse:
 *   mxd_model    a bundle file (.mxb), mapped read-only and validated as a whole   (runtime/BUNDLE.md)
 *   mxd_engine   one arena (KV cache, activations) and one thread pool for a model
 *   mxd_seq      one token timeline with its own sampling settings
 *
 * Exact (docs/arithmetic.md): for the same bundle, precision, KV cache format and tokens, logits have the same bits on
 * every instruction set and with every thread count, batch width and prefill chunk. So have the sampled tokens, whoever
 * drafts.
 *
 * Errors: a function that can fail returns mxd_status and fills *err, which may be NULL. After a failure, output
 * handles are NULL, there is nothing to close or free, and objects are as they were before, unless the function says
 * otherwise. The library never prints and never exits. It installs no signal handler on its own: where a mapped bundle
 * gets shorter, or its medium fails, reading it raises SIGBUS (mxd_exit_on_bus_error()). Replace a bundle by renaming
 * another file over it. Under a limit on file sizes, a program that keeps costs ignores SIGXFSZ.
 *
 * Memory: mxd_engine_open() reserves all that sequences need, so opening, prompting, copying and truncating them
 * allocates nothing. mxd_step() neither allocates nor locks, except to wake threads that have fallen asleep. These
 * allocate, and free again before they return: mxd_chat_encode(), mxd_encode() for a long word, mxd_verify(), and what
 * reads files of the system (plans, costs, statistics, mxd_default_threads()). mxd_bench_close() frees the results of
 * mxd_bench_run(), mxd_grammar_free() what mxd_grammar_compile() made.
 *
 * Threads: an engine and its sequences belong to one caller thread at a time. Engines may share a model.
 *
 * Names: mxd_x_get_y() fills the caller's struct. A function that returns a pointer lends memory of its object. One
 * that takes (buf, cap) writes at most cap bytes, NUL included, and returns the length of the whole text without NUL.
 *
 * ABI: MXD_VERSION is the version of this header, mxd_version() that of the library. While their first two numbers are
 * equal, functions, values and layouts are the same, except that `reserved` fields may have become options. They must
 * be 0, which keeps the behaviour from before; anything else is MXD_ERR_ARGUMENT, so a library refuses an option that
 * it does not know. Start from mxd_..._default(), or from zeros where there is none.
 *
 * A complete program:
 *
 *   mxd_error e; mxd_model *m; mxd_engine *g; mxd_seq *s;
 *   mxd_options o; mxd_options_default(&o); o.ctx = 512;
 *   mxd_sampling p; mxd_sampling_default(&p); p.max_tokens = 64;
 *   if (mxd_model_open("model.mxb", &m, &e)) die(e.message);
 *   if (mxd_engine_open(m, &o, &g, &e)) die(e.message);
 *   if (mxd_seq_open(g, &p, &s, &e)) die(e.message);
 *   mxd_message msg = {"user", "Why is the sky blue?"};
 *   uint32_t ids[512]; size_t n;
 *   if (mxd_chat_encode(m, &msg, 1, 1, ids, 512, &n, &e)) die(e.message);
 *   if (mxd_seq_prompt(s, ids, n, &e)) die(e.message);
 *   while (mxd_seq_stop(s) == MXD_STOP_NONE) {
 *       if (mxd_step(g, &s, 1, &e)) die(e.message);
 *       size_t len; const char *text = mxd_seq_text(s, &len);
 *       fwrite(text, 1, len, stdout);
 *   }
 *   mxd_seq_close(&s); mxd_engine_close(&g); mxd_model_close(&m);
 */
#ifndef MXDRAFT_H
#define MXDRAFT_H

#include <stddef.h>
#include <stdint.h>

/* The one place of the version: library, command lines and Python package take it from here. */
#define MXD_VERSION "0.1.0"

/* Rows of the steps of several sequences whose costs are measured (mxd_wide_rows). */
#define MXD_WIDE_ROWS 24, 32, 48, 64

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* The Python binding reads its declarations from between the two cdef lines: plain C only, no preprocessor. */
/* <cdef> */

typedef struct mxd_model mxd_model;
typedef struct mxd_engine mxd_engine;
typedef struct mxd_seq mxd_seq;
typedef struct mxd_grammar mxd_grammar; /* what the text of a sequence has to fit */
typedef struct mxd_bench mxd_bench;     /* results of a benchmark */

/* ---- status and error ---- */

/* 1..9: general. From 20 on: why a bundle was refused, one code for each kind of fault (BUNDLE.md lists them). */
typedef enum mxd_status {
    MXD_OK = 0,
    MXD_ERR_ARGUMENT = 1,    /* a parameter is out of range; the message names it */
    MXD_ERR_IO = 2,          /* the operating system refused; the message gives its reason */
    MXD_ERR_MEMORY = 3,      /* the plan does not fit; the message names the largest context that does */
    MXD_ERR_CONTEXT = 4,     /* the tokens do not fit the context; the message gives both numbers */
    MXD_ERR_NUMERIC = 5,     /* a non-finite value; the message names layer and position */
    MXD_ERR_UNSUPPORTED = 6, /* the bundle lacks what was asked for (e.g. full precision) */
    MXD_ERR_BUFFER = 7,      /* the caller's buffer is too small; the out-parameter has the size needed */
    MXD_ERR_MISMATCH = 8,    /* mxd_verify(): the digest differs from the bundle's golden one */
    MXD_BAD_MISSING = 20,    /* no such file */
    MXD_BAD_MAGIC = 21,
    MXD_BAD_VERSION = 22,
    MXD_BAD_LENGTH = 23,   /* file length differs from the header's: truncated or extended */
    MXD_BAD_HEADER = 24,   /* section table checksum, reserved bytes or counts */
    MXD_BAD_NAME = 25,     /* name not printable ASCII, not NUL-padded, or duplicated */
    MXD_BAD_RANGE = 26,    /* section outside the file, overlapping, unaligned or out of order */
    MXD_BAD_CHECKSUM = 27, /* section bytes differ from their checksum */
    MXD_BAD_SECTION = 28,  /* a required section is missing */
    MXD_BAD_CONFIG = 29,   /* dimensions impossible or inconsistent */
    MXD_BAD_DTYPE = 30,
    MXD_BAD_SHAPE = 31,  /* tensor shape differs from what the config asks for */
    MXD_BAD_TENSOR = 32, /* tensor missing, duplicated, or its bytes outside its section */
    MXD_BAD_SCALE = 33,  /* an E8M0 code of 255 (NaN) */
    MXD_BAD_TOKENIZER = 34,
    MXD_BAD_CHAT = 35,
    MXD_BAD_GOLDEN = 36,
    MXD_BAD_DRAFT = 37,   /* drafter or n-gram table: impossible, or made for another target */
    MXD_BAD_SCHEDULE = 38 /* settings of the dynamic origin: impossible */
} mxd_status;

typedef struct mxd_error {
    int32_t status;    /* mxd_status */
    char message[508]; /* UTF-8, NUL-terminated, without a line end */
} mxd_error;

/* ---- models ---- */

typedef struct mxd_model_info {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab, max_positions;
    uint32_t has_residual; /* 1: full precision is available */
    uint32_t has_drafter;  /* 1: there is a trained drafter */
    uint32_t has_ngrams;   /* 1: there is a table for drafting by look-up */
    uint32_t bos;          /* token that begins a text; UINT32_MAX: none */
    uint64_t file_bytes;
    const char *provenance; /* JSON text, NUL-terminated; the model owns it */
    const char *path;       /* as given to mxd_model_open(); the model owns it */
} mxd_model_info;

typedef struct mxd_message {
    const char *role;    /* one that the bundle's chat template knows, such as "system", "user", "assistant" */
    const char *content; /* UTF-8; names of control tokens in it are plain text */
} mxd_message;

/* ---- engines ---- */

/* Precision of the weights that rows are computed with. */
typedef enum mxd_precision {
    MXD_PRECISION_AUTO = 0, /* base, and full where it matters (core_fraction), if the bundle has the residual plane */
    MXD_PRECISION_BASE = 1, /* MXFP4 base plane */
    MXD_PRECISION_FULL = 2  /* base + residual plane */
} mxd_precision;

/* Who proposes tokens for speculation. Changes the speed only, never what is generated. */
typedef enum mxd_draft {
    MXD_DRAFT_AUTO = 0, /* everything the bundle has, as far as it pays */
    MXD_DRAFT_OFF = 1,
    MXD_DRAFT_NGRAM = 2, /* look-up in prompt and output, and in the bundle's table */
    MXD_DRAFT_MODEL = 3  /* the bundle's trained drafter */
} mxd_draft;

/* Storage format of the KV cache. All but f16 change what is generated a little, in the same way everywhere. */
typedef enum mxd_kv {
    MXD_KV_AUTO = 0, /* f16 */
    MXD_KV_F16 = 1,
    MXD_KV_INT8 = 2,  /* MXINT8 of rotated rows: 8.25 bits a value */
    MXD_KV_MXFP4 = 3, /* MXFP4 of rotated rows: 4.25 bits a value */
    MXD_KV_TIERED = 4 /* MXINT8 for first, recent and core tokens by the bundle's schedule, 4 bits for the others */
} mxd_kv;

typedef struct mxd_options {
    uint32_t ctx;         /* positions of each sequence; 0 = min(2048, the model's maximum) */
    uint32_t max_seqs;    /* sequences open at once, 1..64; default 1 */
    uint32_t max_rows;    /* rows of one engine step (prefill chunk), 1..512; default 64 */
    uint32_t threads;     /* 1..64; 0 = min(affinity, cgroup quota, fastest core class) */
    uint32_t precision;   /* mxd_precision */
    uint32_t draft;       /* mxd_draft */
    uint32_t draft_max;   /* most tokens drafted for a sequence in one step, 1..15; 0 = 8 */
    uint32_t draft_min;   /* drafted tokens that are verified whether they pay or not; default 0 */
    float core_fraction;  /* precision auto: share of rows that get full precision, 0..1; < 0 (default): the bundle's.
                             If that reads more bytes than full precision throughout, all rows get full precision */
    uint32_t catch_up;    /* precision auto: most rows from one full pass to the next, 1..32; 0: the bundle's */
    uint32_t kv;          /* mxd_kv */
    float kv_budget;      /* kv tiered: mean bits a value when the context is full; 0: by the bundle's schedule */
    uint32_t reserved[8]; /* 0 */
} mxd_options;

/* Memory plan in bytes: all that an engine will allocate, known before it does. */
typedef struct mxd_plan {
    uint64_t weights;     /* mapped file pages that this precision reads */
    uint64_t kv_cache;    /* max_seqs x layers x 2 x kv_heads x the rows of ctx positions (f16: head_dim x 2 bytes) */
    uint64_t activations; /* workspaces of max_rows rows, logits, attention scores */
    uint64_t sequences;   /* token histories, text buffers, what is learned about drafts */
    uint64_t total;
    uint64_t available; /* what this machine can give now: the least of MemAvailable, RLIMIT_AS and the limits of the
                             process's control group and those around it, whose cached files count as free */
    uint32_t ctx;       /* from here on the options as resolved */
    uint32_t threads;
    uint32_t precision; /* MXD_PRECISION_AUTO: some rows at base, some at full precision */
    uint32_t kv;
    uint32_t largest_ctx; /* largest context that would fit `available`; 0: none */
} mxd_plan;

/* What steps take, in seconds. */
enum { MXD_WIDE_COSTS = 4 };
typedef struct mxd_costs {
    double step[17];             /* [1]..[16]: a step of so many rows of one sequence */
    double draft;                /* a step of the trained drafter; 0: none */
    double base;                 /* at full precision: a step of one row at base precision; 0: not known */
    double wide[MXD_WIDE_COSTS]; /* a step of several sequences with mxd_wide_rows[i] rows; 0: not known */
    double draft_row;            /* each further row in a step of the trained drafter */
} mxd_costs;
extern const uint32_t mxd_wide_rows[MXD_WIDE_COSTS]; /* MXD_WIDE_ROWS */

/* ---- sequences ---- */

typedef struct mxd_sampling {
    float temperature;       /* 0 = greedy (lowest id among equals), else 0.0001..100 */
    uint32_t top_k;          /* 0 = off */
    float top_p;             /* (0, 1]; 1 = off */
    float min_p;             /* 0..1; 0 = off */
    float repeat_penalty;    /* 0.1..10; 1 = off. Divides positive and multiplies negative logits of committed tokens
                                other than control tokens */
    uint64_t seed;           /* of the sampling noise; default 0: equal calls give equal text */
    uint32_t max_tokens;     /* 0 = until the context is full */
    uint32_t ignore_eos;     /* 1: end-of-sequence tokens do not stop */
    const char *const *stop; /* stop strings; mxd_seq_open() copies them */
    uint32_t stop_count;     /* 0..16, each of 1..256 bytes */
    float
        presence_penalty; /* -2..2; 0 = off. Is subtracted from the logits of tokens generated since the last prompt */
    float frequency_penalty; /* -2..2; 0 = off. The same, once for each time that the token was generated */
    uint32_t logprobs;       /* 0 = off; 1 + n: log-probabilities of each token and of the n likeliest, n 0..20 */
    uint32_t reserved[5];    /* 0 */
} mxd_sampling;

enum { MXD_MAX_ALTERNATIVES = 20 };

/* A token that could have been chosen. */
typedef struct mxd_alternative {
    uint32_t token; /* UINT32_MAX: none, the vocabulary has no more */
    float logprob;  /* natural logarithm of its probability by the row's logits, before all settings */
} mxd_alternative;

/* Why a sequence stopped. */
typedef enum mxd_stop {
    MXD_STOP_NONE = 0,
    MXD_STOP_EOS = 1,
    MXD_STOP_LIMIT = 2,   /* max_tokens */
    MXD_STOP_CONTEXT = 3, /* the context is full */
    MXD_STOP_STRING = 4,
    MXD_STOP_GRAMMAR = 5 /* the document that a grammar asks for is complete */
} mxd_stop;

/* Statistics since the last prompt. */
typedef struct mxd_stats {
    uint64_t prompt_tokens, generated_tokens, drafted, accepted, steps;
    uint64_t core, due; /* precision auto: tokens that got full precision; that had to, because catch-up was due */
    uint64_t drafted_at[8], accepted_at[8]; /* by depth in the draft; the last counts all deeper ones too */
    double prefill_s, decode_s, first_token_s;
    double prefill_tok_per_s, decode_tok_per_s, tokens_per_step;
    double draft_s, verify_s, sample_s; /* parts of decode_s */
    double schedule_s;                  /* part of draft_s: ranking what is proposed and choosing what is verified */
    double expected_gain;               /* speed over plain decoding by the estimates that chose the drafts; 0: none */
    double gain;                        /* the same by this run's time and the time of plain steps; 0: not measured */
    uint64_t bytes_read;                /* weight and KV bytes that decode steps streamed */
    uint64_t peak_rss_bytes;            /* largest resident set of the process */
} mxd_stats;

/* What the KV cache of a sequence holds. */
typedef struct mxd_kv_use {
    uint32_t mode;              /* mxd_kv */
    uint32_t recent, core, far; /* tokens by tier; without tiers all are recent */
    double bits_per_value;      /* mean over the processed positions, scales included */
    uint64_t bytes;             /* that a decode step reads */
} mxd_kv_use;

/* Tier of a position in a tiered KV cache. */
typedef enum mxd_tier { MXD_TIER_RECENT = 0, MXD_TIER_CORE = 1, MXD_TIER_FAR = 2 } mxd_tier;

/* Why a row was computed at full precision. */
typedef enum mxd_look {
    MXD_LOOK_NONE = 0, /* it was not */
    MXD_LOOK_CORE = 1, /* it looked doubtful at base precision */
    MXD_LOOK_DUE = 2,  /* catch-up was due */
    MXD_LOOK_ALL = 3   /* it followed a prompt, or all rows are at full precision */
} mxd_look;

/* A generated token and what was known of the row that chose it (docs/dynamic-origin.md). */
typedef struct mxd_token_record {
    uint32_t position, token;
    uint32_t base_token; /* the greedy choice of base precision; UINT32_MAX: it was not asked */
    float margin;        /* between the two largest logits, in nat; at base precision if that was asked */
    float confidence, attention, history, score; /* signals of the precision consumer, 0..1, and its score */
    float threshold; /* score above which a row is core; it follows the text to keep the fraction asked for */
    uint32_t look;   /* mxd_look; for a core rule: what the engine would do */
} mxd_token_record;

/* Who drafted a token. */
typedef enum mxd_source {
    MXD_SOURCE_CALLER = 0,
    MXD_SOURCE_COPY = 1,   /* look-up in prompt and output */
    MXD_SOURCE_TABLE = 2,  /* look-up in the bundle's table */
    MXD_SOURCE_MODEL = 3,  /* the trained drafter */
    MXD_SOURCE_BASE = 4,   /* base precision for full */
    MXD_SOURCE_GRAMMAR = 5 /* the only text that the grammar leaves */
} mxd_source;

/* A token drafted for a step, and what became of it. */
typedef struct mxd_draft_record {
    uint32_t token;
    int32_t parent;    /* index of the record that it follows; -1: the newest token before the step */
    uint32_t depth;    /* from 0 */
    uint32_t source;   /* mxd_source */
    float confidence;  /* probability given by its drafter, or the first guess for its kind */
    float history;     /* share of its kind that was accepted lately */
    float chance;      /* estimated probability that it and all above it are right; drafts are ranked by it */
    uint32_t verified; /* 1: it had a place in the step */
    uint32_t accepted; /* 1: it was right */
} mxd_draft_record;

/* Decide whether a row, computed at base precision, gets full precision: return 0 or 1. */
typedef int mxd_core_function(void *arg, const mxd_token_record *row);

/* Write to out[] up to `most` tokens that may follow ids[n], and return how many. parent[i] is preset to i - 1 (a
 * chain); it may name any earlier token of the draft, or -1 for ids[n - 1] (a tree). */
typedef size_t mxd_draft_function(void *arg, const uint32_t *ids, size_t n, uint32_t *out, int32_t *parent,
                                  size_t most);

/* ---- benchmark ---- */

typedef struct mxd_bench_options {
    uint32_t prompt_tokens; /* length of the synthetic prompt, >= 1 */
    uint32_t tokens;        /* generated after it, >= 2 */
    uint32_t repeat;        /* measured repetitions, 1..1000, after one that only warms up */
    uint32_t drafts;        /* drafters to compare with plain decoding on a few questions: bits 1 << mxd_draft */
    uint32_t reserved[4];   /* 0 */
} mxd_bench_options;

typedef enum mxd_bench_format {
    MXD_BENCH_TABLE = 0,
    MXD_BENCH_CSV = 1, /* measure,median,min,max */
    MXD_BENCH_JSON = 2 /* one object on one line (keys: docs/cli.md) */
} mxd_bench_format;

/* ---- MX codecs ---- */

/* How the exponent that a block of 32 shares is chosen. */
typedef enum mxd_rule {
    MXD_RULE_FLOOR = 0, /* OCP MX v1.0 section 6.3 */
    MXD_RULE_SEARCH = 1 /* least squared error among neighbouring exponents */
} mxd_rule;

/* ---- functions: model and text ---- */

/* Open the bundle file at `path`: MXD_BAD_... if it is missing or refused, MXD_ERR_IO if it cannot be read. The model
 * must outlive its engines. */
mxd_status mxd_model_open(const char *path, mxd_model **out, mxd_error *err);
void mxd_model_close(mxd_model **model);
void mxd_model_get_info(const mxd_model *model, mxd_model_info *out);

/* Encode text[len] as plain text, which never makes special tokens but the first one, where the model's tokenizer puts one
 * before every text. Write up to `cap` ids, and to *n how many there
 * are; MXD_ERR_BUFFER if that is more. Bytes that are not UTF-8 are encoded one by one (BUNDLE.md, tokenizer). */
mxd_status mxd_encode(const mxd_model *model, const char *text, size_t len, uint32_t *ids, size_t cap, size_t *n,
                      mxd_error *err);
/* Apply the chat template to messages[count] and encode the result; ids, cap and *n as above. add_generation 1 opens
 * the assistant's turn. MXD_ERR_UNSUPPORTED without a template, MXD_ERR_ARGUMENT for a role that it does not know. */
mxd_status mxd_chat_encode(const mxd_model *model, const mxd_message *messages, size_t count, int add_generation,
                           uint32_t *ids, size_t cap, size_t *n, mxd_error *err);
/* Return the *len bytes of token `id`: not NUL-terminated, possibly part of a character. NULL if id is out of range. */
const char *mxd_token_bytes(const mxd_model *model, uint32_t id, size_t *len);
/* Return 1 for control tokens, which produce no text while generating. */
int mxd_token_is_special(const mxd_model *model, uint32_t id);

/* ---- functions: engine ---- */

void mxd_options_default(mxd_options *out);
/* Plan an engine without opening it; the plan may exceed what is available. */
mxd_status mxd_plan_memory(const mxd_model *model, const mxd_options *options, mxd_plan *out, mxd_error *err);
/* Open an engine: MXD_ERR_MEMORY if its plan does not fit. It must outlive its sequences. */
mxd_status mxd_engine_open(const mxd_model *model, const mxd_options *options, mxd_engine **out, mxd_error *err);
void mxd_engine_close(mxd_engine **engine);
const mxd_plan *mxd_engine_plan(const mxd_engine *engine);

/* Load what steps cost from `directory`, which has a small file for each machine, bundle and options; NULL: nowhere.
 * Return 0 if there is none, or if a step now takes less than half as long as the file says, for which a few steps run
 * unless sequences are open: draft lengths then rest on a guess until costs are measured. */
int mxd_engine_load_costs(mxd_engine *engine, const char *directory);
/* Measure what steps cost and keep it in `directory`, before the first sequence opens: 54 steps and, for several
 * sequences, 12 wide ones. A directory that is not there or cannot be written is no error. */
mxd_status mxd_engine_measure_costs(mxd_engine *engine, const char *directory, mxd_error *err);
void mxd_engine_get_costs(const mxd_engine *engine, mxd_costs *out);
void mxd_engine_set_costs(mxd_engine *engine, const mxd_costs *costs);
/* Let `engine`, before its first sequence opens, learn together with `other`: what drafts and steps show to one then
 * counts for both, and both go by the costs of `other`. Meanwhile `other` may run in another thread, but neither close
 * nor be passed to this function. Up to 8 engines can share; they close in any order. MXD_ERR_ARGUMENT if the engines
 * differ in what costs depend on: model, precision, threads, drafter, rows. */
mxd_status mxd_engine_share_tuner(mxd_engine *engine, const mxd_engine *other, mxd_error *err);

/* Run one step of at most max_rows rows, prompt rows first, for seqs[n], sequences of this engine. Each sequence whose
 * prompt is processed gets one token, and before it the drafted ones that were right, unless its row waits to share a
 * pass at full precision with rows of other sequences. Sequences that have stopped or have nothing to process are
 * skipped; MXD_ERR_ARGUMENT if none can run and one has not stopped. After any error nothing is committed. */
mxd_status mxd_step(mxd_engine *engine, mxd_seq *const *seqs, size_t n, mxd_error *err);

/* ---- functions: sequence ---- */

void mxd_sampling_default(mxd_sampling *out);
/* Open an empty sequence: MXD_ERR_ARGUMENT if max_seqs are open. */
mxd_status mxd_seq_open(mxd_engine *engine, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err);
/* Open another sequence of the same engine that holds what `from` holds, exactly as if it had been given the same
 * tokens: to process a common prompt once, or to continue it in several ways. It has its own settings and statistics,
 * no caller's drafter or core rule, and has not stopped unless the context is full. */
mxd_status mxd_seq_copy(const mxd_seq *from, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err);
void mxd_seq_close(mxd_seq **seq);
/* Queue ids[n] after what the sequence holds; clear its stop, restart max_tokens and the statistics. MXD_ERR_CONTEXT if
 * they do not fit together with one generated token. */
mxd_status mxd_seq_prompt(mxd_seq *seq, const uint32_t *ids, size_t n, mxd_error *err);
/* Forget all positions from n on, exactly: later results are as if they had never been. Under MXD_PRECISION_AUTO, rows
 * that stay but are still at base precision run again at full precision, as rows of a prompt do, and what
 * mxd_seq_logits() decided about the last of them is forgotten. MXD_ERR_ARGUMENT if there are fewer. */
mxd_status mxd_seq_truncate(mxd_seq *seq, size_t n, mxd_error *err);
/* Append ids[n] by teacher forcing and write the logits after each, float[n][vocab]. MXD_ERR_CONTEXT if they do not
 * fit, MXD_ERR_ARGUMENT if queued tokens are not processed yet. After MXD_ERR_NUMERIC, the ids before the chunk that
 * failed stay appended. */
mxd_status mxd_seq_logits(mxd_seq *seq, const uint32_t *ids, size_t n, float *logits, mxd_error *err);
/* Append ids[n] as mxd_seq_logits() does, but write the residual stream after each of layers[count] (0: the embeddings;
 * the last one's, normalized, is the head's input), float[n][count][hidden]. The head is not computed.
 * MXD_ERR_ARGUMENT also under MXD_PRECISION_AUTO, or if the model has fewer layers. */
mxd_status mxd_seq_streams(mxd_seq *seq, const uint32_t *ids, size_t n, const uint32_t *layers, size_t count,
                           float *streams, mxd_error *err);
mxd_stop mxd_seq_stop(const mxd_seq *seq);
/* Return all tokens, committed or queued; valid until the sequence changes. */
const uint32_t *mxd_seq_tokens(const mxd_seq *seq, size_t *n);

/* The next six tell what the last step did, and are valid until the next one.
 * Return the tokens that it added. */
const uint32_t *mxd_seq_output(const mxd_seq *seq, size_t *n);
/* Return the text that it completed: whole UTF-8 characters, never part of a stop string. The step that stops also
 * releases what is incomplete. */
const char *mxd_seq_text(const mxd_seq *seq, size_t *len);
/* Return, for each token of mxd_seq_output(), 1 if it was drafted. */
const uint8_t *mxd_seq_drafted(const mxd_seq *seq);
/* Return, for each token of mxd_seq_output(), what was known of it. */
const mxd_token_record *mxd_seq_records(const mxd_seq *seq);
/* Return, for each token of mxd_seq_output(), sampling.logprobs entries: its own, then those of the likeliest tokens,
 * among equals the lowest id first. NULL if none were asked for. */
const mxd_alternative *mxd_seq_logprobs(const mxd_seq *seq);
/* Return all that was drafted for it, verified or not. */
const mxd_draft_record *mxd_seq_drafts(const mxd_seq *seq, size_t *n);

void mxd_seq_get_stats(const mxd_seq *seq, mxd_stats *out);
/* Write the statistics as one JSON object on one line (keys: docs/cli.md). */
size_t mxd_seq_stats_json(const mxd_seq *seq, char *buf, size_t cap);
void mxd_seq_get_kv(const mxd_seq *seq, mxd_kv_use *out);
/* Write the mxd_tier of the first `cap` processed positions; return how many are processed. */
size_t mxd_seq_tiers(const mxd_seq *seq, uint8_t *tiers, size_t cap);

/* Let `function` draft for this sequence in place of the engine's drafters; NULL gives them back. It is called within
 * mxd_step(), but never under MXD_DRAFT_OFF. */
void mxd_seq_set_drafter(mxd_seq *seq, mxd_draft_function *function, void *arg);
/* Let `function` decide which rows get full precision under MXD_PRECISION_AUTO; NULL: the engine decides. This changes
 * what is generated, from the first row on that is not decided yet: a row that waits for full precision is. It is called
 * within mxd_step() and mxd_seq_logits(). */
void mxd_seq_set_core_rule(mxd_seq *seq, mxd_core_function *function, void *arg);

/* ---- functions: structured output (docs/structured-output.md) ---- */

/* Make a grammar of a JSON schema, schema[len], for the sequences of one engine of `model`: MXD_ERR_ARGUMENT names what
 * the schema asks for that is not supported or too large. It must outlive its use, and belongs to the engine's thread. */
mxd_status mxd_grammar_compile(const mxd_model *model, const char *schema, size_t len, mxd_grammar **out,
                               mxd_error *err);
/* The same of a list of tools as OpenAI's API has it, a JSON text: the document is {"name": ..., "arguments": ...}, a call of
 * the tool `name` or, if that is NULL, of any. */
mxd_status mxd_grammar_compile_tools(const mxd_model *model, const char *tools, size_t len, const char *name,
                                     mxd_grammar **out, mxd_error *err);
/* Free a grammar that no open sequence has. */
void mxd_grammar_free(mxd_grammar **grammar);
/* Let what the sequence generates fit `grammar`; NULL: any text. The document begins at token `from`, and at the end of
 * each later prompt a new one does. Only tokens that fit are chosen, as if the others had probability 0 before all other
 * settings; an end-of-sequence token fits where the document may end. Once nothing can follow the sequence stops
 * (MXD_STOP_GRAMMAR); what max_tokens cuts is the beginning of a document. MXD_ERR_ARGUMENT if the tokens from `from` on do
 * not fit, or the grammar is another model's. A copy of the sequence has no grammar. */
mxd_status mxd_seq_set_grammar(mxd_seq *seq, mxd_grammar *grammar, size_t from, mxd_error *err);

/* ---- functions: proof and introspection ---- */

/* Replay the bundle's golden vectors in a free sequence of the engine, and write the SHA-256 of all logits to hex as 64
 * digits and a NUL. MXD_ERR_MISMATCH if it differs from the bundle's; hex is valid then, too. */
mxd_status mxd_verify(mxd_engine *engine, char hex[65], mxd_error *err);
/* For programs: from now on, SIGBUS from a page of a file that cannot be read any more writes `message` (up to 1023
 * bytes, line end included) to stderr and ends the process with `code`. */
void mxd_exit_on_bus_error(const char *message, int code);
const char *mxd_version(void);
/* Write one line for each operation, "name function": the variant for this CPU, without the levels in the environment
 * variable MXDRAFT_CPU_MASK. */
size_t mxd_cpu_describe(char *buf, size_t cap);
/* Return the threads that an engine takes for threads = 0. */
uint32_t mxd_default_threads(void);

/* Return the word for a value in command lines and statistics; NULL after the last one. A status is named like its
 * constant without the prefix, and "UNKNOWN" if it is none. */
const char *mxd_precision_name(uint32_t precision);
const char *mxd_draft_name(uint32_t draft);
const char *mxd_kv_name(uint32_t kv);
const char *mxd_tier_name(uint32_t tier);
const char *mxd_stop_name(uint32_t stop);
const char *mxd_look_name(uint32_t look);
const char *mxd_source_name(uint32_t source);
const char *mxd_bench_format_name(uint32_t format);
const char *mxd_status_name(uint32_t status);

/* ---- functions: benchmark ---- */

/* Measure in a free sequence of `engine`: prefill and decode; the cost of steps of several rows and of 48 sequences,
 * compared with one row; the read bandwidth of this machine. Repetitions take turns at everything, so that a
 * disturbance meets all of it. Needs a buffer of four last-level caches, and memory for 48 short sequences, which are
 * left out if they do not fit. The engine itself should not draft. MXD_ERR_CONTEXT or MXD_ERR_MEMORY if one is too
 * small. */
mxd_status mxd_bench_run(mxd_engine *engine, const mxd_bench_options *options, mxd_bench **out, mxd_error *err);
void mxd_bench_close(mxd_bench **bench);
/* Write the results in a format. */
size_t mxd_bench_text(const mxd_bench *bench, mxd_bench_format format, char *buf, size_t cap);

/* ---- functions: MX codecs (docs/arithmetic.md; for tools and tests) ---- */

/* Encode x[rows][k], k a multiple of 32, to packed E2M1 data[rows][k/2] and E8M0 scale[rows][k/32]. MXD_ERR_NUMERIC on
 * NaN or Inf, with row and column in the message. */
mxd_status mxd_mxfp4_encode(const float *x, size_t rows, size_t k, mxd_rule rule, uint8_t *data, uint8_t *scale,
                            mxd_error *err);
void mxd_mxfp4_decode(const uint8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x);
/* The same to int8 data[rows][k], by MXD_RULE_FLOOR. */
mxd_status mxd_mxint8_encode(const float *x, size_t rows, size_t k, int8_t *data, uint8_t *scale, mxd_error *err);
void mxd_mxint8_decode(const int8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x);

/* </cdef> */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
