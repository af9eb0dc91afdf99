/* SPDX-License-Identifier: Apache-2.0 */
/* Identify: how much a token matters to one consumer, from three cheap signals (docs/dynamic-origin.md). */
#ifndef MXD_IDENTIFY_H
#define MXD_IDENTIFY_H

/* What the monitor knows of a token. Consumers mean different things by it:
 *              precision                          memory                         compute
 *   confidence doubt of the choice that the       doubt of whoever chose the     the drafter's
 *              row makes                          token
 *   attention  share of its attention that falls  attention that the token       0
 *              on rows at base precision          received lately
 *   history    share of recent looks that         1 for control tokens, else 0   share of its kind that was
 *              changed the choice                                                accepted lately
 * Doubt is the runner-up's probability over the winner's. Precision and memory take each signal in 0..1; compute, whose
 * question is whether a drafted token is right, takes log-odds. */
typedef struct mxd_signals {
    float confidence, attention, history;
} mxd_signals;

/* A consumer's own blend. */
typedef struct mxd_weights {
    float alpha, beta, gamma, bias;
} mxd_weights;

/* Return alpha * confidence + beta * attention + gamma * history + bias: log-odds that the token matters. */
static inline float mxd_score(const mxd_weights *w, mxd_signals s) {
    float score = w->alpha * s.confidence;
    score += w->beta * s.attention;
    score += w->gamma * s.history;
    return score + w->bias;
}

#endif
