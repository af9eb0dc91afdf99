/* mxdraft: exact low-bit text generation on small CPUs. The only public header.
 *
 * Three objects, opened in this order and closed in reverse:
 *   mxd_model   a bundle file (.mxb), mapped read-only and fully validated   (runtime/BUNDLE.md)
 *   mxd_engine  one arena (KV cache, activations) and a thread pool for a model
 *   mxd_seq     one token timeline with its own sampling settings
 *
 * Promise (docs/arithmetic.md): for the same bundle, precision and tokens, logits are the same bit for bit on
 * every instruction set, thread count, batch width and prefill chunk; so are the sampled tokens, whoever drafts.
 *
 * Conventions: functions that can fail return mxd_status and fill *err (may be NULL); output handles are set
 * to NULL on failure. The library never prints, never exits, and allocates nothing after mxd_seq_open().
 * An engine and its sequences belong to one caller thread at a time; a model may be shared by engines.
 *
 * Complete use:
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

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

/* The Python binding reads its declarations from between the two cdef lines: plain C only, no preprocessor. */
/* <cdef> */

typedef struct mxd_model mxd_model;
typedef struct mxd_engine mxd_engine;
typedef struct mxd_seq mxd_seq;

/* 1..9: general. 20..: why a bundle was refused, one code a lie (BUNDLE.md lists them). */
typedef enum mxd_status {
    MXD_OK = 0,
    MXD_ERR_ARGUMENT = 1,    /* a parameter is out of range; the message names it */
    MXD_ERR_IO = 2,          /* the operating system refused; the message carries its reason */
    MXD_ERR_MEMORY = 3,      /* the plan does not fit; the message names the largest context that does */
    MXD_ERR_CONTEXT = 4,     /* the tokens do not fit the context; the message gives both numbers */
    MXD_ERR_NUMERIC = 5,     /* non-finite value; the message names layer and position */
    MXD_ERR_UNSUPPORTED = 6, /* the bundle lacks what was asked for (e.g. full precision) */
    MXD_ERR_BUFFER = 7,      /* the caller's buffer is too small; the needed size is in the out-parameter */
    MXD_ERR_MISMATCH = 8,    /* verify: the digest differs from the bundle's golden one */
    MXD_BAD_MISSING = 20,    /* no such file */
    MXD_BAD_MAGIC = 21,
    MXD_BAD_VERSION = 22,
    MXD_BAD_LENGTH = 23,     /* file length differs from the header's: truncated or extended */
    MXD_BAD_HEADER = 24,     /* section table checksum, reserved bytes or counts */
    MXD_BAD_NAME = 25,       /* name not printable ASCII, not NUL-padded, or duplicated */
    MXD_BAD_RANGE = 26,      /* section outside the file, overlapping, unaligned or out of order */
    MXD_BAD_CHECKSUM = 27,   /* section bytes differ from their checksum */
    MXD_BAD_SECTION = 28,    /* a required section is missing */
    MXD_BAD_CONFIG = 29,     /* dimensions impossible or inconsistent */
    MXD_BAD_DTYPE = 30,
    MXD_BAD_SHAPE = 31,      /* tensor shape differs from what the config asks for */
    MXD_BAD_TENSOR = 32,     /* tensor missing, duplicated, or its bytes outside its section */
    MXD_BAD_SCALE = 33,      /* an E8M0 code of 255 (NaN) */
    MXD_BAD_TOKENIZER = 34,
    MXD_BAD_CHAT = 35,
    MXD_BAD_GOLDEN = 36,
    MXD_BAD_DRAFT = 37,      /* drafter or n-gram table: impossible, or made for another target */
    MXD_BAD_SCHEDULE = 38    /* settings of the dynamic origin: impossible */
} mxd_status;

typedef struct mxd_error {
    int32_t status;
    char message[508];
} mxd_error;

