/* What a step costs on this machine, by its number of rows: measured once, kept in a file. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cpu.h"
#include "draft_model.h"
#include "hash.h"

enum { REPEAT = 5, MEASURED = 9, PATH_BYTES = 4096 };

static const uint32_t WIDTHS[MEASURED] = {1, 2, 3, 4, 5, 6, 8, 12, 16};

void mxd_engine_get_costs(const mxd_engine *g, mxd_costs *out) {
    *out = g->policy.costs;
}

void mxd_engine_set_costs(mxd_engine *g, const mxd_costs *costs) {
    mxd_policy_set_costs(&g->policy, costs);
}

/* Positions before the measured rows: a short context, if there is room. */
static uint32_t first_position(const mxd_engine *g) {
    return g->plan.ctx > 96 ? 64 : 0;
}

/* Most rows that are measured. */
static uint32_t widest(const mxd_engine *g) {
    uint32_t most = g->plan.ctx - 1 < g->max_rows ? g->plan.ctx - 1 : g->max_rows;
    return most < WIDTHS[MEASURED - 1] ? most : WIDTHS[MEASURED - 1];
}

mxd_status mxd_time_rows(mxd_engine *g, uint32_t position, uint32_t rows, int precision, double *seconds,
                         mxd_error *err) {
    g->row_count = g->side_used = 0;
    position = mxd_kv_any_position(g, position, rows);
    for (uint32_t k = 0; k < rows; k++)
        g->rows[g->row_count++] = (mxd_row){.position = position + k, .wants = MXD_WANTS_WINNER};
    double start = mxd_now();
    mxd_status status = mxd_forward(g, precision, err);
    *seconds = mxd_now() - start;
    return status;
}

/* The least of several times for each width, taken in turns: what disturbs only ever adds. */
static mxd_status measure(mxd_engine *g, mxd_costs *out, mxd_error *err) {
    for (int round = -1; round < REPEAT; round++) { /* the first one warms up */
        for (int i = 0; i < MEASURED && WIDTHS[i] <= widest(g); i++) {
            double seconds, *least = &out->step[WIDTHS[i]];
            mxd_status status = mxd_time_rows(g, first_position(g), WIDTHS[i], mxd_first_pass(g), &seconds, err);
            if (status) return status;
            if (round == 0 || (round > 0 && seconds < *least)) *least = seconds;
        }
        double draft = g->features ? mxd_draft_model_time(g) : 0, base = 0;
        mxd_status status = mxd_first_pass(g) ? mxd_time_rows(g, first_position(g), 1, 0, &base, err) : MXD_OK;
        if (status) return status;
        if (round <= 0 || draft < out->draft) out->draft = draft;
        if (round <= 0 || base < out->base) out->base = base;
    }
    /* Fill in the widths between; more rows never cost less. */
    uint32_t last = 1;
    for (int i = 1; i < MEASURED && out->step[WIDTHS[i]] > 0; i++) {
        uint32_t rows = WIDTHS[i];
        if (out->step[rows] < out->step[last]) out->step[rows] = out->step[last];
        for (uint32_t r = last + 1; r < rows; r++)
            out->step[r] = out->step[last] + (out->step[rows] - out->step[last]) * (r - last) / (rows - last);
        last = rows;
    }
    for (uint32_t r = last + 1; r <= 16; r++) out->step[r] = out->step[last] * r / last;
    return MXD_OK;
}

/* ---- the file ---- */

/* Everything the costs depend on, as text. */
static void describe(const mxd_engine *g, char *out, size_t cap) {
    char cpu[256] = "";
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (f) {
        char line[256];
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, "model name", 10) || !strncmp(line, "CPU part", 8) || !strncmp(line, "Model", 5))
                memcpy(cpu, line, sizeof cpu); /* the last one: a Pi's board stands at the end */
        fclose(f);
    }
    const mxd_config *c = &g->model->config;
    snprintf(out, cap,
             "mxdraft %s %s %s %s threads %u precision %d kv %d drafter %d rows %u from %u model %u %u %u %u %" PRIu64 " %s",
             mxd_version(), g->kernel_names.matmul_mxfp4, g->kernel_names.matmul_mxint8, g->kernel_names.attention,
             g->plan.threads, mxd_first_pass(g), (int)g->kv.mode, g->features != NULL, widest(g), first_position(g),
             c->hidden, c->layers,
             c->ffn, c->vocab, (uint64_t)g->model->map_len, cpu);
}

static void costs_path(const mxd_engine *g, const char *directory, char *out, size_t cap) {
    char key[1024];
    uint8_t digest[32];
    mxd_sha256 sha;
    describe(g, key, sizeof key);
    mxd_sha256_init(&sha);
    mxd_sha256_update(&sha, key, strlen(key));
    mxd_sha256_final(&sha, digest);
    int used = snprintf(out, cap, "%s/costs-", directory);
    for (int i = 0; i < 8 && used > 0 && (size_t)used + 3 < cap; i++)
        used += snprintf(out + used, cap - (size_t)used, "%02x", digest[i]);
}

static int plausible(const mxd_costs *c) {
    for (int r = 1; r <= 16; r++)
        if (!(c->step[r] > 0 && c->step[r] < 3600) || (r > 1 && c->step[r] < c->step[r - 1])) return 0;
    return c->draft >= 0 && c->draft < 3600 && c->base >= 0 && c->base < 3600;
}

/* A line of numbers in microseconds. Returns whether it is whole and makes sense. */
static int read_costs(const char *path, mxd_costs *out) {
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    int ok = 1;
    for (int r = 1; r <= 16 && ok; r++) ok = fscanf(f, "%lf", &out->step[r]) == 1, out->step[r] *= 1e-6;
    ok = ok && fscanf(f, "%lf %lf", &out->draft, &out->base) == 2 && fgetc(f) == '\n' && fgetc(f) == EOF;
    out->draft *= 1e-6, out->base *= 1e-6;
    fclose(f);
    return ok && plausible(out);
}

/* Whole or not at all: another process may read it. What fails is measured again next time. */
static void write_costs(const char *path, const mxd_costs *c) {
    char temporary[PATH_BYTES];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.%ld", path, (long)getpid()) >= sizeof temporary) return;
    FILE *f = fopen(temporary, "wxe");
    if (!f) return;
    for (int r = 1; r <= 16; r++) fprintf(f, "%.3f ", c->step[r] * 1e6);
    fprintf(f, "%.3f %.3f\n", c->draft * 1e6, c->base * 1e6);
    int failed = fflush(f) || fsync(fileno(f));
    failed |= fclose(f);
    if (failed || rename(temporary, path)) unlink(temporary);
}

int mxd_engine_load_costs(mxd_engine *g, const char *directory) {
    char path[PATH_BYTES];
    mxd_costs costs;
    if (!directory) return 0;
    costs_path(g, directory, path, sizeof path);
    if (!read_costs(path, &costs)) return 0;
    mxd_policy_set_costs(&g->policy, &costs);
    return 1;
}

mxd_status mxd_engine_measure_costs(mxd_engine *g, const char *directory, mxd_error *err) {
    for (uint32_t i = 0; i < g->max_seqs; i++)
        if (g->seqs[i].in_use) return mxd_fail(err, MXD_ERR_ARGUMENT, "costs are measured before a sequence opens");
    mxd_costs costs = {0};
    mxd_status status = measure(g, &costs, err);
    if (status) return status;
    mxd_policy_set_costs(&g->policy, &costs);
    if (directory) {
        char path[PATH_BYTES];
        costs_path(g, directory, path, sizeof path);
        write_costs(path, &costs);
    }
    return MXD_OK;
}
