#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "costs.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "hash.h"

enum { REPEAT = 5, WIDE_REPEAT = 3, NARROW = 9, MEASURED = NARROW + MXD_WIDE_COSTS };
enum { NUMBERS = MXD_COST_ROWS + MXD_WIDE_COSTS + 3, PATH_BYTES = 4096 };

static const uint32_t WIDTHS[MEASURED] = {1, 2, 3, 4, 5, 6, 8, 12, MXD_COST_ROWS, MXD_WIDE_ROWS};

void mxd_engine_get_costs(const mxd_engine *g, mxd_costs *out) {
    *out = mxd_engine_policy(g).costs;
}

void mxd_engine_set_costs(mxd_engine *g, const mxd_costs *costs) {
    mxd_tuner_set_costs(&g->tuner, costs);
}

/* ---- measuring ---- */

/* Return the number of positions before the measured rows: a short context, if there is room. */
static uint32_t first_position(const mxd_engine *g) {
    return g->plan.ctx > 96 ? 64 : 0;
}

/* Return the most rows that are measured: as many as a step of decoding can have. */
static uint32_t widest(const mxd_engine *g) {
    uint32_t most = g->plan.ctx - 1 - first_position(g), decoding = g->max_seqs * (1 + MXD_MAX_DRAFT);
    if (most > g->max_rows) most = g->max_rows;
    if (most > decoding) most = decoding;
    return most < WIDTHS[MEASURED - 1] ? most : WIDTHS[MEASURED - 1];
}

/* Return where a measured width's seconds belong. */
static double *cost_of(mxd_costs *c, int width) {
    return width < NARROW ? &c->step[WIDTHS[width]] : &c->wide[width - NARROW];
}

mxd_status mxd_time_rows(mxd_engine *g, uint32_t position, uint32_t rows, int precision, double *seconds,
                         mxd_error *err) {
    mxd_clear_rows(g);
    position = mxd_kv_any_position(g, position, rows);
    for (uint32_t k = 0; k < rows; k++) mxd_add_row(g, &g->seqs[0], position + k, 0, MXD_OUTPUT_WINNER);
    double start = mxd_now();
    mxd_status status = mxd_forward(g, precision, err);
    *seconds = mxd_now() - start;
    return status;
}

static void keep_least(double *cost, double seconds, bool first) {
    if (first || seconds < *cost) *cost = seconds;
}

/* Measure each width several times, in turns, and keep the least of its times: what disturbs only ever adds. */
static mxd_status time_steps(mxd_engine *g, mxd_costs *out, mxd_error *err) {
    double together = 0;
    for (int round = -1; round < REPEAT; round++) { /* the first one warms up */
        bool narrow_only = round < 0 || round >= WIDE_REPEAT, first = round <= 0;
        for (int i = 0; i < (narrow_only ? NARROW : MEASURED) && WIDTHS[i] <= widest(g); i++) {
            double seconds;
            mxd_status status = mxd_time_rows(g, first_position(g), WIDTHS[i], mxd_first_pass(g), &seconds, err);
            if (status) return status;
            keep_least(cost_of(out, i), seconds, first);
        }
        if (g->drafter.in_use) keep_least(&out->draft, mxd_draft_model_time(g, 1), first);
        if (g->drafter.in_use) keep_least(&together, mxd_draft_model_time(g, g->max_seqs), first);
        if (mxd_first_pass(g) == 0) continue;
        double base;
        mxd_status status = mxd_time_rows(g, first_position(g), 1, 0, &base, err);
        if (status) return status;
        keep_least(&out->base, base, first);
    }
    if (g->max_seqs > 1 && together > out->draft) out->draft_row = (together - out->draft) / (g->max_seqs - 1);
    return MXD_OK;
}

static int by_value(const void *a, const void *b) {
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* Put the costs of wide steps on a straight line, whose slope decides whether a row more pays: the Theil-Sen slope from
 * MXD_COST_ROWS rows on, which is robust to a few disturbed samples. */
static void straighten(mxd_costs *c, int count) {
    double slopes[(MXD_WIDE_COSTS + 1) * MXD_WIDE_COSTS / 2];
    int n = 0;
    for (int i = NARROW - 1; i < count; i++)
        for (int k = i + 1; k < count; k++) slopes[n++] = (*cost_of(c, k) - *cost_of(c, i)) / (WIDTHS[k] - WIDTHS[i]);
    qsort(slopes, (size_t)n, sizeof *slopes, by_value);
    for (int i = NARROW; i < count; i++)
        *cost_of(c, i) = c->step[MXD_COST_ROWS] + slopes[n / 2] * (WIDTHS[i] - MXD_COST_ROWS);
}

/* Fill in the widths between the measured ones; more rows never cost less. */
static void fill_in(const mxd_engine *g, mxd_costs *c) {
    uint32_t last = 1;
    int count = 0;
    while (count < MEASURED && WIDTHS[count] <= widest(g)) count++;
    straighten(c, count);
    for (int i = 1; i < count; i++) {
        double *cost = cost_of(c, i), before = *cost_of(c, i - 1);
        if (*cost < before) *cost = before;
        for (uint32_t r = last + 1; i < NARROW && r < WIDTHS[i]; r++)
            c->step[r] = before + (*cost - before) * (r - last) / (WIDTHS[i] - last);
        last = WIDTHS[i];
    }
    for (uint32_t r = last + 1; r <= MXD_COST_ROWS; r++) c->step[r] = c->step[last] * r / last;
}

/* ---- the file ---- */

void mxd_costs_describe(const mxd_engine *g, char *out, size_t cap) {
    char cpu[256] = "";
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (f) {
        char line[256];
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, "model name", 10) || !strncmp(line, "CPU part", 8) || !strncmp(line, "Model", 5))
                memcpy(cpu, line, sizeof cpu); /* the last one: a Pi's board comes at the end */
        fclose(f);
    }
    const mxd_config *c = &g->model->config;
    snprintf(out, cap,
             "mxdraft %s %s %s %s threads %u precision %d kv %d drafter %d rows %u from %u "
             "model %u %u %u %u %" PRIu64 " %s",
             mxd_version(), g->kernel_names.matmul_mxfp4, g->kernel_names.matmul_mxint8, g->kernel_names.attention,
             g->plan.threads, mxd_first_pass(g), (int)g->kv.mode, g->drafter.in_use, widest(g), first_position(g),
             c->hidden, c->layers, c->ffn, c->vocab, (uint64_t)g->model->map_len, cpu);
}