typedef enum mxd_precision {
    MXD_PRECISION_AUTO = 0, /* base, with full where it matters (core_fraction), if the bundle has the residual plane */
    MXD_PRECISION_BASE = 1, /* MXFP4 base plane */
    MXD_PRECISION_FULL = 2  /* base + residual plane */
} mxd_precision;

/* Who proposes tokens for speculation. Never changes what is generated, only how fast. */
typedef enum mxd_draft {
    MXD_DRAFT_AUTO = 0,  /* whatever the bundle has, as far as it pays */
    MXD_DRAFT_OFF = 1,
    MXD_DRAFT_NGRAM = 2, /* look-up in prompt and output, and in the bundle's table */
    MXD_DRAFT_MODEL = 3  /* the bundle's trained drafter */
} mxd_draft;

/* In what the KV cache is kept. All but f16 change what is generated a little, the same everywhere. */
typedef enum mxd_kv {
    MXD_KV_AUTO = 0,  /* f16 */
    MXD_KV_F16 = 1,
    MXD_KV_INT8 = 2,  /* MXINT8 of rotated rows: 8.25 bits a value */
    MXD_KV_MXFP4 = 3, /* MXFP4 of rotated rows: 4.25 bits a value */
    MXD_KV_TIERED = 4 /* MXINT8 for first, recent and core tokens by the bundle's schedule, 4 bits for the others */
} mxd_kv;

typedef struct mxd_options {
    uint32_t ctx;       /* positions per sequence; 0 = min(2048, the model's maximum) */
    uint32_t max_seqs;  /* sequences open at once, 1..64; default 1 */
    uint32_t max_rows;  /* rows of one engine step (prefill chunk), 1..512; default 64 */
    uint32_t threads;   /* 0 = min(affinity, cgroup quota, fastest core class) */
    uint32_t precision; /* mxd_precision */
    uint32_t draft;     /* mxd_draft */
    uint32_t draft_max; /* most drafted tokens a sequence and step, 1..15; 0 = 8 */
    uint32_t draft_min; /* verify this many whether it pays or not; default 0 */
    float core_fraction; /* under MXD_PRECISION_AUTO, rows that get full precision: 0..1; < 0: as the bundle says. Where
                            that would read more bytes than full precision throughout, it is full precision throughout */
    uint32_t catch_up;   /* rows from one pass at full precision to the next, at most, 1..32; 0: as the bundle says */
    uint32_t kv;        /* mxd_kv */
    float kv_budget;    /* tiered: bits a value on average when the context is full; 0 = by the bundle's schedule */
} mxd_options;

/* Memory plan in bytes; everything the engine will allocate, known before it does. */
typedef struct mxd_plan {
    uint64_t weights;     /* mapped file pages this precision reads */
    uint64_t kv_cache;    /* max_seqs x layers x 2 x kv_heads x the rows of ctx positions (f16: head_dim x 2 bytes) */
    uint64_t activations; /* workspaces of max_rows rows, logits, attention scores */
    uint64_t sequences;   /* token histories, text buffers, what is learned of drafts */
    uint64_t total;
    uint64_t available;   /* what this machine can give now: MemAvailable, cgroup and rlimit */
    uint32_t ctx;         /* the options as resolved */
    uint32_t threads;
    uint32_t precision; /* MXD_PRECISION_AUTO: some rows at base, some at full precision */
    uint32_t kv;
    uint32_t largest_ctx; /* largest context that would fit `available`, 0 if none */
} mxd_plan;

typedef struct mxd_model_info {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab, max_positions;
    uint32_t has_residual;   /* 1: full precision is available */
    uint32_t has_drafter;    /* 1: a trained drafter */
    uint32_t has_ngrams;     /* 1: a table for drafting by look-up */
    uint32_t bos;            /* UINT32_MAX: none */
    uint64_t file_bytes;
    const char *provenance;  /* JSON text, NUL-terminated, owned by the model */
    const char *path;
} mxd_model_info;

