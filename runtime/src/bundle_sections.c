/* SPDX-License-Identifier: Apache-2.0 */
/* What the sections of a bundle hold: config, tensors of the planes, golden vectors, drafter, and the rest by the
 * readers of their own files. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bundle.h"
#include "bytes.h"

enum { MAX_GOLDEN = 64, MAX_GOLDEN_TOKENS = 4096 }; /* prompts, and tokens generated after each; tokens of a prompt */

static mxd_status read_config(mxd_bundle *b) {
    const mxd_section *s;
    mxd_status status = mxd_bundle_need(b, "target.config", &s);
    if (status) return status;
    mxd_config *c = &b->model->config;
    if (s->len != 64) return mxd_refuse(b, MXD_BAD_CONFIG, "config has %zu bytes", s->len);
    uint32_t *fields[8] = {&c->hidden,   &c->layers, &c->heads, &c->kv_heads,
                           &c->head_dim, &c->ffn,    &c->vocab, &c->max_positions};
    for (int i = 0; i < 8; i++) *fields[i] = mxd_load_u32(s->data + 4 * i);
    c->rms_eps = mxd_load_f32(s->data + 32);

    const uint32_t limits[8] = {65536, 1024, 1024, 1024, MXD_MAX_HEAD_DIM, 65536, 1u << 20, 1u << 20};
    bool ok = mxd_all_zero(s->data + 36, 28) && c->rms_eps > 0 && c->rms_eps < 1;
    for (int i = 0; i < 8; i++) ok = ok && *fields[i] >= 1 && *fields[i] <= limits[i];
    ok = ok && c->hidden % 32 == 0 && c->ffn % 32 == 0 && c->head_dim % 2 == 0 && c->heads % c->kv_heads == 0 &&
         c->heads * c->head_dim % 32 == 0;
    if (!ok) return mxd_refuse(b, MXD_BAD_CONFIG, "impossible dimensions in target.config");
    return MXD_OK;
}

static mxd_status need_f32(const mxd_bundle *b, const mxd_section *in, const char *name, uint32_t rows, uint32_t cols,
                           const float **out) {
    const uint8_t *bytes = NULL;
    mxd_status status = mxd_bundle_need_tensor(b, in, name, MXD_DTYPE_F32, rows, cols, &bytes);
    *out = (const float *)(const void *)bytes; /* 64-byte aligned by the format */
    return status;
}

/* Check that base and residual make up one int8 operand in every block of a matrix. */
static mxd_status check_reach(const mxd_bundle *b, const char *name, const mxd_matrix *w) {
    size_t bytes = mxd_pad_tile(w->rows) / MXD_TILE_ROWS * (w->cols / MXD_BLOCK) * MXD_MXFP4_BLOCK_BYTES;
    for (size_t block = 0; block < bytes; block += MXD_MXFP4_BLOCK_BYTES)
        for (size_t i = block; i < block + MXD_TILE_ROWS; i++) {
            int rho = w->base[i] - w->residual[i];
            if (rho < 0 || rho > MXD_RESIDUAL_REACH)
                return mxd_refuse(b, MXD_BAD_SCALE,
                                  "tensor '%s' in 'target.residual' has a scale out of its base's reach", name);
        }
    return MXD_OK;
}

/* Set one plane of an MXFP4 matrix: 0 base, 1 residual, which comes second. */
static mxd_status need_matrix(const mxd_bundle *b, const mxd_section *in, const char *name, uint32_t rows,
                              uint32_t cols, int plane, mxd_matrix *out) {
    out->rows = rows;
    out->cols = cols;
    mxd_status status = mxd_bundle_need_tensor(b, in, name, MXD_DTYPE_MXFP4T, rows, cols,
                                               plane ? &out->residual : &out->base);
    return !status && plane ? check_reach(b, name, out) : status;
}

