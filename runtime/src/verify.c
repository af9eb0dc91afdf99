/* The golden self-test: replay the bundle's vectors and digest every logit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "hash.h"
#include "sequence.h"

/* Digest one prompt: logits of every prompt position, then of every greedily chosen token. */
static mxd_status digest_prompt(mxd_seq *s, const uint32_t *ids, uint32_t count, uint32_t greedy, float *logits,
                                mxd_sha256 *sha, mxd_error *err) {
    const mxd_engine *g = s->engine;
    uint32_t vocab = g->model->config.vocab, chunk = (uint32_t)mxd_logit_chunk(g);
    uint32_t next = 0;
    mxd_status status;
    for (uint32_t i = 0; i < count + greedy;) {
        uint32_t n = i < count ? (count - i < chunk ? count - i : chunk) : 1;
        if ((status = mxd_seq_logits(s, i < count ? ids + i : &next, n, logits, err))) return status;
        mxd_sha256_update(sha, logits, (size_t)n * vocab * sizeof *logits);
        float *last = logits + (size_t)(n - 1) * vocab;
        next = mxd_sample(&g->kernels, &s->sampling, last, vocab, mxd_control_tokens(g->model), s->tokens,
                          s->token_count, &g->scratch);
        i += n;
    }
    return MXD_OK;
}

mxd_status mxd_verify(mxd_engine *g, char hex[65], mxd_error *err) {
    const mxd_model *m = g->model;
    hex[0] = 0;
    if (!m->has_golden) return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no golden vectors", m->path);
    size_t chunk = mxd_logit_chunk(g);
    float *logits = malloc(chunk * m->config.vocab * sizeof *logits);
    uint32_t *ids = malloc(MXD_MAX_GOLDEN_TOKENS * sizeof *ids);
    mxd_status status = MXD_OK;
    if (!logits || !ids) status = mxd_fail(err, MXD_ERR_MEMORY, "out of memory for the self-test");

    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    mxd_sha256 sha;
    mxd_sha256_init(&sha);
    const uint8_t *entry = m->golden.entries;
    for (uint32_t p = 0; !status && p < m->golden.prompts; p++) {
        uint32_t count = mxd_load_u32(entry);
        for (uint32_t i = 0; i < count; i++) ids[i] = mxd_load_u32(entry + 4 + 4 * i);
        entry += 4 + 4 * (size_t)count;
        mxd_seq *s;
        if ((status = mxd_seq_open_unmixed(g, &greedy, &s, err))) break; /* golden are the planes, throughout */
        status = digest_prompt(s, ids, count, m->golden.greedy, logits, &sha, err);
        mxd_seq_close(&s);
    }
    free(logits);
    free(ids);
    if (status) return status;

    uint8_t digest[32];
    mxd_sha256_final(&sha, digest);
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    if (memcmp(digest, m->golden.digest[g->precision], 32))
        return mxd_fail(err, MXD_ERR_MISMATCH, "digest %s differs from the bundle's golden one", hex);
    return MXD_OK;
}