typedef struct mxd_message {
    const char *role;    /* "system", "user", "assistant": what the bundle's template knows */
    const char *content; /* UTF-8; control-token text inside is plain text */
} mxd_message;

typedef struct mxd_sampling {
    float temperature;    /* 0 = greedy (lowest id among equals), else 0.0001..100 */
    uint32_t top_k;       /* 0 = off */
    float top_p;          /* 1 = off */
    float min_p;          /* 0 = off */
    float repeat_penalty; /* 1 = off; divides positive and multiplies negative logits of committed tokens */
    uint64_t seed;
    uint32_t max_tokens;  /* 0 = until the context is full */
    uint32_t ignore_eos;  /* 1: end-of-sequence tokens do not stop */
    const char *const *stop; /* stop strings; copied by mxd_seq_open */
    uint32_t stop_count;     /* <= 16, each 1..256 bytes */
} mxd_sampling;

typedef enum mxd_stop {
    MXD_STOP_NONE = 0,
    MXD_STOP_EOS = 1,
    MXD_STOP_LIMIT = 2,   /* max_tokens */
    MXD_STOP_CONTEXT = 3, /* context full */
    MXD_STOP_STRING = 4
} mxd_stop_reason;

typedef struct mxd_stats {
    uint64_t prompt_tokens, generated_tokens, drafted, accepted, steps;
    uint64_t core, due;      /* under MXD_PRECISION_AUTO: tokens that got full precision; and those that had to */
    uint64_t drafted_at[8], accepted_at[8]; /* by depth in the draft; the last counts all deeper ones too */
    double prefill_s, decode_s, first_token_s;
    double draft_s, verify_s, sample_s; /* parts of decode_s */
    double schedule_s;       /* of draft_s: ranking what is proposed and choosing what is verified */
    double expected_gain;    /* tok/s over those of plain decoding, by the estimates that chose the drafts; 0: none */
    double gain;             /* the same by this run's time and the measured cost of plain steps; 0: not measured */
    uint64_t bytes_read;     /* weight and KV bytes streamed by decode steps */
    uint64_t peak_rss_bytes;
} mxd_stats;

/* Seconds that a step takes by its number of rows, [1]..[16]; one step of the trained drafter (0: none); at full
 * precision, a step of one row at base precision (0: not known). For steps of several sequences: those of 24, 32, 48 and
 * 64 rows (0: not known, as many rows cost in proportion); each further row of the trained drafter's step. */
enum { MXD_WIDE_COSTS = 4 };
typedef struct mxd_costs {
    double step[17];
    double draft, base;
    double wide[4];
    double draft_row;
} mxd_costs;

/* Why a row was computed at full precision. */
typedef enum mxd_look {
    MXD_LOOK_NONE = 0, /* it was not */
    MXD_LOOK_CORE = 1, /* it looked doubtful at base precision */
    MXD_LOOK_DUE = 2,  /* catch-up was due */
    MXD_LOOK_ALL = 3   /* behind a prompt, or full precision throughout */
} mxd_look;

/* A generated token: what was known of the row that chose it (docs/dynamic-origin.md). */
typedef struct mxd_token_record {
    uint32_t position, token;
    uint32_t base_token; /* what base precision would take greedily; UINT32_MAX: it was not asked */
    float margin;        /* between the two largest logits, nat; at base precision if it was asked */
    float confidence, attention, history, score; /* the precision consumer's signals, 0..1, and its score */
    float threshold;     /* above which it is core; follows the text, so that the fraction asked for is kept */
    uint32_t look;       /* mxd_look; for a core rule: what the engine would do */
} mxd_token_record;

/* A rule of the caller's: whether a row, computed at base precision, shall get full precision. */
typedef int mxd_core_function(void *arg, const mxd_token_record *row);

typedef enum mxd_source {
    MXD_SOURCE_CALLER = 0,
    MXD_SOURCE_COPY = 1,  /* look-up in prompt and output */
    MXD_SOURCE_TABLE = 2, /* look-up in the bundle's table */
    MXD_SOURCE_MODEL = 3, /* the trained drafter */
    MXD_SOURCE_BASE = 4   /* base precision for full */
} mxd_source;

