/* SPDX-License-Identifier: Apache-2.0 */
/* The model: typed views into a mapped and validated bundle (bundle.h). */
#ifndef MXD_MODEL_H
#define MXD_MODEL_H

#include "../kernels/kernels.h"
#include "chat.h"
#include "draft_ngram.h"
#include "schedule.h"
#include "status.h"
#include "tokenizer.h"

/* A weight matrix [rows][cols] in tile order; residual is NULL for one-plane matrices. */
typedef struct mxd_matrix {
    const uint8_t *base, *residual;
    uint32_t rows, cols;
} mxd_matrix;

/* Tensors of one layer; norms are indexed by precision: [0] base, [1] full. */
typedef struct mxd_layer {
    mxd_matrix q, k, v, o, gate, up, down;
    const float *attention_norm[2], *ffn_norm[2]; /* (hidden) */
} mxd_layer;

static inline size_t mxd_pad_tile(size_t n) {
    return (n + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS * MXD_TILE_ROWS;
}

typedef struct mxd_config {
    uint32_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab, max_positions;
    float rms_eps;
} mxd_config;

enum { MXD_MAX_FEATURES = 4, MXD_MAX_DEPTHS = 8 };

/* A trained drafter (docs/arithmetic.md, "Drafter"): one layer that reads residual streams of the target. */
typedef struct mxd_draft_model {
    uint32_t features;                        /* residual streams it reads; 0: the bundle has no drafter */
    uint32_t feature_layer[MXD_MAX_FEATURES]; /* after how many layers */
    uint32_t vocab;                           /* tokens that it can always draft */
    uint32_t depths;                          /* draft depths with a calibration of their own */
    float inverse_temperature[MXD_MAX_DEPTHS], odds[MXD_MAX_DEPTHS];
    const float *feature_norm[MXD_MAX_FEATURES], *embed_norm, *state_norm, *final_norm; /* (hidden) */
    mxd_matrix feature_proj, input_proj; /* (hidden, features*hidden), (hidden, 2*hidden) */
    mxd_layer layer;
    const uint32_t *ids; /* (vocab) ascending */
    uint64_t bytes;      /* of its weights */
} mxd_draft_model;

typedef struct mxd_golden {
    uint32_t prompts, greedy;
    const uint8_t *digest[2]; /* SHA-256 by precision: base, full */
    const uint32_t *entries;  /* per prompt: count, ids[count] */
} mxd_golden;

struct mxd_model {
    const uint8_t *map;
    size_t map_len;
    char *path, *provenance;
    mxd_config config;
    uint32_t has_residual, has_chat, has_golden, has_ngrams;
    mxd_matrix embedding, head;       /* MXINT8T (vocab, hidden); the same when tied */
    const float *rope_cos, *rope_sin; /* (max_positions, head_dim/2) */
    const float *final_norm[2];       /* (hidden) by precision */
    mxd_layer *layers;                /* (layers) */
    uint64_t plane_bytes[2], shared_bytes;
    mxd_tokenizer tokenizer;
    mxd_chat chat;
    mxd_golden golden;
    mxd_draft_model drafter;
    mxd_ngram_table ngrams;
    mxd_schedule schedule;
};

#endif