static void costs_path(const mxd_engine *g, const char *directory, char *out, size_t cap) {
    char key[1024];
    uint8_t digest[32];
    mxd_sha256 sha;
    mxd_costs_describe(g, key, sizeof key);
    mxd_sha256_init(&sha);
    mxd_sha256_update(&sha, key, strlen(key));
    mxd_sha256_final(&sha, digest);
    int used = snprintf(out, cap, "%s/costs-", directory);
    for (int i = 0; i < 8 && used > 0 && (size_t)used + 3 < cap; i++)
        used += snprintf(out + used, cap - (size_t)used, "%02x", digest[i]);
}

/* List the numbers of the file, in its order; returns their count. Wide steps are those of several sequences. */
static int list_costs(const mxd_engine *g, mxd_costs *c, double *out[NUMBERS]) {
    int n = 0;
    for (int r = 1; r <= MXD_COST_ROWS; r++) out[n++] = &c->step[r];
    out[n++] = &c->draft;
    out[n++] = &c->base;
    if (widest(g) <= MXD_COST_ROWS) return n;
    out[n++] = &c->draft_row;
    for (int i = 0; i < MXD_WIDE_COSTS; i++) out[n++] = &c->wide[i];
    return n;
}

/* Whether more rows never cost less; a wide step that costs 0 was not measured. */
static bool is_ordered(const mxd_costs *c) {
    bool ok = c->step[1] > 0;
    for (int r = 2; r <= MXD_COST_ROWS; r++) ok = ok && c->step[r] >= c->step[r - 1];
    for (int i = 0; i < MXD_WIDE_COSTS; i++)
        ok = ok && (c->wide[i] == 0 || c->wide[i] >= (i ? c->wide[i - 1] : c->step[MXD_COST_ROWS]));
    return ok;
}

/* Read a line of numbers in microseconds. Returns whether it is whole and makes sense. */
static bool read_costs(const mxd_engine *g, const char *path, mxd_costs *out) {
    double *numbers[NUMBERS];
    FILE *f = fopen(path, "re");
    if (!f) return false;
    *out = (mxd_costs){0};
    bool ok = true;
    for (int i = 0, n = list_costs(g, out, numbers); i < n && ok; i++) {
        ok = fscanf(f, "%lf", numbers[i]) == 1 && *numbers[i] >= 0 && *numbers[i] < 3600e6;
        *numbers[i] *= 1e-6;
    }
    ok = ok && fgetc(f) == '\n' && fgetc(f) == EOF;
    fclose(f);
    return ok && is_ordered(out);
}

/* Write the file whole or not at all: another process may read it. What fails is measured again next time. */
static void write_costs(const mxd_engine *g, const char *path, mxd_costs *c) {
    char temporary[PATH_BYTES];
    double *numbers[NUMBERS];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid()) >= sizeof temporary) return;
    FILE *f = fopen(temporary, "wxe");
    if (!f) return;
    int n = list_costs(g, c, numbers);
    for (int i = 0; i < n; i++) fprintf(f, "%.3f%c", *numbers[i] * 1e6, i + 1 < n ? ' ' : '\n');
    bool failed = fflush(f) || fsync(fileno(f));
    failed |= fclose(f);
    if (failed || rename(temporary, path)) unlink(temporary);
}

int mxd_engine_load_costs(mxd_engine *g, const char *directory) {
    char path[PATH_BYTES];
    mxd_costs costs;
    if (!directory) return 0;
    costs_path(g, directory, path, sizeof path);
    if (!read_costs(g, path, &costs)) return 0;
    mxd_engine_set_costs(g, &costs);
    return 1;
}

mxd_status mxd_engine_measure_costs(mxd_engine *g, const char *directory, mxd_error *err) {
    for (uint32_t i = 0; i < g->max_seqs; i++)
        if (g->seqs[i].in_use) return mxd_fail(err, MXD_ERR_ARGUMENT, "costs are measured before a sequence opens");
    mxd_costs costs = {0};
    mxd_status status = mxd_engine_enter(g, err);
    if (status) return status;
    status = time_steps(g, &costs, err);
    mxd_engine_leave(g);
    if (status) return status;
    fill_in(g, &costs);
    mxd_engine_set_costs(g, &costs);
    if (directory) {
        char path[PATH_BYTES];
        costs_path(g, directory, path, sizeof path);
        write_costs(g, path, &costs);
    }
    return MXD_OK;
}
