/* SPDX-License-Identifier: Apache-2.0 */
/* verify, bench and info. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

/* Return whether an option's FILE (NULL: not given) is standard output. */
static bool is_stdout(const char *path) {
    return path && !strcmp(path, "-");
}

int run_verify(const settings *s, session *run) {
    int code;
    if ((code = open_model(s->bundle, run)) || (code = open_engine(s, (uint32_t)s->chunk, run))) return code;
    mxd_error error;
    char digest[65];
    mxd_status status = mxd_verify(run->engine, digest, &error);
    if (!status || status == MXD_ERR_MISMATCH) {
        text_buffer line = {0};
        append_text(&line, "%s\n", digest);
        if ((code = emit_buffer(&line))) return code;
    }
    return status ? fail_status(&error) : EXIT_DONE;
}

/* Write the results in a format to a file, or to stdout for "-". */
static int emit_bench(const mxd_bench *results, mxd_bench_format format, const char *path) {
    size_t size = mxd_bench_text(results, format, NULL, 0) + 1;
    char *text = allocate(size);
    mxd_bench_text(results, format, text, size);
    int code = is_stdout(path) ? emit(text, size - 1) : write_file(path, text, size - 1);
    free(text);
    return code;
}

/* Return the drafters that --draft names, as bits. */
static uint32_t drafts_of(const settings *s, const mxd_model *model) {
    mxd_model_info info;
    mxd_model_get_info(model, &info);
    if (s->draft == MXD_DRAFT_OFF) return 0;
    if (s->draft != DRAFT_ALL) return 1u << s->draft;
    return 1u << MXD_DRAFT_NGRAM | 1u << MXD_DRAFT_AUTO | (info.has_drafter ? 1u << MXD_DRAFT_MODEL : 0);
}

int run_bench(const settings *s, session *run) {
    int code;
    settings plain = *s;
    plain.draft = MXD_DRAFT_OFF;
    if (is_stdout(s->csv) && is_stdout(s->json))
        return fail(EXIT_USAGE, "--csv and --json cannot both go to standard output");
    if ((code = open_model(s->bundle, run)) || (code = open_engine(&plain, 0, run))) return code;
    const mxd_bench_options options = {.prompt_tokens = (uint32_t)s->prompt_tokens,
                                       .tokens = (uint32_t)s->limit,
                                       .repeat = (uint32_t)s->repeat,
                                       .drafts = drafts_of(s, run->model)};
    mxd_error error;
    mxd_bench *results;
    if (mxd_bench_run(run->engine, &options, &results, &error)) return fail_status(&error);
    if (!is_stdout(s->csv) && !is_stdout(s->json)) code = emit_bench(results, MXD_BENCH_TABLE, "-");
    if (!code && s->csv) code = emit_bench(results, MXD_BENCH_CSV, s->csv);
    if (!code && s->json) code = emit_bench(results, MXD_BENCH_JSON, s->json);
    mxd_bench_close(&results);
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
    char *path = printable(i.path), *provenance = printable(i.provenance);
    text_buffer t = {0};
    append_text(&t,
                "bundle %s\nfile_bytes %llu\nhidden %u\nlayers %u\nheads %u\nkv_heads %u\nhead_dim %u\n"
                "ffn %u\nvocab %u\nmax_positions %u\nprecisions %s\ndrafters %s%s\n",
                path, (unsigned long long)i.file_bytes, (unsigned)i.hidden, (unsigned)i.layers, (unsigned)i.heads,
                (unsigned)i.kv_heads, (unsigned)i.head_dim, (unsigned)i.ffn, (unsigned)i.vocab,
                (unsigned)i.max_positions, i.has_residual ? "base full" : "base",
                i.has_ngrams ? "lookup table" : "lookup", i.has_drafter ? " model" : "");
    if (i.bos == UINT32_MAX) append_text(&t, "bos none\n");
    else append_text(&t, "bos %u\n", (unsigned)i.bos);
    append_text(&t, "provenance %s\n", provenance);
    append_plan(&t, &plan);
    free(provenance);
    free(path);
    return emit_buffer(&t);
}

int run_info(const settings *s, session *run) {
    int code;
    /* The bundle first: a refusal leaves stdout empty. */
    if (s->bundle && (code = open_model(s->bundle, run))) return code;
    text_buffer t = {0};
    append_text(&t, "version %s\nthreads %u\n", mxd_version(), (unsigned)mxd_default_threads());
    if (s->cpu) {
        size_t size = mxd_cpu_describe(NULL, 0) + 1;
        char *kernels = allocate(size);
        mxd_cpu_describe(kernels, size);
        append_text(&t, "%s", kernels);
        free(kernels);
    }
    code = emit_buffer(&t);
    if (!code && s->bundle) code = info_model(run);
    return code;
}
