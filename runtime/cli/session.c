/* SPDX-License-Identifier: Apache-2.0 */
/* Model, engine and sequence of a command, and its memory plan. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Return the value of an environment variable, NULL if it is unset or empty. */
static const char *set_variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Return $MXDRAFT_CACHE, else mxdraft under $XDG_CACHE_HOME or ~/.cache, allocated; NULL: none of the variables is set.
 * Below home and $XDG_CACHE_HOME only where those are absolute (XDG Base Directory Specification). */
static char *cache_path(void) {
    const char *own = set_variable("MXDRAFT_CACHE"), *shared = set_variable("XDG_CACHE_HOME");
    const char *home = set_variable("HOME");
    if (own) return format_text("%s", own);
    if (shared && shared[0] == '/') return format_text("%s/mxdraft", shared);
    return home && home[0] == '/' ? format_text("%s/.cache/mxdraft", home) : NULL;
}

/* Return whether this can be the name of a bundle in the cache: small letters, digits, '.', '_' and '-', the first one a
 * letter or digit, at most 64. */
static bool is_name(const char *text) {
    size_t length = strlen(text);
    return length >= 1 && length <= 64 && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789._-") == length &&
           !strchr("._-", text[0]);
}

/* Return the path of the bundle that -m names, allocated: a file, else what `mxdraft pull` put into the cache under that
 * name, else the name itself. */
static char *find_bundle(const char *name) {
    char *cache = is_name(name) && access(name, F_OK) ? cache_path() : NULL;
    char *kept = cache ? format_text("%s/bundles/%s.mxb", cache, name) : NULL;
    free(cache);
    if (kept && !access(kept, F_OK)) return kept;
    free(kept);
    return format_text("%s", name);
}

int open_model(const char *name, session *out) {
    mxd_error error;
    char *path = find_bundle(name), *shown = printable(path);
    char *message = format_text(
        "mxdraft: error: %s: cannot be read any more: it was cut while in use, or its medium fails: "
        "copy it again, and replace a bundle only by renaming\n",
        shown);
    mxd_exit_on_bus_error(message, EXIT_IO);
    free(message);
    free(shown);
    mxd_status status = mxd_model_open(path, &out->model, &error);
    free(path);
    return status ? fail_status(&error) : EXIT_DONE;
}

/* Return the engine's options; max_rows 0: the library's default. */
static mxd_options engine_options(const settings *s, uint32_t max_rows) {
    mxd_options options;
    mxd_options_default(&options);
    options.ctx = (uint32_t)s->ctx;
    options.threads = (uint32_t)s->threads;
    options.precision = s->precision;
    options.core_fraction = (float)s->core_fraction;
    options.catch_up = (uint32_t)s->catch_up;
    options.draft = s->draft;
    options.draft_max = (uint32_t)s->draft_max;
    options.kv = s->kv;
    options.kv_budget = (float)s->kv_budget;
    if (max_rows > 0) options.max_rows = max_rows;
    if (s->sequences > 0) options.max_seqs = (uint32_t)s->sequences;
    return options;
}

int plan_engine(const settings *s, uint32_t max_rows, const session *run, mxd_plan *out) {
    mxd_error error;
    mxd_options options = engine_options(s, max_rows);
    return mxd_plan_memory(run->model, &options, out, &error) ? fail_status(&error) : EXIT_DONE;
}

int open_engine(const settings *s, uint32_t max_rows, session *out) {
    mxd_error error;
    mxd_plan plan;
    mxd_options options = engine_options(s, max_rows);
    uint32_t offered = mxd_default_threads();
    if (options.threads > offered)
        note("%u threads asked for, this machine offers %u", (unsigned)options.threads, (unsigned)offered);
    int code = plan_engine(s, max_rows, out, &plan);
    if (code) return code;
    text_buffer line = {0};
    append_plan(&line, &plan);
    tell(line.data, line.length);
    free(line.data);
    return mxd_engine_open(out->model, &options, &out->engine, &error) ? fail_status(&error) : EXIT_DONE;
}

/* Make a directory and those above it that are not there. Where this fails, writing into it fails, too. */
static void make_directories(char *path) {
    for (char *slash = strchr(path + 1, '/'); path[0] && slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0777);
        *slash = '/';
    }
    mkdir(path, 0777);
}

int know_costs(const session *run) {
    mxd_error error;
    mxd_status status = MXD_OK;
    char *cache = cache_path();
    if (cache) make_directories(cache);
    if (!mxd_engine_load_costs(run->engine, cache)) {
        note("first run of this kind: measuring what steps cost");
        status = mxd_engine_measure_costs(run->engine, cache, &error);
    }
    free(cache);
    return status ? fail_status(&error) : EXIT_DONE;
}

/* Let the sequence write documents of the JSON schema in a file. */
static int set_schema(const char *path, session *out) {
    mxd_error error;
    text_buffer schema = {0};
    int code = read_file(path, &schema);
    if (!code && (mxd_grammar_compile(out->model, schema.data, schema.length, &out->grammar, &error) ||
                  mxd_seq_set_grammar(out->seq, out->grammar, 0, &error)))
        code = fail_status(&error);
    free(schema.data);
    return code;
}

int open_seq(const settings *s, session *out) {
    mxd_error error;
    mxd_sampling sampling;
    mxd_sampling_default(&sampling);
    sampling.temperature = (float)s->temp;
    sampling.top_k = (uint32_t)s->top_k;
    sampling.top_p = (float)s->top_p;
    sampling.min_p = (float)s->min_p;
    sampling.repeat_penalty = (float)s->repeat_penalty;
    sampling.seed = out->seed = s->seed;
    if (s->temp > 0 && !s->seeded) {
        sampling.seed = out->seed = random_bits() & UINT32_MAX; /* short enough to type */
        note("seed %llu", (unsigned long long)out->seed);
    }
    sampling.max_tokens = (uint32_t)s->limit;
    sampling.ignore_eos = s->ignore_eos;
    sampling.stop = s->stops;
    sampling.stop_count = (uint32_t)s->stop_count;
    if (mxd_seq_open(out->engine, &sampling, &out->seq, &error)) return fail_status(&error);
    return s->schema ? set_schema(s->schema, out) : EXIT_DONE;
}

void session_close(session *s) {
    mxd_seq_close(&s->seq);
    mxd_grammar_free(&s->grammar);
    mxd_engine_close(&s->engine);
    mxd_model_close(&s->model);
}

void append_plan(text_buffer *t, const mxd_plan *p) {
    const double mib = 1 << 20;
    append_text(t,
                "plan: weights %.1f + KV cache %.1f + activations %.1f + sequences %.1f = %.1f MiB of %.1f MiB "
                "available; ctx %u, threads %u, precision %s, kv %s\n",
                (double)p->weights / mib, (double)p->kv_cache / mib, (double)p->activations / mib,
                (double)p->sequences / mib, (double)p->total / mib, (double)p->available / mib, (unsigned)p->ctx,
                (unsigned)p->threads, mxd_precision_name(p->precision), mxd_kv_name(p->kv));
}
