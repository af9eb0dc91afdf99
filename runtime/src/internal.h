/* SPDX-License-Identifier: Apache-2.0 */
/* The engine and its sequences: every private field. State that one file owns is a struct of that file's header, whose
 * fields no other file writes. runtime/README.md is the map. */
#ifndef MXD_INTERNAL_H
#define MXD_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "draft_log.h"
#include "draft_model.h"
#include "forward.h"
#include "grammar.h"
#include "kv.h"
#include "model.h"
#include "monitor.h"
#include "precision.h"
#include "sampler.h"
#include "threads.h"
#include "tuner.h"

/* The tokens of a model that no repetition penalty falls on. */
static inline mxd_exempt mxd_control_tokens(const mxd_model *m) {
    return (mxd_exempt){m->tokenizer.special, m->tokenizer.special_count};
}

enum { MXD_MAX_ROWS = 512, MXD_MAX_THREADS = 64, MXD_MAX_STOP_STRINGS = 16, MXD_MAX_STOP_BYTES = 256 };

/* A token timeline. Its cursors into tokens[]:
 *
 *      0          kv.aged     precision.full_done      n_past       replay_end      token_count
 *      |-------------|------------------|----------------|-------------|----------------|
 *      | core or far |           in the recent window    |
 *      |       at full precision        | at base prec.  |
 *      |      processed: keys and values are cached      |  to replay  |  never run yet |
 *
 *   kv.aged              moved by kv.c, a block at a time, before rows run
 *   precision.full_done  moved by precision.c after a pass at full precision; only if the sequence mixes precisions
 *   n_past               moved by step.c over prompts, by speculate.c over each row whose choice is committed, by
 *                        teacher_forcing.c over the caller's tokens
 *   replay_end           set by truncation, which can leave n_past below what is kept: that is processed again before
 *                        anything else; no more than n_past otherwise
 *   token_count          moved by sequence.c: prompts queue tokens, and each choice is appended
 *
 * Also prompt_end (tokens below came from prompts), output_from (the last step added the tokens from there on) and
 * drafter.n_past (what the trained drafter has read, at most n_past). Truncation moves all of them back. */
struct mxd_seq {
    mxd_engine *engine;
    uint32_t slot; /* its index in engine->seqs */
    bool in_use;
    mxd_sampling sampling; /* stop strings are copied to: */
    uint32_t stop_len[MXD_MAX_STOP_STRINGS];
    char stop_text[MXD_MAX_STOP_STRINGS][MXD_MAX_STOP_BYTES];

    uint32_t *tokens; /* (ctx) */
    size_t token_count, n_past, replay_end, prompt_end, output_from;
    mxd_stop stop;

    mxd_kv_state kv;
    mxd_precision_state precision;
    mxd_drafter_state drafter;
    mxd_monitor_state monitor;
    mxd_draft_log drafts;
    mxd_grammar_state grammar;

    mxd_draft_function *caller_drafter; /* or NULL */
    void *caller_drafter_arg;

    mxd_token_record records[MXD_MAX_STEP_TOKENS];                              /* of the last step's output */
    mxd_alternative logprobs[MXD_MAX_STEP_TOKENS * (1 + MXD_MAX_ALTERNATIVES)]; /* sampling.logprobs for each of it */
    char *held; /* text not yet released: may be part of a character or of a stop string */
    size_t held_len;
    char *text; /* what the last step released */
    size_t text_len;

    mxd_stats stats;                    /* counted by step.c and speculate.c */
    double expected_tokens, expected_s; /* of the decode steps, by the policy's estimates */
    double prompted_at;                 /* clock when the first prompt token of this round was queued */
};

/* The quantized input of a matrix product, and the f32 rows it is made of. */
typedef struct mxd_input {
    float *rows; /* (rows, widest input) */
    mxd_act act;
} mxd_input;

/* Columns of the head that a thread computes before it looks at them: they are still in the first-level cache. */
enum { MXD_HEAD_COLUMNS = 4 * MXD_TILE_ROWS };

/* A thread's part of the head: logits under work, and what it found so far. */
typedef struct mxd_head_part {
    float *logits;                       /* (max_rows, MXD_HEAD_COLUMNS) */
    float *best, *second;                /* (max_rows) the two largest logits */
    uint32_t *winner;                    /* (max_rows) the token of the largest */
    uint32_t fault_outcome, fault_token; /* the first logit that is not finite; UINT32_MAX: none */
} mxd_head_part;

/* So few rows that each thread prepares them for itself, which costs less than waiting for the others. */
enum { MXD_FEW_ROWS = 4 };

/* Residual streams that a pass writes for the caller, for all its rows. */
typedef struct mxd_streams {
    const uint32_t *layers; /* (count) after how many layers */
    size_t count;
    float *out; /* (rows, count, hidden) */
} mxd_streams;

struct mxd_engine {
    const mxd_model *model;
    mxd_kernels kernels;
    mxd_kernel_names kernel_names;
    mxd_pool *pool;
    char *arena;
    mxd_seq *seqs;     /* (max_seqs) */
    _Atomic bool busy; /* a call that runs rows is under way (engine.c) */
    int64_t process;   /* that opened it: the pool's threads exist in no other */

    /* The options as engine.c resolved them. */
    mxd_plan plan;
    int precision;       /* 0 base, 1 full: the most that the workspaces and the plan have room for */
    bool mixes;          /* rows run at base precision, core rows also at full (precision.h) */
    float core_fraction; /* of rows, as asked for */
    uint32_t catch_up;   /* most rows from one pass at full precision to the next */
    uint32_t max_seqs, max_rows, logit_rows; /* the latter: of max_rows, the most that can have logits for output */
    mxd_draft draft;
    uint32_t draft_max, draft_min;

    mxd_kv_layout kv;
    mxd_drafter drafter;
    mxd_monitor monitor;
    mxd_reader tuner;
    const mxd_streams *streams; /* asked for by the call under way, by teacher_forcing.c; or NULL */
    const mxd_policy *policy;   /* of the step under way, by step.c; NULL between steps */

    /* The pass under way, by forward.c; draft_model.c runs its own with the same rows. */
    mxd_row *rows;         /* (max_rows) */
    mxd_outcome *outcomes; /* (max_rows) of the rows that have an output, in their order */
    size_t row_count, outcome_count;
    uint32_t side_count;    /* side rows among them */
    int pass_precision;     /* index of norms and planes: 0 base, 1 full */
    _Atomic uint64_t fault; /* least (layer << 32 | row) with a non-finite value, UINT64_MAX: none */

    /* Its workspaces; widths are padded to whole tiles. */
    float *x;                  /* (max_rows, hidden) residual stream */
    float *qkv;                /* (max_rows, qkv_width): q | k | v, each padded */
    float *mixed;              /* (max_rows, heads*head_dim) attention output */
    float *projected;          /* (max_rows, hidden) */
    float *gate_up;            /* (max_rows, 2*ffn) */
    float *scores;             /* (threads, heads of a KV head, ctx) */
    mxd_act *queries;          /* (threads) heads of a KV head, where keys are quantized */
    float *logits;             /* (logit_rows, vocab padded) */
    mxd_head_part *head_parts; /* (threads) */
    mxd_input shared;          /* max_rows rows that the threads prepare together */
    mxd_input *own;            /* (threads) MXD_FEW_ROWS rows each */
    mxd_sampler_scratch scratch;
};

#endif
