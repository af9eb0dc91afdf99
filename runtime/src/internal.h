/* The engine and its sequences: every private field, with its shape. */
#ifndef MXD_INTERNAL_H
#define MXD_INTERNAL_H

#include <stdatomic.h>

#include "forward.h"
#include "kv.h"
#include "model.h"
#include "sampler.h"
#include "threads.h"
#include "tuner.h"

enum { MXD_MAX_STOP_STRINGS = 16, MXD_MAX_STOP_BYTES = 256 };

/* A token that the drafter thinks likely, and how likely. */
typedef struct mxd_guess {
    uint32_t token;
    float chance;
} mxd_guess;

/* Tokens of the context that the drafter can choose beside its own vocabulary. */
enum { MXD_CONTEXT_ROWS = 512 };

struct mxd_seq {
    mxd_engine *engine;
    uint32_t slot, in_use;
    mxd_sampling sampling; /* stop strings are copied below */
    uint32_t stop_len[MXD_MAX_STOP_STRINGS];
    char stop_text[MXD_MAX_STOP_STRINGS][MXD_MAX_STOP_BYTES];

    uint32_t *tokens;      /* (ctx) committed and queued */
    size_t token_count;    /* of those */
    size_t done;           /* positions whose keys and values are in the cache */
    size_t kept;           /* positions below were processed; those from done on must be again, behind a truncation */
    mxd_kv_state kv;
    size_t prompt_end;     /* tokens below came from prompts */
    size_t output_from;    /* the last step added tokens[output_from .. token_count) */
    mxd_stop_reason stop;

    char *held;            /* text not yet released: may be part of a character or of a stop string */
    size_t held_len;
    char *text;            /* what the last step released */
    size_t text_len;

    mxd_draft_function *drafter; /* the caller's, or NULL */
    void *drafter_arg;
    mxd_proposal proposal; /* for the step under way */
    mxd_draft_record draft_records[MXD_MAX_DRAFT]; /* of all that was proposed for the last one */
    uint8_t record_kind[MXD_MAX_DRAFT];
    uint32_t record_count;
    uint8_t drafted[MXD_MAX_DRAFT + 1]; /* of the last step's output: 1 if it was drafted */
    mxd_token_record records[MXD_MAX_DRAFT + 1]; /* of the same */

    /* Mixed precision (precision.h): positions below `done` have keys and values, those below `full_done` of full
     * precision. */
    size_t full_done;
    int awaits_full;       /* the row at `done` ran at base precision and is core */
    int catching_up;       /* a pass at full precision had no room for all rows up to the one at `done` */
    uint32_t waited;       /* steps for which it has waited for a pass at full precision */
    mxd_token_record awaiting; /* what base precision made of it */
    float core_threshold;  /* score above which a row is core */
    float flip_rate;       /* share of looks, lately, that changed the choice */
    mxd_core_function *core_rule; /* the caller's, or NULL */
    void *core_rule_arg;

    /* The trained drafter's, if the engine uses it. */
    size_t draft_done;     /* positions in its cache */
    float *draft_state;    /* (hidden) behind the newest of them */
    mxd_guess guesses[2];  /* of the token behind those committed */
    uint32_t guess_count;
    uint32_t *draft_ids;   /* (mxd_draft_logits) tokens that it can choose: the draft vocabulary, some of the context */
    uint8_t *context_head; /* head rows of the latter as tiles */
    size_t context_read;   /* tokens looked at */
    uint32_t context_rows, context_next;

    mxd_stats stats;
    double expected_tokens, expected_s; /* of the decode steps, by the policy's estimates */
    double prompted_at;    /* clock when the first prompt token of this round was queued */
};

/* The quantized input of a matrix product, and the f32 rows it is made of. */
typedef struct mxd_input {
    float *rows; /* (rows, widest input) */
    mxd_act act;
} mxd_input;

/* A thread's part of the head: logits under work, and what it found so far. */
typedef struct mxd_head_part {
    float *logits;     /* (max_rows, MXD_HEAD_COLUMNS) */
    float *best, *second; /* (max_rows) the two largest logits */
    uint32_t *winner;  /* (max_rows) its token */
    uint32_t fault_outcome, fault_token; /* the first logit that is not finite; UINT32_MAX: none */
} mxd_head_part;

/* Columns of the head that a thread computes before it looks at them: they are still in the first-level cache. */
enum { MXD_HEAD_COLUMNS = 4 * MXD_TILE_ROWS };

/* So few rows that each thread prepares them for itself, which costs less than waiting for the others. */
enum { MXD_FEW_ROWS = 4 };

