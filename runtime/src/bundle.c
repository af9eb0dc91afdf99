/* Reads a bundle (.mxb): trusts nothing, refuses every lie with its own verdict (runtime/BUNDLE.md). */
#include "bundle.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hash.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bundles are mapped in place: a little-endian machine is required"
#endif

enum { HEADER_BYTES = 64, ENTRY_BYTES = 64, SECTION_ALIGN = 65536, MAX_SECTIONS = 64, TENSOR_BYTES = 128 };
enum { DTYPE_F32 = 1, DTYPE_MXFP4T = 2, DTYPE_MXINT8T = 3, DTYPE_U32 = 4 };

static const uint8_t MAGIC[8] = {0x89, 'M', 'X', 'B', '\r', '\n', 0x1A, '\n'};

typedef struct section {
    char name[32];
    const uint8_t *data;
    size_t len;
    uint32_t crc;
} section;

typedef struct tensor {
    char name[80];
    uint32_t dtype, section;
    uint64_t rows, cols, offset, len;
} tensor;

typedef struct reader {
    mxd_model *model;
    mxd_error *err;
    uint32_t section_count, tensor_count;
    section sections[MAX_SECTIONS];
    tensor *tensors;
} reader;

static int all_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return 0;
    return 1;
}

/* A NUL-padded name of [a-z0-9._] (and [A-Z-] for tensors) with at least one character and one NUL. */
static int valid_name(const uint8_t *p, size_t cap, int tensor_name) {
    size_t n = 0;
    for (; n < cap && p[n]; n++) {
        uint8_t c = p[n];
        int ok = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                 (tensor_name && ((c >= 'A' && c <= 'Z') || c == '-'));
        if (!ok) return 0;
    }
    return n > 0 && n < cap && all_zero(p + n, cap - n);
}

static mxd_status read_sections(reader *r) {
    const uint8_t *map = r->model->map;
    size_t len = r->model->map_len;
    size_t shown = len < 8 ? len : 8;
    if (len == 0 || memcmp(map, MAGIC, shown))
        return mxd_fail(r->err, MXD_BAD_MAGIC, "%s: not an mxdraft bundle (wrong magic)", r->model->path);
    if (len < HEADER_BYTES)
        return mxd_fail(r->err, MXD_BAD_LENGTH, "%s: truncated: %zu bytes, not even a header", r->model->path, len);
    uint32_t version = mxd_load_u32(map + 8);
    if (version != 1)
        return mxd_fail(r->err, MXD_BAD_VERSION, "%s: bundle version %u, this runtime reads version 1: pack it again",
                        r->model->path, version);
    uint64_t claimed = mxd_load_u64(map + 16);
    if (claimed != len)
        return mxd_fail(r->err, MXD_BAD_LENGTH, "%s: %zu bytes, but the header says %llu: copy the file again",
                        r->model->path, len, (unsigned long long)claimed);
    uint32_t count = mxd_load_u32(map + 12);
    if (count < 1 || count > MAX_SECTIONS || !all_zero(map + 28, 36))
        return mxd_fail(r->err, MXD_BAD_HEADER, "%s: damaged header", r->model->path);
    if (HEADER_BYTES + (size_t)count * ENTRY_BYTES > len)
        return mxd_fail(r->err, MXD_BAD_RANGE, "%s: section table runs past the end of the file", r->model->path);
    const uint8_t *table = map + HEADER_BYTES;
    if (mxd_crc32(table, (size_t)count * ENTRY_BYTES) != mxd_load_u32(map + 24))
        return mxd_fail(r->err, MXD_BAD_HEADER, "%s: section table checksum differs", r->model->path);

    uint64_t expected = SECTION_ALIGN;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *e = table + (size_t)i * ENTRY_BYTES;
        if (!valid_name(e, 32, 0))
            return mxd_fail(r->err, MXD_BAD_NAME, "%s: section %u has an invalid name", r->model->path, i);
        memcpy(r->sections[i].name, e, 32);
        for (uint32_t j = 0; j < i; j++)
            if (!strcmp(r->sections[j].name, r->sections[i].name))
                return mxd_fail(r->err, MXD_BAD_NAME, "%s: section '%s' appears twice", r->model->path,
                                r->sections[i].name);
        uint64_t offset = mxd_load_u64(e + 32), size = mxd_load_u64(e + 40);
        if (offset != expected || size == 0 || offset > len || size > len - offset)
            return mxd_fail(r->err, MXD_BAD_RANGE, "%s: section '%s' is not where it must be", r->model->path,
                            r->sections[i].name);
        if (!all_zero(e + 52, 12))
            return mxd_fail(r->err, MXD_BAD_HEADER, "%s: section '%s' has reserved bytes set", r->model->path,
                            r->sections[i].name);
        r->sections[i].data = map + offset;
        r->sections[i].len = (size_t)size;
        r->sections[i].crc = mxd_load_u32(e + 48);
        expected = (offset + size + SECTION_ALIGN - 1) / SECTION_ALIGN * SECTION_ALIGN;
        if (i + 1 == count && offset + size != len)
            return mxd_fail(r->err, MXD_BAD_RANGE, "%s: bytes behind the last section", r->model->path);
    }
    r->section_count = count;
    for (uint32_t i = 0; i < count; i++)
        if (mxd_crc32(r->sections[i].data, r->sections[i].len) != r->sections[i].crc)
            return mxd_fail(r->err, MXD_BAD_CHECKSUM, "%s: section '%s' is damaged: copy the file again",
                            r->model->path, r->sections[i].name);
    return MXD_OK;
}