/* A token that was drafted for a step, and what the step made of it. */
typedef struct mxd_draft_record {
    uint32_t token;
    int32_t parent;     /* record that it follows, -1: the newest token before the step */
    uint32_t depth;     /* from 0 */
    uint32_t source;    /* mxd_source */
    float confidence;   /* probability by whoever proposed it, or the first guess for its kind */
    float history;      /* share of its kind that was accepted lately */
    float chance;       /* that it and all above it are right: what it was ranked by */
    uint32_t verified;  /* 1: it had a place in the step */
    uint32_t accepted;
} mxd_draft_record;

/* A drafter of the caller's: write up to `most` tokens that may follow ids[n], return how many. parent[i] comes as
 * i - 1 (a chain) and may name any earlier token of the draft, or -1 for ids[n - 1]: a tree. */
typedef size_t mxd_draft_function(void *arg, const uint32_t *ids, size_t n, uint32_t *out, int32_t *parent, size_t most);

/* ---- model ---- */
mxd_status mxd_model_open(const char *path, mxd_model **out, mxd_error *err);
void mxd_model_close(mxd_model **model);
void mxd_model_get_info(const mxd_model *model, mxd_model_info *out);

/* ---- text ---- */
/* Plain text to ids: special tokens are never produced. *n gets the count; MXD_ERR_BUFFER if cap is too small.
 * Bytes that are not UTF-8 are encoded byte by byte (BUNDLE.md, tokenizer). */
mxd_status mxd_encode(const mxd_model *model, const char *text, size_t len, uint32_t *ids, size_t cap, size_t *n,
                      mxd_error *err);
/* Bytes of one token (not NUL-terminated, may be an incomplete character); NULL if id is out of range. */
const char *mxd_token_bytes(const mxd_model *model, uint32_t id, size_t *len);
/* 1 for control tokens, which produce no text while generating. */
int mxd_token_is_special(const mxd_model *model, uint32_t id);
/* The chat template applied and encoded; add_generation 1 opens the assistant's turn. */
mxd_status mxd_chat_encode(const mxd_model *model, const mxd_message *messages, size_t count, int add_generation,
                           uint32_t *ids, size_t cap, size_t *n, mxd_error *err);

/* ---- engine ---- */
void mxd_options_default(mxd_options *out);
mxd_status mxd_plan_memory(const mxd_model *model, const mxd_options *options, mxd_plan *out, mxd_error *err);
mxd_status mxd_engine_open(const mxd_model *model, const mxd_options *options, mxd_engine **out, mxd_error *err);
void mxd_engine_close(mxd_engine **engine);
const mxd_plan *mxd_engine_plan(const mxd_engine *engine);
/* What steps cost, for choosing draft lengths; without it the costs are guessed. Measuring takes 54 steps, and 12 wide
 * ones for several sequences, before the first sequence opens. The result is kept in a directory (NULL: nowhere), one
 * small file for each kind of machine, bundle and options; mxd_engine_load_costs() returns 1 if it found one. A directory
 * that cannot be written is no error. */
int mxd_engine_load_costs(mxd_engine *engine, const char *directory);
mxd_status mxd_engine_measure_costs(mxd_engine *engine, const char *directory, mxd_error *err);
void mxd_engine_get_costs(const mxd_engine *engine, mxd_costs *out);
void mxd_engine_set_costs(mxd_engine *engine, const mxd_costs *costs);
/* Let an engine learn together with another one, which may run in another thread meanwhile but neither close nor be
 * passed to this function: what drafts and steps show to one counts for both from then on, and so do costs (those of
 * `other` are kept). Before a sequence opens. Up to 8 engines; they close in any order. MXD_ERR_ARGUMENT if the engines
 * differ in what costs depend on: model, precision, threads, drafter, rows. */
