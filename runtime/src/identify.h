/* Identify: how much a token matters to one consumer, from three cheap signals (docs/dynamic-origin.md). */
#ifndef MXD_IDENTIFY_H
#define MXD_IDENTIFY_H

/* What the monitor knows of a token. What they mean differs between consumers: `precision` and `memory` take each in
 * 0..1; `compute`, whose question is whether a drafted token is right, takes log-odds. */
typedef struct mxd_signals {
    float confidence; /* doubt of who chose it: the runner-up's probability over the winner's; compute: the drafter's */
    float attention;  /* share of attention; compute: 0 */
    float history;    /* how it went in this text so far; compute: the share of its kind that was accepted */
} mxd_signals;

/* A consumer's own blend. */
typedef struct mxd_weights {
    float alpha, beta, gamma, bias;
} mxd_weights;

/* alpha * confidence + beta * attention + gamma * history + bias: log-odds that the token matters. */
static inline float mxd_score(const mxd_weights *w, mxd_signals s) {
    float score = w->alpha * s.confidence;
    score += w->beta * s.attention;
    score += w->gamma * s.history;
    return score + w->bias;
}

#endif