static const section *find_section(const reader *r, const char *name) {
    for (uint32_t i = 0; i < r->section_count; i++)
        if (!strcmp(r->sections[i].name, name)) return &r->sections[i];
    return NULL;
}

static mxd_status need_section(const reader *r, const char *name, const section **out) {
    *out = find_section(r, name);
    if (!*out) return mxd_fail(r->err, MXD_BAD_SECTION, "%s: section '%s' is missing", r->model->path, name);
    return MXD_OK;
}

static mxd_status read_config(reader *r) {
    const section *s;
    mxd_status status = need_section(r, "target.config", &s);
    if (status) return status;
    mxd_config *c = &r->model->config;
    if (s->len != 64) return mxd_fail(r->err, MXD_BAD_CONFIG, "%s: config has %zu bytes", r->model->path, s->len);
    uint32_t *fields[8] = {&c->hidden,   &c->layers, &c->heads, &c->kv_heads,
                           &c->head_dim, &c->ffn,    &c->vocab, &c->max_positions};
    for (int i = 0; i < 8; i++) *fields[i] = mxd_load_u32(s->data + 4 * i);
    memcpy(&c->rms_eps, s->data + 32, 4);

    const uint32_t limits[8] = {65536, 1024, 1024, 1024, 256, 65536, 1u << 20, 1u << 20};
    int ok = all_zero(s->data + 36, 28) && c->rms_eps > 0 && c->rms_eps < 1;
    for (int i = 0; i < 8; i++) ok = ok && *fields[i] >= 1 && *fields[i] <= limits[i];
    ok = ok && c->hidden % 32 == 0 && c->ffn % 32 == 0 && c->head_dim % 2 == 0 && c->heads % c->kv_heads == 0 &&
         c->heads * c->head_dim % 32 == 0;
    if (!ok) return mxd_fail(r->err, MXD_BAD_CONFIG, "%s: impossible dimensions in target.config", r->model->path);
    return MXD_OK;
}

/* Bytes that a dtype needs for rows x cols; 0 if the shape is impossible. Shapes stay far below overflow. */
static uint64_t tensor_bytes(uint32_t dtype, uint64_t rows, uint64_t cols) {
    if (rows < 1 || cols < 1 || rows > 1u << 24 || cols > 1u << 24) return 0;
    if (dtype == DTYPE_F32 || dtype == DTYPE_U32) return rows * cols * 4;
    if (cols % MXD_BLOCK) return 0;
    uint64_t blocks = (rows + MXD_TILE_ROWS - 1) / MXD_TILE_ROWS * (cols / MXD_BLOCK);
    return blocks * (dtype == DTYPE_MXFP4T ? MXD_MXFP4_BLOCK_BYTES : MXD_MXINT8_BLOCK_BYTES);
}