mxd_status mxd_engine_share_tuner(mxd_engine *engine, const mxd_engine *other, mxd_error *err);

/* ---- sequences ---- */
void mxd_sampling_default(mxd_sampling *out);
mxd_status mxd_seq_open(mxd_engine *engine, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err);
/* Open another sequence of the same engine that begins with all that `from` holds, as if it had been given the same
 * tokens itself: prompts that begin alike are processed once, an answer is tried several ways. Settings and statistics
 * are its own; a stop is not copied (but a full context stays full), nor are the caller's drafter and core rule. */
mxd_status mxd_seq_copy(const mxd_seq *from, const mxd_sampling *sampling, mxd_seq **out, mxd_error *err);
void mxd_seq_close(mxd_seq **seq);
/* Queue tokens behind what the sequence holds; clears a stop, restarts max_tokens and the statistics.
 * MXD_ERR_CONTEXT if they do not fit together with at least one generated token; nothing is queued then. */
mxd_status mxd_seq_prompt(mxd_seq *seq, const uint32_t *ids, size_t n, mxd_error *err);
/* One engine step for n sequences of this engine: at most max_rows rows, prompt rows first come; each sequence whose
 * prompt is processed yields one token, and the drafted ones that were right before it, unless its row waits for other
 * sequences' rows to share a pass at full precision. Stopped sequences are skipped, and so are those without a token to
 * process, but if nothing at all can run and one has not stopped, that is MXD_ERR_ARGUMENT. After any error nothing is
 * committed. */
mxd_status mxd_step(mxd_engine *engine, mxd_seq *const *seqs, size_t n, mxd_error *err);
/* Tokens and text that the last step added. Text is whole UTF-8 characters, never part of a stop string; what a
 * stop leaves incomplete is flushed by the step that stops. Valid until the next step. */
const uint32_t *mxd_seq_output(const mxd_seq *seq, size_t *n);
const char *mxd_seq_text(const mxd_seq *seq, size_t *len);
mxd_stop_reason mxd_seq_stop(const mxd_seq *seq);
/* All tokens committed or queued so far. */
const uint32_t *mxd_seq_tokens(const mxd_seq *seq, size_t *n);
/* Forget all positions from n on (exact: later results are as if they had never been). */
mxd_status mxd_seq_truncate(mxd_seq *seq, size_t n, mxd_error *err);
void mxd_seq_get_stats(const mxd_seq *seq, mxd_stats *out);
/* What the cache of a sequence holds now. */
typedef struct mxd_kv_use {
    uint32_t mode;              /* mxd_kv */
    uint32_t recent, core, far; /* tokens by tier; without tiers all are recent */
    double bits_per_value;      /* mean over what is processed, scales included */
    uint64_t bytes;             /* that a decode step reads */
} mxd_kv_use;
typedef enum mxd_tier {
    MXD_TIER_RECENT = 0,
    MXD_TIER_CORE = 1,
    MXD_TIER_FAR = 2
} mxd_tier;
void mxd_seq_kv(const mxd_seq *seq, mxd_kv_use *out);
/* The mxd_tier of each processed position, as far as there is room; returns their number. */
size_t mxd_seq_tiers(const mxd_seq *seq, uint8_t *tiers, size_t cap);
/* The statistics as one JSON object on one line (keys in docs/cli.md); returns the length needed. */
size_t mxd_seq_stats_json(const mxd_seq *seq, char *buf, size_t cap);
/* Let the caller draft for this sequence, in place of the engine's own drafters; NULL gives them back. Has no effect
 * under MXD_DRAFT_OFF. The function is called within mxd_step(). */
