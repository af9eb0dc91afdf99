/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics of a sequence, as a struct and as JSON. */
#include <inttypes.h>

#include "engine.h"
#include "machine.h"
#include "put.h"

static double ratio(double a, double b) {
    return b > 0 ? a / b : 0;
}

void mxd_seq_get_stats(const mxd_seq *s, mxd_stats *out) {
    const mxd_policy p = mxd_engine_policy(s->engine);
    *out = s->stats;
    /* The first token comes out of the prefill. */
    double decoded = out->generated_tokens ? (double)(out->generated_tokens - 1) : 0;
    out->prefill_tok_per_s = ratio((double)out->prompt_tokens, out->prefill_s);
    out->decode_tok_per_s = ratio(decoded, out->decode_s);
    out->tokens_per_step = ratio(decoded, (double)out->steps);
    out->expected_gain = ratio(s->expected_tokens, s->expected_s) * (p.measured ? p.measured_step[1] : 1);
    out->gain = p.measured ? out->decode_tok_per_s * p.measured_step[1] * p.pace : 0;
    out->peak_rss_bytes = mxd_peak_rss();
}

/* ---- JSON ---- */

typedef struct json {
    mxd_text text;
    const char *separator; /* before the next value */
} json;

/* Append a value; key NULL: of a list. */
static void __attribute__((format(printf, 3, 4))) put(json *j, const char *key, const char *format, ...) {
    va_list args;
    mxd_put(&j->text, "%s", j->separator);
    if (key) mxd_put(&j->text, "\"%s\": ", key);
    va_start(args, format);
    mxd_put_args(&j->text, format, args);
    va_end(args);
    j->separator = ", ";
}

/* Append a list or object of the values up to end(). */
static void begin(json *j, const char *key, const char *bracket) {
    put(j, key, "%s", bracket);
    j->separator = "";
}

static void end(json *j, const char *bracket) {
    mxd_put(&j->text, "%s", bracket);
    j->separator = ", ";
}

size_t mxd_seq_stats_json(const mxd_seq *s, char *buf, size_t cap) {
    const mxd_engine *g = s->engine;
    const int by_caller = s->caller_drafter && g->draft != MXD_DRAFT_OFF;
    mxd_stats t;
    mxd_kv_use kv;
    json j = {{buf, cap, 0}, ""};
    mxd_seq_get_stats(s, &t);
    mxd_seq_get_kv(s, &kv);
    begin(&j, NULL, "{");
    put(&j, "prompt_tokens", "%" PRIu64, t.prompt_tokens);
    put(&j, "generated_tokens", "%" PRIu64, t.generated_tokens);
    put(&j, "prefill_s", "%.6f", t.prefill_s);
    put(&j, "decode_s", "%.6f", t.decode_s);
    put(&j, "first_token_s", "%.6f", t.first_token_s);
    put(&j, "prefill_tok_per_s", "%.3f", t.prefill_tok_per_s);
    put(&j, "decode_tok_per_s", "%.3f", t.decode_tok_per_s);
    put(&j, "draft", "\"%s\"", by_caller ? mxd_source_name(MXD_SOURCE_CALLER) : mxd_draft_name(g->draft));
    put(&j, "drafted", "%" PRIu64, t.drafted);
    put(&j, "accepted", "%" PRIu64, t.accepted);
    put(&j, "steps", "%" PRIu64, t.steps);
    put(&j, "tokens_per_step", "%.4f", t.tokens_per_step);
    begin(&j, "acceptance_by_position", "[");
    for (int i = 0; i < 8 && t.drafted_at[i]; i++)
        put(&j, NULL, "%.4f", ratio((double)t.accepted_at[i], (double)t.drafted_at[i]));
    end(&j, "]");
    put(&j, "draft_s", "%.6f", t.draft_s);
    put(&j, "schedule_s", "%.6f", t.schedule_s);
    put(&j, "verify_s", "%.6f", t.verify_s);
    put(&j, "sample_s", "%.6f", t.sample_s);
    put(&j, "expected_gain", "%.4f", t.expected_gain);
    put(&j, "gain", "%.4f", t.gain);
    begin(&j, "core_fraction", "{");
    put(&j, "compute", "%.4f", ratio((double)t.drafted, (double)(t.drafted + t.steps)));
    put(&j, "precision", "%.4f", ratio((double)t.core, (double)t.generated_tokens));
    put(&j, "memory", "%.4f", ratio(kv.far ? kv.recent + kv.core : 0, (double)s->n_past));
    end(&j, "}");
    put(&j, "due", "%" PRIu64, t.due);
    put(&j, "kv", "\"%s\"", mxd_kv_name(kv.mode));
    put(&j, "kv_bits_per_value", "%.4f", kv.bits_per_value);
    put(&j, "bytes_read", "%" PRIu64, t.bytes_read);
    put(&j, "peak_rss_bytes", "%" PRIu64, t.peak_rss_bytes);
    put(&j, "stop", "\"%s\"", mxd_stop_name(s->stop));
    put(&j, "seed", "%" PRIu64, s->sampling.seed);
    put(&j, "threads", "%u", g->plan.threads);
    put(&j, "ctx", "%u", g->plan.ctx);
    put(&j, "precision", "\"%s\"", mxd_precision_name(g->plan.precision));
    begin(&j, "kernels", "{");
    put(&j, "matmul_mxfp4", "\"%s\"", g->kernel_names.matmul_mxfp4);
    put(&j, "matmul_mxint8", "\"%s\"", g->kernel_names.matmul_mxint8);
    put(&j, "attention", "\"%s\"", g->kernel_names.attention);
    put(&j, "quantize", "\"%s\"", g->kernel_names.quantize);
    end(&j, "}");
    end(&j, "}");
    return j.text.len;
}
