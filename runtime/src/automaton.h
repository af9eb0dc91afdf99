/* SPDX-License-Identifier: Apache-2.0 */
/* Finite automata over bytes: a builder of nondeterministic ones, piece by piece, and the deterministic one made of it. */
#ifndef MXD_AUTOMATON_H
#define MXD_AUTOMATON_H

#include <stdbool.h>

#include "status.h"

/* Limits: edges of the nondeterministic automaton; states of the deterministic one; states of sets kept on the way. */
enum { MXD_MAX_NFA = 1 << 18, MXD_MAX_DFA = 1 << 15, MXD_MAX_SETS = 1 << 21 };

/* A state of the nondeterministic automaton: it goes on by a byte of low..high to next[0], or (low > high) by none to up
 * to two others. 0: no state. */
typedef struct mxd_nfa_state {
    uint32_t next[2];
    uint8_t low, high;
} mxd_nfa_state;

typedef struct mxd_nfa {
    mxd_nfa_state *states; /* (count), and room up to cap; of malloc() */
    uint32_t count, cap;
    bool failed, no_memory; /* the limit was reached; memory ran out */
} mxd_nfa;

/* A piece with one way in and one way out, a state without edges. */
typedef struct mxd_piece {
    uint32_t in, out;
} mxd_piece;

void mxd_nfa_init(mxd_nfa *n);
void mxd_nfa_free(mxd_nfa *n);
/* Make pieces. After a failure, which is sticky, they mean nothing. */
mxd_piece mxd_piece_empty(mxd_nfa *n);
mxd_piece mxd_piece_range(mxd_nfa *n, uint8_t low, uint8_t high);
mxd_piece mxd_piece_bytes(mxd_nfa *n, const char *bytes, size_t len);
/* Join pieces: one after the other; either one; one or nothing. The parts are used up. */
mxd_piece mxd_piece_then(mxd_nfa *n, mxd_piece a, mxd_piece b);
mxd_piece mxd_piece_or(mxd_nfa *n, mxd_piece a, mxd_piece b);
mxd_piece mxd_piece_maybe(mxd_nfa *n, mxd_piece a);
/* Let `from` go on to `to` without a byte. */
void mxd_nfa_link(mxd_nfa *n, uint32_t from, uint32_t to);
/* Return a new state without edges. */
uint32_t mxd_nfa_add(mxd_nfa *n);

/* The deterministic automaton. From each state but MXD_DEAD and the ends, bytes lead to an end. */
enum { MXD_DEAD = 0, MXD_START = 1 };
typedef struct mxd_dfa {
    uint16_t class_of[256];
    uint32_t classes, states;
    uint16_t *next; /* (states, classes) */
    uint8_t *ends;  /* (states) 1: the text may end here */
} mxd_dfa;

/* Make the deterministic automaton of a piece, of the bytes that are `writable`. MXD_ERR_ARGUMENT: it is beyond a limit, or
 * takes no text at all; MXD_ERR_MEMORY. After a failure *out is empty. */
mxd_status mxd_dfa_make(const mxd_nfa *n, mxd_piece whole, const bool writable[256], mxd_dfa *out, mxd_error *err);
void mxd_dfa_free(mxd_dfa *dfa);

static inline uint32_t mxd_dfa_next(const mxd_dfa *d, uint32_t state, uint8_t byte) {
    return d->next[state * d->classes + d->class_of[byte]];
}

#endif
