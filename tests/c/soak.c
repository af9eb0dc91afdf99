/* SPDX-License-Identifier: Apache-2.0 */
/* Soak the library: one engine for each bundle, with 48 sequences that join and leave at random under drafts, KV tiers and
 * mixed precision. What each of them wrote is compared with a fresh engine that holds nothing else and drafts nothing.
 * Resident memory and descriptors must not grow.
 *
 *   soak SECONDS BUNDLE...
 *
 * Prints a line a minute and a summary; ends with 1 where a text, memory or descriptors differ. */
#include <dirent.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "mxdraft.h"

enum { SEQS = 48, CTX = 192, TURNS = 8, MAX_BUNDLES = 4, QUARTERS = 4, GROWTH_KIB = 64, HEAP_GROWTH = 4096 };

/* A prompt and what was generated after it. */
typedef struct turn {
    mxd_sampling sampling; /* from here on, if `copied`; else that of the turn before */
    bool copied;           /* the sequence was copied before the prompt, or opened */
    size_t prompt, end;    /* tokens of the whole sequence after the prompt, and after the answer */
    uint64_t text;         /* digest of the answer's text */
    mxd_stop stop;         /* MXD_STOP_NONE: it left early */
} turn;

typedef struct talk {
    mxd_seq *seq; /* NULL: the place is free */
    turn turns[TURNS];
    size_t turn_count;
    uint32_t tokens[CTX];
} talk;

typedef struct room {
    mxd_model *model;
    mxd_engine *engine;
    mxd_options options;
    uint32_t vocab;
    talk talks[SEQS];
} room;

typedef struct resources {
    long resident_kib, heap, descriptors; /* without pages of files; bytes that malloc() gave and has not got back */
} resources;

static room rooms[MAX_BUNDLES];
static uint64_t rng_state = 1;
static struct {
    unsigned long long steps, tokens, joined, copies, finished, left_early, drafted[6], accepted, core, far;
} count;

