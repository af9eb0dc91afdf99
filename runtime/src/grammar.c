/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar.h"

#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "internal.h"
#include "schema.h"

/* States whose masks are kept; bytes of text that are proposed at once. */
enum { SLOTS = 64, FORCED_BYTES = 96, NO_SLOT = UINT8_MAX };

struct mxd_grammar {
    const mxd_model *model;
    mxd_dfa dfa;
    uint32_t words;        /* of a mask */
    uint8_t *open;         /* (states) 1: more can follow */
    uint8_t *slot_of;      /* (states) which mask is that state's, or NO_SLOT */
    uint64_t *masks;       /* (SLOTS, words) bit per token */
    uint32_t owner[SLOTS]; /* the state that a mask is of; MXD_DEAD: of none */
    uint32_t next_slot;    /* they are replaced in turn */
    uint32_t *allowed;     /* (vocab) the last list */
};

/* ---- making one ---- */

static mxd_status allocate(mxd_grammar *g, mxd_error *err) {
    uint32_t vocab = g->model->config.vocab, states = g->dfa.states;
    g->words = (vocab + 63) / 64;
    g->open = calloc(states, 1);
    g->slot_of = malloc(states);
    g->masks = calloc((size_t)SLOTS * g->words, sizeof *g->masks);
    g->allowed = malloc(vocab * sizeof *g->allowed);
    if (!g->open || !g->slot_of || !g->masks || !g->allowed)
        return mxd_fail(err, MXD_ERR_MEMORY, "out of memory for a grammar");
    memset(g->slot_of, NO_SLOT, states);
    for (uint32_t i = 0; i < states * g->dfa.classes; i++)
        if (g->dfa.next[i] != MXD_DEAD) g->open[i / g->dfa.classes] = 1;
    return MXD_OK;
}

/* Make a grammar of a parsed schema (`tools` 0), or of calls of the tool `name`, or of any if that is NULL. */
static mxd_status make(mxd_grammar *g, const mxd_json *doc, bool tools, const char *name, mxd_error *err) {
    mxd_nfa nfa;
    mxd_piece whole;
    bool writable[256];
    for (uint32_t byte = 0; byte < 256; byte++) writable[byte] = g->model->tokenizer.byte_token[byte] != MXD_NO_TOKEN;
    mxd_nfa_init(&nfa);
    mxd_status status = tools ? mxd_schema_tools(&nfa, doc, name, &whole, err)
                              : mxd_schema_piece(&nfa, doc, 0, &whole, err);
    if (!status) status = mxd_dfa_make(&nfa, whole, writable, &g->dfa, err);
    mxd_nfa_free(&nfa);
    return status ? status : allocate(g, err);
}

/* Keep control characters of a schema's names out of a message. */
static void clean(mxd_error *err) {
    for (char *p = err ? err->message : ""; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7F) *p = '?';
}

static mxd_status compile(const mxd_model *model, const char *text, size_t len, bool tools, const char *name,
                          mxd_grammar **out, mxd_error *err) {
    mxd_json doc;
    *out = NULL;
    mxd_status status = mxd_json_parse(text, len, &doc, err);
    if (status) return status;
    mxd_grammar *g = calloc(1, sizeof *g);
    if (g) g->model = model;
    status = g ? make(g, &doc, tools, name, err) : mxd_fail(err, MXD_ERR_MEMORY, "out of memory for a grammar");
    mxd_json_free(&doc);
    if (status) {
        clean(err);
        mxd_grammar_free(&g);
    }
    *out = g;
    return status;
}

mxd_status mxd_grammar_compile(const mxd_model *model, const char *schema, size_t len, mxd_grammar **out,
                               mxd_error *err) {
    return compile(model, schema, len, false, NULL, out, err);
}

mxd_status mxd_grammar_compile_tools(const mxd_model *model, const char *tools, size_t len, const char *name,
                                     mxd_grammar **out, mxd_error *err) {
    return compile(model, tools, len, true, name, out, err);
}

