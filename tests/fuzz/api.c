/* SPDX-License-Identifier: Apache-2.0 */
/* Stateful fuzz of the public API: random engines, random calls in any order. Every text, every logit and every stop is
 * compared with a plain rerun of the same tokens in an engine that holds nothing else: one sequence, one thread, no
 * drafts. Sequences that a call does not name must not change.
 *
 *   api SECONDS [--engines N] [--seed S] BUNDLE...
 *
 * Engine number i of a run depends on S + i alone: a failure prints the --seed that repeats it, with --engines 1. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mxdraft.h"

enum { MAX_CTX = 256, MAX_SEQS = 12, MAX_EVENTS = 400, CALLS = 60 };

static uint64_t seed, rng_state;
static struct {
    uint64_t engines, refused, calls, failed_calls, tokens, drafted, accepted, core, due, reruns, copies, truncations;
} count;

/* ---- random numbers ---- */

static uint64_t next_random(void) { /* SplitMix64 */
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint32_t below(uint32_t n) {
    return (uint32_t)(next_random() % n);
}

static bool one_in(uint32_t n) {
    return below(n) == 0;
}

#define PICK(array) ((array)[below(sizeof(array) / sizeof *(array))])

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "FAILED --seed %llu: ", (unsigned long long)seed);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

static uint64_t hash(uint64_t h, const void *data, size_t n) { /* FNV-1a */
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

/* ---- what a sequence went through ---- */

typedef struct settings {
    mxd_sampling sampling;
    char stop[2][8];
    const char *stops[2];
} settings;

/* PARTED: what follows depends on more than the tokens, so the rerun ends here (cut_events(), call_logits()). */
typedef enum event_type { PROMPTED, GENERATED, FORCED, COPIED, RULED, CLEARED, PARTED } event_type;

/* Tokens below `end`, and not of an earlier event, came so. What was cut by a truncation has lost its check. */
typedef struct event {
    event_type type;
    size_t end;
    bool checked; /* hash is that of all text (GENERATED) or logits (FORCED) of the event */
    uint64_t hash;
    mxd_stop stop;     /* GENERATED: after the last token */
    uint32_t settings; /* COPIED */
    bool rule;         /* RULED */
} event;

typedef struct timeline {
    mxd_seq *seq; /* NULL: not open */
    event events[MAX_EVENTS];
    size_t event_count, token_count;
    uint32_t tokens[MAX_CTX], memory[MAX_CTX]; /* memory: tokens that were at these positions some time */
    uint32_t settings;
    bool rule, cut; /* cut: truncated since the last prompt */
    int drafter;    /* 0 the engine's, 1 from memory, 2 random trees, 3 and up: against the contract */
} timeline;

static settings pool[64];
static uint32_t pool_count;
static timeline lines[MAX_SEQS];
static mxd_engine *engine, *reference;
static mxd_options options;
static size_t vocab;

/* Return the event that tokens of a type go to: the last one, if it is of that type and may grow. */
static event *open_event(timeline *t, event_type type) {
    event *last = t->event_count ? &t->events[t->event_count - 1] : NULL;
    if (last && last->type == type && type == GENERATED && last->checked) return last;
    if (t->event_count == MAX_EVENTS) fail("too many events");
    t->events[t->event_count] = (event){
        .type = type, .end = t->token_count, .checked = true, .hash = 0xcbf29ce484222325u};
    return &t->events[t->event_count++];
}

static int decide(void *arg, const mxd_token_record *row) {
    (void)arg;
    return (row->position * 7 + row->token) % 5 == 0;
}

/* Propose for a timeline as its mode says. */
static size_t draft(void *arg, const uint32_t *ids, size_t n, uint32_t *out, int32_t *parent, size_t most) {
    timeline *t = arg;
    mxd_error err;
    if (memcmp(ids, t->tokens, n * sizeof *ids)) fail("the drafter was shown other tokens");
    if (t->drafter == 1) {
        size_t made = 0;
        for (; made < most && n + made < MAX_CTX; made++) out[made] = t->memory[n + made];
        return made;
    }
    size_t made = below((uint32_t)most + 1);
    for (size_t i = 0; i < made; i++) {
        out[i] = one_in(2) && n + i < MAX_CTX ? t->memory[n + i] : below((uint32_t)vocab);
        parent[i] = (int32_t)below((uint32_t)i + 1) - 1;
    }
    if (t->drafter == 3) return one_in(2) ? most + 1 : made;
    if (t->drafter == 4 && made) out[made - 1] = (uint32_t)vocab + below(9);
    if (t->drafter == 5 && made) parent[made - 1] = one_in(2) ? (int32_t)made : -2;
    if (t->drafter == 6 && mxd_step(engine, &t->seq, 1, &err) != MXD_ERR_ARGUMENT) fail("a step within a step");
    return made;
}

/* ---- the rerun ---- */

static void expect_tokens(const timeline *t, mxd_seq *s, size_t n, const char *where) {
    size_t have;
    const uint32_t *ids = mxd_seq_tokens(s, &have);
    if (have < n) n = have;
    for (size_t i = 0; i < n; i++)
        if (ids[i] != t->tokens[i])
            fail("%s: token %zu of %zu is %u, alone %u (ctx %u, precision %u, kv %u, draft %u)", where, i,
                 t->token_count, t->tokens[i], ids[i], options.ctx, options.precision, options.kv, options.draft);
}

/* Generate up to the end of an event. Returns whether the rerun can go on: under mixed precision a step alone may make a
 * token more, which can only be forgotten where a prompt follows. */
static bool rerun_generated(const timeline *t, mxd_seq *s, const event *e) {
    mxd_error err;
    uint64_t text = 0xcbf29ce484222325u;
    size_t have, steps = 0;
    for (mxd_seq_tokens(s, &have); have < e->end; mxd_seq_tokens(s, &have)) {
        if (mxd_step(reference, &s, 1, &err)) fail("rerun: %s", err.message);
        size_t len;
        const char *bytes = mxd_seq_text(s, &len);
        text = hash(text, bytes, len);
        expect_tokens(t, s, e->end, "generated");
        mxd_seq_tokens(s, &have);
        if (mxd_seq_stop(s) && have < e->end) fail("alone it stops (%d) at %zu of %zu", mxd_seq_stop(s), have, e->end);
        if (++steps > 3 * MAX_CTX) fail("the rerun does not end");
    }
    if (have > e->end) {
        if (mxd_seq_truncate(s, e->end, &err)) fail("rerun: %s", err.message);
        const event *next = e + 1;
        return next == t->events + t->event_count || next->type == PROMPTED;
    }
    if (e->checked && text != e->hash) fail("other text alone, up to token %zu", e->end);
    if (e->checked && mxd_seq_stop(s) != e->stop) fail("stop %d, alone %d", e->stop, mxd_seq_stop(s));
    return true;
}

/* Process what is queued, as a step does; forget the token that comes of it. */
static void process_queued(mxd_seq *s) {
    mxd_error err;
    size_t before, have;
    mxd_seq_tokens(s, &before);
    if (mxd_seq_truncate(s, before, &err)) fail("rerun: %s", err.message); /* a stop would keep it from running */
    do {
        if (mxd_step(reference, &s, 1, &err)) fail("rerun: %s", err.message);
        mxd_seq_tokens(s, &have);
    } while (have == before);
    if (mxd_seq_truncate(s, before, &err)) fail("rerun: %s", err.message);
}

static void rerun_forced(const timeline *t, mxd_seq *s, const event *e, size_t have) {
    mxd_error err;
    size_t n = e->end - have;
    float *logits = malloc((n + 1) * vocab * sizeof *logits);
    mxd_status status = mxd_seq_logits(s, t->tokens + have, n, logits, &err);
    if (status == MXD_ERR_ARGUMENT) {
        process_queued(s);
        status = mxd_seq_logits(s, t->tokens + have, n, logits, &err);
    }
    if (status) fail("rerun: %s", err.message);
    if (e->checked && hash(0xcbf29ce484222325u, logits, n * vocab * sizeof *logits) != e->hash)
        fail("other logits alone, tokens %zu to %zu", have, e->end);
    free(logits);
}

/* Do to a fresh sequence of the reference engine what a timeline went through, and compare. */
static void rerun(const timeline *t) {
    mxd_error err;
    mxd_seq *s, *copy;
    count.reruns++;
    uint32_t first = t->events[0].settings;
    if (mxd_seq_open(reference, &pool[first].sampling, &s, &err)) fail("rerun: %s", err.message);
    for (size_t i = 1; i < t->event_count; i++) {
        const event *e = &t->events[i];
        size_t have;
        mxd_seq_tokens(s, &have);
        switch (e->type) {
        case PROMPTED:
            if (e->end < have) fail("the rerun is ahead");
            if (mxd_seq_prompt(s, t->tokens + have, e->end - have, &err)) fail("rerun: %s", err.message);
            break;
        case GENERATED:
            if (!rerun_generated(t, s, e)) i = t->event_count;
            break;
        case FORCED: rerun_forced(t, s, e, have); break;
        case COPIED:
            if (mxd_seq_copy(s, &pool[e->settings].sampling, &copy, &err)) fail("rerun: %s", err.message);
            mxd_seq_close(&s);
            s = copy;
            break;
        case RULED: mxd_seq_set_core_rule(s, e->rule ? decide : NULL, NULL); break;
        case PARTED: i = t->event_count; break;
        case CLEARED:
            if (mxd_seq_truncate(s, have, &err)) fail("rerun: %s", err.message);
            break;
        }
    }
    mxd_seq_close(&s);
}

/* ---- calls ---- */

static void check_all(const timeline *except) {
    for (size_t i = 0; i < options.max_seqs; i++) {
        const timeline *t = &lines[i];
        size_t n;
        if (!t->seq || t == except) continue;
        const uint32_t *ids = mxd_seq_tokens(t->seq, &n);
        if (n != t->token_count || memcmp(ids, t->tokens, n * sizeof *ids))
            fail("sequence %zu holds other tokens after a call that was not for it", i);
    }
}

/* Read everything that can be read of a sequence. */
static void look_at(const timeline *t) {
    static char json[8192];
    static uint8_t tiers[MAX_CTX];
    mxd_stats stats;
    mxd_kv_use kv;
    size_t n, len;
    mxd_seq_get_stats(t->seq, &stats);
    mxd_seq_get_kv(t->seq, &kv);
    mxd_seq_tiers(t->seq, tiers, below(MAX_CTX));
    if (mxd_seq_stats_json(t->seq, json, sizeof json) >= sizeof json) fail("statistics are too long");
    mxd_seq_output(t->seq, &n);
    const mxd_token_record *records = mxd_seq_records(t->seq);
    const uint8_t *drafted = mxd_seq_drafted(t->seq);
    for (size_t i = 0; i < n; i++)
        if (records[i].token >= vocab || drafted[i] > 1) fail("record %zu of %zu is damaged", i, n);
    const mxd_draft_record *drafts = mxd_seq_drafts(t->seq, &n);
    for (size_t i = 0; i < n; i++)
        if (drafts[i].token >= vocab || drafts[i].parent >= (int32_t)i) fail("draft %zu of %zu is damaged", i, n);
    mxd_seq_text(t->seq, &len);
}

static uint32_t make_settings(void) {
    static const char *const texts[] = {"e", " th", "ing", "\n", "aa", "."};
    static const float penalties[] = {1, 1, 1, 1.3f, 0.8f};
    static const uint32_t limits[] = {0, 0, 1, 2, 7, 20};
    if (pool_count == sizeof pool / sizeof *pool) return below(pool_count);
    settings *p = &pool[pool_count];
    mxd_sampling_default(&p->sampling);
    p->sampling.ignore_eos = !one_in(3);
    p->sampling.max_tokens = PICK(limits);
    p->sampling.repeat_penalty = PICK(penalties);
    if (one_in(3)) {
        p->sampling.temperature = 0.7f;
        p->sampling.seed = next_random();
        p->sampling.top_k = one_in(2) ? 1 + below(40) : 0;
        p->sampling.top_p = one_in(2) ? 0.9f : 1;
        p->sampling.min_p = one_in(3) ? 0.05f : 0;
    }
    p->sampling.stop_count = one_in(4) ? 1 + below(2) : 0;
    for (uint32_t i = 0; i < p->sampling.stop_count; i++) {
        strcpy(p->stop[i], PICK(texts));
        p->stops[i] = p->stop[i];
    }
    p->sampling.stop = p->stops;
    return pool_count++;
}

static timeline *free_line(void) {
    for (size_t i = 0; i < options.max_seqs; i++)
        if (!lines[i].seq) return &lines[i];
    return NULL;
}

static void call_open(void) {
    timeline *t = free_line();
    mxd_error err;
    mxd_seq *more;
    uint32_t chosen = make_settings();
    if (!t) {
        if (mxd_seq_open(engine, &pool[chosen].sampling, &more, &err) != MXD_ERR_ARGUMENT)
            fail("more sequences than the engine has");
        return;
    }
    if (mxd_seq_open(engine, &pool[chosen].sampling, &t->seq, &err)) fail("open: %s", err.message);
    t->event_count = t->token_count = 0;
    t->rule = t->cut = false;
    t->drafter = 0;
    t->settings = chosen;
    open_event(t, COPIED)->settings = chosen; /* the first event tells how it was opened */
    memset(t->memory, 0, sizeof t->memory);
}

static void call_copy(const timeline *from) {
    timeline *to = free_line();
    mxd_error err;
    mxd_seq *copy;
    uint32_t chosen = make_settings();
    mxd_status status = mxd_seq_copy(from->seq, &pool[chosen].sampling, &copy, &err);
    if (!to) {
        if (status != MXD_ERR_ARGUMENT) fail("a copy more than the engine has");
        return;
    }
    if (status) fail("copy: %s", err.message);
    *to = *from;
    to->seq = copy;
    to->settings = chosen;
    to->drafter = 0;
    to->rule = false;
    open_event(to, COPIED)->settings = chosen;
    count.copies++;
}

static void call_prompt(timeline *t) {
    static uint32_t ids[2 * MAX_CTX];
    mxd_error err;
    size_t n = one_in(8) ? below(2 * MAX_CTX) : one_in(3) ? 1 : 1 + below(one_in(3) ? 40 : 9);
    uint32_t period = 1 + below(6), start = below((uint32_t)vocab);
    bool again = one_in(3); /* what was there some time, so that memory is a good drafter */
    for (size_t i = 0; i < n; i++) ids[i] = i < period ? (start + below(9)) % (uint32_t)vocab : ids[i - period];
    for (size_t i = 0; i < n && again && t->token_count + i < MAX_CTX; i++) ids[i] = t->memory[t->token_count + i];
    if (n && one_in(50)) ids[below((uint32_t)n)] = (uint32_t)vocab + below(5);
    mxd_status status = mxd_seq_prompt(t->seq, ids, n, &err);
    if (status) {
        if (status != MXD_ERR_ARGUMENT && status != MXD_ERR_CONTEXT) fail("prompt: %s", err.message);
        return;
    }
    if (t->token_count + n >= options.ctx) fail("a prompt that leaves no room");
    memcpy(t->tokens + t->token_count, ids, n * sizeof *ids);
    t->token_count += n;
    t->cut = false;
    open_event(t, PROMPTED)->end = t->token_count;
}

static void call_logits(timeline *t) {
    mxd_error err;
    size_t n = 1 + below(one_in(4) ? 60 : 6);
    static uint32_t ids[MAX_CTX];
    for (size_t i = 0; i < n; i++) ids[i] = below((uint32_t)vocab);
    float *logits = malloc(n * vocab * sizeof *logits);
    mxd_status status = mxd_seq_logits(t->seq, ids, n, logits, &err);
    if (status) {
        if (status != MXD_ERR_ARGUMENT && status != MXD_ERR_CONTEXT) fail("logits: %s", err.message);
    } else {
        /* Under mixed precision rows that stay are read again at full precision, as a prompt's are (mxdraft.h). */
        if (t->cut && options.precision == MXD_PRECISION_AUTO) open_event(t, PARTED);
        memcpy(t->tokens + t->token_count, ids, n * sizeof *ids);
        t->token_count += n;
        event *e = open_event(t, FORCED);
        e->end = t->token_count;
        e->hash = hash(e->hash, logits, n * vocab * sizeof *logits);
    }
    free(logits);
}

/* Take over what a step added to a timeline. */
static void take_output(timeline *t) {
    size_t n, len, all;
    const uint32_t *ids = mxd_seq_output(t->seq, &n);
    const char *text = mxd_seq_text(t->seq, &len);
    mxd_seq_tokens(t->seq, &all);
    if (all != t->token_count + n || all > options.ctx) fail("%zu tokens after %zu and %zu", all, t->token_count, n);
    mxd_stop stop = mxd_seq_stop(t->seq);
    if (n == 0) {
        if (len) fail("text without tokens");
        return;
    }
    memcpy(t->tokens + t->token_count, ids, n * sizeof *ids);
    memcpy(t->memory + t->token_count, ids, n * sizeof *ids);
    t->token_count = all;
    event *e = open_event(t, GENERATED);
    e->end = all;
    e->stop = stop;
    e->hash = hash(e->hash, text, len);
    count.tokens += n;
}

static void call_step(void) {
    mxd_seq *seqs[MAX_SEQS];
    timeline *chosen[MAX_SEQS];
    mxd_error err;
    size_t n = 0;
    for (size_t i = 0; i < options.max_seqs; i++)
        if (lines[i].seq && !one_in(4)) chosen[n++] = &lines[i];
    for (size_t i = n; i > 1; i--) { /* in any order */
        size_t j = below((uint32_t)i);
        timeline *swapped = chosen[j];
        chosen[j] = chosen[i - 1];
        chosen[i - 1] = swapped;
    }
    for (size_t i = 0; i < n; i++) seqs[i] = chosen[i]->seq;
    uint32_t steps = one_in(3) ? 1 + below(30) : 1;
    for (uint32_t k = 0; k < steps && n > 0; k++) {
        mxd_status status = mxd_step(engine, seqs, n, &err);
        if (status && status != MXD_ERR_ARGUMENT) fail("step: %s", err.message);
        count.failed_calls += status != MXD_OK;
        for (size_t i = 0; i < n; i++) take_output(chosen[i]);
        if (status) break;
    }
}

/* Cut a timeline's events to its first n tokens. */
static void cut_events(timeline *t, size_t n) {
    size_t kept = 1, i = 1;
    for (size_t start = 0; i < t->event_count; start = t->events[i++].end) {
        event e = t->events[i];
        if (start > n || (start == n && e.end > n)) break;
        if (e.end > n) {
            e.end = n;
            e.checked = false;
        }
        t->events[kept++] = e;
    }
    /* A prompt that is forgotten had restarted max_tokens, which only matters if a token is still to be processed. Under mixed
     * precision what a call of logits decided about its last row is forgotten with what came after (mxdraft.h). */
    const event *last = &t->events[kept - 1]; /* that brought tokens */
    while (last > t->events && (last->type == RULED || last->type == CLEARED || last->type == PARTED)) last--;
    bool restarted = false, generated = last->type == GENERATED, forced = last->type == FORCED;
    for (; i < t->event_count; i++) restarted |= t->events[i].type == PROMPTED;
    restarted &= generated;
    /* What belongs to the sequence, not to its tokens, stays. */
    bool rule = false, stopped = false;
    uint32_t chosen = t->events[0].settings;
    for (size_t i = 1; i < kept; i++) {
        if (t->events[i].type == GENERATED) stopped = t->events[i].end == n && t->events[i].stop != MXD_STOP_NONE;
        if (t->events[i].type == COPIED) {
            chosen = t->events[i].settings;
            rule = false;
        }
        if (t->events[i].type == RULED) rule = t->events[i].rule;
    }
    t->event_count = kept;
    if (stopped) open_event(t, CLEARED)->end = n; /* what stopped it stays, the stop does not */
    if (restarted || (forced && options.precision == MXD_PRECISION_AUTO)) open_event(t, PARTED)->end = n;
    if (chosen != t->settings) {
        open_event(t, COPIED)->settings = t->settings;
        t->events[t->event_count - 1].end = n;
        rule = false;
    }
    if (rule != t->rule) {
        open_event(t, RULED)->rule = t->rule;
        t->events[t->event_count - 1].end = n;
    }
}

static void call_truncate(timeline *t, size_t n) {
    mxd_error err;
    mxd_stop before = mxd_seq_stop(t->seq);
    mxd_status status = mxd_seq_truncate(t->seq, n, &err);
    if ((n > t->token_count) != (status == MXD_ERR_ARGUMENT))
        fail("truncating %zu to %zu: %d", t->token_count, n, status);
    if (status) return;
    count.truncations++;
    if (n == t->token_count) {
        if (before != MXD_STOP_NONE) open_event(t, CLEARED);
        return;
    }
    t->token_count = n;
    t->cut = true;
    cut_events(t, n);
}

static void call_rule(timeline *t) {
    t->rule = one_in(2);
    mxd_seq_set_core_rule(t->seq, t->rule ? decide : NULL, NULL);
    /* The newest row may wait for full precision, decided by the rule before; alone it is not decided yet. */
    if (options.precision == MXD_PRECISION_AUTO && t->events[t->event_count - 1].type == GENERATED)
        open_event(t, PARTED)->end = t->token_count;
    open_event(t, RULED)->rule = t->rule;
}

static void call_drafter(timeline *t) {
    t->drafter = one_in(4) ? 0 : one_in(6) ? 3 + (int)below(4) : 1 + (int)below(2);
    mxd_seq_set_drafter(t->seq, t->drafter ? draft : NULL, t);
}

static void call_close(timeline *t) {
    mxd_stats stats;
    mxd_seq_get_stats(t->seq, &stats);
    count.drafted += stats.drafted;
    count.accepted += stats.accepted;
    count.core += stats.core;
    count.due += stats.due;
    rerun(t);
    mxd_seq_close(&t->seq);
}

/* Costs as a file may have them: a machine on which drafts pay, one on which they do not, and nonsense. */
static void call_costs(void) {
    mxd_costs costs;
    memset(&costs, 0, sizeof costs);
    double row = one_in(2) ? 0 : 1e-4 * below(20);
    for (int i = 1; i <= 16; i++) costs.step[i] = 1e-3 + row * (i - 1);
    costs.draft = one_in(2) ? 1e-6 : 1e-3;
    costs.base = one_in(3) ? 0 : 1e-5 * (1 + below(100));
    for (int i = 0; i < MXD_WIDE_COSTS; i++) costs.wide[i] = one_in(3) ? 0 : costs.step[16] * (i + 1);
    mxd_engine_set_costs(engine, &costs);
}

static void call_any(void) {
    timeline *t = &lines[below(options.max_seqs)];
    uint32_t call = below(100);
    count.calls++;
    if (call < 40) {
        call_step();
        check_all(NULL);
        return;
    }
    if (call < 45 || !t->seq) {
        if (call < 60) call_open();
        check_all(NULL);
        return;
    }
    if (call < 65) call_prompt(t);
    else if (call < 72) call_truncate(t, one_in(3) ? t->token_count : below((uint32_t)t->token_count + 2));
    else if (call < 77) call_copy(t);
    else if (call < 82) call_logits(t);
    else if (call < 85) call_close(t);
    else if (call < 90) call_drafter(t);
    else if (call < 93) call_rule(t);
    else if (call < 98) look_at(t);
    else call_costs();
    check_all(NULL);
}

/* ---- engines ---- */

static void choose_options(void) {
    static const float fractions[] = {-1, 0, 0.05f, 0.1f, 0.2f, 0.25f, 1};
    static const float budgets[] = {0, 0, 4.6f, 5, 6, 8};
    static const uint32_t contexts[] = {2, 3, 5, 17, 32, 33, 64, 65, 100, 128, 200, 256};
    mxd_options_default(&options);
    options.ctx = one_in(3) ? 2 + below(MAX_CTX - 1) : PICK(contexts);
    options.max_seqs = one_in(3) ? 1 : 1 + below(one_in(4) ? MAX_SEQS : 4);
    options.max_rows = one_in(2) ? 1 + below(8) : 1 + below(80);
    options.threads = one_in(6) ? 2 : 1;
    options.precision = below(3);
    if (options.precision == MXD_PRECISION_AUTO) {
        options.core_fraction = PICK(fractions);
        options.catch_up = one_in(3) ? 0 : 1 + below(32);
    }
    options.kv = below(5);
    options.kv_budget = options.kv == MXD_KV_TIERED ? PICK(budgets) : 0;
    options.draft = below(4);
    options.draft_max = below(16);
    options.draft_min = options.draft_max && one_in(2) ? below(options.draft_max + 1) : 0;
}

/* One engine, from its seed; returns whether the options were accepted. */
static bool run_engine(const mxd_model *model) {
    mxd_error err;
    choose_options();
    mxd_status status = mxd_engine_open(model, &options, &engine, &err);
    if (status) {
        if (status != MXD_ERR_ARGUMENT && status != MXD_ERR_UNSUPPORTED) fail("engine: %s", err.message);
        return false;
    }
    mxd_options alone = options;
    alone.max_seqs = 2; /* a copy needs its original */
    alone.max_rows = 64;
    alone.threads = 1;
    alone.draft = MXD_DRAFT_OFF;
    alone.draft_max = alone.draft_min = 0;
    if (mxd_engine_open(model, &alone, &reference, &err)) fail("reference: %s", err.message);
    pool_count = 0;
    if (one_in(2)) call_costs();
    else if (one_in(8) && mxd_engine_measure_costs(engine, NULL, &err)) fail("costs: %s", err.message);
    for (int i = 0; i < CALLS; i++) call_any();
    for (size_t i = 0; i < options.max_seqs; i++)
        if (lines[i].seq) call_close(&lines[i]);
    mxd_engine_close(&engine);
    mxd_engine_close(&reference);
    return true;
}

int main(int argc, char **argv) {
    uint64_t first = 1, engines = UINT64_MAX;
    int at = 2;
    if (argc < 3) return 2;
    double seconds = atof(argv[1]);
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        uint64_t value = strtoull(argv[at + 1], NULL, 10);
        if (!strcmp(argv[at], "--seed")) first = value;
        else if (!strcmp(argv[at], "--engines")) engines = value;
        else return 2;
    }
    mxd_model *models[8];
    mxd_error err;
    uint32_t model_count = 0;
    for (; at < argc && model_count < 8; at++)
        if (mxd_model_open(argv[at], &models[model_count++], &err)) {
            fprintf(stderr, "%s\n", err.message);
            return 3;
        }
    if (model_count == 0) return 2;
    time_t start = time(NULL);
    for (uint64_t i = 0; i < engines && difftime(time(NULL), start) < seconds; i++) {
        rng_state = (seed = first + i) * 0xd1342543de82ef95u;
        const mxd_model *model = models[below(model_count)];
        mxd_model_info info;
        mxd_model_get_info(model, &info);
        vocab = info.vocab;
        if (run_engine(model)) count.engines++;
        else count.refused++;
    }
    while (model_count) mxd_model_close(&models[--model_count]);
    printf("engines %llu, refused options %llu, calls %llu (%llu failed as they must), tokens %llu, drafted %llu, "
           "accepted %llu, core %llu, due %llu, copies %llu, truncations %llu, reruns %llu\n",
           (unsigned long long)count.engines, (unsigned long long)count.refused, (unsigned long long)count.calls,
           (unsigned long long)count.failed_calls, (unsigned long long)count.tokens, (unsigned long long)count.drafted,
           (unsigned long long)count.accepted, (unsigned long long)count.core, (unsigned long long)count.due,
           (unsigned long long)count.copies, (unsigned long long)count.truncations, (unsigned long long)count.reruns);
    return 0;
}
