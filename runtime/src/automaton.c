/* SPDX-License-Identifier: Apache-2.0 */
#include "automaton.h"

#include <stdlib.h>
#include <string.h>

/* ---- pieces ---- */

void mxd_nfa_init(mxd_nfa *n) {
    *n = (mxd_nfa){0};
    mxd_nfa_add(n); /* 0 is no state */
}

void mxd_nfa_free(mxd_nfa *n) {
    free(n->states);
    *n = (mxd_nfa){0};
}

uint32_t mxd_nfa_add(mxd_nfa *n) {
    if (n->failed) return 0;
    if (n->count == n->cap) {
        uint32_t cap = n->cap ? 2 * n->cap : 256;
        mxd_nfa_state *states = cap <= MXD_MAX_NFA ? realloc(n->states, cap * sizeof *states) : NULL;
        if (!states) {
            n->failed = true;
            n->no_memory = cap <= MXD_MAX_NFA;
            return 0;
        }
        n->states = states;
        n->cap = cap;
    }
    n->states[n->count] = (mxd_nfa_state){.low = 1, .high = 0};
    return n->count++;
}

void mxd_nfa_link(mxd_nfa *n, uint32_t from, uint32_t to) {
    if (n->failed) return;
    mxd_nfa_state *s = &n->states[from];
    if (s->next[1]) { /* full: its second edge moves to a state of its own */
        uint32_t more = mxd_nfa_add(n);
        if (n->failed) return;
        s = &n->states[from];
        n->states[more].next[0] = s->next[1];
        n->states[more].next[1] = to;
        s->next[1] = more;
    } else {
        s->next[s->next[0] != 0] = to;
    }
}

mxd_piece mxd_piece_empty(mxd_nfa *n) {
    uint32_t state = mxd_nfa_add(n);
    return (mxd_piece){state, state};
}

mxd_piece mxd_piece_range(mxd_nfa *n, uint8_t low, uint8_t high) {
    mxd_piece p = {mxd_nfa_add(n), 0};
    p.out = mxd_nfa_add(n);
    if (!n->failed) n->states[p.in] = (mxd_nfa_state){{p.out, 0}, low, high};
    return p;
}

mxd_piece mxd_piece_bytes(mxd_nfa *n, const char *bytes, size_t len) {
    mxd_piece p = mxd_piece_empty(n);
    for (size_t i = 0; i < len && !n->failed; i++)
        p = mxd_piece_then(n, p, mxd_piece_range(n, (uint8_t)bytes[i], (uint8_t)bytes[i]));
    return p;
}

mxd_piece mxd_piece_then(mxd_nfa *n, mxd_piece a, mxd_piece b) {
    mxd_nfa_link(n, a.out, b.in);
    return (mxd_piece){a.in, b.out};
}

mxd_piece mxd_piece_or(mxd_nfa *n, mxd_piece a, mxd_piece b) {
    mxd_piece p = {mxd_nfa_add(n), mxd_nfa_add(n)};
    mxd_nfa_link(n, p.in, a.in);
    mxd_nfa_link(n, p.in, b.in);
    mxd_nfa_link(n, a.out, p.out);
    mxd_nfa_link(n, b.out, p.out);
    return p;
}

mxd_piece mxd_piece_maybe(mxd_nfa *n, mxd_piece a) {
    return mxd_piece_or(n, a, mxd_piece_empty(n));
}

/* ---- subset construction ---- */

/* Each deterministic state is a set of the other automaton's states: those with a byte edge, and the way out. */
typedef struct maker {
    const mxd_nfa *n;
    mxd_piece whole;
    mxd_dfa *d;
    uint32_t *members; /* (MXD_MAX_SETS) of all sets, one after the other, each ascending */
    uint32_t *start;   /* (MXD_MAX_DFA + 1) where each set begins */
    uint32_t *table;   /* (TABLE) sets by hash, 0: free */
    uint32_t *queue;   /* (n->count) states under work; `seen` marks them */
    uint32_t visited;  /* of them */
    uint32_t budget;   /* states that may still be visited */
    uint8_t *seen;     /* (n->count), all zero between sets */
    uint8_t representative[256];
} maker;

enum { TABLE = 4 * MXD_MAX_DFA, NO_SET = MXD_MAX_DFA, MAX_VISITS = 1 << 27 };

/* Divide the bytes into classes that no edge tells apart. The bytes that cannot be written are class 0, which leads
 * nowhere. */
static void find_classes(maker *m, const bool writable[256]) {
    bool begins[257] = {[0] = true};
    for (uint32_t i = 1; i < m->n->count; i++) {
        const mxd_nfa_state *s = &m->n->states[i];
        if (s->low > s->high) continue;
        begins[s->low] = true;
        begins[s->high + 1] = true;
    }
    uint32_t class = 0;
    bool fresh = true;
    m->d->classes = 1;
    for (uint32_t byte = 0; byte < 256; byte++) {
        fresh |= begins[byte];
        if (!writable[byte]) continue;
        if (fresh) {
            class = m->d->classes++;
            m->representative[class] = (uint8_t)byte;
            fresh = false;
        }
        m->d->class_of[byte] = (uint16_t)class;
    }
}

/* Visit a state and all that it reaches without a byte. */
static void visit(maker *m, uint32_t state) {
    uint32_t next = m->visited;
    if (m->seen[state]) return;
    m->seen[state] = 1;
    m->queue[m->visited++] = state;
    for (; next < m->visited; next++) {
        const mxd_nfa_state *s = &m->n->states[m->queue[next]];
        for (int i = 0; s->low > s->high && i < 2; i++)
            if (s->next[i] && !m->seen[s->next[i]]) {
                m->seen[s->next[i]] = 1;
                m->queue[m->visited++] = s->next[i];
            }
    }
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t hash(const uint32_t *members, size_t count) {
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < count; i++) h = (h ^ members[i]) * 16777619u;
    return h ^ h >> 15;
}

