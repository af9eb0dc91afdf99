/* SPDX-License-Identifier: Apache-2.0 */
/* The model object of the public header: opening and closing a bundle, what it is, and text through its tokenizer and
 * chat template. */
#include "model.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "arena.h"
#include "bundle.h"

static mxd_status map_file(mxd_model *m, mxd_error *err) {
    /* Without waiting: opening a FIFO would, for a writer. */
    int fd = open(m->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
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

/* Let sanitizers see a read outside of the sections. */
static void forbid_padding(const mxd_bundle *b) {
    const uint8_t *from = b->model->map; /* nobody reads header and table again */
    for (uint32_t i = 0; i < b->section_count; i++) {
        MXD_FORBID(from, (size_t)(b->sections[i].data - from));
        from = b->sections[i].data + b->sections[i].len;
    }
}

mxd_status mxd_model_open(const char *path, mxd_model **out, mxd_error *err) {
    *out = NULL;
    if (!path) return mxd_fail(err, MXD_ERR_ARGUMENT, "no bundle path given");
    mxd_model *m = calloc(1, sizeof *m);
    if (!m || !(m->path = strdup(path))) {
        free(m);
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory opening %s", path);
    }
    mxd_bundle bundle = {.model = m, .err = err};
    mxd_status status = map_file(m, err);
    if (!status) status = mxd_bundle_read(&bundle);
    if (!status) forbid_padding(&bundle);
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
    if (m->map) mxd_arena_unmap((char *)(uintptr_t)m->map, m->map_len);
    free(m->layers);
    free(m->provenance);
    free(m->path);
    free(m);
    *model = NULL;
}

void mxd_model_get_info(const mxd_model *m, mxd_model_info *out) {
    const mxd_config *c = &m->config;
    *out = (mxd_model_info){.hidden = c->hidden,
                            .layers = c->layers,
                            .heads = c->heads,
                            .kv_heads = c->kv_heads,
                            .head_dim = c->head_dim,
                            .ffn = c->ffn,
                            .vocab = c->vocab,
                            .max_positions = c->max_positions,
                            .has_residual = m->has_residual,
                            .has_drafter = m->drafter.features > 0,
                            .has_ngrams = m->has_ngrams,
                            .bos = m->tokenizer.bos,
                            .file_bytes = m->map_len,
                            .provenance = m->provenance,
                            .path = m->path};
}

/* ---- text ---- */

mxd_status mxd_encode(const mxd_model *m, const char *text, size_t len, uint32_t *ids, size_t cap, size_t *n,
                      mxd_error *err) {
    return mxd_tokenizer_encode(&m->tokenizer, text, len, ids, cap, n, err);
}

const char *mxd_token_bytes(const mxd_model *m, uint32_t id, size_t *len) {
    return mxd_tokenizer_bytes(&m->tokenizer, id, len);
}

int mxd_token_is_special(const mxd_model *m, uint32_t id) {
    return id < m->config.vocab && mxd_tokenizer_is_special(&m->tokenizer, id);
}

mxd_status mxd_chat_encode(const mxd_model *m, const mxd_message *messages, size_t count, int add_generation,
                           uint32_t *ids, size_t cap, size_t *n, mxd_error *err) {
    if (!m->has_chat) return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no chat template: use the raw prompt", m->path);
    return mxd_chat_encode_messages(&m->chat, &m->tokenizer, messages, count, add_generation, ids, cap, n, err);
}
