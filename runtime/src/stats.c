/* Statistics of a sequence, as a struct and as JSON. */
#include "cpu.h"
#include "engine.h"
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
    out->gain = p.measured ? out->decode_tok_per_s * p.measured_step[1] : 0;
    out->peak_rss_bytes = mxd_peak_rss();
}

/* ---- JSON ---- */

typedef struct json {
    mxd_text text;
    const char *separator; /* before the next value */
} json;

/* Begin a value; key NULL: within a list. */
static void put_key(json *j, const char *key) {
    mxd_put(&j->text, "%s", j->separator);
    if (key) mxd_put(&j->text, "\"%s\": ", key);
    j->separator = ", ";
}

static void put_whole(json *j, const char *key, uint64_t value) {
    put_key(j, key);
    mxd_put(&j->text, "%llu", (unsigned long long)value);
}

static void put_real(json *j, const char *key, int decimals, double value) {
    put_key(j, key);
    mxd_put(&j->text, "%.*f", decimals, value);
}

static void put_word(json *j, const char *key, const char *value) {
    put_key(j, key);
    mxd_put(&j->text, "\"%s\"", value);
}

static void begin(json *j, const char *key, const char *bracket) {
    put_key(j, key);
    mxd_put(&j->text, "%s", bracket);
    j->separator = "";
}

static void end(json *j, const char *bracket) {
    mxd_put(&j->text, "%s", bracket);
    j->separator = ", ";
}

size_t mxd_seq_stats_json(const mxd_seq *s, char *buf, size_t cap) {
    const mxd_engine *g = s->engine;
    const int by_caller = s->drafter && g->draft != MXD_DRAFT_OFF;
    mxd_stats t;
    mxd_kv_use kv;
    json j = {{buf, cap, 0}, ""};
    mxd_seq_get_stats(s, &t);
    mxd_seq_get_kv(s, &kv);
    begin(&j, NULL, "{");
    put_whole(&j, "prompt_tokens", t.prompt_tokens);
    put_whole(&j, "generated_tokens", t.generated_tokens);
    put_real(&j, "prefill_s", 6, t.prefill_s);
    put_real(&j, "decode_s", 6, t.decode_s);
    put_real(&j, "first_token_s", 6, t.first_token_s);
    put_real(&j, "prefill_tok_per_s", 3, t.prefill_tok_per_s);
    put_real(&j, "decode_tok_per_s", 3, t.decode_tok_per_s);
    put_word(&j, "draft", by_caller ? mxd_source_name(MXD_SOURCE_CALLER) : mxd_draft_name(g->draft));
    put_whole(&j, "drafted", t.drafted);
    put_whole(&j, "accepted", t.accepted);
    put_whole(&j, "steps", t.steps);
    put_real(&j, "tokens_per_step", 4, t.tokens_per_step);
    begin(&j, "acceptance_by_position", "[");
    for (int i = 0; i < 8 && t.drafted_at[i]; i++)
        put_real(&j, NULL, 4, ratio((double)t.accepted_at[i], (double)t.drafted_at[i]));
    end(&j, "]");
    put_real(&j, "draft_s", 6, t.draft_s);
    put_real(&j, "schedule_s", 6, t.schedule_s);
    put_real(&j, "verify_s", 6, t.verify_s);
    put_real(&j, "sample_s", 6, t.sample_s);
    put_real(&j, "expected_gain", 4, t.expected_gain);
    put_real(&j, "gain", 4, t.gain);
    begin(&j, "core_fraction", "{");
    put_real(&j, "compute", 4, ratio((double)t.drafted, (double)(t.drafted + t.steps)));
    put_real(&j, "precision", 4, ratio((double)t.core, (double)t.generated_tokens));
    put_real(&j, "memory", 4, ratio(kv.far ? kv.recent + kv.core : 0, (double)s->done));
    end(&j, "}");
    put_whole(&j, "due", t.due);
    put_word(&j, "kv", mxd_kv_name(kv.mode));
    put_real(&j, "kv_bits_per_value", 4, kv.bits_per_value);
    put_whole(&j, "bytes_read", t.bytes_read);
    put_whole(&j, "peak_rss_bytes", t.peak_rss_bytes);
    put_word(&j, "stop", mxd_stop_name(s->stop));
    put_whole(&j, "seed", s->sampling.seed);
    put_whole(&j, "threads", g->plan.threads);
    put_whole(&j, "ctx", g->plan.ctx);
    put_word(&j, "precision", mxd_precision_name(g->plan.precision));
    begin(&j, "kernels", "{");
    put_word(&j, "matmul_mxfp4", g->kernel_names.matmul_mxfp4);
    put_word(&j, "matmul_mxint8", g->kernel_names.matmul_mxint8);
    put_word(&j, "attention", g->kernel_names.attention);
    put_word(&j, "quantize", g->kernel_names.quantize);
    end(&j, "}");
    end(&j, "}");
    return j.text.len;
}