static mxd_status read_layer(const mxd_bundle *b, const mxd_section *in, uint32_t l, int plane, mxd_layer *layer) {
    const mxd_config *c = &b->model->config;
    uint32_t q_dim = c->heads * c->head_dim, kv_dim = c->kv_heads * c->head_dim;
    const struct {
        const char *name;
        mxd_matrix *matrix;
        uint32_t rows, cols;
    } matrices[] = {
        {"self_attn.q_proj", &layer->q, q_dim, c->hidden},  {"self_attn.k_proj", &layer->k, kv_dim, c->hidden},
        {"self_attn.v_proj", &layer->v, kv_dim, c->hidden}, {"self_attn.o_proj", &layer->o, c->hidden, q_dim},
        {"mlp.gate_proj", &layer->gate, c->ffn, c->hidden}, {"mlp.up_proj", &layer->up, c->ffn, c->hidden},
        {"mlp.down_proj", &layer->down, c->hidden, c->ffn},
    };
    char name[MXD_TENSOR_NAME];
    mxd_status status;
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        snprintf(name, sizeof name, "model.layers.%u.%s.weight", l, matrices[i].name);
        status = need_matrix(b, in, name, matrices[i].rows, matrices[i].cols, plane, matrices[i].matrix);
        if (status) return status;
    }
    snprintf(name, sizeof name, "model.layers.%u.input_layernorm.weight", l);
    if ((status = need_f32(b, in, name, 1, c->hidden, &layer->attention_norm[plane]))) return status;
    snprintf(name, sizeof name, "model.layers.%u.post_attention_layernorm.weight", l);
    return need_f32(b, in, name, 1, c->hidden, &layer->ffn_norm[plane]);
}

/* Read the tensors of one plane, 0 base or 1 residual, into the matrices and norms of the layers. */
static mxd_status read_plane(mxd_bundle *b, const mxd_section *in, int plane) {
    mxd_model *m = b->model;
    for (uint32_t l = 0; l < m->config.layers; l++) {
        mxd_status status = read_layer(b, in, l, plane, &m->layers[l]);
        if (status) return status;
    }
    m->plane_bytes[plane] = in->len;
    return need_f32(b, in, "model.norm.weight", 1, m->config.hidden, &m->final_norm[plane]);
}

static mxd_status read_tensors(mxd_bundle *b) {
    mxd_model *m = b->model;
    const mxd_config *c = &m->config;
    const mxd_section *shared, *base, *residual = mxd_bundle_find(b, "target.residual");
    mxd_status status;
    if ((status = mxd_bundle_need(b, "target.shared", &shared))) return status;
    if ((status = mxd_bundle_need(b, "target.base", &base))) return status;
    if ((status = mxd_bundle_read_directory(b, "target.tensors", MXD_DTYPE_MXINT8T))) return status;
    m->layers = calloc(c->layers, sizeof *m->layers);
    if (!m->layers) return mxd_fail(b->err, MXD_ERR_MEMORY, "out of memory for %u layers", c->layers);

    m->embedding = (mxd_matrix){.rows = c->vocab, .cols = c->hidden};
    status = mxd_bundle_need_tensor(b, shared, "model.embed_tokens.weight", MXD_DTYPE_MXINT8T, c->vocab, c->hidden,
                                    &m->embedding.base);
    if (status) return status;
    m->head = m->embedding;
    if (mxd_bundle_find_tensor(b, shared, "lm_head.weight")) { /* not tied to the embedding */
        status = mxd_bundle_need_tensor(b, shared, "lm_head.weight", MXD_DTYPE_MXINT8T, c->vocab, c->hidden,
                                        &m->head.base);
        if (status) return status;
    }
    if ((status = need_f32(b, shared, "rope.cos", c->max_positions, c->head_dim / 2, &m->rope_cos))) return status;
    if ((status = need_f32(b, shared, "rope.sin", c->max_positions, c->head_dim / 2, &m->rope_sin))) return status;
    if ((status = read_plane(b, base, 0))) return status;
    if (residual && (status = read_plane(b, residual, 1))) return status;
    m->shared_bytes = shared->len;
    m->has_residual = residual != NULL;
    return MXD_OK;
}

