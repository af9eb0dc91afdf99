/* Model, engine and sequence of a command, and its memory plan. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int open_model(const char *path, session *out) {
    mxd_error error;
    return mxd_model_open(path, &out->model, &error) ? fail_status(&error) : EXIT_DONE;
}

int open_engine(const settings *s, uint32_t max_rows, session *out) {
    mxd_error error;
    mxd_plan plan;
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

    uint32_t offered = mxd_default_threads();
    if (options.threads > offered)
        fprintf(stderr, "mxdraft: note: %u threads asked for, this machine offers %u\n", (unsigned)options.threads,
                (unsigned)offered);
    if (mxd_plan_memory(out->model, &options, &plan, &error)) return fail_status(&error);
    char *line = plan_line(&plan);
    fprintf(stderr, "%s\n", line);
    free(line);
    return mxd_engine_open(out->model, &options, &out->engine, &error) ? fail_status(&error) : EXIT_DONE;
}

/* Return the value of an environment variable, NULL if it is unset or empty. */
static const char *set_variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Return $MXDRAFT_CACHE, else mxdraft under $XDG_CACHE_HOME or ~/.cache, allocated and made if it is not there; NULL:
 * none of the variables is set. */
static char *cache_directory(void) {
    const char *own = set_variable("MXDRAFT_CACHE"), *shared = set_variable("XDG_CACHE_HOME");
    const char *home = set_variable("HOME");
    if (own) {
        mkdir(own, 0777);
        return format_text("%s", own);
    }
    if (!shared && !home) return NULL;
    char *parent = shared ? format_text("%s", shared) : format_text("%s/.cache", home);
    char *path = format_text("%s/mxdraft", parent);
    mkdir(parent, 0777); /* where this fails, writing fails too: the costs are measured each time */
    mkdir(path, 0777);
    free(parent);
    return path;
}

int know_costs(const session *run) {
    mxd_error error;
    mxd_status status = MXD_OK;
    char *cache = cache_directory();
    if (!mxd_engine_load_costs(run->engine, cache)) {
        fprintf(stderr, "mxdraft: note: first run of this kind: measuring what steps cost\n");
        status = mxd_engine_measure_costs(run->engine, cache, &error);
    }
    free(cache);
    return status ? fail_status(&error) : EXIT_DONE;
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
    sampling.seed = s->seed;
    sampling.max_tokens = (uint32_t)s->limit;
    sampling.ignore_eos = s->ignore_eos;
    sampling.stop = s->stops;
    sampling.stop_count = (uint32_t)s->stop_count;
    return mxd_seq_open(out->engine, &sampling, &out->seq, &error) ? fail_status(&error) : EXIT_DONE;
}

void session_close(session *s) {
    mxd_seq_close(&s->seq);
    mxd_engine_close(&s->engine);
    mxd_model_close(&s->model);
}

char *plan_line(const mxd_plan *p) {
    const double mib = 1 << 20;
    return format_text("plan: weights %.1f + KV cache %.1f + activations %.1f + sequences %.1f = %.1f MiB of %.1f MiB "
                       "available; ctx %u, threads %u, precision %s, kv %s",
                       (double)p->weights / mib, (double)p->kv_cache / mib, (double)p->activations / mib,
                       (double)p->sequences / mib, (double)p->total / mib, (double)p->available / mib,
                       (unsigned)p->ctx, (unsigned)p->threads, mxd_precision_name(p->precision),
                       mxd_kv_name(p->kv));
}
