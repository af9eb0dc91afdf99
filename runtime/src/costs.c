/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "costs.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "engine.h"
#include "hash.h"

enum { REPEAT = 5, WIDE_REPEAT = 3, LOOKS = 3, NARROW = 9, MEASURED = NARROW + MXD_WIDE_COSTS };
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

/* Write the path of the file for this engine's costs; return whether it fits. */
static bool costs_path(const mxd_engine *g, const char *directory, char *out, size_t cap) {
    char key[1024];
    uint8_t digest[32];
    mxd_sha256 sha;
    mxd_costs_describe(g, key, sizeof key);
    mxd_sha256_init(&sha);
    mxd_sha256_update(&sha, key, strlen(key));
    mxd_sha256_final(&sha, digest);
    uint64_t name = 0;
    for (int i = 0; i < 8; i++) name = name << 8 | digest[i];
    return (size_t)snprintf(out, cap, "%s/costs-%016" PRIx64, directory, name) < cap;
}

/* Return whether a step that reads `bytes` can take these seconds: none takes less than a microsecond plus the time of
 * reading at 40 TB/s, nor more than two minutes plus that at 1 MB/s. */
static bool is_possible(double seconds, double bytes) {
    return seconds >= 1e-6 + bytes / 40e12 && seconds <= 120 + bytes / 1e6;
}

/* Return whether costs[count] of steps of rows[] (NULL: 1, 2, ...) go together with `one`, that of a single row: more rows
 * never cost less, and never four times as much as if each ran alone. A cost of 0 is not known, nor are those after it. */
static bool go_together(const double *costs, const uint32_t *rows, int count, double one, double least) {
    for (int i = 0; i < count && costs[i] > 0; i++) {
        if (!(costs[i] >= least && costs[i] <= 4 * one * (rows ? rows[i] : (uint32_t)i + 1))) return false;
        least = costs[i];
    }
    return true;
}

/* Return whether costs can be those of this engine: wrong ones would make every run slow, in silence. */
static bool plausible(const mxd_engine *g, const mxd_costs *c) {
    const double one = c->step[1], most_of_drafter = 16 * one;
    if (!is_possible(one, (double)g->model->plane_bytes[0]) || !(c->step[16] > 0)) return false;
    return go_together(c->step + 1, NULL, MXD_COST_ROWS, one, one) &&
           go_together(c->wide, mxd_wide_rows, MXD_WIDE_COSTS, one, c->step[16]) &&
           (c->base == 0 || is_possible(c->base, (double)g->model->plane_bytes[0])) && c->base <= 4 * one &&
           (!g->drafter.in_use || c->draft > 0) && c->draft <= most_of_drafter && c->draft_row <= most_of_drafter;
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

/* Read a number of microseconds with three decimals, as write_costs() writes it in any locale, and what follows it. */
static bool read_cost(FILE *f, double *seconds, int follows) {
    uint64_t nanoseconds = 0;
    for (int digits = 0, c; (c = fgetc(f)) != '.'; digits++) {
        if (c < '0' || c > '9' || digits == 12) return false;
        nanoseconds = 10 * nanoseconds + (uint64_t)(c - '0');
    }
    for (int i = 0; i < 3; i++) {
        int c = fgetc(f);
        if (c < '0' || c > '9') return false;
        nanoseconds = 10 * nanoseconds + (uint64_t)(c - '0');
    }
    *seconds = 1e-9 * (double)nanoseconds;
    return fgetc(f) == follows;
}

/* Read a line of numbers. Return whether it is whole and can be true. */
static bool read_costs(const mxd_engine *g, const char *path, mxd_costs *out) {
    double *numbers[NUMBERS];
    struct stat st;
    /* Without waiting: a FIFO of that name is no file of costs. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    FILE *f = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) ? fdopen(fd, "r") : NULL;
    if (!f) {
        if (fd >= 0) close(fd);
        return false;
    }
    *out = (mxd_costs){0};
    bool whole = true;
    int n = list_costs(g, out, numbers);
    for (int i = 0; i < n && whole; i++) whole = read_cost(f, numbers[i], i + 1 < n ? ' ' : '\n');
    whole = whole && fgetc(f) == EOF && !ferror(f);
    fclose(f);
    return whole && plausible(g, out);
}

/* Open the file at `path` for writing, emptied, as the only process that does: -1 if another one does, or on any failure.
 * What a process that died left there is written over. */
static int open_alone(const char *path) {
    struct stat opened, named;
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0) return -1;
    bool locked = !flock(fd, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK; /* not every file system has locks */
    /* Who held the lock before may have renamed the file. */
    bool same = locked && !fstat(fd, &opened) && !stat(path, &named) && opened.st_dev == named.st_dev &&
                opened.st_ino == named.st_ino;
    if (same && S_ISREG(opened.st_mode) && !ftruncate(fd, 0)) return fd;
    close(fd);
    return -1;
}

/* Write the costs whole or not at all: another process may read them. What fails is measured again next time. */
static void write_costs(const mxd_engine *g, const char *path, mxd_costs *c) {
    char temporary[PATH_BYTES];
    double *numbers[NUMBERS];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.part", path) >= sizeof temporary) return;
    int fd = open_alone(temporary);
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!f) {
        if (fd >= 0) {
            unlink(temporary);
            close(fd);
        }
        return;
    }
    int n = list_costs(g, c, numbers);
    for (int i = 0; i < n; i++) {
        uint64_t nanoseconds = (uint64_t)(*numbers[i] * 1e9 + 0.5);
        fprintf(f, "%" PRIu64 ".%03u%c", nanoseconds / 1000, (unsigned)(nanoseconds % 1000), i + 1 < n ? ' ' : '\n');
    }
    if (fflush(f) || ferror(f) || fsync(fd) || rename(temporary, path)) unlink(temporary);
    fclose(f);
}

static bool has_sequences(const mxd_engine *g) {
    for (uint32_t i = 0; i < g->max_seqs; i++)
        if (g->seqs[i].in_use) return true;
    return false;
}

/* Return whether a step of one row takes less than half as long as `costs` say. Then other programs disturbed the
 * measuring, and costs of different widths do not even have the right ratios. Steps below a millisecond vary that much by themselves. */
static bool are_outdated(mxd_engine *g, const mxd_costs *costs) {
    const double shortest = 1e-3;
    double least = costs->step[1];
    if (least < shortest || has_sequences(g) || mxd_engine_enter(g, NULL))
        return false; /* a row would overwrite theirs */
    for (int round = 0; round < LOOKS; round++) {
        double seconds;
        if (!mxd_time_rows(g, first_position(g), 1, mxd_first_pass(g), &seconds, NULL))
            keep_least(&least, seconds, false);
    }
    mxd_engine_leave(g);
    return least < costs->step[1] / 2;
}

int mxd_engine_load_costs(mxd_engine *g, const char *directory) {
    char path[PATH_BYTES];
    mxd_costs costs;
    if (!directory || !costs_path(g, directory, path, sizeof path) || !read_costs(g, path, &costs)) return 0;
    if (are_outdated(g, &costs)) return 0;
    mxd_engine_set_costs(g, &costs);
    return 1;
}

mxd_status mxd_engine_measure_costs(mxd_engine *g, const char *directory, mxd_error *err) {
    if (has_sequences(g)) return mxd_fail(err, MXD_ERR_ARGUMENT, "costs are measured before a sequence opens");
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
        if (costs_path(g, directory, path, sizeof path)) write_costs(g, path, &costs);
    }
    return MXD_OK;
}