static mxd_status read_golden(mxd_bundle *b, const mxd_section *s) {
    const mxd_config *c = &b->model->config;
    mxd_golden *g = &b->model->golden;
    if (s->len < 72) return mxd_refuse(b, MXD_BAD_GOLDEN, "golden section too short");
    g->prompts = mxd_load_u32(s->data);
    g->greedy = mxd_load_u32(s->data + 4);
    g->digest[0] = s->data + 8;
    g->digest[1] = s->data + 40;
    g->entries = (const uint32_t *)(const void *)(s->data + 72); /* sections are aligned */
    if (g->prompts < 1 || g->prompts > MAX_GOLDEN || g->greedy < 1 || g->greedy > MAX_GOLDEN)
        return mxd_refuse(b, MXD_BAD_GOLDEN, "golden section has impossible counts");
    size_t at = 72;
    for (uint32_t p = 0; p < g->prompts; p++) {
        if (s->len - at < 4) return mxd_refuse(b, MXD_BAD_GOLDEN, "golden prompts cut short");
        uint32_t count = mxd_load_u32(s->data + at);
        at += 4;
        if (count < 1 || count > MAX_GOLDEN_TOKENS || count + g->greedy > c->max_positions || (s->len - at) / 4 < count)
            return mxd_refuse(b, MXD_BAD_GOLDEN, "golden prompt %u has an impossible length", p);
        for (uint32_t i = 0; i < count; i++, at += 4)
            if (mxd_load_u32(s->data + at) >= c->vocab)
                return mxd_refuse(b, MXD_BAD_GOLDEN, "golden prompt %u has an id outside the vocabulary", p);
    }
    if (at != s->len) return mxd_refuse(b, MXD_BAD_GOLDEN, "trailing bytes after the golden prompts");
    b->model->has_golden = 1;
    return MXD_OK;
}

/* ---- the drafter ---- */

/* Read `used` finite numbers above 0, which only zeros may follow; returns whether they are that. */
static bool read_calibration(const uint8_t *p, uint32_t used, float *out) {
    bool ok = mxd_all_zero(p + 4 * used, 4 * (MXD_MAX_DEPTHS - used));
    memcpy(out, p, sizeof(float) * MXD_MAX_DEPTHS);
    for (uint32_t i = 0; i < used; i++) ok = ok && isfinite(out[i]) && out[i] > 0;
    return ok;
}

static mxd_status read_draft_config(const mxd_bundle *b, const mxd_section *s) {
    const mxd_config *c = &b->model->config;
    mxd_draft_model *d = &b->model->drafter;
    if (s->len != 160) return mxd_refuse(b, MXD_BAD_DRAFT, "draft.config has %zu bytes", s->len);
    if (mxd_load_u32(s->data) != 1)
        return mxd_refuse(b, MXD_BAD_DRAFT, "drafter architecture %u, this runtime knows 1", mxd_load_u32(s->data));
    const uint32_t dimensions[6] = {c->hidden, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab};
    static const char *const target[3] = {"target.shared", "target.base", "tokenizer"};
    bool same = true, belongs = true;
    for (int i = 0; i < 6; i++) same = same && mxd_load_u32(s->data + 4 + 4 * i) == dimensions[i];
    if (!same) return mxd_refuse(b, MXD_BAD_DRAFT, "the drafter has other dimensions than the target");
    for (int i = 0; i < 3; i++)
        belongs = belongs && mxd_load_u32(s->data + 56 + 4 * i) == mxd_bundle_find(b, target[i])->crc;
    if (!belongs) return mxd_refuse(b, MXD_BAD_DRAFT, "the drafter belongs to another target: pack both together");

    d->features = mxd_load_u32(s->data + 28);
    d->vocab = mxd_load_u32(s->data + 48);
    d->depths = mxd_load_u32(s->data + 52);
    bool ok = d->features >= 1 && d->features <= MXD_MAX_FEATURES && d->depths >= 1 && d->depths <= MXD_MAX_DEPTHS &&
              mxd_all_zero(s->data + 132, 28);
    for (uint32_t i = 0; i < MXD_MAX_FEATURES && ok; i++) {
        uint32_t layer = d->feature_layer[i] = mxd_load_u32(s->data + 32 + 4 * i);
        ok = i < d->features ? layer >= 1 && layer <= c->layers && (i == 0 || layer > d->feature_layer[i - 1])
                             : layer == 0;
    }
    ok = ok && d->vocab % MXD_TILE_ROWS == 0 && d->vocab >= MXD_TILE_ROWS && d->vocab <= 65536 &&
         d->vocab <= c->vocab && read_calibration(s->data + 68, d->depths, d->inverse_temperature) &&
         read_calibration(s->data + 100, d->depths, d->odds);
    if (!ok) return mxd_refuse(b, MXD_BAD_DRAFT, "impossible numbers in draft.config");
    return MXD_OK;
}