void mxd_grammar_free(mxd_grammar **grammar) {
    mxd_grammar *g = *grammar;
    if (!g) return;
    mxd_dfa_free(&g->dfa);
    free(g->open);
    free(g->slot_of);
    free(g->masks);
    free(g->allowed);
    free(g);
    *grammar = NULL;
}

/* ---- states and tokens ---- */

/* Return the state after an end token: nothing follows. */
static uint32_t ended(const mxd_grammar *g) {
    return g->dfa.states;
}

static uint32_t next_state(const mxd_grammar *g, uint32_t state, uint32_t id) {
    const mxd_tokenizer *t = &g->model->tokenizer;
    if (state == MXD_DEAD || state == ended(g)) return MXD_DEAD;
    if (mxd_tokenizer_is_special(t, id))
        return g->dfa.ends[state] && mxd_tokenizer_is_eos(t, id) ? ended(g) : (uint32_t)MXD_DEAD;
    for (uint32_t at = t->text_start[id]; at < t->text_start[id + 1] && state != MXD_DEAD; at++)
        state = mxd_dfa_next(&g->dfa, state, t->text[at]);
    return state;
}

static bool complete(const mxd_grammar *g, uint32_t state) {
    return state == ended(g) || (g->dfa.ends[state] && !g->open[state]);
}

static void fill_mask(const mxd_grammar *g, uint32_t state, uint64_t *mask) {
    const mxd_tokenizer *t = &g->model->tokenizer;
    memset(mask, 0, g->words * sizeof *mask);
    for (uint32_t id = 0; id < t->vocab; id++) {
        uint32_t at = t->text_start[id], end = t->text_start[id + 1], to = state;
        while (at < end && to != MXD_DEAD) to = mxd_dfa_next(&g->dfa, to, t->text[at++]);
        mask[id / 64] |= (uint64_t)(to != MXD_DEAD) << id % 64;
    }
    for (uint32_t i = 0; i < t->special_count; i++) mask[t->special[i] / 64] &= ~(1ull << t->special[i] % 64);
    for (uint32_t i = 0; i < t->eos_count && g->dfa.ends[state]; i++) mask[t->eos[i] / 64] |= 1ull << t->eos[i] % 64;
}

/* Return the mask of a state, kept or made now. */
static const uint64_t *mask_of(mxd_grammar *g, uint32_t state) {
    uint32_t slot = g->slot_of[state];
    if (slot == NO_SLOT) {
        slot = g->next_slot;
        g->next_slot = (slot + 1) % SLOTS;
        if (g->owner[slot] != MXD_DEAD) g->slot_of[g->owner[slot]] = NO_SLOT;
        g->owner[slot] = state;
        g->slot_of[state] = (uint8_t)slot;
        fill_mask(g, state, g->masks + (size_t)slot * g->words);
    }
    return g->masks + (size_t)slot * g->words;
}

/* ---- sequences ---- */

void mxd_grammar_begin(mxd_seq *s, size_t n) {
    s->grammar.from = s->grammar.read = n;
    s->grammar.state = MXD_START;
}

void mxd_grammar_truncate(mxd_seq *s, size_t n) {
    if (n < s->grammar.read) mxd_grammar_begin(s, n < s->grammar.from ? n : s->grammar.from);
}

bool mxd_grammar_read(mxd_seq *s) {
    mxd_grammar_state *g = &s->grammar;
    if (!g->grammar) return false;
    for (; g->read < s->token_count && g->state != MXD_DEAD; g->read++)
        g->state = next_state(g->grammar, g->state, s->tokens[g->read]);
    return complete(g->grammar, g->state);
}

