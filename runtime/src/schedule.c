/* SPDX-License-Identifier: Apache-2.0 */
#include "schedule.h"

#include <float.h>
#include <math.h>

#include "bytes.h"

const float MXD_FRACTION[MXD_THRESHOLDS] = {0.01f, 0.02f, 0.05f, 0.1f, 0.2f, 0.3f, 0.5f, 0.75f};

enum { WORDS = 26, MAX_RECENT = 4096 };

void mxd_schedule_default(mxd_schedule *out, uint32_t layers) {
    *out = (mxd_schedule){
        .compute = {.gamma = 1},
        .precision = {.alpha = 1},
        .memory = {.beta = 1},
        .core_fraction = 1,
        .catch_up = 16,
        .sinks = 4,
        .recent = 64,
        .core_tokens = 0.05f,
        .monitored_layer = layers / 2,
        .threshold = {0.95f, 0.92f, 0.85f, 0.72f, 0.5f, 0.35f, 0.12f, 0.02f}, /* of doubt, seen in chats */
    };
}

static mxd_weights load_weights(const uint8_t *p) {
    return (mxd_weights){mxd_load_f32(p), mxd_load_f32(p + 4), mxd_load_f32(p + 8), mxd_load_f32(p + 12)};
}

static bool is_finite(mxd_weights w) {
    return isfinite(w.alpha) && isfinite(w.beta) && isfinite(w.gamma) && isfinite(w.bias);
}

static bool is_share(float x) {
    return x >= 0 && x <= 1;
}

mxd_status mxd_schedule_init(mxd_schedule *out, const uint8_t *p, size_t len, uint32_t layers, mxd_error *err) {
    if (len != 4 * WORDS) return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: %zu bytes, not %d", len, 4 * WORDS);
    mxd_schedule s = {
        .compute = load_weights(p),
        .precision = load_weights(p + 16),
        .memory = load_weights(p + 32),
        .core_fraction = mxd_load_f32(p + 48),
        .catch_up = mxd_load_u32(p + 52),
        .sinks = mxd_load_u32(p + 56),
        .recent = mxd_load_u32(p + 60),
        .core_tokens = mxd_load_f32(p + 64),
        .monitored_layer = mxd_load_u32(p + 68),
    };
    for (int i = 0; i < MXD_THRESHOLDS; i++) s.threshold[i] = mxd_load_f32(p + 72 + 4 * i);
    if (!is_finite(s.compute) || !is_finite(s.precision) || !is_finite(s.memory))
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: a weight is not finite");
    if (!is_share(s.core_fraction) || !is_share(s.core_tokens))
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: a share is not in 0..1");
    if (s.catch_up < 1 || s.catch_up > MXD_MAX_CATCH_UP)
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: catch_up %u is not in 1..%d", s.catch_up, MXD_MAX_CATCH_UP);
    if (s.sinks > MXD_KV_BLOCK)
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: sinks %u is not in 0..%d", s.sinks, MXD_KV_BLOCK);
    if (s.recent < MXD_KV_BLOCK || s.recent > MAX_RECENT || s.recent % MXD_KV_BLOCK)
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: recent %u is not a multiple of %d up to %d", s.recent,
                        MXD_KV_BLOCK, MAX_RECENT);
    if (s.monitored_layer >= layers)
        return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: layer %u of %u", s.monitored_layer, layers);
    for (int i = 0; i < MXD_THRESHOLDS; i++)
        if (!isfinite(s.threshold[i]) || (i > 0 && s.threshold[i] > s.threshold[i - 1]))
            return mxd_fail(err, MXD_BAD_SCHEDULE, "schedule: threshold %d is not finite or not descending", i);
    *out = s;
    return MXD_OK;
}

float mxd_schedule_threshold(const mxd_schedule *s, float core_fraction) {
    if (core_fraction <= 0) return FLT_MAX;
    if (core_fraction >= 1) return -FLT_MAX;
    int i = 0;
    while (i < MXD_THRESHOLDS && MXD_FRACTION[i] < core_fraction) i++;
    if (i == 0) return s->threshold[0];
    if (i == MXD_THRESHOLDS) return s->threshold[MXD_THRESHOLDS - 1];
    float share = (core_fraction - MXD_FRACTION[i - 1]) / (MXD_FRACTION[i] - MXD_FRACTION[i - 1]);
    float step = s->threshold[i] - s->threshold[i - 1];
    return s->threshold[i - 1] + share * step;
}
