/* SPDX-License-Identifier: Apache-2.0 */
#include "monitor.h"

#include <string.h>

#include "internal.h"

void mxd_monitor_resolve(mxd_engine *g) {
    g->monitor.in_use = g->mixes || g->kv.mode == MXD_KV_TIERED;
}

void mxd_monitor_take(mxd_engine *g, mxd_arena *a) {
    if (g->monitor.in_use)
        g->monitor.paid = mxd_take(a, (size_t)g->max_rows * g->model->config.kv_heads * g->plan.ctx, sizeof(float));
}

mxd_monitor_state mxd_monitor_take_seq(const mxd_engine *g, mxd_arena *a) {
    mxd_monitor_state monitor = {NULL, NULL};
    if (g->kv.mode != MXD_KV_TIERED) return monitor;
    monitor.attended = mxd_take(a, g->plan.ctx, sizeof *monitor.attended);
    monitor.doubt = mxd_take(a, g->plan.ctx, sizeof *monitor.doubt);
    return monitor;
}

void mxd_monitor_copy(mxd_seq *to, const mxd_seq *from) {
    if (!from->monitor.attended) return;
    memcpy(to->monitor.attended, from->monitor.attended, from->n_past * sizeof(float));
    memcpy(to->monitor.doubt, from->monitor.doubt, from->token_count * sizeof(float));
}

void mxd_monitor_truncate(mxd_seq *s, size_t n) {
    if (s->monitor.doubt) memset(s->monitor.doubt + n, 0, (s->engine->plan.ctx - n) * sizeof(float));
}

void mxd_monitor_chosen(mxd_seq *s, size_t position, float doubt) {
    if (s->monitor.doubt) s->monitor.doubt[position] = doubt;
}

static float *slot_of(const mxd_engine *g, size_t m, uint32_t kv_head) {
    return g->monitor.paid + (m * g->model->config.kv_heads + kv_head) * g->plan.ctx;
}

static float sum16(const float *x, size_t n) {
    float lane[16] = {0};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t j = 0; j < 16; j++) lane[j] += x[i + j];
    for (; i < n; i++) lane[i % 16] += x[i];
    return mxd_reduce16_ref(lane);
}

void mxd_monitor_row(const mxd_engine *g, size_t m, uint32_t kv_head, float *weights, size_t n) {
    const mxd_config *c = &g->model->config;
    const mxd_kv_state *kv = &g->seqs[g->rows[m].slot].kv;
    for (size_t h = 0; h < c->heads / c->kv_heads; h++) {
        const float *w = weights + h * n;
        float scale = 1.0f / (sum16(w, n) * (float)c->heads);
        for (size_t j = 0; j < n; j++) weights[j] = (h ? weights[j] : 0) + w[j] * scale;
    }
    float *out = slot_of(g, m, kv_head);
    size_t recent = n - kv->core_count - kv->far_count;
    for (uint32_t i = 0; i < kv->core_count; i++) out[kv->core[i]] = *weights++;
    for (uint32_t i = 0; i < kv->far_count; i++) out[kv->far[i]] = *weights++;
    for (size_t i = 0; i < recent; i++) out[kv->aged + i] = weights[i];
}

void mxd_monitor_commit(mxd_seq *s, size_t m) {
    const mxd_engine *g = s->engine;
    size_t position = g->rows[m].position;
    float *attended = s->monitor.attended;
    if (!attended) return;
    if (position % MXD_KV_BLOCK == 0)
        for (size_t i = 0; i < position; i++) attended[i] *= MXD_ATTENDED_DECAY;
    attended[position] = 0;
    for (uint32_t h = 0; h < g->model->config.kv_heads; h++) {
        const float *paid = slot_of(g, m, h);
        for (size_t i = 0; i <= position; i++) attended[i] += paid[i];
    }
}

float mxd_attended(const mxd_engine *g, size_t m, size_t from, size_t to) {
    size_t end = (size_t)g->rows[m].position + 1;
    float sum = 0;
    if (to > end) to = end;
    for (uint32_t h = 0; from < to && h < g->model->config.kv_heads; h++)
        sum += sum16(slot_of(g, m, h) + from, to - from);
    return sum;
}