static uint32_t below(uint32_t n) { /* SplitMix64 */
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) % n);
}

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("soak: FAILED: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static const uint64_t EMPTY = 0xcbf29ce484222325u;

static uint64_t digest(uint64_t h, const void *data, size_t n) { /* FNV-1a */
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static resources measure(void) {
    struct mallinfo2 heap = mallinfo2();
    resources r = {.resident_kib = -1, .heap = (long)(heap.uordblks + heap.hblkhd)};
    char line[256];
    FILE *sums = fopen("/proc/self/smaps_rollup", "r"); /* exact; statm is not */
    if (!sums) fail("/proc/self/smaps_rollup");
    while (fgets(line, sizeof line, sums)) sscanf(line, "Anonymous: %ld", &r.resident_kib);
    fclose(sums);
    DIR *folder = opendir("/proc/self/fd");
    if (!folder) fail("/proc/self/fd");
    while (readdir(folder)) r.descriptors++;
    closedir(folder);
    r.descriptors -= 3; /* ".", ".." and the folder itself */
    return r;
}

/* ---- the same alone ---- */

/* Generate an answer alone and compare it, as far as it came. */
static void answer_alone(const talk *t, const turn *at, mxd_engine *engine, mxd_seq *s) {
    mxd_error err;
    uint64_t text = EMPTY;
    size_t n, len;
    const uint32_t *ids = mxd_seq_tokens(s, &n);
    while (mxd_seq_stop(s) == MXD_STOP_NONE && (at->stop != MXD_STOP_NONE || n < at->end)) {
        if (mxd_step(engine, &s, 1, &err)) fail("alone: %s", err.message);
        const char *bytes = mxd_seq_text(s, &len);
        text = digest(text, bytes, len);
        ids = mxd_seq_tokens(s, &n);
    }
    size_t compared = n < at->end ? n : at->end;
    for (size_t i = 0; i < compared; i++)
        if (ids[i] != t->tokens[i]) fail("token %zu is %u, alone %u", i, t->tokens[i], ids[i]);
    if (n < at->end) fail("%zu tokens, alone %zu", at->end, n);
    if (at->stop == MXD_STOP_NONE) return;
    if (n != at->end || mxd_seq_stop(s) != at->stop)
        fail("stop %d after %zu tokens, alone %d after %zu", at->stop, at->end, mxd_seq_stop(s), n);
    if (text != at->text) fail("other text alone, up to token %zu", n);
}

/* Write everything that a sequence went through once more, in a fresh engine. */
static void check(const room *r, const talk *t) {
    mxd_error err;
    mxd_engine *engine;
    mxd_seq *s = NULL, *copy;
    mxd_options alone = r->options;
    alone.max_seqs = 2; /* a copy needs its original */
    alone.threads = 1;
    alone.draft = MXD_DRAFT_OFF;
    alone.draft_max = alone.draft_min = 0;
    if (mxd_engine_open(r->model, &alone, &engine, &err)) fail("alone: %s", err.message);
    for (size_t i = 0; i < t->turn_count; i++) {
        const turn *at = &t->turns[i];
        if (!s && mxd_seq_open(engine, &at->sampling, &s, &err)) fail("alone: %s", err.message);
        if (i > 0 && at->copied) {
            if (mxd_seq_copy(s, &at->sampling, &copy, &err)) fail("alone: %s", err.message);
            mxd_seq_close(&s);
            s = copy;
        }
        size_t have;
        mxd_seq_tokens(s, &have);
        if (mxd_seq_prompt(s, t->tokens + have, at->prompt - have, &err)) fail("alone: %s", err.message);
        answer_alone(t, at, engine, s);
    }
    mxd_seq_close(&s);
    mxd_engine_close(&engine);
}

/* ---- joining and leaving ---- */

static mxd_sampling some_sampling(void) {
    static const char *const stops[] = {"e", " th", "aa"};
    mxd_sampling p;
    mxd_sampling_default(&p);
    p.ignore_eos = below(3) > 0;
    p.max_tokens = 1 + below(60);
    if (below(2)) {
        p.temperature = 0.7f;
        p.seed = below(UINT32_MAX);
        p.top_k = below(2) * 40;
    }
    p.repeat_penalty = below(4) ? 1 : 1.2f;
    p.stop = &stops[below(3)];
    p.stop_count = below(4) == 0;
    return p;
}

/* Ask something that repeats itself; returns whether there was room for it. */
static bool ask(const room *r, talk *t, mxd_sampling sampling, bool copied) {
    mxd_error err;
    uint32_t ids[40], n = 1 + below(40), period = 1 + below(8);
    size_t have;
    mxd_seq_tokens(t->seq, &have);
    if (t->turn_count == TURNS || have + n + 1 > CTX) return false;
    for (uint32_t i = 0; i < n; i++) ids[i] = i < period ? below(r->vocab) : ids[i - period];
    if (mxd_seq_prompt(t->seq, ids, n, &err)) fail("prompt: %s", err.message);
    memcpy(t->tokens + have, ids, n * sizeof *ids);
    t->turns[t->turn_count++] = (turn){sampling, copied, have + n, have + n, EMPTY, MXD_STOP_NONE};
    return true;
}

static void leave(const room *r, talk *t) {
    mxd_stats stats;
    mxd_kv_use kv;
    mxd_seq_get_stats(t->seq, &stats);
    mxd_seq_get_kv(t->seq, &kv);
    count.accepted += stats.accepted;
    count.core += stats.core;
    count.far += kv.far;
    mxd_seq_close(&t->seq);
    if (t->turns[t->turn_count - 1].stop == MXD_STOP_NONE) count.left_early++;
    else count.finished++;
    check(r, t);
}

/* Take a free place: alone, or with a copy of what one that has stopped holds. */
static void join(room *r, talk *t) {
    mxd_error err;
    const talk *from = &r->talks[below(SEQS)];
    mxd_sampling sampling = some_sampling();
    bool copy = below(3) == 0 && from->seq && mxd_seq_stop(from->seq) != MXD_STOP_NONE;
    mxd_seq *seq;
    mxd_status status = copy ? mxd_seq_copy(from->seq, &sampling, &seq, &err)
                             : mxd_seq_open(r->engine, &sampling, &seq, &err);
    if (status) fail("join: %s", err.message);
    if (copy) *t = *from;
    else t->turn_count = 0;
    t->seq = seq;
    if (!ask(r, t, sampling, true)) {
        mxd_seq_close(&t->seq);
        return;
    }
    count.joined++;
    count.copies += copy;
}

/* Note what a step wrote. */
static void take(talk *t) {
    turn *at = &t->turns[t->turn_count - 1];
    size_t n, len;
    const uint32_t *ids = mxd_seq_output(t->seq, &n);
    const char *text = mxd_seq_text(t->seq, &len);
    memcpy(t->tokens + at->end, ids, n * sizeof *ids);
    at->end += n;
    at->text = digest(at->text, text, len);
    at->stop = mxd_seq_stop(t->seq);
    count.tokens += n;
    const mxd_draft_record *drafts = mxd_seq_drafts(t->seq, &n);
    for (size_t i = 0; i < n; i++)
        if (drafts[i].source < 6) count.drafted[drafts[i].source]++;
}

static void run_step(room *r) {
    mxd_error err;
    mxd_seq *seqs[SEQS];
    talk *running[SEQS];
    size_t n = 0;
    for (size_t i = 0; i < SEQS; i++) {
        talk *t = &r->talks[i];
        if (!t->seq) {
            if (below(3) == 0) join(r, t);
        } else if (mxd_seq_stop(t->seq) != MXD_STOP_NONE) {
            mxd_sampling same = t->turns[t->turn_count - 1].sampling;
            if (below(4) == 0 && (below(2) || !ask(r, t, same, false))) leave(r, t);
        } else if (below(200) == 0) leave(r, t);
        if (t->seq && mxd_seq_stop(t->seq) == MXD_STOP_NONE) running[n++] = t;
    }
    for (size_t i = 0; i < n; i++) seqs[i] = running[i]->seq;
    if (n && mxd_step(r->engine, seqs, n, &err)) fail("step: %s", err.message);
    for (size_t i = 0; i < n; i++) take(running[i]);
    count.steps += n > 0;
}

/* ---- the run ---- */

/* Touch all memory of an engine once: full contexts in all places. */
static void fill(room *r) {
    mxd_error err;
    mxd_seq *seqs[SEQS];
    mxd_sampling sampling;
    uint32_t ids[CTX - 1];
    mxd_sampling_default(&sampling);
    sampling.ignore_eos = 1;
    for (size_t i = 0; i < SEQS; i++) {
        for (size_t j = 0; j < CTX - 1; j++) ids[j] = below(r->vocab);
        if (mxd_seq_open(r->engine, &sampling, &seqs[i], &err)) fail("open: %s", err.message);
        if (mxd_seq_prompt(seqs[i], ids, CTX - 1, &err)) fail("prompt: %s", err.message);
    }
    for (bool more = true; more;) {
        if (mxd_step(r->engine, seqs, SEQS, &err)) fail("step: %s", err.message);
        more = false;
        for (size_t i = 0; i < SEQS; i++) more |= mxd_seq_stop(seqs[i]) == MXD_STOP_NONE;
    }
    for (size_t i = 0; i < SEQS; i++) mxd_seq_close(&seqs[i]);
}

/* Open an engine as on a machine on which drafts pay. */
static void open_room(room *r, const char *path) {
    mxd_error err;
    mxd_model_info info;
    if (mxd_model_open(path, &r->model, &err)) fail("%s", err.message);
    mxd_model_get_info(r->model, &info);
    r->vocab = info.vocab;
    mxd_options_default(&r->options);
    r->options.ctx = CTX;
    r->options.max_seqs = SEQS;
    r->options.threads = 2;
    r->options.kv = MXD_KV_TIERED;
    r->options.draft_min = 2;
    if (mxd_engine_open(r->model, &r->options, &r->engine, &err)) fail("%s", err.message);
    mxd_costs costs = {.draft = 1e-5, .draft_row = 1e-6, .base = 1e-4};
    for (int i = 1; i <= 16; i++) costs.step[i] = 1e-3 + 1e-5 * i;
    for (int i = 0; i < MXD_WIDE_COSTS; i++) costs.wide[i] = 1e-3 + 1e-5 * mxd_wide_rows[i];
    mxd_engine_set_costs(r->engine, &costs);
    fill(r);
}

static void report(double seconds, resources r) {
    printf(
        "%.0f s: %llu joined (%llu copies), %llu texts whole, %llu left early; %llu steps, %llu tokens, %llu accepted; "
        "resident %ld KiB, %ld descriptors\n",
        seconds, count.joined, count.copies, count.finished, count.left_early, count.steps, count.tokens,
        count.accepted, r.resident_kib, r.descriptors);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 2 + MAX_BUNDLES) {
        fputs("usage: soak SECONDS BUNDLE...\n", stderr);
        return 2;
    }
    double seconds = atof(argv[1]);
    int room_count = argc - 2;
    printf("soak: %d engines\n", room_count); /* stdout takes its buffer */
    for (int i = 0; i < room_count; i++) open_room(&rooms[i], argv[2 + i]);
    double start = now(), sampled = start, told = start;
    resources peak[QUARTERS] = {0};
    while (now() - start < seconds) {
        for (int i = 0; i < room_count; i++) run_step(&rooms[i]);
        double t = now();
        int quarter = (int)((t - start) / seconds * QUARTERS);
        if (t - sampled < seconds / 1000) continue;
        resources r = measure(), *most = &peak[quarter < QUARTERS ? quarter : QUARTERS - 1];
        if (r.resident_kib > most->resident_kib) most->resident_kib = r.resident_kib;
        if (r.heap > most->heap) most->heap = r.heap;
        if (r.descriptors > most->descriptors) most->descriptors = r.descriptors;
        sampled = t;
        if (t - told >= 60) report((told = t) - start, r);
    }
    for (int i = 0; i < room_count; i++) {
        for (size_t j = 0; j < SEQS; j++)
            if (rooms[i].talks[j].seq) leave(&rooms[i], &rooms[i].talks[j]);
        mxd_engine_close(&rooms[i].engine);
        mxd_model_close(&rooms[i].model);
    }
    report(now() - start, measure());
    printf("drafted: look-up %llu, table %llu, trained %llu; %llu core tokens, %llu positions far at the end\n",
           count.drafted[MXD_SOURCE_COPY], count.drafted[MXD_SOURCE_TABLE], count.drafted[MXD_SOURCE_MODEL], count.core,
           count.far);
    printf("all digests equal; peaks by quarter:");
    for (int i = 0; i < QUARTERS; i++)
        printf("%s %ld KiB, heap %ld, %ld descriptors", i ? ";" : "", peak[i].resident_kib, peak[i].heap,
               peak[i].descriptors);
    putchar('\n');
#ifdef __SANITIZE_THREAD__ /* which needs ever more memory itself */
    return 0;
#endif
    const resources *first = &peak[1],
                    *last = &peak[QUARTERS - 1]; /* the first quarter may be too short for a whole text */
    /* Pages are touched for the first time for about a minute; the heap is exact from the beginning. */
    bool warm = seconds / QUARTERS >= 60;
    if (warm && last->resident_kib > first->resident_kib + GROWTH_KIB) fail("resident memory grows");
    if (last->heap > first->heap + HEAP_GROWTH) fail("the heap grows");
    if (last->descriptors > first->descriptors) fail("descriptors grow");
    return 0;
}
