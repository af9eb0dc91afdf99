/* SPDX-License-Identifier: Apache-2.0 */
/* Every use of the public API with the n-th call of every libc function failing, for all n: a documented status, and
 * nothing leaked (LeakSanitizer) nor left open or half-written. Prints a table: function, points, statuses seen.
 *
 *   nth_failure BUNDLE EMPTY_DIRECTORY */
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failing.h"
#include "mxdraft.h"

static size_t entries(const char *directory) {
    size_t n = 0;
    DIR *d = opendir(directory);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

/* Count what is left of files that were being written. What costs are kept for depends on what /proc says, so a failure may
 * add a file of costs. */
static size_t leftovers(const char *directory) {
    size_t n = 0;
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, ".part") != NULL;
    if (d) closedir(d);
    return n;
}

/* Open, measure, prompt, step, copy, truncate, score, verify, measure speed, close. Returns the first status that is not
 * MXD_OK. A failure of a cache is none. */
static mxd_status use_everything(const char *bundle, const char *cache) {
    mxd_error err = {0};
    mxd_model *m = NULL;
    mxd_engine *g = NULL;
    mxd_seq *s = NULL, *copy = NULL;
    mxd_bench *b = NULL;
    mxd_options o;
    mxd_sampling p;
    char hex[65];
    uint32_t ids[64];
    size_t n = 0;
    mxd_options_default(&o);
    o.ctx = 100;
    o.threads = 2;
    o.max_seqs = 2;
    o.max_rows = 8;
    mxd_sampling_default(&p);
    p.max_tokens = 4;
    mxd_status status = mxd_model_open(bundle, &m, &err);
    if (!status) {
        static float logits[2 * 500];
        const mxd_message message = {"user", "What time is it?"};
        status = mxd_chat_encode(m, &message, 1, 1, ids, 64, &n, &err);
        if (!status) status = mxd_engine_open(m, &o, &g, &err);
        if (!status && !mxd_engine_load_costs(g, cache)) status = mxd_engine_measure_costs(g, cache, &err);
        if (!status) status = mxd_seq_open(g, &p, &s, &err);
        if (!status) status = mxd_seq_prompt(s, ids, n, &err);
        while (!status && !mxd_seq_stop(s)) status = mxd_step(g, &s, 1, &err);
        if (!status) status = mxd_seq_truncate(s, n, &err);
        if (!status) status = mxd_seq_logits(s, ids, 2, logits, &err);
        if (!status) status = mxd_seq_copy(s, &p, &copy, &err);
        mxd_seq_close(&copy);
        if (!status) status = mxd_verify(g, hex, &err);
        if (status == MXD_ERR_MISMATCH) status = MXD_OK; /* the bundle may have no digests of its own */
        const mxd_bench_options bench = {.prompt_tokens = 4, .tokens = 3, .repeat = 1};
        if (!status) status = mxd_bench_run(g, &bench, &b, &err);
        mxd_bench_close(&b);
    }
    mxd_seq_close(&s);
    mxd_engine_close(&g);
    mxd_model_close(&m);
    if (status && (err.status != (int32_t)status || !err.message[0])) {
        fprintf(stderr, "status %d with error %d '%s'\n", status, err.status, err.message);
        exit(1);
    }
    return status;
}

static bool documented(mxd_status status) {
    return status == MXD_OK || status == MXD_ERR_MEMORY || status == MXD_ERR_IO;
}

int main(int argc, char **argv) {
    static const int errors[] = {ENOMEM, EIO, ENOSPC, EINTR, EAGAIN, EMFILE};
    if (argc != 3) return 2;
    failing_choose("", 0, 0);
    if (use_everything(argv[1], argv[2])) return 3;
    for (int f = 0; failing_name(f); f++) {
        const char *name = failing_name(f);
        unsigned long points = 0, ok = 0, reported = 0;
        for (unsigned long n = 1, reached = n; reached >= n; n++) {
            failing_choose(name, n, errors[n % (sizeof errors / sizeof *errors)]);
            size_t files = entries("/proc/self/fd"), tasks = entries("/proc/self/task");
            mxd_status status = use_everything(argv[1], argv[2]);
            reached = failing_calls(name);
            if (!documented(status) || entries("/proc/self/fd") != files || entries("/proc/self/task") != tasks ||
                leftovers(argv[2])) {
                fprintf(stderr, "%s, call %lu: status %s, %zu files open, %zu threads, %zu files half-written\n", name,
                        n, mxd_status_name(status), entries("/proc/self/fd"), entries("/proc/self/task"),
                        leftovers(argv[2]));
                return 1;
            }
            points += reached >= n;
            ok += reached >= n && status == MXD_OK;
            reported += status != MXD_OK;
        }
        if (points) printf("%s: %lu points, %lu went on, %lu reported\n", name, points, ok, reported);
    }
    return 0;
}