static mxd_status read_tensor_entry(reader *r, const uint8_t *e, uint32_t index, uint32_t last_dtype) {
    const char *path = r->model->path;
    tensor *t = &r->tensors[index];
    if (!valid_name(e, 80, 1)) return mxd_fail(r->err, MXD_BAD_NAME, "%s: tensor %u has an invalid name", path, index);
    memcpy(t->name, e, 80);
    t->dtype = mxd_load_u32(e + 80);
    t->section = mxd_load_u32(e + 84);
    t->rows = mxd_load_u64(e + 88);
    t->cols = mxd_load_u64(e + 96);
    t->offset = mxd_load_u64(e + 104);
    t->len = mxd_load_u64(e + 112);
    if (t->dtype < DTYPE_F32 || t->dtype > last_dtype)
        return mxd_fail(r->err, MXD_BAD_DTYPE, "%s: tensor '%s' has unknown dtype %u", path, t->name, t->dtype);
    if (t->section >= r->section_count)
        return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensor '%s' names section %u of %u", path, t->name, t->section,
                        r->section_count);
    uint64_t bytes = tensor_bytes(t->dtype, t->rows, t->cols);
    size_t room = r->sections[t->section].len;
    if (bytes == 0 || t->len != bytes || t->offset % 64 || t->offset > room || t->len > room - t->offset)
        return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensor '%s' does not fit its shape or section", path, t->name);
    if (!all_zero(e + 120, 8))
        return mxd_fail(r->err, MXD_BAD_HEADER, "%s: tensor '%s' has reserved bytes set", path, t->name);
    return MXD_OK;
}

static int by_section_and_offset(const void *a, const void *b) {
    const tensor *x = a, *y = b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return 0;
}

static int by_section_and_name(const void *a, const void *b) {
    const tensor *x = a, *y = b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    return strcmp(x->name, y->name);
}

static mxd_status check_scales(const reader *r, const tensor *t) {
    if (t->dtype == DTYPE_F32 || t->dtype == DTYPE_U32) return MXD_OK;
    size_t stride = t->dtype == DTYPE_MXFP4T ? MXD_MXFP4_BLOCK_BYTES : MXD_MXINT8_BLOCK_BYTES;
    const uint8_t *p = r->sections[t->section].data + t->offset, *end = p + t->len;
    for (; p < end; p += stride)
        if (memchr(p, 255, MXD_TILE_ROWS))
            return mxd_fail(r->err, MXD_BAD_SCALE, "%s: tensor '%s' has an E8M0 scale of 255 (NaN)", r->model->path,
                            t->name);
    return MXD_OK;
}

/* The directory in section `name` becomes the reader's; last_dtype: the greatest that it may have. */
static mxd_status read_tensor_directory(reader *r, const char *name, uint32_t last_dtype) {
    const section *s;
    mxd_status status = need_section(r, name, &s);
    if (status) return status;
    if (s->len % TENSOR_BYTES || s->len / TENSOR_BYTES > 1u << 20)
        return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensor directory has %zu bytes", r->model->path, s->len);
    free(r->tensors);
    r->tensor_count = (uint32_t)(s->len / TENSOR_BYTES);
    r->tensors = calloc(r->tensor_count, sizeof *r->tensors);
    if (!r->tensors) return mxd_fail(r->err, MXD_ERR_MEMORY, "out of memory reading the tensor directory");
    for (uint32_t i = 0; i < r->tensor_count; i++)
        if ((status = read_tensor_entry(r, s->data + (size_t)i * TENSOR_BYTES, i, last_dtype))) return status;

    qsort(r->tensors, r->tensor_count, sizeof *r->tensors, by_section_and_offset);
    for (uint32_t i = 1; i < r->tensor_count; i++) {
        const tensor *a = &r->tensors[i - 1], *b = &r->tensors[i];
        if (a->section == b->section && a->offset + a->len > b->offset)
            return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensors '%s' and '%s' overlap", r->model->path, a->name,
                            b->name);
    }
    qsort(r->tensors, r->tensor_count, sizeof *r->tensors, by_section_and_name);
    for (uint32_t i = 1; i < r->tensor_count; i++)
        if (!by_section_and_name(&r->tensors[i - 1], &r->tensors[i]))
            return mxd_fail(r->err, MXD_BAD_NAME, "%s: tensor '%s' appears twice", r->model->path,
                            r->tensors[i].name);
    for (uint32_t i = 0; i < r->tensor_count; i++)
        if ((status = check_scales(r, &r->tensors[i]))) return status;
    return MXD_OK;
}

