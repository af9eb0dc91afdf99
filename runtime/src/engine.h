/* Private: the engine's arena, rows and sequences. */
#ifndef MXD_ENGINE_H
#define MXD_ENGINE_H

#include <stdatomic.h>

#include "../kernels/kernels.h"
#include "bundle.h"
#include "sampler.h"
#include "threads.h"

enum { MXD_MAX_SEQS = 64, MXD_MAX_STOP_STRINGS = 16, MXD_MAX_STOP_BYTES = 256, MXD_LOGIT_ROWS = 16 };

/* One row of an engine step: a token at a position of a sequence. */
typedef struct mxd_row {
    uint32_t slot, position, token;
    uint32_t wants_logits;
} mxd_row;

struct mxd_seq {
    mxd_engine *engine;
    uint32_t slot, in_use;
    mxd_sampling sampling; /* stop strings are copied below */
    uint32_t stop_len[MXD_MAX_STOP_STRINGS];
    char stop_text[MXD_MAX_STOP_STRINGS][MXD_MAX_STOP_BYTES];

    uint32_t *tokens;      /* (ctx) committed and queued */
    size_t token_count;    /* of those */
    size_t done;           /* positions whose keys and values are in the cache */
    size_t prompt_end;     /* tokens below came from prompts */
    size_t output_from;    /* the last step added tokens[output_from .. token_count) */
    mxd_stop_reason stop;

    char *held;            /* text not yet released: may be part of a character or of a stop string */
    size_t held_len;
    char *text;            /* what the last step released */
    size_t text_len;

    mxd_stats stats;
    double prompted_at;    /* clock when the first prompt token of this round was queued */
};

/* The quantized input of a matrix product, and the f32 rows it is made of. */
typedef struct mxd_input {
    float *rows; /* (rows, widest input) */
    mxd_act act;
} mxd_input;

/* So few rows that each thread prepares them for itself, which costs less than waiting for the others. */
enum { MXD_FEW_ROWS = 4 };

struct mxd_engine {
    const mxd_model *model;
    mxd_plan plan;
    mxd_kernels kernels;
    mxd_kernel_names kernel_names;
    mxd_pool *pool;
    int precision;         /* 0 base, 1 full: index of norms and planes */
    uint32_t max_seqs, max_rows, logit_rows;

    char *arena;
    mxd_seq *seqs;         /* (max_seqs) */
    uint16_t *kv;          /* (max_seqs, layers, 2, kv_heads, ctx, head_dim) f16 */
    mxd_row *rows;         /* (max_rows) of the step under way */
    uint32_t *logit_row;   /* (logit_rows) rows that want logits, ascending */
    size_t row_count, logit_count;

    /* Workspaces; widths are padded to whole tiles. */
    float *x;              /* (max_rows, hidden) residual stream */
    float *qkv;            /* (max_rows, qkv_width): q | k | v, each padded */
    float *mixed;          /* (max_rows, heads*head_dim) attention output */
    float *projected;      /* (max_rows, hidden) */
    float *gate_up;        /* (max_rows, 2*ffn) */
    float *scores;         /* (threads, heads of a KV head, ctx) */
    float *logits;         /* (logit_rows, vocab padded) */
    mxd_input shared;      /* max_rows rows that the threads prepare together */
    mxd_input *own;        /* (threads) MXD_FEW_ROWS rows each */
    mxd_sampler_scratch scratch;
    _Atomic uint64_t fault; /* least (layer << 32 | row) with a non-finite value, UINT64_MAX: none */
};

static inline size_t mxd_pad_tile(size_t n) {
    return (n + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS * MXD_TILE_ROWS;
}

/* Keys (which = 0) or values (1) of a head of a sequence: (ctx, head_dim). */
static inline uint16_t *mxd_kv(const mxd_engine *g, uint32_t slot, uint32_t layer, int which, uint32_t head) {
    const mxd_config *c = &g->model->config;
    size_t index = (((size_t)slot * c->layers + layer) * 2 + (size_t)which) * c->kv_heads + head;
    return g->kv + index * g->plan.ctx * c->head_dim;
}

/* Rows whose logits one step can hand out. */
static inline size_t mxd_logit_chunk(const mxd_engine *g) {
    return g->max_rows < g->logit_rows ? g->max_rows : g->logit_rows;
}

/* model.c: run the step's rows through the model; logits of the rows that want them, in order, in g->logits.
 * MXD_ERR_NUMERIC names layer and position. */
mxd_status mxd_forward(mxd_engine *g, mxd_error *err);

#endif