void mxd_seq_set_drafter(mxd_seq *seq, mxd_draft_function *function, void *arg);
/* What was drafted for this sequence's last step; valid until the next one. */
const mxd_draft_record *mxd_seq_drafts(const mxd_seq *seq, size_t *n);
/* For each token of mxd_seq_output(): 1 if it was drafted and accepted. */
const uint8_t *mxd_seq_drafted(const mxd_seq *seq);
/* For each token of mxd_seq_output(): what was known of it. */
const mxd_token_record *mxd_seq_records(const mxd_seq *seq);
/* Let the caller decide which rows get full precision under MXD_PRECISION_AUTO; NULL: the engine does. Changes what is
 * generated. The function is called within mxd_step() and mxd_seq_logits(). */
void mxd_seq_set_core_rule(mxd_seq *seq, mxd_core_function *function, void *arg);
/* Teacher forcing: append ids[n] and write the logits of each, float[n][vocab]. */
mxd_status mxd_seq_logits(mxd_seq *seq, const uint32_t *ids, size_t n, float *logits, mxd_error *err);

/* ---- proof and introspection ---- */
/* Replay the bundle's golden vectors; hex gets the SHA-256 (64 digits, NUL) of all logits computed.
 * MXD_ERR_MISMATCH if it differs from the bundle's (hex is valid all the same). */
mxd_status mxd_verify(mxd_engine *engine, char hex[65], mxd_error *err);
const char *mxd_version(void);
const char *mxd_status_name(mxd_status status);
/* One line an operation: "name function" as bound for this CPU under the MXDRAFT_CPU_MASK environment. */
size_t mxd_cpu_describe(char *buf, size_t cap);
/* Threads used for threads = 0. */
uint32_t mxd_default_threads(void);

/* ---- benchmark ---- */
typedef struct mxd_bench mxd_bench;
typedef struct mxd_bench_options {
    uint32_t prompt_tokens; /* >= 1, of a synthetic prompt */
    uint32_t tokens;        /* >= 2, generated behind it */
    uint32_t repeat;        /* 1..1000 measured repetitions, after one that only warms up */
    uint32_t drafts;        /* drafters to compare with plain decoding on a few questions: bits 1 << mxd_draft */
} mxd_bench_options;
typedef enum mxd_bench_format {
    MXD_BENCH_TABLE = 0,
    MXD_BENCH_CSV = 1, /* measure,median,min,max */
    MXD_BENCH_JSON = 2 /* one object on one line (keys in docs/cli.md) */
} mxd_bench_format;
/* Measure prefill and decode of one greedy sequence, which needs a free one of the engine, what steps of several rows
 * and of 48 sequences cost beside one of one row, and the read bandwidth of this machine; repetitions take turns, so
 * that a disturbance meets all of them. Allocates a buffer of four last-level caches and an engine for 48 short
 * sequences, which is left out if memory is short. The engine itself should not draft. */
mxd_status mxd_bench_run(mxd_engine *engine, const mxd_bench_options *options, mxd_bench **out, mxd_error *err);
void mxd_bench_close(mxd_bench **bench);
/* The results as text; returns the length needed. */
size_t mxd_bench_text(const mxd_bench *bench, mxd_bench_format format, char *buf, size_t cap);

/* ---- MX codecs (docs/arithmetic.md; for tools and tests) ---- */
typedef enum mxd_rule {
    MXD_RULE_FLOOR = 0, /* OCP MX v1.0 section 6.3 */
    MXD_RULE_SEARCH = 1 /* least squared error among neighbouring exponents */
} mxd_rule;
/* rows x k f32 (k a multiple of 32) to packed E2M1 [rows][k/2] and E8M0 [rows][k/32].
 * MXD_ERR_NUMERIC on NaN or Inf, with row and column in the message. */
mxd_status mxd_mxfp4_encode(const float *x, size_t rows, size_t k, mxd_rule rule, uint8_t *data, uint8_t *scale,
                            mxd_error *err);
void mxd_mxfp4_decode(const uint8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x);
mxd_status mxd_mxint8_encode(const float *x, size_t rows, size_t k, int8_t *data, uint8_t *scale, mxd_error *err);
void mxd_mxint8_decode(const int8_t *data, const uint8_t *scale, size_t rows, size_t k, float *x);

/* </cdef> */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