/* Look up a tensor that the config asks for; returns its bytes in *out. */
static mxd_status need_tensor(const reader *r, const section *in, const char *name, uint32_t dtype, uint32_t rows,
                              uint32_t cols, const uint8_t **out) {
    tensor key = {.section = (uint32_t)(in - r->sections)};
    snprintf(key.name, sizeof key.name, "%s", name);
    const tensor *t = bsearch(&key, r->tensors, r->tensor_count, sizeof *r->tensors, by_section_and_name);
    if (!t)
        return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensor '%s' is missing from '%s'", r->model->path, name, in->name);
    if (t->dtype != dtype)
        return mxd_fail(r->err, MXD_BAD_DTYPE, "%s: tensor '%s' has dtype %u, not %u", r->model->path, name, t->dtype,
                        dtype);
    if (t->rows != rows || t->cols != cols)
        return mxd_fail(r->err, MXD_BAD_SHAPE, "%s: tensor '%s' is %llu x %llu, the config asks for %u x %u",
                        r->model->path, name, (unsigned long long)t->rows, (unsigned long long)t->cols, rows, cols);
    *out = in->data + t->offset;
    return MXD_OK;
}

static mxd_status need_f32(const reader *r, const section *in, const char *name, uint32_t rows, uint32_t cols,
                           const float **out) {
    const uint8_t *bytes = NULL;
    mxd_status status = need_tensor(r, in, name, DTYPE_F32, rows, cols, &bytes);
    *out = (const float *)(const void *)bytes; /* 64-byte aligned by the format */
    return status;
}

/* An MXFP4 matrix; plane 0 base, 1 residual. */
static mxd_status need_matrix(const reader *r, const section *in, const char *name, uint32_t rows, uint32_t cols,
                              int plane, mxd_matrix *out) {
    out->rows = rows, out->cols = cols;
    return need_tensor(r, in, name, DTYPE_MXFP4T, rows, cols, plane ? &out->residual : &out->base);
}

static mxd_status read_layer(const reader *r, const section *in, uint32_t l, int plane, mxd_layer *layer) {
    const mxd_config *c = &r->model->config;
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
    char name[80];
    mxd_status status;
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) {
        snprintf(name, sizeof name, "model.layers.%u.%s.weight", l, matrices[i].name);
        status = need_matrix(r, in, name, matrices[i].rows, matrices[i].cols, plane, matrices[i].matrix);
        if (status) return status;
    }
    snprintf(name, sizeof name, "model.layers.%u.input_layernorm.weight", l);
    if ((status = need_f32(r, in, name, 1, c->hidden, &layer->attention_norm[plane]))) return status;
    snprintf(name, sizeof name, "model.layers.%u.post_attention_layernorm.weight", l);
    return need_f32(r, in, name, 1, c->hidden, &layer->ffn_norm[plane]);
}

/* The tensors of one plane (0 base, 1 residual) go into the layers' matrices and norms. */
static mxd_status read_plane(reader *r, const section *in, int plane) {
    mxd_model *m = r->model;
    for (uint32_t l = 0; l < m->config.layers; l++) {
        mxd_status status = read_layer(r, in, l, plane, &m->layers[l]);
        if (status) return status;
    }
    m->plane_bytes[plane] = in->len;
    return need_f32(r, in, "model.norm.weight", 1, m->config.hidden, &m->final_norm[plane]);
}