mxd_status mxd_grammar_check(mxd_seq *s, mxd_error *err) {
    if (mxd_grammar_read(s) && s->stop == MXD_STOP_NONE) s->stop = MXD_STOP_GRAMMAR;
    if (s->grammar.grammar && s->grammar.state == MXD_DEAD)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "token %zu of the sequence does not fit its grammar",
                        s->grammar.read - 1);
    return MXD_OK;
}

uint32_t mxd_grammar_allowed(mxd_seq *s, const uint32_t **ids) {
    mxd_grammar *g = s->grammar.grammar;
    mxd_grammar_read(s);
    const uint64_t *mask = mask_of(g, s->grammar.state);
    uint32_t count = 0;
    for (uint32_t word = 0; word < g->words; word++)
        for (uint64_t bits = mask[word]; bits; bits &= bits - 1)
            g->allowed[count++] = 64 * word + (uint32_t)__builtin_ctzll(bits);
    *ids = g->allowed;
    return count;
}

mxd_status mxd_seq_set_grammar(mxd_seq *s, mxd_grammar *grammar, size_t from, mxd_error *err) {
    mxd_status status = mxd_engine_idle(s->engine, err);
    if (status) return status;
    if (grammar && grammar->model != s->engine->model)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "the grammar was made for another model");
    if (from > s->token_count)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "a document from token %zu on: there are %zu", from, s->token_count);
    mxd_grammar_state before = s->grammar;
    s->grammar.grammar = grammar;
    mxd_grammar_begin(s, from);
    status = mxd_grammar_check(s, err);
    if (status) s->grammar = before;
    return status;
}

/* ---- drafts ---- */

/* Write what has to come next to text[cap], and return its length. */
static size_t forced_text(const mxd_dfa *d, uint32_t state, char *text, size_t cap) {
    size_t n = 0;
    for (; n < cap && !d->ends[state]; n++) {
        uint32_t only = 0, ways = 0;
        for (uint32_t byte = 0; byte < 256 && ways < 2; byte++)
            if (mxd_dfa_next(d, state, (uint8_t)byte) != MXD_DEAD) {
                only = byte;
                ways++;
            }
        if (ways != 1) break;
        text[n] = (char)only;
        state = mxd_dfa_next(d, state, (uint8_t)only);
    }
    return n;
}

void mxd_grammar_propose(const mxd_policy *policy, const mxd_seq *s, size_t most, mxd_proposal *out) {
    const mxd_grammar *g = s->grammar.grammar;
    char text[FORCED_BYTES];
    uint32_t ids[MXD_MAX_DRAFT];
    mxd_id_buffer buffer = {.ids = ids, .cap = most};
    mxd_error err;
    size_t n = forced_text(&g->dfa, s->grammar.state, text, sizeof text);
    if (n == 0 || mxd_tokenizer_append(&g->model->tokenizer, (const uint8_t *)text, n, &buffer, &err)) return;
    for (size_t i = 0; i < buffer.n && i < most; i++)
        mxd_propose(policy, out, ids[i], (int32_t)i - 1, MXD_KIND_FORCED, mxd_policy_prior(MXD_KIND_FORCED));
}

void mxd_grammar_prune(const mxd_seq *s, mxd_proposal *d) {
    uint32_t state[MXD_MAX_DRAFT] = {0}, kept = 0;
    int32_t moved[MXD_MAX_DRAFT]; /* where a node went; -1: it was removed */
    for (uint32_t i = 0; i < d->count; i++) {
        mxd_node node = d->node[i];
        moved[i] = -1;
        if (node.parent >= 0 && moved[node.parent] < 0) continue;
        if (node.parent >= 0) node.parent = moved[node.parent];
        uint32_t before = node.parent < 0 ? s->grammar.state : state[node.parent];
        uint32_t after = next_state(s->grammar.grammar, before, node.token);
        if (after == MXD_DEAD) continue;
        state[kept] = after;
        d->node[kept] = node;
        moved[i] = (int32_t)kept++;
    }
    d->count = kept;
}