struct mxd_engine {
    const mxd_model *model;
    mxd_plan plan;
    mxd_kernels kernels;
    mxd_kernel_names kernel_names;
    mxd_pool *pool;
    int precision;         /* 0 base, 1 full: the most that the workspaces and the plan have room for */
    int mixes;             /* rows run at base precision, core rows also at full (precision.h) */
    float core_fraction;   /* of rows, as asked for */
    uint32_t catch_up;     /* rows from one pass at full precision to the next, at most */
    int pass;              /* precision of the pass under way: index of norms and planes */
    uint32_t max_seqs, max_rows, logit_rows;
    int with_drafter;      /* the bundle's trained drafter is in use */
    mxd_kv_layout kv;
    int monitors;          /* somebody needs monitor.h */
    mxd_draft draft;
    uint32_t draft_max, draft_min;
    mxd_reader tuner;
    const mxd_policy *policy; /* of the step under way; NULL between steps */
    uint64_t draft_bytes;  /* that drafting read for the step under way */
    double drafter_s;      /* seconds that passes of the trained drafter took in it */

    char *arena;
    mxd_seq *seqs;         /* (max_seqs) */
    uint8_t *kv_rows;      /* (max_seqs, layers, 2, kv_heads, kv.head_bytes) */
    uint16_t *draft_kv;    /* (max_seqs, 2, kv_heads, ctx, head_dim) of the drafter's layer */
    uint8_t *side_kv;      /* (side_rows, layers, 2, kv_heads, kv.row_bytes) of rows beside the cache */
    uint32_t side_rows, side_used; /* how many there can be; how many the step under way has */
    mxd_row *rows;         /* (max_rows) of the step under way */
    mxd_outcome *outcomes; /* (max_rows) of the rows that want something, in their order */
    size_t row_count, outcome_count;

    /* Workspaces; widths are padded to whole tiles. */
    float *x;              /* (max_rows, hidden) residual stream */
    float *qkv;            /* (max_rows, qkv_width): q | k | v, each padded */
    float *mixed;          /* (max_rows, heads*head_dim) attention output */
    float *projected;      /* (max_rows, hidden) */
    float *gate_up;        /* (max_rows, 2*ffn) */
    float *scores;         /* (threads, heads of a KV head, ctx) */
    mxd_act *queries;      /* (threads) heads of a KV head, where keys are quantized */
    float *monitored;      /* (max_rows, kv_heads, ctx), see monitor.h; NULL: nobody needs it */
    float *logits;         /* (logit_rows, vocab padded) */
    mxd_head_part *head_parts; /* (threads) */
    mxd_input shared;      /* max_rows rows that the threads prepare together */
    mxd_input *own;        /* (threads) MXD_FEW_ROWS rows each */
    mxd_sampler_scratch scratch;

    /* The trained drafter's; features is NULL without it. */
    float *features;       /* (max_rows, features, hidden) of the target's last step */
    uint32_t *step_rows;   /* (max_rows) rows of the target's last step that count */
    uint32_t *feature_row; /* (max_rows) which of them a row of the drafter reads */
    float *states;         /* (max_rows, hidden) */
    uint8_t *draft_head;   /* (draft vocabulary) MXINT8T */
    float *draft_logits;   /* (max_seqs, mxd_draft_logits) */
    _Atomic uint64_t fault; /* least (layer << 32 | row) with a non-finite value, UINT64_MAX: none */
};

static inline size_t mxd_pad_tile(size_t n) {
    return (n + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS * MXD_TILE_ROWS;
}

/* Bytes of weights that one step of the target reads at a precision, whatever its rows. */
static inline uint64_t mxd_weight_bytes(const mxd_engine *g, int precision) {
    const mxd_matrix *head = &g->model->head;
    return g->model->plane_bytes[0] + (precision ? g->model->plane_bytes[1] : 0) +
           mxd_pad_tile(head->rows) / MXD_TILE_ROWS * (head->cols / MXD_BLOCK) * MXD_MXINT8_BLOCK_BYTES;
}

static inline const char *mxd_precision_name(uint32_t precision) {
    static const char *const names[] = {"auto", "base", "full"};
    return names[precision];
}

/* Precision of a row that nothing is known of yet. */
static inline int mxd_first_pass(const mxd_engine *g) {
    return g->mixes ? 0 : g->precision;
}

/* Logits of the drafter for one row. */
static inline size_t mxd_draft_logits(const mxd_engine *g) {
    return g->model->drafter.vocab + MXD_CONTEXT_ROWS;
}

#endif