static mxd_status read_tensors(reader *r) {
    mxd_model *m = r->model;
    const mxd_config *c = &m->config;
    const section *shared, *base, *residual = find_section(r, "target.residual");
    mxd_status status;
    if ((status = need_section(r, "target.shared", &shared))) return status;
    if ((status = need_section(r, "target.base", &base))) return status;
    if ((status = read_tensor_directory(r, "target.tensors", DTYPE_MXINT8T))) return status;
    m->layers = calloc(c->layers, sizeof *m->layers);
    if (!m->layers) return mxd_fail(r->err, MXD_ERR_MEMORY, "out of memory for %u layers", c->layers);

    m->embedding = (mxd_matrix){.rows = c->vocab, .cols = c->hidden};
    status = need_tensor(r, shared, "model.embed_tokens.weight", DTYPE_MXINT8T, c->vocab, c->hidden,
                         &m->embedding.base);
    if (status) return status;
    m->head = m->embedding;
    tensor key = {.section = (uint32_t)(shared - r->sections), .name = "lm_head.weight"};
    if (bsearch(&key, r->tensors, r->tensor_count, sizeof *r->tensors, by_section_and_name)) {
        status = need_tensor(r, shared, key.name, DTYPE_MXINT8T, c->vocab, c->hidden, &m->head.base);
        if (status) return status;
    }
    if ((status = need_f32(r, shared, "rope.cos", c->max_positions, c->head_dim / 2, &m->rope_cos))) return status;
    if ((status = need_f32(r, shared, "rope.sin", c->max_positions, c->head_dim / 2, &m->rope_sin))) return status;
    if ((status = read_plane(r, base, 0))) return status;
    if (residual && (status = read_plane(r, residual, 1))) return status;
    m->shared_bytes = shared->len;
    m->has_residual = residual != NULL;
    return MXD_OK;
}

static mxd_status read_golden(reader *r, const section *s) {
    const mxd_config *c = &r->model->config;
    mxd_golden *g = &r->model->golden;
    if (s->len < 72) return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: golden section too short", r->model->path);
    g->prompts = mxd_load_u32(s->data);
    g->greedy = mxd_load_u32(s->data + 4);
    g->digest[0] = s->data + 8;
    g->digest[1] = s->data + 40;
    g->entries = s->data + 72;
    if (g->prompts < 1 || g->prompts > 64 || g->greedy < 1 || g->greedy > 64)
        return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: golden section has impossible counts", r->model->path);
    size_t at = 72;
    for (uint32_t p = 0; p < g->prompts; p++) {
        if (s->len - at < 4) return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: golden prompts cut short", r->model->path);
        uint32_t count = mxd_load_u32(s->data + at);
        at += 4;
        if (count < 1 || count > 4096 || count + g->greedy > c->max_positions || (s->len - at) / 4 < count)
            return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: golden prompt %u has an impossible length", r->model->path, p);
        for (uint32_t i = 0; i < count; i++, at += 4)
            if (mxd_load_u32(s->data + at) >= c->vocab)
                return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: golden prompt %u has an id outside the vocabulary",
                                r->model->path, p);
    }
    if (at != s->len) return mxd_fail(r->err, MXD_BAD_GOLDEN, "%s: bytes behind the golden prompts", r->model->path);
    r->model->has_golden = 1;
    return MXD_OK;
}

/* ---- the drafter ---- */

/* `used` finite numbers above 0, then zeros. */
static int read_calibration(const uint8_t *p, uint32_t used, float *out) {
    int ok = all_zero(p + 4 * used, 4 * (MXD_MAX_DEPTHS - used));
    memcpy(out, p, sizeof(float) * MXD_MAX_DEPTHS);
    for (uint32_t i = 0; i < used; i++) ok = ok && isfinite(out[i]) && out[i] > 0;
    return ok;
}

