/* verify, bench and info. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Writes an allocated text to stdout and frees it. */
static int emit_text(char *text) {
    int code = emit(text, strlen(text));
    free(text);
    return code;
}

static int verify(const settings *s, session *run) {
    int code;
    if ((code = open_model(s->bundle, run)) || (code = open_engine(s, (uint32_t)s->chunk, run))) return code;
    mxd_error error;
    char digest[65];
    mxd_status status = mxd_verify(run->engine, digest, &error);
    if (status == MXD_OK || status == MXD_ERR_MISMATCH)
        if ((code = emit_text(format_text("%s\n", digest)))) return code;
    return status == MXD_OK ? EXIT_DONE : fail_status(&error);
}

int run_verify(const settings *s) {
    session run = {0};
    int code = verify(s, &run);
    session_close(&run);
    return code;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct spread {
    double median, min, max;
} spread;

static spread spread_of(double *values, size_t n) {
    qsort(values, n, sizeof *values, compare_doubles);
    return (spread){(values[(n - 1) / 2] + values[n / 2]) / 2, values[0], values[n - 1]};
}

/* One run from an empty sequence; *json gets its statistics. */
static int bench_once(session *run, const uint32_t *prompt, size_t prompt_tokens, char **json) {
    mxd_error error;
    if (mxd_seq_truncate(run->seq, 0, &error) || mxd_seq_prompt(run->seq, prompt, prompt_tokens, &error))
        return fail_status(&error);
    while (mxd_seq_stop(run->seq) == MXD_STOP_NONE)
        if (mxd_step(run->engine, &run->seq, 1, &error)) return fail_status(&error);
    *json = stats_json(run);
    return EXIT_DONE;
}

static int bench(const settings *s, session *run) {
    int code;
    if ((code = open_model(s->bundle, run)) || (code = open_engine(s, 0, run)) || (code = open_seq(s, run)))
        return code;
    mxd_model_info info;
    mxd_model_get_info(run->model, &info);
    size_t prompt_tokens = (size_t)s->prompt_tokens, repeat = (size_t)s->repeat;
    uint32_t *prompt = allocate(prompt_tokens * sizeof *prompt);
    for (size_t i = 0; i < prompt_tokens; i++) prompt[i] = (uint32_t)(i * 7919 % info.vocab);

    double *prefill = allocate(repeat * sizeof *prefill), *decode = allocate(repeat * sizeof *decode);
    double generated = 0, peak_rss = 0;
    for (size_t i = 0; i <= repeat && code == EXIT_DONE; i++) {
        char *json = NULL;
        if ((code = bench_once(run, prompt, prompt_tokens, &json))) break;
        generated = json_number(json, "generated_tokens");
        peak_rss = json_number(json, "peak_rss_bytes");
        if (i > 0) { /* the first run only warms up */
            prefill[i - 1] = json_number(json, "prefill_tok_per_s");
            decode[i - 1] = json_number(json, "decode_tok_per_s");
        }
        free(json);
    }
    if (code == EXIT_DONE) {
        spread p = spread_of(prefill, repeat), d = spread_of(decode, repeat);
        const mxd_plan *plan = mxd_engine_plan(run->engine);
        code = emit_text(
            s->json
                ? format_text("{\"prompt_tokens\": %zu, \"generated_tokens\": %.0f, \"repeat\": %zu, \"threads\": %u, "
                              "\"precision\": \"%s\", "
                              "\"prefill_tok_per_s\": {\"median\": %.3f, \"min\": %.3f, \"max\": %.3f}, "
                              "\"decode_tok_per_s\": {\"median\": %.3f, \"min\": %.3f, \"max\": %.3f}, "
                              "\"peak_rss_bytes\": %.0f}\n",
                              prompt_tokens, generated, repeat, (unsigned)plan->threads,
                              plan->precision == MXD_PRECISION_FULL ? "full" : "base", p.median, p.min, p.max,
                              d.median, d.min, d.max, peak_rss)
                : format_text("tok/s              median       min       max\n"
                              "prefill %-7zu%10.1f%10.1f%10.1f\n"
                              "decode %-8.0f%10.1f%10.1f%10.1f\n",
                              prompt_tokens, p.median, p.min, p.max, generated, d.median, d.min, d.max));
    }
    free(decode);
    free(prefill);
    free(prompt);
    return code;
}

int run_bench(const settings *s) {
    settings measured = *s; /* bench has no sampling options: greedy */
    measured.ignore_eos = true;
    measured.top_p = 1;
    measured.repeat_penalty = 1;
    session run = {0};
    int code = bench(&measured, &run);
    session_close(&run);
    return code;
}

static int info_model(session *run) {
    mxd_model_info i;
    mxd_model_get_info(run->model, &i);
    mxd_options options;
    mxd_options_default(&options);
    mxd_plan plan;
    mxd_error error;
    if (mxd_plan_memory(run->model, &options, &plan, &error)) return fail_status(&error);
    char *bos = i.bos == UINT32_MAX ? format_text("none") : format_text("%u", (unsigned)i.bos);
    char *line = plan_line(&plan);
    char *text = format_text("bundle %s\nfile_bytes %llu\nhidden %u\nlayers %u\nheads %u\nkv_heads %u\nhead_dim %u\n"
                             "ffn %u\nvocab %u\nmax_positions %u\nprecisions %s\nbos %s\nprovenance %s\n%s\n",
                             i.path, (unsigned long long)i.file_bytes, (unsigned)i.hidden, (unsigned)i.layers,
                             (unsigned)i.heads, (unsigned)i.kv_heads, (unsigned)i.head_dim, (unsigned)i.ffn,
                             (unsigned)i.vocab, (unsigned)i.max_positions, i.has_residual ? "base full" : "base", bos,
                             i.provenance, line);
    free(line);
    free(bos);
    return emit_text(text);
}

int run_info(const settings *s) {
    int code;
    session run = {0};
    /* The bundle first: a refusal leaves stdout empty. */
    if (s->bundle != NULL && (code = open_model(s->bundle, &run))) return code;
    code = emit_text(format_text("version %s\nthreads %u\n", mxd_version(), (unsigned)mxd_default_threads()));
    if (code == EXIT_DONE && s->cpu) {
        size_t size = mxd_cpu_describe(NULL, 0) + 1;
        char *kernels = allocate(size);
        mxd_cpu_describe(kernels, size);
        code = emit_text(kernels);
    }
    if (code == EXIT_DONE && s->bundle != NULL) code = info_model(&run);
    session_close(&run);
    return code;
}