static mxd_status read_draft_tensors(const mxd_bundle *b, const mxd_section *in) {
    mxd_draft_model *d = &b->model->drafter;
    uint32_t hidden = b->model->config.hidden, vocab = b->model->config.vocab;
    const uint8_t *ids = NULL;
    mxd_status status;
    char name[MXD_TENSOR_NAME];
    for (uint32_t i = 0; i < b->tensor_count; i++)
        if (&b->sections[b->tensors[i].section] != in)
            return mxd_refuse(b, MXD_BAD_TENSOR, "tensor '%s' of the drafter is not in draft.weights",
                              b->tensors[i].name);
    for (uint32_t i = 0; i < d->features; i++) {
        snprintf(name, sizeof name, "feature_norm.%u.weight", i);
        if ((status = need_f32(b, in, name, 1, hidden, &d->feature_norm[i]))) return status;
    }
    status = need_matrix(b, in, "feature_proj.weight", hidden, d->features * hidden, 0, &d->feature_proj);
    if (!status) status = need_f32(b, in, "embed_norm.weight", 1, hidden, &d->embed_norm);
    if (!status) status = need_f32(b, in, "state_norm.weight", 1, hidden, &d->state_norm);
    if (!status) status = need_matrix(b, in, "input_proj.weight", hidden, 2 * hidden, 0, &d->input_proj);
    if (!status) status = read_layer(b, in, 0, 0, &d->layer);
    if (!status) status = need_f32(b, in, "model.norm.weight", 1, hidden, &d->final_norm);
    if (!status) status = mxd_bundle_need_tensor(b, in, "draft_ids", MXD_DTYPE_U32, 1, d->vocab, &ids);
    if (status) return status;
    d->ids = (const uint32_t *)(const void *)ids; /* 64-byte aligned by the format */
    if (!mxd_ids_ascend(d->ids, d->vocab, vocab))
        return mxd_refuse(b, MXD_BAD_DRAFT, "draft_ids do not ascend below the vocabulary of %u", vocab);
    d->bytes = in->len;
    return MXD_OK;
}

static mxd_status read_drafter(mxd_bundle *b) {
    const mxd_section *config, *tensors, *weights;
    if (!mxd_bundle_find(b, "draft.config") && !mxd_bundle_find(b, "draft.tensors") &&
        !mxd_bundle_find(b, "draft.weights"))
        return MXD_OK;
    mxd_status status = mxd_bundle_need(b, "draft.config", &config);
    if (!status) status = mxd_bundle_need(b, "draft.tensors", &tensors);
    if (!status) status = mxd_bundle_need(b, "draft.weights", &weights);
    if (!status) status = read_draft_config(b, config);
    if (!status) status = mxd_bundle_read_directory(b, "draft.tensors", MXD_DTYPE_U32);
    if (!status) status = read_draft_tensors(b, weights);
    return status;
}

/* Read all but the config and tensors of the target. */
static mxd_status read_other_sections(mxd_bundle *b) {
    mxd_model *m = b->model;
    const mxd_section *s;
    mxd_status status;
    if ((status = mxd_bundle_need(b, "provenance", &s))) return status;
    if (memchr(s->data, 0, s->len)) return mxd_refuse(b, MXD_BAD_SECTION, "provenance holds a NUL byte");
    m->provenance = malloc(s->len + 1);
    if (!m->provenance) return mxd_fail(b->err, MXD_ERR_MEMORY, "out of memory reading provenance");
    memcpy(m->provenance, s->data, s->len);
    m->provenance[s->len] = 0;

    if ((status = mxd_bundle_need(b, "tokenizer", &s))) return status;
    if ((status = mxd_tokenizer_init(&m->tokenizer, s->data, s->len, m->config.vocab, b->err))) return status;
    if ((s = mxd_bundle_find(b, "chat"))) {
        if ((status = mxd_chat_init(&m->chat, s->data, s->len, m->config.vocab, b->err))) return status;
        m->has_chat = 1;
    }
    if ((s = mxd_bundle_find(b, "golden")) && (status = read_golden(b, s))) return status;
    if ((status = read_drafter(b))) return status;
    if ((s = mxd_bundle_find(b, "draft.ngrams"))) {
        if ((status = mxd_ngram_table_init(&m->ngrams, s->data, s->len, m->config.vocab, b->err))) return status;
        m->has_ngrams = 1;
    }
    mxd_schedule_default(&m->schedule, m->config.layers);
    if ((s = mxd_bundle_find(b, "schedule")))
        return mxd_schedule_init(&m->schedule, s->data, s->len, m->config.layers, b->err);
    return MXD_OK;
}

mxd_status mxd_bundle_read(mxd_bundle *b) {
    mxd_status status = mxd_bundle_read_sections(b);
    if (!status) status = read_config(b);
    if (!status) status = read_tensors(b);
    if (!status) status = read_other_sections(b);
    free(b->tensors);
    return status;
}