static mxd_status read_draft_config(const reader *r, const section *s) {
    const mxd_config *c = &r->model->config;
    mxd_draft_model *d = &r->model->drafter;
    const char *path = r->model->path;
    if (s->len != 160) return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: draft.config has %zu bytes", path, s->len);
    if (mxd_load_u32(s->data) != 1)
        return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: drafter architecture %u, this runtime knows 1", path,
                        mxd_load_u32(s->data));
    const uint32_t dimensions[6] = {c->hidden, c->heads, c->kv_heads, c->head_dim, c->ffn, c->vocab};
    static const char *const target[3] = {"target.shared", "target.base", "tokenizer"};
    int same = 1, belongs = 1;
    for (int i = 0; i < 6; i++) same = same && mxd_load_u32(s->data + 4 + 4 * i) == dimensions[i];
    if (!same)
        return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: the drafter has other dimensions than the target", path);
    for (int i = 0; i < 3; i++)
        belongs = belongs && mxd_load_u32(s->data + 56 + 4 * i) == find_section(r, target[i])->crc;
    if (!belongs)
        return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: the drafter belongs to another target: pack both together", path);

    d->features = mxd_load_u32(s->data + 28);
    d->vocab = mxd_load_u32(s->data + 48);
    d->depths = mxd_load_u32(s->data + 52);
    int ok = d->features >= 1 && d->features <= MXD_MAX_FEATURES && d->depths >= 1 && d->depths <= MXD_MAX_DEPTHS &&
             all_zero(s->data + 132, 28);
    for (uint32_t i = 0; i < MXD_MAX_FEATURES && ok; i++) {
        uint32_t layer = d->feature_layer[i] = mxd_load_u32(s->data + 32 + 4 * i);
        ok = i < d->features ? layer >= 1 && layer <= c->layers && (i == 0 || layer > d->feature_layer[i - 1])
                             : layer == 0;
    }
    ok = ok && d->vocab % MXD_TILE_ROWS == 0 && d->vocab >= MXD_TILE_ROWS && d->vocab <= 65536 &&
         d->vocab <= c->vocab &&
         read_calibration(s->data + 68, d->depths, d->inverse_temperature) &&
         read_calibration(s->data + 100, d->depths, d->odds);
    if (!ok) return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: impossible numbers in draft.config", path);
    return MXD_OK;
}

static mxd_status read_draft_tensors(const reader *r, const section *in) {
    mxd_draft_model *d = &r->model->drafter;
    uint32_t hidden = r->model->config.hidden, vocab = r->model->config.vocab;
    const uint8_t *ids = NULL;
    mxd_status status;
    char name[80];
    for (uint32_t i = 0; i < r->tensor_count; i++)
        if (&r->sections[r->tensors[i].section] != in)
            return mxd_fail(r->err, MXD_BAD_TENSOR, "%s: tensor '%s' of the drafter is not in draft.weights",
                            r->model->path, r->tensors[i].name);
    for (uint32_t i = 0; i < d->features; i++) {
        snprintf(name, sizeof name, "feature_norm.%u.weight", i);
        if ((status = need_f32(r, in, name, 1, hidden, &d->feature_norm[i]))) return status;
    }
    status = need_matrix(r, in, "feature_proj.weight", hidden, d->features * hidden, 0, &d->feature_proj);
    if (!status) status = need_f32(r, in, "embed_norm.weight", 1, hidden, &d->embed_norm);
    if (!status) status = need_f32(r, in, "state_norm.weight", 1, hidden, &d->state_norm);
    if (!status) status = need_matrix(r, in, "input_proj.weight", hidden, 2 * hidden, 0, &d->input_proj);
    if (!status) status = read_layer(r, in, 0, 0, &d->layer);
    if (!status) status = need_f32(r, in, "model.norm.weight", 1, hidden, &d->final_norm);
    if (!status) status = need_tensor(r, in, "draft_ids", DTYPE_U32, 1, d->vocab, &ids);
    if (status) return status;
    d->ids = (const uint32_t *)(const void *)ids; /* 64-byte aligned by the format */
    for (uint32_t i = 0; i < d->vocab; i++)
        if (d->ids[i] >= vocab || (i > 0 && d->ids[i] <= d->ids[i - 1]))
            return mxd_fail(r->err, MXD_BAD_DRAFT, "%s: draft_ids do not ascend below the vocabulary of %u",
                            r->model->path, vocab);
    d->bytes = in->len;
    return MXD_OK;
}

static mxd_status read_drafter(reader *r) {
    const section *config, *tensors, *weights;
    if (!find_section(r, "draft.config") && !find_section(r, "draft.tensors") && !find_section(r, "draft.weights"))
        return MXD_OK;
    mxd_status status = need_section(r, "draft.config", &config);
    if (!status) status = need_section(r, "draft.tensors", &tensors);
    if (!status) status = need_section(r, "draft.weights", &weights);
    if (!status) status = read_draft_config(r, config);
    if (!status) status = read_tensor_directory(r, "draft.tensors", DTYPE_U32);
    if (!status) status = read_draft_tensors(r, weights);
    return status;
}