/* Return the number of the set of what was visited, a new one or one known before; MXD_DEAD: nothing was. NO_SET: a limit
 * is reached. */
static uint32_t set_of_visited(maker *m) {
    uint32_t *set = m->members + m->start[m->d->states], count = 0;
    bool ends = false, full = m->visited > MXD_MAX_SETS - m->start[m->d->states] || m->visited > m->budget;
    if (!full) m->budget -= m->visited;
    for (uint32_t i = 0; i < m->visited; i++) {
        uint32_t state = m->queue[i];
        m->seen[state] = 0;
        ends |= state == m->whole.out;
        if (!full && (state == m->whole.out || m->n->states[state].low <= m->n->states[state].high))
            set[count++] = state;
    }
    m->visited = 0;
    if (full) return NO_SET;
    if (count == 0) return MXD_DEAD;
    qsort(set, count, sizeof *set, ascending);
    uint32_t slot = hash(set, count) % TABLE;
    for (; m->table[slot]; slot = (slot + 1) % TABLE) {
        uint32_t known = m->table[slot], size = m->start[known + 1] - m->start[known];
        if (size == count && !memcmp(m->members + m->start[known], set, count * sizeof *set)) return known;
    }
    if (m->d->states == MXD_MAX_DFA) return NO_SET;
    uint32_t state = m->d->states++;
    m->table[slot] = state;
    m->start[state + 1] = m->start[state] + count;
    m->d->ends[state] = ends;
    return state;
}

/* Return where a set goes by the bytes of a class. */
static uint32_t move(maker *m, uint32_t state, uint32_t class) {
    uint8_t byte = m->representative[class];
    for (uint32_t k = m->start[state]; k < m->start[state + 1]; k++) {
        const mxd_nfa_state *s = &m->n->states[m->members[k]];
        if (byte >= s->low && byte <= s->high) visit(m, s->next[0]);
    }
    return set_of_visited(m);
}

static mxd_status too_large(mxd_error *err) {
    return mxd_fail(
        err, MXD_ERR_ARGUMENT,
        "schema: its automaton would be too large: ask for shorter strings and arrays, or fewer properties");
}

static mxd_status explore(maker *m, mxd_error *err) {
    mxd_dfa *d = m->d;
    visit(m, m->whole.in);
    if (set_of_visited(m) == NO_SET) return too_large(err);
    for (uint32_t state = MXD_START; state < d->states; state++)
        for (uint32_t class = 1; class < d->classes; class++) {
            uint32_t to = move(m, state, class);
            if (to == NO_SET) return too_large(err);
            d->next[state * d->classes + class] = (uint16_t)to;
        }
    return MXD_OK;
}

/* Cut the edges to states that lead to no end. MXD_ERR_ARGUMENT if that leaves nothing. */
static mxd_status trim(maker *m, mxd_error *err) {
    mxd_dfa *d = m->d;
    uint8_t *lives = m->seen;
    for (uint32_t s = 0; s < d->states; s++) lives[s] = d->ends[s];
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t s = d->states; s-- > MXD_START;)
            for (uint32_t c = 1; c < d->classes && !lives[s]; c++)
                if (lives[d->next[s * d->classes + c]]) {
                    lives[s] = 1;
                    changed = true;
                }
    }
    for (uint32_t i = 0; i < d->states * d->classes; i++)
        if (!lives[d->next[i]]) d->next[i] = MXD_DEAD;
    if (d->states <= MXD_START || !lives[MXD_START])
        return mxd_fail(err, MXD_ERR_ARGUMENT, "schema: this model's tokens can write no text that fits it");
    return MXD_OK;
}

static mxd_status make(maker *m, const bool writable[256], mxd_error *err) {
    mxd_dfa *d = m->d;
    find_classes(m, writable);
    d->next = calloc((size_t)MXD_MAX_DFA * d->classes, sizeof *d->next);
    d->ends = calloc(MXD_MAX_DFA, 1);
    if (!m->members || !m->start || !m->table || !m->queue || !m->seen || !d->next || !d->ends)
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for an automaton");
    d->states = MXD_START;
    mxd_status status = explore(m, err);
    if (!status) status = trim(m, err);
    if (status) return status;
    uint16_t *next = realloc(d->next, (size_t)d->states * d->classes * sizeof *next);
    if (next) d->next = next;
    return MXD_OK;
}

mxd_status mxd_dfa_make(const mxd_nfa *n, mxd_piece whole, const bool writable[256], mxd_dfa *out, mxd_error *err) {
    *out = (mxd_dfa){0};
    if (n->no_memory) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for an automaton");
    if (n->failed) return too_large(err);
    maker m = {
        .n = n,
        .whole = whole,
        .d = out,
        .members = malloc((MXD_MAX_SETS + 1) * sizeof *m.members),
        .start = calloc(MXD_MAX_DFA + 2, sizeof *m.start),
        .table = calloc(TABLE, sizeof *m.table),
        .queue = malloc(n->count * sizeof *m.queue),
        .budget = MAX_VISITS,
        .seen = calloc(n->count > MXD_MAX_DFA ? n->count : MXD_MAX_DFA, 1), /* trim() takes it for its own marks */
    };
    mxd_status status = make(&m, writable, err);
    free(m.members);
    free(m.start);
    free(m.table);
    free(m.queue);
    free(m.seen);
    if (status) mxd_dfa_free(out);
    return status;
}

void mxd_dfa_free(mxd_dfa *d) {
    free(d->next);
    free(d->ends);
    *d = (mxd_dfa){0};
}
