/* SPDX-License-Identifier: Apache-2.0 */
/* The golden self-test: replay the bundle's vectors and digest every logit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "sequence.h"

/* Digest one prompt: logits of every prompt position, then of every greedily chosen token. */
static mxd_status digest_prompt(mxd_seq *s, const uint32_t *ids, uint32_t count, uint32_t greedy, float *logits,
                                mxd_sha256 *sha, mxd_error *err) {
    const mxd_engine *g = s->engine;
    uint32_t vocab = g->model->config.vocab, next = 0;
    for (uint32_t i = 0, n; i < count + greedy; i += n) {
        n = i >= count ? 1 : count - i < g->logit_rows ? count - i : g->logit_rows;
        mxd_status status = mxd_seq_logits(s, i < count ? ids + i : &next, n, logits, err);
        if (status) return status;
        mxd_sha256_update(sha, logits, (size_t)n * vocab * sizeof *logits);
        float *last = logits + (size_t)(n - 1) * vocab;
        next = mxd_sample(&g->kernels, &s->sampling, last, vocab, NULL, mxd_control_tokens(g->model), s->tokens,
                          s->token_count, s->prompt_end, &g->scratch);
    }
    return MXD_OK;
}

mxd_status mxd_verify(mxd_engine *g, char hex[65], mxd_error *err) {
    const mxd_model *m = g->model;
    hex[0] = 0;
    if (!m->has_golden) return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no golden vectors", m->path);
    float *logits = malloc((size_t)g->logit_rows * m->config.vocab * sizeof *logits);
    if (!logits) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for the self-test");
    mxd_sampling greedy;
    mxd_sampling_default(&greedy);
    mxd_sha256 sha;
    mxd_sha256_init(&sha);
    mxd_status status = MXD_OK;
    const uint32_t *entry = m->golden.entries;
    for (uint32_t p = 0; !status && p < m->golden.prompts; p++, entry += 1 + entry[0]) {
        mxd_seq *s;
        if ((status = mxd_seq_open_mixing(g, false, &greedy, &s, err)))
            break; /* the vectors are those of whole planes */
        status = digest_prompt(s, entry + 1, entry[0], m->golden.greedy, logits, &sha, err);
        mxd_seq_close(&s);
    }
    free(logits);
    if (status) return status;

    uint8_t digest[32];
    mxd_sha256_final(&sha, digest);
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    if (memcmp(digest, m->golden.digest[g->precision], 32))
        return mxd_fail(err, MXD_ERR_MISMATCH, "digest %s differs from the bundle's golden one", hex);
    return MXD_OK;
}