/* Everything behind the target's tensors. */
static mxd_status read_other_sections(reader *r) {
    mxd_model *m = r->model;
    const section *s;
    mxd_status status;
    if ((status = need_section(r, "provenance", &s))) return status;
    if (memchr(s->data, 0, s->len))
        return mxd_fail(r->err, MXD_BAD_SECTION, "%s: provenance holds a NUL byte", m->path);
    m->provenance = malloc(s->len + 1);
    if (!m->provenance) return mxd_fail(r->err, MXD_ERR_MEMORY, "out of memory reading provenance");
    memcpy(m->provenance, s->data, s->len);
    m->provenance[s->len] = 0;

    if ((status = need_section(r, "tokenizer", &s))) return status;
    if ((status = mxd_tokenizer_init(&m->tokenizer, s->data, s->len, m->config.vocab, r->err))) return status;
    if ((s = find_section(r, "chat"))) {
        if ((status = mxd_chat_init(&m->chat, s->data, s->len, m->config.vocab, r->err))) return status;
        m->has_chat = 1;
    }
    if ((s = find_section(r, "golden")) && (status = read_golden(r, s))) return status;
    if ((status = read_drafter(r))) return status;
    if ((s = find_section(r, "draft.ngrams"))) {
        if ((status = mxd_ngram_table_init(&m->ngrams, s->data, s->len, m->config.vocab, r->err))) return status;
        m->has_ngrams = 1;
    }
    mxd_schedule_default(&m->schedule, m->config.layers);
    if ((s = find_section(r, "schedule")))
        return mxd_schedule_init(&m->schedule, s->data, s->len, m->config.layers, r->err);
    return MXD_OK;
}

static mxd_status map_file(mxd_model *m, mxd_error *err) {
    int fd = open(m->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == ENOENT) return mxd_fail(err, MXD_BAD_MISSING, "%s: no such file", m->path);
        return mxd_fail(err, MXD_ERR_IO, "%s: cannot open: %s", m->path, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        return mxd_fail(err, MXD_ERR_IO, "%s: not a regular file", m->path);
    }
    if (st.st_size == 0) {
        close(fd);
        return mxd_fail(err, MXD_BAD_MAGIC, "%s: empty file", m->path);
    }
    /* Large sequential read-ahead: an SD card is several times slower with page-sized faults. */
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
    void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return mxd_fail(err, MXD_ERR_MEMORY, "%s: cannot map %lld bytes: %s", m->path, (long long)st.st_size,
                        strerror(errno));
    m->map = map;
    m->map_len = (size_t)st.st_size;
    return MXD_OK;
}

mxd_status mxd_model_open(const char *path, mxd_model **out, mxd_error *err) {
    *out = NULL;
    if (!path) return mxd_fail(err, MXD_ERR_ARGUMENT, "no bundle path given");
    mxd_model *m = calloc(1, sizeof *m);
    if (!m || !(m->path = strdup(path))) {
        free(m);
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory opening %s", path);
    }
    reader r = {.model = m, .err = err};
    mxd_status status = map_file(m, err);
    if (!status) status = read_sections(&r);
    if (!status) status = read_config(&r);
    if (!status) status = read_tensors(&r);
    if (!status) status = read_other_sections(&r);
    free(r.tensors);
    if (status) {
        mxd_model_close(&m);
        return status;
    }
    *out = m;
    return MXD_OK;
}

void mxd_model_close(mxd_model **model) {
    mxd_model *m = *model;
    if (!m) return;
    if (m->map) munmap((void *)(uintptr_t)m->map, m->map_len);
    free(m->layers);
    free(m->provenance);
    free(m->path);
    free(m);
    *model = NULL;
}

void mxd_model_get_info(const mxd_model *m, mxd_model_info *out) {
    const mxd_config *c = &m->config;
    *out = (mxd_model_info){.hidden = c->hidden, .layers = c->layers, .heads = c->heads, .kv_heads = c->kv_heads,
                            .head_dim = c->head_dim, .ffn = c->ffn, .vocab = c->vocab,
                            .max_positions = c->max_positions, .has_residual = m->has_residual,
                            .has_drafter = m->drafter.features > 0, .has_ngrams = m->has_ngrams,
                            .bos = mxd_tokenizer_bos(&m->tokenizer), .file_bytes = m->map_len,
                            .provenance = m->provenance, .path = m->path};
}
